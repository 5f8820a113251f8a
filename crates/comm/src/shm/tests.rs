//! Groups of threads for the conformance suite, and of processes that leave nothing behind.
//!
//! For the latter the test binary runs itself. Each child is one rank, set by its environment, and
//! prints one line for each event.

mod registered_memory;
#[path = "../../tests/worker/mod.rs"]
mod worker;

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::testing::{self, NEVER_SILENT, on_threads};
use crate::{Reduce, RegisteredMemory, tcp};
use worker::WorkerProcess;

fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

fn listen() -> Listener {
    Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap()
}

fn make(size: u32) -> testing::Ranks {
    make_with(size, None)
}

/// Forces the algorithm for long sums, regardless of measurements.
#[cfg(target_os = "linux")]
fn make_two_shot(size: u32) -> testing::Ranks {
    make_with(size, Some(crate::Algorithm::TwoShot))
}

fn make_with(size: u32, force: Option<crate::Algorithm>) -> testing::Ranks {
    let config = Config {
        force,
        silence: NEVER_SILENT,
        ..Config::default()
    };
    let listeners: Vec<Listener> = (0..size).map(|_| listen()).collect();
    let addrs: Vec<_> = listeners.iter().map(Listener::addr).collect();
    let id = GroupId::random();
    on_threads((0..).zip(listeners).collect(), move |(rank, listener)| {
        let config = config.clone();
        let group = join_with(listener, Rank(rank), &addrs, id, config, soon(60));
        Box::new(group.unwrap()) as Box<dyn Group>
    })
}

#[test]
fn conforms() {
    testing::run_all(&make, 0x5eed_0004);
}

#[test]
fn conforms_with_all_buffers_in_memory_that_peers_map() {
    let make = |size| registered_memory::of(make(size));
    testing::run_sizes(&make, 0x5eed_0007, &[1, 2, 4]);
}

/// Increments of the copy counts of each of `size` ranks by `call`: bytes in place, bytes copied.
#[cfg(target_os = "linux")]
fn copies_of(size: u32, call: impl Fn(&dyn Group) + Send + Sync + 'static) -> Vec<(u64, u64)> {
    on_threads(make_two_shot(size), move |group| {
        let before = group.copies();
        call(&*group);
        let after = group.copies();
        group.barrier(soon(60)).unwrap();
        (
            after.in_place.0 - before.in_place.0,
            after.staged.0 - before.staged.0,
        )
    })
}

#[cfg(target_os = "linux")]
#[test]
fn memory_of_a_group_is_reduced_where_it_lies() {
    const LENGTH: usize = 300_000;
    fn reduce(group: &dyn Group, data: &mut [f32]) {
        data.fill(group.rank().0 as f32 + 1.0);
        group.all_reduce(data, Reduce::Sum, soon(60)).unwrap();
        let sum = (1..=group.size()).sum::<u32>() as f32;
        assert!(data.iter().all(|value| *value == sum));
    }
    let in_memory = |group: &dyn Group| {
        let mut memory = RegisteredMemory::new(Some(group), LENGTH);
        reduce(group, &mut memory);
        // An unaligned part of it works as well.
        reduce(group, &mut memory[12_345..]);
    };
    for size in [2, 3] {
        for (in_place, staged) in copies_of(size, in_memory) {
            assert!(in_place > 0 && staged == 0, "{size}: {in_place}, {staged}");
        }
    }
    // Each of two ranks also writes its half of the sum back to the other's memory, if that has its
    // pages to itself: nothing else is exchanged.
    let half = (2 * LENGTH) as u64;
    let whole = |group: &dyn Group| reduce(group, &mut RegisteredMemory::new(Some(group), LENGTH));
    assert_eq!(copies_of(2, whole), [(2 * half, 0); 2]);
    let part = |group: &dyn Group| {
        let mut memory = RegisteredMemory::<f32>::new(Some(group), LENGTH + 2);
        reduce(group, &mut memory[1..=LENGTH]);
    };
    assert_eq!(copies_of(2, part), [(4 * half, 0); 2]);
    // One rank has memory of the group, the other has not.
    let mixed = |group: &dyn Group| match group.rank() {
        Rank(0) => reduce(group, &mut RegisteredMemory::new(Some(group), LENGTH)),
        _ => reduce(group, &mut vec![0.0; LENGTH]),
    };
    assert_eq!(copies_of(2, mixed), [(2 * half, half); 2]);
    let by_process = |group: &dyn Group| reduce(group, &mut vec![0.0; LENGTH]);
    assert_eq!(copies_of(2, by_process), [(0, 4 * half); 2]);
}

