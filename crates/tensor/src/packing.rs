//! Weight matrices repacked once at load for the kernels.
//!
//! A [`PackedMatrix`] matrix takes about as many bytes as the stored one (table in
//! [`crate::formats`]). The file's pages can be dropped after packing, so memory holds one copy.
//! Rows of [decoded](BlockType::is_decoded) types but FP8 are copied as they are.

pub(crate) mod fp8;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use paceline_base::{BlockType, Bytes};

use crate::error::Error;
use crate::formats::{self, CRUMB_PLANE, Layout, NIBBLE_PLANE, WORDS, grids};
use crate::isa::LANES;
use crate::memory::{HugeMap, MatrixMemory, MemoryBlock};
use crate::pool::ThreadPool;
use crate::quantisation::Precision;
use crate::rounding::is_tiny;
use crate::storage::units::{self, UNIT, UNIT_CHUNKS, Unit};
use crate::storage::{self, BLOCK_LEN_MAX, CODEBOOK, Chunk, e2m1_code};
use fp8::Fp8Layout;

/// Revision of the packed form of all types. It is higher after every change of a layout.
pub const PACKING: u32 = 1;

/// A matrix as it lies in a model file: `(rows, cols)`, row-major, whole blocks per row.
#[derive(Clone, Copy, Debug)]
pub struct StoredMatrix<'a> {
    /// Storage type of the values.
    pub block_type: BlockType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// `rows * block_type.row_bytes(cols)` bytes.
    pub bytes: &'a [u8],
}

impl<'a> StoredMatrix<'a> {
    pub const fn new(block_type: BlockType, rows: usize, cols: usize, bytes: &'a [u8]) -> Self {
        Self {
            block_type,
            rows,
            cols,
            bytes,
        }
    }

    /// The rows in `range` only: a rank's output features.
    ///
    /// # Panics
    /// If they are not rows of this matrix, or its size is wrong ([`PackedMatrix::new`] checks it).
    #[must_use]
    pub fn row_range(self, range: Range<usize>) -> Self {
        let row_bytes = self.bytes.len().checked_div(self.rows).unwrap_or(0);
        Self {
            rows: range.len(),
            bytes: &self.bytes[range.start * row_bytes..range.end * row_bytes],
            ..self
        }
    }
}

/// Options of packing, apart from the type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackOptions {
    /// Columns of a logical block of the canonical sum ([`paceline_base::tree`]), a multiple of 32;
    /// 0 sums a row as one block. Matrices whose input dimension a tensor split may cut need it.
    pub leaf_cols: usize,
    /// Decode to f32 and compute in floats: the kernel class `cpu-f32`.
    pub as_f32: bool,
}

/// A weight matrix in kernel layout. Padded with zero rows to a multiple of 16.
#[derive(Debug)]
pub struct PackedMatrix {
    pub(crate) block_type: BlockType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) leaf_cols: usize,
    /// Chunks of the group before the first that counts. A range of columns may start within a
    /// stored block, and the kernels need that block's header.
    pub(crate) first_chunk: usize,
    /// Chunks of its first unit that a group lacks.
    pub(crate) lacks: usize,
    pub(crate) group_bytes: usize,
    /// Bytes of a group before its first block ([`Layout::headers`]).
    pub(crate) headers: usize,
    /// Whether it has BF16 weights below [`SMALLEST`](crate::rounded::SMALLEST).
    pub(crate) tiny: bool,
    /// Of a decoded type.
    pub(crate) decoded: Option<DecodedForm>,
    pub(crate) data: HugeMap,
}

/// How groups of a decoded type lie in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DecodedForm {
    /// The rows of a group follow one another as stored.
    Rows(StoredRows),
    Fp8(Fp8Layout),
}

/// Rows of a decoded type in a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredRows {
    pub(crate) block_type: BlockType,
    /// Bytes of a row: the blocks that hold the columns.
    row_bytes: usize,
    /// Column 0 of the matrix within these blocks.
    first: usize,
}

