//! Second workers of ranks, the spares.
//!
//! A spare may take its rank's place once its weights are packed: before that a new worker is as
//! good. It is lost when its machine is silent, its process ended or is silent, or its weights
//! cannot be packed.

use paceline_base::lock;
use paceline_cluster::nodes::NodeId;

use super::super::host::FromHost;
use super::Seat;
use crate::messages::FromWorker;

/// A worker's reports about the weights that it was told to pack. Kept for every worker; it means
/// something for spares only.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Packing {
    /// Times that it was told to.
    pub(super) asked: u32,
    done: u32,
    is_lost: bool,
}

impl Packing {
    /// Takes news in.
    pub(super) const fn hear(&mut self, news: &FromHost) {
        match news {
            FromHost::Message(FromWorker::Prepared) => self.done += 1,
            FromHost::Message(FromWorker::Failed { .. })
            | FromHost::Exited { .. }
            | FromHost::Silent { .. }
            | FromHost::Gone { .. } => self.is_lost = true,
            FromHost::Message(_)
            | FromHost::Started { .. }
            | FromHost::Refused { .. }
            | FromHost::Beat => {}
        }
    }

    /// Whether it has packed all that it was told to: an answer to an earlier message is not
    /// enough.
    const fn is_done(self) -> bool {
        self.asked > 0 && self.done == self.asked && !self.is_lost
    }
}

/// Where the spare of a rank is kept. Its lock is held for moments only: to start a spare takes
/// seconds.
#[derive(Default)]
pub(super) enum Slot {
    /// There is none.
    #[default]
    Empty,
    /// It is being started or told what to prepare, outside of the lock.
    Starting,
    /// It waits.
    Kept(Box<Spare>),
}

/// A second worker of a rank.
pub(super) struct Spare {
    pub(super) seat: Seat,
    /// Its events are forgotten until the rank's worker has this number.
    pub(super) worker: u64,
    pub(super) tag: u64,
}

impl Spare {
    fn lives(&self) -> bool {
        let reader = self.seat.reader.as_ref();
        let hears = reader.is_some_and(|reader| !reader.is_finished());
        hears && !lock(&self.seat.packing).is_lost
    }

    /// Whether it may take the place of a worker at that node, at once or later.
    pub(super) fn is_of_use(&self, worker_at: Option<NodeId>) -> bool {
        self.lives() && worker_at != Some(self.seat.node)
    }

    pub(super) fn is_packed(&self) -> bool {
        self.lives() && lock(&self.seat.packing).is_done()
    }
}

impl Slot {
    /// Takes the spare out, if one waits.
    pub(super) fn take(&mut self) -> Option<Spare> {
        match std::mem::take(self) {
            Self::Kept(spare) => Some(*spare),
            Self::Empty | Self::Starting => None,
        }
    }

    /// Takes a spare out that can take its rank's place now; `lives` says so of its node. A spare
    /// that cannot stays.
    pub(super) fn take_packed(&mut self, lives: impl Fn(NodeId) -> bool) -> Option<Spare> {
        let is_packed = |spare: &Spare| spare.is_packed() && lives(spare.seat.node);
        let is_ready = match self {
            Self::Kept(spare) => is_packed(spare),
            Self::Empty | Self::Starting => false,
        };
        if is_ready { self.take() } else { None }
    }

    /// Whether a spare is to be started, or to be told to prepare for `tag`. A spare at the node of
    /// the rank's worker would be lost with it.
    pub(super) fn lacks(&self, tag: u64, worker_at: Option<NodeId>) -> bool {
        match self {
            Self::Empty => true,
            Self::Starting => false,
            Self::Kept(spare) => spare.tag != tag || !spare.is_of_use(worker_at),
        }
    }
}
