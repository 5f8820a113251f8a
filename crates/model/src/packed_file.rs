//! Packed weights on disk: a rank's matrices in the kernels' form, so that a later start reads them
//! instead of packing them again.
//!
//! ```text
//! {folder}/{model}/model            path of the model's file
//! {folder}/{model}/{shard}.packed   header | record | record | .. | end
//! {folder}/{model}/{shard}.part     the same while it is written, locked by its writer
//!
//! header, record's header, end      4 KiB each: fields, BLAKE3 of these, zeros
//! record                            header, data, zeros up to a multiple of 4 KiB
//! ```
//!
//! Matrices are loaded in one order, so that a record needs no name. Its header has a hash of the
//! matrix's type, shape and options, and one of its data. A file belongs to one state of a model's
//! files, kernel class and shard ([`PackedFile::open`]). Another state, another [`VERSION`] or
//! [`PACKING`] replaces it.
//!
//! A killed writer leaves a `.part`. The next start uses its complete records and continues behind
//! them. A process that finds it locked packs in memory. So does one that cannot write, or finds a
//! damaged record; it removes the file and reports a [`PackedFault`]. Nothing is used before its
//! hash fits. Norms, biases and embeddings stay in the model's own files. So do matrices of decoded
//! types, and those of latent attention that are transposed.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use paceline_base::{Bytes, hex, lock};
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{MatrixMemory, PACKING, PackOptions, PackedMatrix, StoredMatrix, ThreadPool};

use crate::streaming::StreamUnit;

/// Revision of the files.
const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"plpack\r\n";
const RECORD_MAGIC: &[u8; 8] = b"plmatrix";
const END_MAGIC: &[u8; 8] = b"plpacked";

/// Bytes of a header, and what data is a multiple of: the largest sector of usual disks.
pub(crate) const BLOCK: usize = 4096;

/// Bytes that a task reads and hashes: 128 KiB to 4 MiB read an NVMe disk at the same rate.
pub(crate) const PIECE: usize = 1 << 20;

/// Name of the file that has the model's path.
const MODEL: &str = "model";

/// Why weights are not on disk as wanted. They were packed in memory instead.
#[derive(Debug, thiserror::Error)]
pub enum PackedFault {
    #[error("packed weights are not kept: cannot {action} {}: {source}", path.display())]
    System {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The file is complete and has other bytes than were written.
    #[error("packed weights {} were damaged at matrix {index} and are removed", path.display())]
    Damaged { path: PathBuf, index: u64 },
    #[error("packed weights {} are being written by another process", path.display())]
    Busy { path: PathBuf },
}

/// A hash, or the bytes of one.
pub(crate) type Hash = [u8; 32];

/// The packed weights of one rank, read or written in the order of loading.
#[derive(Debug)]
pub struct PackedFile {
    path: PathBuf,
    /// Whether matrices of units stay on the disk.
    streams: bool,
    state: Mutex<State>,
}

/// A matrix that stays on the disk until a step needs it.
#[derive(Clone, Debug)]
pub(crate) struct StreamedMatrix {
    pub(crate) unit: StreamUnit,
    pub(crate) memory: MatrixMemory,
    /// Offset of its data in the file, a multiple of 4 KiB.
    pub(crate) start: u64,
    /// Hash of the hashes of its pieces.
    pub(crate) sum: Hash,
}

#[derive(Debug)]
struct State {
    file: Option<File>,
    /// The unit of the next matrices, where they are streamed.
    unit: Option<StreamUnit>,
    streamed: Vec<StreamedMatrix>,
    /// Offset of the next record.
    at: u64,
    /// Number of the next record.
    index: u64,
    mode: Mode,
    fault: Option<PackedFault>,
}

/// The next part of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Records of a complete file.
    Read,
    /// Perhaps records of a writer that was killed.
    Resume,
    /// Nothing: records are appended.
    Write,
    /// There is no file.
    Off,
}

/// Header of a record.
struct RecordHeader {
    index: u64,
    bytes: u64,
    is_tiny: bool,
    /// Of type, shape and options.
    key: Hash,
    /// Of the hashes of the data's pieces.
    sum: Hash,
}

impl PackedFile {
    /// Opens the packed weights of a shard of the model at `model`, below `folder`, or begins them.
    /// `shard` names part and kernel class; `stamp` is another after every change of the model's
    /// files. Never fails: see [`take_fault`](Self::take_fault).
    pub fn open(folder: &Path, model: &Path, shard: &str, stamp: &str) -> Self {
        let own = folder.join(name(model.as_os_str().as_encoded_bytes()));
        let path = own.join(format!("{}.packed", name(shard.as_bytes())));
        let header = file_header(&format!("{stamp}/{shard}"));
        let (opened, fault) = match open_at(&own, &path, model, &header) {
            Ok(opened) => (Some(opened), None),
            Err(fault) => (None, Some(fault)),
        };
        let (file, mode) = opened.map_or((None, Mode::Off), |(file, mode)| (Some(file), mode));
        let state = State {
            file,
            unit: None,
            streamed: Vec::new(),
            at: BLOCK as u64,
            index: 0,
            mode,
            fault,
        };
        Self {
            path,
            streams: false,
            state: Mutex::new(state),
        }
    }

