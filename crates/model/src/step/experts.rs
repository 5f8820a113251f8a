//! Mixture of experts: routing of each row, products of each expert over its rows, and the sum over
//! experts.
//!
//! ```text
//! x (T, C) -> z (T, E) = router x, in f32 -> softmax -> the k largest, by index where equal
//! rows of an expert -> y (rows, C) = down(silu(gate x) * up x)
//! delta (T, C) = sum over the tree of experts of weight * y; who was not chosen adds nothing
//! ```
//!
//! Only the weights of chosen experts are read. A leaf is `weight * y + 0`, which is never -0. So a
//! subtree without a chosen expert may be omitted or zero, with equal bits.

use std::ops::Range;

use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels, vector};

use super::Batch;
use super::adapter_products::{AdapterProducts, AdapterRows, runs_of};
use super::routing::{ExpertRoute, choose_row, finish_row, weigh};
use super::rows::{activations, add_bias, norm_row, sigmoid, whole};
use super::softcap;
use crate::config::{self, Activation, CLAMP_SLOPE, MAX_USED};
use crate::model::Model;
use crate::split::LeafCut;
use crate::streaming::StreamUnit;
use crate::weights::{Experts, of_both};
use crate::{Config, Error, LayerRole, Nth};

/// Rows whose experts of the next layer are guessed, at most: they have most of all rows' experts.
const GUESSED: usize = 32;

/// Buffers of layers with experts. T rows, E experts, k of them per row, and in some models a
/// shared one.
#[derive(Debug)]
pub(super) struct ExpertBuffers {
    of: config::Experts,
    function: GateFunction,
    /// `(GUESSED, C)`: input of the next layer's router, in streamed models.
    guess_x: Option<Activations>,
    /// `(T, C)`: the router's input, if it differs from the experts' input.
    router_x: Option<Activations>,
    /// `(T, E)`
    scores: RegisteredMemory<f32>,
    /// `(T, E)`: their softmax.
    weights: RegisteredMemory<f32>,
    /// `(T,)`: of the shared expert.
    shared_scores: RegisteredMemory<f32>,
    /// `(T, k + 1)`, by expert.
    choices: Vec<ExpertRoute>,
    /// `(E + 1,)`: whether a row was routed to it.
    is_chosen: Vec<bool>,
    /// Chosen experts of this rank that have not computed yet, in ascending order.
    left: Vec<usize>,
    /// Tokens of the step, where these choose the experts.
    tokens: Vec<u32>,
    /// Rows routed to one expert.
    members: Vec<usize>,
    /// Runs of adapters among these.
    adapted: Vec<AdapterRows>,
    /// `(T, C)`: rows of one expert.
    x: Activations,
    /// `(T, F)` each
    gate: RegisteredMemory<f32>,
    up: RegisteredMemory<f32>,
    /// `(T, F)`, for routed experts and for the shared one.
    hidden: [Activations; 2],
    /// `(T (k + 1), C)`: results, expert by expert.
    results: RegisteredMemory<f32>,
    /// Rows of routed experts, where these are not the rows of width C.
    compressed: Option<CompressedRows>,
}

/// Rows of L elements that routed experts read and write.
#[derive(Debug)]
struct CompressedRows {
    /// `(T, L)`
    low: RegisteredMemory<f32>,
    /// `(T, L)`: input of the experts.
    x: Activations,
    /// `(T, L)`: the sum over experts, after its norm.
    sum: Activations,
}

impl CompressedRows {
    fn new(model: &Model, of: config::Experts, rows: usize) -> Option<Self> {
        let width = of.compressed?.width;
        let layers = model.layers().iter();
        let layers = layers.filter_map(|layer| layer.feed_forward.experts());
        let own = layers.clone().flat_map(|layer| &layer.experts);
        let inputs = own.flat_map(|expert| of_both(&expert.gate, expert.up.as_ref()));
        let ups = layers
            .flat_map(|layer| &layer.compression)
            .map(|own| &own.up);
        Some(Self {
            low: RegisteredMemory::new(None, rows * width),
            x: activations(model, rows, width, inputs),
            sum: activations(model, rows, width, ups),
        })
    }
}

