//! Ranks as processes that are killed or stopped, over TCP and shared memory.
//!
//! The test binary runs itself. Each child is one rank, set by its environment, and prints one line
//! for each event.

#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    reason = "a test, with helpers outside of test functions"
)]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::worker::{WorkerProcess, harm, now};
use paceline_base::Rank;
use paceline_comm::testing::NEVER_SILENT;
use paceline_comm::{Deadline, Error, Group, Reduce, RegisteredMemory, shm, tcp};
use rustix::process::Signal;

fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

/// Starts `size` ranks that have joined one group.
fn start(size: u32, transport: &str, role: &str, silence: Duration) -> Vec<WorkerProcess> {
    let start = |rank: u32| {
        let env = [
            ("COMM_TEST_TRANSPORT", transport),
            ("COMM_TEST_RANK", &rank.to_string()[..]),
            ("COMM_TEST_ROLE", role),
            ("COMM_TEST_SILENCE", &silence.as_millis().to_string()),
        ];
        WorkerProcess::start("deaths::worker", &env)
    };
    let mut workers: Vec<WorkerProcess> = (0..size).map(start).collect();
    let addrs: Vec<String> = workers.iter_mut().map(|w| w.expect("addr")).collect();
    for worker in &mut workers {
        worker.tell(&addrs.join(" "));
    }
    for worker in &mut workers {
        worker.expect("joined");
    }
    workers
}

/// Not a test: the body of a child process.
#[test]
fn worker() {
    let Ok(rank) = std::env::var("COMM_TEST_RANK") else {
        return;
    };
    let rank = Rank(rank.parse().unwrap());
    let silence = std::env::var("COMM_TEST_SILENCE").unwrap();
    let config = tcp::Config {
        silence: Duration::from_millis(silence.parse().unwrap()),
        ..tcp::Config::default()
    };
    let listener = tcp::Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    println!("@addr {}", listener.addr());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let addrs: Vec<SocketAddr> = line
        .split_whitespace()
        .map(|a| a.parse().unwrap())
        .collect();
    let id = tcp::GroupId([7; 16]);
    let by = soon(30);
    let group: Box<dyn Group> = match std::env::var("COMM_TEST_TRANSPORT").as_deref() {
        Ok("shm") => Box::new(shm::join_with(listener, rank, &addrs, id, config, by).unwrap()),
        _ => Box::new(tcp::join_with(listener, rank, &addrs, id, config, by).unwrap()),
    };
    println!("@joined -");
    let next = Rank((rank.0 + 1) % group.size());
    let error = match std::env::var("COMM_TEST_ROLE").as_deref() {
        Ok("reduce") => reduce_forever(&*group, [&mut vec![1.0; 1000], &mut vec![1.0; 300_000]]),
        Ok("memory") => reduce_memory_forever(&*group),
        Ok("idle") => idle(&*group),
        Ok("receive") => group.recv(&mut [0_u8], next, 3, soon(3600)).unwrap_err(),
        role => panic!("no role {role:?}"),
    };
    println!("@error {} {error:?}", now());
}

/// The same in memory of the group, which peers map.
fn reduce_memory_forever(group: &dyn Group) -> Error {
    let mut memory = [1000, 300_000].map(|length| RegisteredMemory::new(Some(group), length));
    assert_eq!(memory[1].is_registered(), cfg!(target_os = "linux"));
    let [small, large] = &mut memory;
    reduce_forever(group, [small, large])
}

/// Sums small and large buffers alternately, with a distant deadline.
fn reduce_forever(group: &dyn Group, mut each: [&mut [f32]; 2]) -> Error {
    loop {
        for data in &mut each {
            data.fill(1.0);
            if let Err(error) = group.all_reduce(data, Reduce::Sum, soon(3600)) {
                return error;
            }
            assert!(data.iter().all(|sum| *sum == group.size() as f32));
        }
    }
}

