//! Names of golden folders, for tests inside the crate too.

/// Folders of `tests-data/golden/hf` without experts.
pub(crate) const FOLDERS: [&str; 17] = [
    "lfm2-bf16",
    "gemma2-bf16",
    "gemma4-unified-bf16",
    "mistral-bf16",
    "ministral3-bf16",
    "smollm3-bf16",
    "granite-bf16",
    "olmo2-bf16",
    "olmo3-bf16",
    "phi3-bf16",
    "llama-tied",
    "llama-untied-bf16",
    "llama-rope3-sharded",
    "qwen2-f16",
    "qwen3-bf16",
    "gemma3-bf16",
    "gemma3-linear-bf16",
];

/// Folders whose layers are gated delta nets for the most part; their prompts have three pages.
pub(crate) const DELTA_FOLDERS: [&str; 5] = [
    "qwen3next-bf16",
    "qwen35-bf16",
    "qwen35moe-bf16",
    "qwen4-bf16",
    "qwen4-ngrams-bf16",
];

/// Folders with experts and folders of Gemma 3n and Gemma 4.
pub(crate) const EXPERT_FOLDERS: [&str; 30] = [
    "glm5-next-bf16",
    "deepseek-v41-bf16",
    "deepseek-v41-ngrams-bf16",
    "kimi-k3-bf16",
    "deepseek-v4-bf16",
    "gemma3n-bf16",
    "minimax-m3-blocks-bf16",
    "kimi-linear-bf16",
    "minimax-m3-bf16",
    "nemotron-h-bf16",
    "lfm2moe-bf16",
    "qwen3vlmoe-bf16",
    "deepseek-v32-sparse-bf16",
    "glm-dsa-sparse-bf16",
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

/// The keys of the folders' tokens, which DeepSeek V4.1's memory of n-grams asks for.
pub(crate) fn token_keys() -> Vec<u32> {
    const FILE: &str = "/../../tests-data/golden/hf/deepseek-v41-ngrams-bf16.golden.json";
    let golden = std::fs::read(env!("CARGO_MANIFEST_DIR").to_owned() + FILE).unwrap();
    let golden: serde_json::Value = serde_json::from_slice(&golden).unwrap();
    let keys = golden["token_keys"].as_array().unwrap().iter();
    keys.map(|key| key.as_u64().unwrap() as u32).collect()
}