impl ExpertBuffers {
    /// For steps of up to `rows` rows.
    pub(super) fn new(model: &Model, of: config::Experts, rows: usize) -> Self {
        let (width, row) = (model.config().width, of.row_width(model.config().width));
        let layers = || {
            model
                .layers()
                .iter()
                .filter_map(|layer| layer.feed_forward.experts())
        };
        let own = || layers().flat_map(|layer| &layer.experts);
        let inputs = own().flat_map(|expert| of_both(&expert.gate, expert.up.as_ref()));
        let downs = |ffn: usize| {
            own()
                .map(|e| &e.down.matrix)
                .filter(move |down| down.cols() == ffn)
        };
        let (wide, each) = (of.width.max(of.shared), Self::each(of));
        let memory = |n: usize| RegisteredMemory::new(None, n);
        let routers = layers().map(|layer| &layer.router.matrix);
        Self {
            function: GateFunction::new(model.config(), of.clamp),
            guess_x: model
                .streamer()
                .map(|_| activations(model, rows.min(GUESSED), width, routers.clone())),
            router_x: of.scaled.then(|| activations(model, rows, width, routers)),
            scores: memory(rows * of.count),
            weights: memory(rows * of.count),
            shared_scores: memory(rows),
            choices: vec![ExpertRoute::default(); rows * each],
            is_chosen: vec![false; of.count + 1],
            left: Vec::with_capacity(of.count + 1),
            tokens: Vec::new(),
            members: Vec::with_capacity(rows),
            adapted: Vec::new(),
            x: activations(model, rows, row, inputs),
            gate: memory(rows * wide),
            up: memory(rows * wide),
            hidden: [of.width, of.shared].map(|ffn| activations(model, rows, ffn, downs(ffn))),
            results: memory(rows * each * row),
            compressed: CompressedRows::new(model, of, rows),
            of,
        }
    }

    /// Routes per row.
    const fn each(of: config::Experts) -> usize {
        of.used + if of.shared > 0 { 1 } else { 0 }
    }

    /// Input of a router with its own norm: residual (T, C) -> x (T, C).
    pub(super) fn norm(&mut self, model: &Model, weights: &Experts, residual: &[f32]) {
        let (Some(weight), Some(x)) = (&weights.router_norm, &mut self.router_x) else {
            return;
        };
        let (kernels, eps) = (model.kernels(), model.config().norm_eps);
        x.resize(residual.len() / weight.len());
        kernels.fill_rows(x, |t, out| {
            let row = &residual[t * weight.len()..(t + 1) * weight.len()];
            kernels.rms_norm(row, weight, eps, out);
        });
    }

