//! Bytes that ranks over RDMA send: heads of messages, and descriptions of their devices.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| paceline_comm_rdma::testing::parse_cables(bytes));
