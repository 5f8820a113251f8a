//! Arithmetic on rows that the forward passes of draft heads share.

use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, AttentionRows, Kernels, PackedMatrix, Product};

use crate::{HeadRows, Rope};

/// A norm over heads, then a rotation, then a factor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadTurn<'a> {
    /// `(D,)` and its epsilon.
    pub(crate) norm: (&'a [f32], f32),
    pub(crate) rope: &'a Rope,
    /// Of all rows, `(T, pairs)`.
    pub(crate) angles: &'a [(f32, f32)],
    pub(crate) scale: f32,
}

/// Norms, turns and scales the heads of rows `(T, width)`.
pub(crate) fn turn(kernels: &Kernels, rows: &mut [f32], width: usize, of: HeadTurn<'_>) {
    let (norm, eps) = of.norm;
    let (n, pairs) = (rows.len() / width, of.rope.frequencies.len());
    let rows = DisjointMut::new(rows, width);
    kernels.for_rows(n, |t| {
        // SAFETY: each row is visited once.
        let row = unsafe { rows.part(t) };
        for head in row.chunks_exact_mut(norm.len()) {
            kernels.rms_norm_in_place(head, norm, eps);
        }
        let angles = &of.angles[t * pairs..(t + 1) * pairs];
        kernels.rope(row, norm.len(), angles, of.rope.pairs);
        row.iter_mut().for_each(|x| *x *= of.scale);
    });
}

/// rows `(T, C)` -> normed `(T, C)`, quantised
pub(crate) fn norm_rows(
    kernels: &Kernels,
    rows: &[f32],
    (weight, eps): (&[f32], f32),
    out: &mut Activations,
) {
    let c = weight.len();
    kernels.fill_rows(out, |t, out| {
        kernels.rms_norm(&rows[t * c..(t + 1) * c], weight, eps, out);
    });
}

/// Rows of sequences in the cache; `of` gives their number and the position of the first.
pub(crate) fn attention_rows<'a>(
    sequences: &[HeadRows<'a>],
    of: impl Fn(&HeadRows<'a>) -> (usize, usize),
) -> Vec<AttentionRows<'a>> {
    let row = |s: &HeadRows<'a>| {
        let (rows, position) = of(s);
        AttentionRows {
            rows,
            position,
            pages: s.pages,
            first_page: 0,
        }
    };
    sequences.iter().map(row).collect()
}

/// Writes logits to the places of their tokens; other tokens get minus infinity.
pub(crate) fn scatter(tokens: &[u32], logits: &[f32], out: &mut [f32]) {
    out.fill(f32::NEG_INFINITY);
    for (token, logit) in tokens.iter().zip(logits) {
        if let Some(out) = out.get_mut(*token as usize) {
            *out = *logit;
        }
    }
}

/// The product of `rows` rows with a matrix, into `out`.
pub(crate) fn product<'a>(
    out: &'a mut [f32],
    weights: &'a PackedMatrix,
    rows: usize,
) -> Product<'a> {
    Product {
        weights,
        first_col: 0,
        out: &mut out[..rows * weights.rows()],
    }
}
