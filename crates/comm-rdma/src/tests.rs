//! Groups over the software library: results, joins and failures.

mod fallback;
mod faults;
mod layout;
mod library;
mod schedules;
mod setup;
mod shared_library;
mod speed;
mod wire;
mod zero_copy;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::tcp::{GroupId, Listener};
use paceline_comm::testing::{self, on_threads};
use paceline_comm::{Algorithm, Deadline, Group, Reduce, RegisteredMemory};

use super::soft::{self, Caps, Fabric, Faults};
use super::{
    Cabling, Config, DeviceLimits, MESSAGE_BYTES, Matrix, Rdma, RdmaError, join, software,
};

/// Sizes of the conformance suite here. The cases sleep for some 6 s of each size, and the size
/// matters little to a transport. `COMM_TEST_SIZES=all` and a long run use all sizes.
const SIZES: [u32; 4] = [1, 2, 3, 5];

fn soon(seconds: u64) -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(seconds))
}

/// A fabric, and the cabling of each rank.
struct FabricFixture {
    fabric: Fabric,
    cablings: Vec<Cabling>,
}

impl FabricFixture {
    /// The same, with zero-copy transfers of any length.
    fn in_place(mut self) -> Self {
        let all = self.cablings.iter_mut();
        all.for_each(|cabling| cabling.config.in_place_bytes = 1);
        self
    }

    /// The same, with this algorithm forced.
    fn force(mut self, algorithm: Algorithm) -> Self {
        let all = self.cablings.iter_mut();
        all.for_each(|cabling| cabling.config.tcp.force = Some(algorithm));
        self
    }

    fn new(fabric: Fabric, matrix: &Matrix, config: Config) -> Self {
        let verbs = || software::verbs(DeviceLimits::APPLE);
        let mut config = config;
        config.tcp.silence = testing::NEVER_SILENT;
        let cabling = |_| Cabling::with(verbs(), matrix.clone(), config.clone());
        let cablings = (0..matrix.size()).map(cabling).collect();
        Self { fabric, cablings }
    }
}

/// A device for each rank, all on one switch.
fn switched(size: u32, faults: Faults) -> FabricFixture {
    let fabric = Fabric::new(faults, Caps::APPLE);
    let name = |rank| format!("soft{}.{rank}", soft::number());
    let names: Vec<String> = (0..size).map(name).collect();
    names.iter().for_each(|name| fabric.device(name));
    FabricFixture::new(fabric, &Matrix::switched(&names), Config::default())
}

/// As [`switched`], for threads that share one cabling.
fn switched_cabling(size: u32) -> (Fabric, Cabling) {
    let mut lab = switched(size, Faults::default());
    (lab.fabric, lab.cablings.remove(0))
}

/// A device for each end of each cable; `cables` is their number between two ranks.
fn cabled(size: usize, cables: impl Fn(usize, usize) -> usize, faults: Faults) -> FabricFixture {
    let (fabric, number) = (Fabric::new(faults, Caps::APPLE), soft::number());
    let name = |a: usize, b: usize, cable: usize| format!("soft{number}.{a}.{b}.{cable}");
    let count = |a: usize, b: usize| {
        if a == b {
            0
        } else {
            cables(a.min(b), a.max(b))
        }
    };
    let entry = |a, b| (0..count(a, b)).map(|cable| name(a, b, cable)).collect();
    let row = |a| (0..size).map(|b| entry(a, b)).collect();
    let matrix = Matrix::new((0..size).map(row).collect()).unwrap();
    for a in 0..size {
        matrix.of(a).iter().for_each(|name| fabric.device(name));
    }
    for (a, b) in (0..size).flat_map(|b| (0..b).map(move |a| (a, b))) {
        (0..count(a, b)).for_each(|c| fabric.cable(&name(a, b, c), &name(b, a, c)));
    }
    FabricFixture::new(fabric, &matrix, Config::default())
}

/// Joins all ranks; returns each result, in rank order.
fn join_all(lab: &FabricFixture) -> Vec<Result<Rdma, RdmaError>> {
    let listen = |_| Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listeners: Vec<Listener> = lab.cablings.iter().map(listen).collect();
    let addrs: Vec<_> = listeners.iter().map(Listener::addr).collect();
    let id = GroupId::random();
    let seats = (0..).zip(lab.cablings.iter().cloned().zip(listeners));
    on_threads(seats.collect(), move |(rank, (cabling, listener))| {
        join(&cabling, listener, Rank(rank), &addrs, id, soon(60))
    })
}

