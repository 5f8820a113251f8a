//! The kernels as the model calls them: an instruction set and a thread pool.

use std::ops::Range;

use crate::activations::{Activations, CHUNK};
use crate::attention::{self, PAGE, Query};
use crate::dispatch::{InstructionSet, Table};
use crate::isa::LANES;
use crate::kv::{KvCache, KvType};
use crate::matmul::GroupArgs;
use crate::packed::Packed;
use crate::pool::{DisjointMut, ThreadPool};

/// Activation rows that a task multiplies with its groups before the next groups: their quantised
/// form (64 rows of 2048 columns are 128 KiB) stays in a second-level cache.
const ROW_BLOCK: usize = 64;

/// Tasks per thread and product: enough that a thread that loses its core for a moment leaves its
/// share to the others.
const TASKS_PER_THREAD: usize = 8;

/// Most products of one job: a rank of a tensor split has one for each root of its leaves, and a
/// range of 64 leaves (the most a model has) has at most 12 roots.
pub const MAX_PRODUCTS: usize = 16;

/// Asked for an instruction set that this machine lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this machine cannot run {} kernels; it has {}", wanted.name(), names(available))]
pub struct Unavailable {
    /// The one asked for.
    pub wanted: InstructionSet,
    /// Those that it has.
    pub available: Vec<InstructionSet>,
}

fn names(sets: &[InstructionSet]) -> String {
    sets.iter()
        .map(|set| set.name())
        .collect::<Vec<_>>()
        .join(", ")
}

/// An instruction set and the threads to run it on.
///
/// Every method gives the same bits for every instruction set and number of threads.
#[derive(Debug)]
pub struct Kernels {
    pub(crate) table: &'static Table,
    pool: ThreadPool,
}

/// A product to compute: `out = x W^T`, `(x.rows(), weights.rows())`.
#[derive(Debug)]
pub struct Product<'a> {
    /// The matrix.
    pub weights: &'a Packed,
    /// Column of `x` that meets column 0 of the matrix, a multiple of 32.
    pub first_col: usize,
    /// `(rows, weights.rows())`, row-major.
    pub out: &'a mut [f32],
}

/// One sequence's share of an attention step: rows of the batch, behind those of the sequence
/// before it.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRows<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Position of the first row.
    pub position: usize,
    /// The sequence's pages in order of position.
    pub pages: &'a [u32],
}

/// An attention step over one layer.
#[derive(Debug)]
pub struct Attention<'a> {
    /// The cache, with the keys and values of this step already written.
    pub cache: &'a KvCache,
    /// Layer in the cache.
    pub layer: usize,
    /// Query heads, which share the cache's KV heads in order.
    pub heads: usize,
    /// Query heads to a KV head.
    pub group: usize,
    /// Query heads of the first KV head that come before those of this step: a rank of a tensor
    /// split may start and end within a group.
    pub skipped: usize,
    /// How many positions a query sees, itself included; `None` for all.
    pub window: Option<usize>,
    /// `(rows, heads * head_dim)`, scaled by `1 / sqrt(head_dim)` or what the model says.
    pub queries: &'a [f32],
    /// The sequences of the batch.
    pub sequences: &'a [AttentionRows<'a>],
}

/// Working memory for [`Kernels::attention`].
#[derive(Debug)]
pub struct AttentionScratch {
    partials: Vec<f32>,
}

impl AttentionScratch {
    /// For up to `rows` rows of `heads` heads and sequences of up to `positions` positions. A
    /// step of few rows over many pages is cut by page when its partial results fit here, so room
    /// for at least one row at full length is kept.
    pub fn new(rows: usize, heads: usize, head_dim: usize, positions: usize) -> Self {
        let per_row = heads * attention::partial_len(head_dim);
        let pages = positions.div_ceil(PAGE).max(1);
        Self {
            partials: vec![0.0; per_row * (rows + pages)],
        }
    }
}

