//! Packs parts of stored matrices for the kernels, or reads them from the packed weights on disk.

use std::ops::Range;
use std::sync::Mutex;

use paceline_base::{KernelClass, lock};
use paceline_tensor::{PackOptions, PackedMatrix, StoredMatrix, UNIT};
use paceline_weights::mlx::Quantised;
use paceline_weights::tensor::MappedBytes;

use super::loader::ShardLoader;
use super::stored::{ROWS_JOINED, StoredTensor};
use super::{Linear, Summed};
use crate::packed_file::PackedFile;
use crate::split::LeafCut;
use crate::{Error, Role};

impl ShardLoader<'_> {
    /// Refuses an expert's matrix with values that are not finite. A row routed to it would become
    /// NaN, while all other rows, even in the same batch, would look right.
    pub(super) fn check_finite(&self, role: Role, shape: [usize; 2]) -> Result<(), Error> {
        if self.packed.is_some_and(PackedFile::is_complete) {
            return Ok(()); // checked when they were packed
        }
        let stored = self.names.as_stored(role, shape)?;
        match stored.not_finite(self.pool) {
            None => Ok(()),
            Some(got) => Err(Error::NotFinite {
                name: stored.name().to_owned(),
                got,
            }),
        }
    }

    /// Packs a whole matrix; `as_f32` overrides the class.
    pub(super) fn whole(
        &self,
        role: Role,
        shape: [usize; 2],
        as_f32: bool,
    ) -> Result<PackedMatrix, Error> {
        let part = (0..shape[0], 0..shape[1]);
        self.packed(role, shape, part, |stored, mut options| {
            options.as_f32 |= as_f32;
            self.matrix(stored, 0..stored.cols, options)
        })
    }

    /// Packs the rows `mine` of a matrix and releases its file pages.
    pub(super) fn rows(
        &self,
        role: Role,
        shape: [usize; 2],
        mine: Range<usize>,
    ) -> Result<Linear, Error> {
        let bias = self.names.bias(role, shape[0])?;
        let bias = bias.map(|bias| bias[mine.clone()].to_vec());
        let part = (mine, 0..shape[1]);
        let matrix = self.packed(role, shape, part, |stored, options| {
            self.matrix(stored, 0..stored.cols, options)
        })?;
        Ok(Linear { matrix, bias })
    }

    /// Packs this rank's columns of a matrix, each root separately.
    pub(super) fn summed(&self, role: Role, cols: usize, cut: &LeafCut) -> Result<Summed, Error> {
        let width = self.config.width;
        let bias = self.names.bias(role, width)?;
        let mine = cut.columns();
        // Extended to whole units: the packed form of a column depends on its whole unit.
        let held = mine.start / UNIT * UNIT..mine.end.next_multiple_of(UNIT).min(cols);
        let held = if mine.is_empty() { mine.clone() } else { held };
        let part = (0..width, held.clone());
        let roots = self.packed(role, [width, cols], part, |stored, mut options| {
            options.leaf_cols = cut.leaf_cols;
            // A matrix from the file has all columns, a joined one only those of `held`.
            let before = if stored.cols == cols { 0 } else { held.start };
            let root = |columns: Range<usize>| {
                let first_col = columns.start - mine.start;
                let columns = columns.start - before..columns.end - before;
                Ok((first_col, self.matrix(stored, columns, options)?))
            };
            cut.root_columns().into_iter().map(root).collect()
        })?;
        Ok(Summed { roots, bias })
    }

    /// Finds a matrix, checks its shape, packs the rows of `part` and releases the file's pages.
    /// The packed matrix has all columns, or those of `part` if it had to be joined.
    pub(super) fn packed<T>(
        &self,
        role: Role,
        shape: [usize; 2],
        (rows, cols): (Range<usize>, Range<usize>),
        pack: impl Fn(StoredMatrix<'_>, PackOptions) -> Result<T, paceline_tensor::Error>,
    ) -> Result<T, Error> {
        let options = PackOptions {
            leaf_cols: 0,
            as_f32: self.class == KernelClass::CpuF32,
        };
        match self.names.located(role, shape)? {
            StoredTensor::Whole(tensor) => {
                // While the file downloads, only these rows must have arrived.
                let row = tensor.bytes.len().checked_div(shape[0]).unwrap_or(0);
                let mine = tensor.bytes.slice(rows.start * row..rows.end * row);
                let mine = mine.expect("the rows are of the matrix").arrived()?;
                let part = StoredMatrix {
                    block_type: tensor.block_type,
                    rows: rows.len(),
                    cols: shape[1],
                    bytes: &mine,
                };
                let packed = pack(part, options);
                tensor.bytes.discard();
                packed.map_err(|source| pack_error(&tensor.name, source))
            }
            StoredTensor::Mlx(matrix) => {
                let mut part = StoredMatrix {
                    block_type: matrix.block_type,
                    rows: rows.len(),
                    cols: cols.len(),
                    bytes: &[],
                };
                // A damaged record needs the stored bytes after all.
                if self.packed.is_some_and(PackedFile::is_complete)
                    && let Ok(packed) = pack(part, options)
                {
                    return Ok(packed);
                }
                let joined = self.joined(&matrix, rows.clone(), &cols)?;
                part.bytes = &joined;
                let packed = pack(part, options);
                packed.map_err(|source| pack_error(&matrix.name, source))
            }
        }
    }

    /// Packs columns of a matrix, or reads them from the packed weights on disk.
    pub(super) fn matrix(
        &self,
        stored: StoredMatrix<'_>,
        columns: Range<usize>,
        options: PackOptions,
    ) -> Result<PackedMatrix, paceline_tensor::Error> {
        let pack = || PackedMatrix::of_columns(stored, columns.clone(), options, self.pool);
        match self.packed {
            Some(file) => file.matrix(stored, (columns.clone(), options), self.pool, pack),
            None => pack(),
        }
    }

    /// Joins a part of a matrix that is stored in separate tensors, on all threads.
    pub(super) fn joined(
        &self,
        matrix: &Quantised,
        rows: Range<usize>,
        cols: &Range<usize>,
    ) -> Result<MappedBytes, Error> {
        // While the file downloads, only these rows must have arrived.
        let own = matrix.row_range(rows.clone());
        let own = own.expect("the rows are of the matrix").arrived()?;
        let row_bytes = cols.len() / matrix.block_type.len() * matrix.block_type.bytes();
        let len = rows.len() * row_bytes; // 0 for a rank without a part; maps are never empty
        let bytes = MappedBytes::filled(len.max(1), |out| {
            let out = &mut out[..len];
            let n = rows.len().div_ceil(ROWS_JOINED);
            let parts = out.chunks_mut((ROWS_JOINED * row_bytes).max(1));
            let parts = Mutex::new(parts.enumerate());
            self.pool.run(n, &|_| {
                let next = lock(&parts).next();
                if let Some((i, part)) = next {
                    own.join(i * ROWS_JOINED, cols, part);
                }
            });
        });
        matrix.discard();
        let bytes = bytes.map(|bytes| bytes.slice(0..len).expect("all but the filling"));
        bytes.map_err(|error| {
            let tensor = matrix.name.clone();
            paceline_weights::hf::Error::Memory { tensor, error }.into()
        })
    }
}

pub(crate) fn pack_error(name: &str, source: paceline_tensor::Error) -> Error {
    Error::Pack {
        name: name.to_owned(),
        source,
    }
}
