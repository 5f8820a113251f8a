//! Reads of a disk past the system's cache.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use paceline_tensor::MemoryBlock;

use crate::packed_file::PIECE;

/// Reads under way at a time: an NVMe disk has its full rate from 8 to 16 reads of 1 MiB on.
pub(super) const READERS: usize = 16;

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

/// Opens a file to be read past the system's cache, where the file system can.
pub(super) fn open_direct(path: &Path) -> io::Result<File> {
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
