//! Cases about the results of calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use paceline_base::Rank;

use super::steps::{CollectiveCase, each_length};
use super::{Case, CaseContext, on_threads, patient};
use crate::{Dtype, Error, Group, MESSAGES_HELD, NonblockingCalls, Reduce};

pub(super) const CASES: &[Case] = &[
    ("ranks are numbered", 1, ranks_are_numbered),
    ("a barrier waits for all", 1, barrier_waits_for_all),
    ("gathers of any counts", 1, gathers_of_any_counts),
    ("reductions and broadcasts", 1, reductions_and_broadcasts),
    (
        "scatters and exchanges of any counts",
        1,
        scatters_and_exchanges_of_any_counts,
    ),
    (
        "rough sums have the same bits everywhere",
        1,
        rough_sums_have_the_same_bits,
    ),
    ("nan is kept by max and min", 1, nan_is_kept),
    ("messages between all pairs", 2, messages_between_all_pairs),
    ("tags are streams of their own", 2, tags_are_streams),
    ("all ranks may send first", 2, all_ranks_may_send_first),
    (
        "what was sent before leaving is received",
        2,
        sent_before_leaving,
    ),
    ("several calls are in flight", 2, several_in_flight),
    ("random programs", 1, random_programs),
    ("splits by color and key", 1, splits_by_color_and_key),
    ("traffic is counted", 2, traffic_is_counted),
    ("two groups in turn", 1, two_groups_in_turn),
    ("two groups at once", 1, two_groups_at_once),
];

/// Cases that depend on the algorithms of collectives.
#[cfg(test)]
pub(super) const COLLECTIVES: &[Case] = &[
    ("a barrier waits for all", 1, barrier_waits_for_all),
    ("gathers of any counts", 1, gathers_of_any_counts),
    ("reductions and broadcasts", 1, reductions_and_broadcasts),
    (
        "scatters and exchanges of any counts",
        1,
        scatters_and_exchanges_of_any_counts,
    ),
    (
        "rough sums have the same bits everywhere",
        1,
        rough_sums_have_the_same_bits,
    ),
    ("nan is kept by max and min", 1, nan_is_kept),
    ("random programs", 1, random_programs),
];

fn run_steps(lab: &CaseContext<'_>, steps: Vec<CollectiveCase>) {
    lab.on_each(move |group| {
        for (salt, step) in (0..).zip(&steps) {
            step.run(&*group, salt, patient())
                .unwrap_or_else(|e| panic!("{step:?}: {e}"));
        }
        group
            .barrier(patient())
            .expect("ranks leave after a barrier");
    });
}

fn ranks_are_numbered(lab: &CaseContext<'_>) {
    let seen = lab.on_each(|group| (group.rank(), group.size()));
    let expected: Vec<_> = (0..lab.size).map(|rank| (Rank(rank), lab.size)).collect();
    assert_eq!(seen, expected);
}

fn barrier_waits_for_all(lab: &CaseContext<'_>) {
    let (arrived, size) = (Arc::new(AtomicU32::new(0)), lab.size);
    lab.on_each(move |group| {
        for round in 1..=50 {
            arrived.fetch_add(1, Ordering::Relaxed);
            group.barrier(patient()).expect("all ranks come");
            assert!(
                arrived.load(Ordering::Relaxed) >= round * size,
                "left round {round} early"
            );
        }
    });
}

/// Every dtype at the short lengths; only `few`, which differ most, at the long ones.
const fn dtypes(length: usize, few: &[Dtype]) -> &[Dtype] {
    match length {
        0..1000 => &Dtype::ALL,
        _ => few,
    }
}

fn gathers_of_any_counts(lab: &CaseContext<'_>) {
    let mut random = lab.random();
    let ranks = 0..lab.size as usize;
    let mut steps = Vec::new();
    for length in each_length(lab.size) {
        let alone = random.below(lab.size as usize);
        let patterns: [Vec<usize>; 4] = [
            ranks.clone().map(|_| length).collect(),
            ranks
                .clone()
                .map(|rank| if rank == alone { length } else { 0 })
                .collect(),
            ranks.clone().map(|rank| length / (rank + 1)).collect(),
            ranks.clone().map(|_| random.below(length + 1)).collect(),
        ];
        for dtype in dtypes(length, &[Dtype::U8, Dtype::F32]) {
            steps.push(CollectiveCase::GatherEven(*dtype, length));
            steps.extend(
                patterns
                    .iter()
                    .map(|counts| CollectiveCase::Gather(*dtype, counts.clone())),
            );
        }
    }
    run_steps(lab, steps);
}

