//! Frames between a training and its worker on another machine, and the messages in them: no file
//! that they name leads out of the folder.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_train::testing::parse_line(bytes));
