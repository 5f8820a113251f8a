//! Published measurements and the model's prediction for each.
//!
//! Rows come from TOML files in the tree. [`mod@crate::fit`] fits constants to some, and
//! [`mod@crate::validate`] scores all.

use serde::{Deserialize, Deserializer};

use crate::calibration::family;
use crate::catalogue::{Catalogue, HardwareEntry, LinkKind, ModelEntry, parse};
use crate::cost::Costs;
use crate::placement::{Pipeline, PipelineStage, Placement, Split};
use crate::predict::{Prediction, predict};
use crate::{
    Backend, CHUNK, Calibration, Cluster, ClusterNode, Error, LinkTransport, ModelShape, NodeLink,
    Workload,
};

/// The rows in the tree.
pub const BUILTIN: &str = include_str!("../data/published.toml");

/// Machines of one kind in a row.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Machines {
    /// The catalogue's name.
    pub kind: String,
    pub count: u32,
    /// Memory of each in GB, where the catalogue has the machine with other memory only.
    pub memory_gb: Option<f64>,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct PublishedRow {
    /// Unique.
    pub id: String,
    /// The catalogue's name of the model.
    #[serde(default)]
    pub model: String,
    /// The published name.
    #[serde(default)]
    pub quantization: String,
    /// Stored bits per weight on average.
    pub bits: Option<f64>,
    /// Bits of everything but routed experts, where these are stored in fewer.
    pub rest_bits: Option<f64>,
    #[serde(default)]
    pub hardware: Vec<Machines>,
    /// Machines altogether; 0 when not stated.
    #[serde(default = "stated")]
    pub n_nodes: u32,
    /// The catalogue's name of the link.
    #[serde(default = "unknown")]
    pub interconnect: String,
    /// `single`, `pipeline`, `tensor`, `expert`, `disaggregated` or `unknown`.
    #[serde(default = "unknown")]
    pub strategy: String,
    /// The published name.
    #[serde(default = "unknown")]
    pub framework: String,
    /// A number of requests, or `multi`.
    #[serde(default = "one_request", deserialize_with = "number_or_word")]
    pub concurrency: String,
    /// `decode_tok_s`, `prefill`, `ttft_s`, `speedup` or `train_tok_s`.
    pub metric: String,
    pub value: f64,
    /// Share of time spent communicating.
    pub comm_share: Option<f64>,
    /// Watts of all nodes.
    pub power_w: Option<f64>,
    pub prompt_tokens: Option<u32>,
    /// Answer tokens.
    pub output_tokens: Option<u32>,
    /// Threads, for processors.
    pub threads: Option<u32>,
    /// Whether everything needed is known.
    #[serde(default)]
    pub complete: bool,
    /// `fit` or `held_out`.
    #[serde(default = "held_out")]
    pub split: String,
    /// `high`, `medium` or `low`.
    #[serde(default = "unknown")]
    pub confidence: String,
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn held_out() -> String {
    "held_out".to_owned()
}

fn one_request() -> String {
    "1".to_owned()
}

const fn stated() -> u32 {
    1
}

/// `concurrency = 8` and `concurrency = "8"` mean the same.
fn number_or_word<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(u32),
        Word(String),
    }
    Ok(match Either::deserialize(from)? {
        Either::Number(number) => number.to_string(),
        Either::Word(word) => word,
    })
}

/// A file of rows and what they refer to.
#[derive(Clone, Debug, Deserialize)]
pub struct Published {
    #[serde(rename = "measurement", default)]
    pub rows: Vec<PublishedRow>,
    #[serde(default)]
    hardware: Vec<HardwareEntry>,
    #[serde(default)]
    link: Vec<LinkKind>,
    #[serde(default)]
    model: Vec<ModelEntry>,
}

/// Figures that the model predicts for a row.
#[derive(Clone, Debug, PartialEq)]
pub struct RowPrediction {
    /// In the row's metric.
    pub value: f64,
    /// Share of communication in a token.
    pub comm_share: f64,
    /// Watts, where known.
    pub watts: Option<f64>,
}

/// Why a row cannot be predicted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Skip {
    #[error("the model's shape is not known")]
    Model,
    #[error("bits per weight are not stated")]
    Bits,
    #[error("the machines are not known")]
    Machines,
    /// The weights are larger than the memory that is stated, so something else was used too.
    #[error("the weights are larger than the memory stated")]
    Memory,
    #[error("the strategy is not known")]
    Strategy,
    /// The metric needs what is not stated, or is none of ours.
    #[error("the metric {0:?} cannot be predicted from what is stated")]
    Metric(String),
    #[error("{0}")]
    Refused(Error),
}

/// Rows without a stated answer length are taken for the usual benchmark's 128 tokens from empty.
const OUTPUT: u32 = 128;

/// A row as a question to the cost model.
#[derive(Debug)]
struct Case {
    cluster: Cluster,
    model: ModelShape,
    workload: Workload,
    placement: Placement,
}

