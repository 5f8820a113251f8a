//! Messages between an instance and its workers.
//!
//! ```text
//! Assign(epoch 1) -> Listening   Join -> Loading... Ready   Submit -> Reply...   Leave -> Left
//! Assign(epoch 2) -> Listening   ...
//! ```
//! A worker lives through any number of epochs. It keeps its packed weights from one to the next
//! where its shard stays the same.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use paceline_comm::tcp::KEY_BYTES;
use paceline_engine::{EngineConfig, Guesses, Reply, Request, Ticket};
use paceline_model::trace::RankTrace;
use paceline_model::{Busy, ExpertUses, Split};
use serde::{Deserialize, Serialize};

use crate::adapters::AdapterOf;
use crate::moved::RankMoved;

/// From an instance to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToWorker {
    /// A part in an epoch; the first message, and the first after [`FromWorker::Left`] or
    /// [`FromWorker::Failed`].
    Assign(Box<Job>),
    /// Pack the weights of a part, and wait: another worker may need to be replaced.
    Prepare(Box<Job>),
    /// Where all ranks listen, in rank order; the second message of an epoch.
    Join {
        /// An address for each rank.
        addrs: Vec<SocketAddr>,
    },
    /// A request, to the leader.
    Submit {
        ticket: Ticket,
        /// The request to compute.
        request: Box<Request>,
        /// Tokens of the answer that the caller has already.
        tokens: Vec<u32>,
    },
    /// Stop a request, to the leader.
    Cancel { ticket: Ticket },
    /// Tell what was sent so far, and how often experts were chosen.
    Measure,
    /// Tell what steps computed for. Asked only where shares follow that.
    Look,
    /// Record what takes how long from now on, or tell what was recorded since.
    Trace {
        /// Whether to record.
        on: bool,
    },
    /// Leave the epoch after the step that is under way, and wait for another part.
    Leave,
    /// Listen for the ranks that read prompts, which are to give their pages to this one.
    Receive(Box<Receive>),
    /// Give the pages of prompts to the ranks that decode, from now on to these.
    HandTo(Box<HandTo>),
    /// Tell when a page and all before it have come from the ranks that read prompts.
    Expect {
        /// The prompt's number.
        number: u64,
        /// Name of its last full page.
        page: [u32; 8],
    },
}

impl ToWorker {
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Assign(_) => "Assign",
            Self::Prepare(_) => "Prepare",
            Self::Join { .. } => "Join",
            Self::Submit { .. } => "Submit",
            Self::Cancel { .. } => "Cancel",
            Self::Measure => "Measure",
            Self::Look => "Look",
            Self::Trace { .. } => "Trace",
            Self::Leave => "Leave",
            Self::Receive(_) => "Receive",
            Self::HandTo(_) => "HandTo",
            Self::Expect { .. } => "Expect",
        }
    }
}

/// A rank's part in an epoch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    pub(crate) epoch: u64,
    pub(crate) rank: u32,
    /// The parts of all ranks, as the instance's owner has decided: a worker checks it and derives
    /// nothing.
    pub(crate) split: Split,
    pub(crate) model: PathBuf,
    /// Which model that is to be.
    pub(crate) identity: String,
    /// The model that guesses, if this rank leads.
    #[serde(default)]
    pub(crate) draft: Option<DraftJob>,
    /// Adapters beside the weights.
    #[serde(default)]
    pub(crate) adapters: Vec<AdapterOf>,
    /// Names of a kernel class and of a backend of the group.
    pub(crate) class: String,
    pub(crate) backend: String,
    pub(crate) threads: usize,
    /// The first of the cores that the threads stay on; anywhere without.
    pub(crate) first_core: Option<usize>,
    /// Name of the type of keys and values, if not that of the class.
    pub(crate) kv: Option<String>,
    pub(crate) engine: EngineConfig,
    /// Names the group, so that no stray connection joins it; another one for each epoch.
    pub(crate) group: [u8; 16],
    /// Authenticates and encrypts what ranks send each other; `None` for ranks of one machine.
    pub(crate) key: Option<EpochKey>,
    /// Whether ranks without a key may be on other machines: all ways between them are trusted.
    #[serde(default)]
    pub(crate) plain: bool,
    /// Where to listen for the other ranks.
    pub(crate) listen: SocketAddr,
    /// Longest wait for another rank's part of a step.
    pub(crate) patience_s: u64,
    /// The part in handing pages of prompts over, where prompts are read by ranks of their own.
    #[serde(default)]
    pub(crate) hands: Option<Hands>,
}

/// A rank's part where prompts are read by ranks of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Hands {
    /// It decodes, and takes the pages of prompts.
    Take,
    /// It reads prompts, and gives their pages away.
    Give,
}

/// How ranks of two groups recognise each other, another way for each round of connections.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Round {
    /// Its number: messages about an earlier round are late.
    pub(crate) number: u64,
    /// Names the pairs of ranks.
    pub(crate) group: [u8; 16],
    /// Authenticates and encrypts; `None` where all are on one machine.
    pub(crate) key: Option<EpochKey>,
}

