//! Groups over MPI: one rank. `cargo xtask mpi` runs it by `mpirun` with 2, 3, 4 and 8 ranks.
//!
//! Without `mpirun` it is one rank alone, and passes as such. Every rank runs the same cases; the
//! first prints a line for each. With `COMM_TEST_SPEED` it measures messages instead.
//!
//! The group-related cases of MLX's MPI suite are here under their own names. They run at every
//! suitable number of ranks. The eight common cases are in `mlx_ring/cases.py`; six of them are
//! Python code over `all_sum`. Each rank of `mpirun` is then a Python process, whose `shim.py`
//! starts this program as its rank.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test without the usual harness: it has helpers and says itself what passed"
)]

#[path = "mlx_ring/serve.rs"]
mod serve;

use std::fmt::Debug;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use paceline_base::Rank;
use paceline_comm::{Complex64, Deadline, Element, Error, Group, Reduce, testing};
use paceline_comm_interop::mpi::MpiSession;

/// A case and the divisor of its number of ranks.
type Case = (&'static str, u32, fn(&dyn Group));

const CASES: [Case; 12] = [
    ("test_groups", 1, test_groups),
    ("test_all_reduce", 1, test_all_reduce),
    ("test_all_reduce_extra", 1, test_all_reduce_extra),
    ("test_all_gather", 1, test_all_gather),
    ("test_all_gather_extra", 1, test_all_gather_extra),
    ("test_mixed", 2, test_mixed),
    ("test_send_recv", 2, test_send_recv),
    ("random_programs", 1, random_programs),
    ("nan_is_kept", 1, nan_is_kept),
    (
        "messages_have_deadlines_and_lengths",
        2,
        messages_have_deadlines_and_lengths,
    ),
    ("bad_arguments", 1, bad_arguments),
    ("more_than_mpi_counts", 2, more_than_mpi_counts),
];

fn main() {
    let session = MpiSession::start().unwrap();
    assert!(MpiSession::start().is_err(), "MPI starts once");
    let world = session.world();
    if let Ok(control) = std::env::var("COMM_TEST_CONTROL") {
        serve::serve(&*world, &TcpStream::connect(control).unwrap(), soon);
        return;
    }
    if std::env::var_os("COMM_TEST_SPEED").is_some() {
        return speed(&*world);
    }
    for (name, multiple, case) in CASES {
        if world.size().is_multiple_of(multiple) {
            // A case may poison its group, so each has its own.
            let group = world.split(0, world.rank().0, soon()).unwrap();
            case(&*group);
            world.barrier(soon()).unwrap();
            if world.rank() == Rank(0) {
                println!("ok {name} with {} ranks", world.size());
            }
        }
    }
}

fn soon() -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(60))
}

