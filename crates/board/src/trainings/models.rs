//! Sizes of models that may be trained: of their files, or of the catalogue's entries.

use std::path::Path;

use paceline_model::{
    Config, DeltaNet, Error, Experts, Gating, HeadOrder, Latent, LayerCache, LayerShape,
    ModelSource, Role, Selection,
};
use paceline_plan::catalogue::ModelEntry;
use paceline_tensor::StateRule;
use paceline_train::TrainedShape;

/// The sizes of a model that a forecast of training needs.
#[derive(Debug)]
pub struct ModelSizes {
    pub shape: TrainedShape,
    /// Bytes of its weights as they are stored.
    pub file_bytes: u64,
    /// Whether the head is the embedding.
    pub is_tied: bool,
}

impl ModelSizes {
    /// The sizes of a GGUF file or a folder of safetensors.
    ///
    /// # Errors
    /// The errors of [`ModelSource::open`] and [`Config::read`].
    pub fn of_files(path: &Path) -> Result<Self, Error> {
        let source = ModelSource::open(path)?;
        let config = Config::read(&source)?;
        let is_tied = match config.tied {
            Some(tied) => tied,
            None => source.opt_weight(config.family, Role::Output)?.is_none(),
        };
        Ok(Self {
            shape: (&config).into(),
            file_bytes: source.file_bytes().0,
            is_tied,
        })
    }
}

/// Bits of a weight where the catalogue tells none.
const BITS: f64 = 16.0;

impl From<&ModelEntry> for ModelSizes {
    /// Layers of a kind stand one after the other: their order has no part in a forecast.
    fn from(entry: &ModelEntry) -> Self {
        let layer = |i: u32| {
            let has_experts = entry.experts > 0 && i >= entry.first_dense_layers;
            let mut layer = plain_layer(entry);
            layer.experts = has_experts.then(|| experts(entry));
            layer.latent = (entry.kv_lora_rank > 0).then(|| latent(entry));
            if i < entry.linear_layers {
                layer.cache = LayerCache::Delta(DeltaNet {
                    least_decay: None,
                    low_rank_gates: false,
                    sigmoid_gates: false,
                    taps: 4,
                    order: HeadOrder::Grouped,
                    rule: StateRule::Difference,
                });
                layer.heads = entry.linear_num_value_heads as usize;
                layer.kv_heads = entry.linear_num_key_heads as usize;
                layer.head_dim = entry.linear_head_dim as usize;
                layer.value_dim = entry.linear_head_dim as usize;
            }
            layer
        };
        let shape = TrainedShape {
            width: entry.hidden as usize,
            vocab: entry.vocab as usize,
            layers: (0..entry.layers).map(layer).collect(),
        };
        let numbers = shape.numbers(entry.tied_embeddings) as f64;
        Self {
            shape,
            file_bytes: (numbers * entry.bits.unwrap_or(BITS) / 8.0) as u64,
            is_tied: entry.tied_embeddings,
        }
    }
}

/// A layer with attention and a dense feed-forward.
fn plain_layer(entry: &ModelEntry) -> LayerShape {
    LayerShape {
        cache: LayerCache::Rows,
        window: None,
        rope: 0,
        heads: entry.heads as usize,
        kv_heads: entry.kv_heads as usize,
        head_dim: entry.head_dim as usize,
        value_dim: entry.head_dim as usize,
        query_scale: 1.0,
        gated: false,
        ffn: entry.ffn as usize,
        gate_cutoff: None,
        experts: None,
        latent: None,
        pooled: None,
        dense_beside: false,
        value_norm: false,
        keys_as_values: false,
    }
}

fn experts(entry: &ModelEntry) -> Experts {
    Experts {
        count: entry.experts as usize,
        used: entry.active_experts as usize,
        width: entry.moe_ffn as usize,
        gating: Gating::Softmax,
        normalised: true,
        scale: 1.0,
        corrected: false,
        shared: (entry.shared_experts * entry.moe_ffn) as usize,
        shared_gate: false,
        clamp: None,
        groups: None,
        scaled: false,
        compressed: None,
    }
}

fn latent(entry: &ModelEntry) -> Latent {
    Latent {
        query_rank: (entry.q_lora_rank > 0).then_some(entry.q_lora_rank as usize),
        rank: entry.kv_lora_rank as usize,
        plain: entry.qk_nope_head_dim as usize,
        turned: entry.qk_rope_head_dim as usize,
        value_dim: entry.v_head_dim as usize,
        norm_eps: 0.0,
        growth: None,
        selection: Selection::All,
        gated: false,
    }
}
