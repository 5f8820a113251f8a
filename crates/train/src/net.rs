//! A model that can be trained: leaves in, losses and gradients out.
//!
//! A leaf stores its activations up to [`KEPT_BYTES`]; layers beyond compute them again, with the
//! same bits. Where every weight is trained, the local leaves go back layer by layer together, so
//! that one layer's gradients are summed at a time. A tied embedding is the exception: it has
//! gradients from both ends.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use paceline_model::adapter::files::TARGETS;
use paceline_model::{Config, LayerCache, LayerShape, ModelFamily, ModelSource, Role};
use paceline_tensor::{Kernels, RopePairs};
use serde::{Deserialize, Serialize};

use crate::class::{Means, TrainingClass};
use crate::cpu::{Activations, Cpu};
use crate::dropout::Dropout;
use crate::engine::{LayerEngine, LeafRows};
use crate::error::Error;
use crate::fingerprint::fingerprint;
use crate::mlx::{Mlx, OnMlx, StageSpec};
use crate::params::{Layout, Lora, first_values};
use crate::stage::ModelStage;
use crate::weights::{Method, StageWeights, WeightLoader, numbers};

/// The model of a training, and its trained part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    /// A GGUF file or a Hugging Face folder.
    pub model: PathBuf,
    /// The training method.
    pub method: Method,
    /// The size of adapters; without a meaning where every weight is trained.
    pub lora: Lora,
    /// Names of matrices with adapters, out of [`TARGETS`].
    pub targets: Vec<String>,
    /// Number of the last layers that have adapters; all without.
    pub layers: Option<usize>,
    /// Share of an adapter's inputs that are left out by chance while it is trained.
    pub dropout: f32,
    /// The engine's arithmetic.
    #[serde(default)]
    pub class: TrainingClass,
}

/// Tokens and targets of a logical micro-batch: one forward and one backward pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaf {
    /// Tokens of all sequences, one after the other.
    pub tokens: Vec<u32>,
    /// The target of each token's logits, if it has one.
    pub targets: Vec<Option<u32>>,
    /// Length of each sequence.
    pub lengths: Vec<usize>,
}

impl Leaf {
    /// Tokens that the loss covers.
    pub fn judged(&self) -> u64 {
        self.targets.iter().flatten().count() as u64
    }
}

/// Bytes of activations that a leaf may keep for its backward pass; layers beyond are computed
/// again, with the same bits.
pub(crate) const KEPT_BYTES: usize = 512 << 20;

/// A model that can be trained, or a stage of one.
#[derive(Debug)]
pub struct TrainableModel {
    config: Config,
    stage: ModelStage,
    weights: Arc<StageWeights>,
    kernels: Kernels,
    lora: Lora,
    method: Method,
    is_tied: bool,
    fingerprint: String,
    /// For classes on MLX; opened for the first layer, since a run's process may compute none.
    mlx: Option<(StageSpec, OnceLock<Mlx>)>,
}

/// A leaf whose forward pass is done, and whose backward pass is under way.
pub(crate) struct Pass {
    rows: LeafRows,
    tokens: Vec<u32>,
    chance: Option<Dropout>,
    /// (T, C) at the beginning of each layer whose backward pass is pending.
    inputs: Vec<Vec<f32>>,
    kept: Vec<Option<Activations>>,
    /// (T, C) behind the last layer; then the gradient there, and before each layer that is done.
    x: Vec<f32>,
}

impl TrainableModel {
    /// Loads what `trained` names.
    ///
    /// # Errors
    /// Errors of the model; [`Error::Family`]; [`Error::Option`] for an unknown target or an
    /// impossible rank.
    pub fn load(trained: &Trained, means: impl Into<Means>) -> Result<Self, Error> {
        Self::load_stage(trained, means, ModelStage::WHOLE)
    }