    /// x (T, C) -> this rank's roots of the sum over experts, `(T, C)` each, at the start of `out`;
    /// `(T, L)` each before [`expand`](Self::expand). `residual` (T, C) is that of `x`, and
    /// `adapted` its rows with adapters.
    pub(super) fn compute(
        &mut self,
        (model, index, adapted): (&Model, usize, &[AdapterRows]),
        (weights, cut): (&Experts, &LeafCut),
        (x, residual): (&Activations, &[f32]),
        out: &mut [f32],
    ) -> Result<(), Error> {
        let (kernels, streamer) = (model.kernels(), model.streamer());
        if let Some(own) = model.config().layers[index].experts {
            self.of.gating = own.gating;
        }
        self.choose(kernels, weights, x);
        let chosen = self.choices[..x.rows() * Self::each(self.of)].iter();
        let uses = model.uses(index);
        uses.count(chosen.clone().map(|choice| choice.expert));
        self.is_chosen.fill(false);
        chosen.for_each(|choice| self.is_chosen[choice.expert] = true);
        let mut left = std::mem::take(&mut self.left);
        left.clear();
        left.extend(weights.own().filter(|expert| self.is_chosen[*expert]));
        if let Some(streamer) = streamer.filter(|streamer| streamer.route(index, &left))
            && let Some(next) = model.next_experts(index)
        {
            self.guess(model, next, residual);
            let own = next.0.own();
            streamer.guess(index + 1, own.filter(|expert| self.is_chosen[*expert]));
        }
        let compressed = self.compress(kernels, weights, x);
        let x = compressed.as_ref().map_or(x, |own| &own.x);
        let computed = kernels.meter().experts(|| {
            let mut slot = 0;
            while !left.is_empty() {
                // Slots, and so results, do not depend on the order.
                let place = match streamer {
                    Some(streamer) => streamer.next_expert(index, &left)?,
                    None => 0,
                };
                let expert = left.remove(place);
                self.gather(expert, slot, x.rows());
                runs_of(&self.members, adapted, &mut self.adapted);
                self.expert((model, index), (weights, expert), x, slot);
                if let Some(streamer) = streamer {
                    streamer.leave(StreamUnit::Expert(index, expert));
                }
                slot += self.members.len();
            }
            Ok::<_, Error>(())
        });
        let (rows, width) = (x.rows(), x.cols());
        (self.left, self.compressed) = (left, compressed);
        computed?;
        for (root, out) in cut.own_roots().zip(out.chunks_exact_mut(rows * width)) {
            self.sum(kernels, root.leaves(cut.leaves), width, out);
        }
        Ok(())
    }

    /// Keeps the tokens of a step whose layer has a table of their experts.
    pub(super) fn take_tokens(&mut self, weights: &Experts, batch: &Batch<'_>) {
        self.tokens.clear();
        if weights.table.is_some() {
            let tokens = batch.sequences.iter().flat_map(|sequence| sequence.tokens);
            self.tokens.extend(tokens);
        }
    }

    /// x (T, C) -> the rows that experts read, which the caller gives back; `None` for x itself.
    fn compress(
        &mut self,
        kernels: &Kernels,
        weights: &Experts,
        x: &Activations,
    ) -> Option<CompressedRows> {
        let mut own = self.compressed.take()?;
        let down = &weights.compression.as_ref()?.down;
        let (n, CompressedRows { low, x: out, .. }) = (down.rows(), &mut own);
        kernels.products(x, [whole(down, low, x.rows())]);
        out.resize(x.rows());
        kernels.fill_rows(out, |t, row| row.copy_from_slice(&low[t * n..(t + 1) * n]));
        Some(own)
    }

    /// The sum over experts `(T, L)` at the start of `delta` -> delta (T, C); nothing where experts
    /// write whole rows.
    pub(super) fn expand(
        &mut self,
        (kernels, eps): (&Kernels, f32),
        weights: &Experts,
        rows: usize,
        delta: &mut [f32],
    ) {
        let (Some(own), Some(w)) = (&mut self.compressed, &weights.compression) else {
            return;
        };
        own.sum.resize(rows);
        let (n, sums) = (w.up.cols(), &*delta);
        kernels.fill_rows(&mut own.sum, |t, out| {
            let sum = &sums[t * n..(t + 1) * n];
            match &w.norm {
                Some(norm) => kernels.rms_norm(sum, norm, eps, out),
                None => out.copy_from_slice(sum),
            }
        });
        kernels.products(&own.sum, [whole(&w.up, delta, rows)]);
    }

