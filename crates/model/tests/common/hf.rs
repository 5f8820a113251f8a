//! The folders of `tests-data/golden/hf`, with logits of `transformers`.

use paceline_formats::safetensors::Safetensors;

use super::golden;

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

/// Logits at all positions of the prompt, `(positions, vocabulary)`.
pub(crate) fn golden_logits(name: &str) -> Vec<Vec<f32>> {
    let file = Safetensors::open(golden(&format!("hf/{name}.golden.safetensors"))).unwrap();
    let tensor = file.tensor("logits").unwrap();
    let values = tensor
        .bytes
        .as_chunks()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b));
    let values: Vec<f32> = values.collect();
    values
        .chunks_exact(tensor.cols())
        .map(<[f32]>::to_vec)
        .collect()
}