/// Prints the median round trip of 4 KiB to the next rank, for an even number of ranks.
fn speed(group: &dyn Group) {
    const TIMES: usize = 2001;
    let mut data = [1.0_f32; 1024];
    let (other, first) = (Rank(group.rank().0 ^ 1), group.rank().0.is_multiple_of(2));
    let mut times: Vec<Duration> = Vec::new();
    for _ in 0..TIMES {
        let begun = Instant::now();
        if first {
            group.send(&data, other, 0, soon()).unwrap();
        }
        group.recv(&mut data, other, 0, soon()).unwrap();
        if !first {
            group.send(&data, other, 0, soon()).unwrap();
        }
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    if group.rank() == Rank(0) {
        println!("4 KiB there and back: {:?}", times[TIMES / 2]);
    }
    group.barrier(soon()).unwrap();
}

fn whole(rank: u32, i: usize) -> u8 {
    u8::try_from((rank as usize * 7 + i * 3) % 11).unwrap()
}

/// Sum, max and min of whole numbers at MLX's lengths.
fn reduces<T: Element + PartialEq + Debug>(group: &dyn Group, of: fn(u8) -> T) {
    for len in [7, 10, 1024, 1 << 18] {
        for (op, merge) in [
            (Reduce::Sum, (|a, b| a + b) as fn(u8, u8) -> u8),
            (Reduce::Max, u8::max),
            (Reduce::Min, u8::min),
        ] {
            let mut data: Vec<T> = (0..len).map(|i| of(whole(group.rank().0, i))).collect();
            group.all_reduce(&mut data, op, soon()).unwrap();
            let at = |i| {
                (0..group.size())
                    .map(|r| whole(r, i))
                    .reduce(merge)
                    .unwrap()
            };
            let right = data.iter().enumerate().all(|(i, x)| *x == of(at(i)));
            assert!(right, "{op} of {len} {}", T::DTYPE);
        }
    }
}

fn gathers<T: Element + PartialEq + Debug>(group: &dyn Group, of: fn(u8) -> T) {
    let own: Vec<T> = (0..16).map(|i| of(whole(group.rank().0, i))).collect();
    let mut all = vec![of(0); 16 * group.size() as usize];
    group.all_gather(&own, &mut all, soon()).unwrap();
    let expected = (0..group.size()).flat_map(|r| (0..16).map(move |i| of(whole(r, i))));
    assert!(all.into_iter().eq(expected), "gather of {}", T::DTYPE);
}

/// The group, and its halves by even and odd ranks.
fn with_halves(group: &dyn Group, work: fn(&dyn Group)) {
    work(group);
    let half = group
        .split(group.rank().0 % 2, group.rank().0, soon())
        .unwrap();
    work(&*half);
}

fn test_groups(world: &dyn Group) {
    let (rank, size) = (world.rank().0, world.size());
    let half = world.split(rank % 2, rank, soon()).unwrap();
    assert_eq!(half.size(), size.div_ceil(2) - (size % 2) * (rank % 2));
    assert_eq!(half.rank().0, rank / 2);
    let pair = world.split(rank / 2, rank, soon()).unwrap();
    assert_eq!(pair.size(), 2.min(size - rank / 2 * 2));
    // Keys reverse the order; colors may be any number.
    let turned = world.split(u32::MAX, size - rank, soon()).unwrap();
    assert_eq!((turned.rank().0, turned.size()), (size - 1 - rank, size));
}

fn test_all_reduce(world: &dyn Group) {
    reduces::<i8>(world, |x| i8::try_from(x).unwrap());
    reduces::<u8>(world, |x| x);
    reduces::<i32>(world, i32::from);
    reduces::<u32>(world, u32::from);
    reduces::<f32>(world, f32::from);
    reduces::<f16>(world, f16::from);
    reduces::<bf16>(world, bf16::from);
}

fn complex(x: u8) -> Complex64 {
    Complex64 {
        re: f32::from(x),
        im: f32::from(x),
    }
}

fn test_all_reduce_extra(world: &dyn Group) {
    with_halves(world, |group| {
        reduces::<i16>(group, i16::from);
        reduces::<u16>(group, u16::from);
        reduces::<Complex64>(group, complex);
    });
}

fn test_all_gather(world: &dyn Group) {
    gathers::<i8>(world, |x| i8::try_from(x).unwrap());
    gathers::<u8>(world, |x| x);
    gathers::<i32>(world, i32::from);
    gathers::<u32>(world, u32::from);
    gathers::<f32>(world, f32::from);
    gathers::<f16>(world, f16::from);
    gathers::<bf16>(world, bf16::from);
}

fn test_all_gather_extra(world: &dyn Group) {
    with_halves(world, |group| {
        gathers::<i16>(group, i16::from);
        gathers::<u16>(group, u16::from);
        gathers::<Complex64>(group, complex);
    });
}

/// Pairs (0 0 1 1 ...) reduce, then their first and second members (0 1 0 1 ...) gather.
fn test_mixed(world: &dyn Group) {
    let rank = world.rank().0;
    let pairs = world.split(rank / 2, rank, soon()).unwrap();
    let across = world.split(rank % 2, rank, soon()).unwrap();
    let mut sum = [rank as f32; 8];
    pairs.all_reduce(&mut sum, Reduce::Sum, soon()).unwrap();
    let mut all = vec![0.0; 8 * across.size() as usize];
    across.all_gather(&sum, &mut all, soon()).unwrap();
    let expected = (0..across.size()).flat_map(|pair| [(4 * pair + 1) as f32; 8]);
    assert!(all.into_iter().eq(expected));
}

/// The ranks of a pair double a number in turn.
fn test_send_recv(world: &dyn Group) {
    let pair = world
        .split(world.rank().0 / 2, world.rank().0, soon())
        .unwrap();
    let other = Rank(1 - pair.rank().0);
    let mut sends = pair.rank() == Rank(0);
    let mut x = [1.0_f32; 10];
    for _ in 0..10 {
        match sends {
            true => pair.send(&x.map(|x| 2.0 * x), other, 0, soon()).unwrap(),
            false => pair.recv(&mut x, other, 0, soon()).unwrap(),
        }
        sends = !sends;
    }
    let expected = if pair.rank() == Rank(0) {
        1024.0
    } else {
        512.0
    };
    assert_eq!(x, [expected; 10]);
}

/// The conformance suite's random programs of every call, type and length.
fn random_programs(world: &dyn Group) {
    for seed in [0x5eed_0005, 0x5eed_0006] {
        testing::run_rank(world, seed, 80).unwrap();
        world.barrier(soon()).unwrap();
    }
}

fn nan_is_kept(world: &dyn Group) {
    for (op, sick) in [Reduce::Max, Reduce::Min].map(|op| (op, world.size() - 1)) {
        let own = if world.rank().0 == sick {
            f32::NAN
        } else {
            2.0
        };
        let mut data = [1.0, own];
        world.all_reduce(&mut data, op, soon()).unwrap();
        assert!(data[0] == 1.0 && data[1].is_nan(), "{op}: {data:?}");
    }
}

fn messages_have_deadlines_and_lengths(world: &dyn Group) {
    let (rank, size) = (world.rank().0, world.size());
    let (next, before) = (Rank((rank + 1) % size), Rank((rank + size - 1) % size));
    let part = world.split(0, rank, soon()).unwrap();
    let by = Deadline::at(Instant::now() + Duration::from_millis(50));
    let late = part.recv(&mut [0_u8], before, 1, by).unwrap_err();
    assert!(
        matches!(late, Error::Timeout { rank, .. } if rank == before),
        "{late}"
    );
    assert_eq!(part.recv(&mut [0_u8], before, 1, soon()), Err(late));
    world.send(&[1_u8, 2], next, 3, soon()).unwrap();
    let wrong = world.recv(&mut [0_u8], before, 3, soon()).unwrap_err();
    assert!(
        matches!(wrong, Error::Mismatch { rank, .. } if rank == before),
        "{wrong}"
    );
}

fn bad_arguments(world: &dyn Group) {
    let size = world.size();
    let other = world.split(0, world.rank().0, soon()).unwrap();
    let error = other
        .broadcast(&mut [0_u8], Rank(size), soon())
        .unwrap_err();
    assert!(matches!(error, Error::NoSuchRank { .. }), "{error}");
    assert_eq!(other.barrier(soon()), Err(error));
}

/// MPI counts elements in 32 bits, and MLX's counts overflow. Untouched zeros take no memory.
fn more_than_mpi_counts(world: &dyn Group) {
    let mut data = vec![0_u8; 1 << 31];
    let other = Rank((world.rank().0 + 1) % world.size());
    let refused = [
        world.all_reduce(&mut data, Reduce::Max, soon()),
        world.broadcast(&mut data, Rank(0), soon()),
        world.send(&data, other, 0, soon()),
        world.recv(&mut data, other, 0, soon()),
    ];
    for error in refused.map(Result::unwrap_err) {
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
    world.barrier(soon()).unwrap();
}