    /// Bytes of the file so far, if another process writes it.
    pub fn busy_bytes(&self) -> Option<u64> {
        let is_busy = matches!(lock(&self.state).fault, Some(PackedFault::Busy { .. }));
        let bytes = || fs::metadata(part_of(&self.path)).map_or(0, |facts| facts.len());
        is_busy.then(bytes)
    }

    /// Has layers and experts stay on the disk, for [`Model::load_streamed`].
    ///
    /// [`Model::load_streamed`]: crate::Model::load_streamed
    pub(crate) fn streamed(mut self) -> Self {
        self.streams = true;
        self
    }

    /// From now on matrices belong to `unit`, and stay on the disk until it is needed.
    pub(crate) fn set_unit(&self, unit: Option<StreamUnit>) {
        lock(&self.state).unit = unit.filter(|_| self.streams);
    }

    /// Why matrices are not on the disk, once, where they must be.
    pub(crate) fn streaming_fault(&self) -> Option<PackedFault> {
        if self.streams {
            self.take_fault()
        } else {
            None
        }
    }

    /// The matrices that are on the disk only, and the file that has them.
    pub(crate) fn take_streamed(&self) -> (Vec<StreamedMatrix>, PathBuf) {
        let streamed = std::mem::take(&mut lock(&self.state).streamed);
        (streamed, self.path.clone())
    }

    /// Whether all matrices with data are there: the model's own need not be read.
    pub(crate) fn is_complete(&self) -> bool {
        lock(&self.state).mode == Mode::Read
    }

    /// Why the weights are not on disk as wanted, once.
    pub fn take_fault(&self) -> Option<PackedFault> {
        lock(&self.state).fault.take()
    }

    /// The next matrix: from the file, else from `pack`, whose result is appended. `pack` gives
    /// what [`PackedMatrix::of_columns`] does with these arguments. Reads on all threads of `pool`.
    ///
    /// # Errors
    /// Those of `pack`.
    pub(crate) fn matrix(
        &self,
        stored: StoredMatrix<'_>,
        (columns, options): (Range<usize>, PackOptions),
        pool: &ThreadPool,
        pack: impl FnOnce() -> Result<PackedMatrix, paceline_tensor::Error>,
    ) -> Result<PackedMatrix, paceline_tensor::Error> {
        if !PackedMatrix::has_data(stored.block_type, options) {
            return pack();
        }
        let mut state = lock(&self.state);
        let key = key_of(&stored, &columns, options);
        if matches!(state.mode, Mode::Read | Mode::Resume) {
            match state.read(stored, (columns, options), &key, pool)? {
                Some(matrix) => return Ok(matrix),
                None if state.mode == Mode::Resume => state.mode = Mode::Write,
                None => {
                    let (path, index) = (self.path.clone(), state.index);
                    let _ = fs::remove_file(&path); // another process may have done it
                    state.end(PackedFault::Damaged { path, index });
                }
            }
        }
        let mut matrix = pack()?;
        if state.mode == Mode::Write
            && let Err(source) = state.append(&mut matrix, key, pool)
        {
            self.abandon(&mut state, source);
        }
        Ok(matrix)
    }

    /// Gives a file that was written its final name, after the last matrix. Waits until it is on
    /// the disk.
    pub(crate) fn finish(&self) {
        let mut state = lock(&self.state);
        if state.mode == Mode::Resume {
            state.mode = Mode::Write; // all records were there, the end was not
        }
        if state.mode == Mode::Write
            && let Err(source) = state.finish(&self.path)
        {
            self.abandon(&mut state, source);
        }
        state.file = None; // unlocks it
    }

    /// Removes a file that cannot be written, so that its part fills no disk.
    fn abandon(&self, state: &mut State, source: io::Error) {
        let path = part_of(&self.path);
        let _ = fs::remove_file(&path); // the fault has the reason
        state.end(PackedFault::System {
            action: "write",
            path,
            source,
        });
    }
}

impl State {
    /// Continues without a file.
    fn end(&mut self, fault: PackedFault) {
        (self.file, self.mode, self.fault) = (None, Mode::Off, Some(fault));
    }

