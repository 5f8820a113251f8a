//! Adapter products of a layer's matrices; [`crate::adapter`] has the definition.
//!
//! ```text
//! x (T, in) --A--> t (T, r) --scale, B--> added to y (T, out)
//! ```
//! If ranks divide the inputs, `t` of each root follows the root's values, and one exchange sums
//! both:
//!
//! ```text
//! y of root 0 (T, C) | t (T, r) | padding || y of root 1 (T, C) | t (T, r) | padding || ...
//! ```

use std::ops::Range;

use paceline_base::tree::Stack;
use paceline_tensor::chain::{ProductOutput, Sizes, Strided};
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels};

use super::Batch;
use crate::LayerRole;
use crate::adapter::AdapterShard;
use crate::model::Model;
use crate::split::LeafCut;

/// Rows per task of `A x`: somewhat more than two tiles of the widest kernel.
const ROWS: usize = 32;

/// Floats of a cache line; outputs of products begin at one.
const LINE: usize = 16;

/// Consecutive rows of one adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AdapterRows {
    rows: Range<usize>,
    /// Counted from 0.
    adapter: usize,
}

/// The rows of a batch with adapters; allocates nothing without any.
pub(super) fn runs(batch: &Batch<'_>) -> Vec<AdapterRows> {
    let mut runs: Vec<AdapterRows> = Vec::new();
    let mut first = 0;
    for sequence in batch.sequences {
        let rows = first..first + sequence.tokens.len();
        first = rows.end;
        let Some(adapter) = (sequence.adapter as usize).checked_sub(1) else {
            continue;
        };
        match runs.last_mut() {
            Some(last) if last.adapter == adapter && last.rows.end == rows.start => {
                last.rows.end = rows.end;
            }
            _ => runs.push(AdapterRows { rows, adapter }),
        }
    }
    runs
}

/// The runs of some rows, in ascending order, by their place among them. `into` is emptied first.
pub(super) fn runs_of(rows: &[usize], runs: &[AdapterRows], into: &mut Vec<AdapterRows>) {
    into.clear();
    let mut runs = runs.iter();
    let mut next = runs.next();
    for (place, row) in rows.iter().enumerate() {
        while next.is_some_and(|run| run.rows.end <= *row) {
            next = runs.next();
        }
        let Some(run) = next.filter(|run| run.rows.start <= *row) else {
            continue;
        };
        match into.last_mut() {
            Some(last) if last.adapter == run.adapter && last.rows.end == place => {
                last.rows.end = place + 1;
            }
            _ => into.push(AdapterRows {
                rows: place..place + 1,
                adapter: run.adapter,
            }),
        }
    }
}

/// Adapter products for one matrix: row ranges, and the pair of each.
#[derive(Debug)]
pub(super) struct AdapterProducts<'a> {
    kernels: &'a Kernels,
    pairs: Vec<(Range<usize>, &'a AdapterShard)>,
}

impl<'a> AdapterProducts<'a> {
    /// For a matrix of a layer; `None` if no row of the batch has a pair for it.
    pub(super) fn of(
        model: &'a Model,
        place: (usize, LayerRole),
        runs: &[AdapterRows],
    ) -> Option<Self> {
        let pairs = runs.iter().filter_map(|run| {
            let held = model.adapters().held(run.adapter, place)?;
            Some((run.rows.clone(), held))
        });
        let pairs: Vec<_> = pairs.collect();
        let kernels = model.kernels();
        (!pairs.is_empty()).then_some(Self { kernels, pairs })
    }

    /// `x` (T, in) -> `y` (T, out) += scale B (A x), if this rank has all inputs.
    pub(super) fn add(&self, x: &Activations, y: &mut [f32]) {
        for (rows, held) in &self.pairs {
            let (r, out) = (held.rank, held.outputs());
            let (values, width) = (x.values(), x.cols());
            let mut t = vec![0.0; rows.len() * r];
            let tasks = DisjointMut::new(&mut t, ROWS * r);
            self.kernels.pool().run(tasks.len(), &|task| {
                let first = rows.start + task * ROWS;
                // SAFETY: each task writes its own part.
                let t = unsafe { tasks.part(task) };
                let rows = first..first + t.len() / r;
                self.read(
                    (values, width),
                    (rows, 0..width),
                    held,
                    ProductOutput::rows(t, r),
                );
            });
            self.write(
                held,
                (&mut t[..], r),
                &mut y[rows.start * out..rows.end * out],
            );
        }
    }

    /// Some rows and columns of `x`, with rows of `width` -> the same rows of `t` (T, r).
    fn read(
        &self,
        (x, width): (&[f32], usize),
        (rows, cols): (Range<usize>, Range<usize>),
        held: &AdapterShard,
        t: ProductOutput<'_>,
    ) {
        let sizes = Sizes {
            m: rows.len(),
            n: held.rank,
            k: cols.len(),
        };
        let from = Strided {
            values: &x[rows.start * width + cols.start..],
            row: width,
            col: 1,
        };
        let a = Strided::rows(&held.a[cols.start * held.rank..], held.rank);
        self.kernels.chains_here(sizes, from, a, t);
    }

