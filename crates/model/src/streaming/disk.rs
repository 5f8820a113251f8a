//! Reads of a disk past the system's cache.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use paceline_tensor::MemoryBlock;

use crate::packed_file::records::{BLOCK, Hash, PIECE};

/// Reads under way at a time: an NVMe disk has its full rate from 8 to 16 reads of 1 MiB on.
pub(crate) const READERS: usize = 16;

/// A read of a packed file.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Number among the pieces that are read together.
    pub(crate) nth: usize,
    /// Offset in the file.
    pub(crate) from: u64,
    /// Bytes, without the rest of the last block.
    pub(crate) len: usize,
    pub(crate) block: Arc<MemoryBlock>,
    /// Offset in the block.
    pub(crate) to: usize,
}

impl Piece {
    /// Reads it into its block, and gives its hash. Each piece is read by one thread, before any
    /// step uses its block.
    ///
    /// # Errors
    /// The system's answer.
    pub(crate) fn read(&self, file: &File) -> io::Result<Hash> {
        // Direct reads take whole blocks; matrices begin at such in file and memory.
        let end = self.to + self.len.next_multiple_of(BLOCK);
        // SAFETY: as said above.
        let out = unsafe { self.block.part(self.to..end) };
        file.read_exact_at(out, self.from)?;
        Ok(*blake3::hash(&out[..self.len]).as_bytes())
    }
}

/// Reads a part of the file at `path`, or of a folder's largest file, as streamed weights are read.
/// The caller measures the time: a tenth of a second on an NVMe disk. Returns the bytes.
/// `None` for a small or unreadable file.
pub fn read_sample(path: &Path) -> Option<u64> {
    /// Enough for some rounds of all readers.
    const SAMPLE: u64 = 128 << 20;
    let files = fs::read_dir(path).ok().into_iter().flatten().flatten();
    let files = files.map(|entry| entry.path());
    let size = |path: &PathBuf| fs::metadata(path).map_or(0, |facts| facts.len());
    let path = files.chain([path.to_owned()]).max_by_key(size)?;
    let pieces = size(&path).min(SAMPLE) / PIECE as u64;
    let file = open_direct(&path)
        .ok()
        .filter(|_| pieces >= READERS as u64)?;
    let next = AtomicU64::new(0);
    let read = || {
        let Ok(block) = MemoryBlock::new(PIECE) else {
            return false;
        };
        // SAFETY: nobody else has the block.
        let out = unsafe { block.part(0..PIECE) };
        let piece = || next.fetch_add(1, Ordering::Relaxed);
        std::iter::repeat_with(piece)
            .take_while(|piece| *piece < pieces)
            .all(|piece| file.read_exact_at(out, piece * PIECE as u64).is_ok())
    };
    let are_read = thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(read)).collect();
        let ended = readers.into_iter().map(thread::ScopedJoinHandle::join);
        let ended: Vec<_> = ended.collect(); // all are joined, also after a failed one
        ended.into_iter().all(|own| own.unwrap_or(false))
    });
    are_read.then_some(pieces * PIECE as u64)
}

/// Whether the system's cache has a file, judged by its quarters. Then reads past it are slower.
pub(crate) fn is_cached(file: &File) -> bool {
    #[cfg(target_os = "linux")]
    {
        use rustix::io::{ReadWriteFlags, preadv2};
        let len = file.metadata().map_or(0, |facts| facts.len());
        let has = |quarter: u64| {
            let (mut byte, at) = ([0], len / 4 * quarter);
            let bytes = &mut [io::IoSliceMut::new(&mut byte)];
            preadv2(file, bytes, at, ReadWriteFlags::NOWAIT).is_ok_and(|n| n > 0)
        };
        (0..4).all(has)
    }
    // A descriptor that takes no cache has what is in it elsewhere.
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        false
    }
}

/// Opens a file to be read past the system's cache, where the file system can.
pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        let opened = File::options().read(true).custom_flags(direct).open(path);
        if let Ok(file) = opened {
            return Ok(file);
        }
    }
    let file = File::open(path)?;
    #[cfg(target_vendor = "apple")]
    let _ = rustix::fs::fcntl_nocache(&file, true); // refused: it takes cache
    Ok(file)
}
