//! A simulated transport with seeded faults, and runs which show that no fault makes a rank hang,
//! return a wrong result or miss a failure.
//!
//! Links are queues in memory. A seed decides how every read and write is cut short, and one fault.
//! The fault cuts, garbles or stalls a link after a number of bytes, or ends or stops a rank after
//! a number of calls. Everything above the transport is real.
//!
//! A seed reproduces its run on any machine. Ranks are threads, but only the one with the *turn*
//! runs. It yields the turn where it would wait, and sometimes elsewhere. The seed draws the next
//! rank. Time is simulated too: it stands still while a rank can run, and jumps to the next
//! deadline when none can. So waiting costs nothing.

#![allow(clippy::cast_possible_truncation, reason = "small numbers of a test")]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::Rank;

use crate::locks::lock;
use crate::status::{FailureNotice, GroupStatus};
use crate::transport::{
    Closed, GULP_BYTES, SpinPolicy, Transport, VirtualLane, WaitInterest, ZeroCopy,
};
use crate::transport_group::TransportGroup;
use crate::{Collective, Data, DataMut, Deadline, ElementCounts, Error, Reduce, Tuning};

/// Capacity of a link in bytes.
const LINK_BYTES: usize = 3000;

/// Deadline of every call: the only way to detect a fault that is not reported.
const PATIENCE: Duration = Duration::from_millis(400);

/// Limit of a call; beyond it the run counts as a hang.
const HANG: Duration = Duration::from_secs(60);

const RUNS: u64 = 500;

/// Every this many runs, a run is repeated and must be identical.
const TWICE: u64 = 10;

/// Longest wait between polls: interests are not tracked.
const NAP: Duration = Duration::from_millis(2);

/// A rank yields its turn after one in this many reads and writes.
const PREEMPT: u64 = 8;

/// splitmix64 (Steele, Lea, Flood, 2014), as a function of its state, which traces include.
fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SimulatedFault {
    None,
    /// The link from one rank to another is cut after `at` bytes.
    Cut {
        from: usize,
        to: usize,
        at: u64,
    },
    /// From `at` on its bytes are random.
    Garble {
        from: usize,
        to: usize,
        at: u64,
    },
    /// From `at` on nothing arrives, and no error is reported.
    Stall {
        from: usize,
        to: usize,
        at: u64,
    },
    /// The rank drops its handle before this call.
    Die {
        rank: usize,
        call: usize,
    },
    /// The rank makes no further calls.
    Stop {
        rank: usize,
        call: usize,
    },
}

impl SimulatedFault {
    fn of(seed: u64, size: usize) -> Self {
        let mut state = seed;
        let from = (mix(&mut state) % size as u64) as usize;
        let to = (from + 1 + (mix(&mut state) % (size as u64 - 1)) as usize) % size;
        // Half of the faults hit early headers, the rest anything.
        let range = [300, 40_000][(mix(&mut state) % 2) as usize];
        let (at, call) = (mix(&mut state) % range, (mix(&mut state) % 12) as usize);
        match mix(&mut state) % 6 {
            0 => Self::Cut { from, to, at },
            1 => Self::Garble { from, to, at },
            2 => Self::Stall { from, to, at },
            3 => Self::Die { rank: from, call },
            4 => Self::Stop { rank: from, call },
            _ => Self::None,
        }
    }
}

/// A direction of one lane of a pair.
struct Pipe {
    bytes: VecDeque<u8>,
    carried: u64,
    closed: bool,
    random: u64,
}

struct SimulatedNetwork {
    size: usize,
    fault: SimulatedFault,
    /// By lane, from, to.
    pipes: Vec<Mutex<Pipe>>,
    turns: Mutex<TurnScheduler>,
    turned: Condvar,
    gone: Vec<AtomicBool>,
    status: Arc<GroupStatus>,
    unread: AtomicU64,
    start: Instant,
}

/// The scheduler: which rank may run, and the simulated time.
struct TurnScheduler {
    whose: usize,
    ranks: Vec<RankActivity>,
    random: u64,
    clock: Duration,
    /// Bytes and notices moved so far.
    moved: u64,
    /// Hash of all events.
    trace: u64,
}

#[derive(Clone, Copy, Debug)]
enum RankActivity {
    Ready,
    /// Until this time, or until more has moved.
    Waiting {
        until: Duration,
        moved: u64,
    },
    Done,
}

