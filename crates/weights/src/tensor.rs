//! A weight tensor as it lies in a mapped file.
//!
//! Files are mapped, not read. Opening costs no memory for weights, and a process that uses some
//! layers touches only those.
//!
//! Warning: **the files must not change while they are open**. A writer that truncates or rewrites
//! a mapped model makes the process see other weights or die of a bus error. Nothing in this crate
//! can prevent that, so model stores replace files by renaming.
//!
//! The exception is a file whose bytes arrive while it is open: its [`Arrivals`] say which are
//! there, and no byte is read before.

use std::fmt;
use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::{Mmap, MmapMut};
use paceline_base::{BlockType, whole_pages};
use rustix::fs::{Mode, OFlags};

/// Why a file cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot read: {0}")]
    Io(#[from] std::io::Error),
    /// The path is a folder, a pipe or a device.
    #[error("not a regular file")]
    NotAFile,
}

/// Bytes of a file that are missing and will not arrive.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bytes {}..{} of {file} are not here: {reason}", range.start, range.end)]
pub struct Absent {
    pub file: String,
    /// The bytes that were waited for, counted from the start of the file.
    pub range: Range<usize>,
    pub reason: String,
}

/// Progress of a file's download: waits for byte ranges.
pub trait Arrivals: Send + Sync + fmt::Debug {
    /// Returns once all bytes of `range`, counted from the start of the file, have arrived; they do
    /// not change any more then. Requests them if that was not done yet. Blocks for a bounded time
    /// after the last byte that arrived.
    ///
    /// # Errors
    /// [`Absent`].
    fn wait(&self, range: Range<usize>) -> Result<(), Absent>;
}

/// Finds the progress of a file's download by its path and its mapping; `None` for a complete file.
pub type FindArrivals<'a> =
    dyn Fn(&Path, &MappedBytes) -> std::io::Result<Option<Arc<dyn Arrivals>>> + 'a;

/// A run of bytes of a mapped file, or of memory of our own that was filled once. Clones share the
/// mapping, which lives as long as the last.
///
/// The start has no particular alignment: GGUF files choose their own and safetensors has none.
///
/// Reading bytes that have not arrived waits for them, and panics if they never arrive:
/// [`arrived`](Self::arrived) gives an error instead.
#[derive(Clone, Debug)]
pub struct MappedBytes {
    map: Arc<Mmap>,
    range: Range<usize>,
    /// Whether the mapping has a file, from which dropped pages are read again.
    of_file: bool,
    /// For a file with bytes that may not have arrived.
    arrivals: Option<Arc<dyn Arrivals>>,
}

/// A weight tensor: what it is called, how it is stored, and its bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name in the file.
    pub name: String,
    /// Storage type.
    pub block_type: BlockType,
    /// Sizes, outermost first: a matrix is `[rows (outputs), cols (inputs)]`, which for GGUF is
    /// the reverse of the order in the file. None is 0; empty for a single value. The last is a
    /// whole number of blocks.
    pub shape: Vec<usize>,
    /// The rows one after the other, `block_type.row_bytes(cols)` bytes each. Checked when the
    /// tensor was made: the length is exactly rows times that.
    pub bytes: MappedBytes,
}

impl Tensor {
    /// Length of a row: the innermost size, 1 for a single value.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows: the product of all sizes but the innermost.
    pub fn rows(&self) -> usize {
        self.shape
            .split_last()
            .map_or(1, |(_, outer)| outer.iter().product())
    }
}

