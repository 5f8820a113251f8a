//! Roofline of a layer: each kernel class takes the longer of reading its bytes and doing its
//! arithmetic. Both overlap inside a kernel (Williams, Waterman, Patterson, CACM 52, 2009). The
//! classes follow each other; each launched operation costs a constant besides.

use crate::calibration::Speed;
use crate::cost::moe;
use crate::placement::Split;
use crate::{AttentionKind, Error, ModelShape};

/// The rows of a step in a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRows {
    /// Tokens in the step.
    pub rows: f64,
    /// Sequences they belong to: each has its own cache to read.
    pub sequences: f64,
    /// Keys that a row attends to, on average.
    pub keys: f64,
    /// Whether rows are prompt tokens, so that rates of arithmetic must be known.
    pub prefill: bool,
}

/// A rank's part of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerPart {
    pub split: Split,
    /// The rank's share.
    pub share: f64,
    /// Ranks in the stage.
    pub ranks: u32,
    /// Whether the engine deals whole experts in any split:
    /// [`EngineProfile::deals_experts`](crate::calibration::Engine::deals_experts).
    pub deals: bool,
}

/// Seconds for one layer by one rank.
///
/// # Errors
/// [`Error::MissingFact`] for prompt rows on a node whose arithmetic rate is unknown.
pub fn layer(
    model: &ModelShape,
    index: u32,
    part: LayerPart,
    rows: StepRows,
    speed: &Speed,
) -> Result<f64, Error> {
    if rows.prefill && speed.rates.is_none() {
        return Err(Error::MissingFact {
            node: "the node".to_owned(),
            fact: "rate of arithmetic",
        });
    }
    let matmul = speed.rates.map(|r| r.matmul);
    let common = common_params(model, index, part);
    let common = roof(
        common * model.bits.rest / 8.0,
        2.0 * common * rows.rows,
        speed,
        matmul,
    );
    let attention = attention(model, part, rows, speed);
    let operations = operations(model, index) * speed.op;
    Ok(common + attention + experts(model, index, part, rows, speed) + operations)
}

/// Seconds for the output head, for `rows` rows, by the rank with `share` of it.
pub fn head(model: &ModelShape, share: f64, rows: f64, speed: &Speed) -> f64 {
    const OPERATIONS: f64 = 4.0; // norm, product, and two of the sampler
    let params = model.head_params() * share;
    let matmul = speed.rates.map(|r| r.matmul);
    roof(
        params * model.bits.rest / 8.0,
        2.0 * params * rows,
        speed,
        matmul,
    ) + OPERATIONS * speed.op
}

/// The longer of `bytes` and `flops`; a rate that is not known does not bound.
fn roof(bytes: f64, flops: f64, speed: &Speed, rate: Option<f64>) -> f64 {
    (bytes / speed.memory).max(rate.map_or(0.0, |rate| flops / rate))
}

/// Weights that every row passes at this rank. In a tensor split low-rank projections down are
/// computed by every rank; with more ranks than KV heads, keys and values are too. A shared expert
/// that is dealt counts among the [experts](experts).
fn common_params(model: &ModelShape, index: u32, part: LayerPart) -> f64 {
    let dealt = if part.deals {
        model.shared_params(index)
    } else {
        0.0
    };
    match part.split {
        Split::Whole => model.common_params(index),
        Split::Expert => {
            let others = if part.deals { 1.0 - part.share } else { 0.0 };
            model.common_params(index) - dealt - model.dense_params(index) * others
        }
        Split::Tensor => tensor_params(model, index, part, dealt),
    }
}

/// Like [`common_params`] in a tensor split, without the weights `dealt`.
fn tensor_params(model: &ModelShape, index: u32, part: LayerPart, dealt: f64) -> f64 {
    let all = model.common_params(index) - dealt;
    let c = f64::from(model.width);
    let kept = match model.attention {
        AttentionKind::Mla {
            q_rank,
            kv_rank,
            rope_dim,
            ..
        } => c * f64::from(q_rank + kv_rank + rope_dim),
        AttentionKind::OneKey {
            q_rank, head_dim, ..
        } => c * f64::from(q_rank + head_dim),
        AttentionKind::Gqa { .. } => 0.0,
    };
    let router = model.router_params(index);
    let copied = match model.attention {
        AttentionKind::Gqa {
            kv_heads, head_dim, ..
        } => {
            let excess = (1.0 / f64::from(kv_heads) - part.share).max(0.0);
            2.0 * c * f64::from(kv_heads) * f64::from(head_dim) * excess
        }
        AttentionKind::Mla { .. } | AttentionKind::OneKey { .. } => 0.0,
    };
    (all - kept - router) * part.share + kept + router + copied
}