    /// The next record's matrix; `None` if the record is not whole, or of another matrix.
    fn read(
        &mut self,
        stored: StoredMatrix<'_>,
        (columns, options): (Range<usize>, PackOptions),
        key: &Hash,
        pool: &ThreadPool,
    ) -> Result<Option<PackedMatrix>, paceline_tensor::Error> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        let header = read_record(file, self.at);
        let is_next = |record: &RecordHeader| record.index == self.index && record.key == *key;
        let Some(record) = header.filter(is_next) else {
            return Ok(None);
        };
        let (start, mut whole) = (self.at + BLOCK as u64, false);
        let is_streamed = self.unit.is_some() && self.mode == Mode::Read;
        let fill = |data: &mut [u8]| {
            if is_streamed {
                whole = data.len() as u64 == record.bytes;
                return Ok(());
            }
            whole = data.len() as u64 == record.bytes
                && read_pieces(file, start, data, pool).is_ok_and(|sum| sum == record.sum);
            Ok::<_, paceline_tensor::Error>(())
        };
        let mut matrix = PackedMatrix::read_back(stored, columns, options, record.is_tiny, fill)?;
        if !whole {
            return Ok(None);
        }
        self.keep_on_disk(&mut matrix, start, record.sum);
        self.step(record.bytes);
        Ok(Some(matrix))
    }

    /// Goes behind a record with this many bytes of data.
    const fn step(&mut self, bytes: u64) {
        self.at += BLOCK as u64 + bytes.next_multiple_of(BLOCK as u64);
        self.index += 1;
    }

    fn append(
        &mut self,
        matrix: &mut PackedMatrix,
        key: Hash,
        pool: &ThreadPool,
    ) -> io::Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let data = matrix.data();
        let header = RecordHeader {
            index: self.index,
            bytes: data.len() as u64,
            is_tiny: matrix.is_tiny(),
            key,
            sum: sum_of(data, pool),
        };
        let start = self.at + BLOCK as u64;
        file.write_all_at(&header.block(), self.at)?;
        file.write_all_at(data, start)?;
        let rest = data.len().next_multiple_of(BLOCK) - data.len();
        file.write_all_at(&[0; BLOCK][..rest], start + data.len() as u64)?;
        self.keep_on_disk(matrix, start, header.sum);
        self.step(header.bytes);
        Ok(())
    }

    /// Drops a matrix's bytes where it is streamed: those in the file are the same.
    fn keep_on_disk(&mut self, matrix: &mut PackedMatrix, start: u64, sum: Hash) {
        if let Some(unit) = self.unit {
            let memory = matrix.detach();
            self.streamed.push(StreamedMatrix {
                unit,
                memory,
                start,
                sum,
            });
        }
    }

    fn finish(&mut self, path: &Path) -> io::Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let end = block(&[END_MAGIC, &self.index.to_le_bytes()]);
        file.write_all_at(&end, self.at)?;
        file.set_len(self.at + BLOCK as u64)?; // a longer part of an earlier writer
        file.sync_all()?;
        fs::rename(part_of(path), path)
    }
}

impl RecordHeader {
    fn block(&self) -> [u8; BLOCK] {
        let tiny = u64::from(self.is_tiny).to_le_bytes();
        let (index, bytes) = (self.index.to_le_bytes(), self.bytes.to_le_bytes());
        block(&[RECORD_MAGIC, &index, &bytes, &tiny, &self.key, &self.sum])
    }
}

/// Opens the complete file, else the part, else begins one.
fn open_at(
    own: &Path,
    path: &Path,
    model: &Path,
    header: &[u8; BLOCK],
) -> Result<(File, Mode), PackedFault> {
    let complete = || {
        let file = File::open(path).ok()?;
        (is_of(&file, header) && is_ended(&file)).then_some((file, Mode::Read))
    };
    if let Some(complete) = complete() {
        return Ok(complete);
    }
    let part = part_of(path);
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| PackedFault::System {
            action,
            path,
            source,
        }
    };
    fs::create_dir_all(own).map_err(failed("make", own))?;
    let named = || File::create(own.join(MODEL))?.write_all(model.as_os_str().as_encoded_bytes());
    named().map_err(failed("write", own))?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = options.open(&part).map_err(failed("write", &part))?;
    match file.try_lock() {
        Ok(()) => {
            // Its writer may have ended between the two looks.
            if let Some(complete) = complete() {
                return Ok(complete);
            }
        }
        Err(TryLockError::WouldBlock) => {
            let path = part;
            return Err(PackedFault::Busy { path });
        }
        Err(TryLockError::Error(source)) => return Err(failed("lock", &part)(source)),
    }
    if is_of(&file, header) {
        return Ok((file, Mode::Resume));
    }
    let begin = || file.set_len(0).and_then(|()| file.write_all_at(header, 0));
    begin().map_err(failed("write", &part))?;
    Ok((file, Mode::Write))
}

fn part_of(path: &Path) -> PathBuf {
    path.with_extension("part")
}

fn is_of(file: &File, header: &[u8; BLOCK]) -> bool {
    let mut own = [0; BLOCK];
    file.read_exact_at(&mut own, 0).is_ok() && own == *header
}

