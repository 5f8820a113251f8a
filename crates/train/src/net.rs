//! A model that can be trained: leaves in, losses and gradients out.
//!
//! Leaves store their activations up to [`kept_bytes`]; layers beyond compute them again, with the
//! same bits. Where every weight is trained, the local leaves go through the layers together. One
//! layer's values are needed at a time, and one layer's gradients are summed. A table that is
//! embedding and head has two sums over leaves, which are added last.

mod checks;
mod memory;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use paceline_cluster::machine;
use paceline_model::{Config, LayerCache, LayerShape, ModelSource, Role};
use paceline_tensor::{Kernels, RopePairs};
use serde::{Deserialize, Serialize};

use crate::class::{Means, TrainingClass};
use crate::cpu::{Cpu, LayerKept};
use crate::dropout::Dropout;
use crate::engine::LayerEngine;
use crate::error::Error;
use crate::fingerprint::fingerprint;
use crate::mlx::{Mlx, OnMlx, StageSpec};
use crate::params::{Layout, Lora, first_values};
use crate::rows::{LeafRows, RowSeat};
use crate::stage::ModelStage;
use crate::values::{PartValues, WholeValues};
use crate::weights::{EXPERTS, Method, Parts, StageWeights, WeightLoader, numbers};

pub use checks::FAMILIES;
use checks::{check_experts, check_family, option};
pub(crate) use memory::{kept_bytes, layer_bytes};

/// `(T, C)` of each leaf, as the stage before gave it; the first stage has none.
type StageInputs = Vec<Option<Vec<f32>>>;

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
    /// Factor of the routers' auxiliary loss, which is not in the reported loss. 0 for none.
    #[serde(default)]
    pub balance: f32,
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

/// A model that can be trained, or a stage of one.
#[derive(Debug)]
pub struct TrainableModel {
    config: Config,
    stage: ModelStage,
    weights: Arc<StageWeights>,
    kernels: Kernels,
    lora: Lora,
    method: Method,
    balance: f32,
    /// See [`kept_bytes`].
    kept_bytes: usize,
    /// The ranks that have the rows of each leaf, where they are cut.
    ranks: Option<Arc<RowSeat>>,
    fingerprint: String,
    /// For classes on MLX; opened for the first layer, since a run's process may compute none.
    mlx: Option<(StageSpec, OnceLock<Mlx>)>,
}

