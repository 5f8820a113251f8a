//! GGUF files that lie.

use std::path::Path;

use paceline_base::{BlockType, KernelClass};
use paceline_formats::gguf::{Array, Value};
use paceline_model::{Config, Error, Family, Source};

use super::{check, refusal};
use crate::common::runner::Runner;
use crate::common::tiny::{Random, Tiny, TinyFile};
use crate::common::{gemma4, kernels, try_load};

/// A model of one layer or two, small enough to be written hundreds of times.
pub(super) fn small(family: Family) -> Tiny {
    Tiny {
        width: 64,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        ffn: 96,
        vocab: 50,
        layers: match family {
            Family::Glm4Moe | Family::DeepSeek => 2, // of which the first is dense
            Family::Gemma4 => 4,                     // of which two use the caches of two
            // One of four layers with states is attention.
            Family::Qwen3Next | Family::Qwen35 | Family::Qwen35Moe => 4,
            _ => 1,
        },
        window: 8,
        family,
        block_type: BlockType::F16,
    }
}

/// Writes the model of `family` with one entry changed, and checks what is said about it. Keys
/// without a prefix are the architecture's.
fn check_entry(dir: &Path, family: Family, key: &str, value: Option<Value>, expected: &str) {
    let key = match key.split_once('.') {
        Some(("general" | "tokenizer", _)) => key.to_owned(),
        _ => format!("{}.{key}", family.name()),
    };
    let title = format!("{key} = {value:?}");
    let path = dir.join("lies.gguf");
    let mut file = small(family).file();
    file.set(&key, value);
    file.write(&path);
    check(&path, &title, expected);
}

#[test]
fn entries_that_are_missing_are_named() {
    let dir = tempfile::tempdir().unwrap();
    for key in [
        "general.architecture",
        "tokenizer.ggml.tokens",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "context_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
    ] {
        check_entry(
            dir.path(),
            Family::Gemma3,
            key,
            None,
            &format!("{key} is missing"),
        );
    }
}

#[test]
fn integers_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for key in [
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "context_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "vocab_size",
    ] {
        let check = |value, expected: &str| {
            check_entry(
                dir.path(),
                Family::Llama,
                key,
                Some(value),
                &format!("{key}{expected}"),
            );
        };
        check(0u32.into(), " is 0, expected ");
        check((1u64 << 40).into(), " is 1099511627776, expected");
        check(u64::MAX.into(), " is 18446744073709551615, expected");
        check((-64i32).into(), ": expected");
        check("64".into(), ": expected");
        check(64f32.into(), ": expected");
        // Of these a file may have a list, one for each layer.
        let list = match key {
            "feed_forward_length" | "attention.head_count_kv" => " is a list of 2, expected one",
            _ => ": expected",
        };
        check(vec![64i32; 2].into(), list);
    }
}

#[test]
fn architectures_and_heads_that_no_model_has_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let llama = |key, value, expected| {
        check_entry(dir.path(), Family::Llama, key, Some(value), expected);
    };
    llama("general.architecture", 5u32.into(), "expected string");
    llama(
        "general.architecture",
        "mamba".into(),
        "\"mamba\" is not supported",
    );
    llama(
        "general.architecture",
        "x".repeat(100_000).into(),
        "xxx...\" is not supported",
    );
    llama("tokenizer.ggml.tokens", "a".into(), "expected array");
    llama("attention.head_count_kv", 3u32.into(), "KV heads is 3");
    llama("attention.head_count_kv", 8u32.into(), "KV heads is 8");
    llama("attention.key_length", 20u32.into(), "head size is 20");
    llama("attention.value_length", 32u32.into(), "value head is 32");
}

#[test]
fn norm_epsilons_that_no_model_has_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let llama = |key, value, expected| {
        check_entry(dir.path(), Family::Llama, key, Some(value), expected);
    };
    llama(
        "attention.layer_norm_rms_epsilon",
        f32::NAN.into(),
        "norm epsilon is NaN",
    );
    llama(
        "attention.layer_norm_rms_epsilon",
        (-1f32).into(),
        "norm epsilon is -1",
    );
    llama(
        "attention.layer_norm_rms_epsilon",
        1e300f64.into(),
        "norm epsilon is inf",
    );
    llama(
        "attention.layer_norm_rms_epsilon",
        1u32.into(),
        "epsilon: expected",
    );
}

