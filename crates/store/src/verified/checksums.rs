//! Checksums of a file of the user's store, in files next to it.
//!
//! ```text
//! m.gguf.tree   leaves of its hash tree, 32 bytes each; its SHA-256; BLAKE3 of both
//! m.gguf.sums   quick sums (`sums`)
//! ```
//! They are written once, after all bytes of the file were compared with the SHA-256 of the
//! store's record. From then on each load compares the bytes that it reads (`partial_source`). A
//! file that a disk damaged later gives no answer.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use paceline_base::hex;
use sha2::{Digest, Sha256};

use super::sums::GroupSums;
use super::tree::Tree;
use crate::storage::{self, FileSystem};

/// Bytes of a SHA-256, and of a BLAKE3 hash.
const SUM_BYTES: usize = 32;

/// Bytes per read.
const PIECE_BYTES: usize = 1 << 20;

/// Pieces of a file that may wait until they are part of its SHA-256: at most 8 MiB. A piece is a
/// group of the hash tree, or [`PIECE_BYTES`] of one, and takes 30 µs or more.
const PIECES_AHEAD: usize = 8;

/// Why a file has no checksums.
#[derive(Debug, thiserror::Error)]
pub enum ChecksumError {
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    /// The file is another one, or damaged.
    #[error("{}: its SHA-256 is {got}, expected {expected}", path.display())]
    Differs {
        path: PathBuf,
        expected: String,
        /// SHA-256 of its bytes.
        got: String,
    },
}

/// Checksums of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksums {
    pub tree: Tree,
    /// SHA-256 of the file in hexadecimal digits.
    pub sha256: String,
}

/// Path of the checksums of the file at `path`.
fn beside(path: &Path) -> PathBuf {
    with_suffix(path, ".tree")
}

/// Path of the quick sums of the file at `path`.
pub fn sums_beside(path: &Path) -> PathBuf {
    with_suffix(path, ".sums")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

impl Checksums {
    /// The checksums of the file at `path`; `None` if it has none.
    ///
    /// # Errors
    /// They are damaged, or of a file of another length; the system's error.
    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        Self::read_with(path, || Ok(fs::metadata(path)?.len()))
    }

    /// As [`read`](Self::read), for a file that has or had `length` bytes.
    pub fn read_of(path: &Path, length: u64) -> io::Result<Option<Self>> {
        Self::read_with(path, || Ok(length))
    }

    fn read_with(
        path: &Path,
        length: impl FnOnce() -> io::Result<u64>,
    ) -> io::Result<Option<Self>> {
        let place = beside(path);
        let bytes = match fs::read(&place) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        let found = Self::parse(length()?, &bytes);
        let damaged = || {
            let reason = format!("{} is damaged, or the file was cut", place.display());
            io::Error::new(io::ErrorKind::InvalidData, reason)
        };
        found.map(Some).ok_or_else(damaged)
    }

    fn parse(length: u64, bytes: &[u8]) -> Option<Self> {
        let (both, own) = bytes.split_last_chunk::<SUM_BYTES>()?;
        if blake3::hash(both).as_bytes() != own {
            return None;
        }
        let (leaves, sha256) = both.split_last_chunk::<SUM_BYTES>()?;
        Some(Self {
            tree: Tree::from_bytes(length, leaves)?,
            sha256: hex(sha256),
        })
    }

    /// Compares the file at `path` with its SHA-256, and writes its checksums.
    fn make(
        path: &Path,
        sha256: &str,
        count: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), ChecksumError> {
        let failed = |error| ChecksumError::Io {
            path: path.to_owned(),
            error,
        };
        let (sum, tree) = hash_and_tree(path, count).map_err(failed)?;
        let got = hex(&sum);
        if got != sha256 {
            return Err(ChecksumError::Differs {
                path: path.to_owned(),
                expected: sha256.to_owned(),
                got,
            });
        }
        Self::write(path, (sum, tree)).map_err(failed)
    }

    fn write(path: &Path, (sum, tree): ([u8; SUM_BYTES], Tree)) -> io::Result<()> {
        GroupSums::make(&File::open(path)?, &tree, &sums_beside(path))?;
        let mut bytes = tree.to_bytes();
        bytes.extend(sum);
        bytes.extend(blake3::hash(&bytes).as_bytes());
        storage::replace(&FileSystem, &beside(path), &bytes)
    }
}

/// Makes loads of the store's file at `path` compare its bytes. Reads all of the file the first
/// time, and refuses one with another SHA-256. `count` receives the number of bytes read; false
/// ends the call with an error.
///
/// # Errors
/// [`ChecksumError`]. After [`ChecksumError::Io`] loads compare what they did before.
pub fn record_checksums(
    path: &Path,
    sha256: &str,
    count: &mut dyn FnMut(u64) -> bool,
) -> Result<(), ChecksumError> {
    match Checksums::read(path) {
        Ok(Some(known)) if known.sha256 == sha256 => Ok(()),
        _ => Checksums::make(path, sha256, count),
    }
}