/// A leaf whose forward pass is done, and whose backward pass is under way.
pub(crate) struct Pass {
    rows: LeafRows,
    /// Of the rows that are here.
    tokens: Vec<u32>,
    chance: Option<Dropout>,
    /// Targets of the step.
    judged: u64,
    /// (T, C) at the beginning of each layer whose backward pass is pending.
    inputs: Vec<Vec<f32>>,
    kept: Vec<Option<LayerKept>>,
    /// (T, C) behind the last layer; then the gradient there, and before each layer that is done.
    pub(crate) x: Vec<f32>,
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
        Self::load_part(trained, means, (stage, None))
    }

    /// The same, with the routed experts of a rank of some alone.
    pub(crate) fn load_part(
        trained: &Trained,
        means: impl Into<Means>,
        (stage, experts): (ModelStage, Option<(usize, usize)>),
    ) -> Result<Self, Error> {
        let Means { kernels, mlx } = means.into();
        trained.check()?;
        let source = ModelSource::open(&trained.model)?;
        let mut config = Config::read(&source)?;
        check_family(&config, trained.class)?;
        if trained.targets.iter().any(|name| name == EXPERTS) {
            check_experts(&config)?;
        }
        let layers = config.layers.len();
        let adapted = trained.layers.unwrap_or(layers);
        if adapted == 0 || adapted > layers {
            return option("--layers", adapted, format!("1 to the model's {layers}"));
        }
        let is_tied = match config.tied {
            Some(tied) => tied,
            None => source.opt_weight(config.family, Role::Output)?.is_none(),
        };
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
            experts,
            elsewhere: trained.class != TrainingClass::Cpu,
            layout: Layout::default(),
            part: 0,
            first: Vec::new(),
        };
        let weights = Arc::new(loader.load()?);
        // The loader has turned rows, so everything lies by halves; not of latent attention.
        if config.latent.is_none() {
            for rope in &mut config.ropes {
                rope.pairs = RopePairs::Halves;
            }
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
            balance: trained.balance,
            kept_bytes: kept_bytes(machine::available().map(|free| free.0)),
            ranks: None,
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
        let table = &params[self.parts().values[0].clone()];
        self.cpu(None).embed(table, &leaf.tokens)
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

    /// The parts of what is trained.
    pub(crate) fn parts(&self) -> &Parts {
        &self.weights.parts
    }

    /// Leaves that go through the layers together. They are as many as their layers' inputs have
    /// room for where the gradients are what takes memory, else one.
    pub(crate) fn together(&self, tokens: usize) -> usize {
        if self.method != Method::Full {
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
        let all = 0..self.layout().len();
        self.first_values_of(seed, std::slice::from_ref(&all))
    }

    /// Values of some ranges of the trained vector, one behind the other.
    pub(crate) fn first_values_of(&self, seed: u64, ranges: &[Range<usize>]) -> Vec<f32> {
        if self.method == Method::Full {
            return self.weights.first_values(ranges);
        }
        let all = first_values(&self.weights.layout, seed);
        let own = ranges.iter().flat_map(|range| &all[range.clone()]);
        own.copied().collect()
    }

    pub(crate) fn cpu(&self, dropout: Option<Dropout>) -> Cpu<'_> {
        Cpu {
            balance: 0.0,
            judged: 1,
            kernels: &self.kernels,
            config: &self.config,
            weights: &self.weights,
            scale: self.lora.scale(),
            dropout,
        }
    }

    /// A layer forward; activations where the engine keeps some.
    fn layer(
        &self,
        params: &[f32],
        (layer, rows, x): (usize, &LeafRows, &[f32]),
        chance: Option<Dropout>,
    ) -> Result<(Vec<f32>, Option<LayerKept>), Error> {
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

    /// The head and its loss: see [`Cpu::head_rows`].
    fn head(
        &self,
        params: [&[f32]; 2],
        (rows, x, targets): (&LeafRows, &[f32], &[Option<u32>]),
        weight: f32,
        grads: Option<[&mut [f32]; 2]>,
    ) -> Result<(f64, Vec<f32>), Error> {
        match self.mlx()? {
            Some(mlx) => mlx.head(params, x, targets, weight, grads),
            None => {
                let cpu = self.cpu(None);
                cpu.head_rows(params, rows, (x, targets), weight, grads)
            }
        }
    }

    /// The values of the norm before the head, and those of the head.
    fn head_values<'v>(
        &self,
        values: &'v mut dyn PartValues,
        norm: &'v mut Vec<f32>,
    ) -> Result<[&'v [f32]; 2], Error> {
        *norm = values.part(self.parts().norm())?.to_vec();
        Ok([norm.as_slice(), values.part(self.parts().head())?])
    }

    pub(crate) fn rows(&self, leaf: &Leaf) -> LeafRows {
        let is_net = |layer: &LayerShape| matches!(layer.cache, LayerCache::Delta(_));
        // A delta net's state goes from row to row, and MLX has the whole leaf.
        let is_cut = self.mlx.is_none() && !self.config.layers.iter().any(is_net);
        let ranks = self.ranks.clone();
        let (lengths, targets) = (leaf.lengths.clone(), &leaf.targets);
        LeafRows::new(lengths, targets, &self.config.ropes, (is_cut, ranks))
    }

    /// Has the rows of each leaf cut over ranks, or no longer.
    pub(crate) fn cut_rows(&mut self, ranks: Option<RowSeat>) {
        self.ranks = ranks.map(Arc::new);
    }

    /// Leaves through the stage's layers, without anything for a backward pass: (T, C) of each
    /// behind the last one. `x` of a leaf is what the stage before gave.
    pub(crate) fn forward(
        &self,
        values: &mut dyn PartValues,
        (leaves, rows): (&[(&Leaf, Option<Dropout>)], &[LeafRows]),
        x: StageInputs,
    ) -> Result<Vec<Vec<f32>>, Error> {
        let table = values.part(0)?;
        let enter = |(((leaf, _), rows), x): ((&(&Leaf, _), _), Option<Vec<f32>>)| {
            x.unwrap_or_else(|| self.cpu(None).embed(table, &own_tokens(leaf, rows)))
        };
        let mut all: Vec<Vec<f32>> = leaves.iter().zip(rows).zip(x).map(enter).collect();
        for (part, layer) in (1..).zip(self.weights.numbers()) {
            let params = values.part(part)?;
            for ((x, rows), (_, chance)) in all.iter_mut().zip(rows).zip(leaves) {
                *x = self.layer(params, (layer, rows, x), *chance)?.0;
            }
        }
        Ok(all)
    }

    /// The sum of the negative log likelihoods of a leaf's targets.
    ///
    /// # Errors
    /// [`Error::Model`] of the engine's device; none on the CPU.
    pub fn loss(&self, params: &[f32], leaf: &Leaf) -> Result<f64, Error> {
        let mut values = self.whole(params);
        Ok(self.losses(&mut values, &[leaf], vec![None])?[0])
    }

    /// The same of several leaves, behind what the stage before gave.
    pub(crate) fn losses(
        &self,
        values: &mut dyn PartValues,
        leaves: &[&Leaf],
        x: StageInputs,
    ) -> Result<Vec<f64>, Error> {
        let with: Vec<_> = leaves.iter().map(|leaf| (*leaf, None)).collect();
        let rows: Vec<LeafRows> = leaves.iter().map(|leaf| self.rows(leaf)).collect();
        let all = self.forward(values, (&with, &rows), x)?;
        let mut norm = Vec::new();
        let params = self.head_values(values, &mut norm)?;
        let loss = |((x, rows), leaf): ((&Vec<f32>, &LeafRows), &&Leaf)| {
            let at = (rows, x.as_slice(), leaf.targets.as_slice());
            Ok(self.head(params, at, 1.0, None)?.0)
        };
        all.iter().zip(&rows).zip(leaves).map(loss).collect()
    }

    /// All values, in this process.
    pub(crate) fn whole<'a>(&'a self, values: &'a [f32]) -> WholeValues<'a> {
        let parts = self.parts();
        WholeValues { values, parts }
    }

    /// Leaves forward through all layers. Of the last layers, which are needed first, as many
    /// activations are kept as a `share`-th of [`kept_bytes`] has room for.
    pub(crate) fn begin(
        &self,
        values: &mut dyn PartValues,
        (leaves, x): (&[(&Leaf, Option<Dropout>)], StageInputs),
        share: usize,
    ) -> Result<Vec<Pass>, Error> {
        let table = values.part(0)?;
        let begin = |((leaf, chance), x): (&(&Leaf, _), Option<Vec<f32>>)| {
            let rows = self.rows(leaf);
            let tokens = own_tokens(leaf, &rows);
            Pass {
                chance: *chance,
                judged: 1,
                inputs: Vec::with_capacity(self.weights.layers.len()),
                kept: Vec::with_capacity(self.weights.layers.len()),
                x: x.unwrap_or_else(|| self.cpu(None).embed(table, &tokens)),
                rows,
                tokens,
            }
        };
        let mut passes: Vec<Pass> = leaves.iter().zip(x).map(begin).collect();
        let tokens = passes.iter().map(|pass| pass.rows.tokens()).sum();
        // Ranks that compute a layer again do so together.
        let most = match &self.ranks {
            Some(seat) => kept_bytes(None) * seat.of,
            None => self.kept_bytes,
        };
        let keep =
            most / share / layer_bytes(self.config.width, &self.config.layers, tokens).max(1);
        let numbers = self.weights.numbers();
        for (part, layer) in (1..).zip(numbers.clone()) {
            let params = values.part(part)?;
            for pass in &mut passes {
                let at = (layer, &pass.rows, pass.x.as_slice());
                let (y, activations) = self.layer(params, at, pass.chance)?;
                let is_kept = layer + keep >= numbers.end;
                pass.kept.push(activations.filter(|_| is_kept));
                pass.inputs.push(std::mem::replace(&mut pass.x, y));
            }
        }
        Ok(passes)
    }

    /// The losses of leaves behind the last layer. Their gradients, divided by `judged`, become the
    /// passes'. `done` receives each leaf's gradients of the norm and of the head.
    pub(crate) fn top(
        &self,
        values: &mut dyn PartValues,
        (passes, leaves): (&mut [Pass], &[(&Leaf, Option<Dropout>)]),
        judged: u64,
        done: &mut dyn FnMut([&[f32]; 2]),
    ) -> Result<Vec<f64>, Error> {
        let mut norm = Vec::new();
        let params = self.head_values(values, &mut norm)?;
        let parts = &self.parts().gradients;
        let zeros = |part: usize| vec![0.0; parts[part].len()];
        let mut grads = [zeros(self.parts().norm()), zeros(self.parts().head())];
        let weight = 1.0 / judged as f32;
        let mut losses = Vec::with_capacity(passes.len());
        for (pass, (leaf, _)) in passes.iter_mut().zip(leaves) {
            let [norm, head] = &mut grads;
            let at = (&pass.rows, pass.x.as_slice(), leaf.targets.as_slice());
            let (loss, d) = self.head(params, at, weight, Some([norm, head]))?;
            (pass.judged, pass.x) = (judged, d);
            losses.push(loss);
            done([norm, head]);
            grads.iter_mut().for_each(|grads| grads.fill(0.0));
        }
        Ok(losses)
    }

    /// Goes one layer back, the last one first, whose values are `params`.
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
                None => {
                    let cpu = Cpu {
                        balance: self.balance,
                        judged: pass.judged,
                        ..self.cpu(dropout)
                    };
                    cpu.backward(params, at, kept, &pass.x, grads)?
                }
            };
        }
        Ok(())
    }

    /// Adds the gradient of the tokens' rows, in the first stage.
    pub(crate) fn bottom(&self, pass: &Pass, grads: &mut [f32]) -> Result<(), Error> {
        if !self.stage.is_first() {
            return Ok(());
        }
        let at = (pass.tokens.as_slice(), pass.x.as_slice());
        self.cpu(None).embed_rows_back(&pass.rows, at, grads)
    }

    /// A leaf back through a stage: its loss in the last stage; the pass has the gradient at its
    /// input then. `dy` is what the stage behind gave. `grads` gets the gradients of all parts.
    pub(crate) fn back(
        &self,
        values: &mut dyn PartValues,
        (pass, leaf): (&mut Pass, &Leaf),
        (dy, judged): (Option<Vec<f32>>, u64),
        grads: &mut [f32],
    ) -> Result<f64, Error> {
        let (parts, mut loss) = (self.parts(), 0.0);
        if let Some(dy) = dy {
            (pass.judged, pass.x) = (judged, dy);
        } else {
            let mut add = |own: [&[f32]; 2]| {
                for (part, own) in [parts.norm(), parts.head()].into_iter().zip(own) {
                    grads[parts.gradients[part].clone()].copy_from_slice(own);
                }
            };
            let at = (std::slice::from_mut(&mut *pass), &[(leaf, None)][..]);
            loss = self.top(values, at, judged, &mut add)?[0];
        }
        for part in (1..parts.norm()).rev() {
            let own = &mut grads[parts.gradients[part].clone()];
            self.down(values.part(part)?, pass, own)?;
        }
        self.bottom(pass, &mut grads[parts.gradients[0].clone()])?;
        Ok(loss)
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
        let mut grads = vec![0.0; self.parts().gradient_len()];
        let mut values = self.whole(params);
        let mut passes = self.begin(&mut values, (&[(leaf, None)], vec![None]), 1)?;
        let at = (&mut passes[0], leaf);
        let loss = self.back(&mut values, at, (None, judged), &mut grads)?;
        self.parts().fold(&mut grads);
        Ok((loss, grads))
    }
}

fn own_tokens(leaf: &Leaf, rows: &LeafRows) -> Vec<u32> {
    let own = rows.own_rows();
    own.flat_map(|rows| &leaf.tokens[rows]).copied().collect()
}

/// Bytes of inputs of layers of all leaves that go layer by layer together.
const INPUT_BYTES: usize = 1 << 30;
