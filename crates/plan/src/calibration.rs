//! The constants that make a cost model a prediction: what share of a quoted rate programs reach,
//! and what they spend besides.
//!
//! Every constant has a name, a prior with a spread (a guess before any row is seen), and a value.
//! The value is the prior moved by the `fit` rows of `published.toml` ([`crate::fit`]). They lie in
//! `data/calibration.toml`; a test fits them again and compares.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::catalogue::parse;
use crate::{Backend, ClusterNode, Error, LinkTransport, ModelShape, Rates};

/// The constants in the tree.
const BUILTIN: &str = include_str!("../data/calibration.toml");

/// Name of the constant of [`Calibration::expert_reuse`].
pub const EXPERT_REUSE: &str = "experts.reuse";

/// A constant with its prior.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// Dotted name, `op.exo-1`.
    pub name: String,
    /// The guess without data.
    pub prior: f64,
    /// Standard deviation of the logarithm of the guess.
    pub spread: f64,
    /// The constant in use.
    pub value: f64,
    /// Meaning of the constant, and the source of its prior.
    pub why: String,
}

/// Facts about an engine that are read in its source, not fitted.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct EngineProfile {
    /// The name that nodes use.
    pub name: String,
    /// Parts of published names of frameworks, lower case, that mean this engine.
    #[serde(rename = "match", default)]
    pub matches: Vec<String>,
    /// Name of its `op.*` constant.
    pub op: String,
    /// Name of its `quantised.*` constant: the share of other products' rate that those with
    /// weights of fewer than 16 bits reach.
    #[serde(default)]
    pub quantised: Option<String>,
    /// Name of the `boundary.*` constant that a pipeline pays between stages, if any.
    #[serde(default)]
    pub boundary: Option<String>,
    /// Messages per stage boundary and token that wait for each other.
    #[serde(default = "one")]
    pub boundary_messages: f64,
    /// Name of the `remote.*` constant that each layer away from the first node pays.
    #[serde(default)]
    pub remote: Option<String>,
    /// Bytes of a number in exchanged activations.
    pub activation_bytes: f64,
    /// Whether a tensor split covers the output head too.
    pub head_split: bool,
    /// Whether a tensor split deals whole experts too, the shared one to its last rank. An expert
    /// split then also shares the head and the feed-forward of layers without experts.
    #[serde(default)]
    pub deals_experts: bool,
    /// Prefix of the `handover.*` constants that exchanges pay, such as `gpu`.
    pub handover: String,
    /// Source of these facts.
    pub source: String,
}

fn one() -> f64 {
    1.0
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CalibrationFile {
    parameter: Vec<Parameter>,
    engine: Vec<EngineProfile>,
}

/// All constants.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    parameters: BTreeMap<String, Parameter>,
    engines: Vec<EngineProfile>,
}

/// A node's rates as programs reach them, and the fixed cost of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Bytes of weights or cache a second.
    pub memory: f64,
    /// Arithmetic by kernel class; `None` where the node's rate is not known.
    pub rates: Option<Rates>,
    /// Seconds that each launched operation adds.
    pub op: f64,
}

impl Calibration {
    /// The constants in the tree.
    ///
    /// # Errors
    /// [`Error::Toml`] when the file in the tree is broken.
    pub fn builtin() -> Result<Self, Error> {
        Self::from_toml(BUILTIN, "calibration.toml")
    }

    /// Reads constants.
    ///
    /// # Errors
    /// [`Error::Toml`] with line and column; [`Error::Value`] for a constant that is not positive.
    pub fn from_toml(text: &str, what: &str) -> Result<Self, Error> {
        let file: CalibrationFile = parse(text, what)?;
        for p in &file.parameter {
            for (field, value) in [("prior", p.prior), ("spread", p.spread), ("value", p.value)] {
                let (low, range) = (f64::MIN_POSITIVE, "more than 0 and finite");
                crate::check::finite_in(&p.name, field, value, low, 1e18, range)?;
            }
        }
        let parameters = file.parameter.into_iter().map(|p| (p.name.clone(), p));
        Ok(Self {
            parameters: parameters.collect(),
            engines: file.engine,
        })
    }

