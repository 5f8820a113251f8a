//! Storage of parts between the two halves of a sort: spill files or memory.
//!
//! A part's file has the first key of each bucket as `u64`, and the number of keys; then the keys.
//! It gets its name once it is whole: a worker that was believed lost and writes the part again
//! replaces it by equal bytes. Machines that share no folder keep ranges ([`RangeStore`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use paceline_base::lock;

use super::RangeStore;
use crate::Error;

/// Parts that are cut into buckets.
#[derive(Debug)]
pub enum SpillStore {
    /// Files in a folder, which processes share.
    Folder(PathBuf),
    /// Parts in the memory of this process, by number.
    Memory(Mutex<BTreeMap<u64, Arc<BucketedPart>>>),
    /// Buckets of this machine's ranges.
    Ranges(RangeStore),
}

/// A part in memory.
#[derive(Debug)]
pub struct BucketedPart {
    starts: Vec<u64>,
    keys: Vec<u8>,
}

/// First key of each bucket, and the number of keys. Buckets at a splitter have none.
pub(super) fn starts(counts: &[u64]) -> Vec<u64> {
    let mut sum = 0;
    let mut starts = vec![0];
    for (bucket, count) in counts.iter().enumerate() {
        sum += if bucket % 2 == 0 { *count } else { 0 };
        starts.push(sum);
    }
    starts
}

impl SpillStore {
    /// Files in `folder`, or memory.
    pub(crate) fn new(folder: Option<&Path>) -> Self {
        match folder {
            Some(folder) => Self::Folder(folder.to_owned()),
            None => Self::Memory(Mutex::default()),
        }
    }

    /// Stores a part whose buckets have `counts` rows.
    pub(crate) fn put(&self, part: u64, counts: &[u64], keys: Vec<u8>) -> Result<(), Error> {
        let starts = starts(counts);
        match self {
            // They are read again.
            Self::Ranges(_) => Ok(()),
            Self::Memory(parts) => {
                lock(parts).insert(part, Arc::new(BucketedPart { starts, keys }));
                Ok(())
            }
            Self::Folder(folder) => {
                let head: Vec<u8> = starts.iter().flat_map(|s| s.to_le_bytes()).collect();
                let path = file_of(folder, part);
                let own = path.with_extension(std::process::id().to_string());
                let wrong = |source| Error::file("write", &path, source);
                let mut file = File::create(&own).map_err(wrong)?;
                file.write_all(&head).map_err(wrong)?;
                file.write_all(&keys).map_err(wrong)?;
                std::fs::rename(&own, &path).map_err(wrong)
            }
        }
    }

    /// Fills `into` with the keys of a bucket.
    ///
    /// # Errors
    /// [`Error::Changed`] when the parts have fewer or more; [`Error::File`].
    pub(super) fn collect(&self, wanted: &BucketSpec, into: &mut [u8]) -> Result<(), Error> {
        let mut rest = into;
        for part in 0..wanted.parts {
            rest = match self {
                Self::Memory(all) => {
                    let stored = lock(all).get(&part).map(Arc::clone);
                    stored.and_then(|stored| stored.copy(wanted, rest))
                }
                Self::Folder(folder) => copy_file(&file_of(folder, part), wanted, rest)?,
                Self::Ranges(_) => None,
            }
            .ok_or_else(|| self.changed(part))?;
        }
        match rest.len() {
            0 => Ok(()),
            _ => Err(self.changed(wanted.parts)),
        }
    }

    fn changed(&self, part: u64) -> Error {
        let path = match self {
            Self::Folder(folder) => file_of(folder, part),
            Self::Memory(_) | Self::Ranges(_) => PathBuf::from(format!("part {part}")),
        };
        Error::Changed { path }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct BucketSpec {
    pub(super) parts: u64,
    pub(super) buckets: usize,
    pub(super) bucket: usize,
    /// Bytes of a key.
    pub(super) width: usize,
}

impl BucketedPart {
    /// Copies a bucket's keys; what is left of `into`, `None` if they do not fit.
    fn copy<'a>(&self, wanted: &BucketSpec, into: &'a mut [u8]) -> Option<&'a mut [u8]> {
        let at = |bucket: usize| Some(*self.starts.get(bucket)? as usize * wanted.width);
        let some = self.keys.get(at(wanted.bucket)?..at(wanted.bucket + 1)?)?;
        let (to, rest) = into.split_at_mut_checked(some.len())?;
        to.copy_from_slice(some);
        Some(rest)
    }
}

fn file_of(folder: &Path, part: u64) -> PathBuf {
    folder.join(format!("{part}.part"))
}

/// Reads a bucket's keys of a part; what is left of `into`, `None` if they do not fit.
fn copy_file<'a>(
    path: &Path,
    wanted: &BucketSpec,
    into: &'a mut [u8],
) -> Result<Option<&'a mut [u8]>, Error> {
    let wrong = |source| Error::file("read", path, source);
    let file = File::open(path).map_err(wrong)?;
    let mut ends = [[0; 8]; 2];
    let at = 8 * wanted.bucket as u64;
    file.read_exact_at(ends.as_flattened_mut(), at)
        .map_err(wrong)?;
    let [start, end] = ends.map(u64::from_le_bytes);
    let bytes = |keys: u64| keys.checked_mul(wanted.width as u64);
    let place = end.checked_sub(start).and_then(bytes).zip(bytes(start));
    let Some((length, start)) = place.filter(|(length, _)| *length <= into.len() as u64) else {
        return Ok(None);
    };
    let (to, rest) = into.split_at_mut(length as usize);
    let head = 8 * (wanted.buckets as u64 + 1);
    file.read_exact_at(to, head + start).map_err(wrong)?;
    Ok(Some(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_come_back_from_files_and_memory() {
        let folder = tempfile::tempdir().unwrap();
        let counts = [2, 9, 0, 4, 1];
        for store in [SpillStore::new(None), SpillStore::new(Some(folder.path()))] {
            for part in 0..3 {
                store.put(part, &counts, vec![part as u8; 6]).unwrap();
            }
            let wanted = |bucket| BucketSpec {
                parts: 3,
                buckets: 5,
                bucket,
                width: 2,
            };
            let mut keys = [9; 12];
            store.collect(&wanted(0), &mut keys).unwrap();
            assert_eq!(keys, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
            store.collect(&wanted(2), &mut []).unwrap();
            store.collect(&wanted(4), &mut keys[..6]).unwrap();
            assert_eq!(keys[..6], [0, 0, 1, 1, 2, 2]);
            for length in [4, 8] {
                let changed = store.collect(&wanted(4), &mut keys[..length]);
                assert!(matches!(changed, Err(Error::Changed { .. })), "{length}");
            }
        }
        // A file that another program wrote.
        std::fs::write(folder.path().join("1.part"), [255; 60]).unwrap();
        let wanted = BucketSpec {
            parts: 3,
            buckets: 5,
            bucket: 0,
            width: 2,
        };
        let store = SpillStore::new(Some(folder.path()));
        assert!(store.collect(&wanted, &mut [0; 12]).is_err());
    }
}
