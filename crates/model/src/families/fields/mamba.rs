//! Fields of Mamba 2 (Nemotron-H).

use paceline_tensor::StateRule;
use serde_json::Value;

use super::{ConfigFields, wrong_type, wrong_value};
use crate::config::{DeltaNet, HeadOrder, MAX_HEADS, MAX_TAPS, MAX_WIDTH};
use crate::families::{BlockKind, Blocks, layers_of};
use crate::{Error, Experts, LayerCache, LayerShape};

impl ConfigFields<'_> {
    /// The layers of a model whose file has blocks of one kind each.
    pub(crate) fn nemotron_layers(&self) -> Result<Vec<Blocks>, Error> {
        let kinds = match self {
            Self::Gguf { .. } => self.gguf_blocks()?,
            Self::Hf(_) => self.hf_blocks()?,
        };
        let layers = layers_of(&kinds).filter(|layers| !layers.is_empty());
        layers.ok_or_else(|| {
            let expected = "one that begins with Mamba or attention, and no two feed-forwards \
                            after each other";
            wrong_value("order of the blocks", "another", expected)
        })
    }

    fn hf_blocks(&self) -> Result<Vec<BlockKind>, Error> {
        const LISTS: [&str; 2] = ["layers_block_type", "layer_types"];
        const PATTERN: &str = "hybrid_override_pattern";
        if let Some(pattern) = self.hf(PATTERN, "a string", Value::as_str)? {
            let kind = |c: char| kind_of(c.encode_utf8(&mut [0; 4]));
            let kinds = pattern.chars().map(kind).collect::<Option<_>>();
            let expected = "letters M, *, - and E";
            return kinds.ok_or_else(|| wrong_value(PATTERN, pattern, expected));
        }
        for name in LISTS {
            let Some(list) = self.hf(name, "a list", Value::as_array)? else {
                continue;
            };
            let kinds = list.iter().map(|kind| kind.as_str().and_then(kind_of));
            let expected = "linear_attention, full_attention, mlp or moe for each block";
            let kinds = kinds.collect::<Option<_>>();
            return kinds.ok_or_else(|| wrong_type(name, expected, &Value::Array(list.clone())));
        }
        Err(self.missing("", PATTERN))
    }

    /// Blocks without KV heads and without a feed-forward are Mamba, as in llama.cpp.
    fn gguf_blocks(&self) -> Result<Vec<BlockKind>, Error> {
        let Self::Gguf { file, .. } = self else {
            return Ok(Vec::new());
        };
        let n = self.size("block_count", "", 1, 1 << 10)?;
        let of = |key, most| {
            let sizes = self.opt_sizes((key, ""), n, (0, most))?;
            sizes.ok_or_else(|| self.missing(key, ""))
        };
        let heads = of("attention.head_count_kv", MAX_HEADS)?;
        let ffns = of("feed_forward_length", MAX_WIDTH)?;
        let has_experts = |i: usize| {
            let parts = ["ffn_gate_inp", "ffn_up_exps", "ffn_down_exps"];
            let mut names = parts.iter().map(|part| format!("blk.{i}.{part}.weight"));
            names.any(|name| file.has(&name))
        };
        let kind = |i: usize| match (heads[i], has_experts(i) || ffns[i] > 0) {
            (_, true) => BlockKind::FeedForward {
                experts: has_experts(i),
            },
            (0, false) => BlockKind::Mamba,
            (_, false) => BlockKind::Attention,
        };
        Ok((0..n).map(kind).collect())
    }

    /// Shape of a layer of Mamba 2.
    pub(crate) fn mamba(&self, usual: &LayerShape) -> Result<LayerShape, Error> {
        let heads = |gguf, hf| self.size(gguf, hf, 1, MAX_HEADS);
        let kv_heads = heads("ssm.group_count", "n_groups")?;
        let heads = heads("ssm.time_step_rank", "mamba_num_heads")?;
        let head_dim = self.size("ssm.state_size", "ssm_state_size", 1, MAX_WIDTH)?;
        let value_dim = match self {
            Self::Hf(_) => self.size("", "mamba_head_dim", 1, MAX_WIDTH)?,
            Self::Gguf { .. } => self.size("ssm.inner_size", "", 1, MAX_WIDTH)? / heads,
        };
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of the {heads} heads");
            return Err(wrong_value("number of Mamba's groups", kv_heads, expected));
        }
        for dim in [head_dim, value_dim] {
            if dim == 0 || !dim.is_multiple_of(16) {
                return Err(wrong_value("size of Mamba's heads", dim, "a multiple of 16"));
            }
        }
        let taps = self.size("ssm.conv_kernel", "conv_kernel", 1, MAX_TAPS as u64)?;
        let limit = self.hf("time_step_limit", "a list", Value::as_array)?;
        let least = limit.and_then(|limit| limit.first()?.as_f64());
        if let Some(least) = least.filter(|least| *least > 0.0) {
            return Err(wrong_value("time_step_limit", least, "0 or more, unlimited"));
        }
        let activation = self.hf("mamba_hidden_act", "a string", Value::as_str)?;
        if let Some(other) = activation.filter(|name| *name != "silu") {
            return Err(wrong_value("mamba_hidden_act", other, "silu"));
        }
        Ok(LayerShape {
            cache: LayerCache::Delta(DeltaNet {
                taps,
                order: HeadOrder::Grouped,
                rule: StateRule::Sum,
            }),
            heads,
            kv_heads,
            head_dim,
            value_dim,
            query_scale: 1.0,
            ..*usual
        })
    }

    /// Experts without gates, and a shared one of another width.
    pub(crate) fn nemotron_experts(&self, ffn: usize) -> Result<Experts, Error> {
        if let Some(size) = self.opt_size("moe_latent_size", "moe_latent_size", 1, MAX_WIDTH)? {
            return Err(wrong_value("moe_latent_size", size, "none"));
        }
        let mut experts = self.sigmoid_experts("n_routed_experts", ffn)?;
        let count = self.opt_size("expert_shared_count", "n_shared_experts", 0, 1 << 10)?;
        let width = self.opt_size(
            "expert_shared_feed_forward_length",
            "moe_shared_expert_intermediate_size",
            1,
            MAX_WIDTH,
        )?;
        experts.shared = match (count, width) {
            (Some(0), _) => 0,
            (count, width) => count.unwrap_or(1) * width.unwrap_or(experts.width),
        };
        experts.shared_gate = false;
        Ok(experts)
    }
}

fn kind_of(name: &str) -> Option<BlockKind> {
    Some(match name {
        "M" | "linear_attention" | "mamba" => BlockKind::Mamba,
        "*" | "full_attention" | "attention" => BlockKind::Attention,
        "-" | "mlp" => BlockKind::FeedForward { experts: false },
        "E" | "moe" => BlockKind::FeedForward { experts: true },
        _ => return None,
    })
}
