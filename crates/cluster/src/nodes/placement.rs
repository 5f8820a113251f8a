//! Ownership of instances: each node decides alone, from the map and the lives of nodes.
//!
//! An instance's spec names its nodes, the leader's first, and an order of *successors*. The owner
//! is the first node. When the owner is dead, the first live successor writes a record of the next
//! epoch with itself as owner.
//!
//! No vote is needed. Two sides of a partition may write two records of one epoch; the later write
//! wins when they merge. A node that is no longer the owner ends its workers. An unloaded instance
//! has a tombstone of the highest epoch, so that no takeover restores it.
//!
//! A node may *lease* an instance to a program of its machine. The instance is useless after the
//! node is dead: see [`abandoned`].

use std::collections::BTreeMap;

use paceline_base::KernelClass;
use serde::{Deserialize, Serialize};

pub use super::RecordId as InstanceId;
use super::agent::NodeFacts;
use super::member::Life;
use super::reach::BrokenPairs;
pub use super::registers::EPOCH_UNWANTED;
use super::{NodeId, RegisterKey, Registers};

/// The split that fits any number of nodes.
pub const SPLIT_ANY: &str = "auto";

/// Default of `spare`: one standby, if memory allows.
pub const SPARE_AUTO: u16 = u16::MAX;

/// Most nodes of an instance.
pub const NODES_MAX: usize = 64;

/// Specification of an instance, as recorded in the shared map. A node of a build without one of
/// the fields with a default drops it when it writes the next record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceSpec {
    /// The model's name, as its user gave it.
    pub model: String,
    /// Names that clients call it by instead of `model`: its id, then aliases. Empty for `model`
    /// alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// SHA-256 of the model's file, or of its manifest, in hexadecimal digits.
    pub sha256: String,
    /// Bytes of the model's files.
    pub bytes: u64,
    /// Bytes of its weights in MLX's form; 0 for one on the CPU.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub weight_bytes: u64,
    /// Bytes of keys and values of all its ranks in devices' memory; 0 for one on the CPU, whose
    /// memory is taken on use.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cache_bytes: u64,
    /// Whether the model has several files, listed in a manifest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub manifest: bool,
    /// Nodes of its ranks, in rank order; the first is the owner.
    pub nodes: Vec<NodeId>,
    /// The next owners; the first live one takes over.
    pub successors: Vec<NodeId>,
    /// Whether its user named the nodes, so that flapping ones are readmitted.
    #[serde(default)]
    pub named: bool,
    /// The split, as `--split` names it.
    pub split: String,
    /// Whether the owner relays between nodes that cannot speak. The split is then a pipeline, on
    /// nodes that the owner reaches.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub relayed: bool,
    /// Decode tokens in a thousand seconds that each split of `nodes` is predicted to give, where
    /// the user left the split open; empty otherwise.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub predicted: BTreeMap<String, u64>,
    /// Threads of each worker.
    pub threads: u16,
    #[serde(flatten)]
    pub options: InstanceOptions,
    /// Standby copies of each shard on other nodes: 0, 1 or [`SPARE_AUTO`].
    #[serde(default)]
    pub spare: u16,
    /// Requested number of nodes: after a loss it has fewer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<u16>,
    /// Number of this instance among the replicas of its model, from 1; 0 if it was loaded alone.
    #[serde(default)]
    pub replica: u16,
    /// A node with the model's file, from which an owner without it copies it.
    #[serde(default)]
    pub source: Option<NodeId>,
    /// The node that leases it to a program of its machine, until the program ends. `None` if it
    /// stays until it is unloaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lender: Option<NodeId>,
    /// The draft model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftOf>,
    /// Adapters of the model, which answer too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterFile>,
    /// Names that adapters answer by.
    #[serde(default, skip_serializing_if = "AdapterNaming::is_default")]
    pub adapter_naming: AdapterNaming,
    /// Options for the workers of an instance on one machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineOptions>,
    /// Whether autoscaling added it: it ends when it is idle.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub added: bool,
    /// Prefill nodes; none of `nodes` or of the successors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prompts: Vec<NodeId>,
    /// Kernel class of the prefill nodes; empty for that of the others.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub prompts_class: String,
    /// Kernel class of its nodes; empty for `cpu`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub class: String,
    /// Kernel classes of nodes that compute with another one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub classes: BTreeMap<NodeId, String>,
    /// Relative parts of its nodes, as they were planned; equal if one of the nodes has none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub shares: BTreeMap<NodeId, u32>,
    /// Bytes of each node's rank, as its worker admits it, where some ranks are on MLX. Empty on
    /// the CPU; without effect for other nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub needs: BTreeMap<NodeId, u64>,
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands over a reference"
)]
const fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// Options that a request to load states and the instance's record keeps unchanged. Both flatten
/// them into their JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InstanceOptions {
    /// Positions of a sequence, `None` for the default.
    pub context: Option<u32>,
    /// Answers computed concurrently.
    pub parallel: u16,
    /// Most draft tokens verified in a step; `None` for the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafts: Option<u8>,
    /// Whether slower nodes shift part of their share to the others.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub follow: bool,
    /// Whether load adds and removes replicas of it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub grows: bool,
    /// Distribution of the model file over the nodes.
    #[serde(skip_serializing_if = "WeightDistribution::is_auto")]
    pub weights: WeightDistribution,
    /// Whether an answer in a near kernel class ends with a failure instead of continuing with
    /// other bits.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub strict: bool,
}

