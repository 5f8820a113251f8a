//! Log-probabilities of the model for a token, whatever was drawn.
//!
//! Of the softmax over the logits as the forward pass gave them. With m the largest logit,
//!
//! ```text
//! w[i] = exp(x[i] - m)              f32, the kernels' exp, the same on every instruction set
//! S    = sum of w[i]                f64, in eight lanes (`total`)
//! logprob(x) = (x - m) - ln S       f64 with libm's ln, rounded to f32 once
//! ```
//!
//! so equal logits give equal bits everywhere. The error against exact arithmetic is that of `exp`:
//! some 1e-7.

use paceline_tensor::Kernels;

use super::{Candidate, Scratch, largest, reached_by, sort_first, total};
use crate::TokenLogprobs;

/// Lowest log-probability that is told, also for a logit that is no number. The API of OpenAI uses
/// this value for tokens that are very unlikely, and JSON has no infinity.
const LEAST: f32 = -9999.0;

/// The log-probabilities of `token` and of the `n` most probable tokens. `logits` is
/// `(vocabulary,)`.
///
/// The list has fewer only when the vocabulary has, or logits are NaN. Cost: four passes over the
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

/// The constants that turn a logit into a log-probability.
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
            // Of a broken model: the infinite ones share the probability, differences are NaN.
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
        // A NaN loses against every number.
        ((below - self.log_sum) as f32).max(LEAST)
    }
}

/// The tokens with the `n` largest logits, largest first, the lower id first among equals.
fn find_top(logits: &[f32], n: usize, top: &mut Vec<Candidate>) {
    top.clear();
    if n == 0 {
        return;
    }
    let least = reached_by(logits, n).unwrap_or(f32::NEG_INFINITY);
    let tokens = (0..).zip(logits).filter(|(_, logit)| **logit >= least);
    // Adding 0 makes -0 and 0, which order tells apart, the equals that they are.
    top.extend(tokens.map(|(token, logit)| Candidate {
        token,
        weight: logit + 0.0,
    }));
    let sorted = sort_first(top, n);
    top.truncate(sorted);
}

#[cfg(test)]
mod tests;
