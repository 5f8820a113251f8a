//! Rings, bells and transfers of shared memory under loom, which tries every interleaving of their
//! steps.
//!
//! `src/ring.rs` and `src/single_copy.rs` are compiled a second time here, with a `sync` built from
//! the model checker's parts. These are its atomics, cells that detect simultaneous access of both
//! sides, and a futex from its mutex and condition variable. A lost wake-up is a deadlock, which
//! loom reports.

#![allow(clippy::unwrap_used, reason = "a test")]

#[path = "../src/ring.rs"]
#[allow(dead_code, unreachable_pub, reason = "the model uses some of it")]
mod ring;

#[path = "../src/single_copy.rs"]
#[allow(dead_code, unreachable_pub, reason = "the model uses some of it")]
mod single_copy;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    use loom::cell::UnsafeCell;
    use loom::sync::{Condvar, Mutex};

    /// Bytes of the ring in the model.
    pub(crate) const BYTES: usize = 4;

    loom::lazy_static! {
        static ref TOUCHED: [UnsafeCell<()>; BYTES] = std::array::from_fn(|_| UnsafeCell::new(()));
        static ref GATE: Mutex<()> = Mutex::new(());
        static ref RUNG: Condvar = Condvar::new();
    }

    std::thread_local! {
        /// Omits the fences, to check that the model notices. A model runs on one thread.
        pub(crate) static NO_FENCES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }

    pub(crate) fn fence(order: Ordering) {
        if !NO_FENCES.get() {
            loom::sync::atomic::fence(order);
        }
    }

    /// Copies into the ring, which is aligned to its size.
    pub(crate) unsafe fn copy_in(from: *const u8, into: *mut u8, count: usize) {
        (0..count).for_each(|i| TOUCHED[(into as usize + i) % BYTES].with_mut(|_| ()));
        // SAFETY: as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(from, into, count) };
    }

    /// Copies out of the ring.
    pub(crate) unsafe fn copy_out(from: *const u8, into: *mut u8, count: usize) {
        (0..count).for_each(|i| TOUCHED[(from as usize + i) % BYTES].with(|_| ()));
        // SAFETY: as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(from, into, count) };
    }

    /// Time plays no part: only a wake-up ends it.
    pub(crate) fn futex_wait(word: &AtomicU32, value: u32, _until: std::time::Instant) {
        let gate = GATE.lock().unwrap();
        if word.load(Ordering::SeqCst) == value {
            drop(RUNG.wait(gate).unwrap());
        }
    }

    pub(crate) fn futex_wake(_word: &AtomicU32) {
        drop(GATE.lock().unwrap());
        RUNG.notify_all();
    }
}

// Not loom's: its check for leaks would panic again while a failed model unwinds.
use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::thread;

#[repr(align(4))]
struct Data([u8; sync::BYTES]);

struct Link {
    ring: ring::Ring,
    bells: [ring::Bell; 2],
    // The memory that the ring points to.
    _counters: Box<ring::Counters>,
    _data: Box<Data>,
}

fn link() -> Arc<Link> {
    let counters = Box::new(ring::Counters::new());
    let mut data = Box::new(Data([0; sync::BYTES]));
    let (words, bytes) = (&raw const *counters, data.0.as_mut_ptr());
    // SAFETY: both live as long as the ring, in the same struct.
    let ring = unsafe { ring::Ring::new(words, bytes, sync::BYTES) };
    Arc::new(Link {
        ring,
        bells: [ring::Bell::new(), ring::Bell::new()],
        _counters: counters,
        _data: data,
    })
}

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    sync::NO_FENCES.set(false);
    builder.check(model);
}

/// More bytes than the ring holds, so that both sides must wait. All arrive in order, no byte is
/// touched by both sides at once, and no side sleeps for ever.
fn exchange() {
    const SENT: [u8; 6] = [1, 2, 3, 4, 5, 6];
    let far = std::time::Instant::now();
    let link = link();
    let writer = {
        let link = Arc::clone(&link);
        thread::spawn(move || {
            let mut gone = 0;
            while gone < SENT.len() {
                let head = (gone + 1).min(SENT.len());
                let count = link.ring.write(&SENT[gone..head], &SENT[head..]);
                gone += count;
                match count {
                    0 => link.bells[0].sleep(far, || link.ring.has_room()),
                    _ => link.bells[1].ring(),
                }
            }
        })
    };
    let mut got: Vec<u8> = Vec::new();
    while got.len() < SENT.len() {
        let mut bytes = [0; 3];
        let count = link.ring.read(&mut bytes);
        got.extend(&bytes[..count]);
        match count {
            0 => link.bells[1].sleep(far, || link.ring.is_filled()),
            _ => link.bells[0].ring(),
        }
    }
    writer.join().unwrap();
    assert_eq!(got, SENT);
}

