//! What the ranks of one process share: lanes, arrivals, inboxes and the cause of poisoning.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard,
    RwLockWriteGuard,
};
use std::time::Instant;
use std::{hint, thread};

use paceline_base::Rank;

use super::inbox::Inbox;
use crate::call::judge;
use crate::{Call, Deadline, Dtype, Error, Kind};

/// Looks at the arrivals, with a pause between them, before a rank yields its core: about 3 µs.
///
/// A peer that arrives within this time is met in 1 µs. Longer spinning gains nothing, since
/// yielding on an idle core costs 0.3 µs, and it hurts when the peer waits for this very core:
/// with 2000 spins 2 ranks on 2 busy cores took 53 µs for what takes 1.2 µs otherwise (4 KiB
/// `all_reduce`, `benches/local.rs`, 2-core EPYC 9004 VM, November 2026).
const SPINS: u32 = 64;

/// Looks at the arrivals, with the core yielded between them, before a rank sleeps: about 0.1 ms
/// on an idle core.
///
/// Sleeping at once (0) costs a wake-up: 2 ranks 8.9 µs, 4 ranks on 2 cores 13.7 µs for a 4 KiB
/// `all_gather_v`; with 50 yields 6.9 µs, with 200 to 300 it is 1.0 and 6.3 µs (as above).
const YIELDS: u32 = 300;

/// The shared state of a group.
pub(super) struct Arena {
    size: u32,
    /// Spins of a waiting rank before it yields.
    spins: u32,
    lanes: Box<[Lane]>,
    meeting: Meeting,
    pub(super) inboxes: Box<[Inbox]>,
    cause: OnceLock<Cause>,
    /// Groups split off this one that not all members have taken yet.
    parts: Mutex<Vec<Part>>,
}

/// A group that is being split off.
struct Part {
    /// Number of the split, and color.
    key: (u64, u32),
    arena: Arc<Arena>,
    /// Members that have not taken it.
    missing: u32,
}

/// What one rank shows the others. On cache lines of its own, so that ranks which write do not
/// disturb each other (128 bytes: x86 fetches lines in pairs, Apple's lines are that long).
#[repr(align(128))]
struct Lane {
    /// The last round in which this rank arrived.
    round: AtomicU64,
    banks: [RwLock<Bank>; 2],
}

/// One rank's part of one round.
pub(super) struct Bank {
    call: Call,
    pub(super) bytes: Vec<u8>,
}

/// Where ranks wait for each other.
#[repr(align(128))]
struct Meeting {
    /// Arrivals of all ranks in all rounds: round k is complete at `k * size`, since nobody
    /// arrives twice before everybody has arrived once.
    arrivals: AtomicU64,
    /// Ranks that sleep or are about to.
    sleepers: AtomicU32,
    gate: Mutex<()>,
    opened: Condvar,
}

/// Why the group is poisoned.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cause {
    /// This rank dropped its handle.
    Left(Rank),
    /// A call failed.
    Failed(Error),
}

impl Cause {
    /// The error of `call`, which found the group poisoned.
    pub(super) fn error(self, call: Call) -> Error {
        match self {
            Self::Left(rank) => Error::PeerLost { call, rank },
            Self::Failed(error) => error,
        }
    }
}

impl Arena {
    pub(super) fn new(size: u32) -> Self {
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        // With more ranks than cores, a rank that spins keeps the one it waits for from running.
        let spins = if size as usize > cores { 0 } else { SPINS };
        Self {
            size,
            spins,
            lanes: (0..size).map(|_| Lane::new()).collect(),
            meeting: Meeting {
                arrivals: AtomicU64::new(0),
                sleepers: AtomicU32::new(0),
                gate: Mutex::new(()),
                opened: Condvar::new(),
            },
            inboxes: (0..size).map(|_| Inbox::default()).collect(),
            cause: OnceLock::new(),
            parts: Mutex::default(),
        }
    }

