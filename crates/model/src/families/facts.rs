//! Support of each family: the rows of `paceline models --families`.

use super::ModelFamily;

impl ModelFamily {
    /// Published models of the family.
    pub const fn models(self) -> &'static str {
        match self {
            Self::Llama => "Llama 2 and 3, SmolLM2",
            Self::Qwen2 => "Qwen 2 and 2.5",
            Self::Qwen3 => "Qwen 3",
            Self::Mistral => "Mistral, Ministral, Ministral 3",
            Self::SmolLm3 => "SmolLM3",
            Self::Granite => "Granite 3 and 4, dense",
            Self::Olmo2 => "OLMo 2 and 3",
            Self::Phi3 => "Phi 3 and 4",
            Self::Gemma2 => "Gemma 2",
            Self::Gemma3 => "Gemma 3, EmbeddingGemma",
            Self::Gemma3n => "Gemma 3n",
            Self::Gemma4 => "Gemma 4, also with experts",
            Self::Mixtral => "Mixtral",
            Self::Qwen2Moe => "Qwen 1.5 and 2 with experts",
            Self::Qwen3Moe => "Qwen 3 and Qwen3-VL with experts",
            Self::Dbrx => "DBRX",
            Self::GptOss => "gpt-oss",
            Self::Glm4Moe => "GLM 4.5 to 4.7",
            Self::MiniMaxM2 => "MiniMax M2 to M2.7",
            Self::MiniMaxM3 => "MiniMax M3",
            Self::DeepSeek => {
                "DeepSeek V2 to V3.2 and R1, Kimi K2 to K2.6, GLM 4.7 Flash, GLM 5, Mistral 4"
            }
            Self::DeepSeek4 => "DeepSeek V4 and V4.1, on MLX without n-grams",
            Self::Qwen3Next => "Qwen3-Next",
            Self::Qwen35 => "Qwen 3.5 to 3.8",
            Self::Qwen35Moe => "Qwen 3.5 to 3.8 with experts",
            Self::Qwen4Exp => "Qwen4-Exp, on MLX without n-grams",
            Self::KimiLinear => "Kimi Linear, Kimi K3",
            Self::Glm5Next => "GLM 5.3 Flash",
            Self::Lfm2 => "LFM2",
            Self::Lfm2Moe => "LFM2 with experts",
            Self::NemotronH => "Nemotron-H, Nemotron 3 Nano",
        }
    }

    /// Names in files: `general.architecture`, `model_type`, and others in either layout.
    pub fn stored_names(self) -> Vec<&'static str> {
        let mut names = vec![self.name(), self.hf_name()];
        names.extend(self.other_names());
        names.dedup();
        names
    }

    /// Ways to split its models, as `--split` names them.
    pub const fn splits(self) -> &'static [&'static str] {
        match self.has_experts() {
            true => &["tensor", "pipeline", "experts"],
            false => &["tensor", "pipeline"],
        }
    }

    /// Folders of `tests-data/golden/hf` whose log-probabilities are those of transformers.
    pub const fn checked_by(self) -> &'static [&'static str] {
        match self {
            Self::Llama => &["llama-tied", "llama-untied-bf16", "llama-rope3-sharded"],
            Self::Qwen2 => &["qwen2-f16"],
            Self::Qwen3 => &["qwen3-bf16"],
            Self::Mistral => &["mistral-bf16", "ministral3-bf16"],
            Self::SmolLm3 => &["smollm3-bf16"],
            Self::Granite => &["granite-bf16"],
            Self::Olmo2 => &["olmo2-bf16", "olmo3-bf16"],
            Self::Phi3 => &["phi3-bf16"],
            Self::Gemma2 => &["gemma2-bf16"],
            Self::Gemma3 => &["gemma3-bf16", "gemma3-linear-bf16"],
            Self::Gemma3n => &["gemma3n-bf16"],
            Self::Gemma4 => &["gemma4-e-bf16", "gemma4-moe-bf16", "gemma4-unified-bf16"],
            Self::Mixtral => &["mixtral"],
            Self::Qwen2Moe => &["qwen2moe-bf16"],
            Self::Qwen3Moe => &["qwen3moe-bf16", "qwen3vlmoe-bf16"],
            Self::Dbrx => &["dbrx-bf16"],
            Self::GptOss => &["gpt-oss-bf16", "gpt-oss-mxfp4"],
            Self::Glm4Moe => &["glm4moe-bf16", "glm4moe-air-bf16"],
            Self::Glm5Next => &["glm5-next-bf16"],
            Self::MiniMaxM2 => &["minimax-m2-bf16"],
            Self::MiniMaxM3 => &["minimax-m3-bf16", "minimax-m3-blocks-bf16"],
            Self::DeepSeek => &[
                "deepseek-v2",
                "deepseek-v3-bf16",
                "deepseek-v32-bf16",
                "deepseek-v32-sparse-bf16",
                "glm-dsa-sparse-bf16",
                "glm4-moe-lite-bf16",
                "mistral4-bf16",
            ],
            Self::DeepSeek4 => &[
                "deepseek-v4-bf16",
                "deepseek-v41-bf16",
                "deepseek-v41-ngrams-bf16",
            ],
            Self::Qwen3Next => &["qwen3next-bf16"],
            Self::Qwen35 => &["qwen35-bf16"],
            Self::Qwen35Moe => &["qwen35moe-bf16"],
            Self::Qwen4Exp => &["qwen4-bf16", "qwen4-ngrams-bf16"],
            Self::KimiLinear => &["kimi-linear-bf16", "kimi-k3-bf16"],
            Self::Lfm2 => &["lfm2-bf16"],
            Self::Lfm2Moe => &["lfm2moe-bf16"],
            Self::NemotronH => &["nemotron-h-bf16"],
        }
    }
}
