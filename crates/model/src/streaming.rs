//! Weights that do not fit: read from the packed file when a step needs them.
//!
//! ```text
//! step      | layer 0 | layer 1 | layer 2 | ..       waits until its unit is read
//! readers   |     layer 2, then layer 3, ..          16 threads, pieces of 256 KiB, past the cache
//! memory    layers that stay | a window | experts, the least recently used goes
//! ```
//!
//! A *unit* is read and dropped as a whole: a layer without its routed experts, or one expert. It
//! is read into a block of memory that a dropped unit of its size had, and its matrices then point
//! there. Pages from the system cost more than their reads: it zeroes each.
//!
//! Layers that fit stay. Of the others, the next two are read while one computes. All experts that
//! a layer's rows were routed to are requested together; those in memory compute first. Behind them
//! come experts that the next layer will probably use: its router's choice for this layer's input.
//! A layer's expert is kept from its request until it has computed, so a step reads it at most
//! once.
//!
//! The budget is what a process may have in memory, less what it has before its first step and
//! what its steps reserve. Every read is checked by the hashes of the packed file. A failed or
//! damaged read ends the step with an error that names the file, and every later one. The file is
//! removed then, so that the next load writes another.

mod arrays;
mod budget;
pub(crate) mod disk;
mod units;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use paceline_base::{Bytes, lock};

pub use arrays::{LayerWriter, StreamedLayers};
use budget::AHEAD;
pub(crate) use budget::ProcessMemory;
pub use budget::{MemoryLimit, StreamCounts};
pub use disk::read_sample;
use disk::{READERS, open_direct};
use units::State;

use crate::Error;
pub(crate) use crate::packed_file::records::StreamUnit;
use crate::packed_file::records::StreamedMatrix;

/// Longest wait for a unit. A slow disk reads 100 MB/s, a layer of 405B in 4 bits has 1.6 GB.
const PATIENCE: Duration = Duration::from_secs(60);

/// Divisor of memory for the part that is left free. A process takes it after its first step, for
/// stacks, the allocator and rows of mapped embeddings. A choice, not measured.
const MARGIN: u64 = 64;

/// Assumed memory of a process where the system does not report it: the planner's figure.
const PROGRAM: u64 = 256_000_000;

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
    state: Mutex<State>,
    /// There is work for readers.
    work: Condvar,
    /// A unit was read, or a read failed.
    arrived: Condvar,
}

impl Streamer {
    /// For `matrices` of the file at `path`. Nothing is read before [`fit`](Self::fit).
    ///
    /// # Errors
    /// [`Error::Streaming`] if the file cannot be opened, [`Error::Thread`].
    pub(crate) fn new(
        (matrices, path): (Vec<StreamedMatrix>, PathBuf),
        limit: MemoryLimit,
    ) -> Result<Self, Error> {
        let file = open_direct(&path).map_err(|error| failed(&path, error.to_string()))?;
        let state = State::of(matrices);
        let shared = Arc::new(Shared {
            file,
            path,
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
        let used = state.used();
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
        let least = state.set_budget(limit.saturating_sub(others));
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
            state.pin(own);
            shared.wake(state);
            let is_there = state.is_there(own);
            is_hit &= is_there;
            is_there.then_some(())
        })?;
        state.count(own, is_hit);
        let next = state.passing.partition_point(|layer| *layer <= index);
        let n = state.passing.len();
        for ahead in 0..AHEAD {
            let first = StreamUnit::Layer(index + 1 + ahead); // in the first step only
            if state.units.get(&first).is_some_and(|own| own.stays) {
                state.pin(first);
            }
            if ahead < n {
                let layer = StreamUnit::Layer(state.passing[(next + ahead) % n]);
                if layer != own {
                    state.pin(layer);
                }
            }
        }
        shared.wake(&state);
        Ok(())
    }

    /// Requests the `experts` that the rows of a layer were routed to, as far as there is room.
    /// Says whether the next layer is in memory, so that its router can [guess](Self::guess).
    pub(crate) fn route(&self, layer: usize, experts: &[usize]) -> bool {
        let mut state = lock(&self.shared.state);
        state.end_guesses(layer, experts);
        state.request(layer, experts);
        self.shared.wake(&state);
        state.is_there(StreamUnit::Layer(layer + 1))
    }

    /// Has experts of a later layer read behind those that are needed. The next
    /// [`route`](Self::route) drops those that it does not name.
    pub(crate) fn guess(&self, layer: usize, experts: impl Iterator<Item = usize>) {
        let units = experts.map(|expert| StreamUnit::Expert(layer, expert));
        lock(&self.shared.state).guess(units);
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
            state.request(layer, left);
            shared.wake(state);
            let is_there = |expert: &usize| state.is_there(StreamUnit::Expert(layer, *expert));
            let there = left.iter().position(is_there);
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
        state.release(unit);
        let stays = state.units.get(&unit).is_none_or(|own| own.stays);
        if matches!(unit, StreamUnit::Layer(_)) && !stays {
            state.drop_unit(unit);
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

    /// Wakes as many readers as there are reads.
    fn wake(&self, state: &State) {
        (0..state.queue.len().min(READERS)).for_each(|_| self.work.notify_one());
    }

    /// Work of a reader.
    fn read_on(&self) {
        let mut state = lock(&self.state);
        while !state.closed {
            let Some((unit, piece)) = state.queue.pop_front() else {
                let waited = self.work.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let read = piece.read(&self.file);
            state = lock(&self.state);
            let read = read.map_err(|error| error.to_string());
            match read.and_then(|hash| state.take((unit, &piece), hash)) {
                Ok(false) => {}
                Ok(true) => self.arrived.notify_all(),
                Err(reason) => {
                    let _ = fs::remove_file(&self.path); // the next load writes another
                    state.failed = Some(reason);
                    state.queue.clear();
                    self.arrived.notify_all();
                }
            }
        }
    }
}

fn failed(path: &Path, reason: String) -> Error {
    let path = path.to_owned();
    Error::Streaming { path, reason }
}