fn reductions_and_broadcasts(lab: &CaseContext<'_>) {
    let mut steps = Vec::new();
    for length in each_length(lab.size) {
        for dtype in dtypes(length, &[Dtype::U8, Dtype::Bf16]) {
            for op in Reduce::ALL {
                steps.push(CollectiveCase::Reduce(*dtype, length, op));
                steps.push(CollectiveCase::ScatterEven(
                    *dtype,
                    length / lab.size as usize,
                    op,
                ));
            }
            let root = Rank(u32::from(dtype.code()) % lab.size);
            steps.push(CollectiveCase::Broadcast(*dtype, length, root));
        }
    }
    run_steps(lab, steps);
}

fn scatters_and_exchanges_of_any_counts(lab: &CaseContext<'_>) {
    let mut random = lab.random();
    let mut steps = Vec::new();
    for length in each_length(lab.size) {
        let length = length.min(20_000);
        let counts: Vec<usize> = (0..lab.size).map(|_| random.below(length + 1)).collect();
        for dtype in dtypes(length, &[Dtype::F32, Dtype::F16]) {
            steps.push(CollectiveCase::GatherInPlace(*dtype, counts.clone()));
            steps.push(CollectiveCase::Scatter(*dtype, counts.clone(), Reduce::Sum));
            steps.push(CollectiveCase::Exchange(*dtype, length + 1));
            steps.push(CollectiveCase::ExchangeEven(*dtype, length));
        }
    }
    run_steps(lab, steps);
}