/// Order to a rank that decodes: take pages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Receive {
    pub(crate) round: Round,
    /// The parts of the ranks that read prompts.
    pub(crate) from: Split,
    /// Where to listen for them.
    pub(crate) listen: SocketAddr,
}

/// Order to a rank that reads prompts: give pages away.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HandTo {
    pub(crate) round: Round,
    /// The parts of the ranks that decode.
    pub(crate) to: Split,
    /// Where each of them listens for this rank.
    pub(crate) addrs: Vec<SocketAddr>,
}

/// A draft model, as a leader loads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DraftJob {
    pub(crate) model: PathBuf,
    /// Which model that is to be.
    pub(crate) identity: String,
}

impl From<(String, PathBuf)> for DraftJob {
    fn from((identity, model): (String, PathBuf)) -> Self {
        Self { model, identity }
    }
}

impl DraftJob {
    /// The same on a machine that has its files at `model`; nothing where it lacks them.
    pub(crate) fn at(self, model: Option<PathBuf>) -> Option<Self> {
        let model = model?;
        Some(Self { model, ..self })
    }
}

/// The secret of an epoch's group, another one for each epoch. Never printed.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct EpochKey(pub(crate) [u8; KEY_BYTES]);

impl fmt::Debug for EpochKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EpochKey(..)")
    }
}

/// From a worker to its instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// Where it waits for the other ranks.
    Listening { addr: SocketAddr },
    /// Weights are being packed.
    Loading {
        /// Steps done.
        done: usize,
        /// Of how many.
        of: usize,
    },
    /// It waits for parts of the model's file, which its machine has to fetch: first bytes and
    /// ends. The machine keeps this to itself.
    Wants {
        /// In the order in which they are read.
        parts: Vec<(u64, u64)>,
    },
    /// Parts of the model's file here have other bytes than its hash tree says: first bytes and
    /// ends. The worker waits until its machine has fetched them again. The machine keeps this to
    /// itself.
    Damaged {
        /// Groups of the tree.
        parts: Vec<(u64, u64)>,
    },
    /// The weights of [`ToWorker::Prepare`] are packed, and it waits. An owner of a version without
    /// this message gives up the worker, which it needs for nothing else.
    Prepared,
    /// It can compute.
    Ready(RankFacts),
    /// Something happened to a request.
    Reply {
        ticket: Ticket,
        /// When the step that gave it ended, by the leader's clock. `None` where no step gave it.
        #[serde(default)]
        at_us: Option<u64>,
        reply: Reply,
    },
    /// The answer to `Measure`.
    Measured {
        /// Bytes that the rank has moved in its epoch so far.
        moved: RankMoved,
        /// How often its layers' experts were chosen since their weights were loaded.
        uses: Vec<ExpertUses>,
        /// Bytes that it has sent to each rank in its epoch so far, by rank. Empty where its groups
        /// do not say, and from earlier versions.
        #[serde(default)]
        sent_to: Vec<u64>,
        /// Of a leader: guesses that were checked in the epoch so far.
        #[serde(default)]
        guesses: Guesses,
    },
    /// The answer to `Look`.
    Busy {
        /// The epoch's number.
        epoch: u64,
        /// Steps of the rank in it, and their computing time.
        busy: Busy,
    },
    /// The answer to `Trace` that ends one.
    Traced(Box<RankTrace>),
    /// It has left the epoch, and waits.
    Left {
        /// The epoch's number.
        epoch: u64,
        /// Bytes that it had moved in it.
        moved: RankMoved,
    },
    /// The answer to `Receive`.
    Receives {
        /// Number of the round.
        round: u64,
        /// Where it listens for each rank that reads prompts.
        addrs: Vec<SocketAddr>,
    },
    /// The answer to `HandTo`: all ranks that decode are connected.
    HandsOver {
        /// Number of the round.
        round: u64,
    },
    /// A connection between the ranks that read prompts and those that decode is lost, or could not
    /// be made.
    Unlinked {
        /// Number of the round.
        round: u64,
        /// Why.
        reason: String,
    },
    /// The answer to `Expect`.
    Arrived {
        /// The prompt's number.
        number: u64,
    },
    /// The epoch cannot go on: it has left it, and waits.
    Failed {
        /// The epoch's number; 0 before the first.
        epoch: u64,
        /// Why.
        reason: String,
        /// Whose fault it is, if another rank's.
        blamed: Option<u32>,
    },
}

/// A worker's facts about itself when it is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFacts {
    pub pid: u32,
    /// Bytes of packed weights that it holds.
    pub weight_bytes: u64,
    /// Times that its process has packed weights: 1 as long as it keeps those of its first epoch; 0
    /// from earlier versions.
    #[serde(default)]
    pub packings: u64,
    /// Threads it computes with.
    pub threads: usize,
    /// Instruction set of its kernels, or its device.
    pub instruction_set: String,
}
