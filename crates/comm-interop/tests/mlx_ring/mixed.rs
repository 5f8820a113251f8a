//! Every call, type, length and position in the ring; the Python side is `mixed.py`.

use std::fmt::Debug;
use std::thread;

use half::{bf16, f16};
use paceline_base::Rank;
use paceline_base::testing::long;
use paceline_comm::{Complex64, Element, Group, Plaintext, Reduce};
use paceline_comm_interop::mlx_ring;

use super::python::{Hosts, one_ring, patient, python};

/// A call, its type and its elements, as `mixed.py` reads them.
type MixedCall = (&'static str, &'static str, usize);

const CALLS: [&str; 5] = ["sum", "max", "min", "gather", "message"];

/// Lengths: one element, around the number of ranks, MLX's own test lengths, odd ones.
const LENS: [usize; 6] = [1, 2, 7, 10, 1024, 100_003];

/// Several streams of several packets, and a last part of another length.
const LONG: [usize; 2] = [1 << 20, (4 << 20) + 5];

/// The steps of every ring: all calls on `dtypes` for all lengths.
fn plan(dtypes: &[&'static str], lens: &[usize]) -> Vec<MixedCall> {
    let pairs = dtypes
        .iter()
        .flat_map(|dtype| lens.iter().map(move |len| (*dtype, *len)));
    pairs
        .flat_map(|(dtype, len)| CALLS.map(|call| (call, dtype, len)))
        .collect()
}

fn whole(rank: usize, i: usize) -> u8 {
    u8::try_from((rank * 7 + i * 3) % 11).unwrap()
}

/// A type in which whole numbers below 50 are exact.
trait SmallInteger: Element + PartialEq + Debug {
    fn of(value: u8) -> Self;
}

macro_rules! whole {
    ($($type:ty, $of:expr;)*) => {$(
        impl SmallInteger for $type {
            fn of(value: u8) -> Self {
                let of: fn(u8) -> $type = $of;
                of(value)
            }
        }
    )*};
}

whole! {
    bool, |x| x != 0;
    i8, |x| i8::try_from(x).unwrap();
    i16, i16::from;
    i32, i32::from;
    i64, i64::from;
    u8, |x| x;
    u16, u16::from;
    u32, u32::from;
    u64, u64::from;
    f16, f16::from;
    bf16, bf16::from;
    f32, f32::from;
    f64, f64::from;
    Complex64, |x| Complex64 { re: f32::from(x), im: 0.0 };
}

fn run(group: &dyn Group, step: MixedCall) {
    match step.1 {
        "bool" => run_typed::<bool>(group, step),
        "i8" => run_typed::<i8>(group, step),
        "i16" => run_typed::<i16>(group, step),
        "i32" => run_typed::<i32>(group, step),
        "i64" => run_typed::<i64>(group, step),
        "u8" => run_typed::<u8>(group, step),
        "u16" => run_typed::<u16>(group, step),
        "u32" => run_typed::<u32>(group, step),
        "u64" => run_typed::<u64>(group, step),
        "f16" => run_typed::<f16>(group, step),
        "bf16" => run_typed::<bf16>(group, step),
        "f32" => run_typed::<f32>(group, step),
        "f64" => run_typed::<f64>(group, step),
        "complex64" => run_typed::<Complex64>(group, step),
        other => panic!("no type {other}"),
    }
}

fn part<T: SmallInteger>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::of(whole(rank, i))).collect()
}

fn run_typed<T: SmallInteger>(group: &dyn Group, step: MixedCall) {
    let (call, _, len) = step;
    let (rank, size) = (group.rank().0 as usize, group.size() as usize);
    let own = part::<T>(rank, len);
    let reduce = |op, merge: fn(u8, u8) -> u8| {
        let mut data = own.clone();
        group.all_reduce(&mut data, op, patient()).unwrap();
        let at = |i| (0..size).map(|r| whole(r, i)).reduce(merge).unwrap();
        assert!(
            data == (0..len).map(|i| T::of(at(i))).collect::<Vec<_>>(),
            "{step:?}"
        );
    };
    match call {
        "barrier" => group.barrier(patient()).unwrap(),
        // For an MLX rank the memory layout of its array matters.
        "sum" | "strided" => reduce(Reduce::Sum, |a, b| a + b),
        "max" => reduce(Reduce::Max, u8::max),
        "min" => reduce(Reduce::Min, u8::min),
        "gather" => {
            let mut all = vec![T::of(0); len * size];
            group.all_gather(&own, &mut all, patient()).unwrap();
            let mut parts = all.chunks_exact(len.max(1)).enumerate();
            assert!(parts.all(|(r, got)| got == part::<T>(r, len)), "{step:?}");
        }
        "message" => message(group, &own, step),
        "rough" => rough(group, len),
        other => panic!("no call {other}"),
    }
}

