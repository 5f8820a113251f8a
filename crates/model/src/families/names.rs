//! Parts of tensor names that differ between families.

use crate::role::{LayerRole, Role};

/// A family's words in tensor names. A family lists its differences from [`USUAL`](Self::USUAL).
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileNames {
    /// The norm before the feed-forward, in GGUF files.
    pub(crate) gguf_ffn_norm: &'static str,
    /// The same norm in the Hugging Face layout.
    pub(crate) hf_ffn_norm: &'static str,
    /// The matrix of queries, keys and values in the Hugging Face layout, where these are one.
    pub(crate) qkv: Option<&'static str>,
    /// The matrix of gate and up there, where these are one.
    pub(crate) gate_up: Option<&'static str>,
    /// Module of a layer's expert block, in the Hugging Face layout.
    pub(crate) block: &'static str,
    /// Gate, up and down of an expert, in that module.
    pub(crate) expert: [&'static str; 3],
    /// Module of the shared expert, in that module.
    pub(crate) shared: &'static str,
    /// Router, in that module.
    pub(crate) router: &'static str,
    /// Choice bias of the router, in that module.
    pub(crate) choice: &'static str,
    /// Module of a layer with the stacked experts, in MLX folders.
    pub(crate) mlx_experts: &'static str,
    pub(crate) stacks: ExpertLayout,
    /// Names of its own in the Hugging Face layout, behind the prefix of the model or of a layer.
    pub(crate) hf_own: fn(Role) -> Option<&'static str>,
    pub(crate) gguf_own: fn(Role) -> Option<&'static str>,
}

/// `model_type` of the text part of Qwen3-VL with experts, whose folders hold the experts of a
/// layer in one tensor, inputs by outputs.
pub(crate) const QWEN3_VL_MOE: &str = "qwen3_vl_moe_text";

const fn none(_: Role) -> Option<&'static str> {
    None
}

/// Storage of expert matrices in Hugging Face folders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertLayout {
    /// One tensor per matrix and expert.
    None,
    /// One tensor for all experts, gate and up in alternating rows, possibly in MXFP4 (gpt-oss).
    Alternate,
    /// One tensor for all experts, `(experts, rows, columns)`, the rows of up after those of gate
    /// (Gemma 4).
    Behind,
}

impl FileNames {
    /// Names of most families: `modeling_qwen3_moe.py` of transformers.
    pub(crate) const USUAL: Self = Self {
        gguf_ffn_norm: "ffn_norm",
        hf_ffn_norm: "post_attention_layernorm",
        qkv: None,
        gate_up: None,
        block: "mlp",
        expert: ["gate_proj", "up_proj", "down_proj"],
        shared: "mlp.shared_expert",
        router: "mlp.gate",
        choice: "mlp.gate.e_score_correction_bias",
        mlx_experts: "mlp.switch_mlp",
        stacks: ExpertLayout::None,
        hf_own: none,
        gguf_own: none,
    };

    /// Mixtral's names: `modeling_mixtral.py`.
    pub(crate) const MIXTRAL: Self = Self {
        block: "block_sparse_moe",
        expert: ["w1", "w3", "w2"],
        router: "block_sparse_moe.gate",
        choice: "block_sparse_moe.e_score_correction_bias",
        mlx_experts: "block_sparse_moe.switch_mlp",
        ..Self::USUAL
    };
}

/// DBRX's names in the Hugging Face layout; names of parts that DBRX lacks match no tensor.
pub(crate) fn dbrx_stem(role: Role) -> String {
    let (layer, part) = match role {
        Role::TokenEmbedding => return "transformer.wte".to_owned(),
        Role::OutputNorm => return "transformer.norm_f".to_owned(),
        Role::Output => return "lm_head".to_owned(),
        Role::Layer(layer, part) => (layer, part),
        other => return format!("transformer.{other:?}"),
    };
    let name = match part {
        LayerRole::AttentionNorm => "norm_attn_norm.norm_1",
        LayerRole::Query | LayerRole::Key | LayerRole::Value => "norm_attn_norm.attn.Wqkv",
        LayerRole::AttentionOutput => "norm_attn_norm.attn.out_proj",
        LayerRole::FfnNorm => "norm_attn_norm.norm_2",
        LayerRole::Router => "ffn.router.layer",
        LayerRole::ExpertGate(_) => "ffn.experts.mlp.w1",
        LayerRole::ExpertUp(_) => "ffn.experts.mlp.v1",
        LayerRole::ExpertDown(_) => "ffn.experts.mlp.w2",
        other => return format!("transformer.blocks.{layer}.{other:?}"),
    };
    format!("transformer.blocks.{layer}.{name}")
}
