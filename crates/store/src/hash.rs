//! SHA-256, streamed.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use paceline_base::hex;
use sha2::{Digest, Sha256};

use crate::Error;
use crate::progress::Cancel;

/// Bytes per read or write: large enough to hide system calls, small enough for frequent cancel
/// checks. Hashing 256 KiB takes about 1 ms without SHA instructions.
pub(crate) const CHUNK_BYTES: usize = 256 << 10;

#[derive(Clone, Debug, Default)]
pub(crate) struct Hasher(Sha256);

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash in lower-case hex.
    pub(crate) fn hex(self) -> String {
        hex(&self.0.finalize())
    }
}

/// Hashes the file `path`; calls `each` with each number of bytes read. Returns size and hash.
pub(crate) fn hash_file(
    path: &Path,
    cancel: &Cancel,
    mut each: impl FnMut(u64),
) -> Result<(u64, Hasher), Error> {
    let fail = |error| Error::io("read", path, error);
    let mut file = File::open(path).map_err(fail)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    let (mut hasher, mut total) = (Hasher::default(), 0);
    loop {
        cancel.check()?;
        let n = file.read(&mut buffer).map_err(fail)?;
        if n == 0 {
            return Ok((total, hasher));
        }
        hasher.update(&buffer[..n]);
        total += n as u64;
        each(n as u64);
    }
}

/// Whether `text` is a lower-case hex SHA-256.
pub(crate) fn is_sha256(text: &str) -> bool {
    text.len() == 64
        && text
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Fails on another hash than expected.
pub(crate) fn expect_sha256(what: &str, expected: &str, got: &str) -> Result<(), Error> {
    if expected == got {
        return Ok(());
    }
    Err(Error::HashMismatch {
        what: what.to_owned(),
        expected: expected.to_owned(),
        got: got.to_owned(),
    })
}
