//! Layers that keep a state of fixed size instead of all keys and values.
//!
//! ```text
//! page p:  state before position 64 p | rows 64 p, 64 p + 1, ...
//! row t of page p reads that state and the rows 64 p ..= t
//! page p + 1 begins with the state of page p after its 64 rows
//! ```
//!
//! So a state changes at multiples of [`PAGE`] only and a row's result depends on neither chunks
//! nor batches. A sequence needs the page that it writes and, at that page's beginning, the one
//! before. A caller that keeps an older full page can continue from it with another sequence.

use std::fmt;

use super::{AttentionRows, Kernels};
use crate::attention::PAGE;
use crate::kv::{KvCache, KvWriter};
use crate::pool::DisjointMut;

/// Rows of one head in order of position.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows<'a> {
    /// `(rows, head_dim)`
    pub keys: &'a [f32],
    /// `(rows, value_dim)`
    pub values: &'a [f32],
    /// Elements of a key.
    pub head_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
}

impl<'a> HeadRows<'a> {
    /// Key and value of each row.
    pub fn each(self) -> impl Iterator<Item = (&'a [f32], &'a [f32])> {
        let keys = self.keys.chunks_exact(self.head_dim);
        keys.zip(self.values.chunks_exact(self.value_dim))
    }
}

/// Update of a head's state from rows, and its result for a query. Results must depend on the
/// arguments alone, to the bit.
pub trait Recurrence: fmt::Debug + Send + Sync {
    /// Names it: two of one name are the same.
    fn name(&self) -> &'static str;

    /// Elements of a head's state; it begins as zeros.
    fn state_len(&self, head_dim: usize, value_dim: usize) -> usize;

    /// Adds the [`PAGE`] rows of a full page to `state`.
    fn advance(&self, state: &mut [f32], rows: HeadRows<'_>);

    /// The value that `query` `(head_dim,)` reads from the state and from the page's `rows` up to
    /// its own: `out` `(value_dim,)`.
    fn read(&self, state: &[f32], rows: HeadRows<'_>, query: &[f32], out: &mut [f32]);
}

/// A step over one layer of states. Letters: H query heads, K KV heads, D and E elements of a key
/// and of a value.
#[derive(Clone, Copy, Debug)]
pub struct Recurrent<'a> {
    /// The recurrence of the layer.
    pub recurrence: &'a dyn Recurrence,
    /// Layer in the cache.
    pub layer: usize,
    /// See [`AttentionStep`](super::Attention).
    pub heads: usize,
    /// Query heads to a KV head.
    pub group: usize,
    /// Query heads of the first KV head before those of this step.
    pub skipped: usize,
    /// `(rows, H D)`
    pub queries: &'a [f32],
    /// `(rows, K D)`
    pub keys: &'a [f32],
    /// `(rows, K E)`
    pub values: &'a [f32],
    /// The sequences of the batch.
    pub sequences: &'a [AttentionRows<'a>],
}

impl Kernels {
    /// Keeps the rows of a step and reads them; `out` is `(rows, H E)`. Sequences and KV heads in
    /// parallel.
    ///
    /// # Panics
    /// On lengths that do not fit, or pages that a sequence lacks.
    pub fn recurrent(&self, step: &Recurrent<'_>, cache: &mut KvCache, out: &mut [f32]) {
        let shape = cache.states(step.layer);
        let out = DisjointMut::new(out, shape.value_dim);
        let writer = cache.writer(step.layer);
        let tasks = step.sequences.len() * shape.heads;
        self.pool().run(tasks, &|task| {
            let (s, head) = (task / shape.heads, task % shape.heads);
            let first: usize = step.sequences[..s].iter().map(|s| s.rows).sum();
            step.head(&writer, (first, step.sequences[s]), head, &out);
        });
    }
}

impl Recurrent<'_> {
    /// The rows of one sequence for one KV head. Its first row is row `first` of the batch.
    fn head(
        &self,
        writer: &KvWriter<'_>,
        (first, sequence): (usize, AttentionRows<'_>),
        head: usize,
        out: &DisjointMut<'_, f32>,
    ) {
        let shape = writer.states();
        let (d, e) = (shape.head_dim, shape.value_dim);
        let begin = head * self.group;
        let heads =
            begin.saturating_sub(self.skipped)..(begin + self.group - self.skipped).min(self.heads);
        for t in first..first + sequence.rows {
            let position = sequence.position + t - first;
            let (index, slot) = (position / PAGE, position % PAGE);
            // SAFETY: this task alone has this head of the page that the sequence writes.
            let page = unsafe { writer.state(sequence.page(index), head) };
            let (state, rows) = page.split_at_mut(shape.padded());
            let (keys, values) = rows.split_at_mut(PAGE * d);
            let state = &mut state[..shape.len];
            if slot == 0 {
                self.begin(writer, (sequence, index), head, state);
            }
            keys[slot * d..][..d].copy_from_slice(&self.keys[(t * shape.heads + head) * d..][..d]);
            let value = &self.values[(t * shape.heads + head) * e..][..e];
            values[slot * e..][..e].copy_from_slice(value);
            let rows = HeadRows {
                keys: &keys[..(slot + 1) * d],
                values: &values[..(slot + 1) * e],
                head_dim: d,
                value_dim: e,
            };
            for head in heads.clone() {
                let query = &self.queries[(t * self.heads + head) * d..][..d];
                // SAFETY: this task alone writes this (row, head).
                let out = unsafe { out.part(t * self.heads + head) };
                self.recurrence.read(state, rows, query, out);
            }
        }
    }

    /// The state before the first position of a page: that of the page before, after its rows.
    fn begin(
        &self,
        writer: &KvWriter<'_>,
        (sequence, index): (AttentionRows<'_>, usize),
        head: usize,
        state: &mut [f32],
    ) {
        state.fill(0.0);
        let Some(before) = index.checked_sub(1) else {
            return;
        };
        let shape = writer.states();
        // SAFETY: a full page, which no thread writes; it is another one than that of `state`.
        let page = unsafe { writer.state_before(sequence.page(before), head) };
        let (from, rows) = page.split_at(shape.padded());
        let (keys, values) = rows.split_at(PAGE * shape.head_dim);
        let (head_dim, value_dim) = (shape.head_dim, shape.value_dim);
        state.copy_from_slice(&from[..shape.len]);
        let rows = HeadRows {
            keys,
            values,
            head_dim,
            value_dim,
        };
        self.recurrence.advance(state, rows);
    }
}
