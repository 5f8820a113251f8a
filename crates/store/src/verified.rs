//! Verified files: which bytes of a file are right, and which have arrived.
//!
//! - [`tree`]: the BLAKE3 hash tree over groups of bytes.
//! - [`partial_file`]: a file with some groups still missing.
//! - [`sums`]: a quick checksum of each group, for starts.
//! - [`checksums`]: the record of a stored file, made at its download.
//! - [`damage`]: finds groups whose bytes changed.

pub mod checksums;
pub mod damage;
pub mod partial_file;
pub mod sums;
pub mod tree;

pub use checksums::{ChecksumError, has_checksums, record_checksums, record_own_checksums};