impl StoredRows {
    /// The groups with the given columns, and their bytes within a row of the matrix.
    fn new(block_type: BlockType, columns: &Range<usize>) -> (Self, Range<usize>) {
        let len = block_type.len();
        let blocks = columns.start / len..columns.end.div_ceil(len);
        let bytes = blocks.start * block_type.bytes()..blocks.end * block_type.bytes();
        let this = Self {
            block_type,
            row_bytes: bytes.len(),
            first: columns.start - blocks.start * len,
        };
        (this, bytes)
    }

    /// Decodes a group: element `(col, lane)` of `out`, which is `(cols, 16)`.
    pub(crate) fn decode(&self, group: &[u8], out: &mut [f32]) {
        let (size, len) = (self.block_type.bytes(), self.block_type.len());
        let mut values = [[0.0; BLOCK_LEN_MAX]; LANES];
        let mut out = out.as_chunks_mut::<LANES>().0.iter_mut();
        for block in 0..self.row_bytes / size {
            for (lane, values) in values.iter_mut().enumerate() {
                let stored = &group[lane * self.row_bytes + block * size..][..size];
                storage::decode(self.block_type, stored, &mut values[..len]);
            }
            // The first block may begin before the first column, and `out` ends with the last.
            let first = if block == 0 { self.first } else { 0 };
            for (col, out) in (first..len).zip(&mut out) {
                *out = std::array::from_fn(|lane| values[lane][col]);
            }
        }
    }
}

impl PackedMatrix {
    /// Packs `matrix`. Cost: one pass over it on all threads of `pool`.
    ///
    /// # Errors
    /// [`Error::Size`] when the bytes do not fit the shape, [`Error::Memory`].
    ///
    /// # Panics
    /// If `leaf_cols` is not a multiple of 32.
    pub fn new(
        matrix: StoredMatrix<'_>,
        options: PackOptions,
        pool: &ThreadPool,
    ) -> Result<Self, Error> {
        Self::of_columns(matrix, 0..matrix.cols, options, pool)
    }

    /// Packs a range of the columns of `matrix`: a rank's input features. Leaves are counted from
    /// its start, so to stay those of the whole matrix it starts at a multiple of `leaf_cols`.
    ///
    /// Only the blocks that hold these columns are read and kept.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    ///
    /// # Panics
    /// If `leaf_cols` or the start is not a multiple of 32, or the range exceeds the matrix.
    pub fn of_columns(
        matrix: StoredMatrix<'_>,
        columns: Range<usize>,
        options: PackOptions,
        pool: &ThreadPool,
    ) -> Result<Self, Error> {
        let aligned = |n: usize| n.is_multiple_of(Chunk::LEN);
        assert!(
            aligned(options.leaf_cols) && aligned(columns.start) && columns.end <= matrix.cols,
            "columns {columns:?} of {} in leaves of {}",
            matrix.cols,
            options.leaf_cols
        );
        let span = span(options.leaf_cols, Precision::Fifteen);
        let block_type = matrix.block_type.computed();
        assert!(
            block_type.is_float() || columns.start.is_multiple_of(span),
            "columns {columns:?} in spans of {span}"
        );
        check_size(matrix)?;
        let as_f32 = options.as_f32 && !matrix.block_type.is_float();
        if matrix.block_type.is_decoded() && !as_f32 {
            return Self::of_decoded(matrix, &columns, options, pool);
        }
        let (mut packed, cut) = Self::unfilled(matrix, &columns, options)?;
        packed.fill(matrix, &cut, pool);
        Ok(packed)
    }

