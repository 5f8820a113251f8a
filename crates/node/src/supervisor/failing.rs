//! Failures of an epoch: reports are collected, the cause is found, and another epoch begins.

use std::time::Duration;

use paceline_base::Rank;

use super::events::{Action, Notice};
use super::phase::{EpochReason, LeaveAction, Phase, WorkerState};
use super::{FIRST_WAIT, LEAVE_LIMIT, LONGEST_WAIT, SIGNS_WITHIN, Supervisor, cannot_start};
use crate::cause::{FailureReport, cause};

impl Supervisor {
    pub(super) fn handle_failure(&mut self, now: Duration, sign: FailureReport) {
        let rank = sign.reporter();
        match &sign {
            FailureReport::Exited { .. } => self.workers[rank.0 as usize] = WorkerState::Empty,
            // It is alive and unharmed; it leaves the epoch on order.
            FailureReport::Failed {
                blamed: Some(_), ..
            }
            | FailureReport::Failed {
                interrupted: true, ..
            } => {}
            FailureReport::Failed { .. }
            | FailureReport::Silent { .. }
            | FailureReport::Garbled { .. }
            | FailureReport::Unreachable { .. }
            | FailureReport::Gone { .. } => {
                self.replace_later(rank);
            }
        }
        self.record_failure(now, sign);
    }

    /// Ends a rank's worker; the next epoch starts another.
    pub(super) fn replace_later(&mut self, rank: Rank) {
        let seat = &mut self.workers[rank.0 as usize];
        if std::mem::replace(seat, WorkerState::Empty) != WorkerState::Empty {
            self.out.push_back(Action::Stop(rank));
        }
    }

    pub(super) fn record_failure(&mut self, now: Duration, sign: FailureReport) {
        let until = now + SIGNS_WITHIN;
        let start = match &mut self.phase {
            Phase::Ready => None,
            Phase::Starting(starting) => Some((starting.way, starting.why.clone())),
            // Several messages to a dead rank may fail before its exit is detected.
            Phase::Failing { signs, .. } if signs.contains(&sign) => return,
            Phase::Failing { signs, .. } => return signs.push(sign),
            // The worker states already reflect it; nothing else depends on it.
            Phase::New | Phase::Leaving { .. } | Phase::Waiting { .. } | Phase::Ended { .. } => {
                return;
            }
        };
        let signs = vec![sign];
        self.phase = Phase::Failing {
            signs,
            until,
            start,
        };
    }

    /// All reports are in: finds the root cause and decides what follows.
    pub(super) fn resolve_failure(&mut self, now: Duration) {
        let Phase::Failing { signs, start, .. } = std::mem::replace(&mut self.phase, Phase::New)
        else {
            return;
        };
        if signs.iter().any(FailureReport::is_interrupted) {
            self.out.push_back(Action::ShrinkSteps);
        }
        let sign = cause(&signs);
        let (rank, reason) = (sign.rank(), sign.to_string());
        self.losses_left = match sign.is_loss() {
            true => self.losses_left.saturating_sub(1),
            false => 0,
        };
        match start {
            Some((_, EpochReason::Change(pending))) => {
                let to = pending.order.from;
                self.leave(
                    now,
                    LeaveAction::Begin(to, EpochReason::Back(pending, reason)),
                );
            }
            Some((_, EpochReason::Back(pending, refused))) => {
                self.refuse(now, pending, refused);
                self.fail(now, rank, &cannot_start(&reason));
            }
            Some((_, EpochReason::Again)) => self.fail(now, rank, &cannot_start(&reason)),
            Some((_, EpochReason::First)) | None => self.fail(now, rank, &reason),
        }
    }

    /// An epoch failed.
    pub(super) fn fail(&mut self, now: Duration, rank: Rank, reason: &str) {
        let may_start = self.was_ready || self.losses_left > 0;
        let again = self.policy.restart && may_start;
        if !again || !self.policy.resume {
            self.lose(now, reason);
        }
        if !again {
            self.report_failure(rank, reason, None);
            return self.over(reason);
        }
        self.give_up(now, reason);
        let wait = self.wait;
        self.wait = (wait * 2).clamp(FIRST_WAIT, LONGEST_WAIT);
        self.report_failure(rank, reason, Some(wait));
        self.leave(now, LeaveAction::Wait(now + wait, reason.to_owned()));
    }

    fn report_failure(&mut self, rank: Rank, reason: &str, again_in: Option<Duration>) {
        self.out.push_back(Action::Tell(Notice::Failed {
            rank,
            reason: reason.to_owned(),
            again_in,
        }));
    }

    /// Makes all ranks leave the epoch.
    pub(super) fn leave(&mut self, now: Duration, then: LeaveAction) {
        let busy = (0..).map(Rank).zip(&self.workers);
        let busy = busy.filter(|(_, seat)| **seat == WorkerState::Busy);
        self.out.extend(busy.map(|(rank, _)| Action::Leave(rank)));
        let until = now + LEAVE_LIMIT;
        self.phase = Phase::Leaving { then, until };
    }

    /// Ends the ranks that have not left in time.
    pub(super) fn replace_late(&mut self) {
        for rank in 0..self.workers.len() as u32 {
            if self.workers[rank as usize] == WorkerState::Busy {
                self.replace_later(Rank(rank));
            }
        }
    }

    pub(super) fn all_left(&mut self, now: Duration) {
        match std::mem::replace(&mut self.phase, Phase::New) {
            Phase::Leaving {
                then: LeaveAction::Begin(way, why),
                ..
            } => self.begin(now, way, why),
            Phase::Leaving {
                then: LeaveAction::Wait(until, reason),
                ..
            } => self.phase = Phase::Waiting { until, reason },
            other => self.phase = other,
        }
    }
}
