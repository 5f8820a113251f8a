//! Control plane of a cluster: pure functions that decide which node runs which part of a model.
//!
//! No IO, threads or clocks: a node gathers the facts and performs the actions, and the crate `sim`
//! drives the same functions.
//!
//! ```text
//! shared map ──▶ Specs ──┐
//! agent, workers ──▶ Observed ──▶ reconcile: rules in order ──▶ actions ──▶ node, sim
//! ```
//! - [`reconcile`]: what a node does by what it [observes](Observed); [`rules`] has the rules.
//! - [`InstanceSpec`] and [`Report`]: the records of an instance in the shared map.
//! - [`ownership`]: the owner of an instance, by the map and the lives of nodes.
//! - [`memory`]: bytes that records place on a machine, and what is left for others.
//! - [`assignment`]: nodes for the replicas of a model.
//! - [`replica_names`]: names that instances answer by, and the numbers of replicas.
//! - [`choice`]: the replica for a request.
//! - [`ServiceStarts`]: the models that are being registered at a node's server.

pub mod assignment;
pub mod choice;
pub mod memory;
mod observed;
pub mod ownership;
pub mod replica_names;
mod report;
pub mod rules;
mod service_starts;
mod spec;

pub use observed::{
    BatteryReading, NodeMemory, Observed, OwnedInstance, Record, Specs, WorkerStatus,
};
pub use paceline_cluster::nodes::RecordId as InstanceId;
pub use paceline_cluster::nodes::registers::EPOCH_UNWANTED;
pub use report::{Report, State, has_failed, report, specs};
pub use rules::{Action, History, ResumeReason, UnloadReason, WriteReason, reconcile};
pub use service_starts::ServiceStarts;
pub use spec::{
    ADAPTERS_MAX, AdapterFile, AdapterNaming, CONTEXT_MAX, DraftOf, InstanceOptions, InstanceSpec,
    MachineOptions, NODES_MAX, NotWeights, SMALL_BYTES, SPARE_AUTO, SPLIT_ANY, WeightDistribution,
};

/// Interval of reconciliation when nothing has changed.
pub const ROUND: std::time::Duration = std::time::Duration::from_secs(1);

/// Parses `bytes` as every kind of record, for fuzzing. Returns for any input.
pub fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<InstanceSpec>(bytes);
    let _ = serde_json::from_slice::<Report>(bytes);
}
