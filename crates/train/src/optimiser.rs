//! AdamW or plain descent, with a schedule and a limit on the gradient's norm.
//!
//! Values are updated one by one, in f32 and in one order of operations (PyTorch's). So a process
//! that has only a part of them computes the same bits.

use std::ops::Range;

use paceline_base::tree;
use serde::{Deserialize, Serialize};

use crate::ops::dot;
use crate::params::{Layout, ParameterSlot};

/// Schedule of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Half a cosine, to 0.
    #[default]
    Cosine,
    /// Straight, to 0.
    Linear,
    Constant,
}

/// The rule of an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rule {
    /// Loshchilov and Hutter 2019, with moments 0.9 and 0.999.
    #[default]
    AdamW,
    /// Down the gradient.
    Sgd,
}

/// Settings of an optimiser.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimiserOptions {
    pub rule: Rule,
    /// Highest learning rate.
    pub lr: f64,
    /// Steps over which it rises to that.
    pub warmup: u64,
    pub schedule: Schedule,
    /// Steps of the run.
    pub steps: u64,
    /// Steps behind the warm-up over which it falls; without, those that the run has left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// Decay of weights.
    pub decay: f64,
    /// Largest norm of a gradient; 0 for any.
    pub clip: f64,
}

const BETA: [f64; 2] = [0.9, 0.999];
const EPSILON: f32 = 1e-8;

/// Floats of a block of a tensor whose squares are summed together.
const BLOCK: usize = 4096;

/// Moments of all numbers, and how they are updated.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimiser {
    pub options: OptimiserOptions,
    /// First moments.
    pub first: Vec<f32>,
    /// Second moments.
    pub second: Vec<f32>,
}

impl Optimiser {
    /// Without moments, for `n` numbers.
    pub fn new(options: OptimiserOptions, n: usize) -> Self {
        let n = if options.rule == Rule::AdamW { n } else { 0 };
        Self {
            options,
            first: vec![0.0; n],
            second: vec![0.0; n],
        }
    }

    /// The learning rate of step `step`, from 0.
    pub fn rate(&self, step: u64) -> f64 {
        let o = &self.options;
        if step < o.warmup {
            return o.lr * (step + 1) as f64 / o.warmup as f64;
        }
        let left = o.steps.saturating_sub(o.warmup);
        let left = o.decay_steps.unwrap_or(left).max(1);
        let gone = (step - o.warmup) as f64 / left as f64;
        match o.schedule {
            Schedule::Constant => o.lr,
            Schedule::Linear => o.lr * (1.0 - gone).max(0.0),
            Schedule::Cosine => {
                o.lr * 0.5 * (1.0 + libm::cos(std::f64::consts::PI * gone.min(1.0)))
            }
        }
    }

    /// Applies the gradient of step `step`, from 0. Gives the norm that it had.
    pub fn apply(
        &mut self,
        step: u64,
        layout: &Layout,
        grads: &mut [f32],
        params: &mut [f32],
    ) -> f64 {
        let lens: Vec<usize> = blocks(layout).iter().map(Range::len).collect();
        let norm = norm(layout, &squares(&lens, grads));
        self.update(step, norm, grads, params);
        norm
    }

    /// Applies a part of the gradient of step `step`, whose length as a whole is `norm`, to the
    /// values and moments of that part.
    pub(crate) fn update(&mut self, step: u64, norm: f64, grads: &mut [f32], params: &mut [f32]) {
        if self.options.clip > 0.0 && norm > self.options.clip {
            let factor = (self.options.clip / (norm + 1e-6)) as f32;
            grads.iter_mut().for_each(|g| *g *= factor);
        }
        let rate = self.rate(step);
        let kept = (1.0 - rate * self.options.decay) as f32;
        if self.options.rule == Rule::Sgd {
            for (p, g) in params.iter_mut().zip(&*grads) {
                *p = *p * kept - rate as f32 * g;
            }
            return;
        }
        let [b1, b2] = BETA.map(|b| b as f32);
        let [c1, c2] = BETA.map(|b| 1.0 - libm::pow(b, (step + 1) as f64));
        let (size, root) = ((rate / c1) as f32, libm::sqrt(c2) as f32);
        let moments = self.first.iter_mut().zip(&mut self.second);
        for ((p, g), (m, v)) in params.iter_mut().zip(&*grads).zip(moments) {
            *m = b1 * *m + (1.0 - b1) * g;
            *v = b2 * *v + (1.0 - b2) * (g * g);
            *p = *p * kept - size * (*m / (v.sqrt() / root + EPSILON));
        }
    }
}

