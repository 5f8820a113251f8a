//! Changes of the split while answers are computed.

use std::time::Duration;

use paceline_plan::split_selection::{self, SplitChange};
use serde::Serialize;

use super::{Action, EpochReason, LeaveAction, Notice, PendingGroup, Phase, Supervisor};

/// A change of the split, or a failed attempt.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChangeRecord {
    /// The split before.
    pub from: String,
    /// The other split.
    pub to: String,
    /// Decode tokens a second by `from`, measured.
    pub measured: f64,
    /// By `to`: predicted, or measured if it was in use before.
    pub expected: f64,
    /// Whether `to` was in use before.
    pub back: bool,
    /// Seconds without a token.
    pub seconds: f64,
    /// Why it failed: `from` stays in use.
    pub refused: Option<String>,
}

impl ChangeRecord {
    /// The change as a line for people.
    pub fn line(&self) -> String {
        let Self { from, to, .. } = self;
        let (measured, expected) = (self.measured, self.expected);
        if let Some(reason) = &self.refused {
            return format!("[split stays {from}: {to} could not be started: {reason}]");
        }
        let known = if self.back { "measured" } else { "expected" };
        let back = if self.back { " back" } else { "" };
        format!(
            "[split changed{back} from {from} ({measured:.1} tokens/s measured) to {to} \
             ({expected:.1} {known}) in {:.2} s]",
            self.seconds
        )
    }
}

impl Supervisor {
    /// Passes an event to the steering and executes its order.
    pub(super) fn steer(&mut self, now: Duration, event: split_selection::Event) {
        let ready = matches!(self.phase, Phase::Ready);
        let is_of_speed = matches!(
            event,
            split_selection::Event::Token { .. } | split_selection::Event::Waited
        );
        if is_of_speed && !ready {
            return; // late ones are no measure of speed
        }
        let order = self.steering.step(now, event);
        let Some(order) = order.or_else(|| self.postponed.take()) else {
            return;
        };
        if self.policy.near && (self.load() != (0, 0) || !ready) {
            self.postponed = Some(order);
        } else {
            self.change(now, order);
        }
    }

    /// Changes to a split that is better by a measure other than token speed.
    pub(super) fn move_to(&mut self, now: Duration, to: usize, gain: f64) {
        if !matches!(self.phase, Phase::Ready) {
            return;
        }
        if let Some(order) = self.steering.order(to, gain) {
            self.change(now, order);
        }
    }

    fn change(&mut self, now: Duration, order: SplitChange) {
        self.learn(now);
        let pending = PendingGroup {
            order,
            begun: now,
            back: self.steering.measured(order.to).is_some(),
        };
        self.leave(
            now,
            LeaveAction::Begin(order.to, EpochReason::Change(pending)),
        );
    }

    /// Reports the result of a change once its epoch is ready.
    pub(super) fn changed(&mut self, now: Duration, why: &EpochReason) {
        match why {
            EpochReason::First | EpochReason::Again => {}
            EpochReason::Change(pending) => {
                let took = now.saturating_sub(pending.begun);
                self.steering
                    .step(now, split_selection::Event::Changed(took));
                self.report_change(now, *pending, None);
            }
            EpochReason::Back(pending, reason) => self.refuse(now, *pending, reason.clone()),
        }
    }

    /// The change failed.
    pub(super) fn refuse(&mut self, now: Duration, pending: PendingGroup, reason: String) {
        self.steering.step(now, split_selection::Event::Refused);
        self.report_change(now, pending, Some(reason));
    }

    fn report_change(&mut self, now: Duration, pending: PendingGroup, refused: Option<String>) {
        let SplitChange {
            from,
            to,
            measured,
            expected,
        } = pending.order;
        let name = |way: usize| self.candidates[way].name.clone();
        let change = ChangeRecord {
            from: name(from),
            to: name(to),
            measured,
            expected,
            back: pending.back,
            seconds: now.saturating_sub(pending.begun).as_secs_f64(),
            refused,
        };
        self.out.push_back(Action::Tell(Notice::Changed(change)));
    }
}
