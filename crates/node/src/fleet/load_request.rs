//! A user's request to load a model.

use std::path::PathBuf;

use paceline_fleet::{AdapterNaming, InstanceOptions, MachineOptions};
use paceline_model::SplitKind;
use serde::{Deserialize, Serialize};

use crate::classes::Engines;

/// A user's request to load a model: the JSON of the commands `load`, `preview` and `borrow`.
/// Clients copy `nodes` and `split` from a preview's placement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoadRequest {
    /// The user's name for the model.
    pub model: String,
    /// Names or ids of nodes.
    pub nodes: Vec<String>,
    /// Number of nodes if `nodes` is empty. By default 1, in a preview any number.
    pub count: Option<usize>,
    /// Kind of split: tensor, pipeline or both.
    pub split: SplitKind,
    /// Engine of each node, or one for all; by default MLX where all nodes have a GPU for it, else
    /// the CPU.
    pub engine: Option<Engines>,
    /// Kernel class of the nodes whose engine has it; by default the engine's own.
    pub class: Option<String>,
    /// Threads of each worker; by default all cores of this machine.
    pub threads: Option<u16>,
    #[serde(flatten)]
    pub options: InstanceOptions,
    /// Standby copies of each shard on other nodes, 0 or 1; by default 1 if memory allows.
    pub spare: Option<u16>,
    /// Whole copies of the model, each an instance of its own; 0 is 1. Each has `count` nodes, or
    /// an equal share of `nodes`.
    pub replicas: u16,
    /// The user's name for the draft model of speculative decoding.
    pub draft: Option<String>,
    /// Adapters of the model: names, and their paths on this machine.
    pub adapters: Vec<(String, PathBuf)>,
    /// As of the record.
    pub names: Vec<String>,
    pub adapter_naming: AdapterNaming,
    pub machine: Option<MachineOptions>,
    /// Names or ids of nodes for prefill only.
    pub prefill_nodes: Vec<String>,
    /// Kernel class of these; by default that of the others.
    pub prefill_class: Option<String>,
}
