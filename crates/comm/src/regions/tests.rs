//! Mapping of shared files: which are accepted and which refused.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::*;
use crate::reduce::{OperandSide, fold_lent};
use crate::{Dtype, Reduce, RegisteredMemory};

fn shared(bytes: usize) -> RegisteredMemory<u8> {
    let memory = RegisteredMemory::with(bytes, share);
    assert!(memory.is_registered());
    memory
}

fn own() -> u32 {
    std::process::id()
}

/// The first bytes of a view.
fn copied(view: &MappedView, bytes: usize) -> Vec<u8> {
    let mut copy = vec![0; bytes];
    view.bytes(0, bytes).expect("all of it").copy_to(&mut copy);
    copy
}

#[test]
fn bytes_are_found_where_they_are() {
    let memory = shared(3 * PAGE_BYTES);
    for (from, count) in [
        (0, 0),
        (0, 1),
        (0, 3 * PAGE_BYTES),
        (17, 40),
        (PAGE_BYTES, 9),
    ] {
        let place = find(&memory[from..from + count]).unwrap();
        assert_eq!(place.offset, from as u64);
    }
    let first = find(&memory).unwrap();
    let other = shared(PAGE_BYTES);
    assert_ne!(find(&other).unwrap().check, first.check);
    assert_eq!(find(&[0; 100]), None);
    assert_eq!(
        find(&RegisteredMemory::with(PAGE_BYTES, |_| None)),
        None::<MappedLocation>
    );
    drop(memory);
    let known = |mapped: &Mapped| mapped.place.check == first.check;
    assert!(!regions().values().any(known));
}

/// Lengths of every kind: within a page, at its end, huge, and not a whole huge page.
#[test]
fn a_view_has_what_the_owner_wrote_and_ends_where_that_does() {
    for bytes in [1, PAGE_BYTES, PAGE_BYTES + 1, 2 << 20, (5 << 20) + 3] {
        let mut memory = shared(bytes);
        for (at, byte) in memory.iter_mut().enumerate() {
            assert_eq!(*byte, 0, "{bytes}");
            *byte = at.to_le_bytes()[0] ^ at.to_le_bytes()[1];
        }
        let place = find(&memory).unwrap();
        let view = MappedView::open(own(), &place).unwrap();
        assert_eq!(copied(&view, bytes), &memory[..]);
        let all = bytes.next_multiple_of(PAGE_BYTES) as u64;
        for (offset, count, there) in [
            (all, 0, true),
            (all, 1, false),
            (all - 1, 1, true),
            (0, bytes.next_multiple_of(PAGE_BYTES) + 1, false),
            (u64::MAX, 1, false),
            (1, usize::MAX, false),
        ] {
            assert_eq!(
                view.bytes(offset, count).is_some(),
                there,
                "{offset} {count}"
            );
        }
    }
}

/// A peer may write to bytes that have their pages to themselves. The caller's buffer covers the
/// pages, or ends where the used memory ends.
#[test]
fn what_a_peer_may_write_to_has_its_pages_for_itself() {
    const PAGE: usize = PAGE_BYTES;
    let memory = shared(3 * PAGE + 100);
    let end = memory.len();
    for (whole, part, writable) in [
        (0..end, 0..end, true),
        (0..end, 5..7, true),
        (0..end, 3 * PAGE + 1..end, true),
        (0..end - 1, 3 * PAGE + 1..end - 1, false),
        (0..end - 1, 0..3 * PAGE, true),
        (1..end, 1..9, false),
        (1..end, PAGE - 1..PAGE + 9, false),
        (1..end, PAGE..PAGE + 9, true),
        (PAGE..2 * PAGE, PAGE..2 * PAGE, true),
        (PAGE..2 * PAGE - 1, PAGE..PAGE + 1, false),
    ] {
        let found = find_writable(&memory[part.clone()], &memory[whole.clone()]);
        assert_eq!(found.is_some(), writable, "{part:?} of {whole:?}");
        assert!(found.is_none_or(|place| place.writable && place.offset == part.start as u64));
    }
    let plain = vec![0_u8; 3 * PAGE];
    assert_eq!(find_writable(&plain, &plain), None);
}

#[test]
fn what_was_taken_back_is_out_of_reach_and_as_it_was() {
    for bytes in [3 * PAGE_BYTES + 5, 5 << 20] {
        let mut memory = shared(bytes);
        memory.fill(7);
        let place = find(&memory).unwrap();
        let view = MappedView::open(own(), &place).unwrap();
        let part = PAGE_BYTES + 9..bytes;
        let writable = find_writable(&memory[part.clone()], &memory);
        assert!(writable.is_some());
        // SAFETY: just found, and `memory` is this test's.
        unsafe { take_back(&raw const memory[part]) };
        assert_eq!(find(&memory), None, "it is lent no more");
        // SAFETY: a peer that was stopped and resumes; nothing else uses the bytes.
        let lent = unsafe { view.bytes_mut(0, bytes) };
        lent.unwrap().write(0, &vec![9; bytes]);
        let (kept, lent) = memory.split_at(PAGE_BYTES);
        assert!(kept.iter().all(|byte| *byte == 9), "these were not taken");
        assert!(lent.iter().all(|byte| *byte == 7), "{bytes}");
        memory.fill(1);
        assert!(
            copied(&view, bytes)[PAGE_BYTES..]
                .iter()
                .all(|byte| *byte == 9)
        );
    }
}

