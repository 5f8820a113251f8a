//! Experts: the router's choice for each row, the rows of each expert together, and the sum over
//! experts.
//!
//! ```text
//! x (T, C) -> z (T, E) = router x, in f32 -> softmax -> the k largest, by index where equal
//! rows of an expert -> y (rows, C) = down(silu(gate x) * up x)
//! delta (T, C) = sum over the tree of experts of weight * y; who was not chosen adds nothing
//! ```
//!
//! Only the weights of chosen experts are read. A leaf is `weight * y + 0`, which is never -0, so
//! that a subtree without a chosen expert may be left out or be zeros: the bits are the same.

use std::ops::Range;

use paceline_comm::Memory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels, Packed, Product, vector};

use super::activations;
use crate::config::{self, MAX_USED};
use crate::model::Model;
use crate::split::LeafCut;
use crate::weights::{Expert, Experts};

/// Least sum that weights are divided by: llama.cpp's, the smallest normal half.
const LEAST_SUM: f32 = 6.103_515_6e-5;

/// A row's choice of an expert.
#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    expert: usize,
    weight: f32,
    /// Its place among the results.
    slot: usize,
}

/// Buffers of layers with experts. T rows, E experts, k of them for each row and perhaps a shared
/// one besides.
#[derive(Debug)]
pub(super) struct Routed {
    of: config::Experts,
    /// `(T, E)`
    scores: Memory<f32>,
    /// `(T, E)`: their softmax.
    weights: Memory<f32>,
    /// `(T,)`: of the shared expert.
    shared_scores: Memory<f32>,
    /// `(T, k + 1)`, by expert.
    choices: Vec<Choice>,
    /// Rows of an expert.
    members: Vec<usize>,
    /// `(T, C)`: the rows of an expert.
    x: Activations,
    /// `(T, F)` each
    gate: Memory<f32>,
    up: Memory<f32>,
    /// `(T, F)`, of experts and of the shared one.
    hidden: [Activations; 2],
    /// `(T (k + 1), C)`, the results of an expert behind those of the one before.
    results: Memory<f32>,
}

impl Routed {
    /// For steps of up to `rows` rows.
    pub(super) fn new(model: &Model, of: config::Experts, rows: usize) -> Self {
        let width = model.config().width;
        let layers = || {
            model
                .layers()
                .iter()
                .filter_map(|layer| layer.feed_forward.experts())
        };
        let own = || layers().flat_map(|layer| &layer.experts);
        let inputs = own().flat_map(|expert| [&expert.gate, &expert.up]);
        let downs = |ffn: usize| {
            own()
                .map(|e| &e.down)
                .filter(move |down| down.cols() == ffn)
        };
        let (wide, each) = (of.width.max(of.shared), Self::each(of));
        let memory = |n: usize| Memory::new(None, n);
        Self {
            scores: memory(rows * of.count),
            weights: memory(rows * of.count),
            shared_scores: memory(rows),
            choices: vec![Choice::default(); rows * each],
            members: Vec::with_capacity(rows),
            x: activations(model, rows, width, inputs),
            gate: memory(rows * wide),
            up: memory(rows * wide),
            hidden: [of.width, of.shared].map(|ffn| activations(model, rows, ffn, downs(ffn))),
            results: memory(rows * each * width),
            of,
        }
    }

    /// Choices of a row.
    const fn each(of: config::Experts) -> usize {
        of.used + if of.shared > 0 { 1 } else { 0 }
    }

    /// x (T, C) -> this rank's roots of the sum over experts, `(T, C)` each, at the start of `out`.
    pub(super) fn compute(
        &mut self,
        kernels: &Kernels,
        weights: &Experts,
        cut: &LeafCut,
        x: &Activations,
        out: &mut [f32],
    ) {
        self.choose(kernels, weights, x);
        let mut slot = 0;
        for (index, expert) in (weights.first..).zip(&weights.experts) {
            self.gather(index, slot, x.rows());
            if !self.members.is_empty() {
                self.expert(kernels, expert, x, slot);
            }
            slot += self.members.len();
        }
        let n = x.rows() * x.cols();
        for (root, out) in cut.own_roots().into_iter().zip(out.chunks_exact_mut(n)) {
            self.sum(kernels, root.leaves(cut.leaves), x.cols(), out);
        }
    }

