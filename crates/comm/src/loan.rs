//! Loans: long payloads that the reader copies from where the writer has them, in one go, instead
//! of by way of a ring. Known as single copy, or CMA, in MPI libraries (Linux 3.2,
//! `process_vm_readv(2)`).
//!
//! ```text
//! slot, 128 bytes, of the writer:  0 lent  8 revoked  16 at  24 address  32 bytes
//!                  of the reader:  64 taken  72 able
//! ```
//!
//! A loan stands in for bytes of the stream at place `at`: whoever has read the ring that far reads
//! on at `address` in the writer's process. There is at most one, and the writer writes nothing
//! behind it before it is taken, so the order of the stream is kept. The writer leaves the bytes as
//! they are until the loan is taken or it has revoked it; the reader looks whether it was revoked
//! *after* it has copied, and then throws the copy away.
//!
//! `tests/loom.rs` runs this file under a model checker.

use crate::sync::{AtomicU64, Ordering, fence};

/// The state of loans from one rank to another, in memory that both share. Zero is a value: no
/// loan, and none wanted.
#[repr(C, align(128))]
pub(crate) struct Slot {
    offer: Line<Offered>,
    taken: Line<Taken>,
}

#[repr(C, align(64))]
struct Line<T>(T);

/// Stored by the writer.
struct Offered {
    /// Loans so far.
    lent: AtomicU64,
    /// The last one that was revoked.
    revoked: AtomicU64,
    at: AtomicU64,
    address: AtomicU64,
    bytes: AtomicU64,
}

/// Stored by the reader.
struct Taken {
    /// Loans that were read to their end.
    taken: AtomicU64,
    /// Whether this side can read the writer's memory.
    able: AtomicU64,
}

/// A loan as its reader sees it. What it says may be wrong if the writer is broken: it is used for
/// nothing but to read that process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Loan {
    number: u64,
    /// The place in the stream.
    pub(crate) at: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl Slot {
    #[cfg(test)]
    #[allow(dead_code, reason = "for the model checker")]
    pub(crate) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            offer: Line(Offered {
                lent: zero(),
                revoked: zero(),
                at: zero(),
                address: zero(),
                bytes: zero(),
            }),
            taken: Line(Taken {
                taken: zero(),
                able: zero(),
            }),
        }
    }

    /// The reader says that it can read the writer's memory.
    pub(crate) fn enable(&self) {
        self.taken.0.able.store(1, Ordering::Release);
    }

    /// Whether it said so.
    pub(crate) fn is_able(&self) -> bool {
        self.taken.0.able.load(Ordering::Acquire) == 1
    }

    /// The writer lends bytes; none are lent at the time.
    pub(crate) fn lend(&self, at: u64, address: u64, bytes: u64) {
        let (offer, relaxed) = (&self.offer.0, Ordering::Relaxed);
        debug_assert!(!self.is_out(), "one loan at a time");
        offer.at.store(at, relaxed);
        offer.address.store(address, relaxed);
        offer.bytes.store(bytes, relaxed);
        let number = offer.lent.load(relaxed) + 1;
        offer.lent.store(number, Ordering::Release);
    }

    /// Whether the writer has to leave bytes as they are.
    pub(crate) fn is_out(&self) -> bool {
        let (offer, taken) = (&self.offer.0, &self.taken.0);
        let lent = offer.lent.load(Ordering::Relaxed);
        lent != taken.taken.load(Ordering::Acquire) && lent != offer.revoked.load(Ordering::Relaxed)
    }

    /// The writer takes the loan back, taken or not. From then on it may change the bytes.
    pub(crate) fn revoke(&self) {
        let offer = &self.offer.0;
        let lent = offer.lent.load(Ordering::Relaxed);
        offer.revoked.store(lent, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The loan that the reader has not taken yet.
    pub(crate) fn loan(&self) -> Option<Loan> {
        let (offer, relaxed) = (&self.offer.0, Ordering::Relaxed);
        let number = offer.lent.load(Ordering::Acquire);
        (number != self.taken.0.taken.load(relaxed)).then(|| Loan {
            number,
            at: offer.at.load(relaxed),
            address: offer.address.load(relaxed),
            bytes: offer.bytes.load(relaxed),
        })
    }

    /// Whether what the reader has copied up to now is what was lent.
    pub(crate) fn stands(&self, loan: &Loan) -> bool {
        fence(Ordering::SeqCst);
        self.offer.0.revoked.load(Ordering::Relaxed) != loan.number
    }

    /// The reader has read all of it.
    pub(crate) fn take(&self, loan: &Loan) {
        self.taken.0.taken.store(loan.number, Ordering::Release);
    }
}

/// Shortest payload that is lent: below, the system call and waiting for the reader cost more than
/// a second copy. In tests short enough that the conformance suite lends.
///
/// All-reduce of 16 MiB between two processes on an EPYC VM, November 2026: by rings 2.6 to 3.5 ms;
/// by loans 1.5 to 2.0 where memory is in huge pages ([`Memory`](crate::Memory)), and as by rings
/// in pages of 4 KiB, each of which the system looks up.
pub(crate) const LOAN_BYTES: usize = if cfg!(test) { 1 << 10 } else { 1 << 20 };
