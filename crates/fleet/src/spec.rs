//! The record of an instance in the shared map: what its user asked for, and on which nodes.

use std::collections::BTreeMap;

use paceline_base::KernelClass;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::NodeFacts;
use paceline_cluster::nodes::reach::BrokenPairs;
use serde::{Deserialize, Serialize};

/// The split that fits any number of nodes.
pub const SPLIT_ANY: &str = "auto";

/// Default of `spare`: one standby, if memory allows.
pub const SPARE_AUTO: u16 = u16::MAX;

/// Most nodes of an instance.
pub const NODES_MAX: usize = 64;

/// Specification of an instance, as recorded in the shared map. Fields that a later release adds
/// have defaults; an earlier one ignores them and keeps them in `rest`.
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
    pub split: String,
    /// Whether the owner relays between nodes that cannot speak. The split is then a pipeline, on
    /// nodes that the owner reaches.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub relayed: bool,
    /// Decode tokens in a thousand seconds that each split of `nodes` is predicted to give, where
    /// the user left the split open; empty otherwise.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub predicted: BTreeMap<String, u64>,
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftOf>,
    /// Adapters of the model, which answer too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterFile>,
    /// Names that adapters answer by.
    #[serde(default, skip_serializing_if = "AdapterNaming::is_default")]
    pub adapter_naming: AdapterNaming,
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
    /// Fields of other releases.
    #[serde(flatten)]
    pub rest: BTreeMap<String, serde_json::Value>,
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
    /// Positions of a sequence, [`CONTEXT_MAX`] for those of the model, `None` for the default.
    pub context: Option<u32>,
    /// Answers computed concurrently.
    pub parallel: u16,
    /// Most bytes of each node's memory for it. Weights that do not fit are read from disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
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
            memory: None,
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

/// Positions of a sequence that stand for all that the model was trained for.
pub const CONTEXT_MAX: u32 = u32::MAX;

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

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> InstanceSpec {
        InstanceSpec {
            model: "smollm2".into(),
            nodes: vec![NodeId([1; 16])],
            successors: vec![NodeId([2; 16])],
            split: "auto".into(),
            threads: 1,
            ..InstanceSpec::default()
        }
    }

    #[test]
    fn records_without_a_lender_are_read_and_written_as_before() {
        let before = plain();
        let text = serde_json::to_string(&before).unwrap();
        assert!(!text.contains("lender"), "{text}");
        assert_eq!(serde_json::from_str::<InstanceSpec>(&text).unwrap(), before);
        let lent = InstanceSpec {
            lender: Some(NodeId([4; 16])),
            ..before
        };
        let text = serde_json::to_string(&lent).unwrap();
        assert_eq!(serde_json::from_str::<InstanceSpec>(&text).unwrap(), lent);
    }

    #[test]
    fn fields_of_a_later_release_are_kept() {
        let mut text = serde_json::to_value(plain()).unwrap();
        text["horizon"] = serde_json::json!({ "far": [1, 2] });
        let mut read: InstanceSpec = serde_json::from_value(text.clone()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), text);
        read.threads = 2;
        text["threads"] = 2.into();
        assert_eq!(serde_json::to_value(&read).unwrap(), text, "changed here");
    }

    #[test]
    fn a_draft_is_kept_in_the_record_and_has_one_of_its_own() {
        let plain = plain();
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
    fn records_of_earlier_versions_are_read() {
        let record = plain();
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
}
