//! Attention to the last positions and to runs of earlier ones, which have one key each (DeepSeek
//! V4). A key is its value too.
//!
//! ```text
//! row of a position:  key (D) | of the run's key: inputs, gates (N D each) | of its index key: ..
//! a run that ends  -> entry = finish(sum over its positions of softmax(gate + bias) * input)
//! index queries, index keys of entries -> the top_k best entries of each row, ascending
//! entries, then the keys of the window, copied into pages of the row's own -> attention
//! ```
//!
//! N is 2 where a run overlaps with the one before: that one's first inputs, and its own second
//! ones. Rows are in one layer of the cache, which releases pages behind its window. Entries are in
//! another, in the page of their run's last position. Both keep f32. A row reads pages only, so
//! its bits depend neither on the rest of the batch nor on where a prompt was cut.

use super::sparse::{SparseRow, row_of, rows_of};
use super::{
    AttentionRows, AttentionScratch, AttentionStep, Choice, IndexStep, Kernels, SparseScratch,
};
use crate::attention::PAGE;
use crate::error::Error;
use crate::kv::{KvCache, KvShape, KvType, LayerStore, StateShape};

/// Rows whose keys are gathered together: 10 MB for DeepSeek V4's 640 keys of 512 elements.
const GATHERED_ROWS: usize = 8;

/// Channels whose softmax is computed together.
const CHANNELS: usize = 64;

/// Runs of positions, and the sizes of their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Positions of a run: a divisor or a multiple of [`PAGE`].
    pub len: usize,
    /// Whether a run overlaps with the one before.
    pub overlaps: bool,
    /// Elements of a key (D), a multiple of 16.
    pub dim: usize,
    /// Elements of an index key (X), a multiple of 16; 0 without an indexer.
    pub index_dim: usize,
    /// Whether index keys have inputs of their own in rows.
    pub index_inputs: bool,
}

impl Runs {
    /// Elements of a position's row.
    pub const fn row(self) -> usize {
        let index = if self.index_inputs { self.index_dim } else { 0 };
        self.dim + 2 * self.series() * (self.dim + index)
    }

    /// Inputs of a position for each element of a key.
    pub const fn series(self) -> usize {
        if self.overlaps { 2 } else { 1 }
    }

    /// Positions that a row reads, its own included.
    pub const fn looks_back(self) -> usize {
        self.series() * self.len
    }

    const fn entry(self) -> usize {
        self.dim + self.index_dim
    }

    /// Layer of the entries.
    pub const fn entries(self) -> LayerStore {
        let slots = if self.len < PAGE { PAGE / self.len } else { 1 };
        LayerStore::State(StateShape {
            heads: 1,
            len: slots * self.entry(),
            head_dim: 0,
            value_dim: 0,
        })
    }

    /// Index of the page that has an entry, and its first element there.
    const fn place(self, entry: usize) -> (usize, usize) {
        let last = (entry + 1) * self.len - 1;
        let slot = if self.len < PAGE {
            last % PAGE / self.len
        } else {
            0
        };
        (last / PAGE, slot * self.entry())
    }
}

/// Layer of rows of `len` elements.
pub const fn rows_store(len: usize) -> LayerStore {
    LayerStore::State(StateShape {
        heads: 1,
        len: 0,
        head_dim: 0,
        value_dim: len,
    })
}

/// A layer and its sequences.
#[derive(Clone, Copy, Debug)]
pub struct RunStep<'a> {
    /// Layer of the rows in the cache, and of the entries.
    pub layers: [usize; 2],
    /// The sequences of the batch, with their pages of either.
    pub sequences: [&'a [AttentionRows<'a>]; 2],
    /// Elements of a row.
    pub row: usize,
    /// `None` in layers that attend to their window only.
    pub runs: Option<Runs>,
    /// Positions of the window.
    pub window: usize,
}

/// Keys that a row attends to.
#[derive(Clone, Copy)]
struct RowKeys {
    /// Entries.
    chosen: usize,
    /// Whether these are not all that it sees.
    is_sparse: bool,
    /// The last positions, its own included.
    window: usize,
}

impl RowKeys {
    const fn total(self) -> usize {
        self.chosen + self.window
    }
}

impl<'a> RunStep<'a> {
    /// Keys of row `t`, of whose entries `top_k` are chosen.
    fn keys(&self, t: usize, top_k: usize) -> RowKeys {
        let seen = row_of(self.sequences[0], t).seen();
        let entries = self.runs.map_or(0, |runs| seen / runs.len);
        RowKeys {
            chosen: entries.min(top_k),
            is_sparse: entries > top_k,
            window: seen.min(self.window),
        }
    }

