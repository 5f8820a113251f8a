//! Safetensors: the weight format of Hugging Face.
//!
//! A file has three parts: the length of the header (u64, little endian), the header, and the data.
//! The header is JSON: tensor name to dtype, shape and range, which counts into the data. As the
//! format demands, the ranges must cover the data without gap or overlap. So nothing can hide in a
//! file and it has exactly one expected length.
//!
//! Any dtype opens, and so does an empty tensor; reading either is an error.
//!
//! The header is read by our own code, not by the `safetensors` crate. That crate refuses a whole
//! file for one unknown dtype and takes the last of several tensors with one name. It does not say
//! which values disagree. Its writer is what the tests read.
//!
//! Source: the format section of the `safetensors` README.

mod header;

use std::ops::Range;
use std::path::{Path, PathBuf};

use paceline_base::{BlockType, Bytes};

use crate::LooksLike;
use crate::name_index::NameIndex;
use crate::tensor::{FindArrivals, MappedBytes, OpenError, Tensor};

pub use header::Header;

/// Why a safetensors file or a tensor of it cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("{}: {error}", path.display())]
    InFile { path: PathBuf, error: Box<Error> },
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("not a safetensors file: {looks_like}")]
    NotSafetensors {
        /// Kind of file that it seems to be.
        looks_like: LooksLike,
    },
    #[error(
        "header of {header_bytes} bytes, but the file has {file_bytes}: truncated, or the length \
         lies"
    )]
    HeaderPastEnd { header_bytes: u64, file_bytes: u64 },
    #[error("header of {header_bytes} bytes, at most {max} are allowed")]
    HeaderTooLong {
        header_bytes: u64,
        /// The most that is allowed.
        max: u64,
    },
    /// The header is not the JSON that the format requires.
    #[error("header: {0}")]
    Json(#[from] serde_json::Error),
    /// The shape of a tensor to read is empty, or its number of values does not fit the machine.
    #[error("tensor {tensor}: shape {shape:?} is empty or too large")]
    Shape {
        tensor: String,
        /// Sizes, outermost first.
        shape: Vec<u64>,
    },
    /// The range of a tensor is not as long as its dtype and shape say.
    #[error(
        "tensor {tensor}: range {start}..{end} has not the {expected} bytes of {dtype} {shape:?}"
    )]
    SizeMismatch {
        tensor: String,
        dtype: String,
        /// Sizes, outermost first.
        shape: Vec<usize>,
        start: u64,
        /// Byte behind the last.
        end: u64,
        /// Length by dtype and shape.
        expected: u64,
    },
    #[error("tensor {tensor}: range {start}..{end} is reversed")]
    Reversed {
        tensor: String,
        start: u64,
        /// Byte behind the last.
        end: u64,
    },
    /// A tensor that does not begin where the one before ends.
    #[error("tensor {tensor}: data start at {start}, expected {expected}: a gap or an overlap")]
    NotContiguous {
        tensor: String,
        start: u64,
        expected: u64,
    },
    /// The file is longer or shorter than header and ranges say.
    #[error("file has {actual} bytes, expected {expected}: truncated, or not what the header says")]
    Length { expected: u64, actual: u64 },
    #[error("tensor {tensor} is missing")]
    MissingTensor { tensor: String },
    /// A tensor of a dtype that paceline does not read.
    #[error("tensor {tensor}: dtype {dtype} is not supported, expected F32, F16 or BF16")]
    Dtype { tensor: String, dtype: String },
}

impl Error {
    /// Adds the path of the file, once.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        match self {
            Self::InFile { .. } => self,
            error => Self::InFile {
                path: path.to_owned(),
                error: Box::new(error),
            },
        }
    }
}

/// A tensor of a file: name, dtype and place.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    /// Within the file.
    range: Range<usize>,
}

impl TensorInfo {
    /// Name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of the dtype in the file, for example `BF16` or `I64`.
    pub fn dtype(&self) -> &str {
        &self.dtype
    }

