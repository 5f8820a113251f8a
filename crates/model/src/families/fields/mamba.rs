//! Fields of Mamba 2 (Nemotron-H).

use paceline_tensor::StateRule;
use serde_json::Value;

use super::{ConfigFields, wrong_value};
use crate::config::{DeltaNet, HeadOrder, MAX_HEADS, MAX_LAYERS, MAX_TAPS, MAX_WIDTH};
use crate::families::blocks::{self, Blocks};
use crate::{Error, Experts, LayerCache, LayerShape};

impl ConfigFields<'_> {
    /// The layers of a model whose file has blocks of one kind each.
    pub(crate) fn nemotron_layers(&self) -> Result<Vec<Blocks>, Error> {
        let layers = match self {
            Self::Gguf {
                file, architecture, ..
            } => blocks::of_gguf(file, architecture),
            Self::Hf(config) => blocks::of_config(config),
        };
        let layers = layers.filter(|layers| layers.len() as u64 <= MAX_LAYERS);
        layers.ok_or_else(|| {
            let expected = "Mamba (M), attention (*), feed-forwards (-) and experts (E), the last \
                            two only behind the first two";
            wrong_value("order of the blocks", "another or absent", expected)
        })
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
                return Err(wrong_value(
                    "size of Mamba's heads",
                    dim,
                    "a multiple of 16",
                ));
            }
        }
        let taps = self.size("ssm.conv_kernel", "conv_kernel", 1, MAX_TAPS as u64)?;
        let limit = self.hf("time_step_limit", "a list", Value::as_array)?;
        let least = limit.and_then(|limit| limit.first()?.as_f64());
        if let Some(least) = least.filter(|least| *least > 0.0) {
            return Err(wrong_value(
                "time_step_limit",
                least,
                "0 or more, unlimited",
            ));
        }
        let activation = self.hf("mamba_hidden_act", "a string", Value::as_str)?;
        if let Some(other) = activation.filter(|name| *name != "silu") {
            return Err(wrong_value("mamba_hidden_act", other, "silu"));
        }
        Ok(LayerShape {
            cache: LayerCache::Delta(DeltaNet {
                least_decay: None,
                low_rank_gates: false,
                sigmoid_gates: false,
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
