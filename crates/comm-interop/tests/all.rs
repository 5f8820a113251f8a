//! The integration tests of this crate in one program, so that they are linked once. `mpi` is
//! separate because `mpirun` runs it.

#![allow(clippy::unwrap_used, reason = "helpers outside of test functions")]

#[cfg(target_os = "linux")]
#[path = "../src/free.rs"]
mod free;
mod mlx_ring;
mod nccl;
mod providers;
