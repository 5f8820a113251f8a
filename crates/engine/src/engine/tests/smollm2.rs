//! A real model, where it is on this machine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_base::KernelClass;
use paceline_formats::tokenizer::Specials;
use paceline_model::{Batch, BatchSequence, BatchSize, LoadOptions, Logits, Source, Workspace};
use paceline_tensor::{Kernels, PAGE};

use super::requests::{SAMPLED, request};
use super::rig::{Rig, alone};
use super::tiny::Tiny;
use crate::sampling::logprobs::logprobs;
use crate::sampling::{Sampler, Scratch};
use crate::{EngineConfig, Request, SamplingParams};

const CONTEXT: usize = 2 * PAGE;

/// The folder of the models that tests read.
pub(crate) fn folder() -> PathBuf {
    std::env::var_os("PACELINE_TEST_MODELS")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache/paceline/test-models")))
        .unwrap_or_default()
}

/// The path of SmolLM2, or `None` with a line that says why not.
pub(super) fn path(test: &str) -> Option<PathBuf> {
    let path = folder().join("SmolLM2-135M-Instruct.Q4_1.gguf");
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED {test}: {} is not there", path.display());
    None
}

pub(super) fn load(path: &Path, threads: usize) -> Tiny {
    let kernels = Arc::new(Kernels::new(threads).unwrap());
    Tiny::open(&Source::open(path).unwrap(), kernels)
}