/// Whether a file has its last block.
fn is_ended(file: &File) -> bool {
    let len = file.metadata().map_or(0, |facts| facts.len());
    let mut end = [0; BLOCK];
    len >= 2 * BLOCK as u64
        && file.read_exact_at(&mut end, len - BLOCK as u64).is_ok()
        && end == block(&[END_MAGIC, &end[8..16]])
}

fn file_header(of: &str) -> [u8; BLOCK] {
    let of = blake3::hash(of.as_bytes());
    let [version, packing] = [VERSION, PACKING].map(u32::to_le_bytes);
    block(&[MAGIC, &version, &packing, of.as_bytes()])
}

/// Fields, their hash, and zeros.
fn block(fields: &[&[u8]]) -> [u8; BLOCK] {
    let fields = fields.concat();
    let mut block = [0; BLOCK];
    block[..fields.len()].copy_from_slice(&fields);
    block[fields.len()..fields.len() + 32].copy_from_slice(blake3::hash(&fields).as_bytes());
    block
}

/// The header of the record at `at`; `None` if there is none.
fn read_record(file: &File, at: u64) -> Option<RecordHeader> {
    let mut own = [0; BLOCK];
    file.read_exact_at(&mut own, at).ok()?;
    let number = |at: usize| own[at..].first_chunk().copied().map(u64::from_le_bytes);
    let hash = |at: usize| own[at..].first_chunk::<32>().copied();
    let record = RecordHeader {
        index: number(8)?,
        bytes: number(16)?,
        is_tiny: number(24)? == 1,
        key: hash(32)?,
        sum: hash(64)?,
    };
    (record.block() == own).then_some(record)
}

/// Reads `data` from `start` on, and gives its [`sum`](sum_of).
fn read_pieces(file: &File, start: u64, data: &mut [u8], pool: &ThreadPool) -> io::Result<Hash> {
    let pieces = Mutex::new(data.chunks_mut(PIECE).enumerate());
    let failed = Mutex::new(None);
    let sum = hashes(pool, data_pieces(&pieces), |_| {
        let next = lock(&pieces).next();
        let (i, piece) = next.expect("one piece for each task");
        let offset = start + (i * PIECE) as u64;
        if let Err(error) = file.read_exact_at(piece, offset) {
            *lock(&failed) = Some(error);
        }
        (i, *blake3::hash(piece).as_bytes())
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(sum),
    }
}

/// Pieces that are left.
fn data_pieces<I: ExactSizeIterator>(pieces: &Mutex<I>) -> usize {
    lock(pieces).len()
}

/// The hash of the hashes of pieces of `data`.
fn sum_of(data: &[u8], pool: &ThreadPool) -> Hash {
    let hash = |i: usize| {
        let piece = &data[i * PIECE..data.len().min((i + 1) * PIECE)];
        (i, *blake3::hash(piece).as_bytes())
    };
    hashes(pool, data.len().div_ceil(PIECE), hash)
}

/// The hash of `n` hashes, each computed by a task that gives its number.
fn hashes(pool: &ThreadPool, n: usize, of: impl Fn(usize) -> (usize, Hash) + Sync) -> Hash {
    let mut all = vec![[0u8; 32]; n];
    let parts = DisjointMut::new(&mut all, 1);
    pool.run(n, &|task| {
        let (i, hash) = of(task);
        // SAFETY: no two tasks have one number.
        unsafe { parts.part(i)[0] = hash };
    });
    *blake3::hash(all.as_flattened()).as_bytes()
}

fn key_of(stored: &StoredMatrix<'_>, columns: &Range<usize>, options: PackOptions) -> Hash {
    let StoredMatrix {
        block_type,
        rows,
        cols,
        ..
    } = stored;
    let text = format!("{block_type} {rows} {cols} {columns:?} {options:?}");
    *blake3::hash(text.as_bytes()).as_bytes()
}

/// A name of 16 hexadecimal digits.
fn name(of: &[u8]) -> String {
    hex(&blake3::hash(of).as_bytes()[..8])
}

/// Removes the packed weights below `folder` of models that are no longer there. Returns the bytes
/// that this freed.
///
/// # Errors
/// The system's answer; nothing is missing if there is no such folder.
pub fn remove_packed_orphans(folder: &Path) -> io::Result<Bytes> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Bytes(0)),
        entries => entries?,
    };
    let mut freed = 0;
    for entry in entries {
        let own = entry?.path();
        let Ok(model) = fs::read_to_string(own.join(MODEL)) else {
            continue; // not made here
        };
        if Path::new(&model).exists() {
            continue;
        }
        for file in fs::read_dir(&own)? {
            freed += file?.metadata()?.len();
        }
        fs::remove_dir_all(&own)?;
    }
    Ok(Bytes(freed))
}
