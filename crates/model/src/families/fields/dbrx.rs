//! Names of DBRX and Kimi Linear in `config.json`, some in nested objects, and DBRX's fields.

use serde_json::Value;

use super::{ConfigFields, wrong_value};
use crate::Error;

/// Default name of a field, its object (empty: the root), and its name there.
const DBRX: [(&str, &str, &str); 12] = [
    ("hidden_size", "", "d_model"),
    ("num_attention_heads", "", "n_heads"),
    ("num_hidden_layers", "", "n_layers"),
    ("max_position_embeddings", "", "max_seq_len"),
    ("num_key_value_heads", "attn_config", "kv_n_heads"),
    ("clip_qkv", "attn_config", "clip_qkv"),
    ("rope_theta", "attn_config", "rope_theta"),
    ("intermediate_size", "ffn_config", "ffn_hidden_size"),
    ("moe_num_experts", "ffn_config", "moe_num_experts"),
    ("num_experts_per_tok", "ffn_config", "moe_top_k"),
    ("norm_topk_prob", "ffn_config", NORMALISE),
    ("ffn_act_fn", "ffn_config", "ffn_act_fn"),
];

/// The same of Kimi Linear.
const KIMI: [(&str, &str, &str); 7] = [
    ("max_position_embeddings", "", "model_max_length"),
    ("num_experts_per_tok", "", "num_experts_per_token"),
    ("n_shared_experts", "", "num_shared_experts"),
    ("norm_topk_prob", "", "moe_renormalize"),
    ("n_group", "", "num_expert_group"),
    ("scoring_func", "", "moe_router_activation_func"),
    (
        "use_full_rank_gate",
        "linear_attn_config",
        "use_full_rank_gate",
    ),
];

/// Fields of Kimi's delta nets, also in folders of GLM 5.3 that have the object.
const KIMI_NETS: [(&str, &str, &str); 4] = [
    ("linear_head_dim", "linear_attn_config", "head_dim"),
    ("linear_num_heads", "linear_attn_config", "num_heads"),
    (
        "linear_conv_kernel_dim",
        "linear_attn_config",
        "short_conv_kernel_size",
    ),
    (
        "linear_lower_bound",
        "linear_attn_config",
        "gate_lower_bound",
    ),
];

/// Order of the norm that divides the weights of the chosen experts.
const NORMALISE: &str = "moe_normalize_expert_weights";

/// Object and name of the field that other families call `name`.
pub(super) fn place<'a, 'n>(config: &'a Value, name: &'n str) -> (&'a Value, &'n str) {
    let names: [&[(&str, &str, &str)]; 2] = match config.get("model_type").and_then(Value::as_str) {
        Some("dbrx") => [&DBRX, &[]],
        Some("kimi_linear" | "kimi_k3") => [&KIMI, &KIMI_NETS],
        Some("glm5_next_text" | "glm5_next") => [&KIMI_NETS, &[]],
        _ => [&[], &[]],
    };
    let has = |name: &str| config.get(name).is_some();
    let mut names = names.into_iter().flatten();
    match names.find(|(usual, ..)| *usual == name) {
        Some(&(_, "", own)) if has(own) || !has(name) => (config, own),
        Some(&(_, within, own)) if config.get(within).is_some() => (&config[within], own),
        _ => (config, name),
    }
}

impl ConfigFields<'_> {
    /// Clamp of queries, keys and values, if present.
    pub(crate) fn clamp_qkv(&self) -> Result<Option<f32>, Error> {
        let limit = self.opt_float("attention.clamp_kqv", "clip_qkv")?;
        match limit.filter(|limit| !(limit.is_finite() && *limit > 0.0)) {
            None => Ok(limit),
            Some(bad) => Err(wrong_value("limit of queries and keys", bad, "above 0")),
        }
    }

    /// Whether the weights of the chosen experts are divided by their sum: in folders, unless the
    /// order of the norm is null. Refuses other orders, and another activation of the gate.
    pub(crate) fn dbrx_normalises(&self) -> Result<bool, Error> {
        let function = |value: &Value| value.get("name")?.as_str().map(str::to_owned);
        let function = self.hf("ffn_act_fn", "an object with a name", function)?;
        if let Some(other) = function.filter(|name| name != "silu") {
            return Err(wrong_value("ffn_act_fn", other, "silu"));
        }
        let is_null = |value: &Value| Some(value.get(NORMALISE).is_some_and(Value::is_null));
        let is_null = self
            .hf("ffn_config", "an object", is_null)?
            .unwrap_or(false);
        match self.hf("norm_topk_prob", "a number", Value::as_f64)? {
            Some(order) if order != 1.0 => Err(wrong_value(NORMALISE, order, "1 or null")),
            _ => Ok(!is_null),
        }
    }
}