impl MappedBytes {
    /// Maps a whole file for reading.
    ///
    /// # Errors
    /// [`OpenError`]; a pipe is refused without waiting for a writer.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(std::io::Error::from)?;
        // Metadata of the open file: the path may name another one meanwhile.
        let file = File::from(file);
        if !file.metadata()?.is_file() {
            return Err(OpenError::NotAFile);
        }
        // SAFETY: the mapping is private to this process and only read. The module doc demands of
        // the user that no program changes the file meanwhile; bytes that arrive meanwhile are read
        // only after that, by `Arrivals`.
        let map = unsafe { Mmap::map(&file)? };
        let range = 0..map.len();
        Ok(Self {
            map: Arc::new(map),
            range,
            of_file: true,
            arrivals: None,
        })
    }

    /// The same bytes; every read waits until its range has arrived.
    #[must_use]
    fn arriving(self, arrivals: Arc<dyn Arrivals>) -> Self {
        let arrivals = Some(arrivals);
        Self { arrivals, ..self }
    }

    /// The same bytes of the file at `path`; every read waits for the progress that `find` returns.
    pub(crate) fn arriving_by(
        &self,
        path: &Path,
        find: &FindArrivals<'_>,
    ) -> Result<Self, OpenError> {
        Ok(match find(path, self)? {
            Some(arrivals) => self.clone().arriving(arrivals),
            None => self.clone(),
        })
    }

    /// Waits for all of the bytes, and returns them without later waits.
    ///
    /// # Errors
    /// [`Absent`] if they never arrive.
    pub fn arrived(mut self) -> Result<Self, Absent> {
        if let Some(arrivals) = self.arrivals.take() {
            arrivals.wait(self.range.clone())?;
        }
        Ok(self)
    }

    /// All bytes as they are now: those of a file that have not arrived are zero.
    pub(crate) fn as_they_are(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }

    /// The bytes at `range`, after the system has read all of their pages. Awaits no arrivals.
    /// Later reads neither block nor fault. Linux alone has the call, from 5.14 on.
    ///
    /// `None` if a page cannot be read, where a read would end the process: the disk fails, or the
    /// file was cut. `None` too for a range outside of these bytes, and without the call.
    pub fn resident(&self, range: Range<usize>) -> Option<&[u8]> {
        let bytes = self.as_they_are().get(range.clone())?;
        #[cfg(target_os = "linux")]
        {
            let start = self.range.start + range.start;
            let read = memmap2::Advice::PopulateRead;
            self.map.advise_range(read, start, range.len()).ok()?;
            Some(bytes)
        }
        #[cfg(not(target_os = "linux"))]
        {
            let _ = bytes;
            None
        }
    }

    /// Has the system read all of these bytes, so that a failed read is an error. Without it a read
    /// of a page that the disk does not give ends the process. Systems without the call (Linux has
    /// it from 5.14 on) do nothing.
    ///
    /// # Errors
    /// The disk fails, or the file was cut.
    pub fn check_readable(&self) -> std::io::Result<()> {
        #[cfg(target_os = "linux")]
        {
            let (start, read) = (self.range.start, memmap2::Advice::PopulateRead);
            let done = self.map.advise_range(read, start, self.range.len());
            let is_unknown = |error: &std::io::Error| {
                rustix::io::Errno::from_io_error(error) == Some(rustix::io::Errno::INVAL)
            };
            match done {
                Err(error) if !is_unknown(&error) => Err(error),
                _ => Ok(()),
            }
        }
        #[cfg(not(target_os = "linux"))]
        Ok(())
    }

    /// Length in bytes. Does not wait.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none. Waits for none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// `len` bytes of memory as `fill` leaves them; they are zero before.
    ///
    /// # Errors
    /// Reason of the system for refusing the memory.
    pub fn filled(len: usize, fill: impl FnOnce(&mut [u8])) -> std::io::Result<Self> {
        let mut map = MmapMut::map_anon(len)?;
        fill(&mut map);
        Ok(Self {
            map: Arc::new(map.make_read_only()?),
            range: 0..len,
            of_file: false,
            arrivals: None,
        })
    }

    /// The part at `range`, counted from the start of these bytes; `None` when it reaches outside.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(Self {
            map: Arc::clone(&self.map),
            range: start..self.range.start + range.end,
            of_file: self.of_file,
            arrivals: self.arrivals.clone(),
        })
    }

    /// Advises the system that these bytes are not needed soon, for weights that were repacked.
    ///
    /// Drops the pages that lie wholly inside from resident memory; later reads fetch them from the
    /// file again. Memory without a file stays. Only a hint: a failure or a system without it
    /// changes nothing but memory use.
    pub fn discard(&self) {
        let pages = whole_pages(&self.range);
        if pages.is_empty() || !self.of_file {
            return;
        }
        #[cfg(unix)]
        {
            // SAFETY: the mapping is backed by a file and never written, so dropped pages are read
            // again with the same content, and slices of them stay valid.
            let advised = unsafe {
                self.map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    pages.start,
                    pages.len(),
                )
            };
            drop(advised); // a hint: see above
        }
    }
}

