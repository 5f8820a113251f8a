//! The engine over MLX: records a layer's graph, and MLX computes it and its gradients.
//!
//! ```text
//! Net  -- layer, x, values, dy -->  thread `mlx` (device.rs)  -- mlx_vjp of graph.rs -->  GPU
//!      <-- y, or dx and gradients of the layer's trained tensors --
//! ```
//!
//! Nothing is stored between a forward pass and its backward pass: the caller has the layer's
//! input, and `mlx_vjp` computes the layer again. Only one layer's activations are in the device's
//! memory at a time. The values between layers are f32 for every compute type, so stages and leaves
//! give the bits of one process.
//!
//! Tokens' rows and their gradients are read and added by the CPU. On a GPU that sum is made of
//! atomic additions, whose order changes from run to run.

mod device;
mod graph;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use paceline_model::{Config, ModelSource};
use paceline_model_mlx::{EvaluationLimits, Host, MlxOptions, MlxPlaces};

use crate::class::TrainingClass;
use crate::cpu::HEAD_ROWS;
use crate::dropout::Dropout;
use crate::engine::LayerEngine;
use crate::error::Error;
use crate::rows::LeafRows;
use crate::weights::{Matrix, Method, StageWeights, VectorParameter};
use device::{HeadJob, LayerJob, MlxThread};
use graph::slots;

/// A stage of a model, and how it is computed.
#[derive(Clone, Debug)]
pub(crate) struct StageSpec {
    pub(crate) places: MlxPlaces,
    pub(crate) class: TrainingClass,
    pub(crate) source: Arc<ModelSource>,
    pub(crate) config: Config,
    pub(crate) weights: Arc<StageWeights>,
    pub(crate) method: Method,
    /// Factor of pairs.
    pub(crate) scale: f32,
    /// Whether the table of tokens is the head too.
    pub(crate) is_tied: bool,
    /// Whether this is the stage with the head.
    pub(crate) has_head: bool,
}

/// MLX with a stage's fixed matrices loaded.
#[derive(Debug)]
pub(crate) struct Mlx {
    host: Host<MlxThread>,
    weights: Arc<StageWeights>,
    width: usize,
    /// The device, for people: `mlx 0.32.2 metal Apple M4 Max`.
    pub(crate) device: String,
    /// Lines for the run's owner.
    pub(crate) notes: Vec<String>,
}

impl Mlx {
    /// Opens MLX, checks that the weights fit, and loads them.
    ///
    /// # Errors
    /// [`Error::Model`]: MLX cannot be used, lacks the memory, or has no form for a matrix.
    pub(crate) fn open(spec: StageSpec) -> Result<Self, Error> {
        let patience = EvaluationLimits {
            limit: MlxOptions::PATIENCE,
            last_words: Some(MlxOptions::LAST_WORDS),
            hang_note: spec.places.hang_note.clone(),
        };
        let places = spec.places.clone();
        let host = Host::start(patience, move |watch| MlxThread::open(&places, watch))?;
        let (weights, width) = (Arc::clone(&spec.weights), spec.config.width);
        let facts = host.call(move |device| device.load(spec), || ())??;
        Ok(Self {
            host,
            weights,
            width,
            device: facts.device,
            notes: facts.notes,
        })
    }

