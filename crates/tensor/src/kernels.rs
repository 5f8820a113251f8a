//! [`Kernels`], the interface of this crate to models: products, attention and recurrent layers on
//! one instruction set and one thread pool.
//!
//! It divides a call into tasks and selects the kernels of the instruction set. The kernels
//! themselves are in [`crate::matmul`], [`crate::attention`] and the private module `batch`.

use std::cell::RefCell;
use std::ops::Range;

use paceline_base::BlockType;

use crate::activations::{Activations, CHUNK, OperandForms, Precision};
use crate::batch::rows::{PanelView, RowFormat};
use crate::batch::{self, Batch, TOGETHER};
use crate::dispatch::{InstructionSet, KernelTable};
use crate::isa::LANES;
use crate::matmul::GroupArgs;
use crate::meter::Meter;
use crate::packing::{DecodedForm, PackedMatrix, StoredRows, span};
use crate::pool::{Pinning, ThreadPool};
use crate::vector::RopePairs;

mod attention;
mod delta;
mod recurrent;
mod rotation;
mod runs;
#[cfg(target_arch = "x86_64")]
mod self_test;
mod short_conv;
mod sparse;

pub use attention::{AttentionRows, AttentionScratch, AttentionStep};
pub use delta::{DeltaStep, StateRule};
pub use recurrent::{HeadRows, Recurrence, Recurrent};
pub use runs::{RunScratch, RunStep, Runs, rows_store};
#[cfg(target_arch = "x86_64")]
pub(crate) use self_test::same_products;
pub use short_conv::ShortConvStep;
pub use sparse::{Choice, IndexStep, SparseScratch};

/// Preferred multiple of activation rows: one panel of weights is multiplied with this many at
/// once.
pub const BLOCK: usize = batch::ROWS;

/// Activation rows that a task multiplies with its groups before the next groups. Their quantised
/// form (64 rows of 2048 columns are 128 KiB) stays in a second-level cache.
const ROW_BLOCK: usize = 64;

/// Tasks per thread and product: enough that a thread that loses its core for a moment leaves its
/// share to the others.
const TASKS_PER_THREAD: usize = 8;

/// Most products of one job. A rank of a tensor split has one for each root of its leaves. Some of
/// 2^n leaves have at most 2 n roots: 10 of a feed-forward's 32, 14 of 128 heads.
pub const MAX_PRODUCTS: usize = 16;

/// Asked for an instruction set that this machine lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this machine cannot run {} kernels; it has {}", wanted.name(), names(available))]
pub struct Unavailable {
    pub wanted: InstructionSet,
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
    pub(crate) table: &'static KernelTable,
    pool: ThreadPool,
    meter: Meter,
}

/// A product to compute: `out = x W^T`, `(x.rows(), weights.rows())`.
#[derive(Debug)]
pub struct Product<'a> {
    pub weights: &'a PackedMatrix,
    /// Column of `x` that meets column 0 of the matrix, a multiple of 32.
    pub first_col: usize,
    /// `(rows, weights.rows())`, row-major.
    pub out: &'a mut [f32],
}

impl<'a> Product<'a> {
    /// A product of all columns of `x`.
    pub const fn new(weights: &'a PackedMatrix, out: &'a mut [f32]) -> Self {
        Self {
            weights,
            first_col: 0,
            out,
        }
    }
}

