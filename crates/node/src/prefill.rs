//! Disaggregated prefill: separate prefill ranks compute prompts for the ranks that decode. This
//! pure state machine decides which group computes each prompt.
//!
//! ```text
//! submitted --short, or slower there-----------------------------------> Go: to the decoding ranks
//!     |                                                                  ^
//!     '--> waiting --Read--> under way --all decoding ranks have it------+
//!                                      --lost, late, refused: an event---+
//!
//! link:  Down --both groups are ready: Listen--> Listening --Connect--> Joining --> Up
//!         ^----------------- a rank or a connection is lost, a deadline passes ----'
//! ```
//!
//! The decode ranks compute every page that does not arrive: by the numerics rule the answer is the
//! same. So no failure here loses a request, and every wait has a deadline. [`Apart`] has no clock,
//! thread or process; the shell in the `instance` module has them.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use paceline_base::Rank;
use paceline_engine::{RequestFailure, Ticket};
use paceline_plan::prefill_offload::PrefillOffload;

/// Prompts that the prefill ranks compute or transfer at once: one is computed, and the next is
/// ready when it is done.
pub const UNDER_WAY_MAX: usize = 2;

/// Maximum prompts that wait for the prefill ranks. A further prompt goes to the decode ranks,
/// which would compute it sooner.
pub const WAITING_MAX: usize = 16;

/// Longest wait for the pages of a computed prompt: the queues of a connection hold 64 MB.
pub const HAND_LIMIT: Duration = Duration::from_secs(10);

/// Longest prefill of a prompt with no predicted time: the time limit of a request.
const READ_LIMIT: Duration = Duration::from_secs(600);

/// A prefill may take this multiple of its predicted time, plus [`READ_SPARE`]. After that the
/// decode ranks compute the prompt.
const READ_TIMES: f64 = 4.0;
const READ_SPARE: Duration = Duration::from_secs(10);

/// Longest wait for all ranks to listen, and for all to connect; each rank waits 5 s itself.
const LINK_LIMIT: Duration = Duration::from_secs(10);

/// Wait before a new attempt to connect: doubled each time, reset by a completed KV transfer.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A request arrived. The decode ranks have not cached `tokens` tokens of its prompt, which the
    /// prefill ranks may compute.
    Prompt {
        ticket: Ticket,
        tokens: u32,
    },
    /// The caller cancelled the request.
    Cancel(Ticket),
    /// The prefill ranks have computed the prompt, or refuse it.
    Read(Ticket, Result<(), RequestFailure>),
    /// A decode rank has received all pages of the prompt.
    Arrived(Ticket, Rank),
    /// The decode ranks computed `tokens` tokens of a prompt themselves.
    ReadHere {
        tokens: u32,
        took: Duration,
    },
    /// The decode ranks are ready in a new epoch; their number.
    DecodeReady(u32),
    /// The decode ranks are no longer ready.
    DecodeLost,
    /// The prefill ranks are ready in a new epoch; their number.
    PrefillReady(u32),
    /// The prefill ranks are not ready; the reason.
    PrefillLost(String),
    /// A decode rank listens.
    Receives {
        rank: Rank,
        round: u64,
        /// One for each prefill rank.
        addrs: Vec<SocketAddr>,
    },
    /// A prefill rank is connected to all decode ranks.
    HandsOver {
        rank: Rank,
        round: u64,
    },
    /// A connection is lost, or could not be made.
    Unlinked {
        round: u64,
        reason: String,
    },
    Tick,
}

/// Something to do, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillAction {
    /// Submit a request to the decode ranks.
    Go(Ticket),
    /// Have the prefill ranks compute a prompt, and the decode ranks report when they have its
    /// pages.
    Read(Ticket),
    /// Stop the prefill of a prompt.
    Stop(Ticket),
    /// Forget a request that was cancelled.
    Forget(Ticket),
    /// Have all decode ranks listen, in a new round of connections.
    Listen(u64),
    /// Have each prefill rank connect to the addresses where the decode ranks listen for it.
    Connect {
        round: u64,
        /// By prefill rank: an address for each decode rank.
        addrs: Vec<Vec<SocketAddr>>,
    },
    /// Notify the observer.
    Tell(PrefillUpdate),
}

/// A change of disaggregated prefill, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrefillUpdate {
    /// Prefill runs on the prefill ranks from now on.
    Up,
    /// The prefill ranks are lost; the decode ranks compute the prompts that were under way.
    Down {
        reason: String,
        /// Prompts.
        under_way: usize,
    },
    /// A single prompt falls back to the decode ranks.
    Late { reason: String },
}

