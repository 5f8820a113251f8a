//! RDMA through a loaded library: the software as `libibverbs.so.1`, and a real device if one is
//! named.
//!
//! `cargo xtask rdma` runs this in a virtual machine that has a device. It sets two variables:
//! - `COMM_TEST_RDMA_DEVICE` names the device;
//! - `COMM_TEST_RDMA_GROUP` (with rank, and the addresses of both) makes this process one of two
//!   ranks.

#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    reason = "a test, with helpers outside of test functions"
)]

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::testing::{self, on_threads};
use paceline_comm::{Deadline, Group, Reduce, RegisteredMemory, tcp};

use super::library;
use crate::{Cabling, Matrix, Rdma, RdmaError, Verbs, join};

fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

fn listen() -> tcp::Listener {
    tcp::Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap()
}

/// A group of threads, rank r on device r of `devices`.
fn groups(verbs: &Verbs, devices: &[String]) -> Vec<Rdma> {
    let matrix = Matrix::switched(devices);
    let listeners: Vec<_> = devices.iter().map(|_| listen()).collect();
    let addrs: Vec<_> = listeners.iter().map(tcp::Listener::addr).collect();
    let id = tcp::GroupId::random();
    // One cabling for the process, as a device is opened once.
    let cabling = Cabling::new(verbs.clone(), matrix);
    on_threads((0..).zip(listeners).collect(), move |(rank, listener)| {
        join(&cabling, listener, Rank(rank), &addrs, id, soon(60)).unwrap()
    })
}

/// Runs some calls of every kind on all ranks, and checks them.
fn exercise(groups: Vec<Rdma>, calls: u64) {
    on_threads(groups, move |group| {
        testing::run_rank(&group, 0x5eed_000b, calls).unwrap();
        let mut own = group.allocate(1 << 20).unwrap();
        own.fill(1);
        let size = u8::try_from(group.size()).unwrap();
        let group: &dyn Group = &group;
        group
            .all_reduce(&mut own[..], Reduce::Sum, soon(60))
            .unwrap();
        assert!(own.iter().all(|sum| *sum == size));
        in_place(group);
        group.barrier(soon(60)).unwrap();
    });
}

/// Runs and checks gathers and messages of registered memory; prints the copied bytes.
fn in_place(group: &dyn Group) {
    const PART: usize = 300_001;
    let (rank, size) = (group.rank().0 as usize, group.size() as usize);
    let value = |rank: usize, i: usize| (i * 7 + rank * 31) as u8;
    let mut memory = RegisteredMemory::<u8>::new(Some(group), size * PART);
    let counts = vec![PART; size];
    let next = Rank(((rank + 1) % size) as u32);
    let before = Rank(((rank + size - 1) % size) as u32);
    let old = group.copies();
    for round in 0..10 {
        let own = memory[rank * PART..(rank + 1) * PART].iter_mut();
        own.enumerate()
            .for_each(|(i, byte)| *byte = value(rank + round, i));
        group
            .all_gather_in_place(&mut memory, &counts, soon(60))
            .unwrap();
        for (rank, part) in memory.chunks(PART).enumerate() {
            let wrong = part
                .iter()
                .enumerate()
                .find(|(i, b)| **b != value(rank + round, *i));
            assert_eq!(wrong, None, "round {round}, part {rank}");
        }
        if size > 1 {
            let part = &memory[rank * PART..(rank + 1) * PART];
            group.send(part, next, 3, soon(60)).unwrap();
            let into = &mut memory[..PART];
            group.recv(into, before, 3, soon(60)).unwrap();
            let from = before.0 as usize + round;
            assert!(into.iter().enumerate().all(|(i, b)| *b == value(from, i)));
        }
    }
    let new = group.copies();
    let (in_place, staged) = (new.in_place.0 - old.in_place.0, new.staged.0 - old.staged.0);
    println!("@in_place rank {rank}: {in_place} bytes in place, {staged} staged");
    assert!(in_place > 0 || size == 1);
}

#[test]
fn a_library_is_loaded_by_path_and_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let Some(library) = library::build(folder.path()) else {
        println!("SKIPPED a_library_is_loaded_by_path_and_by_name: no rustc");
        return;
    };
    let verbs = Verbs::load_from(library.to_str().unwrap()).unwrap();
    let devices = verbs.devices().unwrap();
    assert_eq!(devices.len(), 8);
    assert_eq!(devices[7], "soft7");
    exercise(groups(&verbs, &devices[..3]), 60);

    // By its own name, as a program finds it.
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["tests::shared_library::worker", "--exact", "--nocapture"])
        .env("COMM_TEST_RDMA_ROLE", "load")
        .env("LD_LIBRARY_PATH", folder.path())
        .env("DYLD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && text.contains("@exercised 8"),
        "{text}"
    );
}

