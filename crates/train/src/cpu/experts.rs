//! Routed experts in place of a feed-forward, a shared one, and their gradients.
//!
//! The router scores all experts for a row, and the best `used` get it. Experts take their rows in
//! order, one expert after the other, so sums over experts have one order. The choice itself has no
//! gradient; the weights of the chosen have.
//!
//! An auxiliary loss of a layer is small where rows are even over experts: `E sum(f_e P_e)`. For
//! expert e, f is the share of rows that chose it, and P is the mean of the softmax of its scores.
//! Source: Fedus et al. 2021 (Switch Transformer), equation 4, with `used` choices a row.
//!
//! Letters: T tokens, C width, E experts, n rows of an expert, F its feed-forward.

use paceline_model::{Experts, Gating, LEAST_SUM};

use super::Cpu;
use crate::ops::Gate;
use crate::weights::ExpertWeights;
use crate::{ops, pool};

/// Values that the forward pass of a layer's experts leaves for the backward one.
#[derive(Debug)]
pub(crate) struct RoutedRows {
    /// (T, E): shares of a sum that divides the weights; 0 without one, and for experts that do
    /// not count in it.
    shares: Vec<f32>,
    /// (T, E): derivatives of weights by scores, without the part of the sum. `shares` of a
    /// softmax.
    slopes: Option<Vec<f32>>,
    /// (E,): rows that chose each expert.
    uses: Vec<usize>,
    /// (T,): weights of the shared expert, where it has a gate.
    shared: Vec<f32>,
    /// Experts with rows, in order; the shared one is last.
    experts: Vec<ExpertRows>,
}

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
        let choice = weights.choice.as_ref().map(|choice| choice.get(params));
        let chosen = pool::chunks_map(self.kernels.pool(), &mut shares, of.count, |_, scores| {
            choose(of, choice, scores)
        });
        let mut kept = RoutedRows {
            shares,
            slopes: (of.gating == Gating::Sigmoid)
                .then(|| chosen.iter().flat_map(|row| &row.slopes).copied().collect()),
            uses: vec![0; of.count],
            shared: Vec::new(),
            experts: Vec::new(),
        };
        let all = chosen.iter().flat_map(|row| &row.experts);
        all.for_each(|(expert, _)| kept.uses[*expert] += 1);
        if let Some(gate) = &weights.shared_gate {
            kept.shared = self.linear(gate, params, x);
            kept.shared.iter_mut().for_each(|x| *x = ops::sigmoid(*x));
        }
        let mut y = vec![0.0; x.len()];
        for (expert, [gate, up, down]) in weights.experts.iter().enumerate() {
            let weight_of = |row: usize| match expert < of.count {
                true => {
                    let chosen = chosen[row].experts.iter();
                    let mut own = chosen.filter(|(of, _)| *of == expert);
                    own.next().map(|(_, weight)| *weight)
                }
                false => Some(kept.shared.get(row).copied().unwrap_or(1.0)),
            };
            let rows = (0..chosen.len()).filter_map(|row| Some((row, weight_of(row)?)));
            let rows: Vec<(usize, f32)> = rows.collect();
            if rows.is_empty() {
                continue;
            }
            let own = rows_of(&rows, x, c);
            let both = (
                self.linear(gate, params, &own),
                self.linear(up, params, &own),
            );
            let hidden = self.gated(self.gate_of(of), (&both.0, &both.1), gate.rows);
            let out = self.linear(down, params, &hidden);
            for ((row, weight), out) in rows.iter().zip(out.chunks(c)) {
                let place = y[row * c..][..c].iter_mut();
                place.zip(out).for_each(|(y, out)| *y += weight * out);
            }
            kept.experts.push(ExpertRows {
                expert,
                rows,
                x: own,
                gate: both.0,
                up: both.1,
                hidden,
                y: out,
            });
        }
        (y, kept)
    }

    fn gate_of(&self, of: Experts) -> Gate {
        of.clamp.map_or(self.gate(), Gate::Clamped)
    }

    /// dy (T, C) at the input `x` -> dx (T, C). Adds the gradients of trained values to `grads`.
    pub(super) fn experts_back(
        &self,
        (of, weights): (Experts, &ExpertWeights),
        params: &[f32],
        (x, mut kept, dy): (&[f32], RoutedRows, &[f32]),
        grads: &mut [f32],
    ) -> Vec<f32> {
        let c = self.config.width;
        let mut dx = vec![0.0; x.len()];
        // (T, E) and (T,): the gradients of the weights, 0 for experts that are not chosen.
        let mut d_weights = vec![0.0; kept.shares.len()];
        let mut d_shared = vec![0.0; kept.shared.len()];
        for own in std::mem::take(&mut kept.experts) {
            let mut d_out = rows_of(&own.rows, dy, c);
            for (i, (row, weight)) in own.rows.iter().enumerate() {
                let d = &mut d_out[i * c..][..c];
                let d_weight = ops::dot(d, &own.y[i * c..][..c]);
                if own.expert < of.count {
                    d_weights[row * of.count + own.expert] = d_weight;
                } else if let Some(place) = d_shared.get_mut(*row) {
                    *place = d_weight * weight * (1.0 - weight);
                }
                d.iter_mut().for_each(|d| *d *= weight);
            }
            let rows = own.rows.clone();
            let d_own = self.expert_back((of, weights), params, own, &d_out, grads);
            for ((row, _), d) in rows.iter().zip(d_own.chunks(c)) {
                let place = dx[row * c..][..c].iter_mut();
                place.zip(d).for_each(|(dx, d)| *dx += d);
            }
        }
        let slopes = kept.slopes.as_ref().unwrap_or(&kept.shares);
        let shares = kept.shares.chunks(of.count).zip(slopes.chunks(of.count));
        for (d, (shares, slopes)) in d_weights.chunks_mut(of.count).zip(shares) {
            // Shares divided by their sum have a part of every gradient.
            let mean = ops::dot(d, shares);
            for (d, slope) in d.iter_mut().zip(slopes) {
                *d = slope * (*d - mean) * of.scale;
            }
        }
        if self.balance > 0.0 {
            let scores = self.linear(&weights.router, params, x);
            balance_back(&kept.uses, self.balance, scores, &mut d_weights);
        }
        let at = (&weights.router, x);
        self.linear_back(at, params, &d_weights, (&mut dx, true), grads);
        if let Some(gate) = &weights.shared_gate {
            self.linear_back((gate, x), params, &d_shared, (&mut dx, true), grads);
        }
        dx
    }

    /// The gradient of an expert's rows: (n, C).
    fn expert_back(
        &self,
        (of, weights): (Experts, &ExpertWeights),
        params: &[f32],
        mut own: ExpertRows,
        d_out: &[f32],
        grads: &mut [f32],
    ) -> Vec<f32> {
        let [gate, up, down] = &weights.experts[own.expert];
        let mut d_hidden = vec![0.0; own.hidden.len()];
        let at = (down, own.hidden.as_slice());
        self.linear_back(at, params, d_out, (&mut d_hidden, false), grads);
        let both = (own.gate.as_mut_slice(), own.up.as_mut_slice());
        self.gated_back(self.gate_of(of), both, &d_hidden, gate.rows);
        let mut d_own = vec![0.0; own.x.len()];
        let at = (gate, own.x.as_slice());
        self.linear_back(at, params, &own.gate, (&mut d_own, false), grads);
        let at = (up, own.x.as_slice());
        self.linear_back(at, params, &own.up, (&mut d_own, true), grads);
        d_own
    }
}

