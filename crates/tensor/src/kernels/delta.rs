//! A step over a layer that is a gated delta net ([`crate::delta`]).
//!
//! ```text
//! rows in parallel                     inputs (q | k | v) -> convolution over the last ones ->
//! silu q and k of each key head to length 1 sequences and heads in parallel      page by page: the
//! state before it, then its rows in order
//! ```
//!
//! A page keeps what later rows need: inputs of the convolution, keys, the differences that were
//! taken in, sums of decays, and the state before its first position. Rows that are taken back are
//! written again by the next step.

use super::{AttentionRows, Kernels};
use crate::attention::PAGE;
use crate::delta::{self, Chains};
use crate::kv::{DeltaShape, KvCache, Writer};
use crate::pool::DisjointMut;

/// Added to the sum of squares of a key or query, as transformers does.
const EPS: f32 = 1e-6;

/// Rows of a page that go through its state together: their results, `2 * ROWS * value_dim`
/// floats, are 16 KiB at 128, half of a first-level cache.
const ROWS: usize = 16;

/// Longest value of which a row's query and key go through the state together: twice that of
/// published models.
const PAIR: usize = 256;

/// A step over one layer. Letters: H value heads, K key heads, D and E elements of a key and of a
/// value.
#[derive(Clone, Copy, Debug)]
pub struct DeltaStep<'a> {
    /// Layer in the cache.
    pub layer: usize,
    /// The key head of each value head, among those of the cache.
    pub key_heads: &'a [usize],
    /// `(taps, 2 K D + H E)`: of queries, keys and values; the newest input last.
    pub conv: &'a [f32],
    /// `(rows, K D)`, not yet convolved, as keys and values.
    pub queries: &'a [f32],
    /// `(rows, K D)`
    pub keys: &'a [f32],
    /// `(rows, H E)`
    pub values: &'a [f32],
    /// `(rows, H)`: how much of the difference is taken in.
    pub steps: &'a [f32],
    /// `(rows, H)`: logarithms of decays, 0 or less.
    pub decays: &'a [f32],
    /// The sequences of the batch.
    pub sequences: &'a [AttentionRows<'a>],
}

impl Kernels {
    /// Takes the rows of a step in and reads them; `mixed` is `(rows, 2 K D + H E)` of working
    /// memory, `out` `(rows, H E)`.
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
                let of = Head {
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
    fn convolve(&self, step: &DeltaStep<'_>, writer: &Writer<'_>, mixed: &mut [f32]) {
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
        writer: &Writer<'_>,
        (sequence, first): (&AttentionRows<'_>, usize),
        t: usize,
        out: &mut [f32],
    ) {
        let (shape, taps) = (writer.delta(), writer.delta().taps);
        let (keys, values) = (
            shape.key_heads * shape.head_dim,
            shape.heads * shape.value_dim,
        );
        let position = sequence.position + t - first;
        let (page, slot) = (sequence.page(position / PAGE), position % PAGE);
        // Newest tap last: the input `taps - 1 - i` positions before meets tap i.
        out.fill(0.0);
        for i in 0..taps {
            let back = taps - 1 - i;
            let Some(at) = position.checked_sub(back) else {
                continue;
            };
            let parts = [
                (step.queries, 0, keys),
                (step.keys, keys, keys),
                (step.values, 2 * keys, values),
            ];
            for (input, channel, n) in parts {
                let row = match t.checked_sub(back).filter(|row| *row >= first) {
                    Some(row) => &input[row * n..(row + 1) * n],
                    // SAFETY: a position before those of this step, which nobody writes.
                    None => unsafe {
                        let page = sequence.page(at / PAGE);
                        &writer.delta_inputs(page, at % PAGE)[channel..channel + n]
                    },
                };
                let weights = &step.conv[i * out.len() + channel..][..n];
                // SAFETY: equal lengths, multiples of 16; the table was detected.
                unsafe {
                    (delta::table(self.table.set).taps)(
                        weights,
                        row,
                        &mut out[channel..channel + n],
                    )
                };
            }
        }
        self.silu(out);
        for (i, head) in out[..2 * keys].chunks_exact_mut(shape.head_dim).enumerate() {
            let scale = 1.0 / (self.square_sum(head) + EPS).sqrt();
            head.iter_mut().for_each(|x| *x *= scale);
            if i < shape.key_heads {
                let root = 1.0 / (shape.head_dim as f32).sqrt();
                head.iter_mut().for_each(|x| *x *= root);
            }
        }
        // SAFETY: this row's alone.
        unsafe {
            let inputs = writer.delta_inputs_mut(page, slot);
            inputs[..keys].copy_from_slice(&step.queries[t * keys..][..keys]);
            inputs[keys..2 * keys].copy_from_slice(&step.keys[t * keys..][..keys]);
            inputs[2 * keys..].copy_from_slice(&step.values[t * values..][..values]);
            writer.write_delta_keys(page, slot, &out[keys..2 * keys]);
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
    /// As [`crate::delta::accumulate`], features apart.
    unsafe fn accumulate(&self, chains: Chains) {
        // SAFETY: by the caller's promise; the table was detected.
        unsafe { (delta::table(self.table.set).accumulate)(chains) }
    }
}

/// Results of a step, `(rows, H E)`, of which each task writes a head's.
#[derive(Clone, Copy)]
struct Out(*mut f32);

// SAFETY: tasks write disjoint heads and rows.
unsafe impl Sync for Out {}

/// The rows of one sequence for one value head.
struct Head<'a> {
    kernels: &'a Kernels,
    step: &'a DeltaStep<'a>,
    shape: DeltaShape,
    writer: &'a Writer<'a>,
    sequence: AttentionRows<'a>,
    /// Its first row in the batch.
    first: usize,
    head: usize,
}

impl Head<'_> {
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
            self.rows(at, (self.first + done, n), mixed, out);
            done += n;
        }
    }

