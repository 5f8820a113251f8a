//! Reports of owners about their instances, and the records and reports of a map.

use paceline_cluster::nodes::{NodeId, RegisterKey, Registers};
use serde::{Deserialize, Serialize};

use crate::{InstanceId, InstanceSpec, NODES_MAX};

/// State of an instance, reported by its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Nodes copy the model.
    Fetching,
    /// Workers read it.
    Loading,
    /// It answers.
    Ready,
    /// A worker or node was lost.
    Recovering,
    /// It failed; the report has the reason.
    Failed,
}

/// An owner's report of its instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Epoch of the reported record.
    pub epoch: u64,
    pub state: State,
    /// Steps done and their total, while fetching or loading.
    pub progress: Option<(u64, u64)>,
    /// Why it failed, or which nodes it does not use and why.
    pub reason: Option<String>,
    /// The node of each rank, while it answers; empty if they are those of the record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub computing: Vec<NodeId>,
    /// Positions of a sequence, while it answers, if the record does not state them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<u32>,
    /// Name of its numbers, while it answers and its kernel class does not say all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numbers: Option<String>,
    /// Transports between nodes with RDMA cables, for people, while it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wires: Option<String>,
    /// The split in use, while it answers by another one than its record's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
}

/// The instances in the map: id, epoch and spec.
pub fn specs(map: &Registers) -> impl Iterator<Item = (InstanceId, u64, InstanceSpec)> + '_ {
    map.iter().filter_map(|(key, register)| {
        let RegisterKey::Record(id) = key else {
            return None;
        };
        let wanted: InstanceSpec = serde_json::from_str(register.value.as_deref()?).ok()?;
        let is_sane = (1..=NODES_MAX).contains(&wanted.nodes.len())
            && wanted.successors.len() <= NODES_MAX
            && wanted.prompts.len() <= NODES_MAX;
        is_sane.then_some((*id, register.epoch, wanted))
    })
}

/// The owner's report of an instance.
pub fn report(map: &Registers, id: InstanceId) -> Option<Report> {
    serde_json::from_str(map.get(&RegisterKey::Report(id))?).ok()
}

/// Whether the instance of a record has failed for good.
pub fn has_failed(map: &Registers, id: InstanceId, epoch: u64) -> bool {
    report(map, id).is_some_and(|it| it.epoch == epoch && it.state == State::Failed)
}