/// Whether the file at `path` has checksums; reads neither.
pub fn has_checksums(path: &Path) -> bool {
    beside(path).is_file()
}

/// Makes loads of a model that this machine has computed, a file or a folder, compare its weights.
/// Reads all of them the first time.
pub fn record_own_checksums(path: &Path) -> Result<(), ChecksumError> {
    let failed = |error| ChecksumError::Io {
        path: path.to_owned(),
        error,
    };
    let files = match path.is_dir() {
        true => {
            let entries = fs::read_dir(path).map_err(failed)?.flatten();
            let is_weights =
                |file: &PathBuf| file.extension().is_some_and(|it| it == "safetensors");
            entries
                .map(|entry| entry.path())
                .filter(is_weights)
                .collect()
        }
        false => vec![path.to_owned()],
    };
    for file in files {
        if !matches!(Checksums::read(&file), Ok(Some(_))) {
            let (sum, tree) = hash_and_tree(&file, &mut |_| true).map_err(failed)?;
            Checksums::write(&file, (sum, tree)).map_err(failed)?;
        }
    }
    Ok(())
}

/// SHA-256 and hash tree of a file. Reads it once. Computes the SHA-256 on a thread of its own,
/// since it takes some times as long as the tree.
///
/// # Errors
/// The system's error; `count` has ended it.
pub fn hash_and_tree(
    path: &Path,
    count: &mut dyn FnMut(u64) -> bool,
) -> io::Result<([u8; SUM_BYTES], Tree)> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let (to_sum, pieces) = mpsc::sync_channel::<Vec<u8>>(PIECES_AHEAD);
    std::thread::scope(|scope| {
        let sum = scope.spawn(move || {
            let mut sum = Sha256::new();
            pieces.iter().for_each(|piece| sum.update(piece));
            sum.finalize().into()
        });
        // Dropped at the end of this line, which ends the other thread.
        let tree = Tree::read(
            &mut Tee {
                file,
                to_sum,
                count,
            },
            bytes,
        );
        let sum = sum.join();
        let sum = sum.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        tree.map(|tree| (sum, tree))
    })
}

/// A file whose bytes are sent to another thread as they are read.
struct Tee<'a> {
    file: File,
    to_sum: mpsc::SyncSender<Vec<u8>>,
    count: &'a mut dyn FnMut(u64) -> bool,
}

impl Read for Tee<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(PIECE_BYTES);
        let n = self.file.read(&mut buffer[..most])?;
        if !(self.count)(n as u64) {
            return Err(io::Error::other("cancelled"));
        }
        let sent = self.to_sum.send(buffer[..n].to_vec());
        sent.map(|()| n).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pass_gives_the_hash_and_the_tree() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for len in [0, 1, 64 << 10, (64 << 10) + 1, (3 << 20) + 7] {
            let bytes: Vec<u8> = (0..len).map(|i: u32| (i / 7) as u8).collect();
            fs::write(&file, &bytes).unwrap();
            let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
            let expected = (Sha256::digest(&bytes).into(), tree);
            let found = hash_and_tree(file.path(), &mut |_| true).unwrap();
            assert_eq!(found, expected, "{len}");
        }
    }

    #[test]
    fn checksums_are_made_once_and_detect_their_own_damage() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let bytes: Vec<u8> = (0..(200 << 10)).map(|i: u32| (i / 7) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let sha256 = hex(&Sha256::digest(&bytes));
        let record = |sha256: &str| {
            let mut read = 0;
            let mut count = |bytes| {
                read += bytes;
                true
            };
            record_checksums(&path, sha256, &mut count).map(|()| read)
        };
        assert_eq!(Checksums::read(&path).unwrap(), None);
        let other = record(&"0".repeat(64)).unwrap_err();
        assert!(matches!(other, ChecksumError::Differs { .. }), "{other}");
        assert_eq!(Checksums::read(&path).unwrap(), None);
        assert_eq!(record(&sha256).unwrap(), bytes.len() as u64);
        assert_eq!(record(&sha256).unwrap(), 0, "they are there");
        let known = Checksums::read(&path).unwrap().unwrap();
        assert_eq!(known.sha256, sha256);
        assert!(known.tree.holds(0, &bytes[..64 << 10]));

        let place = beside(&path);
        let right = fs::read(&place).unwrap();
        let mut flipped = right.clone();
        flipped[40] ^= 1;
        for damaged in [&right[1..], &[&right[..], &[0]].concat(), &flipped] {
            fs::write(&place, damaged).unwrap();
            Checksums::read(&path).unwrap_err();
            record(&sha256).unwrap();
            assert_eq!(fs::read(&place).unwrap(), right);
        }
    }
}
