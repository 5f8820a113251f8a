//! Groups over an MPI library: the processes of one `mpirun`.
//!
//! MPI is a library of collectives, not a transport, so it implements
//! [`Group`](paceline_comm::Group) itself. It needs the feature `mpi` (with `mpicc` and libclang at
//! build time). Without it [`MpiSession::start`] returns [`StartError::Unavailable`].
//!
//! **Exceptions to the contract.** MPI has no deadlines. A collective waits as long as its ranks
//! do, and a dead rank ends the whole program (`mpirun` kills the others). Only messages observe
//! their deadline. There is no lockstep guard: ranks that make different calls get MPI's behaviour.
//! The library determines the order of sums. Max and min keep NaN all the same. `f16`, `bf16` and
//! `complex64` reduce as everywhere, by user operations.
//!
//! Traffic is plaintext, over `mpirun`'s connections.

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
use paceline_comm::{Backend, Deadline, Group, InitError, JoinParams, Plaintext};

pub use self::library::MpiSession;

/// The backend's name in errors.
pub const NAME: &str = Backend::Mpi.name();

/// MPI as a provider of [`init`](paceline_comm::init): the ranks that `mpirun` started. Its errors
/// are [`StartError`]s.
#[derive(Clone, Copy, Debug)]
pub struct MpiProvider {
    /// Whether bytes may leave this machine unencrypted.
    pub plaintext: Plaintext,
}

impl Provider for MpiProvider {
    fn backend(&self) -> Backend {
        Backend::Mpi
    }

    /// Joins all ranks that `mpirun` started; this process must be the seat's rank. Listener and
    /// addresses are not used.
    fn join(&self, seat: JoinParams<'_, Addrs>, _: Deadline) -> Result<Box<dyn Group>, InitError> {
        allowed(self.backend(), self.plaintext)?;
        let (rank, size) = (seat.rank, seat.addrs.len());
        let world = MpiSession::start().map_err(InitError::wire)?.world();
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

/// Why MPI could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// This program was built without the feature `mpi`.
    #[error("mpi is not in this build")]
    Unavailable,
    #[error("mpi was already started in this process")]
    Started,
    /// The library does not allow concurrent calls of several threads, which a group promises.
    #[error("mpi library supports threads up to level {got}, expected {expected}")]
    Threads {
        /// `MPI_THREAD_MULTIPLE`.
        expected: i32,
        got: i32,
    },
    /// `mpirun` has assigned this process another rank.
    #[error("mpi: this process is {got} of {got_size}, expected {rank} of {size}")]
    OtherRank {
        rank: Rank,
        size: usize,
        got: Rank,
        /// The number of ranks that `mpirun` started.
        got_size: u32,
    },
}
