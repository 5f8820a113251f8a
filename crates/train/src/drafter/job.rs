//! The job of a draft head's training, which its workers get too.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::optimiser::OptimiserOptions;

/// All that the bits of a head depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrafterJob {
    /// A GGUF file or a Hugging Face folder.
    pub model: PathBuf,
    /// A file of prompts, in any form of training data.
    pub data: PathBuf,
    /// Prompts that are held out; without, one in 20 of `data`.
    pub valid: Option<PathBuf>,
    /// Longest prompt with its answer, in tokens.
    pub tokens_max: usize,
    /// Answers of a step.
    pub batch: usize,
    pub seed: u64,
    /// Most tokens of the draft vocabulary.
    pub draft_vocab: usize,
    pub optimiser: OptimiserOptions,
}
