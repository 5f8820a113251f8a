//! Journals of streamed answers and stored responses, as other nodes kept them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_serve::testing::parse_kept(bytes));