    /// All constants by name.
    pub fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.values()
    }

    /// Changes one constant; false when there is none of this name.
    pub fn set(&mut self, name: &str, value: f64) -> bool {
        let found = self.parameters.get_mut(name);
        found.map(|p| p.value = value).is_some()
    }

    /// Adds or replaces a constant: those of a machine that was measured here.
    pub fn insert(&mut self, parameter: Parameter) {
        self.parameters.insert(parameter.name.clone(), parameter);
    }

    /// Adds an engine whose costs were measured on one machine: `operation_s` of an operation, and
    /// `crossing_s` of an exchange besides the network. It computes as our own engine on GPUs.
    pub fn add_measured(&mut self, name: &str, operation_s: f64, crossing_s: f64) {
        let constant = |name: String, value: f64| Parameter {
            name,
            prior: value,
            spread: 1.0,
            value,
            why: "measured on its machine".to_owned(),
        };
        let handover = format!("own.{name}");
        self.insert(constant(format!("op.{name}"), operation_s));
        self.insert(constant(format!("handover.{handover}.tcp"), crossing_s));
        self.engines.push(EngineProfile {
            name: name.to_owned(),
            matches: Vec::new(),
            op: name.to_owned(),
            quantised: None,
            boundary: None,
            boundary_messages: 1.0,
            remote: None,
            activation_bytes: 4.0,
            head_split: true,
            deals_experts: true,
            handover,
            source: "this project: activations travel as f32 between stages".to_owned(),
        });
    }

    /// The constant, or `default` for a machine or engine that no row anchors.
    fn value(&self, name: &str, default: f64) -> f64 {
        self.parameters.get(name).map_or(default, |p| p.value)
    }

    /// The engine of this name; the generic one when there is none.
    pub fn engine(&self, name: &str) -> &EngineProfile {
        let found = self.engines.iter().find(|engine| engine.name == name);
        found.unwrap_or(&self.engines[0])
    }

    /// All engines; the first is the generic one.
    pub fn engines(&self) -> &[EngineProfile] {
        &self.engines
    }

    /// The engine that a published name of a framework means: the first in file order with a match
    /// for a part of the name. `cpu` machines get the engine's CPU form where there is one.
    pub fn engine_of(&self, framework: &str, cpu: bool) -> &EngineProfile {
        let text = framework.to_lowercase();
        let hit = |engine: &&EngineProfile| engine.matches.iter().any(|part| text.contains(part));
        let engine = self.engines.iter().find(hit).unwrap_or(&self.engines[0]);
        let on_cpu = format!("{}-cpu", engine.name);
        let twin = self.engines.iter().find(|e| cpu && e.name == on_cpu);
        twin.unwrap_or(engine)
    }

    /// Rates of a node as the kernels for `model` reach them, from its quoted or measured rates.
    pub fn speed(&self, node: &ClusterNode, model: &ModelShape) -> Speed {
        let engine = self.engine(&node.engine);
        let op = self.value(&format!("op.{}", engine.op), 6e-6);
        if node.measured {
            // Measured with our own kernels, the rates are what is reached; a measured read rate
            // of memory is reached in part.
            let own = engine.handover.starts_with("own");
            let share = if own {
                1.0
            } else {
                self.value("memory.measured", 1.0)
            };
            let arithmetic = if own {
                1.0
            } else {
                self.rate_share(node, model)
            };
            return Speed {
                memory: node.bandwidth * share,
                rates: node.rates.map(|r| r.scaled(arithmetic)),
                op,
            };
        }
        let class = if node.backend == Backend::Cpu {
            "memory.cpu"
        } else {
            "memory.gpu"
        };
        let machine = format!("machine.{}.memory", family(&node.kind));
        Speed {
            memory: node.bandwidth * self.value(class, 0.8) * self.value(&machine, 1.0),
            rates: node.rates.map(|r| r.scaled(self.rate_share(node, model))),
            op,
        }
    }

    fn rate_share(&self, node: &ClusterNode, model: &ModelShape) -> f64 {
        let class = if node.backend == Backend::Cpu {
            "compute.cpu"
        } else {
            "compute.gpu"
        };
        let machine = format!("machine.{}.compute", family(&node.kind));
        let quantised = self.engine(&node.engine).quantised.as_ref();
        let kernels = quantised.filter(|_| model.is_quantised());
        let kernels = kernels.map_or(1.0, |name| self.value(&format!("quantised.{name}"), 1.0));
        self.value(class, 0.5) * self.value(&machine, 1.0) * kernels
    }

    /// Seconds that handing data to a transport and back costs an engine, per exchange.
    pub fn handover(&self, engine: &EngineProfile, transport: LinkTransport) -> f64 {
        let kind = match transport {
            LinkTransport::Fabric => "fabric",
            LinkTransport::Rdma => "rdma",
            LinkTransport::Tcp => "tcp",
            LinkTransport::Shm => "shm",
        };
        self.value(&format!("handover.{}.{kind}", engine.handover), 1e-5)
    }

    /// Seconds that a stage boundary costs besides its messages.
    pub fn boundary(&self, engine: &EngineProfile) -> Option<f64> {
        let name = engine.boundary.as_ref()?;
        Some(self.value(&format!("boundary.{name}"), 0.0))
    }

    /// Power of the share of experts in memory that a step finds there, as a share of its own.
    pub fn expert_reuse(&self) -> f64 {
        self.value(EXPERT_REUSE, 1.0)
    }

    /// Seconds that each layer on another node than the first costs besides.
    pub fn remote_layer(&self, engine: &EngineProfile) -> f64 {
        let name = engine.remote.as_deref().unwrap_or("none");
        self.value(&format!("remote.{name}"), 0.0)
    }
}

