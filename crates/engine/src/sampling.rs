//! From logits to a token.
//!
//! Order: penalties, then temperature, then top-k, top-p, min-p on the tokens that are left, then
//! one draw. (Temperature first, as in vLLM and transformers; llama.cpp applies it last.) Everything is a
//! fixed sequence of operations on the logits and the request's own random numbers, so equal
//! seeds give equal answers whatever else the engine does.

use paceline_tensor::Kernels;
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde::{Deserialize, Serialize};

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the most probable token always. 0 or more.
    pub temperature: f32,
    /// Keeps this many most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest most probable tokens whose probabilities sum to this; above 0, at most 1.
    pub top_p: f32,
    /// Keeps tokens at least this probable, as a share of the most probable; 0 to 1.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in the last
    /// [`penalty_window`](Self::penalty_window) tokens (Keskar et al. 2019); 1 does nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of generated tokens once; -2 to 2, 0 does nothing.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence among generated tokens; -2 to 2, 0 does nothing.
    pub frequency_penalty: f32,
    /// Tokens that the repetition penalty looks back over, prompt included.
    pub penalty_window: usize,
    /// Starts the request's random numbers.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: 64, // llama.cpp's default
            seed: 0,
        }
    }
}

/// A sampling parameter out of range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {got}, expected {expected}")]
pub struct ParamError {
    /// The parameter.
    pub name: &'static str,
    /// Its value.
    pub got: f32,
    /// What would be accepted.
    pub expected: &'static str,
}

impl SamplingParams {
    /// Checks all ranges.
    ///
    /// # Errors
    /// [`ParamError`] for the first parameter out of range.
    pub fn check(&self) -> Result<(), ParamError> {
        let checks = [
            ("temperature", self.temperature, 0.0..=f32::MAX, "0 or more"),
            (
                "top_p",
                self.top_p,
                f32::MIN_POSITIVE..=1.0,
                "above 0 and at most 1",
            ),
            ("min_p", self.min_p, 0.0..=1.0, "0 to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                1e-3..=1e3,
                "0.001 to 1000",
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                -2.0..=2.0,
                "-2 to 2",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                -2.0..=2.0,
                "-2 to 2",
            ),
        ];
        for (name, got, range, expected) in checks {
            if !range.contains(&got) {
                return Err(ParamError {
                    name,
                    got,
                    expected,
                });
            }
        }
        Ok(())
    }
}

/// The sampling state of one sequence.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sampler {
    params: SamplingParams,
    rng: Pcg64Mcg,
}

/// A token that may be drawn.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    /// Proportional to its probability; the most probable has 1.
    weight: f32,
}

impl Candidate {
    /// More probable first; the lower id among equals.
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        other
            .weight
            .total_cmp(&self.weight)
            .then(self.token.cmp(&other.token))
    }
}

/// How many candidates are sorted at first when only top-p or min-p bounds them: nearly always
/// enough (SmolLM2 at temperature 1 needs a median of 60 for top-p 0.95), doubled until it is.
const FIRST_CUT: usize = 256;

impl Sampler {
    /// A sampler at the start of its random numbers.
    ///
    /// # Errors
    /// [`ParamError`].
    pub fn new(params: SamplingParams) -> Result<Self, ParamError> {
        params.check()?;
        Ok(Self {
            params,
            rng: Pcg64Mcg::seed_from_u64(params.seed),
        })
    }

    /// The parameters.
    pub const fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Chooses the token that follows `tokens`, of which the first `prompt_len` are the prompt.
    /// `logits` is `(vocabulary,)` and is overwritten.
    ///
    /// Cost: one pass over the vocabulary (two exponentials' worth per token), and a sort of the
    /// candidates that are left. Takes one random number, none when greedy.
    pub fn sample(
        &mut self,
        kernels: &Kernels,
        logits: &mut [f32],
        tokens: &[u32],
        prompt_len: usize,
    ) -> u32 {
        self.penalise(logits, tokens, prompt_len);
        let best = argmax(logits);
        let scale = 1.0 / self.params.temperature;
        // A temperature so small that its inverse overflows is greedy.
        if self.params.temperature == 0.0 || !scale.is_finite() {
            return best;
        }
        let mut candidates = self.candidates(kernels, logits, best, scale);
        self.keep_top(&mut candidates);
        self.draw(&candidates)
    }

