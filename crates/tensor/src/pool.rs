//! A small thread pool for kernels: numbered tasks, claimed one by one.
//!
//! Each thread has a *share* of a job's tasks, neighbours, and takes them one by one. A thread that
//! has none left steals tasks of the others. So a core that is slow or taken away by the system
//! only delays the task it holds. The caller never waits for a worker that has claimed nothing.
//!
//! A share's state is an atomic word on a cache line of its own. The line stays with its thread as
//! long as no other thread helps. With all threads at one word, its line went to and fro twice a
//! task. Workers spin for [`SPINS`] rounds between jobs, then sleep. Which thread runs a task never
//! changes a result: tasks write disjoint outputs.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Rounds of spinning before a worker sleeps: about 50 µs on a 3 GHz x86, where a `pause` takes
/// some 40 cycles. That is several times the gap between two jobs of a decode step (a few µs). It
/// is short enough not to burn a core while a user types.
const SPINS: u32 = 4_000;

type PoolTask<'a> = &'a (dyn Fn(usize) + Sync);

/// A job's number and a count, in one word: 44 bits and 20. Jobs are numbered from 1 on, and at
/// 100,000 a second for five years.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word(u64);

impl Word {
    const COUNT_BITS: u32 = 20;
    const MAX_COUNT: usize = (1 << Self::COUNT_BITS) - 1;

    const fn new(job: u64, count: usize) -> Self {
        Self(job << Self::COUNT_BITS | count as u64)
    }

    const fn job(self) -> u64 {
        self.0 >> Self::COUNT_BITS
    }

    const fn count(self) -> usize {
        self.0 as usize & Self::MAX_COUNT
    }
}

/// A thread's share of a job: its tasks claimed so far.
///
/// The [`Word`] holds the next unclaimed task and the last job from which a task was claimed. In a
/// later job none has been claimed, so a share needs no reset. Claims check job and task at once,
/// so a thread that arrives late gets nothing.
#[derive(Debug)]
#[repr(align(128))] // two lines of x86, which fetches pairs, or one of Apple's
struct Share(AtomicU64);

impl Share {
    /// Claims the next of tasks `own` of a job, which is this share's part of it, if there is one.
    fn claim(&self, job: u64, own: &Range<usize>) -> Option<usize> {
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            let task = match Word(word).job() {
                last if last < job => own.start,
                last if last == job => Word(word).count(),
                _ => return None, // a later one: all of this were claimed
            };
            if task >= own.end {
                return None;
            }
            let claimed = self.0.compare_exchange_weak(
                word,
                Word::new(job, task + 1).0,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match claimed {
                Ok(_) => return Some(task),
                Err(now) => word = now,
            }
        }
    }
}

/// Whether the threads of a pool stay where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pinning {
    /// The system moves them as it likes.
    #[default]
    Free,
    /// Each thread is pinned to a core of its own, in the order of the cores that this process may
    /// use. The caller of [`ThreadPool::run`] is on core number `first`, counted from 0, from its
    /// first job on. Several processes use different firsts. The numbers wrap around after the last
    /// core. Where the system cannot pin (all but Linux) or refuses, like `Free`.
    Cores {
        /// First core of this pool.
        first: usize,
    },
}

/// The cores that this process may use.
#[cfg(target_os = "linux")]
fn cores() -> Vec<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let Ok(all) = sched_getaffinity(None) else {
        return Vec::new();
    };
    (0..CpuSet::MAX_CPU)
        .filter(|core| all.is_set(*core))
        .collect()
}

/// Keeps this thread on `core`.
#[cfg(target_os = "linux")]
fn stay_on(core: usize) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut own = CpuSet::new();
    own.set(core);
    let _ = sched_setaffinity(None, &own); // refused: as it was
}

#[cfg(not(target_os = "linux"))]
const fn cores() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
const fn stay_on(_core: usize) {}

thread_local! {
    /// The core that this thread is pinned to, plus one.
    static CORE: Cell<usize> = const { Cell::new(0) };
}

