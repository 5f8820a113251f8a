//! Names of a family's weights in files, where families differ.

use crate::role::{Part, Role};

/// The words of a family in the names of weights; a family's file says what is not
/// [`USUAL`](Self::USUAL).
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileNames {
    /// The norm before the feed-forward, in GGUF files.
    pub(crate) gguf_ffn_norm: &'static str,
    /// The same in the Hugging Face layout.
    pub(crate) hf_ffn_norm: &'static str,
    /// The module of the layers' block with experts, in the Hugging Face layout.
    pub(crate) block: &'static str,
    /// Gate, up and down of an expert, there.
    pub(crate) expert: [&'static str; 3],
    /// The module of the shared expert, there.
    pub(crate) shared: &'static str,
    /// The router, there.
    pub(crate) router: &'static str,
    /// The bias of the router's choice, there.
    pub(crate) choice: &'static str,
    /// The module of a layer that holds the stacks of all experts in folders of MLX.
    pub(crate) mlx_experts: &'static str,
    /// How the Hugging Face layout keeps experts.
    pub(crate) stacks: Stacks,
}

/// How a family's Hugging Face folders keep the matrices of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stacks {
    /// A tensor for each matrix of each expert.
    None,
    /// All in one, gate and up in alternate rows, perhaps in MXFP4 (gpt-oss).
    Alternate,
    /// All in one, `(experts, rows, columns)`, the rows of up behind those of gate (Gemma 4).
    Behind,
}

impl FileNames {
    /// As most families have them: `modeling_qwen3_moe.py` of transformers.
    pub(crate) const USUAL: Self = Self {
        gguf_ffn_norm: "ffn_norm",
        hf_ffn_norm: "post_attention_layernorm",
        block: "mlp",
        expert: ["gate_proj", "up_proj", "down_proj"],
        shared: "mlp.shared_expert",
        router: "mlp.gate",
        choice: "mlp.gate.e_score_correction_bias",
        mlx_experts: "mlp.switch_mlp",
        stacks: Stacks::None,
    };

    /// As Mixtral has them: `modeling_mixtral.py`.
    pub(crate) const MIXTRAL: Self = Self {
        block: "block_sparse_moe",
        expert: ["w1", "w3", "w2"],
        router: "block_sparse_moe.gate",
        choice: "block_sparse_moe.e_score_correction_bias",
        mlx_experts: "block_sparse_moe.switch_mlp",
        ..Self::USUAL
    };
}

/// DBRX's names in the Hugging Face layout; those of what a layer has not are of no tensor.
pub(crate) fn dbrx_stem(role: Role) -> String {
    let (layer, part) = match role {
        Role::TokenEmbedding => return "transformer.wte".to_owned(),
        Role::OutputNorm => return "transformer.norm_f".to_owned(),
        Role::Output => return "lm_head".to_owned(),
        Role::Layer(layer, part) => (layer, part),
        other => return format!("transformer.{other:?}"),
    };
    let name = match part {
        Part::AttentionNorm => "norm_attn_norm.norm_1",
        Part::Query | Part::Key | Part::Value => "norm_attn_norm.attn.Wqkv",
        Part::AttentionOutput => "norm_attn_norm.attn.out_proj",
        Part::FfnNorm => "norm_attn_norm.norm_2",
        Part::Router => "ffn.router.layer",
        Part::ExpertGate(_) => "ffn.experts.mlp.w1",
        Part::ExpertUp(_) => "ffn.experts.mlp.v1",
        Part::ExpertDown(_) => "ffn.experts.mlp.w2",
        other => return format!("transformer.blocks.{layer}.{other:?}"),
    };
    format!("transformer.blocks.{layer}.{name}")
}