    /// The row of a position of the sequence of `row`.
    fn row_of<'c>(&self, cache: &'c KvCache, row: &SparseRow<'a>, position: usize) -> &'c [f32] {
        let (page, slot) = row.place(position);
        cache.state_part(self.layers[0], page, slot * self.row..(slot + 1) * self.row)
    }
}

/// Working memory of such layers.
#[derive(Debug)]
pub struct RunScratch {
    /// `(GATHERED_ROWS, room)` keys.
    gathered: KvCache,
    /// Numbers of the pages of `gathered`.
    pages: Vec<u32>,
    /// Pages of a row.
    each: usize,
    attention: AttentionScratch,
    index: Option<IndexScratch>,
}

/// Working memory of an indexer of entries.
#[derive(Debug)]
struct IndexScratch {
    /// Index keys of a sequence.
    keys: KvCache,
    pages: Vec<u32>,
    sparse: SparseScratch,
}

impl RunScratch {
    /// For layers of up to `heads` heads with keys of `dim` elements, whose rows attend to up to
    /// `room` of these. An indexer chooses among up to `entries` keys of `index_dim` elements.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn new(
        kernels: &Kernels,
        (heads, dim, room): (usize, usize, usize),
        index: Option<(Choice, usize, usize)>,
    ) -> Result<Self, Error> {
        let shape = KvShape {
            heads: 1,
            head_dim: dim,
            value_dim: dim,
            kv_type: KvType::F32,
        };
        let each = room.div_ceil(PAGE);
        let pages = GATHERED_ROWS * each;
        let index = index.map(|(choice, index_dim, entries)| {
            let least = KvShape {
                head_dim: 16,
                value_dim: 16,
                ..shape
            };
            let store = LayerStore::Pooled(least, index_dim); // for its index keys only
            let pages = entries.div_ceil(PAGE).max(1);
            Ok::<_, Error>(IndexScratch {
                keys: KvCache::new(&[(0, store)], &[pages])?,
                pages: (0..pages as u32).collect(),
                sparse: SparseScratch::new(kernels, store, 1, (choice, entries.max(1)))?,
            })
        });
        Ok(Self {
            gathered: KvCache::new(&[(0, LayerStore::Indexed(shape, 0))], &[pages])?,
            pages: (0..pages as u32).collect(),
            each,
            attention: kernels.attention_scratch(GATHERED_ROWS, heads, (dim, dim), room),
            index: index.transpose()?,
        })
    }

    /// Entries that a layer's indexer chooses; all in layers without one.
    fn top_k(&self, runs: Option<Runs>) -> usize {
        let own = self
            .index
            .as_ref()
            .filter(|_| runs.is_some_and(|of| of.index_dim > 0));
        own.map_or(usize::MAX, |own| own.sparse.choice().top_k)
    }
}

impl Kernels {
    /// Writes the rows of a batch, `(rows, row)`, to the cache.
    ///
    /// # Panics
    /// On lengths that do not fit, or pages that a sequence lacks.
    pub fn write_rows(&self, cache: &mut KvCache, step: &RunStep<'_>, rows: &[f32]) {
        let (sequences, n) = (step.sequences[0], step.row);
        let writer = cache.writer(step.layers[0]);
        self.for_rows(rows_of(sequences), |t| {
            let row = row_of(sequences, t);
            let (page, slot) = row.place(row.position);
            // SAFETY: rows are positions of their own.
            let out = unsafe { writer.state_part(page, slot * n..(slot + 1) * n) };
            out.copy_from_slice(&rows[t * n..(t + 1) * n]);
        });
    }

    /// Makes the entries of runs that end in a batch, from the rows in the cache. `biases` are
    /// those of the gates of keys and of index keys, `(len, N D)` and `(len, N X)`. `finish` gets
    /// which of both it is, a row of the batch and the sum, and turns this into the key.
    ///
    /// # Panics
    /// As [`write_rows`](Self::write_rows).
    pub fn compress(
        &self,
        cache: &mut KvCache,
        step: &RunStep<'_>,
        biases: [&[f32]; 2],
        finish: impl Fn(usize, usize, &mut [f32]) + Sync,
    ) {
        let Some(runs) = step.runs else { return };
        let rows = step.sequences[0];
        let writer = cache.writer(step.layers[1]);
        self.for_rows(rows_of(rows), |t| {
            let (row, entries) = (row_of(rows, t), row_of(step.sequences[1], t));
            if !row.seen().is_multiple_of(runs.len) {
                return;
            }
            let (page, first) = runs.place(row.seen() / runs.len - 1);
            let page = entries.sequence.page(page);
            // SAFETY: each entry is written by the row that ends its run; no row reads entries.
            let out = unsafe { writer.state_part(page, first..first + runs.entry()) };
            let (key, index) = out.split_at_mut(runs.dim);
            let mut at = runs.dim;
            for (which, (out, bias)) in [key, index].into_iter().zip(biases).enumerate() {
                if which == 0 || runs.index_inputs {
                    let of = |position| step.row_of(writer.cache(), &row, position);
                    self.sum_run(runs, (row.seen(), at), (bias, of), out);
                    finish(which, t, out);
                }
                at += 2 * runs.series() * out.len();
            }
        });
    }

