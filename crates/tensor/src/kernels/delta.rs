//! A step over a layer that is a gated delta net, or Mamba 2 ([`crate::delta`]).
//!
//! ```text
//! rows in parallel                 inputs (q | k | v) -> convolution over the last ones -> silu
//!                                  q and k of each key head to length 1 (not in Mamba 2)
//! sequences and heads in parallel  page by page: the state before it, then its rows in order
//! ```
//!
//! A page keeps the facts that later rows need. They are inputs of the convolution, keys, the
//! differences that were taken in, sums of decays, and the state before its first position. Rows
//! that are taken back are written again by the next step.

mod segment;

use std::ops::Range;

use super::{AttentionRows, Kernels};
use crate::attention::PAGE;
use crate::delta::{self, Chains};
use crate::kv::{DeltaShape, KvCache, KvWriter};
use crate::pool::DisjointMut;
use segment::PageSegment;

/// Added to the sum of squares of a key or query, as transformers does.
const EPS: f32 = 1e-6;

/// Rows of a page that go through its state together. Their results, `2 * ROWS * value_dim` floats,
/// are 16 KiB at 128, half of a first-level cache.
const ROWS: usize = 16;

/// Elements of a key that are decayed together, one by one: 4 KiB for the positions of a page.
const CHANNELS: usize = 16;

/// Longest value for which a row's query and key pass through the state together: twice the longest
/// of published models.
const PAIR: usize = 256;

/// The rule by which a value enters a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateRule {
    /// A share of the difference to what the state has for the key: a gated delta net. Queries and
    /// keys have length 1.
    Difference,
    /// As `Difference`, with a decay for each element of a key: Kimi delta attention.
    Channels,
    /// The value times its step, nothing is taken back: Mamba 2. Queries and keys stay as they are.
    Sum,
}

impl StateRule {
    /// Decays of a head whose keys have `head_dim` elements.
    pub const fn decays(self, head_dim: usize) -> usize {
        match self {
            Self::Channels => head_dim,
            Self::Difference | Self::Sum => 1,
        }
    }
}

/// A step over one layer. Letters: H value heads, K key heads, D and E elements of a key and of a
/// value.
#[derive(Clone, Copy, Debug)]
pub struct DeltaStep<'a> {
    /// Layer in the cache.
    pub layer: usize,
    /// The key head of each value head, among those of the cache.
    pub key_heads: &'a [usize],
    /// See [`StateRule`].
    pub rule: StateRule,
    /// `(taps, 2 K D + H E)`: of queries, keys and values; the newest input last.
    pub conv: &'a [f32],
    /// `(2 K D + H E,)`: added to the convolution; empty for none.
    pub conv_bias: &'a [f32],
    /// `(H,)`: factors of values that are added to results; empty for none.
    pub skip: &'a [f32],
    /// `(rows, K D)`, not yet convolved, as keys and values.
    pub queries: &'a [f32],
    /// `(rows, K D)`
    pub keys: &'a [f32],
    /// `(rows, H E)`
    pub values: &'a [f32],
    /// `(rows, H)`: share of the difference that enters the state.
    pub steps: &'a [f32],
    /// `(rows, H)`, or `(rows, H D)` by [`StateRule::Channels`]: logarithms of decays, 0 or less.
    pub decays: &'a [f32],
    /// The sequences of the batch.
    pub sequences: &'a [AttentionRows<'a>],
}

