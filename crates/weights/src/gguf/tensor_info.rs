//! The tensor half of a GGUF header.

use std::ops::Range;

use paceline_base::{BlockType, UnknownBlockType};

use super::Error;
use super::cursor::Cursor;

/// Most dimensions of a tensor (`GGML_MAX_DIMS` of ggml).
const MAX_DIMS: u32 = 4;

/// Least bytes of an entry of the tensor table: name length, one byte of name, number of
/// dimensions, storage type and offset.
pub(super) const MIN_ENTRY_BYTES: usize = 8 + 1 + 4 + 4 + 8;

/// A tensor of a file: name, storage and place.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    name: String,
    shape: Vec<usize>,
    type_id: u32,
    /// Bytes from the start of the tensor data; `None` when the storage type is not known.
    bytes: Option<usize>,
    /// From the start of the tensor data; after [`place`](Self::place), of the file.
    start: u64,
    /// Part of a split model, from 0.
    pub(super) part: usize,
}

impl TensorInfo {
    /// Name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sizes, outermost first (the file has them innermost first); none is 0.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Storage type of the values.
    ///
    /// # Errors
    /// [`UnknownBlockType`] for a type that paceline does not read.
    pub fn block_type(&self) -> Result<BlockType, UnknownBlockType> {
        BlockType::from_gguf(self.type_id)
    }

    pub fn values(&self) -> usize {
        self.shape.iter().product()
    }

    /// Byte range in the file; `None` when the storage type is unknown.
    ///
    /// Inside the file, and disjoint from the range of every other tensor.
    pub fn range(&self) -> Option<Range<usize>> {
        let start = usize::try_from(self.start).ok()?;
        Some(start..start.checked_add(self.bytes?)?)
    }

    /// Reads one entry; its offset is not placed in the file yet.
    pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<Self, Error> {
        let name = cursor.name("tensor name")?.to_owned();
        let dims = cursor.u32("number of dimensions")?;
        if dims > MAX_DIMS {
            return Err(Error::TooManyDims {
                tensor: name,
                dims,
                max: MAX_DIMS,
            });
        }
        let mut sizes = Vec::with_capacity(dims as usize);
        for _ in 0..dims {
            sizes.push(cursor.u64("tensor dimension")?);
        }
        sizes.reverse();
        let type_id = cursor.u32("storage type")?;
        let start = cursor.u64("tensor offset")?;
        let Some(shape) = checked_shape(&sizes) else {
            return Err(Error::Shape {
                tensor: name,
                shape: sizes,
            });
        };
        let bytes = match BlockType::from_gguf(type_id) {
            Ok(block_type) => Some(stored_bytes(&name, block_type, &shape)?),
            Err(_) => None,
        };
        Ok(Self {
            name,
            shape,
            type_id,
            bytes,
            start,
            part: 0,
        })
    }

    /// Moves the offset from the tensor data to the file, where the data begin at `data_start`.
    ///
    /// Saturates: no file is 2^64 bytes long, so the check against its length still fails.
    pub(super) fn place(&mut self, data_start: u64, alignment: u64) -> Result<(), Error> {
        if !self.start.is_multiple_of(alignment) {
            return Err(Error::Misaligned {
                tensor: self.name.clone(),
                offset: self.start,
                alignment,
            });
        }
        self.start = self.start.saturating_add(data_start);
        Ok(())
    }

    /// Offset of the first byte.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// Offset behind the last byte; of the first when the storage type is not known.
    pub(super) fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes.unwrap_or(0) as u64)
    }
}

/// The sizes as the machine's integers, when none is 0 and their product fits.
fn checked_shape(sizes: &[u64]) -> Option<Vec<usize>> {
    let shape: Vec<usize> = sizes
        .iter()
        .map(|&n| n.try_into().ok())
        .collect::<Option<_>>()?;
    let values = shape
        .iter()
        .try_fold(1_usize, |product, &n| product.checked_mul(n))?;
    (values > 0).then_some(shape)
}

/// Bytes of a tensor of `shape`, outermost first.
fn stored_bytes(name: &str, block_type: BlockType, shape: &[usize]) -> Result<usize, Error> {
    let (cols, outer) = shape
        .split_last()
        .map_or((1, &[][..]), |(&cols, outer)| (cols, outer));
    if !cols.is_multiple_of(block_type.len()) {
        return Err(Error::PartialBlock {
            tensor: name.to_owned(),
            shape: shape.to_vec(),
            name: block_type.name(),
            block: block_type.len(),
        });
    }
    let rows: usize = outer.iter().product(); // fits: the product with cols was checked
    let bytes = block_type
        .row_bytes(cols)
        .and_then(|row| row.checked_mul(rows));
    bytes.ok_or_else(|| Error::Shape {
        tensor: name.to_owned(),
        shape: shape.iter().map(|&n| n as u64).collect(),
    })
}
