//! Late connections to a rank's listener, and the roster of the group's processes.
//!
//! The heartbeat thread of a complete group polls the listener. A process that names this group
//! comes too late and receives the reason; most likely it is a second process of a rank.
//! Connections that name another group stay pending for a group that is being made over the same
//! listener (`split`). They time out after [`STRANGER_WAIT`](super::greeting::STRANGER_WAIT), and
//! the peer dials again.

use std::sync::{Arc, Mutex, MutexGuard};

use paceline_base::Rank;

use super::config::{Config, GroupId, random};
use super::greeting::{IncompleteGreeting, check, refuse};
use super::hello::{Hello, Reply};
use super::listener::Listener;
use super::origin::JoinRecord;
use super::refusal::Refusal;
use crate::locks::lock;

/// The process of each rank, as known to one rank.
pub(crate) struct Roster {
    rank: usize,
    /// Random number that identifies this process.
    pub(super) instance: u64,
    /// Process numbers of the higher ranks, which dial this one, as far as they have arrived.
    pub(super) instances: Vec<Option<u64>>,
    streams: u16,
    slots: usize,
}

impl Roster {
    pub(super) fn new(rank: usize, size: usize, config: &Config) -> Self {
        Self {
            rank,
            instance: random(),
            instances: vec![None; size],
            streams: config.streams.get().into(),
            slots: config.slots(),
        }
    }

    /// Why a hello of this group is refused, if it does not fit.
    pub(super) fn judge(&self, hello: &Hello) -> Option<Refusal> {
        let (rank, slot) = (hello.rank as usize, usize::from(hello.slot));
        let ours = u32::try_from(self.instances.len()).expect("checked when the group was made");
        let theirs = hello.size;
        let known = match self.instances.get(rank) {
            _ if rank == self.rank => Some(self.instance),
            known => known.copied().flatten(),
        };
        if theirs != ours {
            Some(Refusal::Size { ours, theirs })
        } else if hello.streams != self.streams {
            let (ours, theirs) = (self.streams, hello.streams);
            Some(Refusal::Streams { ours, theirs })
        } else if rank < self.rank
            || rank >= self.instances.len()
            || hello.to as usize != self.rank
            || slot >= self.slots
        {
            Some(Refusal::Rank(Rank(hello.rank)))
        } else if known.is_some_and(|known| known != hello.instance) {
            Some(Refusal::Duplicate(Rank(hello.rank)))
        } else {
            None
        }
    }
}

/// Handles connections to a complete group.
pub(crate) struct LateConnections {
    listener: Arc<Listener>,
    config: Config,
    id: GroupId,
    roster: Roster,
    turned_away: Mutex<Option<Refusal>>,
}

impl LateConnections {
    pub(crate) fn new(origin: &JoinRecord, roster: Roster) -> Self {
        Self {
            listener: Arc::clone(&origin.listener),
            config: origin.config.clone(),
            id: origin.id,
            roster,
            turned_away: Mutex::new(None),
        }
    }

    /// Replies to late connections that name this group.
    pub(crate) fn refuse_late(&self) {
        self.listener.pending_connections().sort(|pending, hello| {
            let meant = hello.group == self.id;
            if meant {
                self.turn_away(pending, hello);
            }
            meant
        });
    }

    fn turn_away(&self, pending: &IncompleteGreeting, hello: &Hello) {
        let key = self.config.protection.key();
        let why = match check(pending, hello, self.id, key) {
            Ok(_) => self.roster.judge(hello),
            Err(why) => Some(why),
        };
        // A member that dialled twice already has its connection.
        if let Some(why) = why {
            refuse(&pending.stream, Reply::Refused(why));
            *self.last() = Some(why);
        }
    }

    /// Reason of the last rejection.
    pub(crate) fn turned_away(&self) -> Option<Refusal> {
        *self.last()
    }

    fn last(&self) -> MutexGuard<'_, Option<Refusal>> {
        lock(&self.turned_away)
    }
}
