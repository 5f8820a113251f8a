//! Hugging Face folders that lie.

use std::path::Path;

use serde_json::{Value, json};

use super::{check, refusal};
use crate::common::golden;

/// A Hugging Face folder whose configuration is rewritten again and again.
pub(super) struct Folder {
    dir: tempfile::TempDir,
    pub(super) config: Value,
}

impl Folder {
    /// A copy of `tests-data/golden/hf/NAME` without the tokenizer.
    pub(super) fn copy(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let from = golden(&format!("hf/{name}"));
        let to = dir.path().join("model.safetensors");
        std::fs::copy(from.join("model.safetensors"), to).unwrap();
        let text = std::fs::read(from.join("config.json")).unwrap();
        Self {
            dir,
            config: serde_json::from_slice(&text).unwrap(),
        }
    }

    pub(super) fn write(&self, config: &Value) -> &Path {
        std::fs::write(self.dir.path().join("config.json"), config.to_string()).unwrap();
        self.dir.path()
    }

    /// Checks what is said about a configuration with one field changed; null takes it away.
    fn check(&self, field: &str, value: Value, expected: &str) {
        let title = format!("{field} = {value}");
        let mut config = self.config.clone();
        let fields = config.as_object_mut().unwrap();
        match value {
            Value::Null => drop(fields.shift_remove(field)),
            value => drop(fields.insert(field.to_owned(), value)),
        }
        check(self.write(&config), &title, expected);
    }
}

#[test]
fn sizes_that_lie_are_refused() {
    let folder = Folder::copy("llama-tied");
    for field in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "head_dim",
    ] {
        for wrong in [
            json!("64"),
            json!(-1),
            json!(64.5),
            json!([64]),
            json!({}),
            json!(true),
        ] {
            folder.check(
                field,
                wrong.clone(),
                &format!("{field} is {wrong}, expected"),
            );
        }
        folder.check(field, json!(0), &format!("{field} is 0, expected"));
        folder.check(
            field,
            json!(u64::MAX),
            &format!("{field} is 18446744073709551615"),
        );
        folder.check(field, json!(1e30), &format!("{field} is 1e"));
    }
    for field in [
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "rms_norm_eps",
        "model_type",
    ] {
        folder.check(field, Value::Null, &format!("no {field}"));
    }
}

/// Possible values, but not those of the weights.
#[test]
fn sizes_that_the_weights_do_not_have_are_refused() {
    let mut folder = Folder::copy("llama-tied");
    folder.config["head_dim"] = json!(16);
    for (field, value, expected) in [
        ("hidden_size", 96, "tensor model.embed_tokens.weight"),
        ("intermediate_size", 1 << 18, "tensor model.layers.0.mlp."),
        ("num_hidden_layers", 1 << 10, "tensor model.layers."),
        (
            "num_attention_heads",
            1 << 12,
            "tensor model.layers.0.self_attn.",
        ),
        ("vocab_size", 1 << 24, "tensor model.embed_tokens.weight"),
        (
            "head_dim",
            64,
            "tensor model.layers.0.self_attn.q_proj.weight",
        ),
    ] {
        folder.check(field, json!(value), expected);
    }
}

#[test]
fn settings_that_lie_are_refused() {
    let folder = Folder::copy("llama-tied");
    let llama = |field, value, expected| folder.check(field, value, expected);
    llama("model_type", json!(5), "model_type is 5, expected");
    llama("model_type", json!("gpt2"), "\"gpt2\" is not supported");
    llama(
        "model_type",
        json!("x".repeat(100_000)),
        "xxx...\" is not supported",
    );
    llama("num_local_experts", json!(8), "number of experts is 8");
    llama("head_dim", json!(20), "head size is 20");
    llama("num_key_value_heads", json!(3), "KV heads is 3");
    llama("rms_norm_eps", json!("1e-5"), "rms_norm_eps is \"1e-5\"");
    llama("rms_norm_eps", json!(-1), "norm epsilon is -1");
    llama("hidden_act", json!("relu"), "hidden_act is relu");
    llama("hidden_act", json!(3), "hidden_act is 3");
    llama(
        "tie_word_embeddings",
        json!("yes"),
        "tie_word_embeddings is \"yes\"",
    );
    llama(
        "tie_word_embeddings",
        json!(false),
        "lm_head.weight is missing",
    );
    let folder = Folder::copy("qwen2-f16");
    folder.check(
        "use_sliding_window",
        json!("yes"),
        "use_sliding_window is \"yes\"",
    );
}

