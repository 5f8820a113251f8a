//! Zero-copy transfers: which bytes are copied, and which are not.

use std::sync::Mutex;

use paceline_comm::{CopyStats, Element};

use super::*;
use crate::IN_PLACE_BYTES;

/// Copy counts of a call, by rank: bytes in place and bytes staged.
fn copies<T: Element>(
    lab: &FabricFixture,
    length: usize,
    call: impl Fn(&dyn Group, &mut RegisteredMemory<T>) + Copy + Send + Sync + 'static,
) -> Vec<(u64, u64)> {
    on_each(lab, move |group| {
        let mut memory = RegisteredMemory::new(Some(&group), length);
        assert!(memory.is_registered());
        (&group as &dyn Group).barrier(soon(60)).unwrap();
        let before = group.copies();
        call(&group, &mut memory);
        let CopyStats { in_place, staged } = group.copies();
        (&group as &dyn Group).barrier(soon(60)).unwrap();
        (in_place.0 - before.in_place.0, staged.0 - before.staged.0)
    })
}

fn value(rank: usize, i: usize) -> u8 {
    u8::try_from((i * 7 + rank * 31) % 251).unwrap()
}

/// Gathers `part` bytes of each rank and checks them.
fn gather(group: &dyn Group, memory: &mut RegisteredMemory<u8>, part: usize) {
    let (rank, size) = (group.rank().0 as usize, group.size() as usize);
    let own = &mut memory[rank * part..(rank + 1) * part];
    own.iter_mut()
        .enumerate()
        .for_each(|(i, byte)| *byte = value(rank, i));
    let counts = vec![part; size];
    group
        .all_gather_in_place(memory, &counts, soon(60))
        .unwrap();
    for (rank, got) in memory.chunks(part).enumerate() {
        let wrong = got
            .iter()
            .enumerate()
            .position(|(i, got)| *got != value(rank, i));
        assert_eq!(wrong, None, "{part} bytes of {rank}");
    }
}

#[test]
fn gathers_of_registered_memory_copy_nothing_at_any_length() {
    // Around chunk boundaries.
    const PARTS: [usize; 8] = [1, 63, 2304, 16_384, 16_385, 200_001, 131_072, (1 << 20) + 7];
    for cables in [1, 3] {
        for part in PARTS {
            let lab = cabled(2, move |_, _| cables, Faults::default()).in_place();
            let each = copies(&lab, 2 * part, move |group, memory| {
                gather(group, memory, part)
            });
            assert_eq!(
                each,
                [(2 * part as u64, 0); 2],
                "{part} bytes, {cables} cables"
            );
        }
    }
}

/// By default only long bodies are offered.
#[test]
fn short_parts_are_copied_at_the_receiver_unless_told_otherwise() {
    for (part, staged) in [(2304, 2 * 2304), (8192, 8192), (IN_PLACE_BYTES, 0)] {
        let lab = switched(2, Faults::default());
        let each = copies(&lab, 2 * part, move |group, memory| {
            gather(group, memory, part)
        });
        let all = 2 * part as u64;
        assert_eq!(each, [(all - staged, staged); 2], "{part} bytes");
    }
}

/// Reductions run in place on received messages, in fragments of whole elements of any width.
#[test]
fn reductions_copy_nothing() {
    fn sum<T: Element + PartialEq + std::fmt::Debug>(
        lab: &FabricFixture,
        length: usize,
        one: T,
        all: T,
    ) {
        let each = copies(
            lab,
            length,
            move |group, memory: &mut RegisteredMemory<T>| {
                memory.fill(one);
                group.all_reduce(memory, Reduce::Sum, soon(60)).unwrap();
                assert!(memory.iter().all(|sum| *sum == all));
            },
        );
        for (rank, (in_place, staged)) in each.iter().enumerate() {
            let length = length * size_of::<T>();
            assert_eq!(*staged, 0, "{length} bytes, rank {rank}");
            assert!(
                *in_place >= 2 * length as u64,
                "{in_place} of {length} bytes"
            );
        }
    }
    // Long enough for a sum in two steps; message lengths are multiples of none of the widths.
    let pair = || {
        let lab = switched(2, Faults::default()).in_place();
        lab.force(Algorithm::TwoShot)
    };
    sum(&pair(), 700_001, 1.5_f32, 3.0);
    sum(&pair(), 700_001, 1.5_f64, 3.0);
    sum(&pair(), 900_001, 1_u8, 2);
    sum(&pair(), 700_001, 7_i16, 14);
    // Three ranks; each reduces one part, in registered memory.
    let three = || {
        let lab = switched(3, Faults::default()).in_place();
        lab.force(Algorithm::TwoShot)
    };
    sum(&three(), 700_001, 0.5_f32, 1.5);
    let ring = |a: usize, b: usize| usize::from(b - a == 1 || b - a == 3);
    let ring = || cabled(4, ring, Faults::default()).in_place();
    sum(&ring(), 240_003, 0.25_f32, 1.0);
    sum(&ring(), 240_003, 3_u64, 12);
}