impl Default for InstanceOptions {
    fn default() -> Self {
        Self {
            context: None,
            parallel: 4, // a step reads the weights once for all
            drafts: None,
            follow: false,
            grows: false,
            weights: WeightDistribution::Auto,
            strict: false,
        }
    }
}

/// Options of an instance on one machine, as `up` takes them. Texts are those of its options. They
/// have no effect once the instance is on several nodes, but for `kv` and `pace`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MachineOptions {
    /// Worker processes, each a rank; 0 is 1.
    pub ranks: u32,
    /// Relative part of each rank; empty for equal parts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<u32>,
    /// Kernel class of each rank; empty for that of the node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// Transport between the ranks; empty for any.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub transport: String,
    /// Further processes for prefill only.
    pub prefill_ranks: u32,
    /// Uncached tokens from which these read a prompt; `None`: where they are faster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_from: Option<u32>,
    /// Their kernel class, if not that of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_class: Option<String>,
    /// Type of keys and values, if not that of the class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv: Option<String>,
    /// Target for the time of a step; empty for the default.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pace: String,
    /// Whether each thread has a core of its own.
    pub pin: bool,
}

/// Names that the adapters of an instance answer by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AdapterNaming {
    /// The model's name, a colon and the adapter's.
    #[default]
    Qualified,
    /// The adapter's name, and the qualified one.
    Bare,
    /// The model's names: the only adapter answers in its place.
    Model,
}

impl AdapterNaming {
    /// Whether it is the default.
    #[allow(
        clippy::trivially_copy_pass_by_ref,
        reason = "serde hands over a reference"
    )]
    const fn is_default(&self) -> bool {
        matches!(self, Self::Qualified)
    }
}

/// How a model file is distributed over the nodes of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightDistribution {
    /// All of a small file; of a large file, the part that each node computes with. Once the
    /// instance answers, the first successor gets the rest, so that the loss of the owner loses no
    /// weights.
    #[default]
    Auto,
    /// Only the part that each node computes with.
    Shard,
    /// All of it, before the load.
    Whole,
}

/// The largest file in bytes that [`WeightDistribution::Auto`] copies whole to every node: two
/// seconds at 1 Gbit/s.
pub const SMALL_BYTES: u64 = 256 << 20;

impl WeightDistribution {
    /// Whether it is the default.
    #[allow(
        clippy::trivially_copy_pass_by_ref,
        reason = "serde hands over a reference"
    )]
    const fn is_auto(&self) -> bool {
        matches!(self, Self::Auto)
    }

    /// Whether each node only gets its part of a file of `bytes` bytes.
    pub const fn in_parts(self, bytes: u64) -> bool {
        match self {
            Self::Auto => bytes > SMALL_BYTES,
            Self::Shard => true,
            Self::Whole => false,
        }
    }
}

/// The text names no distribution of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected auto, shard or whole")]
pub struct NotWeights;

impl std::str::FromStr for WeightDistribution {
    type Err = NotWeights;

