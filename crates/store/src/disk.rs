//! Files: creation, atomic replacement, free space.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use paceline_base::Bytes;

use crate::Error;

/// Free space to leave on a file system: records, locks, directory blocks.
const MARGIN: u64 = 1 << 20;

/// Bytes available to this user on the file system that holds `path`.
pub fn free_space(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Fails if `dir` cannot take `needed` more bytes. An unknown free space is no error: the write
/// itself will fail.
pub(crate) fn check_space(
    free_space: fn(&Path) -> io::Result<u64>,
    dir: &Path,
    needed: u64,
) -> Result<(), Error> {
    match free_space(dir) {
        Ok(free) if free < needed.saturating_add(MARGIN) => Err(Error::DiskFull {
            path: dir.into(),
            needed: Bytes(needed),
            free: Bytes(free),
        }),
        _ => Ok(()),
    }
}

/// A file in writing, with the remaining bytes for the error of a full disk.
#[derive(Debug)]
pub(crate) struct ModelFileSink<'a> {
    pub(crate) file: File,
    pub(crate) path: &'a Path,
    pub(crate) free_space: fn(&Path) -> io::Result<u64>,
}

impl ModelFileSink<'_> {
    /// Appends `bytes`; `to_come` is the total still needed, for the error.
    pub(crate) fn write(&mut self, bytes: &[u8], to_come: u64) -> Result<(), Error> {
        self.file
            .write_all(bytes)
            .map_err(|error| self.explain(error, to_come))
    }

    /// Syncs the contents to disk.
    pub(crate) fn sync(&mut self) -> Result<(), Error> {
        self.file.sync_all().map_err(|error| self.explain(error, 0))
    }

    fn explain(&self, error: io::Error, needed: u64) -> Error {
        if !matches!(
            error.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        ) {
            return Error::io("write", self.path, error);
        }
        let dir = self.path.parent().unwrap_or(self.path);
        let free = Bytes((self.free_space)(dir).unwrap_or(0));
        Error::DiskFull {
            path: dir.into(),
            needed: Bytes(needed),
            free,
        }
    }
}

/// Creates a folder and its parents.
pub(crate) fn create_dir(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).map_err(|error| Error::io("create the folder", path, error))
}

/// A temporary folder in `dir`, removed on drop; creates `dir` too. [`crate::wheel::sweep`] finds
/// leftovers by its prefix.
pub(crate) fn temp_dir(dir: &Path) -> Result<tempfile::TempDir, Error> {
    create_dir(dir)?;
    let made = tempfile::Builder::new().prefix(TEMP_PREFIX).tempdir_in(dir);
    made.map_err(|error| Error::io("create a folder in", dir, error))
}

/// Prefix of temporary folders.
pub(crate) const TEMP_PREFIX: &str = ".tmp-";

/// Removes a file; a missing one is no error.
pub(crate) fn remove_file(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io("remove", path, error))
        }
        _ => Ok(()),
    }
}

/// Renames a finished file and syncs the folder.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    fs::rename(from, to).map_err(|error| Error::io("rename", to, error))?;
    to.parent().map_or(Ok(()), sync_dir)
}

/// Replaces `path` atomically: readers see the old or the new contents.
pub(crate) fn write_atomic(path: &Path, contents: &[u8]) -> Result<(), Error> {
    let dir = path.parent().unwrap_or(path);
    let fail = |error| Error::io("write", path, error);
    // Applies the umask, like for other files; temporary files are private by default.
    let mut temp = tempfile::Builder::new()
        .prefix(".write-")
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(dir)
        .map_err(fail)?;
    temp.write_all(contents).map_err(fail)?;
    temp.as_file().sync_all().map_err(fail)?;
    temp.persist(path).map_err(|error| fail(error.error))?;
    sync_dir(dir)
}

fn sync_dir(dir: &Path) -> Result<(), Error> {
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(|error| Error::io("sync", dir, error))
}

/// Bytes of all files under `path`, without following links. Deeper than `depth` folders, and
/// unreadable ones, count as nothing.
pub(crate) fn tree_bytes(path: &Path, depth: u32) -> u64 {
    let Ok(meta) = fs::symlink_metadata(path) else {
        return 0;
    };
    if meta.is_file() {
        return meta.len();
    }
    if !meta.is_dir() || depth == 0 {
        return 0;
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .map(|entry| tree_bytes(&entry.path(), depth - 1))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_checked_with_a_margin() {
        let check = |needed| check_space(|_| Ok(10 << 20), Path::new("/x"), needed);
        assert!(check(9 << 20).is_ok());
        let error = check((9 << 20) + 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "/x: disk full: 9.0 MiB needed, 10.0 MiB free"
        );
        assert!(check(u64::MAX).is_err());
        assert!(check_space(|_| Err(io::ErrorKind::Other.into()), Path::new("/x"), 1).is_ok());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_device_is_told_apart_from_other_errors() {
        let file = fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let mut sink = ModelFileSink {
            file,
            path: Path::new("/dev/full"),
            free_space: |_| Ok(7),
        };
        let error = sink.write(b"x", 100).unwrap_err();
        assert!(
            matches!(
                error,
                Error::DiskFull {
                    needed: Bytes(100),
                    free: Bytes(7),
                    ..
                }
            ),
            "{error:?}"
        );
    }

    #[test]
    fn replacing_leaves_no_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        for contents in ["one", "two"] {
            write_atomic(&path, contents.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), contents);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(tree_bytes(dir.path(), 2), 3);
        assert_eq!(tree_bytes(dir.path(), 0), 0);
    }
}