    /// Writes the index keys of runs that end in a batch, `(rows, X)`, where they have no inputs of
    /// their own.
    ///
    /// # Panics
    /// As [`write_rows`](Self::write_rows); without entries.
    pub fn write_index_keys(&self, cache: &mut KvCache, step: &RunStep<'_>, keys: &[f32]) {
        let runs = step.runs.expect("a layer with entries");
        let writer = cache.writer(step.layers[1]);
        self.for_rows(rows_of(step.sequences[1]), |t| {
            let row = row_of(step.sequences[1], t);
            if row.seen().is_multiple_of(runs.len) {
                let (page, first) = runs.place(row.seen() / runs.len - 1);
                let part = first + runs.dim..first + runs.entry();
                // SAFETY: each entry is written by the row that ends its run.
                let out = unsafe { writer.state_part(row.sequence.page(page), part) };
                out.copy_from_slice(&keys[t * runs.index_dim..][..runs.index_dim]);
            }
        });
    }

    /// Sums the run before position `seen`, whose inputs are at element `at` of rows.
    fn sum_run<'r>(
        &self,
        runs: Runs,
        (seen, at): (usize, usize),
        (bias, row): (&[f32], impl Fn(usize) -> &'r [f32]),
        out: &mut [f32],
    ) {
        let (dim, series) = (out.len(), runs.series());
        let all = series * dim;
        let first = seen.saturating_sub(runs.looks_back());
        for (c, out) in out.chunks_mut(CHANNELS).enumerate() {
            let n = out.len();
            let gate = |position: usize, gates: &mut [f32; CHANNELS]| {
                let own = seen - position <= runs.len && series == 2;
                let channel = usize::from(own) * dim + c * CHANNELS;
                let row = &row(position)[at..at + 2 * all];
                let bias = &bias[position % runs.len * all + channel..][..n];
                let own = row[all + channel..][..n].iter().zip(bias);
                let pairs = gates.iter_mut().zip(own);
                pairs.for_each(|(gate, (own, bias))| *gate = own + bias);
                &row[channel..channel + n]
            };
            let (mut largest, mut sums) = ([f32::NEG_INFINITY; CHANNELS], [0.0f32; CHANNELS]);
            let (mut gates, mut exp) = ([0.0; CHANNELS], [0.0; CHANNELS]);
            for position in first..seen {
                gate(position, &mut gates);
                let pairs = largest.iter_mut().zip(&gates);
                pairs.for_each(|(largest, gate)| *largest = largest.max(*gate));
            }
            out.fill(0.0);
            for position in first..seen {
                let inputs = gate(position, &mut gates);
                let pairs = gates.iter_mut().zip(&largest);
                pairs.for_each(|(gate, largest)| *gate -= largest);
                self.exp_scaled(&gates[..n], 0.0, 1.0, &mut exp[..n]);
                for (i, input) in inputs.iter().enumerate() {
                    sums[i] += exp[i];
                    out[i] += exp[i] * input;
                }
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out /= sum);
        }
    }

    /// Selects the entries of each row that sees more than the indexer chooses, ascending: `out` is
    /// `(rows, top_k)`. Rows have `heads` queries `(rows, heads X)` with weights `(rows, heads)`.
    ///
    /// # Panics
    /// As [`write_rows`](Self::write_rows); without an indexer.
    pub fn select_entries(
        &self,
        cache: &KvCache,
        step: &RunStep<'_>,
        (heads, queries, weights): (usize, &[f32], &[f32]),
        scratch: &mut RunScratch,
        out: &mut [u32],
    ) {
        let runs = step.runs.expect("a layer with entries");
        let top_k = scratch.top_k(step.runs);
        let own = scratch.index.as_mut().expect("made for an indexer");
        let mut first = 0;
        for sequence in step.sequences[1] {
            let before = sequence.position + 1;
            let dense = ((top_k + 1) * runs.len)
                .saturating_sub(before)
                .min(sequence.rows);
            let entries = (sequence.position + sequence.rows) / runs.len;
            if dense < sequence.rows {
                self.gather_index(cache, (step.layers[1], runs), sequence, entries, own);
                let seen = (dense..sequence.rows).map(|row| (before + row) / runs.len);
                let rows: Vec<AttentionRows<'_>> = seen
                    .map(|seen| AttentionRows {
                        rows: 1,
                        position: seen - 1,
                        pages: &own.pages,
                        first_page: 0,
                    })
                    .collect();
                let at = first + dense;
                let index = IndexStep {
                    cache: &own.keys,
                    layer: 0,
                    heads,
                    queries: &queries[at * heads * runs.index_dim..],
                    weights: &weights[at * heads..],
                    sequences: &rows,
                };
                self.select(&index, &mut own.sparse, &mut out[at * top_k..]);
            }
            first += sequence.rows;
        }
    }

