//! The other nodes as one node sees them: life, incarnation, pings and rumours.

use std::collections::BTreeMap;
use std::time::Duration;

use paceline_base::SplitMix64;
use serde::{Deserialize, Serialize};

use super::super::NodeId;
use super::Pace;
use super::messages::{RUMOURS_MAX, Rumour};

/// Most other nodes.
pub const PEERS_MAX: usize = 1024;

/// The life of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Life {
    /// It answers.
    Alive,
    /// It did not answer, and may object.
    Suspect,
    /// It is declared dead.
    Dead,
    Left,
}

/// A node counts as slow at this number of late answers minus punctual ones. With one other node
/// they take 1.5 s, so that a busy moment is not reported.
const SLOW_ANSWERS: u32 = 5;

/// A ping without an answer is dropped after this: its node is declared dead by then.
const LOST: Duration = Duration::from_secs(2);

/// A node as another sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerView {
    pub id: NodeId,
    pub life: Life,
    /// Whether there is a session with it.
    pub linked: bool,
    /// Time of its last answer to a ping, while its answers are late; see [`Pace::late`].
    pub slow: Option<Duration>,
}

#[derive(Clone, Debug)]
struct PeerState {
    life: Life,
    incarnation: u64,
    since: Duration,
    linked: bool,
    ping: Option<Ping>,
    /// Number of messages that still carry its last change.
    news: u32,
    beats: Beats,
}

/// Round trips of pings over the session with a node.
#[derive(Clone, Copy, Debug, Default)]
struct Beats {
    /// Number and time of the oldest unanswered ping.
    asked: Option<(u64, Duration)>,
    /// Round trip of the last answer.
    took: Duration,
    /// Late answers minus punctual ones, 0 to [`SLOW_ANSWERS`].
    late: u32,
    /// Set when `late` reaches its maximum, cleared when it is 0 again.
    slow: bool,
}

impl Beats {
    fn asked(&mut self, seq: u64, now: Duration) {
        if self.asked.is_none_or(|(_, at)| now >= at + LOST) {
            self.asked = Some((seq, now));
        }
    }

    fn answered(&mut self, seq: u64, now: Duration, late: Duration) {
        let Some((_, at)) = self.asked.filter(|(asked, _)| *asked == seq) else {
            return;
        };
        self.asked = None;
        self.took = now.saturating_sub(at);
        self.late = match self.took > late {
            true => (self.late + 1).min(SLOW_ANSWERS),
            false => self.late.saturating_sub(1),
        };
        self.slow = match self.late {
            0 => false,
            SLOW_ANSWERS => true,
            _ => self.slow,
        };
    }
}

#[derive(Clone, Copy, Debug)]
struct Ping {
    at: Duration,
    others_asked: bool,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Peers {
    peers: BTreeMap<NodeId, PeerState>,
    /// The nodes to ping next, from the back.
    round: Vec<NodeId>,
}

impl Peers {
    /// Adds a node; false if it is known already, or the limit is reached.
    pub(super) fn add(&mut self, id: NodeId, now: Duration) -> bool {
        if self.peers.contains_key(&id) || self.peers.len() >= PEERS_MAX {
            return false;
        }
        let peer = PeerState {
            life: Life::Alive,
            incarnation: 0,
            since: now,
            linked: false,
            ping: None,
            news: 0,
            beats: Beats::default(),
        };
        self.peers.insert(id, peer);
        true
    }

    pub(super) fn remove(&mut self, id: NodeId) {
        self.peers.remove(&id);
    }

    pub(super) fn link(&mut self, id: NodeId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.linked = true;
        }
    }

