//! Bytes that ranks and strangers send: every parser of frames and greetings, on any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_comm::testing::parse_frames(bytes));
