//! A stamp that tells, without reading them, that a model's files were changed.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::SystemTime;

use crate::Error;

/// Length, modification time and inode number of a file. For a folder: the sum of its files'
/// lengths, the latest of their times, and the XOR of their inode numbers. The folder's own time
/// changes when the download of a file ends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WeightsStamp(u64, SystemTime, u64);

impl WeightsStamp {
    pub(crate) fn of(path: &Path) -> Result<Self, Error> {
        Self::read(path).map_err(|source| Error::System {
            what: "look at the model's file",
            source,
        })
    }

    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        let facts = std::fs::metadata(path)?;
        if !facts.is_dir() {
            return Self::of_file(&facts);
        }
        let mut stamp = Self(0, SystemTime::UNIX_EPOCH, 0);
        for entry in std::fs::read_dir(path)? {
            // Without links to nowhere.
            let Ok(facts) = std::fs::metadata(entry?.path()) else {
                continue;
            };
            let Self(len, time, inode) = Self::of_file(&facts)?;
            if facts.is_file() {
                stamp = Self(stamp.0 + len, stamp.1.max(time), stamp.2 ^ inode);
            }
        }
        Ok(stamp)
    }

    fn of_file(facts: &std::fs::Metadata) -> io::Result<Self> {
        Ok(Self(facts.len(), facts.modified()?, facts.ino()))
    }
}