    fn from_str(text: &str) -> Result<Self, NotWeights> {
        match text {
            "auto" => Ok(Self::Auto),
            "shard" => Ok(Self::Shard),
            "whole" => Ok(Self::Whole),
            _ => Err(NotWeights),
        }
    }
}

/// The draft model of an instance, for speculative decoding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftOf {
    /// The model's name, as its user gave it.
    pub model: String,
    /// SHA-256 of its file, or of its manifest, in hexadecimal digits.
    pub sha256: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// Whether it has several files, listed in a manifest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub manifest: bool,
}

/// Most adapters of an instance: each takes some 150 bytes of a record, which may have 16 KiB.
pub const ADAPTERS_MAX: usize = 32;

/// An adapter of an instance's model: one GGUF file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterFile {
    /// The name by which requests select it, after the model's.
    pub name: String,
    /// SHA-256 of its file, in hexadecimal digits.
    pub sha256: String,
    pub bytes: u64,
}

impl InstanceSpec {
    /// Name of the kernel class of a node's ranks, also of a node that joins later.
    pub fn class_of(&self, node: NodeId) -> &str {
        let reads = !self.prompts_class.is_empty() && self.prompts.contains(&node);
        let class = match reads {
            true => &self.prompts_class,
            false => self.classes.get(&node).unwrap_or(&self.class),
        };
        match class.is_empty() {
            true => KernelClass::default().name(),
            false => class,
        }
    }

    /// Whether a node has the engine for its class, as its facts list it. The CPU's needs nothing.
    pub fn fits_engine(&self, node: NodeId, facts: &NodeFacts) -> bool {
        !self.is_on_mlx(node) || facts.has_engine("mlx")
    }

    /// Whether MLX computes the ranks of a node.
    pub fn is_on_mlx(&self, node: NodeId) -> bool {
        let class: Result<KernelClass, _> = self.class_of(node).parse();
        class.is_ok_and(KernelClass::is_mlx)
    }

    /// The most of `nodes` that can have ranks of it together, with the first of them.
    pub fn together(&self, broken: &BrokenPairs, nodes: &[NodeId]) -> Vec<NodeId> {
        match self.relayed {
            true => broken.reached(nodes),
            false => broken.group(nodes),
        }
    }

    /// Whether it has several nodes and MLX computes on one of them, which allows no split of a
    /// stage between classes.
    pub fn splits_on_mlx(&self) -> bool {
        self.nodes.len() > 1 && self.nodes.iter().any(|id| self.is_on_mlx(*id))
    }

    /// The classes of its nodes in rank order, as `cpu` or `mlx+cpu`. Equal texts state equal
    /// numbers only where every class is exact.
    pub fn class_names(&self) -> String {
        let ranks = self.on_one_machine().map(|machine| &machine.classes);
        let mut names: Vec<&str> = match ranks.filter(|classes| !classes.is_empty()) {
            Some(classes) => classes.iter().map(String::as_str).collect(),
            None => self.nodes.iter().map(|id| self.class_of(*id)).collect(),
        };
        names.dedup();
        names.join("+")
    }

    /// Name of its numbers, where `decoding` names those of its decode nodes, if they have a name.
    /// A class of prefill nodes that differs from theirs precedes it, as in `mlx-f32>cpu-f32`.
    pub fn numbers_name(&self, decoding: Option<String>) -> Option<String> {
        let reader = self.prompts.first().map(|id| self.class_of(*id));
        let other = reader.filter(|reader| *reader != self.class_of(self.nodes[0]));
        match other {
            Some(reader) => {
                let decoding = decoding.unwrap_or_else(|| self.class_names());
                Some(format!("{reader}>{decoding}"))
            }
            None => decoding,
        }
    }

    /// The name that clients call it by.
    pub fn id(&self) -> &str {
        self.names.first().unwrap_or(&self.model)
    }

    /// Whether clients or its user call it so.
    pub fn is_called(&self, name: &str) -> bool {
        self.model == name || self.names.iter().any(|own| own == name)
    }

    /// The qualified name of an adapter of this model.
    pub fn adapted(&self, adapter: &str) -> String {
        format!("{}:{adapter}", self.id())
    }

