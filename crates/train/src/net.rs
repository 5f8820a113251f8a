//! A model that can be trained: leaves in, losses and gradients out.

use std::path::PathBuf;

use paceline_model::{Config, Family, LayerCache, LayerShape, Role, Source};
use paceline_tensor::{Kernels, RopePairs};
use serde::{Deserialize, Serialize};

use crate::cpu::Cpu;
use crate::engine::{Engine, Rows};
use crate::error::Error;
use crate::params::{Layout, Lora, first_values};
use crate::weights::{Loader, Method, TARGETS, Weights, numbers};

/// What of a model is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    /// A GGUF file or a Hugging Face folder.
    pub model: PathBuf,
    /// What is trained, and how the rest is kept.
    pub method: Method,
    /// The size of adapters; without a meaning where every weight is trained.
    pub lora: Lora,
    /// Names of matrices with adapters, out of [`TARGETS`].
    pub targets: Vec<String>,
}

/// Tokens and targets of a logical micro-batch: one forward and one backward pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaf {
    /// Tokens of all sequences, one after the other.
    pub tokens: Vec<u32>,
    /// What each token's logits are judged by, if they are.
    pub targets: Vec<Option<u32>>,
    /// Length of each sequence.
    pub lengths: Vec<usize>,
}

impl Leaf {
    /// How many tokens are judged.
    pub fn judged(&self) -> u64 {
        self.targets.iter().flatten().count() as u64
    }
}

/// Bytes of activations that a leaf may keep for its backward pass; layers beyond are computed
/// again, with the same bits.
pub(crate) const KEPT_BYTES: usize = 512 << 20;

/// A model that can be trained.
#[derive(Debug)]
pub struct Net {
    config: Config,
    weights: Weights,
    kernels: Kernels,
    lora: Lora,
    method: Method,
}

impl Net {
    /// Loads what `trained` names.
    ///
    /// # Errors
    /// What is wrong with the model; [`Error::Family`]; [`Error::Option`] for an unknown target
    /// or an impossible rank.
    pub fn load(trained: &Trained, kernels: Kernels) -> Result<Self, Error> {
        trained.check()?;
        let source = Source::open(&trained.model)?;
        let mut config = Config::read(&source)?;
        check_family(&config)?;
        if let Some(factors) = source.opt_weight(config.family, Role::RopeFactors)? {
            let rope = &mut config.ropes[0];
            let factors = numbers(&factors, rope.frequencies.len())?;
            *rope = rope.clone().with_factors(&factors);
        }
        let loader = Loader {
            source: &source,
            config: &config,
            kernels: &kernels,
            method: trained.method,
            lora: trained.lora,
            targets: &trained.targets,
            layout: Layout::default(),
            first: Vec::new(),
        };
        let weights = loader.load()?;
        // The loader has turned rows, so everything lies by halves.
        config
            .ropes
            .iter_mut()
            .for_each(|rope| rope.pairs = RopePairs::Halves);
        Ok(Self {
            config,
            weights,
            kernels,
            lora: trained.lora,
            method: trained.method,
        })
    }

    /// The model's shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What is trained.
    pub fn layout(&self) -> &Layout {
        &self.weights.layout
    }

    /// The values that training begins with.
    pub fn first_values(&self, seed: u64) -> Vec<f32> {
        match self.method {
            Method::Full => self.weights.first.clone(),
            Method::Lora | Method::Qlora => first_values(&self.weights.layout, seed),
        }
    }

