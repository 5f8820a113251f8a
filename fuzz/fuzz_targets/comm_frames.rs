//! Bytes from ranks and from unauthenticated peers: every parser of frames and greetings.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_comm::testing::parse_frames(bytes));
