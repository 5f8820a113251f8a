//! Bytes of an encrypted link: handshakes and records, forged and altered.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_comm::testing::parse_sealed(bytes));