    /// The options for its workers while it is on one machine.
    pub fn on_one_machine(&self) -> Option<&MachineOptions> {
        self.machine.as_ref().filter(|_| self.nodes.len() == 1)
    }

    /// The options for a file that every node needs whole.
    fn whole(&self) -> InstanceOptions {
        InstanceOptions {
            weights: WeightDistribution::Whole,
            ..self.options
        }
    }

    /// The spec with each adapter in place of the model, to find and copy its file.
    pub fn of_adapters(&self) -> impl Iterator<Item = Self> {
        self.adapters.iter().map(|adapter| Self {
            model: self.adapted(&adapter.name),
            names: Vec::new(),
            sha256: adapter.sha256.clone(),
            bytes: adapter.bytes,
            manifest: false,
            draft: None,
            adapters: Vec::new(),
            options: self.whole(),
            prompts: Vec::new(), // prefill uses the model only
            ..self.clone()
        })
    }

    /// The spec with each file that its nodes need in place of the model: the model, its draft, its
    /// adapters.
    pub fn files(self) -> impl Iterator<Item = Self> {
        let (draft, adapters) = (self.of_draft(), self.of_adapters().collect::<Vec<_>>());
        std::iter::once(self).chain(draft).chain(adapters)
    }

    /// The spec with the draft model in place of the model, to find and copy its file. `None`
    /// without a draft.
    pub fn of_draft(&self) -> Option<Self> {
        let DraftOf {
            model,
            sha256,
            bytes,
            manifest,
        } = self.draft.clone()?;
        Some(Self {
            model,
            names: Vec::new(),
            sha256,
            bytes,
            manifest,
            draft: None,
            adapters: Vec::new(),
            options: self.whole(),
            prompts: Vec::new(), // prefill uses the model only
            ..self.clone()
        })
    }
}

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

/// A task of a node about an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Own it: keep it running by its record.
    Own {
        id: InstanceId,
        /// Epoch of the record.
        epoch: u64,
        wanted: InstanceSpec,
    },
    /// Write this record: its owner is dead and this node is next.
    TakeOver {
        id: InstanceId,
        /// The next epoch.
        epoch: u64,
        /// The next record.
        wanted: InstanceSpec,
    },
}

/// The instances in the map: id, epoch and spec.
pub fn wanted(map: &Registers) -> impl Iterator<Item = (InstanceId, u64, InstanceSpec)> + '_ {
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

/// The duties of node `this_process` now, in order of ids. An instance whose lending node is dead
/// has no takeover.
pub fn duties(map: &Registers, own: NodeId, life: impl Fn(NodeId) -> Life) -> Vec<Duty> {
    let lives = |id: &NodeId| matches!(life(*id), Life::Alive | Life::Suspect);
    wanted(map)
        .filter_map(|(id, epoch, wanted)| {
            if wanted.nodes[0] == own {
                return Some(Duty::Own { id, epoch, wanted });
            }
            let is_next = acting(&wanted, lives) == Some(own);
            (is_next && !has_lost_lender(&wanted, lives)).then(|| Duty::TakeOver {
                id,
                epoch: epoch + 1,
                wanted: succeed(wanted, own, &lives),
            })
        })
        .collect()
}

/// The leased instances whose lending node is dead or has left, and which `this_process` must
/// unload as their owner or first live successor. In order of ids.
pub fn abandoned(map: &Registers, own: NodeId, life: impl Fn(NodeId) -> Life) -> Vec<InstanceId> {
    let lives = |id: &NodeId| matches!(life(*id), Life::Alive | Life::Suspect);
    wanted(map)
        .filter(|(.., wanted)| has_lost_lender(wanted, lives))
        .filter(|(.., wanted)| acting(wanted, lives) == Some(own))
        .map(|(id, ..)| id)
        .collect()
}

/// The instances with ranks on a node, for people; `None` for none.
pub fn work(map: &Registers, own: NodeId) -> Option<String> {
    let own = wanted(map).filter(|(.., wanted)| wanted.nodes.contains(&own));
    let models: Vec<String> = own.map(|(.., wanted)| wanted.model).collect();
    let models = (!models.is_empty()).then(|| models.join(", "));
    models.map(|models| format!("this node's cluster has instances: {models}"))
}

