//! File operations of model copies, as traits: `sim` runs the same code on a disk that tears, loses
//! and damages what was written.
//!
//! The rule of durable files: bytes are synced before the file gets its final name. The folder is
//! synced before anyone relies on the name. [`replace`] and [`publish`] keep the rule.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::SystemTime;

/// Extension of a file in writing, which [`replace`] renames.
pub const NEW: &str = "new";

/// An open file.
pub trait StoredFile: fmt::Debug + Send + Sync {
    /// Length in bytes.
    fn bytes(&self) -> io::Result<u64>;

    /// Fills `bytes` from offset `at`.
    ///
    /// # Errors
    /// The file ends before, or the system's error.
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()>;

    /// Writes all of `bytes` at offset `at`.
    ///
    /// # Errors
    /// The disk is full, or the system's error. Some of the bytes may be written.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Cuts the file, or extends it by zeros.
    fn set_bytes(&self, bytes: u64) -> io::Result<()>;

    /// Time of the last change.
    fn modified(&self) -> io::Result<SystemTime>;

    /// Sets the time of the last change.
    fn set_modified(&self, time: SystemTime) -> io::Result<()>;

    /// Returns once all bytes written so far survive a power cut.
    ///
    /// # Errors
    /// The disk is full, or the system's error.
    fn sync(&self) -> io::Result<()>;
}

/// How to open a file. All modes read; all but the first write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// An existing file.
    Read,
    /// An existing file.
    Write,
    /// A file that is created if it is missing.
    Create,
    /// An empty file in place of any earlier one.
    Truncate,
}

/// A file system.
pub trait Storage: fmt::Debug + Send + Sync {
    /// Opens a file.
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Box<dyn StoredFile>>;

    /// Renames a file; an existing file of the new name is replaced.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Gives a file a second name.
    ///
    /// # Errors
    /// The name exists, or the file system has no hard links.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Returns once the names in the folder of `path` survive a power cut.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
}

/// The file system of this machine.
#[derive(Clone, Copy, Debug)]
pub struct FileSystem;

impl StoredFile for File {
    fn bytes(&self) -> io::Result<u64> {
        self.metadata().map(|facts| facts.len())
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(bytes, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn set_bytes(&self, bytes: u64) -> io::Result<()> {
        self.set_len(bytes)
    }

    fn modified(&self) -> io::Result<SystemTime> {
        self.metadata()?.modified()
    }

    fn set_modified(&self, time: SystemTime) -> io::Result<()> {
        Self::set_modified(self, time)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

impl Storage for FileSystem {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Box<dyn StoredFile>> {
        let mut options = OpenOptions::new();
        options.read(true);
        match mode {
            OpenMode::Read => &mut options,
            OpenMode::Write => options.write(true),
            OpenMode::Create => options.write(true).create(true).truncate(false),
            OpenMode::Truncate => options.write(true).create(true).truncate(true),
        };
        Ok(Box::new(options.open(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        path.parent()
            .map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    }
}

/// Writes a small file in an existing folder. After a power cut it has the old or the new bytes.
pub fn replace(storage: &dyn Storage, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".");
    new.push(NEW);
    let new = Path::new(&new);
    let file = storage.open(new, OpenMode::Truncate)?;
    file.write_at(bytes, 0)?;
    file.sync()?;
    rename(storage, new, path)
}

/// Syncs a file, or a folder with its files.
pub fn sync_all(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            File::open(entry?.path())?.sync_all()?;
        }
    }
    File::open(path)?.sync_all()
}

/// Gives the synced file at `from` its final name, which survives a power cut.
pub fn rename(storage: &dyn Storage, from: &Path, to: &Path) -> io::Result<()> {
    storage.rename(from, to)?;
    storage.sync_folder(to)
}

/// Gives the synced file at `from` the name `to` too, which survives a power cut. A file system
/// without hard links renames it.
pub fn publish(storage: &dyn Storage, from: &Path, to: &Path) -> io::Result<()> {
    match storage.link(from, to) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(_) => storage.rename(from, to)?,
        Ok(()) => {}
    }
    storage.sync_folder(to)
}
