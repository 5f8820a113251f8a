//! GGUF: the single-file model format of llama.cpp.

mod error;
mod metadata;
mod value;

pub use error::Error;
pub use metadata::Metadata;
pub use value::{Array, Value, ValueType};