    /// A matrix of a packed type, still zero. Does not read the stored bytes.
    fn unfilled(
        matrix: StoredMatrix<'_>,
        columns: &Range<usize>,
        options: PackOptions,
    ) -> Result<(Self, ColumnUnits), Error> {
        let as_f32 = options.as_f32 && !matrix.block_type.is_float();
        let block_type = match as_f32 {
            true => BlockType::F32,
            false => matrix.block_type.computed(),
        };
        let cut = ColumnUnits::new(matrix, columns);
        let (chunks, kept) = (cut.chunks(), cut.kept.len());
        let (headers, blocks) = group_parts(block_type, (chunks, kept), columns.len());
        let group_bytes = headers + blocks;
        let data = HugeMap::zeroed(group_bytes * matrix.rows.div_ceil(LANES))?;
        let packed = Self {
            block_type,
            rows: matrix.rows,
            cols: columns.len(),
            leaf_cols: options.leaf_cols,
            first_chunk: match block_type.is_float() {
                true => 0,
                false => cut.first / Chunk::LEN - cut.kept.start,
            },
            lacks: cut.kept.start,
            group_bytes,
            headers,
            tiny: false,
            decoded: None,
            data,
        };
        Ok((packed, cut))
    }

    /// The matrix that [`of_columns`](Self::of_columns) gives with these arguments, once a reader
    /// has put [its data](Self::data) into its [memory](Self::memory). The stored bytes are not
    /// read and may be empty.
    ///
    /// # Errors
    /// [`Error::Memory`].
    ///
    /// # Panics
    /// If [`has_data`](Self::has_data) is false, or the matrix has fewer columns.
    pub fn unread(
        matrix: StoredMatrix<'_>,
        columns: Range<usize>,
        options: PackOptions,
        is_tiny: bool,
    ) -> Result<Self, Error> {
        let has_data = Self::has_data(matrix.block_type, options);
        assert!(has_data && columns.end <= matrix.cols, "{columns:?}");
        let (mut packed, _) = Self::unfilled(matrix, &columns, options)?;
        packed.tiny = is_tiny;
        Ok(packed)
    }

    /// The memory of the packed bytes, for [`unread`](Self::unread) matrices.
    ///
    /// # Panics
    /// If they are on a disk only.
    pub fn memory(&self) -> MemoryBlock {
        self.data.block()
    }

    /// Whether the form of packed matrices of a type follows from their shapes: not of decoded
    /// types.
    pub const fn has_data(block_type: BlockType, options: PackOptions) -> bool {
        options.as_f32 || !block_type.is_decoded()
    }

    /// The packed bytes of revision [`PACKING`].
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Drops the packed bytes, which are read from a disk when they are needed.
    pub fn detach(&mut self) -> MatrixMemory {
        self.data.detach()
    }

    /// Whether BF16 weights have values that kernels treat apart: the argument of
    /// [`unread`](Self::unread).
    pub const fn is_tiny(&self) -> bool {
        self.tiny
    }

    /// The columns of a matrix of a decoded type.
    fn of_decoded(
        matrix: StoredMatrix<'_>,
        columns: &Range<usize>,
        options: PackOptions,
        pool: &ThreadPool,
    ) -> Result<Self, Error> {
        let (decoded, headers, group_bytes, data) = match matrix.block_type {
            BlockType::FP8 => {
                let (layout, data) = fp8::pack(matrix, columns, pool)?;
                let form = DecodedForm::Fp8(layout);
                (form, layout.headers(), layout.group_bytes(), data)
            }
            _ => {
                let (rows, data) = rows_as_stored(matrix, columns, pool)?;
                (DecodedForm::Rows(rows), 0, rows.row_bytes * LANES, data)
            }
        };
        Ok(Self {
            block_type: matrix.block_type.computed(),
            rows: matrix.rows,
            cols: columns.len(),
            leaf_cols: options.leaf_cols,
            first_chunk: 0,
            lacks: 0,
            group_bytes,
            headers,
            tiny: false,
            decoded: Some(decoded),
            data,
        })
    }