impl TurnScheduler {
    /// Draws the next rank; the clock advances if all wait.
    fn next(&mut self) {
        let able = |turns: &Self, doing: &RankActivity| match doing {
            RankActivity::Ready => true,
            RankActivity::Waiting { until, moved } => {
                *moved != turns.moved || *until <= turns.clock
            }
            RankActivity::Done => false,
        };
        if !self.ranks.iter().any(|doing| able(self, doing)) {
            let until = self.ranks.iter().filter_map(|doing| match doing {
                RankActivity::Waiting { until, .. } => Some(*until),
                RankActivity::Ready | RankActivity::Done => None,
            });
            let Some(until) = until.min() else { return };
            self.clock = self.clock.max(until);
        }
        let able: Vec<usize> = (0..self.ranks.len())
            .filter(|rank| able(self, &self.ranks[*rank]))
            .collect();
        self.whose = able[(mix(&mut self.random) % able.len() as u64) as usize];
    }

    /// Adds an event to the trace.
    fn trace(&mut self, what: [u64; 4]) {
        for word in what {
            self.trace ^= word;
            mix(&mut self.trace);
        }
    }
}

impl SimulatedNetwork {
    fn new(size: usize, seed: u64, fault: SimulatedFault) -> Arc<Self> {
        let pipe = |index: usize| Pipe {
            bytes: VecDeque::new(),
            carried: 0,
            closed: false,
            random: seed ^ (index as u64).wrapping_mul(0xa076_1d64_78bd_642f),
        };
        let mut turns = TurnScheduler {
            whose: 0,
            ranks: vec![RankActivity::Ready; size],
            random: seed,
            clock: Duration::ZERO,
            moved: 0,
            trace: 0,
        };
        turns.next();
        Arc::new(Self {
            size,
            fault,
            pipes: (0..2 * size * size).map(pipe).map(Mutex::new).collect(),
            turns: Mutex::new(turns),
            turned: Condvar::new(),
            gone: (0..size).map(|_| AtomicBool::new(false)).collect(),
            status: Arc::default(),
            unread: AtomicU64::new(0),
            start: Instant::now(),
        })
    }

    fn pipe(&self, lane: VirtualLane, from: usize, to: usize) -> &Mutex<Pipe> {
        &self.pipes[(lane as usize * self.size + from) * self.size + to]
    }

    fn turns(&self) -> MutexGuard<'_, TurnScheduler> {
        lock(&self.turns)
    }

    fn notify(&self) {
        self.turns().moved += 1;
    }

    fn take_turn(&self, rank: usize) {
        let mut turns = self.turns();
        while turns.whose != rank {
            turns = self
                .turned
                .wait(turns)
                .unwrap_or_else(PoisonError::into_inner);
        }
        turns.ranks[rank] = RankActivity::Ready;
    }

    /// Yields the turn, and waits for the next one.
    fn hand_on(&self, rank: usize, doing: RankActivity) {
        let mut turns = self.turns();
        turns.ranks[rank] = doing;
        turns.next();
        self.turned.notify_all();
        drop(turns);
        if !matches!(doing, RankActivity::Done) {
            self.take_turn(rank);
        }
    }

    /// Records a read or write, and may yield the turn.
    fn did(&self, what: [u64; 4]) {
        let mut turns = self.turns();
        turns.trace(what);
        turns.moved += u64::from(what[3] > 0);
        let preempt = mix(&mut turns.random).is_multiple_of(PREEMPT);
        drop(turns);
        if preempt {
            self.hand_on(what[1] as usize, RankActivity::Ready);
        }
    }
}

/// A rank's end of the simulated links.
#[derive(derive_more::Debug)]
#[debug("simulated {:?}", self.net.fault)]
struct Simulated {
    rank: usize,
    net: Arc<SimulatedNetwork>,
}

impl Transport for Simulated {
    fn write(
        &self,
        lane: VirtualLane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        let mut pipe = self.net.pipe(lane, self.rank, peer).lock().unwrap();
        if pipe.closed || self.net.gone[peer].load(Ordering::SeqCst) {
            return Err(Closed);
        }
        let room = LINK_BYTES.saturating_sub(pipe.bytes.len());
        let most = (head.len() + body.len()).min(room);
        // Short writes: any part of what fits, sometimes nothing.
        let count = (mix(&mut pipe.random) % (most as u64 * 2 + 1)).min(most as u64) as usize;
        for byte in head.iter().chain(body).take(count) {
            let (carried, mut byte) = (pipe.carried, *byte);
            pipe.carried += 1;
            let here = |from, to| (from, to) == (self.rank, peer);
            match self.net.fault {
                SimulatedFault::Cut { from, to, at } if here(from, to) && carried >= at => {
                    pipe.closed = true;
                    break;
                }
                SimulatedFault::Stall { from, to, at } if here(from, to) && carried >= at => {
                    continue;
                }
                SimulatedFault::Garble { from, to, at } if here(from, to) && carried >= at => {
                    byte = mix(&mut pipe.random).to_le_bytes()[0];
                }
                _ => {}
            }
            pipe.bytes.push_back(byte);
        }
        drop(pipe);
        let what = [lane as u64, self.rank as u64, peer as u64, count as u64];
        self.net.did(what);
        Ok(count)
    }