#[test]
fn windows_that_lie_are_refused() {
    let folder = Folder::copy("gemma3-bf16");
    let gemma = |field, value, expected| folder.check(field, value, expected);
    gemma("layer_types", json!(["full_attention"]), "layer_types is");
    gemma("layer_types", json!("full_attention"), "layer_types is");
    gemma(
        "layer_types",
        json!(["a", "b", "c", "d", "e", "f", "g"]),
        "layer_types is",
    );
    gemma(
        "layer_types",
        json!([1, 2, 3, 4, 5, 6, 7]),
        "layer_types is",
    );
    gemma(
        "layer_types",
        json!(vec!["full_attention"; 1000]),
        "layer_types is",
    );
    gemma("sliding_window", Value::Null, "no sliding_window");
    gemma("sliding_window", json!(0), "sliding_window is 0");
    gemma(
        "sliding_window_pattern",
        json!(0),
        "sliding_window_pattern is 0",
    );
}

#[test]
fn numbers_of_gemma_that_lie_are_refused() {
    let folder = Folder::copy("gemma3-bf16");
    let gemma = |field, value, expected| folder.check(field, value, expected);
    gemma("query_pre_attn_scalar", json!(0), "query scalar is 0");
    gemma("query_pre_attn_scalar", json!(-24), "query scalar is -24");
    gemma(
        "hidden_activation",
        json!("silu"),
        "hidden_activation is silu",
    );
    gemma(
        "attn_logit_softcapping",
        json!(50.0),
        "attn_logit_softcapping is 50",
    );
    gemma(
        "final_logit_softcapping",
        json!(30.0),
        "final_logit_softcapping is 30",
    );
}

/// Keys that classes of transformers know, with values that are not what is computed.
#[test]
fn keys_that_change_the_arithmetic_are_refused() {
    let bidirectional = "use_bidirectional_attention is true, expected false";
    // EmbeddingGemma.
    let gemma = Folder::copy("gemma3-bf16");
    gemma.check("use_bidirectional_attention", json!(true), bidirectional);
    let llama = Folder::copy("llama-tied");
    for (field, value, expected) in [
        ("use_bidirectional_attention", json!(true), bidirectional),
        ("is_causal", json!(false), "is_causal is false"),
        ("use_qk_norm", json!(true), "use_qk_norm is true"),
        ("logit_scale", json!(0.0625), "logit_scale is 0.0625"),
        ("logits_scaling", json!(8), "logits_scaling is 8"),
        (
            "embedding_multiplier",
            json!(12),
            "embedding_multiplier is 12",
        ),
        (
            "residual_multiplier",
            json!(0.22),
            "residual_multiplier is 0.22",
        ),
        (
            "attention_multiplier",
            json!(1),
            "attention_multiplier is 1",
        ),
        (
            "final_logit_softcapping",
            json!(30),
            "final_logit_softcapping is 30",
        ),
        ("clip_qkv", json!(8), "clip_qkv is 8"),
        (
            "scale_attn_by_inverse_layer_idx",
            json!(true),
            "scale_attn_by_inverse_layer_idx is true",
        ),
        ("attn_output_gate", json!(true), "attn_output_gate is true"),
    ] {
        llama.check(field, value, expected);
    }
}