    /// Bytes that a matrix takes when it is packed whole. Those of FP8 depend on how many columns
    /// share a scale, a multiple of 32, which other types do not read.
    ///
    /// # Panics
    /// If `cols` is not a whole number of blocks, or `scale_cols` is 0 for FP8.
    pub fn planned_bytes(
        block_type: BlockType,
        [rows, cols]: [usize; 2],
        scale_cols: usize,
    ) -> Bytes {
        let group = match block_type {
            BlockType::FP8 => Fp8Layout::with_runs(cols, scale_cols).group_bytes(),
            decoded if decoded.is_decoded() => {
                let row = decoded.row_bytes(cols).expect("whole blocks");
                row * LANES
            }
            other => {
                let chunks = cols / Chunk::LEN;
                let (headers, blocks) = group_parts(other.computed(), (chunks, chunks), cols);
                headers + blocks
            }
        };
        Bytes((group * rows.div_ceil(LANES)) as u64)
    }

    /// Output features.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// The type that the kernels compute with.
    pub const fn block_type(&self) -> BlockType {
        self.block_type
    }

    /// Memory taken.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.data.len() as u64)
    }

    /// Columns of activations that share a scale: see [`crate::activations`].
    pub const fn span(&self, precision: Precision) -> usize {
        span(self.leaf_cols, precision)
    }

    /// Whether the kernels read quantised activations for this matrix.
    pub const fn reads_integers(&self) -> bool {
        !self.block_type.is_float()
    }

    pub(crate) const fn groups(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    fn fill(&mut self, matrix: StoredMatrix<'_>, cut: &ColumnUnits, pool: &ThreadPool) {
        let (group_bytes, block_type, cols) = (self.group_bytes, self.block_type, self.cols);
        if group_bytes == 0 {
            return;
        }
        let row_bytes = matrix.bytes.len().checked_div(matrix.rows).unwrap_or(0);
        let tiny = AtomicBool::new(false);
        let groups = crate::pool::DisjointMut::new(&mut self.data, group_bytes);
        pool.run(matrix.rows.div_ceil(LANES), &|g| {
            // SAFETY: each task writes its own group.
            let out = unsafe { groups.part(g) };
            for lane in 0..LANES.min(matrix.rows - g * LANES) {
                let start = (g * LANES + lane) * row_bytes;
                let row = &matrix.bytes[start..start + row_bytes][cut.bytes.clone()];
                if block_type == BlockType::BF16 && has_tiny(row) {
                    tiny.store(true, Ordering::Relaxed);
                }
                match formats::layout(block_type) {
                    Some(layout) => pack_row(matrix.block_type, layout, row, lane, cut, out),
                    None => {
                        let wanted = cut.first..cut.first + cols;
                        pack_floats((matrix.block_type, block_type), row, wanted, lane, out);
                    }
                }
            }
        });
        self.tiny = tiny.into_inner();
    }
}

/// Bytes of a group before its first block, and of its blocks. Packed types have the chunks of
/// their units, and those that they keep; floats have columns.
fn group_parts(
    block_type: BlockType,
    (chunks, kept): (usize, usize),
    cols: usize,
) -> (usize, usize) {
    match formats::layout(block_type) {
        Some(layout) => (layout.headers(chunks), layout.blocks(kept)),
        None => (0, cols * LANES * block_type.bytes()),
    }
}

/// Copies the columns of the rows of a matrix, group by group.
fn rows_as_stored(
    matrix: StoredMatrix<'_>,
    columns: &Range<usize>,
    pool: &ThreadPool,
) -> Result<(StoredRows, HugeMap), Error> {
    let (rows, bytes) = StoredRows::new(matrix.block_type, columns);
    let group_bytes = rows.row_bytes * LANES;
    let groups = matrix.rows.div_ceil(LANES);
    let mut data = HugeMap::zeroed(group_bytes * groups)?;
    let row_bytes = matrix.bytes.len().checked_div(matrix.rows).unwrap_or(0);
    if group_bytes > 0 {
        let parts = crate::pool::DisjointMut::new(&mut data, group_bytes);
        pool.run(groups, &|g| {
            // SAFETY: each task writes its own group.
            let out = unsafe { parts.part(g) };
            let stored = &matrix.bytes[g * LANES * row_bytes..];
            let rows_of = stored.chunks_exact(row_bytes);
            for (out, row) in out.chunks_exact_mut(rows.row_bytes).zip(rows_of) {
                out.copy_from_slice(&row[bytes.clone()]);
            }
        });
    }
    Ok((rows, data))
}