    fn read(&self, lane: VirtualLane, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        let gone = self.net.gone[peer].load(Ordering::SeqCst);
        let mut pipe = self.net.pipe(lane, peer, self.rank).lock().unwrap();
        let most = pipe.bytes.len().min(into.len()) as u64;
        if most == 0 {
            let closed = gone || pipe.closed;
            return if closed { Err(Closed) } else { Ok(0) };
        }
        let count = (mix(&mut pipe.random) % (most * 2 + 1)).clamp(1, most) as usize;
        for (byte, slot) in pipe.bytes.drain(..count).zip(into) {
            *slot = byte;
        }
        drop(pipe);
        let what = [2 + lane as u64, self.rank as u64, peer as u64, count as u64];
        self.net.did(what);
        Ok(count)
    }

    fn zero_copy(&self) -> Option<&dyn ZeroCopy> {
        None
    }

    fn wait(&self, _lane: VirtualLane, _wants: &[WaitInterest], until: Instant) {
        let turns = self.net.turns();
        let nap = until.min(self.net.start + turns.clock + NAP);
        let until = nap.saturating_duration_since(self.net.start);
        let moved = turns.moved;
        drop(turns);
        self.net
            .hand_on(self.rank, RankActivity::Waiting { until, moved });
    }

    fn wake(&self) {
        self.net.notify();
    }

    fn notify_failure(&self, news: &FailureNotice) {
        self.net.status.poison(*news);
        self.net.notify();
    }

    fn nudge(&self) -> bool {
        false
    }

    fn now(&self) -> Instant {
        self.net.start + self.net.turns().clock
    }

    fn patience(&self) -> SpinPolicy {
        SpinPolicy {
            spins: 0,
            yields: 2,
        }
    }

    fn gulp(&self) -> usize {
        GULP_BYTES
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        self.net.unread.fetch_add(1, Ordering::SeqCst);
        // Also if this rank panics, so that the others continue.
        self.net.hand_on(self.rank, RankActivity::Done);
    }
}

/// Makes call number `call` of a fixed program and checks its result if it has one.
fn step(group: &TransportGroup<Simulated>, call: usize) -> Result<(), Error> {
    let (rank, size) = (group.rank().0 as usize, group.size() as usize);
    let by = Deadline::at(group.transport().now() + PATIENCE);
    let length = [3, 700, 5000, 0, 64, 2000][call % 6];
    let value = |rank: usize, i: usize| (rank * 31 + i * 7 + call) as u32;
    let own: Vec<u32> = (0..length).map(|i| value(rank, i)).collect();
    match call % 4 {
        0 => {
            let mut all = vec![0; length * size];
            let gather = Collective::AllGather {
                input: Some(Data::new(&own)),
                output: DataMut::new(&mut all),
                counts: ElementCounts::Even(length),
            };
            group.run(gather, by)?;
            for (at, got) in all.iter().enumerate() {
                assert_eq!(*got, value(at / length, at % length), "gather {call}");
            }
        }
        1 => {
            let (mut sum, op) = (own, Reduce::Sum);
            let data = DataMut::new(&mut sum);
            group.run(Collective::AllReduce { data, op }, by)?;
            for (i, got) in sum.iter().enumerate() {
                let expected: u32 = (0..size).map(|r| value(r, i)).sum();
                assert_eq!(*got, expected, "sum {call}");
            }
        }
        2 => {
            let next = Rank(((rank + 1) % size) as u32);
            let before = (rank + size - 1) % size;
            group.send(Data::new(&own), next, call as u32, by)?;
            let mut got = vec![0; length];
            let from = Rank(before as u32);
            group.recv(DataMut::new(&mut got), from, call as u32, by)?;
            for (i, got) in got.iter().enumerate() {
                assert_eq!(*got, value(before, i), "message {call}");
            }
        }
        _ => group.run(Collective::Barrier, by)?,
    }
    Ok(())
}

/// Outcome of a rank: completed calls, and the error that ended it.
type RankOutcome = (usize, Option<Error>);

