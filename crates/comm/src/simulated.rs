//! A simulated transport with faults from a seed, and the runs that show that no fault makes a
//! rank hang, answer wrongly or stay ignorant.
//!
//! Links are queues in memory. A seed decides how every read and write is cut short, and one fault:
//! a link that is cut, garbles or stalls after so many bytes, or a rank that dies or stops after so
//! many calls. Everything above the transport is the real thing. What is random is drawn per link
//! and per operation on it, so a seed gives the same faults at the same bytes; which thread runs
//! first is the system's choice, and differs.

#![allow(clippy::cast_possible_truncation, reason = "small numbers of a test")]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::Rank;

use crate::linked::Linked;
use crate::status::{News, Status};
use crate::transport::{Closed, Lane, Patience, Transport, Want};
use crate::{Collective, Counts, Data, DataMut, Deadline, Error, Reduce, Tuning};

/// Bytes that a link holds.
const LINK_BYTES: usize = 3000;

/// Deadline of every call: the only way to notice a fault that nobody reports.
const PATIENCE: Duration = Duration::from_millis(400);

/// Nobody may take longer for a call.
const HANG: Duration = Duration::from_secs(20);

const RUNS: u64 = 500;

/// Runs side by side: most of a run is waiting for a deadline.
const RUNS_AT_ONCE: u32 = 12;

/// splitmix64 (Steele, Lea, Flood, 2014).
fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// The link from one rank to another ends after so many bytes.
    Cut {
        from: usize,
        to: usize,
        at: u64,
    },
    /// From then on its bytes are random.
    Garble {
        from: usize,
        to: usize,
        at: u64,
    },
    /// From then on nothing arrives, and nobody says so.
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
    /// The rank calls nothing any more.
    Stop {
        rank: usize,
        call: usize,
    },
}

impl Fault {
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

/// One direction of one lane of a pair.
struct Pipe {
    bytes: VecDeque<u8>,
    carried: u64,
    closed: bool,
    random: u64,
}

struct Net {
    size: usize,
    fault: Fault,
    /// By lane, from, to.
    pipes: Vec<Mutex<Pipe>>,
    moved: Mutex<u64>,
    changed: Condvar,
    gone: Vec<AtomicBool>,
    status: Arc<Status>,
    unread: AtomicU64,
}

impl Net {
    fn new(size: usize, seed: u64, fault: Fault) -> Arc<Self> {
        let pipe = |index: usize| Pipe {
            bytes: VecDeque::new(),
            carried: 0,
            closed: false,
            random: seed ^ (index as u64).wrapping_mul(0xa076_1d64_78bd_642f),
        };
        Arc::new(Self {
            size,
            fault,
            pipes: (0..2 * size * size).map(pipe).map(Mutex::new).collect(),
            moved: Mutex::new(0),
            changed: Condvar::new(),
            gone: (0..size).map(|_| AtomicBool::new(false)).collect(),
            status: Arc::default(),
            unread: AtomicU64::new(0),
        })
    }

    fn pipe(&self, lane: Lane, from: usize, to: usize) -> &Mutex<Pipe> {
        &self.pipes[(lane as usize * self.size + from) * self.size + to]
    }

    fn notify(&self) {
        *self.moved.lock().unwrap() += 1;
        self.changed.notify_all();
    }
}

/// One rank's end of the simulated links.
struct Simulated {
    rank: usize,
    net: Arc<Net>,
}

impl std::fmt::Debug for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "simulated {:?}", self.net.fault)
    }
}

impl Transport for Simulated {
    fn write(&self, lane: Lane, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        let mut pipe = self.net.pipe(lane, self.rank, peer).lock().unwrap();
        if pipe.closed || self.net.gone[peer].load(Ordering::SeqCst) {
            return Err(Closed);
        }
        let room = LINK_BYTES.saturating_sub(pipe.bytes.len());
        let most = (head.len() + body.len()).min(room);
        // Short writes: any part of what fits, now and then nothing.
        let count = (mix(&mut pipe.random) % (most as u64 * 2 + 1)).min(most as u64) as usize;
        for byte in head.iter().chain(body).take(count) {
            let (carried, mut byte) = (pipe.carried, *byte);
            pipe.carried += 1;
            let here = |from, to| (from, to) == (self.rank, peer);
            match self.net.fault {
                Fault::Cut { from, to, at } if here(from, to) && carried >= at => {
                    pipe.closed = true;
                    break;
                }
                Fault::Stall { from, to, at } if here(from, to) && carried >= at => continue,
                Fault::Garble { from, to, at } if here(from, to) && carried >= at => {
                    byte = mix(&mut pipe.random).to_le_bytes()[0];
                }
                _ => {}
            }
            pipe.bytes.push_back(byte);
        }
        drop(pipe);
        self.net.notify();
        Ok(count)
    }

    fn read(&self, lane: Lane, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        let gone = self.net.gone[peer].load(Ordering::SeqCst);
        let mut pipe = self.net.pipe(lane, peer, self.rank).lock().unwrap();
        let most = pipe.bytes.len().min(into.len()) as u64;
        if most == 0 {
            return if gone || pipe.closed {
                Err(Closed)
            } else {
                Ok(0)
            };
        }
        let count = (mix(&mut pipe.random) % (most * 2 + 1)).clamp(1, most) as usize;
        for (byte, slot) in pipe.bytes.drain(..count).zip(into) {
            *slot = byte;
        }
        drop(pipe);
        self.net.notify();
        Ok(count)
    }

