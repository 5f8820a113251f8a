//! Weights that do not fit: read from the packed file when a step needs them.
//!
//! ```text
//! step      | layer 0 | layer 1 | layer 2 | ..       needs a unit: waits until it is read
//! readers   |     layer 2, then layer 3, ..          16 threads, pieces of 1 MiB, past the cache
//! memory    layers that stay | a window | experts, the least recently used goes
//! ```
//!
//! A *unit* is read and dropped as a whole: a layer without its routed experts, or one expert.
//! Every matrix has addresses of its own for as long as the model lives. A unit that is dropped
//! gives its memory back to the system, so that kernels need not know where weights are.
//!
//! Layers that fit stay; of the others, the two behind the one that computes are read ahead. All
//! experts that a layer's rows were routed to are asked for before the first of them computes.
//! Every read is checked by the hashes of the packed file. After a failed or damaged read the step
//! ends with an error that names the file, and so does every later one.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::{Bytes, lock};

use crate::Error;
use crate::packed_file::{BLOCK, Hash, PIECE, StreamedMatrix};

/// Reads under way at a time: an NVMe disk has its full rate from 8 to 16 reads of 1 MiB on.
const READERS: usize = 16;

/// Layers read ahead of the one that computes.
const AHEAD: usize = 2;

/// Longest wait for a unit. A slow disk reads 100 MB/s, a layer of 405B in 4 bits has 1.6 GB.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is read and dropped together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum StreamUnit {
    /// A layer, without its routed experts.
    Layer(usize),
    /// An expert of a layer.
    Expert(usize, usize),
}

/// Counters of a [`Streamer`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounts {
    /// Bytes read from the disk.
    pub read: u64,
    /// Units that a step found in memory, and those it waited for.
    pub hits: u64,
    pub misses: u64,
    /// Most bytes of units in memory at a time.
    pub most: u64,
}

/// Reads the units of a model within a budget.
#[derive(Debug)]
pub(crate) struct Streamer {
    shared: Arc<Shared>,
    readers: Vec<thread::JoinHandle<()>>,
    /// First layer of this rank, and behind its last.
    layers: (usize, usize),
}

#[derive(Debug)]
struct Shared {
    file: File,
    path: PathBuf,
    matrices: Vec<StreamedMatrix>,
    state: Mutex<State>,
    /// A unit was read or failed, or there is work.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    units: HashMap<StreamUnit, UnitState>,
    queue: VecDeque<Piece>,
    budget: u64,
    used: u64,
    clock: u64,
    counts: StreamCounts,
    failed: Option<String>,
    closed: bool,
}

#[derive(Debug)]
struct UnitState {
    /// Range in [`Shared::matrices`].
    matrices: std::ops::Range<usize>,
    bytes: u64,
    stays: bool,
    held: bool,
    last: u64,
    at: Place,
}

#[derive(Debug, PartialEq, Eq)]
enum Place {
    Disk,
    /// Pieces to be read, and hashes so far.
    Reading(usize, Vec<Hash>),
    Memory,
}

/// A read.
#[derive(Clone, Copy, Debug)]
struct Piece {
    unit: StreamUnit,
    /// Number of the matrix, and offset in it.
    matrix: usize,
    at: usize,
    /// Number among the unit's pieces.
    nth: usize,
}

const fn pieces(bytes: usize) -> usize {
    bytes.div_ceil(PIECE)
}

impl Streamer {
    /// For `matrices` of the file at `path`, with at most `budget` bytes of them in memory.
    ///
    /// # Errors
    /// [`Error::Streaming`] if the file cannot be opened, or the budget is too small for a layer
    /// and the experts of one row. The error says how much suffices.
    pub(crate) fn new(
        (mut matrices, path): (Vec<StreamedMatrix>, PathBuf),
        layers: (usize, usize),
        budget: Bytes,
    ) -> Result<Self, Error> {
        let failed = |reason: String| Error::Streaming {
            path: path.clone(),
            reason,
        };
        let file = open_direct(&path).map_err(|error| failed(error.to_string()))?;
        matrices.sort_by_key(|matrix| matrix.unit);
        let mut units = units_of(&matrices);
        let least = plan(&mut units, budget.0);
        if least > budget.0 {
            let (least, budget) = (Bytes(least), budget);
            return Err(failed(format!(
                "needs {least} in memory, of which {budget} are left"
            )));
        }
        let shared = Arc::new(Shared {
            file,
            path: path.clone(),
            matrices,
            state: Mutex::new(State {
                units,
                queue: VecDeque::new(),
                budget: budget.0,
                used: 0,
                clock: 0,
                counts: StreamCounts::default(),
                failed: None,
                closed: false,
            }),
            changed: Condvar::new(),
        });
        let reader = |i: usize| {
            let shared = Arc::clone(&shared);
            let thread = thread::Builder::new().name(format!("read-{i}"));
            thread
                .spawn(move || shared.read_on())
                .map_err(Error::Thread)
        };
        Ok(Self {
            readers: (0..READERS).map(reader).collect::<Result<_, _>>()?,
            shared: Arc::clone(&shared),
            layers,
        })
    }

