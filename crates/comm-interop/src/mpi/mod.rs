//! Groups over an MPI library: what `mpirun` started together.
//!
//! MPI is a library of collectives and not a wire, so it implements [`Group`](paceline_comm::Group)
//! itself. Built with the feature `mpi` (an `mpicc` and libclang are needed then); without it
//! [`Session::start`] says [`StartError::Unavailable`].
//!
//! **Exempt.** MPI has no deadlines. A collective waits for as long as its ranks, and a dead rank
//! ends the whole program by MPI's own rule (`mpirun` kills the others). Only messages look at
//! theirs. There is no lockstep guard: ranks that make different calls do what MPI does. The order
//! of sums is the library's. NaN is kept by max and min all the same. `f16`, `bf16` and `complex64`
//! reduce as everywhere, through operations of our own.
//!
//! What it sends is plaintext, by `mpirun`'s links.

#[cfg(feature = "mpi")]
mod library;
#[cfg(not(feature = "mpi"))]
#[path = "stub.rs"]
mod library;
#[cfg(feature = "mpi")]
mod ops;

use paceline_base::Rank;
use paceline_comm::provider::{Provider, allowed};
use paceline_comm::tcp::Addrs;
use paceline_comm::{Backend, Deadline, Group, InitError, Plaintext, Seat};

pub use self::library::Session;

/// The backend's name in errors.
pub const NAME: &str = Backend::Mpi.name();

/// The ranks that `mpirun` started, as a wire of [`init`](paceline_comm::init). Its errors are
/// [`StartError`]s.
#[derive(Clone, Copy, Debug)]
pub struct Wire {
    /// Whether bytes may leave this machine unencrypted.
    pub plaintext: Plaintext,
}

impl Provider for Wire {
    fn backend(&self) -> Backend {
        Backend::Mpi
    }

    /// All ranks that `mpirun` started, of which this one has to be the one that is meant. Listener
    /// and addresses are not used.
    fn join(&self, seat: Seat<'_, Addrs>, _: Deadline) -> Result<Box<dyn Group>, InitError> {
        allowed(self.backend(), self.plaintext)?;
        let (rank, size) = (seat.rank, seat.addrs.len());
        let world = Session::start().map_err(InitError::wire)?.world();
        let (got, got_size) = (world.rank(), world.size());
        match got == rank && got_size as usize == size {
            true => Ok(world),
            false => Err(InitError::wire(StartError::OtherRank {
                rank,
                size,
                got,
                got_size,
            })),
        }
    }
}

/// Why there is no group of what `mpirun` started.
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
        /// The thread support that it offers.
        got: i32,
    },
    /// `mpirun` has made this process another rank than it was to be.
    #[error("mpi: this process is {got} of {got_size}, expected {rank} of {size}")]
    OtherRank {
        /// The rank that it was to be.
        rank: Rank,
        /// Of how many.
        size: usize,
        got: Rank,
        /// Of how many.
        got_size: u32,
    },
}
