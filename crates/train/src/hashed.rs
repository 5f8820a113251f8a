//! A writer that hashes what it writes.

use std::io::{self, Write};

use sha2::{Digest, Sha256};

/// Writes to a file and hashes what it writes.
pub(crate) struct Hashed<W> {
    pub(crate) file: W,
    pub(crate) hash: Sha256,
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_all(bytes)?;
        self.hash.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
