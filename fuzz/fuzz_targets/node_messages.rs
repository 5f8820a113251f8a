//! Messages between an owner, its workers, hosts and other nodes: crews, answers, copies, journals.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_node::testing::parse_messages(bytes));