impl Kernels {
    /// The fastest instruction set of this machine, on `threads` threads.
    ///
    /// # Errors
    /// What the system says when it refuses a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let best = InstructionSet::available()
            .pop()
            .expect("scalar is always there");
        let table = best.table().expect("available");
        Ok(Self {
            table,
            pool: ThreadPool::new(threads)?,
        })
    }

    /// The given instruction set on `threads` threads.
    ///
    /// # Errors
    /// [`Unavailable`] when this machine lacks it (wrapped as [`std::io::ErrorKind::Unsupported`]),
    /// or what the system says when it refuses a thread.
    pub fn with_set(set: InstructionSet, threads: usize) -> std::io::Result<Self> {
        let table = set.table().ok_or_else(|| {
            let error = Unavailable {
                wanted: set,
                available: InstructionSet::available(),
            };
            std::io::Error::new(std::io::ErrorKind::Unsupported, error)
        })?;
        Ok(Self {
            table,
            pool: ThreadPool::new(threads)?,
        })
    }

    /// The instruction set in use.
    pub const fn instruction_set(&self) -> InstructionSet {
        self.table.set
    }

    /// The threads.
    pub const fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    /// Multiplies one batch of activations with several matrices, in one parallel job.
    ///
    /// # Panics
    /// On lengths that do not fit, if a matrix wants quantised activations that `x` lacks, and on
    /// more than [`MAX_PRODUCTS`] products.
    pub fn products<'a>(
        &self,
        x: &'a Activations,
        products: impl IntoIterator<Item = Product<'a>>,
    ) {
        let mut jobs = [const { None }; MAX_PRODUCTS];
        let mut count = 0;
        for product in products {
            check_product(x, &product);
            jobs[count] = Some(Job::new(x, product, self.table));
            count += 1;
        }
        let jobs = || jobs[..count].iter().flatten();
        let total: usize = jobs().map(|job| job.groups).sum();
        let per_task = (total / (TASKS_PER_THREAD * self.pool.threads())).max(1);
        let tasks_of = |job: &Job<'_>| job.groups.div_ceil(per_task);
        let tasks = jobs().map(tasks_of).sum();
        self.pool.run(tasks, &|mut task| {
            for job in jobs() {
                let own = tasks_of(job);
                if task < own {
                    // SAFETY: tasks cover disjoint groups.
                    return unsafe { job.run(task * per_task, per_task) };
                }
                task -= own;
            }
        });
    }

    /// Fills rows of `x` by `fill(row, values)` and quantises them, rows in parallel when there
    /// are many.
    pub fn fill_rows(&self, x: &mut Activations, fill: impl Fn(usize, &mut [f32]) + Sync) {
        let rows = x.rows();
        let writer = x.writer();
        self.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            unsafe {
                fill(t, writer.row(t));
                (self.table.quantise_row)(&writer, t);
            }
        });
    }

    /// Runs `f(t)` for every row, in parallel when there is more than one.
    pub fn for_rows(&self, rows: usize, f: impl Fn(usize) + Sync) {
        let per_task = rows.div_ceil(TASKS_PER_THREAD * self.pool.threads()).max(1);
        self.pool.run(rows.div_ceil(per_task), &|task| {
            (task * per_task..rows.min((task + 1) * per_task)).for_each(&f);
        });
    }

    /// Root-mean-square norm, see [`crate::vector`]; `x`, `weight`, `out` are `(n,)`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert_eq!((x.len(), x.len()), (weight.len(), out.len()));
        // SAFETY: the table was detected; lengths are checked.
        unsafe { (self.table.rms_norm)(x.as_ptr(), weight, eps, out.as_mut_ptr()) }
    }

    /// [`rms_norm`](Self::rms_norm) that overwrites its input.
    pub fn rms_norm_in_place(&self, x: &mut [f32], weight: &[f32], eps: f32) {
        assert_eq!(x.len(), weight.len());
        let out = x.as_mut_ptr();
        // SAFETY: the kernel reads each run of 16 before it writes it, through raw pointers; the
        // table was detected.
        unsafe { (self.table.rms_norm)(out, weight, eps, out) }
    }

    /// `out = silu(gate) * up`, all `(n,)`.
    pub fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert_eq!((gate.len(), gate.len()), (up.len(), out.len()));
        // SAFETY: the table was detected; lengths are checked.
        unsafe { (self.table.silu_mul)(gate, up, out) }
    }

    /// `out = gelu(gate) * up` with the tanh form, all `(n,)`.
    pub fn gelu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert_eq!((gate.len(), gate.len()), (up.len(), out.len()));
        // SAFETY: the table was detected; lengths are checked.
        unsafe { (self.table.gelu_mul)(gate, up, out) }
    }

    /// `out = exp((x - shift) * scale)`, all `(n,)`: weights of a softmax, not yet divided by their
    /// sum.
    pub fn exp_scaled(&self, x: &[f32], shift: f32, scale: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len());
        // SAFETY: the table was detected; lengths are checked.
        unsafe { (self.table.exp_scaled)(x, shift, scale, out) }
    }

    /// Causal attention of a batch; `out` is `(rows, heads * head_dim)`, see [`crate::attention`].
    ///
    /// Work is cut into (row block, KV head) tasks, and by page as well when those are too few
    /// for the threads. The cut never changes a bit.
    ///
    /// # Panics
    /// On lengths that do not fit, or pages that a sequence lacks.
    pub fn attention(&self, step: &Attention<'_>, scratch: &mut AttentionScratch, out: &mut [f32]) {
        let plan = Plan::new(step, self.pool.threads(), scratch.partials.len());
        assert!(out.len() >= plan.rows * plan.row_len(), "attention output");
        let partials = DisjointMut::new(&mut scratch.partials, plan.partial);
        if plan.by_page {
            self.pool.run(plan.page_tasks(), &|task| {
                self.one_page(step, &plan, task, &partials)
            });
        }
        let out = DisjointMut::new(out, plan.head_dim);
        self.pool.run(plan.row_tasks(), &|task| {
            self.rows(step, &plan, task, &partials, &out)
        });
    }

    /// Computes the partial results of one page for one KV head and one row.
    fn one_page(
        &self,
        step: &Attention<'_>,
        plan: &Plan,
        task: usize,
        partials: &DisjointMut<'_, f32>,
    ) {
        let (row, rest) = (
            task / (plan.kv_heads * plan.max_pages),
            task % (plan.kv_heads * plan.max_pages),
        );
        let (kv_head, index) = (rest / plan.max_pages, rest % plan.max_pages);
        let (sequence, offset) = plan.locate(step, row);
        let position = sequence.position + offset;
        let Some((lo, hi)) = visible(position, step.window, index) else {
            return;
        };
        let mut queries = [Query {
            q: std::ptr::null(),
            lo,
            hi,
            out: std::ptr::null_mut(),
        }; 4];
        let heads = plan.heads_of(kv_head);
        for first in heads.clone().step_by(queries.len()) {
            let n = queries.len().min(heads.end - first);
            for (i, query) in queries[..n].iter_mut().enumerate() {
                let head = first + i;
                query.q = plan.query(step, row, head);
                // SAFETY: each (row, head, page) has a slot of its own.
                query.out = unsafe { partials.part(plan.slot(row, head, index)) }.as_mut_ptr();
            }
            self.attend(step, sequence.pages[index], kv_head, &queries[..n]);
        }
    }

    /// Finishes a block of rows for one KV head: merges stored partial results, or computes page
    /// by page.
    fn rows(
        &self,
        step: &Attention<'_>,
        plan: &Plan,
        task: usize,
        partials: &DisjointMut<'_, f32>,
        out: &DisjointMut<'_, f32>,
    ) {
        let (block, kv_head) = (task / plan.kv_heads, task % plan.kv_heads);
        for row in block * plan.row_block..plan.rows.min((block + 1) * plan.row_block) {
            for head in plan.heads_of(kv_head) {
                if plan.by_page {
                    // SAFETY: slots and outputs belong to this (row, head).
                    unsafe { self.merge_pages(step, plan, row, head, partials, out) }
                }
            }
        }
        if !plan.by_page {
            self.stream(step, plan, block, kv_head, out);
        }
    }

    /// Merges the partial results of all pages of one (row, head) and writes its output.
    ///
    /// # Safety
    /// No other task touches the slots and the output of this (row, head).
    unsafe fn merge_pages(
        &self,
        step: &Attention<'_>,
        plan: &Plan,
        row: usize,
        head: usize,
        partials: &DisjointMut<'_, f32>,
        out: &DisjointMut<'_, f32>,
    ) {
        let (sequence, offset) = plan.locate(step, row);
        let position = sequence.position + offset;
        let first = first_page(position, step.window);
        // SAFETY: by the contract; features were detected, partials have the right length.
        unsafe {
            let into = partials.part(plan.slot(row, head, first));
            for index in first + 1..=position / PAGE {
                (self.table.merge)(into, partials.part(plan.slot(row, head, index)));
            }
            (self.table.finish)(into, out.part(row * plan.heads + head));
        }
    }

    /// Computes a block of rows for one KV head page by page, merging as it goes.
    fn stream(
        &self,
        step: &Attention<'_>,
        plan: &Plan,
        block: usize,
        kv_head: usize,
        out: &DisjointMut<'_, f32>,
    ) {
        let heads = plan.heads_of(kv_head);
        let mut running = StreamBuffers::new(plan, heads.len());
        for row in block * plan.row_block..plan.rows.min((block + 1) * plan.row_block) {
            let (sequence, offset) = plan.locate(step, row);
            let position = sequence.position + offset;
            let first = first_page(position, step.window);
            for index in first..=position / PAGE {
                let (lo, hi) = visible(position, step.window, index).expect("a visible page");
                let target = if index == first {
                    &mut running.total
                } else {
                    &mut running.next
                };
                let queries = target
                    .chunks_exact_mut(plan.partial)
                    .enumerate()
                    .map(|(i, part)| {
                        let q = plan.query(step, row, heads.start + i);
                        Query {
                            q,
                            lo,
                            hi,
                            out: part.as_mut_ptr(),
                        }
                    });
                running.queries.clear();
                running.queries.extend(queries);
                self.attend(step, sequence.pages[index], kv_head, &running.queries);
                if index > first {
                    running.merge(self.table, plan.partial);
                }
            }
            for (i, part) in running.total.chunks_exact(plan.partial).enumerate() {
                let head = heads.start + i;
                // SAFETY: this task alone writes this (row, head); features were detected.
                unsafe { (self.table.finish)(part, out.part(row * plan.heads + head)) };
            }
        }
    }

    fn attend(&self, step: &Attention<'_>, page: u32, kv_head: usize, queries: &[Query]) {
        let view = step.cache.page(step.layer, page, kv_head);
        // SAFETY: the view covers a page of this element type, queries point to head_dim floats
        // and to partials of the right length; features were detected.
        unsafe {
            match step.cache.shape().kv_type {
                KvType::F16 => (self.table.attend_f16)(view, queries),
                KvType::F32 => (self.table.attend_f32)(view, queries),
            }
        }
    }
}

