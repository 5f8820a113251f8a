//! The folders of `tests-data/golden/hf`, with logits of `transformers`.

use paceline_formats::safetensors::Safetensors;

use super::{golden, rows_of};

/// All of them.
pub(crate) const FOLDERS: [&str; 7] = [
    "llama-tied",
    "llama-untied-bf16",
    "llama-rope3-sharded",
    "qwen2-f16",
    "qwen3-bf16",
    "gemma3-bf16",
    "gemma3-linear-bf16",
];

/// Those of `tests-data/golden/mlx`, with logits of MLX.
pub(crate) const MLX_FOLDERS: [&str; 6] = [
    "llama-4bit",
    "llama-tied-mixed",
    "llama-2bit-sharded",
    "qwen2-8bit",
    "qwen3-mxfp4",
    "gemma3-5bit",
];

/// Logits at all positions of the prompt, `(positions, vocabulary)`.
pub(crate) fn golden_logits(name: &str) -> Vec<Vec<f32>> {
    let file = Safetensors::open(golden(&format!("hf/{name}.golden.safetensors"))).unwrap();
    rows_of(&file.tensor("logits").unwrap())
}
