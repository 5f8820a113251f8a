//! The trait that every set of ranks implements, and its typed methods.

use std::fmt;
use std::sync::Arc;

use paceline_base::{Bytes, Rank};

use crate::{
    Collective, Counts, Data, DataMut, Deadline, Element, Error, Pages, Reduce, Registered, Site,
    Tuning,
};

/// Messages from one rank that may wait at one receiver before [`Group::send_data`] blocks.
///
/// It is part of the contract, so that a program which lets every rank send before it receives does
/// not depend on the transport.
///
/// Sixteen are the residuals, in two halves, of eight steps that a pipeline stage has not taken
/// yet: nine stages compute at the same time. With 8 it was five. Where so many wait, steps of 512
/// rows of a model of width 8,192 hold 128 MiB. That is at a rank that has a ninth of the model or
/// less. Of up to five stages no more wait than with 8.
pub const MESSAGES_HELD: usize = 16;

/// Bytes that a rank has put on its links and taken from them, frames included, since the group was
/// made.
///
/// Between threads of a process it is what was copied to and from shared memory. Heartbeats and
/// news of failures are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From this rank to others.
    pub sent: Bytes,
    /// From others to this rank.
    pub received: Bytes,
}

/// How the bytes that a rank's calls exchanged with others got on the links and off them, since the
/// group was made. Frames are not counted, nor what a rank copies within its own memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// Sent from where they were, put where they belong by a device, or reduced where they came to.
    pub in_place: Bytes,
    /// Copied on the way, in either direction.
    pub staged: Bytes,
}

/// A rank's handle to a fixed set of ranks that compute together.
///
/// This trait is what a provider implements; programs call the typed methods of `dyn Group`
/// ([`barrier`](#method.barrier), [`all_gather_v`](#method.all_gather_v), ...). The contract holds
/// for every provider and is tested by `testing::run_all`.
///
/// **Order.** Collectives are called by all ranks in the same order. Two threads may share a
/// handle, but then the program itself has to see to that order; the second waits for the first.
/// Messages are apart from collectives: they may overlap them, and each other.
///
/// **Lockstep guard.** Each rank announces its [`Call`](crate::Call) (sequence number, operation,
/// type, length, counts, place). If they differ, every rank that took part gets [`Error::Mismatch`]
/// and no data is used. The place is the line that calls, or what [`mark`](Self::mark) says. So a
/// rank that leaves a call out is named even if the next call is alike. The exception is a next
/// call from the same line with nothing marked: then the rank is named at the first call that
/// differs. A rank that calls nothing cannot be told from a slow one before the deadline.
///
/// **Deadlines.** Every call has one, and no call waits longer than that and the time it takes to
/// copy its own data.
///
/// **Poison.** After an error on any rank the group is poisoned. It also is after any rank dropped
/// its handle, as the end of its thread or process does, panic or not. Blocked calls on all ranks
/// then return an error at once, and so does every later call. They report the first cause. Ranks
/// do not agree on which call was the last to succeed. A rank whose peers have all arrived
/// completes, although another may have given up. On an error the contents of output buffers are
/// unspecified. To go on, drop the handle and build a new group.
///
/// **Leaving.** Since leaving ends the group for the rest, ranks that finish at different times
/// end with a barrier. What was sent before a rank left can still be received.
///
/// **Bits.** After a collective all ranks hold the same bytes. Given the provider's choice of
/// algorithm, these depend only on operation, type, size of the group and the data, never on
/// timing. The NaN that a sum of NaNs yields is exempt: processors differ in its payload.
///
/// **Size 1.** Collectives copy input to output; there is nobody to send to.
pub trait Group: fmt::Debug + Send + Sync {
    fn rank(&self) -> Rank;

    /// Number of ranks, at least 1.
    fn size(&self) -> u32;