impl PrefillUpdate {
    /// A line for people.
    pub fn line(&self) -> String {
        match self {
            Self::Up => "prompts are read by nodes of their own".to_owned(),
            Self::Down { reason, under_way } => format!(
                "warning: the nodes for prompts are lost: {reason}; the other nodes read prompts, \
                 {under_way} of them anew"
            ),
            Self::Late { reason } => {
                format!("warning: a prompt is read by the nodes that decode: {reason}")
            }
        }
    }
}

#[derive(Clone, Debug)]
enum PrefillLink {
    Down {
        again: Duration,
    },
    Listening {
        until: Duration,
        /// By decoding rank.
        addrs: Vec<Option<Vec<SocketAddr>>>,
    },
    Joining {
        until: Duration,
        /// By rank for prompts.
        joined: Vec<bool>,
    },
    Up,
}

#[derive(Clone, Debug)]
struct OffloadedPrompt {
    ticket: Ticket,
    tokens: u32,
    way: PrefillProgress,
}

#[derive(Clone, Debug)]
enum PrefillProgress {
    Waiting,
    Under {
        since: Duration,
        until: Duration,
        /// By decoding rank.
        arrived: Vec<bool>,
    },
}

/// Counters for status and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillCounts {
    /// Prompts computed by the prefill ranks and transferred.
    pub handed: u64,
    /// Prompts meant for the prefill ranks that the decode ranks computed.
    pub fell_back: u64,
}

#[derive(Debug)]
pub struct PrefillScheduler {
    readers: PrefillOffload,
    /// Ready decode ranks; `None` while that group is not ready.
    here: Option<u32>,
    there: Option<u32>,
    link: PrefillLink,
    round: u64,
    wait: Duration,
    /// Whether [`PrefillUpdate::Up`] was the last update sent.
    told_up: bool,
    prompts: VecDeque<OffloadedPrompt>,
    counts: PrefillCounts,
    out: Vec<PrefillAction>,
}

impl PrefillScheduler {
    /// `readers` holds the measured prefill speed of both groups.
    pub const fn new(readers: PrefillOffload) -> Self {
        Self {
            readers,
            here: None,
            there: None,
            link: PrefillLink::Down {
                again: Duration::ZERO,
            },
            round: 0,
            wait: FIRST_WAIT,
            told_up: false,
            prompts: VecDeque::new(),
            counts: PrefillCounts {
                handed: 0,
                fell_back: 0,
            },
            out: Vec::new(),
        }
    }

    /// Whether both groups are connected, so that prompts can be offloaded.
    pub const fn is_up(&self) -> bool {
        matches!(self.link, PrefillLink::Up)
    }

    /// Prompts that wait or are under way.
    pub fn held(&self) -> usize {
        self.prompts.len()
    }

    /// Outcomes of offloaded prompts so far.
    pub const fn counts(&self) -> PrefillCounts {
        self.counts
    }

    /// Prefill speed of both groups.
    pub const fn readers(&self) -> &PrefillOffload {
        &self.readers
    }

    /// Whether no prompt is under way, so that a time measured on the decode ranks is undisturbed.
    pub fn is_idle(&self) -> bool {
        self.prompts.is_empty()
    }

    /// When [`Event::Tick`] is due, if nothing else happens before.
    pub fn due(&self) -> Option<Duration> {
        let link = match &self.link {
            PrefillLink::Down { again } if self.here.is_some() && self.there.is_some() => {
                Some(*again)
            }
            PrefillLink::Listening { until, .. } | PrefillLink::Joining { until, .. } => {
                Some(*until)
            }
            PrefillLink::Down { .. } | PrefillLink::Up => None,
        };
        let prompts = self.prompts.iter().filter_map(|prompt| match prompt.way {
            PrefillProgress::Under { until, .. } => Some(until),
            PrefillProgress::Waiting => None,
        });
        prompts.chain(link).min()
    }

    /// Takes in an event; returns the actions.
    pub fn step(&mut self, now: Duration, event: Event) -> Vec<PrefillAction> {
        match event {
            Event::Prompt { ticket, tokens } => self.prompt(ticket, tokens),
            Event::Cancel(ticket) => self.cancel(ticket),
            Event::Read(ticket, outcome) => self.read(now, ticket, outcome),
            Event::Arrived(ticket, rank) => self.arrived(now, ticket, rank),
            Event::ReadHere { tokens, took } => {
                self.readers.read_here(tokens, took.as_secs_f64());
            }
            Event::DecodeReady(ranks) => {
                self.here = Some(ranks);
                self.renew(now);
            }
            Event::PrefillReady(ranks) => {
                self.there = Some(ranks);
                self.renew(now);
            }
            Event::DecodeLost => {
                self.here = None;
                self.down(now, "the nodes that decode start again");
            }
            Event::PrefillLost(reason) => {
                self.there = None;
                self.down(now, &reason);
            }
            Event::Receives { rank, round, addrs } if round == self.round => {
                self.receives(now, rank, addrs);
            }
            Event::HandsOver { rank, round } if round == self.round => self.joined(rank),
            Event::Unlinked { round, reason } if round == self.round => self.down(now, &reason),
            Event::Receives { .. }
            | Event::HandsOver { .. }
            | Event::Unlinked { .. }
            | Event::Tick => {}
        }
        self.tick(now);
        std::mem::take(&mut self.out)
    }