fn requests(model: &Tiny) -> Vec<Request> {
    let encode = |text: &str| model.tokenizer.encode(text, Specials::Parse, true).unwrap();
    let chat = |text| {
        encode(&format!(
            "<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ))
    };
    let seed = |seed| SamplingParams {
        seed,
        top_p: 0.9,
        ..SAMPLED
    };
    let greedy = SamplingParams::default();
    let stop = vec![".\n".to_owned(), " of".to_owned()];
    vec![
        request(encode("The capital of France is"), 8, greedy),
        request(chat("Answer with emojis only: 🌈🦄🍕🎉"), 16, seed(1)),
        request(encode("月亮代表我的心,你问我爱你有多深"), 16, seed(2)),
        Request {
            stop,
            ..request(chat("Name three rivers."), 24, seed(3))
        },
        request(
            encode("Once upon a time"),
            12,
            SamplingParams {
                top_k: 40,
                ..seed(4)
            },
        ),
    ]
}

#[test]
fn outcomes_do_not_depend_on_strangers_threads_or_moves() {
    let Some(path) = path("outcomes_do_not_depend_on_strangers_threads_or_moves") else {
        return;
    };
    let models = [load(&path, 2), load(&path, 1)];
    let requests = requests(&models[0]);
    let sizes = EngineConfig {
        max_running: 4,
        max_waiting: 9,
        max_rows: 19,
        ..EngineConfig::single("tiny", CONTEXT)
    };
    let mut rigs = [
        Rig::new(&models[1], sizes.clone()),
        Rig::new(&models[0], sizes),
    ];
    let ids: Vec<_> = requests.iter().map(|r| rigs[0].submit(r)).collect();
    rigs[0].steps(9);
    let mut at = Vec::new();
    for (i, id) in ids.into_iter().enumerate() {
        // Every second one moves on the way.
        let moves = i % 2 == 0 && rigs[0].outcomes[&id].finish.is_none();
        let (engine, id) = match moves {
            false => (0, id),
            true => {
                let (snapshot, past) = rigs[0].take(id);
                (1, rigs[1].restore(&snapshot, past))
            }
        };
        at.push((engine, id));
    }
    rigs.iter_mut().for_each(Rig::drain);
    for ((engine, id), request) in at.into_iter().zip(&requests) {
        let expected = alone(&models[0], request, CONTEXT);
        assert_eq!(rigs[engine].outcomes[&id], expected, "{request:?}");
    }
    let first = alone(&models[0], &requests[0], CONTEXT);
    assert!(first.text.contains("Paris"), "{first:?}");
}

#[test]
fn the_next_turn_of_a_chat_is_the_same_with_what_is_known_of_it() {
    let Some(path) = path("the_next_turn_of_a_chat_is_the_same_with_what_is_known_of_it") else {
        return;
    };
    let model = load(&path, 2);
    let context = 6 * PAGE;
    let text = include_str!("../../../../../tests-data/austen-1056.txt");
    let mut said = model.encode(text);
    let mut rig = Rig::new(&model, EngineConfig::single("tiny", context));
    for turn in 0..2 {
        let mut wanted = request(said.clone(), 40, SamplingParams::default());
        wanted.logprobs = Some(3);
        let id = rig.submit(&wanted);
        rig.drain();
        assert_eq!(rig.engine.n_reused(), turn * 4 * PAGE as u64);
        assert_eq!(rig.outcomes[&id], alone(&model, &wanted, context));
        said.extend(&rig.outcomes[&id].tokens);
        said.extend(model.encode("\nWhat does she do then?\n"));
    }
}

/// Logits after each token of a text, `(tokens, vocabulary)`.
fn logits(model: &Tiny, text: &str) -> Vec<Vec<f32>> {
    let tokens = model
        .tokenizer
        .encode(text, Specials::AsText, true)
        .unwrap();
    logits_of(model, &tokens)
}

/// Logits after each of `tokens`, from one step.
pub(super) fn logits_of(model: &Tiny, tokens: &[u32]) -> Vec<Vec<f32>> {
    let n = tokens.len();
    let mut cache = model.model.whole_cache(n).unwrap();
    let pages: Vec<u32> = (0..cache.pages() as u32).collect();
    let mut workspace = Workspace::new(
        &model.model,
        BatchSize {
            rows: n,
            logit_rows: n,
            sequences: 1,
            context: n,
        },
    );
    let sequence = BatchSequence {
        tokens,
        position: 0,
        pages: &pages,
        windows: &[],
        adapter: 0,
        logits: Logits::All,
    };
    let batch = Batch {
        sequences: &[sequence],
    };
    let rows = model
        .model
        .forward(&batch, &mut workspace, &mut cache)
        .unwrap();
    let vocab = model.model.config().vocab;
    (0..rows)
        .map(|i| workspace.logits_mut(i, vocab).to_vec())
        .collect()
}

/// The model in float32, as numpy computes it.
fn load_f32(path: &Path) -> Tiny {
    let kernels = Arc::new(Kernels::new(2).unwrap());
    let class = KernelClass::CpuF32;
    let options = LoadOptions { class };
    Tiny::open_as(&Source::open(path).unwrap(), kernels, options)
}

/// How far two float32 implementations may be apart: the reference has four digits, the rest is the
/// order of their sums.
const CLOSE: f32 = 2e-4;

fn assert_close(got: f32, expected: f32) {
    assert!((got - expected).abs() < CLOSE, "{got}, expected {expected}");
}

/// Against a float32 forward pass in numpy on the dequantised weights (shared/reference/models.md,
/// section 4; that of llama.cpp for " Paris" is -0.2589).
#[test]
fn log_probabilities_agree_with_numpy() {
    let Some(path) = path("log_probabilities_agree_with_numpy") else {
        return;
    };
    let model = load_f32(&path);
    let prompt = model.encode("The capital of France is");
    let mut paris = request(prompt, 1, SamplingParams::default());
    paris.logprobs = Some(5);
    // Neither changes what is told.
    paris.sampling.logit_bias = vec![(7042, -50.0)];
    paris.sampling.presence_penalty = 1.0;
    let outcome = alone(&model, &paris, CONTEXT);
    let told = outcome.logprobs[0].as_ref().unwrap();
    let expected = [
        (7042, -0.2581),
        (260, -2.7407),
        (4528, -4.3844),
        (2250, -4.6199),
        (1315, -4.6778),
    ];
    assert_eq!(told.top.len(), expected.len());
    for ((id, got), (token, logprob)) in told.top.iter().zip(expected) {
        assert_eq!(*id, token);
        assert_close(*got, logprob);
    }
    assert_eq!(outcome.tokens, [260], "the bias forbids the first");
    assert_eq!(told.logprob, told.top[1].1);
}

/// The same source: negative log-probabilities of the first 256 tokens of Austen.
#[test]
fn log_probabilities_of_a_text_agree_with_numpy() {
    let Some(path) = path("log_probabilities_of_a_text_agree_with_numpy") else {
        return;
    };
    let model = load_f32(&path);
    let text = include_str!("../../../../../tests-data/austen-1056.txt");
    let tokens = model.encode(text);
    let rows = logits(&model, text);
    let mut scratch = Scratch::new(rows[0].len());
    let kernels = model.model.kernels();
    let mut told = |row: &[f32], token, n| logprobs(kernels, row, token, n, &mut scratch);
    let pairs = rows.iter().zip(&tokens[1..]);
    let costs: Vec<f32> = pairs.map(|(row, t)| -told(row, *t, 0).logprob).collect();
    assert_eq!(costs.len(), 255);
    let mut scored = request(tokens.clone(), 0, SamplingParams::default());
    scored.prompt_logprobs = true;
    let scores = alone(&model, &scored, 5 * PAGE).scores.unwrap();
    let scores: Vec<f32> = scores.iter().map(|score| -score.logprob).collect();
    assert_eq!(
        scores, costs,
        "the engine scores a prompt with the same numbers"
    );
    let first = [
        12.2544, 2.9422, 1.9437, 5.7901, 7.8040, 5.6032, 13.8812, 0.2515,
    ];
    for (got, expected) in costs.iter().zip(first) {
        assert_close(*got, expected);
    }
    let mean = costs.iter().sum::<f32>() / 255.0;
    assert!((mean - 3.47049).abs() < 2e-5, "mean {mean}");
    let last = told(&rows[255], 0, 3).top;
    for ((id, got), (token, logprob)) in
        last.iter()
            .zip([(198, -0.3874), (284, -1.5955), (564, -2.4880)])
    {
        assert_eq!(*id, token);
        assert_close(*got, logprob);
    }
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
    let scored = Request {
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
    let rows = logits(
        &model,
        include_str!("../../../../../tests-data/austen-1056.txt"),
    );
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
            sampler.sample(
                model.model.kernels(),
                &mut row.clone(),
                (&[], 0),
                &mut scratch,
            );
            few += usize::from(scratch.kept() <= 256);
        }
        let got = few as f64 / rows.len() as f64;
        assert!(
            (got - share).abs() < 0.01,
            "{got} at temperature {temperature}"
        );
    }
}