impl Kernels {
    /// The fastest instruction set of this machine, on `threads` threads.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let best = InstructionSet::available()
            .pop()
            .expect("scalar is always there");
        let table = best.table().expect("available");
        Ok(Self {
            table,
            pool: ThreadPool::new(threads)?,
            meter: Meter::default(),
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
            meter: Meter::default(),
        })
    }

    /// The same with threads that stay where `pinning` says.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn pinned(self, pinning: Pinning) -> std::io::Result<Self> {
        Ok(Self {
            pool: ThreadPool::with_pinning(self.pool.threads(), pinning)?,
            table: self.table,
            meter: self.meter,
        })
    }

    /// The instruction set in use.
    pub const fn instruction_set(&self) -> InstructionSet {
        self.table.set
    }

    /// Counts the time of products, when it is turned on.
    pub const fn meter(&self) -> &Meter {
        &self.meter
    }

    pub const fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    /// Room for `max_rows` rows of `cols` columns that products with `matrices` (and no others)
    /// will read. It has only the forms that these read: f32 only, quantised or rounded to
    /// `precision` too, or with copies for panels. Making those takes 1 to 2 % of a prompt.
    ///
    /// # Panics
    /// If a matrix is quantised and `cols` is not a multiple of 32, or two are whose
    /// [spans](Packed::span) differ.
    pub fn activations<'a>(
        &self,
        max_rows: usize,
        cols: usize,
        precision: Precision,
        matrices: impl IntoIterator<Item = &'a PackedMatrix>,
    ) -> Activations {
        let fifteen = precision == Precision::Fifteen;
        let mut reads = OperandForms {
            integers: None,
            span: span(0, precision),
            panels: Default::default(),
            rounded: false,
        };
        for w in matrices {
            if w.reads_integers() {
                let read_already = reads.integers.replace(precision).is_some();
                assert!(
                    !read_already || reads.span == w.span(precision),
                    "leaves differ"
                );
                reads.span = w.span(precision);
            }
            let form = |batch: &Batch| batch.form(w.block_type, precision, max_rows);
            if let Some(form) = self.table.batch.and_then(form) {
                reads.panels[form as usize] = true;
            }
            reads.rounded |= !fifteen && w.block_type == BlockType::BF16;
        }
        Activations::with(max_rows, cols, reads)
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
        let began = self.meter.begin();
        let mut jobs = [const { None }; MAX_PRODUCTS];
        let mut count = 0;
        for product in products {
            check_product(x, &product);
            jobs[count] = Some(MatmulJob::new(x, product, self.table));
            count += 1;
        }
        let jobs = || jobs[..count].iter().flatten();
        let total: usize = jobs().map(|job| job.groups * job.blocks).sum();
        let mut per_task = (total / (TASKS_PER_THREAD * self.pool.threads())).max(1);
        if jobs().any(|job| job.batch.is_some()) {
            per_task = per_task.next_multiple_of(TOGETHER);
        }
        let of_block = |job: &MatmulJob<'_>| job.groups.div_ceil(per_task);
        let tasks = jobs().map(|job| job.blocks * of_block(job)).sum();
        self.pool.run(tasks, &|mut task| {
            for job in jobs() {
                let parts = of_block(job);
                let own = job.blocks * parts;
                if task < own {
                    let (block, part) = (task / parts, task % parts);
                    // SAFETY: tasks cover disjoint blocks or groups.
                    return unsafe { job.run(block, part * per_task, per_task) };
                }
                task -= own;
            }
        });
        self.meter.end(began);
    }

    /// Fills rows of `x` by `fill(row, values)` and quantises them, rows in parallel when there
    /// are many.
    pub fn fill_rows(&self, x: &mut Activations, fill: impl Fn(usize, &mut [f32]) + Sync) {
        let rows = x.rows();
        let many = self.table.batch.filter(|many| rows >= many.from);
        let make_row = many.map(|many| many.make_row).unwrap_or_default();
        let copied = RowFormat::ALL
            .map(|form| x.panel_rows(form).has_buffers() && make_row[form as usize].is_some());
        let (writer, copies) = x.writers(copied);
        self.for_rows(rows, |t| {
            // SAFETY: each row is visited once; the table was detected.
            unsafe {
                fill(t, writer.row(t));
                (self.table.quantise_row)(&writer, t);
                for form in RowFormat::ALL.map(|form| form as usize) {
                    if let Some(make_row) = make_row[form].filter(|_| copied[form]) {
                        make_row(&copies[form], t);
                    }
                }
            }
        });
    }

    /// Quantises rows of `x` that were filled through [`Activations::values_mut`].
    pub fn quantise(&self, x: &mut Activations) {
        self.fill_rows(x, |_, _| {});
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

    /// The sum of squares of `x`, as [`rms_norm`](Self::rms_norm) adds them.
    pub fn square_sum(&self, x: &[f32]) -> f32 {
        self.dot(x, x)
    }

    /// The sum of the products of `x` and `y`, `(n,)` each, added as squares are.
    pub fn dot(&self, x: &[f32], y: &[f32]) -> f32 {
        assert_eq!(x.len(), y.len());
        // SAFETY: the table was detected; lengths are checked.
        unsafe { (self.table.dot)(x, y) }
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

    /// Rotates every head of `x`, `(heads, head_dim)`, in place.
    ///
    /// `angles` holds `(cos, sin)` of the position for each pair, at most `head_dim / 2`; elements
    /// beyond the pairs stay (partial rotation). Source: Su et al. 2021 (RoFormer).
    pub fn rope(&self, x: &mut [f32], head_dim: usize, angles: &[(f32, f32)], pairs: RopePairs) {
        assert!(
            2 * angles.len() <= head_dim,
            "{} pairs of {head_dim}",
            angles.len()
        );
        // SAFETY: the table was detected.
        unsafe { (self.table.rope)(x, head_dim, angles, pairs) }
    }

    /// `out = exp((x - shift) * scale)`, all `(n,)`: weights of a softmax, not yet divided by their
    /// sum.
    pub fn exp_scaled(&self, x: &[f32], shift: f32, scale: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len());
        // SAFETY: the table was detected; lengths are checked.
        unsafe { (self.table.exp_scaled)(x, shift, scale, out) }
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
    let wanted = x.precision().map(|precision| w.span(precision));
    assert!(
        !w.reads_integers() || (wanted == Some(x.span()) && first.is_multiple_of(x.span())),
        "spans of {} from column {first}, for leaves whose spans are {wanted:?}",
        x.span(),
    );
}

/// A product as tasks see it.
struct MatmulJob<'a> {
    kernel: unsafe fn(GroupArgs<'_>),
    /// For many rows.
    batch: Option<(batch::Functions, PanelView<'a>)>,
    /// Activation rows that a task takes at once: what meets panels stays in a second-level cache
    /// while many groups meet it.
    block: usize,
    blocks: usize,
    args: GroupArgs<'a>,
    groups: usize,
    group_bytes: usize,
    rows: usize,
    /// Of a decoded type whose groups are decoded before they are multiplied.
    rows_as_stored: Option<StoredRows>,
}

thread_local! {
    /// A group of a decoded type as f32: grows to the thread's widest matrix, and stays.
    static DECODED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

// SAFETY: tasks read the weights and activations and write disjoint outputs.
unsafe impl Sync for MatmulJob<'_> {}

impl<'a> MatmulJob<'a> {
    fn new(x: &'a Activations, product: Product<'a>, table: &'static KernelTable) -> Self {
        let w = product.weights;
        let leaf_cols = if w.leaf_cols == 0 {
            w.cols
        } else {
            w.leaf_cols
        };
        let (mut block, mut blocks) = (x.rows(), 1);
        let batch = table.batch.and_then(|batch| {
            let precision = x.precision()?;
            let form = batch.form(w.block_type, precision, x.rows())?;
            let rows = Some(x.panel_rows(form)).filter(|rows| rows.filled())?;
            let functions = batch.functions(w.block_type, precision, x.rows())?;
            block = form.block(w.cols);
            blocks = x.rows().div_ceil(block);
            Some((functions, rows.view(product.first_col)))
        });
        let rounded = (w.block_type == BlockType::BF16).then(|| x.rounded_view(product.first_col));
        let (mut kernel, x_view) = match rounded.flatten() {
            Some(rounded) => (table.pairs(w.tiny), rounded),
            None => (
                table.group(w.block_type, x.precision()),
                x.view(product.first_col),
            ),
        };
        let (mut scale_cols, mut rows_as_stored) = (0, None);
        match w.decoded {
            Some(DecodedForm::Fp8(layout)) => (kernel, scale_cols) = (table.fp8(), layout.run),
            Some(DecodedForm::Rows(rows)) => rows_as_stored = Some(rows),
            None => {}
        }
        Self {
            kernel,
            batch,
            block,
            blocks,
            args: GroupArgs {
                weights: w.data.as_ptr().wrapping_add(w.headers),
                first_chunk: w.first_chunk,
                lacks: w.lacks,
                span: x.span(),
                scale_cols,
                cols: w.cols,
                leaf_cols: leaf_cols.max(1),
                x: x_view,
                first: 0,
                end: x.rows(),
                out: product.out.as_mut_ptr(),
                out_stride: w.rows,
                lanes: LANES,
            },
            groups: w.groups(),
            group_bytes: w.group_bytes,
            rows: w.rows,
            rows_as_stored,
        }
    }

    /// Groups of a decoded type with all activation rows: each group is decoded once.
    ///
    /// # Safety
    /// No other task writes these groups' outputs.
    unsafe fn run_decoded(&self, rows: &StoredRows, groups: Range<usize>) {
        DECODED.with_borrow_mut(|decoded| {
            let len = self.args.cols * LANES;
            decoded.resize(decoded.len().max(len), 0.0);
            for g in groups {
                // SAFETY: the group lies within the packed data; `args_of` is as in `run`, and the
                // kernel of f32 reads `len` values.
                unsafe {
                    let mut args = self.args_of(g..g + 1, 0..self.args.end);
                    let group = std::slice::from_raw_parts(args.weights, self.group_bytes);
                    rows.decode(group, &mut decoded[..len]);
                    args.weights = decoded.as_ptr().cast();
                    let end = args.end;
                    for start in (0..end).step_by(ROW_BLOCK) {
                        (args.first, args.end) = (start, end.min(start + ROW_BLOCK));
                        (self.kernel)(args);
                    }
                }
            }
        });
    }

    /// Groups `first..first + count` with a block of activation rows.
    ///
    /// # Safety
    /// No other task writes these groups' outputs for the block.
    unsafe fn run(&self, block: usize, first: usize, count: usize) {
        let groups = first..self.groups.min(first + count);
        if let Some(rows) = &self.rows_as_stored {
            // SAFETY: by the caller's promise; there is one block.
            return unsafe { self.run_decoded(rows, groups) };
        }
        // SAFETY: the groups lie within the packed data, their outputs within `out`; lengths were
        // checked by `products`, features by detection; a batch reads activations as they lie.
        unsafe {
            let Some((batch, x)) = &self.batch else {
                for start in (0..self.args.end).step_by(ROW_BLOCK) {
                    for g in groups.clone() {
                        (self.kernel)(self.args_of(g..g + 1, start..start + ROW_BLOCK));
                    }
                }
                return;
            };
            let start = block * self.block;
            let parts = groups.clone().step_by(TOGETHER).map(|g| {
                let neighbours = g..groups.end.min(g + TOGETHER);
                let args = self.args_of(neighbours.clone(), start..start + self.block);
                (args, neighbours.len())
            });
            batch.run(parts, *x, self.group_bytes);
        }
    }

    /// For neighbouring groups and a block of activation rows, as far as there are any.
    ///
    /// # Safety
    /// The groups are there.
    #[inline(always)]
    unsafe fn args_of(&self, groups: Range<usize>, rows: Range<usize>) -> GroupArgs<'a> {
        let mut args = self.args;
        args.first = rows.start;
        args.end = args.end.min(rows.end);
        args.lanes = (groups.len() * LANES).min(self.rows - groups.start * LANES);
        // SAFETY: by the caller's promise.
        unsafe {
            args.weights = args.weights.add(groups.start * self.group_bytes);
            args.out = args.out.add(groups.start * LANES);
        }
        args
    }
}

#[cfg(test)]
mod tests;