fn live(group: TransportGroup<Simulated>, fault: SimulatedFault) -> RankOutcome {
    let rank = group.rank().0 as usize;
    for call in 0..16 {
        let (dies, stops) = match fault {
            SimulatedFault::Die { rank: r, call: c } => ((r, c) == (rank, call), false),
            SimulatedFault::Stop { rank: r, call: c } => (false, (r, c) == (rank, call)),
            _ => (false, false),
        };
        if stops {
            // This rank must be notified, regardless of the others' errors.
            let links = group.transport();
            let until = links.now() + 3 * PATIENCE;
            while group.status_cause().is_none() && links.now() < until {
                links.wait(VirtualLane::Calls, &[], until);
            }
        }
        if dies {
            group.leave();
            group.transport().net.gone[rank].store(true, Ordering::SeqCst);
            group.transport().net.notify();
            return (call, None);
        }
        let started = group.transport().now();
        if let Err(error) = step(&group, call) {
            let took = group.transport().now() - started;
            assert!(
                took < PATIENCE + Duration::from_secs(2),
                "{took:?} for {error}"
            );
            assert!(step(&group, 3).is_err(), "a poisoned group works again");
            // Stays until the others have had time to notice, as a process would.
            return (call, Some(error));
        }
    }
    (16, None)
}

/// Whether the fault had an effect, and the trace of the run.
fn run(seed: u64) -> (bool, u64) {
    let size = 2 + (seed % 4) as usize;
    let mut fault = SimulatedFault::of(seed, size);
    if let SimulatedFault::Garble { from, to, at } = fault {
        // Payload has no checksum of its own (TCP's, or none in memory): only headers are garbled,
        // so that a wrong result cannot pass for a right one.
        let at = if at < 60 { at } else { 0 };
        fault = SimulatedFault::Garble { from, to, at };
    }
    let net = SimulatedNetwork::new(size, seed, fault);
    let forced = [
        None,
        Some(crate::Algorithm::Ring),
        Some(crate::Algorithm::Halving),
    ];
    let tuning = Tuning {
        force: forced[(seed / 4 % 3) as usize],
        ..Tuning::default()
    };
    let ranks: Vec<_> = (0..size)
        .map(|rank| {
            let net = Arc::clone(&net);
            let status = Arc::clone(&net.status);
            let links = Simulated { rank, net };
            let group = TransportGroup::with_status(Rank(rank as u32), size as u32, links, status);
            group.agree(tuning);
            thread::spawn(move || {
                group.transport().net.take_turn(rank);
                live(group, fault)
            })
        })
        .collect();
    let started = Instant::now();
    while ranks.iter().any(|rank| !rank.is_finished()) {
        assert!(
            started.elapsed() < HANG,
            "seed {seed}, {fault:?}: a rank hangs"
        );
        thread::sleep(Duration::from_micros(50));
    }
    let ends: Vec<RankOutcome> = ranks
        .into_iter()
        .map(|rank| {
            rank.join()
                .unwrap_or_else(|_| panic!("seed {seed}, {fault:?}"))
        })
        .collect();
    check(seed, fault, &ends);
    let hit = ends.iter().any(|(_, error)| error.is_some());
    assert_eq!(
        net.unread.load(Ordering::SeqCst),
        size as u64,
        "seed {seed}: ends are kept"
    );
    assert_eq!(
        Arc::strong_count(&net),
        1,
        "seed {seed}: something holds the net"
    );
    (hit, net.turns().trace)
}

fn check(seed: u64, fault: SimulatedFault, ends: &[RankOutcome]) {
    let failed = ends.iter().filter(|(_, error)| error.is_some()).count();
    let text = || format!("seed {seed}, {fault:?}: {ends:?}");
    match fault {
        SimulatedFault::None => assert_eq!(failed, 0, "{}", text()),
        SimulatedFault::Die { rank, call } => {
            for (other, (_, error)) in ends.iter().enumerate().filter(|(r, _)| *r != rank) {
                let named = Some(Rank(rank as u32));
                let got = error.map(|error| error.blamed());
                assert_eq!(
                    got,
                    Some(named),
                    "rank {other} after call {call}; {}",
                    text()
                );
            }
        }
        SimulatedFault::Stop { .. } => assert_eq!(failed, ends.len(), "{}", text()),
        // A fault behind the last byte of the program has no effect; else all ranks end with an
        // error.
        SimulatedFault::Cut { .. }
        | SimulatedFault::Garble { .. }
        | SimulatedFault::Stall { .. } => {
            assert!(failed == 0 || failed == ends.len(), "{}", text());
        }
    }
}

#[test]
fn no_fault_makes_a_rank_hang_or_answer_wrongly() {
    let hits = |seed| {
        let (hit, trace) = run(seed);
        if seed.is_multiple_of(TWICE) {
            assert_eq!(run(seed), (hit, trace), "seed {seed}: another run");
        }
        hit
    };
    let hits = (0..RUNS).filter(|seed| hits(*seed)).count() as u64;
    // One run in six has no fault, and some faults are behind the last byte.
    assert!(hits > RUNS / 2, "only {hits} of {RUNS} faults hit");
}
