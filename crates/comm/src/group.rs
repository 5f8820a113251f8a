//! The trait that every set of ranks implements, and its typed methods.

use std::fmt;
use std::sync::Arc;

use paceline_base::{Bytes, Rank};

use crate::{
    Collective, Data, DataMut, Deadline, Element, ElementCounts, Error, MemoryRegistration, Pages,
    Reduce, Site, Tuning,
};

/// Messages from one rank that may wait at one receiver before [`Group::send_data`] blocks.
///
/// It is part of the contract, so that a program in which every rank sends before it receives does
/// not depend on the transport.
///
/// Sixteen messages are the residuals, in two halves, of eight steps queued at a pipeline stage.
/// They let nine stages compute at once; 8 messages allowed five. A full queue of 512-row steps of
/// a model of width 8,192 holds 128 MiB. Such a rank has a ninth of the model or less. Pipelines of
/// up to five stages queue no more than with 8.
pub const MESSAGES_HELD: usize = 16;

/// Bytes sent and received on a rank's links since the group was made, frames included.
///
/// Between threads of one process: bytes copied to and from shared memory. Heartbeats and failure
/// notices are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From this rank to others.
    pub sent: Bytes,
    /// From others to this rank.
    pub received: Bytes,
}

/// How the payload bytes of a rank's calls were moved since the group was made. Excludes frames,
/// and copies within the rank's own memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyStats {
    /// Sent from the caller's memory, written to the destination by a device, or reduced where they
    /// arrived.
    pub in_place: Bytes,
    /// Copied through a staging buffer, in either direction.
    pub staged: Bytes,
}

/// A rank's handle to a fixed set of ranks that compute together.
///
/// This trait is what a provider implements; programs call the typed methods of `dyn Group`
/// ([`barrier`](#method.barrier), [`all_gather_v`](#method.all_gather_v), ...). The contract holds
/// for every provider and is tested by `testing::run_all`.
///
/// **Order.** All ranks call collectives in the same order. Two threads may share a handle; the
/// program then ensures that order, and the second thread waits for the first. Messages are
/// independent of collectives: they may overlap them, and each other.
///
/// **Lockstep guard.** Each rank announces its [`Call`](crate::Call) (sequence number, operation,
/// type, length, counts, site). If they differ, every rank that took part gets [`Error::Mismatch`]
/// and no data is used. The site is the calling line, or the number set by [`mark`](Self::mark). So
/// a rank that omits a call is named even if the next call is alike. The exception is a next call
/// from the same line without a mark: the rank is then named at the first call that differs. A rank
/// that makes no call looks like a slow one until the deadline.
///
/// **Deadlines.** Every call has one. No call blocks for longer than its deadline plus the time to
/// copy its own data.
///
/// **Poison.** An error on any rank poisons the group. So does a rank that drops its handle, as the
/// end of its thread or process does, panic or not. Blocked calls on all ranks then return an error
/// at once, and so does every later call. They report the first cause. Ranks do not agree on which
/// call was the last to succeed: a rank whose peers have all arrived completes, although another
/// may have failed. After an error the contents of output buffers are unspecified. To continue,
/// drop the handle and build a new group. Any [`Error`] may come. [`Error::NoSuchRank`] comes only
/// of a call with a peer or a root, [`Error::Length`] only of one with lengths of several ranks.
///
/// **Leaving.** A rank that leaves ends the group for the others, so ranks that finish at different
/// times end with a barrier. Messages sent before a rank left can still be received.
///
/// **Bits.** After a collective all ranks hold the same bytes. Given the provider's choice of
/// algorithm, these depend only on operation, type, size of the group and the data, never on
/// timing. The NaN that a sum of NaNs yields is exempt: processors differ in its payload.
///
/// **Size 1.** Collectives copy input to output; there is no peer to send to.
pub trait Group: fmt::Debug + Send + Sync {
    fn rank(&self) -> Rank;

    /// Number of ranks, at least 1.
    fn size(&self) -> u32;

