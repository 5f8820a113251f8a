//! Samples a token from logits.
//!
//! Order: bias, penalties and temperature, then top-k, top-p and min-p, then one draw. Each filter
//! works on the result of the one before. From the penalties on, transformers and Ollama
//! (`sample/samplers.go`) do the same. In llama.cpp's default chain the temperature comes last,
//! which gives another distribution; requests of llama-server's dialect ask for it
//! ([`TemperatureOrder`]). Everything is a fixed sequence of operations on the logits and the
//! request's own random numbers. So equal seeds give equal answers, independent of other requests.

use paceline_model::{ForbiddenTokens, Logits, TokenDraw, TopLogits};
use paceline_tensor::Kernels;
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde::{Deserialize, Serialize};
use toktrie::SimpleVob;

use crate::{Error, TokenLogprobs};

pub(crate) mod logprobs;

/// Maximum tokens of [`SamplingParams::logit_bias`]: each costs 8 bytes per request and an addition
/// per token. The limit of vLLM (`MAX_NUM_LOGIT_BIAS_TOKENS`, `v1/worker/gpu/sample`).
pub const MAX_LOGIT_BIAS: usize = 1024;

/// Sampling parameters. The default is greedy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divisor of the logits; 0 is greedy. 0 or more, finite.
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
    /// Seed of the request's random numbers.
    pub seed: u64,
    /// Tokens with a bias added to their logits before all else, -100 to 100; at most
    /// [`MAX_LOGIT_BIAS`], each token once, in any order.
    pub logit_bias: Vec<(u32, f32)>,
    #[serde(default, skip_serializing_if = "TemperatureOrder::is_first")]
    pub order: TemperatureOrder,
}

/// Where the temperature stands among the filters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TemperatureOrder {
    /// Before top-k, top-p and min-p.
    #[default]
    First,
    /// After them: they see the probabilities of temperature 1, as in llama.cpp.
    Last,
}

impl TemperatureOrder {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
    fn is_first(&self) -> bool {
        *self == Self::First
    }
}

impl SamplingParams {
    /// Whether a bias or penalty may raise any logit above the largest.
    fn changes_logits(&self) -> bool {
        self.penalties() != [1.0, 0.0, 0.0] || !self.logit_bias.is_empty()
    }

    const fn penalties(&self) -> [f32; 3] {
        let others = [self.presence_penalty, self.frequency_penalty];
        [self.repetition_penalty, others[0], others[1]]
    }

    /// The logits of a row that determine the token, if `forbidden` tokens are excluded.
    pub(crate) fn wanted(&self, forbidden: usize) -> Logits {
        if self.changes_logits() {
            return Logits::Last;
        }
        let n = match (self.temperature == 0.0, self.top_k) {
            (true, _) if forbidden == 0 => return Logits::Best,
            (true, _) => 1,
            (false, 0) => return Logits::Last,
            (false, _) if self.order == TemperatureOrder::Last => return Logits::Last,
            (false, top_k) => top_k,
        };
        let top = TopLogits::of_draw(n.saturating_add(forbidden), self.temperature);
        top.map_or(Logits::Last, Logits::Top)
    }
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
            logit_bias: Vec::new(),
            order: TemperatureOrder::First,
        }
    }
}

/// A sampling parameter out of range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {got}, expected {expected}")]
pub struct ParamError {
    pub name: &'static str,
    pub got: f32,
    pub expected: &'static str,
}