/// The owner, or the first live successor of a dead one.
fn acting(wanted: &InstanceSpec, lives: impl Fn(&NodeId) -> bool) -> Option<NodeId> {
    let mut order = wanted.nodes[..1].iter().chain(&wanted.successors);
    order.find(|id| lives(id)).copied()
}

fn has_lost_lender(wanted: &InstanceSpec, lives: impl Fn(&NodeId) -> bool) -> bool {
    wanted.lender.is_some_and(|lender| !lives(&lender))
}

/// The split for fewer nodes. A kind stays as it is; sizes, as in `2x2`, would not fit.
pub fn split_of_fewer(split: String) -> String {
    match split.contains(|c: char| c.is_ascii_digit()) {
        true => SPLIT_ANY.to_owned(),
        false => split,
    }
}

/// The spec after its owner died: on the live nodes, `this_process` first.
fn succeed(
    mut wanted: InstanceSpec,
    own: NodeId,
    lives: &impl Fn(&NodeId) -> bool,
) -> InstanceSpec {
    let former = wanted.nodes[0];
    wanted.split = split_of_fewer(wanted.split);
    let others = wanted.nodes.iter().filter(|id| **id != own && lives(id));
    wanted.nodes = std::iter::once(own).chain(others.copied()).collect();
    wanted.successors.retain(|id| *id != own);
    // A returning former owner comes after all others.
    wanted.successors.retain(|id| *id != former);
    wanted.successors.push(former);
    wanted.prompts.retain(|id| *id != own);
    wanted
}

/// The spec without `leaver`, on the live nodes that stay. The owner stays; a leaving owner is
/// replaced by the first live successor, or the first of `others`. `None` if no node is left.
pub fn without(
    mut wanted: InstanceSpec,
    leaver: NodeId,
    others: &[NodeId],
    life: impl Fn(NodeId) -> Life,
) -> Option<InstanceSpec> {
    let stays = |id: &NodeId| *id != leaver && life(*id) == Life::Alive;
    let owner = wanted.nodes.first().copied().filter(stays);
    let after = wanted.successors.iter().chain(others).copied();
    let owner = owner.or_else(|| after.into_iter().find(stays))?;
    let (before, nodes) = (wanted.nodes.len(), std::mem::take(&mut wanted.nodes));
    let rest = nodes.into_iter().filter(|id| *id != owner && stays(id));
    wanted.nodes = std::iter::once(owner).chain(rest).collect();
    if wanted.nodes.len() != before {
        wanted.split = split_of_fewer(wanted.split);
    }
    wanted.successors.retain(|id| *id != owner && *id != leaver);
    // It may return, and then comes after all others.
    wanted.successors.push(leaver);
    wanted.prompts.retain(|id| *id != owner && *id != leaver);
    Some(wanted)
}

#[cfg(test)]
mod tests {
    use super::super::registers::Register;
    use super::super::{HybridTimestamp, NodeId};
    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    fn map(epoch: u64, nodes: &[u8], successors: &[u8]) -> Registers {
        lent_map(epoch, nodes, successors, None)
    }

    fn lent_map(epoch: u64, nodes: &[u8], successors: &[u8], lender: Option<u8>) -> Registers {
        let wanted = InstanceSpec {
            model: "smollm2".into(),
            nodes: nodes.iter().map(|number| node(*number)).collect(),
            successors: successors.iter().map(|number| node(*number)).collect(),
            split: "auto".into(),
            threads: 1,
            lender: lender.map(node),
            ..InstanceSpec::default()
        };
        let stamp = HybridTimestamp {
            ms: 1,
            count: 0,
            node: node(1),
        };
        let register = Register {
            epoch,
            stamp,
            value: Some(serde_json::to_string(&wanted).unwrap()),
        };
        Registers::from_entries([(RegisterKey::Record(InstanceId(5)), register)])
    }

    fn lives(living: &'static [u8]) -> impl Fn(NodeId) -> Life {
        move |id| {
            if living.contains(&id.0[0]) {
                Life::Alive
            } else {
                Life::Dead
            }
        }
    }

