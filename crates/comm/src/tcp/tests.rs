//! Ranks as threads with sockets between them; `tests/tcp.rs` has ranks as processes.

use std::io::{Read, Write};
use std::mem::discriminant;
use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroU8;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::Bytes;
use paceline_base::testing::Stopwatch;

use super::*;
use crate::Reduce;
use crate::testing::{self, on_threads};

/// Distant deadline, in seconds, for events that occur long before it.
const FAR: u64 = 90;

fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

fn listeners(size: u32) -> (Vec<Listener>, Vec<SocketAddr>) {
    let bind = |_| Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listeners: Vec<Listener> = (0..size).map(bind).collect();
    let addrs = listeners.iter().map(Listener::addr).collect();
    (listeners, addrs)
}

fn never_silent() -> Config {
    Config {
        silence: testing::NEVER_SILENT,
        ..Config::default()
    }
}

/// Joins all ranks, each on its own thread.
fn join_all(size: u32) -> Vec<Tcp> {
    let (listeners, addrs) = listeners(size);
    let id = GroupId::random();
    on_threads((0..).zip(listeners).collect(), move |(rank, listener)| {
        join_with(listener, Rank(rank), &addrs, id, never_silent(), soon(FAR)).unwrap()
    })
}

fn make(size: u32) -> testing::Ranks {
    let ranks = join_all(size).into_iter();
    ranks.map(|rank| Box::new(rank) as Box<dyn Group>).collect()
}

#[test]
fn conforms() {
    testing::run_all(&make, 0x5eed_0002);
}

/// The parameters that a rank joins with.
struct GroupFacts {
    addrs: Vec<SocketAddr>,
    id: GroupId,
    config: Config,
}

/// Joins ranks with these settings; returns each outcome and when it came.
fn join_each(
    size: u32,
    change: impl Fn(u32, &mut GroupFacts),
) -> Vec<(Result<Tcp, JoinError>, Duration)> {
    join_late(size, |_| Duration::ZERO, change)
}

/// As [`join_each`]; ranks listen at once but join after a delay.
fn join_late(
    size: u32,
    late: impl Fn(u32) -> Duration,
    change: impl Fn(u32, &mut GroupFacts),
) -> Vec<(Result<Tcp, JoinError>, Duration)> {
    let (listeners, addrs) = listeners(size);
    let id = GroupId::random();
    let start = Stopwatch::start();
    let seats = (0..).zip(listeners).map(|(rank, listener)| {
        let (addrs, config) = (addrs.clone(), never_silent());
        let mut told = GroupFacts { addrs, id, config };
        change(rank, &mut told);
        (rank, listener, told, late(rank))
    });
    on_threads(seats.collect(), move |(rank, listener, told, late)| {
        thread::sleep(late);
        let GroupFacts { addrs, id, config } = told;
        let result = join_with(listener, Rank(rank), &addrs, id, config, soon(20));
        (result, start.elapsed())
    })
}

fn key(byte: u8) -> Protection {
    Protection::Key(GroupKey::new([byte; KEY_BYTES]))
}

/// A rank differs from the others in `change`: rank 0 and that rank learn the reason at once.
fn check_misfit(odd: u32, change: fn(&mut GroupFacts), expected: Refusal) {
    for size in [2, 3] {
        let results = join_each(size, |rank, told| {
            if rank == odd % size {
                change(told);
            }
        });
        for (rank, (result, took)) in (0..size).zip(&results) {
            let error = result.as_ref().expect_err("one does not fit");
            let told = match error {
                JoinError::Unfit { why, .. } => *why,
                JoinError::Refused { why, .. } | JoinError::GaveUp { why, .. } => *why,
                error => panic!("rank {rank} of {size}: {error}"),
            };
            assert_eq!(
                discriminant(&told),
                discriminant(&expected),
                "rank {rank} of {size}: {error}"
            );
            assert!(
                *took < Duration::from_secs(2),
                "rank {rank} of {size}: {took:?}"
            );
        }
        // With more ranks, another may have been faster, and reports its own view.
        let zero = &results[0].0;
        assert!(
            size > 2 || matches!(zero, Err(JoinError::Unfit { why, .. }) if *why == expected),
            "{zero:?}"
        );
    }
}