/// To the right, then to the left; rank 0 receives first, so that the ring cannot deadlock.
fn message<T: SmallInteger>(group: &dyn Group, own: &[T], step: MixedCall) {
    let (rank, size) = (group.rank().0, group.size());
    for away in [1, size - 1] {
        let (to, from) = (
            Rank((rank + away) % size),
            Rank((rank + size - away) % size),
        );
        let send = || group.send(own, to, 0, patient()).unwrap();
        if rank != 0 {
            send();
        }
        let got = group.recv_like(own, from, 0, patient()).unwrap();
        if rank == 0 {
            send();
        }
        assert!(
            got == part::<T>(from.0 as usize, own.len()),
            "{step:?} from {from}"
        );
    }
}

/// A sum that rounds: all ranks must hold the same bits.
fn rough(group: &dyn Group, len: usize) {
    let value = |i: usize| (i as f32 * 0.37 + group.rank().0 as f32).sin() * 1000.0;
    let mut data: Vec<f32> = (0..len).map(value).collect();
    group.all_reduce(&mut data, Reduce::Sum, patient()).unwrap();
    let mut all = vec![0.0_f32; len * group.size() as usize];
    group.all_gather(&data, &mut all, patient()).unwrap();
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let own = bits(&data);
    assert!(
        all.chunks_exact(len).all(|part| bits(part) == own),
        "bits of a rough sum"
    );
}

/// Runs `steps` in a ring whose ranks are `r` (Rust) and `p` (Python) in this order.
fn mixed(test: &str, ranks: &str, connections: usize, steps: &[MixedCall]) {
    let Some(python) = python(test) else { return };
    let _alone = one_ring();
    let mut hosts = Hosts::new(ranks.len(), connections);
    let json = |(call, dtype, len): &MixedCall| format!("[\"{call}\", \"{dtype}\", {len}]");
    let json: Vec<String> = steps.iter().map(json).collect();
    let plan = hosts.folder.path().join("plan.json");
    std::fs::write(&plan, format!("[{}]", json.join(", "))).unwrap();
    let args = [plan.to_str().unwrap()];
    let of_kind = |kind| ranks.chars().enumerate().filter(move |(_, k)| *k == kind);
    let pythons: Vec<_> = of_kind('p')
        .map(|(rank, _)| hosts.start(&python, rank, "mixed.py", &args))
        .collect();
    thread::scope(|scope| {
        for (rank, _) in of_kind('r') {
            let own = std::mem::take(&mut hosts.listeners[rank]);
            let addrs = &hosts.addrs;
            scope.spawn(move || {
                let rank = Rank(u32::try_from(rank).unwrap());
                let ring = mlx_ring::join_with(own, rank, addrs, Plaintext::Refused, patient());
                let ring = ring.unwrap();
                steps.iter().for_each(|step| run(&ring, *step));
            });
        }
    });
    for python in pythons {
        assert!(python.finish().ends_with("done\n"));
    }
}

/// Types of the long calls: all of them around two ranks, where a ring is cheapest.
const TYPES: [&str; 4] = ["f32", "f16", "bf16", "i32"];

#[test]
fn two_ranks_in_both_places() {
    let mut steps = plan(&TYPES, &LENS);
    steps.extend(plan(&TYPES, &LONG));
    for (ranks, connections) in [("rp", 1), ("pr", 1), ("rp", 2), ("pr", 2)] {
        mixed("mlx-ring of two ranks", ranks, connections, &steps);
    }
}

/// Rings of more ranks: all types, and one of the longest calls for each. `COMM_TEST_MLX=all` and a
/// long run use all of them, and every ring with one connection and with two.
fn rings(test: &str, rings: &[(&str, usize)]) {
    let all = long() || std::env::var("COMM_TEST_MLX").is_ok_and(|what| what == "all");
    for (i, (ranks, connections)) in rings.iter().enumerate() {
        let (long, connections) = match all {
            true => (&TYPES[..], vec![1, 2]),
            false => (&TYPES[i..=i], vec![*connections]),
        };
        let mut steps = plan(&TYPES, &LENS);
        steps.extend(plan(long, &LONG[1..]));
        for connections in connections {
            mixed(test, ranks, connections, &steps);
        }
    }
}

#[test]
fn three_ranks_in_every_place() {
    let places = [("rpp", 1), ("prp", 2), ("ppr", 1), ("rpr", 2)];
    rings("mlx-ring of three ranks", &places);
}

#[test]
fn four_ranks_of_both_kinds() {
    let places = [("rprp", 1), ("pprr", 2), ("prpp", 1)];
    rings("mlx-ring of four ranks", &places);
}

#[test]
fn three_ranks_with_every_type_and_no_elements_at_all() {
    let all = [
        "bool",
        "i8",
        "i16",
        "i32",
        "i64",
        "u8",
        "u16",
        "u32",
        "u64",
        "f16",
        "bf16",
        "f32",
        "f64",
        "complex64",
    ];
    let mut steps = plan(&all, &[0, 1, 2, 1025]);
    steps.extend([
        ("rough", "f32", 100_003),
        ("strided", "f32", 10),
        ("strided", "bf16", 100_003),
        ("barrier", "f32", 1),
    ]);
    mixed("mlx-ring of every type", "rpr", 2, &steps);
}
