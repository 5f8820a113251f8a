//! Activations as the integer kernels read them: integers with a scale per 32 columns.
//!
//! For chunk `c` of row `t`, with `m = max |x|` over its 32 values and `n` steps (below):
//! `scale = m / n`, `q[k] = round_ties_even(x[k] * (n / m))`, all in f32 (both 0 when `m` is not
//! above [`SMALLEST`] or not finite). The sums of `q` over each half of 16 go with it: weight types
//! with a zero offset or a min need them. One format serves every weight type, so a row is
//! quantised once however many matrices read it.
//!
//! [`Precision::Fifteen`] has n = 16256 = 127 * 128 and keeps `q` as two bytes,
//! `q = 128 high + low` with `high` in -127..=127 and `low` in -64..=63: a product takes two byte
//! products, and its rounding is too small to change an answer. [`Precision::Eight`] has n = 127
//! and keeps one byte. Where many rows meet a matrix, kernels may want the 15 bits whole
//! ([`Layout::Words`]): the same integers, in the same memory.

use paceline_base::KernelClass;

use crate::isa::{Isa, LANES, Words};

/// Columns that share a scale.
pub const CHUNK: usize = 32;

/// Chunks whose largest magnitude is not above this are taken as zero: below it `127 / m`
/// (or 16256 / m) overflows to infinity.
const SMALLEST: f32 = 1e-34;

/// How finely activations are rounded for integer kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// 127 steps: one byte, as other engines do. Changes the most probable token in 2 to 4 of 100
    /// positions (docs/numerics.md).
    Eight,
    /// 16256 steps: two bytes.
    Fifteen,
}

impl Precision {
    /// That of a kernel class. Where weights are floats, it does not matter.
    pub const fn of(class: KernelClass) -> Self {
        match class {
            KernelClass::CpuQ8 => Self::Eight,
            _ => Self::Fifteen,
        }
    }

    /// Bytes of an integer.
    const fn terms(self) -> usize {
        match self {
            Self::Eight => 1,
            Self::Fifteen => 2,
        }
    }

    /// Steps from zero to the largest magnitude of a chunk.
    pub(crate) const fn steps(self) -> f32 {
        match self {
            Self::Eight => 127.0,
            Self::Fifteen => 127.0 * 128.0,
        }
    }
}

/// How the integers of a row lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// The high bytes of a row (or its only ones), then the low ones, in the order of columns.
    Bytes,
    /// [`Precision::Fifteen`] in one i16 each. Of every four columns the middle two change places,
    /// as [`Words::widen`](crate::isa::Words::widen) gives weights.
    Words,
}

/// Columns between rows of integers beyond their own, whole chunks: rows of a power of two would
/// all fall into the same few sets of a cache.
const ROW_PADDING: usize = 64;

/// Scale and sums of one chunk of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Meta {
    /// Value of one step of `q`.
    pub(crate) scale: f32,
    /// Sum of `q` over each half of 16.
    pub(crate) sums: [i32; 2],
}

/// A batch of activation rows, `(rows, cols)`, as f32 and (where asked for) quantised.
///
/// Allocated once for the largest batch; [`resize`](Self::resize) only changes the row count.
#[derive(Clone, Debug)]
pub struct Activations {
    cols: usize,
    rows: usize,
    /// `(rows, cols)`
    values: Vec<f32>,
    precision: Option<Precision>,
    layout: Layout,
    /// `(terms, most rows, stride)` bytes, the high ones (or only ones) first, or as many words,
    /// `(most rows, stride)`; empty when no integer kernel reads this.
    q: Vec<i8>,
    /// `(most rows, stride / 32)`
    meta: Vec<Meta>,
}

