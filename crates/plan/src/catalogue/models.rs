//! Entries for models.

use serde::Deserialize;

use crate::model::{Bits, Caches};
use crate::{AttentionKind, DeltaNet, Error, ModelShape, Moe, Sliding};

/// A model as catalogues and published rows write it. `head_dim` is ignored with low-rank
/// attention, whose parts are stated one by one.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct ModelEntry {
    pub name: String,
    pub layers: u32,
    /// Width.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    pub kv_heads: u32,
    /// Size of a head.
    pub head_dim: u32,
    /// Width of the dense feed-forward.
    pub ffn: u32,
    /// Rows of the embedding.
    pub vocab: u32,
    /// Whether the head is the embedding.
    #[serde(default)]
    pub tied_embeddings: bool,
    /// Routed experts in a layer; 0 for a dense model.
    #[serde(default)]
    pub experts: u32,
    /// Routed experts per token.
    #[serde(default)]
    pub active_experts: u32,
    /// Experts that every token uses.
    #[serde(default)]
    pub shared_experts: u32,
    /// Width of an expert.
    #[serde(default)]
    pub moe_ffn: u32,
    /// Dense layers at the start of a mixture.
    #[serde(default)]
    pub first_dense_layers: u32,
    /// Groups that experts are chosen in first; where nothing is known, none.
    pub expert_groups: Option<u32>,
    /// Rank of low-rank queries.
    #[serde(default)]
    pub q_lora_rank: u32,
    /// Rank of low-rank keys and values; 0 for grouped attention.
    #[serde(default)]
    pub kv_lora_rank: u32,
    /// Size of a head's part without rotation.
    #[serde(default)]
    pub qk_nope_head_dim: u32,
    /// Size of a head's rotated part.
    #[serde(default)]
    pub qk_rope_head_dim: u32,
    /// Size of a value head.
    #[serde(default)]
    pub v_head_dim: u32,
    /// Groups of heads with an output rank of their own, as in DeepSeek V4; 0 for none.
    #[serde(default)]
    pub o_groups: u32,
    /// Rank of a group's output.
    #[serde(default)]
    pub o_lora_rank: u32,
    /// Share of the positions that the mean layer keeps, where positions are compressed.
    #[serde(default)]
    pub kept_positions: f64,
    /// Layers with a gated delta net.
    #[serde(default)]
    pub linear_layers: u32,
    /// Heads of a delta net's keys.
    #[serde(default)]
    pub linear_num_key_heads: u32,
    /// Heads of a delta net's values.
    #[serde(default)]
    pub linear_num_value_heads: u32,
    /// Size of a delta net's keys and values.
    #[serde(default)]
    pub linear_head_dim: u32,
    /// Layers that look at the last `sliding_window` positions only.
    #[serde(default)]
    pub sliding_layers: u32,
    /// Positions in the window of those layers.
    #[serde(default)]
    pub sliding_window: u32,
    /// Published parameters, billions, to check the shape against.
    pub params_b: Option<f64>,
    /// Bits that it is usually stored in, for plans that name none.
    pub bits: Option<f64>,
    /// Whether only its experts are stored in few bits.
    #[serde(default)]
    pub native_experts: bool,
    /// Bits of the rest where only experts are stored in few bits; 16 in a model's own files.
    pub rest_bits: Option<f64>,
    #[serde(default)]
    pub source: String,
}

impl ModelEntry {
    /// The shape, stored in `bits` bits per weight on average.
    ///
    /// # Errors
    /// [`Error::Value`] for a number that no model has.
    pub fn shape(&self, bits: f64) -> Result<ModelShape, Error> {
        let attention = if self.o_groups > 0 {
            AttentionKind::OneKey {
                heads: self.heads,
                head_dim: self.head_dim,
                q_rank: self.q_lora_rank,
                groups: self.o_groups,
                out_rank: self.o_lora_rank,
            }
        } else if self.kv_lora_rank > 0 {
            AttentionKind::Mla {
                heads: self.heads,
                q_rank: self.q_lora_rank,
                kv_rank: self.kv_lora_rank,
                nope_dim: self.qk_nope_head_dim,
                rope_dim: self.qk_rope_head_dim,
                value_dim: self.v_head_dim,
            }
        } else {
            AttentionKind::Gqa {
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
            }
        };
        let moe = (self.experts > 0).then_some(Moe {
            experts: self.experts,
            active: self.active_experts,
            shared: self.shared_experts,
            ffn: self.moe_ffn,
            dense_layers: self.first_dense_layers,
            every: 1,
            groups: self.expert_groups.unwrap_or(1),
        });
        let shape = ModelShape {
            name: self.name.clone(),
            layers: self.layers,
            width: self.hidden,
            vocab: self.vocab,
            tied: self.tied_embeddings,
            attention,
            sliding: (self.sliding_layers > 0).then_some(Sliding {
                layers: self.sliding_layers,
                window: self.sliding_window,
            }),
            indexer: None,
            caches: self.caches(),
            ffn: self.ffn,
            moe,
            bits: Bits::uniform(bits),
        };
        shape.check()?;
        Ok(shape)
    }

    /// The shape as it is usually stored, `bits` bits per weight on average.
    ///
    /// # Errors
    /// The errors of [`shape`](Self::shape).
    pub fn stored(&self, bits: f64) -> Result<ModelShape, Error> {
        let shape = self.shape(bits)?;
        Ok(match self.native_experts {
            true => shape.with_native_experts(self.rest_bits.unwrap_or(16.0)),
            false => shape,
        })
    }

    fn caches(&self) -> Caches {
        let kept = self.kept_positions;
        if self.linear_layers == 0 {
            return Caches {
                kept,
                ..Caches::default()
            };
        }
        let net = DeltaNet {
            key: f64::from(self.linear_head_dim),
            key_heads: f64::from(self.linear_num_key_heads),
            value: f64::from(self.linear_head_dim),
            heads: f64::from(self.linear_num_value_heads),
        };
        Caches {
            states: self.linear_layers,
            state_bytes: net.state_bytes(),
            state_params: net.params(f64::from(self.hidden)),
            kept,
            ..Caches::default()
        }
    }
}
