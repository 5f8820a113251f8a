//! Products of f32 matrices for training: each element is one chain.
//!
//! **Definition** ([`naive`]). An element of `C = A B` is one chain of fused multiply-adds over the
//! inner dimension in order. First comes `c = fma(a[i][0], b[0][j], c)`, then 1, 2 and so on. The
//! chain begins with 0 or with what `C` holds. No partial sums are made, so blocking, threads and
//! instruction set cannot show in a bit. Speed comes from many chains at once: a tile of rows by
//! lanes stays in registers.
//!
//! Operands are given by strides, so that `X W^T`, `dY W` and `dY^T X` are one kernel.

use std::cell::RefCell;

use crate::Kernels;
use crate::dispatch::InstructionSet;
#[cfg(target_arch = "aarch64")]
use crate::isa::Neon;
#[cfg(target_arch = "x86_64")]
use crate::isa::{Avx2, Avx512};
use crate::isa::{Isa, LANES, Scalar};

/// Inner columns of a block: a panel of 32 lanes by 256 is 32 KiB, which the first cache holds.
const BLOCK_K: usize = 256;

/// Most rows and most lanes of a tile, over all instruction sets.
const ROWS_MAX: usize = 12;
const COLS_MAX: usize = 2 * LANES;

/// A matrix by its strides: element `(i, j)` is `values[i * row + j * col]`.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    pub values: &'a [f32],
    /// Distance of two rows.
    pub row: usize,
    /// Distance of two columns.
    pub col: usize,
}

impl<'a> Strided<'a> {
    /// Rows of `cols` elements one after the other.
    pub const fn rows(values: &'a [f32], cols: usize) -> Self {
        Self {
            values,
            row: cols,
            col: 1,
        }
    }

    /// The transpose.
    #[must_use]
    pub const fn t(self) -> Self {
        Self {
            values: self.values,
            row: self.col,
            col: self.row,
        }
    }

    /// Whether `(rows, cols)` lie within the values.
    fn holds(&self, rows: usize, cols: usize) -> bool {
        let last = rows.saturating_sub(1) * self.row + cols.saturating_sub(1) * self.col;
        rows == 0 || cols == 0 || last < self.values.len()
    }
}

/// Sizes of a product `(m, k) (k, n)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// The inner dimension.
    pub k: usize,
}

/// Output of a product: `(m, n)` with rows `stride` apart.
#[derive(Debug)]
pub struct ProductOutput<'a> {
    /// The elements, from the first of the first row on.
    pub values: &'a mut [f32],
    /// Distance of two rows, at least `n`.
    pub stride: usize,
    /// Whether chains continue from the stored values instead of starting at 0.
    pub goes_on: bool,
}

impl<'a> ProductOutput<'a> {
    /// Rows of `cols` elements, whose chains begin at 0.
    pub const fn rows(values: &'a mut [f32], cols: usize) -> Self {
        Self {
            values,
            stride: cols,
            goes_on: false,
        }
    }

    /// The same, going on from what is there.
    #[must_use]
    pub const fn more(self) -> Self {
        Self {
            values: self.values,
            stride: self.stride,
            goes_on: true,
        }
    }
}

/// The definition: see the module.
///
/// # Panics
/// If an operand or the target is too short.
pub fn naive(sizes: Sizes, a: Strided<'_>, b: Strided<'_>, c: ProductOutput<'_>) {
    check(sizes, a, b, &c);
    for i in 0..sizes.m {
        for j in 0..sizes.n {
            let element = &mut c.values[i * c.stride + j];
            let start = if c.goes_on { *element } else { 0.0 };
            *element = (0..sizes.k).fold(start, |sum, p| {
                let a = a.values[i * a.row + p * a.col];
                a.mul_add(b.values[p * b.row + j * b.col], sum)
            });
        }
    }
}

impl Kernels {
    /// `C = A B` or `C += A B` by chains, on all threads.
    ///
    /// # Panics
    /// If an operand or the target is too short.
    pub fn chains(&self, sizes: Sizes, a: Strided<'_>, b: Strided<'_>, c: ProductOutput<'_>) {
        self.product(sizes, (a, b), c, true);
    }

    /// The same on the calling thread alone: for tasks of the pool.
    ///
    /// # Panics
    /// The errors of [`chains`](Self::chains).
    pub fn chains_here(&self, sizes: Sizes, a: Strided<'_>, b: Strided<'_>, c: ProductOutput<'_>) {
        self.product(sizes, (a, b), c, false);
    }

