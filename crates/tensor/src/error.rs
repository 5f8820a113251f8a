//! Why weights or caches cannot be held.

use paceline_base::{BlockType, Bytes};

/// A matrix that cannot be packed, or memory that cannot be reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes are not those of such a matrix.
    #[error("matrix of {rows} x {cols} {block_type}: expected {expected} bytes, got {got}")]
    Size {
        rows: usize,
        cols: usize,
        block_type: BlockType,
        /// Bytes that the shape needs; 0 when rows are not whole blocks or the size overflows.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// The system refused memory for weights or a cache.
    #[error("cannot reserve {bytes} of memory: {reason}")]
    Memory {
        /// Requested size.
        bytes: Bytes,
        reason: String,
    },
}
