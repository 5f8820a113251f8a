//! The ring against a model queue, with arbitrary counters, and with a peer that writes anywhere.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU8;
use std::time::Duration;

use paceline_base::Rank;
use proptest::prelude::*;

use super::*;
use crate::sync::{AtomicU64, copy_in};
use crate::transport_group::TransportGroup;
use crate::{Collective, DataMut, Deadline, Error, Reduce};

/// Guard words before and after the data of a ring, checked for changes.
const MARGIN: usize = 16;
const UNTOUCHED: u64 = 0xa5a5_a5a5_a5a5_a5a5;
const COUNTER_WORDS: usize = Ring::COUNTER_BYTES / 8;

#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct AlignedWords([u64; 16]);

/// A ring in memory that a test can inspect and corrupt: counters, margin, data, margin.
struct CorruptibleRing {
    memory: Vec<AlignedWords>,
    size: usize,
}

impl CorruptibleRing {
    fn new(size: usize) -> Self {
        let words = COUNTER_WORDS + 2 * MARGIN + size.div_ceil(8);
        let mut new = Self {
            memory: vec![AlignedWords([UNTOUCHED; 16]); words.div_ceil(16)],
            size,
        };
        new.put_counters([0, 0]);
        new
    }

    fn words(&mut self) -> *mut u64 {
        self.memory.as_mut_ptr().cast()
    }

    fn data(&mut self) -> *mut u8 {
        // SAFETY: `new` made room for counters and a margin before the data.
        unsafe { self.words().add(COUNTER_WORDS + MARGIN).cast() }
    }

    /// Sets the counters: bytes written, bytes read.
    fn put_counters(&mut self, values: [u64; 2]) {
        for (line, value) in self.memory.iter_mut().zip(values) {
            line.0[0] = value;
        }
    }

    fn ring(&mut self) -> Ring {
        let (counters, data) = (self.words().cast_const().cast(), self.data());
        // SAFETY: both are in `memory`, which outlives the ring in every test, and are aligned.
        // These tests break the promise that they were zero.
        unsafe { Ring::new(counters, data, self.size) }
    }

    fn assert_margins(&mut self) {
        let (start, words) = (COUNTER_WORDS, self.size.div_ceil(8));
        for at in (start..start + MARGIN).chain(start + MARGIN + words..start + 2 * MARGIN + words)
        {
            // SAFETY: `new` made room for two margins and the data.
            let word = unsafe { self.words().add(at).read() };
            assert_eq!(word, UNTOUCHED, "word {at} was overwritten");
        }
    }
}

/// Operations on a ring: bytes of head and body written, bytes read.
fn traffic() -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
    prop::collection::vec((0..70_usize, 0..5000_usize, 0..6000_usize), 1..60)
}

proptest! {
    #[test]
    fn a_ring_is_a_queue(bits in 0..14_u32, start in any::<u64>(), traffic in traffic()) {
        let size = 1 << bits;
        let mut memory = CorruptibleRing::new(size);
        memory.put_counters([start, start]);
        let (ring, mut queue, mut next) = (memory.ring(), VecDeque::new(), 0_u8);
        for (head, body, read) in traffic {
            let byte = |i: usize| next.wrapping_add(i.to_le_bytes()[0]);
            let bytes: Vec<u8> = (0..head + body).map(byte).collect();
            let count = ring.write(&bytes[..head], &bytes[head..]);
            prop_assert_eq!(count, bytes.len().min(size - queue.len()));
            queue.extend(&bytes[..count]);
            next = next.wrapping_add(count.to_le_bytes()[0]);
            prop_assert_eq!(ring.has_room(), queue.len() < size);
            prop_assert_eq!(ring.is_filled(), !queue.is_empty());
            let mut into = vec![0; read];
            let count = ring.read(&mut into);
            prop_assert_eq!(count, read.min(queue.len()));
            let expected: Vec<u8> = queue.drain(..count).collect();
            prop_assert_eq!(&into[..count], &expected[..]);
        }
        memory.assert_margins();
    }

    #[test]
    fn counters_of_a_liar_lead_nowhere(
        bits in 0..13_u32,
        lies in prop::collection::vec(any::<[u64; 2]>(), 1..40),
        traffic in traffic(),
    ) {
        let size = 1 << bits;
        let mut memory = CorruptibleRing::new(size);
        let ring = memory.ring();
        for (lie, (head, body, read)) in lies.iter().cycle().zip(traffic) {
            memory.put_counters(*lie);
            prop_assert!(ring.write(&vec![1; head], &vec![2; body]) <= size.min(head + body));
            memory.put_counters([lie[1], lie[0]]);
            let mut into = vec![3; read + 8];
            prop_assert!(ring.read(&mut into[..read]) <= size.min(read));
            prop_assert_eq!(&into[read..], &[3; 8]);
        }
        memory.assert_margins();
    }

    #[test]
    fn a_streaming_copy_is_a_copy(at in 0..130_usize, from in 0..9_usize, count in 0..5000_usize) {
        let source: Vec<u8> = (0..from + count).map(|i| i.to_le_bytes()[0] | 1).collect();
        let mut target = vec![0_u8; at + count + 64];
        // SAFETY: both ranges are within their vectors, which do not overlap.
        unsafe { copy_in(source[from..].as_ptr(), target[at..].as_mut_ptr(), count) };
        prop_assert!(target[..at].iter().chain(&target[at + count..]).all(|byte| *byte == 0));
        prop_assert_eq!(&target[at..at + count], &source[from..]);
    }
}

