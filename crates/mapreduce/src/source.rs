//! Input of rows: the trait [`RowSource`], files and memory.

use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::npy::{self, HEADER_BYTES_MAX, NpyError};
use crate::{Dtype, Error};

/// Rows of values of one type, which can be read in any order, by many threads.
pub trait RowSource: Send + Sync {
    /// Type of the values.
    fn dtype(&self) -> Dtype;

    fn rows(&self) -> u64;

    /// Values of a row.
    fn columns(&self) -> u64;

    /// Reads rows into `bytes`, whose length is that of the rows: little-endian, row by row.
    ///
    /// # Errors
    /// Errors of the system; an end before the last row.
    fn read(&self, rows: Range<u64>, bytes: &mut [u8]) -> Result<(), Error>;
}

/// A file of values, described: what a worker needs to open it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    pub path: PathBuf,
    /// Type of its values.
    pub dtype: Dtype,
    /// Bytes before the first.
    pub data_at: u64,
    pub rows: u64,
    /// Values of a row: the product of all axes but the first.
    pub columns: u64,
}

impl InputFile {
    /// Describes a `.npy` file. Its first axis is the rows; an array without axes is one row.
    ///
    /// # Errors
    /// [`Error::Npy`] names what is wrong with the header; [`Error::File`].
    pub fn npy(path: &Path) -> Result<Self, Error> {
        let refuse = |problem| Error::Npy {
            path: path.to_owned(),
            problem,
        };
        let (file, bytes) = open(path)?;
        let mut head = Vec::new();
        let read = file
            .take(HEADER_BYTES_MAX as u64 + 12)
            .read_to_end(&mut head);
        read.map_err(|source| Error::file("read", path, source))?;
        let header = npy::parse(&head, bytes).map_err(refuse)?;
        let (rows, others) = header.shape.split_first().unwrap_or((&1, &[]));
        Ok(Self {
            path: path.to_owned(),
            dtype: header.dtype,
            data_at: header.data_at,
            rows: *rows,
            // A shape with a 0 may have any other axes, even ones whose product overflows.
            columns: others
                .iter()
                .try_fold(1u64, |n, axis| n.checked_mul(*axis))
                .unwrap_or(0),
        })
    }

    /// Describes a file of nothing but values.
    ///
    /// # Errors
    /// [`Error::Npy`] when it has no whole number of rows; [`Error::File`].
    pub fn raw(path: &Path, dtype: Dtype, columns: u64) -> Result<Self, Error> {
        let (_, bytes) = open(path)?;
        let row = columns
            .checked_mul(dtype.bytes() as u64)
            .filter(|row| *row > 0);
        let rows = row.map_or(0, |row| bytes / row);
        if row.is_none_or(|row| bytes % row != 0) {
            return Err(Error::Npy {
                path: path.to_owned(),
                problem: NpyError::Length {
                    got: bytes,
                    expected: rows.saturating_mul(row.unwrap_or(0)),
                },
            });
        }
        Ok(Self {
            path: path.to_owned(),
            dtype,
            data_at: 0,
            rows,
            columns,
        })
    }

    pub fn row_bytes(&self) -> u64 {
        self.columns * self.dtype.bytes() as u64
    }

    /// Bytes of all values.
    pub fn bytes(&self) -> u64 {
        self.rows * self.row_bytes()
    }

    /// Fingerprint of the contents: FNV-1a of the length and of 16 pieces of 4 KiB evenly over the
    /// values. Costs 16 reads.
    pub fn fingerprint(&self) -> Result<u64, Error> {
        const PIECES: u64 = 16;
        const PIECE_BYTES: u64 = 4096;
        let source = self.open()?;
        let mut hash = 0xcbf2_9ce4_8422_2325;
        let mut add = |bytes: &[u8]| {
            for byte in bytes {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
            }
        };
        add(&self.bytes().to_le_bytes());
        let last = self.bytes().saturating_sub(PIECE_BYTES);
        let mut piece = vec![0; PIECE_BYTES.min(self.bytes()) as usize];
        for number in 0..PIECES {
            let at = self.data_at + last / (PIECES - 1) * number;
            let read = source.file.read_exact_at(&mut piece, at);
            read.map_err(|error| Error::file("read", &self.path, error))?;
            add(&piece);
        }
        Ok(hash)
    }

    /// Whether `other` has as many rows.
    ///
    /// # Errors
    /// [`Error::Shapes`] if not.
    pub(crate) fn paired_with(&self, other: &Self) -> Result<(), Error> {
        match other.rows == self.rows {
            true => Ok(()),
            false => Err(Error::Shapes {
                path: other.path.clone(),
                got: other.rows,
                expected: self.rows,
            }),
        }
    }

    /// The same values as rows of one.
    pub const fn flat(mut self) -> Self {
        self.rows *= self.columns;
        self.columns = 1;
        self
    }

    /// Opens it.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Changed`] when it is no longer as described.
    pub fn open(&self) -> Result<FileSource, Error> {
        let (file, bytes) = open(&self.path)?;
        if bytes < self.data_at + self.bytes() {
            return Err(Error::Changed {
                path: self.path.clone(),
            });
        }
        Ok(FileSource {
            input: self.clone(),
            file,
        })
    }
}

fn open(path: &Path) -> Result<(File, u64), Error> {
    let wrong = |source| Error::file("open", path, source);
    let file = File::open(path).map_err(wrong)?;
    let facts = file.metadata().map_err(wrong)?;
    if !facts.is_file() {
        let kind = std::io::Error::other("no regular file");
        return Err(Error::file("open", path, kind));
    }
    Ok((file, facts.len()))
}

/// An open file. Reads copy from the system's page cache. A file that shrinks meanwhile is an
/// error, not a signal, and memory does not grow with the file.
#[derive(Debug)]
pub struct FileSource {
    input: InputFile,
    file: File,
}

impl FileSource {
    /// Reads values of a row from a column on, as many as `bytes` has room for.
    pub(crate) fn read_columns(
        &self,
        row: u64,
        column: u64,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let before = row * self.input.columns + column;
        let at = self.input.data_at + before * self.input.dtype.bytes() as u64;
        let read = self.file.read_exact_at(bytes, at);
        read.map_err(|source| Error::file("read", &self.input.path, source))
    }
}

impl RowSource for FileSource {
    fn dtype(&self) -> Dtype {
        self.input.dtype
    }

    fn rows(&self) -> u64 {
        self.input.rows
    }

    fn columns(&self) -> u64 {
        self.input.columns
    }

    fn read(&self, rows: Range<u64>, bytes: &mut [u8]) -> Result<(), Error> {
        let at = self.input.data_at + rows.start * self.input.row_bytes();
        let read = self.file.read_exact_at(bytes, at);
        read.map_err(|source| Error::file("read", &self.input.path, source))
    }
}

/// Values in memory, one column.
#[derive(Debug)]
pub struct MemorySource<'a>(pub &'a [f64]);

impl RowSource for MemorySource<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F64
    }

    fn rows(&self) -> u64 {
        self.0.len() as u64
    }

    fn columns(&self) -> u64 {
        1
    }

    fn read(&self, rows: Range<u64>, bytes: &mut [u8]) -> Result<(), Error> {
        let values = &self.0[rows.start as usize..rows.end as usize];
        for (into, value) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(values) {
            *into = value.to_le_bytes();
        }
        Ok(())
    }
}
