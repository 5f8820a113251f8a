//! Latent attention in its expanded form, and its gradients. Every head has a key and a value of
//! its own, made of the latent elements that all heads share.
//!
//! ```text
//! x (T, C) -> compressed (T, A) -> norm -> q (T, H, N + P)
//! x (T, C) -> latent (T, R) | turned (T, P);  norm(latent) -> plain (T, H, N) | v (T, H, V)
//! k (T, H, N + P) = plain | turned of all heads; the last P of q and k are rotated
//! ```
//!
//! T tokens, C width, H heads, A elements of a compressed query. N and P count the elements of a
//! key without and with rotation, R latent ones, V those of a value.

use paceline_model::{Latent, LayerShape};
use paceline_tensor::RopePairs;

use super::{Cpu, KEY, QUERY, VALUE};
use crate::ops;
use crate::rows::BlockRows;
use crate::weights::{LatentWeights, LayerWeights};

/// Values that the forward pass leaves for the backward one.
#[derive(Debug)]
pub(crate) struct LatentKept {
    /// (T, A) before and after the norm.
    compressed: Option<[Vec<f32>; 2]>,
    /// (T, R) before and after the norm.
    latent: [Vec<f32>; 2],
}

/// A layer's latent attention over a block.
#[derive(Clone)]
pub(crate) struct LatentLayer<'a> {
    pub(crate) of: Latent,
    pub(crate) shape: LayerShape,
    pub(crate) weights: (&'a LayerWeights, &'a LatentWeights),
    pub(crate) rows: BlockRows<'a>,
    pub(crate) pairs: RopePairs,
}

/// The shape of a layer whose heads have keys and values of their own.
pub(crate) fn expanded(shape: LayerShape) -> LayerShape {
    match shape.latent {
        None => shape,
        Some(of) => LayerShape {
            head_dim: of.query_dim(),
            value_dim: of.value_dim,
            kv_heads: shape.heads,
            ..shape
        },
    }
}

impl Cpu<'_> {
    /// x (T, C) -> q, k (T, H (N + P)), v (T, H V)
    pub(super) fn latent(
        &self,
        at: &LatentLayer<'_>,
        params: &[f32],
        x: &[f32],
    ) -> ([Vec<f32>; 3], LatentKept) {
        let (of, (w, own), eps) = (at.of, at.weights, at.of.norm_eps);
        let compressed = own.query_down.as_ref().map(|(down, norm)| {
            let raw = self.linear(down, params, x);
            let normed = self.norm_with((norm, eps), params, &raw);
            [raw, normed]
        });
        let input = compressed
            .as_ref()
            .map_or(x, |[_, normed]| normed.as_slice());
        let mut query = self.linear(&w.matrices[QUERY], params, input);
        let down = self.linear(&w.matrices[KEY], params, x);
        let [raw, turned] = split(&down, [of.rank, of.turned]);
        let normed = self.norm_with((&own.norm, eps), params, &raw);
        let both = self.linear(&w.matrices[VALUE], params, &normed);
        let [plain, value] = split(&both, [of.plain, of.value_dim]);
        let heads = at.shape.heads;
        let mut key = Vec::with_capacity(query.len());
        for (head, plain) in plain.chunks(of.plain).enumerate() {
            key.extend_from_slice(plain);
            key.extend_from_slice(&turned[head / heads * of.turned..][..of.turned]);
        }
        at.turn(&mut query, false);
        at.turn(&mut key, false);
        at.grow(&mut query);
        let latent = [raw, normed];
        ([query, key, value], LatentKept { compressed, latent })
    }

    /// Gradients of q, k and v -> dx (T, C), at the input `x`.
    pub(super) fn latent_back(
        &self,
        at: &LatentLayer<'_>,
        params: &[f32],
        (x, kept): (&[f32], &LatentKept),
        [mut dq, mut dk, dv]: [Vec<f32>; 3],
        grads: &mut [f32],
    ) -> Vec<f32> {
        let (of, (w, own), eps) = (at.of, at.weights, at.of.norm_eps);
        at.grow(&mut dq);
        at.turn(&mut dq, true);
        at.turn(&mut dk, true);
        let mut dx = vec![0.0; x.len()];
        match (&kept.compressed, &own.query_down) {
            (Some([raw, normed]), Some((down, norm))) => {
                let mut d_normed = vec![0.0; normed.len()];
                let query = (&w.matrices[QUERY], normed.as_slice());
                self.linear_back(query, params, &dq, (&mut d_normed, false), grads);
                let mut d_raw = vec![0.0; raw.len()];
                self.norm_back_with((norm, eps), params, (raw, &d_normed), &mut d_raw, grads);
                self.linear_back((down, x), params, &d_raw, (&mut dx, false), grads);
            }
            _ => {
                let query = (&w.matrices[QUERY], x);
                self.linear_back(query, params, &dq, (&mut dx, false), grads);
            }
        }
        let [plain, turned] = split(&dk, [of.plain, of.turned]);
        let both = join([&plain, &dv], [of.plain, of.value_dim]);
        let [raw, normed] = &kept.latent;
        let mut d_normed = vec![0.0; normed.len()];
        let expansion = (&w.matrices[VALUE], normed.as_slice());
        self.linear_back(expansion, params, &both, (&mut d_normed, false), grads);
        let mut d_raw = vec![0.0; raw.len()];
        let at_norm = (raw.as_slice(), d_normed.as_slice());
        self.norm_back_with((&own.norm, eps), params, at_norm, &mut d_raw, grads);
        let d_turned = sum_heads(&turned, at.shape.heads, of.turned);
        let down = join([&d_raw, &d_turned], [of.rank, of.turned]);
        let at = (&w.matrices[KEY], x);
        self.linear_back(at, params, &down, (&mut dx, true), grads);
        dx
    }
}

