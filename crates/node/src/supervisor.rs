//! Supervisor of an instance: a pure state machine for starts, failures, recoveries and changes of
//! the split.
//!
//! ```text
//!            Begin              all ready
//!   New ------------> Starting -----------> Ready --- change of split ---> Leaving
//!                       |  ^                  |                              |   |
//!               failure |  |    failure       |                all have left |   |
//!                       v  |                  v                              |   |
//!                     Failing <---------------+        Starting <------------+   |
//!                       | cause known                                            |
//!                       +--> Leaving --> Waiting --> Starting (next epoch)  <----+
//!                       +--> Ended (when nothing is to be started again)
//! ```
//! The supervisor owns the open requests with the tokens answered so far. A new *epoch* (another
//! set of processes, another split, or both) continues from those, so a recovery needs nothing from
//! a dead worker. Live workers keep their processes and, if their shard stays the same, their
//! packed weights.
//!
//! [`Supervisor::step`] takes one event and returns the actions. It has no clock, thread or
//! process: the shell [`Instance`](crate::Instance) has them, and tests drive thousands of
//! instances from seeds.

mod change;
mod events;
mod failing;
mod phase;
mod requests;

use std::collections::VecDeque;
use std::time::Duration;

use paceline_base::Rank;
use paceline_cluster::workers::Event as CrewEvent;
use paceline_engine::{Reply, RequestFailure, RequestMessage};
use paceline_plan::split_selection::{self, KEYS, SplitChange, SplitSelector};

pub use change::ChangeRecord;
use requests::Requests;

use crate::cause::FailureReport;
pub use events::{Action, Event, Notice};
use paceline_worker::messages::FromWorker;
use phase::{EpochReason, LeaveAction, PendingGroup, Phase, Starting, WorkerState};

/// How long failure reports are collected after the first, to find the root cause. With the 1.5 s
/// until a silent worker is detected, a failure is reported within 2 s.
pub const SIGNS_WITHIN: Duration = Duration::from_millis(150);

/// Longest wait for workers to listen: they start and read the model's header first.
pub const LISTEN_LIMIT: Duration = Duration::from_secs(30);

/// Longest wait for a rank to leave an epoch. It finishes its step, or detects within 2 s that the
/// rank it waits for is silent. After this it is replaced.
pub const LEAVE_LIMIT: Duration = Duration::from_secs(3);

/// Wait before the first epoch after a failure: doubled with each further failure, reset once an
/// epoch has answered a request. Long enough for a client to see the failure. If answers resume
/// there is nothing to see: the first restart does not wait, the second waits this long.
pub const FIRST_WAIT: Duration = Duration::from_millis(250);

/// A request is lost after this many failures of workers that had it, without a token in between. A
/// request that crashes workers must not do so for ever. One more than the losses that exclude a
/// machine, so that the request is tried once without that machine. Workers that fail to start do
/// not count; the request waits for them.
pub const FAILURES_MAX: u32 = 4;

/// The first load has failed after this many losses of workers, machines or connections: as many as
/// a request outlives. A rank's own reason fails it at once: the next load would give it again.
pub const FIRST_LOSSES_MAX: u32 = FAILURES_MAX;

/// How long a request waits for workers that cannot start, if machines may return: as long as an
/// ingress waits for an owner.
pub const HELD_LIMIT: Duration = Duration::from_secs(120);

/// The same if all workers are on one machine, whose files do not return by themselves. With waits
/// that double from [`FIRST_WAIT`], it allows four more starts that fail at once.
pub const HELD_ALONE_LIMIT: Duration = Duration::from_secs(5);

/// Failed starts before a request is lost, within [`HELD_LIMIT`]: a large model loads for longer
/// than [`HELD_ALONE_LIMIT`].
pub const STARTS_MIN: u32 = 3;

/// Longest such wait.
pub const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Interval of [`Action::Learn`]; also sent at the end.
const LEARN_EVERY: Duration = Duration::from_secs(60);

/// A possible split of the model and its costs.
#[derive(Clone, Debug)]
pub struct SplitCandidate {
    /// Name of the split, for people.
    pub name: String,
    /// The rank that receives requests.
    pub leader: Rank,
    /// Decode tokens a second, predicted and corrected by earlier runs, for an answer with [`KEYS`]
    /// keys in the cache. Finite and above 0.
    pub tok_s: f64,
    /// Seconds that one more key adds to a token; 0 if unknown.
    pub key_s: f64,
    /// Time of a change to it; `None` if it was never loaded: then that of the first split.
    pub change: Option<Duration>,
}