impl SamplingParams {
    /// Checks all ranges except [`logit_bias`](Self::logit_bias), which depends on the vocabulary:
    /// the engine checks it.
    ///
    /// # Errors
    /// [`ParamError`] for the first parameter out of range.
    pub fn check(&self) -> Result<(), ParamError> {
        const LEAST: f32 = f32::MIN_POSITIVE;
        let [repetition, presence, frequency] = self.penalties();
        let (temperature, top_p, finite) = (self.temperature, self.top_p, 0.0..=f32::MAX);
        for (name, got, range, expected) in [
            ("temperature", temperature, finite, "0 or more, finite"),
            ("top_p", top_p, LEAST..=1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, 0.0..=1.0, "0 to 1"),
            (
                "repetition_penalty",
                repetition,
                1e-3..=1e3,
                "0.001 to 1000",
            ),
            ("presence_penalty", presence, -2.0..=2.0, "-2 to 2"),
            ("frequency_penalty", frequency, -2.0..=2.0, "-2 to 2"),
        ] {
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

    /// Checks the bias for a model of `vocab` tokens. A repeated token is refused instead of added
    /// up or overwritten: one of the entries is a mistake.
    ///
    /// # Errors
    /// [`Error::BiasCount`] before any entry is checked, [`Error::BiasToken`],
    /// [`Error::BiasValue`], [`Error::BiasTwice`].
    pub(crate) fn check_bias(&self, vocab: usize) -> Result<(), Error> {
        let (got, most) = (self.logit_bias.len(), MAX_LOGIT_BIAS);
        if got > most {
            return Err(Error::BiasCount { got, most });
        }
        for &(token, got) in &self.logit_bias {
            if token as usize >= vocab {
                return Err(Error::BiasToken { token, vocab });
            }
            if !(-100.0..=100.0).contains(&got) {
                return Err(Error::BiasValue { token, got });
            }
        }
        let mut tokens: Vec<u32> = self.logit_bias.iter().map(|(token, _)| *token).collect();
        tokens.sort_unstable();
        let twice = tokens.windows(2).find(|pair| pair[0] == pair[1]);
        twice.map_or(Ok(()), |pair| Err(Error::BiasTwice { token: pair[0] }))
    }
}

/// Inputs of sampling besides the logits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SamplingInputs<'a> {
    pub(crate) history: History<'a>,
    /// Allowed tokens, at least one; `None` for all.
    pub(crate) mask: Option<&'a SimpleVob>,
    /// Alternatives with log-probabilities to report; `None` for no log-probabilities.
    pub(crate) logprobs: Option<usize>,
}

/// Tokens so far, and the length of the prompt.
pub(crate) type History<'a> = (&'a [u32], usize);

/// The sampling state of one sequence.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "State", into = "State")]
pub(crate) struct Sampler {
    params: SamplingParams,
    /// Random numbers used so far.
    draws: u64,
    rng: Pcg64Mcg,
}

/// Serialised form of a [`Sampler`]. The generator can be advanced, so the count stands for its
/// state.
#[derive(Serialize, Deserialize)]
struct State {
    params: SamplingParams,
    draws: u64,
}

impl From<Sampler> for State {
    fn from(sampler: Sampler) -> Self {
        Self {
            params: sampler.params,
            draws: sampler.draws,
        }
    }
}

impl TryFrom<State> for Sampler {
    type Error = ParamError;

    fn try_from(state: State) -> Result<Self, ParamError> {
        let mut sampler = Self::new(state.params)?;
        sampler.draws = state.draws;
        sampler.rng.advance(state.draws.into());
        Ok(sampler)
    }
}

#[derive(Clone, Copy, Debug)]
struct TokenCandidate {
    token: u32,
    weight: f32,
}

impl TokenCandidate {
    /// More probable first; the lower id among equals.
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        let by_weight = other.weight.total_cmp(&self.weight);
        by_weight.then(self.token.cmp(&other.token))
    }
}

/// Buffers of [`Sampler::sample`]: 16 bytes per token of the vocabulary.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Unmodified logits, for log-probabilities.
    raw: Vec<f32>,
    /// By token, proportional to the probability: 1 for the most probable token, 0 for excluded
    /// ones.
    weights: Vec<f32>,
    candidates: Vec<TokenCandidate>,
}

impl Scratch {
    pub(crate) fn new(vocab: usize) -> Self {
        Self {
            raw: vec![0.0; vocab],
            weights: vec![0.0; vocab],
            candidates: Vec::with_capacity(vocab),
        }
    }