    fn prompt(&mut self, ticket: Ticket, tokens: u32) {
        let waiting = self.prompts.len().saturating_sub(UNDER_WAY_MAX);
        let ahead = self.prompts.iter().map(|prompt| prompt.tokens);
        let ahead = ahead.fold(0, u32::saturating_add);
        let goes =
            self.is_up() && waiting < WAITING_MAX && self.readers.is_offloaded(tokens, ahead);
        if !goes {
            self.out.push(PrefillAction::Go(ticket));
            return;
        }
        self.prompts.push_back(OffloadedPrompt {
            ticket,
            tokens,
            way: PrefillProgress::Waiting,
        });
    }

    fn take(&mut self, ticket: Ticket) -> Option<OffloadedPrompt> {
        let at = self.prompts.iter().position(|p| p.ticket == ticket)?;
        self.prompts.remove(at)
    }

    fn cancel(&mut self, ticket: Ticket) {
        if let Some(prompt) = self.take(ticket) {
            if matches!(prompt.way, PrefillProgress::Under { .. }) {
                self.out.push(PrefillAction::Stop(ticket));
            }
            self.out.push(PrefillAction::Forget(ticket));
        }
    }

    /// Sends a prompt to the decode ranks.
    fn fall_back(&mut self, prompt: &OffloadedPrompt) {
        if matches!(prompt.way, PrefillProgress::Under { .. }) {
            self.out.push(PrefillAction::Stop(prompt.ticket));
        }
        self.counts.fell_back += 1;
        self.out.push(PrefillAction::Go(prompt.ticket));
    }

    fn late(&mut self, prompt: &OffloadedPrompt, reason: String) {
        self.fall_back(prompt);
        self.out
            .push(PrefillAction::Tell(PrefillUpdate::Late { reason }));
    }

    /// Takes the elapsed time of a late prompt as a lower bound of its cost, so that later prompts
    /// wait less.
    fn learn_late(&mut self, now: Duration, prompt: &OffloadedPrompt) {
        if let PrefillProgress::Under { since, .. } = prompt.way {
            let took = now.saturating_sub(since);
            self.readers.read_there(prompt.tokens, took.as_secs_f64());
        }
    }

    fn read(&mut self, now: Duration, ticket: Ticket, outcome: Result<(), RequestFailure>) {
        if let Err(failure) = outcome {
            if let Some(prompt) = self.take(ticket) {
                self.late(&prompt, failure.to_string());
            }
            return;
        }
        let mut all = self.prompts.iter_mut();
        if let Some(prompt) = all.find(|prompt| prompt.ticket == ticket)
            && let PrefillProgress::Under { until, .. } = &mut prompt.way
        {
            *until = now + HAND_LIMIT;
        }
    }

    fn arrived(&mut self, now: Duration, ticket: Ticket, rank: Rank) {
        let mut all = self.prompts.iter_mut();
        let Some(prompt) = all.find(|prompt| prompt.ticket == ticket) else {
            return;
        };
        let PrefillProgress::Under { since, arrived, .. } = &mut prompt.way else {
            return;
        };
        if let Some(has) = arrived.get_mut(rank.0 as usize) {
            *has = true;
        }
        if arrived.contains(&false) {
            return;
        }
        let (tokens, took) = (prompt.tokens, now.saturating_sub(*since));
        self.take(ticket);
        if let Some(OffloadedPrompt {
            way: PrefillProgress::Under { since, .. },
            ..
        }) = self.prompts.front_mut()
        {
            *since = now; // it was queued behind the previous one until now
        }
        self.readers.read_there(tokens, took.as_secs_f64());
        self.counts.handed += 1;
        self.wait = FIRST_WAIT;
        self.out.push(PrefillAction::Go(ticket));
    }

    /// A group began a new epoch: the connections of the previous epoch are gone.
    fn renew(&mut self, now: Duration) {
        if !matches!(self.link, PrefillLink::Down { .. }) {
            self.down(now, "a group of nodes started again");
        }
        self.link = PrefillLink::Down { again: now };
    }