/// Share of a layer's cache that a rank has.
pub fn cache_share(model: &ModelShape, part: LayerPart) -> f64 {
    match (part.split, model.attention) {
        (Split::Tensor, AttentionKind::Gqa { kv_heads, .. }) => {
            part.share.max(1.0 / f64::from(kv_heads))
        }
        // The latent vector, or the one key, serves all heads; every rank needs it whole.
        (Split::Tensor, AttentionKind::Mla { .. } | AttentionKind::OneKey { .. })
        | (Split::Whole | Split::Expert, _) => 1.0,
    }
}

fn attention(model: &ModelShape, part: LayerPart, rows: StepRows, speed: &Speed) -> f64 {
    let heads = if part.split == Split::Tensor {
        part.share
    } else {
        1.0
    };
    let cached = model.attention.cached() * model.bits.kv / 8.0 * cache_share(model, part);
    let pair = if rows.prefill {
        model.attention.pair_flops()
    } else {
        model.attention.decode_pair_flops()
    };
    // A sequence's cache is read once per step for any number of its rows: twice the mean of a
    // chunk's keys is an upper bound that decode (one row) meets exactly with its own. Layers with
    // states read these instead, for any number of keys.
    let states = model.states_among_all();
    let keys = (1.0 - states) * model.keys_seen(rows.keys);
    // Every rank scores all index keys, since all of them need the whole choice.
    let scored = model.index_keys_scored(rows.keys);
    let index = model.indexer.map_or(0.0, |own| f64::from(own.dim)) * model.bits.kv / 8.0;
    let bytes = rows.sequences * (keys * cached + scored * index);
    let flops = rows.rows * (keys * pair * heads + scored * model.index_flops());
    let state = rows.sequences * states * model.state_read() * cache_share(model, part);
    roof(bytes, flops, speed, speed.rates.map(|r| r.attention)) + state / speed.memory
}

fn experts(model: &ModelShape, index: u32, part: LayerPart, rows: StepRows, speed: &Speed) -> f64 {
    let Some(moe) = model.moe.filter(|_| model.is_moe(index)) else {
        return 0.0;
    };
    let (e, a) = (f64::from(moe.experts), f64::from(moe.active));
    let is_dealt = part.split == Split::Expert || part.split == Split::Tensor && part.deals;
    let shared = if is_dealt && part.deals {
        moe.shared
    } else {
        0
    };
    let load = if is_dealt {
        let uneven = moe::imbalance((moe.experts, moe.active, shared), part.ranks, rows.rows);
        (part.share * uneven).min(1.0)
    } else if part.split == Split::Tensor {
        part.share
    } else {
        1.0
    };
    let (one, shared) = (model.expert_params() * load, f64::from(shared));
    let (bits, rate) = (model.bits.experts, speed.rates.map(|r| r.expert));
    let kernel =
        |read: f64, computed: f64| roof(read * one * bits / 8.0, 2.0 * computed * one, speed, rate);
    // A few rows each read the experts they need; of many, those of an expert go together, in
    // tiles where the engine has such. Engines take what is sooner.
    let all = rows.rows * (a + shared);
    let whole_rows = rows.rows.ceil().min(f64::from(u32::MAX)) as u32;
    let padded = if part.deals {
        rows.rows * a
    } else {
        moe::padded_rows(moe.experts, moe.active, whole_rows)
    };
    let touched = moe::touched(e, a, rows.rows) + shared;
    kernel(all, all).min(kernel(touched, padded + rows.rows * shared))
}

/// Launched operations of a layer, counted in mlx-lm's `llama.py`, `qwen3_moe.py` and
/// `deepseek_v3.py` (2026-08); llama.cpp's graphs have about as many.
///
/// - attention with grouped queries, 12: norm, q, k, v, two rotations, two cache writes, attention,
///   output, residual, and one of layout;
/// - attention with low ranks, 24: three norms, five projections, two rotations, two cache writes
///   and four of scores. Two more lead into and out of the latent space, then output, residual, and
///   layout;
/// - dense feed-forward, 6: norm, gate, up, gated product, down, residual;
/// - mixture, 14: norm, router, scores, selection, gather, sum, division, gate, up, gated product,
///   down, weighting, sum, residual;
/// - shared experts, 5: gate, up, gated product, down, sum;
/// - with low-rank attention, 1: scores have a bias and are negated for the selection. Where groups
///   of experts are chosen first (`group_expert_select`), 6: the best two of each, their sum, the
///   selection, a copy and a scatter besides.
pub fn operations(model: &ModelShape, index: u32) -> f64 {
    let low_rank = !matches!(model.attention, AttentionKind::Gqa { .. });
    let attention = if low_rank { 24.0 } else { 12.0 };
    let Some(moe) = model.moe.filter(|_| model.is_moe(index)) else {
        return attention + 6.0;
    };
    let shared = if moe.shared > 0 { 5.0 } else { 0.0 };
    let selection = match (low_rank, moe.groups) {
        (false, _) => 0.0,
        (true, 1) => 1.0,
        (true, _) => 6.0,
    };
    attention + 14.0 + shared + selection
}