/// Columns of activations of 8 bits that share a scale at most: with 256 they lose what makes them
/// as good as other engines' (docs/numerics.md).
const EIGHT_SPAN: usize = 32;

/// Columns of activations that share a scale in products with leaves of `leaf_cols` columns, 0 for
/// one leaf. It is the largest number that divides both a leaf and a unit of the weights, or
/// [`EIGHT_SPAN`].
pub(crate) const fn span(leaf_cols: usize, precision: Precision) -> usize {
    let most = match precision {
        Precision::Eight => EIGHT_SPAN,
        Precision::Fifteen => UNIT,
    };
    let (mut span, mut rest) = (most, leaf_cols);
    while rest > 0 {
        (span, rest) = (rest, span % rest);
    }
    span
}

/// Whether a row of BF16 has weights that [`is_tiny`] says are.
fn has_tiny(row: &[u8]) -> bool {
    let mut weights = row
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| u16::from_le_bytes(bytes));
    weights.any(is_tiny)
}

/// The units of a row that hold a range of its columns, or for floats the columns.
#[derive(Debug)]
struct ColumnUnits {
    /// Their bytes within the row.
    bytes: Range<usize>,
    /// Columns that they hold.
    cols: usize,
    /// Index of the first column of the range within these.
    first: usize,
    /// Chunks of them to pack: those of the stored blocks that hold these columns.
    kept: Range<usize>,
}

impl ColumnUnits {
    fn new(matrix: StoredMatrix<'_>, columns: &Range<usize>) -> Self {
        let block = matrix.block_type;
        let unit = if block.is_float() { 1 } else { UNIT };
        let start = columns.start / unit * unit;
        let held = start..matrix.cols.min(columns.end.next_multiple_of(unit));
        let byte = |col: usize| col / block.len() * block.bytes();
        let (first, end) = (columns.start - start, columns.end - start);
        let kept = first / block.len() * block.len()..end.next_multiple_of(block.len());
        Self {
            bytes: byte(held.start)..byte(held.end),
            cols: held.len(),
            first,
            kept: kept.start / Chunk::LEN..kept.end / Chunk::LEN,
        }
    }

    /// Chunks of the units.
    const fn chunks(&self) -> usize {
        self.cols / Chunk::LEN
    }
}

fn check_size(matrix: StoredMatrix<'_>) -> Result<(), Error> {
    let StoredMatrix {
        block_type,
        rows,
        cols,
        bytes,
    } = matrix;
    let row_bytes = block_type.row_bytes(cols);
    match row_bytes.and_then(|row| row.checked_mul(rows)) {
        Some(expected) if expected == bytes.len() => Ok(()),
        expected => Err(Error::Size {
            rows,
            cols,
            block_type,
            expected: expected.unwrap_or(0),
            got: bytes.len(),
        }),
    }
}

/// Writes the `wanted` columns of a row of floats (types as stored and as packed) into lane `lane`
/// of a group: element `(col, lane)`.
fn pack_floats(
    (stored, packed): (BlockType, BlockType),
    row: &[u8],
    wanted: Range<usize>,
    lane: usize,
    out: &mut [u8],
) {
    let size = packed.bytes();
    if stored == packed {
        let wanted = &row[wanted.start * size..wanted.end * size];
        for (col, value) in wanted.chunks_exact(size).enumerate() {
            out[(col * LANES + lane) * size..][..size].copy_from_slice(value);
        }
        return;
    }
    let mut values = vec![0.0f32; row.len() / stored.bytes() * stored.len()];
    storage::dequantise(stored, row, &mut values);
    for (col, value) in values[wanted].iter().enumerate() {
        out[(col * LANES + lane) * 4..][..4].copy_from_slice(&value.to_ne_bytes());
    }
}