    /// Loads a stage of what `trained` names.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load), and [`Error::Option`] for more stages than layers.
    pub fn load_stage(
        trained: &Trained,
        means: impl Into<Means>,
        stage: ModelStage,
    ) -> Result<Self, Error> {
        let Means { kernels, mlx } = means.into();
        trained.check()?;
        let source = ModelSource::open(&trained.model)?;
        let mut config = Config::read(&source)?;
        check_family(&config)?;
        let layers = config.layers.len();
        let adapted = trained.layers.unwrap_or(layers);
        if adapted == 0 || adapted > layers {
            return option("--layers", adapted, format!("1 to the model's {layers}"));
        }
        let is_tied = match config.tied {
            Some(tied) => tied,
            None => source.opt_weight(config.family, Role::Output)?.is_none(),
        };
        if stage.of > 1 && is_tied && trained.method == Method::Full {
            let expected = "1: the first and the last stage share a table that is trained";
            return option("--stages", stage.of, expected.to_owned());
        }
        if let Some(factors) = source.opt_weight(config.family, Role::RopeFactors)? {
            let rope = &mut config.ropes[0];
            let factors = numbers(&factors, rope.frequencies.len())?;
            *rope = rope.clone().with_factors(&factors);
        }
        let loader = WeightLoader {
            source: &source,
            config: &config,
            kernels: &kernels,
            method: trained.method,
            lora: trained.lora,
            targets: &trained.targets,
            adapted_from: layers - adapted,
            stage,
            elsewhere: trained.class != TrainingClass::Cpu,
            layout: Layout::default(),
            first: Vec::new(),
        };
        let weights = Arc::new(loader.load()?);
        // The loader has turned rows, so everything lies by halves.
        for rope in &mut config.ropes {
            rope.pairs = RopePairs::Halves;
        }
        let fingerprint = fingerprint(&source)?;
        let spec = (trained.class != TrainingClass::Cpu).then(|| StageSpec {
            places: mlx,
            class: trained.class,
            source: Arc::new(source),
            config: config.clone(),
            weights: Arc::clone(&weights),
            method: trained.method,
            scale: trained.lora.scale(),
            is_tied,
            has_head: stage.is_last(),
        });
        Ok(Self {
            fingerprint,
            config,
            stage,
            weights,
            kernels,
            lora: trained.lora,
            method: trained.method,
            is_tied,
            mlx: spec.map(|spec| (spec, OnceLock::new())),
        })
    }

    /// The engine on MLX, where the class is one of it: opened now if it was not yet.
    fn mlx(&self) -> Result<Option<&Mlx>, Error> {
        let Some((spec, opened)) = &self.mlx else {
            return Ok(None);
        };
        if opened.get().is_none() {
            // A net is computed with by one thread: no other opens another engine meanwhile.
            let _ = opened.set(Mlx::open(spec.clone())?);
        }
        Ok(opened.get())
    }

    /// The engine on MLX of a net that has one.
    #[cfg(test)]
    pub(crate) fn on_mlx(&self) -> Option<&Mlx> {
        self.mlx().expect("the library of the test")
    }

    /// The rows of a leaf's tokens.
    #[cfg(test)]
    pub(crate) fn embedded(&self, params: &[f32], leaf: &Leaf) -> Vec<f32> {
        self.enter(params, leaf, None)
    }

    /// Has the engine ready, so that what is wrong with it is known before the first step. Gives
    /// the class, and what computes it: all workers of a run are alike in both.
    pub(crate) fn ready(&self) -> Result<String, Error> {
        Ok(match (self.mlx()?, &self.mlx) {
            (Some(mlx), Some((spec, _))) => format!("{} on {}", spec.class, mlx.device),
            _ => TrainingClass::Cpu.name().to_owned(),
        })
    }

    /// Lines about the engine for the run's owner; none before it is ready.
    pub(crate) fn notes(&self) -> &[String] {
        let opened = self.mlx.as_ref().and_then(|(_, opened)| opened.get());
        match opened {
            Some(mlx) => &mlx.notes,
            None => &[],
        }
    }

    /// Fingerprint of the model: hashed samples of all tensors.
    pub(crate) fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The part of the model that this is.
    pub(crate) const fn stage(&self) -> ModelStage {
        self.stage
    }

    /// Ranges in the trained vector: the embedding, then each layer, then the rest.
    pub(crate) fn parts(&self) -> &[Range<usize>] {
        &self.weights.parts
    }

    /// Leaves whose backward passes go layer by layer together. They are as many as their layers'
    /// inputs have room for where the gradients are what takes memory, else one.
    pub(crate) fn together(&self, tokens: usize) -> usize {
        // A tied embedding gets gradients from both ends of a pass.
        if self.method != Method::Full || self.is_tied {
            return 1;
        }
        let of_leaf = self.weights.layers.len() * self.config.width * tokens * size_of::<f32>();
        (INPUT_BYTES / of_leaf.max(1)).max(1)
    }

    /// The model's shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The layout of the trained values.
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