    pub(crate) fn counts(&self) -> StreamCounts {
        lock(&self.shared.state).counts
    }

    /// Waits for layer `index`, and has the next ones read.
    ///
    /// # Errors
    /// [`Error::Streaming`].
    pub(crate) fn enter(&self, index: usize) -> Result<(), Error> {
        self.need(StreamUnit::Layer(index))?;
        let (first, end) = self.layers;
        let n = end - first;
        for ahead in 1..=AHEAD.min(n - 1) {
            self.want(StreamUnit::Layer(first + (index - first + ahead) % n));
        }
        Ok(())
    }

    /// Has a unit read soon, if there is room.
    pub(crate) fn want(&self, unit: StreamUnit) {
        let mut state = lock(&self.shared.state);
        if state.request(unit, &self.shared.matrices) {
            self.shared.changed.notify_all();
        }
    }

    /// Waits until a unit is in memory, where it stays until it is [left](Self::leave).
    ///
    /// # Errors
    /// [`Error::Streaming`].
    pub(crate) fn need(&self, unit: StreamUnit) -> Result<(), Error> {
        let (until, mut asked) = (Instant::now() + PATIENCE, false);
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(reason) = &state.failed {
                return Err(self.shared.failed(reason.clone()));
            }
            if state.hold(unit, asked) {
                return Ok(());
            }
            asked = true;
            if state.request(unit, &self.shared.matrices) {
                self.shared.changed.notify_all();
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let limit = PATIENCE.as_secs();
                return Err(self
                    .shared
                    .failed(format!("{unit:?} was not read in {limit} s")));
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the use of a unit. A layer that does not stay is dropped at once: it is needed again
    /// after all others.
    pub(crate) fn leave(&self, unit: StreamUnit) {
        let mut state = lock(&self.shared.state);
        let Some(own) = state.units.get_mut(&unit) else {
            return;
        };
        own.held = false;
        if matches!(unit, StreamUnit::Layer(_)) && !own.stays {
            state.drop_unit(unit, &self.shared.matrices);
        }
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        lock(&self.shared.state).closed = true;
        self.shared.changed.notify_all();
        for reader in self.readers.drain(..) {
            let _ = reader.join(); // a panic was reported as a failed read
        }
    }
}

impl State {
    /// Holds a unit that is in memory. Units without matrices always are.
    fn hold(&mut self, unit: StreamUnit, asked: bool) -> bool {
        self.clock += 1;
        let Some(own) = self.units.get_mut(&unit) else {
            return true;
        };
        if own.at != Place::Memory {
            return false;
        }
        (own.held, own.last) = (true, self.clock);
        match asked {
            true => self.counts.misses += 1,
            false => self.counts.hits += 1,
        }
        true
    }

    /// Queues the reads of a unit, if it is on the disk only and there is room. Says whether it
    /// did.
    fn request(&mut self, unit: StreamUnit, matrices: &[StreamedMatrix]) -> bool {
        let Some(own) = self.units.get(&unit).filter(|own| own.at == Place::Disk) else {
            return false;
        };
        let (bytes, range) = (own.bytes, own.matrices.clone());
        while self.used + bytes > self.budget {
            let free = |(_, own): &(&StreamUnit, &UnitState)| {
                own.at == Place::Memory && !own.held && !own.stays
            };
            let oldest = self
                .units
                .iter()
                .filter(free)
                .min_by_key(|(_, own)| own.last);
            let Some(oldest) = oldest.map(|(unit, _)| *unit) else {
                return false;
            };
            self.drop_unit(oldest, matrices);
        }
        let mut n = 0;
        for matrix in range {
            for i in 0..pieces(matrices[matrix].memory.size()) {
                self.queue.push_back(Piece {
                    unit,
                    matrix,
                    at: i * PIECE,
                    nth: n,
                });
                n += 1;
            }
        }
        self.clock += 1;
        self.used += bytes;
        self.counts.most = self.counts.most.max(self.used);
        let clock = self.clock;
        if let Some(own) = self.units.get_mut(&unit) {
            own.last = clock;
            own.at = Place::Reading(n, vec![[0; 32]; n]);
        }
        true
    }

    /// Gives the memory of a unit back.
    fn drop_unit(&mut self, unit: StreamUnit, matrices: &[StreamedMatrix]) {
        if let Some(own) = self
            .units
            .get_mut(&unit)
            .filter(|own| own.at == Place::Memory)
        {
            own.at = Place::Disk;
            self.used -= own.bytes;
            for matrix in &matrices[own.matrices.clone()] {
                // SAFETY: no step holds the unit, and it is read before one does.
                unsafe { matrix.memory.discard() };
            }
        }
    }
}

impl Shared {
    fn failed(&self, reason: String) -> Error {
        Error::Streaming {
            path: self.path.clone(),
            reason,
        }
    }

    /// Work of a reader.
    fn read_on(&self) {
        let mut state = lock(&self.state);
        while !state.closed {
            let Some(piece) = state.queue.pop_front() else {
                let waited = self.changed.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let read = self.read(piece);
            state = lock(&self.state);
            match read {
                Ok((hash, bytes)) => self.arrived(&mut state, piece, hash, bytes),
                Err(error) => state.failed = Some(error.to_string()),
            }
            self.changed.notify_all();
        }
    }

    /// Reads a piece and gives its hash.
    fn read(&self, piece: Piece) -> io::Result<(Hash, u64)> {
        let matrix = &self.matrices[piece.matrix];
        let end = matrix.memory.size().min(piece.at + PIECE);
        let offset = matrix.start + piece.at as u64;
        // SAFETY: each piece is read by one thread, and no step holds the unit.
        let out = unsafe { matrix.memory.part(piece.at..end) };
        let whole = out.len() / BLOCK * BLOCK;
        self.file.read_exact_at(&mut out[..whole], offset)?;
        if whole < out.len() {
            // The file has whole blocks; what follows in memory may be another's.
            let mut last = Aligned([0; BLOCK]);
            self.file
                .read_exact_at(&mut last.0, offset + whole as u64)?;
            let rest = out.len() - whole;
            out[whole..].copy_from_slice(&last.0[..rest]);
        }
        Ok((*blake3::hash(out).as_bytes(), out.len() as u64))
    }

    /// Takes a piece that was read; the last one of a unit checks all of it.
    fn arrived(&self, state: &mut State, piece: Piece, hash: Hash, bytes: u64) {
        state.counts.read += bytes;
        let Some(own) = state.units.get_mut(&piece.unit) else {
            return;
        };
        let Place::Reading(left, hashes) = &mut own.at else {
            return;
        };
        hashes[piece.nth] = hash;
        *left -= 1;
        if *left > 0 {
            return;
        }
        let mut first = 0;
        for matrix in &self.matrices[own.matrices.clone()] {
            let n = pieces(matrix.memory.size());
            let sum = blake3::hash(hashes[first..first + n].as_flattened());
            if *sum.as_bytes() != matrix.sum {
                let unit = piece.unit;
                state.failed = Some(format!("{unit:?} has other bytes than were written"));
                return;
            }
            first += n;
        }
        own.at = Place::Memory;
    }
}

/// A block at an address that direct reads take.
#[repr(align(4096))]
struct Aligned([u8; BLOCK]);

/// The units of `matrices`, whose matrices follow one another.
fn units_of(matrices: &[StreamedMatrix]) -> HashMap<StreamUnit, UnitState> {
    let mut units = HashMap::new();
    let mut first = 0;
    for run in matrices.chunk_by(|a, b| a.unit == b.unit) {
        let bytes = run.iter().map(|matrix| matrix.memory.size());
        let state = UnitState {
            matrices: first..first + run.len(),
            bytes: bytes.map(|n| n.next_multiple_of(BLOCK) as u64).sum(),
            stays: false,
            held: false,
            last: 0,
            at: Place::Disk,
        };
        first += run.len();
        units.insert(run[0].unit, state);
    }
    units
}

/// Decides which layers stay, and gives the bytes that are needed in any case. Layers stay from the
/// first on, as long as a window of [`AHEAD`] and one more, and a few experts, fit besides.
fn plan(units: &mut HashMap<StreamUnit, UnitState>, budget: u64) -> u64 {
    let (mut layers, mut experts) = (Vec::new(), 0);
    for (unit, own) in &*units {
        match unit {
            StreamUnit::Layer(_) => layers.push((*unit, own.bytes)),
            StreamUnit::Expert(..) => experts = own.bytes.max(experts),
        }
    }
    layers.sort_unstable();
    let all: u64 = layers.iter().map(|(_, bytes)| bytes).sum();
    let largest = layers.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
    let window = |layers: usize| layers as u64 * largest + 2 * experts;
    let mut kept = 0;
    for (unit, bytes) in layers {
        let room = if all + 2 * experts <= budget {
            0
        } else {
            window(AHEAD + 1)
        };
        if kept + bytes + room > budget {
            break;
        }
        kept += bytes;
        if let Some(own) = units.get_mut(&unit) {
            own.stays = true;
        }
    }
    window(1).min(all + 2 * experts)
}

/// Opens a file to be read past the system's cache, where the file system can.
fn open_direct(path: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        let opened = File::options().read(true).custom_flags(direct).open(path);
        if let Ok(file) = opened {
            return Ok(file);
        }
    }
    File::open(path)
}
