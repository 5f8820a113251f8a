//! Ranks as threads with sockets between them; `tests/tcp.rs` has ranks as processes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::Bytes;

use super::*;
use crate::testing;

fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

fn listeners(size: u32) -> (Vec<Listener>, Vec<SocketAddr>) {
    let bind = |_| Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listeners: Vec<Listener> = (0..size).map(bind).collect();
    let addrs = listeners.iter().map(Listener::addr).collect();
    (listeners, addrs)
}

/// Joins all ranks, each on a thread of its own.
fn join_all(size: u32) -> Vec<Tcp> {
    let (listeners, addrs) = listeners(size);
    let id = GroupId::random();
    let threads: Vec<_> = (0..)
        .zip(listeners)
        .map(|(rank, listener)| {
            let addrs = addrs.clone();
            thread::spawn(move || join(listener, Rank(rank), &addrs, id, soon(30)).unwrap())
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

fn make(size: u32) -> testing::Ranks {
    let ranks = join_all(size).into_iter();
    ranks.map(|rank| Box::new(rank) as Box<dyn Group>).collect()
}

#[test]
fn conforms() {
    testing::run_all(&make, 0x5eed_0002);
}

/// Lets two ranks with these settings join and returns what came of it.
fn join_two(
    change: impl Fn(u32, &mut Vec<SocketAddr>, &mut GroupId),
) -> [Result<Tcp, JoinError>; 2] {
    let (listeners, addrs) = listeners(2);
    let id = GroupId::random();
    let threads: Vec<_> = (0..)
        .zip(listeners)
        .map(|(rank, listener)| {
            let (mut addrs, mut id) = (addrs.clone(), id);
            change(rank, &mut addrs, &mut id);
            let deadline = Deadline::at(Instant::now() + Duration::from_millis(500));
            thread::spawn(move || join(listener, Rank(rank), &addrs, id, deadline))
        })
        .collect();
    let mut results = threads.into_iter().map(|t| t.join().unwrap());
    std::array::from_fn(|_| results.next().unwrap())
}

#[test]
fn ranks_that_do_not_fit_and_their_peers_are_told_why() {
    let [zero, one] = join_two(|rank, addrs, _| {
        if rank == 1 {
            addrs.push(addrs[0]);
        }
    });
    let why = Refusal::Size { ours: 2, theirs: 3 };
    assert!(
        matches!(zero, Err(JoinError::Unfit { why: w }) if w == why),
        "{zero:?}"
    );
    assert!(
        matches!(one, Err(JoinError::Refused { by: Rank(0), why: w }) if w == why),
        "{one:?}"
    );
    let [zero, one] = join_two(|rank, _, id| id.0[3] ^= u8::try_from(rank).unwrap());
    assert!(
        matches!(
            zero,
            Err(JoinError::Missing {
                rank: Rank(1),
                turned_away: Some(Refusal::Group)
            })
        ),
        "{zero:?}"
    );
    assert!(
        matches!(
            one,
            Err(JoinError::Refused {
                by: Rank(0),
                why: Refusal::Group
            })
        ),
        "{one:?}"
    );
}

#[test]
fn a_second_process_of_a_rank_is_refused_and_all_are_told() {
    let (mut listeners, addrs) = listeners(3);
    let (id, twin) = (
        GroupId::random(),
        Listener::bind("127.0.0.1:0".parse().unwrap()),
    );
    let join = |rank, listener: Listener| {
        let addrs = addrs.clone();
        thread::spawn(move || join(listener, Rank(rank), &addrs, id, soon(10)))
    };
    let first = [
        join(0, listeners.remove(0)),
        join(1, listeners.remove(0)),
        join(1, twin.unwrap()),
    ];
    let results = first.map(|thread| thread.join().unwrap().unwrap_err());
    let duplicate = Refusal::Duplicate(Rank(1));
    assert!(
        matches!(results[0], JoinError::Unfit { why } if why == duplicate),
        "{:?}",
        results[0]
    );
    let refused =
        |e: &&JoinError| matches!(e, JoinError::Refused { by: Rank(0), why } if *why == duplicate);
    let told =
        |e: &&JoinError| matches!(e, JoinError::GaveUp { by: Rank(0), why } if *why == duplicate);
    let lost = |e: &&JoinError| matches!(e, JoinError::Lost { rank: Rank(0) });
    let twins = &results[1..];
    assert_eq!(twins.iter().filter(refused).count(), 1, "{twins:?}");
    assert_eq!(
        twins.iter().filter(|e| told(e) || lost(e)).count(),
        1,
        "{twins:?}"
    );
}

#[test]
fn another_version_is_refused_by_name() {
    let (mut listeners, addrs) = listeners(2);
    let id = GroupId::random();
    let peer = addrs[0];
    let listener = listeners.remove(0);
    let zero = thread::spawn(move || join(listener, Rank(0), &addrs, id, soon(10)));
    let mut stream = TcpStream::connect(peer).unwrap();
    let mut hello = [0_u8; 48];
    hello[..8].copy_from_slice(b"paceline");
    hello[8] = 77;
    hello[24..40].copy_from_slice(&id.0);
    stream.write_all(&hello).unwrap();
    let mut reply = [0_u8; 24];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!((&reply[..8], reply[8], reply[10]), (&b"paceline"[..], 1, 1));
    let why = Refusal::Version {
        ours: 1,
        theirs: 77,
    };
    let error = zero.join().unwrap().unwrap_err();
    assert!(
        matches!(error, JoinError::Unfit { why: w } if w == why),
        "{error}"
    );
}

#[test]
fn strangers_neither_end_nor_starve_a_join() {
    let (listeners, addrs) = listeners(3);
    let id = GroupId::random();
    let stop = Arc::new(AtomicBool::new(false));
    let flood = |seed: u64| {
        let (addrs, stop) = (addrs.clone(), Arc::clone(&stop));
        thread::spawn(move || {
            let (mut random, mut silent) = (seed, Vec::new());
            let mut connections = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let bytes: Vec<u8> = (0..random % 300)
                    .map(|i| (random >> (i % 57)).to_le_bytes()[0])
                    .collect();
                let peer = addrs[(random >> 33) as usize % addrs.len()];
                if let Ok(mut stream) = TcpStream::connect(peer) {
                    connections += 1;
                    let _ = stream.write_all(&bytes);
                    if silent.len() < 100 {
                        silent.push(stream);
                    }
                }
            }
            connections
        })
    };
    let floods = [flood(1), flood(2)];
    thread::sleep(Duration::from_millis(100));
    let started = Instant::now();
    let threads: Vec<_> = (0..)
        .zip(listeners)
        .map(|(rank, listener)| {
            let addrs = addrs.clone();
            thread::spawn(move || {
                let group = join(listener, Rank(rank), &addrs, id, soon(30)).unwrap();
                for _ in 0..100 {
                    (&group as &dyn Group).barrier(soon(30)).unwrap();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    stop.store(true, Ordering::Relaxed);
    let connections: u32 = floods.into_iter().map(|f| f.join().unwrap()).sum();
    assert!(connections > 0, "nobody flooded");
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "{:?}",
        started.elapsed()
    );
}

#[test]
fn traffic_counts_payload_and_frames() {
    let threads = join_all(2).into_iter().map(|group| {
        thread::spawn(move || {
            let mut output = [0_u8; 2000];
            let group: &dyn Group = &group;
            group
                .all_gather(&[7_u8; 1000], &mut output, soon(10))
                .unwrap();
            group.traffic()
        })
    });
    for thread in threads.collect::<Vec<_>>() {
        let traffic = thread.join().unwrap();
        assert_eq!(traffic.sent, Bytes(1052));
        assert_eq!(traffic.received, Bytes(1052));
    }
}
