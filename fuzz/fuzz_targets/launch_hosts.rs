//! Answers of machines that are asked over ssh, marks in programs' output, and files of hosts.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_launch::testing::parse_hosts(bytes));