/// Policy of an instance for failures, and its limits for held requests.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Whether a new epoch starts after a failure. Before the first one was ready, only after a
    /// loss, or if the instance [`goes_on`](Self::goes_on).
    pub restart: bool,
    /// Whether open requests continue in that epoch; otherwise they fail with the reason.
    pub resume: bool,
    /// Whether the bits of an answer depend on ranks and steps: its caller is notified where it
    /// continues in another epoch.
    pub near: bool,
    /// Whether ranks with other numbers read prompts, so that an answer that began under another
    /// owner continues with near ones.
    pub reads_near: bool,
    /// Most requests held while the split changes, or while answers wait to resume.
    pub held_max: usize,
    /// How long a request waits for workers that cannot start; it is lost at the next failure.
    pub held_limit: Duration,
    /// Whether only [`Event::Move`] changes the split.
    pub holds: bool,
    /// Whether the instance was started before, by another owner or an earlier process of this one.
    /// A new epoch then starts even after a failure of the first one.
    pub goes_on: bool,
}

impl Policy {
    /// Wait before the first epoch after a failure.
    const fn first_wait(&self) -> Duration {
        if self.resume {
            Duration::ZERO
        } else {
            FIRST_WAIT
        }
    }
}

/// Whether an instance takes requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// The first epoch is starting.
    Loading,
    /// It takes requests; they are held during a change of the split.
    Ready,
    /// The last epoch failed.
    Failed {
        reason: String,
        /// Whether another epoch follows.
        again: bool,
    },
}

/// The state machine of an instance: see the module.
#[derive(Debug)]
pub struct Supervisor {
    candidates: Vec<SplitCandidate>,
    policy: Policy,
    steering: SplitSelector,
    /// A change that would alter the bits of open answers, until they have ended.
    postponed: Option<SplitChange>,
    /// Index of the split in use, or of the last epoch.
    way: usize,
    epoch: u64,
    workers: Vec<WorkerState>,
    phase: Phase,
    requests: Requests,
    was_ready: bool,
    /// Losses that the first load may still have, this one included.
    losses_left: u32,
    /// Wait before the next epoch after a failure.
    wait: Duration,
    restarts: u64,
    /// Answers that continued with near numbers.
    continued: u64,
    /// The last [`Action::Learn`]; `learned_at` is its time.
    learned: Option<(usize, f64)>,
    learned_at: Option<Duration>,
    out: VecDeque<Action>,
}

impl Supervisor {
    /// For `ranks` workers that start with split `first`. Nothing happens before [`Event::Begin`].
    ///
    /// # Errors
    /// If the speed of a split is not finite or not above 0.
    ///
    /// # Panics
    /// If there is no split `first`.
    pub fn new(
        ways: Vec<SplitCandidate>,
        first: usize,
        ranks: u32,
        policy: Policy,
    ) -> Result<Self, paceline_plan::Error> {
        Ok(Self {
            steering: steering(&ways, first, Duration::ZERO, policy.holds)?,
            postponed: None,
            candidates: ways,
            policy,
            way: first,
            epoch: 0,
            workers: vec![WorkerState::Empty; ranks as usize],
            phase: Phase::New,
            requests: Requests::default(),
            was_ready: policy.goes_on,
            losses_left: FIRST_LOSSES_MAX,
            wait: policy.first_wait(),
            restarts: 0,
            continued: 0,
            learned: None,
            learned_at: None,
            out: VecDeque::new(),
        })
    }

    /// Index of the split in use, or of the last epoch.
    pub const fn way(&self) -> usize {
        self.way
    }

    /// Whether a split failed to start before, so that it is not used again.
    pub fn is_refused(&self, way: usize) -> bool {
        self.steering.is_refused(way)
    }

    /// Number of the last started epoch; 0 before the first.
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Epochs started after a failure.
    pub const fn restarts(&self) -> u64 {
        self.restarts
    }

    /// Answers that continued from their tokens with numbers that are near and not the same to the
    /// bit; one that does so twice counts twice.
    pub const fn continued(&self) -> u64 {
        self.continued
    }

    /// Measured decode tokens a second of the split in use, from single answers.
    pub fn measured(&self) -> Option<f64> {
        self.steering.measured(self.steering.at())
    }

    /// Changes of the split that were made.
    pub const fn changes(&self) -> u32 {
        self.steering.changes()
    }

    /// Numbers of running and of waiting requests.
    pub fn load(&self) -> (usize, usize) {
        self.requests.load(matches!(self.phase, Phase::Ready))
    }