    pub(super) fn unlink(&mut self, id: NodeId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.linked = false;
            peer.beats = Beats::default();
        }
    }

    pub(super) fn is_linked(&self, id: NodeId) -> bool {
        self.peers.get(&id).is_some_and(|peer| peer.linked)
    }

    /// Whether a node is unknown, has left, or has been dead for `limit`.
    pub(super) fn is_gone(&self, id: NodeId, now: Duration, limit: Duration) -> bool {
        self.peers.get(&id).is_none_or(|peer| match peer.life {
            Life::Alive | Life::Suspect => false,
            Life::Dead => !peer.linked && now.saturating_sub(peer.since) >= limit,
            Life::Left => true,
        })
    }

    pub(super) fn life(&self, id: NodeId) -> Option<Life> {
        Some(self.peers.get(&id)?.life)
    }

    pub(super) fn incarnation(&self, id: NodeId) -> u64 {
        self.peers.get(&id).map_or(0, |peer| peer.incarnation)
    }

    pub(super) fn views(&self) -> impl Iterator<Item = PeerView> {
        self.peers.iter().map(|(id, peer)| PeerView {
            id: *id,
            life: peer.life,
            linked: peer.linked,
            slow: peer.beats.slow.then_some(peer.beats.took),
        })
    }

    pub(super) fn linked(&self) -> impl Iterator<Item = NodeId> {
        let linked = self.peers.iter().filter(|(_, peer)| peer.linked);
        linked.map(|(id, _)| *id)
    }

    pub(super) fn some_linked(
        &self,
        count: usize,
        but: Option<NodeId>,
        random: &mut SplitMix64,
    ) -> Vec<NodeId> {
        let mut some: Vec<NodeId> = self.linked().filter(|id| Some(*id) != but).collect();
        random.shuffle(&mut some);
        some.truncate(count);
        some
    }

    /// The next node of a round over all nodes that may be alive, in a new order each round.
    pub(super) fn next_to_ping(&mut self, random: &mut SplitMix64) -> Option<NodeId> {
        for _ in 0..2 {
            while let Some(id) = self.round.pop() {
                // A dead node with a session may object as soon as it gets the rumour.
                let is_due = |peer: &PeerState| match peer.life {
                    Life::Alive | Life::Suspect => true,
                    Life::Dead => peer.linked,
                    Life::Left => false,
                };
                if self.peers.get(&id).is_some_and(is_due) {
                    return Some(id);
                }
            }
            self.round = self.peers.keys().copied().collect();
            random.shuffle(&mut self.round);
        }
        None
    }

    pub(super) fn pinged(&mut self, id: NodeId, seq: u64, now: Duration) {
        if let Some(peer) = self.peers.get_mut(&id) {
            if peer.linked {
                peer.beats.asked(seq, now);
            }
            let others_asked = !peer.linked;
            let ping = Ping {
                at: now,
                others_asked,
            };
            peer.ping.get_or_insert(ping);
        }
    }

    /// A message arrived from a node, which counts as an answer to all pings.
    pub(super) fn heard(&mut self, id: NodeId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.ping = None;
        }
    }

    /// The answer to a ping arrived over the session; it is late if it took longer than `late`.
    pub(super) fn answered(&mut self, id: NodeId, seq: u64, now: Duration, late: Duration) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.beats.answered(seq, now, late);
        }
    }

    /// Nodes that did not answer in time, each returned once.
    pub(super) fn unanswered(&mut self, now: Duration, answer: Duration) -> Vec<NodeId> {
        let mut found = Vec::new();
        for (id, peer) in &mut self.peers {
            if let Some(ping) = &mut peer.ping
                && !ping.others_asked
                && now >= ping.at + answer
            {
                ping.others_asked = true;
                found.push(*id);
            }
        }
        found
    }

    /// Nodes that did not answer others either: those that were alive, and dead ones with a
    /// session.
    pub(super) fn missing(&mut self, now: Duration, limit: Duration) -> Vec<NodeId> {
        let mut found = Vec::new();
        for (id, peer) in &mut self.peers {
            if peer.ping.is_some_and(|ping| now >= ping.at + limit) {
                peer.ping = None;
                let is_linked_dead = peer.life == Life::Dead && peer.linked;
                if peer.life == Life::Alive || is_linked_dead {
                    found.push(*id);
                }
            }
        }
        found
    }

    /// Suspects that did not object in time.
    pub(super) fn silent(&self, now: Duration, suspicion: Duration) -> Vec<NodeId> {
        let limit = self.suspicion(suspicion);
        let is_over = |peer: &&PeerState| peer.life == Life::Suspect && now >= peer.since + limit;
        let over = self.peers.iter().filter(|(_, peer)| is_over(peer));
        over.map(|(id, _)| *id).collect()
    }

    /// The time for a suspect to object: gossip takes rounds in the logarithm of the number of
    /// nodes.
    fn suspicion(&self, base: Duration) -> Duration {
        base * self.scale().max(3) / 3
    }

    /// Binary logarithm of the number of nodes, rounded up.
    fn scale(&self) -> u32 {
        usize::BITS - self.peers.len().leading_zeros()
    }

    /// The next deadline, if no event comes before.
    pub(super) fn next_deadline(&self, pace: Pace) -> Option<Duration> {
        let suspicion = self.suspicion(pace.suspicion);
        let of = |peer: &PeerState| {
            let ping = peer.ping.map(|ping| {
                ping.at
                    + if ping.others_asked {
                        pace.missing
                    } else {
                        pace.answer
                    }
            });
            let life = (peer.life == Life::Suspect).then(|| peer.since + suspicion);
            ping.into_iter().chain(life).min()
        };
        self.peers.values().filter_map(of).min()
    }

    /// Applies a rumour. Returns the node's life, if it changed.
    pub(super) fn hear(&mut self, rumour: Rumour, now: Duration) -> Option<Life> {
        let news = 3 + self.scale();
        let peer = self.peers.get_mut(&rumour.id)?;
        let is_newer = rumour.incarnation > peer.incarnation;
        let is_worse = rumour.incarnation == peer.incarnation && rumour.life > peer.life;
        if !is_newer && !is_worse {
            return None;
        }
        peer.incarnation = rumour.incarnation;
        let changed = peer.life != rumour.life;
        if changed || is_newer {
            peer.news = news;
        }
        if changed || (is_newer && rumour.life == Life::Suspect) {
            (peer.life, peer.since) = (rumour.life, now);
        }
        changed.then_some(rumour.life)
    }

    /// Facts of a node that a rumour calls dead, if it has objected since.
    pub(super) fn alive_since(&self, rumour: Rumour) -> Option<Rumour> {
        let peer = self.peers.get(&rumour.id)?;
        let has_objected = peer.life == Life::Alive && peer.incarnation > rumour.incarnation;
        (has_objected && rumour.life == Life::Dead).then_some(Rumour {
            id: rumour.id,
            incarnation: peer.incarnation,
            life: Life::Alive,
        })
    }

    /// A random one of the dead nodes, as a rumour.
    pub(super) fn some_dead(&self, random: &mut SplitMix64) -> Option<Rumour> {
        let dead = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.life == Life::Dead);
        let dead: Vec<Rumour> = dead
            .map(|(id, peer)| Rumour {
                id: *id,
                incarnation: peer.incarnation,
                life: Life::Dead,
            })
            .collect();
        (!dead.is_empty()).then(|| dead[random.below(dead.len())])
    }

    /// The rumours for one message, the newest first.
    pub(super) fn rumours(&mut self) -> Vec<Rumour> {
        let mut fresh: Vec<(u32, NodeId)> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.news > 0)
            .map(|(id, peer)| (peer.news, *id))
            .collect();
        fresh.sort_unstable_by(|one, two| two.cmp(one));
        fresh.truncate(RUMOURS_MAX / 2);
        let mut rumours = Vec::with_capacity(fresh.len());
        for (_, id) in fresh {
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.news -= 1;
                rumours.push(Rumour {
                    id,
                    incarnation: peer.incarnation,
                    life: peer.life,
                });
            }
        }
        rumours
    }
}
