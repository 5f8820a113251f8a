//! Weights that do not fit: read from the packed file when a step needs them.
//!
//! ```text
//! step      | layer 0 | layer 1 | layer 2 | ..       waits until its unit is read
//! readers   |     layer 2, then layer 3, ..          16 threads, pieces of 1 MiB, past the cache
//! memory    layers that stay | a window | experts, the least recently used goes
//! ```
//!
//! A *unit* is read and dropped as a whole: a layer without its routed experts, or one expert.
//! Every matrix has addresses of its own for as long as the model lives. A dropped unit gives its
//! memory back to the system, so that kernels need not know where weights are.
//!
//! Layers that fit stay. Of the others, the next two are read while one computes. All experts that
//! a layer's rows were routed to are requested together; those in memory compute first. A layer's
//! expert is kept from its request until it has computed, so a step reads it at most once.
//!
//! The budget is what a process may have in memory, less what it has before its first step and
//! what its steps reserve. Every read is checked by the hashes of the packed file. A failed or
//! damaged read ends the step with an error that names the file, and every later one. The file is
//! removed then, so that the next load writes another.

mod budget;
mod disk;

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use paceline_base::{Bytes, lock};

pub(crate) use budget::ProcessMemory;
use budget::{AHEAD, Division};
pub use budget::{MemoryLimit, StreamCounts};
pub use disk::read_sample;
use disk::{Aligned, READERS, open_direct};

use crate::Error;
use crate::packed_file::{BLOCK, Hash, PIECE, StreamedMatrix};

/// Longest wait for a unit. A slow disk reads 100 MB/s, a layer of 405B in 4 bits has 1.6 GB.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process's memory over the part that is left free, for what it takes after its first step:
/// stacks, the allocator's own and rows of mapped embeddings. A choice, not measured.
const MARGIN: u64 = 64;

/// Assumed memory of a process where the system does not report it: the planner's figure.
const PROGRAM: u64 = 256_000_000;

/// Matrices that are read and dropped together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum StreamUnit {
    /// A layer, without its routed experts.
    Layer(usize),
    /// An expert of a layer.
    Expert(usize, usize),
}

/// Reads the units of a model within a budget.
#[derive(Debug)]
pub(crate) struct Streamer {
    shared: Arc<Shared>,
    readers: Vec<thread::JoinHandle<()>>,
    limit: MemoryLimit,
}

#[derive(Debug)]
struct Shared {
    file: File,
    path: PathBuf,
    matrices: Vec<StreamedMatrix>,
    state: Mutex<State>,
    /// There is work for readers.
    work: Condvar,
    /// A unit was read, or a read failed.
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct State {
    units: HashMap<StreamUnit, UnitState>,
    /// Layers that do not stay, in their order.
    passing: Vec<usize>,
    queue: VecDeque<Piece>,
    layers: Pool,
    experts: Pool,
    clock: u64,
    counts: StreamCounts,
    failed: Option<String>,
    closed: bool,
}

/// Bytes for units of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Pool {
    budget: u64,
    used: u64,
}

#[derive(Debug)]
struct UnitState {
    /// Range in [`Shared::matrices`].
    matrices: Range<usize>,
    bytes: u64,
    stays: bool,
    /// A step uses it or will.
    pinned: bool,
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

impl Streamer {
    /// For `matrices` of the file at `path`. Nothing is read before [`fit`](Self::fit).
    ///
    /// # Errors
    /// [`Error::Streaming`] if the file cannot be opened, [`Error::Thread`].
    pub(crate) fn new(
        (mut matrices, path): (Vec<StreamedMatrix>, PathBuf),
        limit: MemoryLimit,
    ) -> Result<Self, Error> {
        let file = open_direct(&path).map_err(|error| failed(&path, error.to_string()))?;
        matrices.sort_by_key(|matrix| matrix.unit);
        let state = State {
            units: units_of(&matrices),
            ..State::default()
        };
        let shared = Arc::new(Shared {
            file,
            path,
            matrices,
            state: Mutex::new(state),
            work: Condvar::new(),
            arrived: Condvar::new(),
        });
        let reader = |i: usize| {
            let shared = Arc::clone(&shared);
            let thread = thread::Builder::new().name(format!("read-{i}"));
            let started = thread.spawn(move || shared.read_on());
            started.map_err(Error::Thread)
        };
        Ok(Self {
            readers: (0..READERS).map(reader).collect::<Result<_, _>>()?,
            shared,
            limit,
        })
    }

