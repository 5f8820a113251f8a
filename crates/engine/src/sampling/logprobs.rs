//! Log-probabilities of tokens under the model, independent of sampling.
//!
//! They are those of the softmax over the unmodified logits. With m the largest logit,
//!
//! ```text
//! w[i] = exp(x[i] - m)              f32, the kernels' exp, the same on every instruction set
//! S    = sum of w[i]                f64, in eight lanes (`total`)
//! logprob(x) = (x - m) - ln S       f64 with libm's ln, rounded to f32 once
//! ```
//!
//! Equal logits have equal bits everywhere. The error against exact arithmetic is that of `exp`:
//! some 1e-7.

use paceline_tensor::Kernels;

use super::{Scratch, TokenCandidate, largest, reached_by, sort_first, total};
use crate::TokenLogprobs;

/// Lowest reported log-probability, also for a NaN logit. The OpenAI API uses this value for very
/// unlikely tokens, and JSON has no infinity.
const LEAST: f32 = -9999.0;

/// Log-probabilities of `token` and of the `n` most probable tokens. `logits` is `(vocabulary,)`.
///
/// The list is shorter only if the vocabulary is, or logits are NaN. Cost: four passes over the
/// logits, one of them with an exponential, and a sort of `n`. Allocates the list and a number per
/// 64 tokens of the vocabulary.
pub(crate) fn logprobs(
    kernels: &Kernels,
    logits: &[f32],
    token: u32,
    n: usize,
    scratch: &mut Scratch,
) -> TokenLogprobs {
    let scale = Scale::new(kernels, logits, &mut scratch.weights);
    find_top(logits, n, &mut scratch.candidates);
    let top = scratch.candidates.iter();
    TokenLogprobs {
        logprob: scale.logprob(logits[token as usize]),
        top: top.map(|c| (c.token, scale.logprob(c.weight))).collect(),
    }
}

/// Constants that convert a logit to a log-probability.
struct Scale {
    largest: f32,
    log_sum: f64,
}

impl Scale {
    fn new(kernels: &Kernels, logits: &[f32], weights: &mut [f32]) -> Self {
        let largest = largest(logits);
        if largest.is_finite() {
            kernels.exp_scaled(logits, largest, 1.0, weights);
        } else {
            // Infinite logits, of a broken model, share the probability; their differences are NaN.
            let pairs = weights.iter_mut().zip(logits);
            pairs.for_each(|(weight, logit)| *weight = f32::from(*logit == largest));
        }
        let log_sum = libm::log(total(weights));
        Self { largest, log_sum }
    }

    fn logprob(&self, logit: f32) -> f32 {
        let below = if logit == self.largest {
            0.0
        } else {
            f64::from(logit) - f64::from(self.largest)
        };
        // `max` returns the number if the other is NaN.
        ((below - self.log_sum) as f32).max(LEAST)
    }
}

/// The tokens with the `n` largest logits, largest first, the lower id first among equals.
fn find_top(logits: &[f32], n: usize, top: &mut Vec<TokenCandidate>) {
    top.clear();
    if n == 0 {
        return;
    }
    let least = reached_by(logits, n).unwrap_or(f32::NEG_INFINITY);
    let tokens = (0..).zip(logits).filter(|(_, logit)| **logit >= least);
    // Adding 0 converts -0 to 0, which the ordering would distinguish.
    top.extend(tokens.map(|(token, logit)| TokenCandidate {
        token,
        weight: logit + 0.0,
    }));
    let sorted = sort_first(top, n);
    top.truncate(sorted);
}

#[cfg(test)]
mod tests;
