//! Activation rows as panels meet them.
//!
//! Quantised once more, beside [`Activations`]' own integers: those stay as the kernels for few
//! rows read them, whose speed from memory hangs on their code.
//!
//! [`Activations`]: crate::Activations

use std::marker::PhantomData;

use crate::activations::{CHUNK, Meta, View};
use crate::isa::{LANES, Words};

/// How the integers of a row lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The high bytes of a row, those of all rows, then the low ones.
    Bytes,
    /// In one i16 each. Of every four columns the middle two change places, as [`Words::widen`]
    /// gives weights.
    Words,
}

/// Columns between rows beyond their own, whole chunks: rows of a power of two would all fall into
/// the same few sets of a cache.
const PADDING: usize = 64;

/// A batch of rows of 15-bit integers, in one of the forms.
#[derive(Clone, Debug)]
pub(crate) struct PanelRows {
    /// How the rows lie; `None` when those of the last batch were too few for panels.
    form: Option<Form>,
    /// Columns from a row to the next.
    stride: usize,
    /// `(2, most rows, stride)` bytes, the high ones first, or `(most rows, stride)` words. Zeros
    /// that are never written take no memory.
    q: Vec<i8>,
    /// `(most rows, stride / 32)`
    meta: Vec<Meta>,
}

impl PanelRows {
    /// Room for `max_rows` rows of `cols` columns, whole chunks; none for copies that nobody reads.
    pub(crate) fn new(max_rows: usize, cols: usize) -> Self {
        let stride = cols + PADDING;
        Self {
            form: None,
            stride,
            q: vec![0; 2 * max_rows * stride],
            meta: vec![Meta::default(); max_rows * stride / CHUNK],
        }
    }

    /// Whether there is room for copies.
    pub(crate) const fn wanted(&self) -> bool {
        !self.q.is_empty()
    }

    /// How the rows lie.
    pub(crate) const fn form(&self) -> Option<Form> {
        self.form
    }

    /// Copies of rows of `from`, whose length is `cols`, in the given form.
    pub(crate) fn writer<'a>(
        &'a mut self,
        from: View<'a>,
        cols: usize,
        form: Option<Form>,
    ) -> PanelWriter<'a> {
        self.form = form;
        PanelWriter {
            from,
            cols,
            stride: self.stride,
            low: self.q.len() / 2,
            q: self.q.as_mut_ptr(),
            meta: self.meta.as_mut_ptr(),
            _borrow: PhantomData,
        }
    }

    /// A view whose row 0 is `first` and whose column 0 is `first_col`, which starts a chunk.
    pub(crate) fn view(&self, first: usize, first_col: usize) -> PanelView<'_> {
        let at = first * self.stride + first_col;
        let bytes = match self.form {
            Some(Form::Words) => [2 * at, 0],
            Some(Form::Bytes) => [at, self.q.len() / 2 + at],
            None => [0; 2],
        };
        PanelView {
            stride: self.stride,
            bytes: bytes.map(|at| self.q[at..].as_ptr()),
            meta: self.meta[at / CHUNK..].as_ptr(),
            _borrow: PhantomData,
        }
    }
}

/// Read access for kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PanelView<'a> {
    /// Columns from a row to the next.
    pub(crate) stride: usize,
    /// High and low bytes; in [`Form::Words`] the first is the words.
    bytes: [*const i8; 2],
    meta: *const Meta,
    _borrow: PhantomData<&'a ()>,
}

// SAFETY: a view only reads, and borrows the rows for its lifetime.
unsafe impl Sync for PanelView<'_> {}

impl PanelView<'_> {
    /// The high and low bytes of chunk `c` of row `t`, of rows in [`Form::Bytes`].
    ///
    /// # Safety
    /// Both lie within the rows.
    #[inline(always)]
    pub(crate) unsafe fn bytes(&self, t: usize, c: usize) -> [*const i8; 2] {
        // SAFETY: in bounds by the caller's promise.
        self.bytes
            .map(|bytes| unsafe { bytes.add(t * self.stride + c * CHUNK) })
    }

    /// The integers of chunk `c` of row `t`, of rows in [`Form::Words`].
    ///
    /// # Safety
    /// Both lie within the rows.
    #[inline(always)]
    pub(crate) unsafe fn words(&self, t: usize, c: usize) -> *const i16 {
        let words = self.bytes[0].cast::<i16>();
        // SAFETY: in bounds by the caller's promise.
        unsafe { words.add(t * self.stride + c * CHUNK) }
    }

    /// Scale and sums of chunk `c` of row `t`.
    ///
    /// # Safety
    /// Both lie within the rows.
    #[inline(always)]
    pub(crate) unsafe fn meta(&self, t: usize, c: usize) -> Meta {
        // SAFETY: in bounds by the caller's promise.
        unsafe { *self.meta.add(t * (self.stride / CHUNK) + c) }
    }
}

/// Write access by row.
#[derive(Debug)]
pub(crate) struct PanelWriter<'a> {
    from: View<'a>,
    cols: usize,
    stride: usize,
    /// Bytes from a high byte to its low one.
    low: usize,
    q: *mut i8,
    meta: *mut Meta,
    _borrow: PhantomData<&'a mut ()>,
}

// SAFETY: rows are disjoint, and the methods' contracts give each to one thread at a time.
unsafe impl Sync for PanelWriter<'_> {}

impl PanelWriter<'_> {
    /// Copies row `t`, which was quantised, in [`Form::Words`].
    ///
    /// # Safety
    /// As [`Isa`](crate::isa::Isa); the row is there, of 15 bits, and nobody else's at the time.
    #[inline(always)]
    pub(crate) unsafe fn words<S: Words>(&self, t: usize) {
        for c in 0..self.cols / CHUNK {
            // SAFETY: the chunk lies within the row.
            unsafe {
                let ([high, low], meta) = self.from.chunk::<2>(t, c);
                let words = self.q.cast::<i16>().add(t * self.stride + c * CHUNK);
                let mut half = 0;
                while half < CHUNK {
                    let high = S::shl7_i(S::load_i8(high.add(half).cast()));
                    let q = S::add_i(high, S::load_i8(low.add(half).cast()));
                    S::store_words(words.add(half), q);
                    half += LANES;
                }
                *self.meta_at(t, c) = meta;
            }
        }
    }

    /// Copies row `t`, which was quantised, in [`Form::Bytes`].
    ///
    /// # Safety
    /// As [`words`](Self::words).
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[inline(always)]
    pub(crate) unsafe fn bytes(&self, t: usize) {
        for c in 0..self.cols / CHUNK {
            // SAFETY: the chunk lies within the row.
            unsafe {
                let (bytes, meta) = self.from.chunk::<2>(t, c);
                let to = self.q.add(t * self.stride + c * CHUNK);
                std::ptr::copy_nonoverlapping(bytes[0], to, CHUNK);
                std::ptr::copy_nonoverlapping(bytes[1], to.add(self.low), CHUNK);
                *self.meta_at(t, c) = meta;
            }
        }
    }

    #[inline(always)]
    unsafe fn meta_at(&self, t: usize, c: usize) -> *mut Meta {
        // SAFETY: by the caller's promise.
        unsafe { self.meta.add(t * (self.stride / CHUNK) + c) }
    }
}
