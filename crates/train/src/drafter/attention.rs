//! Attention of drafts, and its gradients.
//!
//! A row begins one draft. In step k of the draft it attends to two kinds of keys. These are the
//! keys of step 1 up to its own row, and its own keys of the steps 2 to k.
//!
//! ```text
//! keys of step 1, rows 0..=i | keys of row i, steps 2..=k
//! ```

use paceline_tensor::Kernels;
use paceline_tensor::chain::{ProductOutput, Sizes, Strided};

use crate::{ops, pool};

/// Heads of a sequence. T rows, H query heads, K key and value heads of D elements.
pub(super) struct DraftAttention<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// T
    pub(super) rows: usize,
}

/// Keys and values of a step, or their gradients.
pub(super) type KeyAndValue = (Vec<f32>, Vec<f32>);

/// Keys and values of the steps so far, `(T, K D)` each.
pub(super) type StepKeys<'a> = [(&'a [f32], &'a [f32])];

/// Gradients of one head: queries `(T, D)`, then keys and values of each step.
struct HeadGradient {
    query: Vec<f32>,
    keys: Vec<KeyAndValue>,
}

impl DraftAttention<'_> {
    fn scale(&self) -> f32 {
        1.0 / libm::sqrtf(self.head_dim as f32)
    }

    /// q (T, H D) of the last of the steps -> (T, H D)
    pub(super) fn forward(&self, query: &[f32], keys: &StepKeys<'_>) -> Vec<f32> {
        let parts = pool::map(self.kernels.pool(), self.heads, |head| {
            self.head(head, query, keys)
        });
        let mut out = vec![0.0; query.len()];
        for (head, part) in parts.iter().enumerate() {
            self.add(&mut out, (head, self.heads), part);
        }
        out
    }

    fn head(&self, head: usize, query: &[f32], keys: &StepKeys<'_>) -> Vec<f32> {
        let (n, d) = (self.rows, self.head_dim);
        let (p, more) = self.probabilities(head, query, keys);
        let mut out = vec![0.0; n * d];
        let sizes = Sizes { m: n, n: d, k: n };
        let values = self.of_kv(head, keys[0].1);
        let rows = ProductOutput::rows(&mut out, d);
        self.kernels
            .chains_here(sizes, Strided::rows(&p, n), values, rows);
        for (step, (_, values)) in keys.iter().enumerate().skip(1) {
            for (i, out) in out.chunks_mut(d).enumerate() {
                let p = more[i * (keys.len() - 1) + step - 1];
                let value = self.kv_row(head, i, values);
                out.iter_mut().zip(value).for_each(|(o, v)| *o += p * v);
            }
        }
        out
    }

    /// Adds the gradients of keys and values of every step to `d_keys`; gives that of the queries.
    pub(super) fn backward(
        &self,
        query: &[f32],
        keys: &StepKeys<'_>,
        d_out: &[f32],
        d_keys: &mut [KeyAndValue],
    ) -> Vec<f32> {
        let parts = pool::map(self.kernels.pool(), self.heads, |head| {
            self.head_back(head, query, keys, d_out)
        });
        let mut d_query = vec![0.0; query.len()];
        for (head, part) in parts.iter().enumerate() {
            let shared = (self.shared(head), self.kv_heads);
            self.add(&mut d_query, (head, self.heads), &part.query);
            for (to, (key, value)) in d_keys.iter_mut().zip(&part.keys) {
                self.add(&mut to.0, shared, key);
                self.add(&mut to.1, shared, value);
            }
        }
        d_query
    }

    fn head_back(
        &self,
        head: usize,
        query: &[f32],
        keys: &StepKeys<'_>,
        d_out: &[f32],
    ) -> HeadGradient {
        let (n, d, steps) = (self.rows, self.head_dim, keys.len() - 1);
        let (p, more) = self.probabilities(head, query, keys);
        let d_rows = self.of_query(head, d_out);
        let product = |sizes: Sizes, a, b| {
            let mut out = vec![0.0; sizes.m * sizes.n];
            let rows = ProductOutput::rows(&mut out, sizes.n);
            self.kernels.chains_here(sizes, a, b, rows);
            out
        };
        let (inner, square) = (Sizes { m: n, n: d, k: n }, Sizes { m: n, n, k: d });
        let d_value = product(inner, Strided::rows(&p, n).t(), d_rows);
        let mut ds = product(square, d_rows, self.of_kv(head, keys[0].1).t());
        let mut d_more = vec![0.0; n * steps];
        for i in 0..n {
            let d_out = self.query_row(head, i, d_out);
            let own = &mut d_more[i * steps..(i + 1) * steps];
            for (to, (_, values)) in own.iter_mut().zip(&keys[1..]) {
                *to = ops::dot(d_out, self.kv_row(head, i, values));
            }
            let (p, more) = (&p[i * n..=i * n + i], &more[i * steps..(i + 1) * steps]);
            let (seen, unseen) = ds[i * n..(i + 1) * n].split_at_mut(i + 1);
            let mean = ops::dot(seen, p) + ops::dot(own, more);
            let back = |ds: &mut f32, p: &f32| *ds = p * (*ds - mean) * self.scale();
            seen.iter_mut().zip(p).for_each(|(ds, p)| back(ds, p));
            own.iter_mut().zip(more).for_each(|(ds, p)| back(ds, p));
            unseen.fill(0.0);
        }
        let rows = Strided::rows(&ds, n);
        let mut d_query = product(inner, rows, self.of_kv(head, keys[0].0));
        let d_key = product(inner, rows.t(), self.of_query(head, query));
        let mut d_keys = vec![(d_key, d_value)];
        for (step, (key, _)) in keys.iter().enumerate().skip(1) {
            let (mut dk, mut dv) = (vec![0.0; n * d], vec![0.0; n * d]);
            for i in 0..n {
                let (ds, p) = (d_more[i * steps + step - 1], more[i * steps + step - 1]);
                let at = i * d..(i + 1) * d;
                add_scaled(&mut d_query[at.clone()], ds, self.kv_row(head, i, key));
                add_scaled(&mut dk[at.clone()], ds, self.query_row(head, i, query));
                add_scaled(&mut dv[at], p, self.query_row(head, i, d_out));
            }
            d_keys.push((dk, dv));
        }
        HeadGradient {
            query: d_query,
            keys: d_keys,
        }
    }

    /// Softmax of the scores: (n, n) over the keys of step 1, with 0 for keys outside the mask. The
    /// scores of a row's own later keys are (n, steps - 1).
    fn probabilities(
        &self,
        head: usize,
        query: &[f32],
        keys: &StepKeys<'_>,
    ) -> (Vec<f32>, Vec<f32>) {
        let (n, d, steps) = (self.rows, self.head_dim, keys.len() - 1);
        let mut p = vec![0.0; n * n];
        let (q, k) = (self.of_query(head, query), self.of_kv(head, keys[0].0).t());
        let rows = ProductOutput::rows(&mut p, n);
        self.kernels
            .chains_here(Sizes { m: n, n, k: d }, q, k, rows);
        let mut more = vec![0.0; n * steps];
        let mut scores = Vec::with_capacity(n + steps);
        for (i, row) in p.chunks_mut(n).enumerate() {
            let query = self.query_row(head, i, query);
            scores.clear();
            scores.extend_from_slice(&row[..=i]);
            let later = keys[1..].iter();
            scores.extend(later.map(|(key, _)| ops::dot(query, self.kv_row(head, i, key))));
            ops::softmax(&mut scores, self.scale());
            row[..=i].copy_from_slice(&scores[..=i]);
            row[i + 1..].fill(0.0);
            more[i * steps..(i + 1) * steps].copy_from_slice(&scores[i + 1..]);
        }
        (p, more)
    }

    /// The key and value head of a query head.
    const fn shared(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    fn query_row<'b>(&self, head: usize, i: usize, x: &'b [f32]) -> &'b [f32] {
        &x[(i * self.heads + head) * self.head_dim..][..self.head_dim]
    }

    fn kv_row<'b>(&self, head: usize, i: usize, x: &'b [f32]) -> &'b [f32] {
        &x[(i * self.kv_heads + self.shared(head)) * self.head_dim..][..self.head_dim]
    }

    fn of_query<'b>(&self, head: usize, x: &'b [f32]) -> Strided<'b> {
        self.columns(x, (head, self.heads))
    }

    fn of_kv<'b>(&self, head: usize, x: &'b [f32]) -> Strided<'b> {
        self.columns(x, (self.shared(head), self.kv_heads))
    }

    fn columns<'b>(&self, x: &'b [f32], (head, heads): (usize, usize)) -> Strided<'b> {
        Strided {
            values: &x[head * self.head_dim..],
            row: heads * self.head_dim,
            col: 1,
        }
    }

    /// Adds (T, D) to a head's columns.
    fn add(&self, out: &mut [f32], (head, heads): (usize, usize), part: &[f32]) {
        let d = self.head_dim;
        let rows = out.chunks_mut(heads * d).zip(part.chunks(d));
        rows.for_each(|(row, part)| add_scaled(&mut row[head * d..(head + 1) * d], 1.0, part));
    }
}

fn add_scaled(out: &mut [f32], factor: f32, x: &[f32]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o += factor * x);
}