#[test]
fn bytes_arrive_and_nobody_sleeps_for_ever() {
    check(3, exchange);
}

/// A model that does not detect missing fences would be useless.
#[test]
#[should_panic = "deadlock"]
fn without_fences_a_wake_up_is_lost() {
    check(3, || {
        sync::NO_FENCES.set(true);
        exchange();
    });
}

/// A call before, while or after its addressee falls asleep ends that sleep.
#[test]
fn calls_are_never_lost() {
    let far = std::time::Instant::now();
    check(3, move || {
        let link = link();
        let caller = {
            let link = Arc::clone(&link);
            thread::spawn(move || link.bells[0].call())
        };
        let called = std::cell::Cell::new(false);
        while !called.get() {
            link.bells[0].sleep(far, || {
                called.set(called.get() || link.bells[0].was_called(0));
                called.get()
            });
            called.set(called.get() || link.bells[0].was_called(0));
        }
        caller.join().unwrap();
    });
}

/// A writer starts `loans` transfers; it revokes the last one at some moment and overwrites the
/// payload. The reader gets the payload or nothing.
fn lend_and_take_back(loans: u64, looks: bool) {
    let shared = Arc::new((single_copy::TransferSlot::new(), AtomicU64::new(0)));
    let writer = {
        let shared = Arc::clone(&shared);
        thread::spawn(move || {
            let (slot, bytes) = &*shared;
            for number in 1..=loans {
                bytes.store(number, Relaxed);
                slot.offer(number, 0, 8, None);
                while number < loans && slot.is_out() {
                    thread::yield_now();
                }
            }
            slot.revoke();
            bytes.store(9, Relaxed);
        })
    };
    let (slot, bytes) = &*shared;
    for number in 1..=loans {
        while !take(slot, bytes, number, looks) {
            thread::yield_now();
        }
    }
    writer.join().unwrap();
}

/// Whether there was a transfer; it is completed if valid, or without checking.
fn take(slot: &single_copy::TransferSlot, bytes: &AtomicU64, number: u64, looks: bool) -> bool {
    let Some(loan) = slot.loan() else {
        return false;
    };
    assert_eq!(loan.at, number);
    let copy = bytes.load(Relaxed);
    if !looks || slot.is_valid(&loan) {
        slot.complete(&loan, false);
        assert_eq!(copy, number);
    }
    true
}

#[test]
fn what_is_taken_was_lent() {
    check(3, || lend_and_take_back(1, true));
    check(3, || lend_and_take_back(2, true));
}

/// The reader writes a result back: the writer sees it, or the transfer completed without.
fn lend_and_have_back(returned: bool) {
    let shared = Arc::new((single_copy::TransferSlot::new(), AtomicU64::new(0)));
    let reader = {
        let shared = Arc::clone(&shared);
        thread::spawn(move || {
            let (slot, bytes) = &*shared;
            let loan = loop {
                match slot.loan() {
                    Some(loan) => break loan,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(bytes.load(Relaxed), 3);
            if returned {
                bytes.store(5, Relaxed);
            }
            slot.complete(&loan, returned);
        })
    };
    let (slot, bytes) = &*shared;
    bytes.store(3, Relaxed);
    slot.offer(0, 0, 8, None);
    while slot.is_out() {
        thread::yield_now();
    }
    assert_eq!(slot.is_written_back(), returned);
    assert_eq!(bytes.load(Relaxed), if returned { 5 } else { 3 });
    reader.join().unwrap();
}

#[test]
fn what_comes_back_is_there_when_the_loan_is_taken() {
    check(3, || lend_and_have_back(true));
    check(3, || lend_and_have_back(false));
}

/// The model shows what `stands` is for.
#[test]
#[should_panic = "left: 9"]
fn whoever_does_not_look_takes_what_was_not_lent() {
    check(3, || lend_and_take_back(1, false));
}
