//! Attention as the model calls it: a batch of rows over the pages of their sequences.
//!
//! A step is cut into tasks of some rows and one KV head. Its queries go through the pages
//! together, so that a page is read once for all of them:
//!
//! ```text
//! rows t, t+1, ..  x  heads of the KV head      page 0, 1, 2, ..        running m, l, o of each
//!          up to QUERIES queries          x     in order           ->   query, 2 + head_dim floats
//! ```
//!
//! A decode row has too few such tasks for several threads. Then a task is a run of pages for one
//! row and KV head. Partial results are stored, and a second job merges them in order of position.
//! Both ways do the same operations in the same order ([`crate::attention`]). Memory grows with
//! rows x heads, and with pages only when a step is cut by page; never with positions squared.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Kernels, TASKS_PER_THREAD};
use crate::attention::{self, PAGE, PageView, Query};
use crate::dispatch::KernelTable;
use crate::kv::{KvCache, KvType};
use crate::pool::DisjointMut;

/// Queries that go through a page together: a multiple of the kernels' tiles (6 and 4). They are
/// few enough that their running results (264 bytes each at 64 elements) stay in a first-level
/// cache.
const QUERIES: usize = 24;

/// [`QUERIES`] for pages whose keys or values are transposed first. That is 64 x 512 elements
/// of GLM 4.7 Flash, against 64 x 1088 multiply-adds for each query. More queries share that; their
/// results (2 x 2 KiB each) stay in an L2 of 1 MiB.
const LATENT_QUERIES: usize = 72;

/// A sequence's share of an attention step: rows of the batch, behind those of the sequence before
/// it.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRows<'a> {
    pub rows: usize,
    /// Position of the first row.
    pub position: usize,
    /// The sequence's pages in order of position, from page `first_page` on.
    pub pages: &'a [u32],
    /// Pages before those that are no longer there, since no row sees them.
    pub first_page: usize,
}

impl AttentionRows<'_> {
    /// The number in the cache of the page with positions `64 index ..`.
    #[inline]
    pub(crate) fn page(&self, index: usize) -> u32 {
        self.pages[index - self.first_page]
    }
}

/// An attention step over one layer.
#[derive(Debug)]
pub struct AttentionStep<'a> {
    /// The cache, with the keys and values of this step already written.
    pub cache: &'a KvCache,
    /// Layer in the cache.
    pub layer: usize,
    /// Query heads, which share the cache's KV heads in order.
    pub heads: usize,
    /// Query heads to a KV head.
    pub group: usize,
    /// Query heads of the first KV head that come before those of this step. A rank of a tensor
    /// split may start and end within a group.
    pub skipped: usize,
    /// Positions that a query attends to, itself included; `None` for all.
    pub window: Option<usize>,
    /// `(heads,)`: a score of each head that takes part in its softmax and has no value.
    pub sinks: Option<&'a [f32]>,
    /// Scores become `cap * tanh(score / cap)` (Gemma 2).
    pub cap: Option<f32>,
    /// `(rows, heads * head_dim)`, scaled by `1 / sqrt(head_dim)` or what the model says.
    pub queries: &'a [f32],
    /// The sequences of the batch.
    pub sequences: &'a [AttentionRows<'a>],
}

/// Working memory for [`Kernels::attention`].
#[derive(Debug)]
pub struct AttentionScratch {
    /// Partial results of a step that is cut by page, for each (row, head, page).
    partials: Vec<f32>,
    /// For each thread, two partial results for each of [`LATENT_QUERIES`] or fewer. Behind them
    /// lie the transposed keys or values of a page, where values are part of the keys.
    running: Vec<Mutex<Vec<f32>>>,
}

impl AttentionScratch {
    /// Memory that no other task uses: no more tasks run at a time than there are threads.
    fn running(&self) -> MutexGuard<'_, Vec<f32>> {
        loop {
            for memory in &self.running {
                if let Ok(guard) = memory.try_lock() {
                    return guard;
                }
            }
            // Only when one scratch is used with a larger pool than it was made for.
            drop(
                self.running[0]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner),
            );
        }
    }
}