/// A row's experts.
struct Choice {
    /// The chosen ones and their weights.
    experts: Vec<(usize, f32)>,
    /// (E,): see [`RoutedRows::slopes`].
    slopes: Vec<f32>,
}

/// The chosen experts of a row. `scores` (E,) become shares, whose multiples the weights are. They
/// are a softmax over the chosen experts where weights are divided by their sum, else over all.
fn choose(of: Experts, choice: Option<&[f32]>, scores: &mut [f32]) -> Choice {
    let mut weights = scores.to_vec();
    if of.gating == Gating::Sigmoid {
        weights.iter_mut().for_each(|x| *x = ops::sigmoid(*x));
    }
    // The order of scores is that of their softmax, also of sums of one.
    let rank = |e: usize| weights[e] + choice.map_or(0.0, |choice| choice[e]);
    let open = of.groups.map(|groups| groups.open(of.count, rank));
    let is_open = |e: &usize| match (of.groups, open) {
        (Some(groups), Some(open)) => open >> (e / (of.count / groups.count)) & 1 == 1,
        _ => true,
    };
    let mut order: Vec<usize> = (0..of.count).filter(is_open).collect();
    order.sort_by(|a, b| rank(*b).total_cmp(&rank(*a))); // stable: the lower one of equals
    order.truncate(of.used);
    if of.gating == Gating::Sigmoid {
        return of_sigmoids(of, &order, &weights, scores);
    }
    if of.normalised || of.gating == Gating::OfChosen {
        for (expert, score) in scores.iter_mut().enumerate() {
            if !order.contains(&expert) {
                *score = f32::NEG_INFINITY;
            }
        }
    }
    ops::softmax(scores, 1.0);
    let of_chosen = order.iter();
    let of_chosen = of_chosen.map(|expert| (*expert, scores[*expert] * of.scale));
    Choice {
        experts: of_chosen.collect(),
        slopes: Vec::new(),
    }
}

/// Weights that are sigmoids, divided by their sum where they are normalised.
fn of_sigmoids(of: Experts, order: &[usize], sigmoids: &[f32], shares: &mut [f32]) -> Choice {
    let mut sum = 1.0;
    if of.normalised {
        let chosen: f32 = order.iter().map(|expert| sigmoids[*expert]).sum();
        sum = chosen.max(LEAST_SUM);
    }
    shares.fill(0.0);
    let (mut slopes, mut experts) = (vec![0.0; of.count], Vec::with_capacity(order.len()));
    for expert in order {
        let s = sigmoids[*expert];
        slopes[*expert] = s * (1.0 - s) / sum;
        if of.normalised {
            shares[*expert] = s / sum;
        }
        experts.push((*expert, s / sum * of.scale));
    }
    Choice { experts, slopes }
}

/// Adds to the gradients of scores (T, E) what the auxiliary loss gives, times `factor`.
fn balance_back(uses: &[usize], factor: f32, mut scores: Vec<f32>, d_scores: &mut [f32]) {
    let (count, rows) = (uses.len(), scores.len() / uses.len());
    // Shares of choices, of each row's mean: E / T / T.
    let scale = factor * count as f32 / (rows * rows) as f32;
    let d_means: Vec<f32> = uses.iter().map(|n| *n as f32 * scale).collect();
    for (p, d) in scores.chunks_mut(count).zip(d_scores.chunks_mut(count)) {
        ops::softmax(p, 1.0);
        let mean = ops::dot(p, &d_means);
        for (d, (p, d_mean)) in d.iter_mut().zip(p.iter().zip(&d_means)) {
            *d += p * (d_mean - mean);
        }
    }
}

/// Rows of x (T, C): (n, C)
fn rows_of(rows: &[(usize, f32)], x: &[f32], c: usize) -> Vec<f32> {
    let row = |(row, _): &(usize, f32)| &x[row * c..][..c];
    rows.iter().flat_map(row).copied().collect()
}