    fn penalise(&self, logits: &mut [f32], tokens: &[u32], prompt_len: usize) {
        let p = &self.params;
        if p.repetition_penalty != 1.0 {
            let recent = &tokens[tokens.len().saturating_sub(p.penalty_window)..];
            for (i, &token) in recent.iter().enumerate() {
                if !recent[..i].contains(&token) {
                    let logit = &mut logits[token as usize];
                    *logit = if *logit > 0.0 {
                        *logit / p.repetition_penalty
                    } else {
                        *logit * p.repetition_penalty
                    };
                }
            }
        }
        if p.presence_penalty != 0.0 || p.frequency_penalty != 0.0 {
            // Counted over a sorted copy: a hash map's order would leak into the float sums.
            let mut generated = tokens[prompt_len..].to_vec();
            generated.sort_unstable();
            for run in generated.chunk_by(|a, b| a == b) {
                logits[run[0] as usize] -=
                    p.presence_penalty + p.frequency_penalty * run.len() as f32;
            }
        }
    }

    /// Tokens with their weights, those of weight 0 left out, cut by min-p.
    fn candidates(
        &self,
        kernels: &Kernels,
        logits: &[f32],
        best: u32,
        scale: f32,
    ) -> Vec<Candidate> {
        let mut weights = vec![0.0; logits.len()];
        kernels.exp_scaled(logits, logits[best as usize], scale, &mut weights);
        let least = self.params.min_p.max(f32::MIN_POSITIVE);
        let all = weights.iter().enumerate();
        all.filter(|(_, weight)| **weight >= least)
            .map(|(token, &weight)| Candidate {
                token: token as u32,
                weight,
            })
            .collect()
    }

    /// Applies top-k and top-p; what is left is sorted, most probable first, if either cuts.
    fn keep_top(&self, candidates: &mut Vec<Candidate>) {
        if self.params.top_k > 0 && self.params.top_k < candidates.len() {
            candidates.select_nth_unstable_by(self.params.top_k - 1, Candidate::order);
            candidates.truncate(self.params.top_k);
        }
        if self.params.top_p >= 1.0 {
            candidates.sort_unstable_by_key(|c| c.token);
            return;
        }
        candidates.sort_unstable_by_key(|c| c.token);
        let total: f64 = candidates.iter().map(|c| f64::from(c.weight)).sum();
        let wanted = total * f64::from(self.params.top_p);
        let mut cut = FIRST_CUT;
        loop {
            let sorted = sort_first(candidates, cut);
            let mut sum = 0.0;
            let enough = candidates[..sorted].iter().position(|c| {
                sum += f64::from(c.weight);
                sum >= wanted
            });
            match enough {
                Some(last) => return candidates.truncate(last + 1),
                None if sorted == candidates.len() => return,
                None => cut *= 2,
            }
        }
    }

    /// One token by its weight.
    fn draw(&mut self, candidates: &[Candidate]) -> u32 {
        let total: f64 = candidates.iter().map(|c| f64::from(c.weight)).sum();
        // 53 random bits: every f64 in 0..1 of that spacing.
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * total;
        for candidate in candidates {
            left -= f64::from(candidate.weight);
            if left < 0.0 {
                return candidate.token;
            }
        }
        candidates
            .last()
            .expect("the most probable token is always left")
            .token
    }
}

/// Sorts the `cut` most probable candidates to the front; returns how many that were.
fn sort_first(candidates: &mut [Candidate], cut: usize) -> usize {
    if cut < candidates.len() {
        candidates.select_nth_unstable_by(cut, Candidate::order);
    }
    let sorted = cut.min(candidates.len());
    candidates[..sorted].sort_unstable_by(Candidate::order);
    sorted
}

/// The largest logit's token, the lowest id among equals; NaN never wins.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] || logits[best].is_nan() {
            best = i;
        }
    }
    best as u32
}
