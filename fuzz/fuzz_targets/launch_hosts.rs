//! Output of hosts over ssh, marks in programs' output, host files, and frames of joined machines.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_launch::testing::parse_hosts(bytes));