#[test]
fn rotations_that_no_model_has_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let llama = |key, value, expected| {
        check_entry(dir.path(), Family::Llama, key, Some(value), expected);
    };
    llama("rope.freq_base", 0f32.into(), "rope base is 0");
    llama("rope.freq_base", f32::NAN.into(), "rope base is NaN");
    llama("rope.freq_base", 1e-40f32.into(), "rope base is");
    llama("rope.dimension_count", 7u32.into(), "rotated elements is 7");
    llama(
        "rope.dimension_count",
        18u32.into(),
        "rope.dimension_count is 18",
    );
    llama("rope.scaling.type", "yarn".into(), "rope scaling is yarn");
    llama(
        "rope.scaling.type",
        3u32.into(),
        "rope.scaling.type: expected",
    );
    llama(
        "rope.scaling.factor",
        0f32.into(),
        "rope scaling factor is 0",
    );
    llama(
        "rope.scaling.factor",
        1e-40f32.into(),
        "rope scaling factor is",
    );
}

#[test]
fn experts_and_settings_of_gemma_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let llama = |key, value, expected| {
        check_entry(dir.path(), Family::Llama, key, Some(value), expected);
    };
    llama("expert_count", 8u32.into(), "expert_used_count");
    llama("expert_count", (-8i32).into(), "expert_count: expected");
    let gemma = |key, value, expected| {
        check_entry(dir.path(), Family::Gemma3, key, Some(value), expected);
    };
    gemma("expert_count", 8u32.into(), "number of experts is 8");
    gemma(
        "attention.sliding_window",
        0u32.into(),
        "attention.sliding_window is 0",
    );
    gemma("attention.query_scalar", 0f32.into(), "query scalar is 0");
    gemma("rope.freq_base_swa", (-1f32).into(), "rope base is -1");
    gemma(
        "final_logit_softcapping",
        30f32.into(),
        "final_logit_softcapping is 30",
    );
}

/// Keys that llama.cpp knows, with values that are not what is computed.
#[test]
fn keys_that_change_the_arithmetic_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let llama = |key, value, expected| {
        check_entry(dir.path(), Family::Llama, key, Some(value), expected);
    };
    let causal = "attention.causal is false, expected true";
    llama("attention.causal", false.into(), causal);
    llama("logit_scale", 0.5f32.into(), "logit_scale is 0.5");
    llama("attention.scale", 1f32.into(), "expected 0.25");
    llama("embedding_scale", 12f32.into(), "embedding_scale is 12");
    llama("residual_scale", 0.2f32.into(), "residual_scale is 0.2");
    llama(
        "attn_logit_softcapping",
        f32::NAN.into(),
        "attn_logit_softcapping is NaN",
    );
    llama(
        "attention.clamp_kqv",
        8f32.into(),
        "attention.clamp_kqv is 8",
    );
    llama("rope.scale_linear", 4f32.into(), "rope.scale_linear is 4");
    let factor = "rope.scaling.attn_factor";
    llama(factor, 2f32.into(), "rope.scaling.attn_factor is 2");
    let window = "attention.sliding_window";
    llama(window, 7u32.into(), "attention.sliding_window is 7");
    let experts = |key, value, expected| {
        check_entry(dir.path(), Family::Qwen3Moe, key, Some(value), expected);
    };
    experts("expert_gating_func", 2u32.into(), "expert_gating_func is 2");
    experts("expert_weights_norm", false.into(), "expected true");
    experts("expert_weights_scale", 2.5f32.into(), "expected 1");
    experts("expert_group_count", 2u32.into(), "expected 1");
}

/// Possible values, but not those of the weights.
#[test]
fn sizes_that_the_weights_do_not_have_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let check = |key, value: u32, expected| {
        check_entry(dir.path(), Family::Llama, key, Some(value.into()), expected);
    };
    check("embedding_length", 65, "tensor token_embd.weight");
    check("embedding_length", 1 << 18, "tensor token_embd.weight");
    check("block_count", 2, "tensor blk.1.");
    check("block_count", 1 << 10, "tensor blk.1.");
    check("feed_forward_length", 1 << 18, "tensor blk.0.ffn_");
    check(
        "attention.head_count",
        1 << 12,
        "tensor blk.0.attn_q.weight",
    );
    check("attention.head_count_kv", 1, "tensor blk.0.attn_k.weight");
    check("vocab_size", 51, "tensor token_embd.weight");
    check("vocab_size", 1 << 24, "tensor token_embd.weight");
}