    #[test]
    fn the_first_successor_that_lives_takes_over() {
        let map = map(3, &[1, 2, 3], &[2, 3, 4]);
        let owns = duties(&map, node(1), lives(&[1, 2, 3, 4]));
        assert!(
            matches!(&owns[..], [Duty::Own { epoch: 3, .. }]),
            "{owns:?}"
        );
        for other in [2, 3, 4] {
            assert_eq!(duties(&map, node(other), lives(&[1, 2, 3, 4])), []);
        }
        assert_eq!(duties(&map, node(4), lives(&[3, 4])), [], "3 is before it");
        let takes = duties(&map, node(3), lives(&[3, 4]));
        let [
            Duty::TakeOver {
                epoch: 4, wanted, ..
            },
        ] = &takes[..]
        else {
            panic!("{takes:?}");
        };
        assert_eq!(wanted.nodes, [node(3)], "on those that live");
        assert_eq!(wanted.successors, [node(2), node(4), node(1)]);
    }

    #[test]
    fn a_direction_of_a_split_outlives_a_loss() {
        for (split, after) in [
            ("auto", "auto"),
            ("pipeline", "pipeline"),
            ("2x2", "auto"),
            ("2x2-experts", "auto"),
        ] {
            assert_eq!(split_of_fewer(split.to_owned()), after);
        }
    }

    #[test]
    fn a_lent_instance_is_unloaded_by_its_owner_or_the_next_once_its_lender_is_dead() {
        let map = lent_map(3, &[1, 2], &[2, 3], Some(4));
        let to_unload = |own, living| abandoned(&map, node(own), lives(living));
        let all = [1, 2, 3, 4];
        assert!(
            all.iter()
                .all(|own| to_unload(*own, &[1, 2, 3, 4]).is_empty())
        );
        assert_eq!(to_unload(1, &[1, 2, 3]), [InstanceId(5)]);
        assert_eq!(to_unload(2, &[1, 2, 3]), [], "its owner does");
        assert_eq!(to_unload(2, &[2, 3]), [InstanceId(5)]);
        assert_eq!(to_unload(3, &[2, 3]), [], "2 is before it");
        assert_eq!(duties(&map, node(2), lives(&[2, 3])), [], "for nobody");
        assert_eq!(duties(&map, node(2), lives(&[2, 3, 4])).len(), 1);
        let kept = lent_map(3, &[1, 2], &[2], None);
        assert_eq!(abandoned(&kept, node(1), lives(&[1])), []);
    }

    #[test]
    fn records_without_a_lender_are_read_and_written_as_before() {
        let (_, _, before) = wanted(&map(3, &[1], &[2])).next().unwrap();
        let text = serde_json::to_string(&before).unwrap();
        assert!(!text.contains("lender"), "{text}");
        assert_eq!(serde_json::from_str::<InstanceSpec>(&text).unwrap(), before);
        let lent = InstanceSpec {
            lender: Some(node(4)),
            ..before
        };
        let text = serde_json::to_string(&lent).unwrap();
        assert_eq!(serde_json::from_str::<InstanceSpec>(&text).unwrap(), lent);
    }

    #[test]
    fn a_draft_is_kept_in_the_record_and_has_one_of_its_own() {
        let (_, _, plain) = wanted(&map(3, &[1], &[2])).next().unwrap();
        assert_eq!(plain.of_draft(), None);
        let text = serde_json::to_string(&plain).unwrap();
        assert!(
            !text.contains("draft") && !text.contains("follow") && !text.contains("weights"),
            "{text}"
        );
        let draft = DraftOf {
            model: "small".into(),
            sha256: "00".into(),
            bytes: 7,
            manifest: false,
        };
        let guessed = InstanceSpec {
            draft: Some(draft),
            adapters: vec![AdapterFile {
                name: "poet".into(),
                sha256: "11".into(),
                bytes: 5,
            }],
            options: InstanceOptions {
                drafts: Some(4),
                follow: true,
                grows: true,
                weights: WeightDistribution::Shard,
                ..plain.options
            },
            added: true,
            ..plain.clone()
        };
        let text = serde_json::to_string(&guessed).unwrap();
        assert_eq!(
            serde_json::from_str::<InstanceSpec>(&text).unwrap(),
            guessed
        );
        let of_draft = guessed.of_draft().unwrap();
        assert_eq!((of_draft.model.as_str(), of_draft.bytes), ("small", 7));
        assert_eq!(of_draft.nodes, plain.nodes);
        let told = |file: InstanceSpec| (file.sha256.clone(), file.adapters.len(), file.bytes);
        let files: Vec<_> = guessed.clone().files().map(told).collect();
        let own = (guessed.sha256.clone(), 1, guessed.bytes);
        assert_eq!(files, [own, ("00".into(), 0, 7), ("11".into(), 0, 5)]);
        let poet = guessed.of_adapters().next().unwrap();
        assert_eq!(poet.model, guessed.adapted("poet"));
    }

