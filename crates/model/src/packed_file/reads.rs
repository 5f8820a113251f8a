//! Reads of a complete packed file while its matrices are looked up.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;

use paceline_base::lock;
use paceline_tensor::PackedMatrix;

use super::records::{Hash, PIECE, RecordHeader};
use crate::streaming::disk::{Piece, READERS, is_cached, open_direct};

/// Pieces that wait for a reader, at most: enough that none waits while a matrix is looked up.
const WAITING: usize = 4 * READERS;

/// Hashes of pieces, by their numbers.
type PieceHashes = Vec<(usize, Hash)>;

/// Threads that fill matrices. Dropped before its end, it lets them end on their own.
#[derive(Debug)]
pub(super) struct MatrixReads {
    pieces: SyncSender<Piece>,
    readers: Vec<thread::JoinHandle<io::Result<PieceHashes>>>,
    /// Of each matrix: its record's number, its pieces and its sum.
    expected: Vec<(u64, usize, Hash)>,
    /// Pieces of all matrices.
    n: usize,
}

impl MatrixReads {
    /// Opens the file at `path` and starts threads, at least one. What fails is an error at the
    /// [end](Self::finish).
    pub(super) fn start(path: &Path) -> Self {
        let (pieces, waiting) = sync_channel(WAITING);
        let waiting = Arc::new(Mutex::new(waiting));
        let file = File::open(path).and_then(|file| match is_cached(&file) {
            true => Ok(file),
            false => open_direct(path),
        });
        let file = Arc::new(file);
        let reader = |i: usize| {
            let (file, waiting) = (Arc::clone(&file), Arc::clone(&waiting));
            let thread = thread::Builder::new().name(format!("read-{i}"));
            thread.spawn(move || read_all(&file, &waiting)).ok()
        };
        Self {
            pieces,
            readers: (0..READERS).filter_map(reader).collect(),
            expected: Vec::new(),
            n: 0,
        }
    }

    /// Has the data of `matrix`, from `start` of the file on, put into its memory. Waits while as
    /// many pieces as may wait do.
    pub(super) fn push(&mut self, matrix: &PackedMatrix, start: u64, record: &RecordHeader) {
        let (block, len) = (Arc::new(matrix.memory()), matrix.bytes().0 as usize);
        let first = self.n;
        for to in (0..len).step_by(PIECE) {
            let block = Arc::clone(&block);
            let piece = Piece {
                nth: self.n,
                from: start + to as u64,
                len: PIECE.min(len - to),
                block,
                to,
            };
            let _ = self.pieces.send(piece); // without readers it fails at the end
            self.n += 1;
        }
        let n = self.n - first;
        self.expected.push((record.index, n, record.sum));
    }

    /// Waits for all reads.
    ///
    /// # Errors
    /// The number of the first matrix that could not be read or has other bytes than were written.
    pub(super) fn finish(self) -> Result<(), u64> {
        drop(self.pieces);
        let mut hashes = vec![[0; 32]; self.n];
        for reader in self.readers {
            // Pieces of a reader that failed have no hash.
            let read = reader.join().unwrap_or_else(|_| Ok(Vec::new()));
            let read = read.unwrap_or_default();
            read.into_iter().for_each(|(nth, hash)| hashes[nth] = hash);
        }
        let mut hashes = hashes.as_slice();
        for (index, n, sum) in self.expected {
            let own;
            (own, hashes) = hashes.split_at(n);
            if *blake3::hash(own.as_flattened()).as_bytes() != sum {
                return Err(index);
            }
        }
        Ok(())
    }
}

/// Work of a reader: the hashes of the pieces that it read.
fn read_all(file: &io::Result<File>, waiting: &Mutex<Receiver<Piece>>) -> io::Result<PieceHashes> {
    let mut hashes = Vec::new();
    let next = || lock(waiting).recv().ok(); // ends with the sender
    while let Some(piece) = next() {
        let file = file.as_ref().map_err(|error| error.kind())?;
        hashes.push((piece.nth, piece.read(file)?));
    }
    Ok(hashes)
}