/// Pins this thread to its core, once.
fn stay(core: Option<usize>) {
    let Some(core) = core else { return };
    CORE.with(|own| {
        if own.get() != core + 1 {
            stay_on(core);
            own.set(core + 1);
        }
    });
}

/// State that the threads have in common. A job is published by its pointer and then `job`.
#[derive(Debug)]
struct PoolState {
    /// The current job's [`Word`], with all of its tasks.
    job: AtomicU64,
    /// Its closure: a pointer to a `PoolTask` on the stack of the caller of `run`.
    task: AtomicPtr<()>,
    /// The caller's, then the workers'.
    shares: Box<[Share]>,
    /// Tasks of the current job that have ended.
    ended: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

/// A fixed set of threads that run numbered tasks.
pub struct ThreadPool {
    shared: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
    /// Core of the caller of `run`.
    core: Option<usize>,
    /// Held while a job runs: `run` from two threads takes turns.
    turn: Mutex<u64>,
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadPool")
            .field("threads", &self.threads())
            .finish_non_exhaustive()
    }
}

impl ThreadPool {
    /// A pool of `threads` threads, the caller of [`run`](Self::run) being one of them; 0 counts
    /// as 1.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::with_pinning(threads, Pinning::Free)
    }

    /// Like [`new`](Self::new), with optional pinning of threads to cores.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with_pinning(threads: usize, pinning: Pinning) -> std::io::Result<Self> {
        let (cores, first) = match pinning {
            Pinning::Free => (Vec::new(), 0),
            Pinning::Cores { first } => (cores(), first),
        };
        let core_of = |i: usize| cores.get((first + i) % cores.len().max(1)).copied();
        let shared = Arc::new(PoolState {
            job: AtomicU64::new(0),
            task: AtomicPtr::new(std::ptr::null_mut()),
            shares: (0..threads.max(1))
                .map(|_| Share(AtomicU64::new(0)))
                .collect(),
            ended: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        // Workers started before one that fails are ended by the drop of this value.
        let mut pool = Self {
            shared,
            workers: Vec::new(),
            core: core_of(0),
            turn: Mutex::new(0),
        };
        for i in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let name = format!("paceline-{i}");
            let core = core_of(i);
            let body = move || {
                stay(core);
                shared.work(i);
            };
            pool.workers
                .push(std::thread::Builder::new().name(name).spawn(body)?);
        }
        Ok(pool)
    }

    /// Threads that run tasks, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0)`, ..., `task(tasks - 1)`, each once, in any order and on any thread; returns
    /// when all have ended. One job at a time: calls from several threads take turns. Must not be
    /// called from a task. Allocates nothing.
    ///
    /// # Panics
    /// If a task panicked, after all have ended; if there are 2^20 tasks or more.
    pub fn run(&self, tasks: usize, task: PoolTask<'_>) {
        stay(self.core);
        if self.workers.is_empty() || tasks <= 1 {
            (0..tasks).for_each(task);
            return;
        }
        assert!(tasks <= Word::MAX_COUNT, "{tasks} tasks in one job");
        let mut job = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        *job += 1;
        let word = Word::new(*job, tasks);
        self.shared.publish(word, &task);
        self.shared.claim_tasks(word, 0);
        self.shared.wait_for_all(tasks);
        let panicked = self.shared.panicked.swap(false, Ordering::Relaxed);
        drop(job);
        assert!(!panicked, "a task of the thread pool panicked");
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.lock.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join(); // workers catch panics; there is nothing to report
        }
    }
}