impl Kernels {
    /// Working memory for up to `rows` rows of `heads` heads with keys and values of as many
    /// elements, the most of any layer. Sequences have up to `positions` positions. A step of few
    /// rows over many pages is cut by page when its partial results fit here. So room for at least
    /// one row at full length is kept.
    pub fn attention_scratch(
        &self,
        rows: usize,
        heads: usize,
        (key_dim, value_dim): (usize, usize),
        positions: usize,
    ) -> AttentionScratch {
        let partial = attention::partial_len(value_dim);
        let pages = positions.div_ceil(PAGE).max(1);
        let turned = PAGE * key_dim.max(value_dim);
        let running = || Mutex::new(vec![0.0; 2 * LATENT_QUERIES * partial + turned]);
        AttentionScratch {
            partials: vec![0.0; heads * partial * (rows + pages)],
            running: (0..self.pool().threads()).map(|_| running()).collect(),
        }
    }

    /// Writes keys and values of a batch to a layer of the cache; rows in parallel. They are
    /// `(rows, KV heads * head_dim)` and `(rows, KV heads * value_dim)`. `values` are not read
    /// where they are part of the keys.
    ///
    /// # Panics
    /// On lengths that do not fit, or pages that a sequence lacks.
    pub fn write_kv(
        &self,
        cache: &mut KvCache,
        layer: usize,
        sequences: &[AttentionRows<'_>],
        keys: &[f32],
        values: &[f32],
    ) {
        let rows = sequences.iter().map(|s| s.rows).sum();
        let shape = cache.rows(layer);
        let value_dim = if cache.is_latent(layer) {
            0
        } else {
            shape.value_dim
        };
        let (k, v) = (shape.heads * shape.head_dim, shape.heads * value_dim);
        let writer = cache.writer(layer);
        self.for_rows(rows, |t| {
            let (sequence, offset) = locate(sequences, t);
            let position = sequence.position + offset;
            let (page, slot) = (sequence.page(position / PAGE), position % PAGE);
            let (key, value) = (&keys[t * k..][..k], &values[t * v..][..v]);
            // SAFETY: rows are positions of their own.
            unsafe { writer.write(page, slot, key, value) }
        });
    }

    /// Causal attention of a batch; `out` is `(rows, heads * value_dim)`, see [`crate::attention`].
    /// Allocates nothing.
    ///
    /// # Panics
    /// On lengths that do not fit, or pages that a sequence lacks.
    pub fn attention(
        &self,
        step: &AttentionStep<'_>,
        scratch: &mut AttentionScratch,
        out: &mut [f32],
    ) {
        let plan = AttentionPlan::new(step, self.pool().threads(), scratch.partials.len());
        assert!(out.len() >= plan.rows * plan.row_len(), "attention output");
        let out = DisjointMut::new(out, plan.value_dim);
        let mut partials = std::mem::take(&mut scratch.partials);
        let stored = DisjointMut::new(&mut partials, plan.partial);
        let task = AttentionTask {
            step,
            plan: &plan,
            table: self.table,
            out: &out,
            stored: &stored,
        };
        if plan.by_page() {
            self.pool().run(plan.page_tasks(), &|i| {
                task.pages(i, &mut scratch.running())
            });
            self.pool()
                .run(plan.rows * plan.kv_heads, &|i| task.merge_pages(i));
        } else {
            self.pool()
                .run(plan.row_tasks(), &|i| task.rows(i, &mut scratch.running()));
        }
        scratch.partials = partials;
    }
}

/// State that the tasks of a step share.
struct AttentionTask<'a> {
    step: &'a AttentionStep<'a>,
    plan: &'a AttentionPlan,
    table: &'static KernelTable,
    /// `(rows, heads)` parts of `value_dim`.
    out: &'a DisjointMut<'a, f32>,
    /// `(rows, heads, pages)` partial results.
    stored: &'a DisjointMut<'a, f32>,
}

