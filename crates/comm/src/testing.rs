//! The conformance suite: the contract of [`Group`], as tests.
//!
//! A provider calls [`run_all`] from one of its tests with a function that makes groups. Every case
//! runs for every size in [`sizes`] on fresh groups, one thread per rank, and under a watchdog. A
//! rank that hangs fails its case. A failure names the case, the size and the seed.
//!
//! - `steps`: single calls with inputs and expected outputs.
//! - `results`: results of calls.
//! - `failures`: death, silence, disagreement, bad arguments.

mod failures;
mod results;
mod steps;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::locks::lock;
use crate::{Deadline, Error, Group};

/// Handles to one new group, in rank order.
pub type Ranks = Vec<Box<dyn Group>>;

/// Makes a new group of this size.
pub type GroupFactory<'a> = &'a (dyn Fn(u32) -> Ranks + Sync);

/// Group sizes under test: one, powers of two and their neighbours, two other primes.
pub const SIZES: [u32; 7] = [1, 2, 3, 4, 5, 7, 8];

/// The sizes of a short run: the smallest ones, a power of two and a prime.
const SIZES_SHORT: [u32; 5] = [1, 2, 3, 4, 5];

/// [`SIZES`] in a [long](paceline_base::testing::long) run, else the smaller of them.
pub fn sizes() -> &'static [u32] {
    if paceline_base::testing::long() {
        &SIZES
    } else {
        &SIZES_SHORT
    }
}

/// Deadline of calls that should succeed, or fail for another reason.
const PATIENCE: Duration = Duration::from_secs(60);

/// How soon ranks must learn of a failure, less the time that the machine withheld. Up to 80 ranks
/// share the cores with other tests here. The contract is 2 s from a death.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Limit of a rank, after which it counts as hung: more than [`PATIENCE`].
const HANG: Duration = Duration::from_secs(90);

/// A case: its name, the smallest group it makes sense for, and its function.
type Case = (&'static str, u32, fn(&CaseContext<'_>));

/// Runs every case for every size in [`sizes`].
///
/// # Panics
/// If a case fails, with its name, size and seed.
pub fn run_all(make: GroupFactory<'_>, seed: u64) {
    run_sizes(make, seed, sizes());
}

/// [`run_all`] for some sizes.
///
/// # Panics
/// As [`run_all`].
pub fn run_sizes(make: GroupFactory<'_>, seed: u64, sizes: &[u32]) {
    run_results_of(make, seed, sizes);
    run_some(failures::CASES, sizes, FAILURES_AT_ONCE, make, seed);
}

/// Runs the cases about results of calls.
///
/// # Panics
/// As [`run_all`].
pub fn run_results(make: GroupFactory<'_>, seed: u64) {
    run_results_of(make, seed, sizes());
}

/// [`run_results`] for some sizes.
///
/// # Panics
/// As [`run_all`].
pub fn run_results_of(make: GroupFactory<'_>, seed: u64, sizes: &[u32]) {
    run_some(results::CASES, sizes, 1, make, seed);
}

/// Runs the cases that depend on the algorithm.
#[cfg(test)]
pub(crate) fn run_collectives(make: GroupFactory<'_>, seed: u64) {
    run_some(results::COLLECTIVES, sizes(), 1, make, seed);
}

/// Makes `count` random calls as one rank and checks their results. All ranks, on any machine, pass
/// the same `seed` and `count`. Collective.
///
/// # Errors
/// The error of a call, if the group fails.
///
/// # Panics
/// If a call gives a wrong result.
pub fn run_rank(group: &dyn Group, seed: u64, count: u64) -> Result<(), Error> {
    let mut random = Xorshift(seed);
    (0..count).try_for_each(|salt| {
        steps::CollectiveCase::any(&mut random, group.size()).run(group, salt, patient())
    })
}

/// A silence limit that no rank reaches for want of a core: a named rank has ended or is late in a
/// call. On CI a heartbeat thread once had no core for 1.5 s.
pub const NEVER_SILENT: Duration = Duration::from_secs(3600);

