//! The integration tests of this crate: one program, so that they are linked once. `loom` stands
//! apart because it compiles the ring with the model checker's atomics, `mpi` because it is run by
//! `mpirun`.

#![allow(clippy::unwrap_used, reason = "helpers outside of test functions")]

mod faults;
#[cfg(target_os = "linux")]
mod free;
mod mlx_ring;
mod nccl;
mod rdma;
mod tcp;
mod worker;
