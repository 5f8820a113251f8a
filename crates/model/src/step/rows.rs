//! Buffers, products and norms of rows that the parts of a step share.

use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels, PackedMatrix, Product, vector};

use crate::model::Model;
use crate::weights::Linear;

/// Input buffer for products with `matrices`, in the format these read.
pub(super) fn activations<'a>(
    model: &Model,
    max_rows: usize,
    cols: usize,
    matrices: impl IntoIterator<Item = &'a PackedMatrix>,
) -> Activations {
    let kernels = model.kernels();
    kernels.activations(max_rows, cols, model.precision(), matrices)
}

/// Memory for `len` values that ranks exchange. It is registered with their groups, so that RDMA
/// devices transfer it without a copy.
pub(super) fn exchanged(model: &Model, len: usize) -> RegisteredMemory<f32> {
    RegisteredMemory::new(model.links().map(|links| &*links.world), len)
}

/// `out = 1 / (1 + exp(-scale * x))`
pub(super) fn sigmoid(kernels: &Kernels, x: &[f32], scale: f32, out: &mut [f32]) {
    kernels.exp_scaled(x, 0.0, -scale, out);
    out.iter_mut().for_each(|e| *e = 1.0 / (1.0 + *e));
}

/// `x *= y`; as many as `x` has.
pub(super) fn multiply(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x *= y);
}

pub(super) fn product<'a>(out: &'a mut [f32], linear: &'a Linear, rows: usize) -> Product<'a> {
    whole(&linear.matrix, out, rows)
}

/// Product of `rows` rows with a whole matrix.
pub(super) fn whole<'a>(weights: &'a PackedMatrix, out: &'a mut [f32], rows: usize) -> Product<'a> {
    Product {
        weights,
        first_col: 0,
        out: &mut out[..rows * weights.rows()],
    }
}

pub(super) fn add_bias(out: &mut [f32], bias: Option<&[f32]>, rows: usize) {
    if let Some(bias) = bias.filter(|bias| !bias.is_empty()) {
        out.chunks_exact_mut(bias.len())
            .take(rows)
            .for_each(|row| vector::add_assign(row, bias));
    }
}

/// Norm of a row of the residual, `(C,)`, in the family's form. A subtracted mean is summed in f64
/// in the order of the row.
pub(super) fn norm_row(model: &Model, row: &[f32], weight: &[f32], out: &mut [f32]) {
    let (kernels, eps) = (model.kernels(), model.config().norm_eps);
    if model.config().family.centres_norms() {
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / row.len() as f64;
        for (out, x) in out.iter_mut().zip(row) {
            *out = (f64::from(*x) - mean) as f32;
        }
        kernels.rms_norm_in_place(out, weight, eps);
    } else {
        kernels.rms_norm(row, weight, eps, out);
    }
}

/// RMS norm of each run of `weight.len()` values.
pub(super) fn norm_in_place(model: &Model, x: &mut [f32], weight: &[f32]) {
    let (kernels, eps) = (model.kernels(), model.config().norm_eps);
    let parts = DisjointMut::new(x, weight.len());
    let runs = parts.len();
    kernels.for_rows(runs, |i| {
        // SAFETY: each run is visited once.
        let run = unsafe { parts.part(i) };
        kernels.rms_norm_in_place(run, weight, eps);
    });
}