    fn cpu(&self, dropout: Option<Dropout>) -> Cpu<'_> {
        Cpu {
            kernels: &self.kernels,
            config: &self.config,
            weights: &self.weights,
            scale: self.lora.scale(),
            dropout,
        }
    }

    /// The input of the first layer: `x`, which another stage gave, or the tokens' rows.
    fn enter(&self, params: &[f32], leaf: &Leaf, x: Option<Vec<f32>>) -> Vec<f32> {
        x.unwrap_or_else(|| self.cpu(None).embed(params, &leaf.tokens))
    }

    /// A layer forward; activations where the engine keeps some.
    fn layer(
        &self,
        params: &[f32],
        (layer, rows, x): (usize, &LeafRows, &[f32]),
        chance: Option<Dropout>,
    ) -> Result<(Vec<f32>, Option<Activations>), Error> {
        if let Some(mlx) = self.mlx()? {
            let engine = OnMlx {
                mlx,
                dropout: chance,
            };
            return Ok((engine.forward(params, layer, rows, x)?.0, None));
        }
        let (y, kept) = self.cpu(chance).forward(params, layer, rows, x)?;
        Ok((y, Some(kept)))
    }

    /// The head and its loss: see [`Cpu::head`].
    fn head(
        &self,
        params: &[f32],
        (x, targets): (&[f32], &[Option<u32>]),
        weight: f32,
        grads: Option<&mut [f32]>,
    ) -> Result<(f64, Vec<f32>), Error> {
        match self.mlx()? {
            Some(mlx) => mlx.head(params, x, targets, weight, grads),
            None => Ok(self.cpu(None).head(params, x, targets, weight, grads)),
        }
    }

    /// The stage's layers, without anything for a backward pass: (T, C) behind the last one.
    pub(crate) fn forward(
        &self,
        params: &[f32],
        leaf: &Leaf,
        x: Option<Vec<f32>>,
        chance: Option<Dropout>,
    ) -> Result<Vec<f32>, Error> {
        let rows = LeafRows::new(leaf.lengths.clone(), &self.config.ropes);
        let mut x = self.enter(params, leaf, x);
        for layer in self.weights.numbers() {
            x = self.layer(params, (layer, &rows, &x), chance)?.0;
        }
        Ok(x)
    }

    /// The sum of the negative log likelihoods of a leaf's targets.
    ///
    /// # Errors
    /// [`Error::Model`] of the engine's device; none on the CPU.
    pub fn loss(&self, params: &[f32], leaf: &Leaf) -> Result<f64, Error> {
        self.loss_after(params, leaf, None)
    }

    /// The same in the last stage, behind what the one before gave.
    pub(crate) fn loss_after(
        &self,
        params: &[f32],
        leaf: &Leaf,
        x: Option<Vec<f32>>,
    ) -> Result<f64, Error> {
        let x = self.forward(params, leaf, x, None)?;
        let head = self.head(params, (&x, &leaf.targets), 1.0, None)?;
        Ok(head.0)
    }

    /// Begins a leaf: forward through all layers. Of the last ones, which are needed first, as
    /// many activations are kept as `keep_bytes` have room for.
    pub(crate) fn begin(
        &self,
        params: &[f32],
        leaf: &Leaf,
        (x, chance): (Option<Vec<f32>>, Option<Dropout>),
        keep_bytes: usize,
    ) -> Result<Pass, Error> {
        let rows = LeafRows::new(leaf.lengths.clone(), &self.config.ropes);
        let numbers = self.weights.numbers();
        let keep = keep_bytes / layer_bytes(&self.config, rows.tokens()).max(1);
        let mut inputs = Vec::with_capacity(numbers.len());
        let mut kept = Vec::with_capacity(numbers.len());
        let mut x = self.enter(params, leaf, x);
        for layer in numbers.clone() {
            let (y, activations) = self.layer(params, (layer, &rows, &x), chance)?;
            kept.push(activations.filter(|_| layer + keep >= numbers.end));
            inputs.push(std::mem::replace(&mut x, y));
        }
        Ok(Pass {
            rows,
            tokens: leaf.tokens.clone(),
            chance,
            inputs,
            kept,
            x,
        })
    }

    /// The loss of a leaf behind the last layer. Its gradient, divided by `judged`, becomes the
    /// pass's.
    pub(crate) fn top(
        &self,
        params: &[f32],
        (pass, leaf): (&mut Pass, &Leaf),
        judged: u64,
        grads: &mut [f32],
    ) -> Result<f64, Error> {
        let weight = 1.0 / judged as f32;
        let (loss, d) = self.head(params, (&pass.x, &leaf.targets), weight, Some(grads))?;
        pass.x = d;
        Ok(loss)
    }

    /// Goes one layer back; the last one first.
    pub(crate) fn down(
        &self,
        params: &[f32],
        pass: &mut Pass,
        grads: &mut [f32],
    ) -> Result<(), Error> {
        if let (Some(x), Some(kept)) = (pass.inputs.pop(), pass.kept.pop()) {
            let layer = self.weights.first_layer + pass.inputs.len();
            let at = (layer, &pass.rows, x.as_slice());
            let dropout = pass.chance;
            pass.x = match self.mlx()? {
                Some(mlx) => OnMlx { mlx, dropout }.backward(params, at, None, &pass.x, grads)?,
                None => self
                    .cpu(dropout)
                    .backward(params, at, kept, &pass.x, grads)?,
            };
        }
        Ok(())
    }

    /// Adds the gradient of the tokens' rows, in the first stage.
    pub(crate) fn bottom(&self, pass: &Pass, grads: &mut [f32]) {
        if self.stage.is_first() {
            self.cpu(None).embed_back(&pass.tokens, &pass.x, grads);
        }
    }

    /// A leaf through a stage and back: its loss in the last stage, and the gradient at its input.
    /// `dy` is what the stage behind gave.
    pub(crate) fn through(
        &self,
        params: &[f32],
        leaf: &Leaf,
        (x, chance): (Option<Vec<f32>>, Option<Dropout>),
        (dy, judged): (Option<Vec<f32>>, u64),
        grads: &mut [f32],
    ) -> Result<(f64, Vec<f32>), Error> {
        let mut pass = self.begin(params, leaf, (x, chance), KEPT_BYTES)?;
        let loss = match dy {
            None => self.top(params, (&mut pass, leaf), judged, grads)?,
            Some(dy) => {
                pass.x = dy;
                0.0
            }
        };
        while !pass.inputs.is_empty() {
            self.down(params, &mut pass, grads)?;
        }
        self.bottom(&pass, grads);
        Ok((loss, pass.x))
    }

    /// The sum of [`loss`](Self::loss), and its gradient divided by `judged`, the targets of the
    /// whole step.
    ///
    /// # Errors
    /// The errors of [`loss`](Self::loss).
    pub fn gradient(
        &self,
        params: &[f32],
        leaf: &Leaf,
        judged: u64,
    ) -> Result<(f64, Vec<f32>), Error> {
        let mut grads = vec![0.0; self.weights.layout.len()];
        let loss = self.through(params, leaf, (None, None), (None, judged), &mut grads)?;
        Ok((loss.0, grads))
    }
}

