//! Activations as the integer kernels read them: integers with a scale per *span* of columns.
//!
//! A span of row `t` has `m = max |x|` over its values, and `n` steps (below). Then `scale = m / n`
//! and `q[k] = round_ties_even(x[k] * (n / m))`, all in f32. Both are 0 when `m` is not above 1e-34
//! or not finite. The sums of `q` over each half chunk of 16 go with it: weight types with a zero
//! offset or a min need them.
//!
//! A span has 256 columns, or as many as divide that and the leaves of the products that will read
//! them ([`crate::packed::span`]). So a rank knows all of each span. The last may have fewer
//! columns. A row is quantised once however many matrices read it.
//!
//! [`Precision::Fifteen`] has n = 16256 = 127 * 128 and keeps `q` as two bytes. They are
//! `q = 128 high + low` with `high` in -127..=127 and `low` in -64..=63. A product takes two byte
//! products, and its rounding is too small to change an answer. [`Precision::Eight`] has n = 127
//! and keeps one byte.

use crate::batch::rows::{PanelRows, PanelWriter, RowFormat};
use crate::isa::{Isa, LANES};
use crate::memory::OffsetBuffer;
use crate::packing::span;
pub use crate::quantisation::{CHUNK, Precision};
use crate::quantisation::{Meta, QuantisedView, Rounding};
use crate::rounding::round;

/// Forms of activations that products read in addition to f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OperandForms {
    /// Integers, so fine.
    pub(crate) integers: Option<Precision>,
    /// Columns that share a scale.
    pub(crate) span: usize,
    /// Copies of integers for panels, by [`RowFormat`].
    pub(crate) panels: [bool; RowFormat::ALL.len()],
    /// Values rounded to bf16.
    pub(crate) rounded: bool,
}

/// A batch of activation rows, `(rows, cols)`, as f32 and (on request) quantised.
///
/// Allocated once for the largest batch; [`resize`](Self::resize) only changes the row count.
#[derive(Debug)]
pub struct Activations {
    cols: usize,
    rows: usize,
    span: usize,
    /// `(rows, cols)`
    values: Vec<f32>,
    precision: Option<Precision>,
    /// `(rows, cols)`; the high bytes, or all of `q`; empty when no integer kernel reads this.
    high: OffsetBuffer<i8>,
    /// `(rows, cols)`; the low bytes; empty but for [`Precision::Fifteen`].
    low: OffsetBuffer<i8>,
    /// `(rows, cols / 32)`
    meta: OffsetBuffer<Meta>,
    /// `(rows, cols)`, bits of bf16; empty when no product reads them.
    rounded: Vec<u16>,
    /// The same integers once more, when the rows are many; no room where no product reads them.
    panel_rows: [PanelRows; RowFormat::ALL.len()],
}

impl Activations {
    /// Room for `max_rows` rows of `cols` columns, for products with any matrix whose leaves have
    /// `leaf_cols` columns. 0 means one leaf, as in [`PackOptions`](crate::PackOptions).
    /// `precision` is that of the integer kernels; `None` if none reads the rows. For known
    /// matrices, [`Kernels::activations`](crate::Kernels::activations) makes only the forms that
    /// they need.
    ///
    /// # Panics
    /// If there is a precision and `cols` is not a multiple of 32.
    pub fn new(
        max_rows: usize,
        cols: usize,
        leaf_cols: usize,
        precision: Option<Precision>,
    ) -> Self {
        let reads = OperandForms {
            integers: precision,
            span: span(leaf_cols, precision.unwrap_or(Precision::Fifteen)),
            panels: RowFormat::ALL.map(|form| precision == Some(form.precision())),
            rounded: precision == Some(Precision::Eight),
        };
        Self::with(max_rows, cols, reads)
    }

    /// Like [`new`](Self::new), with the given operand forms.
    pub(crate) fn with(max_rows: usize, cols: usize, reads: OperandForms) -> Self {
        let precision = reads.integers;
        assert!(
            precision.is_none() || cols.is_multiple_of(CHUNK),
            "{cols} columns in chunks"
        );
        let fifteen = precision == Some(Precision::Fifteen);
        let len = |wanted: bool| if wanted { max_rows * cols } else { 0 };
        // A row's three parts take sets of the first cache side by side, each on its own page.
        let place = |parts: usize| (parts * cols).next_multiple_of(64);
        Self {
            cols,
            rows: max_rows,
            span: reads.span,
            values: vec![0.0; max_rows * cols],
            precision,
            high: OffsetBuffer::new(len(precision.is_some()), 0),
            low: OffsetBuffer::new(len(fifteen), place(1)),
            meta: OffsetBuffer::new(len(precision.is_some()) / CHUNK, place(2)),
            rounded: vec![0; len(reads.rounded)],
            panel_rows: RowFormat::ALL.map(|form| {
                let wanted = reads.panels[form as usize];
                PanelRows::new(if wanted { max_rows } else { 0 }, cols, reads.span, form)
            }),
        }
    }

