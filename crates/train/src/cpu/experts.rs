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

mod apart;

use paceline_model::{Experts, Gating, LEAST_SUM};

use super::Cpu;
use crate::ops::Gate;
use crate::weights::{ExpertWeights, Matrix};
use crate::{ops, pool};
pub(super) use apart::GuestRows;

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

/// The rows of an expert.
#[derive(Debug)]
struct ExpertRows {
    expert: usize,
    /// Rows and their weights.
    rows: Vec<(usize, f32)>,
    /// Empty where another rank has the expert.
    work: ExpertWork,
    /// (n, C), without weights.
    y: Vec<f32>,
}

/// Values of an expert on its rows.
#[derive(Debug, Default)]
struct ExpertWork {
    /// (n, C)
    x: Vec<f32>,
    /// (n, F)
    gate: Vec<f32>,
    up: Vec<f32>,
    hidden: Vec<f32>,
}

/// Gradients behind a layer's experts.
struct ResultGradients {
    /// (n, C) of the rows of each expert.
    rows: Vec<Vec<f32>>,
    /// (T, E): of the weights, 0 for experts that are not chosen.
    weights: Vec<f32>,
    /// (T,)
    shared: Vec<f32>,
}

impl RoutedRows {
    /// The sum over experts, of `len` numbers in rows of `c`: one expert after the other.
    fn sum(&self, len: usize, c: usize) -> Vec<f32> {
        let mut y = vec![0.0; len];
        for own in &self.experts {
            for ((row, weight), out) in own.rows.iter().zip(own.y.chunks(c)) {
                let place = y[row * c..][..c].iter_mut();
                place.zip(out).for_each(|(y, out)| *y += weight * out);
            }
        }
        y
    }

    /// Gradients of the experts' results and weights, of dy (T, C).
    fn results_back(&self, of: Experts, dy: &[f32], c: usize) -> ResultGradients {
        let mut found = ResultGradients {
            rows: Vec::with_capacity(self.experts.len()),
            weights: vec![0.0; self.shares.len()],
            shared: vec![0.0; self.shared.len()],
        };
        for own in &self.experts {
            let mut d_out = rows_of(&own.rows, dy, c);
            for (i, (row, weight)) in own.rows.iter().enumerate() {
                let d = &mut d_out[i * c..][..c];
                let d_weight = ops::dot(d, &own.y[i * c..][..c]);
                if own.expert < of.count {
                    found.weights[row * of.count + own.expert] = d_weight;
                } else if let Some(place) = found.shared.get_mut(*row) {
                    *place = d_weight * weight * (1.0 - weight);
                }
                d.iter_mut().for_each(|d| *d *= weight);
            }
            found.rows.push(d_out);
        }
        found
    }
}

impl Cpu<'_> {
    /// x (T, C) -> y (T, C)
    pub(super) fn experts(
        &self,
        at: (Experts, &ExpertWeights),
        params: &[f32],
        x: &[f32],
    ) -> (Vec<f32>, RoutedRows) {
        let mut routed = self.route(at, params, x);
        for own in &mut routed.experts {
            let x = std::mem::take(&mut own.work.x);
            (own.work, own.y) = self.expert((at.0, &at.1.experts[own.expert]), params, x);
        }
        (routed.sum(x.len(), self.config.width), routed)
    }

    /// The experts of each row of x (T, C), and their inputs.
    fn route(
        &self,
        (of, weights): (Experts, &ExpertWeights),
        params: &[f32],
        x: &[f32],
    ) -> RoutedRows {
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
        for expert in 0..weights.experts.len() {
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
            let work = ExpertWork {
                x: rows_of(&rows, x, self.config.width),
                ..ExpertWork::default()
            };
            let y = Vec::new();
            kept.experts.push(ExpertRows {
                expert,
                rows,
                work,
                y,
            });
        }
        kept
    }

    /// x (n, C) through an expert: what it leaves, and y (n, C).
    fn expert(
        &self,
        (of, [gate, up, down]): (Experts, &[Matrix; 3]),
        params: &[f32],
        x: Vec<f32>,
    ) -> (ExpertWork, Vec<f32>) {
        let both = [gate, up].map(|matrix| self.linear(matrix, params, &x));
        let hidden = self.gated(self.gate_of(of), (&both[0], &both[1]), gate.rows);
        let y = self.linear(down, params, &hidden);
        let [gate, up] = both;
        let work = ExpertWork {
            x,
            gate,
            up,
            hidden,
        };
        (work, y)
    }

    fn gate_of(&self, of: Experts) -> Gate {
        of.clamp.map_or(self.gate(), Gate::Clamped)
    }

    /// dy (T, C) at the input `x` -> dx (T, C). Adds the gradients of trained values to `grads`.
    pub(super) fn experts_back(
        &self,
        at: (Experts, &ExpertWeights),
        params: &[f32],
        (x, mut kept, dy): (&[f32], RoutedRows, &[f32]),
        grads: &mut [f32],
    ) -> Vec<f32> {
        let mut of = kept.results_back(at.0, dy, self.config.width);
        for (own, d) in kept.experts.iter_mut().zip(&mut of.rows) {
            let weights = (at.0, &at.1.experts[own.expert]);
            let work = (std::mem::take(&mut own.work), d.as_slice());
            *d = self.expert_back(weights, params, work, grads);
        }
        self.routes_back(at, params, (x, &kept, of), grads)
    }

    /// The gradient at `x` (T, C), by those at the experts' inputs and of their weights.
    fn routes_back(
        &self,
        (of, weights): (Experts, &ExpertWeights),
        params: &[f32],
        (x, kept, d): (&[f32], &RoutedRows, ResultGradients),
        grads: &mut [f32],
    ) -> Vec<f32> {
        let (c, mut d_weights) = (self.config.width, d.weights);
        let mut dx = vec![0.0; x.len()];
        for (own, d_own) in kept.experts.iter().zip(&d.rows) {
            for ((row, _), d) in own.rows.iter().zip(d_own.chunks(c)) {
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
            self.linear_back((gate, x), params, &d.shared, (&mut dx, true), grads);
        }
        dx
    }

    /// The gradient at an expert's input (n, C), by that at its results.
    fn expert_back(
        &self,
        (of, [gate, up, down]): (Experts, &[Matrix; 3]),
        params: &[f32],
        (mut work, d_out): (ExpertWork, &[f32]),
        grads: &mut [f32],
    ) -> Vec<f32> {
        let mut d_hidden = vec![0.0; work.hidden.len()];
        let at = (down, work.hidden.as_slice());
        self.linear_back(at, params, d_out, (&mut d_hidden, false), grads);
        let both = (work.gate.as_mut_slice(), work.up.as_mut_slice());
        self.gated_back(self.gate_of(of), both, &d_hidden, gate.rows);
        let mut dx = vec![0.0; work.x.len()];
        let at = (gate, work.x.as_slice());
        self.linear_back(at, params, &work.gate, (&mut dx, false), grads);
        let at = (up, work.x.as_slice());
        self.linear_back(at, params, &work.up, (&mut dx, true), grads);
        dx
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