/// Bytes of inputs of layers of all leaves that go layer by layer together.
const INPUT_BYTES: usize = 1 << 30;

fn option<T>(option: &'static str, got: impl ToString, expected: String) -> Result<T, Error> {
    let got = got.to_string();
    Err(Error::Option {
        option,
        got,
        expected,
    })
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
        if self.method == Method::Full {
            return Ok(());
        }
        let Lora { rank, alpha } = self.lora;
        if rank == 0 || rank > 1024 {
            return option("--rank", rank, "1 to 1024".to_owned());
        }
        if !(alpha.is_finite() && alpha > 0.0) {
            return option("--alpha", alpha, "a number above 0".to_owned());
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return option(
                "--dropout",
                self.dropout,
                "0 or more, and below 1".to_owned(),
            );
        }
        let known = |name: &String| TARGETS.iter().any(|(_, _, target)| target == name);
        let names = TARGETS.map(|(_, _, name)| name).join(", ");
        match self.targets.iter().find(|name| !known(name)) {
            Some(bad) => option("--targets", bad, format!("some of {names}")),
            None if self.targets.is_empty() => {
                option("--targets", "empty", format!("some of {names}"))
            }
            None => Ok(()),
        }
    }
}

/// Families with gradients.
pub const FAMILIES: [ModelFamily; 4] = [
    ModelFamily::Llama,
    ModelFamily::Qwen2,
    ModelFamily::Qwen3,
    ModelFamily::Gemma3,
];

fn check_family(config: &Config) -> Result<(), Error> {
    let refused = |why| {
        let family = format!("{:?}", config.family).to_lowercase();
        Err(Error::Family { family, why })
    };
    if config.layers.iter().any(|layer| layer.experts.is_some()) {
        return refused("it has experts, whose gradients are to come");
    }
    if !FAMILIES.contains(&config.family) {
        return refused("its gradients are to come; llama, qwen2, qwen3 and gemma3 have them");
    }
    if config.bidirectional {
        return refused("its positions attend to later ones");
    }
    if config.ropes.iter().any(|rope| rope.long.is_some()) {
        return refused("its rotations depend on the served context");
    }
    let rows = |layer: &LayerShape| layer.cache == LayerCache::Rows;
    if !config.layers.iter().all(rows) {
        return refused("it has layers without keys and values of their own");
    }
    Ok(())
}