impl PoolState {
    /// Makes a job visible to the workers. `task` outlives it: `run` returns only when every
    /// claimed task has ended, and nothing is claimed after the last.
    fn publish(&self, job: Word, task: &PoolTask<'_>) {
        // All tasks of the previous job were claimed and have ended, so no thread reads these now;
        // a worker reads them only after it has claimed a task of this job.
        self.ended.store(0, Ordering::Relaxed);
        self.task.store(
            std::ptr::from_ref(task).cast_mut().cast(),
            Ordering::Relaxed,
        );
        self.job.store(job.0, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock());
            self.wake.notify_all();
        }
    }

    /// Claims and runs tasks of `job` until there are none: those of share `own`, then of the
    /// others.
    fn claim_tasks(&self, job: Word, own: usize) {
        let (shares, tasks) = (self.shares.len(), job.count());
        let mut done = 0;
        for of in (own..shares).chain(0..own) {
            let part = of * tasks / shares..(of + 1) * tasks / shares;
            while let Some(task) = self.shares[of].claim(job.job(), &part) {
                self.run_task(task);
                done += 1;
            }
        }
        if done > 0 {
            self.ended.fetch_add(done, Ordering::Release);
        }
    }

    fn run_task(&self, index: usize) {
        let task = self.task.load(Ordering::Relaxed).cast::<PoolTask<'_>>();
        // SAFETY: a task of this job is claimed and not counted as ended, so `run` is still
        // waiting and the closure is alive.
        let task = unsafe { *task };
        if catch_unwind(AssertUnwindSafe(|| task(index))).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }

    /// Waits for tasks that other threads have claimed. They run on cores of their own and end in
    /// microseconds, but a core may be taken away: after a while, yield.
    fn wait_for_all(&self, tasks: usize) {
        let mut rounds = 0u32;
        while self.ended.load(Ordering::Acquire) < tasks {
            rounds = rounds.saturating_add(1);
            if rounds < SPINS {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
        }
    }

    /// The life of the worker that has share `own`.
    fn work(&self, own: usize) {
        let mut seen = 0;
        while let Some(job) = self.next_job(seen) {
            seen = job.job();
            self.claim_tasks(job, own);
        }
    }

    /// Waits for a job behind `seen`; `None` when the pool ends.
    fn next_job(&self, seen: u64) -> Option<Word> {
        let look = || {
            let job = Word(self.job.load(Ordering::SeqCst));
            (job.job() != seen).then_some(job)
        };
        for _ in 0..SPINS {
            if let Some(job) = look() {
                return Some(job);
            }
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            if self.stop.load(Ordering::SeqCst) {
                break None;
            }
            if let Some(job) = look() {
                break Some(job);
            }
            guard = self
                .wake
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        found
    }
}

/// A slice handed out in parts of equal length to several threads.
#[derive(Debug)]
pub struct DisjointMut<'a, T> {
    start: *mut T,
    len: usize,
    part_len: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: `part`'s contract gives each part to one thread at a time.
unsafe impl<T: Send> Sync for DisjointMut<'_, T> {}

impl<'a, T> DisjointMut<'a, T> {
    /// Parts of `part_len` elements; the last may be shorter.
    pub fn new(slice: &'a mut [T], part_len: usize) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            part_len,
            _borrow: PhantomData,
        }
    }

    /// Number of parts.
    #[allow(
        clippy::len_without_is_empty,
        reason = "a number of parts, not a container"
    )]
    pub const fn len(&self) -> usize {
        self.len.div_ceil(self.part_len)
    }

    /// Part `index`.
    ///
    /// # Safety
    /// No other reference to this part lives at the same time.
    ///
    /// # Panics
    /// If the part starts behind the end.
    #[allow(clippy::mut_from_ref, reason = "parts are disjoint, see the contract")]
    pub unsafe fn part(&self, index: usize) -> &'a mut [T] {
        let start = index * self.part_len;
        assert!(start <= self.len, "part {index} of {} elements", self.len);
        let len = self.part_len.min(self.len - start);
        // SAFETY: in bounds; unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [0, 1, 2, 3, 5] {
            let pool = ThreadPool::new(threads).unwrap();
            for tasks in [0, 1, 2, 7, 100] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                for _ in 0..50 {
                    pool.run(tasks, &|i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                }
                let counts: Vec<_> = counts.iter().map(|c| c.load(Ordering::Relaxed)).collect();
                assert_eq!(counts, vec![50; tasks], "{threads} threads");
            }
        }
    }

    #[test]
    fn a_share_gives_each_task_once_and_none_to_who_comes_late() {
        let share = Share(AtomicU64::new(0));
        assert_eq!(share.claim(5, &(3..5)), Some(3));
        assert_eq!(share.claim(5, &(3..5)), Some(4));
        assert_eq!(share.claim(5, &(3..5)), None);
        assert_eq!(share.claim(4, &(0..9)), None); // all claimed
        assert_eq!(share.claim(6, &(2..2)), None);
        assert_eq!(share.claim(7, &(0..1)), Some(0)); // nobody told it that there is another job
        assert_eq!(share.claim(7, &(0..1)), None);
        assert_eq!(share.claim(5, &(3..5)), None);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(2).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(8, &|i| assert!(i != 5, "expected"))
        }));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(8, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 28);
    }

    #[test]
    fn sleeping_workers_wake_up() {
        let pool = ThreadPool::new(3).unwrap();
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(2)); // longer than the spinning
            let (ids, began) = (Mutex::new(Vec::new()), std::time::Instant::now());
            // Wait for a second thread, which a busy machine may delay.
            pool.run(64, &|_| {
                let own = std::thread::current().id();
                ids.lock().unwrap().push(own);
                let alone = || ids.lock().unwrap().iter().all(|id| *id == own);
                while alone() && began.elapsed().as_secs() < 30 {
                    std::thread::sleep(std::time::Duration::from_micros(200));
                }
            });
            let ids = ids.into_inner().unwrap();
            assert!(ids.iter().any(|id| *id != ids[0]), "only one thread worked");
        }
    }

    #[test]
    fn a_thread_that_is_held_up_keeps_nothing_but_its_task() {
        // Task 0 does not end before all others have. On two threads that is possible only when the
        // other thread steals the rest of the blocked thread's share.
        let pool = ThreadPool::new(2).unwrap();
        for _ in 0..20 {
            let others = AtomicUsize::new(0);
            pool.run(64, &|i| {
                if i > 0 {
                    others.fetch_add(1, Ordering::Relaxed);
                }
                while i == 0 && others.load(Ordering::Relaxed) < 63 {
                    std::thread::yield_now();
                }
            });
            assert_eq!(others.into_inner(), 63);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn pinned_threads_stay_on_cores_of_their_own() {
        use rustix::thread::{sched_getaffinity, sched_getcpu};
        let all = sched_getaffinity(None).unwrap();
        let cores = cores();
        assert_eq!(cores.len() as u32, all.count());
        let body = |threads, first: usize| {
            let pool = ThreadPool::with_pinning(threads, Pinning::Cores { first }).unwrap();
            let seen = Mutex::new(std::collections::HashSet::new());
            for _ in 0..50 {
                pool.run(16, &|_| {
                    let own = sched_getaffinity(None).unwrap();
                    assert_eq!(own.count(), 1, "not pinned");
                    assert!(own.is_set(sched_getcpu()), "not where it should be");
                    seen.lock().unwrap().insert(sched_getcpu());
                });
            }
            let own = |i| cores[(first + i) % cores.len()];
            let own: std::collections::HashSet<usize> = (0..threads).map(own).collect();
            assert!(seen.into_inner().unwrap().is_subset(&own));
        };
        // In a thread of its own, which the test's caller does not get back.
        for (threads, first) in [(2, 0), (1, 1), (2, cores.len() - 1), (1, cores.len())] {
            std::thread::scope(|scope| scope.spawn(|| body(threads, first)).join().unwrap());
        }
        assert_eq!(sched_getaffinity(None).unwrap(), all);
    }

    #[test]
    fn callers_from_several_threads_take_turns() {
        let pool = ThreadPool::new(2).unwrap();
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        pool.run(5, &|i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 4 * 100 * 10);
    }
}
