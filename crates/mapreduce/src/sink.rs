//! Output of rows.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::npy::{self, HEADER_BYTES_MAX};
use crate::{Dtype, Error, Values};

/// A column that many threads and processes write, each its own rows, in any order.
pub trait Sink: fmt::Debug + Send + Sync {
    /// Type of the values.
    fn dtype(&self) -> Dtype;

    /// Writes values, little-endian, from `first_row` on.
    fn write_bytes(&self, first_row: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Writes values to a column of f64, wide integers as the nearest ones; how many.
    fn write(&self, first_row: u64, values: &Values<'_>) -> Result<u64, Error> {
        let mut room = Vec::new();
        let values = values.nearest(&mut room);
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.write_bytes(first_row, &bytes)?;
        Ok(values.len() as u64)
    }
}

/// A `.npy` file that is there in full length.
#[derive(Debug)]
pub struct FileSink {
    path: PathBuf,
    file: File,
    dtype: Dtype,
    data_at: u64,
}

impl FileSink {
    /// Makes a file for an array of this shape, all 0 at first. Replaces one that is there.
    pub fn create(path: &Path, dtype: Dtype, shape: &[u64]) -> Result<(), Error> {
        let wrong = |source| Error::file("write", path, source);
        let header = npy::write(dtype, shape);
        let mut file = File::create(path).map_err(wrong)?;
        file.write_all(&header).map_err(wrong)?;
        let bytes = header.len() as u64 + dtype.bytes() as u64 * shape.iter().product::<u64>();
        file.set_len(bytes).map_err(wrong)
    }

    /// Opens a file that [`create`](Self::create) has made.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let wrong = |source| Error::file("write", path, source);
        let open = OpenOptions::new().read(true).write(true).open(path);
        let file = open.map_err(wrong)?;
        let length = file.metadata().map_err(wrong)?.len();
        let mut head = Vec::new();
        let mut start = (&file).take(HEADER_BYTES_MAX as u64 + 12);
        start.read_to_end(&mut head).map_err(wrong)?;
        let header = npy::parse(&head, length).map_err(|problem| Error::Npy {
            path: path.to_owned(),
            problem,
        })?;
        Ok(Self {
            path: path.to_owned(),
            file,
            dtype: header.dtype,
            data_at: header.data_at,
        })
    }
}

impl Sink for FileSink {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn write_bytes(&self, first_row: u64, bytes: &[u8]) -> Result<(), Error> {
        let at = self.data_at + self.dtype.bytes() as u64 * first_row;
        let written = self.file.write_all_at(bytes, at);
        written.map_err(|source| Error::file("write", &self.path, source))
    }
}
