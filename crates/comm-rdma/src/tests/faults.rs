//! Faults of a fabric: no rank hangs and no byte is wrong.
//!
//! A seed draws size, cables, the rates of lost and delayed messages, and a failure with its time.
//! All of it is real but the devices. `COMM_TEST_RUNS=500` runs that many seeds, as a long run
//! does.

#![allow(clippy::cast_possible_truncation, reason = "small numbers of a test")]

use std::sync::atomic::{AtomicU64, Ordering};

use paceline_base::testing::{Stopwatch, long};
use paceline_comm::Error;

use super::super::soft::{Break, DeviceFailure, mix};
use super::*;

/// Number of seeds by default, and in a long run.
const RUNS: [u64; 2] = [30, 500];

/// Deadline of a call that only a deadline ends: a device that went silent.
const PATIENCE: Duration = Duration::from_millis(500);

/// Deadline of all other calls: they must succeed, however late, or report why not.
const LONG: Duration = Duration::from_secs(30);

/// Limit of all calls; beyond it a rank counts as hung.
const HANG: Duration = Duration::from_secs(60);

const CALLS: usize = 12;

/// Bytes of the longest part.
const OWN: usize = 150_000;

const fn blamed(error: &Error) -> Option<Rank> {
    match error {
        Error::PeerLost { rank, .. }
        | Error::Timeout { rank, .. }
        | Error::Silent { rank, .. }
        | Error::Garbled { rank, .. } => Some(*rank),
        _ => None,
    }
}

/// A run drawn from a seed.
#[derive(Clone, Copy, Debug)]
struct SeededRun {
    size: usize,
    cables: usize,
    ring: bool,
    faults: Faults,
    /// A rank that drops its handle before this call.
    dies: Option<(usize, usize)>,
}

impl SeededRun {
    fn of(seed: u64) -> Self {
        let mut state = seed;
        let mut below = |bound: u64| mix(&mut state) % bound;
        let (size, cables) = (2 + below(3) as usize, 1 + below(3) as usize);
        let ring = below(4) == 0;
        let ends = if ring { 2 } else { size as u64 - 1 };
        let devices = size as u64 * ends * cables as u64;
        let mut faults = Faults {
            seed,
            lose: [0, 10, 50][below(3) as usize],
            delay: [0, 20, 100][below(3) as usize],
            failure: None,
        };
        // A device sends some 30 messages during the join and the measurement, and as many after
        // that; several cables share them.
        let (device, after) = (below(devices) as usize, below(60) / cables as u64);
        let what = [Break::Send, Break::Receive, Break::Poll, Break::Mute];
        let mut dies = None;
        match below(8) {
            kind @ 0..4 => {
                let what = what[kind as usize];
                // During a join it takes seconds until a silent device is given up.
                let late = if what == Break::Mute {
                    30 / cables as u64
                } else {
                    0
                };
                let after = after / (1 + late.min(1)) + late;
                faults.failure = Some(DeviceFailure {
                    device,
                    after,
                    what,
                });
            }
            4 => dies = Some((below(size as u64) as usize, below(CALLS as u64) as usize)),
            _ => {}
        }
        Self {
            size,
            cables,
            ring,
            faults,
            dies,
        }
    }

    fn lab(&self) -> FabricFixture {
        let &Self {
            size, cables, ring, ..
        } = self;
        // Every other run transfers bodies of any length without a copy.
        let in_place = self.faults.seed.is_multiple_of(2);
        let near = move |a: usize, b: usize| !ring || b - a == 1 || b - a == size - 1;
        let lab = cabled(
            size,
            |a, b| if near(a, b) { cables } else { 0 },
            self.faults,
        );
        if in_place { lab.in_place() } else { lab }
    }
}