impl<'a> DeltaStep<'a> {
    /// Queries, keys and values: all rows of each, its first channel, and its channels in a row.
    fn inputs(&self, shape: DeltaShape) -> [(&'a [f32], usize, usize); 3] {
        let keys = shape.key_heads * shape.head_dim;
        let values = shape.heads * shape.value_dim;
        [
            (self.queries, 0, keys),
            (self.keys, keys, keys),
            (self.values, 2 * keys, values),
        ]
    }
}

impl Kernels {
    /// Adds the rows of a step to the state and reads them. `mixed` is `(rows, 2 K D + H E)` of
    /// working memory, `out` is `(rows, H E)`.
    ///
    /// # Panics
    /// On lengths that do not fit, or pages that a sequence lacks.
    pub fn delta(
        &self,
        step: &DeltaStep<'_>,
        cache: &mut KvCache,
        mixed: &mut [f32],
        out: &mut [f32],
    ) {
        let shape = cache.delta(step.layer);
        let rows: usize = step.sequences.iter().map(|s| s.rows).sum();
        assert_eq!(step.conv.len(), shape.channels() * shape.taps, "taps");
        assert_eq!(step.key_heads.len(), shape.heads, "heads");
        assert_eq!(step.rule.decays(shape.head_dim), shape.decays, "decays");
        let [bias, skip] = [step.conv_bias.len(), step.skip.len()];
        assert!(bias == 0 || bias == shape.channels(), "biases {bias}");
        assert!(skip == 0 || skip == shape.heads, "factors of values {skip}");
        let mixed = &mut mixed[..rows * shape.channels()];
        let writer = cache.writer(step.layer);
        self.convolve(step, &writer, mixed);
        let mixed = &*mixed;
        assert!(out.len() >= rows * shape.heads * shape.value_dim, "room");
        let out = Out(out.as_mut_ptr());
        self.pool()
            .run(step.sequences.len() * shape.heads, &|task| {
                let (s, head) = (task / shape.heads, task % shape.heads);
                let first: usize = step.sequences[..s].iter().map(|s| s.rows).sum();
                let of = ValueHead {
                    kernels: self,
                    step,
                    shape,
                    writer: &writer,
                    sequence: step.sequences[s],
                    first,
                    head,
                };
                of.compute(mixed, out);
            });
    }

    /// Inputs -> mixed, with queries and keys of length 1; keeps inputs and keys in the pages.
    fn convolve(&self, step: &DeltaStep<'_>, writer: &KvWriter<'_>, mixed: &mut [f32]) {
        let shape = writer.delta();
        let mixed = DisjointMut::new(mixed, shape.channels());
        self.for_rows(mixed.len(), |t| {
            let mut first = 0;
            let mut sequences = step.sequences.iter();
            let sequence = sequences.find(|s| {
                let own = t < first + s.rows;
                first += if own { 0 } else { s.rows };
                own
            });
            let sequence = sequence.expect("a row of a sequence");
            // SAFETY: each row is visited once.
            let out = unsafe { mixed.part(t) };
            self.convolve_row(step, writer, (sequence, first), t, out);
        });
    }

