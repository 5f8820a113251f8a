//! Why a call failed.

use std::io;

use paceline_base::Rank;

use crate::Call;

/// Why a call failed. Every variant but [`Error::Unsupported`] poisons the group (see
/// [`Group`](crate::Group)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A rank ended, was killed or dropped its handle.
    #[error("{call}: {rank} left the group")]
    PeerLost {
        /// The call in which this rank noticed.
        call: Call,
        rank: Rank,
    },
    #[error("{call}: {rank} did not take part before the deadline")]
    Timeout {
        call: Call,
        /// The first rank that was missing.
        rank: Rank,
    },
    /// The ranks did not make the same call.
    #[error("{rank} made another call than its peers: expected {expected}, got {got}")]
    Mismatch {
        /// The first rank that differs from `expected`.
        rank: Rank,
        /// The call that most ranks made. On a tie, the call that the lowest of these ranks made.
        expected: Call,
        /// The call that `rank` made.
        got: Call,
    },
    /// A buffer's length does not match the other arguments.
    #[error("{call}: length of {buffer} on {rank} is {got}, expected {expected}")]
    Length {
        call: Call,
        rank: Rank,
        buffer: &'static str,
        expected: u64,
        got: u64,
    },
    /// A root or peer is not in the group, or a rank sends to itself.
    #[error("{call}: {rank} named {named}, which is not its peer in a group of {size}")]
    NoSuchRank {
        call: Call,
        rank: Rank,
        named: Rank,
        size: u32,
    },
    /// A rank sent no heartbeat for longer than the group allows.
    #[error("{call}: {rank} has been silent for {millis} ms")]
    Silent {
        /// The call in which this rank noticed.
        call: Call,
        rank: Rank,
        millis: u32,
    },
    /// A rank sent bytes that are no valid frame of this protocol.
    #[error("{call}: {rank} sent bytes that are no frame")]
    Garbled {
        /// The call in which this rank noticed.
        call: Call,
        rank: Rank,
    },
    /// The backend has no such call. Nothing was sent, and the group is *not* poisoned: every rank
    /// that makes this call gets this.
    #[error("{call}: {backend} does not have this between {rank} and its group")]
    Unsupported {
        call: Call,
        rank: Rank,
        backend: &'static str,
    },
    #[error("{call}: {backend} failed on {rank} with code {code}")]
    Library {
        call: Call,
        rank: Rank,
        backend: &'static str,
        code: i32,
    },
    /// The system refused a resource that a new group needs, such as one more open file.
    #[error("{call}: {rank} cannot {what}: {}", of_system(.code))]
    System {
        call: Call,
        rank: Rank,
        what: &'static str,
        /// The system's error code; 0 if it gave none.
        code: i32,
    },
}

fn of_system(code: &i32) -> io::Error {
    io::Error::from_raw_os_error(*code)
}

impl Error {
    /// The call that this error is about: on the rank it happened on, or its peers' (for a
    /// mismatch).
    pub const fn call(&self) -> Call {
        match self {
            Self::PeerLost { call, .. }
            | Self::Timeout { call, .. }
            | Self::Length { call, .. }
            | Self::NoSuchRank { call, .. }
            | Self::Silent { call, .. }
            | Self::Garbled { call, .. }
            | Self::Unsupported { call, .. }
            | Self::Library { call, .. }
            | Self::System { call, .. } => *call,
            Self::Mismatch { expected, .. } => *expected,
        }
    }

    /// The rank that did not do its part, for tests.
    #[cfg(test)]
    pub(crate) const fn blamed(&self) -> Option<Rank> {
        match self {
            Self::PeerLost { rank, .. }
            | Self::Timeout { rank, .. }
            | Self::Silent { rank, .. }
            | Self::Garbled { rank, .. } => Some(*rank),
            _ => None,
        }
    }
}
