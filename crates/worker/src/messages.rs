//! Messages between an instance and its workers.
//!
//! ```text
//! Assign(epoch 1) -> Listening   Join -> Loading... Ready   Submit -> Reply...   Leave -> Left
//! Assign(epoch 2) -> Listening   ...
//! ```
//! A worker serves any number of epochs. It keeps its packed weights for the next epoch if its
//! shard stays the same. Messages are JSON lines on the control channel; a remote host forwards
//! them unchanged, apart from `Wants` and `Damaged`.
use std::net::SocketAddr;
use std::path::PathBuf;

use paceline_cluster::nodes::NodeId;
use paceline_comm::tcp::KEY_BYTES;
use paceline_engine::{DraftCounts, EngineConfig, Reply, RequestMessage, Ticket};
use paceline_model::trace::RankTrace;
use paceline_model::{ComputeTime, ExpertUses, Split};
use serde::{Deserialize, Serialize};

use crate::adapters::AdapterOf;
use crate::traffic::RankTraffic;

/// From an instance to a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToWorker {
    /// An assignment in an epoch; the first message, and the first after [`FromWorker::Left`] or
    /// [`FromWorker::Failed`].
    Assign(Box<RankAssignment>),
    /// Pack the weights of an assignment, and wait as standby.
    Prepare(Box<RankAssignment>),
    /// The addresses of all ranks, in rank order; the second message of an epoch.
    Join { addrs: Vec<SocketAddr> },
    /// About a request, to the leader.
    Request(RequestMessage),
    /// Report bytes sent and expert counts so far.
    Measure,
    /// Report step times. Sent only if shares are rebalanced by them.
    Look,
    /// Start a trace, or end it and report it.
    Trace {
        /// Whether to record.
        on: bool,
    },
    /// Leave the epoch after the current step, and wait for another assignment.
    Leave,
    /// Listen for the prefill ranks, which send their KV pages to this rank.
    Receive(Box<ReceivePages>),
    /// Send the KV pages of prompts to these decode ranks from now on.
    HandTo(Box<SendPages>),
    /// Report when a page and all before it have arrived from the prefill ranks.
    Expect {
        number: u64,
        /// Name of its last full page.
        page: [u32; 8],
    },
}

impl ToWorker {
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Assign(_) => "Assign",
            Self::Prepare(_) => "Prepare",
            Self::Join { .. } => "Join",
            Self::Request(RequestMessage::Submit(_)) => "Submit",
            Self::Request(RequestMessage::Cancel(_)) => "Cancel",
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

/// A rank's assignment in an epoch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankAssignment {
    pub epoch: u64,
    pub rank: u32,
    /// The shards of all ranks, decided by the instance's owner: a worker checks them and derives
    /// nothing.
    pub split: Split,
    pub model: PathBuf,
    /// The expected identity of the model's files.
    pub identity: String,
    /// The draft model, if this rank leads.
    #[serde(default)]
    pub draft: Option<DraftJob>,
    /// Layers whose input the draft reads, if it is a draft head.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub captures: Vec<usize>,
    #[serde(default)]
    pub adapters: Vec<AdapterOf>,
    /// Names of the kernel class and of the group's backend.
    pub class: String,
    /// Whether other ranks compute in another class: then keys and values of this rank may follow
    /// from its numbers.
    #[serde(default)]
    pub mixed: bool,
    pub backend: String,
    pub threads: usize,
    /// The first core its threads are pinned to; `None` for no pinning.
    pub first_core: Option<usize>,
    /// Name of the type of keys and values, if not that of the class.
    pub kv: Option<String>,
    /// Most bytes of the worker's process. Weights that do not fit are read while steps compute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    pub engine: EngineConfig,
    /// Id of the group, so that no stray connection joins it; new for each epoch.
    pub group: [u8; 16],
    /// Key that authenticates and encrypts the ranks' traffic; `None` for ranks of one machine.
    pub key: Option<EpochKey>,
    /// Whether ranks without a key may be on other machines, because all routes between them are
    /// trusted.
    #[serde(default)]
    pub plain: bool,
    /// RDMA cables between the ranks. Pairs without one, or whose cable fails, use `backend`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cables: Option<RankCables>,
    /// Whether no host of the worker repairs a damaged file: damage ends the load.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_alone: bool,
    /// Listen address for the other ranks.
    pub listen: SocketAddr,
    /// Longest wait for another rank's part of a step, in seconds.
    pub patience_s: u64,
    /// The role in KV transfer, with disaggregated prefill.
    #[serde(default)]
    pub hands: Option<PrefillRole>,
    /// Set where prefill and decode ranks compute in other classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unlike: Option<crate::prefill_classes::UnlikePrefill>,
}