    fn convolve_row(
        &self,
        step: &DeltaStep<'_>,
        writer: &KvWriter<'_>,
        (sequence, first): (&AttentionRows<'_>, usize),
        t: usize,
        out: &mut [f32],
    ) {
        let shape = writer.delta();
        let keys = shape.key_heads * shape.head_dim;
        let position = sequence.position + t - first;
        self.weigh_inputs(step, writer, (sequence, first), t, out);
        self.silu(out);
        if step.rule != StateRule::Sum {
            self.normalise(&mut out[..2 * keys], shape.head_dim);
            let root = 1.0 / (shape.head_dim as f32).sqrt();
            out[..keys].iter_mut().for_each(|x| *x *= root);
        }
        let place = (sequence.page(position / PAGE), position % PAGE);
        // SAFETY: this row's alone.
        unsafe {
            keep_inputs(step, writer, place, t);
            writer.write_delta_keys(place.0, place.1, &out[keys..2 * keys]);
        }
    }

    /// The convolution of row `t` of the batch over its own and earlier inputs; `first` is the row
    /// at which its sequence begins.
    fn weigh_inputs(
        &self,
        step: &DeltaStep<'_>,
        writer: &KvWriter<'_>,
        (sequence, first): (&AttentionRows<'_>, usize),
        t: usize,
        out: &mut [f32],
    ) {
        let taps = writer.delta().taps;
        let position = sequence.position + t - first;
        // Newest tap last: the input `taps - 1 - i` positions before meets tap i.
        match step.conv_bias {
            [] => out.fill(0.0),
            bias => out.copy_from_slice(bias),
        }
        for i in 0..taps {
            let back = taps - 1 - i;
            let Some(at) = position.checked_sub(back) else {
                continue;
            };
            for (input, channel, n) in step.inputs(writer.delta()) {
                let row = match t.checked_sub(back).filter(|row| *row >= first) {
                    Some(row) => &input[row * n..(row + 1) * n],
                    // SAFETY: a position before those of this step; no thread writes it.
                    None => unsafe {
                        let page = sequence.page(at / PAGE);
                        &writer.delta_inputs(page, at % PAGE)[channel..channel + n]
                    },
                };
                let weights = &step.conv[i * out.len() + channel..][..n];
                let out = &mut out[channel..channel + n];
                // SAFETY: equal lengths, multiples of 16; the table was detected.
                unsafe { (delta::table(self.table.set).taps)(weights, row, out) };
            }
        }
    }

    /// Brings each head, `size` elements, to length 1.
    fn normalise(&self, heads: &mut [f32], size: usize) {
        for head in heads.chunks_exact_mut(size) {
            let scale = 1.0 / (self.square_sum(head) + EPS).sqrt();
            head.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// `x / (1 + exp(-x))` in place.
    fn silu(&self, x: &mut [f32]) {
        const ONES: [f32; 64] = [1.0; 64];
        let mut gate = ONES;
        for run in x.chunks_mut(ONES.len()) {
            let gate = &mut gate[..run.len()];
            gate.copy_from_slice(run);
            self.silu_mul(gate, &ONES[..run.len()], run);
        }
    }

    /// Runs one kernel of chains.
    ///
    /// # Safety
    /// See [`crate::delta::accumulate`], features apart.
    unsafe fn accumulate(&self, chains: Chains) {
        // SAFETY: by the caller's promise; the table was detected.
        unsafe { (delta::table(self.table.set).accumulate)(chains) }
    }
}

/// Results of a step, `(rows, H E)`; each task writes the columns of one head.
#[derive(Clone, Copy)]
struct Out(*mut f32);

// SAFETY: tasks write disjoint heads and rows.
unsafe impl Sync for Out {}

/// The rows of one sequence for one value head.
struct ValueHead<'a> {
    kernels: &'a Kernels,
    step: &'a DeltaStep<'a>,
    shape: DeltaShape,
    writer: &'a KvWriter<'a>,
    sequence: AttentionRows<'a>,
    /// Its first row in the batch.
    first: usize,
    head: usize,
}

impl ValueHead<'_> {
    fn compute(&self, mixed: &[f32], out: Out) {
        let (position, rows) = (self.sequence.position, self.sequence.rows);
        let mut done = 0;
        while done < rows {
            let at = position + done;
            let slot = at % PAGE;
            let n = (rows - done).min(PAGE - slot).min(ROWS);
            if slot == 0 {
                self.begin(at / PAGE);
            }
            self.piece(at, (self.first + done, n), mixed, out).compute();
            done += n;
        }
    }

    /// Rows `t..t + n` of the batch, at `position` and behind, all of one page.
    fn piece<'p>(
        &'p self,
        position: usize,
        (t, n): (usize, usize),
        mixed: &'p [f32],
        out: Out,
    ) -> PageSegment<'p> {
        let (e, slot) = (self.shape.value_dim, position % PAGE);
        let page = self.sequence.page(position / PAGE);
        let part = self.writer.delta_head(page, self.head);
        let stride = self.shape.heads * e;
        PageSegment {
            head: self,
            mixed,
            t,
            n,
            slot,
            keys: self.writer.delta_keys(page, self.step.key_heads[self.head]),
            part,
            // SAFETY: within the page's positions.
            fresh: unsafe { part.deltas.add(slot * e) },
            // SAFETY: within the batch's rows.
            outs: unsafe { out.0.add(t * stride + self.head * e) },
            stride,
        }
    }

    /// Sums of decays `(decays, 64)` at the positions `slots`, of row `t` of the batch and those
    /// behind.
    fn sum_decays(&self, sums: &mut [f64], slots: Range<usize>, t: usize) {
        let (heads, each) = (self.shape.heads, self.shape.decays);
        for (d, sums) in sums.chunks_exact_mut(PAGE).enumerate() {
            let before = slots.start.checked_sub(1);
            let mut sum = before.map_or(0.0, |before| sums[before]);
            let decays = self.step.decays[(t * heads + self.head) * each + d..].iter();
            let decays = decays.step_by(heads * each);
            for (to, decay) in sums[slots.clone()].iter_mut().zip(decays) {
                sum += f64::from(*decay);
                *to = sum;
            }
        }
    }

