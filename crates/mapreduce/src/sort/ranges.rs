//! The buckets of a machine that shares no folder with the others: it reads the input again and
//! keeps the keys of its own range.
//!
//! ```text
//! buckets   [ machine 0 | machine 1 | machine 2 ]      ranges of equal numbers of buckets
//! scan      every row of the input -> keys of the range's buckets -> a file without a name
//! ```
//! Machines exchange no keys, since each has the whole input. A machine reads it once, and once
//! more for each range that it takes over from a lost or slow one. All threads that need a bucket
//! scan parts together. The file has no name, so that nothing is left of a worker that is killed.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

use paceline_base::lock;

use super::{Gather, keys_of};
use crate::{Error, FileSource, RowSource as _};

/// Tells the files of this process apart.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// Keys of ranges of buckets, in a file.
#[derive(Debug)]
pub struct RangeStore {
    path: PathBuf,
    file: File,
    state: Mutex<State>,
    /// A part was scanned.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ranges: Vec<KeptRange>,
    /// Bytes of the file.
    end: u64,
}

/// A range of buckets, and what is kept of it so far.
#[derive(Debug)]
struct KeptRange {
    buckets: Range<u64>,
    /// The part that is scanned next.
    next: u64,
    /// Parts whose scan has not ended.
    left: u64,
    /// A scan has failed.
    is_broken: bool,
    pieces: Vec<RangePiece>,
}

/// Keys of a range in one part.
#[derive(Debug)]
struct RangePiece {
    /// Where they are in the file.
    at: u64,
    /// First byte of each bucket of the range behind `at`, and the end of the last.
    starts: Vec<u64>,
}

