//! Interfaces of links between ranks.
//!
//! - [`Transport`]: ordered bytes between two ranks, and a way to wait; every wire has that.
//! - [`Lend`]: bytes that are not copied, over wires that can do so.
//! - [`ComeBack`]: results in the place of bytes that were lent.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::lent::{Lent, LentMut};
use crate::status::News;
use crate::{Pages, Registered};

/// Two independent streams of bytes connect each pair of ranks, so that messages and collectives
/// cannot block each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Collectives, in lockstep: only the frames of the current call and the next are ever on it.
    Calls,
    /// Messages and credits, taken in whenever somebody looks.
    Messages,
}

/// The other end of a link is gone, and all it sent has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

/// The event that a waiting rank is interested in.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    /// Which stream.
    pub lane: Lane,
    /// Whose link.
    pub peer: usize,
    /// Bytes to read.
    pub read: bool,
    /// Room to write.
    pub write: bool,
}

/// [`Transport::gulp`] of links that copy: reductions find their bytes in the second-level cache.
pub const GULP_BYTES: usize = 256 << 10;

/// Links from one rank to all others. `peer` is a rank and never this one.
///
/// Bytes of one lane arrive in the order written. Nothing but `wait` blocks.
pub trait Transport: fmt::Debug + Send + Sync + 'static {
    /// Writes what fits of `head` followed by `body` and returns how many bytes that were.
    ///
    /// # Errors
    /// [`Closed`]
    fn write(&self, lane: Lane, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed>;

    /// Reads what is there, 0 bytes if nothing is. If the transport [lends](Lend::lends), `into`
    /// may be written to from then on, until [`Lend::let_go`], or bytes have come. Until then a
    /// caller that reads on passes the same memory.
    ///
    /// # Errors
    /// [`Closed`]
    fn read(&self, lane: Lane, peer: usize, into: &mut [u8]) -> Result<usize, Closed>;

    /// The same links, if they move some bytes without a copy.
    fn lending(&self) -> Option<&dyn Lend>;

    /// Blocks until one of `wants` may make progress, `wake` was called for `lane`, or it is
    /// `until`. May return early. At most one thread waits per lane.
    fn wait(&self, lane: Lane, wants: &[Want], until: Instant);

    /// Ends the current or next `wait` on both lanes.
    fn wake(&self);

    /// Tells all peers, as far as that is possible without waiting.
    fn tell(&self, news: &News);

    /// Asks the thread that looks after the links in the background to send what waits; false if
    /// there is none.
    fn nudge(&self) -> bool;

    /// The time by which deadlines are measured.
    fn now(&self) -> Instant;

    /// How to look for progress before waiting.
    fn patience(&self) -> Patience;

    /// Most bytes that are worth reading at a time if they are reduced on arrival. They stay in the
    /// second-level cache with what they are reduced into.
    fn gulp(&self) -> usize;
}

/// Links that move some bytes without a copy. They read a body from where its sender has it, put it
/// where it belongs, or let the receiver use it where it lies.
pub trait Lend {
    /// As [`Transport::write`], of a body that the peer puts where it belongs as it is, and does
    /// not reduce. The links may move it there, and then take all of it at once.
    ///
    /// # Errors
    /// [`Closed`]
    fn write_whole(
        &self,
        lane: Lane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed>;

    /// The caller waits for a message of `peer`, and goes on waiting until one comes; its place is
    /// `memory`.
    fn expect(&self, peer: usize, memory: &[u8]);

    /// Whether what comes next from `peer` can be used where it lies: see [`lend`](Self::lend).
    /// Then no more is read than is asked for.
    fn lends(&self, lane: Lane, peer: usize) -> bool;

    /// Has `take` use what is there on [`Lane::Calls`] where it lies, piece by piece, until it says
    /// that it has used less than a piece. Returns how many bytes were used. Only if it `lends`.
    ///
    /// # Errors
    /// [`Closed`]
    fn lend(&self, peer: usize, take: &mut dyn FnMut(Lent<'_>) -> usize) -> Result<usize, Closed>;

    /// Bytes of bodies that were not copied, neither to the link nor from it. They were sent from
    /// where they were, put where they belong, or reduced where they lay.
    fn placed(&self) -> u64;

    /// See [`Group::register_pages`](crate::Group::register_pages).
    fn register_pages(&self, pages: &Arc<Pages>) -> Option<Registered>;

    /// Whether bytes that were handed to `write` are still read from where they were: they have to
    /// stay as they are.
    fn holds(&self, lane: Lane, peer: usize) -> bool;

    /// Ends that: bytes are copied, or given up. Called when a call fails.
    fn let_go(&self, lane: Lane);

    /// The same for what goes to `peer` or comes from it.
    fn let_go_of(&self, lane: Lane, peer: usize);

    /// The same links, if a receiver can put results in the place of what it was lent.
    fn come_back(&self) -> Option<&dyn ComeBack>;
}

/// Links over which the receiver of a body may put what becomes of it in the body's place.
pub trait ComeBack {
    /// As [`Transport::write`], of a body that the peer reduces. The result belongs in its place,
    /// in `whole`, which the caller may write to: the peer may put it there.
    /// [`has_come_back`](Self::has_come_back) says whether it has.
    ///
    /// # Errors
    /// [`Closed`]
    fn write_to_come_back(
        &self,
        lane: Lane,
        peer: usize,
        frame: (&[u8], &[u8]),
        whole: &[u8],
    ) -> Result<usize, Closed>;

    /// Whether the result of what was last written `to_come_back`, and is not held any more, is in
    /// its place. Once for each.
    fn has_come_back(&self, peer: usize) -> bool;

    /// As [`Lend::lend`], of bytes in whose place the result goes: `take` puts it there too. `None`
    /// where what comes next is nothing of that kind.
    ///
    /// # Errors
    /// [`Closed`]
    fn lend_to_come_back(
        &self,
        peer: usize,
        take: &mut dyn FnMut(LentMut<'_>) -> usize,
    ) -> Result<Option<usize>, Closed>;
}

/// How often to look for progress before blocking.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Looks with a pause instruction between them.
    pub spins: u32,
    /// Further looks, the core yielded between them.
    pub yields: u32,
}

/// The next move after a look that found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Look again; it was paused.
    Look,
    Block,
}

impl Patience {
    /// Pauses after the `looks`th look without progress, or says to block.
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