    /// The experts of each row, in order of their index.
    fn choose(&mut self, kernels: &Kernels, weights: &Experts, x: &Activations) {
        let (rows, of, each) = (x.rows(), self.of, Self::each(self.of));
        let scores = &mut self.scores[..rows * of.count];
        kernels.products(x, [whole(&weights.router, scores)]);
        if let Some(router) = &weights.shared_router {
            kernels.products(x, [whole(router, &mut self.shared_scores[..rows])]);
        }
        let shared = &self.shared_scores;
        let weights = DisjointMut::new(&mut self.weights[..rows * of.count], of.count);
        let choices = DisjointMut::new(&mut self.choices[..rows * each], each);
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let (weights, choices) = unsafe { (weights.part(t), choices.part(t)) };
            let scores = &scores[t * of.count..(t + 1) * of.count];
            choose_row(
                (kernels, of.normalised),
                scores,
                weights,
                &mut choices[..of.used],
            );
            if let Some(last) = choices.get_mut(of.used) {
                let mut exp = [0.0];
                kernels.exp_scaled(&shared[t..=t], 0.0, -1.0, &mut exp);
                *last = Choice {
                    expert: of.count,
                    weight: 1.0 / (1.0 + exp[0]),
                    slot: 0,
                };
            }
        });
    }

    /// The rows that chose an expert, whose results begin at `slot`.
    fn gather(&mut self, expert: usize, mut slot: usize, rows: usize) {
        self.members.clear();
        let all = self.choices.chunks_exact_mut(Self::each(self.of));
        for (t, choices) in all.take(rows).enumerate() {
            if let Ok(at) = choices.binary_search_by_key(&expert, |choice| choice.expert) {
                choices[at].slot = slot;
                slot += 1;
                self.members.push(t);
            }
        }
    }

    /// One expert on the rows that were gathered; its results go to `slot` and behind.
    fn expert(&mut self, kernels: &Kernels, expert: &Expert, x: &Activations, slot: usize) {
        let Self {
            members, gate, up, ..
        } = self;
        let (rows, ffn) = (members.len(), expert.gate.rows());
        let x = if rows == x.rows() {
            x
        } else {
            self.x.resize(rows);
            kernels.fill_rows(&mut self.x, |i, out| out.copy_from_slice(x.row(members[i])));
            &self.x
        };
        let (gate, up) = (&mut gate[..rows * ffn], &mut up[..rows * ffn]);
        kernels.products(x, [whole(&expert.gate, gate), whole(&expert.up, up)]);
        let hidden = self.hidden.iter_mut().find(|hidden| hidden.cols() == ffn);
        let hidden = hidden.expect("a buffer for each width");
        hidden.resize(rows);
        kernels.fill_rows(hidden, |i, out| {
            let part = i * ffn..(i + 1) * ffn;
            kernels.silu_mul(&gate[part.clone()], &up[part], out);
        });
        let width = expert.down.rows();
        let out = &mut self.results[slot * width..(slot + rows) * width];
        kernels.products(hidden, [whole(&expert.down, out)]);
    }

    /// The subtree over the experts `leaves`, `(T, width)`: zeros where a row chose none of them.
    fn sum(&mut self, kernels: &Kernels, leaves: Range<usize>, width: usize, out: &mut [f32]) {
        let each = Self::each(self.of);
        let results = DisjointMut::new(&mut self.results, width);
        let out = DisjointMut::new(out, width);
        let choices = &self.choices;
        kernels.for_rows(out.len(), |t| {
            let own = choices[t * each..(t + 1) * each].iter();
            let own = own.filter(|choice| leaves.contains(&choice.expert));
            // SAFETY: slots and output are this row's alone; each row is visited once.
            unsafe { sum_row(own, &results, out.part(t)) }
        });
    }
}

/// Adds the results of `choices`, in order of their leaves, as the tree does.
///
/// # Safety
/// Nobody else uses the slots of these choices.
unsafe fn sum_row<'a>(
    choices: impl Iterator<Item = &'a Choice>,
    results: &DisjointMut<'_, f32>,
    out: &mut [f32],
) {
    let mut parts = [Choice::default(); MAX_USED + 1];
    let mut len = 0;
    for choice in choices {
        // SAFETY: by the contract, as below.
        let leaf = unsafe { results.part(choice.slot) };
        leaf.iter_mut().for_each(|y| *y = choice.weight * *y + 0.0);
        parts[len] = *choice;
        len += 1;
    }
    while len > 1 {
        // Two neighbours whose common node is lowest are its children.
        let height = |i: &usize| (parts[*i].expert ^ parts[i + 1].expert).ilog2();
        let at = (0..len - 1).min_by_key(height).unwrap_or(0);
        // SAFETY: two slots.
        let [left, right] = [at, at + 1].map(|i| unsafe { results.part(parts[i].slot) });
        vector::add_assign(left, right);
        parts.copy_within(at + 2..len, at + 1);
        len -= 1;
    }
    match len {
        0 => out.fill(0.0),
        // SAFETY: the one that is left.
        _ => out.copy_from_slice(unsafe { results.part(parts[0].slot) }),
    }
}

/// All columns of `x` by all rows of a matrix.
fn whole<'a>(weights: &'a Packed, out: &'a mut [f32]) -> Product<'a> {
    Product {
        weights,
        first_col: 0,
        out,
    }
}

/// The largest probabilities of a softmax over `scores`, by index where equal, and their experts in
/// order of index.
fn choose_row(
    (kernels, normalised): (&Kernels, bool),
    scores: &[f32],
    weights: &mut [f32],
    choices: &mut [Choice],
) {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    kernels.exp_scaled(scores, largest, 1.0, weights);
    let sum: f32 = weights.iter().sum();
    weights.iter_mut().for_each(|weight| *weight /= sum);
    for n in 0..choices.len() {
        let taken = &choices[..n];
        let is_free = |e: &usize| taken.iter().all(|choice| choice.expert != *e);
        // The first of equal ones: `max_by` takes the last.
        let free = (0..weights.len()).filter(is_free).rev();
        let best = free.max_by(|a, b| weights[*a].total_cmp(&weights[*b]));
        let expert = best.expect("no more are used than there are");
        choices[n] = Choice {
            expert,
            weight: weights[expert],
            slot: 0,
        };
    }
    if normalised {
        let sum: f32 = choices.iter().map(|choice| choice.weight).sum();
        choices
            .iter_mut()
            .for_each(|choice| choice.weight /= sum.max(LEAST_SUM));
    }
    choices.sort_unstable_by_key(|choice| choice.expert);
}
