//! The open requests of an instance: admission, replies, resubmission and failures.

use std::collections::BTreeMap;
use std::time::Duration;

use paceline_engine::{Reply, RequestFailure, RequestMessage, Submission, Ticket};

use super::{
    Action, EpochReason, FAILURES_MAX, HELD_LIMIT, KEYS, Notice, Phase, STARTS_MIN, Supervisor,
    split_selection,
};

/// A request without a final reply.
#[derive(Debug)]
pub(super) struct ActiveRequest {
    /// With the tokens of the answer that the caller has.
    pub(super) submission: Submission,
    /// Whether the caller was notified of the end of prefill.
    prompt_read: bool,
    /// Whether ranks with other numbers read its prompt, so that it continues with near ones.
    read_near: bool,
    /// Whether it is submitted to the epoch.
    in_work: bool,
    /// When it was last submitted, or arrived.
    since: Duration,
    /// Epochs that had it and failed since its last token.
    failures: u32,
    /// Epochs that failed before they had it, since it was last submitted.
    starts: u32,
}

impl ActiveRequest {
    /// Keys of its last token in the cache, beyond the [`KEYS`] of predictions.
    fn further_keys(&self) -> u32 {
        let keys = self.submission.request.prompt.len() + self.submission.tokens.len();
        u32::try_from(keys).unwrap_or(u32::MAX).saturating_sub(KEYS)
    }

    /// Counts a failed epoch; returns whether the request may still be answered.
    fn outlives(&mut self, now: Duration, held_limit: Duration) -> bool {
        if std::mem::take(&mut self.in_work) {
            self.failures += 1;
            (self.since, self.starts) = (now, 0);
        } else {
            self.starts += 1;
        }
        let held = now.saturating_sub(self.since);
        let waits = held < held_limit || self.starts < STARTS_MIN && held < HELD_LIMIT;
        self.failures < FAILURES_MAX && waits
    }
}

/// All open requests.
#[derive(Debug, Default)]
pub(super) struct Requests(BTreeMap<Ticket, ActiveRequest>);

impl Requests {
    /// Numbers of running and of waiting requests; none is running unless `ready`.
    pub(super) fn load(&self, ready: bool) -> (usize, usize) {
        let started = self.0.values().filter(|open| open.prompt_read && ready);
        let running = started.count();
        (running, self.0.len() - running)
    }
}

enum RequestAdmission {
    Open,
    /// Held: the split is changing, or answers wait to resume.
    Held,
    Shut(String),
}

impl Supervisor {
    fn admission(&self) -> RequestAdmission {
        let why = match &self.phase {
            Phase::Ready | Phase::Failing { start: None, .. } => return RequestAdmission::Open,
            Phase::Starting(starting) => Some(&starting.why),
            Phase::Failing {
                start: Some((_, why)),
                ..
            } => Some(why),
            Phase::Leaving {
                then: super::LeaveAction::Begin(_, why),
                ..
            } => Some(why),
            Phase::Leaving {
                then: super::LeaveAction::Wait(_, reason),
                ..
            }
            | Phase::Waiting { reason, .. } => {
                if self.policy.resume {
                    return RequestAdmission::Held;
                }
                return RequestAdmission::Shut(format!(
                    "{reason}; the workers are being started again"
                ));
            }
            Phase::Ended { reason } => return RequestAdmission::Shut(reason.clone()),
            Phase::New => None,
        };
        match why {
            Some(EpochReason::Change(_) | EpochReason::Back(..)) => RequestAdmission::Held,
            Some(EpochReason::Again) if self.policy.resume => RequestAdmission::Held,
            _ => RequestAdmission::Shut("its workers are being started".to_owned()),
        }
    }

    /// Checks whether a request would be admitted now.
    ///
    /// # Errors
    /// [`Failure::Unavailable`] and [`Failure::Busy`].
    pub fn check(&self) -> Result<(), RequestFailure> {
        match self.admission() {
            RequestAdmission::Shut(reason) => Err(RequestFailure::Unavailable { reason }),
            RequestAdmission::Held if self.requests.0.len() >= self.policy.held_max => {
                Err(RequestFailure::Busy {
                    waiting: self.requests.0.len(),
                })
            }
            RequestAdmission::Open | RequestAdmission::Held => Ok(()),
        }
    }

    pub(super) fn submit(&mut self, now: Duration, submission: Submission) {
        let (ticket, tokens) = (submission.ticket, &submission.tokens);
        let has_begun = !tokens.is_empty();
        let read_near = self.policy.reads_near && has_begun;
        let is_near = read_near || (self.policy.near && has_begun);
        let refused = match self.check() {
            Ok(()) if is_near && !self.policy.resume => Some(RequestFailure::Lost {
                reason: "it began elsewhere, and --strict allows no other bits".to_owned(),
            }),
            checked => checked.err(),
        };
        if let Some(failure) = refused {
            let reply = Reply::Failed(failure);
            return self.out.push_back(Action::Deliver(ticket, reply));
        }
        self.steer(now, split_selection::Event::Opened);
        let in_work = matches!(self.phase, Phase::Ready);
        if in_work {
            if is_near {
                self.tell_continued(&[ticket]);
            }
            self.tell_leader(RequestMessage::Submit(submission.clone()));
        }
        let open = ActiveRequest {
            submission,
            prompt_read: has_begun,
            read_near,
            in_work,
            since: now,
            failures: 0,
            starts: 0,
        };
        self.requests.0.insert(ticket, open);
    }

