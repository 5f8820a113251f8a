//! The folders of `tests-data/golden/hf`, with logits of `transformers`.

use paceline_weights::safetensors::Safetensors;

#[allow(unused_imports, reason = "each test binary uses its own part")]
pub(crate) use super::folders::{DELTA_FOLDERS, EXPERT_FOLDERS, FOLDERS};
use super::{golden, rows_of};

/// Folders of `tests-data/golden/mlx`, with logits of MLX.
pub(crate) const MLX_FOLDERS: [&str; 6] = [
    "llama-4bit",
    "llama-tied-mixed",
    "llama-2bit-sharded",
    "qwen2-8bit",
    "qwen3-mxfp4",
    "gemma3-5bit",
];

/// As those, with experts.
pub(crate) const MLX_EXPERT_FOLDERS: [&str; 6] = [
    "qwen3moe-4bit",
    "glm4moe-4bit",
    "minimax-m2-6bit",
    "gpt-oss-mxfp4",
    "deepseek-v3-4bit",
    "dbrx-4bit",
];

/// Logits at all positions of the prompt, `(positions, vocabulary)`.
pub(crate) fn golden_logits(name: &str) -> Vec<Vec<f32>> {
    golden_tensor(name, "logits")
}

/// A matrix of the golden file of a folder.
pub(crate) fn golden_tensor(name: &str, tensor: &str) -> Vec<Vec<f32>> {
    let file = Safetensors::open(golden(&format!("hf/{name}.golden.safetensors"))).unwrap();
    rows_of(&file.tensor(tensor).unwrap())
}
