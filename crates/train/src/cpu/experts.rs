//! Routed experts in place of a feed-forward, and their gradients.
//!
//! The router scores all experts for a row, and the best `used` get it. Experts take their rows in
//! order, one expert after the other, so sums over experts have one order. The choice itself has no
//! gradient; the weights of the chosen have.
//!
//! Letters: T tokens, C width, E experts, n rows of an expert, F its feed-forward.

use paceline_model::{Experts, Gating};

use super::Cpu;
use crate::weights::ExpertWeights;
use crate::{ops, pool};

/// Values that the forward pass of a layer's experts leaves for the backward one.
#[derive(Debug)]
pub(crate) struct RoutedRows {
    /// (T, E): what the weights are made of, 0 for experts that are not chosen where only the
    /// chosen count.
    shares: Vec<f32>,
    /// Experts with rows, in order.
    experts: Vec<ExpertRows>,
}

/// The rows of an expert.
#[derive(Debug)]
struct ExpertRows {
    expert: usize,
    /// Rows and their weights.
    rows: Vec<(usize, f32)>,
    /// (n, C)
    x: Vec<f32>,
    /// (n, F)
    gate: Vec<f32>,
    up: Vec<f32>,
    hidden: Vec<f32>,
    /// (n, C), without weights.
    y: Vec<f32>,
}

impl Cpu<'_> {
    /// x (T, C) -> y (T, C)
    pub(super) fn experts(
        &self,
        (of, weights): (Experts, &ExpertWeights),
        params: &[f32],
        x: &[f32],
    ) -> (Vec<f32>, RoutedRows) {
        let c = self.config.width;
        let mut shares = self.linear(&weights.router, params, x);
        let chosen = pool::chunks_map(self.kernels.pool(), &mut shares, of.count, |_, scores| {
            choose(of, scores)
        });
        let mut y = vec![0.0; x.len()];
        let mut experts = Vec::new();
        for (expert, [gate, up, down]) in weights.experts.iter().enumerate() {
            let rows = chosen.iter().enumerate().flat_map(|(row, chosen)| {
                let own = chosen.iter().find(|(of, _)| *of == expert);
                own.map(|(_, weight)| (row, *weight))
            });
            let rows: Vec<(usize, f32)> = rows.collect();
            if rows.is_empty() {
                continue;
            }
            let own = rows_of(&rows, x, c);
            let (gate, up) = (
                self.linear(gate, params, &own),
                self.linear(up, params, &own),
            );
            let hidden = self.gated(&gate, &up, of.width);
            let out = self.linear(down, params, &hidden);
            for ((row, weight), out) in rows.iter().zip(out.chunks(c)) {
                let place = y[row * c..][..c].iter_mut();
                place.zip(out).for_each(|(y, out)| *y += weight * out);
            }
            experts.push(ExpertRows {
                expert,
                rows,
                x: own,
                gate,
                up,
                hidden,
                y: out,
            });
        }
        (y, RoutedRows { shares, experts })
    }

    /// dy (T, C) at the input `x` -> dx (T, C). Adds the gradients of trained values to `grads`.
    pub(super) fn experts_back(
        &self,
        (of, weights): (Experts, &ExpertWeights),
        params: &[f32],
        (x, kept, dy): (&[f32], RoutedRows, &[f32]),
        grads: &mut [f32],
    ) -> Vec<f32> {
        let c = self.config.width;
        let mut dx = vec![0.0; x.len()];
        // (T, E): the gradients of the weights, 0 for experts that are not chosen.
        let mut d_weights = vec![0.0; kept.shares.len()];
        for mut own in kept.experts {
            let [gate, up, down] = &weights.experts[own.expert];
            let mut d_out = rows_of(&own.rows, dy, c);
            for (i, (row, weight)) in own.rows.iter().enumerate() {
                let d = &mut d_out[i * c..][..c];
                d_weights[row * of.count + own.expert] = ops::dot(d, &own.y[i * c..][..c]);
                d.iter_mut().for_each(|d| *d *= weight);
            }
            let mut d_hidden = vec![0.0; own.hidden.len()];
            let at = (down, own.hidden.as_slice());
            self.linear_back(at, params, &d_out, (&mut d_hidden, false), grads);
            self.gated_back((&mut own.gate, &mut own.up), &d_hidden, of.width);
            let mut d_own = vec![0.0; own.x.len()];
            let at = (gate, own.x.as_slice());
            self.linear_back(at, params, &own.gate, (&mut d_own, false), grads);
            let at = (up, own.x.as_slice());
            self.linear_back(at, params, &own.up, (&mut d_own, true), grads);
            for ((row, _), d) in own.rows.iter().zip(d_own.chunks(c)) {
                let place = dx[row * c..][..c].iter_mut();
                place.zip(d).for_each(|(dx, d)| *dx += d);
            }
        }
        let shares = kept.shares.chunks(of.count);
        for (d, shares) in d_weights.chunks_mut(of.count).zip(shares) {
            // Both ways of making weights are a softmax over what has a share.
            let mean = ops::dot(d, shares);
            for (d, share) in d.iter_mut().zip(shares) {
                *d = share * (*d - mean) * of.scale;
            }
        }
        let at = (&weights.router, x);
        self.linear_back(at, params, &d_weights, (&mut dx, true), grads);
        dx
    }
}

/// The chosen experts of a row and their weights. `scores` (E,) become shares, whose multiples the
/// weights are. They are a softmax over the chosen experts where weights are divided by their sum,
/// else over all.
fn choose(of: Experts, scores: &mut [f32]) -> Vec<(usize, f32)> {
    let mut order: Vec<usize> = (0..of.count).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a])); // stable: the lower one of equals
    order.truncate(of.used);
    if of.normalised || of.gating == Gating::OfChosen {
        for (expert, score) in scores.iter_mut().enumerate() {
            if !order.contains(&expert) {
                *score = f32::NEG_INFINITY;
            }
        }
    }
    ops::softmax(scores, 1.0);
    order
        .iter()
        .map(|expert| (*expert, scores[*expert] * of.scale))
        .collect()
}

/// Rows of x (T, C): (n, C)
fn rows_of(rows: &[(usize, f32)], x: &[f32], c: usize) -> Vec<f32> {
    let row = |(row, _): &(usize, f32)| &x[row * c..][..c];
    rows.iter().flat_map(row).copied().collect()
}