    #[test]
    fn large_files_are_had_in_parts() {
        let parts = |text: &str, bytes| {
            text.parse::<WeightDistribution>()
                .map(|it| it.in_parts(bytes))
        };
        assert_eq!(parts("auto", SMALL_BYTES), Ok(false));
        assert_eq!(parts("auto", SMALL_BYTES + 1), Ok(true));
        assert_eq!(parts("shard", 1), Ok(true));
        assert_eq!(parts("whole", u64::MAX), Ok(false));
        assert_eq!(parts("half", 1), Err(NotWeights));
    }

    #[test]
    fn work_moves_to_those_that_stay() {
        let of = |nodes: &[u8], successors: &[u8], living| {
            let (_, _, before) = wanted(&map(3, nodes, successors)).next().unwrap();
            without(before, node(1), &[node(9)], lives(living))
        };
        let nodes =
            |wanted: &InstanceSpec| -> Vec<u8> { wanted.nodes.iter().map(|id| id.0[0]).collect() };
        let owner = of(&[1, 2, 3], &[2, 3], &[1, 2, 3]).unwrap();
        assert_eq!(nodes(&owner), [2, 3]);
        assert_eq!(owner.successors, [node(3), node(1)]);
        let member = of(&[2, 1, 3], &[1, 3], &[1, 2, 3]).unwrap();
        assert_eq!(nodes(&member), [2, 3], "its owner stays");
        assert_eq!(member.successors, [node(3), node(1)]);
        assert_eq!(nodes(&of(&[1, 2], &[2, 3], &[1, 3]).unwrap()), [3]);
        assert_eq!(nodes(&of(&[1], &[], &[1, 9]).unwrap()), [9]);
        assert_eq!(of(&[1, 2], &[2], &[1]), None);
    }

    #[test]
    fn records_of_earlier_versions_are_read() {
        let (_, _, record) = wanted(&map(3, &[1], &[])).next().unwrap();
        let mut value = serde_json::to_value(&record).unwrap();
        let fields = value.as_object_mut().unwrap();
        for later in ["named", "spare", "replica", "source"] {
            assert!(fields.remove(later).is_some(), "{later}");
        }
        assert_eq!(
            serde_json::from_value::<InstanceSpec>(value).unwrap(),
            record
        );
    }

    #[test]
    fn the_format_of_records_stays() {
        let plain = r#"{"model":"m","sha256":"","bytes":0,"nodes":[],"successors":[],"named":false,
            "split":"auto","threads":2,"context":null,"parallel":4,"spare":0,"replica":0,
            "source":null}"#;
        let mut text = plain.replace(['\n', ' '], "");
        let mut record: InstanceSpec = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        let set = r#","drafts":3,"follow":true,"grows":true,"weights":"shard","strict":true}"#;
        text.replace_range(text.len() - 1.., set);
        record.options = InstanceOptions {
            drafts: Some(3),
            follow: true,
            grows: true,
            weights: WeightDistribution::Shard,
            strict: true,
            ..record.options
        };
        assert_eq!(serde_json::from_str::<InstanceSpec>(&text).unwrap(), record);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_value(&record).unwrap(), value);
    }

    #[test]
    fn records_that_are_none_are_nobodys() {
        for value in ["", "null", "{}", r#"{"model":"x","nodes":[]}"#] {
            let (ms, count, own) = (1, 0, node(1));
            let register = Register {
                epoch: 3,
                stamp: HybridTimestamp {
                    ms,
                    count,
                    node: own,
                },
                value: Some(value.to_owned()),
            };
            let key = RegisterKey::Record(InstanceId(5));
            let bad = Registers::from_entries([(key, register)]);
            assert_eq!(duties(&bad, node(1), lives(&[1])), []);
        }
        assert_eq!(duties(&map(3, &[], &[1]), node(1), lives(&[1])), []);
    }
}