// long: a table of cases
#[test]
fn numbers_of_gemma4_that_lie_are_refused() {
    let folder = Folder::copy("gemma4-e-bf16");
    let gemma = |field, value, expected| folder.check(field, value, expected);
    gemma(
        "use_bidirectional_attention",
        json!("all"),
        "use_bidirectional_attention is all",
    );
    gemma(
        "hidden_activation",
        json!("silu"),
        "hidden_activation is silu",
    );
    gemma(
        "final_logit_softcapping",
        json!(-6),
        "final_logit_softcapping is -6",
    );
    gemma(
        "num_kv_shared_layers",
        json!(5),
        "no layer of the kind of layer 1 keeps a cache",
    );
    gemma(
        "num_kv_shared_layers",
        json!(7),
        "num_kv_shared_layers is 7",
    );
    gemma(
        "hidden_size_per_layer_input",
        json!(16),
        "per_layer_model_projection",
    );
    gemma(
        "hidden_size_per_layer_input",
        json!(-1),
        "hidden_size_per_layer_input is -1",
    );
    gemma(
        "global_head_dim",
        json!(48),
        "layers.1.self_attn.q_norm.weight: shape [32], expected [48]",
    );
    gemma(
        "use_double_wide_mlp",
        json!(false),
        "gate_proj.weight: shape [192, 64]",
    );
    gemma("use_double_wide_mlp", json!(2), "use_double_wide_mlp is 2");
    gemma("attention_k_eq_v", json!("yes"), "attention_k_eq_v is");
    gemma("enable_moe_block", json!(1), "enable_moe_block is 1");
    gemma("sliding_window", Value::Null, "no sliding_window");
    gemma("layer_types", json!(["full_attention"]), "layer_types is");
    gemma("per_layer_config", json!([1]), "per_layer_config is");
    gemma(
        "per_layer_config",
        json!({ "1": { "head_dim": 0 } }),
        "head_dim is 0",
    );
    for (field, value, expected) in [
        (
            "partial_rotary_factor",
            json!(1.5),
            "partial_rotary_factor is 1.5",
        ),
        ("factor", json!(0), "rope scaling factor is 0"),
        ("rope_type", json!("yarn"), "rope_type is yarn"),
    ] {
        let mut parameters = folder.config["rope_parameters"].clone();
        parameters["full_attention"][field] = value;
        gemma("rope_parameters", parameters, expected);
    }
    let pictures = Folder::copy("gemma4-moe-bf16");
    pictures.check("text_config", json!({}), "no model_type");
    pictures.check("model_type", json!("gemma4_vision"), "gemma4_vision");
}

#[test]
fn numbers_of_gpt_oss_that_lie_are_refused() {
    let folder = Folder::copy("gpt-oss-mxfp4");
    let gpt_oss = |field, value, expected| folder.check(field, value, expected);
    gpt_oss("num_local_experts", json!(5), "router.weight: shape [6,");
    gpt_oss("num_local_experts", json!(0), "num_local_experts is 0");
    gpt_oss("num_experts_per_tok", json!(7), "num_experts_per_tok is 7");
    gpt_oss(
        "intermediate_size",
        json!(64),
        "gate_up_proj_blocks: shape [32,",
    );
    gpt_oss("swiglu_limit", json!(-7), "swiglu_limit is -7");
    gpt_oss("swiglu_alpha", json!(1.5), "swiglu_alpha is 1.5");
    gpt_oss("sliding_window", Value::Null, "no sliding_window");
    gpt_oss("layer_types", json!(["full_attention"]), "layer_types is");
    for (field, value, expected) in [
        ("factor", json!(0), "rope scaling factor is 0"),
        ("factor", json!("32"), "factor is \"32\""),
        ("factor", Value::Null, "no factor"),
        ("beta_fast", json!(0.5), "beta_fast of yarn is 0.5"),
        ("beta_slow", json!(-1), "beta_slow of yarn is -1"),
        (
            "attention_factor",
            json!(0),
            "attention factor of yarn is 0",
        ),
        ("truncate", json!(1), "truncate is 1"),
        (
            "original_max_position_embeddings",
            json!(0),
            "original context of yarn is 0",
        ),
    ] {
        let mut scaling = folder.config["rope_scaling"].clone();
        scaling[field] = value;
        gpt_oss("rope_scaling", scaling, expected);
    }
}