    /// Sets which experts the router of the next layer chooses for the input of this one's. A layer
    /// adds little to the residual, so that it will choose most of them.
    fn guess(&mut self, model: &Model, (next, norm): (&Experts, &[f32]), residual: &[f32]) {
        let (of, kernels) = (self.of, model.kernels());
        let x = self.guess_x.as_mut().expect("the model is streamed");
        let rows = (residual.len() / norm.len()).min(GUESSED);
        x.resize(rows);
        kernels.fill_rows(x, |t, out| {
            norm_row(
                model,
                &residual[t * norm.len()..(t + 1) * norm.len()],
                norm,
                out,
            );
        });
        let scores = &mut self.scores[..rows * of.count];
        kernels.products(x, [whole(&next.router.matrix, scores, rows)]);
        add_bias(scores, next.router.bias.as_deref(), rows);
        self.is_chosen.fill(false);
        self.is_chosen[of.count] = true; // the shared one
        let rows = scores.chunks_exact(of.count);
        for (scores, weights) in rows.zip(self.weights.chunks_exact_mut(of.count)) {
            let mut choices = [ExpertRoute::default(); MAX_USED];
            let choices = &mut choices[..of.used];
            choose_row(
                (kernels, &of),
                scores,
                next.choice.as_deref(),
                weights,
                choices,
            );
            let chosen = choices.iter().map(|choice| choice.expert);
            chosen.for_each(|expert| self.is_chosen[expert] = true);
        }
    }

    /// Routes each row; routes are in order of expert index.
    fn choose(&mut self, kernels: &Kernels, weights: &Experts, x: &Activations) {
        let (rows, of, each) = (x.rows(), self.of, Self::each(self.of));
        let scores = &mut self.scores[..rows * of.count];
        let router_x = self.router_x.as_ref().unwrap_or(x);
        kernels.products(router_x, [whole(&weights.router.matrix, scores, rows)]);
        add_bias(scores, weights.router.bias.as_deref(), rows);
        if let Some(router) = &weights.shared_router {
            kernels.products(x, [whole(router, &mut self.shared_scores, rows)]);
        }
        let (shared, choice) = (&self.shared_scores, weights.choice.as_deref());
        let (scales, table) = (weights.scales.as_deref(), weights.table.as_deref());
        let tokens = &self.tokens;
        let weights = DisjointMut::new(&mut self.weights[..rows * of.count], of.count);
        let choices = DisjointMut::new(&mut self.choices[..rows * each], each);
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let (weights, choices) = unsafe { (weights.part(t), choices.part(t)) };
            let scores = &scores[t * of.count..(t + 1) * of.count];
            let routed = &mut choices[..of.used];
            match table {
                Some(table) => {
                    weigh(kernels, of.gating, scores, weights);
                    let own = &table[tokens[t] as usize * of.used..][..of.used];
                    for (route, expert) in routed.iter_mut().zip(own) {
                        *route = ExpertRoute::to(*expert as usize, weights);
                    }
                    finish_row((kernels, &of), routed);
                }
                None => choose_row((kernels, &of), scores, choice, weights, routed),
            }
            if let Some(scales) = scales {
                let each = routed.iter_mut();
                each.for_each(|choice| choice.weight *= scales[choice.expert]);
            }
            if let Some(last) = choices.get_mut(of.used) {
                let mut weight = [1.0];
                if of.shared_gate {
                    sigmoid(kernels, &shared[t..=t], 1.0, &mut weight);
                }
                *last = ExpertRoute {
                    expert: of.count,
                    weight: weight[0],
                    slot: 0,
                };
            }
        });
    }

    /// Collects the rows routed to `expert`; their results begin at `slot`.
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

    /// Computes an expert on the collected rows; its results begin at `slot`.
    fn expert(
        &mut self,
        (model, layer): (&Model, usize),
        (weights, index): (&Experts, usize),
        x: &Activations,
        slot: usize,
    ) {
        let (kernels, of) = (model.kernels(), self.of.count);
        let expert = &weights.experts[index - weights.first];
        let [gate_part, up_part, down_part] = LayerRole::of_expert(Nth { index, of });
        let Self {
            members,
            gate,
            up,
            adapted,
            ..
        } = self;
        let beside = |part| AdapterProducts::of(model, (layer, part), adapted);
        let (rows, ffn) = (members.len(), expert.gate.matrix.rows());
        let x = if rows == x.rows() {
            x
        } else {
            self.x.resize(rows);
            kernels.fill_rows(&mut self.x, |i, out| out.copy_from_slice(x.row(members[i])));
            &self.x
        };
        let (gate, up) = (&mut gate[..rows * ffn], &mut up[..rows * ffn]);
        let other = expert.up.as_ref();
        let outs = [whole(&expert.gate.matrix, gate, rows)].into_iter();
        let up_product = other.map(|linear| whole(&linear.matrix, up, rows));
        kernels.products(x, outs.chain(up_product));
        add_bias(gate, expert.gate.bias.as_deref(), rows);
        add_bias(up, other.and_then(|linear| linear.bias.as_deref()), rows);
        for (part, out) in [(gate_part, &mut *gate), (up_part, &mut *up)] {
            if let Some(pairs) = beside(part) {
                pairs.add(x, out);
            }
        }
        let function = self.function;
        let hidden = self.hidden.iter_mut().find(|hidden| hidden.cols() == ffn);
        let hidden = hidden.expect("a buffer for each width");
        hidden.resize(rows);
        kernels.fill_rows(hidden, |i, out| {
            let part = i * ffn..(i + 1) * ffn;
            activate(kernels, function, [&gate[part.clone()], &up[part]], out);
        });
        let width = expert.down.matrix.rows();
        let out = &mut self.results[slot * width..(slot + rows) * width];
        kernels.products(hidden, [whole(&expert.down.matrix, out, rows)]);
        add_bias(out, expert.down.bias.as_deref(), rows);
        if let Some(pairs) = beside(down_part) {
            pairs.add(hidden, out);
        }
    }

    /// The subtree over the experts `leaves`, `(T, width)`: zeros for rows without one of them.
    fn sum(&mut self, kernels: &Kernels, leaves: Range<usize>, width: usize, out: &mut [f32]) {
        let each = Self::each(self.of);
        let results = DisjointMut::new(&mut self.results, width);
        let out = DisjointMut::new(out, width);
        let choices = &self.choices;
        kernels.for_rows(out.len(), |t| {
            let own = choices[t * each..(t + 1) * each].iter();
            let own = own.filter(|choice| leaves.contains(&choice.expert));
            // SAFETY: slots and output belong to this row only; each row is visited once.
            unsafe { sum_row(own, &results, out.part(t)) }
        });
    }
}