    pub(crate) fn counts(&self) -> StreamCounts {
        lock(&self.shared.state).counts
    }

    /// Whether a read failed, so that no step will succeed.
    pub(crate) fn is_failed(&self) -> bool {
        lock(&self.shared.state).failed.is_some()
    }

    /// Sets the budget, between steps. `before` is this process's memory before memory for steps
    /// was reserved; `reserved` are bytes of the cache, used where the system does not report.
    ///
    /// # Errors
    /// [`Error::StreamMemory`] if a layer and an expert do not fit.
    pub(crate) fn fit(&self, before: Option<ProcessMemory>, reserved: Bytes) -> Result<(), Error> {
        let mut state = lock(&self.shared.state);
        let used = state.layers.used + state.experts.used;
        let (limit, others) = match self.limit {
            MemoryLimit::Units(bytes) => (bytes.0, 0),
            MemoryLimit::Process(bytes) => {
                let now = before.zip(ProcessMemory::now());
                let taken = now.map_or(PROGRAM + reserved.0, |(before, now)| {
                    let grown = now.data.saturating_sub(before.data);
                    before.resident.saturating_sub(used) + grown
                });
                (bytes.0, taken + bytes.0 / MARGIN)
            }
        };
        let least = state.set_budget(limit.saturating_sub(others), &self.shared.matrices);
        if others + least > limit {
            return Err(Error::StreamMemory {
                given: Bytes(limit),
                needed: Bytes(others + least),
                units: Bytes(least),
            });
        }
        Ok(())
    }

    /// Waits for layer `index`, and has the next ones read.
    ///
    /// # Errors
    /// [`Error::Streaming`].
    pub(crate) fn enter(&self, index: usize) -> Result<(), Error> {
        let (own, shared) = (StreamUnit::Layer(index), &*self.shared);
        let mut is_hit = true;
        let (mut state, ()) = shared.wait(|state| {
            if !state.is_on_its_way(own) {
                state.release_passing(); // a step that failed may have left some
            }
            if state.pin(own, &shared.matrices) {
                shared.work.notify_all();
            }
            let is_there = state.is_there(own);
            is_hit &= is_there;
            is_there.then_some(())
        })?;
        state.count(own, is_hit);
        let next = state.passing.partition_point(|layer| *layer <= index);
        let n = state.passing.len();
        let mut has_asked = false;
        for ahead in 0..AHEAD {
            let first = StreamUnit::Layer(index + 1 + ahead); // in the first step only
            if state.units.get(&first).is_some_and(|own| own.stays) {
                has_asked |= state.pin(first, &shared.matrices);
            }
            if ahead < n {
                let layer = StreamUnit::Layer(state.passing[(next + ahead) % n]);
                has_asked |= layer != own && state.pin(layer, &shared.matrices);
            }
        }
        if has_asked {
            shared.work.notify_all();
        }
        Ok(())
    }

    /// Waits until one of the experts `left` of a layer is in memory, and gives its place in
    /// `left`. Requests those that are not, as far as there is room.
    ///
    /// # Errors
    /// [`Error::Streaming`].
    pub(crate) fn next_expert(&self, layer: usize, left: &[usize]) -> Result<usize, Error> {
        let shared = &*self.shared;
        let mut is_hit = true;
        let (mut state, place) = shared.wait(|state| {
            let unit = |expert: &usize| StreamUnit::Expert(layer, *expert);
            let units = || left.iter().map(unit);
            // Experts in memory must not make room for those on disk.
            units().for_each(|unit| state.keep(unit));
            let mut has_asked = false;
            for unit in units() {
                has_asked |= state.pin(unit, &shared.matrices);
                if !state.is_on_its_way(unit) {
                    break; // no room
                }
            }
            if has_asked {
                shared.work.notify_all();
            }
            let there = units().position(|unit| state.is_there(unit));
            is_hit &= there.is_some();
            there
        })?;
        state.count(StreamUnit::Expert(layer, left[place]), is_hit);
        Ok(place)
    }

