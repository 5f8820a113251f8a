//! Prompt logprobs: the same in any batch, and equal to those of one pass over the whole prompt.

use paceline_tensor::PAGE;

use super::requests::{mixed, prompt, request};
use super::rig::{Rig, alone};
use super::smollm2::logits_of;
use super::tiny::TinyModel;
use crate::request::check_prompt_logprobs;
use crate::sampling::Scratch;
use crate::sampling::logprobs::logprobs;
use crate::{EngineConfig, GenerationRequest, MAX_PROMPT_LOGPROBS, SamplingParams};

const CONTEXT: usize = 3 * PAGE;

fn config(max_running: usize, max_rows: usize, cache_positions: usize) -> EngineConfig {
    EngineConfig {
        cache_positions,
        max_running,
        max_waiting: 100,
        max_rows,
        drafts: max_rows % 2,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

/// Requests of all kinds, two of three with prompt logprobs.
pub(super) fn scored(tiny: &TinyModel) -> Vec<GenerationRequest> {
    let mut all = mixed(tiny);
    for (i, request) in all.iter_mut().enumerate() {
        request.prompt_logprobs = i % 3 > 0;
    }
    all
}

#[test]
fn scores_are_those_of_one_pass() {
    for tiny in [TinyModel::new(2), TinyModel::toy(1)] {
        let tokens = prompt(2 * PAGE + 9, 3);
        let rows = logits_of(&tiny, &tokens);
        let mut scratch = Scratch::new(rows[0].len());
        let kernels = tiny.model.kernels();
        let pairs = rows.iter().zip(&tokens[1..]);
        let expected: Vec<_> = pairs
            .map(|(row, token)| logprobs(kernels, row, *token, 4, &mut scratch))
            .collect();
        let wanted = GenerationRequest {
            logprobs: Some(4),
            prompt_logprobs: true,
            ..request(tokens, 2, SamplingParams::default())
        };
        assert_eq!(alone(&tiny, &wanted, CONTEXT).scores, Some(expected));
    }
}

/// Cached pages have no logits, so the rows are computed again. Other answers do not change, and
/// the pages remain shared.
#[test]
fn a_known_prompt_is_scored_the_same() {
    for tiny in [TinyModel::new(1), TinyModel::toy(1)] {
        let plain = request(prompt(2 * PAGE + 5, 1), 3, SamplingParams::default());
        let scored = GenerationRequest {
            logprobs: Some(1),
            prompt_logprobs: true,
            ..plain.clone()
        };
        let expected = [&plain, &scored].map(|r| alone(&tiny, r, CONTEXT));
        let mut rig = Rig::new(&tiny, config(4, 40, 6 * CONTEXT));
        for order in [[0, 1], [1, 0]] {
            let ids = order.map(|i| rig.submit([&plain, &scored][i]));
            rig.drain();
            for (id, i) in ids.iter().zip(order) {
                assert_eq!(rig.outcomes[id], expected[i]);
            }
        }
        assert!(rig.engine.n_reused() >= 2 * PAGE as u64);
    }
}

#[test]
fn too_many_scores_are_refused() {
    let tokens = MAX_PROMPT_LOGPROBS / 6;
    assert!(check_prompt_logprobs(tokens, Some(5)).is_ok());
    let error = check_prompt_logprobs(tokens + 1, Some(5)).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("1048578") && text.contains("1048576"),
        "{text}"
    );
}