impl RangeStore {
    /// A file without a name in `folder`.
    pub(crate) fn new(folder: &Path) -> Result<Self, Error> {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("paceline-sort-{}-{number}", std::process::id()));
        let wrong = |source| Error::file("write", &path, source);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(&path).map_err(wrong)?;
        std::fs::remove_file(&path).map_err(wrong)?;
        Ok(Self {
            path,
            file,
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Fills `into` with the keys of a bucket, after a scan of `source` if they are not kept yet.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Changed`] when the input has other keys than were counted.
    pub(super) fn collect(
        &self,
        gather: &Gather,
        source: &FileSource,
        bucket: u64,
        into: &mut [u8],
    ) -> Result<(), Error> {
        self.scan(gather, source, bucket)?;
        let state = lock(&self.state);
        let range = state.range(bucket).expect("it was scanned");
        let at = (bucket - range.buckets.start) as usize;
        let places = range.pieces.iter().map(|piece| {
            let (start, end) = (piece.starts[at], piece.starts[at + 1]);
            (piece.at + start, (end - start) as usize)
        });
        let places: Vec<(u64, usize)> = places.collect();
        drop(state);
        let mut rest = into;
        for (at, length) in places {
            let (to, behind) = rest
                .split_at_mut_checked(length)
                .ok_or_else(|| self.changed())?;
            let read = self.file.read_exact_at(to, at);
            read.map_err(|source| Error::file("read", &self.path, source))?;
            rest = behind;
        }
        match rest.len() {
            0 => Ok(()),
            _ => Err(self.changed()),
        }
    }

    fn changed(&self) -> Error {
        Error::Changed {
            path: self.path.clone(),
        }
    }

    /// Scans parts until the range with `bucket` is kept whole; waits for parts of other threads.
    fn scan(&self, gather: &Gather, source: &FileSource, bucket: u64) -> Result<(), Error> {
        let mut state = lock(&self.state);
        loop {
            if state.range(bucket).is_none() {
                let new = KeptRange {
                    buckets: bucket..gather.range_end(bucket),
                    next: 0,
                    left: gather.parts,
                    is_broken: false,
                    pieces: Vec::new(),
                };
                state.ranges.push(new);
            }
            let range = state.range_mut(bucket).expect("it is there");
            if range.is_broken {
                return Err(self.changed());
            }
            if range.left == 0 {
                return Ok(());
            }
            if range.next == gather.parts {
                // Other threads read the last parts of a local file; their error ends this too.
                let waiting = self.changed.wait(state);
                state = waiting.unwrap_or_else(std::sync::PoisonError::into_inner);
                continue;
            }
            let (part, buckets) = (range.next, range.buckets.clone());
            range.next += 1;
            drop(state);
            let scanned = self.scan_part(gather, source, part, &buckets);
            state = lock(&self.state);
            let range = state.range_mut(bucket).expect("ranges stay");
            match scanned {
                Ok(piece) => {
                    range.pieces.push(piece);
                    range.left -= 1;
                }
                Err(error) => {
                    range.is_broken = true;
                    self.changed.notify_all();
                    return Err(error);
                }
            }
            self.changed.notify_all();
        }
    }

    /// Keeps the keys of `buckets` in a part of the input.
    fn scan_part(
        &self,
        gather: &Gather,
        source: &FileSource,
        part: u64,
        buckets: &Range<u64>,
    ) -> Result<RangePiece, Error> {
        let scatter = &gather.scatter;
        let first = |part: u64| source.rows().min(part.saturating_mul(scatter.part_rows));
        let rows = first(part)..first(part + 1);
        let (counts, keys) = keys_of(scatter, source, rows)?;
        let width = scatter.dtype.bytes() as u64;
        let starts = super::store::starts(&counts).into_iter();
        let starts: Vec<u64> = starts.map(|first| first * width).collect();
        let (first, last) = (buckets.start as usize, buckets.end as usize);
        let kept = &keys[starts[first] as usize..starts[last] as usize];
        let at = {
            let mut state = lock(&self.state);
            state.end += kept.len() as u64;
            state.end - kept.len() as u64
        };
        let written = self.file.write_all_at(kept, at);
        written.map_err(|source| Error::file("write", &self.path, source))?;
        let own = starts[first..=last].iter();
        Ok(RangePiece {
            at,
            starts: own.map(|start| start - starts[first]).collect(),
        })
    }
}

impl State {
    fn range(&self, bucket: u64) -> Option<&KeptRange> {
        self.ranges.iter().find(|it| it.buckets.contains(&bucket))
    }

    fn range_mut(&mut self, bucket: u64) -> Option<&mut KeptRange> {
        self.ranges
            .iter_mut()
            .find(|it| it.buckets.contains(&bucket))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::{Gather, Scatter};
    use super::*;
    use crate::{Dtype, InputFile};

    /// Threads that take buckets in any order get all keys of each, those at splitters none.
    #[test]
    fn each_bucket_of_a_range_has_its_keys() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("x");
        let values: Vec<u8> = (0..3000u32).map(|i| (i * 7919 % 251) as u8).collect();
        std::fs::write(&path, &values).unwrap();
        let source = InputFile::raw(&path, Dtype::U8, 1).unwrap().open().unwrap();
        let scatter = Scatter {
            dtype: Dtype::U8,
            splitters: vec![50, 90, 200],
            part_rows: 700,
            folder: None,
            machines: 2,
        };
        let bucket = |value: u8| match scatter.splitters.binary_search(&value.into()) {
            Ok(at) => 2 * at + 1,
            Err(at) => 2 * at,
        };
        let mut counts = vec![0; scatter.buckets()];
        values.iter().for_each(|value| counts[bucket(*value)] += 1);
        let gather = Gather::new(scatter.clone(), 5, &counts, path);
        let ends: Vec<u64> = (0..7).map(|bucket| gather.range_end(bucket)).collect();
        assert_eq!(ends, [3, 3, 3, 7, 7, 7, 7]);
        let store = RangeStore::new(home.path()).unwrap();
        thread::scope(|scope| {
            for at in [0u64, 2, 4, 6, 2, 6] {
                let (store, gather, source) = (&store, &gather, &source);
                let (count, values) = (counts[at as usize], &values);
                scope.spawn(move || {
                    let mut keys = vec![0; count as usize];
                    store.collect(gather, source, at, &mut keys).unwrap();
                    let mut expected: Vec<u8> = values.clone();
                    expected.retain(|value| bucket(*value) == at as usize);
                    keys.sort_unstable();
                    expected.sort_unstable();
                    assert_eq!(keys, expected, "{at}");
                    let mut more = vec![0; count as usize + 1];
                    let changed = store.collect(gather, source, at, &mut more);
                    assert!(matches!(changed, Err(Error::Changed { .. })));
                });
            }
        });
        assert_eq!(
            std::fs::read_dir(home.path()).unwrap().count(),
            1,
            "a file is left"
        );
    }
}