    /// Ends the use of a unit. A layer that does not stay is dropped at once: it is needed again
    /// after all others.
    pub(crate) fn leave(&self, unit: StreamUnit) {
        let mut state = lock(&self.shared.state);
        let Some(own) = state.units.get_mut(&unit) else {
            return;
        };
        own.pinned = false;
        if matches!(unit, StreamUnit::Layer(_)) && !own.stays {
            state.drop_unit(unit, &self.shared.matrices);
        }
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        lock(&self.shared.state).closed = true;
        self.shared.work.notify_all();
        for reader in self.readers.drain(..) {
            let _ = reader.join(); // a panic was reported as a failed read
        }
    }
}

impl State {
    const fn pool(&mut self, unit: StreamUnit) -> &mut Pool {
        match unit {
            StreamUnit::Layer(_) => &mut self.layers,
            StreamUnit::Expert(..) => &mut self.experts,
        }
    }

    /// Whether a unit is in memory. Units without matrices always are.
    fn is_there(&self, unit: StreamUnit) -> bool {
        let own = self.units.get(&unit);
        own.is_none_or(|own| own.at == Place::Memory)
    }

    fn is_on_its_way(&self, unit: StreamUnit) -> bool {
        let own = self.units.get(&unit);
        own.is_none_or(|own| own.at != Place::Disk)
    }

    /// Lets layers go that were read ahead.
    fn release_passing(&mut self) {
        for layer in &self.passing {
            if let Some(own) = self.units.get_mut(&StreamUnit::Layer(*layer)) {
                own.pinned = false;
            }
        }
    }

    /// Pins a unit that is not on the disk only.
    fn keep(&mut self, unit: StreamUnit) {
        self.clock += 1;
        let clock = self.clock;
        if let Some(own) = self.units.get_mut(&unit)
            && own.at != Place::Disk
        {
            (own.pinned, own.last) = (true, clock);
        }
    }

    /// Pins a unit, and queues its reads if it is on the disk only and there is room. Says whether
    /// it queued them.
    fn pin(&mut self, unit: StreamUnit, matrices: &[StreamedMatrix]) -> bool {
        self.keep(unit);
        let Some(own) = self.units.get(&unit).filter(|own| own.at == Place::Disk) else {
            return false;
        };
        let (bytes, range) = (own.bytes, own.matrices.clone());
        if !self.make_room(unit, bytes, matrices) {
            return false;
        }
        let mut n = 0;
        for matrix in range {
            for at in (0..matrices[matrix].memory.size()).step_by(PIECE) {
                let nth = n;
                self.queue.push_back(Piece {
                    unit,
                    matrix,
                    at,
                    nth,
                });
                n += 1;
            }
        }
        self.pool(unit).used += bytes;
        let used = self.layers.used + self.experts.used;
        self.counts.most = self.counts.most.max(used);
        if let Some(own) = self.units.get_mut(&unit) {
            own.at = Place::Reading(n, vec![[0; 32]; n]);
            own.pinned = true;
            own.last = self.clock;
        }
        true
    }

    /// Drops units of the kind of `unit`, the least recently used first, until `bytes` fit.
    fn make_room(&mut self, unit: StreamUnit, bytes: u64, matrices: &[StreamedMatrix]) -> bool {
        let kind = std::mem::discriminant(&unit);
        loop {
            let pool = *self.pool(unit);
            if pool.used + bytes <= pool.budget {
                return true;
            }
            let free = |(unit, own): &(&StreamUnit, &UnitState)| {
                let is_kind = std::mem::discriminant(*unit) == kind;
                is_kind && own.at == Place::Memory && !own.pinned && !own.stays
            };
            let units = self.units.iter().filter(free);
            let Some((oldest, _)) = units.min_by_key(|(_, own)| own.last) else {
                return false;
            };
            self.drop_unit(*oldest, matrices);
        }
    }

    /// Gives the memory of a unit back, if it is there.
    fn drop_unit(&mut self, unit: StreamUnit, matrices: &[StreamedMatrix]) {
        let own = self.units.get_mut(&unit);
        let Some(own) = own.filter(|own| own.at == Place::Memory) else {
            return;
        };
        own.at = Place::Disk;
        for matrix in &matrices[own.matrices.clone()] {
            // SAFETY: no step uses the unit, and it is read before one does.
            unsafe { matrix.memory.discard() };
        }
        let bytes = own.bytes;
        self.pool(unit).used -= bytes;
    }

    fn count(&mut self, unit: StreamUnit, is_hit: bool) {
        if self.units.contains_key(&unit) {
            match is_hit {
                true => self.counts.hits += 1,
                false => self.counts.misses += 1,
            }
        }
    }