    /// Runs one collective; all ranks call it. Typed: the methods named as its variants.
    fn run(&self, collective: Collective<'_>, deadline: Deadline) -> Result<(), Error>;

    /// As [`run`](Self::run), called from `site`, which the lockstep guard compares too where the
    /// provider has one of this crate's transports. The typed methods pass the line of their
    /// caller, but for `broadcast`, which root and receivers often call from different lines.
    fn run_at(
        &self,
        site: Site,
        collective: Collective<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let _ = site;
        self.run(collective, deadline)
    }

    /// Makes this rank's collectives announce `number` as their site, instead of the calling line.
    /// 0 restores the lines.
    ///
    /// For loops, in which every iteration calls from the same line (mark the iteration), and for
    /// programs whose ranks make one call from different lines. Ranks with different marks get
    /// [`Error::Mismatch`]. Not collective; costs nothing. The mark applies when a call runs: a
    /// call started with [`NonblockingCalls`](crate::Ahead) sets it in its work.
    fn mark(&self, number: u64) {
        let _ = number;
    }

    /// Sends a message. See the typed method `send`.
    fn send_data(
        &self,
        message: Data<'_>,
        to: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error>;

    /// Receives a message. See the typed method `recv`.
    fn recv_data(
        &self,
        into: DataMut<'_>,
        from: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error>;

    /// Bytes that this rank has sent and received so far, without groups split off this one.
    fn traffic(&self) -> Traffic;

    /// Bytes of that traffic by destination rank; empty if the provider does not count them.
    fn sent_to(&self) -> Vec<Bytes> {
        Vec::new()
    }

    /// The part of this rank's traffic that was copied on the way. The default, for providers that
    /// copy everything, counts nothing.
    fn copies(&self) -> CopyStats {
        CopyStats::default()
    }

    /// Registers `pages` for in-place use by this group and those split off it, while the result
    /// lives. `None` if registration is useless or impossible here. Not collective. Called by
    /// [`RegisteredMemory::new`](crate::Memory::new).
    fn register_pages(&self, pages: &Arc<Pages>) -> Option<MemoryRegistration> {
        let _ = pages;
        None
    }

    /// The measurements behind the choice of algorithms; [`Tuning::explain`] prints the choices.
    fn tuning(&self) -> Tuning;

    /// Makes one new group for each `color`, of the ranks that pass it. Collective.
    ///
    /// Ranks are numbered by `key`; equal keys are ordered by rank in this group. The new group has
    /// its own links, deadlines and failures. Poisoning one group does not poison the other, though
    /// a process that ends leaves both. Cost: one gather of 8 bytes and new links for every pair.
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::Length`] and [`Error::NoSuchRank`]; ranks in it are ranks of
    /// this group.
    fn split(&self, color: u32, key: u32, deadline: Deadline) -> Result<Box<dyn Group>, Error>;
}

/// The operations, typed. They do not allocate; [`Group`] has the contract and the errors.
impl dyn Group + '_ {
    /// Returns when all ranks have called it. Collective.
    #[track_caller]
    pub fn barrier(&self, deadline: Deadline) -> Result<(), Error> {
        self.run_at(Site::here(), Collective::Barrier, deadline)
    }

    /// Gives every rank the parts of all ranks, in rank order. Collective.
    ///
    /// `input` is `(counts[rank],)`, `output` is `(sum of counts,)`; all ranks pass the same
    /// `counts`, one for each rank, any of them 0.
    #[track_caller]
    pub fn all_gather_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let (input, output) = (Some(Data::new(input)), DataMut::new(output));
        let counts = ElementCounts::Each(counts);
        self.run_at(
            Site::here(),
            Collective::AllGather {
                input,
                output,
                counts,
            },
            deadline,
        )
    }

    /// [`all_gather_v`](#method.all_gather_v) of parts of one length: `input` is `(n,)`, `output`
    /// is `(size * n,)`. Collective.
    #[track_caller]
    pub fn all_gather<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let counts = ElementCounts::Even(input.len());
        let (input, output) = (Some(Data::new(input)), DataMut::new(output));
        self.run_at(
            Site::here(),
            Collective::AllGather {
                input,
                output,
                counts,
            },
            deadline,
        )
    }

    /// [`all_gather_v`](#method.all_gather_v) in place: this rank's part is where it belongs in
    /// `data`, `(sum of counts,)`. Collective.
    #[track_caller]
    pub fn all_gather_in_place<T: Element>(
        &self,
        data: &mut [T],
        counts: &[usize],
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.run_at(
            Site::here(),
            Collective::AllGather {
                input: None,
                output: DataMut::new(data),
                counts: ElementCounts::Each(counts),
            },
            deadline,
        )
    }

    /// Reduces `input` elementwise over all ranks and gives each rank one part of the result.
    /// Collective.
    ///
    /// `input` is `(sum of counts,)`, `output` is `(counts[rank],)`; all ranks pass the same
    /// `counts`, one for each rank, any of them 0.
    #[track_caller]
    pub fn reduce_scatter_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: Reduce,
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.run_at(
            Site::here(),
            Collective::ReduceScatter {
                input: Data::new(input),
                output: DataMut::new(output),
                counts: ElementCounts::Each(counts),
                op,
            },
            deadline,
        )
    }

    /// [`reduce_scatter_v`](#method.reduce_scatter_v) with parts of one length: `input` is
    /// `(size * n,)`, `output` is `(n,)`. Collective.
    #[track_caller]
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: Reduce,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let counts = ElementCounts::Even(output.len());
        let (input, output) = (Data::new(input), DataMut::new(output));
        self.run_at(
            Site::here(),
            Collective::ReduceScatter {
                input,
                output,
                counts,
                op,
            },
            deadline,
        )
    }

    /// Sends each rank a part of its own and receives one from each, in rank order. Collective.
    ///
    /// `input` is `(sum of sends,)`, `output` is `(sum of receives,)`; `receives[r]` here is
    /// `sends[this rank]` on rank r.
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::NoSuchRank`]; [`Error::Length`] of `receives` if a rank sends
    /// another number of elements.
    #[track_caller]
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        sends: &[usize],
        output: &mut [T],
        receives: &[usize],
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.run_at(
            Site::here(),
            Collective::AllToAll {
                input: Data::new(input),
                output: DataMut::new(output),
                sends: ElementCounts::Each(sends),
                receives: ElementCounts::Each(receives),
            },
            deadline,
        )
    }

    /// [`all_to_all_v`](#method.all_to_all_v) with parts of one length: both are `(size * n,)`.
    /// Collective.
    #[track_caller]
    pub fn all_to_all<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let each = ElementCounts::Even(input.len() / self.size() as usize);
        let (input, output) = (Data::new(input), DataMut::new(output));
        self.run_at(
            Site::here(),
            Collective::AllToAll {
                input,
                output,
                sends: each,
                receives: each,
            },
            deadline,
        )
    }