/// Whether a model computes without a tensor: the embedding is the head then, and some GLM have
/// neither biases nor norms on heads.
fn may_lack(family: Family, name: &str) -> bool {
    let of_glm = name.ends_with(".bias") && name.contains(".attn_") || name.contains("attn_q_norm");
    let of_deepseek = name.ends_with("exp_probs_b.bias");
    name == "output.weight"
        || family == Family::Glm4Moe && of_glm
        || family == Family::DeepSeek && of_deepseek
        || family == Family::Gemma4 && gemma4::may_lack(name)
}

/// Every tensor of every family: absent, of other shapes, of a type that is not read.
#[test]
fn tensors_that_lie_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lies.gguf");
    for family in Family::ALL {
        let whole = small(family).file();
        for (i, tensor) in whole.tensors.iter().enumerate() {
            for lie in LIES {
                if lie.0 == "absent" && may_lack(family, &tensor.name) {
                    continue;
                }
                let mut file = whole.clone();
                (lie.1)(&mut file, i);
                file.write(&path);
                let title = format!("{family:?} {} {}", tensor.name, lie.0);
                let text = refusal(&path, &title);
                assert!(
                    text.contains(&format!("tensor {}", tensor.name)),
                    "{title}: {text:?}"
                );
            }
        }
    }
}

#[test]
fn numbers_of_experts_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (key, value, expected) in [
        ("expert_count", 0, "expert_count is 0"),
        (
            "expert_count",
            6,
            "tensor blk.0.ffn_gate_inp.weight: shape [7,",
        ),
        ("expert_count", u32::MAX, "expert_count is 4294967295"),
        ("expert_used_count", 0, "expert_used_count is 0"),
        ("expert_used_count", 8, "expert_used_count is 8"),
        (
            "expert_feed_forward_length",
            0,
            "expert_feed_forward_length is 0",
        ),
        (
            "expert_feed_forward_length",
            128,
            "tensor blk.0.ffn_gate_exps.weight: shape [256,",
        ),
        (
            "expert_shared_feed_forward_length",
            0,
            "expert_shared_feed_forward_length is 0",
        ),
    ] {
        check_entry(
            dir.path(),
            Family::Qwen2Moe,
            key,
            Some(value.into()),
            expected,
        );
    }
}

#[test]
fn numbers_of_sigmoid_experts_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let glm = |key, value: Value, expected| {
        check_entry(dir.path(), Family::Glm4Moe, key, Some(value), expected);
    };
    glm(
        "nextn_predict_layers",
        3u32.into(),
        "nextn_predict_layers is 3",
    );
    glm("nextn_predict_layers", 0u32.into(), "tensor blk.2.");
    glm(
        "leading_dense_block_count",
        2u32.into(),
        "tensor blk.1.ffn_gate.weight",
    );
    glm(
        "leading_dense_block_count",
        0u32.into(),
        "tensor blk.0.ffn_gate_inp.weight",
    );
    glm("expert_gating_func", 1u32.into(), "expert_gating_func is 1");
    glm(
        "expert_group_count",
        8u32.into(),
        "number of groups of experts is 8",
    );
    glm(
        "expert_shared_count",
        1u32.into(),
        "tensor blk.1.ffn_gate_shexp.weight: shape [512,",
    );
    glm(
        "expert_shared_count",
        u32::MAX.into(),
        "expert_shared_count is 4294967295",
    );
    glm(
        "expert_weights_scale",
        f32::NAN.into(),
        "scale of expert weights is NaN",
    );
    glm(
        "expert_weights_norm",
        1u32.into(),
        "expert_weights_norm: expected bool",
    );
}

