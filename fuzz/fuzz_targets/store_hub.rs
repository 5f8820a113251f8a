//! A hub's lists of files and headers: no file that is chosen leads out of the model's folder.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_store::testing::parse_hub(bytes));
