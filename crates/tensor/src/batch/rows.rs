//! Activation rows as panels meet them.
//!
//! Quantised once more, beside [`Activations`]' own integers: those stay as the kernels for few
//! rows read them, whose speed from memory hangs on their code.
//!
//! [`Activations`]: crate::Activations

use std::marker::PhantomData;

use crate::activations::{CHUNK, Meta, Precision, View};
use crate::batch::ROWS;
#[cfg(target_arch = "x86_64")]
use crate::isa::Floats;
use crate::isa::{LANES, Words};
use crate::memory::Placed;

/// How the integers of a row lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The high bytes of a row, those of all rows, then the low ones.
    Bytes,
    /// In one i16 each. Of every four columns the middle two change places, as [`Words::widen`]
    /// gives weights.
    Words,
    /// As bf16, 16 rows together: of a chunk 128 times their high bytes, row by row, then their low
    /// bytes, each exact; then their next chunk. Columns as in [`Words`](Self::Words).
    Floats,
    /// The same of rows of 8 bits, which have one byte.
    SmallFloats,
}

impl Form {
    /// Every one, in order.
    pub(crate) const ALL: [Self; 4] = [Self::Bytes, Self::Words, Self::Floats, Self::SmallFloats];

    /// Activation rows of `cols` columns that meet a panel before the next one: so many that half
    /// of a second-level cache of 2 MiB holds them, as they meet the next panel too.
    pub(crate) fn block(self, cols: usize) -> usize {
        const BYTES: usize = 1 << 20;
        let rows = BYTES / (cols * self.column()).max(1);
        (rows / TILE_ROWS * TILE_ROWS).clamp(LEAST_ROWS, ROWS)
    }

    /// Bytes of a column.
    const fn column(self) -> usize {
        match self {
            Self::Bytes | Self::Words | Self::SmallFloats => 2,
            Self::Floats => 4,
        }
    }

    /// What the integers have that rows are copied of.
    pub(crate) const fn precision(self) -> Precision {
        match self {
            Self::Bytes | Self::Words | Self::Floats => Precision::Fifteen,
            Self::SmallFloats => Precision::Eight,
        }
    }
}

/// Columns between rows beyond their own, whole chunks: rows of a power of two would all fall into
/// the same few sets of a cache.
const PADDING: usize = 64;

/// Rows that lie together in [`Form::Floats`], those of a tile.
pub(crate) const TILE_ROWS: usize = 16;

/// What belongs to a chunk of a tile's rows: each part a cache line or two, for a product whose
/// type has no min reads the first alone.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
pub(crate) struct TileMeta {
    scale: [f32; TILE_ROWS],
    sum: [f32; TILE_ROWS],
    sums: [[i32; TILE_ROWS]; 2],
}

#[cfg(target_arch = "x86_64")]
const _: () = assert!(size_of::<TileMeta>() == TILE_ROWS * size_of::<Meta>());

#[cfg(target_arch = "x86_64")]
impl TileMeta {
    /// That of row `t` of the tile.
    #[inline(always)]
    pub(crate) const fn of(&self, t: usize) -> Meta {
        Meta {
            scale: self.scale[t],
            sums: [self.sums[0][t], self.sums[1][t]],
            sum: self.sum[t],
        }
    }

    /// # Safety
    /// Row `t` of the tile is nobody else's at the time.
    #[inline(always)]
    unsafe fn set(this: *mut Self, t: usize, meta: Meta) {
        // SAFETY: places of this row alone, through raw pointers.
        unsafe {
            (*this).scale[t] = meta.scale;
            (*this).sum[t] = meta.sum;
            (*this).sums[0][t] = meta.sums[0];
            (*this).sums[1][t] = meta.sums[1];
        }
    }
}

/// Fewest rows of a block: for less, unpacking takes too much of the time.
const LEAST_ROWS: usize = 32;

/// A batch of rows of integers, in one of the forms.
#[derive(Clone, Debug)]
pub(crate) struct PanelRows {
    form: Form,
    /// Whether the rows are there; those of the last batch may have been too few for panels.
    filled: bool,
    /// Columns from a row to the next.
    stride: usize,
    /// `(2, most rows, stride)` bytes, the high ones first, `(most rows, stride)` words, or `(most
    /// rows / 16, stride / 32, 2, 16, 32)` floats. Zeros that are never written take no memory. At
    /// a cache line: a row of a tile is one.
    q: Placed<i8>,
    /// `(most rows, stride / 32)`; of floats as many bytes, as [`TileMeta`]
    meta: Placed<Meta>,
}

impl PanelRows {
    /// Room for `max_rows` rows of `cols` columns, whole chunks; none for copies that nobody reads.
    pub(crate) fn new(max_rows: usize, cols: usize, form: Form) -> Self {
        let stride = cols + PADDING;
        let max_rows = max_rows.next_multiple_of(TILE_ROWS);
        Self {
            form,
            filled: false,
            stride,
            q: Placed::new(form.column() * max_rows * stride, 0),
            meta: Placed::new(max_rows * stride / CHUNK, 0),
        }
    }