/// Bytes are right despite losses and delays; copied bytes are counted as such.
#[test]
fn lost_parts_are_counted_as_copied() {
    let faults = Faults {
        seed: 11,
        lose: 50,
        delay: 50,
        failure: None,
    };
    let part = 1_000_003;
    let lab = cabled(2, |_, _| 2, faults).in_place();
    let each = copies(&lab, 2 * part, move |group, memory| {
        gather(group, memory, part)
    });
    for (in_place, staged) in each {
        assert_eq!(in_place + staged, 2 * part as u64);
        assert!(staged > 0, "nothing was lost");
    }
}

/// Bits of a sum do not depend on the order of arrival; with JACCL's mesh they may.
#[test]
fn sums_of_floats_do_not_depend_on_the_order_of_arrival() {
    let sums = Arc::new(Mutex::new(Vec::new()));
    for seed in 0..6 {
        let faults = Faults {
            seed,
            lose: 20,
            delay: 200,
            failure: None,
        };
        let all = Arc::clone(&sums);
        let lab = switched(3, faults).force(Algorithm::TwoShot);
        on_each(&lab, move |group| {
            let scale = [1.0_f32, 1e-3, 3e4][group.rank().0 as usize];
            let mut data: Vec<f32> = (0..30_000).map(|i| scale * (i as f32 + 0.1)).collect();
            (&group as &dyn Group)
                .all_reduce(&mut data, Reduce::Sum, soon(60))
                .unwrap();
            let bits: Vec<u32> = data.iter().map(|sum| sum.to_bits()).collect();
            all.lock().unwrap().push(bits);
            (&group as &dyn Group).barrier(soon(60)).unwrap();
        });
    }
    let sums = sums.lock().unwrap();
    assert!(sums.iter().all(|sum| *sum == sums[0]));
}

/// Messages of one tag with changing length and type, in both directions at once; JACCL's corrupt
/// or hang (ml-explore/mlx #3149, #4342).
#[test]
fn messages_of_changing_shape_arrive_as_they_were() {
    let faults = Faults {
        seed: 3,
        lose: 10,
        delay: 20,
        failure: None,
    };
    let lengths = [1, 70_000, 3, 16_384, 0, 400_001, 4096, 5, 131_072, 33];
    on_each(&cabled(2, |_, _| 2, faults).in_place(), move |group| {
        let (own, other) = (group.rank().0 as usize, 1 - group.rank().0);
        let group_ref: &dyn Group = &group;
        let mut from = RegisteredMemory::<u8>::new(Some(&group), 400_001);
        let mut into = RegisteredMemory::<u8>::new(Some(&group), 400_001);
        for (round, length) in lengths.into_iter().cycle().take(30).enumerate() {
            let bytes = from[..length].iter_mut().enumerate();
            bytes.for_each(|(i, byte)| *byte = value(own + round, i));
            let by = soon(60);
            if round % 3 == 2 {
                let wide = vec![f64::from(group.rank().0) + round as f64; length / 8];
                group_ref.send(&wide, Rank(other), 1, by).unwrap();
                let mut got = vec![0.0_f64; length / 8];
                group_ref.recv(&mut got, Rank(other), 1, by).unwrap();
                let expected = f64::from(other) + round as f64;
                assert!(got.iter().all(|value| *value == expected), "round {round}");
                continue;
            }
            group_ref.send(&from[..length], Rank(other), 1, by).unwrap();
            // The buffer may be reused at once.
            from.fill(0xee);
            into.fill(0);
            group_ref
                .recv(&mut into[..length], Rank(other), 1, by)
                .unwrap();
            for (i, got) in into[..length].iter().enumerate() {
                assert_eq!(*got, value(other as usize + round, i), "round {round}, {i}");
            }
        }
        group_ref.barrier(soon(60)).unwrap();
    });
}

