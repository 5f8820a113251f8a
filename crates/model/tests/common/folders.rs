//! Names of golden folders, for tests inside the crate too.

/// Folders of `tests-data/golden/hf` without experts.
pub(crate) const FOLDERS: [&str; 7] = [
    "llama-tied",
    "llama-untied-bf16",
    "llama-rope3-sharded",
    "qwen2-f16",
    "qwen3-bf16",
    "gemma3-bf16",
    "gemma3-linear-bf16",
];

/// Folders whose layers are gated delta nets for the most part; their prompts have three pages.
pub(crate) const DELTA_FOLDERS: [&str; 3] = ["qwen3next-bf16", "qwen35-bf16", "qwen35moe-bf16"];

/// Folders with experts and folders of Gemma 4.
pub(crate) const EXPERT_FOLDERS: [&str; 16] = [
    "mixtral",
    "qwen2moe-bf16",
    "qwen3moe-bf16",
    "dbrx-bf16",
    "gpt-oss-mxfp4",
    "gpt-oss-bf16",
    "glm4moe-bf16",
    "glm4moe-air-bf16",
    "minimax-m2-bf16",
    "deepseek-v3-bf16",
    "deepseek-v2",
    "glm4-moe-lite-bf16",
    "mistral4-bf16",
    "deepseek-v32-bf16",
    "gemma4-e-bf16",
    "gemma4-moe-bf16",
];