    /// The arena of a group of `size` ranks that is split off: one for all who ask with this
    /// number and color.
    pub(super) fn part(&self, number: u64, color: u32, size: u32) -> Arc<Self> {
        let (key, mut parts) = ((number, color), lock(&self.parts));
        let index = parts
            .iter()
            .position(|part| part.key == key)
            .unwrap_or_else(|| {
                parts.push(Part {
                    key,
                    arena: Arc::new(Self::new(size)),
                    missing: size,
                });
                parts.len() - 1
            });
        parts[index].missing -= 1;
        match parts[index].missing {
            0 => parts.swap_remove(index).arena,
            _ => Arc::clone(&parts[index].arena),
        }
    }

    pub(super) const fn size(&self) -> u32 {
        self.size
    }

    /// Why the group is poisoned, if it is.
    pub(super) fn cause(&self) -> Option<Cause> {
        self.cause.get().copied()
    }

    /// Fails if the group is poisoned, except that a message sent by a rank before it (or another)
    /// left may still be received.
    pub(super) fn check(&self, call: Call) -> Result<(), Error> {
        match (self.cause(), call.kind) {
            (None, _) | (Some(Cause::Left(_)), Kind::Recv { .. }) => Ok(()),
            (Some(cause), _) => Err(cause.error(call)),
        }
    }

    /// Poisons the group with `error`, unless it is poisoned already, and hands it back.
    /// The caller must not hold the lock of the gate or of an inbox.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.poison(Cause::Failed(error));
        error
    }

    /// Poisons the group because `rank` dropped its handle.
    pub(super) fn leave(&self, rank: Rank) {
        self.poison(Cause::Left(rank));
    }

    fn poison(&self, cause: Cause) {
        if self.cause.set(cause).is_ok() {
            self.meeting.wake();
            self.inboxes.iter().for_each(Inbox::wake);
        }
    }

    /// Steps 1 and 2: shows `bytes` to the other ranks and arrives.
    pub(super) fn publish(&self, rank: Rank, round: u64, call: Call, bytes: &[u8]) {
        let lane = &self.lanes[rank.0 as usize];
        let mut bank = write(&lane.banks[parity(round)]);
        bank.call = call;
        bank.bytes.clear();
        bank.bytes.extend_from_slice(bytes);
        drop(bank);
        lane.round.store(round, Ordering::Release);
        self.meeting.arrive(self.complete(round));
    }

    /// Step 2: returns when all ranks have arrived in `round`. Complete beats poisoned: what all
    /// ranks have given is not lost because one of them has left since.
    pub(super) fn wait(&self, round: u64, call: Call, deadline: Deadline) -> Result<(), Error> {
        let complete = self.complete(round);
        if self.meeting.soon(complete, self.spins) {
            return Ok(());
        }
        let stop = self.meeting.sleep(complete, deadline, |now| {
            if let Some(cause) = self.cause() {
                return Some(Stop::Poisoned(cause.error(call)));
            }
            deadline
                .left(now)
                .is_zero()
                .then(|| self.late(round, call))
                .flatten()
        });
        stop.map_or(Ok(()), |stop| {
            Err(match stop {
                Stop::Poisoned(error) => error,
                Stop::Late(error) => self.fail(error),
            })
        })
    }

    /// Arrivals once `round` is complete.
    fn complete(&self, round: u64) -> u64 {
        round * u64::from(self.size)
    }

    /// The timeout of a rank that waits for `round`; none if the last one is just arriving.
    fn late(&self, round: u64, call: Call) -> Option<Stop> {
        let late = |lane: &Lane| lane.round.load(Ordering::Acquire) < round;
        let rank = (0..self.size)
            .zip(&self.lanes)
            .find(|(_, lane)| late(lane))?
            .0;
        Some(Stop::Late(Error::Timeout {
            call,
            rank: Rank(rank),
        }))
    }

    /// Step 3: whether all ranks made this call.
    pub(super) fn compare(&self, round: u64, call: Call) -> Result<(), Error> {
        if self.banks(round).all(|bank| read(bank).call == call) {
            return Ok(());
        }
        // Every rank sees the same calls here, so all come to the same error.
        let said = self.banks(round).map(|bank| read(bank).call);
        let calls: Vec<_> = (0..).map(Rank).zip(said).collect();
        Err(self.fail(judge(&calls)))
    }

    /// The banks of all ranks in `round`, in rank order.
    pub(super) fn banks(&self, round: u64) -> impl Iterator<Item = &RwLock<Bank>> {
        self.lanes
            .iter()
            .map(move |lane| &lane.banks[parity(round)])
    }
}

