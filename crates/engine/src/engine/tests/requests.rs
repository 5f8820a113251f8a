//! Requests of all kinds.

use super::tiny::{END, TinyModel, VOCAB};
use crate::{GenerationRequest, SamplingParams, SchedulingParams};

/// Sampled, so that the answer covers the vocabulary.
pub(super) const SAMPLED: SamplingParams = SamplingParams {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    penalty_window: 64,
    seed: 0,
    logit_bias: Vec::new(),
    order: crate::TemperatureOrder::First,
};

/// `n` pseudorandom tokens.
pub(super) fn prompt(n: usize, seed: u32) -> Vec<u32> {
    let token = |i: usize| (i as u32 + 1).wrapping_mul(2_654_435_761 + seed) >> 16;
    (0..n).map(|i| token(i) % VOCAB as u32).collect()
}

/// A request without stop strings.
pub(super) fn request(
    prompt: Vec<u32>,
    max_tokens: usize,
    sampling: SamplingParams,
) -> GenerationRequest {
    GenerationRequest {
        prompt,
        max_tokens,
        sampling,
        ..GenerationRequest::default()
    }
}

/// A greedy answer of exactly `n` tokens: none ends it.
pub(super) fn endless(prompt: Vec<u32>, n: usize) -> GenerationRequest {
    request(prompt, n, biased(&[(END, -100.0)]))
}

/// Greedy with these biases.
pub(super) fn biased(biases: &[(u32, f32)]) -> SamplingParams {
    let logit_bias = biases.to_vec();
    SamplingParams {
        logit_bias,
        ..SamplingParams::default()
    }
}

/// The order of a client's request without priority and deadline.
pub(super) fn of_client(client: u64) -> SchedulingParams {
    SchedulingParams {
        client,
        ..SchedulingParams::default()
    }
}

/// Overlapping stop strings that sampled text often contains.
pub(super) fn stops() -> Vec<String> {
    ["abcab", "bc", "中", "e d"].map(str::to_owned).to_vec()
}

/// Greedy and sampled, prompts shorter and longer than pages and chunks, at least 160 tokens of
/// context.
pub(crate) fn mixed(tiny: &TinyModel) -> Vec<GenerationRequest> {
    let greedy = SamplingParams::default();
    let seed = |seed| SamplingParams { seed, ..SAMPLED };
    let with = |number, change: fn(&mut SamplingParams)| {
        let mut sampling = seed(number);
        change(&mut sampling);
        sampling
    };
    let narrow = with(5, |p| (p.top_p, p.min_p) = (0.9, 0.02));
    let mut all = vec![
        request(prompt(1, 1), 20, greedy.clone()),
        request(prompt(150, 2), 10, greedy.clone()),
        request(tiny.encode("abc def"), 60, seed(3)),
        request(prompt(64, 4), 30, with(4, |p| p.top_k = 5)),
        request(prompt(63, 5), 30, narrow),
        request(prompt(65, 6), 70, with(6, |p| p.temperature = 2.0)),
        request(prompt(130, 7), 0, greedy.clone()),
        request(prompt(9, 8), 1, seed(8)),
    ];
    let penalised = SamplingParams {
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.2,
        penalty_window: 20,
        ..greedy
    };
    all.push(request(prompt(30, 9), 50, penalised));
    let biased = with(20, |p| {
        p.logit_bias = vec![(2, 2.5), (14, 4.0), (0, -100.0)]
    });
    all.push(request(prompt(31, 20), 40, biased));
    for n in 10..13 {
        let stop = stops();
        all.push(GenerationRequest {
            stop,
            ..request(prompt(5 * n, n as u32), 60, seed(n as u64))
        });
    }
    // Some report log-probabilities: of the token only, of a few, of more than the vocabulary has.
    let some = all.iter_mut().skip(1).step_by(2);
    for (request, n) in some.zip([0, 2, 20].iter().cycle()) {
        request.logprobs = Some(*n);
    }
    all
}
