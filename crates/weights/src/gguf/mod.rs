//! GGUF: the single-file model format of llama.cpp.
//!
//! A file is, in little-endian byte order:
//!
//! ```text
//! "GGUF" | version u32 | tensor count u64 | entry count u64
//! entries:  key string | value type u32 | value             -> Metadata
//! tensors:  name string | n u32 | n dims u64, innermost first
//!           | storage type u32 | offset u64                  -> TensorInfo
//! padding to the alignment (general.alignment, 32 if absent)
//! tensor data, each tensor at its offset from here
//! ```
//!
//! A string is a length (u64) and UTF-8. [`Header::parse`] reads all but the data from a slice
//! and is pure. [`Gguf::open`] maps a file, or all parts of a split model, and hands out
//! [`Tensor`](crate::tensor::Tensor)s.
//!
//! When a file is opened, everything is refused that would make a later read ambiguous or reach
//! outside the file. Names occur once. Tensors lie inside the file, are aligned, have no dimension
//! of 0 and do not overlap. So the sizes of all tensors add up to no more than the file.
//!
//! A storage type that paceline does not read is *not* refused then. [`Gguf::tensor`] refuses such
//! a tensor by name. So a model with an exotic tensor that no layer needs still runs.
//!
//! Source: `docs/gguf.md` of ggml, and `gguf.cpp` of llama.cpp where the two differ.

mod cursor;
mod error;
mod file;
mod header;
mod metadata;
mod split;
mod tensor_info;
pub mod testing;
mod value;

pub use error::Error;
pub use file::Gguf;
pub use header::Header;
pub use metadata::Metadata;
pub use tensor_info::TensorInfo;
pub use value::{Array, MetadataValue, ValueType};
