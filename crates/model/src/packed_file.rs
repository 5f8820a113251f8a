//! Packed weights on disk: a rank's matrices in the kernels' form, so that a later start reads them
//! instead of packing them again.
//!
//! ```text
//! {folder}/{model}/model            path of the model's file
//! {folder}/{model}/{shard}.packed   header | record | record | .. | index | end
//! {folder}/{model}/{shard}.part     the same while it is written, locked by its writer
//!
//! header, record's header, end      4 KiB each: fields, BLAKE3 of these, zeros
//! record                            header, data, zeros up to a multiple of 4 KiB
//! index                             fields of all records' headers
//! ```
//!
//! Matrices are loaded in one order, so that a record needs no name. Its header has a hash of the
//! matrix's type, shape and options, and one of its data. A file belongs to one state of a model's
//! files, kernel class and shard ([`PackedFile::open`]). A file of another state or revision is
//! replaced.
//!
//! Threads read the data of a complete file while the next matrices are looked up;
//! [`PackedFile::finish`] waits for them. Nothing is used before its hash fits.
//!
//! A killed writer leaves a `.part`. The next start uses its complete records and continues behind
//! them. A process that finds it locked packs in memory. So does one that cannot write, or finds a
//! damaged record; it removes the file and reports a [`PackedFault`]. Norms, biases and embeddings
//! stay in the model's own files. So do matrices of decoded types, and those of latent attention
//! that are transposed.

mod reads;
pub(crate) mod records;

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use paceline_base::{Bytes, hex, lock};
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{MatrixMemory, PackOptions, PackedMatrix, StoredMatrix, ThreadPool};

use reads::MatrixReads;
use records::{
    BLOCK, Hash, PIECE, RecordHeader, StreamUnit, StreamedMatrix, file_header, is_of, read_index,
    read_record, write_index,
};

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