/// Two ranks on threads, and their memory.
fn pair() -> ([TransportGroup<SharedRings>; 2], Vec<Arc<Segment>>) {
    let segments: Vec<_> = (0..2)
        .map(|_| Arc::new(Segment::new(2, None).unwrap()))
        .collect();
    let gone: Arc<[AtomicBool]> = (0..2).map(|_| AtomicBool::new(false)).collect();
    let ranks = [0, 1].map(|rank| {
        // Separate statuses: neither is notified, as if the other were another process.
        let status = Arc::new(GroupStatus::default());
        let teller = FailureNotifier::Threads(Arc::clone(&status));
        let (gone, patience) = (Arc::clone(&gone), crate::local::patience(2));
        let shared = SharedRings::new(rank, segments.clone(), gone, teller, patience);
        let rank = Rank(u32::try_from(rank).unwrap());
        TransportGroup::with_status(rank, 2, shared, status)
    });
    (ranks, segments)
}

fn reduce(rank: &TransportGroup<SharedRings>, length: usize, wait: Duration) -> Result<(), Error> {
    let mut data = vec![1.0_f32; length];
    let (data, op) = (DataMut::new(&mut data), Reduce::Sum);
    let deadline = Deadline::at(deadline::now() + wait);
    rank.run(Collective::AllReduce { data, op }, deadline)
}

#[test]
fn bytes_that_are_no_frame_are_garbled() {
    let ([rank, _], segments) = pair();
    segments[0]
        .ring(VirtualLane::Calls, 1)
        .write(&[0x5a; 4096], &[]);
    let error = reduce(&rank, 10, Duration::from_secs(10)).unwrap_err();
    assert!(
        matches!(error, Error::Garbled { rank: Rank(1), .. }),
        "{error}"
    );
}

#[test]
fn memory_that_is_spoiled_under_way_ends_in_a_result_in_time() {
    let wait = Duration::from_millis(300);
    for seed in 1..=12_u64 {
        let (ranks, segments) = pair();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let spoiler = scope.spawn(|| spoil(&segments[0], seed, &stop));
            let workers = ranks.each_ref().map(|rank| {
                scope.spawn(move || {
                    let started = deadline::now();
                    while reduce(rank, 30_000, wait).is_ok() && started.elapsed() < wait {}
                    started.elapsed()
                })
            });
            for worker in workers {
                let took = worker.join().expect("no rank panics");
                assert!(took < Duration::from_secs(10), "seed {seed}: {took:?}");
            }
            stop.store(true, Ordering::Relaxed);
            spoiler.join().unwrap();
        });
    }
}