/// Makes call number `call` of a fixed program and checks its result if it has one.
fn step(group: &Rdma, own: &mut [u8], call: usize, patience: Duration) -> Result<(), Error> {
    let by = Deadline::at(Instant::now() + patience);
    let (rank, size) = (group.rank().0 as usize, group.size() as usize);
    let group: &dyn Group = group;
    let value = |rank: usize, i: usize| (rank * 31 + i * 7 + call * 3) as u8;
    let length = [100_000, 70_000, 0, 5000, OWN, 64][call % 6];
    match call % 4 {
        0 => {
            let part: Vec<u8> = (0..length).map(|i| value(rank, i)).collect();
            // Long enough for a zero-copy transfer.
            let all = &mut own[..length * size];
            all.fill(0);
            group.all_gather(&part, all, by)?;
            for (at, got) in all.iter().enumerate() {
                assert_eq!(*got, value(at / length, at % length), "gather {call}");
            }
        }
        1 => {
            // In place, and changed as soon as the call returns.
            let sum = &mut own[..length];
            sum.iter_mut()
                .enumerate()
                .for_each(|(i, byte)| *byte = value(rank, i));
            group.all_reduce(sum, Reduce::Sum, by)?;
            for (i, got) in sum.iter().enumerate() {
                let expected = (0..size).fold(0_u8, |sum, r| sum.wrapping_add(value(r, i)));
                assert_eq!(*got, expected, "sum {call}");
            }
            sum.fill(0xee);
        }
        2 => {
            // Registered at both ends: a waiting receive gets it without a copy.
            let (part, rest) = own.split_at_mut(OWN);
            let (part, got) = (&mut part[..length], &mut rest[..length]);
            let bytes = part.iter_mut().enumerate();
            bytes.for_each(|(i, byte)| *byte = value(rank, i));
            let number = |rank: usize| Rank(u32::try_from(rank).unwrap());
            let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
            let tag = u32::try_from(call).unwrap();
            group.send(part, number(next), tag, by)?;
            part.fill(0xdd);
            group.recv(got, number(before), tag, by)?;
            for (i, got) in got.iter().enumerate() {
                assert_eq!(*got, value(before, i), "message {call}");
            }
        }
        _ => group.barrier(by)?,
    }
    Ok(())
}

#[derive(Debug)]
enum RankResult {
    /// It did not join.
    Outside(RdmaError),
    /// All calls succeeded, or those before it died; with the number of cables lost.
    Well(usize),
    /// This call failed; and why a link of this rank is broken, if one is.
    Failed(usize, Error, Option<Arc<RdmaError>>),
}

fn live(joined: Result<Rdma, RdmaError>, run: SeededRun) -> RankResult {
    let group = match joined {
        Ok(group) => group,
        Err(error) => return RankResult::Outside(error),
    };
    let rank = group.rank().0 as usize;
    let patience = match run.faults.failure {
        Some(failure) if failure.what == Break::Mute => PATIENCE,
        _ => LONG,
    };
    let mut own = group.allocate(OWN * group.size() as usize).unwrap();
    for call in 0..CALLS {
        if run.dies == Some((rank, call)) {
            return RankResult::Well(0);
        }
        let started = Stopwatch::start();
        if let Err(error) = step(&group, &mut own, call, patience) {
            let took = started.elapsed();
            assert!(
                took < patience + Duration::from_secs(3),
                "{took:?} for {error}"
            );
            let again = step(&group, &mut own, 3, patience);
            assert!(again.is_err(), "a poisoned group works again");
            let broken = (0..group.size()).find_map(|peer| group.broken(Rank(peer)));
            return RankResult::Failed(call, error, broken);
        }
    }
    let peers = (0..group.size()).map(Rank);
    let lost = peers.filter(|peer| group.cables(*peer).1.is_some());
    RankResult::Well(lost.count())
}

/// Whether the fault had an effect.
fn run(seed: u64) -> bool {
    let run = SeededRun::of(seed);
    let lab = run.lab();
    let started = Stopwatch::start();
    let threads = join_all(&lab)
        .into_iter()
        .map(|joined| thread::spawn(move || live(joined, run)));
    let threads: Vec<_> = threads.collect();
    while threads.iter().any(|thread| !thread.is_finished()) {
        assert!(
            started.elapsed() < HANG,
            "seed {seed}, {run:?}: a rank hangs"
        );
        thread::sleep(Duration::from_micros(500));
    }
    let end = |thread: thread::JoinHandle<RankResult>| {
        thread
            .join()
            .unwrap_or_else(|_| panic!("seed {seed}, {run:?}"))
    };
    let ends: Vec<RankResult> = threads.into_iter().map(end).collect();
    check(&run, &ends, &format!("seed {seed}, {run:?}: {ends:?}"));
    assert_eq!(
        lab.fabric.live(),
        0,
        "seed {seed}: something was not given back"
    );
    ends.iter().any(|end| !matches!(end, RankResult::Well(0)))
}

