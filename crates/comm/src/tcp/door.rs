//! Who knocks at a rank's listener, and who is a member already: while a group is made, and as long
//! as it lives.
//!
//! When a group is complete its keeper looks at the door every now and then. Whoever means this
//! group comes too late, and is told why not: most likely it is a second process of a rank. Those
//! who mean another group wait in the lobby, for a group that is being made over the same listener
//! (`split`), until [`STRANGER_WAIT`] is over; they dial again.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard};

use paceline_base::Rank;

use super::greeting::{Pending, STRANGERS, check, refuse};
use super::hello::{Hello, Reply};
use super::refusal::Refusal;
use super::{Config, Listener, Origin, random};
use crate::locks::lock;

/// Connections of a listener that no group has taken; the oldest makes room for a new one.
pub(super) struct Lobby<'a> {
    sockets: &'a [TcpListener],
    waiting: MutexGuard<'a, VecDeque<Pending>>,
}

impl<'a> Lobby<'a> {
    pub(super) fn new(sockets: &'a [TcpListener], waiting: &'a Mutex<VecDeque<Pending>>) -> Self {
        let waiting = lock(waiting);
        Self { sockets, waiting }
    }

    /// Lets in who has knocked, up to a bound for each look.
    fn fill(&mut self) {
        for socket in self.sockets {
            for _ in 0..STRANGERS {
                let Ok((stream, _)) = socket.accept() else {
                    break;
                };
                let ready = stream
                    .set_nonblocking(true)
                    .and_then(|()| stream.set_nodelay(true));
                if ready.is_ok() {
                    self.waiting.push_back(Pending::new(stream));
                }
                if self.waiting.len() > STRANGERS {
                    self.waiting.pop_front();
                }
            }
        }
    }

    /// All who wait.
    pub(super) fn take(mut self) -> impl Iterator<Item = Pending> + use<> {
        self.fill();
        std::mem::take(&mut *self.waiting).into_iter()
    }

    /// Lets `answer` have those who have said hello and whom it wants: it returns false for others.
    fn sort(mut self, answer: impl Fn(&Pending, &Hello) -> bool) {
        self.fill();
        for _ in 0..self.waiting.len() {
            let Some(mut pending) = self.waiting.pop_front() else {
                break;
            };
            let stays = match pending.hello() {
                Ok(Some(hello)) => !answer(&pending, &hello),
                Ok(None) => true,
                Err(_) => false,
            };
            if stays && pending.plausible() {
                self.waiting.push_back(pending);
            }
        }
    }
}

/// Which process is which rank, as one rank knows it.
pub(super) struct Roster {
    rank: usize,
    /// The number of this process.
    pub(super) instance: u64,
    /// Those of the other ranks, as far as they have come. Only higher ones do.
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

    /// What is wrong with a rank of this group, if its hello is true.
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

/// The door of a complete group.
pub(crate) struct Door {
    listener: Arc<Listener>,
    config: Config,
    id: super::GroupId,
    roster: Roster,
    turned_away: Mutex<Option<Refusal>>,
}

impl Door {
    pub(super) fn new(origin: &Origin, roster: Roster) -> Self {
        Self {
            listener: Arc::clone(&origin.listener),
            config: origin.config.clone(),
            id: origin.id,
            roster,
            turned_away: Mutex::new(None),
        }
    }

    /// Answers those who mean this group.
    pub(super) fn answer(&self) {
        self.listener.lobby().sort(|pending, hello| {
            let meant = hello.group == self.id;
            if meant {
                self.turn_away(pending, hello);
            }
            meant
        });
    }

    fn turn_away(&self, pending: &Pending, hello: &Hello) {
        let key = self.config.protection.key();
        let why = match check(pending, hello, self.id, key) {
            Ok(_) => self.roster.judge(hello),
            Err(why) => Some(why),
        };
        // A member that has dialled twice has what it needs.
        if let Some(why) = why {
            refuse(&pending.stream, Reply::Refused(why));
            *self.last() = Some(why);
        }
    }

    /// Why somebody was last turned away.
    pub(super) fn turned_away(&self) -> Option<Refusal> {
        *self.last()
    }

    fn last(&self) -> MutexGuard<'_, Option<Refusal>> {
        lock(&self.turned_away)
    }
}