impl Published {
    /// Reads a file of rows. Its machines, links and models go before the tree's, which fill gaps.
    ///
    /// # Errors
    /// [`Error::Toml`] with line and column.
    pub fn from_toml(text: &str, what: &str) -> Result<Self, Error> {
        parse(text, what)
    }

    /// The tree's catalogue with the file's entries before it. Where the file's entry lacks a
    /// link's latency, a machine's backend or a model's groups of experts, the tree's number stays.
    pub fn catalogue(&self) -> Result<Catalogue, Error> {
        let mut all = Catalogue::builtin()?;
        let mut links = self.link.clone();
        for link in &mut links {
            if let Ok(known) = all.link(&link.kind) {
                link.latency_us = link.latency_us.or(known.latency_us);
                link.shared |= known.shared;
            }
        }
        let mut models = self.model.clone();
        for model in &mut models {
            let known = all.models.iter().find(|known| known.name == model.name);
            let groups = known.and_then(|known| known.expert_groups);
            model.expert_groups = model.expert_groups.or(groups);
        }
        all.add(Catalogue {
            hardware: self.hardware.clone(),
            links,
            models,
        });
        Ok(all)
    }
}

impl Machines {
    /// The catalogue's facts, or those of a machine of the same family with this one's memory.
    fn entry(&self, catalogue: &Catalogue) -> Option<HardwareEntry> {
        if let Ok(known) = catalogue.machine(&self.kind) {
            return Some(known.clone());
        }
        let own = family(&self.kind);
        let mut all = catalogue.hardware.iter();
        let like = all.find(|known| own != self.kind && family(&known.kind) == own)?;
        let named = self
            .kind
            .get(own.len() + 1..)
            .and_then(|gb| gb.parse().ok());
        Some(HardwareEntry {
            kind: self.kind.clone(),
            memory_gb: self.memory_gb.or(named),
            ..like.clone()
        })
    }
}

impl PublishedRow {
    /// The model's prediction of the published number. `bits` is used where the row states none.
    ///
    /// # Errors
    /// [`Skip`]: what is missing.
    pub fn predict(
        &self,
        catalogue: &Catalogue,
        calibration: &Calibration,
        bits: Option<f64>,
    ) -> Result<RowPrediction, Skip> {
        let case = self.case(catalogue, calibration, bits)?;
        let said = case.predict(calibration).map_err(Skip::Refused)?;
        let none = || Skip::Metric(self.metric.clone());
        let value = match self.metric.as_str() {
            "decode_tok_s" if self.concurrency != "1" => said.throughput_tok_s,
            "decode_tok_s" => said.decode_tok_s,
            "prefill" | "prefill_tok_s" => said.prefill_tok_s.ok_or_else(none)?,
            "ttft_s" if self.prompt_tokens.is_some() => said.ttft_s.ok_or_else(none)?,
            "speedup" => case.speedup(&said, calibration).map_err(Skip::Refused)?,
            _ => return Err(none()),
        };
        Ok(RowPrediction {
            value,
            comm_share: said.comm_share,
            watts: said.watts,
        })
    }

    fn case(
        &self,
        catalogue: &Catalogue,
        calibration: &Calibration,
        bits: Option<f64>,
    ) -> Result<Case, Skip> {
        let entry = catalogue.model(&self.model).map_err(|_| Skip::Model)?;
        let bits = self.bits.or(bits).ok_or(Skip::Bits)?;
        let mut model = entry.shape(bits).map_err(Skip::Refused)?;
        let native = self.quantization.to_lowercase().contains("native");
        if let Some(rest) = self.rest_bits.or(native.then_some(16.0)) {
            model = model.with_native_experts(rest);
        }
        let nodes = self.nodes(catalogue, calibration)?;
        let placement = self.placement(&model, &nodes)?;
        let links = self.links(catalogue, nodes.len());
        let cluster = Cluster {
            name: self.id.clone(),
            nodes,
            links,
        };
        let used = placement.replicas[0].nodes();
        let memory: f64 = used.iter().map(|&node| nodes_memory(&cluster, node)).sum();
        if model.weight_bytes() > memory {
            return Err(Skip::Memory);
        }
        let stages = placement.replicas[0].stages.len();
        Ok(Case {
            workload: self.workload(stages),
            cluster,
            model,
            placement,
        })
    }

    fn nodes(
        &self,
        catalogue: &Catalogue,
        calibration: &Calibration,
    ) -> Result<Vec<ClusterNode>, Skip> {
        let mut nodes = Vec::new();
        for machines in &self.hardware {
            let entry = machines.entry(catalogue).ok_or(Skip::Machines)?;
            for _ in 0..machines.count.min(1024) {
                let name = format!("n{}", nodes.len());
                let mut node = entry
                    .node(&name, self.threads)
                    .map_err(|_| Skip::Machines)?;
                let cpu = node.backend == Backend::Cpu;
                node.engine = calibration.engine_of(&self.framework, cpu).name.clone();
                nodes.push(node);
            }
        }
        // Several processes on one machine: they take turns, so each has all of it.
        if nodes.len() == 1 && self.strategy != "single" {
            let mut twin = nodes[0].clone();
            twin.name = "n1".to_owned();
            nodes.push(twin);
        }
        if self.n_nodes == 0 || nodes.is_empty() {
            return Err(Skip::Machines);
        }
        Ok(nodes)
    }

