//! The phases of an instance: starting, ready, failing, leaving, waiting, ended.

use std::net::SocketAddr;
use std::time::Duration;

use paceline_plan::split_selection::SplitChange;
use paceline_worker::messages::RankFacts;

use super::Health;
use crate::cause::FailureReport;

/// State of a rank's worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkerState {
    /// There is none, or one that must be replaced.
    Empty,
    /// Alive, outside of any epoch.
    Idle,
    /// In the epoch.
    Busy,
}

/// Why an epoch starts.
#[derive(Clone, Debug)]
pub(super) enum EpochReason {
    First,
    /// After a failure.
    Again,
    /// Change to another split.
    Change(PendingGroup),
    /// Back to the previous split, because the other one did not start.
    Back(PendingGroup, String),
}

/// A change of the split in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingGroup {
    pub(super) order: SplitChange,
    pub(super) begun: Duration,
    /// Whether the target split was in use before.
    pub(super) back: bool,
}

/// The action once all ranks have left.
#[derive(Clone, Debug)]
pub(super) enum LeaveAction {
    Begin(usize, EpochReason),
    /// Wait until this time, with the reason.
    Wait(Duration, String),
}

#[derive(Clone, Debug)]
pub(super) struct Starting {
    pub(super) way: usize,
    pub(super) why: EpochReason,
    pub(super) since: Duration,
    /// Deadline until all listen; loading has none.
    pub(super) until: Option<Duration>,
    pub(super) addrs: Vec<Option<SocketAddr>>,
    pub(super) ready: Vec<Option<RankFacts>>,
}

#[derive(Clone, Debug)]
pub(super) enum Phase {
    New,
    Starting(Starting),
    Ready,
    /// Failure reports are collected; `start` is the failed start, if it was one.
    Failing {
        signs: Vec<FailureReport>,
        until: Duration,
        start: Option<(usize, EpochReason)>,
    },
    Leaving {
        then: LeaveAction,
        until: Duration,
    },
    Waiting {
        until: Duration,
        reason: String,
    },
    Ended {
        reason: String,
    },
}

impl EpochReason {
    pub(super) fn health(&self) -> Health {
        match self {
            Self::First => Health::Loading,
            Self::Change(_) | Self::Back(..) => Health::Ready,
            Self::Again => Health::Loading,
        }
    }
}