/// Writes random bytes into a segment, most often to its bell and counters.
fn spoil(segment: &Segment, seed: u64, stop: &AtomicBool) {
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    while !stop.load(Ordering::Relaxed) {
        for shift in [12, 25, 27] {
            random ^= random.rotate_left(shift).wrapping_mul(3);
            let [value, choice, ..] = random.to_le_bytes();
            let near = [
                0,
                ring_at(2, VirtualLane::Calls, 1),
                ring_at(2, VirtualLane::Messages, 1),
            ];
            let any = usize::try_from(random >> 20).unwrap();
            let at = match choice % 8 {
                0 => any % segment_bytes(2),
                choice => near[usize::from(choice) % 3] + any % Ring::COUNTER_BYTES,
            };
            // SAFETY: `at` is within the segment; a byte is an atomic of its own.
            unsafe { &*segment.base().add(at).cast::<AtomicU8>() }.store(value, Ordering::Relaxed);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Counters and data do not share a cache line, and no ring reaches into another.
#[test]
fn rings_are_apart_and_fit() {
    for size in [1, 2, 3, 8] {
        let mut end = rings_at(size);
        for lane in [VirtualLane::Calls, VirtualLane::Messages] {
            for peer in 0..size {
                let at = ring_at(size, lane, peer);
                assert_eq!(
                    (at, at % align_of::<AlignedWords>()),
                    (end, 0),
                    "{lane:?} {peer}"
                );
                end = at + Ring::COUNTER_BYTES + RING_BYTES[lane as usize];
            }
        }
        assert_eq!(end, segment_bytes(size));
    }
    assert!(size_of::<Bell>() <= CHECK_AT && CHECK_AT + size_of::<AtomicU64>() <= SLOTS_AT);
    assert_eq!(SLOTS_AT % align_of::<TransferSlot>(), 0);
}

/// Two ranks of this process; the second reads transfers of the first, with access `able`.
#[cfg(target_os = "linux")]
fn lender_and_borrower(able: ReadAccess) -> [SharedRings; 2] {
    let segments: Vec<_> = (0..2)
        .map(|_| Arc::new(Segment::new(2, None).unwrap()))
        .collect();
    let mut ranks = [0, 1].map(|rank| {
        let gone: Arc<[AtomicBool]> = (0..2).map(|_| AtomicBool::new(false)).collect();
        let teller = FailureNotifier::Threads(Arc::default());
        SharedRings::new(
            rank,
            segments.clone(),
            gone,
            teller,
            crate::local::patience(2),
        )
    });
    ranks[1].borrow_from(0, std::process::id(), able);
    ranks
}

/// Memory that peers map, and the head of a frame.
#[cfg(target_os = "linux")]
fn lendable(bytes: usize) -> (crate::RegisteredMemory<u8>, [u8; 4]) {
    let mut memory = crate::RegisteredMemory::<u8>::with(bytes, regions::share);
    memory.fill(7);
    (memory, [1, 2, 3, 4])
}

#[cfg(target_os = "linux")]
#[test]
fn memory_is_lent_by_the_way_that_its_reader_has() {
    let (memory, head) = lendable(10_000);
    let plain = vec![7_u8; 10_000];
    for (maps, reads, body, lent, in_view) in [
        (true, false, &memory[..], true, true),
        (true, true, &memory[..], true, true),
        (false, true, &memory[..], true, false),
        (true, true, &plain[..], true, false),
        (true, false, &plain[..], false, false),
        (false, false, &memory[..], false, false),
    ] {
        let [lender, borrower] = lender_and_borrower(ReadAccess { reads, maps });
        let count = lender.write(VirtualLane::Calls, 1, &head, body).unwrap();
        assert_eq!(count, 10_004);
        let text = format!("{maps} {reads} {in_view}");
        assert_eq!(lender.holds(VirtualLane::Calls, 1), lent, "{text}");
        let mut into = [0; 10_004];
        assert_eq!(borrower.read(VirtualLane::Calls, 0, &mut into[..4]), Ok(4));
        assert_eq!(
            borrower.reads_in_place(VirtualLane::Calls, 0),
            in_view,
            "{text}"
        );
        let rest = borrower.read(VirtualLane::Calls, 0, &mut into[4..]);
        assert_eq!((rest, &into[4..]), (Ok(10_000), body), "{text}");
        assert!(!lender.holds(VirtualLane::Calls, 1), "{text}");
        let placed = if in_view { 10_000 } else { 0 };
        assert_eq!(
            (lender.placed(), borrower.placed()),
            (placed, placed),
            "{text}"
        );
    }
}

/// A peer's announcement about its memory may be wrong in every part. The process survives, and
/// gets a closed link or the bytes by reading the process.
#[cfg(target_os = "linux")]
#[test]
fn a_loan_of_a_liar_is_refused_or_read_the_other_way() {
    let (memory, _) = lendable(10_000);
    let honest = regions::find(&memory).unwrap();
    let loose = rustix::fs::memfd_create("loose", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let loose = u32::try_from(std::os::fd::AsRawFd::as_raw_fd(&loose)).unwrap();
    let outside = |offset| (MappedLocation { offset, ..honest }, false);
    let other = MappedLocation {
        check: !honest.check,
        ..honest
    };
    let unsealed = MappedLocation {
        descriptor: loose,
        ..honest
    };
    let nowhere = MappedLocation {
        descriptor: u32::MAX,
        ..honest
    };
    for (place, is_another) in [
        outside(1 << 20),
        outside(10_000_000_000),
        outside(u64::MAX),
        (other, true),
        (unsealed, true),
        (nowhere, true),
    ] {
        for reads in [false, true] {
            let able = ReadAccess { reads, maps: true };
            let [lender, borrower] = lender_and_borrower(able);
            let address = memory.as_ptr() as u64;
            lender.segments[1]
                .slot(0)
                .offer(0, address, 9_000, Some(place));
            let mut into = [0; 9_000];
            let read = borrower.read(VirtualLane::Calls, 0, &mut into);
            let expected = match is_another && reads {
                true => Ok(9_000),
                false => Err(Closed),
            };
            assert_eq!(read, expected, "{place:?}");
            assert_eq!(
                into.iter().all(|byte| *byte == 7),
                read.is_ok(),
                "{place:?}"
            );
        }
    }
}

/// As in `tests/loom.rs` for copies: bytes of a revoked transfer are discarded after use.
#[cfg(target_os = "linux")]
#[test]
fn what_is_used_of_a_loan_that_is_taken_back_is_lost() {
    let (memory, head) = lendable(10_000);
    let [lender, borrower] = lender_and_borrower(ReadAccess {
        reads: false,
        maps: true,
    });
    lender.write(VirtualLane::Calls, 1, &head, &memory).unwrap();
    borrower.read(VirtualLane::Calls, 0, &mut [0; 4]).unwrap();
    let half = borrower.read_in_place(0, &mut |bytes| bytes.len() / 2);
    assert_eq!(half, Ok(5_000));
    let mut take_back = |bytes: PeerBytes<'_>| {
        lender.release_memory(VirtualLane::Calls);
        bytes.len()
    };
    assert_eq!(borrower.read_in_place(0, &mut take_back), Err(Closed));
    assert_eq!(
        borrower.read(VirtualLane::Calls, 0, &mut [0; 10]),
        Err(Closed)
    );
}

/// The whole result is written back, or nothing; a failed call reclaims the memory.
#[cfg(target_os = "linux")]
#[test]
fn what_is_lent_to_come_back_does_so_whole_or_not_at_all() {
    const BYTES: usize = 40_000;
    for (first, second, comes_back) in [
        (BYTES, 0, true),
        (BYTES / 2, BYTES / 2, true),
        (BYTES / 2, BYTES / 4, false),
    ] {
        let (mut memory, head) = lendable(BYTES);
        let [lender, borrower] = lender_and_borrower(ReadAccess {
            reads: false,
            maps: true,
        });
        let frame = (&head[..], &memory[..]);
        let written = lender.write_reducible(VirtualLane::Calls, 1, frame, &memory);
        assert_eq!(written, Ok(BYTES + 4));
        borrower.read(VirtualLane::Calls, 0, &mut [0; 4]).unwrap();
        for count in [first, second].into_iter().filter(|count| *count > 0) {
            let taken = borrower.reduce_in_place(0, &mut |mut bytes| {
                bytes.write(0, &vec![9; count]);
                count
            });
            assert_eq!(taken, Ok(Some(count)));
        }
        let left = BYTES - first - second;
        if left > 0 {
            assert!(lender.holds(VirtualLane::Calls, 1));
            assert_eq!(
                borrower.read(VirtualLane::Calls, 0, &mut vec![0; left]),
                Ok(left)
            );
        }
        assert!(!lender.holds(VirtualLane::Calls, 1));
        assert_eq!(lender.is_written_back(1), comes_back);
        assert!(!lender.is_written_back(1), "it is said once");
        assert!(memory[..first + second].iter().all(|byte| *byte == 9));
        lender.release_memory(VirtualLane::Calls);
        assert!(regions::find(&memory).is_some(), "nothing was under way");

        memory.fill(7);
        let frame = (&head[..], &memory[..]);
        lender
            .write_reducible(VirtualLane::Calls, 1, frame, &memory)
            .unwrap();
        lender.release_memory(VirtualLane::Calls);
        assert_eq!(regions::find(&memory), None);
        borrower.read(VirtualLane::Calls, 0, &mut [0; 4]).unwrap();
        let late = borrower.reduce_in_place(0, &mut |mut bytes| {
            let count = bytes.read().len();
            bytes.write(0, &vec![1; count]);
            count
        });
        assert_eq!(late, Err(Closed));
        assert!(memory.iter().all(|byte| *byte == 7));
    }
}
