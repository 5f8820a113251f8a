//! Matrices of FP8: values by columns, and scales apart for as many columns as have the same.
//!
//! ```text
//! group:  .. | scales of run 1 | of run 0 || column 0 | column 1 | ..   ||: places count from here
//! ```
//!
//! A column is the bytes of sixteen rows. A *run* is a number of columns in which no row's scale
//! changes: 128 in matrices of DeepSeek, all where a row has one scale.

use std::ops::Range;

use paceline_base::BlockType;

use crate::isa::LANES;
use crate::memory::HugeMap;
use crate::pool::{DisjointMut, ThreadPool};
use crate::storage::Chunk;
use crate::{Error, StoredMatrix};

/// Bytes of a stored block's scale.
const SCALE: usize = size_of::<f32>();
/// Bytes of the scales of a run.
pub(crate) const SCALES: usize = SCALE * LANES;
/// Kernels read values that are this much too small ([`crate::isa::Isa::load_e4m3`]).
const UNDER: f32 = 256.0;

/// Sizes of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fp8Layout {
    /// Columns.
    pub(crate) cols: usize,
    /// Columns of a run, whole chunks.
    pub(crate) run: usize,
}

impl Fp8Layout {
    fn new(matrix: StoredMatrix<'_>, columns: &Range<usize>, pool: &ThreadPool) -> Self {
        let blocks = columns.len().div_ceil(Chunk::LEN);
        let runs = std::sync::Mutex::new(0);
        pool.run(matrix.rows.div_ceil(LANES), &|g| {
            let mut run = 0;
            for row in g * LANES..matrix.rows.min((g + 1) * LANES) {
                let scale = |block: usize| block_of(matrix, row, columns, block).0;
                for at in (1..blocks).filter(|&at| scale(at) != scale(at - 1)) {
                    run = common_divisor(run, at);
                }
            }
            let mut all = runs
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            *all = common_divisor(*all, run);
        });
        let run = runs
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let run = if run == 0 { blocks.max(1) } else { run };
        Self::with_runs(columns.len(), run * Chunk::LEN)
    }

    /// That of `cols` columns in runs of `run`.
    pub(super) fn with_runs(cols: usize, run: usize) -> Self {
        assert!(run > 0, "columns that share a scale");
        let run = run.min(cols.next_multiple_of(Chunk::LEN)).max(Chunk::LEN);
        Self { cols, run }
    }

    /// Bytes of a group before its first column.
    pub(crate) const fn headers(self) -> usize {
        self.cols.div_ceil(self.run) * SCALES
    }

    pub(crate) const fn group_bytes(self) -> usize {
        self.headers() + self.cols * LANES
    }
}

/// Packs the columns of a matrix of FP8.
///
/// # Errors
/// [`Error::Memory`].
pub(super) fn pack(
    matrix: StoredMatrix<'_>,
    columns: &Range<usize>,
    pool: &ThreadPool,
) -> Result<(Fp8Layout, HugeMap), Error> {
    let layout = Fp8Layout::new(matrix, columns, pool);
    let groups = matrix.rows.div_ceil(LANES);
    let mut data = HugeMap::zeroed(layout.group_bytes() * groups)?;
    if layout.cols > 0 {
        let parts = DisjointMut::new(&mut data, layout.group_bytes());
        pool.run(groups, &|g| {
            // SAFETY: each task writes its own group.
            let (headers, values) = unsafe { parts.part(g) }.split_at_mut(layout.headers());
            for lane in 0..LANES.min(matrix.rows - g * LANES) {
                for block in 0..columns.len() / Chunk::LEN {
                    let (scale, bytes) = block_of(matrix, g * LANES + lane, columns, block);
                    for (k, byte) in bytes.iter().enumerate() {
                        values[(block * Chunk::LEN + k) * LANES + lane] = *byte;
                    }
                    let run = block * Chunk::LEN / layout.run;
                    let at = headers.len() - (run + 1) * SCALES + lane * SCALE;
                    put_scale(&mut headers[at..at + SCALE], scale, bytes);
                }
            }
        });
    }
    Ok((layout, data))
}

/// Writes the scale of a run that has these values, once for each of its blocks. It is no number
/// where one of the values is none, since kernels would read 480.
fn put_scale(out: &mut [u8], scale: u32, values: &[u8]) {
    let before = f32::from_ne_bytes(out.try_into().expect("the bytes of a scale"));
    let nan = before.is_nan() || values.iter().any(|value| value & 127 == 127);
    let scale = if nan {
        f32::NAN
    } else {
        f32::from_bits(scale) * UNDER
    };
    out.copy_from_slice(&scale.to_ne_bytes());
}

/// The scale, as bits, and the values of block `block` of the columns of a row.
fn block_of<'a>(
    matrix: StoredMatrix<'a>,
    row: usize,
    columns: &Range<usize>,
    block: usize,
) -> (u32, &'a [u8]) {
    let bytes = BlockType::FP8.bytes();
    let row_blocks = matrix.cols / Chunk::LEN;
    let at = (row * row_blocks + columns.start / Chunk::LEN + block) * bytes;
    let (scale, values) = matrix.bytes[at..at + bytes].split_at(SCALE);
    let scale = u32::from_le_bytes(scale.try_into().expect("the bytes of a scale"));
    (scale, values)
}

/// The largest number that divides both; 0 is divided by all.
const fn common_divisor(mut a: usize, mut b: usize) -> usize {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}
