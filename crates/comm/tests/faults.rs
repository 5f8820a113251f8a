//! Ranks as processes that are killed or stopped during calls, over TCP and shared memory. The
//! survivors form a smaller group at once, then a group of the old size with a fresh process.
//!
//! Each run is drawn from its number; the first rank is among the victims. `COMM_TEST_RUNS` sets
//! the number of runs (default 6; 100 take some minutes).

#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    reason = "a test, with helpers outside of test functions"
)]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::worker::{FailureClock, WorkerProcess, now};
use paceline_base::Rank;
use paceline_base::testing::long;
use paceline_comm::testing::NEVER_SILENT;
use paceline_comm::{Deadline, Group, Reduce, RegisteredMemory, shm, tcp};
use rustix::process::Signal;

fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

/// Not a test: the body of a child process. For each line of orders it listens, learns the members,
/// joins, sums until that fails, and reports.
#[test]
fn worker() {
    let Ok(transport) = std::env::var("COMM_TEST_TRANSPORT") else {
        return;
    };
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    while let Some(silence) = lines.next() {
        let config = tcp::Config {
            silence: Duration::from_millis(silence.parse().unwrap()),
            ..tcp::Config::default()
        };
        let listener = tcp::Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        println!("@bound {}", listener.addr());
        let members = lines.next().unwrap();
        let (place, addrs) = members.split_once(' ').unwrap();
        let (round, rank) = place.split_once('.').unwrap();
        let (round, rank): (u8, u32) = (round.parse().unwrap(), rank.parse().unwrap());
        let addrs: Vec<SocketAddr> = addrs.split(' ').map(|addr| addr.parse().unwrap()).collect();
        let (rank, id, by) = (Rank(rank), tcp::GroupId([round; 16]), soon(30));
        let group: Box<dyn Group> = match transport.as_str() {
            "shm" => Box::new(shm::join_with(listener, rank, &addrs, id, config, by).unwrap()),
            _ => Box::new(tcp::join_with(listener, rank, &addrs, id, config, by).unwrap()),
        };
        println!("@joined {}", rank.0);
        let error = work(&*group);
        let when = now();
        drop(group);
        let (files, named) = (open_files(), blamed(&error));
        println!("@error {when} {files} {named} {error:?}");
    }
}

fn work(group: &dyn Group) -> paceline_comm::Error {
    // Over shared memory peers map the second buffer, and two ranks write to each other's.
    let (mut small, mut large) = (
        vec![1.0_f32; 1000],
        RegisteredMemory::new(Some(group), 200_000),
    );
    loop {
        for data in [&mut small[..], &mut large] {
            data.fill(1.0);
            if let Err(error) = group.all_reduce(data, Reduce::Sum, soon(3600)) {
                return error;
            }
            assert!(
                data.iter().all(|sum| *sum == group.size() as f32),
                "a wrong result"
            );
        }
    }
}

fn blamed(error: &paceline_comm::Error) -> i64 {
    use paceline_comm::Error;
    match error {
        Error::PeerLost { rank, .. } | Error::Silent { rank, .. } => i64::from(rank.0),
        _ => -1,
    }
}

/// Files, sockets and mappings of this process, as far as the system reports them.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Joins `workers` into the group of this round, each at its index. The silence limit only matters
/// if a rank is to be stopped.
fn join(round: u32, workers: &mut [WorkerProcess], signal: Signal) {
    let silence = match signal {
        Signal::STOP => tcp::SILENCE,
        _ => NEVER_SILENT,
    };
    for worker in workers.iter() {
        worker.tell(&silence.as_millis().to_string());
    }
    let addrs: Vec<String> = workers.iter_mut().map(|w| w.expect("bound")).collect();
    for (rank, worker) in workers.iter().enumerate() {
        worker.tell(&format!("{round}.{rank} {}", addrs.join(" ")));
    }
    for worker in workers {
        worker.expect("joined");
    }
}

/// Kills or stops `victim` and checks that all others name it in time; returns their open files.
fn harm(run: u64, workers: &mut Vec<WorkerProcess>, victim: usize, signal: Signal) -> Vec<usize> {
    // A moment during the calls, drawn from the run.
    std::thread::sleep(Duration::from_micros(run * 7919 % 30_000));
    let harmed = FailureClock::now();
    workers[victim].signal(signal);
    let gone = workers.remove(victim);
    let mut files = Vec::new();
    for worker in workers.iter_mut() {
        let report = worker.expect("error");
        let words: Vec<&str> = report.splitn(4, ' ').collect();
        let what = format!("run {run}, {signal:?}: {report}");
        files.push(words[1].parse().unwrap());
        assert_eq!(words[2], victim.to_string(), "{what}");
        harmed.known(what, words[0].parse().unwrap());
    }
    drop(gone);
    files
}

fn run(run: u64) {
    let transport = ["tcp", "shm"][(run % 2) as usize];
    let size = 3 + run / 2 % 2;
    let start = || WorkerProcess::start("faults::worker", &[("COMM_TEST_TRANSPORT", transport)]);
    let victim = [0, (run % size) as usize][(run / 4 % 2) as usize];
    let signal = [Signal::KILL, Signal::STOP][(run / 3 % 2) as usize];
    let mut workers: Vec<WorkerProcess> = (0..size).map(|_| start()).collect();
    join(0, &mut workers, signal);
    let before = harm(run, &mut workers, victim, signal);

    // First the survivors at once, without the victim; then with a fresh process.
    join(1, &mut workers, Signal::KILL);
    let after = harm(run, &mut workers, 0, Signal::KILL);
    assert!(
        after.iter().max() <= before.iter().max(),
        "files leak: {before:?}, {after:?}"
    );
    workers.push(start());
    join(2, &mut workers, Signal::KILL);
    harm(run, &mut workers, 1, Signal::KILL);
}

#[test]
fn survivors_go_on_whoever_dies() {
    let usual = if long() { 100 } else { 6 };
    let runs = std::env::var("COMM_TEST_RUNS").map_or(usual, |runs| runs.parse().unwrap());
    (0..runs).for_each(run);
}
