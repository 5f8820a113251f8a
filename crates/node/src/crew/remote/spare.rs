//! Second workers of ranks, the spares.

use super::Seat;

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
    Kept(Spare),
}

/// A second worker of a rank.
pub(super) struct Spare {
    pub(super) seat: Seat,
    /// Its events are forgotten until the rank's worker has this number.
    pub(super) worker: u64,
    pub(super) tag: u64,
}

impl Spare {
    pub(super) fn lives(&self) -> bool {
        let reader = self.seat.reader.as_ref();
        reader.is_some_and(|reader| !reader.is_finished())
    }
}

impl Slot {
    /// Takes the spare out, if one waits.
    pub(super) fn take(&mut self) -> Option<Spare> {
        match std::mem::take(self) {
            Self::Kept(spare) => Some(spare),
            Self::Empty | Self::Starting => None,
        }
    }

    /// Takes a spare out that can take its rank's place now. One that cannot stays.
    pub(super) fn take_ready(&mut self) -> Option<Spare> {
        let is_ready = matches!(&*self, Self::Kept(spare) if spare.lives());
        is_ready.then(|| self.take()).flatten()
    }

    /// Whether a spare is to be started, or to be told to prepare for `tag`.
    pub(super) fn lacks(&self, tag: u64) -> bool {
        match self {
            Self::Empty => true,
            Self::Starting => false,
            Self::Kept(spare) => spare.tag != tag || !spare.lives(),
        }
    }
}
