//! Single-copy transfers: the reader uses a long payload in the writer's memory, instead of
//! receiving it through a ring.
//!
//! ```text
//! slot, 128 bytes, of the writer:  0 lent  8 revoked  16 at  24 address  32 bytes
//!                                  40 file + 1, bit 32: may be written  48 check  56 offset
//!                  of the reader:  64 taken  72 able  80 returned
//! ```
//!
//! A transfer replaces bytes of the stream at position `at`. A reader that has consumed the ring up
//! to `at` continues with the transfer. Its bytes are at `address` in the writer's process, or at
//! `offset` in a file of the writer that both have mapped (`regions`). MPI libraries call the first
//! kind single copy, or CMA (Linux 3.2, `process_vm_readv(2)`). The second kind copies nothing that
//! is reduced.
//!
//! There is at most one transfer. The writer writes nothing behind it before it is complete, so the
//! order of the stream is kept. The writer leaves the bytes unchanged until the transfer is
//! complete or revoked. The reader checks for a revocation *after* it has used the bytes, and then
//! discards its result.
//!
//! The writer may let the reader write the reduced result back into the payload's place, so that
//! nobody has to send it. A reader does so with the whole payload, or reports that it has not.
//!
//! `tests/loom.rs` runs this file under a model checker.

use crate::sync::{AtomicU64, Ordering, fence};

/// The state of transfers from one rank to another, in memory that both share. Zero is a valid
/// state: no transfer.
#[repr(C, align(128))]
pub(crate) struct TransferSlot {
    offer: CacheAligned<WriterOffer>,
    taken: CacheAligned<ReaderCounters>,
}

#[repr(C, align(64))]
struct CacheAligned<T>(T);

/// Stored by the writer.
struct WriterOffer {
    /// Transfers so far.
    lent: AtomicU64,
    /// Number of the last revoked transfer.
    revoked: AtomicU64,
    at: AtomicU64,
    address: AtomicU64,
    bytes: AtomicU64,
    /// The file's descriptor plus 1, or 0.
    file: AtomicU64,
    check: AtomicU64,
    offset: AtomicU64,
}

/// Stored by the reader.
struct ReaderCounters {
    /// Number of the last completed transfer.
    taken: AtomicU64,
    /// How the reader can access the writer's memory: bits of [`ReadAccess`].
    able: AtomicU64,
    /// Number of the last transfer whose result was written back.
    returned: AtomicU64,
}

/// How a reader can access the memory of a writer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadAccess {
    /// All of it, by `process_vm_readv`.
    pub(crate) reads: bool,
    /// The part in files that the writer shares, by mapping them.
    pub(crate) maps: bool,
}

/// Location of a payload in a file that the reader can map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappedLocation {
    /// The writer's file descriptor.
    pub(crate) descriptor: u32,
    /// A random word that identifies the file.
    pub(crate) check: u64,
    pub(crate) offset: u64,
    /// The reader may write the result back to the same location.
    pub(crate) writable: bool,
}

/// Flag in the descriptor's word.
const WRITABLE: u64 = 1 << 32;

/// A transfer as read by the reader. Its fields are wrong if the writer is broken; they are used
/// only to read that process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SingleCopyTransfer {
    number: u64,
    /// Position in the stream.
    pub(crate) at: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) place: Option<MappedLocation>,
}

impl WriterOffer {
    fn place(&self) -> Option<MappedLocation> {
        let word = self.file.load(Ordering::Relaxed);
        let file = (word & !WRITABLE).checked_sub(1)?;
        Some(MappedLocation {
            descriptor: u32::try_from(file).ok()?,
            writable: word & WRITABLE != 0,
            check: self.check.load(Ordering::Relaxed),
            offset: self.offset.load(Ordering::Relaxed),
        })
    }
}

