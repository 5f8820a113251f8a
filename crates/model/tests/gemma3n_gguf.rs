//! A GGUF file of Gemma 3n against `transformers`: the golden folder with llama.cpp's names.
//!
//! Names and keys are those of `MODEL_ARCH.GEMMA3N` in gguf-py 0.19.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use paceline_base::{BlockType, KernelClass};
use paceline_weights::gguf::Array;
use paceline_weights::gguf::testing::GgufWriter;
use paceline_weights::safetensors::Safetensors;
use paceline_weights::tensor::Tensor;

use crate::common::compare::worst_within;
use crate::common::hf::golden_logits;
use crate::common::runner::Runner;
use crate::common::{golden, golden_json, ids, kernels, load, number};

const NAME: &str = "gemma3n-bf16";
const LAYERS: usize = 5;
const VOCAB: usize = 300;

/// Weights of the model, and of each layer: in the folder and in the file.
const OUTER: &str = "embed_tokens token_embd
norm output_norm
per_layer_model_projection per_layer_model_proj
per_layer_projection_norm per_layer_proj_norm";
const INNER: &str = "altup.correct_output_scale altup_correct_scale
altup.correction_coefs.weight altup_correct_coef
altup.modality_router.weight altup_router
altup.prediction_coefs.weight altup_predict_coef
altup.router_norm.weight altup_router_norm
input_layernorm.weight attn_norm
laurel.linear_left.weight laurel_l
laurel.linear_right.weight laurel_r
laurel.post_laurel_norm.weight laurel_post_norm
mlp.down_proj.weight ffn_down
mlp.gate_proj.weight ffn_gate
mlp.up_proj.weight ffn_up
per_layer_input_gate.weight inp_gate
per_layer_projection.weight proj
post_attention_layernorm.weight post_attention_norm
post_feedforward_layernorm.weight post_ffw_norm
post_per_layer_input_norm.weight post_norm
pre_feedforward_layernorm.weight ffn_norm
self_attn.k_norm.weight attn_k_norm
self_attn.k_proj.weight attn_k
self_attn.o_proj.weight attn_output
self_attn.q_norm.weight attn_q_norm
self_attn.q_proj.weight attn_q
self_attn.v_proj.weight attn_v";

/// Metadata of one number.
const NUMBERS: &str = "block_count 5
context_length 256
embedding_length 64
attention.head_count 4
attention.head_count_kv 2
attention.key_length 32
attention.value_length 32
attention.sliding_window 8
altup.active_idx 0
altup.num_inputs 3
embedding_length_per_layer_input 32
attention.shared_kv_layers 2
vocab_size 300";

fn pairs(table: &str) -> impl Iterator<Item = (&str, &str)> {
    table.lines().map(|line| line.split_once(' ').unwrap())
}

fn metadata() -> GgufWriter {
    let file = GgufWriter::new().meta("general.architecture", "gemma3n");
    let file = pairs(NUMBERS).fold(file, |file, (key, value)| {
        file.meta(&format!("gemma3n.{key}"), value.parse::<u32>().unwrap())
    });
    let windowed = (0..LAYERS).map(|layer| layer % 2 == 0).collect();
    // Deviations of a normal distribution below which 0.9 and 0.6 of it lie, and none.
    let mut cutoffs = vec![f32::NEG_INFINITY; LAYERS];
    (cutoffs[0], cutoffs[1]) = (1.281_551_5, 0.253_347_16);
    let tokens = (0..VOCAB).map(|token| token.to_string());
    file.meta("tokenizer.ggml.tokens", tokens.collect::<Vec<String>>())
        .meta("gemma3n.attention.layer_norm_rms_epsilon", 1e-6_f32)
        .meta("gemma3n.rope.freq_base", 1e6_f32)
        .meta("gemma3n.rope.freq_base_swa", 1e4_f32)
        .meta("gemma3n.final_logit_softcapping", 20.0_f32)
        .meta("gemma3n.feed_forward_length", vec![160, 160, 160, 320, 320])
        .meta("gemma3n.activation_sparsity_scale", cutoffs)
        .meta(
            "gemma3n.attention.sliding_window_pattern",
            Array::Bool(windowed),
        )
}

/// Adds a weight; vectors are f32 in such files.
fn add(file: GgufWriter, name: &str, tensor: &Tensor) -> GgufWriter {
    let name = format!("{name}.weight");
    if tensor.shape.len() > 1 {
        return file.tensor(&name, BlockType::BF16, &tensor.shape, tensor.bytes.to_vec());
    }
    let halves = tensor.bytes.as_chunks::<2>().0.iter();
    let values = halves.map(|half| f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16));
    file.f32s(&name, &tensor.shape, &values.collect::<Vec<f32>>())
}

fn converted(folder: &Safetensors) -> GgufWriter {
    let read = |name: &str| folder.tensor(&format!("model.{name}")).unwrap();
    let mut file = metadata();
    for (theirs, name) in pairs(OUTER) {
        file = add(file, name, &read(&format!("{theirs}.weight")));
    }
    for layer in 0..LAYERS {
        for (theirs, name) in pairs(INNER) {
            // The last layers read the keys and values of earlier ones.
            if let Ok(own) = folder.tensor(&format!("model.layers.{layer}.{theirs}")) {
                file = add(file, &format!("blk.{layer}.{name}"), &own);
            }
        }
    }
    for (theirs, name) in [
        ("altup_projections", "altup_proj"),
        ("altup_unembed_projections", "altup_unembd_proj"),
    ] {
        let both = [0, 1].map(|i| read(&format!("{theirs}.{i}.weight")).bytes.to_vec());
        file = file.tensor(
            &format!("{name}.weight"),
            BlockType::BF16,
            &[2, 64, 64],
            both.concat(),
        );
    }
    // The file has rows for all tokens. The folder's model reads row 0 for those that have none.
    let own = read("embed_tokens_per_layer.weight");
    let mut rows = own.bytes.to_vec();
    let first = rows[..own.cols() * 2].to_vec();
    rows.extend(first.repeat(VOCAB - own.rows()));
    file.tensor(
        "per_layer_token_embd.weight",
        BlockType::BF16,
        &[VOCAB, own.cols()],
        rows,
    )
}

#[test]
fn files_of_llama_cpp_agree_with_transformers() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("model.gguf");
    let folder = golden(&format!("hf/{NAME}/model.safetensors"));
    converted(&Safetensors::open(folder).unwrap()).write(&path);
    let json = golden_json(&format!("hf/{NAME}.golden.json"));
    let prompt = ids(&json, "prompt");
    let tolerance = 4.0 * number(&json, &["max_abs_diff", "f64_matmul"]);
    let model = load(&path, KernelClass::CpuF32, &kernels());
    let got = Runner::new(model, prompt.len()).all(&prompt);
    worst_within("gemma3n from GGUF", &got, &golden_logits(NAME), tolerance);
}