/// Ranges of trained values whose squares are summed together: blocks of tensors, in order.
pub(crate) fn blocks(layout: &Layout) -> Vec<Range<usize>> {
    let of = |slot: &ParameterSlot| {
        let (start, end) = (slot.range.start, slot.range.end);
        let block = move |at: usize| at..(at + BLOCK).min(end);
        (start..end).step_by(BLOCK).map(block)
    };
    layout.slots().iter().flat_map(of).collect()
}

/// The sum of squares of each block of a gradient's part; `lens` are the blocks' lengths.
pub(crate) fn squares(lens: &[usize], grads: &[f32]) -> Vec<f32> {
    let mut rest = grads;
    let of = |len: &usize| {
        let (block, behind) = rest.split_at(*len);
        rest = behind;
        dot(block, block)
    };
    lens.iter().map(of).collect()
}

/// The length of a gradient, of the sums of all blocks: trees over tensors and over their blocks.
pub(crate) fn norm(layout: &Layout, squares: &[f32]) -> f64 {
    let mut rest = squares;
    let mut of = |slot: &ParameterSlot| {
        let (own, behind) = rest.split_at(slot.range.len().div_ceil(BLOCK));
        rest = behind;
        total(&own.iter().map(|square| [*square]).collect::<Vec<_>>())
    };
    let tensors: Vec<[f32; 1]> = layout.slots().iter().map(|slot| [of(slot)]).collect();
    libm::sqrt(f64::from(total(&tensors)))
}

fn total(leaves: &[[f32; 1]]) -> f32 {
    let leaves: Vec<&[f32]> = leaves.iter().map(<[f32; 1]>::as_slice).collect();
    tree::sum_all(&leaves).first().copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: OptimiserOptions = OptimiserOptions {
        rule: Rule::AdamW,
        lr: 0.1,
        warmup: 2,
        schedule: Schedule::Linear,
        steps: 10,
        decay_steps: None,
        decay: 0.01,
        clip: 0.0,
    };

    /// Recorded: `torch.optim.AdamW([1.0], lr=0.1, weight_decay=0.01)`, gradients 0.5 and -0.25,
    /// whose rates are 0.05 and 0.1.
    #[test]
    fn two_steps_are_those_of_pytorch() {
        let mut layout = Layout::default();
        layout.add("x".to_owned(), vec![1]);
        let (mut optimiser, mut x) = (Optimiser::new(OPTIONS, 1), [1.0]);
        optimiser.apply(0, &layout, &mut [0.5], &mut x);
        assert!((x[0] - 0.949_5).abs() < 1e-6, "{}", x[0]);
        optimiser.apply(1, &layout, &mut [-0.25], &mut x);
        assert!((x[0] - 0.921_916_8).abs() < 1e-5, "{}", x[0]);
    }

    #[test]
    fn rates_rise_and_fall() {
        let optimiser = Optimiser::new(OPTIONS, 0);
        let rates: Vec<f64> = [0, 1, 2, 6, 10].map(|step| optimiser.rate(step)).to_vec();
        assert_eq!(rates, [0.05, 0.1, 0.1, 0.05, 0.0]);
        let cosine = Optimiser::new(
            OptimiserOptions {
                schedule: Schedule::Cosine,
                ..OPTIONS
            },
            0,
        );
        assert!((cosine.rate(6) - 0.05).abs() < 1e-12);
        let sooner = Optimiser::new(
            OptimiserOptions {
                decay_steps: Some(4),
                ..OPTIONS
            },
            0,
        );
        let rates: Vec<f64> = [1, 2, 4, 6, 9].map(|step| sooner.rate(step)).to_vec();
        assert_eq!(rates, [0.1, 0.1, 0.05, 0.0, 0.0]);
    }

    #[test]
    fn a_long_gradient_is_shortened() {
        let mut layout = Layout::default();
        layout.add("x".to_owned(), vec![2]);
        let options = OptimiserOptions {
            rule: Rule::Sgd,
            clip: 1.0,
            decay: 0.0,
            warmup: 0,
            ..OPTIONS
        };
        let (mut grads, mut x) = ([3.0, 4.0], [0.0, 0.0]);
        let norm = Optimiser::new(options, 2).apply(0, &layout, &mut grads, &mut x);
        assert_eq!(norm, 5.0);
        assert!((x[1] + 0.08).abs() < 1e-6, "{x:?}");
    }
}
