//! DeepSeek V4 and V4.1, text only.
//!
//! - Every half of a layer is between constrained residual streams.
//! - All heads share one key per position, which is its value too. A row attends to a window and to
//!   compressed keys of runs of all earlier positions, in some layers to those of an indexer's
//!   choice. The end of a key turns, and the attention output is turned back.
//! - The output of each group of heads is compressed.
//! - In the first layers the token chooses the experts. Gates are clamped.
//! - V4.1: keys are rounded to 8 and 4 bits. Layers share compressed keys and choices of them. A
//!   half reads streams with the weights of the half before. Some layers read a memory of n-grams.
//!
//! Source: DeepSeek-AI 2026 (DeepSeek-V4); `modeling_deepseek_v4.py` and `modeling_deepseek_v41.py`
//! of transformers; `deepseek_v41.py` of mlx-lm.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, V41};
use crate::role::{LayerRole, Role};
use crate::{Config, Error};

/// Names on the hub.
pub(super) const NAMES: FileNames = FileNames {
    hf_ffn_norm: "ffn_norm",
    block: "ffn",
    expert: ["w1", "w3", "w2"],
    router: "ffn.gate",
    choice: "ffn.gate.bias",
    hf_own,
    ..FileNames::USUAL
};

const fn hf_own(role: Role) -> Option<&'static str> {
    let part = match role {
        Role::TokenEmbedding => return Some("embed"),
        Role::Output => return Some("head"),
        Role::Layer(_, part) => part,
        _ => return None,
    };
    Some(match part {
        LayerRole::AttentionNorm => "attn_norm",
        LayerRole::QueryDown => "attn.wq_a",
        LayerRole::QueryDownNorm => "attn.q_norm",
        LayerRole::QueryUp => "attn.wq_b",
        LayerRole::Key => "attn.wkv",
        LayerRole::KeyNorm => "attn.kv_norm",
        LayerRole::Sinks => "attn.attn_sink",
        LayerRole::GroupOutput => "attn.wo_a",
        LayerRole::AttentionOutput => "attn.wo_b",
        LayerRole::RunInput(false) => "attn.compressor.wkv",
        LayerRole::RunGate(false) => "attn.compressor.wgate",
        LayerRole::RunBias(false) => "attn.compressor.ape",
        LayerRole::RunNorm(false) => "attn.compressor.norm",
        LayerRole::RunInput(true) => "attn.indexer.compressor.wkv",
        LayerRole::RunGate(true) => "attn.indexer.compressor.wgate",
        LayerRole::RunBias(true) => "attn.indexer.compressor.ape",
        LayerRole::RunNorm(true) => "attn.indexer.compressor.norm",
        LayerRole::IndexerQuery => "attn.indexer.wq_b",
        LayerRole::IndexerKey => "attn.indexer.wk",
        LayerRole::IndexerNorm => "attn.indexer.k_norm",
        LayerRole::IndexerWeights => "attn.indexer.weights_proj",
        LayerRole::ExpertTable => "ffn.gate.tid2eid",
        LayerRole::NgramTable => "engram.embed",
        LayerRole::NgramKey | LayerRole::NgramValue => "engram.wkv",
        LayerRole::NgramQueryNorm => "engram.q_weight",
        LayerRole::NgramKeyNorm => "engram.k_weight",
        LayerRole::SharedGate => "ffn.shared_experts.w1",
        LayerRole::SharedUp => "ffn.shared_experts.w3",
        LayerRole::SharedDown => "ffn.shared_experts.w2",
        _ => return None,
    })
}

/// Rotary sets in [`Config::ropes`]: of layers with a window only, and of the others.
const WINDOWED: usize = 0;
const COMPRESSED: usize = 1;

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::DeepSeek4, fields)?;
    let is_later = fields.is_type(V41);
    config.streams = Some(fields.constrained_streams(!is_later, is_later)?);
    if is_later {
        config.context = fields.candidate_context(config.context)?;
        config.ngrams = fields.engrams(&config)?;
    }
    config.ropes = fields.compressed_ropes(&config)?;
    let caches = fields.compressed_layers(&config)?;
    let experts = fields.token_experts(&config)?;
    for ((layer, of), experts) in config.layers.iter_mut().zip(caches).zip(experts) {
        layer.window = Some(of.window);
        layer.rope = if of.runs.is_some() {
            COMPRESSED
        } else {
            WINDOWED
        };
        layer.cache = crate::LayerCache::Compressed(of);
        layer.experts = Some(experts);
    }
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows with S streams.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.add_ngrams(w, index)?; //             residual (T, S, C) += memory of the last tokens
    step.mix_streams(w, Half::Attention)?; //  residual (T, S, C) -> x (T, C)
    step.attend_compressed(w, index)?; //      x (T, C) -> keys, to the cache -> attended (T, G R)
    step.project_attention(w)?; //             attended (T, G R) -> delta (T, C)
    step.add_to_streams()?; //                 residual (T, S, C) = mix of it + weights * delta
    step.mix_streams(w, Half::FeedForward)?; // residual (T, S, C) -> x (T, C)
    step.experts(w)?; //                       x (T, C) -> delta (T, C)
    step.add_to_streams() //                   residual (T, S, C) = mix of it + weights * delta
}