    /// Sets the number of rows in use.
    ///
    /// # Panics
    /// If it exceeds the number given to [`new`](Self::new).
    pub fn resize(&mut self, rows: usize) {
        assert!(
            rows.saturating_mul(self.cols) <= self.values.len(),
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

    /// Columns that share a scale.
    pub const fn span(&self) -> usize {
        self.span
    }

    /// Row `t`, `(cols,)`.
    pub fn row(&self, t: usize) -> &[f32] {
        &self.values[t * self.cols..(t + 1) * self.cols]
    }

    /// All rows in use, `(rows, cols)`.
    pub fn values(&self) -> &[f32] {
        &self.values[..self.rows * self.cols]
    }

    /// All rows in use, `(rows, cols)`, to be filled and then
    /// [quantised](crate::Kernels::quantise).
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.rows * self.cols]
    }

    /// Precision of the integers; `None` without integers.
    pub const fn precision(&self) -> Option<Precision> {
        self.precision
    }

    /// Whether there are values rounded to bf16.
    pub(crate) const fn has_rounded(&self) -> bool {
        !self.rounded.is_empty()
    }

    /// Writers for disjoint rows, for use from several threads.
    pub fn writer(&mut self) -> ActivationWriter<'_> {
        self.writers([false; RowFormat::ALL.len()]).0
    }

    /// Like [`writer`](Self::writer), with writers of the forms that panels read. The first writer
    /// does not quantise rows that lie in [tiles](RowFormat::tiled).
    pub(crate) fn writers(
        &mut self,
        forms: [bool; RowFormat::ALL.len()],
    ) -> (
        ActivationWriter<'_>,
        [PanelWriter<'_>; RowFormat::ALL.len()],
    ) {
        let instead = RowFormat::ALL
            .iter()
            .any(|&form| forms[form as usize] && form.tiled());
        let writer = ActivationWriter {
            cols: self.cols,
            rows: self.rows,
            span: self.span,
            precision: self.precision.filter(|_| !instead),
            values: self.values.as_mut_ptr(),
            high: self.high.as_mut_ptr(),
            low: self.low.as_mut_ptr(),
            meta: self.meta.as_mut_ptr(),
            rounded: self.has_rounded().then_some(self.rounded.as_mut_ptr()),
            _borrow: std::marker::PhantomData,
        };
        let from = QuantisedView {
            cols: writer.cols,
            values: writer.values,
            high: writer.high,
            low: writer.low,
            meta: writer.meta,
            _borrow: std::marker::PhantomData,
        };
        let (cols, mut forms) = (self.cols, forms.into_iter());
        let rows = self.panel_rows.each_mut();
        let copies = rows.map(|rows| rows.writer(from, cols, forms.next() == Some(true)));
        (writer, copies)
    }

    /// The copies for panels in a form.
    pub(crate) const fn panel_rows(&self, form: RowFormat) -> &PanelRows {
        &self.panel_rows[form as usize]
    }

    /// A view whose column 0 is `first_col`, which starts a chunk where there are chunks.
    pub(crate) fn view(&self, first_col: usize) -> QuantisedView<'_> {
        let from = |n: usize, len: usize| n.min(len); // absent buffers are empty
        QuantisedView {
            cols: self.cols,
            values: self.values[from(first_col, self.values.len())..].as_ptr(),
            high: self.high[from(first_col, self.high.len())..].as_ptr(),
            low: self.low[from(first_col, self.low.len())..].as_ptr(),
            meta: self.meta[from(first_col / CHUNK, self.meta.len())..].as_ptr(),
            _borrow: std::marker::PhantomData,
        }
    }

    /// Like [`view`](Self::view), with the values rounded to bf16; `None` without that form.
    pub(crate) fn rounded_view(&self, first_col: usize) -> Option<QuantisedView<'_>> {
        let rounded = self.rounded.get(first_col..)?;
        self.has_rounded().then(|| QuantisedView {
            values: rounded.as_ptr().cast(),
            ..self.view(first_col)
        })
    }

    #[cfg(test)]
    pub(crate) fn quantised_chunk(&self, t: usize, chunk: usize) -> (Vec<i32>, Meta) {
        let start = t * self.cols + chunk * CHUNK;
        let high = self.high[start..start + CHUNK]
            .iter()
            .map(|&q| i32::from(q));
        let q = match self.precision {
            Some(Precision::Fifteen) => {
                let low = &self.low[start..start + CHUNK];
                high.zip(low)
                    .map(|(high, &low)| 128 * high + i32::from(low))
                    .collect()
            }
            _ => high.collect(),
        };
        (q, self.meta[start / CHUNK])
    }
}