/// Sleeps in place of a computation, then calls.
fn idle(group: &dyn Group) -> Error {
    thread::sleep(Duration::from_millis(1000));
    loop {
        if let Err(error) = group.barrier(soon(3600)) {
            return error;
        }
    }
}

#[test]
fn killed_ranks_are_named_by_all_at_once_and_leave_nothing() {
    for (size, transport, role, victim) in [
        (2, "tcp", "reduce", 0),
        (4, "tcp", "reduce", 0),
        (4, "tcp", "reduce", 2),
        (3, "tcp", "idle", 0),
        (3, "tcp", "receive", 1),
        (2, "shm", "reduce", 0),
        (4, "shm", "reduce", 0),
        (4, "shm", "reduce", 2),
        (2, "shm", "memory", 0),
        (4, "shm", "memory", 3),
        (3, "shm", "idle", 0),
        (3, "shm", "receive", 1),
    ] {
        let mut workers = start(size, transport, role, NEVER_SILENT);
        harm(&mut workers, victim, Signal::KILL, "PeerLost");
    }
    let named = std::fs::read_dir("/dev/shm")
        .into_iter()
        .flatten()
        .flatten();
    let named: Vec<_> = named.map(|entry| entry.file_name()).collect();
    let ours = |name: &std::ffi::OsString| name.to_string_lossy().contains("paceline");
    assert!(!named.iter().any(ours), "shared memory is left: {named:?}");
}

/// Two in parallel, since most of the time passes waiting for the silence limit.
#[test]
fn stopped_ranks_are_named_by_all_in_time() {
    let stop = |(size, transport, role, victim)| {
        let mut workers = start(size, transport, role, tcp::SILENCE);
        harm(&mut workers, victim, Signal::STOP, "Silent");
    };
    for [one, two] in [
        [(2, "tcp", "reduce", 0), (4, "tcp", "reduce", 3)],
        [(3, "tcp", "idle", 0), (3, "tcp", "receive", 1)],
        [(2, "shm", "reduce", 0), (4, "shm", "reduce", 3)],
        [(2, "shm", "memory", 0), (4, "shm", "memory", 1)],
        [(3, "shm", "idle", 0), (3, "shm", "receive", 1)],
    ] {
        thread::scope(|scope| {
            scope.spawn(move || stop(one));
            stop(two);
        });
    }
}

/// Not a test: a child process with a whole group, which the parent suspends.
#[test]
fn group() {
    if std::env::var_os("COMM_TEST_GROUP").is_none() {
        return;
    }
    let bind = || tcp::Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listeners = [bind(), bind(), bind()];
    let addrs = listeners.each_ref().map(tcp::Listener::addr);
    let over = AtomicBool::new(false);
    let work = |listener, rank| {
        let id = tcp::GroupId([8; 16]);
        let group = tcp::join(listener, rank, &addrs, id, soon(30)).unwrap();
        let (group, mut last): (&dyn Group, _) = (&group, [false]);
        while !last[0] {
            last[0] = over.load(Ordering::Relaxed);
            group.broadcast(&mut last, Rank(0), soon(3600)).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
    };
    thread::scope(|scope| {
        for (rank, listener) in (0..).map(Rank).zip(listeners) {
            scope.spawn(move || work(listener, rank));
        }
        println!("@up -");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        // Long enough to declare ranks lost, if any were.
        thread::sleep(Duration::from_millis(500));
        over.store(true, Ordering::Relaxed);
    });
    println!("@well -");
}

/// A sleeping machine, or one whose cores are taken away, stops all ranks at once. When they
/// resume, none is declared lost for the suspended time.
#[test]
fn ranks_that_are_suspended_together_accuse_nobody() {
    let mut all = WorkerProcess::start("deaths::group", &[("COMM_TEST_GROUP", "1")]);
    all.expect("up");
    thread::sleep(Duration::from_millis(200));
    for _ in 0..2 {
        all.signal(Signal::STOP);
        thread::sleep(tcp::SILENCE + Duration::from_millis(500));
        all.signal(Signal::CONT);
    }
    all.tell("");
    all.expect("well");
}