    /// The decode ranks compute all prompts until the groups are connected again.
    fn down(&mut self, now: Duration, reason: &str) {
        self.round += 1; // messages of the previous round are ignored
        let again = now + self.wait;
        if !matches!(self.link, PrefillLink::Down { .. }) {
            self.wait = LONGEST_WAIT.min(self.wait * 2);
        }
        self.link = PrefillLink::Down { again };
        let prompts = std::mem::take(&mut self.prompts);
        prompts.iter().for_each(|prompt| self.fall_back(prompt));
        if std::mem::take(&mut self.told_up) {
            self.out.push(PrefillAction::Tell(PrefillUpdate::Down {
                reason: reason.to_owned(),
                under_way: prompts.len(),
            }));
        }
    }

    fn receives(&mut self, now: Duration, rank: Rank, of_rank: Vec<SocketAddr>) {
        let (PrefillLink::Listening { addrs, .. }, Some(there)) = (&mut self.link, self.there)
        else {
            return;
        };
        let Some(place) = addrs.get_mut(rank.0 as usize) else {
            return;
        };
        if of_rank.len() != there as usize {
            let reason = format!("{rank} listens for {} nodes of {there}", of_rank.len());
            return self.down(now, &reason);
        }
        *place = Some(of_rank);
        let Some(all) = addrs.iter().cloned().collect::<Option<Vec<_>>>() else {
            return;
        };
        let for_giver = |giver: usize| all.iter().map(|of_rank| of_rank[giver]).collect();
        self.out.push(PrefillAction::Connect {
            round: self.round,
            addrs: (0..there as usize).map(for_giver).collect(),
        });
        self.link = PrefillLink::Joining {
            until: now + LINK_LIMIT,
            joined: vec![false; there as usize],
        };
    }

    fn joined(&mut self, rank: Rank) {
        let PrefillLink::Joining { joined, .. } = &mut self.link else {
            return;
        };
        if let Some(has) = joined.get_mut(rank.0 as usize) {
            *has = true;
        }
        if joined.contains(&false) {
            return;
        }
        self.link = PrefillLink::Up;
        self.told_up = true;
        self.out.push(PrefillAction::Tell(PrefillUpdate::Up));
    }

    /// Handles expired deadlines, then starts queued prompts.
    fn tick(&mut self, now: Duration) {
        match &self.link {
            PrefillLink::Down { again } if *again <= now => self.listen(now),
            PrefillLink::Listening { until, .. } | PrefillLink::Joining { until, .. }
                if *until <= now =>
            {
                self.down(now, "not all nodes connect");
            }
            _ => {}
        }
        let is_late = |prompt: &OffloadedPrompt| match prompt.way {
            PrefillProgress::Under { until, .. } => until <= now,
            PrefillProgress::Waiting => false,
        };
        while let Some(at) = self.prompts.iter().position(is_late) {
            if let Some(prompt) = self.prompts.remove(at) {
                self.learn_late(now, &prompt);
                self.late(&prompt, "its pages did not come in time".to_owned());
            }
        }
        self.begin(now);
    }

    fn listen(&mut self, now: Duration) {
        let (Some(here), Some(_)) = (self.here, self.there) else {
            return;
        };
        self.round += 1;
        self.out.push(PrefillAction::Listen(self.round));
        self.link = PrefillLink::Listening {
            until: now + LINK_LIMIT,
            addrs: vec![None; here as usize],
        };
    }

    /// Starts queued prompts up to [`UNDER_WAY_MAX`].
    fn begin(&mut self, now: Duration) {
        let (true, Some(here)) = (self.is_up(), self.here) else {
            return;
        };
        let mut ahead: u32 = 0;
        for prompt in self.prompts.iter_mut().take(UNDER_WAY_MAX) {
            ahead = ahead.saturating_add(prompt.tokens);
            if matches!(prompt.way, PrefillProgress::Under { .. }) {
                continue;
            }
            let seconds = self.readers.there_tok_s().map(|s| f64::from(ahead) / s);
            let limit = seconds.map(|s| Duration::try_from_secs_f64(s * READ_TIMES));
            let limit = match limit {
                Some(Ok(limit)) => READ_LIMIT.min(limit + READ_SPARE),
                _ => READ_LIMIT,
            };
            prompt.way = PrefillProgress::Under {
                since: now,
                until: now + limit,
                arrived: vec![false; here as usize],
            };
            self.out.push(PrefillAction::Read(prompt.ticket));
        }
    }
}

#[cfg(test)]
mod tests;