/// Fields under names of their own, some in objects.
#[test]
fn numbers_of_dbrx_that_lie_are_refused() {
    let folder = Folder::copy("dbrx-bf16");
    folder.check("d_model", json!("wide"), "d_model is \"wide\"");
    folder.check("n_heads", Value::Null, "n_heads");
    let within = |object: &str, field: &str, value: Value, expected: &str| {
        let mut changed = folder.config[object].clone();
        changed[field] = value;
        folder.check(object, changed, expected);
    };
    let attention = |field, value, expected| within("attn_config", field, value, expected);
    attention("kv_n_heads", json!(3), "number of KV heads is 3");
    attention("kv_n_heads", json!(4), "Wqkv.weight: shape [128,");
    attention("clip_qkv", json!(0), "limit of queries and keys is 0");
    let experts = |field, value, expected| within("ffn_config", field, value, expected);
    experts(
        "moe_num_experts",
        json!(5),
        "router.layer.weight: shape [6,",
    );
    experts("moe_top_k", json!(7), "moe_top_k is 7");
    experts("ffn_hidden_size", json!(16), "mlp.w1: shape [32,");
    experts("ffn_act_fn", json!({"name": "gelu"}), "ffn_act_fn is gelu");
    let normalise = "moe_normalize_expert_weights";
    experts(normalise, json!(2), "moe_normalize_expert_weights is 2");
}

#[test]
fn numbers_of_glm_that_lie_are_refused() {
    let folder = Folder::copy("glm4moe-bf16");
    let glm = |field, value, expected| folder.check(field, value, expected);
    glm("n_group", json!(8), "number of groups of experts is 8");
    glm("n_routed_experts", json!(7), "mlp.gate.weight: shape [6,");
    glm(
        "first_k_dense_replace",
        json!(0),
        "mlp.gate.weight is missing",
    );
    glm(
        "n_shared_experts",
        json!(2),
        "shared_experts.gate_proj.weight: shape [32,",
    );
    glm(
        "n_shared_experts",
        json!(1 << 10),
        "shared_experts.gate_proj.weight",
    );
    glm(
        "routed_scaling_factor",
        json!(-1),
        "scale of expert weights is -1",
    );
    glm("norm_topk_prob", json!("yes"), "norm_topk_prob is \"yes\"");
    glm(
        "partial_rotary_factor",
        json!(1.5),
        "partial_rotary_factor is 1.5",
    );
    glm(
        "partial_rotary_factor",
        json!(0.01),
        "rotated elements is 0",
    );
}

#[test]
fn numbers_of_minimax_that_lie_are_refused() {
    let folder = Folder::copy("minimax-m2-bf16");
    let minimax = |field, value, expected| folder.check(field, value, expected);
    minimax("rotary_dim", json!(64), "rotary_dim is 64");
    minimax("rotary_dim", json!(7), "rotated elements is 7");
    minimax("scoring_func", json!("softmax"), "scoring_func is softmax");
    minimax(
        "qk_norm_type",
        json!("per_head"),
        "qk_norm_type is per_head",
    );
    minimax("use_qk_norm", json!(false), "use_qk_norm is false");
    minimax("attn_type_list", json!([1, 0]), "attn_type_list is 0");
    minimax(
        "shared_intermediate_size",
        json!(32),
        "shared_intermediate_size is 32",
    );
}

