//! Activation rows in the layout that panels read.
//!
//! Words and bytes are additional copies of [`Activations`]' integers. The originals stay in the
//! layout of the kernels for few rows, whose memory speed depends on their code. Tiles are made
//! from the f32 values; no kernel reads the integers then.
//!
//! [`Activations`]: crate::Activations

use std::marker::PhantomData;

use crate::batch::{ROWS, words};
#[cfg(target_arch = "x86_64")]
use crate::isa::BytePlanes;
use crate::isa::{LANES, Words};
use crate::memory::{HugeMap, OffsetBuffer};
#[cfg(target_arch = "x86_64")]
use crate::quantisation::Rounding;
use crate::quantisation::{CHUNK, Meta, Precision, QuantisedView};

/// Memory layout of a row's integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowFormat {
    /// The high bytes of a row, those of all rows, then the low ones.
    Bytes,
    /// In one i16 each. Of every four columns the middle two change places, as [`Words::widen`]
    /// gives weights.
    Words,
    /// Tiles of 16 rows of 64 bytes. For each 64 columns of a span: their high bytes, row by row,
    /// then their low bytes, of `256 high + low`, both signed. Zeros fill the tile at the end of a
    /// span.
    Tiles,
    /// The same of rows of 8 bits, which have one byte.
    SmallTiles,
}

impl RowFormat {
    /// Every one, in order.
    pub(crate) const ALL: [Self; 4] = [Self::Bytes, Self::Words, Self::Tiles, Self::SmallTiles];

    /// Activation rows of `cols` columns that are multiplied with a panel before the next one. They
    /// fill half of an L2 of 2 MiB, because the next panel reads them too.
    pub(crate) fn block(self, cols: usize) -> usize {
        const BYTES: usize = 1 << 20;
        let rows = BYTES / (cols * self.column()).max(1);
        (rows / TILE_ROWS * TILE_ROWS).clamp(LEAST_ROWS, ROWS)
    }

    /// Bytes of a column.
    const fn column(self) -> usize {
        match self {
            Self::Bytes | Self::Words | Self::Tiles => 2,
            Self::SmallTiles => 1,
        }
    }

    /// Whether rows lie in tiles: made of the values, without integers in any other form.
    pub(crate) const fn tiled(self) -> bool {
        matches!(self, Self::Tiles | Self::SmallTiles)
    }

    /// Precision of the integers that rows are copied of.
    pub(crate) const fn precision(self) -> Precision {
        match self {
            Self::Bytes | Self::Words | Self::Tiles => Precision::Fifteen,
            Self::SmallTiles => Precision::Eight,
        }
    }
}

/// Columns between rows beyond their own, whole chunks: rows of a power of two would all fall into
/// the same few sets of a cache.
const PADDING: usize = 64;

pub(crate) const TILE_ROWS: usize = 16;
/// Columns of a tile.
pub(crate) const TILE_COLS: usize = 64;

/// Tiles that the columns of a span take.
pub(crate) const fn steps(span: usize) -> usize {
    span.div_ceil(TILE_COLS)
}

/// The tile of a row's tiles in which chunk `c` lies, of spans of `span` columns, and its place in
/// it: 0 or 1.
pub(crate) const fn step_of(c: usize, span: usize) -> (usize, usize) {
    let (first, within) = (c / (span / CHUNK), c % (span / CHUNK));
    (first * steps(span) + within / 2, within % 2)
}

/// Fewest rows of a block: for less, unpacking takes too much of the time.
const LEAST_ROWS: usize = 32;

/// A batch of rows of integers, in one of the forms.
#[derive(Debug)]
pub(crate) struct PanelRows {
    form: RowFormat,
    /// Whether the rows are there; those of the last batch may have been too few for panels.
    filled: bool,
    span: usize,
    /// Columns from a row to the next; of tiles, how many there are from 16 rows to the next.
    stride: usize,
    spans: usize,
    /// `(2, most rows, stride)` bytes, the high ones first, `(most rows, stride)` words, or `(most
    /// rows / 16, stride, 2 or 1, 16, 64)` bytes. Zeros that are never written take no memory. At
    /// a cache line: a row of a tile is one.
    q: HugeMap,
    /// `(most rows, stride / 32)`, but not of tiles.
    meta: OffsetBuffer<Meta>,
    /// For tiles: `(most rows / 16, spans, 16)`.
    scales: OffsetBuffer<f32>,
}