/// Writes the chunks of a quantised row that `cut` keeps into lane `lane` of a group.
fn pack_row(
    block_type: BlockType,
    layout: Layout,
    row: &[u8],
    lane: usize,
    cut: &ColumnUnits,
    out: &mut [u8],
) {
    let chunks = cut.chunks();
    let (headers, blocks) = out.split_at_mut(layout.headers(chunks));
    for first in (0..chunks).step_by(UNIT_CHUNKS) {
        let unit = Unit::of(block_type, row, first / UNIT_CHUNKS);
        let header = headers.len() - layout.header_before(first);
        pack_header(
            block_type,
            &unit,
            lane,
            &mut headers[header..][..layout.header],
        );
        let unit_chunks = first..chunks.min(first + UNIT_CHUNKS);
        for c in unit_chunks.filter(|c| cut.kept.contains(c)) {
            let place = layout.place(c - cut.kept.start);
            if let Some(grid) = storage::grid_chunk(block_type, row, c) {
                let form = grids::indices(block_type);
                grids::pack_grid(
                    &grid,
                    form,
                    lane,
                    &mut blocks[place.planes..][..layout.planes],
                );
                grids::pack_odd(&grid, lane, &mut blocks[place.scales..][..layout.scales]);
                continue;
            }
            let planes = &mut blocks[place.planes..][..layout.planes];
            pack_planes(
                block_type,
                &storage::chunk(block_type, row, c),
                lane,
                planes,
            );
            let raw = storage::raw_scales(block_type, row, c);
            let scales = &mut blocks[place.scales..][..layout.scales];
            pack_scales(block_type, raw, unit.factors[c - first], lane, scales);
        }
    }
}

/// Writes the step of a unit, and its multipliers where the type has some.
fn pack_header(block_type: BlockType, unit: &Unit, lane: usize, out: &mut [u8]) {
    let (step, size) = units::step_bytes(block_type, unit.step);
    out[size * lane..][..size].copy_from_slice(&step[..size]);
    if out.len() > size * LANES {
        let multipliers = unit.multipliers.map(|multiplier| multiplier as i16);
        put_words(&mut out[size * LANES..], lane, multipliers.into_iter());
    }
}

/// Writes the scales of a chunk: the file's bytes where it has some, else the factors.
fn pack_scales(
    block_type: BlockType,
    raw: storage::RawScales,
    units::HalfFactors { scale, min }: units::HalfFactors,
    lane: usize,
    out: &mut [u8],
) {
    if raw.bytes[0].is_none() {
        let grain = units::grain(block_type);
        let min = (min[0] + formats::center(block_type) * scale[0]) / grain;
        let words = [scale[0] as i16, min as i16];
        let wanted = out.len() / WORDS;
        put_words(out, lane, words.into_iter().take(wanted));
    }
    for (i, byte) in raw.bytes.into_iter().flatten().enumerate() {
        out[i * LANES + lane] = byte;
    }
}

/// Stores each word at position `lane` of a run of sixteen.
fn put_words(out: &mut [u8], lane: usize, words: impl Iterator<Item = i16>) {
    for (i, word) in words.enumerate() {
        out[(i * LANES + lane) * 2..][..2].copy_from_slice(&word.to_ne_bytes());
    }
}