#[test]
fn numbers_of_delta_nets_that_lie_are_refused() {
    let folder = Folder::copy("qwen3next-bf16");
    let lie = |field, value, expected| folder.check(field, value, expected);
    lie(
        "linear_num_key_heads",
        Value::Null,
        "no linear_num_key_heads",
    );
    lie("linear_num_key_heads", json!(3), "number of key heads is 3");
    lie(
        "linear_key_head_dim",
        json!(24),
        "size of a linear head is 24",
    );
    lie(
        "linear_value_head_dim",
        json!(0),
        "linear_value_head_dim is 0",
    );
    lie(
        "linear_conv_kernel_dim",
        json!(1 << 20),
        "linear_conv_kernel_dim is 1048576",
    );
    lie(
        "linear_num_value_heads",
        json!(2),
        "linear_attn.in_proj_qkvz.weight: shape [192, 64], expected [128, 64]",
    );
    lie("layer_types", json!(["linear_attention"]), "layer_types is");
    lie(
        "layer_types",
        json!([
            "sliding_attention",
            "full_attention",
            "full_attention",
            "full_attention"
        ]),
        "layer_types is",
    );
    lie(
        "full_attention_interval",
        json!(0),
        "full_attention_interval is 0",
    );
    // The text part of a model with pictures.
    let folder = Folder::copy("qwen35moe-bf16");
    folder.check("text_config", json!([]), "qwen3_5_moe");
    folder.check("text_config", Value::Null, "qwen3_5_moe");
    folder.check(
        "text_config",
        json!({"model_type": "qwen3_5_moe_vision"}),
        "\"qwen3_5_moe_vision\" is not supported",
    );
}

#[test]
fn rotations_that_lie_are_refused() {
    let folder = Folder::copy("llama-tied");
    folder.check("rope_theta", json!("10000"), "rope_theta is \"10000\"");
    folder.check("rope_theta", json!(0), "rope base is 0");
    folder.check("rope_theta", json!(-5), "rope base is -5");
    folder.check(
        "partial_rotary_factor",
        json!(0.5),
        "partial_rotary_factor is 0.5",
    );
    let scaling = |value, expected| folder.check("rope_scaling", value, expected);
    scaling(json!("linear"), "rope_scaling is \"linear\"");
    scaling(json!({"rope_type": "yarn"}), "rope_type is yarn");
    scaling(json!({"type": "dynamic"}), "rope_type is dynamic");
    scaling(json!({"rope_type": 5}), "rope_type is 5");
    scaling(json!({"rope_type": "linear"}), "no factor");
    scaling(
        json!({"rope_type": "linear", "factor": "8"}),
        "factor is \"8\"",
    );
    scaling(
        json!({"rope_type": "linear", "factor": 0}),
        "rope scaling factor is 0",
    );
    scaling(
        json!({"rope_type": "llama3", "factor": 8}),
        "no low_freq_factor",
    );
    scaling(llama3(0.0, 1.0, 4.0, 64.0), "factor is 0");
    scaling(llama3(8.0, 4.0, 4.0, 64.0), "high_freq_factor is 4");
    scaling(llama3(8.0, -1.0, 4.0, 64.0), "low_freq_factor is -1");
    scaling(
        llama3(8.0, 1.0, 4.0, 0.0),
        "original_max_position_embeddings is 0",
    );
    let parameters = |value, expected| folder.check("rope_parameters", value, expected);
    parameters(json!([]), "rope_parameters is []");
    parameters(json!({"rope_theta": "x"}), "rope_theta is \"x\"");
    parameters(json!({"full_attention": 3}), "full_attention is 3");
    parameters(
        json!({"partial_rotary_factor": 0.25}),
        "partial_rotary_factor is 0.25",
    );
    let folder = Folder::copy("gemma3-bf16");
    folder.check("rope_local_base_freq", json!(-1), "rope base is -1");
    folder.check(
        "rope_parameters",
        json!({"sliding_attention": 1}),
        "sliding_attention is 1",
    );
}

/// Llama 3's scaling with the numbers that its formula divides by.
fn llama3(factor: f64, low: f64, high: f64, original: f64) -> Value {
    json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    })
}

#[test]
fn a_configuration_that_is_no_object_is_refused() {
    let folder = Folder::copy("llama-tied");
    for config in [json!([]), json!(null), json!("llama"), json!(3), json!({})] {
        let text = refusal(folder.write(&config), "config");
        assert!(text.contains("no model_type"), "{config}: {text:?}");
    }
}