/// RDMA cables between ranks: the same for all ranks but for `refused`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankCables {
    /// By rank and peer: devices of the rank's machine. The cables of a pair have one order.
    pub devices: Vec<Vec<Vec<String>>>,
    pub nodes: Vec<NodeId>,
    /// Peers to which the rank's machine does not trust a cable; filled in by its host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<u32>,
}

impl RankCables {
    /// Whether there is no cable.
    pub fn is_bare(&self) -> bool {
        self.devices.iter().flatten().all(Vec::is_empty)
    }

    /// Refuses the peers to which `rank` has a cable that is not trusted, by its device and the
    /// peer's node.
    pub fn refuse(&mut self, rank: u32, is_trusted: impl Fn(&str, NodeId) -> bool) {
        let row = self.devices.get(rank as usize).into_iter().flatten();
        let is_refused = |(peer, devices): &(u32, &Vec<String>)| {
            let node = self.nodes.get(*peer as usize);
            let is_trusted = |device: &String| node.is_some_and(|node| is_trusted(device, *node));
            !devices.iter().all(is_trusted)
        };
        let refused = (0..).zip(row).filter(is_refused);
        self.refused = refused.map(|(peer, _)| peer).collect();
    }
}

/// A rank's role in disaggregated prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PrefillRole {
    /// It decodes, and receives the KV pages of prompts.
    Take,
    /// It computes prompts, and sends their KV pages.
    Give,
}

/// Credentials of one round of connections between the prefill and decode ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TransferRound {
    /// Its number: messages of an earlier round are ignored.
    pub number: u64,
    /// Id of the groups of two ranks.
    pub group: [u8; 16],
    /// Key that authenticates and encrypts; `None` if all are on one machine.
    pub key: Option<EpochKey>,
    /// Names of the numbers of the prefill and of the decode ranks.
    #[serde(default)]
    pub numbers: [String; 2],
}

impl TransferRound {
    /// Name of the prefill ranks' numbers, if the decode ranks have other ones.
    pub fn read_by(&self) -> Option<&String> {
        let [from, to] = &self.numbers;
        (from != to).then_some(from)
    }
}

/// Order to a decode rank: receive KV pages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReceivePages {
    pub round: TransferRound,
    /// The split of the prefill ranks.
    pub from: Split,
    pub listen: SocketAddr,
}

/// Order to a prefill rank: send KV pages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SendPages {
    pub round: TransferRound,
    /// The split of the decode ranks.
    pub to: Split,
    /// Address of each of them for this rank.
    pub addrs: Vec<SocketAddr>,
}

/// A draft model, as a leader loads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftJob {
    pub model: PathBuf,
    /// The expected identity of the model's files.
    pub identity: String,
}

impl From<(String, PathBuf)> for DraftJob {
    fn from((identity, model): (String, PathBuf)) -> Self {
        Self { model, identity }
    }
}

impl DraftJob {
    /// The same with the files at `model`; `None` for a machine without them.
    pub fn at(self, model: Option<PathBuf>) -> Option<Self> {
        let model = model?;
        Some(Self { model, ..self })
    }
}

/// The secret of an epoch's group, new for each epoch. Never printed.
#[derive(Clone, Default, Serialize, Deserialize, derive_more::Debug)]
#[debug("EpochKey(..)")]
pub struct EpochKey(pub [u8; KEY_BYTES]);

