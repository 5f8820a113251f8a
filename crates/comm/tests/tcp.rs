//! Ranks as processes: killed, stopped, cut off.
//!
//! The test binary runs itself: a child is one rank, told by its environment which, and prints a
//! line for each thing that happens to it.

#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    reason = "a test, with helpers outside of test functions"
)]

mod worker;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::{Deadline, Error, Group, Reduce, tcp};
use worker::Worker;

/// What DESIGN.md asks for.
const DEATH_SECONDS: f64 = 2.0;

fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

/// Starts `size` ranks that have joined one group.
fn start(size: u32, role: &str) -> Vec<Worker> {
    let start = |rank: u32| {
        let env = [
            ("COMM_TEST_RANK", &rank.to_string()[..]),
            ("COMM_TEST_ROLE", role),
        ];
        Worker::start("worker", &env)
    };
    let mut workers: Vec<Worker> = (0..size).map(start).collect();
    let addrs: Vec<String> = workers.iter_mut().map(|w| w.expect("addr")).collect();
    for worker in &mut workers {
        worker.tell(&addrs.join(" "));
    }
    for worker in &mut workers {
        worker.expect("joined");
    }
    workers
}

/// Not a test: what a child process does.
#[test]
fn worker() {
    let Ok(rank) = std::env::var("COMM_TEST_RANK") else {
        return;
    };
    let rank = Rank(rank.parse().unwrap());
    let listener = tcp::Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    println!("@addr {}", listener.addr());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let addrs: Vec<SocketAddr> = line
        .split_whitespace()
        .map(|a| a.parse().unwrap())
        .collect();
    let group = tcp::join(listener, rank, &addrs, tcp::GroupId([7; 16]), soon(30)).unwrap();
    println!("@joined -");
    let role = std::env::var("COMM_TEST_ROLE").unwrap();
    let error = match role.as_str() {
        "reduce" => reduce_forever(&group),
        "idle" => idle(&group),
        "receive" => (&group as &dyn Group)
            .recv(
                &mut [0_u8],
                Rank((rank.0 + 1) % group.size()),
                3,
                soon(3600),
            )
            .unwrap_err(),
        role => panic!("no role {role}"),
    };
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    println!("@error {} {error:?}", since_epoch.unwrap().as_secs_f64());
}

/// Adds up small and large buffers in turn, with a deadline that is far away.
fn reduce_forever(group: &dyn Group) -> Error {
    let (mut small, mut large) = (vec![1.0_f32; 1000], vec![1.0_f32; 300_000]);
    loop {
        small.fill(1.0);
        large.fill(1.0);
        for data in [&mut small, &mut large] {
            if let Err(error) = group.all_reduce(data, Reduce::Sum, soon(3600)) {
                return error;
            }
            assert!(data.iter().all(|sum| *sum == group.size() as f32));
        }
    }
}

/// Computes for a while, so to speak, then calls.
fn idle(group: &dyn Group) -> Error {
    std::thread::sleep(Duration::from_millis(1000));
    loop {
        if let Err(error) = group.barrier(soon(3600)) {
            return error;
        }
    }
}

fn now() -> f64 {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since_epoch.unwrap().as_secs_f64()
}

/// Does `harm` to one rank; all others must name it in time.
fn check(size: u32, role: &str, victim: u32, signal: &str, variant: &str) {
    let mut workers = start(size, role);
    std::thread::sleep(Duration::from_millis(50));
    let harmed = now();
    workers[victim as usize].signal(signal);
    for (rank, worker) in (0..).zip(&mut workers) {
        if rank != victim {
            let report = worker.expect("error");
            let (when, error) = report.split_once(' ').unwrap();
            let took = when.parse::<f64>().unwrap() - harmed;
            assert!(error.starts_with(variant), "rank {rank}: {error}");
            assert!(
                error.contains(&format!("rank: Rank({victim})")),
                "rank {rank}: {error}"
            );
            assert!(took < DEATH_SECONDS, "rank {rank} knew after {took:.2} s");
        }
    }
}

#[test]
fn killed_ranks_are_named_by_all_at_once() {
    for (size, role, victim) in [(2, "reduce", 0), (4, "reduce", 0), (4, "reduce", 2)] {
        check(size, role, victim, "-KILL", "PeerLost");
    }
    check(3, "idle", 0, "-KILL", "PeerLost");
    check(3, "receive", 1, "-KILL", "PeerLost");
}

/// Two side by side, since most of the time is the silence that is waited for.
#[test]
fn stopped_ranks_are_named_by_all_in_time() {
    for pair in [
        [(2, "reduce", 0), (4, "reduce", 3)],
        [(3, "idle", 0), (3, "receive", 1)],
    ] {
        std::thread::scope(|scope| {
            for (size, role, victim) in pair {
                scope.spawn(move || check(size, role, victim, "-STOP", "Silent"));
            }
        });
    }
}