/// Why a rank stops waiting: the group was poisoned, or is to be by this rank.
enum Stop {
    Poisoned(Error),
    Late(Error),
}

impl Lane {
    fn new() -> Self {
        let call = Call {
            sequence: 0,
            kind: Kind::Barrier,
            dtype: Dtype::U8,
            length: 0,
            digest: 0,
        };
        let bank = || {
            RwLock::new(Bank {
                call,
                bytes: Vec::new(),
            })
        };
        Self {
            round: AtomicU64::new(0),
            banks: [bank(), bank()],
        }
    }
}

impl Meeting {
    /// Counts an arrival; the one that completes the round wakes the sleepers.
    ///
    /// No wake-up is lost: both sides write, then read what the other wrote, all in one total
    /// order (`SeqCst`). Either this rank sees the sleeper, or the sleeper sees this arrival.
    fn arrive(&self, complete: u64) {
        let arrivals = self.arrivals.fetch_add(1, Ordering::SeqCst) + 1;
        if arrivals == complete && self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
    }

    /// Whether there are `complete` arrivals within a bounded time.
    fn soon(&self, complete: u64, spins: u32) -> bool {
        (0..spins + YIELDS).any(|look| {
            let done = self.arrivals.load(Ordering::Acquire) >= complete;
            match look < spins {
                _ if done => {}
                true => hint::spin_loop(),
                false => thread::yield_now(),
            }
            done
        })
    }

    /// Wakes all sleepers. Taking the gate first waits for one that is between its last look and
    /// its sleep.
    fn wake(&self) {
        drop(lock(&self.gate));
        self.opened.notify_all();
    }

    /// Sleeps until there are `complete` arrivals (`None`) or `stop` says why not to wait longer.
    fn sleep(
        &self,
        complete: u64,
        deadline: Deadline,
        stop: impl Fn(Instant) -> Option<Stop>,
    ) -> Option<Stop> {
        let mut gate = lock(&self.gate);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let stop = loop {
            if self.arrivals.load(Ordering::SeqCst) >= complete {
                break None;
            }
            let now = Instant::now();
            if let Some(stop) = stop(now) {
                break Some(stop);
            }
            gate = sleep_on(&self.opened, gate, deadline, now);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        stop
    }
}

/// The bank used in this round.
const fn parity(round: u64) -> usize {
    if round.is_multiple_of(2) { 0 } else { 1 }
}

/// Sleeps on `condition` until it is notified or the deadline passes. May wake up early.
pub(super) fn sleep_on<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Deadline,
    now: Instant,
) -> MutexGuard<'a, T> {
    let woken = condition.wait_timeout(guard, deadline.left(now));
    woken.unwrap_or_else(PoisonError::into_inner).0
}

// A lock whose holder panicked is taken over: what it protects is either replaced as a whole
// before it is read (banks, which are read only after their owner arrived), or changed by steps
// that cannot panic half-way (counters, queues).

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn read(bank: &RwLock<Bank>) -> RwLockReadGuard<'_, Bank> {
    bank.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(bank: &RwLock<Bank>) -> RwLockWriteGuard<'_, Bank> {
    bank.write().unwrap_or_else(PoisonError::into_inner)
}