    /// Reduces `data`, `(n,)`, elementwise over all ranks, in place. Collective.
    ///
    /// The order of a sum is the provider's and fixed. For sums whose bits must not depend on the
    /// number of ranks, use `paceline_base::tree` over a gather.
    #[track_caller]
    pub fn all_reduce<T: Element>(
        &self,
        data: &mut [T],
        op: Reduce,
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.run_at(
            Site::here(),
            Collective::AllReduce {
                data: DataMut::new(data),
                op,
            },
            deadline,
        )
    }

    /// [`all_reduce`](#method.all_reduce) that keeps `input`: both are `(n,)`. Collective.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn all_reduce_into<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: Reduce,
        deadline: Deadline,
    ) -> Result<(), Error> {
        output.copy_from_slice(input);
        self.all_reduce(output, op, deadline)
    }

    /// Gives every rank the `data`, `(n,)`, of `root`. Collective; all ranks wait for all.
    pub fn broadcast<T: Element>(
        &self,
        data: &mut [T],
        root: Rank,
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.run_at(
            Site::NONE,
            Collective::Broadcast {
                data: DataMut::new(data),
                root,
            },
            deadline,
        )
    }

    /// Sends `message` to another rank, which calls [`recv`](#method.recv) with the same `tag`.
    ///
    /// Returns once `message` has been copied, which need not mean that it was received. Messages
    /// with one tag arrive in the order sent; other tags may be received first. Blocks while
    /// [`MESSAGES_HELD`] messages from this rank wait at the receiver.
    pub fn send<T: Element>(
        &self,
        message: &[T],
        to: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.send_data(Data::new(message), to, tag, deadline)
    }

    /// Receives the oldest message of `from` with this `tag`, which must fill `into` exactly.
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::Length`]; [`Error::Mismatch`] if type or length differ from what
    /// was sent.
    pub fn recv<T: Element>(
        &self,
        into: &mut [T],
        from: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.recv_data(DataMut::new(into), from, tag, deadline)
    }

    /// Receives a message of the type and length of `like`, as MLX's `recv_like`. Allocates it.
    pub fn recv_like<T: Element>(
        &self,
        like: &[T],
        from: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<Vec<T>, Error> {
        let mut into = like.to_vec();
        self.recv(&mut into, from, tag, deadline)?;
        Ok(into)
    }
}