    /// Number of tokens that could have been drawn.
    #[cfg(test)]
    pub(crate) fn kept(&self) -> usize {
        self.weights.iter().filter(|weight| **weight > 0.0).count()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ChosenToken {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// Candidates that top-p sorts first, doubled until they are enough. Measured for top-p 0.95 on 256
/// tokens of Austen's prose (`engine::tests::smollm2` counts them). SmolLM2 needs no more at 96 %
/// of the positions at temperature 0.7, and at 57 % at temperature 1.
const FIRST_CUT: usize = 256;

/// Values per chunk of a search.
const CHUNK: usize = 64;

impl SamplingParams {
    /// Samples the first token of an empty history; `logits` is `(vocabulary,)` and is overwritten.
    /// For benchmarks of sampling.
    ///
    /// # Errors
    /// [`ParamError`].
    pub fn first_token(&self, kernels: &Kernels, logits: &mut [f32]) -> Result<u32, ParamError> {
        let mut scratch = Scratch::new(logits.len());
        let mut sampler = Sampler::new(self.clone())?;
        Ok(sampler.sample(kernels, logits, (&[], 0), &mut scratch))
    }
}

impl Sampler {
    /// A sampler at the start of its random numbers.
    ///
    /// # Errors
    /// [`ParamError`].
    pub(crate) fn new(params: SamplingParams) -> Result<Self, ParamError> {
        params.check()?;
        let rng = Pcg64Mcg::seed_from_u64(params.seed);
        Ok(Self {
            params,
            draws: 0,
            rng,
        })
    }

    pub(crate) const fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// The next draw, for a step that draws tokens; `None` where bias or penalties change logits,
    /// and where the temperature comes last.
    pub(crate) fn draw_of(&self, forbidden: ForbiddenTokens) -> Option<TokenDraw> {
        let p = &self.params;
        let is_usual = !p.changes_logits() && p.order == TemperatureOrder::First;
        is_usual.then(|| TokenDraw {
            temperature: p.temperature,
            top_k: u32::try_from(p.top_k).unwrap_or(0),
            top_p: p.top_p,
            min_p: p.min_p,
            seed: p.seed,
            draws: self.draws,
            forbidden,
        })
    }

    /// Skips a token that was sampled elsewhere: uses up its random numbers.
    pub(crate) fn skip(&mut self) {
        if (1.0 / self.params.temperature).is_finite() {
            self.draws = self.draws.wrapping_add(1);
            self.rng.next_u64();
        }
    }

    /// [`sample`](Self::sample) among the allowed tokens, with log-probabilities of the unmodified
    /// logits if requested.
    pub(crate) fn choose(
        &mut self,
        kernels: &Kernels,
        logits: &mut [f32],
        asked: SamplingInputs<'_>,
        scratch: &mut Scratch,
    ) -> ChosenToken {
        if asked.logprobs.is_some() {
            // Bias and penalties overwrite the logits.
            scratch.raw.copy_from_slice(logits);
        }
        if let Some(mask) = asked.mask {
            forbid(logits, mask);
        }
        let mut token = self.sample(kernels, logits, asked.history, scratch);
        if let Some(mask) = asked.mask.filter(|mask| !mask.is_allowed(token)) {
            // All allowed tokens have a logit of minus infinity or NaN.
            token = mask.first_bit_set().unwrap_or_default() as u32;
        }
        let logprobs = asked.logprobs.map(|n| {
            let raw = std::mem::take(&mut scratch.raw);
            let logprobs = logprobs::logprobs(kernels, &raw, token, n, scratch);
            scratch.raw = raw;
            logprobs
        });
        ChosenToken { token, logprobs }
    }

    /// Samples the token that follows `history`. `logits` is `(vocabulary,)` and is overwritten; a
    /// NaN is never preferred to a number.
    ///
    /// Cost: greedy, one pass over the logits; otherwise a few passes with an exponential per
    /// token, and a sort of the candidates. Allocates a copy of the penalised tokens, and for top-k
    /// a number per 64 tokens of the vocabulary. Uses one random number, none when greedy.
    pub(crate) fn sample(
        &mut self,
        kernels: &Kernels,
        logits: &mut [f32],
        history: History<'_>,
        scratch: &mut Scratch,
    ) -> u32 {
        for (token, bias) in &self.params.logit_bias {
            logits[*token as usize] += bias;
        }
        self.penalise(logits, history);
        let best = argmax(logits);
        let (largest, scale) = (logits[best], 1.0 / self.params.temperature);
        // Greedy at temperature 0, if its inverse overflows, and if all weights, which are relative
        // to the largest logit, would be NaN.
        if !scale.is_finite() || !largest.is_finite() {
            return best as u32;
        }
        let weights = |logits: &[f32], scale, scratch: &mut Scratch| {
            kernels.exp_scaled(logits, largest, scale, &mut scratch.weights);
        };
        match self.params.order {
            TemperatureOrder::First => {
                weights(logits, scale, scratch);
                self.cut(scratch);
            }
            TemperatureOrder::Last => {
                weights(logits, 1.0, scratch);
                self.cut(scratch);
                let kept = logits.iter_mut().zip(&scratch.weights);
                let out = kept.filter(|(_, weight)| **weight == 0.0);
                out.for_each(|(logit, _)| *logit = f32::NEG_INFINITY);
                weights(logits, scale, scratch);
            }
        }
        self.draw(&scratch.weights) as u32
    }

    fn penalise(&self, logits: &mut [f32], (tokens, prompt_len): History<'_>) {
        let p = &self.params;
        if p.repetition_penalty != 1.0 {
            let recent = &tokens[tokens.len().saturating_sub(p.penalty_window)..];
            for (token, _) in counts(recent) {
                let logit = &mut logits[token as usize];
                *logit = match *logit > 0.0 {
                    true => *logit / p.repetition_penalty,
                    false => *logit * p.repetition_penalty,
                };
            }
        }
        if p.presence_penalty != 0.0 || p.frequency_penalty != 0.0 {
            for (token, n) in counts(&tokens[prompt_len..]) {
                logits[token as usize] -= p.presence_penalty + p.frequency_penalty * n as f32;
            }
        }
    }

    /// Sets the weights of tokens outside top-k, top-p or min-p to 0.
    fn cut(&self, scratch: &mut Scratch) {
        let (p, weights) = (&self.params, &mut scratch.weights);
        if p.top_k > 0 || p.top_p < 1.0 {
            let candidates = &mut scratch.candidates;
            self.find_top(weights, candidates);
            weights.fill(0.0);
            let kept = candidates.iter();
            kept.for_each(|c| weights[c.token as usize] = c.weight);
        }
        if p.min_p > 0.0 {
            let improbable = weights.iter_mut().filter(|w| **w < p.min_p);
            improbable.for_each(|w| *w = 0.0);
        }
    }

    /// Candidates after top-k and then top-p; at least one of them is active.
    fn find_top(&self, weights: &[f32], candidates: &mut Vec<TokenCandidate>) {
        let (top_k, top_p) = (self.params.top_k, f64::from(self.params.top_p));
        candidates.clear();
        let all = if top_k > 0 {
            let least = reached_by(weights, top_k).unwrap_or(0.0);
            candidates.extend(candidates_from(weights, least));
            let kept = sort_first(candidates, top_k);
            candidates.truncate(kept);
            candidates.iter().map(|c| f64::from(c.weight)).sum()
        } else {
            let all = total(weights);
            // All tokens below this weight together have less than top-p excludes. Slightly lower,
            // so that rounding cannot matter.
            let unneeded = 0.999 * (1.0 - top_p) * all / weights.len() as f64;
            candidates.extend(candidates_from(weights, unneeded as f32));
            all
        };
        if top_p < 1.0 {
            keep_most_probable(candidates, top_p * all);
        }
    }

    fn draw(&mut self, weights: &[f32]) -> usize {
        // Only a forged count reaches the end of the range.
        self.draws = self.draws.wrapping_add(1);
        // 53 random bits: every f64 in 0..1 of that spacing.
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * total(weights);
        for (i, chunk) in weights.chunks(CHUNK).enumerate() {
            let sum = total(chunk);
            if left >= sum {
                left -= sum;
                continue;
            }
            for (j, weight) in chunk.iter().enumerate() {
                left -= f64::from(*weight);
                if left < 0.0 {
                    return i * CHUNK + j;
                }
            }
        }
        // Rounding can leave a remainder.
        let last = weights.iter().rposition(|weight| *weight > 0.0);
        last.expect("the most probable token is always left")
    }
}

/// Sets the logits outside `mask` to minus infinity. Cost: a pass over the logits.
fn forbid(logits: &mut [f32], mask: &SimpleVob) {
    for (part, bits) in logits.chunks_mut(32).zip(mask.as_slice()) {
        if *bits == u32::MAX {
            continue;
        }
        for (i, logit) in part.iter_mut().enumerate() {
            if bits >> i & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

/// Tokens with their number of occurrences, by ascending id: the order of a hash map would change
/// logits.
fn counts(tokens: &[u32]) -> Vec<(u32, usize)> {
    let mut sorted = tokens.to_vec();
    sorted.sort_unstable();
    let runs = sorted.chunk_by(|a, b| a == b);
    runs.map(|run| (run[0], run.len())).collect()
}

/// Tokens with a weight above 0 and at least `least`.
fn candidates_from(weights: &[f32], least: f32) -> impl Iterator<Item = TokenCandidate> {
    let tokens = (0..).zip(weights.iter().copied());
    let tokens = tokens.filter(move |(_, weight)| *weight > 0.0 && *weight >= least);
    tokens.map(|(token, weight)| TokenCandidate { token, weight })
}

/// A value that at least `n` (1 or more) of `values` reach: the n-th largest of the chunk maxima.
/// `None` if there are fewer chunks.
fn reached_by(values: &[f32], n: usize) -> Option<f32> {
    let mut peaks: Vec<f32> = values.chunks(CHUNK).map(largest).collect();
    let most = |a: &f32, b: &f32| b.total_cmp(a);
    (peaks.len() >= n).then(|| *peaks.select_nth_unstable_by(n - 1, most).1)
}

/// The sum, in eight lanes for vectorisation.
fn total(weights: &[f32]) -> f64 {
    let mut lanes = [0.0; 8];
    for part in weights.chunks(lanes.len()) {
        let pairs = lanes.iter_mut().zip(part);
        pairs.for_each(|(lane, weight)| *lane += f64::from(*weight));
    }
    lanes.iter().sum()
}

/// Keeps the fewest most probable candidates whose weights sum to `wanted`, or all; most probable
/// first.
fn keep_most_probable(candidates: &mut Vec<TokenCandidate>, wanted: f64) {
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

/// Sorts the `cut` most probable candidates to the front; returns their number.
fn sort_first(candidates: &mut [TokenCandidate], cut: usize) -> usize {
    if cut < candidates.len() {
        candidates.select_nth_unstable_by(cut, TokenCandidate::order);
    }
    let sorted = cut.min(candidates.len());
    candidates[..sorted].sort_unstable_by(TokenCandidate::order);
    sorted
}

/// The largest value, negative infinity if all are NaN.
fn largest(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 8];
    for part in values.chunks(lanes.len()) {
        let pairs = lanes.iter_mut().zip(part);
        pairs.for_each(|(lane, value)| *lane = larger(*lane, *value));
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, larger)
}

/// Index of the largest logit, the first among equals; a NaN only if all are NaN.
fn argmax(logits: &[f32]) -> usize {
    let mut best = (f32::NEG_INFINITY, 0);
    for (i, chunk) in logits.chunks(CHUNK).enumerate() {
        let peak = largest(chunk);
        if peak > best.0 {
            best = (peak, i * CHUNK);
        }
    }
    let (peak, start) = best;
    let place = logits[start..].iter().position(|logit| *logit == peak);
    place.map_or(0, |place| start + place)
}

#[cfg(test)]
mod tests;
