//! A real model, if installed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_base::KernelClass;
use paceline_model::{
    Batch, BatchSequence, BatchSize, LoadOptions, Logits, ModelSource, Workspace,
};
use paceline_tensor::{Kernels, PAGE};
use paceline_text::tokenizer::Specials;

use super::requests::{SAMPLED, request};
use super::rig::alone;
use super::tiny::TinyModel;
use crate::sampling::{Sampler, Scratch};
use crate::{GenerationRequest, SamplingParams};

/// The folder of the models that tests read.
pub(crate) fn folder() -> PathBuf {
    std::env::var_os("PACELINE_TEST_MODELS")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache/paceline/test-models")))
        .unwrap_or_default()
}

/// The path of SmolLM2, or `None` after printing the reason.
pub(super) fn path(test: &str) -> Option<PathBuf> {
    let path = folder().join("SmolLM2-135M-Instruct.Q4_1.gguf");
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED {test}: {} is not there", path.display());
    None
}

pub(super) fn load(path: &Path, threads: usize) -> TinyModel {
    let kernels = Arc::new(Kernels::new(threads).unwrap());
    TinyModel::open(&ModelSource::open(path).unwrap(), kernels)
}

/// Logits after each token of a text, `(tokens, vocabulary)`.
fn logits(model: &TinyModel, text: &str) -> Vec<Vec<f32>> {
    let tokens = model.tokenizer.encode(text, Specials::AsText, true);
    logits_of(model, &tokens.unwrap())
}

/// Logits after each of `tokens`, from one step.
pub(super) fn logits_of(model: &TinyModel, tokens: &[u32]) -> Vec<Vec<f32>> {
    let n = tokens.len();
    let mut cache = model.model.whole_cache(n).unwrap();
    let pages: Vec<u32> = (0..cache.pages() as u32).collect();
    let size = BatchSize {
        logit_rows: n,
        ..BatchSize::single(n, n)
    };
    let mut workspace = Workspace::new(&model.model, size);
    let batch = [BatchSequence::plain(tokens, 0, &pages, Logits::All)];
    let batch = Batch::new(&batch);
    let rows = model.model.forward(&batch, &mut workspace, &mut cache);
    let vocab = model.model.config().vocab;
    let row = |i| workspace.logits_mut(i, vocab).to_vec();
    (0..rows.unwrap()).map(row).collect()
}

/// The model in float32, as numpy computes it.
fn load_f32(path: &Path) -> TinyModel {
    let kernels = Arc::new(Kernels::new(2).unwrap());
    let class = KernelClass::CpuF32;
    let options = LoadOptions { class };
    TinyModel::open_as(&ModelSource::open(path).unwrap(), kernels, options)
}

/// Maximum difference of two float32 implementations: the reference has four digits, the rest is
/// the order of sums.
const CLOSE: f32 = 2e-4;

fn assert_close(got: f32, expected: f32) {
    assert!((got - expected).abs() < CLOSE, "{got}, expected {expected}");
}

/// Log-probabilities of an echoed prompt's tokens, against `transformers`
/// (`scripts/golden/echo.py`).
#[test]
fn scores_of_a_prompt_agree_with_transformers() {
    let Some(path) = path("scores_of_a_prompt_agree_with_transformers") else {
        return;
    };
    let golden = include_str!("../../../../../tests-data/golden/echo.json");
    let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
    let ids = golden["ids"].as_array().unwrap().iter();
    let ids: Vec<u32> = ids.map(|id| id.as_u64().unwrap() as u32).collect();
    let expected = golden["logprobs"].as_array().unwrap();
    assert!(expected[0].is_null());
    let scored = GenerationRequest {
        prompt_logprobs: true,
        ..request(ids, 0, SamplingParams::default())
    };
    let scores = alone(&load_f32(&path), &scored, 5 * PAGE).scores.unwrap();
    assert_eq!(scores.len() + 1, expected.len());
    for (score, expected) in scores.iter().zip(&expected[1..]) {
        assert_close(score.logprob, expected.as_f64().unwrap() as f32);
    }
}

/// The figures in the documentation of `sampling::FIRST_CUT`.
#[test]
fn most_top_p_cuts_need_few_candidates() {
    let Some(path) = path("most_top_p_cuts_need_few_candidates") else {
        return;
    };
    let model = load(&path, 2);
    let text = include_str!("../../../../../tests-data/austen-1056.txt");
    let rows = logits(&model, text);
    assert_eq!(rows.len(), 256);
    for (temperature, share) in [(0.7, 0.96), (1.0, 0.57)] {
        let params = SamplingParams {
            temperature,
            top_p: 0.95,
            ..SAMPLED
        };
        let mut scratch = Scratch::new(rows[0].len());
        let mut few = 0;
        for row in &rows {
            let mut sampler = Sampler::new(params.clone()).unwrap();
            let (kernels, mut row) = (model.model.kernels(), row.clone());
            sampler.sample(kernels, &mut row, (&[], 0), &mut scratch);
            few += usize::from(scratch.kept() <= 256);
        }
        let got = few as f64 / rows.len() as f64;
        assert!((got - share).abs() < 0.01, "{got} at {temperature}");
    }
}
