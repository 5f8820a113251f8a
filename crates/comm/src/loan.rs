//! Loans: long payloads that the reader uses where the writer has them, instead of by way of a
//! ring.
//!
//! ```text
//! slot, 128 bytes, of the writer:  0 lent  8 revoked  16 at  24 address  32 bytes
//!                                  40 file + 1, bit 32: may be written  48 check  56 offset
//!                  of the reader:  64 taken  72 able  80 returned
//! ```
//!
//! A loan stands in for bytes of the stream at place `at`. A reader that has read the ring that far
//! reads on in the loan. It lies at `address` in the writer's process, or at `offset` in a file of
//! the writer that both have mapped (`regions`). The first is known as single copy, or CMA, in MPI
//! libraries (Linux 3.2, `process_vm_readv(2)`). The second copies nothing that is reduced.
//!
//! There is at most one loan, and the writer writes nothing behind it before it is taken, so the
//! order of the stream is kept. The writer leaves the bytes as they are until the loan is taken or
//! it has revoked it. The reader checks for a revocation *after* it has used the bytes, and then
//! throws away what it made of them.
//!
//! A writer that lends bytes to be reduced may let the reader put the result in their place: then
//! nobody has to send it. A reader does so with all of a loan or says that it has not.
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
    /// The descriptor of a file and 1, or 0.
    file: AtomicU64,
    check: AtomicU64,
    offset: AtomicU64,
}

/// Stored by the reader.
struct Taken {
    /// Loans that were read to their end.
    taken: AtomicU64,
    /// How this side can read the writer's memory: bits of [`Able`].
    able: AtomicU64,
    /// The last loan in whose place the reader has put a result.
    returned: AtomicU64,
}

/// How a reader can read the memory of a writer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Able {
    /// All of it, by asking the system.
    pub(crate) reads: bool,
    /// The part that lies in files that the writer shares.
    pub(crate) maps: bool,
}

/// Where lent bytes lie, if that is in a file which the reader can map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The writer's descriptor of the file.
    pub(crate) descriptor: u32,
    /// A word by which the file is known.
    pub(crate) check: u64,
    /// Where in the file.
    pub(crate) offset: u64,
    /// The reader may put there what becomes of the bytes.
    pub(crate) writable: bool,
}

/// The flag of a place beside its descriptor.
const WRITABLE: u64 = 1 << 32;

/// A loan as its reader sees it. What it says may be wrong if the writer is broken: it is used for
/// nothing but to read that process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Loan {
    number: u64,
    /// The place in the stream.
    pub(crate) at: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) place: Option<Place>,
}

impl Offered {
    fn place(&self) -> Option<Place> {
        let word = self.file.load(Ordering::Relaxed);
        let file = (word & !WRITABLE).checked_sub(1)?;
        Some(Place {
            descriptor: u32::try_from(file).ok()?,
            writable: word & WRITABLE != 0,
            check: self.check.load(Ordering::Relaxed),
            offset: self.offset.load(Ordering::Relaxed),
        })
    }
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
                file: zero(),
                check: zero(),
                offset: zero(),
            }),
            taken: Line(Taken {
                taken: zero(),
                able: zero(),
                returned: zero(),
            }),
        }
    }

    /// The reader says how it can read the writer's memory.
    pub(crate) fn enable(&self, able: Able) {
        let bits = u64::from(able.reads) | u64::from(able.maps) << 1;
        self.taken.0.able.store(bits, Ordering::Release);
    }

    /// The reader's abilities, as it announced them.
    pub(crate) fn able(&self) -> Able {
        let bits = self.taken.0.able.load(Ordering::Acquire);
        Able {
            reads: bits & 1 != 0,
            maps: bits & 2 != 0,
        }
    }

    /// The writer lends bytes; none are lent at the time.
    pub(crate) fn lend(&self, at: u64, address: u64, bytes: u64, place: Option<Place>) {
        let (offer, relaxed) = (&self.offer.0, Ordering::Relaxed);
        debug_assert!(!self.is_out(), "one loan at a time");
        offer.at.store(at, relaxed);
        offer.address.store(address, relaxed);
        offer.bytes.store(bytes, relaxed);
        let flag = |place: Place| if place.writable { WRITABLE } else { 0 };
        let file = place.map_or(0, |place| (u64::from(place.descriptor) + 1) | flag(place));
        offer.file.store(file, relaxed);
        if let Some(place) = place {
            offer.check.store(place.check, relaxed);
            offer.offset.store(place.offset, relaxed);
        }
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
            place: offer.place(),
        })
    }

    /// Whether what the reader has used up to now is what was lent.
    pub(crate) fn stands(&self, loan: &Loan) -> bool {
        fence(Ordering::SeqCst);
        // A later loan that was revoked too says the same of this one.
        self.offer.0.revoked.load(Ordering::Relaxed) < loan.number
    }

    /// The reader has read all of it, and put a result in the place of all of it, or not.
    pub(crate) fn take(&self, loan: &Loan, returned: bool) {
        let taken = &self.taken.0;
        if returned {
            taken.returned.store(loan.number, Ordering::Relaxed);
        }
        taken.taken.store(loan.number, Ordering::Release);
    }

    /// Whether the reader has put a result in the place of the last loan.
    pub(crate) fn has_come_back(&self) -> bool {
        let (lent, taken) = (self.offer.0.lent.load(Ordering::Relaxed), &self.taken.0);
        taken.taken.load(Ordering::Acquire) == lent
            && taken.returned.load(Ordering::Relaxed) == lent
    }
}

/// Shortest payload that is lent from memory which the reader has to ask the system for. Below, the
/// system call and waiting for the reader cost more than a second copy. In tests short enough that
/// the conformance suite lends.
///
/// All-reduce of 16 MiB between two processes on an EPYC VM, November 2026:
///
/// - by rings 2.6 to 3.5 ms;
/// - by loans 1.5 to 2.0 ms where memory is in huge pages ([`Memory`](crate::Memory));
/// - by loans in pages of 4 KiB, each of which the system looks up, as by rings.
pub(crate) const LOAN_BYTES: usize = if cfg!(test) { 1 << 10 } else { 1 << 20 };
