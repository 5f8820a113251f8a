//! The events of the decode and the prefill group, on their way to the prefill thread.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use paceline_base::Rank;
use paceline_engine::{RequestFailure, Sink, Submission, Ticket};
use paceline_model::Split;
use paceline_worker::messages::FromWorker;

use crate::supervisor::Notice;

/// One of the two groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupRole {
    /// The decode ranks.
    Decode,
    /// The prefill ranks.
    Prefill,
}

/// A message to the thread.
pub(in crate::instance) enum PrefillSignal {
    Accept(Submission, Sink),
    Cancel(Ticket),
    Ready(GroupRole, Split),
    Lost(GroupRole, String),
    /// A worker's message about KV transfer.
    Worker(Rank, FromWorker),
    Read(Ticket, Result<(), RequestFailure>),
    ReadHere(u32, Duration),
    End,
}

#[derive(Clone)]
pub(crate) struct GroupEventSender {
    pub(super) side: GroupRole,
    pub(super) signals: Sender<PrefillSignal>,
}

pub(crate) struct GroupEventReceiver {
    pub(super) signals: Sender<PrefillSignal>,
    pub(super) heard: Receiver<PrefillSignal>,
}

/// Creates the event channel of both groups, before they exist: for decode, for prefill, and the
/// receiver.
pub(crate) fn group_events() -> (GroupEventSender, GroupEventSender, GroupEventReceiver) {
    let (signals, heard) = channel();
    let of = |side| GroupEventSender {
        side,
        signals: signals.clone(),
    };
    (
        of(GroupRole::Decode),
        of(GroupRole::Prefill),
        GroupEventReceiver { signals, heard },
    )
}

impl GroupEventSender {
    pub(crate) const fn side(&self) -> GroupRole {
        self.side
    }

    /// Forwards a worker's message about KV transfer; returns any other message.
    pub(in crate::instance) fn worker(
        &self,
        rank: Rank,
        message: FromWorker,
    ) -> Option<FromWorker> {
        let is_ours = matches!(
            message,
            FromWorker::Receives { .. }
                | FromWorker::HandsOver { .. }
                | FromWorker::Unlinked { .. }
                | FromWorker::Arrived { .. }
        );
        if !is_ours {
            return Some(message);
        }
        self.say(PrefillSignal::Worker(rank, message));
        None
    }

    /// Forwards a notice of the group; `split` returns its split by index.
    pub(in crate::instance) fn notice(&self, notice: &Notice, split: impl Fn(usize) -> Split) {
        match notice {
            Notice::Ready { way, .. } => self.say(PrefillSignal::Ready(self.side, split(*way))),
            Notice::Failed { reason, .. } => {
                self.say(PrefillSignal::Lost(self.side, reason.clone()))
            }
            Notice::Changed(_)
            | Notice::Loading { .. }
            | Notice::Prompts(_)
            | Notice::Continued { .. } => {}
        }
    }

    pub(super) fn say(&self, signal: PrefillSignal) {
        let _ = self.signals.send(signal); // fails when the instance ends
    }
}