    /// A mesh. A link that is not named costs nothing here. Its cost is in the engine's boundary
    /// constant, which was fitted on rows whose link is not named either.
    fn links(&self, catalogue: &Catalogue, n_nodes: usize) -> Vec<NodeLink> {
        let free = NodeLink {
            a: 0,
            b: 0,
            kind: "unknown".to_owned(),
            transport: LinkTransport::Tcp,
            alpha: 0.0,
            beta: 1e9,
            shared: false,
        };
        let known = catalogue.link(&self.interconnect).ok();
        let known = known.filter(|link| !matches!(link.kind.as_str(), "unknown" | "none"));
        let pairs = (0..n_nodes).flat_map(|a| (a + 1..n_nodes).map(move |b| (a, b)));
        let join = |(a, b)| match known {
            Some(link) => link.between(a, b),
            None => NodeLink {
                a,
                b,
                ..free.clone()
            },
        };
        pairs.map(join).collect()
    }

    fn placement(&self, model: &ModelShape, nodes: &[ClusterNode]) -> Result<Placement, Skip> {
        let all: Vec<usize> = (0..nodes.len()).collect();
        let single = Placement::single;
        Ok(match self.strategy.as_str() {
            "single" => single(Pipeline::group(model.layers, Split::Whole, &[0])),
            "pipeline" => single(by_memory(model.layers, nodes)),
            "tensor" => single(Pipeline::group(model.layers, Split::Tensor, &all)),
            "expert" => single(Pipeline::group(model.layers, Split::Expert, &all)),
            "disaggregated" if nodes.len() == 2 => {
                let rate = |node: &ClusterNode| node.rates.map_or(0.0, |r| r.matmul);
                let prompts = usize::from(rate(&nodes[1]) > rate(&nodes[0]));
                let on = |node| Pipeline::group(model.layers, Split::Whole, &[node]);
                Placement::new(vec![on(1 - prompts)], Some(on(prompts)))
            }
            _ => return Err(Skip::Strategy),
        })
    }

    /// Rows with several requests do not say how many; as many as stages are assumed. A rate of
    /// prefill without a length is that of a long enough prompt; decode begins with none.
    fn workload(&self, stages: usize) -> Workload {
        let unstated = if self.metric.starts_with("prefill") {
            CHUNK
        } else {
            1
        };
        let prompt = self.prompt_tokens.unwrap_or(unstated).max(1);
        let output = self.output_tokens.unwrap_or(OUTPUT).max(1);
        let many = u32::try_from(stages).unwrap_or(1).max(2);
        let stated = self.concurrency.parse().ok().filter(|&n| n > 0);
        Workload {
            prompt,
            output,
            concurrency: stated.unwrap_or(many),
            context: prompt.saturating_add(output),
        }
    }
}

fn nodes_memory(cluster: &Cluster, node: usize) -> f64 {
    cluster.nodes[node].memory.0 as f64
}

/// Layers in proportion to memory, by largest remainder: what exo and llama.cpp do.
pub fn by_memory(n_layers: u32, nodes: &[ClusterNode]) -> Pipeline {
    let weights: Vec<f64> = nodes.iter().map(ClusterNode::budget).collect();
    let counts = crate::solver::shares(n_layers, &weights);
    let mut start = 0;
    let mut stages = Vec::new();
    for (node, count) in counts
        .into_iter()
        .enumerate()
        .filter(|(_, count)| *count > 0)
    {
        stages.push(PipelineStage::whole(start..start + count, node));
        start += count;
    }
    Pipeline { stages }
}

impl Case {
    fn predict(&self, calibration: &Calibration) -> Result<Prediction, Error> {
        let costs = Costs::new(&self.cluster, &self.model, self.workload, calibration)?;
        predict(&costs, &self.placement)
    }

    /// Against the first node alone in decode; for prefill elsewhere, a whole request against the
    /// decoding node alone.
    fn speedup(&self, said: &Prediction, calibration: &Calibration) -> Result<f64, Error> {
        let costs = Costs::new(&self.cluster, &self.model, self.workload, calibration)?;
        let node = self.placement.replicas[0].nodes()[0];
        let alone = Pipeline::group(self.model.layers, Split::Whole, &[node]);
        let alone = predict(&costs, &Placement::single(alone))?;
        Ok(if self.placement.prefill.is_some() {
            alone.request_s / said.request_s
        } else {
            said.decode_tok_s / alone.decode_tok_s
        })
    }
}
