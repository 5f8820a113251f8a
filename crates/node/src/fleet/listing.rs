//! The list of instances, as users see it.

use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::{NodeId, RegisterKey};
use paceline_fleet::memory::disk_bytes;
use paceline_fleet::replica_names::{self, Name, Replica};
use paceline_fleet::{InstanceId, InstanceSpec, Report, State, has_failed, report, specs};
use serde::Serialize;

use super::Inner;

/// An instance, as any node sees it.
#[derive(Clone, Debug, Serialize)]
pub struct InstanceView {
    pub id: String,
    /// The model's name, as its user gave it.
    pub model: String,
    /// Its state; `waiting` before its owner reports one.
    pub state: String,
    /// Steps or bytes done, and their total.
    pub progress: Option<(u64, u64)>,
    /// Why it failed or recovers, or which nodes it does not use and why.
    pub reason: Option<String>,
    /// Names of its nodes, the owner first.
    pub nodes: Vec<String>,
    /// Within a limit of memory: about how many bytes each node reads from its disk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub from_disk: Vec<u64>,
    /// Name of the node that computes each rank, if they are not `nodes`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub computing: Vec<String>,
    /// Which nodes stand in for which, a line each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stand_ins: Vec<String>,
    /// Since when its state, nodes and reason are these, in seconds since 1970; `None` before its
    /// owner reports.
    pub since_unix_s: Option<u64>,
    /// Names of its prefill nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prompts: Vec<String>,
    /// Number of the record: one more with each owner.
    pub epoch: u64,
    /// The split as requested.
    pub split: String,
    /// Kernel classes of its nodes in rank order, as `cpu` or `mlx+cpu`.
    pub classes: String,
    /// Name of its numbers: `mlx(metal):0-47+cpu:48-63`; its classes where these say all, and until
    /// it answers. An unlike class of its prefill nodes precedes them, as in `mlx>cpu`.
    pub numbers: String,
    /// Transports between its nodes with RDMA cables, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wires: Option<String>,
    /// Which replica of the model it is, where there are several.
    pub replica: Option<Replica>,
    /// Requests that this node has sent to it.
    pub asked: u64,
    /// Its running requests as far as this node knows; 0 if this node sends it none.
    pub load: usize,
}

impl Inner {
    pub(super) fn list(&self) -> Vec<InstanceView> {
        let map = self.agent.map();
        let all: Vec<_> = specs(&map).collect();
        let works = |(id, epoch, _): &&(InstanceId, u64, _)| !has_failed(&map, *id, *epoch);
        let replicas = all
            .iter()
            .filter(works)
            .map(|(id, _, wanted)| (*id, wanted));
        let numbers = replica_names::numbers(replicas);
        // Called once, because it reads the facts of all nodes.
        let names = self.agent.names();
        let name = |id: &NodeId| names.get(id).cloned().unwrap_or_else(|| id.to_string());
        let view = |(id, epoch, wanted): (InstanceId, u64, InstanceSpec)| {
            let report = report(&map, id).filter(|report| report.epoch == epoch);
            let named = report.as_ref().and_then(|report| report.numbers.clone());
            let wires = report.as_ref().and_then(|report| report.wires.clone());
            let (computing, stand_ins) = computing(&wanted, report.as_ref(), &name);
            let since = report.as_ref().and(map.register(&RegisterKey::Report(id)));
            let split = report.as_ref().and_then(|report| report.split.clone());
            let (state, progress, reason) = match self.told(&wanted, report, &name) {
                // A request now would be answered with `no such model`.
                ("ready", ..) if !self.is_settled(&Name::of(&wanted), id) => {
                    ("loading", None, None)
                }
                told => told,
            };
            let on_disk = |id: &NodeId| disk_bytes(&wanted, *id);
            let usage = self.replicas_with(id).map(|all| all.usage(id));
            let usage = usage.unwrap_or_default();
            InstanceView {
                id: id.to_string(),
                numbers: wanted
                    .numbers_name(named)
                    .unwrap_or_else(|| wanted.class_names()),
                wires,
                classes: wanted.class_names(),
                model: wanted.id().to_owned(),
                state: state.to_owned(),
                progress,
                reason,
                nodes: wanted.nodes.iter().map(name).collect(),
                from_disk: match wanted.options.memory {
                    Some(_) => wanted.nodes.iter().map(on_disk).collect(),
                    None => Vec::new(),
                },
                computing,
                stand_ins,
                since_unix_s: since.map(|register| register.stamp.ms / 1000),
                prompts: wanted.prompts.iter().map(name).collect(),
                epoch,
                split: split.unwrap_or(wanted.split),
                replica: numbers.get(&id).copied(),
                asked: usage.asked,
                load: usage.load,
            }
        };
        all.into_iter().map(view).collect()
    }

    /// State, progress and reason of an instance. The last report of a dead owner is ignored.
    fn told(
        &self,
        wanted: &InstanceSpec,
        report: Option<Report>,
        name: &dyn Fn(&NodeId) -> String,
    ) -> (&'static str, Option<(u64, u64)>, Option<String>) {
        let owner = &wanted.nodes[0];
        if self.agent.life(*owner) == Life::Dead {
            let reason = format!("{}, its owner, is dead", name(owner));
            return ("recovering", None, Some(reason));
        }
        let Some(report) = report else {
            return ("waiting", None, None);
        };
        let state = match report.state {
            State::Fetching => "fetching",
            State::Loading => "loading",
            State::Ready => "ready",
            State::Recovering => "recovering",
            State::Failed => "failed",
        };
        (state, report.progress, report.reason)
    }
}

/// The nodes that compute an instance's ranks now, if they are not those of its record, and which
/// stand in for which.
fn computing(
    wanted: &InstanceSpec,
    report: Option<&Report>,
    name: &dyn Fn(&NodeId) -> String,
) -> (Vec<String>, Vec<String>) {
    let Some(report) = report else {
        return (Vec::new(), Vec::new());
    };
    let ranks = wanted.on_one_machine().map_or(1, |machine| machine.ranks);
    if ranks > 1 {
        return (vec![name(&wanted.nodes[0]); ranks as usize], Vec::new());
    }
    let both = report.computing.iter().zip(&wanted.nodes);
    let others = both.filter(|(now, home)| now != home);
    let stand_ins = others.map(|(now, home)| format!("{} stands in for {}", name(now), name(home)));
    (
        report.computing.iter().map(name).collect(),
        stand_ins.collect(),
    )
}