/// From a worker to its instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// Its listen address for the other ranks.
    Listening { addr: SocketAddr },
    /// Weights are being packed.
    Loading {
        done: usize,
        /// Of how many.
        of: usize,
    },
    /// It waits for ranges of the model file (first bytes and ends), which its host must fetch. The
    /// host does not forward this message.
    Wants {
        /// The file's name in the model's folder; empty for a model of one file.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        file: String,
        /// In read order.
        parts: Vec<(u64, u64)>,
    },
    /// Ranges of the model file (first bytes and ends) differ from its hash tree. The worker waits
    /// until its host has fetched them again. The host does not forward this message.
    Damaged {
        /// As in [`Wants`](Self::Wants).
        #[serde(default, skip_serializing_if = "String::is_empty")]
        file: String,
        /// Groups of the tree.
        parts: Vec<(u64, u64)>,
    },
    /// The weights of [`ToWorker::Prepare`] are packed, and it waits. An owner of a build without
    /// this message drops the worker, which it needs for nothing else.
    Prepared,
    /// It can compute.
    Ready(RankFacts),
    Reply {
        ticket: Ticket,
        /// End of the step that produced it, in microseconds of the leader's clock. `None` if no
        /// step produced it.
        #[serde(default)]
        at_us: Option<u64>,
        reply: Reply,
    },
    Measured {
        /// Bytes that the rank has moved in its epoch so far.
        moved: RankTraffic,
        /// How often its layers' experts were chosen since their weights were loaded.
        uses: Vec<ExpertUses>,
        /// Bytes sent to each rank in its epoch so far, by rank. Empty if its groups do not count
        /// them.
        #[serde(default)]
        sent_to: Vec<u64>,
        /// Of a leader: draft tokens verified in the epoch so far.
        #[serde(default)]
        guesses: DraftCounts,
    },
    /// The answer to `Look`.
    Busy { epoch: u64, busy: ComputeTime },
    /// The answer to `Trace` that ends one.
    Traced(Box<RankTrace>),
    /// It has left the epoch, and waits.
    Left {
        epoch: u64,
        /// Bytes that it had moved in it.
        moved: RankTraffic,
    },
    /// The answer to `ReceivePages`.
    Receives {
        round: u64,
        /// Its listen address for each prefill rank.
        addrs: Vec<SocketAddr>,
    },
    /// The answer to `SendPages`: all decode ranks are connected.
    HandsOver { round: u64 },
    /// A connection between a prefill and a decode rank is lost, or could not be made.
    Unlinked { round: u64, reason: String },
    /// The answer to `Expect`.
    Arrived { number: u64 },
    /// The epoch failed: it has left it, and waits.
    Failed {
        /// The epoch's number; 0 before the first.
        epoch: u64,
        reason: String,
        /// The rank at fault, if it is another one.
        blamed: Option<u32>,
        /// Whether its device interrupted a step because it took too long: the rank is unharmed,
        /// and smaller steps may succeed.
        #[serde(default)]
        interrupted: bool,
    },
}

/// A worker's facts about itself when it is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFacts {
    pub pid: u32,
    /// Bytes of packed weights that it holds.
    pub weight_bytes: u64,
    /// How often its process packed weights: 1 while it keeps those of its first epoch.
    #[serde(default)]
    pub packings: u64,
    pub threads: usize,
    /// Instruction set of its kernels, or its device.
    pub instruction_set: String,
    /// The cables to ranks to which there are some.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wires: Vec<PeerWire>,
}

/// A rank's cables to another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerWire {
    pub peer: u32,
    /// RDMA cables in use; without one the ranks use TCP.
    pub cables: u32,
    /// Why the rank does not use one, if it is at its end.
    pub reason: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_refuses_cables_that_it_does_not_trust_whatever_the_owner_names() {
        let node = |number| NodeId([number; 16]);
        let row = |devices: [&[&str]; 3]| {
            let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            devices.map(names).to_vec()
        };
        let mut cables = RankCables {
            devices: vec![row([&[], &["en3", "en4"], &["en5"]])],
            nodes: vec![node(1), node(2), node(3)],
            refused: vec![9],
        };
        let trusted = [("en3", node(2)), ("en5", node(3)), ("en4", node(3))];
        let refused = |cables: &mut RankCables, rank| {
            cables.refuse(rank, |device, node| trusted.contains(&(device, node)));
            std::mem::take(&mut cables.refused)
        };
        assert_eq!(
            refused(&mut cables, 0),
            [1],
            "one of its cables is not trusted"
        );
        cables.devices[0][1].pop();
        assert_eq!(refused(&mut cables, 0), [0; 0]);
        assert_eq!(refused(&mut cables, 7), [0; 0], "no row, no cable");
        cables.nodes.truncate(1);
        assert_eq!(refused(&mut cables, 0), [1, 2], "peers without a node");
    }
}
