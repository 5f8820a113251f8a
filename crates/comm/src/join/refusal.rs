//! Why a join fails.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};

use paceline_base::Rank;

use crate::{Call, Error};

/// Why a rank may not become a member. `ours` is the value of the rank that refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Another version of the protocol.
    Version {
        /// Of the rank that refuses.
        ours: u16,
        theirs: u16,
    },
    /// Another number of ranks.
    Size {
        /// Of the rank that refuses.
        ours: u32,
        theirs: u32,
    },
    /// Another group id: a member of another group, or of none.
    Group,
    /// It cannot be that rank, or dialled the wrong address.
    Rank(Rank),
    /// Another process has that rank already.
    Duplicate(Rank),
    /// Another group key.
    Key,
    /// No group key, although the refusing rank has one.
    NoKey,
    /// A group key, although the refusing rank has none.
    UnknownKey,
    /// Another number of connections for each lane.
    Streams {
        /// Of the rank that refuses.
        ours: u16,
        theirs: u16,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { ours, theirs } => {
                write!(f, "protocol version is {theirs}, expected {ours}")
            }
            Self::Size { ours, theirs } => write!(f, "group size is {theirs}, expected {ours}"),
            Self::Group => write!(f, "it has another group id"),
            Self::Rank(rank) => write!(f, "{rank} does not fit the list of addresses"),
            Self::Duplicate(rank) => write!(f, "{rank} is taken by another process"),
            Self::Key => write!(f, "its group key differs"),
            Self::NoKey => write!(f, "it has no group key, expected one"),
            Self::UnknownKey => write!(f, "it has a group key, expected none"),
            Self::Streams { ours, theirs } => {
                write!(f, "streams per link are {theirs}, expected {ours}")
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The own rank is not in the list of addresses.
    #[error("{rank} cannot join a group of {size}")]
    NoSuchRank { rank: Rank, size: usize },
    #[error("{what}: {source}")]
    System {
        what: &'static str,
        source: io::Error,
    },
    #[error("{rank} did not join before the deadline{}", refused(.turned_away))]
    Missing {
        rank: Rank,
        /// Why another process was turned away, if that happened.
        turned_away: Option<Refusal>,
    },
    #[error("{by} refuses this rank: {why}")]
    Refused {
        by: Rank,
        /// The reason: what is wrong with this rank.
        why: Refusal,
    },
    /// A process with this group's id does not fit, or a member uses another id.
    #[error("a process at {from} that wants to join does not fit: {why}")]
    Unfit {
        /// The reason: what is wrong with the process.
        why: Refusal,
        from: IpAddr,
    },
    #[error("{addr} is not loopback: expected a group key, or plaintext asked for by name")]
    Unprotected {
        /// The first such address.
        addr: SocketAddr,
    },
    #[error("{rank} has no address")]
    NoAddress { rank: Rank },
    /// Another rank found a process that does not fit.
    #[error("{by} gave up: {why}")]
    GaveUp {
        by: Rank,
        /// The reason: what is wrong with that process.
        why: Refusal,
    },
    /// A rank cannot use another's memory, most likely because it is on another machine.
    #[error("{rank} cannot map the memory of all others{}", because(.code))]
    Apart {
        /// This rank if it cannot, else the first that cannot.
        rank: Rank,
        /// The system's error code, if this rank is the cause and the system gave one.
        code: Option<i32>,
    },
    #[error("{rank} left before the group was complete")]
    Lost { rank: Rank },
}

fn because(code: &Option<i32>) -> String {
    code.map_or(String::new(), |code| {
        format!(": {}", io::Error::from_raw_os_error(code))
    })
}

fn refused(why: &Option<Refusal>) -> String {
    why.map_or(String::new(), |why| {
        format!("; a process was turned away: {why}")
    })
}

impl JoinError {
    /// Converts the error of a call made during the join.
    pub fn of_call(error: Error) -> Self {
        match error {
            Error::Timeout { rank, .. } => Self::Missing {
                rank,
                turned_away: None,
            },
            Error::PeerLost { rank, .. }
            | Error::Silent { rank, .. }
            | Error::Garbled { rank, .. }
            | Error::Mismatch { rank, .. }
            | Error::Length { rank, .. }
            | Error::NoSuchRank { rank, .. }
            | Error::Unsupported { rank, .. }
            | Error::Library { rank, .. }
            | Error::System { rank, .. } => Self::Lost { rank },
        }
    }

    /// Converts an error that rank `own` of the new group met during a split. `ranks` are the new
    /// group's members by their old ranks.
    pub fn of_split(&self, call: Call, own: Rank, ranks: &[Rank]) -> Error {
        let old = |rank: &Rank| ranks.get(rank.0 as usize).copied().unwrap_or(*rank);
        match self {
            Self::Missing { rank, .. } => Error::Timeout {
                call,
                rank: old(rank),
            },
            Self::Lost { rank }
            | Self::Refused { by: rank, .. }
            | Self::GaveUp { by: rank, .. } => Error::PeerLost {
                call,
                rank: old(rank),
            },
            Self::System { what, source } => Error::System {
                call,
                rank: old(&own),
                what,
                code: source.raw_os_error().unwrap_or_default(),
            },
            Self::Apart {
                rank,
                code: Some(code),
            } => Error::System {
                call,
                rank: old(rank),
                what: "map the memory of all others",
                code: *code,
            },
            Self::Apart { rank, code: None } => Error::PeerLost {
                call,
                rank: old(rank),
            },
            Self::NoSuchRank { .. }
            | Self::Unfit { .. }
            | Self::Unprotected { .. }
            | Self::NoAddress { .. } => Error::PeerLost {
                call,
                rank: ranks.first().copied().unwrap_or_default(),
            },
        }
    }
}