impl TransferSlot {
    #[cfg(test)]
    #[allow(dead_code, reason = "for the model checker")]
    pub(crate) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            offer: CacheAligned(WriterOffer {
                lent: zero(),
                revoked: zero(),
                at: zero(),
                address: zero(),
                bytes: zero(),
                file: zero(),
                check: zero(),
                offset: zero(),
            }),
            taken: CacheAligned(ReaderCounters {
                taken: zero(),
                able: zero(),
                returned: zero(),
            }),
        }
    }

    /// Called by the reader: announces how it can access the writer's memory.
    pub(crate) fn enable(&self, able: ReadAccess) {
        let bits = u64::from(able.reads) | u64::from(able.maps) << 1;
        self.taken.0.able.store(bits, Ordering::Release);
    }

    /// The access that the reader announced.
    pub(crate) fn able(&self) -> ReadAccess {
        let bits = self.taken.0.able.load(Ordering::Acquire);
        ReadAccess {
            reads: bits & 1 != 0,
            maps: bits & 2 != 0,
        }
    }

    /// Called by the writer: starts a transfer. None may be in progress.
    pub(crate) fn offer(&self, at: u64, address: u64, bytes: u64, place: Option<MappedLocation>) {
        let (offer, relaxed) = (&self.offer.0, Ordering::Relaxed);
        debug_assert!(!self.is_out(), "one loan at a time");
        offer.at.store(at, relaxed);
        offer.address.store(address, relaxed);
        offer.bytes.store(bytes, relaxed);
        let flag = |place: MappedLocation| if place.writable { WRITABLE } else { 0 };
        let file = place.map_or(0, |place| (u64::from(place.descriptor) + 1) | flag(place));
        offer.file.store(file, relaxed);
        if let Some(place) = place {
            offer.check.store(place.check, relaxed);
            offer.offset.store(place.offset, relaxed);
        }
        let number = offer.lent.load(relaxed) + 1;
        offer.lent.store(number, Ordering::Release);
    }

    /// Whether the writer must leave the payload unchanged.
    pub(crate) fn is_out(&self) -> bool {
        let (offer, taken) = (&self.offer.0, &self.taken.0);
        let lent = offer.lent.load(Ordering::Relaxed);
        lent != taken.taken.load(Ordering::Acquire) && lent != offer.revoked.load(Ordering::Relaxed)
    }

    /// Called by the writer: ends the transfer, complete or not. Afterwards the payload may change.
    pub(crate) fn revoke(&self) {
        let offer = &self.offer.0;
        let lent = offer.lent.load(Ordering::Relaxed);
        offer.revoked.store(lent, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The transfer that the reader has not completed.
    pub(crate) fn loan(&self) -> Option<SingleCopyTransfer> {
        let (offer, relaxed) = (&self.offer.0, Ordering::Relaxed);
        let number = offer.lent.load(Ordering::Acquire);
        (number != self.taken.0.taken.load(relaxed)).then(|| SingleCopyTransfer {
            number,
            at: offer.at.load(relaxed),
            address: offer.address.load(relaxed),
            bytes: offer.bytes.load(relaxed),
            place: offer.place(),
        })
    }

    /// Whether all bytes read so far were valid: the transfer is not revoked.
    pub(crate) fn is_valid(&self, loan: &SingleCopyTransfer) -> bool {
        fence(Ordering::SeqCst);
        // A later revoked transfer implies that this one is over too.
        self.offer.0.revoked.load(Ordering::Relaxed) < loan.number
    }

    /// Called by the reader: completes the transfer. `returned`: the whole result was written back.
    pub(crate) fn complete(&self, loan: &SingleCopyTransfer, returned: bool) {
        let taken = &self.taken.0;
        if returned {
            taken.returned.store(loan.number, Ordering::Relaxed);
        }
        taken.taken.store(loan.number, Ordering::Release);
    }

    /// Whether the result of the last transfer was written back.
    pub(crate) fn is_written_back(&self) -> bool {
        let (lent, taken) = (self.offer.0.lent.load(Ordering::Relaxed), &self.taken.0);
        taken.taken.load(Ordering::Acquire) == lent
            && taken.returned.load(Ordering::Relaxed) == lent
    }
}

/// Shortest payload that is transferred by `process_vm_readv`. Below, the system call and the wait
/// for the reader cost more than a second copy. Short in tests, so that the conformance suite
/// covers it.
///
/// All-reduce of 16 MiB between two processes on an EPYC VM, November 2026:
///
/// - by rings 2.6 to 3.5 ms;
/// - by transfers from huge pages ([`RegisteredMemory`](crate::Memory)) 1.5 to 2.0 ms;
/// - by transfers from 4 KiB pages, each looked up by the kernel, as long as by rings.
pub(crate) const LOAN_BYTES: usize = if cfg!(test) { 1 << 10 } else { 1 << 20 };