    fn product(
        &self,
        sizes: Sizes,
        (a, b): (Strided<'_>, Strided<'_>),
        c: ProductOutput<'_>,
        on_all: bool,
    ) {
        check(sizes, a, b, &c);
        let Sizes { m, n, k } = sizes;
        if m == 0 || n == 0 {
            return;
        }
        let kernel = Kernel::of(self.instruction_set());
        let mut packed = PACKED.take();
        packed.resize(m.next_multiple_of(kernel.rows) * k, 0.0);
        // SAFETY: the instruction set was detected when `Kernels` was made.
        unsafe { (kernel.pack)(a, (m, k), &mut packed) };
        let job = ChainProduct {
            sizes,
            a: &packed,
            b,
            c: c.values.as_mut_ptr(),
            stride: c.stride,
            goes_on: c.goes_on,
            rows: kernel.rows,
        };
        let panels = n.div_ceil(kernel.cols);
        // SAFETY: `check` has found the target long enough; a panel is one task's; the
        // instruction set was detected when `Kernels` was made.
        let task = |i: usize| unsafe { (kernel.panel)(&job, i * kernel.cols) };
        if on_all {
            self.pool().run(panels, &task);
        } else {
            (0..panels).for_each(task);
        }
        if packed.capacity() <= PACKED_KEPT {
            PACKED.set(packed);
        }
    }
}

fn check(sizes: Sizes, a: Strided<'_>, b: Strided<'_>, c: &ProductOutput<'_>) {
    let Sizes { m, n, k } = sizes;
    assert!(a.holds(m, k), "A is shorter than {m} x {k}");
    assert!(b.holds(k, n), "B is shorter than {k} x {n}");
    let room = m == 0 || n == 0 || (m - 1) * c.stride + n <= c.values.len();
    assert!(
        room && n <= c.stride.max(n * usize::from(m < 2)),
        "C is shorter than {m} x {n}"
    );
}

/// Rows of a matrix, turned: `W` lanes for each of the columns `ks`. Lanes behind the last row keep
/// what they have.
#[inline(always)]
fn pack<const W: usize>(
    x: Strided<'_>,
    rows: std::ops::Range<usize>,
    ks: std::ops::Range<usize>,
    out: &mut [f32],
) {
    let n = rows.len();
    if x.row == 1 {
        for (out, k) in out.chunks_exact_mut(W).zip(ks) {
            let from = &x.values[k * x.col + rows.start..][..n];
            if n == W {
                out.copy_from_slice(&from[..W]); // of a known length: no call
            } else {
                out[..n].copy_from_slice(from);
            }
        }
        return;
    }
    let fours = if x.col == 1 { n / 4 * 4 } else { 0 };
    for first in (0..fours).step_by(4) {
        let start = (rows.start + first) * x.row + ks.start;
        let line = |i: usize| &x.values[start + i * x.row..][..ks.len()];
        turn([line(0), line(1), line(2), line(3)], &mut out[first..], W);
    }
    for lane in fours..n {
        let from = (rows.start + lane) * x.row;
        for (i, k) in ks.clone().enumerate() {
            out[i * W + lane] = x.values[from + k * x.col];
        }
    }
}

/// Four lines as columns that are `width` apart, by squares of four, which the compiler turns in
/// registers.
#[inline(always)]
fn turn(lines: [&[f32]; 4], out: &mut [f32], width: usize) {
    let squares = lines.map(|line| line.as_chunks::<4>());
    let [a, b, c, d] = squares.map(|(squares, _)| squares);
    let whole = a.iter().zip(b).zip(c).zip(d);
    for (at, (((a, b), c), d)) in whole.enumerate() {
        for i in 0..4 {
            let place = &mut out[(4 * at + i) * width..][..4];
            place.copy_from_slice(&[a[i], b[i], c[i], d[i]]);
        }
    }
    for (lane, (_, rest)) in squares.iter().enumerate() {
        for (i, value) in rest.iter().enumerate() {
            out[(4 * a.len() + i) * width + lane] = *value;
        }
    }
}

/// Panels of `ROWS` rows, each `(k, ROWS)`, rows behind the last being 0.
#[inline(always)]
fn pack_panels<const ROWS: usize>(a: Strided<'_>, (m, k): (usize, usize), out: &mut [f32]) {
    let panels = out.chunks_exact_mut((ROWS * k).max(1));
    for (panel, first) in panels.zip((0..m).step_by(ROWS)) {
        let rows = first..m.min(first + ROWS);
        if rows.len() < ROWS {
            panel.fill(0.0);
        }
        pack::<ROWS>(a, rows, 0..k, panel);
    }
}

thread_local! {
    /// Packed operands of this thread's last product. Products of a training step have few sizes,
    /// and new memory costs a page fault for each 4 KiB.
    static PACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Most floats that are kept there: 4 MiB, 1,024 rows of 1,024.
const PACKED_KEPT: usize = 1 << 20;

/// A product under way.
struct ChainProduct<'a> {
    sizes: Sizes,
    a: &'a [f32],
    b: Strided<'a>,
    c: *mut f32,
    stride: usize,
    goes_on: bool,
    rows: usize,
}