    /// Rows `t..t + n` of the batch, at `position` and behind, all of one page.
    // long: one page's pointers, which every part of it shares
    fn rows(&self, position: usize, (t, n): (usize, usize), mixed: &[f32], out: Out) {
        let (d, e, slot) = (self.shape.head_dim, self.shape.value_dim, position % PAGE);
        let (channels, key_head) = (self.shape.channels(), self.step.key_heads[self.head]);
        let page = self.sequence.page(position / PAGE);
        let keys = self.writer.delta_keys(page, key_head);
        let part = self.writer.delta_head(page, self.head);
        let query = key_head * d;
        let key = (self.shape.key_heads + key_head) * d;
        let value = 2 * self.shape.key_heads * d + self.head * e;
        let end = (slot + n).next_multiple_of(16);
        let stride = self.shape.heads * e;
        // SAFETY: this task alone has this head of the page and of these rows; keys of the page's
        // positions were written before.
        unsafe {
            let outs = out.0.add(t * stride + self.head * e);
            let sums = std::slice::from_raw_parts_mut(part.sums, PAGE);
            self.sum_decays(&mut sums[..slot + n], slot, t);
            // Of queries, then of keys; what keys read lies where their differences will.
            let mut scores = [[[0.0f32; PAGE]; ROWS]; 2];
            let reads = [(outs, stride), (part.deltas.add(slot * e), e)];
            for (acc, stride) in reads {
                for i in 0..n {
                    std::slice::from_raw_parts_mut(acc.add(i * stride), e).fill(0.0);
                }
            }
            let of = |first: usize| Chains {
                coefficients: mixed[t * channels + first..].as_ptr(),
                coefficient_stride: channels,
                x: keys,
                x_stride: PAGE,
                count: d,
                acc: std::ptr::null_mut(),
                acc_stride: PAGE,
                rows: n,
                width: end,
            };
            let of_state = |first: usize, (acc, acc_stride): (*mut f32, usize)| Chains {
                x: part.state,
                x_stride: e,
                acc,
                acc_stride,
                width: e,
                ..of(first)
            };
            if n == 1 && e <= PAIR {
                // One row's query and key go through keys and state together.
                let both = |chains: Chains| Chains {
                    coefficient_stride: key - query,
                    rows: 2,
                    ..chains
                };
                self.kernels.accumulate(Chains {
                    acc: scores.as_mut_ptr().cast(),
                    acc_stride: ROWS * PAGE,
                    ..both(of(query))
                });
                let mut pair = [[0.0f32; PAIR]; 2];
                let acc = (pair.as_mut_ptr().cast(), PAIR);
                self.kernels.accumulate(both(of_state(query, acc)));
                for ((to, _), from) in reads.into_iter().zip(&pair) {
                    std::slice::from_raw_parts_mut(to, e).copy_from_slice(&from[..e]);
                }
            } else {
                for ((first, read), scores) in [query, key].into_iter().zip(reads).zip(&mut scores)
                {
                    let acc = scores.as_mut_ptr().cast();
                    self.kernels.accumulate(Chains { acc, ..of(first) });
                    self.kernels.accumulate(of_state(first, read));
                }
            }
            for i in 0..n {
                let at = slot + i;
                let mut weights = [0.0f32; PAGE];
                let far = self.weights(&sums[..=at], &mut weights);
                for scores in &mut scores {
                    let pairs = scores[i][..=at].iter_mut().zip(&weights);
                    pairs.for_each(|(score, weight)| *score *= weight);
                }
                let delta = std::slice::from_raw_parts_mut(part.deltas.add(at * e), e);
                delta.iter_mut().for_each(|x| *x *= far);
                self.add_deltas(&scores[1][i], part.deltas, at, delta);
                let values = &mixed[(t + i) * channels + value..][..e];
                let step = self.step.steps[(t + i) * self.shape.heads + self.head];
                let pairs = delta.iter_mut().zip(values);
                pairs.for_each(|(delta, v)| *delta = step * (v - *delta));
                let o = std::slice::from_raw_parts_mut(outs.add(i * stride), e);
                o.iter_mut().for_each(|x| *x *= far);
                self.add_deltas(&scores[0][i], part.deltas, at + 1, o);
            }
        }
    }

    /// Sums of decays from `slot` on, row `t` of the batch and those behind.
    fn sum_decays(&self, sums: &mut [f64], slot: usize, t: usize) {
        let mut sum = slot.checked_sub(1).map_or(0.0, |before| sums[before]);
        let decays = self.step.decays[t * self.shape.heads + self.head..].iter();
        let decays = decays.step_by(self.shape.heads);
        for (to, decay) in sums[slot..].iter_mut().zip(decays) {
            sum += f64::from(*decay);
            *to = sum;
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
    /// So many deltas are there, which nobody writes.
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
            let sums = std::slice::from_raw_parts(from.sums.cast_const(), PAGE);
            let old = std::slice::from_raw_parts(from.state.cast_const(), d * e);
            let mut weights = [0.0f32; PAGE];
            let far = self.weights(sums, &mut weights);
            let mut factors = [[0.0f32; PAGE]; ROWS];
            let parts = state.chunks_mut(ROWS * e).zip(old.chunks(ROWS * e));
            for ((state, old), keys) in parts.zip(keys.chunks(ROWS * PAGE)) {
                state
                    .iter_mut()
                    .zip(old)
                    .for_each(|(s, old)| *s = far * old);
                for (factors, keys) in factors.iter_mut().zip(keys.chunks_exact(PAGE)) {
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