/// A stopped peer may resume after its memory was reclaimed by the owner. Its later writes must not
/// be visible there.
#[cfg(target_os = "linux")]
#[test]
fn memory_that_a_peer_may_still_write_to_is_taken_back_when_a_sum_fails() {
    use crate::regions::find;
    let mut ranks = make_two_shot(2).into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    let mut memory = RegisteredMemory::<u8>::new(Some(&*first), 100_000);
    memory.fill(7);
    let place = find(&memory).unwrap();
    let soon_over = Deadline::at(Instant::now() + Duration::from_millis(200));
    let error = first
        .all_reduce(&mut memory, Reduce::Sum, soon_over)
        .unwrap_err();
    assert!(
        matches!(error, crate::Error::Timeout { rank: Rank(1), .. }),
        "{error}"
    );
    assert_eq!(find(&memory), None, "known at {place:?} before");
    assert!(memory.iter().all(|byte| *byte == 7));
    let mut late = RegisteredMemory::<u8>::new(Some(&*second), 100_000);
    assert!(second.all_reduce(&mut late, Reduce::Sum, soon(5)).is_err());
    assert!(memory.iter().all(|byte| *byte == 7));
}

/// A group that was split off uses the same memory.
#[cfg(target_os = "linux")]
#[test]
fn parts_of_a_group_map_its_memory_too() {
    for (in_place, staged) in copies_of(3, |group| {
        let part = group.split(group.rank().0 / 2, 0, soon(60)).unwrap();
        let mut memory = RegisteredMemory::<u8>::new(Some(group), 50_000);
        memory.fill(1);
        part.all_reduce(&mut memory, Reduce::Sum, soon(60)).unwrap();
        assert!(memory.iter().all(|sum| u32::from(*sum) == part.size()));
        let copies = part.copies();
        assert_eq!(
            (copies.in_place.0 > 0, copies.staged.0),
            (part.size() > 1, 0)
        );
        part.barrier(soon(60)).unwrap();
    }) {
        assert_eq!(in_place, 0, "the whole group did nothing with it: {staged}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn memory_of_others_is_opened_only_if_it_cannot_be_cut_short() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsRawFd;
    let own = MemoryFile::new(Segment::file_bytes(2)).unwrap();
    assert!(ftruncate(&own.file, 0).is_err(), "it is sealed");
    let told = |name: &str, check: u64| {
        let mut said = [0; NAME_BYTES];
        said[..8].copy_from_slice(&check.to_le_bytes());
        said[16..16 + name.len()].copy_from_slice(name.as_bytes());
        said
    };
    assert!(open(&told(&own.name, 0), 2).is_ok());
    assert!(open(&told(&own.name, 7), 2).is_err(), "another check word");
    assert!(open(&told(&own.name, 0), 3).is_err(), "it is too short");

    let loose = memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&loose, Segment::file_bytes(2)).unwrap();
    let process = std::process::id();
    let of_loose = format!("/proc/{process}/fd/{}", loose.as_raw_fd());
    assert!(open(&told(&of_loose, 0), 2).is_err(), "it is not sealed");
    for name in [
        "",
        "/proc/self/mem",
        "/proc/self/fd/3",
        "/proc/1/fd/../../self/mem",
        "/proc//fd/3",
        "/proc/1/fd/",
        "/dev/zero",
        "/proc/1/fd/3/4",
    ] {
        assert!(!crate::file::is_descriptor(name), "{name}");
        assert!(open(&told(name, 0), 2).is_err(), "{name}");
    }
    // Arbitrary bytes from a peer.
    assert!(open(&[0xff; NAME_BYTES], 2).is_err());
    assert!(open(&[b'/'; NAME_BYTES], 2).is_err());
}

/// Whether the system allows ranks of one process to read each other's memory.
fn can_lend() -> bool {
    let word = 0x5eed_u64;
    let mut found = [0; 8];
    let address = std::ptr::from_ref(&word) as u64;
    process::read(std::process::id(), address, &mut found) && found == word.to_ne_bytes()
}

#[cfg(target_os = "linux")]
#[test]
fn memory_of_a_process_is_read_or_refused() {
    assert!(
        can_lend(),
        "this machine lets no process read its own memory"
    );
    let mut found = [0; 8];
    assert!(
        !process::read(std::process::id(), 8, &mut found),
        "nothing is mapped there"
    );
    assert!(!process::read(0, 8, &mut found), "no such process");
    assert!(!process::read(u32::MAX, 8, &mut found), "no such process");
}

/// Long unaligned payloads are transferred, and a rank that gives up revokes its transfer.
#[cfg(target_os = "linux")]
#[test]
fn a_loan_that_was_taken_back_is_an_error_for_both() {
    let mut ranks = make(2).into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    let bytes = 3 * crate::single_copy::LOAN_BYTES + 5;
    let hasty = thread::spawn(move || {
        let soon = Deadline::at(Instant::now() + Duration::from_millis(200));
        first.broadcast(&mut vec![7_u8; bytes], Rank(0), soon)
    });
    thread::sleep(Duration::from_millis(10));
    assert!(hasty.join().unwrap().is_err());
    let mut data = vec![0_u8; bytes];
    assert!(second.broadcast(&mut data, Rank(0), soon(5)).is_err());
}

/// A second process of an existing rank: both sides learn the reason, and the group continues.
#[test]
fn a_late_twin_is_told_why_and_so_is_the_group() {
    for late in [Rank(0), Rank(1)] {
        let (listeners, id) = ([listen(), listen()], GroupId::random());
        let addrs = listeners.each_ref().map(Listener::addr);
        let ranks = on_threads((0..).zip(listeners).collect(), move |(rank, listener)| {
            join(listener, Rank(rank), &addrs, id, soon(60)).unwrap()
        });
        let error = join(listen(), late, &addrs, id, soon(60)).unwrap_err();
        let duplicate = tcp::Refusal::Duplicate(late);
        let why = match error {
            JoinError::Refused { why, .. } => Some(why),
            _ => None,
        };
        assert_eq!(why, Some(duplicate), "{error}");
        let until = Instant::now() + Duration::from_secs(60);
        while ranks.iter().all(|rank| rank.turned_away().is_none()) {
            assert!(Instant::now() < until, "nobody turned the twin away");
            thread::sleep(Duration::from_millis(5));
        }
        let told: Vec<_> = ranks.iter().filter_map(Shm::turned_away).collect();
        assert!(told.iter().all(|why| *why == duplicate), "{told:?}");
        let calls = on_threads(ranks, |rank| (&rank as &dyn Group).barrier(soon(60)));
        assert!(calls.iter().all(Result::is_ok), "{calls:?}");
    }
}

#[test]
fn a_rank_that_leaves_when_it_has_all_is_not_missed() {
    for round in 0..60 {
        let all = on_threads(make(3), |group| {
            let mut data = vec![1_u8; 3 * crate::single_copy::LOAN_BYTES];
            let done = group.all_reduce(&mut data, Reduce::Sum, soon(60));
            drop(group);
            done.map(|()| data)
        });
        for data in all {
            assert!(data.unwrap().iter().all(|sum| *sum == 3), "round {round}");
        }
    }
}

/// Not a test: the body of a child process, which makes calls and leaves.
#[test]
fn worker() {
    let Ok(rank) = std::env::var("COMM_SHM_RANK") else {
        return;
    };
    let held = ProcessResources::count();
    let listener = listen();
    println!("@addr {}", listener.addr());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let addrs = line.split_whitespace().map(|addr| addr.parse().unwrap());
    let addrs: Vec<SocketAddr> = addrs.collect();
    let config = Config {
        silence: NEVER_SILENT,
        ..Config::default()
    };
    let rank = Rank(rank.parse().unwrap());
    let id = GroupId([7; 16]);
    let group = join_with(listener, rank, &addrs, id, config, soon(60)).unwrap();
    testing::run_rank(&group, 0x5eed_0005, 250).unwrap();
    map_and_forget(&group);
    (&group as &dyn Group).barrier(soon(60)).unwrap();
    drop(group);
    println!("@left {}", ProcessResources::count() == held);
}

#[derive(Debug, PartialEq, Eq)]
struct ProcessResources {
    descriptors: usize,
    segments: usize,
}

impl ProcessResources {
    fn count() -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Self {
            descriptors: std::fs::read_dir("/dev/fd").unwrap().count(),
            segments: maps.matches("memfd:paceline").count(),
        }
    }
}

