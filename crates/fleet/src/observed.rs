//! A node's knowledge at one moment: the records of the shared map, and its own state.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use paceline_cluster::nodes::agent::NodeView;
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::reach::BrokenPairs;
use paceline_cluster::nodes::{NodeId, Registers};

use crate::replica_names::Name;
use crate::rules::route::ModelRoute;
use crate::{InstanceId, InstanceSpec, Report, ServiceStarts, State, memory, report, specs};

/// Bytes available on each node for an instance.
pub type NodeMemory = BTreeMap<NodeId, u64>;

/// The record of an instance, with its owner's last report.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub epoch: u64,
    pub spec: InstanceSpec,
    /// The last report, perhaps of an earlier epoch.
    pub report: Option<Report>,
}

impl Record {
    /// Whether the last report has this state.
    pub fn is_in(&self, state: State) -> bool {
        self.report.as_ref().is_some_and(|it| it.state == state)
    }
}

/// The instances in the shared map.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Specs(BTreeMap<InstanceId, Record>);

impl Specs {
    /// The readable records of a map. Cost: parses each once.
    pub fn read(map: &Registers) -> Self {
        let record = |(id, epoch, spec)| {
            let report = report(map, id);
            let record = Record {
                epoch,
                spec,
                report,
            };
            (id, record)
        };
        Self(specs(map).map(record).collect())
    }

    /// The record of an instance.
    pub fn get(&self, id: InstanceId) -> Option<&Record> {
        self.0.get(&id)
    }

    /// All records, in order of ids.
    pub fn iter(&self) -> impl Iterator<Item = (InstanceId, &Record)> {
        self.0.iter().map(|(id, record)| (*id, record))
    }

    /// The nodes that have ranks of an instance.
    pub fn used(&self) -> BTreeSet<NodeId> {
        let all = self.0.values().map(|it| &it.spec);
        all.flat_map(|it| it.nodes.iter().chain(&it.prompts))
            .copied()
            .collect()
    }
}

impl FromIterator<(InstanceId, Record)> for Specs {
    fn from_iter<T: IntoIterator<Item = (InstanceId, Record)>>(records: T) -> Self {
        Self(records.into_iter().collect())
    }
}

/// State of an instance's workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerStatus {
    /// Whether they answer now.
    pub is_ready: bool,
    /// Requests that run or wait.
    pub open: usize,
}

/// An instance that this node runs or starts.
#[derive(Clone, Debug)]
pub struct OwnedInstance {
    /// Epoch of the record by which it runs.
    pub epoch: u64,
    /// The record.
    pub spec: InstanceSpec,
    /// State of its workers, once they answered by this record.
    pub status: Option<WorkerStatus>,
    /// Whether it answers by this record, by workers or as an encoder.
    pub answers: bool,
    /// Whether workers answer, by this record or the one before.
    pub serves: bool,
    /// The node of each rank, where it is known.
    pub ranks: Vec<Option<NodeId>>,
    /// Nodes that lost workers repeatedly.
    pub excluded: Vec<NodeId>,
    /// Whether a rank was lost and no node of the instance has memory for it.
    pub is_cramped: bool,
    /// Whether the last evaluated placement was predicted to be slower.
    pub is_slower: bool,
}

impl OwnedInstance {
    /// The node of each rank now.
    pub fn nodes_now(&self) -> Vec<NodeId> {
        let ranks = self.ranks.iter().zip(&self.spec.nodes);
        ranks.map(|(at, home)| at.unwrap_or(*home)).collect()
    }
}

/// A battery's reading: whether it is discharging, and its charge from 0 to 1. `None` without one.
pub type BatteryReading = Option<(bool, f64)>;

/// A node's view of the others and of itself.
#[derive(Clone, Debug)]
pub struct Observed {
    pub own: NodeId,
    pub nodes: Vec<NodeView>,
    /// Lives of the known nodes; others are dead.
    pub lives: BTreeMap<NodeId, Life>,
    /// Nodes that may get work of this one, best first.
    pub ranked: Vec<NodeId>,
    /// Pairs of nodes that cannot speak. Only complete where [`needs_paths`](Self::needs_paths).
    pub broken: BrokenPairs,
    /// Whether this node drains.
    pub is_leaving: bool,
    /// Since when all work of this node has moved to others.
    pub drained: Option<Instant>,
    /// The instances that this node runs.
    pub owned: BTreeMap<InstanceId, OwnedInstance>,
    /// Instances leased to programs of this machine.
    pub leased: BTreeSet<InstanceId>,
    /// Whether another placement is evaluated now.
    pub is_evaluating: bool,
    /// The battery, if it was read since the last round.
    pub battery: Option<BatteryReading>,
    /// The models that this node's server answers with.
    pub routes: BTreeMap<Name, ModelRoute>,
    /// The models that are being registered at this node's server.
    pub starts: ServiceStarts,
    /// By instance: time and number of attempts to fetch or sign the file needed to answer with it.
    pub tried: BTreeMap<InstanceId, (Instant, u32)>,
    /// SHA-256 of this node's models whose roots a trusted node has signed. Read once a round.
    pub rooted: BTreeSet<String>,
}

impl Observed {
    /// A node that knows of no other node and runs nothing.
    pub fn new(own: NodeId) -> Self {
        Self {
            own,
            nodes: Vec::new(),
            lives: BTreeMap::from([(own, Life::Alive)]),
            ranked: Vec::new(),
            broken: BrokenPairs::default(),
            is_leaving: false,
            drained: None,
            owned: BTreeMap::new(),
            leased: BTreeSet::new(),
            is_evaluating: false,
            battery: None,
            routes: BTreeMap::new(),
            starts: ServiceStarts::default(),
            tried: BTreeMap::new(),
            rooted: BTreeSet::new(),
        }
    }

    pub fn life(&self, id: NodeId) -> Life {
        self.lives.get(&id).copied().unwrap_or(Life::Dead)
    }

    /// Whether a node is not known to be gone.
    pub fn lives(&self, id: NodeId) -> bool {
        matches!(self.life(id), Life::Alive | Life::Suspect)
    }

    /// Whether a rule may choose nodes now, which then must be able to speak.
    pub fn needs_paths(&self, specs: &Specs) -> bool {
        let lacks = |it: &OwnedInstance| {
            let spec = &it.spec;
            let is_away = it.nodes_now() != spec.nodes;
            let is_narrow = spec.nodes.len() < usize::from(spec.width.unwrap_or(0));
            it.is_cramped || is_away || is_narrow || !spec.nodes.iter().all(|id| self.lives(*id))
        };
        let mut owners = specs.iter().map(|(_, it)| it.spec.nodes[0]);
        self.owned.values().any(lacks) || owners.any(|id| !self.lives(id))
    }

    /// Bytes for an instance on each node, by the engine that it has there, after all records but
    /// `without`. Unlimited for a node that does not report its memory.
    pub fn rooms(
        &self,
        specs: &Specs,
        without: Option<InstanceId>,
        spec: &InstanceSpec,
    ) -> NodeMemory {
        let others = specs.iter().filter(|(id, _)| Some(*id) != without);
        let others: Vec<InstanceSpec> = others.map(|(_, it)| it.spec.clone()).collect();
        let views = self.nodes.iter();
        views
            .map(|view| {
                let is_on_mlx = spec.is_on_mlx(view.id);
                (view.id, memory::room(view, is_on_mlx, &others))
            })
            .collect()
    }
}