/// Adds the results of `choices`, in order of their leaves, as the tree does.
///
/// # Safety
/// The slots of these choices must not be accessed concurrently.
unsafe fn sum_row<'a>(
    choices: impl Iterator<Item = &'a ExpertRoute>,
    results: &DisjointMut<'_, f32>,
    out: &mut [f32],
) {
    let mut parts = [ExpertRoute::default(); MAX_USED + 1];
    let mut len = 0;
    for choice in choices {
        // SAFETY: by the contract, as below.
        let leaf = unsafe { results.part(choice.slot) };
        leaf.iter_mut().for_each(|y| *y = choice.weight * *y + 0.0);
        parts[len] = *choice;
        len += 1;
    }
    while len > 1 {
        // Two neighbours with the lowest common node are its children.
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
        // SAFETY: the remaining slot.
        _ => out.copy_from_slice(unsafe { results.part(parts[0].slot) }),
    }
}

/// Values per call of the exponential kernel.
const RUN: usize = 64;

/// Function of a gate and what it multiplies.
#[derive(Clone, Copy, Debug)]
pub(super) struct GateFunction {
    activation: Activation,
    /// Clamp, in place of the activation or around it.
    limit: Option<f32>,
    /// Whether the clamp is of silu, not of gpt-oss's gate.
    clamps_silu: bool,
}

impl GateFunction {
    pub(super) const fn new(config: &Config, limit: Option<f32>) -> Self {
        Self {
            activation: config.activation,
            limit,
            clamps_silu: config.family.clamps_silu(),
        }
    }
}