fn check_product(x: &Activations, product: &Product<'_>) {
    let (w, first) = (product.weights, product.first_col);
    assert!(
        first.is_multiple_of(CHUNK) && first + w.cols() <= x.cols(),
        "{} columns from {first} of {}",
        w.cols(),
        x.cols()
    );
    assert_eq!(product.out.len(), x.rows() * w.rows(), "outputs");
    assert!(
        x.precision().is_some() || !w.reads_integers(),
        "activations are not quantised"
    );
}

/// A product as tasks see it.
struct Job<'a> {
    kernel: unsafe fn(GroupArgs<'_>),
    args: GroupArgs<'a>,
    groups: usize,
    group_bytes: usize,
    rows: usize,
}

// SAFETY: tasks read the weights and activations and write disjoint outputs.
unsafe impl Sync for Job<'_> {}

impl<'a> Job<'a> {
    fn new(x: &'a Activations, product: Product<'a>, table: &'static Table) -> Self {
        let w = product.weights;
        let leaf_cols = if w.leaf_cols == 0 {
            w.cols
        } else {
            w.leaf_cols
        };
        Self {
            kernel: table.group(w.block_type, x.precision()),
            args: GroupArgs {
                weights: w.data.as_ptr(),
                first_chunk: w.first_chunk,
                cols: w.cols,
                leaf_cols: leaf_cols.max(1),
                x: x.view(product.first_col),
                first: 0,
                end: x.rows(),
                out: product.out.as_mut_ptr(),
                out_stride: w.rows,
                lanes: LANES,
            },
            groups: w.groups(),
            group_bytes: w.group_bytes,
            rows: w.rows,
        }
    }