impl Deref for MappedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        if let Some(arrivals) = &self.arrivals
            && let Err(absent) = arrivals.wait(self.range.clone())
        {
            panic!("{absent}");
        }
        self.as_they_are()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(content: &[u8]) -> (tempfile::TempDir, MappedBytes) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, content).unwrap();
        let bytes = MappedBytes::open(&path).unwrap();
        (dir, bytes)
    }

    #[test]
    fn slices_stay_inside() {
        let (_dir, bytes) = mapped(b"0123456789");
        let middle = bytes.slice(2..8).unwrap();
        assert_eq!(&*middle, b"234567");
        assert_eq!(&*middle.slice(1..3).unwrap(), b"34");
        assert_eq!(&*middle.slice(6..6).unwrap(), b"");
        assert!(middle.slice(0..7).is_none());
        #[allow(clippy::reversed_empty_ranges, reason = "the case under test")]
        let reversed = middle.slice(3..2);
        assert!(reversed.is_none());
    }

    /// Has the first bytes only, and counts what was waited for.
    #[derive(Debug)]
    struct First(usize, std::sync::atomic::AtomicUsize);

    impl Arrivals for First {
        fn wait(&self, range: Range<usize>) -> Result<(), Absent> {
            self.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            match range.end <= self.0 {
                true => Ok(()),
                false => Err(Absent {
                    file: "m".to_owned(),
                    range,
                    reason: "nobody has them".to_owned(),
                }),
            }
        }
    }

    #[test]
    fn bytes_that_arrive_are_waited_for_once() {
        let (_dir, bytes) = mapped(b"0123456789");
        let first = Arc::new(First(4, std::sync::atomic::AtomicUsize::new(0)));
        let waits = || first.1.load(std::sync::atomic::Ordering::SeqCst);
        let bytes = bytes.arriving(Arc::clone(&first) as Arc<dyn Arrivals>);
        assert_eq!((bytes.len(), waits()), (10, 0), "a length needs no bytes");
        let head = bytes.slice(1..4).unwrap().arrived().unwrap();
        assert_eq!(&*head, b"123");
        assert_eq!(&*head, b"123");
        assert_eq!(waits(), 1);
        let absent = bytes.slice(2..6).unwrap().arrived().unwrap_err();
        let text = "bytes 2..6 of m are not here: nobody has them";
        assert_eq!(absent.to_string(), text);
        let read = std::panic::AssertUnwindSafe(|| bytes.slice(0..5).unwrap()[0]);
        let read = std::panic::catch_unwind(read);
        assert!(read.is_err(), "no byte is read before it is there");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn bytes_that_the_file_lost_are_not_resident() {
        let (dir, bytes) = mapped(&[7; 3 << 12]);
        let part = bytes.slice(9..3 << 12).unwrap();
        if part.resident(0..9).is_none() {
            eprintln!("SKIPPED resident bytes: Linux 5.14 has the call");
            return;
        }
        let end = part.len();
        assert_eq!(part.resident(0..end), Some(&*part));
        assert_eq!(part.resident(0..end + 1), None);
        let file = File::options().write(true).open(dir.path().join("file"));
        file.unwrap().set_len(1 << 12).unwrap();
        assert_eq!(part.resident(0..1000).map(<[u8]>::len), Some(1000));
        assert_eq!(part.resident(0..end), None, "reading them would be fatal");
    }

    #[test]
    fn an_empty_file_maps_to_nothing() {
        let (_dir, bytes) = mapped(b"");
        assert!(bytes.is_empty());
        bytes.discard();
    }

    #[test]
    fn memory_of_our_own_is_kept() {
        let bytes = MappedBytes::filled(1 << 20, |out| out.fill(7)).unwrap();
        let part = bytes.slice(1..1 << 20).unwrap();
        part.discard();
        assert!(part.iter().all(|&byte| byte == 7));
        assert!(MappedBytes::filled(0, |_| {}).unwrap().is_empty());
    }

    #[test]
    fn folders_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            MappedBytes::open(dir.path()),
            Err(OpenError::NotAFile)
        ));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn discarded_bytes_leave_memory_and_come_back() {
        let content: Vec<u8> = (0..8 << 20).map(|i: u32| i.to_le_bytes()[1]).collect();
        let (dir, bytes) = mapped(&content);
        assert_eq!(&*bytes, content);
        let path = dir.path().join("file");
        let before = resident_kib(&path);
        bytes.slice(100..content.len() - 100).unwrap().discard();
        let after = resident_kib(&path);
        assert!(before >= 8 << 10, "{before} KiB resident after reading all");
        assert!(
            after <= 256,
            "{after} KiB resident after discarding all but the ends"
        );
        assert_eq!(&*bytes, content);
    }

    /// Resident memory of the mappings of `path`, from the kernel's own account.
    #[cfg(target_os = "linux")]
    fn resident_kib(path: &Path) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let file = path.to_str().unwrap();
        let entry = maps.split_once(file).expect("the file is mapped").1;
        let line = entry.lines().find(|l| l.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}