    /// `exp(last - each)` of `sums` to `weights`, and `exp(last)`.
    fn weights(&self, sums: &[f64], weights: &mut [f32; PAGE]) -> f32 {
        let last = sums[sums.len() - 1];
        let mut logs = [0.0f32; PAGE];
        let pairs = logs.iter_mut().zip(sums);
        pairs.for_each(|(log, sum)| *log = (last - sum) as f32);
        let n = sums.len();
        self.kernels
            .exp_scaled(&logs[..n], 0.0, 1.0, &mut weights[..n]);
        let mut far = [0.0];
        self.kernels.exp_scaled(&[last as f32], 0.0, 1.0, &mut far);
        far[0]
    }

    /// `sum += factors[i] * deltas[i]` for the first `n` in order.
    ///
    /// # Safety
    /// `n` deltas are readable, and no thread writes them.
    unsafe fn add_deltas(
        &self,
        factors: &[f32; PAGE],
        deltas: *const f32,
        n: usize,
        sum: &mut [f32],
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            self.kernels.accumulate(Chains {
                coefficients: factors.as_ptr(),
                coefficient_stride: PAGE,
                x: deltas,
                x_stride: sum.len(),
                count: n,
                acc: sum.as_mut_ptr(),
                acc_stride: sum.len(),
                rows: 1,
                width: sum.len(),
            });
        }
    }

    /// The state before the first position of page `index`: that of the page before, after its
    /// rows.
    fn begin(&self, index: usize) {
        let (d, e) = (self.shape.head_dim, self.shape.value_dim);
        let own = self.writer.delta_head(self.sequence.page(index), self.head);
        // SAFETY: this task alone has this head of the page.
        let state = unsafe { std::slice::from_raw_parts_mut(own.state, d * e) };
        let Some(before) = index.checked_sub(1) else {
            state.fill(0.0);
            return;
        };
        let page = self.sequence.page(before);
        let from = self.writer.delta_head(page, self.head);
        let key_head = self.step.key_heads[self.head];
        // SAFETY: a full page, whose head this task alone writes, if anybody does.
        unsafe {
            let keys = self.writer.delta_keys(page, key_head).cast_const();
            let keys = std::slice::from_raw_parts(keys, d * PAGE);
            let sums = std::slice::from_raw_parts(from.sums.cast_const(), PAGE * self.shape.decays);
            let old = std::slice::from_raw_parts(from.state.cast_const(), d * e);
            let (mut weights, mut far) = ([0.0f32; PAGE], 0.0);
            let mut sums = sums.chunks_exact(PAGE);
            let mut factors = [[0.0f32; PAGE]; ROWS];
            let parts = state.chunks_mut(ROWS * e).zip(old.chunks(ROWS * e));
            for ((state, old), keys) in parts.zip(keys.chunks(ROWS * PAGE)) {
                let rows = state.chunks_exact_mut(e).zip(old.chunks_exact(e));
                let keys = keys.chunks_exact(PAGE).zip(&mut factors);
                for ((state, old), (keys, factors)) in rows.zip(keys) {
                    // Without sums of its own an element has those of the first.
                    if let Some(sums) = sums.next() {
                        far = self.weights(sums, &mut weights);
                    }
                    let pairs = state.iter_mut().zip(old);
                    pairs.for_each(|(s, old)| *s = far * old);
                    let keys = factors.iter_mut().zip(&weights).zip(keys);
                    keys.for_each(|((factor, weight), key)| *factor = weight * key);
                }
                self.kernels.accumulate(Chains {
                    coefficients: factors.as_ptr().cast(),
                    coefficient_stride: PAGE,
                    x: from.deltas,
                    x_stride: e,
                    count: PAGE,
                    acc: state.as_mut_ptr(),
                    acc_stride: e,
                    rows: state.len() / e,
                    width: e,
                });
            }
        }
    }
}

/// Keeps the inputs of row `t` of the batch for later rows, at a page and a place in it.
///
/// # Safety
/// No other thread reads or writes this position.
unsafe fn keep_inputs(
    step: &DeltaStep<'_>,
    writer: &KvWriter<'_>,
    (page, slot): (u32, usize),
    t: usize,
) {
    // SAFETY: by the caller's promise.
    let kept = unsafe { writer.delta_inputs_mut(page, slot) };
    for (input, channel, n) in step.inputs(writer.delta()) {
        kept[channel..channel + n].copy_from_slice(&input[t * n..][..n]);
    }
}