fn rough_sums_have_the_same_bits(lab: &CaseContext<'_>) {
    let seed = lab.random().next();
    let sums = lab.on_each(move |group| {
        let mut random = super::Xorshift(seed ^ u64::from(group.rank().0));
        let exponents = [1e-6, 1e-3, 1.0, 1e3, 1e6];
        let rough = |_| f32::from(random.next().to_le_bytes()[0]) * exponents[random.below(5)];
        let input: Vec<f32> = (0..40_000).map(rough).collect();
        let sum = || {
            let mut data = input.clone();
            group
                .all_reduce(&mut data, Reduce::Sum, patient())
                .expect("all ranks come");
            data.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        (sum(), sum())
    });
    for (rank, (once, again)) in sums.iter().enumerate() {
        assert!(once == again, "rank {rank}: the same sum twice differs");
        assert!(*once == sums[0].0, "rank {rank} has other bits than rank 0");
    }
}

fn nan_is_kept(lab: &CaseContext<'_>) {
    lab.on_each(|group| {
        for op in [Reduce::Max, Reduce::Min] {
            for sick in 0..group.size() {
                let mut data = [
                    1.0,
                    if group.rank().0 == sick {
                        f32::NAN
                    } else {
                        2.0
                    },
                ];
                group
                    .all_reduce(&mut data, op, patient())
                    .expect("all ranks come");
                assert!(
                    data[0].to_bits() == 1.0_f32.to_bits() && data[1].is_nan(),
                    "{data:?}"
                );
            }
        }
    });
}

fn messages_between_all_pairs(lab: &CaseContext<'_>) {
    lab.on_each(|group| {
        for length in each_length(group.size()) {
            for (from, to) in (0..group.size()).flat_map(|a| (0..group.size()).map(move |b| (a, b)))
            {
                pass(&*group, from, to, length);
            }
        }
        group
            .barrier(patient())
            .expect("ranks leave after a barrier");
    });
}

/// Passes a message, if `group` is one of its two ends.
fn pass(group: &dyn Group, from: u32, to: u32, length: usize) {
    let expected: Vec<u8> = (0..=u8::MAX)
        .cycle()
        .skip(from as usize)
        .take(length)
        .collect();
    if from != to && group.rank().0 == from {
        group
            .send(&expected, Rank(to), from, patient())
            .expect("the receiver lives");
    }
    if from != to && group.rank().0 == to {
        let mut got = vec![0; length];
        group
            .recv(&mut got, Rank(from), from, patient())
            .expect("the sender lives");
        assert!(
            got == expected,
            "message of {length} bytes from {from} to {to}"
        );
    }
}

fn tags_are_streams(lab: &CaseContext<'_>) {
    lab.on_each(|group| {
        let sent = [(7, 1.0_f32), (7, 2.0), (9, 3.0), (7, 4.0), (9, 5.0)];
        let received = [(9, 3.0), (7, 1.0), (9, 5.0), (7, 2.0), (7, 4.0_f32)];
        match group.rank() {
            Rank(0) => sent.iter().for_each(|(tag, value)| {
                group
                    .send(&[*value], Rank(1), *tag, patient())
                    .expect("the receiver lives");
            }),
            Rank(1) => received.iter().for_each(|(tag, value)| {
                let mut got = [0.0_f32];
                group
                    .recv(&mut got, Rank(0), *tag, patient())
                    .expect("the sender lives");
                assert_eq!(got, [*value], "tag {tag}");
            }),
            _ => {}
        }
        group
            .barrier(patient())
            .expect("messages do not disturb collectives");
    });
}

fn all_ranks_may_send_first(lab: &CaseContext<'_>) {
    lab.on_each(|group| {
        let own = group.rank().0;
        let others = || (0..group.size()).filter(|peer| *peer != own);
        let value = |from: u32, message: usize| [from as f32, message as f32];
        for messages in (0..3).map(|burst| burst * MESSAGES_HELD..(burst + 1) * MESSAGES_HELD) {
            for (message, to) in messages
                .clone()
                .flat_map(|m| others().map(move |to| (m, to)))
            {
                let sent = group.send(&value(own, message), Rank(to), 0, patient());
                sent.expect("as many messages as are promised fit");
            }
            for (message, from) in messages.flat_map(|m| others().map(move |from| (m, from))) {
                let mut got = [0.0_f32; 2];
                group
                    .recv(&mut got, Rank(from), 0, patient())
                    .expect("the sender lives");
                assert_eq!(got, value(from, message));
            }
        }
        group
            .barrier(patient())
            .expect("ranks leave after a barrier");
    });
}

fn sent_before_leaving(lab: &CaseContext<'_>) {
    let left = std::sync::Barrier::new(2);
    lab.on_each(move |group| match group.rank() {
        Rank(0) => {
            for message in 0..MESSAGES_HELD {
                let sent = group.send(&[message as f32], Rank(1), 3, patient());
                sent.expect("as many messages as are promised fit");
            }
            drop(group);
            left.wait();
            None
        }
        Rank(1) => {
            left.wait();
            for message in 0..MESSAGES_HELD {
                let mut got = [0.0_f32];
                group
                    .recv(&mut got, Rank(0), 3, patient())
                    .expect("it was sent in time");
                assert_eq!(got, [message as f32]);
            }
            let lost = group.recv(&mut [0.0_f32], Rank(0), 3, patient());
            assert!(
                matches!(lost, Err(Error::PeerLost { rank: Rank(0), .. })),
                "{lost:?}"
            );
            Some(group)
        }
        _ => Some(group),
    });
}

fn random_programs(lab: &CaseContext<'_>) {
    let mut random = lab.random();
    run_steps(
        lab,
        (0..60)
            .map(|_| CollectiveCase::any(&mut random, lab.size))
            .collect(),
    );
}

fn splits_by_color_and_key(lab: &CaseContext<'_>) {
    let mut random = lab.random();
    let size = lab.size as usize;
    let choices: Vec<(u32, u32)> = (0..size)
        .map(|_| (random.rank(3).0 * 1000, random.rank(3).0))
        .collect();
    lab.on_each(move |group| {
        let own = group.rank().0 as usize;
        let (color, key) = choices[own];
        let part = group.split(color, key, patient()).expect("all ranks split");
        let mut members: Vec<_> = (0..size).filter(|r| choices[*r].0 == color).collect();
        members.sort_by_key(|rank| choices[*rank].1);
        assert_eq!(part.size() as usize, members.len());
        assert_eq!(members[part.rank().0 as usize], own);
        let mut gathered = vec![0.0_f32; members.len()];
        part.all_gather(&[own as f32], &mut gathered, patient())
            .expect("the part works");
        let expected: Vec<f32> = members.iter().map(|rank| *rank as f32).collect();
        assert_eq!(gathered, expected);
        // Both groups stay usable, and a part can be split in turn.
        group.barrier(patient()).expect("the whole still works");
        let alone = part.split(part.rank().0, 0, patient()).expect("all split");
        assert_eq!((alone.rank(), alone.size()), (Rank(0), 1));
        alone.barrier(patient()).expect("size 1 works");
        part.barrier(patient()).expect("the part still works");
        group
            .barrier(patient())
            .expect("ranks leave after a barrier");
    });
}

fn traffic_is_counted(lab: &CaseContext<'_>) {
    let traffics = lab.on_each(|group| {
        assert_eq!(group.traffic(), crate::Traffic::default());
        let mut output = vec![0_u8; 1000 * group.size() as usize];
        group
            .all_gather(&[1_u8; 1000], &mut output, patient())
            .expect("all ranks come");
        let traffic = group.traffic();
        let to = group.sent_to();
        if !to.is_empty() {
            assert_eq!(to.len(), group.size() as usize);
            let sum: u64 = to.iter().map(|sent| sent.0).sum();
            // Frames may follow between the two reads.
            let near = traffic.sent.0..=traffic.sent.0 + 1000;
            assert!(near.contains(&sum), "{sum} of {}", traffic.sent.0);
        }
        group
            .barrier(patient())
            .expect("ranks leave after a barrier");
        (traffic.sent.0, traffic.received.0, group.size())
    });
    for (sent, received, size) in traffics {
        let others = u64::from(size - 1);
        // Shared memory is written once; links send it once per peer, plus frames.
        assert!(sent >= 1000 && sent <= others.max(1) * 1200, "{sent}");
        assert!(
            (others * 1000..=others * 1200).contains(&received),
            "{received}"
        );
    }
}

/// All sums start before any is waited for; receives start before the messages they wait for.
fn several_in_flight(lab: &CaseContext<'_>) {
    let size = lab.size;
    lab.on_each(move |group| {
        let rank = group.rank().0;
        let (next, before) = (Rank((rank + 1) % size), Rank((rank + size - 1) % size));
        let ahead = NonblockingCalls::new(Arc::from(group));
        let receive = |tag: u32| {
            ahead.start_message(move |g| g.recv_like(&[0_u32; 3], before, tag, patient()))
        };
        let sum = |turn: u32| {
            ahead.start(move |group| {
                let mut data = vec![turn + group.rank().0; 1 + 100 * turn as usize];
                let done = group.all_reduce(&mut data, Reduce::Sum, patient());
                done.map(|()| data)
            })
        };
        let send = |tag: u32| {
            ahead.start_message(move |group| group.send(&[tag; 3], next, tag, patient()))
        };
        let receives: Vec<_> = (0..4).rev().map(receive).collect();
        let sums: Vec<_> = (0..20).map(sum).collect();
        let sends: Vec<_> = (0..4).map(send).collect();
        for (turn, sum) in (0..).zip(sums) {
            let expected = size * turn + size * (size - 1) / 2;
            let sum = sum.wait().expect("all ranks add up");
            assert!(sum.iter().all(|x| *x == expected), "turn {turn}");
        }
        for (tag, receive) in (0..4).rev().zip(receives) {
            assert_eq!(receive.wait(), Ok(vec![tag; 3]));
        }
        sends
            .into_iter()
            .for_each(|send| send.wait().expect("it is received"));
        let last = ahead.start(|group| group.barrier(patient()));
        last.wait().expect("ranks leave after a barrier");
    });
}

fn two_groups_in_turn(lab: &CaseContext<'_>) {
    let mut random = lab.random();
    let steps: Vec<_> = (0..60)
        .map(|_| (random.below(2), CollectiveCase::any(&mut random, lab.size)))
        .collect();
    let (first, second) = ((lab.make)(lab.size), (lab.make)(lab.size));
    let seats: Vec<_> = first.into_iter().zip(second).map(|(a, b)| [a, b]).collect();
    on_threads(seats, move |groups| {
        for (salt, (which, step)) in (0..).zip(&steps) {
            step.run(&*groups[*which], salt, patient())
                .expect("groups do not disturb each other");
        }
        groups
            .iter()
            .for_each(|g| g.barrier(patient()).expect("ranks leave after a barrier"));
    });
}

fn two_groups_at_once(lab: &CaseContext<'_>) {
    let mut random = lab.random();
    let steps: [Vec<_>; 2] = std::array::from_fn(|_| {
        (0..40)
            .map(|_| CollectiveCase::any(&mut random, lab.size))
            .collect()
    });
    let seats = (0..2).flat_map(|which| (lab.make)(lab.size).into_iter().map(move |g| (which, g)));
    on_threads(
        seats.collect(),
        move |(which, group): (usize, Box<dyn Group>)| {
            for (salt, step) in (0..).zip(&steps[which]) {
                step.run(&*group, salt, patient())
                    .expect("groups do not disturb each other");
            }
            group
                .barrier(patient())
                .expect("ranks leave after a barrier");
        },
    );
}
