//! Groups that interoperate with MLX's ranks, and groups over MPI and NCCL.
//!
//! - [`mlx_ring`]: rings that real MLX ranks can join;
//! - [`mpi`], [`nccl`]: the libraries of these names, which implement
//!   [`Group`](paceline_comm::Group) themselves;
//! - [`init_mlx`]: the backend that MLX's `init` would choose.
//!
//! Each module of a library has a `Wire`, a provider for [`paceline_comm::init`].
//!
//! **None of them encrypts**, so each needs [`Plaintext::Allowed`](paceline_comm::Plaintext) off
//! loopback. None guarantees that results are independent of the number of ranks.

#![warn(clippy::cast_possible_truncation)]

#[cfg(test)]
mod free;
mod mlx_init;
pub mod mlx_ring;
pub mod mpi;
pub mod nccl;

pub use mlx_init::{MlxBackend, MlxError, MlxPlace, init_mlx};