    /// Runs one collective; all ranks call it. Typed: the methods named as its variants.
    ///
    /// # Errors
    /// Any [`Error`].
    fn run(&self, collective: Collective<'_>, deadline: Deadline) -> Result<(), Error>;

    /// As [`run`](Self::run), called from `site`, which the lockstep guard compares too where the
    /// provider has one of this crate's transports. The typed methods pass the line of their
    /// caller, but for `broadcast`, which root and receivers often call from different lines.
    ///
    /// # Errors
    /// Any [`Error`].
    fn run_at(
        &self,
        site: Site,
        collective: Collective<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let _ = site;
        self.run(collective, deadline)
    }

    /// From now on this rank's collectives carry `number` in place of the line they are called
    /// from; 0 brings the lines back.
    ///
    /// For loops, in which every turn calls from the same line (mark the turn), and for programs
    /// whose ranks make one call from different lines. Ranks with different marks are a
    /// [`Error::Mismatch`]. Not collective; costs nothing. It counts when a call runs: what is
    /// started with [`Ahead`](crate::Ahead) marks in its work.
    fn mark(&self, number: u64) {
        let _ = number;
    }

    /// Sends a message. Typed, and described at: `send`.
    ///
    /// # Errors
    /// All but [`Error::Length`].
    fn send_data(
        &self,
        message: Data<'_>,
        to: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error>;

    /// Receives a message. Typed, and described at: `recv`.
    ///
    /// # Errors
    /// All but [`Error::Length`].
    fn recv_data(
        &self,
        into: DataMut<'_>,
        from: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error>;

    /// Bytes that this rank has sent and received so far, without groups split off this one.
    fn traffic(&self) -> Traffic;

    /// Bytes of that traffic sent to each rank, by rank; empty where a provider does not say.
    fn sent_to(&self) -> Vec<Bytes> {
        Vec::new()
    }

    /// The part of this rank's traffic that was copied on the way. Where a provider does not say
    /// otherwise all of it is copied, and then it is not counted.
    fn copies(&self) -> Copies {
        Copies::default()
    }

    /// Lets this group, and those split off it, use `pages` in place while the result lives.
    /// `None` where that is of no use, or not possible. Not collective. Called by
    /// [`Memory::new`](crate::Memory::new).
    fn register_pages(&self, pages: &Arc<Pages>) -> Option<Registered> {
        let _ = pages;
        None
    }

    /// The measurements that choices of algorithms rest on; [`Tuning::explain`] prints the choices.
    fn tuning(&self) -> Tuning;

    /// Makes new groups of the ranks that name the same `color`. Collective.
    ///
    /// Ranks are numbered by `key`, where keys are equal by their rank in this group. The new group
    /// has links, deadlines and failures of its own. Poisoning one group does not poison the other,
    /// though a process that ends leaves both. Cost: one gather of 8 bytes and new links for every
    /// pair.
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::Length`] and [`Error::NoSuchRank`]; ranks in it are ranks of
    /// this group.
    fn split(&self, color: u32, key: u32, deadline: Deadline) -> Result<Box<dyn Group>, Error>;
}

/// The operations, typed. They do not allocate; [`Group`] has the contract and the errors.
impl dyn Group + '_ {
    /// Returns when all ranks have called it. Collective.
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::Length`] and [`Error::NoSuchRank`].
    #[track_caller]
    pub fn barrier(&self, deadline: Deadline) -> Result<(), Error> {
        self.run_at(Site::here(), Collective::Barrier, deadline)
    }

    /// Gives every rank the parts of all ranks, in rank order. Collective.
    ///
    /// `input` is `(counts[rank],)`, `output` is `(sum of counts,)`; all ranks pass the same
    /// `counts`, one for each rank, any of them 0.
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::NoSuchRank`].
    #[track_caller]
    pub fn all_gather_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let (input, output) = (Some(Data::new(input)), DataMut::new(output));
        let counts = Counts::Each(counts);
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
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::NoSuchRank`].
    #[track_caller]
    pub fn all_gather<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let counts = Counts::Even(input.len());
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
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::NoSuchRank`].
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
                counts: Counts::Each(counts),
            },
            deadline,
        )
    }

    /// Reduces `input` elementwise over all ranks and gives each rank one part of the result.
    /// Collective.
    ///
    /// `input` is `(sum of counts,)`, `output` is `(counts[rank],)`; all ranks pass the same
    /// `counts`, one for each rank, any of them 0.
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::NoSuchRank`].
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
                counts: Counts::Each(counts),
                op,
            },
            deadline,
        )
    }

    /// [`reduce_scatter_v`](#method.reduce_scatter_v) with parts of one length: `input` is
    /// `(size * n,)`, `output` is `(n,)`. Collective.
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::NoSuchRank`].
    #[track_caller]
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: Reduce,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let counts = Counts::Even(output.len());
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
                sends: Counts::Each(sends),
                receives: Counts::Each(receives),
            },
            deadline,
        )
    }

    /// [`all_to_all_v`](#method.all_to_all_v) with parts of one length: both are `(size * n,)`.
    /// Collective.
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::NoSuchRank`].
    #[track_caller]
    pub fn all_to_all<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let each = Counts::Even(input.len() / self.size() as usize);
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
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::Length`] and [`Error::NoSuchRank`].
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
    /// # Errors
    /// Any [`Error`] but [`Error::NoSuchRank`].
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
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::Length`].
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
    ///
    /// # Errors
    /// Any [`Error`] but [`Error::Length`].
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
    ///
    /// # Errors
    /// As [`recv`](#method.recv).
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