    /// The head and its loss over the rows that have a target, as of the CPU's engine. Gives the
    /// sum of their negative log likelihoods, and with `grads` its gradient times `weight` at `x`
    /// (T, C). `params` and `grads` are of the norm before the head, and of the head.
    pub(crate) fn head(
        &self,
        params: [&[f32]; 2],
        x: &[f32],
        targets: &[Option<u32>],
        weight: f32,
        mut grads: Option<[&mut [f32]; 2]>,
    ) -> Result<(f64, Vec<f32>), Error> {
        let c = self.width;
        let (norm, matrix) = self.weights.head();
        let ranges = of_head(norm, matrix);
        let of_norm = usize::from(matches!(norm, VectorParameter::Trained(_)));
        let (of_norm, of_matrix) = ranges.split_at(of_norm);
        let mut dx = vec![0.0; if grads.is_some() { x.len() } else { 0 }];
        let wanted = targets.iter().enumerate();
        let wanted: Vec<(usize, u32)> = wanted
            .filter_map(|(row, target)| target.map(|target| (row, target)))
            .collect();
        let mut loss = 0.0;
        for block in wanted.chunks(HEAD_ROWS) {
            let rows = block.iter().flat_map(|(row, _)| &x[row * c..][..c]);
            let job = HeadJob {
                x: rows.copied().collect(),
                targets: block.iter().map(|(_, target)| *target).collect(),
                values: [values(of_norm, params[0]), values(of_matrix, params[1])].concat(),
                weight: grads.is_some().then_some(weight),
            };
            let done = self.host.call(move |device| device.head(&job), || ())??;
            loss = done.losses.iter().fold(loss, |sum, l| sum + f64::from(*l));
            let Some([norm_grads, matrix_grads]) = &mut grads else {
                continue;
            };
            for ((row, _), d) in block.iter().zip(done.dx.chunks(c)) {
                dx[row * c..][..c].copy_from_slice(d);
            }
            let (of_first, of_rest) = done.gradients.split_at(of_norm.len());
            add(of_norm, of_first, norm_grads);
            add(of_matrix, of_rest, matrix_grads);
        }
        Ok((loss, dx))
    }
}

fn of_head(norm: &VectorParameter, matrix: &Matrix) -> Vec<Range<usize>> {
    let slots = slots::of_head(norm, matrix).into_iter();
    slots.map(|slot| slot.range).collect()
}

/// Values of trained tensors, for the device's thread.
fn values(ranges: &[Range<usize>], params: &[f32]) -> Vec<Vec<f32>> {
    let of = |range: &Range<usize>| params[range.clone()].to_vec();
    ranges.iter().map(of).collect()
}

/// Adds gradients of trained tensors where they lie.
fn add(ranges: &[Range<usize>], gradients: &[Vec<f32>], grads: &mut [f32]) {
    for (range, own) in ranges.iter().zip(gradients) {
        let place = &mut grads[range.clone()];
        place.iter_mut().zip(own).for_each(|(g, own)| *g += own);
    }
}

/// The engine for one leaf.
pub(crate) struct OnMlx<'a> {
    pub(crate) mlx: &'a Mlx,
    /// Dropout of adapters' inputs.
    pub(crate) dropout: Option<Dropout>,
}

impl OnMlx<'_> {
    /// A layer's work, and where its trained tensors lie.
    fn job(
        &self,
        params: &[f32],
        layer: usize,
        rows: &LeafRows,
        x: &[f32],
    ) -> (LayerJob, Vec<Range<usize>>) {
        let slots = slots::of_layer(self.mlx.weights.layer(layer)).into_iter();
        let ranges: Vec<Range<usize>> = slots.map(|slot| slot.range).collect();
        let job = LayerJob {
            layer,
            lengths: rows.lengths.clone(),
            x: x.to_vec(),
            values: values(&ranges, params),
            dropout: self.dropout,
        };
        (job, ranges)
    }
}

impl LayerEngine for OnMlx<'_> {
    type Kept = ();

    fn forward(
        &self,
        params: &[f32],
        layer: usize,
        rows: &LeafRows,
        x: &[f32],
    ) -> Result<(Vec<f32>, ()), Error> {
        let (job, _) = self.job(params, layer, rows, x);
        let y = self
            .mlx
            .host
            .call(move |device| device.forward(&job), || ())??;
        Ok((y, ()))
    }

    fn backward(
        &self,
        params: &[f32],
        (layer, rows, x): (usize, &LeafRows, &[f32]),
        _: Option<()>,
        dy: &[f32],
        grads: &mut [f32],
    ) -> Result<Vec<f32>, Error> {
        let (job, ranges) = self.job(params, layer, rows, x);
        let dy = dy.to_vec();
        let back = move |device: &mut MlxThread| device.backward(&job, &dy);
        let (dx, gradients) = self.mlx.host.call(back, || ())??;
        add(&ranges, &gradients, grads);
        Ok(dx)
    }
}
