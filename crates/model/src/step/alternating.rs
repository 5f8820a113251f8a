//! Alternating residual streams (Gemma 3n): a layer computes the first stream and updates the
//! others by small maps.
//!
//! ```text
//! m (T, S) = tanh(router(norm(stream 0)))        stream[q] += sum of predict(m)[q, p] stream[p]
//! active (T, C) = stream 0, through the layer    m = tanh(router(norm(active)))
//! stream[s] += (1 + correct(m)[s]) * (active - stream 0)
//! laurel (T, C) = x + norm(up down x)            active = (active + laurel) / sqrt 2
//! ```
//!
//! Every rank of a stage has all streams and computes all of it, so a split changes no bits.

use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels, PackedMatrix};

use super::rows::{activations, whole};
use crate::config::{MAX_STREAMS, StreamRule};
use crate::model::Model;
use crate::weights::Alternation;

/// Lower bound of the mean square that a further stream is scaled from: of transformers.
const LEAST_SQUARE: f32 = 1e-5;

/// Buffers; `step::Workspace` has one for all layers.
#[derive(Debug)]
pub(super) struct AlternatingRows {
    /// S
    count: usize,
    /// `(T, C)`: the stream that the layer computes.
    pub(super) active: RegisteredMemory<f32>,
    /// `(T, C)`; at the ends of the model a further stream.
    laurel: RegisteredMemory<f32>,
    /// `(T, R)`, before and after rounding.
    low: RegisteredMemory<f32>,
    low_x: Activations,
    /// `(T, S)`: outputs of the router.
    routed: RegisteredMemory<f32>,
}

impl AlternatingRows {
    /// For steps of up to `rows` rows; `None` for models of other streams.
    pub(super) fn new(model: &Model, rows: usize) -> Option<Self> {
        let of = model.config().streams?;
        if of.rule != StreamRule::Alternating {
            return None;
        }
        let layers = model.layers().iter().flat_map(|layer| &layer.streams);
        let own = layers.filter_map(|streams| streams.alternation());
        let memory = |n: usize| RegisteredMemory::new(None, rows * n);
        Some(Self {
            count: of.count,
            active: memory(model.config().width),
            laurel: memory(model.config().width),
            low: memory(of.rank),
            low_x: activations(model, rows, of.rank, own.map(|own| &own.laurel_up)),
            routed: memory(of.count),
        })
    }

    /// residual (T, S, C) -> predicted in place, and the first stream to `active`
    pub(super) fn predict(
        &mut self,
        place: (&Kernels, f32),
        w: &Alternation,
        residual: &mut [f32],
        x: &mut Activations,
    ) {
        let (n, width) = (self.count, x.cols());
        let residual_of = &*residual;
        self.route(place, w, |t| &residual_of[t * n * width..][..width], x);
        let rows = DisjointMut::new(residual, n * width);
        let active = DisjointMut::new(&mut self.active[..x.rows() * width], width);
        let routed = &self.routed;
        place.0.for_rows(x.rows(), |t| {
            // SAFETY: each row is visited once.
            let (row, active) = unsafe { (rows.part(t), active.part(t)) };
            let maps = mapped(&w.predict, &routed[t * n..(t + 1) * n]);
            for c in 0..width {
                let mut old = [0.0; MAX_STREAMS];
                (0..n).for_each(|p| old[p] = row[p * width + c]);
                for q in 0..n {
                    let factors = &maps[q * n..(q + 1) * n];
                    let sum: f32 = factors.iter().zip(&old).map(|(a, b)| a * b).sum();
                    row[q * width + c] = sum + old[q];
                }
            }
            active.copy_from_slice(&row[..width]);
        });
    }