impl Rates {
    fn scaled(self, by: f64) -> Self {
        Self {
            matmul: self.matmul * by,
            expert: self.expert * by,
            attention: self.attention * by,
        }
    }
}

/// A machine's kind without its memory size: `mac-studio-m3-ultra` of `mac-studio-m3-ultra-512`.
/// Machines that differ in nothing else share their constants.
pub fn family(kind: &str) -> &str {
    match kind.rsplit_once('-') {
        Some((head, size)) if !size.is_empty() && size.bytes().all(|b| b.is_ascii_digit()) => head,
        _ => kind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_a_kind_without_its_memory() {
        for (kind, expected) in [
            ("mac-studio-m3-ultra-512", "mac-studio-m3-ultra"),
            ("raspberry-pi-5-8", "raspberry-pi-5"),
            ("vm-2core", "vm-2core"),
            ("unknown", "unknown"),
            ("ends-", "ends-"),
            ("", ""),
        ] {
            assert_eq!(family(kind), expected);
        }
    }

    #[test]
    fn published_names_find_their_engine() {
        let all = Calibration::builtin().unwrap();
        for (framework, cpu, expected) in [
            ("exo 0.0.x (MLX)", false, "exo-0"),
            ("exo 1.0 (MLX, JACCL)", false, "exo-1"),
            ("exo (MLX)", false, "exo-1"),
            ("mlx-lm", false, "mlx"),
            ("MLX, JACCL", false, "mlx"),
            (
                "MLX, experts stacked, router on each node",
                false,
                "mlx-experts",
            ),
            ("llama.cpp (ROCm)", false, "llama.cpp-rocm-2025"),
            ("llama.cpp (CUDA graphs)", false, "llama.cpp-graphs"),
            ("llama.cpp (Vulkan)", false, "llama.cpp-graphs"),
            ("llama.cpp", true, "llama.cpp-cpu"),
            ("ollama (llama.cpp)", false, "llama.cpp"),
            ("llama.cpp RPC", false, "llama.cpp-rpc"),
            ("llama.cpp RPC", true, "llama.cpp-rpc-cpu"),
            ("distributed-llama", true, "distributed-llama-cpu"),
            ("vLLM", false, "generic"),
        ] {
            assert_eq!(all.engine_of(framework, cpu).name, expected, "{framework}");
        }
    }
}