#[test]
fn ranks_that_do_not_fit_and_their_peers_are_told_why_at_once() {
    let size = |theirs| Refusal::Size {
        ours: theirs - 1,
        theirs,
    };
    let results = join_each(2, |rank, told| {
        if rank == 1 {
            told.addrs.push(told.addrs[0]);
        }
    });
    assert!(matches!(&results[0].0, Err(JoinError::Unfit { why, .. }) if *why == size(3)));
    let one = &results[1].0;
    assert!(matches!(one, Err(JoinError::Refused { by: Rank(0), why }) if *why == size(3)));
    for (_, took) in &results {
        assert!(*took < Duration::from_secs(1), "{took:?}");
    }
    check_misfit(1, |told| told.id.0[3] ^= 1, Refusal::Group);
    let streams = Refusal::Streams { ours: 1, theirs: 2 };
    let two: fn(&mut GroupFacts) = |told| told.config.streams = NonZeroU8::new(2).unwrap();
    check_misfit(1, two, streams);
}

#[test]
fn a_wrong_or_missing_key_is_named_on_all_sides_at_once() {
    let all = |own: fn(u32) -> Protection| {
        move |rank: u32, told: &mut GroupFacts| told.config.protection = own(rank)
    };
    type Case = (fn(u32) -> Protection, Refusal);
    let cases: [Case; 4] = [
        (|rank| key(u8::from(rank == 1)), Refusal::Key),
        (|rank| key(u8::from(rank == 0)), Refusal::Key),
        (
            |rank| {
                if rank == 1 {
                    Protection::Loopback
                } else {
                    key(0)
                }
            },
            Refusal::NoKey,
        ),
        (
            |rank| {
                if rank == 1 {
                    key(0)
                } else {
                    Protection::Plaintext
                }
            },
            Refusal::UnknownKey,
        ),
    ];
    for (own, why) in cases {
        for size in [2, 3] {
            for (rank, (result, took)) in (0..).zip(join_each(size, all(own))) {
                let error = result.expect_err("the keys differ");
                let told = match error {
                    JoinError::Unfit { why, .. } => Some(why),
                    JoinError::Refused { why, .. } | JoinError::GaveUp { why, .. } => Some(why),
                    _ => None,
                };
                // The rank without a key reports that the third has one, and vice versa.
                let mirror = [Refusal::NoKey, Refusal::UnknownKey];
                let named = told == Some(why)
                    || size == 3
                        && mirror.contains(&why)
                        && told.is_some_and(|t| mirror.contains(&t));
                assert!(named, "rank {rank} of {size}: {error}, expected {why}");
                assert!(
                    took < Duration::from_secs(1),
                    "rank {rank} of {size}: {took:?}"
                );
            }
        }
    }
}

/// Rank 1 learns of rank 2's mismatch before it has dialled rank 0, and gives up. Rank 2 gives up
/// before rank 0 is there to link. One of them must notify rank 0.
#[test]
fn who_gives_up_before_it_called_a_member_still_tells_it() {
    let ways: [fn(u32) -> Protection; 2] = [
        |rank| key(u8::from(rank == 1)),
        |rank| match rank {
            1 => Protection::Loopback,
            _ => key(0),
        },
    ];
    for own in ways {
        let late = |rank| Duration::from_millis([300, 100, 0][rank as usize]);
        let joined = join_late(3, late, |rank, told| told.config.protection = own(rank));
        for (rank, (result, took)) in (0..).zip(joined) {
            let error = result.expect_err("the keys differ");
            let hung = matches!(error, JoinError::Missing { .. });
            let bound = late(rank) + Duration::from_secs(1);
            assert!(!hung && took < bound, "rank {rank}: {error} after {took:?}");
        }
    }
}