impl AttentionTask<'_> {
    /// Computes the partial results of a run of pages for one KV head and one row.
    fn pages(&self, task: usize, running: &mut [f32]) {
        let plan = self.plan;
        let mut turned = TurnedPage::at_end(running, plan).1;
        let (task, run) = (task / plan.runs(), task % plan.runs());
        let (row, kv_head) = (task / plan.kv_heads, task % plan.kv_heads);
        let (sequence, offset) = locate(self.step.sequences, row);
        let position = sequence.position + offset;
        let seen = first_page(position, self.step.window)..position / PAGE + 1;
        let run = run * plan.run_pages..(run + 1) * plan.run_pages;
        let run = run.start.max(seen.start)..run.end.min(seen.end);
        for index in run {
            let (lo, hi) = visible(position, self.step.window, index).expect("a visible page");
            // The next task's, maybe: this thread's as a rule.
            let next = self.behind(&sequence, &seen, index, kv_head);
            let page = (sequence.page(index), kv_head);
            let mut queries = Queries::new(plan.queries);
            for head in plan.heads_of(kv_head) {
                if queries.is_full() {
                    self.attend(page, next, &mut queries, &mut turned);
                }
                // SAFETY: each (row, head, page) has a slot of its own.
                let out = unsafe { self.stored.part(plan.slot(row, head, index)) };
                queries.push(Query {
                    q: plan.query(self.step, row, head),
                    lo,
                    hi,
                    out: out.as_mut_ptr(),
                });
            }
            self.attend(page, next, &mut queries, &mut turned);
        }
    }

    /// The page that a row reads behind page `index` of those it has `seen` of a KV head. It is the
    /// next of these, or the first of the next head.
    fn behind(
        &self,
        sequence: &AttentionRows<'_>,
        seen: &Range<usize>,
        index: usize,
        kv_head: usize,
    ) -> Option<(u32, usize)> {
        if index + 1 < seen.end {
            return Some((sequence.page(index + 1), kv_head));
        }
        let next = kv_head + 1;
        (next < self.plan.kv_heads).then(|| (sequence.page(seen.start), next))
    }

    /// Merges the stored partial results of all pages for one row and KV head.
    fn merge_pages(&self, task: usize) {
        let plan = self.plan;
        let (row, kv_head) = (task / plan.kv_heads, task % plan.kv_heads);
        let (sequence, offset) = locate(self.step.sequences, row);
        let position = sequence.position + offset;
        let first = first_page(position, self.step.window);
        for head in plan.heads_of(kv_head) {
            // SAFETY: slots and outputs belong to this (row, head); features were detected,
            // partials have the right length.
            unsafe {
                let into = self.stored.part(plan.slot(row, head, first));
                for index in first + 1..=position / PAGE {
                    (self.table.merge)(into, self.stored.part(plan.slot(row, head, index)));
                }
                self.finish(into, row, head);
            }
        }
    }

    /// Finishes a block of rows for one KV head.
    fn rows(&self, task: usize, running: &mut [f32]) {
        let plan = self.plan;
        let (block, kv_head) = (task / plan.kv_heads, task % plan.kv_heads);
        let end = plan.rows.min((block + 1) * plan.row_block);
        let heads = plan.heads_of(kv_head);
        let mut row = block * plan.row_block;
        while row < end {
            let (sequence, offset) = locate(self.step.sequences, row);
            let together = (plan.queries / heads.len()).max(1);
            let rows = together.min(end - row).min(sequence.rows - offset);
            for first in heads.clone().step_by(plan.queries) {
                let tile = QueryTile {
                    sequence,
                    position: sequence.position + offset,
                    rows: row..row + rows,
                    heads: first..heads.end.min(first + plan.queries),
                    kv_head,
                };
                self.tile(&tile, running);
            }
            row += rows;
        }
    }

    /// Computes some queries over all pages that they attend to.
    fn tile(&self, tile: &QueryTile<'_>, running: &mut [f32]) {
        let (plan, window) = (self.plan, self.step.window);
        let (running, mut turned) = TurnedPage::at_end(running, plan);
        let (total, next) = running.split_at_mut(plan.queries * plan.partial);
        let (mut totals, mut nexts) = (parts(total, plan.partial), parts(next, plan.partial));
        let last = (tile.position + tile.rows.len() - 1) / PAGE;
        let seen = first_page(tile.position, window)..last + 1;
        let mut queries = Queries::new(plan.queries);
        for index in seen.clone() {
            tile.each(|slot, row, position, head| {
                let Some((lo, hi)) = visible(position, window, index) else {
                    return;
                };
                let first = index == first_page(position, window);
                let into = if first { &mut totals } else { &mut nexts };
                queries.push(Query {
                    q: plan.query(self.step, row, head),
                    lo,
                    hi,
                    out: into.part(slot).as_mut_ptr(),
                });
            });
            let page = (tile.sequence.page(index), tile.kv_head);
            let next = self.behind(&tile.sequence, &seen, index, tile.kv_head);
            self.attend(page, next, &mut queries, &mut turned);
            tile.each(|slot, _, position, _| {
                let seen = first_page(position, window)..position / PAGE + 1;
                if index > seen.start && index < seen.end {
                    // SAFETY: both are partial results; features were detected.
                    unsafe { (self.table.merge)(totals.part(slot), nexts.part(slot)) }
                }
            });
        }
        tile.each(|slot, row, _, head| {
            // SAFETY: this task alone writes this (row, head).
            unsafe { self.finish(totals.part(slot), row, head) }
        });
    }

    /// Writes the result of a row and head whose pages are merged, its sink merged last.
    ///
    /// # Safety
    /// Nobody else writes this (row, head).
    unsafe fn finish(&self, merged: &mut [f32], row: usize, head: usize) {
        // SAFETY: by the contract; features were detected, lengths are the plan's.
        unsafe {
            if let Some(sinks) = self.step.sinks {
                (self.table.sink)(merged, sinks[head]);
            }
            let out = self.out.part(row * self.plan.heads + head);
            (self.table.finish)(merged, out);
        }
    }

    /// Attends the collected queries to one page of a KV head, and forgets them.
    fn attend(
        &self,
        page: (u32, usize),
        next: Option<(u32, usize)>,
        queries: &mut Queries,
        turned: &mut TurnedPage<'_>,
    ) {
        let (cache, layer) = (self.step.cache, self.step.layer);
        let mut view = cache.page(layer, page, next);
        view.cap = self.step.cap.unwrap_or(0.0);
        let kv_type = cache.rows(layer).kv_type;
        if cache.is_selected(layer) {
            view.keys = turned.keys_of(page, &view, kv_type);
            view.to_next = 0;
        } else if cache.is_latent(layer) {
            view.values = turned.values_of(page, &view, kv_type);
            view.values_to_next = 0;
        }
        let kernel = match kv_type {
            KvType::F16 => self.table.attend_f16,
            KvType::F32 => self.table.attend_f32,
            KvType::Q8 => self.table.attend_q8,
            KvType::Q4 => self.table.attend_q4,
        };
        // SAFETY: the view covers a page of this element type, queries point to head_dim floats
        // and to partials of the right length; features were detected.
        unsafe { kernel(view, &queries.all[..queries.len]) }
        queries.len = 0;
    }
}