    fn cpu(&self) -> Cpu<'_> {
        Cpu {
            kernels: &self.kernels,
            config: &self.config,
            weights: &self.weights,
            scale: self.lora.scale(),
        }
    }

    /// The sum of the negative log likelihoods of a leaf's targets.
    pub fn loss(&self, params: &[f32], leaf: &Leaf) -> f64 {
        let cpu = self.cpu();
        let rows = Rows::new(leaf.lengths.clone(), &self.config.ropes);
        let mut x = cpu.embed(params, &leaf.tokens);
        for layer in 0..self.config.layers.len() {
            x = cpu.forward(params, layer, &rows, &x).0;
        }
        cpu.head(params, &x, &leaf.targets, 1.0, None).0
    }

    /// The same sum, and the gradient of it divided by `judged`, the targets of the whole step.
    pub fn gradient(&self, params: &[f32], leaf: &Leaf, judged: u64) -> (f64, Vec<f32>) {
        let cpu = self.cpu();
        let rows = Rows::new(leaf.lengths.clone(), &self.config.ropes);
        let mut grads = vec![0.0; self.weights.layout.len()];
        let layers = self.config.layers.len();
        let mut inputs = Vec::with_capacity(layers);
        let mut kept = Vec::with_capacity(layers);
        let keep = KEPT_BYTES / layer_bytes(&self.config, rows.tokens()).max(1);
        let mut x = cpu.embed(params, &leaf.tokens);
        for layer in 0..layers {
            let (y, activations) = cpu.forward(params, layer, &rows, &x);
            // The last layers, which are needed first.
            kept.push((layer + keep >= layers).then_some(activations));
            inputs.push(std::mem::replace(&mut x, y));
        }
        let weight = 1.0 / judged as f32;
        let (loss, mut d) = cpu.head(params, &x, &leaf.targets, weight, Some(&mut grads));
        while let (Some(x), Some(kept)) = (inputs.pop(), kept.pop()) {
            let at = (inputs.len(), &rows, x.as_slice());
            d = cpu.backward(params, at, kept, &d, &mut grads);
        }
        cpu.embed_back(&leaf.tokens, &d, &mut grads);
        (loss, grads)
    }
}

/// Bytes that a layer's activations take.
pub(crate) fn layer_bytes(config: &Config, tokens: usize) -> usize {
    let of = |l: &LayerShape| {
        let heads = (3 * l.heads + 2 * l.kv_heads) * l.head_dim;
        heads + 3 * l.ffn + 5 * config.width
    };
    config.layers.iter().map(of).max().unwrap_or(0) * tokens * size_of::<f32>()
}

impl Trained {
    fn check(&self) -> Result<(), Error> {
        let option = |option, got: String, expected: &str| {
            let expected = expected.to_owned();
            Err(Error::Option {
                option,
                got,
                expected,
            })
        };
        if self.method == Method::Full {
            return Ok(());
        }
        let Lora { rank, alpha } = self.lora;
        if rank == 0 || rank > 1024 {
            return option("--rank", rank.to_string(), "1 to 1024");
        }
        if !(alpha.is_finite() && alpha > 0.0) {
            return option("--alpha", alpha.to_string(), "a number above 0");
        }
        let known = |name: &String| TARGETS.iter().any(|(_, _, target)| target == name);
        let names = TARGETS.map(|(_, _, name)| name).join(", ");
        match self.targets.iter().find(|name| !known(name)) {
            Some(bad) => option("--targets", bad.clone(), &format!("some of {names}")),
            None if self.targets.is_empty() => {
                option("--targets", "empty".to_owned(), &format!("some of {names}"))
            }
            None => Ok(()),
        }
    }
}

fn check_family(config: &Config) -> Result<(), Error> {
    let refused = |why| {
        let family = format!("{:?}", config.family).to_lowercase();
        Err(Error::Family { family, why })
    };
    if config.layers.iter().any(|layer| layer.experts.is_some()) {
        return refused("it has experts, whose gradients are to come");
    }
    let known = [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Gemma3];
    if !known.contains(&config.family) {
        return refused("its gradients are to come; llama, qwen2, qwen3 and gemma3 have them");
    }
    let rows = |layer: &LayerShape| layer.cache == LayerCache::Rows;
    if !config.layers.iter().all(rows) {
        return refused("it has layers without keys and values of their own");
    }
    Ok(())
}