impl Activations {
    /// Room for `max_rows` rows of `cols` columns; `precision` says how integer kernels will read
    /// them, `None` that none will.
    ///
    /// # Panics
    /// If there is a precision and `cols` is not a multiple of 32.
    pub fn new(max_rows: usize, cols: usize, precision: Option<Precision>) -> Self {
        assert!(
            precision.is_none() || cols.is_multiple_of(CHUNK),
            "{cols} columns in chunks"
        );
        let integers = if precision.is_some() { max_rows } else { 0 };
        let terms = precision.map_or(0, Precision::terms);
        Self {
            cols,
            rows: max_rows,
            values: vec![0.0; max_rows * cols],
            precision,
            layout: Layout::Bytes,
            q: vec![0; integers * terms * (cols + ROW_PADDING)],
            meta: vec![Meta::default(); integers * ((cols + ROW_PADDING) / CHUNK)],
        }
    }

    /// Sets the number of rows in use.
    ///
    /// # Panics
    /// If it exceeds the number given to [`new`](Self::new).
    pub fn resize(&mut self, rows: usize) {
        assert!(
            rows * self.cols <= self.values.len(),
            "{rows} rows exceed the buffer"
        );
        self.rows = rows;
    }

    /// Columns per row.
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Rows in use.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Row `t`, `(cols,)`.
    pub fn row(&self, t: usize) -> &[f32] {
        &self.values[t * self.cols..(t + 1) * self.cols]
    }

    /// All rows in use, `(rows, cols)`, to be filled and then
    /// [quantised](crate::Kernels::quantise).
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.rows * self.cols]
    }

    /// How integer kernels read this; `None` when they cannot.
    pub const fn precision(&self) -> Option<Precision> {
        self.precision
    }

    /// How the integers lie since the last [`writer`](Self::writer).
    pub(crate) const fn layout(&self) -> Layout {
        self.layout
    }

    /// Columns from a row's integers to those of the next.
    const fn stride(&self) -> usize {
        self.cols + ROW_PADDING
    }

    /// Bytes from the high bytes of all rows to the low ones.
    fn term_bytes(&self) -> usize {
        self.q.len() / self.precision.map_or(1, Precision::terms)
    }

    /// Writers for disjoint rows, for use from several threads, which leave the integers in
    /// `layout`.
    pub(crate) fn writer(&mut self, layout: Layout) -> Writer<'_> {
        self.layout = layout;
        Writer {
            cols: self.cols,
            rows: self.rows,
            stride: self.stride(),
            precision: self.precision,
            term_bytes: self.term_bytes(),
            values: self.values.as_mut_ptr(),
            q: self.q.as_mut_ptr(),
            meta: self.meta.as_mut_ptr(),
            _borrow: std::marker::PhantomData,
        }
    }

    /// A view whose row 0 is `first` and whose column 0 is `first_col`, which starts a chunk where
    /// there are chunks.
    pub(crate) fn view(&self, first: usize, first_col: usize) -> View<'_> {
        let from = |n: usize, len: usize| n.min(len); // absent buffers are empty
        let (value, integer) = (
            first * self.cols + first_col,
            first * self.stride() + first_col,
        );
        let (high, low) = match self.layout {
            Layout::Bytes => (integer, self.term_bytes() + integer),
            Layout::Words => (2 * integer, 0),
        };
        View {
            cols: self.cols,
            stride: self.stride(),
            values: self.values[from(value, self.values.len())..].as_ptr(),
            high: self.q[from(high, self.q.len())..].as_ptr(),
            low: self.q[from(low, self.q.len())..].as_ptr(),
            meta: self.meta[from(integer / CHUNK, self.meta.len())..].as_ptr(),
            _borrow: std::marker::PhantomData,
        }
    }

    #[cfg(test)]
    pub(crate) fn quantised_chunk(&self, t: usize, chunk: usize) -> (Vec<i32>, Meta) {
        let start = t * self.stride() + chunk * CHUNK;
        let word = |k: usize| {
            let at = 2 * (start + (k & !3 | [0, 2, 1, 3][k % 4]));
            i32::from(i16::from_ne_bytes([self.q[at] as u8, self.q[at + 1] as u8]))
        };
        let byte = |k: usize| match self.precision {
            Some(Precision::Fifteen) => {
                let low = self.q[self.term_bytes() + start + k];
                128 * i32::from(self.q[start + k]) + i32::from(low)
            }
            _ => i32::from(self.q[start + k]),
        };
        let q = match self.layout {
            Layout::Words => (0..CHUNK).map(word).collect(),
            Layout::Bytes => (0..CHUNK).map(byte).collect(),
        };
        (q, self.meta[start / CHUNK])
    }
}

