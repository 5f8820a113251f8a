//! A short convolution of each channel over its last inputs (LFM2), or over every s-th of them.
//! The inputs are in the cache.
//!
//! ```text
//! out[t][c] = sum over i, in order: fma(taps[i][c], input[t - s (taps - 1 - i)][c], out[t][c])
//! ```
//!
//! Inputs before the first position are left out. A row reads pages only, so its bits depend
//! neither on the rest of the batch nor on where a prompt was cut.

use super::{AttentionRows, Kernels};
use crate::attention::PAGE;
use crate::delta;
use crate::kv::{KvCache, KvWriter};
use crate::pool::DisjointMut;

/// A step over one layer. Letters: H heads of D channels.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvStep<'a> {
    /// Layer in the cache: states of length 0, whose values are the inputs.
    pub layer: usize,
    /// `(taps, H D)`; the newest input last. At most [`PAGE`] taps.
    pub taps: &'a [f32],
    /// Positions from one input to the next (s), 1 or more.
    pub stride: usize,
    /// `(rows, H D)`; D is a multiple of 16.
    pub inputs: &'a [f32],
    /// The sequences of the batch.
    pub sequences: &'a [AttentionRows<'a>],
}

impl Kernels {
    /// Keeps the inputs of a step and convolves them; `out` is `(rows, H D)`. Sequences and heads
    /// in parallel.
    ///
    /// # Panics
    /// On lengths that do not fit, or pages that a sequence lacks.
    pub fn short_conv(&self, step: &ShortConvStep<'_>, cache: &mut KvCache, out: &mut [f32]) {
        let shape = cache.states(step.layer);
        let rows: usize = step.sequences.iter().map(|s| s.rows).sum();
        let width = shape.heads * shape.value_dim;
        assert!(
            step.taps.len().is_multiple_of(width) && step.taps.len() <= PAGE * width,
            "{} taps of {width} channels",
            step.taps.len()
        );
        let out = DisjointMut::new(&mut out[..rows * width], shape.value_dim);
        let writer = cache.writer(step.layer);
        self.pool()
            .run(step.sequences.len() * shape.heads, &|task| {
                let (s, head) = (task / shape.heads, task % shape.heads);
                let first: usize = step.sequences[..s].iter().map(|s| s.rows).sum();
                self.convolve_head(step, &writer, (first, step.sequences[s]), head, &out);
            });
    }

    /// The rows of one sequence for one head. Its first row is row `first` of the batch.
    fn convolve_head(
        &self,
        step: &ShortConvStep<'_>,
        writer: &KvWriter<'_>,
        (first, sequence): (usize, AttentionRows<'_>),
        head: usize,
        out: &DisjointMut<'_, f32>,
    ) {
        let shape = writer.states();
        let (heads, d) = (shape.heads, shape.value_dim);
        let value = |position: usize| PAGE * shape.head_dim + position % PAGE * d;
        let taps = step.taps.len() / (heads * d);
        for row in 0..sequence.rows {
            let (position, part) = (sequence.position + row, (first + row) * heads + head);
            // SAFETY: this task alone writes this (row, head).
            let out = unsafe { out.part(part) };
            // SAFETY: this task alone has this head of the page that the sequence writes.
            let page = unsafe { writer.state(sequence.page(position / PAGE), head) };
            page[value(position)..][..d].copy_from_slice(&step.inputs[part * d..][..d]);
            out.fill(0.0);
            for i in 0..taps {
                let Some(at) = position.checked_sub(step.stride * (taps - 1 - i)) else {
                    continue;
                };
                let input = match at / PAGE == position / PAGE {
                    true => &page[value(at)..][..d],
                    // SAFETY: a page before the one in use, which no other thread writes.
                    false => unsafe {
                        let before = writer.state_before(sequence.page(at / PAGE), head);
                        &before[value(at)..][..d]
                    },
                };
                let weights = &step.taps[(i * heads + head) * d..][..d];
                // SAFETY: equal lengths, multiples of 16; the table was detected.
                unsafe { (delta::table(self.table.set).taps)(weights, input, out) };
            }
        }
    }
}