// long: a table of cases
#[test]
fn numbers_of_latent_attention_and_groups_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (key, value, expected) in [
        ("attention.kv_lora_rank", 0, "attention.kv_lora_rank is 0"),
        ("attention.kv_lora_rank", 33, "latent elements is 33"),
        (
            "attention.kv_lora_rank",
            64,
            "tensor blk.0.attn_kv_a_mqa.weight",
        ),
        (
            "attention.kv_lora_rank",
            u32::MAX,
            "attention.kv_lora_rank is 4294967295",
        ),
        ("attention.q_lora_rank", 0, "tensor blk.0.attn_q.weight"),
        ("attention.q_lora_rank", 64, "tensor blk.0.attn_q_"),
        ("attention.key_length_mla", 16, "size of a key head is 16"),
        ("attention.key_length_mla", 80, "tensor blk.0.attn_"),
        ("attention.value_length_mla", 32, "tensor blk.0.attn_"),
        ("rope.dimension_count", 8, "rotated elements is 8"),
        ("rope.dimension_count", 32, "without rotation is 16"),
        ("expert_group_count", 3, "number of groups of experts is 3"),
        ("expert_group_count", 8, "number of groups of experts is 8"),
        (
            "expert_group_count",
            u32::MAX,
            "expert_group_count is 4294967295",
        ),
        ("expert_group_used_count", 0, "expert_group_used_count is 0"),
        ("expert_group_used_count", 5, "expert_group_used_count is 5"),
        (
            "expert_group_used_count",
            1,
            "layer 1: it uses no expert, or more",
        ),
        ("expert_gating_func", 3, "expert_gating_func is 3"),
    ] {
        check_entry(
            dir.path(),
            Family::DeepSeek,
            key,
            Some(value.into()),
            expected,
        );
    }
    for (key, value, expected) in [
        (
            "rope.scaling.factor",
            f32::INFINITY,
            "rope scaling factor is inf",
        ),
        (
            "rope.scaling.yarn_log_multiplier",
            f32::NAN,
            "attention factor of yarn is NaN",
        ),
        (
            "rope.scaling.yarn_log_multiplier",
            -1e9,
            "attention factor of yarn is -",
        ),
        (
            "attention.temperature_scale",
            f32::NAN,
            "growth of queries is NaN",
        ),
    ] {
        check_entry(
            dir.path(),
            Family::DeepSeek,
            key,
            Some(value.into()),
            expected,
        );
    }
}

// long: a table of cases
#[test]
fn numbers_of_gemma4_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let list = |list: &[u32]| Some(Value::Array(Array::U32(list.to_vec())));
    let one = |n: u32| Some(Value::U32(n));
    for (key, value, expected) in [
        (
            "attention.shared_kv_layers",
            one(5),
            "shared_kv_layers is 5, expected 0 to 4",
        ),
        (
            "attention.shared_kv_layers",
            one(3),
            "no layer of the kind of layer 1 keeps a cache",
        ),
        (
            "attention.shared_kv_layers",
            one(4),
            "no layer of the kind of layer 0 keeps a cache",
        ),
        (
            "attention.head_count_kv",
            list(&[2, 1]),
            "head_count_kv is a list of 2",
        ),
        (
            "attention.head_count_kv",
            list(&[2, 0, 2, 1]),
            "head_count_kv is 0",
        ),
        (
            "attention.head_count_kv",
            list(&[3, 1, 3, 1]),
            "number of KV heads is 3",
        ),
        (
            "feed_forward_length",
            list(&[96; 5]),
            "feed_forward_length is a list of 5",
        ),
        (
            "feed_forward_length",
            list(&[96; 4]),
            "ffn_gate.weight: shape [192, 64]",
        ),
        (
            "attention.sliding_window_pattern",
            list(&[1; 3]),
            "pattern is a list of 3",
        ),
        (
            "attention.key_length_swa",
            one(24),
            "value head is 16, expected the size of a key head",
        ),
        (
            "attention.key_length",
            one(48),
            "size of a value head is 32",
        ),
        (
            "rope.dimension_count_swa",
            one(64),
            "dimension_count_swa is 64, expected 2 to 16",
        ),
        ("embedding_length_per_layer_input", one(32), "per_layer_"),
        (
            "embedding_length_per_layer_input",
            one(u32::MAX),
            "embedding_length_per_layer_input is",
        ),
        (
            "final_logit_softcapping",
            Some(Value::F32(-1.0)),
            "final_logit_softcapping is -1",
        ),
        (
            "final_logit_softcapping",
            Some(Value::F32(f32::NAN)),
            "final_logit_softcapping is NaN",
        ),
        ("expert_used_count", one(8), "expert_used_count is 8"),
        (
            "expert_feed_forward_length",
            None,
            "expert_feed_forward_length",
        ),
    ] {
        check_entry(dir.path(), Family::Gemma4, key, value, expected);
    }
}

#[test]
fn numbers_of_yarn_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let gpt_oss = |key, value: Value, expected| {
        check_entry(dir.path(), Family::GptOss, key, Some(value), expected);
    };
    gpt_oss(
        "rope.scaling.factor",
        f32::NAN.into(),
        "rope scaling factor is NaN",
    );
    gpt_oss(
        "rope.scaling.yarn_beta_fast",
        1f32.into(),
        "beta_fast of yarn is 1",
    );
    gpt_oss(
        "rope.scaling.original_context_length",
        0u32.into(),
        "rope.scaling.original_context_length is 0",
    );
    gpt_oss(
        "attention.sliding_window",
        0u32.into(),
        "attention.sliding_window is 0",
    );
}

