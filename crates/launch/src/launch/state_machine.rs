//! The state machine of a launch, without processes: events in, actions out.
//!
//! ```text
//!  Starting ──all ranks ready and guarded──▶ Running ──all ended──▶ over
//!      │                                        │
//!      └── a host or rank is lost, a rank fails, Ctrl-C ──▶ Ending ──all gone──▶ over
//! ```
//!
//! No program runs before all can, so a host that is switched off does not cost the others a
//! half-started job. The first failure is reported as the cause; its consequences are not reported.

use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_process::{Ending, Signal};

use super::{Error, LaunchLimits, Notice};

/// How long a rank's session may stay after its program has ended: a process that left the
/// program's group may hold its output open.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) enum Event {
    HostReady(usize),
    /// The host agent, or the connection to it, has ended.
    HostLost(usize, String),
    /// The shell of a rank is ready.
    Ready(usize),
    /// The host agent has registered the rank's process group.
    Guarded(usize),
    /// The shell of a rank shares its process group with others, so the group cannot be killed.
    Shared(usize),
    /// The program of a rank ended with this code, as a shell reports it.
    Exited(usize, i32),
    /// The session of a rank ended.
    Closed(usize, Ending),
    /// The reader of the output has closed it.
    OutputGone,
    /// The user cancelled the launch.
    Cancel,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum SessionAction {
    /// Start the sessions of this host's ranks.
    Start(usize),
    /// Register the rank's process group with its host agent.
    Guard(usize),
    /// Start the program.
    Go(usize),
    /// Unregister the rank's process group.
    Release(usize),
    /// Let the host agent signal the rank's process group.
    Signal(usize, Signal),
    /// Kill the session from this side.
    Abandon(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankStage {
    Waiting,
    Ready,
    Guarded,
    Running,
    Exited(Instant),
    Gone,
}

#[derive(Debug)]
struct RankState {
    host: usize,
    stage: RankStage,
    killed: bool,
}

#[derive(Debug)]
enum Phase {
    Starting(Instant),
    Running,
    /// A rank has ended well: the time and the rank.
    Lingering(Instant, usize),
    /// The signals to send and when, latest first; `None` kills the session.
    Ending(Vec<(Instant, Option<Signal>)>),
}

#[derive(Debug)]
pub(super) struct LaunchMachine {
    hosts: Vec<String>,
    ranks: Vec<RankState>,
    limits: LaunchLimits,
    phase: Phase,
    cause: Option<Error>,
    notices: Vec<Notice>,
}

impl LaunchMachine {
    /// `host_of` has an index into `hosts` for each rank.
    pub(super) fn new(
        hosts: Vec<String>,
        host_of: &[usize],
        limits: LaunchLimits,
        now: Instant,
    ) -> Self {
        let rank = |host: &usize| RankState {
            host: *host,
            stage: RankStage::Waiting,
            killed: false,
        };
        Self {
            hosts,
            ranks: host_of.iter().map(rank).collect(),
            limits,
            phase: Phase::Starting(now + limits.start),
            cause: None,
            notices: Vec::new(),
        }
    }

    /// Whether all ranks have ended.
    pub(super) fn is_over(&self) -> bool {
        let unborn = self.cause.is_some();
        let gone = |rank: &RankState| match rank.stage {
            RankStage::Gone => true,
            RankStage::Waiting => unborn,
            _ => false,
        };
        self.ranks.iter().all(gone)
    }

    pub(super) fn outcome(self) -> Result<(), Error> {
        self.cause.map_or(Ok(()), Err)
    }

    /// Drains the pending notifications.
    pub(super) fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    pub(super) fn step(&mut self, now: Instant, event: Event) -> Vec<SessionAction> {
        match event {
            Event::HostReady(host) if self.cause.is_none() => vec![SessionAction::Start(host)],
            Event::HostReady(_) => Vec::new(),
            Event::HostLost(host, why) => self.lost(now, host, why),
            Event::Ready(rank) if self.cause.is_none() => {
                self.ranks[rank].stage = RankStage::Ready;
                vec![SessionAction::Guard(rank)]
            }
            Event::Ready(rank) => vec![SessionAction::Abandon(rank)],
            Event::Guarded(rank) => self.guarded(rank),
            Event::Shared(rank) => {
                let host = self.host(rank);
                self.end(now, Error::SharedGroup { host }, Signal::TERM)
            }
            Event::Exited(rank, code) => self.exited(now, rank, code),
            Event::Closed(rank, ending) => self.closed(now, rank, ending),
            Event::OutputGone => self.end(now, Error::OutputGone, Signal::TERM),
            Event::Cancel => self.end(now, Error::Cancelled, Signal::INT),
        }
    }

    /// Handles expired timers.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<SessionAction> {
        let mut orders = Vec::new();
        for (rank, state) in self.ranks.iter_mut().enumerate() {
            if matches!(state.stage, RankStage::Exited(at) if now >= at + CLOSE_LIMIT) {
                state.stage = RankStage::Exited(now); // again, should it not help
                orders.push(SessionAction::Abandon(rank));
            }
        }
        orders.extend(match &self.phase {
            Phase::Starting(until) if now >= *until => self.late(now),
            Phase::Lingering(since, rank) => self.lingered(now, *since, *rank),
            Phase::Ending(_) => self.escalate(now),
            _ => Vec::new(),
        });
        orders
    }

    fn host(&self, rank: usize) -> String {
        self.hosts[self.ranks[rank].host].clone()
    }

    fn guarded(&mut self, rank: usize) -> Vec<SessionAction> {
        if self.cause.is_some() || self.ranks[rank].stage != RankStage::Ready {
            return Vec::new();
        }
        self.ranks[rank].stage = RankStage::Guarded;
        if self
            .ranks
            .iter()
            .any(|rank| rank.stage != RankStage::Guarded)
        {
            return Vec::new();
        }
        self.phase = Phase::Running;
        self.ranks
            .iter_mut()
            .for_each(|rank| rank.stage = RankStage::Running);
        (0..self.ranks.len()).map(SessionAction::Go).collect()
    }

    fn exited(&mut self, now: Instant, rank: usize, code: i32) -> Vec<SessionAction> {
        self.ranks[rank].stage = RankStage::Exited(now);
        let mut orders = vec![SessionAction::Release(rank)];
        // A shell reports a child's signal in no other way.
        let ending = match code {
            129..=192 => Ending::Signal(code - 128),
            code => Ending::Code(code),
        };
        self.notices.push(Notice::Ended(name(rank), ending));
        if !ending.is_success() {
            let (rank, host) = (name(rank), self.host(rank));
            orders.extend(self.end(now, Error::Failed { rank, host, ending }, Signal::TERM));
        } else if matches!(self.phase, Phase::Running) {
            self.phase = Phase::Lingering(now, rank);
        }
        orders
    }

    fn closed(&mut self, now: Instant, rank: usize, ending: Ending) -> Vec<SessionAction> {
        let stage = std::mem::replace(&mut self.ranks[rank].stage, RankStage::Gone);
        if matches!(stage, RankStage::Exited(_) | RankStage::Gone) {
            return Vec::new();
        }
        if self.ranks[rank].killed {
            self.notices.push(Notice::Killed(name(rank)));
            return vec![SessionAction::Release(rank)];
        }
        let (host, started) = (self.host(rank), stage == RankStage::Running);
        let rank = name(rank);
        let error = if started {
            Error::SessionLost { rank, host, ending }
        } else {
            Error::NotStarted { rank, host, ending }
        };
        self.end(now, error, Signal::TERM)
    }

    fn lost(&mut self, now: Instant, host: usize, why: String) -> Vec<SessionAction> {
        let host = self.hosts[host].clone();
        let error = match self.phase {
            Phase::Starting(_) => Error::HostUnreachable { host, why },
            _ => Error::HostLost { host, why },
        };
        if self.ended_by_keeper(&error) {
            self.cause = Some(error);
            return Vec::new();
        }
        self.end(now, error, Signal::TERM)
    }

    /// Whether the first failure is a consequence of losing that host. Without a connection, a host
    /// agent ends its programs.
    fn ended_by_keeper(&self, lost: &Error) -> bool {
        let (Some(Error::Failed { host, ending, .. }), Error::HostLost { host: lost, .. }) =
            (&self.cause, lost)
        else {
            return false;
        };
        let by_keeper = [Signal::TERM, Signal::KILL].map(|signal| Ending::Signal(signal.as_raw()));
        host == lost && by_keeper.contains(ending)
    }

    fn late(&mut self, now: Instant) -> Vec<SessionAction> {
        let waits = |rank: &&RankState| rank.stage != RankStage::Guarded;
        let late = self.ranks.iter().filter(waits).map(|rank| rank.host);
        let mut late: Vec<usize> = late.collect();
        late.sort_unstable();
        late.dedup();
        let hosts = late
            .into_iter()
            .map(|host| self.hosts[host].clone())
            .collect();
        let limit = self.limits.start;
        self.end(now, Error::StartLate { hosts, limit }, Signal::TERM)
    }

    /// The rank that ended well may have left the others waiting for it.
    fn lingered(&mut self, now: Instant, since: Instant, ended: usize) -> Vec<SessionAction> {
        let runs = |(_, rank): &(usize, &RankState)| rank.stage == RankStage::Running;
        let running: Vec<Rank> = self
            .ranks
            .iter()
            .enumerate()
            .filter(runs)
            .map(|(rank, _)| name(rank))
            .collect();
        match self.limits.linger {
            Some(limit) if now >= since + limit && !running.is_empty() => {
                let ended = name(ended);
                let error = Error::Lingered {
                    ended,
                    running,
                    limit,
                };
                self.end(now, error, Signal::TERM)
            }
            _ => Vec::new(),
        }
    }

    /// Starts to end everything, unless that has started.
    fn end(&mut self, now: Instant, cause: Error, first: Signal) -> Vec<SessionAction> {
        if self.cause.is_some() {
            return Vec::new();
        }
        self.cause = Some(cause);
        let grace = self.limits.grace;
        let mut steps = vec![
            (now + grace + CLOSE_LIMIT, None),
            (now + grace, Some(Signal::KILL)),
        ];
        if first != Signal::TERM {
            steps.push((now + grace / 2, Some(Signal::TERM)));
        }
        steps.push((now, Some(first)));
        self.phase = Phase::Ending(steps);
        let unstarted = |(_, rank): &(usize, &RankState)| {
            matches!(
                rank.stage,
                RankStage::Waiting | RankStage::Ready | RankStage::Guarded
            )
        };
        let all = self.ranks.iter().enumerate().filter(unstarted);
        let mut orders: Vec<SessionAction> =
            all.map(|(rank, _)| SessionAction::Abandon(rank)).collect();
        orders.extend(self.escalate(now));
        orders
    }

    fn escalate(&mut self, now: Instant) -> Vec<SessionAction> {
        let mut orders = Vec::new();
        let Phase::Ending(steps) = &mut self.phase else {
            return orders;
        };
        while let Some((_, signal)) = steps.pop_if(|(at, _)| now >= *at) {
            for (rank, state) in self.ranks.iter_mut().enumerate() {
                let is_gone = state.stage == RankStage::Gone;
                match signal {
                    Some(signal) if state.stage == RankStage::Running => {
                        state.killed |= signal == Signal::KILL;
                        orders.push(SessionAction::Signal(rank, signal));
                    }
                    None if !is_gone => orders.push(SessionAction::Abandon(rank)),
                    _ => {}
                }
            }
        }
        orders
    }
}

fn name(rank: usize) -> Rank {
    Rank(u32::try_from(rank).expect("hostfiles have at most 4096 hosts"))
}

#[cfg(test)]
mod tests;
