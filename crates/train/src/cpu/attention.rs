//! Causal attention over sequences that do not see one another, and its gradients.

use paceline_model::LayerShape;
use paceline_tensor::Kernels;
use paceline_tensor::chain::{ProductOutput, Sizes, Strided};

use crate::engine::LeafRows;
use crate::{ops, pool};

/// The attention of one layer over one leaf.
pub(crate) struct LeafAttention<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) shape: LayerShape,
    pub(crate) rows: &'a LeafRows,
}

/// A sequence's rows under one query head.
#[derive(Clone, Copy)]
struct HeadTask {
    first: usize,
    n: usize,
    head: usize,
}

impl LeafAttention<'_> {
    /// Turns queries and keys by the positions of their sequences, or back.
    pub(crate) fn rotate(&self, query: &mut [f32], key: &mut [f32], back: bool) {
        let d = self.shape.head_dim;
        let angles = &self.rows.angles[self.shape.rope];
        let pairs = d / 2;
        let positions: Vec<usize> = self.rows.sequences().flat_map(|(_, n)| 0..n).collect();
        for (x, heads) in [(query, self.shape.heads), (key, self.shape.kv_heads)] {
            pool::chunks(self.kernels.pool(), x, heads * d, |row, x| {
                let at = positions[row] * pairs;
                let angles = &angles[at..at + pairs];
                x.chunks_mut(d)
                    .for_each(|head| ops::rotate(head, angles, back));
            });
        }
    }

    fn tasks(&self) -> Vec<HeadTask> {
        let heads = self.shape.heads;
        let of = |(first, n)| (0..heads).map(move |head| HeadTask { first, n, head });
        self.rows.sequences().flat_map(of).collect()
    }

    /// q (T, H D), k, v (T, K D) -> (T, H D)
    pub(crate) fn forward(&self, query: &[f32], key: &[f32], value: &[f32]) -> Vec<f32> {
        let d = self.shape.head_dim;
        let tasks = self.tasks();
        let heads = pool::map(self.kernels.pool(), tasks.len(), |i| {
            let task = tasks[i];
            let p = self.probabilities(task, query, key);
            let mut out = vec![0.0; task.n * d];
            let sizes = Sizes {
                m: task.n,
                n: d,
                k: task.n,
            };
            let v = self.of_kv(task, value);
            let out_rows = ProductOutput::rows(&mut out, d);
            self.kernels
                .chains_here(sizes, Strided::rows(&p, task.n), v, out_rows);
            out
        });
        let mut out = vec![0.0; query.len()];
        for (task, head) in tasks.iter().zip(&heads) {
            self.add(&mut out, *task, (task.head, self.shape.heads), head);
        }
        out
    }

    /// d attended (T, H D) -> dq (T, H D), dk, dv (T, K D); keys and values add up their query
    /// heads in order.
    pub(crate) fn backward(&self, [q, k, v]: [&[f32]; 3], d_out: &[f32]) -> [Vec<f32>; 3] {
        let tasks = self.tasks();
        let (heads, kv) = (self.shape.heads, self.shape.kv_heads);
        let parts = pool::map(self.kernels.pool(), tasks.len(), |i| {
            self.head_back(tasks[i], [q, k, v], d_out)
        });
        let mut out = [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]];
        let [dq, dk, dv] = &mut out;
        for (task, [q, k, v]) in tasks.iter().zip(&parts) {
            let shared = task.head / (heads / kv);
            self.add(dq, *task, (task.head, heads), q);
            self.add(dk, *task, (shared, kv), k);
            self.add(dv, *task, (shared, kv), v);
        }
        out
    }

    /// dq, dk and dv (n, D) of one head.
    fn head_back(&self, task: HeadTask, [q, k, v]: [&[f32]; 3], d_out: &[f32]) -> [Vec<f32>; 3] {
        let (n, d) = (task.n, self.shape.head_dim);
        let p = self.probabilities(task, q, k);
        let d_out = self.of_query(task, d_out);
        let (inner, square) = (Sizes { m: n, n: d, k: n }, Sizes { m: n, n, k: d });
        let product = |sizes: Sizes, a, b| {
            let mut out = vec![0.0; sizes.m * sizes.n];
            self.kernels
                .chains_here(sizes, a, b, ProductOutput::rows(&mut out, sizes.n));
            out
        };
        let dv = product(inner, Strided::rows(&p, n).t(), d_out);
        let mut ds = product(square, d_out, self.of_kv(task, v).t());
        for (i, (ds, p)) in ds.chunks_mut(n).zip(p.chunks(n)).enumerate() {
            let seen = self.seen(i);
            let mean = ops::dot(&ds[seen.clone()], &p[seen.clone()]);
            for (j, (ds, p)) in ds.iter_mut().zip(p).enumerate() {
                let inside = seen.contains(&j);
                *ds = if inside {
                    p * (*ds - mean) * self.shape.query_scale
                } else {
                    0.0
                };
            }
        }
        let ds = Strided::rows(&ds, n);
        let dq = product(inner, ds, self.of_kv(task, k));
        let dk = product(inner, ds.t(), self.of_query(task, q));
        [dq, dk, dv]
    }

    /// Softmax of the scores (n, n), 0 where a row does not look.
    fn probabilities(&self, task: HeadTask, query: &[f32], key: &[f32]) -> Vec<f32> {
        let (n, d) = (task.n, self.shape.head_dim);
        let mut p = vec![0.0; n * n];
        let (q, k) = (self.of_query(task, query), self.of_kv(task, key).t());
        self.kernels.chains_here(
            Sizes { m: n, n, k: d },
            q,
            k,
            ProductOutput::rows(&mut p, n),
        );
        for (i, row) in p.chunks_mut(n).enumerate() {
            let seen = self.seen(i);
            ops::softmax(&mut row[seen.clone()], self.shape.query_scale);
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
        }
        p
    }

    /// The rows that the row `i` of a sequence looks at.
    fn seen(&self, i: usize) -> std::ops::Range<usize> {
        let window = self.shape.window.unwrap_or(usize::MAX);
        (i + 1).saturating_sub(window)..i + 1
    }

    fn of_query<'a>(&self, task: HeadTask, x: &'a [f32]) -> Strided<'a> {
        self.of(x, task, task.head, self.shape.heads)
    }

    fn of_kv<'a>(&self, task: HeadTask, x: &'a [f32]) -> Strided<'a> {
        let (heads, kv) = (self.shape.heads, self.shape.kv_heads);
        self.of(x, task, task.head / (heads / kv), kv)
    }

    fn of<'a>(&self, x: &'a [f32], task: HeadTask, head: usize, heads: usize) -> Strided<'a> {
        let d = self.shape.head_dim;
        Strided {
            values: &x[task.first * heads * d + head * d..],
            row: heads * d,
            col: 1,
        }
    }

    /// Adds (n, D) to a head's columns.
    fn add(&self, out: &mut [f32], task: HeadTask, (head, heads): (usize, usize), part: &[f32]) {
        let d = self.shape.head_dim;
        for (i, row) in part.chunks(d).enumerate() {
            let at = (task.first + i) * heads * d + head * d;
            out[at..at + d]
                .iter_mut()
                .zip(row)
                .for_each(|(o, x)| *o += x);
        }
    }
}