    /// Divides `budget` among layers and experts, decides which layers stay, and drops the rest.
    /// Gives the bytes that are needed in any case.
    fn set_budget(&mut self, budget: u64, matrices: &[StreamedMatrix]) -> u64 {
        let (mut layers, mut expert, mut experts) = (Vec::new(), 0, 0);
        for (unit, own) in &self.units {
            match unit {
                StreamUnit::Layer(index) => layers.push((*index, own.bytes)),
                StreamUnit::Expert(..) => {
                    expert = own.bytes.max(expert);
                    experts += own.bytes;
                }
            }
        }
        layers.sort_unstable();
        let division = Division::of(&layers, (expert, experts), budget);
        (self.layers.budget, self.experts.budget) = (division.layers, division.experts);
        self.passing.clear();
        for (place, (index, _)) in layers.iter().enumerate() {
            let stays = place < division.stay;
            if !stays {
                self.passing.push(*index);
            }
            if let Some(own) = self.units.get_mut(&StreamUnit::Layer(*index)) {
                own.stays = stays;
            }
        }
        self.counts.budget = budget;
        let idle = self.units.iter().filter(|(_, own)| !own.stays);
        let idle: Vec<StreamUnit> = idle.map(|(unit, _)| *unit).collect();
        idle.iter().for_each(|unit| {
            if let Some(own) = self.units.get_mut(unit) {
                own.pinned = false;
            }
            self.drop_unit(*unit, matrices);
        });
        division.least
    }
}

impl Shared {
    /// Waits until `ready` gives something, and keeps the state locked.
    fn wait<T>(
        &self,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<(MutexGuard<'_, State>, T), Error> {
        let mut got = None;
        let waits = |state: &mut State| {
            got = match state.failed {
                Some(_) => None,
                None => ready(state),
            };
            got.is_none() && state.failed.is_none()
        };
        let waited = self
            .arrived
            .wait_timeout_while(lock(&self.state), PATIENCE, waits);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match got {
            Some(got) => Ok((state, got)),
            None => {
                let late = || format!("no answer in {} s", PATIENCE.as_secs());
                let reason = state.failed.get_or_insert_with(late).clone();
                Err(failed(&self.path, reason))
            }
        }
    }

    /// Work of a reader.
    fn read_on(&self) {
        let mut state = lock(&self.state);
        while !state.closed {
            let Some(piece) = state.queue.pop_front() else {
                let waited = self.work.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let read = self.read(piece);
            state = lock(&self.state);
            let taken = match read {
                Ok((hash, bytes)) => self.take(&mut state, piece, hash, bytes),
                Err(error) => Err(error.to_string()),
            };
            if let Err(reason) = taken {
                let _ = fs::remove_file(&self.path); // the next load writes another
                state.failed = Some(reason);
                state.queue.clear();
            }
            self.arrived.notify_all();
        }
    }

    /// Reads a piece and gives its hash.
    fn read(&self, piece: Piece) -> io::Result<(Hash, u64)> {
        let matrix = &self.matrices[piece.matrix];
        let end = matrix.memory.size().min(piece.at + PIECE);
        let offset = matrix.start + piece.at as u64;
        // SAFETY: each piece is read by one thread, and no step uses the unit yet.
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
    fn take(&self, state: &mut State, piece: Piece, hash: Hash, bytes: u64) -> Result<(), String> {
        state.counts.read += bytes;
        let Some(own) = state.units.get_mut(&piece.unit) else {
            return Ok(());
        };
        let Place::Reading(left, hashes) = &mut own.at else {
            return Ok(());
        };
        hashes[piece.nth] = hash;
        *left -= 1;
        if *left > 0 {
            return Ok(());
        }
        let mut first = 0;
        for matrix in &self.matrices[own.matrices.clone()] {
            let n = matrix.memory.size().div_ceil(PIECE);
            let sum = blake3::hash(hashes[first..first + n].as_flattened());
            if *sum.as_bytes() != matrix.sum {
                let unit = piece.unit;
                return Err(format!("{unit:?} has other bytes than were written"));
            }
            first += n;
        }
        own.at = Place::Memory;
        Ok(())
    }
}

fn failed(path: &Path, reason: String) -> Error {
    let path = path.to_owned();
    Error::Streaming { path, reason }
}

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
            pinned: false,
            last: 0,
            at: Place::Disk,
        };
        first += run.len();
        units.insert(run[0].unit, state);
    }
    units
}