/// `out = activation(gate) * up`, or as [`clamped`] and [`clamped_silu`] with a limit. `up` may be
/// empty for an activation without it.
pub(super) fn activate(
    kernels: &Kernels,
    function: GateFunction,
    [gate, up]: [&[f32]; 2],
    out: &mut [f32],
) {
    match (function.limit, function.activation) {
        (Some(limit), _) if function.clamps_silu => clamped_silu(kernels, limit, [gate, up], out),
        (Some(limit), _) => clamped(kernels, limit, [gate, up], out),
        (None, Activation::Silu) => kernels.silu_mul(gate, up, out),
        (None, Activation::GeluTanh) => kernels.gelu_mul(gate, up, out),
        (None, Activation::ReluSquared) => relu_squared(gate, out),
        (
            None,
            Activation::Situ {
                gate: most,
                up: limit,
            },
        ) => situ(kernels, (most, limit), [gate, up], out),
    }
}

/// `out = g / (1 + exp(-1.702 g)) * (u + 1)`, where g is `gate` up to `limit` and u is `up` within
/// `-limit..=limit`.
fn clamped(kernels: &Kernels, limit: f32, [gate, up]: [&[f32]; 2], out: &mut [f32]) {
    let most = |x: f32| if x > limit { limit } else { x };
    let least = |x: f32| if x < -limit { -limit } else { x };
    let (mut g, mut exp) = ([0.0; RUN], [0.0; RUN]);
    let runs = gate.chunks(RUN).zip(up.chunks(RUN));
    for (out, (gate, up)) in out.chunks_mut(RUN).zip(runs) {
        let n = gate.len();
        g.iter_mut().zip(gate).for_each(|(g, x)| *g = most(*x));
        kernels.exp_scaled(&g[..n], 0.0, -CLAMP_SLOPE, &mut exp[..n]);
        for (i, out) in out.iter_mut().enumerate() {
            *out = g[i] / (1.0 + exp[i]) * (least(most(up[i])) + 1.0);
        }
    }
}

/// `out = silu(gate up to limit) * (up within -limit..=limit)` (DeepSeek V4)
fn clamped_silu(kernels: &Kernels, limit: f32, [gate, up]: [&[f32]; 2], out: &mut [f32]) {
    let (mut g, mut u) = ([0.0; RUN], [0.0; RUN]);
    let runs = gate.chunks(RUN).zip(up.chunks(RUN));
    for (out, (gate, up)) in out.chunks_mut(RUN).zip(runs) {
        let n = gate.len();
        let pairs = g.iter_mut().zip(gate);
        pairs.for_each(|(g, x)| *g = if *x > limit { limit } else { *x });
        u[..n].copy_from_slice(up);
        u[..n].iter_mut().for_each(|x| *x = x.clamp(-limit, limit));
        kernels.silu_mul(&g[..n], &u[..n], out);
    }
}

/// `out = sigmoid(g) most tanh(g / most) * limit tanh(u / limit)`; u itself without `limit`.
fn situ(
    kernels: &Kernels,
    (most, limit): (f32, Option<f32>),
    [gate, up]: [&[f32]; 2],
    out: &mut [f32],
) {
    let (mut g, mut u, mut factor) = ([0.0; RUN], [0.0; RUN], [0.0; RUN]);
    let runs = gate.chunks(RUN).zip(up.chunks(RUN));
    for (out, (gate, up)) in out.chunks_mut(RUN).zip(runs) {
        let n = gate.len();
        softcap::bound_gates(kernels, most, gate, &mut g[..n]);
        match limit {
            Some(limit) => softcap::bound_gates(kernels, limit, up, &mut u[..n]),
            None => u[..n].copy_from_slice(up),
        }
        sigmoid(kernels, gate, 1.0, &mut factor[..n]);
        let triples = out.iter_mut().zip(factor).zip(g.iter().zip(&u));
        triples.for_each(|((out, factor), (g, u))| *out = factor * g * u);
    }
}

/// `out = max(x, 0)^2`
fn relu_squared(x: &[f32], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        let above = if *x > 0.0 { *x } else { 0.0 };
        *out = above * above;
    }
}
