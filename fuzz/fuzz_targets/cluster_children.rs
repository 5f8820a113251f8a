//! Bytes that child processes send over their channel and print: messages and lines.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_cluster::testing::parse_children(bytes));