/// Write access by row; see [`Activations::writer`].
#[derive(Debug)]
pub struct ActivationWriter<'a> {
    cols: usize,
    rows: usize,
    span: usize,
    precision: Option<Precision>,
    values: *mut f32,
    high: *mut i8,
    low: *mut i8,
    meta: *mut Meta,
    rounded: Option<*mut u16>,
    _borrow: std::marker::PhantomData<&'a mut ()>,
}

// SAFETY: rows are disjoint, and `row`'s contract gives each to one thread at a time.
unsafe impl Sync for ActivationWriter<'_> {}

impl ActivationWriter<'_> {
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

    /// Quantises or rounds row `t`; does nothing for activations that are kept as f32 only.
    ///
    /// # Safety
    /// See [`Isa`] and [`row`](Self::row).
    #[inline(always)]
    pub(crate) unsafe fn quantise_row<S: Isa>(&self, t: usize) {
        assert!(t < self.rows, "row {t} of {}", self.rows);
        if let Some(rounded) = self.rounded {
            for k in t * self.cols..(t + 1) * self.cols {
                // SAFETY: a value of row `t`.
                unsafe { *rounded.add(k) = round(*self.values.add(k)) };
            }
        }
        let Some(precision) = self.precision else {
            return;
        };
        for first in (0..self.cols).step_by(self.span) {
            let start = t * self.cols + first;
            // SAFETY: whole chunks lie within row `t`.
            unsafe {
                let span = ColumnSpan {
                    x: self.values.add(start),
                    cols: self.span.min(self.cols - first),
                    high: self.high.add(start),
                    meta: self.meta.add(start / CHUNK),
                };
                match precision {
                    Precision::Eight => span.quantise::<S, 1>(span.high, precision),
                    Precision::Fifteen => span.quantise::<S, 2>(self.low.add(start), precision),
                }
            }
        }
    }
}

/// Columns to quantise, and where to.
struct ColumnSpan {
    x: *const f32,
    /// A multiple of a chunk's columns.
    cols: usize,
    high: *mut i8,
    meta: *mut Meta,
}

impl ColumnSpan {
    /// Quantises to one byte each, or to two.
    #[inline(always)]
    unsafe fn quantise<S: Isa, const TERMS: usize>(&self, low: *mut i8, precision: Precision) {
        // SAFETY: all pointers are good for the columns; features by the caller.
        unsafe {
            let rounding = Rounding::of::<S>(self.x, self.cols, precision);
            for c in 0..self.cols / CHUNK {
                let mut sums = [[0; 2]; 2];
                let mut half = 0;
                while half < 2 {
                    let at = c * CHUNK + half * LANES;
                    let q = rounding.integers::<S>(self.x.add(at));
                    sums[half] = store_terms::<S, TERMS>(q, [self.high, low], at);
                    half += 1;
                }
                let whole = [sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]];
                let eight_less = [-8 * whole[0], -8 * whole[1]];
                *self.meta.add(c) = Meta {
                    scale: rounding.scale,
                    sums,
                    small: [whole[0] & S::SMALL, whole[1] & S::SMALL],
                    eight_less,
                };
            }
        }
    }
}

/// The high and the low bytes of integers of 15 bits, each in 32.
///
/// # Safety
/// Features of `S`.
#[inline(always)]
unsafe fn halves<S: Isa>(q: S::I) -> [S::I; 2] {
    // SAFETY: by the caller's promise.
    unsafe {
        let above = S::add_i(q, S::splat_i(64));
        let low = S::add_i(S::and_i(above, S::splat_i(127)), S::splat_i(-64));
        [S::sar7_i(above), low]
    }
}

/// Stores 16 integers as one byte each, or as a high and a low byte; the sums of these.
#[inline(always)]
unsafe fn store_terms<S: Isa, const TERMS: usize>(
    q: S::I,
    bytes: [*mut i8; 2],
    at: usize,
) -> [i32; 2] {
    // SAFETY: passed on.
    unsafe {
        if TERMS == 1 {
            S::store_i8(bytes[0].add(at), q);
            return [S::reduce_add_i(q), 0];
        }
        let [high, low] = halves::<S>(q);
        S::store_i8(bytes[0].add(at), high);
        S::store_i8(bytes[1].add(at), low);
        [S::reduce_add_i(high), S::reduce_add_i(low)]
    }
}