#[test]
fn other_libraries_are_refused() {
    let error = Verbs::load_from("no-such-library.so.1").unwrap_err();
    assert!(matches!(error, RdmaError::Library { .. }), "{error}");
    if cfg!(target_os = "linux") {
        let error = Verbs::load_from("libc.so.6").unwrap_err();
        assert_eq!(
            error.to_string(),
            "libc.so.6 has no function ibv_get_device_list"
        );
    }
}

/// Not a test: the body of a child process.
#[test]
fn worker() {
    match std::env::var("COMM_TEST_RDMA_ROLE").as_deref() {
        Ok("load") => {
            let verbs = Verbs::load().unwrap();
            let devices = verbs.devices().unwrap();
            exercise(groups(&verbs, &devices[..2]), 20);
            println!("@exercised {}", devices.len());
        }
        Ok(role) => panic!("no role {role}"),
        Err(_) => {}
    }
}

/// The named device; reports a skipped test if there is none.
fn device(test: &str) -> Option<String> {
    let device = std::env::var("COMM_TEST_RDMA_DEVICE").ok();
    if device.is_none() {
        println!("SKIPPED {test}: no RDMA device is named; `cargo xtask rdma` makes one");
    }
    device
}

/// The conformance suite, for groups of one and two threads on one device.
#[test]
fn a_device_conforms() {
    let Some(device) = device("a_device_conforms") else {
        return;
    };
    let verbs = Verbs::load().unwrap();
    let make = |size: u32| -> testing::Ranks {
        let devices = vec![device.clone(); size as usize];
        let boxed = |group| Box::new(group) as Box<dyn Group>;
        groups(&verbs, &devices).into_iter().map(boxed).collect()
    };
    testing::run_sizes(&make, 0x5eed_000c, &[1, 2]);
}

/// A process that is one of two ranks: checks results for every size, and times them.
#[test]
fn a_device_carries_every_size() {
    let Some(device) = device("a_device_carries_every_size") else {
        return;
    };
    let Ok(group) = std::env::var("COMM_TEST_RDMA_GROUP") else {
        println!("SKIPPED a_device_carries_every_size: this process is no rank");
        return;
    };
    let words: Vec<&str> = group.split(' ').collect();
    let rank: u32 = words[0].parse().unwrap();
    let addrs: Vec<SocketAddr> = words[1..]
        .iter()
        .map(|addr| addr.parse().unwrap())
        .collect();
    let listener = tcp::Listener::bind(addrs[rank as usize]).unwrap();
    let matrix = Matrix::switched(&vec![device; addrs.len()]);
    let cabling = Cabling::new(Verbs::load().unwrap(), matrix);
    let id = tcp::GroupId([9; 16]);
    let group = join(&cabling, listener, Rank(rank), &addrs, id, soon(60)).unwrap();
    testing::run_rank(&group, 0x5eed_000d, 100).unwrap();
    for bytes in (2..=20).step_by(2).map(|bit| 1_usize << bit) {
        time(&group, bytes);
    }
    in_place(&group);
    (&group as &dyn Group).barrier(soon(60)).unwrap();
}

/// Runs sums of `bytes` bytes, each checked; rank 0 prints the median.
fn time(group: &Rdma, bytes: usize) {
    let (length, rounds) = (bytes / 4, 15);
    let value = |rank: u32, i: usize| (i % 1000) as f32 + rank as f32;
    let mut times = Vec::new();
    let own = group.rank().0;
    for _ in 0..rounds {
        let mut data: Vec<f32> = (0..length).map(|i| value(own, i)).collect();
        let start = Instant::now();
        (group as &dyn Group)
            .all_reduce(&mut data, Reduce::Sum, soon(60))
            .unwrap();
        times.push(start.elapsed());
        for (i, sum) in data.iter().enumerate() {
            assert_eq!(*sum, value(0, i) + value(1, i));
        }
    }
    times.sort_unstable();
    if own == 0 {
        let us = times[rounds / 2].as_secs_f64() * 1e6;
        println!("@all_sum {bytes} bytes {us:.0} us");
    }
}