    /// Whether there is room for copies.
    pub(crate) fn wanted(&self) -> bool {
        !self.q.is_empty()
    }

    /// Whether the rows are there.
    pub(crate) const fn filled(&self) -> bool {
        self.filled
    }

    /// Who copies rows of `from`, whose length is `cols`, all of them if `filled` and else none.
    pub(crate) fn writer<'a>(
        &'a mut self,
        from: View<'a>,
        cols: usize,
        filled: bool,
    ) -> PanelWriter<'a> {
        self.filled = filled;
        PanelWriter {
            from,
            cols,
            stride: self.stride,
            #[cfg(target_arch = "aarch64")]
            low: self.q.len() / 2,
            q: self.q.as_mut_ptr(),
            meta: self.meta.as_mut_ptr(),
            _borrow: PhantomData,
        }
    }

    /// A view whose column 0 is `first_col`, which starts a chunk.
    pub(crate) fn view(&self, first_col: usize) -> PanelView<'_> {
        let bytes = match self.form {
            Form::Words => [2 * first_col, 0],
            Form::Bytes => [first_col, self.q.len() / 2 + first_col],
            Form::Floats | Form::SmallFloats => [first_col * TILE_ROWS * self.form.column(), 0],
        };
        let meta = match self.form {
            Form::Words | Form::Bytes => first_col / CHUNK,
            Form::Floats | Form::SmallFloats => first_col / CHUNK * TILE_ROWS,
        };
        PanelView {
            stride: self.stride,
            column: self.form.column(),
            bytes: bytes.map(|at| self.q[at..].as_ptr()),
            meta: self.meta[meta..].as_ptr(),
            _borrow: PhantomData,
        }
    }
}

/// Read access for kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PanelView<'a> {
    /// Columns from a row to the next.
    pub(crate) stride: usize,
    /// Bytes of a column.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "of tiles, which are x86's")
    )]
    column: usize,
    /// High and low bytes; in the other forms the first is all.
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
    #[cfg(target_arch = "aarch64")]
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

    /// Chunk `c` of the 16 rows from `t` on, of rows in [`Form::Floats`], a tile of high floats and
    /// one of low floats, or in [`Form::SmallFloats`], one tile; and what belongs to them.
    ///
    /// # Safety
    /// Both lie within the rows, and `t` is a multiple of 16.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) unsafe fn floats(&self, t: usize, c: usize) -> (*const u8, *const TileMeta) {
        let tile = t / TILE_ROWS * (self.stride / CHUNK) + c;
        // SAFETY: in bounds by the caller's promise.
        unsafe {
            let bytes = TILE_ROWS * CHUNK * self.column;
            let floats = self.bytes[0].cast::<u8>().add(tile * bytes);
            (floats, self.meta.cast::<TileMeta>().add(tile))
        }
    }

    /// Chunks from a tile to the next, of rows in [`Form::Floats`] or [`Form::SmallFloats`].
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) const fn tile_chunks(&self) -> usize {
        self.stride / CHUNK
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
    #[cfg(target_arch = "aarch64")]
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
    #[cfg(target_arch = "aarch64")]
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

    /// Copies row `t`, which was quantised, in [`Form::Floats`] for two bytes of integers, and in
    /// [`Form::SmallFloats`] for one.
    ///
    /// # Safety
    /// As [`words`](Self::words), of integers of so many bytes.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) unsafe fn floats<S: Floats, const BYTES: usize>(&self, t: usize) {
        for c in 0..self.cols / CHUNK {
            // SAFETY: the chunk lies within the row.
            unsafe {
                let (bytes, meta) = self.from.chunk::<BYTES>(t, c);
                let tile = t / TILE_ROWS * (self.stride / CHUNK) + c;
                let floats = self.q.cast::<i16>().add(tile * BYTES * TILE_ROWS * CHUNK);
                let floats = floats.add(t % TILE_ROWS * CHUNK);
                let mut half = 0;
                while half < CHUNK {
                    let mut first = S::load_i8(bytes[0].add(half).cast());
                    if BYTES == 2 {
                        first = S::shl7_i(first);
                        let low = S::top(S::to_f(S::load_i8(bytes[1].add(half).cast())));
                        S::store_words(floats.add(TILE_ROWS * CHUNK + half), low);
                    }
                    S::store_words(floats.add(half), S::top(S::to_f(first)));
                    half += LANES;
                }
                // Other rows of the tile may be written meanwhile, by other threads.
                TileMeta::set(self.meta.cast::<TileMeta>().add(tile), t % TILE_ROWS, meta);
            }
        }
    }

    #[inline(always)]
    unsafe fn meta_at(&self, t: usize, c: usize) -> *mut Meta {
        // SAFETY: by the caller's promise.
        unsafe { self.meta.add(t * (self.stride / CHUNK) + c) }
    }
}
