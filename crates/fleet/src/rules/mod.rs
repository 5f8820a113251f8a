//! The rules of the control plane, in order. All get the same observation and return actions.

pub mod collect;
pub mod drain;
mod own;
mod readmit;
pub mod relocate;
pub mod retire;
pub mod route;
mod scale;
pub mod sign;
#[cfg(test)]
mod testing;
mod widen;

use std::collections::BTreeSet;
use std::time::Instant;

use paceline_cluster::nodes::NodeId;

use crate::replica_names::Name;
use crate::{InstanceId, InstanceSpec, Observed, Specs};
use route::{ReadyReplica, UnservedModel};

/// A change that a node makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start the instance of a record, unless it runs. `resumes`: it was started before, so that
    /// clients may have parts of answers.
    Start {
        id: InstanceId,
        epoch: u64,
        spec: InstanceSpec,
        resumes: bool,
    },
    /// End the instance that runs by this epoch.
    Stop {
        id: InstanceId,
        epoch: u64,
    },
    /// Write the next record of an instance. Refused if another node wrote first.
    Write {
        id: InstanceId,
        epoch: u64,
        spec: InstanceSpec,
        reason: WriteReason,
    },
    Load {
        spec: InstanceSpec,
    },
    Unload {
        id: InstanceId,
        reason: UnloadReason,
    },
    /// Predict the speed of another placement, and write it as the next record if it is better.
    /// `in_use`: although requests are open.
    Evaluate {
        id: InstanceId,
        epoch: u64,
        nodes: Vec<NodeId>,
        in_use: bool,
    },
    /// There is no other placement.
    KeepPlacement {
        id: InstanceId,
    },
    /// Forget the lost workers of these nodes.
    Readmit {
        id: InstanceId,
        nodes: BTreeSet<NodeId>,
    },
    /// Move this node's work to others.
    Drain,
    /// All other nodes drain, so that none takes this node's work.
    Strand,
    /// End a drain.
    Resume {
        reason: ResumeReason,
    },
    /// Look for records that no instance uses. `removes`: delete those found twice.
    Collect {
        removes: bool,
    },
    /// Register a model at this node's server, over an instance that is ready.
    Open {
        name: Name,
        id: InstanceId,
        spec: InstanceSpec,
    },
    /// Answer requests for a registered model by its `ready` instances. Those that are not of `all`
    /// are gone.
    Route {
        name: Name,
        ready: Vec<ReadyReplica>,
        all: BTreeSet<InstanceId>,
    },
    /// Remove a model from this node's server.
    Close {
        name: Name,
    },
    /// Tell this node's server which models it does not answer with.
    TellUnserved {
        models: Vec<UnservedModel>,
    },
    /// Sign the root of the file of an instance.
    Sign {
        id: InstanceId,
        spec: InstanceSpec,
    },
}

/// Why a record is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteReason {
    /// Its owner is dead.
    OwnerLost,
    /// Its nodes have no memory for a lost rank.
    NoRoom,
}

/// Why an instance is unloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnloadReason {
    /// The program that leased it is gone.
    Unleased,
    /// It was added for a load that is over.
    Idle { model: String },
}

/// Why a node works again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeReason {
    /// It is on mains power.
    Power,
    /// It still runs some time after its drain.
    StillHere,
}

/// Past observations of the rules.
#[derive(Debug)]
pub struct History {
    lenders: retire::LostLenders,
    load: scale::LoadHistory,
    widening: widen::WideningHistory,
    battery: drain::BatteryHistory,
    named: readmit::NamedLoads,
    collected: Option<Instant>,
    unserved: Vec<UnservedModel>,
}

impl History {
    /// The history of a node that starts now.
    pub fn new(now: Instant) -> Self {
        Self {
            lenders: retire::LostLenders::new(now),
            load: scale::LoadHistory::default(),
            widening: widen::WideningHistory::default(),
            battery: drain::BatteryHistory::default(),
            named: readmit::NamedLoads::default(),
            collected: None,
            unserved: Vec::new(),
        }
    }
}

/// Arguments of a rule.
struct Round<'a> {
    observed: &'a Observed,
    specs: &'a Specs,
    now: Instant,
    history: &'a mut History,
}

/// The rules, first to last.
const RULES: [fn(&mut Round<'_>) -> Vec<Action>; 10] = [
    retire::rule,
    relocate::rule,
    own::rule,
    scale::rule,
    widen::rule,
    drain::rule,
    readmit::rule,
    collect::rule,
    route::rule,
    sign::rule,
];

/// The actions of a node by what it observes, in the order in which it is to perform them. Call it
/// after each change, and about every [`ROUND`](crate::ROUND).
pub fn reconcile(
    observed: &Observed,
    specs: &Specs,
    now: Instant,
    history: &mut History,
) -> Vec<Action> {
    let mut round = Round {
        observed,
        specs,
        now,
        history,
    };
    RULES.iter().flat_map(|rule| rule(&mut round)).collect()
}