/// Memory for the transposed keys or values of one page whose values are part of its keys.
struct TurnedPage<'a> {
    memory: &'a mut [f32],
    /// The page and KV head that it has.
    of: Option<(u32, usize)>,
}

impl<'a> TurnedPage<'a> {
    /// The end of a thread's memory, and what lies before.
    fn at_end(running: &'a mut [f32], plan: &AttentionPlan) -> (&'a mut [f32], Self) {
        let len = PAGE * plan.head_dim.max(plan.value_dim);
        let (before, memory) = running.split_at_mut(running.len() - len);
        (before, Self { memory, of: None })
    }

    /// The values of a page, `(64, value_dim)`, of the cache's elements.
    fn values_of(&mut self, page: (u32, usize), view: &PageView, kv_type: KvType) -> *const u8 {
        let to = self.memory.as_mut_ptr().cast::<u8>();
        if self.of != Some(page) {
            // SAFETY: the keys are (head_dim, 64) elements; the first value_dim rows are transposed
            // into memory for 64 value_dim floats, which take the most bytes.
            unsafe { turn(kv_type, view.keys, (view.value_dim, PAGE), to) };
            self.of = Some(page);
        }
        to
    }

    /// The keys of a page, `(head_dim, 64)`, from the two runs of each position.
    fn keys_of(&mut self, page: (u32, usize), view: &PageView, kv_type: KvType) -> *const u8 {
        let to = self.memory.as_mut_ptr().cast::<u8>();
        if self.of != Some(page) {
            let first = PAGE * view.value_dim * kv_type.key_bits() / 8;
            let second = (PAGE, view.head_dim - view.value_dim);
            // SAFETY: the first runs are (64, value_dim) elements, the second have the others; both
            // are transposed into memory for 64 head_dim floats.
            unsafe {
                turn(kv_type, view.keys, (PAGE, view.value_dim), to);
                turn(kv_type, view.keys.add(first), second, to.add(first));
            }
            self.of = Some(page);
        }
        to
    }
}