    /// Groups `first..first + count`, all activation rows.
    ///
    /// # Safety
    /// No other task writes these groups' outputs.
    unsafe fn run(&self, first: usize, count: usize) {
        let groups = first..self.groups.min(first + count);
        for start in (0..self.args.end).step_by(ROW_BLOCK) {
            for g in groups.clone() {
                let mut args = self.args;
                args.first = start;
                args.end = self.args.end.min(start + ROW_BLOCK);
                args.lanes = LANES.min(self.rows - g * LANES);
                // SAFETY: group `g` lies within the packed data, its outputs within `out`; lengths
                // were checked by `products`, features by detection.
                unsafe {
                    args.weights = self.args.weights.add(g * self.group_bytes);
                    args.out = self.args.out.add(g * LANES);
                    (self.kernel)(args);
                }
            }
        }
    }
}

/// How an attention step is cut into tasks.
#[derive(Debug)]
struct Plan {
    rows: usize,
    heads: usize,
    kv_heads: usize,
    /// Query heads per KV head, and those of the first that are not in this step.
    group: usize,
    skipped: usize,
    head_dim: usize,
    /// Floats of a partial result.
    partial: usize,
    /// Most pages that a row of this step sees, counted from position 0.
    max_pages: usize,
    /// Rows of a streaming task.
    row_block: usize,
    by_page: bool,
}

