//! Rotation of heads before they are quantised, and back.
//!
//! A key with one large channel has large steps in all of its run. Multiplied by a Hadamard matrix
//! over the root of its size, that channel is spread over all of them. The matrix is orthogonal and
//! symmetric. So rotated queries have the same products with rotated keys, and a second rotation
//! undoes the first. Source: Ashkboos et al., QuaRot (2024).

use super::Kernels;
use crate::pool::DisjointMut;

impl Kernels {
    /// Rotates each `part` elements of `x`, a power of two ([`KvShape::rotated`]). `x` is
    /// `(rows, row_len)`; rows run in parallel. Additions have one order, so that the bits depend
    /// on nothing else.
    ///
    /// # Panics
    /// If `part` is no power of two, or does not divide a row.
    ///
    /// [`KvShape::rotated`]: crate::KvShape::rotated
    pub fn rotate_heads(&self, x: &mut [f32], row_len: usize, part: usize) {
        if x.is_empty() {
            return;
        }
        let fits = part.is_power_of_two() && row_len.is_multiple_of(part);
        assert!(fits, "rows of {row_len} by {part}");
        let factor = 1.0 / (part as f32).sqrt();
        let rows = x.len() / row_len;
        let x = DisjointMut::new(x, row_len);
        self.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { x.part(t) };
            row.chunks_exact_mut(part)
                .for_each(|part| hadamard(part, factor));
        });
    }
}

/// `x H * factor`, where H is the Hadamard matrix in its natural order.
fn hadamard(x: &mut [f32], factor: f32) {
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (a, b) = pair.split_at_mut(half);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    x.iter_mut().for_each(|x| *x *= factor);
}