/// The packed weights of one rank, read or written in the order of loading.
#[derive(Debug)]
pub struct PackedFile {
    path: PathBuf,
    /// Whether matrices of units stay on the disk.
    streams: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: Option<File>,
    /// The unit of the next matrices, where they are streamed.
    unit: Option<StreamUnit>,
    streamed: Vec<StreamedMatrix>,
    /// Of a complete file all, else those that were read or written so far.
    records: Vec<RecordHeader>,
    /// Reads of a complete file.
    reads: Option<MatrixReads>,
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

impl PackedFile {
    /// Opens the packed weights of a shard of the model at `model`, below `folder`, or begins them.
    /// `shard` names part and kernel class; `stamp` is another after every change of the model's
    /// files. Never fails: see [`take_fault`](Self::take_fault).
    pub fn open(folder: &Path, model: &Path, shard: &str, stamp: &str) -> Self {
        let own = folder.join(name(model.as_os_str().as_encoded_bytes()));
        let path = own.join(format!("{}.packed", name(shard.as_bytes())));
        let header = file_header(&format!("{stamp}/{shard}"));
        let mut state = State {
            file: None,
            unit: None,
            streamed: Vec::new(),
            records: Vec::new(),
            reads: None,
            at: BLOCK as u64,
            index: 0,
            mode: Mode::Off,
            fault: None,
        };
        match open_at(&own, &path, model, &header) {
            Ok((file, mode, records)) => {
                (state.file, state.mode, state.records) = (Some(file), mode, records);
            }
            Err(fault) => state.fault = Some(fault),
        }
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
    /// what [`PackedMatrix::of_columns`] does with these arguments. The data of a complete file are
    /// there after [`finish`](Self::finish).
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
            match state.read(&self.path, stored, (columns, options), &key)? {
                Some(matrix) => return Ok(matrix),
                None if state.mode == Mode::Resume => state.mode = Mode::Write,
                None => {
                    let index = state.index;
                    self.give_up(&mut state, index);
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

    /// The bytes of an array of the last [unit](Self::set_unit), which another engine reads when a
    /// step needs them. Writes them unless the file has the same ones. Hashes on all threads of
    /// `pool`.
    ///
    /// # Errors
    /// The file cannot be written, or it is complete and has another array there; it is removed
    /// then.
    pub(crate) fn array(
        &self,
        bytes: &[u8],
        pool: &ThreadPool,
    ) -> Result<MatrixMemory, PackedFault> {
        let mut state = lock(&self.state);
        let (key, sum) = (*blake3::hash(b"array").as_bytes(), sum_of(bytes, pool));
        let header = RecordHeader {
            index: state.index,
            bytes: bytes.len() as u64,
            is_tiny: false,
            key,
            sum,
        };
        let is_there = state.next_record().is_some_and(|own| own == header);
        match state.mode {
            Mode::Read if !is_there => {
                let index = state.index;
                self.give_up(&mut state, index);
            }
            Mode::Resume if is_there => state.records.push(header),
            Mode::Resume => state.mode = Mode::Write,
            _ => {}
        }
        if state.mode == Mode::Write
            && let Err(source) = state.write_record(&header, bytes)
        {
            self.abandon(&mut state, source);
        }
        match state.fault.take() {
            Some(fault) => Err(fault),
            None => {
                let memory = MatrixMemory::on_disk(bytes.len());
                let start = state.at + BLOCK as u64;
                state.stream(memory.clone(), start, sum);
                state.step(header.bytes);
                Ok(memory)
            }
        }
    }

    /// Ends loading, after the last matrix: waits until the data of all matrices are there. Gives a
    /// file that was written its final name, and waits until it is on the disk. False if data were
    /// damaged: then no matrix may be used, and another load packs all in memory.
    #[must_use]
    pub(crate) fn finish(&self) -> bool {
        let mut state = lock(&self.state);
        if let Some(Err(index)) = state.reads.take().map(MatrixReads::finish) {
            self.give_up(&mut state, index);
            return false;
        }
        if state.mode == Mode::Resume {
            state.mode = Mode::Write; // all records were there, the end was not
        }
        if state.mode == Mode::Write
            && let Err(source) = state.finish(&self.path)
        {
            self.abandon(&mut state, source);
        }
        state.file = None; // unlocks it
        true
    }

    /// Removes a file with a damaged record.
    fn give_up(&self, state: &mut State, index: u64) {
        let path = self.path.clone();
        let _ = fs::remove_file(&path); // another process may have done it
        state.end(PackedFault::Damaged { path, index });
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
        path: &Path,
        stored: StoredMatrix<'_>,
        (columns, options): (Range<usize>, PackOptions),
        key: &Hash,
    ) -> Result<Option<PackedMatrix>, paceline_tensor::Error> {
        let is_complete = self.mode == Mode::Read;
        let is_next = |record: &RecordHeader| record.index == self.index && record.key == *key;
        let Some(record) = self.next_record().filter(is_next) else {
            return Ok(None);
        };
        let start = self.at + BLOCK as u64;
        let mut matrix = PackedMatrix::unread(stored, columns, options, record.is_tiny)?;
        if matrix.bytes().0 != record.bytes {
            return Ok(None);
        }
        if self.unit.is_none() || !is_complete {
            let path = if is_complete { path } else { &part_of(path) };
            let mut reads = match self.reads.take() {
                Some(reads) => reads,
                None => MatrixReads::start(path),
            };
            reads.push(&matrix, start, &record);
            if is_complete {
                self.reads = Some(reads);
            } else if reads.finish().is_err() {
                return Ok(None);
            }
        }
        if !is_complete {
            self.records.push(record);
        }
        self.keep_on_disk(&mut matrix, start, record.sum);
        self.step(record.bytes);
        Ok(Some(matrix))
    }

    /// The header of the next record, by the index of a complete file, if there is one.
    fn next_record(&self) -> Option<RecordHeader> {
        let known = self.records.get(self.index as usize).copied();
        let file = self.file.as_ref().filter(|_| self.mode != Mode::Read);
        known.or_else(|| read_record(file?, self.at))
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
        let data = matrix.data();
        let header = RecordHeader {
            index: self.index,
            bytes: data.len() as u64,
            is_tiny: matrix.is_tiny(),
            key,
            sum: sum_of(data, pool),
        };
        self.write_record(&header, data)?;
        self.keep_on_disk(matrix, self.at + BLOCK as u64, header.sum);
        self.step(header.bytes);
        Ok(())
    }

    /// Writes a record to the next place.
    fn write_record(&mut self, header: &RecordHeader, data: &[u8]) -> io::Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        self.records.push(*header);
        let start = self.at + BLOCK as u64;
        file.write_all_at(&header.block(), self.at)?;
        file.write_all_at(data, start)?;
        let rest = data.len().next_multiple_of(BLOCK) - data.len();
        file.write_all_at(&[0; BLOCK][..rest], start + data.len() as u64)
    }

    /// Drops a matrix's bytes where it is streamed: those in the file are the same.
    fn keep_on_disk(&mut self, matrix: &mut PackedMatrix, start: u64, sum: Hash) {
        if self.unit.is_some() {
            self.stream(matrix.detach(), start, sum);
        }
    }

    /// Notes bytes of the unit that are on the disk, if there is one.
    fn stream(&mut self, memory: MatrixMemory, start: u64, sum: Hash) {
        self.streamed.extend(self.unit.map(|unit| StreamedMatrix {
            unit,
            memory,
            start,
            sum,
        }));
    }

    fn finish(&mut self, path: &Path) -> io::Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let end = write_index(file, self.at, &self.records)?;
        file.set_len(end)?; // a longer part of an earlier writer
        file.sync_all()?;
        fs::rename(part_of(path), path)
    }
}

/// Opens the complete file, else the part, else begins one.
fn open_at(
    own: &Path,
    path: &Path,
    model: &Path,
    header: &[u8; BLOCK],
) -> Result<(File, Mode, Vec<RecordHeader>), PackedFault> {
    let complete = || {
        let file = File::open(path).ok().filter(|file| is_of(file, header))?;
        let index = read_index(&file)?;
        Some((file, Mode::Read, index))
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
        return Ok((file, Mode::Resume, Vec::new()));
    }
    let begin = || file.set_len(0).and_then(|()| file.write_all_at(header, 0));
    begin().map_err(failed("write", &part))?;
    Ok((file, Mode::Write, Vec::new()))
}

fn part_of(path: &Path) -> PathBuf {
    path.with_extension("part")
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