/// Such numbers would turn every choice of a router, or every score of a head.
#[test]
fn biases_and_sinks_that_are_not_numbers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lies.gguf");
    for (family, name) in [
        (Family::DeepSeek, "blk.1.exp_probs_b.bias"),
        (Family::MiniMaxM2, "blk.0.exp_probs_b.bias"),
        (Family::Glm4Moe, "blk.1.exp_probs_b.bias"),
        (Family::GptOss, "blk.0.attn_sinks.weight"),
        (Family::Qwen35, "blk.0.ssm_a"),
        (Family::Qwen35, "blk.1.ssm_dt.bias"),
    ] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut file = small(family).file();
            let tensor = file.tensors.iter_mut().find(|t| t.name == name).unwrap();
            tensor.bytes[4..8].copy_from_slice(&bad.to_le_bytes());
            file.write(&path);
            check(&path, name, &format!("tensor {name} holds {bad}"));
        }
    }
}

#[test]
fn numbers_of_delta_nets_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let lie = |key, value: Value, expected| {
        check_entry(dir.path(), Family::Qwen35, key, Some(value), expected);
    };
    for key in [
        "ssm.group_count",
        "ssm.time_step_rank",
        "ssm.state_size",
        "ssm.conv_kernel",
        "ssm.inner_size",
        "full_attention_interval",
    ] {
        check_zero(dir.path(), key);
    }
    lie("ssm.group_count", 3u32.into(), "number of key heads is 3");
    lie("ssm.time_step_rank", 16u32.into(), "ssm.inner_size is 256");
    lie("ssm.state_size", 24u32.into(), "ssm.inner_size is 256");
    lie("ssm.conv_kernel", 17u32.into(), "ssm.conv_kernel is 17");
    lie(
        "ssm.conv_kernel",
        3u32.into(),
        "tensor blk.0.ssm_conv1d.weight: shape [512, 4], expected [512, 3]",
    );
    lie(
        "full_attention_interval",
        2u32.into(),
        "tensor blk.1.attn_q_norm.weight is missing",
    );
    lie(
        "attention.recurrent_layers",
        "all".into(),
        "expected a list with an entry for each of 4 layers",
    );
    lie(
        "attention.recurrent_layers",
        vec![1u32; 2].into(),
        "expected a list with an entry for each of 4 layers",
    );
    lie(
        "nextn_predict_layers",
        5u32.into(),
        "nextn_predict_layers is 5",
    );
}

fn check_zero(dir: &Path, key: &str) {
    let expected = format!("{key} is 0");
    check_entry(dir, Family::Qwen35, key, Some(0u32.into()), &expected);
    if key.starts_with("ssm.") {
        check_entry(dir, Family::Qwen35, key, None, &format!("{key} is missing"));
    }
}

/// Scores that are not numbers would choose experts all the same.
#[test]
fn routers_that_are_not_numbers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nan.gguf");
    for family in [
        Family::Mixtral,
        Family::GptOss,
        Family::MiniMaxM2,
        Family::Gemma4,
    ] {
        let mut file = small(family).file();
        let name = "blk.0.ffn_gate_inp.weight";
        let tensor = file.tensors.iter_mut().find(|t| t.name == name).unwrap();
        tensor.bytes[400..404].copy_from_slice(&f32::NAN.to_le_bytes());
        file.write(&path);
        check(
            &path,
            &format!("{family:?}"),
            &format!("tensor {name} holds NaN"),
        );
    }
}

/// A scale that is infinite or NaN, in one block of one expert.
#[test]
fn experts_that_are_not_numbers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nan.gguf");
    for (block_type, at, bad) in [
        (BlockType::Q8_0, 0, "NaN"),
        (BlockType::Q4_K, 2, "NaN"),
        (BlockType::Q6_K, 208, "NaN"),
        (BlockType::F16, 6, "NaN"),
        (BlockType::MXFP4_SPLIT, 0, "NaN"),
    ] {
        let tiny = Tiny {
            layers: 2,
            ..Tiny::new(Family::DeepSeek, block_type)
        };
        for part in ["gate", "up", "down"] {
            let mut file = tiny.file();
            let name = format!("blk.1.ffn_{part}_exps.weight");
            let tensor = file.tensors.iter_mut().find(|t| t.name == name).unwrap();
            let block = tensor.bytes.len() / block_type.bytes() / 2 * block_type.bytes();
            tensor.bytes[block + at..block + at + 2].fill(0xff);
            file.write(&path);
            check(&path, &name, &format!("tensor {name} holds {bad}"));
        }
    }
}