impl PanelRows {
    /// Room for `max_rows` rows of `cols` columns, whole chunks; none for copies that no kernel
    /// reads.
    pub(crate) fn new(max_rows: usize, cols: usize, span: usize, form: RowFormat) -> Self {
        let max_rows = max_rows.next_multiple_of(TILE_ROWS);
        let (tiles, spans) = (max_rows / TILE_ROWS, cols.div_ceil(span));
        let (stride, bytes, metas, scales) = if form.tiled() {
            // A tile more than there are: not all rows in the same sets of a cache.
            let stride = cols / span * steps(span) + steps(cols % span) + 1;
            let bytes = tiles * stride * TILE_ROWS * TILE_COLS * form.column();
            (stride, bytes, 0, tiles * spans * TILE_ROWS)
        } else {
            let stride = cols + PADDING;
            (
                stride,
                form.column() * max_rows * stride,
                max_rows * stride / CHUNK,
                0,
            )
        };
        Self {
            form,
            filled: false,
            span,
            stride,
            spans,
            q: HugeMap::zeroed(bytes).unwrap_or_else(|error| panic!("activations: {error}")),
            meta: OffsetBuffer::new(metas, 0),
            scales: OffsetBuffer::new(scales, 0),
        }
    }

    /// Whether there is room for copies.
    pub(crate) fn has_buffers(&self) -> bool {
        !self.q.is_empty()
    }

    /// Whether the rows are there.
    pub(crate) const fn filled(&self) -> bool {
        self.filled
    }

    /// A writer that copies rows of `from`, whose length is `cols`: all of them if `filled` and
    /// else none.
    pub(crate) fn writer<'a>(
        &'a mut self,
        from: QuantisedView<'a>,
        cols: usize,
        filled: bool,
    ) -> PanelWriter<'a> {
        self.filled = filled;
        PanelWriter {
            from,
            cols,
            span: self.span,
            stride: self.stride,
            spans: self.spans,
            #[cfg(target_arch = "aarch64")]
            low: self.q.len() / 2,
            q: self.q.as_mut_ptr().cast(),
            meta: self.meta.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            _borrow: PhantomData,
        }
    }

    /// A view whose column 0 is `first_col`, which starts a span.
    pub(crate) fn view(&self, first_col: usize) -> PanelView<'_> {
        let (step, _) = step_of(first_col / CHUNK, self.span);
        let bytes = match self.form {
            RowFormat::Words => [2 * first_col, 0],
            RowFormat::Bytes => [first_col, self.q.len() / 2 + first_col],
            tiles => [step * TILE_ROWS * TILE_COLS * tiles.column(), 0],
        };
        let from = |n: usize, len: usize| n.min(len); // absent buffers are empty
        let scales = first_col / self.span * TILE_ROWS;
        PanelView {
            stride: self.stride,
            spans: self.spans,
            column: self.form.column(),
            bytes: bytes.map(|at| self.q[at..].as_ptr().cast()),
            meta: self.meta[from(first_col / CHUNK, self.meta.len())..].as_ptr(),
            scales: self.scales[from(scales, self.scales.len())..].as_ptr(),
            _borrow: PhantomData,
        }
    }
}

/// Read access for kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PanelView<'a> {
    /// Columns from a row to the next, or tiles from 16 rows to the next.
    pub(crate) stride: usize,
    /// Spans of a row.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "of tiles, which are x86's")
    )]
    pub(crate) spans: usize,
    /// Bytes of a column.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "of tiles, which are x86's")
    )]
    column: usize,
    /// High and low bytes; in the other forms the first is all.
    bytes: [*const i8; 2],
    meta: *const Meta,
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "of tiles, which are x86's")
    )]
    scales: *const f32,
    _borrow: PhantomData<&'a ()>,
}

// SAFETY: a view only reads, and borrows the rows for its lifetime.
unsafe impl Sync for PanelView<'_> {}