    pub(super) fn cancel(&mut self, now: Duration, ticket: Ticket) {
        if self.requests.0.remove(&ticket).is_none() {
            return;
        }
        self.out.push_back(Action::Forget(ticket));
        if matches!(self.phase, Phase::Ready) {
            self.tell_leader(RequestMessage::Cancel(ticket));
        }
        self.closed(now);
    }

    /// Handles a reply of the leader; `at` is the end of its step by the leader's clock.
    pub(super) fn reply(
        &mut self,
        now: Duration,
        ticket: Ticket,
        reply: Reply,
        at: Option<Duration>,
    ) {
        // The engine's failure follows: the request stays open until the cause is known.
        if is_consequence(&reply) {
            return;
        }
        let Some(open) = self.requests.0.get_mut(&ticket) else {
            return;
        };
        match &reply {
            Reply::PromptRead { read_by, .. } => {
                open.read_near |= read_by.is_some();
                if std::mem::replace(&mut open.prompt_read, true) {
                    return;
                }
            }
            Reply::Token { token, .. } => {
                open.submission.tokens.push(*token);
                open.failures = 0;
                let further = open.further_keys();
                self.out.push_back(Action::Deliver(ticket, reply));
                if let Some(at) = at {
                    self.steer(now, split_selection::Event::Token { further, at });
                }
                return;
            }
            Reply::Continued => {
                self.continued += 1;
                self.out
                    .push_back(Action::Tell(Notice::Continued { answers: 1 }));
            }
            Reply::Finished { .. } => {
                self.wait = self.policy.first_wait();
                return self.finish(now, ticket, reply);
            }
            Reply::Failed(_) => return self.finish(now, ticket, reply),
        }
        self.out.push_back(Action::Deliver(ticket, reply));
    }

    /// Delivers the last reply to a request.
    pub(super) fn finish(&mut self, now: Duration, ticket: Ticket, reply: Reply) {
        if self.requests.0.remove(&ticket).is_some() {
            self.out.push_back(Action::Deliver(ticket, reply));
            self.closed(now);
        }
    }

    fn closed(&mut self, now: Duration) {
        self.steer(now, split_selection::Event::Closed);
        self.learn_sometimes(now);
    }

    /// Submits all open requests to the leader.
    pub(super) fn hand_over(&mut self) {
        let is_near = self.policy.near;
        let begun =
            self.requests.0.iter().filter(|(_, open)| {
                (is_near || open.read_near) && !open.submission.tokens.is_empty()
            });
        let begun: Vec<Ticket> = begun.map(|(ticket, _)| *ticket).collect();
        self.tell_continued(&begun);
        let rank = self.candidates[self.way].leader;
        for open in self.requests.0.values_mut() {
            open.in_work = true;
            let message = RequestMessage::Submit(open.submission.clone());
            self.out.push_back(Action::Request { rank, message });
        }
    }

    fn tell_leader(&mut self, message: RequestMessage) {
        let rank = self.candidates[self.way].leader;
        self.out.push_back(Action::Request { rank, message });
    }

    /// Tells that these answers continue with other bits.
    fn tell_continued(&mut self, tickets: &[Ticket]) {
        let told = tickets
            .iter()
            .map(|it| Action::Deliver(*it, Reply::Continued));
        self.out.extend(told);
        let answers = tickets.len();
        if answers > 0 {
            self.continued += answers as u64;
            self.out
                .push_back(Action::Tell(Notice::Continued { answers }));
        }
    }

    /// Marks all requests as not submitted, at the start of an epoch. A failure before they are
    /// submitted does not count against them.
    pub(super) fn rest(&mut self, now: Duration) {
        for open in self.requests.0.values_mut() {
            if std::mem::take(&mut open.in_work) {
                (open.since, open.starts) = (now, 0);
            }
        }
    }

    /// Counts a failure; fails requests that failed too often or wait too long.
    pub(super) fn give_up(&mut self, now: Duration, reason: &str) {
        let limit = self.policy.held_limit;
        let lost = |_: &Ticket, open: &mut ActiveRequest| !open.outlives(now, limit);
        let lost = self.requests.0.extract_if(.., lost).collect();
        self.lost(now, lost, reason);
    }

    /// Fails all open requests.
    pub(super) fn lose(&mut self, now: Duration, reason: &str) {
        let open = std::mem::take(&mut self.requests.0);
        self.lost(now, open, reason);
    }

    fn lost(&mut self, now: Duration, open: BTreeMap<Ticket, ActiveRequest>, reason: &str) {
        for ticket in open.into_keys() {
            let reason = reason.to_owned();
            let reply = Reply::Failed(RequestFailure::Lost { reason });
            self.out.push_back(Action::Deliver(ticket, reply));
            self.closed(now);
        }
    }
}

/// Whether a reply of the leader reports a failure of its engine and not of the request.
const fn is_consequence(reply: &Reply) -> bool {
    matches!(
        reply,
        Reply::Failed(RequestFailure::Lost { .. } | RequestFailure::Unavailable { .. })
    )
}