    /// residual (T, S, C) += (1 + correct(m)) * (active - stream 0)
    pub(super) fn correct(
        &mut self,
        place: (&Kernels, f32),
        w: &Alternation,
        residual: &mut [f32],
        x: &mut Activations,
    ) {
        let (n, width) = (self.count, x.cols());
        let active = std::mem::replace(&mut self.active, RegisteredMemory::new(None, 0));
        self.route(place, w, |t| &active[t * width..(t + 1) * width], x);
        let rows = DisjointMut::new(residual, n * width);
        let routed = &self.routed;
        place.0.for_rows(x.rows(), |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { rows.part(t) };
            let factors = mapped(&w.correct, &routed[t * n..(t + 1) * n]);
            for c in 0..width {
                let difference = active[t * width + c] - row[c];
                for s in 0..n {
                    row[s * width + c] += difference * (factors[s] + 1.0);
                }
            }
        });
        self.active = active;
    }

    /// x (T, C) -> laurel (T, C)
    pub(super) fn project_laurel(
        &mut self,
        (kernels, eps): (&Kernels, f32),
        w: &Alternation,
        x: &Activations,
    ) {
        let (rows, width, rank) = (x.rows(), x.cols(), w.laurel_down.rows());
        kernels.products(x, [whole(&w.laurel_down, &mut self.low, rows)]);
        let low = &self.low;
        self.low_x.resize(rows);
        kernels.fill_rows(&mut self.low_x, |t, out| {
            out.copy_from_slice(&low[t * rank..(t + 1) * rank]);
        });
        kernels.products(&self.low_x, [whole(&w.laurel_up, &mut self.laurel, rows)]);
        let parts = DisjointMut::new(&mut self.laurel[..rows * width], width);
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { parts.part(t) };
            kernels.rms_norm_in_place(row, &w.laurel_norm, eps);
            let pairs = row.iter_mut().zip(x.row(t));
            pairs.for_each(|(out, x)| *out += x);
        });
    }

    /// active (T, C) = (active + laurel) / sqrt 2, for `n` values
    pub(super) fn add_laurel(&mut self, n: usize) {
        let pairs = self.active[..n].iter_mut().zip(&self.laurel[..n]);
        pairs.for_each(|(x, laurel)| *x = (*x + laurel) / std::f32::consts::SQRT_2);
    }

    /// residual (T, S, C) with the embedding as stream 0 -> the other streams
    pub(super) fn expand(
        &mut self,
        kernels: &Kernels,
        ends: &[PackedMatrix],
        residual: &mut [f32],
        x: &mut Activations,
    ) {
        let (n, width, rows) = (self.count, x.cols(), x.rows());
        for (i, end) in ends.iter().enumerate() {
            let from = &*residual;
            kernels.fill_rows(x, |t, out| {
                out.copy_from_slice(&from[t * n * width..][..width]);
            });
            kernels.products(x, [whole(end, &mut self.laurel, rows)]);
            let streams = residual.chunks_exact_mut(n * width);
            for (row, new) in streams.zip(self.laurel.chunks_exact(width)) {
                let (first, others) = row.split_at_mut(width);
                let out = &mut others[i * width..(i + 1) * width];
                out.copy_from_slice(new);
                scale_to(kernels, first, out);
            }
        }
    }

    /// Streams of `x.rows()` rows, `row(t)` `(S, C)` each, -> their mean after `ends`, `active`
    /// (T, C)
    pub(super) fn collapse<'r>(
        &mut self,
        kernels: &Kernels,
        ends: &[PackedMatrix],
        row: impl Fn(usize) -> &'r [f32] + Sync,
        x: &mut Activations,
    ) -> &[f32] {
        let (width, rows) = (x.cols(), x.rows());
        for (t, sum) in self.active.chunks_exact_mut(width).take(rows).enumerate() {
            sum.copy_from_slice(&row(t)[..width]);
        }
        for (i, end) in ends.iter().enumerate() {
            kernels.fill_rows(x, |t, out| {
                out.copy_from_slice(&row(t)[(i + 1) * width..][..width]);
            });
            kernels.products(x, [whole(end, &mut self.laurel, rows)]);
            let sums = self.active.chunks_exact_mut(width).take(rows);
            for (t, (sum, new)) in sums.zip(self.laurel.chunks_exact_mut(width)).enumerate() {
                scale_to(kernels, &row(t)[..width], new);
                sum.iter_mut().zip(new).for_each(|(sum, x)| *sum += *x);
            }
        }
        let part = 1.0 / self.count as f32;
        let sums = &mut self.active[..rows * width];
        sums.iter_mut().for_each(|x| *x *= part);
        sums
    }

    /// tanh(router(norm(row(t)))) of each row -> `routed`
    fn route<'r>(
        &mut self,
        (kernels, eps): (&Kernels, f32),
        w: &Alternation,
        row: impl Fn(usize) -> &'r [f32] + Sync,
        x: &mut Activations,
    ) {
        kernels.fill_rows(x, |t, out| {
            kernels.rms_norm(row(t), &w.router_norm, eps, out)
        });
        let n = x.rows() * self.count;
        kernels.products(x, [whole(&w.router, &mut self.routed, x.rows())]);
        self.routed[..n]
            .iter_mut()
            .for_each(|m| *m = libm::tanhf(*m));
    }
}

/// Rows of `matrix`, each times `routed`: up to S S sums.
fn mapped(matrix: &[f32], routed: &[f32]) -> [f32; MAX_STREAMS * MAX_STREAMS] {
    let mut out = [0.0; MAX_STREAMS * MAX_STREAMS];
    let rows = matrix.chunks_exact(routed.len());
    for (out, row) in out.iter_mut().zip(rows) {
        *out = row.iter().zip(routed).map(|(a, b)| a * b).sum();
    }
    out
}

/// Scales `x` to the root mean square of `like`.
fn scale_to(kernels: &Kernels, like: &[f32], x: &mut [f32]) {
    let mean = |x: &[f32]| kernels.square_sum(x) / x.len() as f32;
    let factor = mean(like).sqrt() / mean(x).max(LEAST_SQUARE).sqrt();
    x.iter_mut().for_each(|x| *x *= factor);
}
