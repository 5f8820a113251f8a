//! A matrix as the files store it: one tensor of rows, or separate values and scales.
//!
//! [`StoredTensor`] gives rows without packing, and finds values that are not finite.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use paceline_base::{BlockType, lock};
use paceline_tensor::{ThreadPool, storage};
use paceline_weights::mlx::{BLOCK_BYTES_MAX, Quantised};
use paceline_weights::tensor::{MappedBytes, Tensor};

use crate::Error;

/// A matrix in the mapped files. Embeddings are read from it row by row.
#[derive(Debug)]
pub enum StoredTensor {
    /// A tensor of rows.
    Whole(Tensor),
    /// Separate values and scales, in MLX's layout or in another.
    Mlx(Quantised),
}

impl StoredTensor {
    /// Its bytes in the files, values before scales.
    pub fn parts(&self) -> Vec<&MappedBytes> {
        match self {
            Self::Whole(tensor) => vec![&tensor.bytes],
            Self::Mlx(matrix) => matrix.parts().collect(),
        }
    }

    /// The name in the file.
    pub fn name(&self) -> &str {
        match self {
            Self::Whole(tensor) => &tensor.name,
            Self::Mlx(matrix) => &matrix.name,
        }
    }

    /// The rows `rows`, without a copy.
    ///
    /// # Panics
    /// If the matrix has fewer.
    pub fn row_range(&self, rows: Range<usize>) -> Self {
        match self {
            Self::Whole(tensor) => {
                let row = tensor.bytes.len() / tensor.rows();
                let own = tensor.bytes.slice(rows.start * row..rows.end * row);
                Self::Whole(Tensor {
                    name: tensor.name.clone(),
                    shape: vec![rows.len(), tensor.cols()],
                    bytes: own.expect("the rows are of the matrix"),
                    ..*tensor
                })
            }
            Self::Mlx(matrix) => {
                let own = matrix.row_range(rows);
                Self::Mlx(own.expect("the rows are of the matrix"))
            }
        }
    }

    /// The same with separate parts only as MLX has them; others are joined in memory.
    pub fn for_mlx(self) -> Result<Self, Error> {
        Ok(match self {
            Self::Mlx(matrix) if !matrix.scheme.mode.is_mlx() => Self::Whole(matrix.joined()?),
            other => other,
        })
    }

    /// Waits until all of it is downloaded, so that later reads do not block.
    pub fn arrived(self) -> Result<Self, Error> {
        Ok(match self {
            Self::Whole(tensor) => Self::Whole(Tensor {
                bytes: tensor.bytes.arrived()?,
                ..tensor
            }),
            Self::Mlx(matrix) => Self::Mlx(matrix.arrived()?),
        })
    }

    /// The first scale, or float weight, that is infinite or NaN.
    pub(super) fn not_finite(&self, pool: &ThreadPool) -> Option<f32> {
        match self {
            Self::Whole(tensor) => not_finite(tensor.block_type, &tensor.bytes, pool),
            Self::Mlx(matrix) if !matrix.scheme.mode.is_mlx() => joined_not_finite(matrix, pool),
            Self::Mlx(matrix) => {
                let scales = match (&matrix.biases, is_bf16(matrix.block_type)) {
                    (None, _) => return matrix.scales.contains(&u8::MAX).then_some(f32::NAN),
                    (_, true) => BlockType::BF16,
                    (_, false) => BlockType::F16,
                };
                let parts = [Some(&matrix.scales), matrix.biases.as_ref()];
                let mut parts = parts.into_iter().flatten();
                parts.find_map(|part| not_finite(scales, part, pool))
            }
        }
    }

    /// Writes the stored embedding of `token`, `(width,)`.
    pub fn row(&self, token: u32, out: &mut [f32]) {
        match self {
            Self::Whole(tensor) => {
                let bytes = tensor.block_type.row_bytes(out.len());
                let bytes = bytes.expect("checked at load");
                let row = &tensor.bytes[token as usize * bytes..][..bytes];
                storage::dequantise(tensor.block_type, row, out);
            }
            Self::Mlx(matrix) => {
                let mut block = [0; BLOCK_BYTES_MAX];
                let block = &mut block[..matrix.block_type.bytes()];
                let len = matrix.block_type.len();
                for (i, values) in out.chunks_exact_mut(len).enumerate() {
                    matrix.block(token as usize, i, block);
                    storage::dequantise(matrix.block_type, block, values);
                }
            }
        }
    }
}

/// Whether MLX stores scales as bfloat16.
fn is_bf16(block_type: BlockType) -> bool {
    block_type.name().ends_with("BF16")
}

/// Bytes per task of the search for non-finite values: large against the cost of a task.
const LOOKED_AT: usize = 1 << 18;

/// As [`stored::not_finite`], on all threads. With several non-finite values, the reported one may
/// vary.
fn not_finite(block_type: BlockType, bytes: &[u8], pool: &ThreadPool) -> Option<f32> {
    let part = LOOKED_AT / block_type.bytes() * block_type.bytes();
    let found = Mutex::new(None);
    pool.run(bytes.len().div_ceil(part), &|i| {
        let part = &bytes[i * part..bytes.len().min((i + 1) * part)];
        if let Some(bad) = storage::not_finite(block_type, part) {
            *lock(&found) = Some(bad);
        }
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// As [`not_finite`], of a matrix that is joined for it, some rows at a time.
fn joined_not_finite(matrix: &Quantised, pool: &ThreadPool) -> Option<f32> {
    let found = Mutex::new(None);
    pool.run(matrix.rows.div_ceil(ROWS_JOINED), &|i| {
        let first = i * ROWS_JOINED;
        let rows = ROWS_JOINED.min(matrix.rows - first);
        let blocks = rows * matrix.cols / matrix.block_type.len();
        let mut joined = vec![0; blocks * matrix.block_type.bytes()];
        matrix.join(first, &(0..matrix.cols), &mut joined);
        if let Some(bad) = storage::not_finite(matrix.block_type, &joined) {
            *lock(&found) = Some(bad);
        }
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Rows per task when joining: a hundred kilobytes of an 8B model, and many tasks per matrix.
pub(super) const ROWS_JOINED: usize = 64;