/// Failure cases that run in parallel: they mostly wait.
const FAILURES_AT_ONCE: usize = 10;

/// Runs `cases` for some sizes, `at_once` of them in parallel.
fn run_some(cases: &[Case], sizes: &[u32], at_once: usize, make: GroupFactory<'_>, seed: u64) {
    let all = sizes.iter().copied();
    let sizes = |size_min| all.clone().filter(move |size| *size >= size_min);
    let jobs = cases
        .iter()
        .flat_map(|(name, size_min, case)| sizes(*size_min).map(move |size| (name, size, case)));
    let jobs = Mutex::new(jobs);
    let next = || lock(&jobs).next();
    let work = || {
        while let Some((name, size, case)) = next() {
            let lab = CaseContext { make, size, seed };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| case(&lab))) {
                let text = message(panic.as_ref());
                panic!("case `{name}` with {size} ranks and seed {seed:#x}: {text}");
            }
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            worker.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("panic without a message")
}

struct CaseContext<'a> {
    make: GroupFactory<'a>,
    size: u32,
    seed: u64,
}

impl CaseContext<'_> {
    fn random(&self) -> Xorshift {
        Xorshift(self.seed ^ u64::from(self.size))
    }

    /// Makes a group and runs `work` for every rank on its own thread, which owns the handle.
    /// Returns the results in rank order.
    fn on_each<R: Send + 'static>(
        &self,
        work: impl Fn(Box<dyn Group>) -> R + Send + Sync + 'static,
    ) -> Vec<R> {
        on_threads((self.make)(self.size), work)
    }
}

/// Runs `work` on a thread for each of `seats`; returns the results in this order, and propagates
/// the first panic.
///
/// # Panics
/// If a thread is not done after 90 s.
pub fn on_threads<S: Send + 'static, R: Send + 'static>(
    seats: Vec<S>,
    work: impl Fn(S) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let (work, (done, results)) = (Arc::new(work), mpsc::channel());
    let started = Instant::now();
    let mut outcomes: Vec<Option<R>> = seats.iter().map(|_| None).collect();
    for (rank, seat) in seats.into_iter().enumerate() {
        let (work, done) = (Arc::clone(&work), done.clone());
        thread::spawn(move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| work(seat)));
            // The receiver is dropped once another rank has failed the case.
            let _ = done.send((rank, outcome));
        });
    }
    for _ in 0..outcomes.len() {
        let left = HANG.saturating_sub(started.elapsed());
        let (rank, outcome) = results.recv_timeout(left).expect("no rank hangs");
        outcomes[rank] = Some(outcome.unwrap_or_else(|panic| resume_unwind(panic)));
    }
    outcomes
        .into_iter()
        .map(|outcome| outcome.expect("every rank reported once"))
        .collect()
}

/// A deadline that a test should never reach.
fn patient() -> Deadline {
    Deadline::at(Instant::now() + PATIENCE)
}

/// xorshift64 (Marsaglia, Xorshift RNGs, 2003): the same cases again from the same seed.
struct Xorshift(u64);

impl Xorshift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("less than a usize")
    }

    /// A random rank of a group of this size.
    fn rank(&mut self, size: u32) -> paceline_base::Rank {
        paceline_base::Rank(u32::try_from(self.below(size as usize)).expect("less than a u32"))
    }
}

/// For fuzzing: parses `bytes` as every kind of frame and returns for any input.
pub fn parse_frames(bytes: &[u8]) {
    if let Some(head) = bytes.first_chunk() {
        let header = crate::wire::Header::decode(head);
        assert!(header.is_none_or(|h| crate::wire::Header::decode(&h.encode()) == Some(h)));
    }
    if let Some(head) = bytes.first_chunk() {
        let _ = crate::wire::Control::decode(head);
    }
    crate::join::parse_hello(bytes);
    crate::shm::parse(bytes);
}

/// For fuzzing: parses `bytes` as handshake messages and encrypted records, and as a script that
/// alters valid records.
pub fn parse_sealed(bytes: &[u8]) {
    crate::join::parse_sealed(bytes);
}