    /// Sizes, outermost first; 0 is possible.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Byte range in the file; inside it and disjoint from every other tensor.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The dtype as a storage type.
    ///
    /// # Errors
    /// [`Error::Dtype`].
    pub fn block_type(&self) -> Result<BlockType, Error> {
        match self.dtype.as_str() {
            "F32" => Ok(BlockType::F32),
            "F16" => Ok(BlockType::F16),
            "BF16" => Ok(BlockType::BF16),
            _ => Err(Error::Dtype {
                tensor: self.name.clone(),
                dtype: self.dtype.clone(),
            }),
        }
    }
}

/// An open safetensors file; see [`crate::tensor`] for what the mapping demands.
#[derive(Debug)]
pub struct Safetensors {
    path: PathBuf,
    bytes: MappedBytes,
    tensors: Vec<TensorInfo>,
    index: NameIndex,
}

impl Safetensors {
    /// Maps the file at `path` and checks its header.
    ///
    /// # Errors
    /// [`Error::InFile`] with what is wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let open = || {
            let bytes = MappedBytes::open(path)?;
            let Header { tensors, index } = Header::parse(&bytes)?;
            Ok(Self {
                path: path.to_owned(),
                bytes,
                tensors,
                index,
            })
        };
        open().map_err(|e: Error| e.in_file(path))
    }

    /// Makes every later read of weights wait for the progress that `find` returns.
    pub(crate) fn arrive_by(&mut self, find: &FindArrivals<'_>) -> Result<(), Error> {
        let arriving = self.bytes.arriving_by(&self.path, find);
        self.bytes = arriving.map_err(|error| Error::from(error).in_file(&self.path))?;
        Ok(())
    }

    /// All tensors, in the order of their data.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// The entry of a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.index.find(&self.tensors, TensorInfo::name, name)
    }

    /// The tensor called `name`. Copies no weights.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::Dtype`], and [`Error::Shape`] for a tensor without
    /// values, as [`Error::InFile`].
    pub fn tensor(&self, name: &str) -> Result<Tensor, Error> {
        self.find(name).map_err(|e| e.in_file(&self.path))
    }

    fn find(&self, name: &str) -> Result<Tensor, Error> {
        let tensor = name.to_owned();
        let Some(info) = self.info(name) else {
            return Err(Error::MissingTensor { tensor });
        };
        if info.shape.contains(&0) {
            let shape = info.shape.iter().map(|&n| n as u64).collect();
            return Err(Error::Shape { tensor, shape });
        }
        let block_type = info.block_type()?;
        let bytes = self.bytes_of(info);
        Ok(Tensor {
            name: tensor,
            block_type,
            shape: info.shape.clone(),
            bytes,
        })
    }

    /// The bytes of a tensor of this file, of any dtype; none for an empty one.
    pub fn bytes_of(&self, info: &TensorInfo) -> MappedBytes {
        self.bytes
            .slice(info.range())
            .expect("ranges were checked against the file")
    }

    /// Checks that the file has a tensor of that name, of any dtype.
    pub(crate) fn require(&self, name: &str) -> Result<(), Error> {
        match self.info(name) {
            Some(_) => Ok(()),
            None => Err(Error::MissingTensor {
                tensor: name.to_owned(),
            }
            .in_file(&self.path)),
        }
    }

    /// Size of the file.
    pub fn file_bytes(&self) -> Bytes {
        Bytes(self.bytes.len() as u64)
    }

    /// The bytes of the file, and the length of the prefix before its weights. Does not wait:
    /// weights that have not arrived are zero.
    pub fn content(&self) -> (&[u8], usize) {
        let starts = self.tensors.iter().map(|tensor| tensor.range().start);
        let bytes = self.bytes.as_they_are();
        (bytes, starts.min().unwrap_or(bytes.len()))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
