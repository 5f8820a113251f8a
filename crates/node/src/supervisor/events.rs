//! Events, actions and notices of the supervisor.

use std::net::SocketAddr;
use std::time::Duration;

use paceline_base::Rank;
use paceline_cluster::workers::Event as CrewEvent;
use paceline_engine::{Reply, RequestMessage, Ticket};
use paceline_worker::messages::{FromWorker, RankFacts};

use super::change::ChangeRecord;
use crate::prefill::PrefillUpdate;

/// Something that happened.
#[derive(Debug)]
pub enum Event {
    /// Start the first epoch.
    Begin,
    /// A caller's message.
    Request(RequestMessage),
    /// An event of a worker.
    Worker(CrewEvent<FromWorker>),
    /// A worker did not start or is unreachable.
    Unreachable {
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// A request could not be encoded as a message.
    Unsendable {
        ticket: Ticket,
        /// Why.
        reason: String,
    },
    /// Another split is better now: change to it, unless another change or a failure is in
    /// progress.
    Move {
        to: usize,
        /// Tokens a second there, as a multiple of those now.
        gain: f64,
    },
    /// Time went by.
    Tick,
    /// End all workers.
    End,
}

/// Something to do, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Start a worker for a rank, and replace an earlier one.
    Start(Rank),
    /// Assign a rank its part of the epoch.
    Assign {
        rank: Rank,
        /// Number of the epoch, from 1.
        epoch: u64,
        /// Index of the split.
        way: usize,
    },
    /// Give the next epochs fewer rows a step: a device interrupted a step that took too long.
    ShrinkSteps,
    /// Send a rank the addresses of all ranks.
    Join {
        rank: Rank,
        /// An address for each rank.
        addrs: Vec<SocketAddr>,
    },
    /// Make a rank leave the epoch.
    Leave(Rank),
    /// Kill a rank's worker.
    Stop(Rank),
    /// Submit a request to the leader with the tokens answered so far, or make it drop one.
    Request { rank: Rank, message: RequestMessage },
    /// Deliver a reply to the request's caller.
    Deliver(Ticket, Reply),
    /// Drop the sink of a cancelled request.
    Forget(Ticket),
    /// Store the decode speed of a split.
    Learn {
        way: usize,
        /// Decode tokens a second.
        tok_s: f64,
    },
    /// Store the load time of a split, from its first order until the last rank was ready.
    Loaded {
        way: usize,
        /// How long.
        took: Duration,
    },
    /// Notify the observer.
    Tell(Notice),
    /// End all workers; the last action.
    End,
}

/// A notice for logs and the dashboard.
#[derive(Clone, Debug, PartialEq)]
pub enum Notice {
    /// A rank has loaded `done` of `of` steps.
    Loading {
        rank: Rank,
        /// Steps done.
        done: usize,
        /// Of how many.
        of: usize,
    },
    /// An epoch takes requests.
    Ready {
        /// Its number.
        epoch: u64,
        /// Index of its split.
        way: usize,
        /// The ranks' facts about themselves.
        facts: Vec<RankFacts>,
        /// Whether it follows a failure.
        again: bool,
    },
    /// The split was changed, or the change failed.
    Changed(ChangeRecord),
    /// An epoch failed.
    Failed {
        /// The rank that caused it.
        rank: Rank,
        /// The failure, with the rank's name.
        reason: String,
        /// Until the next epoch starts; `None` when none will.
        again_in: Option<Duration>,
    },
    /// Disaggregated prefill started or stopped. Sent by the instance, not by its supervisor.
    Prompts(PrefillUpdate),
    /// Answers continue in this epoch from the tokens that they have. Their numbers are near and
    /// not the same to the bit.
    Continued { answers: usize },
}

impl Notice {
    /// A line for people about answers that [continued](Self::Continued).
    pub fn continued(answers: usize) -> String {
        let noun = match answers {
            1 => "answer continues",
            _ => "answers continue",
        };
        format!(
            "{answers} {noun} from the tokens so far; its bits may differ from those of an answer \
             without the interruption"
        )
    }
}