/// [`attention::turn`] of elements of `kv_type`.
///
/// # Safety
/// Its contract.
unsafe fn turn(kv_type: KvType, from: *const u8, size: (usize, usize), to: *mut u8) {
    // SAFETY: by the contract.
    unsafe {
        match kv_type {
            KvType::F16 => attention::turn::<u16>(from.cast(), size, to.cast()),
            KvType::F32 => attention::turn::<u32>(from.cast(), size, to.cast()),
            KvType::Q8 => attention::turn::<u8>(from, size, to),
            KvType::Q4 => unreachable!("latent layers have bytes"),
        }
    }
}

/// Parts of equal length of a slice.
struct EqualParts<'a> {
    all: &'a mut [f32],
    len: usize,
}

const fn parts(all: &mut [f32], len: usize) -> EqualParts<'_> {
    EqualParts { all, len }
}

impl EqualParts<'_> {
    fn part(&mut self, index: usize) -> &mut [f32] {
        &mut self.all[index * self.len..(index + 1) * self.len]
    }
}

/// Up to [`AttentionPlan::queries`] queries of one sequence and KV head.
struct QueryTile<'a> {
    sequence: AttentionRows<'a>,
    /// Position of the first row.
    position: usize,
    /// In the batch.
    rows: Range<usize>,
    heads: Range<usize>,
    kv_head: usize,
}

impl QueryTile<'_> {
    /// Calls `f(number, row, position, head)` for each query.
    fn each(&self, mut f: impl FnMut(usize, usize, usize, usize)) {
        let mut slot = 0;
        for row in self.rows.clone() {
            for head in self.heads.clone() {
                f(slot, row, self.position + row - self.rows.start, head);
                slot += 1;
            }
        }
    }
}

/// Queries collected for a page.
struct Queries {
    all: [Query; LATENT_QUERIES],
    len: usize,
    most: usize,
}

impl Queries {
    const fn new(most: usize) -> Self {
        let none = Query {
            q: std::ptr::null(),
            lo: 0,
            hi: 0,
            out: std::ptr::null_mut(),
        };
        Self {
            all: [none; LATENT_QUERIES],
            len: 0,
            most,
        }
    }

    const fn is_full(&self) -> bool {
        self.len == self.most
    }

    fn push(&mut self, query: Query) {
        self.all[self.len] = query;
        self.len += 1;
    }
}

/// Division of an attention step into tasks.
#[derive(Debug)]
struct AttentionPlan {
    rows: usize,
    heads: usize,
    kv_heads: usize,
    /// Query heads per KV head, and those of the first that are not in this step.
    group: usize,
    skipped: usize,
    head_dim: usize,
    value_dim: usize,
    /// Floats of a partial result.
    partial: usize,
    /// Most queries that go through a page together.
    queries: usize,
    /// Most pages that a row of this step sees, counted from position 0.
    max_pages: usize,
    /// Rows of a task.
    row_block: usize,
    /// Pages of a task when the step is cut by page, else 0.
    run_pages: usize,
}