    fn wait(&self, _lane: Lane, _wants: &[Want], until: Instant) {
        let moved = self.net.moved.lock().unwrap();
        let left = until.saturating_duration_since(Instant::now());
        // Nobody tracks who is interested in what: look again soon in any case.
        let nap = left.min(Duration::from_millis(2));
        drop(self.net.changed.wait_timeout(moved, nap).unwrap());
    }

    fn wake(&self) {
        self.net.notify();
    }

    fn tell(&self, news: &News) {
        self.net.status.poison(*news);
        self.net.notify();
    }

    fn nudge(&self) -> bool {
        false
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn patience(&self) -> Patience {
        Patience {
            spins: 0,
            yields: 2,
        }
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        self.net.unread.fetch_add(1, Ordering::SeqCst);
    }
}

/// Makes call number `call` of a fixed program and checks its result if it has one.
fn step(group: &Linked<Simulated>, call: usize) -> Result<(), Error> {
    let (rank, size) = (group.rank().0 as usize, group.size() as usize);
    let by = Deadline::at(Instant::now() + PATIENCE);
    let length = [3, 700, 5000, 0, 64, 2000][call % 6];
    let value = |rank: usize, i: usize| (rank * 31 + i * 7 + call) as u32;
    let own: Vec<u32> = (0..length).map(|i| value(rank, i)).collect();
    match call % 4 {
        0 => {
            let mut all = vec![0; length * size];
            let gather = Collective::AllGather {
                input: Some(Data::new(&own)),
                output: DataMut::new(&mut all),
                counts: Counts::Even(length),
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

/// What became of a rank: calls it completed, and why it ended.
type End = (usize, Option<Error>);

fn live(group: Linked<Simulated>, fault: Fault) -> End {
    let rank = group.rank().0 as usize;
    for call in 0..16 {
        let (dies, stops) = match fault {
            Fault::Die { rank: r, call: c } => ((r, c) == (rank, call), false),
            Fault::Stop { rank: r, call: c } => (false, (r, c) == (rank, call)),
            _ => (false, false),
        };
        if stops {
            // Whatever others do about it, this rank is told.
            let until = Instant::now() + 3 * PATIENCE;
            while group.status_cause().is_none() && Instant::now() < until {
                thread::sleep(Duration::from_millis(2));
            }
        }
        if dies {
            group.leave();
            group.transport().net.gone[rank].store(true, Ordering::SeqCst);
            group.transport().net.notify();
            return (call, None);
        }
        let started = Instant::now();
        if let Err(error) = step(&group, call) {
            let took = started.elapsed();
            assert!(
                took < PATIENCE + Duration::from_secs(2),
                "{took:?} for {error}"
            );
            assert!(step(&group, 3).is_err(), "a poisoned group works again");
            // Stays until the others have had time to notice by themselves, as a process would.
            return (call, Some(error));
        }
    }
    (16, None)
}

/// Whether the fault hit somebody.
fn run(seed: u64) -> bool {
    let size = 2 + (seed % 4) as usize;
    let mut fault = Fault::of(seed, size);
    if let Fault::Garble { from, to, at } = fault {
        // Payload has no checksum of its own (TCP's, or none in memory): only headers are garbled,
        // so that a wrong result cannot pass for a right one.
        let at = if at < 60 { at } else { 0 };
        fault = Fault::Garble { from, to, at };
    }
    let net = Net::new(size, seed, fault);
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
            let group = Linked::new(Rank(rank as u32), size as u32, links, status);
            group.agree(tuning);
            thread::spawn(move || live(group, fault))
        })
        .collect();
    let started = Instant::now();
    while ranks.iter().any(|rank| !rank.is_finished()) {
        assert!(
            started.elapsed() < HANG,
            "seed {seed}, {fault:?}: a rank hangs"
        );
        thread::sleep(Duration::from_micros(200));
    }
    let ends: Vec<End> = ranks
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
    hit
}

fn check(seed: u64, fault: Fault, ends: &[End]) {
    let failed = ends.iter().filter(|(_, error)| error.is_some()).count();
    let text = || format!("seed {seed}, {fault:?}: {ends:?}");
    match fault {
        Fault::None => assert_eq!(failed, 0, "{}", text()),
        Fault::Die { rank, call } => {
            for (other, (_, error)) in ends.iter().enumerate().filter(|(r, _)| *r != rank) {
                let named = Some(Rank(rank as u32));
                let got = error.map(|error| blamed(&error));
                assert_eq!(
                    got,
                    Some(named),
                    "rank {other} after call {call}; {}",
                    text()
                );
            }
        }
        Fault::Stop { .. } => assert_eq!(failed, ends.len(), "{}", text()),
        // A fault behind the last byte of the program hurts nobody; else all end with an error.
        Fault::Cut { .. } | Fault::Garble { .. } | Fault::Stall { .. } => {
            assert!(failed == 0 || failed == ends.len(), "{}", text());
        }
    }
}

fn blamed(error: &Error) -> Option<Rank> {
    match error {
        Error::PeerLost { rank, .. }
        | Error::Timeout { rank, .. }
        | Error::Silent { rank, .. }
        | Error::Garbled { rank, .. } => Some(*rank),
        _ => None,
    }
}

#[test]
fn no_fault_makes_a_rank_hang_or_answer_wrongly() {
    let (next, hits) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..RUNS_AT_ONCE {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= RUNS {
                        break;
                    }
                    hits.fetch_add(u64::from(run(seed)), Ordering::Relaxed);
                }
            });
        }
    });
    // A sixth has no fault, and some faults lie behind the last byte.
    let hits = hits.load(Ordering::Relaxed);
    assert!(hits > RUNS / 2, "only {hits} of {RUNS} faults hit");
}
