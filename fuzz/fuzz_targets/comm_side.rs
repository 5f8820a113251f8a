//! Bytes that ranks send over JACCL's side channel: containers, and where they listen.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_comm_rdma::testing::parse_side(bytes));
