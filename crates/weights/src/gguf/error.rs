//! Faults of a GGUF file.

use std::path::PathBuf;

use paceline_base::UnknownBlockType;

use crate::LooksLike;
use crate::tensor::OpenError;

/// Why a GGUF file or a part of it cannot be used.
///
/// Sizes and offsets are in bytes from the start of the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("{}: {error}", path.display())]
    InFile { path: PathBuf, error: Box<Error> },
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("not a GGUF file: {looks_like}")]
    NotGguf {
        /// Kind of file that it seems to be.
        looks_like: LooksLike,
    },
    /// The file has the byte order of big-endian machines.
    #[error("GGUF version {version} in big-endian byte order is not supported")]
    BigEndian {
        /// Version, read in that order.
        version: u32,
    },
    /// A version of the format that is not 2 or 3.
    #[error("GGUF version {version} is not supported, expected 2 or 3")]
    Version { version: u32 },
    #[error(
        "{what} at byte {offset} needs at least {needed} bytes, but the file has {file_bytes}: \
         truncated, or the header lies"
    )]
    HeaderPastEnd {
        what: &'static str,
        offset: u64,
        needed: u64,
        file_bytes: u64,
    },
    #[error(
        "file has {actual} bytes, expected {expected} for tensor {tensor}: truncated, or the \
         header lies"
    )]
    Truncated {
        /// The tensor that ends last.
        tensor: String,
        expected: u64,
        actual: u64,
    },
    /// A key or a tensor name that is empty or longer than the format allows.
    #[error("{what} at byte {offset} has {len} bytes, expected 1 to {max}")]
    NameLength {
        what: &'static str,
        offset: u64,
        len: u64,
        /// The most that is allowed.
        max: u64,
    },
    #[error("{what} is {count}, at most {max} is allowed")]
    TooMany {
        what: &'static str,
        count: u64,
        /// The most that is allowed.
        max: u64,
    },
    #[error("{what} at byte {offset} is not UTF-8")]
    NotUtf8 { what: &'static str, offset: u64 },
    /// A truth value that is neither 0 nor 1.
    #[error("bool at byte {offset} is {byte}, expected 0 or 1")]
    InvalidBool { offset: u64, byte: u8 },
    #[error("metadata key {key}: value type {id} is unknown")]
    UnknownValueType { key: String, id: u32 },
    #[error("metadata key {key}: arrays are nested deeper than {max} levels")]
    TooDeep { key: String, max: usize },
    #[error("metadata key {key} occurs twice")]
    DuplicateKey { key: String },
    #[error("metadata key {key} is missing")]
    MissingKey { key: String },
    #[error("metadata key {key}: expected {expected}, got {got}")]
    WrongType {
        key: String,
        expected: &'static str,
        got: String,
    },
    /// `general.alignment` is not a power of two, or too large to align anything.
    #[error("alignment of tensor data is {alignment}, expected a power of two")]
    Alignment { alignment: u64 },
    /// A tensor name that is there twice, in one file or in two parts.
    #[error("tensor {tensor} occurs twice")]
    DuplicateTensor { tensor: String },
    #[error("tensor {tensor} has {dims} dimensions, at most {max} are allowed")]
    TooManyDims {
        tensor: String,
        dims: u32,
        /// The most that is allowed.
        max: u32,
    },
    /// A dimension of 0, or a number of values or bytes that does not fit the machine.
    #[error("tensor {tensor}: shape {shape:?} is empty or too large")]
    Shape { tensor: String, shape: Vec<u64> },
    /// A row that is not a whole number of blocks.
    #[error(
        "tensor {tensor}: rows of shape {shape:?} are not whole blocks of {block} values ({name})"
    )]
    PartialBlock {
        tensor: String,
        shape: Vec<usize>,
        name: &'static str,
        /// Values in a block of that type.
        block: usize,
    },
    /// A tensor that does not start at a multiple of the alignment.
    #[error("tensor {tensor}: offset {offset} is not a multiple of the alignment {alignment}")]
    Misaligned {
        tensor: String,
        /// Offset from the start of the tensor data.
        offset: u64,
        alignment: u64,
    },
    #[error("tensors {first} and {second} overlap")]
    Overlap {
        /// The one that starts first.
        first: String,
        second: String,
    },
    #[error("tensor {tensor} is missing")]
    MissingTensor { tensor: String },
    /// A tensor that is stored in a way that paceline does not read.
    #[error("tensor {tensor}: {error}")]
    Unsupported {
        tensor: String,
        error: UnknownBlockType,
    },
    /// A part of a split model whose name does not have the form that names the others.
    #[error(
        "the file is one of {count} parts of a model, but is not called NAME-NNNNN-of-{count:05}.gguf"
    )]
    SplitName { count: u64 },
    /// A part that does not belong where its name puts it.
    #[error("{key} is {got}, expected {expected} by the file name")]
    SplitMismatch {
        key: &'static str,
        got: u64,
        expected: u64,
    },
    /// The parts together hold another number of tensors than they announce.
    #[error("the parts hold {got} tensors, expected {expected}")]
    SplitTensors {
        got: u64,
        /// Tensors announced in the first part.
        expected: u64,
    },
}

impl Error {
    /// Adds the path of the file, once.
    pub(crate) fn in_file(self, path: &std::path::Path) -> Self {
        match self {
            Self::InFile { .. } => self,
            error => Self::InFile {
                path: path.to_owned(),
                error: Box::new(error),
            },
        }
    }
}
