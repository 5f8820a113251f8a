//! Standby workers: a second worker of each rank, on another machine, with packed weights.
//!
//! A standby may replace its rank's worker once its weights are packed; before that a new worker is
//! as good. It is lost when its machine falls silent, its process ends or falls silent, or its
//! weights cannot be packed.

use paceline_base::lock;
use paceline_cluster::nodes::NodeId;

use super::super::host::FromHost;
use super::RemoteWorker;
use paceline_worker::messages::FromWorker;

/// Progress of the orders to pack weights. Kept for every worker, but used for standbys only.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Packing {
    /// Orders sent so far.
    pub(super) asked: u32,
    done: u32,
    is_lost: bool,
}

impl Packing {
    /// Updates the state from a host's message.
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

    /// Whether all orders are done: an answer to an earlier order is not enough.
    const fn is_done(self) -> bool {
        self.asked > 0 && self.done == self.asked && !self.is_lost
    }
}

/// The standby of a rank.
#[derive(Default)]
pub(super) enum SpareSlot {
    /// There is none.
    #[default]
    Empty,
    /// It is being started or prepared, outside of the lock.
    Starting,
    /// It is ready to replace the worker.
    Kept(Box<Spare>),
}

/// A second worker of a rank.
pub(super) struct Spare {
    pub(super) seat: RemoteWorker,
    /// Its events are dropped until the rank's worker has this number.
    pub(super) worker: u64,
    pub(super) tag: u64,
}

impl Spare {
    fn lives(&self) -> bool {
        let reader = self.seat.reader.as_ref();
        let hears = reader.is_some_and(|reader| !reader.is_finished());
        hears && !lock(&self.seat.packing).is_lost
    }

    /// Whether it may replace a worker at that node, now or after it is packed.
    pub(super) fn is_of_use(&self, worker_at: Option<NodeId>) -> bool {
        self.lives() && worker_at != Some(self.seat.node)
    }

    pub(super) fn is_packed(&self) -> bool {
        self.lives() && lock(&self.seat.packing).is_done()
    }
}

impl SpareSlot {
    /// Removes and returns the standby, if there is one.
    pub(super) fn take(&mut self) -> Option<Spare> {
        match std::mem::take(self) {
            Self::Kept(spare) => Some(*spare),
            Self::Empty | Self::Starting => None,
        }
    }

    /// Removes and returns the standby if it is packed and its node lives by `lives`; else it
    /// stays.
    pub(super) fn take_packed(&mut self, lives: impl Fn(NodeId) -> bool) -> Option<Spare> {
        let is_packed = |spare: &Spare| spare.is_packed() && lives(spare.seat.node);
        let is_ready = match self {
            Self::Kept(spare) => is_packed(spare),
            Self::Empty | Self::Starting => false,
        };
        if is_ready { self.take() } else { None }
    }

    /// Whether a standby must be started, or prepared for `tag`. One at the node of the rank's
    /// worker does not count: it would be lost with that node.
    pub(super) fn lacks(&self, tag: u64, worker_at: Option<NodeId>) -> bool {
        match self {
            Self::Empty => true,
            Self::Starting => false,
            Self::Kept(spare) => spare.tag != tag || !spare.is_of_use(worker_at),
        }
    }
}