    /// Copies the index keys of the first `entries` entries of a sequence, 64 to a page.
    fn gather_index(
        &self,
        cache: &KvCache,
        (layer, runs): (usize, Runs),
        sequence: &AttentionRows<'_>,
        entries: usize,
        own: &mut IndexScratch,
    ) {
        let writer = own.keys.writer(0);
        self.for_rows(entries, |entry| {
            let (page, first) = runs.place(entry);
            let key = first + runs.dim..first + runs.entry();
            let key = cache.state_part(layer, sequence.page(page), key);
            // SAFETY: entries are positions of their own.
            unsafe { writer.write_index((entry / PAGE) as u32, entry % PAGE, key) }
        });
    }

    /// Attention of each row to its entries and its window; `out` is `(rows, heads D)`. A row that
    /// sees more entries than an indexer chooses reads the `selected` ones. `step` has the heads,
    /// their queries and sinks; its cache and sequences are not read.
    ///
    /// # Panics
    /// As [`write_rows`](Self::write_rows).
    pub fn attend_runs(
        &self,
        (cache, of): (&KvCache, &RunStep<'_>),
        step: &AttentionStep<'_>,
        selected: &[u32],
        scratch: &mut RunScratch,
        out: &mut [f32],
    ) {
        let n = step.heads * scratch.gathered.rows(0).head_dim;
        let (rows, each) = (rows_of(of.sequences[0]), scratch.each);
        let top_k = scratch.top_k(of.runs);
        for first in (0..rows).step_by(GATHERED_ROWS) {
            let block = first..rows.min(first + GATHERED_ROWS);
            self.gather_keys((cache, of), selected, block.clone(), scratch);
            let own = |i: usize| AttentionRows {
                rows: 1,
                position: of.keys(first + i.min(block.len() - 1), top_k).total() - 1,
                pages: &scratch.pages[i * each..(i + 1) * each],
                first_page: 0,
            };
            let sequences: [AttentionRows<'_>; GATHERED_ROWS] = std::array::from_fn(own);
            let part = AttentionStep {
                cache: &scratch.gathered,
                layer: 0,
                window: None,
                queries: &step.queries[first * n..],
                sequences: &sequences[..block.len()],
                ..*step
            };
            self.attention(&part, &mut scratch.attention, &mut out[first * n..]);
        }
    }

    /// Copies the keys that the rows `block` attend to.
    fn gather_keys(
        &self,
        (cache, of): (&KvCache, &RunStep<'_>),
        selected: &[u32],
        block: std::ops::Range<usize>,
        scratch: &mut RunScratch,
    ) {
        let (each, top_k) = (scratch.each, scratch.top_k(of.runs));
        let dim = scratch.gathered.rows(0).head_dim;
        let writer = scratch.gathered.writer(0);
        self.pool().run(block.len() * each, &|task| {
            let (t, page) = (block.start + task / each, task % each);
            let [row, entries] = of.sequences.map(|sequences| row_of(sequences, t));
            let keys = of.keys(t, top_k);
            for i in page * PAGE..keys.total().min((page + 1) * PAGE) {
                let key = match i.checked_sub(keys.chosen) {
                    Some(i) => &of.row_of(cache, &row, row.seen() - keys.window + i)[..dim],
                    None => {
                        let entry = match keys.is_sparse {
                            true => selected[t * top_k + i] as usize,
                            false => i,
                        };
                        let (page, first) = of.runs.expect("it has entries").place(entry);
                        let page = entries.sequence.page(page);
                        cache.state_part(of.layers[1], page, first..first + dim)
                    }
                };
                // SAFETY: each page of the gathered rows is written by one task.
                unsafe { writer.write(task as u32, i % PAGE, key, &[]) }
            }
        });
    }
}
