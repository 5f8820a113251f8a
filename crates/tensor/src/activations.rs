//! Activations as the integer kernels read them: 8-bit integers with a scale per 32 columns.
//!
//! For chunk `c` of row `t`, with `m = max |x|` over its 32 values:
//! `scale = m / 127`, `q[k] = round_ties_even(x[k] * (127 / m))`, all in f32 (both 0 when `m` is
//! not above [`SMALLEST`]). The sums of `q` over each half of 16 go with it: weight types with a
//! zero offset or a min need them. One format serves every weight type, so a row is quantised
//! once however many matrices read it.

use crate::isa::{self, Isa, LANES};

/// Columns that share a scale.
pub const CHUNK: usize = 32;

/// Chunks whose largest magnitude is not above this are taken as zero: below it `127 / m`
/// overflows to infinity.
const SMALLEST: f32 = 1e-36;

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
    /// `(rows, cols)`; empty when no integer kernel reads this.
    q: Vec<i8>,
    /// `(rows, cols / 32)`
    meta: Vec<Meta>,
}

impl Activations {
    /// Room for `max_rows` rows of `cols` columns; `quantised` says whether integer kernels will
    /// read them.
    ///
    /// # Panics
    /// If `quantised` and `cols` is not a multiple of 32.
    pub fn new(max_rows: usize, cols: usize, quantised: bool) -> Self {
        assert!(
            !quantised || cols.is_multiple_of(CHUNK),
            "{cols} columns are not whole chunks"
        );
        let integers = if quantised { max_rows * cols } else { 0 };
        Self {
            cols,
            rows: max_rows,
            values: vec![0.0; max_rows * cols],
            q: vec![0; integers],
            meta: vec![Meta::default(); integers / CHUNK],
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

    /// Whether integer kernels can read this.
    pub const fn is_quantised(&self) -> bool {
        !self.q.is_empty()
    }

    /// Writers for disjoint rows, for use from several threads.
    pub fn writer(&mut self) -> Writer<'_> {
        Writer {
            cols: self.cols,
            rows: self.rows,
            quantised: self.is_quantised(),
            values: self.values.as_mut_ptr(),
            q: self.q.as_mut_ptr(),
            meta: self.meta.as_mut_ptr(),
            _borrow: std::marker::PhantomData,
        }
    }

    pub(crate) fn view(&self) -> View<'_> {
        View {
            cols: self.cols,
            values: self.values.as_ptr(),
            q: self.q.as_ptr(),
            meta: self.meta.as_ptr(),
            _borrow: std::marker::PhantomData,
        }
    }

    #[cfg(test)]
    pub(crate) fn quantised_chunk(&self, t: usize, chunk: usize) -> (&[i8], Meta) {
        let start = t * self.cols + chunk * CHUNK;
        (&self.q[start..start + CHUNK], self.meta[start / CHUNK])
    }
}

/// Read access for kernels, with raw pointers to keep bounds checks out of inner loops.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    cols: usize,
    values: *const f32,
    q: *const i8,
    meta: *const Meta,
    _borrow: std::marker::PhantomData<&'a ()>,
}

// SAFETY: a view only reads, and borrows the activations for its lifetime.
unsafe impl Sync for View<'_> {}

impl View<'_> {
    /// The integers and scale of chunk `c` of row `t`.
    ///
    /// # Safety
    /// Both lie within the activations, which are quantised.
    #[inline(always)]
    pub(crate) unsafe fn chunk(&self, t: usize, c: usize) -> (*const i8, Meta) {
        let start = t * self.cols + c * CHUNK;
        // SAFETY: in bounds by the caller's promise.
        unsafe { (self.q.add(start), *self.meta.add(start / CHUNK)) }
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
    rows: usize,
    quantised: bool,
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

    /// Quantises row `t`; does nothing for activations that are kept as f32 only.
    ///
    /// # Safety
    /// As [`Isa`] and [`row`](Self::row).
    #[inline(always)]
    pub(crate) unsafe fn quantise_row<S: Isa>(&self, t: usize) {
        assert!(t < self.rows, "row {t} of {}", self.rows);
        if !self.quantised {
            return;
        }
        for c in 0..self.cols / CHUNK {
            let start = t * self.cols + c * CHUNK;
            // SAFETY: a whole chunk lies within row `t`.
            unsafe {
                *self.meta.add(start / CHUNK) =
                    quantise_chunk::<S>(self.values.add(start), self.q.add(start));
            }
        }
    }
}

/// Quantises 32 values at `x` into 32 bytes at `q`.
#[inline(always)]
unsafe fn quantise_chunk<S: Isa>(x: *const f32, q: *mut i8) -> Meta {
    // SAFETY: both pointers are good for 32 elements; features by the caller.
    unsafe {
        let (low, high) = (S::load(x), S::load(x.add(LANES)));
        let largest = isa::reduce_max::<S>(S::max(S::abs(low), S::abs(high)));
        // Written so that NaN counts as too small: it gives zeros, not undefined casts.
        let usable = largest > SMALLEST && largest.is_finite();
        let inverse = S::splat(if usable { 127.0 / largest } else { 0.0 });
        S::store_i8(
            q,
            if usable {
                S::mul(low, inverse)
            } else {
                inverse
            },
        );
        S::store_i8(
            q.add(LANES),
            if usable {
                S::mul(high, inverse)
            } else {
                inverse
            },
        );
        let scale = if usable { largest / 127.0 } else { 0.0 };
        Meta {
            scale,
            sums: [sum16(q), sum16(q.add(LANES))],
        }
    }
}

#[inline(always)]
unsafe fn sum16(q: *const i8) -> i32 {
    // SAFETY: 16 bytes at `q`.
    let bytes = unsafe { q.cast::<[i8; LANES]>().read_unaligned() };
    bytes.iter().map(|&b| i32::from(b)).sum()
}