fn groups(lab: &FabricFixture) -> Vec<Rdma> {
    let joined = join_all(lab).into_iter();
    joined.map(|group| group.unwrap()).collect()
}

/// Groups in the suite's form. Their fabric lives as long as they do: open devices keep it.
fn boxed(lab: &FabricFixture) -> testing::Ranks {
    let boxed = |group| Box::new(group) as Box<dyn Group>;
    groups(lab).into_iter().map(boxed).collect()
}

/// Runs `work` for every rank; the results in rank order.
fn on_each<R: Send + 'static>(
    lab: &FabricFixture,
    work: impl Fn(Rdma) -> R + Send + Sync + 'static,
) -> Vec<R> {
    on_threads(groups(lab), work)
}

#[test]
fn conforms() {
    let asked = std::env::var("COMM_TEST_SIZES").is_ok_and(|sizes| sizes == "all");
    let all = asked || paceline_base::testing::long();
    let sizes = if all { &testing::SIZES[..] } else { &SIZES };
    let make = |size| boxed(&switched(size, Faults::default()));
    testing::run_sizes(&make, 0x5eed_0007, sizes);
}

#[test]
fn several_cables_give_the_right_results() {
    let make = |size: u32| {
        boxed(&cabled(
            size as usize,
            |a, b| 1 + (a + b) % 4,
            Faults::default(),
        ))
    };
    testing::run_results_of(&make, 0x5eed_0008, &[2, 3]);
}

/// Rings whose cables are not between neighbours in rank order, and cables that form no ring.
#[test]
fn partial_meshes_give_the_right_results() {
    type Cables = fn(usize, usize) -> usize;
    let cablings: [(u32, Cables); 4] = [
        (4, |a, b| {
            usize::from(matches!((a, b), (0, 2) | (1, 2) | (1, 3) | (0, 3)))
        }),
        (5, |a, b| 2 * usize::from(b - a == 2 || b - a == 3)),
        (4, |a, b| usize::from(a == 0 && b > 0)),
        (3, |_, _| 0),
    ];
    for (size, cables) in cablings {
        let make = |size: u32| {
            let ranks = boxed(&cabled(size as usize, cables, Faults::default()));
            // Ranks without a cable know of the others' cables.
            let any = (0..size as usize).any(|a| (0..a).any(|b| cables(b, a) > 0));
            assert!(ranks.iter().all(|rank| rank.tuning().wire == any), "{size}");
            ranks
        };
        testing::run_results_of(&make, 0x5eed_0009, &[size]);
    }
}

#[test]
fn rings_go_both_ways_at_once() {
    let ring = |a: usize, b: usize| usize::from(b - a == 1 || b - a == 3);
    let lab = cabled(4, ring, Faults::default());
    on_each(&lab, |group| {
        let (by, length) = (soon(60), 1_000_000);
        let mut data = vec![group.rank().0 + 1; length];
        let before = group.traffic().sent.0;
        (&group as &dyn Group)
            .all_reduce(&mut data, Reduce::Sum, by)
            .unwrap();
        assert!(data.iter().all(|sum| *sum == 10));
        let sent = group.traffic().sent.0 - before;
        // 2 (P - 1) S / P, and frames of 52 bytes.
        let least = 2 * 3 * length as u64 * 4 / 4;
        assert!(
            (least..least + 2000).contains(&sent),
            "{sent} bytes, at least {least}"
        );
        (&group as &dyn Group).barrier(by).unwrap();
    });
}

#[test]
fn more_than_eight_ranks_join_and_compute() {
    // A device has ten queue pairs.
    let lab = switched(11, Faults::default());
    on_each(&lab, |group| {
        testing::run_rank(&group, 0x5eed_000a, 6).unwrap();
        (&group as &dyn Group).barrier(soon(60)).unwrap();
    });
    assert_eq!(lab.fabric.live(), 0, "something was not given back");
}

