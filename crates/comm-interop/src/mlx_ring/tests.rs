//! Rings of Rust ranks only, as threads of this process. `tests/mlx_ring.rs` has the rings with
//! MLX's ranks.

mod edges;
mod pending_connections;

use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use paceline_base::testing::Stopwatch;

use super::*;
use paceline_comm::{Complex64, Element};

/// Distant deadline, in seconds, for events that occur long before it.
const FAR: u64 = 90;

/// Time after which a wait counts as a hang.
const HANG: Duration = Duration::from_secs(FAR / 3);

fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

fn millis(millis: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_millis(millis))
}

/// Waits until `done`.
fn wait_for(done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < HANG, "it does not come");
        thread::sleep(Duration::from_millis(1));
    }
}

type Listeners = Vec<Vec<TcpListener>>;

fn listeners(size: usize, connections: usize) -> (Listeners, Vec<Vec<SocketAddr>>) {
    let listen = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let all: Listeners = (0..size)
        .map(|_| (0..connections).map(listen).collect())
        .collect();
    let addr = |listener: &TcpListener| listener.local_addr().unwrap();
    let hosts = all.iter().map(|own| own.iter().map(addr).collect());
    let hosts = hosts.collect();
    (all, hosts)
}

/// Runs `work` for every rank of a new ring on its own thread; results in rank order.
fn on_each<R: Send>(
    size: usize,
    connections: usize,
    work: impl Fn(MlxRing) -> R + Send + Sync,
) -> Vec<R> {
    let (all, hosts) = listeners(size, connections);
    on_each_of(all, &hosts, work)
}