/// A peer that breaks the protocol writes while another folds: each element comes from old or new
/// bytes.
#[test]
fn lent_bytes_may_change_while_they_are_used() {
    const BYTES: usize = 4 * PAGE_BYTES + 3;
    let memory = shared(BYTES);
    let place = find(&memory).unwrap();
    let views = [(); 2].map(|()| MappedView::open(own(), &place).unwrap());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in (0..=1).cycle() {
                // SAFETY: a view of this thread alone; `memory` is not used meanwhile.
                let lent = unsafe { views[0].bytes_mut(0, BYTES) };
                lent.unwrap().write(0, &vec![value; BYTES]);
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        for _ in 0..200 {
            let (mut sums, lent) = (vec![6; BYTES], views[1].bytes(0, BYTES).unwrap());
            fold_lent(Reduce::Sum, Dtype::U8, OperandSide::First, &mut sums, lent);
            assert!(sums.iter().all(|sum| matches!(sum, 6 | 7)));
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// A location in `file`, which belongs to this process.
fn place(file: &OwnedFd, check: u64) -> MappedLocation {
    MappedLocation {
        descriptor: u32::try_from(file.as_raw_fd()).expect("it is open"),
        check,
        offset: 0,
        writable: false,
    }
}

#[test]
fn what_can_be_cut_short_or_is_another_file_is_not_mapped() {
    let length = (2 * PAGE_BYTES) as u64;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let loose = memfd_create("loose", flags).unwrap();
    ftruncate(&loose, length).unwrap();
    assert!(
        MappedView::open(own(), &place(&loose, 0)).is_none(),
        "not sealed"
    );
    let seals = rustix::fs::SealFlags::GROW | rustix::fs::SealFlags::SEAL;
    fcntl_add_seals(&loose, seals).unwrap();
    assert!(
        MappedView::open(own(), &place(&loose, 0)).is_none(),
        "it can shrink"
    );

    let sealed = MemoryFile::new(length).unwrap();
    assert!(ftruncate(&sealed.file, 0).is_err());
    assert!(MappedView::open(own(), &place(&sealed.file, 0)).is_some());
    assert!(
        MappedView::open(own(), &place(&sealed.file, 1)).is_none(),
        "another"
    );
    for bytes in [0, PAGE_BYTES as u64 - 1, length + 1] {
        let odd = MemoryFile::new(bytes).unwrap();
        assert!(
            MappedView::open(own(), &place(&odd.file, 0)).is_none(),
            "{bytes}"
        );
    }
    let on_disk: OwnedFd = tempfile::tempfile().unwrap().into();
    ftruncate(&on_disk, length).unwrap();
    assert!(
        MappedView::open(own(), &place(&on_disk, 0)).is_none(),
        "a file on disk"
    );
    let nobody = MappedLocation {
        descriptor: u32::MAX,
        ..place(&on_disk, 0)
    };
    assert!(MappedView::open(own(), &nobody).is_none());
    assert!(MappedView::open(u32::MAX, &place(&sealed.file, 0)).is_none());
}

#[test]
fn views_are_bounded_and_end_with_the_memory() {
    let mut views = Views::default();
    let (kept, gone) = (shared(100), shared(100));
    let places = [find(&kept).unwrap(), find(&gone).unwrap()];
    for place in &places {
        let (first, again) = (views.get(own(), place), views.get(own(), place));
        assert!(Arc::ptr_eq(&first.unwrap(), &again.unwrap()));
    }
    drop(gone);
    views.forget_ended();
    assert_eq!(views.views.len(), 1);
    assert_eq!(views.views[0].check, places[0].check);
    assert!(views.get(own(), &places[1]).is_none(), "its file is gone");
    assert_eq!(views.refused, Some(places[1].check));
    assert!(views.get(own(), &places[0]).is_some());

    // More than any process of this crate has: files not made by `share`.
    let files: Vec<MemoryFile> = (0..MOST + 3)
        .map(|_| MemoryFile::new(2 * PAGE_BYTES as u64).unwrap())
        .collect();
    for (file, check) in files.iter().zip(1..) {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let last = Mapping::of(&file.file, (PAGE_BYTES, PAGE_BYTES), access).unwrap();
        tail(&last, 0).check.store(check, Ordering::Release);
        assert!(views.get(own(), &place(&file.file, check)).is_some());
    }
    assert_eq!(views.views.len(), MOST);
}

/// Concurrent callers get exactly the maximum number of counts; all are returned.
#[test]
fn no_file_more_than_a_process_may_have_is_counted() {
    static FILES: AtomicUsize = AtomicUsize::new(0);
    const THREADS: usize = 4;
    let start = std::sync::Barrier::new(THREADS);
    for _ in 0..100 {
        let taken: Vec<Vec<FileCount>> = std::thread::scope(|scope| {
            let take = || {
                start.wait();
                (0..MOST).filter_map(|_| FileCount::take(&FILES)).collect()
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(take)).collect();
            let threads = threads.into_iter();
            threads.map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(taken.iter().map(Vec::len).sum::<usize>(), MOST);
        assert_eq!(FILES.load(Ordering::Relaxed), MOST);
        drop(taken);
        assert_eq!(FILES.load(Ordering::Relaxed), 0);
    }
}

/// A writer that started another transfer has revoked the first one.
#[test]
fn a_loan_before_one_that_was_revoked_stands_no_more() {
    let slot = crate::single_copy::TransferSlot::new();
    slot.offer(0, 1, 2, None);
    let first = slot.loan().unwrap();
    assert!(slot.is_valid(&first));
    slot.revoke();
    assert!(!slot.is_valid(&first));
    slot.offer(0, 3, 4, None);
    let second = slot.loan().unwrap();
    assert!(!slot.is_valid(&first) && slot.is_valid(&second));
    slot.revoke();
    assert!(!slot.is_valid(&first) && !slot.is_valid(&second));
}