impl Plan {
    fn new(step: &Attention<'_>, threads: usize, scratch: usize) -> Self {
        let shape = step.cache.shape();
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
        let mut max_pages = 1;
        for s in step.sequences {
            let pages = (s.position + s.rows).div_ceil(PAGE);
            assert!(
                pages <= s.pages.len(),
                "{pages} pages needed, {} given",
                s.pages.len()
            );
            max_pages = max_pages.max(pages);
        }
        let partial = attention::partial_len(shape.head_dim);
        let fits = rows * step.heads * max_pages * partial <= scratch;
        let few = rows * shape.heads < TASKS_PER_THREAD * threads;
        let row_block = rows.div_ceil(TASKS_PER_THREAD * threads).max(1);
        Self {
            rows,
            heads: step.heads,
            kv_heads: shape.heads,
            group: step.group,
            skipped: step.skipped,
            head_dim: shape.head_dim,
            partial,
            max_pages,
            row_block,
            by_page: fits && few && max_pages > 1,
        }
    }

    const fn row_len(&self) -> usize {
        self.heads * self.head_dim
    }

    /// The query heads of a KV head.
    fn heads_of(&self, kv_head: usize) -> Range<usize> {
        let first = kv_head * self.group;
        first.saturating_sub(self.skipped)..(first + self.group - self.skipped).min(self.heads)
    }

    const fn page_tasks(&self) -> usize {
        self.rows * self.kv_heads * self.max_pages
    }

    const fn row_tasks(&self) -> usize {
        self.rows.div_ceil(self.row_block) * self.kv_heads
    }

    const fn slot(&self, row: usize, head: usize, page: usize) -> usize {
        (row * self.heads + head) * self.max_pages + page
    }

    fn query(&self, step: &Attention<'_>, row: usize, head: usize) -> *const f32 {
        step.queries[(row * self.heads + head) * self.head_dim..][..self.head_dim].as_ptr()
    }

    /// The sequence of a row, and the row's place in it.
    fn locate<'a>(&self, step: &Attention<'a>, row: usize) -> (AttentionRows<'a>, usize) {
        let mut offset = row;
        for sequence in step.sequences {
            if offset < sequence.rows {
                return (*sequence, offset);
            }
            offset -= sequence.rows;
        }
        unreachable!("row {row} of {}", self.rows)
    }
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

/// Working memory of a streaming task.
struct StreamBuffers {
    total: Vec<f32>,
    next: Vec<f32>,
    queries: Vec<Query>,
}

impl StreamBuffers {
    fn new(plan: &Plan, heads: usize) -> Self {
        let len = heads * plan.partial;
        Self {
            total: vec![0.0; len],
            next: vec![0.0; len],
            queries: Vec::with_capacity(heads),
        }
    }

    fn merge(&mut self, table: &Table, partial: usize) {
        let parts = self.next.chunks_exact(partial);
        for (into, next) in self.total.chunks_exact_mut(partial).zip(parts) {
            // SAFETY: both are partial results of the same length; features were detected.
            unsafe { (table.merge)(into, next) }
        }
    }
}

#[cfg(test)]
mod tests;
