//! The header of one GGUF file, read and checked as a whole.

use super::cursor::Cursor;
use super::tensor_info::MIN_ENTRY_BYTES;
use super::{Error, Metadata, TensorInfo, ValueType};
use crate::LooksLike;
use crate::name_index::NameIndex;

/// First bytes of every file.
const MAGIC: &[u8; 4] = b"GGUF";

/// Alignment of tensor data where the file names none (`GGUF_DEFAULT_ALIGNMENT` of ggml).
const DEFAULT_ALIGNMENT: u64 = 32;

/// Most metadata entries; real models have 20 to 60.
const MAX_ENTRIES: u64 = 1 << 16;

/// Most tensors of a file; real models have up to about 3,000.
const MAX_TENSORS: u64 = 1 << 20;

/// Least bytes of a metadata entry: key length, one byte of key, value type, one byte of value.
const MIN_METADATA_BYTES: usize = 8 + 1 + 4 + ValueType::U8.min_bytes();

/// Everything that a file says before its tensor data.
#[derive(Clone, Debug)]
pub struct Header {
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
}

impl Header {
    /// Reads the header of `file`, the bytes of a whole file, and checks the tensor table against
    /// its length.
    ///
    /// Pure: reads nothing else. Time and memory are proportional to the header, up to n log n in
    /// the number of names. Memory is at most six times the size of the header, and a few KiB.
    ///
    /// # Errors
    /// Every [`Error`] but those about files and split models.
    pub fn parse(file: &[u8]) -> Result<Self, Error> {
        let mut cursor = Cursor::new(file);
        let version = read_preamble(&mut cursor, file)?;
        let n_tensors = cursor.count("tensor count", MIN_ENTRY_BYTES, MAX_TENSORS)?;
        let n_entries = cursor.count("metadata count", MIN_METADATA_BYTES, MAX_ENTRIES)?;
        let mut entries = Vec::with_capacity(n_entries);
        for _ in 0..n_entries {
            let key = cursor.name("metadata key")?;
            entries.push((key.to_owned(), cursor.value(key)?));
        }
        let metadata = Metadata::from_entries(entries)?;
        cursor.fits(n_tensors as u64, "tensor table", MIN_ENTRY_BYTES)?;
        let mut tensors = Vec::with_capacity(n_tensors);
        for _ in 0..n_tensors {
            tensors.push(TensorInfo::read(&mut cursor)?);
        }
        place_tensors(&mut tensors, alignment(&metadata)?, cursor.offset())?;
        check_layout(&tensors, file.len() as u64)?;
        Ok(Self {
            version,
            metadata,
            tensors,
        })
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The key-value pairs.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors in the order of the table.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Splits the header into its halves.
    pub(super) fn into_parts(self) -> (Metadata, Vec<TensorInfo>) {
        (self.metadata, self.tensors)
    }
}

/// Magic and version.
fn read_preamble(cursor: &mut Cursor<'_>, file: &[u8]) -> Result<u32, Error> {
    let start = &file[..file.len().min(MAGIC.len())];
    if start.is_empty() || !MAGIC.starts_with(start) {
        return Err(Error::NotGguf {
            looks_like: LooksLike::of(file),
        });
    }
    cursor.take(MAGIC.len() as u64, "magic")?;
    match cursor.u32("version")? {
        version @ (2 | 3) => Ok(version),
        // Versions are small numbers: with the low half 0 the bytes are in the other order.
        version if version & 0xffff == 0 && version != 0 => Err(Error::BigEndian {
            version: version.swap_bytes(),
        }),
        version => Err(Error::Version { version }),
    }
}

/// `general.alignment`.
fn alignment(metadata: &Metadata) -> Result<u64, Error> {
    let alignment = metadata
        .opt_u64("general.alignment")?
        .unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() {
        return Err(Error::Alignment { alignment });
    }
    Ok(alignment)
}

/// Turns offsets from the start of the data into offsets in the file.
fn place_tensors(tensors: &mut [TensorInfo], alignment: u64, end: u64) -> Result<(), Error> {
    let data_start = end
        .checked_next_multiple_of(alignment)
        .ok_or(Error::Alignment { alignment })?;
    tensors
        .iter_mut()
        .try_for_each(|tensor| tensor.place(data_start, alignment))
}

/// Checks that names are unique and that tensors lie in the file without overlap.
fn check_layout(tensors: &[TensorInfo], file_bytes: u64) -> Result<(), Error> {
    index_tensors(tensors)?;
    if let Some(last) = tensors.iter().max_by_key(|t| t.end())
        && last.end() > file_bytes
    {
        return Err(Error::Truncated {
            tensor: last.name().to_owned(),
            expected: last.end(),
            actual: file_bytes,
        });
    }
    let mut by_place: Vec<&TensorInfo> = tensors.iter().collect();
    by_place.sort_by_key(|t| (t.start(), t.end()));
    match by_place
        .windows(2)
        .find(|pair| pair[0].end() > pair[1].start())
    {
        Some(pair) => Err(Error::Overlap {
            first: pair[0].name().to_owned(),
            second: pair[1].name().to_owned(),
        }),
        None => Ok(()),
    }
}

/// The index by name; names are unique.
pub(super) fn index_tensors(tensors: &[TensorInfo]) -> Result<NameIndex, Error> {
    NameIndex::new(tensors, TensorInfo::name).map_err(|at| Error::DuplicateTensor {
        tensor: tensors[at].name().to_owned(),
    })
}
