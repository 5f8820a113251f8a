//! The audit log of this machine's node: a JSON object per line, append-only.
//!
//! ```text
//! HOME/audit.jsonl      the newest lines, for this user alone (mode 0600)
//! HOME/audit.1.jsonl    the lines before them
//! ```
//! Two files of [`FILE_BYTES`] bound its size. Each line is one write, so that lines of several
//! processes do not mix. The machine's user can modify the log.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use crate::{Error, Home};

/// Maximum size of a file: about 30,000 lines.
const FILE_BYTES: u64 = 4 << 20;

/// Maximum bytes of a line; longer ones are dropped.
const LINE_BYTES: usize = 4096;

/// An open audit log.
#[derive(Debug)]
pub struct Audit {
    path: PathBuf,
    before: PathBuf,
    file_bytes: u64,
}

impl Audit {
    /// Opens the log of `home`; creates folder and file.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be written.
    pub fn open(home: &Home) -> Result<Self, Error> {
        Self::of(home, FILE_BYTES)
    }

    fn of(home: &Home, file_bytes: u64) -> Result<Self, Error> {
        let audit = Self {
            path: home.root().join("audit.jsonl"),
            before: home.root().join("audit.1.jsonl"),
            file_bytes,
        };
        let made = fs::create_dir_all(home.root()).and_then(|()| audit.file());
        made.map_err(|error| Error::io("write", &audit.path, error))?;
        Ok(audit)
    }

    /// Path of the newest lines.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    fn file(&self) -> io::Result<File> {
        let mut options = File::options();
        options.append(true).create(true).mode(0o600);
        options.open(&self.path)
    }

    /// Appends a line. A full file is rotated, which deletes the older one.
    ///
    /// # Errors
    /// [`Error::Io`]: the line is not in the log.
    pub fn append(&self, line: &str) -> Result<(), Error> {
        self.write(line)
            .map_err(|error| Error::io("write", &self.path, error))
    }

    fn write(&self, line: &str) -> io::Result<()> {
        if line.len() >= LINE_BYTES || line.contains('\n') {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut file = self.file()?;
        if file.metadata()?.len() + line.len() as u64 >= self.file_bytes {
            fs::rename(&self.path, &self.before)?;
            file = self.file()?;
        }
        file.write_all(format!("{line}\n").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn lines_are_appended_for_the_user_alone_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path().join("home"));
        let audit = Audit::of(&home, 1000).unwrap();
        for n in 0..200 {
            audit.append(&format!("{{\"n\":{n}}}")).unwrap();
            let again = Audit::of(&home, 1000).unwrap(); // another process
            again.append("{}").unwrap();
        }
        let all: u64 = [&audit.path, &audit.before]
            .map(|path| fs::metadata(path).unwrap().len())
            .iter()
            .sum();
        assert!((1000..=2000).contains(&all), "{all}");
        let text = fs::read_to_string(audit.path()).unwrap();
        assert!(text.ends_with("{\"n\":199}\n{}\n"), "{text}");
        let mode = fs::metadata(&audit.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        for bad in ["a\nb", &"x".repeat(LINE_BYTES)] {
            assert!(audit.append(bad).is_err());
        }
    }
}
