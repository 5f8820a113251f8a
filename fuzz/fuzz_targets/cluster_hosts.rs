//! Answers of machines that are asked over ssh, and files of hosts.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_cluster::testing::parse_hosts(bytes));
