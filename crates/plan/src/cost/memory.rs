//! Bytes that a node needs for its part.

use crate::cost::kernels::{LayerPart, cache_share};
use crate::cost::moe::touched;
use crate::placement::{PipelineStage, Split, StageMember};
use crate::workload::CHUNK;
use crate::{ModelShape, Workload};

/// Bytes in a node's memory, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Weights that stay in memory.
    pub weights: f64,
    /// Keys, values and states of all requests at full length.
    pub cache: f64,
    /// Activations and logits of a step, and the program's own memory.
    pub buffers: f64,
}

/// Program, tokenizer and allocator slack. Our CPU engine's resident set without weights and cache
/// is 60 to 180 MiB for the models of docs/measurements.md. GPU runtimes take 0.3 to 0.6 GB.
const PROGRAM: f64 = 256e6;

impl Usage {
    pub fn total(&self) -> f64 {
        self.weights + self.cache + self.buffers
    }
}

/// Bytes of `member`'s part of `stage`.
pub fn usage(
    model: &ModelShape,
    workload: &Workload,
    stage: &PipelineStage,
    member: &StageMember,
    ends: Ends,
) -> Usage {
    let part = part_of(stage, member);
    let streamed = stage.layers.start + member.streamed;
    // Streamed layers pass through a window of two: one computes while the next is read. Of
    // experts, those of a step must be there.
    let first = streamed_bytes(model, workload, part, stage.layers.start);
    let window = f64::from(member.streamed.min(2)) * first.iter().sum::<f64>();
    let layers = range_weights(model, streamed..stage.layers.end, part);
    let rows = workload.positions() as f64 * model.cached() * model.bits.kv / 8.0
        * model.row_layers(stage.layers.clone());
    let states = f64::from(workload.concurrency) * model.state_bytes(stage.layers.clone());
    let cache = (rows + states) * cache_share(model, part);
    Usage {
        weights: layers + window + end_bytes(model, part, ends),
        cache,
        buffers: buffers(model, workload) + PROGRAM,
    }
}

/// The fewest layers of `member`'s part that must be streamed for it to have at most `memory`
/// bytes; all if even that is too much.
pub fn least_streamed(
    model: &ModelShape,
    workload: &Workload,
    stage: &PipelineStage,
    member: &StageMember,
    (ends, memory): (Ends, f64),
) -> u32 {
    let layers = stage.layers.end - stage.layers.start;
    let fits = |streamed: &u32| {
        let member = StageMember {
            streamed: *streamed,
            ..member.clone()
        };
        usage(model, workload, stage, &member, ends).total() <= memory
    };
    (0..layers).find(fits).unwrap_or(layers)
}

/// Bytes of layer `index` that a rank needs for a step of all requests: without routed experts, and
/// of these.
pub fn streamed_bytes(
    model: &ModelShape,
    workload: &Workload,
    part: LayerPart,
    index: u32,
) -> [f64; 2] {
    let moe = model.moe.filter(|_| model.is_moe(index));
    let experts = moe.map_or(0.0, |moe| {
        let rows = f64::from(workload.concurrency);
        let touched = touched(f64::from(moe.experts), f64::from(moe.active), rows);
        touched * model.expert_params() * model.bits.experts / 8.0
    });
    let common = model.common_params(index) * model.bits.rest / 8.0;
    let [of_common, of_experts] = shares(part);
    [common * of_common, experts * of_experts]
}

/// A rank's shares of a layer without routed experts, and of these.
pub fn shares(part: LayerPart) -> [f64; 2] {
    match part.split {
        Split::Whole => [1.0; 2],
        Split::Tensor => [part.share; 2],
        Split::Expert => [1.0, part.share],
    }
}

/// The ends of the model that a stage has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    pub first: bool,
    /// The output head.
    pub last: bool,
}

/// A member's part, for the cost of kernels.
pub fn part_of(stage: &PipelineStage, member: &StageMember) -> LayerPart {
    LayerPart {
        split: stage.split,
        share: member.share,
        ranks: u32::try_from(stage.members.len()).unwrap_or(u32::MAX),
        deals: false,
    }
}

/// Bytes of a range of layers that a rank stores: layers of a kind are alike.
fn range_weights(model: &ModelShape, layers: std::ops::Range<u32>, part: LayerPart) -> f64 {
    let mixtures = model.mixtures(&layers);
    let dense = layers.end.saturating_sub(layers.start) - mixtures;
    let of = |count: u32, is_moe: bool| {
        let one = (0..model.layers).find(|index| model.is_moe(*index) == is_moe);
        let one = one.filter(|_| count > 0);
        one.map_or(0.0, |index| f64::from(count) * weights(model, index, part))
    };
    of(dense, false) + of(mixtures, true)
}

/// Bytes of layer `index` that a rank stores.
fn weights(model: &ModelShape, index: u32, part: LayerPart) -> f64 {
    let common = model.common_params(index) * model.bits.rest / 8.0;
    let routed = model.routed_params(index) * model.bits.experts / 8.0;
    let [of_common, of_routed] = shares(part);
    common * of_common + routed * of_routed
}

/// Embedding and head. In a tensor split both are cut by rows of the vocabulary.
fn end_bytes(model: &ModelShape, part: LayerPart, ends: Ends) -> f64 {
    let tables = match (ends.first, ends.last) {
        (true, true) if model.tied => 1.0,
        (first, last) => f64::from(u8::from(first)) + f64::from(u8::from(last)),
    };
    let share = if part.split == Split::Tensor {
        part.share
    } else {
        1.0
    };
    tables * model.head_bytes() * share
}

/// Activations of a step in 32 bits. Every row has the residual stream and its norm, queries, keys,
/// values, and the feed-forward's two halves. Every request has logits. With experts, the rows are
/// gathered once per active expert.
fn buffers(model: &ModelShape, workload: &Workload) -> f64 {
    let rows = f64::from(workload.prompt.min(CHUNK).max(workload.concurrency));
    let heads = model.attention.heads();
    let attention = model.attention.pair_flops() / 2.0 + f64::from(heads) * 2.0;
    let dense = 2.0 * f64::from(model.ffn);
    let mixture = model.moe.map_or(0.0, |moe| {
        f64::from(moe.active + moe.shared) * (2.0 * f64::from(moe.ffn) + f64::from(model.width))
    });
    let row = 4.0 * f64::from(model.width) + attention + dense.max(mixture);
    let logits = f64::from(workload.concurrency) * f64::from(model.vocab);
    4.0 * (rows * row + logits)
}
