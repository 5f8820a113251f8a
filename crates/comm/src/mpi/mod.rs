//! Groups over an MPI library: what `mpirun` started together.
//!
//! MPI is a library of collectives and not a wire, so it implements [`Group`](crate::Group) itself.
//! Built with the feature `mpi` (an `mpicc` and libclang are needed then); without it
//! [`Session::start`] says [`StartError::Unavailable`].
//!
//! **Exempt.** MPI has no deadlines: a collective waits for as long as its ranks, and a dead rank
//! ends the whole program by MPI's own rule (`mpirun` kills the others). Only messages look at
//! theirs. There is no lockstep guard: ranks that make different calls do what MPI does. The order
//! of sums is the library's. NaN is kept by max and min all the same, and `f16`, `bf16` and
//! `complex64` reduce as everywhere, through operations of our own.
//!
//! What it sends is plaintext, by `mpirun`'s links.

#[cfg(feature = "mpi")]
mod library;
#[cfg(not(feature = "mpi"))]
#[path = "stub.rs"]
mod library;
#[cfg(feature = "mpi")]
mod ops;

pub use self::library::Session;

/// What errors call this backend.
pub const NAME: &str = "mpi";

/// Why MPI could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// This program was built without the feature `mpi`.
    #[error("mpi is not in this build")]
    Unavailable,
    /// MPI starts once in a process, and did.
    #[error("mpi was already started in this process")]
    Started,
    /// The library does not allow calls from several threads at once, which a group promises.
    #[error("mpi library supports threads up to level {got}, expected {expected}")]
    Threads {
        /// `MPI_THREAD_MULTIPLE`.
        expected: i32,
        /// What it offers.
        got: i32,
    },
}
