//! Whether a group is poisoned, why, and from which call on.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use paceline_base::Rank;

use crate::{Call, Error};

/// Why a group is poisoned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Cause {
    /// This rank dropped its handle, or its process ended.
    Left(Rank),
    /// This rank exceeded the silence limit.
    Silent {
        rank: Rank,
        /// Length of its silence.
        millis: u32,
    },
    /// This rank sent invalid frames.
    Garbled(Rank),
    /// A call failed.
    Failed(Error),
}

impl Cause {
    /// The error of `call`, which found the group poisoned.
    pub(crate) const fn error(self, call: Call) -> Error {
        match self {
            Self::Left(rank) => Error::PeerLost { call, rank },
            Self::Silent { rank, millis } => Error::Silent { call, rank, millis },
            Self::Garbled(rank) => Error::Garbled { call, rank },
            Self::Failed(error) => error,
        }
    }
}

/// A failure notice: the message by which ranks announce the end of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FailureNotice {
    pub(crate) cause: Cause,
    /// The first collective that the sender has not completed, or `u64::MAX` if unknown.
    ///
    /// All ranks have entered every collective before that one. So a rank that is still in an
    /// earlier one can finish it and does: an error ends the same call on all ranks.
    pub(crate) at: u64,
}

/// The first cause that this rank received, and the first collective that it ends.
#[derive(Debug)]
pub(crate) struct GroupStatus {
    cause: OnceLock<Cause>,
    at: AtomicU64,
}

impl Default for GroupStatus {
    fn default() -> Self {
        Self {
            cause: OnceLock::new(),
            at: AtomicU64::new(u64::MAX),
        }
    }
}

impl GroupStatus {
    /// Why the group is poisoned, if it is.
    pub(crate) fn cause(&self) -> Option<Cause> {
        self.cause.get().copied()
    }

    /// Whether a running collective with this number must stop.
    pub(crate) fn stops(&self, sequence: u64) -> bool {
        self.at.load(Ordering::Acquire) <= sequence
    }

    /// Records `news`; true if it adds something and should be forwarded.
    pub(crate) fn poison(&self, news: FailureNotice) -> bool {
        let first = self.cause.set(news.cause).is_ok();
        let before = self.at.fetch_min(news.at, Ordering::AcqRel);
        first || news.at < before
    }

    /// The message for other ranks.
    pub(crate) fn news(&self) -> Option<FailureNotice> {
        let cause = self.cause()?;
        let at = self.at.load(Ordering::Acquire);
        Some(FailureNotice { cause, at })
    }
}