/// Name of the fault, and how tensor `i` is given it.
type Lie = (&'static str, fn(&mut TinyFile, usize));

const LIES: [Lie; 6] = [
    ("absent", |file, i| drop(file.tensors.remove(i))),
    ("a row more", |file, i| {
        let t = &mut file.tensors[i];
        let row = t.bytes.len() / t.shape[0];
        t.shape[0] += 1;
        t.bytes.extend(vec![0; row]);
    }),
    ("a row less", |file, i| {
        let t = &mut file.tensors[i];
        let row = t.bytes.len() / t.shape[0];
        t.shape[0] -= 1;
        t.bytes.truncate(t.bytes.len() - row);
    }),
    ("flat or deep", |file, i| {
        let t = &mut file.tensors[i];
        let n = t.shape.iter().product();
        t.shape = if t.shape.len() == 1 {
            vec![n / 2, 2]
        } else {
            vec![n]
        };
    }),
    ("transposed or single", |file, i| {
        let t = &mut file.tensors[i];
        t.shape.reverse();
        if t.shape[0] == *t.shape.last().unwrap() {
            t.shape.insert(0, 1);
        }
    }),
    ("integers", |file, i| {
        let t = &mut file.tensors[i];
        t.type_id = 24; // I8
        t.bytes.truncate(t.shape.iter().product());
    }),
];

/// An integer matrix among floats whose rows are not whole runs of 32, as a file may have.
#[test]
fn odd_widths_beside_integer_weights_compute() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.gguf");
    let odd = Tiny {
        width: 48,
        heads: 1,
        kv_heads: 1,
        ffn: 80,
        ..small(Family::Llama)
    };
    for (tiny, name, cols) in [
        (Tiny { ffn: 64, ..odd }, "blk.0.ffn_down.weight", 64),
        (Tiny { heads: 6, ..odd }, "blk.0.attn_output.weight", 96),
    ] {
        let mut file = tiny.file();
        file.put(name, BlockType::Q8_0, &[tiny.width, cols]);
        file.write(&path);
        for class in [KernelClass::Cpu, KernelClass::CpuF32] {
            let model = try_load(&path, class, &kernels()).unwrap();
            let logits = Runner::new(model, 3).all(&[1, 2, 3]).concat();
            assert!(logits.iter().all(|x| x.is_finite()), "{name} {class}");
        }
    }
}

#[test]
fn rope_factors_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lies.gguf");
    for (factors, expected) in [
        (
            vec![1.0; 7],
            "tensor rope_freqs.weight: shape [7], expected [8]",
        ),
        (vec![f32::NAN; 8], "rope factor is NaN"),
        (vec![-1.0; 8], "rope factor is -1"),
        (vec![0.0; 8], "rope factor is 0"),
        (vec![1e-40; 8], "rope factor is"),
    ] {
        let mut file = small(Family::Llama).file();
        file.put_f32("rope_freqs.weight", &factors);
        file.write(&path);
        check(&path, expected, expected);
    }
}

/// Scales that are infinite or NaN give such logits, but no panic.
#[test]
fn weights_of_random_bits_compute() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bits.gguf");
    for block_type in BlockType::GGUF {
        let tiny = Tiny {
            layers: 1,
            ..Tiny::new(Family::Qwen3, block_type)
        };
        let mut file = tiny.file();
        let mut random = Random(block_type as u64);
        for tensor in &mut file.tensors {
            tensor.bytes.fill_with(|| random.next() as u8);
        }
        file.write(&path);
        let model = try_load(&path, KernelClass::Cpu, &kernels()).unwrap();
        assert_eq!(Runner::new(model, 70).all(&tiny.tokens(70, 1)).len(), 70);
    }
}

/// Reading the configuration alone does not touch the weights.
#[test]
fn a_configuration_reads_without_weights() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bare.gguf");
    for family in Family::DENSE {
        let mut file = small(family).file();
        file.tensors.truncate(1);
        file.write(&path);
        let config = Config::read(&Source::open(&path).unwrap()).unwrap();
        assert_eq!(
            (config.family, config.width, config.vocab),
            (family, 64, 50)
        );
        let error = try_load(&path, KernelClass::Cpu, &kernels()).unwrap_err();
        assert!(matches!(error, Error::Gguf(_)), "{error}");
    }
}