impl PanelView<'_> {
    /// The high and low bytes of chunk `c` of row `t`, of rows in [`RowFormat::Bytes`].
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

    /// The integers of chunk `c` of row `t`, of rows in [`RowFormat::Words`].
    ///
    /// # Safety
    /// Both lie within the rows.
    #[inline(always)]
    pub(crate) unsafe fn words(&self, t: usize, c: usize) -> *const i16 {
        let words = self.bytes[0].cast::<i16>();
        // SAFETY: in bounds by the caller's promise.
        unsafe { words.add(t * self.stride + c * CHUNK) }
    }

    /// The first tile of the span that begins with chunk `c`, of the 16 rows from `t` on, and the
    /// scales of these rows. The rows are in [`RowFormat::Tiles`] or [`RowFormat::SmallTiles`].
    ///
    /// # Safety
    /// Both lie within the rows, and `t` is a multiple of 16; spans have `span` columns.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) unsafe fn tiles(&self, t: usize, c: usize, span: usize) -> (*const u8, *const f32) {
        let (rows, (step, _)) = (t / TILE_ROWS, step_of(c, span));
        let bytes = TILE_ROWS * TILE_COLS * self.column;
        // SAFETY: in bounds by the caller's promise.
        unsafe {
            let tiles = self.bytes[0].cast::<u8>();
            let scales = (rows * self.spans + c * CHUNK / span) * TILE_ROWS;
            let tiles = tiles.add((rows * self.stride + step) * bytes);
            (tiles, self.scales.add(scales))
        }
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
    from: QuantisedView<'a>,
    cols: usize,
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "of tiles, which are x86's")
    )]
    span: usize,
    stride: usize,
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "of tiles, which are x86's")
    )]
    spans: usize,
    /// Bytes from a high byte to its low one.
    #[cfg(target_arch = "aarch64")]
    low: usize,
    q: *mut i8,
    meta: *mut Meta,
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "of tiles, which are x86's")
    )]
    scales: *mut f32,
    _borrow: PhantomData<&'a mut ()>,
}

// SAFETY: rows are disjoint, and the methods' contracts give each to one thread at a time.
unsafe impl Sync for PanelWriter<'_> {}

impl PanelWriter<'_> {
    /// Copies row `t`, which was quantised, in [`RowFormat::Words`].
    ///
    /// # Safety
    /// See [`Isa`](crate::isa::Isa); the row is there, of 15 bits, and no other thread has it at
    /// the time.
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
                *self.meta_at(t, c) = words::copied(meta);
            }
        }
    }

    /// Copies row `t`, which was quantised, in [`RowFormat::Bytes`].
    ///
    /// # Safety
    /// See [`words`](Self::words).
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

    /// Quantises row `t` in [`RowFormat::Tiles`] for two bytes of integers, and in
    /// [`RowFormat::SmallTiles`] for one.
    ///
    /// # Safety
    /// See [`Isa`](crate::isa::Isa); the row is there, and no other thread has it at the time.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) unsafe fn tiles<S: BytePlanes, const BYTES: usize>(&self, t: usize) {
        let precision = if BYTES == 2 {
            Precision::Fifteen
        } else {
            Precision::Eight
        };
        let (rows, row) = (t / TILE_ROWS, t % TILE_ROWS);
        // SAFETY: columns lie within the row. Other rows of the tiles may be written meanwhile, by
        // other threads.
        unsafe {
            let x = self.from.values(t);
            for first in (0..self.cols).step_by(self.span) {
                let cols = self.span.min(self.cols - first);
                let rounding = Rounding::of::<S>(x.add(first), cols, precision);
                let span = rows * self.spans + first / self.span;
                *self.scales.add(span * TILE_ROWS + row) = rounding.scale;
                let (step, _) = step_of(first / CHUNK, self.span);
                let tiles = (rows * self.stride + step) * BYTES * TILE_ROWS * TILE_COLS;
                let tiles = self.q.add(tiles + row * TILE_COLS);
                for k in (0..cols).step_by(LANES) {
                    let q = rounding.integers::<S>(x.add(first + k));
                    let (step, within) = (k / TILE_COLS, k % TILE_COLS);
                    let to = tiles.add(step * BYTES * TILE_ROWS * TILE_COLS + within);
                    if BYTES == 1 {
                        S::store_i8(to, q);
                    } else {
                        let above = S::add_i(q, S::splat_i(128));
                        let high = S::sar16_i(S::shl_i::<8>(above));
                        let low = S::add_i(S::and_i(above, S::splat_i(255)), S::splat_i(-128));
                        S::store_i8(to, high);
                        S::store_i8(to.add(TILE_ROWS * TILE_COLS), low);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn meta_at(&self, t: usize, c: usize) -> *mut Meta {
        // SAFETY: by the caller's promise.
        unsafe { self.meta.add(t * (self.stride / CHUNK) + c) }
    }
}