impl AttentionPlan {
    fn new(step: &AttentionStep<'_>, threads: usize, scratch: usize) -> Self {
        let shape = step.cache.rows(step.layer);
        let rows: usize = step.sequences.iter().map(|s| s.rows).sum();
        let groups = (step.skipped + step.heads).div_ceil(step.group);
        assert!(
            step.heads > 0 && step.skipped < step.group && groups == shape.heads,
            "{} heads after {} in {} groups of {}",
            step.heads,
            step.skipped,
            shape.heads,
            step.group
        );
        assert!(
            step.queries.len() >= rows * step.heads * shape.head_dim,
            "queries"
        );
        assert!(
            step.sinks.is_none_or(|sinks| sinks.len() == step.heads),
            "sinks"
        );
        let max_pages = most_pages(step.sequences);
        let partial = attention::partial_len(shape.value_dim);
        let fits = rows * step.heads * max_pages * partial <= scratch;
        let wanted = TASKS_PER_THREAD * threads;
        let by_page = fits && threads > 1 && rows * shape.heads < wanted && max_pages > 1;
        // Consecutive pages are in one task, which prefetches the next.
        let runs = wanted.div_ceil(rows * shape.heads);
        Self {
            rows,
            heads: step.heads,
            kv_heads: shape.heads,
            group: step.group,
            skipped: step.skipped,
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
            partial,
            queries: match step.cache.is_latent(step.layer) {
                true => LATENT_QUERIES,
                false => QUERIES,
            },
            max_pages,
            row_block: rows.div_ceil(wanted).max(1),
            run_pages: if by_page { max_pages.div_ceil(runs) } else { 0 },
        }
    }

    const fn by_page(&self) -> bool {
        self.run_pages > 0
    }

    const fn row_len(&self) -> usize {
        self.heads * self.value_dim
    }

    /// The query heads of a KV head.
    fn heads_of(&self, kv_head: usize) -> Range<usize> {
        let first = kv_head * self.group;
        first.saturating_sub(self.skipped)..(first + self.group - self.skipped).min(self.heads)
    }

    /// Runs of pages for one row and KV head.
    const fn runs(&self) -> usize {
        self.max_pages.div_ceil(self.run_pages)
    }

    const fn page_tasks(&self) -> usize {
        self.rows * self.kv_heads * self.runs()
    }

    const fn row_tasks(&self) -> usize {
        self.rows.div_ceil(self.row_block) * self.kv_heads
    }

    const fn slot(&self, row: usize, head: usize, page: usize) -> usize {
        (row * self.heads + head) * self.max_pages + page
    }

    fn query(&self, step: &AttentionStep<'_>, row: usize, head: usize) -> *const f32 {
        step.queries[(row * self.heads + head) * self.head_dim..][..self.head_dim].as_ptr()
    }
}

fn most_pages(sequences: &[AttentionRows<'_>]) -> usize {
    let pages_of = |s: &AttentionRows<'_>| {
        let pages = (s.position + s.rows).div_ceil(PAGE);
        assert!(
            pages <= s.first_page + s.pages.len(),
            "{pages} pages needed, {} given from {}",
            s.pages.len(),
            s.first_page
        );
        pages
    };
    sequences.iter().map(pages_of).max().unwrap_or(0).max(1)
}

/// The sequence of a row, and the row's place in it.
pub(super) fn locate<'a>(
    sequences: &[AttentionRows<'a>],
    row: usize,
) -> (AttentionRows<'a>, usize) {
    let mut offset = row;
    for sequence in sequences {
        if offset < sequence.rows {
            return (*sequence, offset);
        }
        offset -= sequence.rows;
    }
    unreachable!("row {row} of {} sequences", sequences.len())
}

/// The first page that the query at `position` sees.
fn first_page(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |w| (position + 1).saturating_sub(w) / PAGE)
}

/// The positions `lo..hi` within page `index` that the query at `position` sees, if any.
fn visible(position: usize, window: Option<usize>, index: usize) -> Option<(usize, usize)> {
    let start = window.map_or(0, |w| (position + 1).saturating_sub(w));
    let lo = start.saturating_sub(index * PAGE);
    let hi = (position + 1).saturating_sub(index * PAGE).min(PAGE);
    (lo < hi).then_some((lo, hi))
}