#[test]
fn memory_serves_groups_that_are_split_off() {
    let part = 200_000;
    on_each(&switched(2, Faults::default()), move |group| {
        let mut memory = RegisteredMemory::<u8>::new(Some(&group), 2 * part);
        let stage = (&group as &dyn Group)
            .split(0, group.rank().0, soon(60))
            .unwrap();
        let before = stage.copies();
        gather(&*stage, &mut memory, part);
        let after = stage.copies();
        assert_eq!(after.staged, before.staged);
        assert_eq!(after.in_place.0 - before.in_place.0, 2 * part as u64);
        stage.barrier(soon(60)).unwrap();
        (&group as &dyn Group).barrier(soon(60)).unwrap();
    });
}

/// A long message goes directly to a waiting receive; others go through the inbox. The sender gives
/// the receiver time to wait, at last half a second.
#[test]
fn messages_go_straight_to_who_waits() {
    const BYTES: usize = 300_001;
    const ROUNDS: usize = 40;
    let lab = switched(2, Faults::default());
    let copied = on_each(&lab, |group| {
        let mut memory = RegisteredMemory::<u8>::new(Some(&group), BYTES);
        (&group as &dyn Group).barrier(soon(60)).unwrap();
        let before = group.copies();
        for round in 0..ROUNDS {
            let (by, group) = (soon(60), &group as &dyn Group);
            if group.rank() == Rank(0) {
                let waited = group.copies().in_place > before.in_place;
                let pause = match ROUNDS - round {
                    left @ ..5 if !waited => 2 << (9 - left),
                    _ => 2,
                };
                thread::sleep(Duration::from_millis(pause));
                let bytes = memory.iter_mut().enumerate();
                bytes.for_each(|(i, byte)| *byte = value(round, i));
                group.send(&memory, Rank(1), 5, by).unwrap();
                memory.fill(0xee);
            } else {
                group.recv(&mut memory, Rank(0), 5, by).unwrap();
                let wrong = memory
                    .iter()
                    .enumerate()
                    .position(|(i, b)| *b != value(round, i));
                assert_eq!(wrong, None, "round {round}");
            }
        }
        let CopyStats { in_place, staged } = group.copies();
        (&group as &dyn Group).barrier(soon(60)).unwrap();
        (in_place.0 - before.in_place.0, staged.0 - before.staged.0)
    });
    for (in_place, staged) in copied {
        assert_eq!(in_place + staged, (ROUNDS * BYTES) as u64);
        assert!(in_place > 0, "all were copied");
    }
}

/// Two ranks that send before they receive do not deadlock, at any length.
#[test]
fn both_may_send_before_they_receive() {
    on_each(&switched(2, Faults::default()).in_place(), |group| {
        let other = Rank(1 - group.rank().0);
        let mut from = RegisteredMemory::<u8>::new(Some(&group), 2_000_000);
        let mut into = RegisteredMemory::<u8>::new(Some(&group), 2_000_000);
        let group: &dyn Group = &group;
        for round in 1..20_u8 {
            from.fill(round);
            group.send(&from, other, 1, soon(60)).unwrap();
            group.recv(&mut into, other, 1, soon(60)).unwrap();
            assert!(into.iter().all(|byte| *byte == round));
        }
        group.barrier(soon(60)).unwrap();
    });
}

/// A receive that ends without its message returns its memory to the caller.
#[test]
fn a_receive_that_is_late_gives_its_memory_back() {
    on_each(&switched(2, Faults::default()).in_place(), |group| {
        let own: &dyn Group = &group;
        let mut memory = RegisteredMemory::<u8>::new(Some(own), 500_000);
        own.barrier(soon(60)).unwrap();
        if group.rank() == Rank(1) {
            let by = Deadline::at(Instant::now() + Duration::from_millis(20));
            own.recv(&mut memory, Rank(0), 9, by).unwrap_err();
            memory.fill(7);
            drop(memory);
        } else {
            // It waits with another tag, or has ended.
            let by = soon(60);
            while own.send(&memory, Rank(1), 8, by).is_ok() {}
        }
    });
}