// SAFETY: tasks write disjoint columns of `c`.
unsafe impl Sync for ChainProduct<'_> {}

/// The tile of an instruction set, and what computes a panel of columns.
#[derive(Clone, Copy)]
struct Kernel {
    rows: usize,
    cols: usize,
    panel: unsafe fn(&ChainProduct<'_>, usize),
    pack: unsafe fn(Strided<'_>, (usize, usize), &mut [f32]),
}

impl Kernel {
    fn of(set: InstructionSet) -> Self {
        match set {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Vnni | InstructionSet::AmxInt8 => Self {
                rows: 12,
                cols: 2 * LANES,
                panel: avx512::panel,
                pack: avx512::pack,
            },
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 | InstructionSet::AvxVnni => Self {
                rows: 6,
                cols: LANES,
                panel: avx2::panel,
                pack: avx2::pack,
            },
            #[cfg(target_arch = "aarch64")]
            InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => Self {
                rows: 6,
                cols: LANES,
                panel: neon::panel,
                pack: neon::pack,
            },
            _ => Self {
                rows: 4,
                cols: LANES,
                panel: scalar::panel,
                pack: scalar::pack,
            },
        }
    }
}

macro_rules! entry {
    ($name:ident, [$($feature:literal)?], $isa:ty, $rows:literal, $lanes:literal) => {
        mod $name {
            #[allow(clippy::wildcard_imports, reason = "a macro's module")]
            use super::*;

            /// # Safety
            /// The CPU has the features; see [`super::panel`].
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn panel(job: &ChainProduct<'_>, first: usize) {
                // SAFETY: passed on.
                unsafe { super::panel::<$isa, $rows, $lanes>(job, first) }
            }

            /// # Safety
            /// The CPU has the features.
            $(#[target_feature(enable = $feature)])?
            pub(super) unsafe fn pack(a: Strided<'_>, size: (usize, usize), out: &mut [f32]) {
                pack_panels::<$rows>(a, size, out);
            }
        }
    };
}

entry!(scalar, [], Scalar, 4, 1);
#[cfg(target_arch = "x86_64")]
entry!(avx2, ["avx2,fma,f16c"], Avx2, 6, 1);
#[cfg(target_arch = "x86_64")]
entry!(
    avx512,
    ["avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c"],
    Avx512,
    12,
    2
);
#[cfg(target_arch = "aarch64")]
entry!(neon, ["neon,dotprod"], Neon, 6, 1);

/// The columns from `first` on, as many as a tile has.
///
/// # Safety
/// `job.c` has room for the product, and no other task writes these columns; features of `S`.
#[inline(always)]
unsafe fn panel<S: Isa, const ROWS: usize, const REGS: usize>(
    job: &ChainProduct<'_>,
    first: usize,
) {
    let Sizes { m, n, k } = job.sizes;
    let width = REGS * LANES;
    let cols = (n - first).min(width);
    let mut b = vec![0.0f32; BLOCK_K.min(k.max(1)) * width];
    let mut start = 0;
    loop {
        let len = (k - start).min(BLOCK_K);
        let (columns, ks) = (first..first + cols, start..start + len);
        // An array's length cannot be computed from a parameter.
        match REGS {
            1 => pack::<LANES>(job.b.t(), columns, ks, &mut b),
            _ => pack::<COLS_MAX>(job.b.t(), columns, ks, &mut b),
        }
        let goes_on = job.goes_on || start > 0;
        let mut i = 0;
        while i < m {
            let a = &job.a[i / job.rows * job.rows * k + start * ROWS..];
            let rows = (m - i).min(ROWS);
            // SAFETY: within the target by the caller's promise; `a` and `b` have `len` panels.
            unsafe {
                let c = job.c.add(i * job.stride + first);
                if rows == ROWS && cols == width {
                    tile::<S, ROWS, REGS>(len, (a, &b), c, job.stride, goes_on);
                } else {
                    let at = Edge {
                        c,
                        stride: job.stride,
                        rows,
                        cols,
                    };
                    edge::<S, ROWS, REGS>(len, (a, &b), &at, goes_on);
                }
            }
            i += ROWS;
        }
        start += len;
        if start >= k {
            return;
        }
    }
}

/// A whole tile: `ROWS` rows by `REGS` registers.
///
/// # Safety
/// `a` has `k` columns of `ROWS`, `b` `k` rows of `REGS` registers, `c` a tile; features of `S`.
#[inline(always)]
unsafe fn tile<S: Isa, const ROWS: usize, const REGS: usize>(
    k: usize,
    (a, b): (&[f32], &[f32]),
    c: *mut f32,
    stride: usize,
    goes_on: bool,
) {
    debug_assert!(
        a.len() >= k * ROWS && b.len() >= k * REGS * LANES,
        "short panels"
    );
    // SAFETY: by the caller's promise.
    unsafe {
        let mut sums = [[S::splat(0.0); REGS]; ROWS];
        if goes_on {
            for (i, row) in sums.iter_mut().enumerate() {
                for (j, sum) in row.iter_mut().enumerate() {
                    *sum = S::load(c.add(i * stride + j * LANES));
                }
            }
        }
        let (mut a, mut b) = (a.as_ptr(), b.as_ptr());
        for _ in 0..k {
            let mut columns = [S::splat(0.0); REGS];
            for (j, column) in columns.iter_mut().enumerate() {
                *column = S::load(b.add(j * LANES));
            }
            for (i, row) in sums.iter_mut().enumerate() {
                let x = S::splat(*a.add(i));
                for (sum, column) in row.iter_mut().zip(&columns) {
                    *sum = S::fma(x, *column, *sum);
                }
            }
            a = a.add(ROWS);
            b = b.add(REGS * LANES);
        }
        for (i, row) in sums.iter().enumerate() {
            for (j, sum) in row.iter().enumerate() {
                S::store(c.add(i * stride + j * LANES), *sum);
            }
        }
    }
}

/// A part of a tile at the end of the rows or columns.
struct Edge {
    c: *mut f32,
    stride: usize,
    rows: usize,
    cols: usize,
}

/// A partial tile: only the first rows and columns are stored.
///
/// # Safety
/// See [`tile`], for the stored part.
#[inline(always)]
unsafe fn edge<S: Isa, const ROWS: usize, const REGS: usize>(
    k: usize,
    panels: (&[f32], &[f32]),
    at: &Edge,
    goes_on: bool,
) {
    let mut whole = [0.0f32; ROWS_MAX * COLS_MAX];
    let width = REGS * LANES;
    // SAFETY: `whole` holds a tile of any set; the part lies in the target.
    unsafe {
        if goes_on {
            for i in 0..at.rows {
                let row = std::slice::from_raw_parts(at.c.add(i * at.stride), at.cols);
                whole[i * width..][..at.cols].copy_from_slice(row);
            }
        }
        tile::<S, ROWS, REGS>(k, panels, whole.as_mut_ptr(), width, goes_on);
        for i in 0..at.rows {
            let row = std::slice::from_raw_parts_mut(at.c.add(i * at.stride), at.cols);
            row.copy_from_slice(&whole[i * width..][..at.cols]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            ((state >> 40) as f32 / 8_388_608.0 - 1.0) * 2f32.powi((state >> 33) as i32 % 7 - 3)
        };
        (0..n).map(|_| next()).collect()
    }

    /// All orders of operands, sizes around tiles and blocks, from 0 and going on.
    #[test]
    fn every_set_gives_the_bits_of_one_chain() {
        let sizes = [
            (1, 1, 1),
            (12, 32, 256),
            (13, 33, 257),
            (5, 100, 600),
            (30, 7, 0),
        ];
        for set in InstructionSet::available() {
            for threads in [1, 3] {
                let kernels = Kernels::with_set(set, threads).unwrap();
                for (m, n, k) in sizes {
                    for turned in 0..4 {
                        let (a, b) = (values(m * k, 1), values(k * n, 2));
                        let a = match turned & 1 {
                            0 => Strided::rows(&a, k),
                            _ => Strided::rows(&a, m).t(),
                        };
                        let b = match turned & 2 {
                            0 => Strided::rows(&b, n),
                            _ => Strided::rows(&b, k).t(),
                        };
                        for goes_on in [false, true] {
                            let (mut c, mut d) = (values(m * n, 3), values(m * n, 3));
                            let sizes = Sizes { m, n, k };
                            let at = |values| ProductOutput {
                                values,
                                stride: n,
                                goes_on,
                            };
                            naive(sizes, a, b, at(&mut c));
                            kernels.chains(sizes, a, b, at(&mut d));
                            let bits =
                                |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                            let case = format!("{set:?} {threads} {sizes:?} {turned} {goes_on}");
                            assert_eq!(bits(&c), bits(&d), "{case}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_part_of_wider_rows_is_left_alone_around() {
        let kernels = Kernels::new(1).unwrap();
        let (a, b) = (values(6, 1), values(6, 2));
        let mut c = [9.0; 10];
        let sizes = Sizes { m: 2, n: 2, k: 3 };
        let at = ProductOutput {
            values: &mut c[1..],
            stride: 5,
            goes_on: false,
        };
        kernels.chains(sizes, Strided::rows(&a, 3), Strided::rows(&b, 2), at);
        let touched: Vec<usize> = (0..10).filter(|i| c[*i] != 9.0).collect();
        assert_eq!(touched, [1, 2, 6, 7]);
    }
}