/// Read access for kernels, with raw pointers to keep bounds checks out of inner loops.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    cols: usize,
    /// Columns from a row's integers to those of the next.
    pub(crate) stride: usize,
    values: *const f32,
    /// In [`Layout::Words`] the words.
    high: *const i8,
    low: *const i8,
    meta: *const Meta,
    _borrow: std::marker::PhantomData<&'a ()>,
}

// SAFETY: a view only reads, and borrows the activations for its lifetime.
unsafe impl Sync for View<'_> {}

impl View<'_> {
    /// The integers of chunk `c` of row `t` in [`Layout::Bytes`], `[high]` or `[high, low]`, and
    /// their scale and sums.
    ///
    /// # Safety
    /// Both lie within the activations, which have `TERMS` bytes for each integer.
    #[inline(always)]
    pub(crate) unsafe fn chunk<const TERMS: usize>(
        &self,
        t: usize,
        c: usize,
    ) -> ([*const i8; TERMS], Meta) {
        let start = t * self.stride + c * CHUNK;
        let mut bytes = [self.high; TERMS];
        // SAFETY: in bounds by the caller's promise.
        unsafe {
            bytes[0] = self.high.add(start);
            if TERMS == 2 {
                bytes[1] = self.low.add(start);
            }
            (bytes, *self.meta.add(start / CHUNK))
        }
    }

    /// The integers of chunk `c` of row `t` in [`Layout::Words`].
    ///
    /// # Safety
    /// Both lie within the activations.
    #[inline(always)]
    pub(crate) unsafe fn words(&self, t: usize, c: usize) -> *const i16 {
        // SAFETY: in bounds by the caller's promise.
        unsafe { self.high.cast::<i16>().add(t * self.stride + c * CHUNK) }
    }

    /// Scale and sums of chunk `c` of row `t`.
    ///
    /// # Safety
    /// Both lie within the activations.
    #[inline(always)]
    pub(crate) unsafe fn meta(&self, t: usize, c: usize) -> Meta {
        // SAFETY: in bounds by the caller's promise.
        unsafe { *self.meta.add((t * self.stride + c * CHUNK) / CHUNK) }
    }

    /// The f32 values of row `t`.
    ///
    /// # Safety
    /// `t` is a row in use.
    #[inline(always)]
    pub(crate) unsafe fn values(&self, t: usize) -> *const f32 {
        // SAFETY: in bounds by the caller's promise.
        unsafe { self.values.add(t * self.cols) }
    }
}

/// Write access by row; see [`Activations::writer`].
#[derive(Debug)]
pub struct Writer<'a> {
    cols: usize,
    stride: usize,
    rows: usize,
    precision: Option<Precision>,
    term_bytes: usize,
    values: *mut f32,
    q: *mut i8,
    meta: *mut Meta,
    _borrow: std::marker::PhantomData<&'a mut ()>,
}

// SAFETY: rows are disjoint, and `row`'s contract gives each to one thread at a time.
unsafe impl Sync for Writer<'_> {}