/// Cuts the 32 values of a chunk into planes, lane `lane`; `out` is zero there.
fn pack_planes(block_type: BlockType, chunk: &Chunk, lane: usize, out: &mut [u8]) {
    let shifted = |offset: i8| chunk.q.map(|q| (q + offset) as u8);
    match block_type {
        BlockType::Q8_0 => put_bytes(out, lane, &chunk.q.map(|q| q as u8)),
        BlockType::IQ4_NL | BlockType::IQ4_XS => put_nibbles(out, lane, &chunk.q.map(code)),
        BlockType::Q4_0 => put_nibbles(out, lane, &shifted(8)),
        BlockType::Q4_1 | BlockType::Q4_K => put_nibbles(out, lane, &shifted(0)),
        BlockType::Q5_0 => put_five_bits(out, lane, &shifted(16)),
        BlockType::Q5_1 | BlockType::Q5_K => put_five_bits(out, lane, &shifted(0)),
        BlockType::Q6_K => put_six_bits(out, lane, &shifted(32)),
        BlockType::Q2_K => put_crumbs(out, lane, &shifted(0)),
        BlockType::Q3_K => {
            let values = shifted(4);
            put_crumbs(out, lane, &values);
            put_bits(&mut out[CRUMB_PLANE..], lane, &values.map(|v| v >> 2));
        }
        BlockType::MXFP4 | BlockType::MXFP4_SPLIT => {
            put_nibbles(out, lane, &chunk.q.map(e2m1_code));
        }
        BlockType::F32 | BlockType::F16 | BlockType::BF16 => {
            unreachable!("floats have no planes")
        }
        affine => {
            let bits = affine
                .affine_bits()
                .expect("no type is left but the affine");
            pack_affine(bits, chunk, lane, out);
        }
    }
}

/// Like [`pack_planes`] for affine integers of `bits` bits.
fn pack_affine(bits: u32, chunk: &Chunk, lane: usize, out: &mut [u8]) {
    let values = chunk
        .q
        .map(|q| (i32::from(q) + storage::offset(bits)) as u8);
    match bits {
        2 => put_crumbs(out, lane, &values),
        3 => {
            put_crumbs(out, lane, &values);
            put_bits(&mut out[CRUMB_PLANE..], lane, &values.map(|v| v >> 2));
        }
        4 => put_nibbles(out, lane, &values),
        5 => put_five_bits(out, lane, &values),
        6 => put_six_bits(out, lane, &values),
        _ => put_bytes(out, lane, &chunk.q.map(|q| q as u8)),
    }
}

fn put_bytes(plane: &mut [u8], lane: usize, values: &[u8; 32]) {
    for (quad, four) in values.as_chunks::<4>().0.iter().enumerate() {
        plane[64 * quad + 4 * lane..][..4].copy_from_slice(four);
    }
}

/// The low four bits of each value.
fn put_nibbles(plane: &mut [u8], lane: usize, values: &[u8; 32]) {
    let pairs: [u8; 16] = std::array::from_fn(|k| values[k] & 15 | values[k + 16] << 4);
    for (quad, four) in pairs.as_chunks::<4>().0.iter().enumerate() {
        plane[64 * quad + 4 * lane..][..4].copy_from_slice(four);
    }
}

/// The low two bits of each value.
fn put_crumbs(plane: &mut [u8], lane: usize, values: &[u8; 32]) {
    let crumb = |quad: usize, j: usize| values[4 * quad + j] & 3;
    for odd in 0..2 {
        let four: [u8; 4] = std::array::from_fn(|j| {
            (0..4)
                .map(|pair| crumb(2 * pair + odd, j) << (2 * pair))
                .fold(0, |a, b| a | b)
        });
        plane[64 * odd + 4 * lane..][..4].copy_from_slice(&four);
    }
}

/// The lowest bit of each value.
pub(crate) fn put_bits(plane: &mut [u8], lane: usize, values: &[u8; 32]) {
    for (quad, four) in values.as_chunks::<4>().0.iter().enumerate() {
        let bits = four.iter().rev().fold(0, |bits, v| bits << 1 | v & 1);
        plane[8 * quad + lane / 2] |= bits << (4 * (lane % 2));
    }
}

fn put_six_bits(out: &mut [u8], lane: usize, values: &[u8; 32]) {
    put_nibbles(out, lane, values);
    put_crumbs(&mut out[NIBBLE_PLANE..], lane, &values.map(|v| v >> 4));
}

fn put_five_bits(out: &mut [u8], lane: usize, values: &[u8; 32]) {
    put_nibbles(out, lane, values);
    put_bits(&mut out[NIBBLE_PLANE..], lane, &values.map(|v| v >> 4));
}

/// The code of an IQ4 value.
fn code(value: i8) -> u8 {
    CODEBOOK.partition_point(|&v| v < value) as u8
}