#[test]
fn without_a_key_only_loopback_is_joined() {
    let listener = || Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let far: SocketAddr = "192.0.2.1:1".parse().unwrap();
    let own = listener();
    let addrs = [own.addr(), far];
    let error = join(own, Rank(0), &addrs, GroupId::random(), soon(5)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "192.0.2.1:1 is not loopback: expected a group key, or plaintext asked for by name"
    );
    let open = Listener::bind("0.0.0.0:0".parse().unwrap()).unwrap();
    let addrs = [SocketAddr::from(([127, 0, 0, 1], open.addr().port()))];
    let error = join(open, Rank(0), &addrs, GroupId::random(), soon(5)).unwrap_err();
    assert!(matches!(error, JoinError::Unprotected { addr } if addr.ip().is_unspecified()));
}

/// Forwards connections to `to` and records the bytes of both directions.
fn relay(to: SocketAddr, seen: &Arc<Mutex<Vec<u8>>>) -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (addr, seen) = (listener.local_addr().unwrap(), Arc::clone(seen));
    thread::spawn(move || {
        for from in listener.incoming() {
            let (from, to) = (from.unwrap(), TcpStream::connect(to).unwrap());
            let back = (to.try_clone().unwrap(), from.try_clone().unwrap());
            for (mut from, mut to) in [(from, to), back] {
                let seen = Arc::clone(&seen);
                thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        seen.lock().unwrap().extend_from_slice(&bytes[..count]);
                        let _ = to.write_all(&bytes[..count]);
                    }
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    addr
}

/// Two ranks communicate; returns the bytes recorded on the connections to rank 0.
fn overheard(protection: &Protection) -> Vec<u8> {
    let (listeners, mut addrs) = listeners(2);
    let seen = Arc::default();
    // So rank 0 finds that the list points elsewhere, dials that address, and reaches itself.
    addrs[0] = relay(addrs[0], &seen);
    let id = GroupId::random();
    let config = Config {
        protection: protection.clone(),
        ..Config::default()
    };
    on_threads((0..).zip(listeners).collect(), move |(rank, listener)| {
        let config = config.clone();
        let group = join_with(listener, Rank(rank), &addrs, id, config, soon(FAR)).unwrap();
        let (group, peer): (&dyn Group, _) = (&group, Rank(1 - rank));
        group.send(b"a secret message", peer, 0, soon(FAR)).unwrap();
        let got = group.recv_like(b"................", peer, 0, soon(FAR));
        assert_eq!(&got.unwrap(), b"a secret message");
        let mut all = [0; 26];
        let gathered = group.all_gather(b"a secret call", &mut all, soon(FAR));
        gathered.unwrap();
        assert_eq!(&all, b"a secret calla secret call");
        group.barrier(soon(FAR)).unwrap();
    });
    Arc::clone(&seen).lock().unwrap().clone()
}

#[test]
fn with_a_key_nothing_is_in_the_clear() {
    for (protection, clear) in [(Protection::Loopback, true), (key(5), false)] {
        let heard = overheard(&protection);
        for text in ["a secret message", "a secret call", "PLc1", "PLk1"] {
            let found = heard
                .windows(text.len())
                .any(|part| part == text.as_bytes());
            assert_eq!(found, clear, "{protection:?}: {text:?}");
        }
    }
}

#[test]
fn conforms_with_a_key_and_several_streams() {
    let make = |size: u32| {
        let streams = NonZeroU8::new(1 + u8::try_from(size / 2).unwrap()).unwrap();
        let results = join_each(size, |_, told| {
            (told.config.protection, told.config.streams) = (key(9), streams);
        });
        let ranks = results.into_iter().map(|(result, _)| result.unwrap());
        ranks.map(|rank| Box::new(rank) as Box<dyn Group>).collect()
    };
    testing::run_results_of(&make, 0x5eed_0005, &[2, 5]);
}

#[test]
fn stripes_keep_order_whatever_is_sent() {
    let results = join_each(2, |_, told| {
        told.config.streams = NonZeroU8::new(3).unwrap()
    });
    on_threads(results, |(group, _)| {
        let group: &dyn Group = &group.unwrap();
        let peer = Rank(1 - group.rank().0);
        // Some megabytes together: every stripe boundary is at another position of a message.
        let stripes = [131_072 - 60, 131_072, 131_073];
        for length in [0, 1, 100_000]
            .into_iter()
            .chain(stripes)
            .chain([777, 1 << 20, 3 << 20])
        {
            let byte = |i: usize| (i * 7 + i / 256).to_le_bytes()[0];
            let sent: Vec<u8> = (0..length).map(byte).collect();
            let mut got = vec![0; length];
            group.send(&sent, peer, 3, soon(FAR)).unwrap();
            group.recv(&mut got, peer, 3, soon(FAR)).unwrap();
            assert!(got == sent, "a message of {length}");
            let mut all = vec![0; 2 * length];
            group.all_gather(&sent, &mut all, soon(FAR)).unwrap();
            assert!(all == sent.repeat(2), "a gather of {length}");
        }
        group.barrier(soon(FAR)).unwrap();
    });
}

/// Ranks with two addresses each; with `dead`, one address of each leads nowhere.
fn join_over_two(dead: bool) -> Vec<Tcp> {
    let both = ["127.0.0.1:0", "127.0.0.2:0"].map(|addr| addr.parse().unwrap());
    let listeners = [(); 2].map(|()| Listener::bind_all(&both).unwrap());
    let mut addrs = listeners
        .each_ref()
        .map(|listener| listener.addrs().to_vec());
    if dead {
        // Nothing listens there: the port is bound and released.
        addrs[0][1] = Listener::bind(both[1]).unwrap().addr();
    }
    let id = GroupId::random();
    on_threads((0..).zip(listeners).collect(), move |(rank, listener)| {
        let config = Config {
            streams: NonZeroU8::new(2).unwrap(),
            ..Config::default()
        };
        join_with(listener, Rank(rank), &addrs, id, config, soon(FAR)).unwrap()
    })
}

#[test]
fn streams_go_to_all_addresses_or_to_those_that_answer() {
    for dead in [false, true] {
        let groups = join_over_two(dead);
        let sockets = groups[1].0.linked.transport();
        let reached: Vec<Vec<String>> = sockets
            .streams(0)
            .map(|lane| lane.iter().map(|s| s.peer().unwrap().to_string()).collect())
            .into();
        let second = if dead { "127.0.0.1" } else { "127.0.0.2" };
        assert_eq!(
            reached,
            [["127.0.0.1", second], ["127.0.0.1", second]],
            "dead: {dead}"
        );
        on_threads(groups, |group| {
            let (group, mut data): (&dyn Group, _) = (&group, vec![1.5_f32; 300_000]);
            group.all_reduce(&mut data, Reduce::Sum, soon(FAR)).unwrap();
            assert!(data.iter().all(|sum| *sum == 3.0));
        });
    }
}

/// The end of one of several connections ends the group, and both sides name the peer.
#[test]
fn a_stream_that_dies_ends_the_group() {
    for protection in [Protection::Loopback, key(1)] {
        let results = join_each(2, |_, told| {
            (told.config.streams, told.config.protection) =
                (NonZeroU8::new(3).unwrap(), protection.clone());
        });
        on_threads(results, |(group, _)| {
            let tcp = group.unwrap();
            let group: &dyn Group = &tcp;
            group.barrier(soon(FAR)).unwrap();
            let mut data = vec![1.0_f32; 1 << 20];
            if group.rank() == Rank(1) {
                let [calls, _] = tcp.0.linked.transport().streams(0);
                calls[1].shut_down();
            }
            let started = Stopwatch::start();
            let error = loop {
                if let Err(error) = group.all_reduce(&mut data, Reduce::Sum, soon(FAR)) {
                    break error;
                }
            };
            assert!(started.elapsed() < Duration::from_secs(2), "{error}");
            assert!(matches!(error, Error::PeerLost { .. }), "{error}");
        });
    }
}

/// The address of a rank in the list leads to another process of the same rank.
#[test]
fn a_twin_that_nobody_dials_finds_out_and_the_first_too() {
    for protection in [Protection::Loopback, key(1)] {
        let (mut listeners, addrs) = listeners(2);
        let twin = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let id = GroupId::random();
        let started = Stopwatch::start();
        // Rank 1 never arrives.
        let zeros = [listeners.remove(0), twin].map(|listener| {
            let (addrs, protection) = (addrs.clone(), protection.clone());
            let config = Config {
                protection,
                ..Config::default()
            };
            thread::spawn(move || join_with(listener, Rank(0), &addrs, id, config, soon(20)))
        });
        let [first, twin] = zeros.map(|thread| thread.join().unwrap().unwrap_err());
        let duplicate = Refusal::Duplicate(Rank(0));
        assert!(
            matches!(first, JoinError::Unfit { why, .. } if why == duplicate),
            "{first}"
        );
        let told = match twin {
            JoinError::Refused { why, .. } | JoinError::GaveUp { why, .. } => why == duplicate,
            _ => false,
        };
        assert!(told, "{twin}");
        assert!(
            started.elapsed() < Duration::from_secs(2),
            "{:?}",
            started.elapsed()
        );
    }
}

#[test]
fn records_that_are_changed_on_the_way_are_garbled_by_name() {
    // The long part of a relay's traffic: a record of the large call below.
    let (listeners, mut addrs) = listeners(2);
    let target = addrs[0];
    let vandal = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    addrs[0] = vandal.local_addr().unwrap();
    thread::spawn(move || {
        for from in vandal.incoming() {
            let (from, to) = (from.unwrap(), TcpStream::connect(target).unwrap());
            let back = (to.try_clone().unwrap(), from.try_clone().unwrap());
            for (harms, (mut from, mut to)) in [(true, (from, to)), (false, back)] {
                thread::spawn(move || {
                    let (mut bytes, mut passed) = (vec![0; 4096], 0);
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        passed += count;
                        // The measurement of the links is over by then.
                        bytes[count / 2] ^= u8::from(harms && passed > 1 << 20);
                        let _ = to.write_all(&bytes[..count]);
                    }
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    let id = GroupId::random();
    let errors = on_threads((0..).zip(listeners).collect(), move |(rank, listener)| {
        let config = Config {
            protection: key(3),
            ..Config::default()
        };
        let group = join_with(listener, Rank(rank), &addrs, id, config, soon(FAR)).unwrap();
        let (group, mut data): (&dyn Group, _) = (&group, vec![1.0_f32; 1 << 20]);
        let ended = group.all_reduce(&mut data, Reduce::Sum, soon(FAR));
        ended.unwrap_err()
    });
    for error in errors {
        assert!(
            matches!(error, Error::Garbled { rank: Rank(1), .. }),
            "{error}"
        );
    }
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
        matches!(results[0], JoinError::Unfit { why, .. } if why == duplicate),
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

/// Polls `look` until it returns a value.
fn wait_for<T>(look: impl Fn() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(FAR);
    loop {
        match look() {
            Some(found) => return found,
            None => assert!(Instant::now() < until, "nothing was found"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// A process that arrives after the group is complete learns why it is refused. So do the ranks
/// that turn it away; the group continues.
#[test]
fn who_comes_too_late_is_told_why_and_the_group_goes_on() {
    let (same, none): (fn(&mut GroupFacts), _) = (
        |_| (),
        |told: &mut GroupFacts| {
            told.config.protection = Protection::Loopback;
        },
    );
    let stranger: fn(&mut GroupFacts) = |told| told.config.protection = key(9);
    let cases = [
        (Protection::Loopback, 1, same, Refusal::Duplicate(Rank(1))),
        // No rank dials rank 0: it dials itself.
        (Protection::Loopback, 0, same, Refusal::Duplicate(Rank(0))),
        (Protection::Loopback, 1, stranger, Refusal::UnknownKey),
        (key(1), 1, same, Refusal::Duplicate(Rank(1))),
        (key(1), 1, none, Refusal::NoKey),
        (key(1), 1, stranger, Refusal::Key),
    ];
    for (protection, late, change, expected) in cases {
        let (listeners, addrs) = listeners(2);
        let id = GroupId::random();
        let config = Config {
            protection,
            ..Config::default()
        };
        let (all, same) = (addrs.clone(), config.clone());
        let ranks = on_threads((0..).zip(listeners).collect(), move |(rank, listener)| {
            join_with(listener, Rank(rank), &all, id, same.clone(), soon(FAR)).unwrap()
        });
        assert_eq!(ranks[0].turned_away(), None);

        let mut told = GroupFacts { addrs, id, config };
        change(&mut told);
        let GroupFacts { addrs, id, config } = told;
        let twin = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let error = join_with(twin, Rank(late), &addrs, id, config, soon(FAR)).unwrap_err();
        assert!(
            matches!(error, JoinError::Refused { why, .. } if why == expected),
            "{expected}: {error}"
        );
        assert_eq!(wait_for(|| ranks[0].turned_away()), expected);
        for ended in on_threads(ranks, |rank| (&rank as &dyn Group).barrier(soon(FAR))) {
            assert_eq!(ended, Ok(()), "{expected}");
        }
    }
}

/// A process at an address of the group, without its key, claims to be a rank of it.
#[test]
fn a_hello_without_proof_does_not_end_a_join() {
    let (listeners, addrs) = listeners(3);
    let id = GroupId::random();
    let with = |byte| Config {
        protection: key(byte),
        ..Config::default()
    };
    let join = |listener, rank, config| {
        let addrs = addrs.clone();
        thread::spawn(move || join_with(listener, Rank(rank), &addrs, id, config, soon(FAR)))
    };
    let mut listeners = listeners.into_iter();
    let mut next = || listeners.next().unwrap();
    let first = [join(next(), 0, with(1)), join(next(), 1, with(1))];
    let twin = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let error = join(twin, 1, with(9)).join().unwrap().unwrap_err();
    let by_zero = matches!(
        error,
        JoinError::Refused {
            by: Rank(0),
            why: Refusal::Key
        }
    );
    assert!(by_zero, "{error}");
    // Longer than the grace period for a rank with another key.
    thread::sleep(Duration::from_millis(700));
    let last = join(next(), 2, with(1));
    for rank in first.into_iter().chain([last]) {
        assert!(rank.join().unwrap().is_ok());
    }
}

/// Connections for a group that is split off stay pending while the first group's heartbeat thread
/// polls the listener.
#[test]
fn a_door_lets_through_who_means_another_group() {
    on_threads(join_all(2), |group| {
        let group: &dyn Group = &group;
        if group.rank() == Rank(0) {
            // The heartbeat thread has polled several times when this rank joins.
            thread::sleep(Duration::from_millis(400));
        }
        let part = group.split(0, 0, soon(FAR)).unwrap();
        part.barrier(soon(FAR)).unwrap();
    });
}

#[test]
fn another_version_is_refused_by_name() {
    let (mut listeners, addrs) = listeners(2);
    let id = GroupId::random();
    let peer = addrs[0];
    let listener = listeners.remove(0);
    let zero = thread::spawn(move || join(listener, Rank(0), &addrs, id, soon(FAR)));
    let mut stream = TcpStream::connect(peer).unwrap();
    // The length of a hello of version 1.
    let mut hello = [0_u8; 48];
    hello[..8].copy_from_slice(b"paceline");
    hello[8] = 77;
    hello[24..40].copy_from_slice(&id.0);
    stream.write_all(&hello).unwrap();
    let mut reply = [0_u8; 24];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!((&reply[..8], reply[8], reply[10]), (&b"paceline"[..], 3, 1));
    let why = Refusal::Version {
        ours: 3,
        theirs: 77,
    };
    let error = zero.join().unwrap().unwrap_err();
    assert!(
        matches!(error, JoinError::Unfit { why: w, .. } if w == why),
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
    let started = Stopwatch::start();
    let all = addrs.clone();
    on_threads((0..).zip(listeners).collect(), move |(rank, listener)| {
        let group = join(listener, Rank(rank), &all, id, soon(FAR)).unwrap();
        for _ in 0..100 {
            (&group as &dyn Group).barrier(soon(FAR)).unwrap();
        }
    });
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
    let all = on_threads(join_all(2), |group| {
        let (group, mut output): (&dyn Group, _) = (&group, [0_u8; 2000]);
        let gathered = group.all_gather(&[7_u8; 1000], &mut output, soon(FAR));
        gathered.unwrap();
        group.traffic()
    });
    for traffic in all {
        assert_eq!(traffic.sent, Bytes(1060));
        assert_eq!(traffic.received, Bytes(1060));
    }
}