    /// `t` (T, r), rows `stride` apart -> `y` (T, out) += scale B t. Scales `t` in place.
    fn write(&self, held: &AdapterShard, (t, stride): (&mut [f32], usize), y: &mut [f32]) {
        let (r, out) = (held.rank, held.outputs());
        if out == 0 {
            return; // a rank without heads
        }
        let sizes = Sizes {
            m: y.len() / out,
            n: out,
            k: r,
        };
        for row in t.chunks_mut(stride).take(sizes.m) {
            row[..r].iter_mut().for_each(|x| *x *= held.scale);
        }
        let t = Strided {
            values: t,
            row: stride,
            col: 1,
        };
        let b = Strided::rows(&held.b, out);
        self.kernels
            .chains(sizes, t, b, ProductOutput::rows(y, out).more());
    }

    /// Values of `t` per row: the largest rank of the pairs.
    fn wide(&self) -> usize {
        let ranks = self.pairs.iter().map(|(_, held)| held.rank);
        ranks.max().unwrap_or(0)
    }

    /// Floats after the values of a root, for `rows` rows.
    pub(super) fn room(&self, rows: usize) -> usize {
        room(rows, self.wide())
    }

    /// This rank's columns of `x` (T, in) -> `t` of each of its roots, after the root's `behind`
    /// values of `y`.
    pub(super) fn read_roots(
        &self,
        x: &Activations,
        cut: &LeafCut,
        (roots, behind): (&mut [f32], usize),
    ) {
        let (wide, mine) = (self.wide(), cut.columns());
        let (from, width) = (x.values(), x.cols());
        let each = x.rows() * wide;
        let leaves = mine.len().div_ceil(cut.leaf_cols);
        if leaves == 0 {
            return;
        }
        let mut values = vec![0.0; leaves * each];
        let tasks = DisjointMut::new(&mut values, each);
        self.kernels.pool().run(leaves, &|leaf| {
            // SAFETY: each task writes its own part.
            let t = unsafe { tasks.part(leaf) };
            let cols = leaf * cut.leaf_cols..mine.len().min((leaf + 1) * cut.leaf_cols);
            for (rows, held) in &self.pairs {
                let t = ProductOutput::rows(&mut t[rows.start * wide..rows.end * wide], wide);
                self.read((from, width), (rows.clone(), cols.clone()), held, t);
            }
        });
        let mut stack = Stack::new(cut.leaves, each);
        stack.reset(mine.start / cut.leaf_cols);
        values.chunks_exact(each).for_each(|leaf| stack.push(leaf));
        let roots = roots.chunks_exact_mut(behind + self.room(x.rows()));
        for (root, t) in roots.zip(stack.values().chunks_exact(each)) {
            let (own, padding) = root[behind..].split_at_mut(each);
            own.copy_from_slice(t);
            padding.fill(0.0);
        }
    }

    /// The sum of all roots, `y` (T, C) followed by `t` -> `y` += scale B t.
    pub(super) fn add_sum(&self, sum: &mut [f32], behind: usize) {
        let wide = self.wide();
        let (y, t) = sum.split_at_mut(behind);
        for (rows, held) in &self.pairs {
            let out = held.outputs();
            let t = &mut t[rows.start * wide..rows.end * wide];
            self.write(held, (t, wide), &mut y[rows.start * out..rows.end * out]);
        }
    }
}

/// Floats for `t` of `rows` rows with `wide` values: whole cache lines.
pub(super) const fn room(rows: usize, wide: usize) -> usize {
    (rows * wide).next_multiple_of(LINE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BatchSequence, Logits};

    #[test]
    fn neighbours_with_one_adapter_are_one_run() {
        let tokens = [1, 2, 3];
        let sequence = |n: usize, adapter| BatchSequence {
            tokens: &tokens[..n],
            position: 0,
            pages: &[0],
            windows: &[],
            adapter,
            logits: Logits::None,
        };
        let sequences = [
            sequence(2, 0),
            sequence(1, 2),
            sequence(3, 2),
            sequence(1, 1),
            sequence(1, 0),
            sequence(2, 1),
        ];
        let run = |rows, adapter| AdapterRows { rows, adapter };
        let sequences = Batch::new(&sequences);
        assert_eq!(
            runs(&sequences),
            [run(2..6, 1), run(6..7, 0), run(8..10, 0)]
        );
        let mut found = Vec::new();
        runs_of(&[1, 2, 5, 6, 7, 9], &runs(&sequences), &mut found);
        assert_eq!(found, [run(1..3, 1), run(3..4, 0), run(5..6, 0)]);
    }
}
