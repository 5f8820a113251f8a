//! The integration tests of this crate: one program, so that they are linked once. `mpi` stands
//! apart because it is run by `mpirun`.

#![allow(clippy::unwrap_used, reason = "helpers outside of test functions")]

#[cfg(target_os = "linux")]
#[path = "../../comm/src/free.rs"]
mod free;
mod mlx_ring;
mod nccl;
mod providers;