#[test]
fn registered_memory_is_sent_from_where_it_is() {
    use std::sync::atomic::Ordering;
    let lab = switched(2, Faults::default());
    let core = Arc::clone(&lab.fabric.core);
    let gathered = move || core.gathered.load(Ordering::Relaxed);
    on_each(&lab, move |group| {
        let group_ref: &dyn Group = &group;
        let mut plain = vec![1_u8; 300_000];
        group_ref
            .all_reduce(&mut plain, Reduce::Sum, soon(60))
            .unwrap();
        group_ref.barrier(soon(60)).unwrap();
        assert_eq!(gathered(), 0, "nothing is registered");
        group_ref.barrier(soon(60)).unwrap();

        let mut own = group.allocate(300_000).unwrap();
        for round in 1..20 {
            own.fill(round);
            group_ref
                .all_reduce(&mut own[..], Reduce::Sum, soon(60))
                .unwrap();
            assert!(own.iter().all(|sum| *sum == 2 * round));
        }
        assert!(gathered() > 0, "it was copied");
        drop(own);
        // SAFETY: `plain` lives longer.
        let memory = unsafe { group.register(plain.as_mut_ptr(), plain.len()) }.unwrap();
        plain.fill(3);
        group_ref
            .all_reduce(&mut plain, Reduce::Sum, soon(60))
            .unwrap();
        assert!(plain.iter().all(|sum| *sum == 6));
        drop(memory);
        group_ref.barrier(soon(60)).unwrap();
    });
    assert_eq!(lab.fabric.live(), 0, "something was not given back");
}

/// Gathered parts are transferred without a copy, despite lost messages. Incomplete chunks at the
/// end and unregistered memory are copied.
#[test]
#[allow(clippy::cast_possible_truncation, reason = "small numbers")]
fn registered_memory_is_received_where_it_is() {
    use std::sync::atomic::Ordering;
    let loss = |lose, delay| Faults {
        seed: 7,
        lose,
        delay,
        failure: None,
    };
    for (cables, faults) in [
        (1, loss(0, 0)),
        (3, loss(0, 0)),
        (1, loss(50, 0)),
        (2, loss(20, 200)),
    ] {
        let lab = cabled(2, |_, _| cables, faults);
        let core = Arc::clone(&lab.fabric.core);
        let chunks = |bytes: usize| (bytes / (MESSAGE_BYTES as usize / 2)) as u64;
        // More chunks than receives.
        let lengths = [3 << 20, 200_001, 128 << 10];
        on_each(&lab, move |group| {
            let mut all = group.allocate(2 * lengths[0]).unwrap();
            let mut plain = vec![0; 2 * lengths[0]];
            for round in 0..3 {
                for length in lengths {
                    let value =
                        |rank: u32, i: usize| (i * 7 % 251) as u8 ^ (rank * 31 + round) as u8;
                    let own: Vec<u8> = (0..length).map(|i| value(group.rank().0, i)).collect();
                    // In the last round only one rank has registered its receive buffer.
                    let bare = round == 2 && group.rank().0 == 0;
                    let all = if bare { &mut plain[..] } else { &mut all[..] };
                    let all = &mut all[..2 * length];
                    all.fill(0);
                    (&group as &dyn Group)
                        .all_gather(&own, all, soon(60))
                        .unwrap();
                    for (rank, part) in (0..).zip(all.chunks(length)) {
                        let wrong = part
                            .iter()
                            .enumerate()
                            .position(|(i, got)| *got != value(rank, i));
                        assert_eq!(wrong, None, "{length} bytes of {rank}, round {round}");
                    }
                }
            }
            (&group as &dyn Group).barrier(soon(60)).unwrap();
        });
        assert_eq!(lab.fabric.live(), 0, "something was not given back");
        let direct = core.scattered.load(Ordering::Relaxed);
        let all: u64 = lengths.into_iter().map(chunks).sum();
        // In two of three rounds by both. A rank without a core may have to request some again.
        assert!(direct > all, "{direct} chunks of {all}, {cables} cables");
    }
}

#[test]
fn subgroups_share_open_devices() {
    let lab = switched(4, Faults::default());
    on_each(&lab, |group| {
        let own = group.rank().0;
        let part = (&group as &dyn Group)
            .split(own % 2, own, soon(60))
            .unwrap();
        let mut sum = [own];
        part.all_reduce(&mut sum, Reduce::Sum, soon(60)).unwrap();
        assert_eq!(sum, [2 + 2 * (own % 2)]);
        part.barrier(soon(60)).unwrap();
        (&group as &dyn Group).barrier(soon(60)).unwrap();
    });
    assert_eq!(lab.fabric.live(), 0, "something was not given back");
}