impl LatentLayer<'_> {
    /// Rotates the last P elements of every head, or turns them back.
    fn turn(&self, x: &mut [f32], back: bool) {
        let (heads, pairs) = (self.shape.heads, self.of.turned / 2);
        let (angles, _) = self.rows.angles(self.shape.rope);
        let dim = self.of.query_dim();
        for (row, position) in x.chunks_mut(heads * dim).zip(self.rows.positions()) {
            let angles = &angles[position * pairs..(position + 1) * pairs];
            for head in row.chunks_mut(dim) {
                let turned = &mut head[self.of.plain..];
                match self.pairs {
                    RopePairs::Halves => ops::rotate(turned, angles, back),
                    RopePairs::Adjacent => ops::rotate_neighbours(turned, angles, back),
                }
            }
        }
    }

    /// Multiplies queries, or their gradients, by the growth of their positions.
    fn grow(&self, x: &mut [f32]) {
        let Some(growth) = self.of.growth else { return };
        let row = self.shape.heads * self.of.query_dim();
        for (row, position) in x.chunks_mut(row).zip(self.rows.positions()) {
            let factor = growth.at(position);
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// The first and the last elements of each run of `a + b`.
pub(super) fn split(x: &[f32], [a, b]: [usize; 2]) -> [Vec<f32>; 2] {
    let runs = || x.chunks(a + b);
    [
        runs().flat_map(|run| &run[..a]).copied().collect(),
        runs().flat_map(|run| &run[a..]).copied().collect(),
    ]
}

/// Undoes [`split`].
pub(super) fn join([x, y]: [&[f32]; 2], [a, b]: [usize; 2]) -> Vec<f32> {
    let runs = x.chunks(a).zip(y.chunks(b));
    runs.flat_map(|(x, y)| x.iter().chain(y)).copied().collect()
}

/// (T, H, n) -> (T, n): the sum over heads, in order.
fn sum_heads(x: &[f32], heads: usize, n: usize) -> Vec<f32> {
    let sum = |row: &[f32]| {
        let mut sum = vec![0.0; n];
        for head in row.chunks(n) {
            sum.iter_mut().zip(head).for_each(|(sum, x)| *sum += x);
        }
        sum
    };
    x.chunks(heads * n).flat_map(sum).collect()
}
