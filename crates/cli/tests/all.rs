//! The integration tests of the binary: one program, so that they are linked once.

#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

mod cluster;
mod common;
mod engines;
#[cfg(target_os = "linux")]
mod environment;
mod golden;
mod hosts;
mod kb;
mod launch;
#[path = "../../comm-rdma/src/tests/library.rs"]
mod library;
mod mapreduce;
mod nodes;
mod plan;
mod registered;
mod run;
mod selftest;
mod store_commands;
mod topology;
mod train;