/// Sums in memory that peers map; when it is dropped, they unmap it too.
fn map_and_forget(group: &dyn Group) {
    let before = ProcessResources::count();
    let mut memory = RegisteredMemory::<f32>::new(Some(group), 100_000);
    memory.fill(1.0);
    group
        .all_reduce(&mut memory, Reduce::Sum, soon(60))
        .unwrap();
    assert!(memory.iter().all(|sum| *sum == group.size() as f32));
    drop(memory);
    group.barrier(soon(60)).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while ProcessResources::count() != before {
        assert!(
            Instant::now() < until,
            "{:?}, {before:?}",
            ProcessResources::count()
        );
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn processes_compute_the_same_and_leave_nothing() {
    for size in [2, 4] {
        let start = |rank: u32| {
            let rank = ("COMM_SHM_RANK", rank.to_string());
            WorkerProcess::start("shm::tests::worker", &[rank])
        };
        let mut workers: Vec<WorkerProcess> = (0..size).map(start).collect();
        let addrs: Vec<String> = workers.iter_mut().map(|w| w.expect("addr")).collect();
        for worker in &workers {
            worker.tell(&addrs.join(" "));
        }
        for mut worker in workers {
            assert_eq!(worker.expect("left"), "true", "{size} ranks");
        }
    }
}
