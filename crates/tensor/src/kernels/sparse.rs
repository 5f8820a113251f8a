//! Sparse attention: a lightning indexer scores all positions, a row attends to the best of them.
//!
//! ```text
//! index keys, queries of each row  -> a score of each position (page by page, in parallel)
//! scores  -> the top_k best positions of each row, ascending; of equal scores the earlier position
//! positions -> their keys copied into pages of the row's own -> attention as over any pages
//! ```
//!
//! An indexer may choose whole pools of consecutive positions, each by the index key of its last
//! one. A row also attends to the positions behind the last whole pool. Or it chooses blocks, each
//! by the best of its positions, the blocks before the row always.
//!
//! A row's keys lie in the order of their positions. So a row with at most `top_k` positions has
//! the bits of plain attention, and no row depends on others. Memory is reserved for blocks of
//! [`SELECTED_ROWS`] and [`GATHERED_ROWS`] rows.

use super::{AttentionRows, AttentionScratch, AttentionStep, Kernels};
use crate::attention::PAGE;
use crate::error::Error;
use crate::kv::{KvCache, KvType, LayerStore};
use crate::pool::DisjointMut;
use crate::sparse::IndexQueries;

/// Rows whose scores are in memory together: 16 MiB at 131,072 positions.
const SELECTED_ROWS: usize = 16;

/// Rows whose keys are gathered together: 19 MB for DeepSeek V3.2's 2048 positions of 576 halves.
const GATHERED_ROWS: usize = 8;

/// Pages that a task scores: 64 heads of 128 elements take some 40 us for each page.
const RUN_PAGES: usize = 8;

/// How many positions an indexer chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Positions in chosen pools, a multiple of `pool`.
    pub top_k: usize,
    /// Positions of a pool or block; 1 for positions that are chosen one by one.
    pub pool: usize,
    /// Blocks up to the row's own that are always chosen, among those of `top_k`; 0 for pools.
    pub local: usize,
}

impl Choice {
    /// Most positions of a row.
    pub const fn room(self) -> usize {
        self.top_k + self.pool - 1
    }

    /// Whether a row that sees `seen` positions attends to some of them only.
    pub const fn is_sparse(self, seen: usize) -> bool {
        match self.local {
            0 => seen / self.pool * self.pool > self.top_k,
            _ => seen > self.top_k,
        }
    }

    /// Positions that a row attends to.
    const fn chosen(self, seen: usize) -> usize {
        match (self.is_sparse(seen), self.local) {
            (false, _) => seen,
            (true, 0) => self.top_k + seen % self.pool,
            (true, _) => self.top_k - (seen.next_multiple_of(self.pool) - seen),
        }
    }
}

/// Selection of a step's rows over the index keys of one layer.
#[derive(Debug)]
pub struct IndexStep<'a> {
    /// The cache, with the index keys of this step already written.
    pub cache: &'a KvCache,
    /// Layer in the cache.
    pub layer: usize,
    /// Queries of a row.
    pub heads: usize,
    /// `(rows, heads * dim)`
    pub queries: &'a [f32],
    /// `(rows, heads)`
    pub weights: &'a [f32],
    /// The sequences of the batch.
    pub sequences: &'a [AttentionRows<'a>],
}

/// Working memory for sparse attention.
#[derive(Debug)]
pub struct SparseScratch {
    choice: Choice,
    /// `(SELECTED_ROWS, positions)`: for each position its score, inverted, and itself; the
    /// smallest is the best.
    ranks: Vec<u64>,
    /// Positions of a row of `ranks`.
    positions: usize,
    /// `(GATHERED_ROWS, room)` positions of one layer.
    gathered: KvCache,
    /// Numbers of the pages of `gathered`.
    pages: Vec<u32>,
    attention: AttentionScratch,
    /// The KV head whose keys are gathered, where each has a choice of its own.
    head: Option<usize>,
}

/// A row of a batch.
#[derive(Clone, Copy)]
pub(super) struct SparseRow<'a> {
    pub(super) sequence: &'a AttentionRows<'a>,
    pub(super) position: usize,
}

