//! Names of golden folders, for tests inside the crate too.

/// All of `tests-data/golden/hf`.
pub(crate) const FOLDERS: [&str; 7] = [
    "llama-tied",
    "llama-untied-bf16",
    "llama-rope3-sharded",
    "qwen2-f16",
    "qwen3-bf16",
    "gemma3-bf16",
    "gemma3-linear-bf16",
];
