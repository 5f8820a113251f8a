//! Causal attention of a block of rows over the sequences of its leaf, and its gradients. Sequences
//! do not see one another. S rows of keys and values of the leaf, T rows of the block.

use paceline_model::LayerShape;
use paceline_tensor::Kernels;
use paceline_tensor::chain::{ProductOutput, Sizes, Strided};

use crate::rows::BlockRows;
use crate::{ops, pool};

/// The attention of one layer over one block. H query heads, K KV heads, D and E elements of a key
/// and a value.
pub(crate) struct LeafAttention<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) shape: LayerShape,
    pub(crate) rows: BlockRows<'a>,
    /// (H,): see [`ops::softmax_with`].
    pub(crate) sinks: Option<&'a [f32]>,
}

/// Gradients of one head: of queries (n, D), keys (m, D), values (m, E), and its sink.
struct HeadGradients {
    rows: [Vec<f32>; 3],
    sink: f32,
}

/// Rows of a sequence under one query head.
#[derive(Clone, Copy)]
struct HeadTask {
    /// The first row in the block.
    row: usize,
    n: usize,
    /// Where the sequence begins in the leaf.
    first: usize,
    /// Its rows up to the last one here.
    m: usize,
    head: usize,
}

impl LeafAttention<'_> {
    /// Turns queries and keys by the positions of their sequences, or back.
    pub(crate) fn rotate(&self, query: &mut [f32], key: &mut [f32], back: bool) {
        let d = self.shape.head_dim;
        // Fewer than half a head in models that turn a part of it.
        let (angles, pairs) = self.rows.angles(self.shape.rope);
        let positions: Vec<usize> = self.rows.positions().collect();
        for (x, heads) in [(query, self.shape.heads), (key, self.shape.kv_heads)] {
            pool::chunks(self.kernels.pool(), x, heads * d, |row, x| {
                let at = positions[row] * pairs;
                let angles = &angles[at..at + pairs];
                x.chunks_mut(d)
                    .for_each(|head| ops::rotate(&mut head[..2 * pairs], angles, back));
            });
        }
    }

    fn tasks(&self) -> Vec<HeadTask> {
        let mut tasks = Vec::new();
        let mut row = 0;
        for piece in self.rows.pieces() {
            tasks.extend((0..self.shape.heads).map(|head| HeadTask {
                row,
                n: piece.at.len(),
                first: piece.first,
                m: piece.at.end,
                head,
            }));
            row += piece.at.len();
        }
        tasks
    }

    /// q (T, H D), k (S, K D), v (S, K E) -> (T, H E)
    pub(crate) fn forward(&self, query: &[f32], key: &[f32], value: &[f32]) -> Vec<f32> {
        let (d, heads) = (self.shape.value_dim, self.shape.heads);
        let tasks = self.tasks();
        let parts = pool::map(self.kernels.pool(), tasks.len(), |i| {
            let task = tasks[i];
            let (p, _) = self.probabilities(task, query, key);
            let mut out = vec![0.0; task.n * d];
            let sizes = Sizes {
                m: task.n,
                n: d,
                k: task.m,
            };
            let v = self.of_kv(task, value, d);
            let out_rows = ProductOutput::rows(&mut out, d);
            self.kernels
                .chains_here(sizes, Strided::rows(&p, task.m), v, out_rows);
            out
        });
        let tokens = query.len() / (heads * self.shape.head_dim);
        let mut out = vec![0.0; tokens * heads * d];
        for (task, part) in tasks.iter().zip(&parts) {
            add(&mut out, task.row, (task.head, heads, d), part);
        }
        out
    }

    /// d attended (T, H E) -> dq (T, H D), dk (S, K D), dv (S, K E). Keys and values add up their
    /// query heads in order. Adds to `d_sinks` the gradients of the heads' own scores.
    pub(crate) fn backward(
        &self,
        [q, k, v]: [&[f32]; 3],
        d_out: &[f32],
        d_sinks: Option<&mut [f32]>,
    ) -> [Vec<f32>; 3] {
        let tasks = self.tasks();
        let (heads, kv) = (self.shape.heads, self.shape.kv_heads);
        let parts = pool::map(self.kernels.pool(), tasks.len(), |i| {
            self.head_back(tasks[i], [q, k, v], d_out)
        });
        let mut out = [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]];
        let [dq, dk, dv] = &mut out;
        let (d, e) = (self.shape.head_dim, self.shape.value_dim);
        for (task, part) in tasks.iter().zip(&parts) {
            let (shared, [q, k, v]) = (task.head / (heads / kv), &part.rows);
            add(dq, task.row, (task.head, heads, d), q);
            add(dk, task.first, (shared, kv, d), k);
            add(dv, task.first, (shared, kv, e), v);
        }
        if let Some(d_sinks) = d_sinks {
            let each = tasks.iter().zip(&parts);
            each.for_each(|(task, part)| d_sinks[task.head] += part.sink);
        }
        out
    }

    fn head_back(&self, task: HeadTask, [q, k, v]: [&[f32]; 3], d_out: &[f32]) -> HeadGradients {
        let (n, m) = (task.n, task.m);
        let (d, e) = (self.shape.head_dim, self.shape.value_dim);
        let (p, sinks) = self.probabilities(task, q, k);
        let d_out = of(d_out, task.row, (task.head, self.shape.heads, e));
        let of_keys = |size: usize| Sizes { m, n: size, k: n };
        let scores = Sizes { m: n, n: m, k: e };
        let product = |sizes: Sizes, a, b| {
            let mut out = vec![0.0; sizes.m * sizes.n];
            self.kernels
                .chains_here(sizes, a, b, ProductOutput::rows(&mut out, sizes.n));
            out
        };
        let dv = product(of_keys(e), Strided::rows(&p, m).t(), d_out);
        let mut ds = product(scores, d_out, self.of_kv(task, v, e).t());
        let mut sink = 0.0;
        for (i, (ds, p)) in ds.chunks_mut(m).zip(p.chunks(m)).enumerate() {
            let seen = self.seen(task, i);
            let mean = ops::dot(&ds[seen.clone()], &p[seen.clone()]);
            sink -= sinks.get(i).map_or(0.0, |share| share * mean);
            for (j, (ds, p)) in ds.iter_mut().zip(p).enumerate() {
                let inside = seen.contains(&j);
                *ds = if inside {
                    p * (*ds - mean) * self.shape.query_scale
                } else {
                    0.0
                };
            }
        }
        let ds = Strided::rows(&ds, m);
        let of_queries = Sizes { m: n, n: d, k: m };
        let dq = product(of_queries, ds, self.of_kv(task, k, d));
        let dk = product(of_keys(d), ds.t(), self.of_query(task, q));
        let rows = [dq, dk, dv];
        HeadGradients { rows, sink }
    }

    /// Softmax of the scores (n, m), 0 where a row does not look, and the sink's share of each row.
    fn probabilities(&self, task: HeadTask, query: &[f32], key: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (n, m, d) = (task.n, task.m, self.shape.head_dim);
        let (mut p, mut shares) = (vec![0.0; n * m], Vec::new());
        let (q, k) = (self.of_query(task, query), self.of_kv(task, key, d).t());
        self.kernels.chains_here(
            Sizes { m: n, n: m, k: d },
            q,
            k,
            ProductOutput::rows(&mut p, m),
        );
        for (i, row) in p.chunks_mut(m).enumerate() {
            let seen = self.seen(task, i);
            let (own, scale) = (&mut row[seen.clone()], self.shape.query_scale);
            match self.sinks {
                None => ops::softmax(own, scale),
                Some(sinks) => shares.push(ops::softmax_with(sinks[task.head], own, scale)),
            }
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
        }
        (p, shares)
    }

    /// The rows of a sequence that row `i` of a task looks at.
    fn seen(&self, task: HeadTask, i: usize) -> std::ops::Range<usize> {
        let window = self.shape.window.unwrap_or(usize::MAX);
        let end = task.m - task.n + i + 1;
        end.saturating_sub(window)..end
    }

    fn of_query<'a>(&self, task: HeadTask, x: &'a [f32]) -> Strided<'a> {
        of(
            x,
            task.row,
            (task.head, self.shape.heads, self.shape.head_dim),
        )
    }

    /// Keys or values with `dim` elements.
    fn of_kv<'a>(&self, task: HeadTask, x: &'a [f32], dim: usize) -> Strided<'a> {
        let (heads, kv) = (self.shape.heads, self.shape.kv_heads);
        of(x, task.first, (task.head / (heads / kv), kv, dim))
    }
}

/// The rows from `first` on of one of `heads` heads with `d` elements each.
fn of(x: &[f32], first: usize, (head, heads, d): (usize, usize, usize)) -> Strided<'_> {
    Strided {
        values: &x[first * heads * d + head * d..],
        row: heads * d,
        col: 1,
    }
}

/// Adds (n, d) to a head's columns, from row `first` on.
fn add(out: &mut [f32], first: usize, (head, heads, d): (usize, usize, usize), part: &[f32]) {
    for (i, row) in part.chunks(d).enumerate() {
        let at = (first + i) * heads * d + head * d;
        let place = out[at..at + d].iter_mut();
        place.zip(row).for_each(|(o, x)| *o += x);
    }
}
