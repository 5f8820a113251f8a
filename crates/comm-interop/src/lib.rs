//! Groups with ranks of other programs in them, and groups by other people's libraries.
//!
//! - [`mlx_ring`]: rings that real MLX ranks are members of;
//! - [`mpi`], [`nccl`]: the libraries of these names, which implement
//!   [`Group`](paceline_comm::Group) themselves;
//! - [`init_mlx`]: the backend that MLX's `init` would take;
//! - [`launched`]: the settings for all of these in a launcher's environment.
//!
//! Each module of a library has a `Wire` for the list of providers of [`paceline_comm::init`].
//!
//! **None of them encrypts**, so each wants [`Plaintext::Allowed`](paceline_comm::Plaintext) off
//! loopback, and none keeps the rule that results do not depend on the number of ranks.

#![warn(clippy::cast_possible_truncation)]

#[cfg(test)]
#[path = "../../comm/src/free.rs"]
mod free;
pub mod launched;
mod mlx_init;
pub mod mlx_ring;
pub mod mpi;
pub mod nccl;

pub use mlx_init::{MlxBackend, MlxError, MlxPlace, init_mlx};
