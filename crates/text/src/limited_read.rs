//! Small files of a model, read within bounds.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Content of a plain file; its size in bytes where that is more than `max`. Checks the file that
/// it reads: a pipe or a device, which may have no end, is refused without waiting for a writer.
///
/// # Errors
/// The system's error; [`io::ErrorKind::InvalidInput`] for all but plain files.
pub(crate) fn read(path: &Path, max: u64) -> io::Result<Result<Vec<u8>, u64>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
    }
    if about.len() > max {
        return Ok(Err(about.len()));
    }
    let mut content = Vec::new();
    // It may have grown since.
    file.take(max + 1).read_to_end(&mut content)?;
    let size = content.len() as u64;
    Ok(if size > max { Err(size) } else { Ok(content) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_files_within_the_limit_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "0123456789").unwrap();
        assert_eq!(read(&path, 10).unwrap(), Ok(b"0123456789".to_vec()));
        assert_eq!(read(&path, 9).unwrap(), Err(10));
        // A link in a model's folder may lead to a device without an end.
        let endless = folder.path().join("endless");
        std::os::unix::fs::symlink("/dev/zero", &endless).unwrap();
        let none = folder.path().join("none");
        for (path, kind) in [
            (endless.as_path(), io::ErrorKind::InvalidInput),
            (folder.path(), io::ErrorKind::InvalidInput),
            (none.as_path(), io::ErrorKind::NotFound),
        ] {
            assert_eq!(read(path, 10).unwrap_err().kind(), kind, "{path:?}");
        }
    }
}
