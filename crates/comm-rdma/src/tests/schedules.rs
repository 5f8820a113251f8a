//! Bytes on each cable: the schedules match docs/algorithms.md.

#![allow(clippy::cast_possible_truncation, reason = "small numbers of a test")]

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use paceline_comm::Traffic;

use super::*;

/// Frame bytes of a call: at most two frames for each other rank and step, of 52 bytes (`wire`).
/// The announcement takes as much again.
fn frames(size: usize) -> u64 {
    (2 * (2 * size) as u64 + size as u64) * 52
}

/// The bytes that a call of every rank sent, by rank.
fn sent(
    lab: &FabricFixture,
    call: impl Fn(&dyn Group, &mut RegisteredMemory<u32>) + Copy + Send + Sync + 'static,
    length: usize,
) -> Vec<u64> {
    on_each(lab, move |group| {
        let mut memory = RegisteredMemory::<u32>::new(Some(&group), length);
        memory.fill(group.rank().0 + 1);
        (&group as &dyn Group).barrier(soon(20)).unwrap();
        let Traffic { sent: before, .. } = group.traffic();
        call(&group, &mut memory);
        let sent = group.traffic().sent.0 - before.0;
        (&group as &dyn Group).barrier(soon(20)).unwrap();
        sent
    })
}

type Cables = fn(usize, usize) -> usize;

/// Rings that are no meshes: in rank order; in another order, with two cables each; and of nine
/// ranks, more than JACCL's mesh may have.
const RINGS: [(usize, Cables); 3] = [
    (4, |a, b| usize::from(b - a == 1 || b - a == 3)),
    (5, |a, b| 2 * usize::from(b - a == 2 || b - a == 3)),
    (9, |a, b| usize::from(b - a == 1 || b - a == 8)),
];

#[test]
fn partial_meshes_carry_as_few_bytes_as_can_be() {
    for (size, cables) in RINGS {
        // Divisible by ranks and directions, and by no chunk or message.
        let length = size * 2 * 3 * 1009;
        let all = (length * 4) as u64;
        let (least, ranks) = (all / size as u64 * (size as u64 - 1), size as u64);
        let lab = cabled(size, cables, Faults::default());
        let reduced = sent(
            &lab,
            move |group, memory| {
                group.all_reduce(memory, Reduce::Sum, soon(20)).unwrap();
                let sum = (ranks * (ranks + 1) / 2) as u32;
                assert!(memory.iter().all(|value| *value == sum));
            },
            length,
        );
        let lab = cabled(size, cables, Faults::default());
        let gathered = sent(
            &lab,
            move |group, memory| {
                let counts = vec![length / size; size];
                group
                    .all_gather_in_place(memory, &counts, soon(20))
                    .unwrap();
                for (rank, part) in (1..).zip(memory.chunks(length / size)) {
                    assert!(part.iter().all(|value| *value == rank));
                }
            },
            length,
        );
        for (what, expected, sent) in [("reduce", 2 * least, reduced), ("gather", least, gathered)]
        {
            for (rank, sent) in sent.iter().enumerate() {
                assert!(
                    (expected..=expected + frames(size)).contains(sent),
                    "{what} by rank {rank} of {size}: {sent} bytes, expected {expected}"
                );
            }
        }
    }
}

/// Both directions and all cables of a pair carry the same share. JACCL at HEAD sends the same half
/// both ways in a gather, and uses one cable of several.
#[test]
fn every_cable_carries_its_share() {
    let (size, cables) = RINGS[1];
    let lab = cabled(size, cables, Faults::default());
    let names: Vec<String> = (0..size)
        .flat_map(|rank| lab.cablings[0].matrix.of(rank))
        .map(String::from)
        .collect();
    let bytes = move || -> Vec<u64> {
        let all = soft::devices();
        let named = |name: &String| all.iter().find(|d| d.name.to_bytes() == name.as_bytes());
        let bytes = |name| named(name).map_or(0, |d| d.bytes.load(Ordering::Relaxed));
        names.iter().map(bytes).collect()
    };
    let before = Arc::new(Mutex::new(Vec::new()));
    let length = size * 4 * 50_000;
    let (of_all, marks) = (bytes.clone(), Arc::clone(&before));
    on_each(&lab, move |group| {
        let group: &dyn Group = &group;
        let mut data = vec![1_u32; length];
        group.barrier(soon(20)).unwrap();
        if group.rank().0 == 0 {
            *marks.lock().unwrap() = of_all();
        }
        group.barrier(soon(20)).unwrap();
        group.all_reduce(&mut data, Reduce::Sum, soon(20)).unwrap();
        group.barrier(soon(20)).unwrap();
    });
    // Two directions and two cables: four devices for each rank.
    let share = (2 * length * 4 / size * (size - 1) / 4) as u64;
    for (after, before) in bytes().iter().zip(&*before.lock().unwrap()) {
        let carried = after - before;
        // Plus heads and acknowledgements, and repetitions if a rank has no core; a repeated
        // message may use the other cable.
        assert!(
            carried >= share / 4 * 3,
            "{carried} bytes over a cable, expected {share}"
        );
    }
}
