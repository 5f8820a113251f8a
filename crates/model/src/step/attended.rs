//! Attention over residuals (Kimi K3). The first stream is the sum since the current block of
//! layers began; the others are the sums of the blocks before. Each half of a layer reads a
//! weighted mean.
//!
//! ```text
//! score[s] = scores . norm(residual[s])   weights = softmax over the blocks begun and the sum
//! x (T, C) = norm(sum of weights[s] * residual[s])
//! a block begins: residual[block] = residual[0], residual[0] = 0   then residual[0] += delta
//! ```

use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels, vector};

use crate::config::{MAX_BLOCKS, StreamRule};
use crate::families::Half;
use crate::model::Model;

/// Sizes of the streams; the rule needs no buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttendedRows {
    /// S
    count: usize,
    /// C
    width: usize,
    /// Layers of a block.
    block: usize,
}

impl AttendedRows {
    /// `None` for models of other streams.
    pub(super) fn new(model: &Model) -> Option<Self> {
        let of = model.config().streams?;
        let StreamRule::Attended { block } = of.rule else {
            return None;
        };
        Some(Self {
            count: of.count,
            width: model.config().width,
            block,
        })
    }

    /// Blocks that began before a half of layer `index`.
    pub(super) fn begun(self, index: usize, half: Half) -> usize {
        (index + usize::from(half != Half::Attention)).div_ceil(self.block)
    }

    /// Mixes the sum and the first `begun` blocks of `x.rows()` rows, `row(t)` `(S, C)` each; all
    /// where there are fewer.
    pub(super) fn mix<'r>(
        self,
        (kernels, eps): (&Kernels, f32),
        (scores, norm): (&[f32], &[f32]),
        begun: usize,
        row: impl Fn(usize) -> &'r [f32] + Sync,
        x: &mut Activations,
    ) {
        kernels.fill_rows(x, |t, out| {
            let streams = row(t);
            let n = (streams.len() / out.len() - 1).min(begun);
            attend(kernels, eps, scores, &streams[..(n + 1) * out.len()], out);
            kernels.rms_norm_in_place(out, norm, eps);
        });
    }

    /// Stores the sum of each row of `residual` `(T, S, C)` as a block, if layer `index` is the
    /// first of one, and begins another.
    pub(super) fn begin(self, kernels: &Kernels, index: usize, residual: &mut [f32]) {
        if !index.is_multiple_of(self.block) {
            return;
        }
        let (width, nth) = (self.width, 1 + index / self.block);
        let rows = DisjointMut::new(residual, self.count * width);
        kernels.for_rows(rows.len(), |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { rows.part(t) };
            row.copy_within(..width, nth * width);
            row[..width].fill(0.0);
        });
    }

    /// Adds `delta` `(T, C)` to the sum of each row of `residual` `(T, S, C)`.
    pub(super) fn add(self, kernels: &Kernels, delta: &[f32], residual: &mut [f32]) {
        let width = self.width;
        let rows = DisjointMut::new(residual, self.count * width);
        kernels.for_rows(rows.len(), |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { rows.part(t) };
            vector::add_assign(&mut row[..width], &delta[t * width..(t + 1) * width]);
        });
    }
}

/// Weighted mean of `streams` `(n, C)`.
fn attend(kernels: &Kernels, eps: f32, scores: &[f32], streams: &[f32], out: &mut [f32]) {
    let width = out.len();
    let n = streams.len() / width;
    let (mut z, mut weights) = ([0.0; MAX_BLOCKS], [0.0; MAX_BLOCKS]);
    for (z, stream) in z.iter_mut().zip(streams.chunks_exact(width)) {
        let mean = kernels.square_sum(stream) / width as f32;
        *z = kernels.dot(stream, scores) / (mean + eps).sqrt();
    }
    let largest = z[..n].iter().copied().fold(f32::NEG_INFINITY, f32::max);
    kernels.exp_scaled(&z[..n], largest, 1.0, &mut weights[..n]);
    let total: f32 = weights[..n].iter().sum();
    out.fill(0.0);
    for (weight, stream) in weights.iter().zip(streams.chunks_exact(width)) {
        let weight = weight / total;
        let pairs = out.iter_mut().zip(stream);
        pairs.for_each(|(out, x)| *out += weight * x);
    }
}