    /// Whether requests are taken.
    pub fn health(&self) -> Health {
        let failed = |reason: &str, again| Health::Failed {
            reason: reason.to_owned(),
            again,
        };
        match &self.phase {
            Phase::Ready => Health::Ready,
            Phase::New => Health::Loading,
            Phase::Starting(Starting { why, .. }) => why.health(),
            Phase::Leaving {
                then: LeaveAction::Begin(_, why),
                ..
            } => why.health(),
            Phase::Failing { start: None, .. } => Health::Ready, // until the cause is known
            Phase::Failing {
                start: Some((_, why)),
                ..
            } => why.health(),
            Phase::Waiting { reason, .. }
            | Phase::Leaving {
                then: LeaveAction::Wait(_, reason),
                ..
            } => failed(reason, true),
            Phase::Ended { reason } => failed(reason, false),
        }
    }

    /// When [`Event::Tick`] is due, if nothing else happens before.
    pub fn due(&self) -> Option<Duration> {
        match &self.phase {
            Phase::Failing { until, .. }
            | Phase::Leaving { until, .. }
            | Phase::Waiting { until, .. } => Some(*until),
            Phase::Starting(starting) => starting.until,
            Phase::Ready => self.steering.due(),
            Phase::New | Phase::Ended { .. } => None,
        }
    }