fn check(run: &SeededRun, ends: &[RankResult], text: &str) {
    let outside = ends
        .iter()
        .filter(|end| matches!(end, RankResult::Outside(_)))
        .count();
    let failed: Vec<usize> = ends
        .iter()
        .filter_map(|end| match end {
            RankResult::Failed(call, ..) => Some(*call),
            _ => None,
        })
        .collect();
    match (run.faults.failure, run.dies) {
        (None, None) => assert_eq!(outside + failed.len(), 0, "{text}"),
        (None, Some((rank, call))) => {
            let others = ends.iter().enumerate().filter(|(other, _)| *other != rank);
            for (_, end) in others {
                let RankResult::Failed(at, error, _) = end else {
                    panic!("{text}")
                };
                // A message may be refused one call early: its receiver has ended by then.
                assert!(*at + 1 >= call, "{text}");
                assert!(
                    blamed(error) == Some(Rank(u32::try_from(rank).unwrap())),
                    "{text}"
                );
            }
        }
        (Some(failure), _) => {
            // A rank that succeeded needed no further message of those that failed.
            let all = outside + failed.len() == ends.len();
            let last = failed.iter().all(|call| *call + 2 >= CALLS);
            assert!(
                all || outside + failed.len() == 0 || (outside == 0 && last),
                "{text}"
            );
            let mute = failure.what == Break::Mute;
            let named = ends.iter().any(|end| match end {
                RankResult::Failed(_, _, broken) => broken.is_some(),
                RankResult::Outside(error) => !matches!(error, RdmaError::Elsewhere { .. }),
                RankResult::Well(_) => false,
            });
            assert!(mute || failed.is_empty() || named, "{text}");
        }
    }
}

#[test]
fn no_fault_makes_a_rank_hang_or_answer_wrongly() {
    let usual = RUNS[usize::from(long())];
    let runs = std::env::var("COMM_TEST_RUNS").map_or(usual, |runs| runs.parse().unwrap());
    // A few in parallel: most of a run is waiting.
    let (next, hits) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= runs {
                        break;
                    }
                    hits.fetch_add(u64::from(run(seed)), Ordering::Relaxed);
                }
            });
        }
    });
    // Five of eight runs have a failure, some of them behind the last message.
    let hits = hits.load(Ordering::Relaxed);
    assert!(hits > runs / 4, "only {hits} of {runs} faults hit");
}

/// A cable, of several of a pair, fails in any way: all calls succeed over the others.
#[test]
fn traffic_moves_to_the_other_cables() {
    let mut lost = 0;
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for seed in 0..24 {
            threads.push(scope.spawn(move || over_the_others(seed)));
        }
        for thread in threads {
            lost += thread.join().unwrap();
        }
    });
    assert!(lost > 12, "{lost} ends of cables were lost in 24 runs");
}

/// Number of ends that noticed.
fn over_the_others(seed: u64) -> usize {
    let mut state = seed;
    let mut below = |bound: u64| mix(&mut state) % bound;
    let cables = 2 + below(3) as usize;
    let what = [Break::Send, Break::Receive, Break::Poll, Break::Mute][seed as usize % 4];
    let failure = DeviceFailure {
        device: below(2 * cables as u64) as usize,
        after: below(20) / cables as u64,
        what,
    };
    let run = SeededRun {
        size: 2,
        cables,
        ring: false,
        faults: Faults {
            seed,
            lose: 10 * below(2),
            delay: 20 * below(2),
            failure: Some(failure),
        },
        dies: None,
    };
    let lab = run.lab();
    let patient = SeededRun {
        faults: Faults {
            failure: None,
            ..run.faults
        },
        ..run
    };
    // A cable that is dead from the start is an error.
    lab.fabric.arm(false);
    let joined = join_all(&lab).into_iter();
    lab.fabric.arm(true);
    let threads = joined.map(|joined| thread::spawn(move || live(joined, patient)));
    let ends: Vec<RankResult> = threads
        .collect::<Vec<_>>()
        .into_iter()
        .map(|t| t.join().unwrap())
        .collect();
    let lost = ends.iter().map(|end| match end {
        RankResult::Well(lost) => *lost,
        end => panic!("seed {seed}, {run:?}: {end:?}"),
    });
    lost.sum()
}