impl Writer<'_> {
    /// The f32 values of row `t`, `(cols,)`, to be filled and then
    /// [quantised](crate::Kernels::quantise_row).
    ///
    /// # Safety
    /// No other reference to row `t` lives at the same time.
    #[allow(clippy::mut_from_ref, reason = "rows are disjoint, see the contract")]
    pub unsafe fn row(&self, t: usize) -> &mut [f32] {
        assert!(t < self.rows, "row {t} of {}", self.rows);
        // SAFETY: in bounds; unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.values.add(t * self.cols), self.cols) }
    }

    /// Quantises row `t`, in [`Layout::Bytes`]; does nothing for activations that are kept as f32
    /// only.
    ///
    /// # Safety
    /// As [`Isa`] and [`row`](Self::row).
    #[inline(always)]
    pub(crate) unsafe fn quantise_row<S: Isa>(&self, t: usize) {
        assert!(t < self.rows, "row {t} of {}", self.rows);
        let Some(precision) = self.precision else {
            return;
        };
        // SAFETY: whole chunks lie within row `t`, their bytes where the view reads them.
        unsafe {
            let high = self.q.add(t * self.stride);
            match precision {
                Precision::Eight => self.quantise_chunks::<S>(t, precision, |at, q| {
                    S::store_i8(high.add(at), q);
                }),
                Precision::Fifteen => self.quantise_chunks::<S>(t, precision, |at, q| {
                    store_terms::<S>(high.add(at), high.add(self.term_bytes + at), q);
                }),
            }
        }
    }

    /// Quantises row `t`, in [`Layout::Words`]; for [`Precision::Fifteen`] only.
    ///
    /// # Safety
    /// As [`Isa`] and [`row`](Self::row).
    #[inline(always)]
    pub(crate) unsafe fn quantise_row_words<S: Words>(&self, t: usize) {
        assert!(
            t < self.rows && self.precision == Some(Precision::Fifteen),
            "row {t} of {} in words, {:?}",
            self.rows,
            self.precision
        );
        // SAFETY: as `quantise_row`; two bytes for each integer.
        unsafe {
            let words = self.q.cast::<i16>().add(t * self.stride);
            self.quantise_chunks::<S>(t, Precision::Fifteen, |at, q| {
                S::store_words(words.add(at), q);
            });
        }
    }

    /// Quantises the chunks of row `t`; `store(col, q)` writes sixteen integers.
    #[inline(always)]
    unsafe fn quantise_chunks<S: Isa>(
        &self,
        t: usize,
        precision: Precision,
        store: impl Fn(usize, S::I),
    ) {
        for c in 0..self.cols / CHUNK {
            // SAFETY: a whole chunk lies within row `t`.
            unsafe {
                let x = self.values.add(t * self.cols + c * CHUNK);
                let (meta, q) = quantise::<S>(x, precision);
                store(c * CHUNK, q[0]);
                store(c * CHUNK + LANES, q[1]);
                *self.meta.add((t * self.stride + c * CHUNK) / CHUNK) = meta;
            }
        }
    }
}

/// Quantises 32 values at `x`.
#[inline(always)]
unsafe fn quantise<S: Isa>(x: *const f32, precision: Precision) -> (Meta, [S::I; 2]) {
    // SAFETY: the pointer is good for 32 values; features by the caller.
    unsafe {
        let values = [S::load(x), S::load(x.add(LANES))];
        let largest = S::reduce_max(S::max(S::abs(values[0]), S::abs(values[1])));
        // Written so that NaN counts as too small: it gives zeros, not wild integers.
        if !(largest > SMALLEST && largest.is_finite()) {
            return (Meta::default(), [S::splat_i(0); 2]);
        }
        let inverse = S::splat(precision.steps() / largest);
        let q = [
            S::round(S::mul(values[0], inverse)),
            S::round(S::mul(values[1], inverse)),
        ];
        let meta = Meta {
            scale: largest / precision.steps(),
            sums: [S::reduce_add_i(q[0]), S::reduce_add_i(q[1])],
        };
        (meta, q)
    }
}

/// Stores 16 integers as a high and a low byte each.
#[inline(always)]
unsafe fn store_terms<S: Isa>(high_at: *mut i8, low_at: *mut i8, q: S::I) {
    // SAFETY: passed on.
    unsafe {
        let high = S::sar7_i(S::add_i(q, S::splat_i(64)));
        S::store_i8(high_at, high);
        // q - 128 high, as q + 128 (-high): the trait has no subtraction.
        let low = S::add_i(q, S::mul_i(high, S::splat_i(-128)));
        S::store_i8(low_at, low);
    }
}
