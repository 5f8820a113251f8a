//! What parent and workers say to each other.

use std::net::SocketAddr;
use std::path::PathBuf;

use paceline_engine::{EngineConfig, Reply, Request, Snapshot, Ticket};
use serde::{Deserialize, Serialize};

use crate::moved::RankMoved;

/// From the parent to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum ToWorker {
    /// What to be; the first message.
    Start(Box<Job>),
    /// Where all ranks listen, in rank order; the second message.
    Join {
        /// One address for each rank.
        addrs: Vec<SocketAddr>,
    },
    /// A request, to the leader.
    Submit {
        /// Its name.
        ticket: Ticket,
        /// What to compute.
        request: Box<Request>,
    },
    /// Stop a request, to the leader.
    Cancel {
        /// Its name.
        ticket: Ticket,
    },
    /// A request that other workers began, to the leader.
    Resume {
        /// Its name.
        ticket: Ticket,
        /// Where it stands.
        snapshot: Box<Snapshot>,
    },
    /// Give all requests back, to the leader.
    TakeAll,
    /// Tell what was sent so far.
    Measure,
}

impl ToWorker {
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Start(_) => "Start",
            Self::Join { .. } => "Join",
            Self::Submit { .. } => "Submit",
            Self::Cancel { .. } => "Cancel",
            Self::Resume { .. } => "Resume",
            Self::TakeAll => "TakeAll",
            Self::Measure => "Measure",
        }
    }
}

/// What a worker is to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) model: PathBuf,
    /// Names of a kernel class, of a split, and of a backend of the group.
    pub(crate) class: String,
    pub(crate) split: String,
    pub(crate) backend: String,
    /// One for each rank, or none for equal shares.
    pub(crate) shares: Vec<u32>,
    pub(crate) threads: usize,
    /// Whether they stay on cores of their own, those of rank 0 first.
    pub(crate) pin: bool,
    /// Name of the type of keys and values, if not that of the class.
    pub(crate) kv: Option<String>,
    pub(crate) engine: EngineConfig,
    /// Names the group, so that no stray connection joins it.
    pub(crate) group: [u8; 16],
    /// Where to listen for the other ranks.
    pub(crate) listen: SocketAddr,
    /// Longest wait for another rank's part of a step.
    pub(crate) patience_s: u64,
}

/// From a worker to the parent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum FromWorker {
    /// Where it waits for the other ranks.
    Listening {
        /// The address.
        addr: SocketAddr,
    },
    /// Weights are being packed.
    Loading {
        /// Steps done.
        done: usize,
        /// Of how many.
        of: usize,
    },
    /// It can compute.
    Ready(RankReady),
    /// Something happened to a request.
    Reply {
        /// Its name.
        ticket: Ticket,
        /// What.
        reply: Reply,
    },
    /// A request that is given back; after all its replies so far.
    Taken {
        /// Its name.
        ticket: Ticket,
        /// Where it stands.
        snapshot: Box<Snapshot>,
    },
    /// All were given back.
    TakenAll,
    /// The answer to `Measure`.
    Measured(RankMoved),
    /// It cannot go on, and ends.
    Failed {
        /// Why.
        reason: String,
        /// Whose fault it is, if another rank's.
        blamed: Option<u32>,
    },
}

/// What a worker says of itself when it is ready.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankReady {
    pub(crate) weight_bytes: u64,
    pub(crate) threads: usize,
    pub(crate) instruction_set: String,
}
