//! Parsers of all input from other machines of a cluster: beacons, greetings, messages, codes and
//! tokens.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_cluster::nodes::parse_all(bytes));