fn on_each_of<R: Send>(
    all: Listeners,
    hosts: &[Vec<SocketAddr>],
    work: impl Fn(MlxRing) -> R + Send + Sync,
) -> Vec<R> {
    let work = &work;
    thread::scope(|scope| {
        let start = |(rank, own)| {
            scope.spawn(move || {
                let ring = join_with(own, rank, hosts, Plaintext::Refused, soon(FAR));
                work(ring.unwrap())
            })
        };
        let ranks: Vec<_> = (0..).map(Rank).zip(all).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const SHAPES: [(usize, usize); 7] = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (5, 3)];

/// Few elements, around the number of ranks, a long odd number with several courses, and none.
const LENS: [usize; 9] = [0, 1, 2, 3, 5, 7, 1024, 100_003, 700_001];

/// Small integers, so that sums of a few are exact in every type.
fn whole(rank: usize, i: usize) -> u8 {
    u8::try_from((rank * 7 + i * 3) % 11).unwrap()
}

fn reduces<T: Element + PartialEq + Debug>(group: &dyn Group, len: usize, of: fn(u8) -> T) {
    let (rank, size) = (group.rank().0 as usize, group.size() as usize);
    for (op, merge) in [
        (Reduce::Sum, (|a, b| a + b) as fn(u8, u8) -> u8),
        (Reduce::Max, |a, b| a.max(b)),
        (Reduce::Min, |a, b| a.min(b)),
    ] {
        let mut data: Vec<T> = (0..len).map(|i| of(whole(rank, i))).collect();
        group.all_reduce(&mut data, op, soon(FAR)).unwrap();
        let expected = |i| (0..size).map(|r| whole(r, i)).reduce(merge).unwrap();
        let expected: Vec<T> = (0..len).map(|i| of(expected(i))).collect();
        assert!(data == expected, "{op} of {len} {}", T::DTYPE);
    }
}

#[test]
fn reductions_are_right() {
    for (size, connections) in SHAPES {
        on_each(size, connections, |ring| {
            let group: &dyn Group = &ring;
            for len in LENS {
                reduces::<f32>(group, len, f32::from);
                reduces::<i32>(group, len, i32::from);
                if len > 2000 {
                    continue; // the wire knows no types: two are enough
                }
                reduces::<f16>(group, len, f16::from);
                reduces::<bf16>(group, len, bf16::from);
                reduces::<f64>(group, len, f64::from);
                reduces::<u8>(group, len, |x| x);
                reduces::<u16>(group, len, u16::from);
                reduces::<i64>(group, len, i64::from);
                reduces::<Complex64>(group, len, |x| Complex64 {
                    re: f32::from(x),
                    im: f32::from(x),
                });
            }
            let mut flags = [ring.rank().0 == 0, false, true];
            group
                .all_reduce(&mut flags, Reduce::Sum, soon(FAR))
                .unwrap();
            assert_eq!(flags, [true, false, true]);
            group.barrier(soon(FAR)).unwrap();
        });
    }
}

#[test]
fn gathers_and_messages_are_right() {
    for (size, connections) in SHAPES {
        on_each(size, connections, |ring| {
            let group: &dyn Group = &ring;
            let rank = group.rank().0;
            for len in LENS {
                let part = |rank: u32| (0..len).map(move |i| whole(rank as usize, i));
                let mut all = vec![0_u8; len * size];
                let own: Vec<u8> = part(rank).collect();
                group.all_gather(&own, &mut all, soon(FAR)).unwrap();
                let expected: Vec<u8> = (0..group.size()).flat_map(part).collect();
                assert!(all == expected, "gather of {len}");
                all[..].fill(0);
                all[rank as usize * len..][..len].copy_from_slice(&own);
                let counts = vec![len; size];
                let gathered = group.all_gather_in_place(&mut all, &counts, soon(FAR));
                gathered.unwrap();
                assert!(all == expected, "gather in place of {len}");
                round(group, &own, &part);
            }
            group.barrier(soon(FAR)).unwrap();
        });
    }
}

/// Every rank sends to its right, then to its left, in an order that cannot deadlock.
fn round<I: Iterator<Item = u8>>(group: &dyn Group, own: &[u8], part: &dyn Fn(u32) -> I) {
    let (rank, size) = (group.rank().0, group.size());
    for (to, from) in [(1, size - 1), (size - 1, 1)] {
        if size == 1 {
            return;
        }
        let (to, from) = ((rank + to) % size, (rank + from) % size);
        let send = || group.send(own, Rank(to), 0, soon(FAR)).unwrap();
        if rank != 0 {
            send();
        }
        let got = group.recv_like(own, Rank(from), 0, soon(FAR)).unwrap();
        if rank == 0 {
            send();
        }
        assert!(got.into_iter().eq(part(from)), "from {from} to {rank}");
    }
}

#[test]
fn rough_sums_have_the_same_bits_everywhere_and_again() {
    let sums = on_each(4, 2, |ring| {
        let group: &dyn Group = &ring;
        let rough =
            |i: usize| (i as f32 * 0.37 + group.rank().0 as f32).sin() * [1.0, 1e3, 1e6][i % 3];
        let sum = || {
            let mut data: Vec<f32> = (0..700_001).map(rough).collect();
            group.all_reduce(&mut data, Reduce::Sum, soon(FAR)).unwrap();
            data.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let sums = (sum(), sum());
        group.barrier(soon(FAR)).unwrap();
        sums
    });
    for (once, again) in &sums {
        assert!(once == again && *once == sums[0].0);
    }
}

#[test]
fn what_mlx_has_not_is_refused_by_name_and_the_ring_goes_on() {
    on_each(4, 1, |ring| {
        let group: &dyn Group = &ring;
        let (mut four, mut one, rank) = ([0_u8; 4], [0_u8; 1], group.rank().0);
        let across = Rank((rank + 2) % 4);
        let refused = [
            group.all_reduce(&mut four, Reduce::Prod, soon(FAR)),
            group.broadcast(&mut four, Rank(0), soon(FAR)),
            group.reduce_scatter(&[0; 4], &mut one, Reduce::Sum, soon(FAR)),
            group.all_to_all(&[0; 4], &mut four, soon(FAR)),
            group.all_gather_v(
                &vec![0; rank as usize],
                &mut [0; 6],
                &[0, 1, 2, 3],
                soon(FAR),
            ),
            group.send(&one, across, 0, soon(FAR)),
            group.recv(&mut one, across, 0, soon(FAR)),
            group.send(&one, Rank((rank + 1) % 4), 7, soon(FAR)),
            group.split(0, 0, soon(FAR)).map(|_| ()),
        ];
        for error in refused.map(Result::unwrap_err) {
            assert!(
                matches!(
                    error,
                    Error::Unsupported {
                        backend: "mlx-ring",
                        ..
                    }
                ),
                "{error}"
            );
            assert!(
                error.to_string().contains("mlx-ring does not have"),
                "{error}"
            );
        }
        group.barrier(soon(FAR)).unwrap();
        assert_eq!(
            group.all_gather_v(&one, &mut four, &[1; 4], soon(FAR)),
            Ok(())
        );
    });
}

/// After `harm` to one rank, all others get an error that names a neighbour, repeatedly.
fn check_harm(size: u32, work: fn(&dyn Group) -> Result<(), Error>) {
    for victim in [0, size - 1] {
        on_each(size as usize, 2, |ring| {
            let group: &dyn Group = &ring;
            group.barrier(soon(FAR)).unwrap();
            let rank = group.rank().0;
            if rank == victim {
                return;
            }
            let started = Stopwatch::start();
            for _ in 0..4 {
                let error = work(group).unwrap_err();
                let Error::PeerLost { rank: lost, .. } = error else {
                    panic!("rank {rank}: {error}");
                };
                let near = [(rank + 1) % size, (rank + size - 1) % size];
                assert!(near.contains(&lost.0), "rank {rank}: {error}");
                assert!(
                    size > 3 || lost.0 == victim || size == 3,
                    "rank {rank}: {error}"
                );
            }
            assert!(started.elapsed() < Duration::from_secs(2));
        });
    }
}

#[test]
fn a_dead_rank_is_an_error_for_all_and_stays_one() {
    let reduce: fn(&dyn Group) -> Result<(), Error> =
        |group| group.all_reduce(&mut vec![1.0_f32; 1 << 20], Reduce::Sum, soon(FAR));
    let small: fn(&dyn Group) -> Result<(), Error> =
        |group| group.all_reduce(&mut [1_u8], Reduce::Max, soon(FAR));
    let gather: fn(&dyn Group) -> Result<(), Error> = |group| {
        let mut all = vec![0_u8; group.size() as usize * 600_000];
        group.all_gather(&vec![1; 600_000], &mut all, soon(FAR))
    };
    for (size, work) in [(2, reduce), (4, reduce), (3, small), (4, gather)] {
        check_harm(size, work);
    }
}

#[test]
fn a_dead_neighbour_ends_messages_too() {
    let results = on_each(2, 1, |ring| {
        let group: &dyn Group = &ring;
        // Otherwise a rank that leaves before its neighbour has joined would be waited for.
        group.barrier(soon(FAR)).unwrap();
        match group.rank() {
            Rank(0) => {
                group.send(&[7_u8; 100], Rank(1), 0, soon(FAR)).unwrap();
                None
            }
            _ => {
                // Bytes sent before leaving are received.
                assert_eq!(
                    group.recv_like(&[0_u8; 100], Rank(0), 0, soon(FAR)),
                    Ok(vec![7; 100])
                );
                Some(group.recv(&mut [0_u8], Rank(0), 0, soon(FAR)))
            }
        }
    });
    let lost = results[1].unwrap().unwrap_err();
    assert!(
        matches!(lost, Error::PeerLost { rank: Rank(0), .. }),
        "{lost}"
    );
    assert_eq!(
        lost.to_string(),
        "recv from rank 0 with tag 0 of 1 u8 (call 2): rank 0 left the group"
    );
}

#[test]
fn a_silent_rank_is_an_error_at_the_deadline() {
    let (started, given_up) = (Stopwatch::start(), AtomicU32::new(0));
    let results = on_each(3, 1, |ring| {
        let group: &dyn Group = &ring;
        if group.rank() == Rank(2) {
            // It stays silent, but alive, until the others have given up.
            wait_for(|| given_up.load(Ordering::Relaxed) == 2);
            return None;
        }
        let result = group.all_reduce(&mut [1.0_f32; 100], Reduce::Sum, millis(100));
        given_up.fetch_add(1, Ordering::Relaxed);
        Some(result)
    });
    assert!(started.elapsed() < Duration::from_secs(5));
    // One of the two waits for rank 2; the other may learn of it from the first.
    let errors: Vec<Error> = results
        .into_iter()
        .flatten()
        .map(Result::unwrap_err)
        .collect();
    let named = |e: &Error| matches!(e, Error::Timeout { .. } | Error::PeerLost { .. });
    assert!(errors.iter().all(named), "{errors:?}");
    assert!(
        errors.iter().any(|e| matches!(e, Error::Timeout { .. })),
        "{errors:?}"
    );
}

#[test]
fn a_deadline_holds_while_another_thread_uses_the_ring() {
    let given_up = AtomicU32::new(0);
    on_each(2, 1, |ring| {
        let group: &dyn Group = &ring;
        if group.rank() == Rank(0) {
            wait_for(|| given_up.load(Ordering::Relaxed) == 1);
            return;
        }
        thread::scope(|scope| {
            let receives = scope.spawn(|| group.recv(&mut [0_u8], Rank(0), 0, soon(FAR)));
            thread::sleep(Duration::from_millis(50));
            let result = group.barrier(millis(50));
            // The other leaves now, which ends the call that waits for it.
            given_up.fetch_add(1, Ordering::Relaxed);
            assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
            assert_eq!(receives.join().unwrap(), result);
        });
    });
}

#[test]
fn whoever_is_missing_is_named() {
    let (mut all, hosts) = listeners(3, 1);
    drop(all.remove(1));
    let own = all.remove(0);
    let error = join_with(own, Rank(0), &hosts, Plaintext::Refused, millis(50)).unwrap_err();
    let expected = format!(
        "mlx-ring: rank 1 did not accept at {} before the deadline",
        hosts[1][0]
    );
    assert_eq!(error.to_string(), expected);
    // Rank 0 is there; its left neighbour never arrives.
    let own = all.remove(0);
    let error = join_with(own, Rank(2), &hosts, Plaintext::Refused, millis(50)).unwrap_err();
    assert!(
        matches!(
            error,
            JoinError::Missing {
                rank: Rank(0) | Rank(1),
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn bad_lists_of_hosts_are_refused() {
    let addr = |text: &str| text.parse::<SocketAddr>().unwrap();
    let (near, far) = (addr("127.0.0.1:1"), addr("192.0.2.7:1"));
    let by = millis(0);
    let error = |rank, hosts: &[Vec<SocketAddr>], plaintext| {
        join(Rank(rank), hosts, plaintext, by)
            .unwrap_err()
            .to_string()
    };
    for (rank, hosts, expected) in [
        (0, vec![], "mlx-ring: rank 0 is not in a ring of 0"),
        (
            2,
            vec![vec![near]; 2],
            "mlx-ring: rank 2 is not in a ring of 2",
        ),
        (
            0,
            vec![vec![], vec![]],
            "mlx-ring: rank 0 has 0 addresses, expected 0 as rank 0, and at least 1",
        ),
        (
            0,
            vec![vec![near], vec![near, near]],
            "mlx-ring: rank 1 has 2 addresses, expected 1 as rank 0, and at least 1",
        ),
        (
            0,
            vec![vec![near], vec![far]],
            "mlx-ring is plaintext and 192.0.2.7:1 is not on this machine's loopback: not allowed",
        ),
    ] {
        assert_eq!(error(rank, &hosts, Plaintext::Refused), expected);
    }
    // Requested by name it continues, and finds that its neighbour is missing.
    let (own, hosts) = listeners(1, 1);
    let hosts = [hosts[0].clone(), vec![far]];
    let own = own.into_iter().next().unwrap();
    let error = join_with(own, Rank(0), &hosts, Plaintext::Allowed, by).unwrap_err();
    assert!(
        matches!(error, JoinError::Missing { rank: Rank(1), .. }),
        "{error}"
    );
}

/// Rank 0 against bytes written by hand: the first data of the protocol, as in the reference.
#[test]
fn the_wire_is_array_bytes_alone() {
    let (all, hosts) = listeners(2, 1);
    let right = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let hosts = [hosts[0].clone(), vec![right.local_addr().unwrap()]];
    let own = all.into_iter().next().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let ring = join_with(own, Rank(0), &hosts, Plaintext::Refused, soon(FAR)).unwrap();
            let group: &dyn Group = &ring;
            let mut data = [1.0_f32, 2.0, 3.0];
            group.all_reduce(&mut data, Reduce::Sum, soon(FAR)).unwrap();
            assert_eq!(data, [11.0, 22.0, 33.0]);
        });
        // Rank 0 connects to rank 1's left socket; its right one leads to rank 0.
        let mut left = right.accept().unwrap().0;
        let mut to_rank_0 = TcpStream::connect(hosts[0][0]).unwrap();
        // One stream of direction 1: rank 0 sends left, to rank 1's right socket, segment 0 of
        // ceil(3 / 2) = 2 elements, and receives segment 1 from the right.
        let floats = |values: &[f32]| {
            values
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect::<Vec<_>>()
        };
        let mut got = [0; 8];
        to_rank_0.read_exact(&mut got).unwrap();
        assert_eq!(got[..], floats(&[1.0, 2.0]));
        left.write_all(&floats(&[30.0])).unwrap();
        let mut complete = [0; 4];
        to_rank_0.read_exact(&mut complete).unwrap();
        assert_eq!(complete[..], floats(&[33.0]));
        left.write_all(&floats(&[11.0, 22.0])).unwrap();
        // And nothing else.
        assert_eq!(to_rank_0.read(&mut got).unwrap(), 0);
    });
}
