//! Interfaces of links between ranks.
//!
//! - [`Transport`]: ordered bytes between two ranks, and waiting; every backend has it.
//! - [`ZeroCopy`]: zero-copy reads and writes, for links that support them.
//! - [`WriteBack`]: write-back of results into the sender's memory.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::peer_bytes::{PeerBytes, PeerBytesMut};
use crate::status::FailureNotice;
use crate::{MemoryRegistration, Pages};

/// Each pair of ranks has two independent byte streams, so that messages and collectives cannot
/// block each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtualLane {
    /// Collectives, in lockstep: it only ever holds frames of the current call and the next.
    Calls,
    /// Messages and credits, read by any thread that polls.
    Messages,
}

/// The peer has closed the link, and all of its bytes have been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

/// An event that a waiting rank is interested in.
#[derive(Clone, Copy, Debug)]
pub struct WaitInterest {
    pub lane: VirtualLane,
    pub peer: usize,
    /// Wait for bytes to read.
    pub read: bool,
    /// Wait for room to write.
    pub write: bool,
}

/// [`Transport::gulp`] of links that copy: reductions find their bytes in L2.
pub const GULP_BYTES: usize = 256 << 10;

/// Links from one rank to all others. `peer` is a rank and never this one.
///
/// Bytes of one lane arrive in the order written. Nothing but `wait` blocks.
pub trait Transport: fmt::Debug + Send + Sync + 'static {
    /// Writes as much of `head` followed by `body` as fits and returns that number of bytes.
    fn write(
        &self,
        lane: VirtualLane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed>;

    /// Reads available bytes; 0 if there are none. If the transport [lends](Lend::lends), it may
    /// write to `into` from then on, until [`ZeroCopy::let_go`] or until bytes arrived. Continue a
    /// partial read with the same buffer.
    fn read(&self, lane: VirtualLane, peer: usize, into: &mut [u8]) -> Result<usize, Closed>;

    /// The zero-copy interface of these links, if they have one.
    fn zero_copy(&self) -> Option<&dyn ZeroCopy>;

    /// Blocks until one of `wants` may make progress, `wake` was called for `lane`, or `until`. May
    /// return early. At most one thread waits per lane.
    fn wait(&self, lane: VirtualLane, wants: &[WaitInterest], until: Instant);

    /// Ends the current or next `wait` on both lanes.
    fn wake(&self);

    /// Sends a failure notice to all peers, as far as possible without waiting.
    fn notify_failure(&self, news: &FailureNotice);

    /// Asks the background thread of the links to send pending bytes; false if there is none.
    fn nudge(&self) -> bool;

    /// How often the background thread has read all failure notices that had arrived; it only
    /// grows. `None` for links without such a thread: their notices need none.
    fn notice_reads(&self) -> Option<u64> {
        None
    }

    /// The clock of deadlines.
    fn now(&self) -> Instant;

    /// How to poll before blocking.
    fn patience(&self) -> SpinPolicy;

    /// Most bytes worth reading at once if they are reduced on arrival. They stay in L2 together
    /// with their target.
    fn gulp(&self) -> usize;
}

/// Zero-copy links. They read a body from its sender's memory, write it to its destination, or let
/// the receiver use it in place.
pub trait ZeroCopy {
    /// As [`Transport::write`], for a body that the peer stores unchanged and does not reduce. The
    /// links may move it to its destination, and then accept all of it at once.
    fn write_whole(
        &self,
        lane: VirtualLane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed>;

    /// Announces that the caller waits for a message of `peer` in `memory`, and stays until one
    /// arrives.
    fn expect(&self, peer: usize, memory: &[u8]);

    /// Whether the next bytes of `peer` can be used in place: see [`lend`](Self::lend). A read then
    /// returns no more than requested.
    fn reads_in_place(&self, lane: VirtualLane, peer: usize) -> bool;

    /// Calls `take` with available bytes of [`VirtualLane::Calls`] in place, fragment by fragment,
    /// until it uses less than a fragment. Returns the number of used bytes. Only if it `lends`.
    fn read_in_place(
        &self,
        peer: usize,
        take: &mut dyn FnMut(PeerBytes<'_>) -> usize,
    ) -> Result<usize, Closed>;

    /// Payload bytes that were never copied: sent from the caller's memory, written to their
    /// destination, or reduced in place.
    fn placed(&self) -> u64;

    /// See [`Group::register_pages`](crate::Group::register_pages).
    fn register_pages(&self, pages: &Arc<Pages>) -> Option<MemoryRegistration>;

    /// Whether the links still read bytes that were passed to `write`. They must stay unchanged.
    fn holds(&self, lane: VirtualLane, peer: usize) -> bool;

    /// Ends that: the bytes are copied or abandoned. Called when a call fails.
    fn release_memory(&self, lane: VirtualLane);

    /// The same for the traffic to and from one `peer`.
    fn release_peer_memory(&self, lane: VirtualLane, peer: usize);

    /// The write-back interface of these links, if they have one.
    fn write_back(&self) -> Option<&dyn WriteBack>;
}

/// Links whose receiver may write the reduced result back into the body's memory.
pub trait WriteBack {
    /// As [`Transport::write`], for a body that the peer reduces. The result belongs in its place,
    /// in `whole`, which the caller may write to: the peer may write it there.
    /// [`has_come_back`](Self::has_come_back) reports whether it has.
    fn write_reducible(
        &self,
        lane: VirtualLane,
        peer: usize,
        frame: (&[u8], &[u8]),
        whole: &[u8],
    ) -> Result<usize, Closed>;

    /// Whether the result of the last released `write_to_come_back` is in place. Reported once for
    /// each write.
    fn is_written_back(&self, peer: usize) -> bool;

    /// As [`ZeroCopy::lend`], for bytes that are replaced by the result: `take` also writes it
    /// there. `None` if the next bytes do not allow that.
    fn reduce_in_place(
        &self,
        peer: usize,
        take: &mut dyn FnMut(PeerBytesMut<'_>) -> usize,
    ) -> Result<Option<usize>, Closed>;
}

/// How often to poll for progress before blocking.
#[derive(Clone, Copy, Debug)]
pub struct SpinPolicy {
    /// Polls with a pause instruction between them.
    pub spins: u32,
    /// Further polls, the core yielded between them.
    pub yields: u32,
}

/// The next step after a poll without progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Poll again, after a pause.
    Look,
    Block,
}

impl SpinPolicy {
    /// Pauses after poll number `looks` without progress, or returns [`Pause::Block`].
    pub fn pause(self, looks: u32) -> Pause {
        if looks < self.spins {
            std::hint::spin_loop();
        } else if looks < self.spins + self.yields {
            std::thread::yield_now();
        } else {
            return Pause::Block;
        }
        Pause::Look
    }
}
