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

use crate::worker::{FailureClock, NEVER_SILENT, WorkerProcess, now};
use paceline_base::testing::long;
use paceline_comm::rendezvous::{RendezvousPoint, RequiredRanks, rendezvous};
use paceline_comm::{Deadline, Group, Reduce, RegisteredMemory, shm, tcp};
use rustix::process::Signal;

fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

/// Not a test: the body of a child process. Joins, sums until that fails, reports, and waits for
/// the size of the next group.
#[test]
fn worker() {
    let Some(folder) = std::env::var_os("COMM_TEST_FOLDER") else {
        return;
    };
    let place = RendezvousPoint::Folder(folder.into());
    let transport = std::env::var("COMM_TEST_TRANSPORT").unwrap();
    let mut order = std::env::var("COMM_TEST_ORDER").unwrap();
    loop {
        let words: Vec<&str> = order.split_whitespace().collect();
        let [round, size, silence] = words[..] else {
            panic!("no order: {order:?}");
        };
        let wanted = RequiredRanks::Exactly(size.parse().unwrap());
        let config = tcp::Config {
            silence: Duration::from_millis(silence.parse().unwrap()),
            ..tcp::Config::default()
        };
        let listener = tcp::Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let by = soon(30);
        let members = {
            let round = round.parse().unwrap();
            rendezvous(&place, listener.addr(), round, wanted, None, by).unwrap()
        };
        let (rank, addrs, id) = (members.rank, &members.addrs, members.id);
        let group: Box<dyn Group> = match transport.as_str() {
            "shm" => Box::new(shm::join_with(listener, rank, addrs, id, config, by).unwrap()),
            _ => Box::new(tcp::join_with(listener, rank, addrs, id, config, by).unwrap()),
        };
        println!("@joined {}", rank.0);
        let error = work(&*group);
        let when = now();
        drop(group);
        println!(
            "@error {when} {} {} {error:?}",
            open_files(),
            blamed(&error)
        );
        order.clear();
        std::io::stdin().read_line(&mut order).unwrap();
        if order.trim().is_empty() {
            return;
        }
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

/// Joins `workers` into a group, each as its rank.
fn joined(workers: &mut Vec<WorkerProcess>) {
    let ranks: Vec<usize> = workers
        .iter_mut()
        .map(|w| w.expect("joined").parse().unwrap())
        .collect();
    let mut order: Vec<(usize, WorkerProcess)> = ranks.into_iter().zip(workers.drain(..)).collect();
    order.sort_by_key(|(rank, _)| *rank);
    workers.extend(order.into_iter().map(|(_, worker)| worker));
}

/// The command to the processes: the round and the number of ranks. It also has the silence limit
/// in milliseconds, which only matters if a rank is to be stopped.
fn order(round: u64, size: u32, signal: Signal) -> String {
    let silence = match signal {
        Signal::STOP => tcp::SILENCE,
        _ => NEVER_SILENT,
    };
    format!("{round} {size} {}", silence.as_millis())
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
    let folder = tempfile::tempdir().unwrap();
    let transport = ["tcp", "shm"][(run % 2) as usize];
    let size = 3 + (run / 2 % 2) as u32;
    let start = |order: &str| {
        let env = [
            ("COMM_TEST_FOLDER", folder.path().as_os_str()),
            ("COMM_TEST_TRANSPORT", transport.as_ref()),
            ("COMM_TEST_ORDER", order.as_ref()),
        ];
        WorkerProcess::start("faults::worker", &env)
    };
    let victim = [0, (run % u64::from(size)) as usize][(run / 4 % 2) as usize];
    let signal = [Signal::KILL, Signal::STOP][(run / 3 % 2) as usize];
    let first = order(0, size, signal);
    let mut workers: Vec<WorkerProcess> = (0..size).map(|_| start(&first)).collect();
    joined(&mut workers);
    let before = harm(run, &mut workers, victim, signal);

    // First the survivors at once, without the victim; then with a fresh process.
    let second = order(1, size - 1, Signal::KILL);
    workers.iter().for_each(|w| w.tell(&second));
    joined(&mut workers);
    let after = harm(run, &mut workers, 0, Signal::KILL);
    assert!(
        after.iter().max() <= before.iter().max(),
        "files leak: {before:?}, {after:?}"
    );
    let third = order(2, size - 1, Signal::KILL);
    workers.iter().for_each(|w| w.tell(&third));
    workers.push(start(&third));
    joined(&mut workers);
    harm(run, &mut workers, 1, Signal::KILL);
}

#[test]
fn survivors_go_on_whoever_dies() {
    let usual = if long() { 100 } else { 6 };
    let runs = std::env::var("COMM_TEST_RUNS").map_or(usual, |runs| runs.parse().unwrap());
    (0..runs).for_each(run);
}