    /// Handles an event at `now`, a monotonic time from any origin; returns the actions.
    pub fn step(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Begin => self.first(now),
            Event::Request(RequestMessage::Submit(submission)) => self.submit(now, submission),
            Event::Request(RequestMessage::Cancel(ticket)) => self.cancel(now, ticket),
            Event::Worker(event) => self.crew(now, event),
            Event::Unreachable { .. } if matches!(self.phase, Phase::Ended { .. }) => {}
            Event::Unreachable { rank, reason } => {
                self.replace_later(rank);
                self.record_failure(now, FailureReport::Unreachable { rank, reason });
            }
            Event::Unsendable { ticket, reason } => {
                self.finish(
                    now,
                    ticket,
                    Reply::Failed(RequestFailure::Invalid { reason }),
                );
            }
            Event::Move { to, gain } => self.move_to(now, to, gain),
            Event::Tick => self.steer(now, split_selection::Event::Waited),
            Event::End => self.end(now, "the instance was ended"),
        }
        self.poll(now);
        self.out.drain(..).collect()
    }

    fn first(&mut self, now: Duration) {
        if matches!(self.phase, Phase::New) {
            self.begin(now, self.way, EpochReason::First);
        }
    }

    /// Starts an epoch: starts missing workers, and assigns all ranks.
    fn begin(&mut self, now: Duration, way: usize, why: EpochReason) {
        self.epoch += 1;
        self.rest(now);
        let ranks = self.workers.len();
        self.phase = Phase::Starting(Starting {
            way,
            why,
            since: now,
            until: Some(now + LISTEN_LIMIT),
            addrs: vec![None; ranks],
            ready: vec![None; ranks],
        });
        for (rank, seat) in (0..).map(Rank).zip(&mut self.workers) {
            if *seat == WorkerState::Empty {
                self.out.push_back(Action::Start(rank));
            }
            *seat = WorkerState::Busy;
        }
        let epoch = self.epoch;
        let assign = |rank| Action::Assign { rank, epoch, way };
        self.out.extend((0..ranks as u32).map(Rank).map(assign));
    }

    fn crew(&mut self, now: Duration, event: CrewEvent<FromWorker>) {
        let old = match &event {
            CrewEvent::Message {
                message: FromWorker::Failed { epoch, .. },
                ..
            } => *epoch != self.epoch, // a report of an earlier epoch
            _ => false,
        };
        if old || matches!(self.phase, Phase::Ended { .. }) {
            return;
        }
        match FailureReport::of(event) {
            Ok(sign) => self.handle_failure(now, sign),
            Err((rank, message)) => self.message(now, rank, message),
        }
    }

    fn message(&mut self, now: Duration, rank: Rank, message: FromWorker) {
        let place = rank.0 as usize;
        match (message, &mut self.phase) {
            (FromWorker::Listening { addr }, Phase::Starting(starting)) => {
                starting.addrs[place] = Some(addr);
                self.join_ranks();
            }
            (FromWorker::Loading { done, of }, Phase::Starting(_)) => {
                let notice = Notice::Loading { rank, done, of };
                self.out.push_back(Action::Tell(notice));
            }
            (FromWorker::Ready(facts), Phase::Starting(starting)) => {
                starting.ready[place] = Some(facts);
                self.become_ready(now);
            }
            (
                FromWorker::Reply {
                    ticket,
                    at_us,
                    reply,
                },
                _,
            ) => self.reply(now, ticket, reply, at_us.map(Duration::from_micros)),
            (FromWorker::Left { epoch, .. }, Phase::Leaving { .. })
                if epoch == self.epoch && self.workers[place] == WorkerState::Busy =>
            {
                self.workers[place] = WorkerState::Idle;
            }
            _ => {}
        }
    }

    /// Once all ranks listen, sends each the addresses.
    fn join_ranks(&mut self) {
        let Phase::Starting(starting) = &mut self.phase else {
            return;
        };
        let Some(addrs) = starting.addrs.iter().copied().collect::<Option<Vec<_>>>() else {
            return;
        };
        starting.until = None;
        let join = |rank| Action::Join {
            rank,
            addrs: addrs.clone(),
        };
        self.out.extend((0..addrs.len() as u32).map(Rank).map(join));
    }

    /// Once all ranks are ready, starts to admit requests.
    fn become_ready(&mut self, now: Duration) {
        let Phase::Starting(starting) = &self.phase else {
            return;
        };
        let Some(facts) = starting.ready.iter().cloned().collect::<Option<Vec<_>>>() else {
            return;
        };
        let (way, why, took) = (starting.way, starting.why.clone(), now - starting.since);
        self.phase = Phase::Ready;
        if let (EpochReason::First, Ok(steering)) = (
            &why,
            steering(&self.candidates, way, took, self.policy.holds),
        ) {
            self.steering = steering; // the time of a load is known now
        }
        (self.way, self.was_ready) = (way, true);
        self.out.push_back(Action::Loaded { way, took });
        let again = matches!(why, EpochReason::Again);
        self.out.push_back(Action::Tell(Notice::Ready {
            epoch: self.epoch,
            way,
            facts,
            again,
        }));
        self.changed(now, &why);
        self.steer(now, split_selection::Event::Restarted);
        self.hand_over();
    }

    /// Handles expired deadlines and completed phases.
    fn poll(&mut self, now: Duration) {
        match &self.phase {
            Phase::Starting(starting) if starting.until.is_some_and(|until| now >= until) => {
                let missing = starting.addrs.iter().position(Option::is_none);
                let rank = Rank(missing.unwrap_or(0) as u32);
                self.replace_later(rank);
                let reason = format!("did not listen within {} s", LISTEN_LIMIT.as_secs());
                self.record_failure(now, FailureReport::Unreachable { rank, reason });
            }
            Phase::Failing { signs, until, .. }
                if now >= *until || signs.len() > self.workers.len() * 2 =>
            {
                self.resolve_failure(now);
            }
            Phase::Leaving { until, .. } => {
                if now >= *until {
                    self.replace_late();
                }
                if !self.workers.contains(&WorkerState::Busy) {
                    self.all_left(now);
                }
            }
            Phase::Waiting { until, .. } if now >= *until => {
                self.restarts += 1;
                let why = match self.was_ready {
                    true => EpochReason::Again,
                    false => EpochReason::First,
                };
                self.begin(now, self.way, why);
            }
            _ => {}
        }
    }

    fn end(&mut self, now: Duration, reason: &str) {
        if matches!(self.phase, Phase::Ended { .. }) {
            return;
        }
        self.learn(now);
        self.lose(now, reason);
        self.over(reason);
    }

    fn over(&mut self, reason: &str) {
        let reason = reason.to_owned();
        self.phase = Phase::Ended { reason };
        self.out.push_back(Action::End);
    }

    /// Reports the speed of the split in use, if it is known and new.
    fn learn(&mut self, now: Duration) {
        let way = self.steering.at();
        let lesson = self.steering.measured(way).map(|tok_s| (way, tok_s));
        if let Some((way, tok_s)) = lesson.filter(|_| lesson != self.learned) {
            (self.learned, self.learned_at) = (lesson, Some(now));
            self.out.push_back(Action::Learn { way, tok_s });
        }
    }

    fn learn_sometimes(&mut self, now: Duration) {
        let last = self.learned_at;
        if last.is_none_or(|last| now.saturating_sub(last) > LEARN_EVERY) {
            self.learn(now);
        }
    }
}

/// Steering that starts with split `first`; `unknown` is the assumed change time of splits never
/// loaded. If it `holds`, it orders no change by itself.
fn steering(
    ways: &[SplitCandidate],
    first: usize,
    unknown: Duration,
    holds: bool,
) -> Result<SplitSelector, paceline_plan::Error> {
    let way = |way: &SplitCandidate| split_selection::SplitEstimate {
        tok_s: way.tok_s,
        key_s: way.key_s,
        change: way.change.unwrap_or(unknown),
    };
    let ways: Vec<split_selection::SplitEstimate> = ways.iter().map(way).collect();
    let steering = SplitSelector::new(&ways, first)?;
    Ok(if holds { steering.holding() } else { steering })
}

fn cannot_start(reason: &str) -> String {
    format!("cannot start: {reason}")
}

#[cfg(test)]
mod tests;
