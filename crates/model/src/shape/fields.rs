//! Sizes by the names that GGUF files and `config.json` have for them.

use paceline_plan::{AttentionKind, Bits, Caches, DeltaNet, Indexer, ModelShape, Moe, Sliding};

use super::Error;

/// Field lookup by the names of both formats.
pub(super) struct ShapeFields<'a> {
    pub(super) number: &'a dyn Fn(&str, &str) -> Option<u64>,
    /// Family name in the file's format.
    pub(super) family: &'a str,
    /// Cache kind of each layer, if the file lists its layers.
    pub(super) kinds: Option<Vec<LayerCacheKind>>,
}

/// Cache of a layer: all positions before, a sliding window of them, or a recurrent state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerCacheKind {
    All,
    Window,
    State,
}

impl ShapeFields<'_> {
    fn get(&self, gguf: &str, hf: &str) -> Option<u32> {
        (self.number)(gguf, hf).and_then(|value| u32::try_from(value).ok())
    }

    fn or(&self, gguf: &str, hf: &str, usual: u32) -> u32 {
        self.get(gguf, hf).unwrap_or(usual)
    }

    pub(super) fn need(&self, gguf: &str, hf: &str) -> Result<u32, Error> {
        self.get(gguf, hf).ok_or_else(|| Error::Field {
            gguf: gguf.to_owned(),
            hf: hf.to_owned(),
        })
    }

    pub(super) fn shape(&self, name: &str, vocab: u32, tied: bool) -> Result<ModelShape, Error> {
        let heads = self.need("attention.head_count", "num_attention_heads")?;
        let width = self.need("embedding_length", "hidden_size")?;
        let layers = self.need("block_count", "num_hidden_layers")?;
        Ok(ModelShape {
            name: name.to_owned(),
            layers,
            width,
            vocab,
            tied,
            attention: self.attention(heads, width),
            sliding: self.sliding(layers),
            indexer: self.indexer(layers),
            caches: self.caches(layers, width),
            ffn: self.or("feed_forward_length", "intermediate_size", 0),
            moe: self.moe()?,
            bits: Bits::uniform(16.0),
        })
    }

    /// Sliding-window attention: every n-th of `layers` attends to all positions, as the file says
    /// or by the family's default. Other families that state a window do not use it, or use it
    /// nowhere here.
    fn sliding(&self, layers: u32) -> Option<Sliding> {
        let window = self.get("attention.sliding_window", "sliding_window");
        let every = self.get("attention.sliding_window_pattern", "sliding_window_pattern");
        let family = match self.family {
            "mistral" | "phi3" => Some(u32::MAX), // in every layer
            "olmo3" => Some(4),
            "gemma2" | "gpt-oss" | "gpt_oss" => Some(2),
            "gemma3" | "gemma3_text" => Some(6),
            _ => None,
        };
        let every = every.filter(|&n| n > 1).or(family);
        let listed = self.listed(LayerCacheKind::Window);
        let count = listed.or(every.map(|every| layers - layers / every))?;
        let window = window.filter(|&positions| positions > 0 && count > 0)?;
        let layers = count;
        Some(Sliding { layers, window })
    }

    /// A lightning indexer; layers that use another one's choice are not counted apart.
    fn indexer(&self, layers: u32) -> Option<Indexer> {
        Some(Indexer {
            layers,
            top_k: self.get("attention.indexer.top_k", "index_topk")?,
            heads: self.get("attention.indexer.head_count", "index_n_heads")?,
            dim: self.get("attention.indexer.key_length", "index_head_dim")?,
        })
    }

    /// Number of listed layers with this cache kind.
    fn listed(&self, keeps: LayerCacheKind) -> Option<u32> {
        let kinds = self.kinds.as_ref()?.iter();
        u32::try_from(kinds.filter(|kind| **kind == keeps).count()).ok()
    }

    /// Layers that share other layers' caches, and layers with recurrent states.
    fn caches(&self, layers: u32, width: u32) -> Caches {
        let borrowed = self.get("attention.shared_kv_layers", "num_kv_shared_layers");
        let borrowed = borrowed.unwrap_or(0).min(layers.saturating_sub(1));
        let net = self.delta_net();
        let conv = self.get("shortconv.l_cache", "conv_L_cache");
        let (state_bytes, state_params) = match (net, conv) {
            (Some(net), _) => (net.state_bytes(), net.params(f64::from(width))),
            (None, Some(_)) => short_conv(f64::from(width)),
            (None, None) => (0.0, 0.0),
        };
        let every = self.get("full_attention_interval", "full_attention_interval");
        let states = match every.filter(|n| state_bytes > 0.0 && *n > 1) {
            Some(every) => layers - layers / every,
            None if state_bytes > 0.0 => {
                let usual = layers - layers / 4; // the default in all models without the field
                self.listed(LayerCacheKind::State).unwrap_or(usual)
            }
            None => 0,
        };
        Caches {
            borrowed,
            states: states.min(layers - borrowed),
            state_bytes,
            state_params,
            together: match borrowed {
                0 => 0,
                _ => layers - self.first_keeper(layers - borrowed),
            },
            kept: 0.0,
        }
    }

    /// First layer whose cache later layers use. Layers from `own` on use the cache of the last
    /// earlier layer of their kind.
    fn first_keeper(&self, own: u32) -> u32 {
        let Some(kinds) = &self.kinds else {
            return own.saturating_sub(2); // one of each kind, as in all models with shared caches
        };
        let (own_kinds, others) = kinds.split_at((own as usize).min(kinds.len()));
        let keeper = |kind: &LayerCacheKind| own_kinds.iter().rposition(|own| own == kind);
        let first = others.iter().filter_map(keeper).min();
        let first = first.and_then(|first| u32::try_from(first).ok());
        first.unwrap_or(own)
    }

    fn delta_net(&self) -> Option<DeltaNet> {
        let size = |gguf, hf| self.get(gguf, hf).map(f64::from);
        let key = size("ssm.state_size", "linear_key_head_dim")?;
        let heads = size("ssm.time_step_rank", "linear_num_value_heads")?;
        let key_heads = size("ssm.group_count", "linear_num_key_heads")?;
        let value = size("", "linear_value_head_dim").unwrap_or(key);
        Some(DeltaNet {
            key,
            key_heads,
            value,
            heads,
        })
    }

    fn attention(&self, heads: u32, width: u32) -> AttentionKind {
        let rank = self.or("attention.kv_lora_rank", "kv_lora_rank", 0);
        let head_dim = self.get("attention.key_length", "head_dim");
        let head_dim = head_dim.unwrap_or_else(|| width / heads.max(1));
        if rank == 0 {
            let kv = self.get("attention.head_count_kv", "num_key_value_heads");
            return AttentionKind::Gqa {
                heads,
                kv_heads: kv.unwrap_or(heads),
                head_dim,
            };
        }
        let rope = self.or("rope.dimension_count", "qk_rope_head_dim", 64);
        // GGUF files of absorbed models give latent sizes in key_length, and head sizes in other
        // keys.
        let key = self.or("attention.key_length_mla", "", head_dim);
        AttentionKind::Mla {
            heads,
            q_rank: self.or("attention.q_lora_rank", "q_lora_rank", 0),
            kv_rank: rank,
            nope_dim: self.or("", "qk_nope_head_dim", key.saturating_sub(rope)),
            rope_dim: rope,
            value_dim: self.or("attention.value_length_mla", "v_head_dim", 128),
        }
    }

    /// Shared experts: the number in the file, or the shared width in multiples of `width`.
    fn shared_experts(&self, width: u32) -> u32 {
        let [gguf, hf] = [
            "expert_shared_feed_forward_length",
            "shared_expert_intermediate_size",
        ];
        let count = self.get("expert_shared_count", "n_shared_experts");
        let wide = self.get(gguf, hf);
        let wide = wide.map(|wide| wide.div_ceil(width.max(1)));
        count.or(wide).unwrap_or(0)
    }

    /// Families name expert fields differently; the first present field counts.
    fn moe(&self) -> Result<Option<Moe>, Error> {
        let first = |names: [(&str, &str); 3]| names.iter().find_map(|(g, h)| self.get(g, h));
        let experts = first([
            ("expert_count", "num_experts"),
            ("", "n_routed_experts"),
            ("", "num_local_experts"),
        ]);
        let Some(experts) = experts.filter(|&n| n > 0) else {
            return Ok(None);
        };
        let active = first([
            ("expert_used_count", "num_experts_per_tok"),
            ("", "experts_per_token"),
            ("", "moe_topk"),
        ]);
        let width = first([
            ("expert_feed_forward_length", "moe_intermediate_size"),
            ("feed_forward_length", "intermediate_size"),
            ("", "expert_dim"),
        ]);
        let missing = |name: &str| Error::Field {
            gguf: name.to_owned(),
            hf: name.to_owned(),
        };
        let width = width.ok_or_else(|| missing("expert_feed_forward_length"))?;
        let every = self.or("interleave_moe_layer_step", "decoder_sparse_step", 1);
        Ok(Some(Moe {
            experts,
            active: active.ok_or_else(|| missing("expert_used_count"))?,
            shared: self.shared_experts(width),
            ffn: width,
            dense_layers: self.or("leading_dense_block_count", "first_k_dense_replace", 0),
            every: every.max(1),
            groups: self.or("expert_group_count", "n_group", 1).max(1),
        }))
    }
}

/// Bytes of the inputs of a short convolution of width `c`, two pages per sequence. Its weights:
/// three inputs and the output.
fn short_conv(c: f64) -> (f64, f64) {
    const PAGE: f64 = 64.0;
    (2.0 * PAGE * 4.0 * c, 4.0 * c * c)
}