impl SparseRow<'_> {
    /// Rows that it chooses among.
    pub(super) const fn seen(&self) -> usize {
        self.position + 1
    }

    /// Page and slot of a position of its sequence.
    pub(super) fn place(&self, position: usize) -> (u32, usize) {
        (self.sequence.page(position / PAGE), position % PAGE)
    }
}

pub(super) fn row_of<'a>(sequences: &'a [AttentionRows<'a>], mut row: usize) -> SparseRow<'a> {
    for sequence in sequences {
        if row < sequence.rows {
            let position = sequence.position + row;
            return SparseRow { sequence, position };
        }
        row -= sequence.rows;
    }
    unreachable!("row {row} behind all sequences")
}

pub(super) fn rows_of(sequences: &[AttentionRows<'_>]) -> usize {
    sequences.iter().map(|s| s.rows).sum()
}

/// A number that falls as `score` rises, with the position below it: the order of selection. Zeros
/// of both signs are equal.
fn rank(score: f32, position: usize) -> u64 {
    let bits = (score + 0.0).to_bits();
    let rising = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    u64::from(!rising) << 32 | position as u64
}

impl SparseScratch {
    /// For attention of up to `heads` heads over the best of up to `positions` positions, whose
    /// keys a layer of `store` keeps.
    ///
    /// # Errors
    /// [`Error::Memory`].
    ///
    /// # Panics
    /// If `store` has no index keys.
    pub fn new(
        kernels: &Kernels,
        store: LayerStore,
        heads: usize,
        (choice, positions): (Choice, usize),
    ) -> Result<Self, Error> {
        let (shape, gathered) = match store {
            LayerStore::Indexed(shape, _) | LayerStore::IndexedPools(shape, _) => {
                (shape, LayerStore::Indexed(shape, 0))
            }
            LayerStore::Pooled(mut shape, _) => {
                if choice.local > 0 {
                    shape.heads = 1; // each has blocks of its own
                }
                (shape, LayerStore::Rows(shape))
            }
            _ => panic!("{store:?} has no index keys"),
        };
        let pages = GATHERED_ROWS * choice.room().div_ceil(PAGE);
        let positions = positions.next_multiple_of(PAGE);
        Ok(Self {
            choice,
            ranks: vec![0; SELECTED_ROWS * positions],
            positions,
            gathered: KvCache::new(&[(0, gathered)], &[pages])?,
            pages: (0..pages as u32).collect(),
            attention: kernels.attention_scratch(
                GATHERED_ROWS,
                heads,
                (shape.head_dim, shape.value_dim),
                choice.room(),
            ),
            head: (choice.local > 0).then_some(0),
        })
    }

    /// Attends to the keys of KV head `head` of the cache from now on.
    ///
    /// # Panics
    /// If the choice is not of blocks, which each KV head has of its own.
    pub const fn set_head(&mut self, head: usize) {
        assert!(self.head.is_some(), "all heads have one choice");
        self.head = Some(head);
    }

    pub const fn choice(&self) -> Choice {
        self.choice
    }
}

impl Kernels {
    /// Writes index keys of a batch, `(rows, dim)`, to a layer of the cache; rows in parallel.
    ///
    /// # Panics
    /// On lengths that do not fit, or pages that a sequence lacks.
    pub fn write_index(
        &self,
        cache: &mut KvCache,
        layer: usize,
        sequences: &[AttentionRows<'_>],
        keys: &[f32],
    ) {
        let dim = cache.index_dim(layer);
        let writer = cache.writer(layer);
        self.for_rows(rows_of(sequences), |t| {
            let row = row_of(sequences, t);
            let (page, slot) = row.place(row.position);
            // SAFETY: rows are positions of their own.
            unsafe { writer.write_index(page, slot, &keys[t * dim..][..dim]) }
        });
    }

    /// Makes the index keys of pools that end in a batch, from the rows that
    /// [`write_index`](Self::write_index) wrote. `finish` gets a row of the batch and the mean of
    /// its pool, and turns this into the key. `keys` `(rows, dim)` is room for them.
    ///
    /// # Panics
    /// As there.
    pub fn pool_index(
        &self,
        cache: &mut KvCache,
        layer: usize,
        (sequences, pool): (&[AttentionRows<'_>], usize),
        keys: &mut [f32],
        finish: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let rows = rows_of(sequences);
        let dim = cache.index_dim(layer);
        let writer = cache.writer(layer);
        let keys = DisjointMut::new(&mut keys[..rows * dim], dim);
        self.for_rows(rows, |t| {
            let row = row_of(sequences, t);
            if !row.seen().is_multiple_of(pool) {
                return;
            }
            // SAFETY: each row is visited once; only this one reads or writes its pool.
            unsafe {
                let key = keys.part(t);
                key.fill(0.0);
                for position in row.seen() - pool..row.seen() {
                    let (page, slot) = row.place(position);
                    writer.add_index(page, slot, key);
                }
                key.iter_mut().for_each(|sum| *sum /= pool as f32);
                finish(t, key);
                let (page, slot) = row.place(row.position);
                writer.write_index(page, slot, key);
            }
        });
    }

    /// As [`pool_index`](Self::pool_index), from rows of X inputs and X gates. An element of a key
    /// is the mean of its inputs, weighted by the softmax of its gates plus `biases` `(pool, X)`.
    /// Zeros follow in the place of gates.
    ///
    /// # Panics
    /// As there, and if pools do not divide a page.
    pub fn weigh_pools(
        &self,
        cache: &mut KvCache,
        layer: usize,
        (sequences, pool): (&[AttentionRows<'_>], usize),
        keys: &mut [f32],
        biases: &[f32],
    ) {
        let (rows, dim) = (rows_of(sequences), cache.index_dim(layer));
        assert!(PAGE.is_multiple_of(pool) && biases.len() == pool * dim / 2);
        let writer = cache.writer(layer);
        let keys = DisjointMut::new(&mut keys[..rows * dim], dim);
        self.for_rows(rows, |t| {
            let row = row_of(sequences, t);
            if !row.seen().is_multiple_of(pool) {
                return;
            }
            let (page, last) = (row.sequence.page(row.position / PAGE), row.position % PAGE);
            // SAFETY: each row is visited once.
            let key = unsafe { keys.part(t) };
            key.fill(0.0);
            let (mut inputs, mut gates, mut weights) = ([0.0; PAGE], [0.0; PAGE], [0.0; PAGE]);
            let [inputs, gates, weights] =
                [&mut inputs, &mut gates, &mut weights].map(|all| &mut all[..pool]);
            for (d, key) in key[..dim / 2].iter_mut().enumerate() {
                let first = last + 1 - pool;
                // SAFETY: only this row reads or writes its pool.
                unsafe {
                    writer.index_line(page, first, d, inputs);
                    writer.index_line(page, first, dim / 2 + d, gates);
                }
                let biases = biases.iter().skip(d).step_by(dim / 2);
                gates
                    .iter_mut()
                    .zip(biases)
                    .for_each(|(x, bias)| *x += bias);
                let largest = gates.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                self.exp_scaled(gates, largest, 1.0, weights);
                let pairs = inputs.iter().zip(&*weights);
                let sum: f32 = pairs.map(|(x, weight)| x * weight).sum();
                *key = sum / weights.iter().sum::<f32>();
            }
            // SAFETY: as above.
            unsafe { writer.write_index(page, last, key) }
        });
    }

    /// Selects the positions that each row attends to: `out` is `(rows, room)`. A row has the
    /// first of them, ascending. Allocates nothing.
    ///
    /// # Panics
    /// On lengths that do not fit, or pages that a sequence lacks.
    pub fn select(&self, step: &IndexStep<'_>, scratch: &mut SparseScratch, out: &mut [u32]) {
        let rows = rows_of(step.sequences);
        let (choice, positions) = (scratch.choice, scratch.positions);
        let out = DisjointMut::new(&mut out[..rows * choice.room()], choice.room());
        for first in (0..rows).step_by(SELECTED_ROWS) {
            let block = first..rows.min(first + SELECTED_ROWS);
            self.score(step, block.clone(), scratch);
            let ranks = DisjointMut::new(&mut scratch.ranks, positions);
            self.pool().run(block.len(), &|i| {
                let seen = row_of(step.sequences, first + i).seen();
                // SAFETY: each row is visited once.
                let (out, ranks) = unsafe { (out.part(first + i), ranks.part(i)) };
                choose(choice, &mut ranks[..seen], out);
            });
        }
    }

    /// Ranks of all positions of the rows `block` that attend to some only.
    fn score(
        &self,
        step: &IndexStep<'_>,
        block: std::ops::Range<usize>,
        scratch: &mut SparseScratch,
    ) {
        let dim = step.cache.index_key_dim(step.layer);
        let kv_type = step.cache.index_type(step.layer);
        let kernel = match kv_type {
            KvType::F16 => self.table.index_f16,
            KvType::F32 => self.table.index_f32,
            KvType::Q8 => self.table.index_q8,
            KvType::Q4 => unreachable!("latent layers have bytes"),
        };
        let most = block.clone().map(|t| row_of(step.sequences, t).seen());
        let runs = most.max().unwrap_or(0).div_ceil(RUN_PAGES * PAGE);
        let pages = scratch.positions / PAGE;
        let ranks = DisjointMut::new(&mut scratch.ranks, PAGE);
        self.pool().run(block.len() * runs, &|task| {
            let (i, run) = (task / runs, task % runs);
            let t = block.start + i;
            let row = row_of(step.sequences, t);
            if !scratch.choice.is_sparse(row.seen()) {
                return;
            }
            let queries = &step.queries[t * step.heads * dim..][..step.heads * dim];
            let queries = IndexQueries {
                queries: queries.as_ptr(),
                weights: step.weights[t * step.heads..][..step.heads].as_ptr(),
                heads: step.heads,
            };
            let end = row.seen().div_ceil(PAGE).min((run + 1) * RUN_PAGES);
            for page in run * RUN_PAGES..end {
                let mut scores = [0.0; PAGE];
                let view = step.cache.index_page(step.layer, row.sequence.page(page));
                // SAFETY: the page has elements of this type, the row has `heads` queries of its
                // elements; features were detected.
                unsafe { kernel(view, queries, scores.as_mut_ptr()) };
                // SAFETY: each page of a row is visited once.
                let out = unsafe { ranks.part(i * pages + page) };
                for (slot, (out, score)) in out.iter_mut().zip(scores).enumerate() {
                    *out = rank(score, page * PAGE + slot);
                }
            }
        });
    }

    /// Attention of each row of `step` over the positions that [`select`](Self::select) chose.
    /// Allocates nothing.
    ///
    /// # Panics
    /// On lengths that do not fit, or pages that a sequence lacks.
    pub fn sparse_attention(
        &self,
        step: &AttentionStep<'_>,
        selected: &[u32],
        scratch: &mut SparseScratch,
        out: &mut [f32],
    ) {
        let shape = step.cache.rows(step.layer);
        let (query, value) = (step.heads * shape.head_dim, step.heads * shape.value_dim);
        let rows = rows_of(step.sequences);
        for first in (0..rows).step_by(GATHERED_ROWS) {
            let block = first..rows.min(first + GATHERED_ROWS);
            let each = scratch.choice.room().div_ceil(PAGE);
            self.gather(step, selected, block.clone(), scratch);
            let own = |i: usize| {
                let seen = row_of(step.sequences, (first + i).min(block.end - 1)).seen();
                AttentionRows {
                    rows: 1,
                    position: scratch.choice.chosen(seen) - 1,
                    pages: &scratch.pages[i * each..(i + 1) * each],
                    first_page: 0,
                }
            };
            let sequences: [AttentionRows<'_>; GATHERED_ROWS] = std::array::from_fn(own);
            let part = AttentionStep {
                cache: &scratch.gathered,
                layer: 0,
                queries: &step.queries[first * query..],
                sequences: &sequences[..block.len()],
                ..*step
            };
            self.attention(&part, &mut scratch.attention, &mut out[first * value..]);
        }
    }

    /// Copies the selected keys of the rows `block`.
    fn gather(
        &self,
        step: &AttentionStep<'_>,
        selected: &[u32],
        block: std::ops::Range<usize>,
        scratch: &mut SparseScratch,
    ) {
        let (choice, layer) = (scratch.choice, step.layer);
        let each = choice.room().div_ceil(PAGE);
        let is_pooled = !step.cache.is_latent(layer);
        let heads = match scratch.head {
            Some(head) => head..head + 1,
            None if is_pooled => 0..step.cache.rows(layer).heads,
            None => 0..0,
        };
        let writer = scratch.gathered.writer(0);
        self.pool().run(block.len() * each, &|task| {
            let (i, page) = (task / each, task % each);
            let row = row_of(step.sequences, block.start + i);
            let chosen = choice.chosen(row.seen());
            let own = page * PAGE..chosen.min((page + 1) * PAGE);
            if own.is_empty() {
                return;
            }
            let first = (block.start + i) * choice.room();
            let mut from = [(0, 0); PAGE];
            let positions = &selected[first + own.start..first + own.end];
            for (from, position) in from.iter_mut().zip(positions) {
                *from = row.place(*position as usize);
            }
            let (page, source) = (task as u32, (step.cache, layer));
            // SAFETY: each page of the gathered rows is written by one task.
            unsafe {
                match is_pooled {
                    true => writer.copy_heads(page, source, heads.clone(), &from[..own.len()]),
                    false => writer.copy(page, source, &from[..own.len()]),
                }
            }
        });
    }
}

/// Writes the positions of the best of `ranks`, ascending; all where there are no more.
fn choose(choice: Choice, ranks: &mut [u64], out: &mut [u32]) {
    let Choice { top_k, pool, .. } = choice;
    let seen = ranks.len();
    if !choice.is_sparse(seen) {
        let all = out.iter_mut().zip(0..seen as u32);
        all.for_each(|(out, position)| *out = position);
        return;
    }
    if choice.local > 0 {
        return choose_blocks(choice, ranks, out);
    }
    let pools = seen / pool;
    (0..pools).for_each(|i| ranks[i] = ranks[(i + 1) * pool - 1]);
    ranks[..pools].select_nth_unstable(top_k / pool - 1);
    for (out, rank) in out.chunks_exact_mut(pool).zip(&ranks[..top_k / pool]) {
        let end = *rank as u32 + 1;
        let all = out.iter_mut().zip(end - pool as u32..end);
        all.for_each(|(out, position)| *out = position);
    }
    out[..top_k].sort_unstable();
    let rest = out[top_k..]
        .iter_mut()
        .zip((pools * pool) as u32..seen as u32);
    rest.for_each(|(out, position)| *out = position);
}

/// As [`choose`], of blocks: the rank of a block is the best of its positions.
fn choose_blocks(choice: Choice, ranks: &mut [u64], out: &mut [u32]) {
    let Choice { top_k, pool, local } = choice;
    let (seen, own) = (ranks.len(), (ranks.len() - 1) / pool);
    for block in 0..=own {
        let first = block * pool;
        let best = ranks[first..seen.min(first + pool)].iter().min();
        let best = best.map_or(0, |best| best >> 32);
        let best = if block + local > own { 0 } else { best };
        ranks[block] = best << 32 | first as u64;
    }
    let (blocks, wanted) = (&mut ranks[..=own], top_k / pool);
    blocks.select_nth_unstable(wanted - 1);
    let chosen = &mut blocks[..wanted];
    chosen.sort_unstable_by_key(|rank| *rank as u32);
    let positions = chosen.iter().flat_map(|rank| {
        let first = *rank as u32;
        first..(first + pool as u32).min(seen as u32)
    });
    out.iter_mut()
        .zip(positions)
        .for_each(|(out, position)| *out = position);
}
