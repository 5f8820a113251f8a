//! A node's part in a cluster: the nodes that live, the messages between them, and their sessions.
//!
//! [`Member::step`] takes an event and says what to do; it waits for nothing and knows no clock but
//! its argument. Its driver calls it with [`Event::Tick`] at [`Member::next_wake`].
//!
//! **Lives.** SWIM (Das, Gupta, Motivala, DSN 2002) over the sessions. Each period one node is
//! pinged, round robin in shuffled order. Without an answer others are asked to ping it. Then it is
//! *suspect*, and *dead* when it does not object in time by raising its incarnation. Changes travel
//! with pings and to a few nodes at once.
//!
//! **Messages.** Pings carry the map's root. Unlike roots make two nodes exchange marks, then
//! the entries that differ. A write goes to all linked nodes at once.
//!
//! **Sessions.** Every two nodes should have one. The one with the lower id dials first; failed
//! attempts are repeated with growing pauses, to dead nodes too, so that partitions heal.
//!
//! Bounds: [`PEERS_MAX`] nodes, lists in messages as their constants say. Messages of another
//! member can make this node forget nothing and hold no more.

mod dials;
mod messages;
mod peers;

use std::collections::BTreeMap;
use std::time::Duration;

use paceline_base::SplitMix64;

use super::clock::{Clock, Now, SKEW_MAX};
use super::registers::TOMBSTONE_MS;
use super::{Key, NodeId, Register, Registers, revocation};
use dials::Dials;
pub use dials::Target;
pub use messages::{ENTRIES_MAX, Message, RUMOURS_MAX, Rumour};
use peers::Peers;
pub use peers::{Life, PEERS_MAX, PeerView};

/// How quickly a cluster notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Between two pings of this node.
    pub period: Duration,
    /// For the answer to a ping, before others are asked to try.
    pub answer: Duration,
    /// For the answer to a ping, of the node or by others, before it is suspect.
    pub missing: Duration,
    /// For a suspect to object; longer in clusters of more than eight.
    pub suspicion: Duration,
    /// Between two attempts to reach a node: the first pause, and the longest.
    pub redial: (Duration, Duration),
}

impl Pace {
    /// An answer to a ping that takes longer is late: half the time after which others are asked to
    /// try. A node whose answers stay late is slow. Cables answer in well below a millisecond,
    /// radio in some ten.
    pub fn late(&self) -> Duration {
        self.answer / 2
    }
}

impl Default for Pace {
    /// In clusters of up to four a node is known as dead within 2 s of its last word. It is pinged
    /// within 600 ms, since a node visits all others in turn. After 400 ms it is suspect, and after
    /// another second dead. With 400 ms between pings an owner's silence was told after 2.04 s.
    /// Answers take a moment longer than the longest time that a loaded machine keeps a thread
    /// waiting.
    fn default() -> Self {
        Self {
            period: Duration::from_millis(300),
            answer: Duration::from_millis(200),
            missing: Duration::from_millis(400),
            suspicion: Duration::from_secs(1),
            redial: (Duration::from_millis(250), Duration::from_secs(5)),
        }
    }
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It is time.
    Tick,
    /// A node may be reached, says discovery or the user.
    Found(Target),
    /// A session with a node began; the target that was dialled for it, if it was dialled here.
    Linked {
        /// With whom.
        id: NodeId,
        /// The target that was dialled.
        target: Option<Target>,
    },
    /// The session with a node is gone.
    Unlinked(NodeId),
    /// A message came over the session with `from`.
    Received { from: NodeId, message: Message },
    /// This node writes to the map.
    Write {
        /// The key of the entry.
        key: Key,
        /// As of [`Register`].
        epoch: u64,
        /// JSON, or `None` to delete.
        value: Option<String>,
    },
    /// This node goes for good.
    Leave,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Try to make a session.
    Dial(Target),
    /// Send over the session with `to`; drop it if there is none.
    Send {
        /// To whom.
        to: NodeId,
        message: Message,
    },
    /// End the session with a node that is dead or gone.
    Unlink(NodeId),
    /// These entries of the map have other contents now.
    Changed(Vec<Key>),
    /// A node lives, or does not.
    Life(NodeId, Life),
}

/// A node's part in a cluster.
#[derive(Clone, Debug)]
pub struct Member {
    own: NodeId,
    pace: Pace,
    clock: Clock,
    map: Registers,
    peers: Peers,
    dials: Dials,
    incarnation: u64,
    left: bool,
    random: SplitMix64,
    next_ping: Duration,
    next_forget: Duration,
    next_seq: u64,
    /// When the map was last compared with a node's.
    compared: BTreeMap<NodeId, Duration>,
}

/// How often two maps that differ are compared, at most.
const COMPARE_EVERY: Duration = Duration::from_millis(300);

/// How far a node's incarnation may be ahead of this machine's clock, in milliseconds, in what
/// others say. It begins as the time at the node's start: its clock and the other's may each be
/// [`SKEW_MAX`] ahead. No member can so give a node's death a number that the node cannot exceed. A
/// node that started with a wrong clock has a higher one, by its own word.
const INCARNATION_AHEAD_MAX: u64 = 2 * SKEW_MAX.as_millis() as u64;

/// Up to here a node exceeds any incarnation that others say it has, such as that of an earlier
/// start with a wrong clock. From here on it raises its own one by one, so that it never runs out.
const INCARNATION_LEAP_MAX: u64 = u64::MAX / 2;

/// How often old tombstones are looked for.
const FORGET_EVERY: Duration = Duration::from_secs(600);

/// How many nodes are asked to ping one that does not answer, and how many hear of a change first.
const HELPERS: usize = 3;

impl Member {
    /// A node that knows what `map` has, such as one that was saved; `seed` is any random number.
    pub fn new(own: NodeId, map: Registers, pace: Pace, seed: u64, now: Now) -> Self {
        let mut member = Self {
            own,
            pace,
            clock: Clock::new(own),
            map,
            peers: Peers::default(),
            dials: Dials::default(),
            // A process that starts later has a higher one, and raises it when that was wrong.
            incarnation: now.wall_ms,
            left: false,
            random: SplitMix64::new(seed),
            next_ping: now.since_start,
            next_forget: now.since_start + FORGET_EVERY,
            next_seq: 0,
            compared: BTreeMap::new(),
        };
        let known: Vec<Key> = member.map.iter().map(|(key, _)| key.clone()).collect();
        for (_, register) in member.map.iter() {
            member.clock.observe(register.stamp, now.wall_ms);
        }
        member.follow_map(&known, now);
        member
    }

    pub const fn own(&self) -> NodeId {
        self.own
    }

    /// The map as this node knows it.
    pub const fn map(&self) -> &Registers {
        &self.map
    }

    /// The other nodes, as this one sees them.
    pub fn peers(&self) -> impl Iterator<Item = PeerView> {
        self.peers.views()
    }

    /// Whether a node lives; this one does. A node that nothing is known of is dead.
    pub fn life(&self, id: NodeId) -> Life {
        match id == self.own {
            true if self.left => Life::Left,
            true => Life::Alive,
            false => self.peers.life(id).unwrap_or(Life::Dead),
        }
    }

    /// When [`Event::Tick`] is due at the latest.
    pub fn next_wake(&self) -> Duration {
        let soonest = self.next_ping.min(self.next_forget);
        let dial = self.dials.next().unwrap_or(Duration::MAX);
        let peers = self.peers.next_deadline(self.pace).unwrap_or(Duration::MAX);
        soonest.min(dial).min(peers)
    }

    /// Takes an event in and says what to do, in this order.
    pub fn step(&mut self, now: Now, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Tick => self.tick(now, &mut actions),
            Event::Found(target) => self.found(target, now),
            Event::Linked { id, target } => self.linked(id, target, now, &mut actions),
            Event::Unlinked(id) => self.unlinked(id, now),
            Event::Received { from, message } => self.receive(from, message, now, &mut actions),
            Event::Write { key, epoch, value } => self.write(key, epoch, value, now, &mut actions),
            Event::Leave => self.leave(now, &mut actions),
        }
        actions
    }

    fn found(&mut self, target: Target, now: Now) {
        match target {
            Target::Node(id) if id == self.own || self.is_revoked(id) => {}
            Target::Node(id) => {
                self.know(id, now);
                self.dials.hurry(id, now.since_start);
            }
            Target::Peer(addr) => self.dials.add(Target::Peer(addr), now.since_start),
        }
    }

    /// Takes note of a node, and dials it.
    fn know(&mut self, id: NodeId, now: Now) {
        if id != self.own && self.peers.add(id, now.since_start) {
            // The other side dials at once; should that fail, this one does.
            let wait = if self.own < id {
                Duration::ZERO
            } else {
                self.pace.period * 2
            };
            self.dials.add(Target::Node(id), now.since_start + wait);
        }
    }

    fn linked(&mut self, id: NodeId, target: Option<Target>, now: Now, actions: &mut Vec<Action>) {
        if self.is_revoked(id) {
            actions.push(Action::Unlink(id));
            return;
        }
        self.know(id, now);
        self.peers.link(id);
        self.dials.linked(id, target);
        self.compared.remove(&id);
        self.ping(id, now, actions);
    }

    fn unlinked(&mut self, id: NodeId, now: Now) {
        self.peers.unlink(id);
        match self.peers.life(id) {
            Some(Life::Left) => self.peers.remove(id),
            _ => self.dials.unlinked(id, now.since_start),
        }
    }

    fn is_revoked(&self, id: NodeId) -> bool {
        self.map.get(&Key::Revoked(id)).is_some()
    }

    fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.left {
            self.next_ping = now.since_start + self.pace.period;
            return;
        }
        self.judge(now, actions);
        if now.since_start >= self.next_ping {
            self.next_ping = now.since_start + self.pace.period;
            let random = &mut self.random;
            if let Some(id) = self.peers.next_to_ping(random) {
                self.ping(id, now, actions);
            }
        }
        if now.since_start >= self.next_forget {
            self.next_forget = now.since_start + FORGET_EVERY;
            self.map.forget(now.wall_ms);
        }
        for target in self.dials.due(now.since_start, self.pace.redial) {
            actions.push(Action::Dial(target));
        }
    }

    /// Looks which pings had no answer, and which suspects no objection.
    fn judge(&mut self, now: Now, actions: &mut Vec<Action>) {
        for id in self.peers.unanswered(now.since_start, self.pace.answer) {
            self.ask_others(id, actions);
        }
        for id in self.peers.missing(now.since_start, self.pace.missing) {
            if self.peers.life(id) == Some(Life::Dead) {
                // It may hear this node over another session.
                self.peers.unlink(id);
                self.dials.unlinked(id, now.since_start);
                actions.push(Action::Unlink(id));
                continue;
            }
            let known = self.peers.incarnation(id);
            self.hear(
                Rumour {
                    id,
                    incarnation: known,
                    life: Life::Suspect,
                },
                now,
                actions,
            );
        }
        for id in self.peers.silent(now.since_start, self.pace.suspicion) {
            let known = self.peers.incarnation(id);
            self.hear(
                Rumour {
                    id,
                    incarnation: known,
                    life: Life::Dead,
                },
                now,
                actions,
            );
        }
    }

    fn ping(&mut self, id: NodeId, now: Now, actions: &mut Vec<Action>) {
        self.next_seq += 1;
        let seq = self.next_seq;
        self.peers.pinged(id, seq, now.since_start);
        if !self.peers.is_linked(id) {
            self.ask_others(id, actions);
            return;
        }
        let (root, rumours) = (self.map.root(), self.rumours_for(id));
        let message = Message::Ping { seq, root, rumours };
        actions.push(Action::Send { to: id, message });
    }

    fn ask_others(&mut self, id: NodeId, actions: &mut Vec<Action>) {
        for helper in self.peers.some_linked(HELPERS, Some(id), &mut self.random) {
            let message = Message::PingFor { id };
            actions.push(Action::Send {
                to: helper,
                message,
            });
        }
    }

    /// The rumours for `id`, with what is wrong about `id` itself first, so that it can object.
    fn rumours_for(&mut self, id: NodeId) -> Vec<Rumour> {
        let mut rumours = self.peers.rumours();
        let own = Rumour {
            id: self.own,
            incarnation: self.incarnation,
            life: self.life(self.own),
        };
        rumours.push(own);
        if let Some(life) = self.peers.life(id).filter(|life| *life != Life::Alive) {
            let incarnation = self.peers.incarnation(id);
            rumours.insert(
                0,
                Rumour {
                    id,
                    incarnation,
                    life,
                },
            );
        }
        rumours.truncate(RUMOURS_MAX);
        rumours
    }

    fn receive(&mut self, from: NodeId, message: Message, now: Now, actions: &mut Vec<Action>) {
        if self.left || !self.peers.is_linked(from) {
            return; // the session ended meanwhile
        }
        self.peers.heard(from);
        match message {
            Message::Ping { seq, root, rumours } => {
                self.hear_all(from, rumours, now, actions);
                let (own, rumours) = (self.map.root(), self.rumours_for(from));
                let message = Message::Ack {
                    seq,
                    root: own,
                    rumours,
                };
                actions.push(Action::Send { to: from, message });
                self.compare(from, root, now, actions);
            }
            Message::Ack { seq, root, rumours } => {
                let late = self.pace.late();
                self.peers.answered(from, seq, now.since_start, late);
                self.hear_all(from, rumours, now, actions);
                self.compare(from, root, now, actions);
            }
            Message::PingFor { id } => self.ping_for(from, id, actions),
            Message::PingFrom { asker } => {
                let message = Message::Lives {
                    id: self.own,
                    asker,
                };
                actions.push(Action::Send { to: from, message });
            }
            Message::Lives { id, asker } if asker == self.own => self.peers.heard(id),
            Message::Lives { id, asker } => {
                let message = Message::Lives { id, asker };
                actions.push(Action::Send { to: asker, message });
            }
            Message::Gossip { rumours } => self.hear_all(from, rumours, now, actions),
            Message::Marks { marks, answer } => self.answer_marks(from, &marks, answer, actions),
            Message::Entries { entries } => self.take(entries, now, actions),
        }
    }

    /// Pings `id` for somebody who cannot.
    fn ping_for(&self, asker: NodeId, id: NodeId, actions: &mut Vec<Action>) {
        if self.peers.is_linked(id) && id != asker {
            let message = Message::PingFrom { asker };
            actions.push(Action::Send { to: id, message });
        }
    }

    fn hear_all(
        &mut self,
        from: NodeId,
        rumours: Vec<Rumour>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        for rumour in rumours.into_iter().take(RUMOURS_MAX) {
            if rumour.incarnation <= self.latest_incarnation(from, rumour.id, now) {
                self.hear(rumour, now, actions);
            }
        }
    }

    /// The highest incarnation of `id` that `from` is believed.
    fn latest_incarnation(&self, from: NodeId, id: NodeId, now: Now) -> u64 {
        if id == self.own {
            return self.incarnation.max(INCARNATION_LEAP_MAX);
        }
        let latest = now.wall_ms.saturating_add(INCARNATION_AHEAD_MAX);
        match id == from {
            true => u64::MAX,
            false => latest.max(self.peers.incarnation(id)),
        }
    }

    fn hear(&mut self, rumour: Rumour, now: Now, actions: &mut Vec<Action>) {
        if rumour.id == self.own {
            return self.object(rumour, actions);
        }
        let Some(life) = self.peers.hear(rumour, now.since_start) else {
            return;
        };
        actions.push(Action::Life(rumour.id, life));
        if matches!(life, Life::Dead | Life::Left) && self.peers.is_linked(rumour.id) {
            // A session to a node that others buried is tried again, and heard out.
            self.peers.unlink(rumour.id);
            actions.push(Action::Unlink(rumour.id));
        }
        match life {
            Life::Left => self.dials.remove(rumour.id),
            _ if !self.peers.is_linked(rumour.id) => {
                self.dials.unlinked(rumour.id, now.since_start);
            }
            _ => {}
        }
        self.spread(rumour, actions);
    }

    /// Says that this node lives to those who think otherwise.
    fn object(&mut self, rumour: Rumour, actions: &mut Vec<Action>) {
        let wrong = rumour.life != Life::Alive && !self.left;
        if wrong && rumour.incarnation >= self.incarnation {
            self.incarnation = rumour.incarnation + 1;
            let (id, incarnation) = (self.own, self.incarnation);
            let life = Life::Alive;
            let rumours = vec![Rumour {
                id,
                incarnation,
                life,
            }];
            self.tell_all(&Message::Gossip { rumours }, actions);
        }
    }

    /// Tells a change to a few nodes at once; the others hear it with pings.
    fn spread(&mut self, rumour: Rumour, actions: &mut Vec<Action>) {
        for to in self.peers.some_linked(HELPERS, None, &mut self.random) {
            let rumours = vec![rumour];
            let message = Message::Gossip { rumours };
            actions.push(Action::Send { to, message });
        }
    }

    fn tell_all(&self, message: &Message, actions: &mut Vec<Action>) {
        for to in self.peers.linked() {
            let message = message.clone();
            actions.push(Action::Send { to, message });
        }
    }

    /// Starts an exchange of what differs, unless one has just begun.
    fn compare(&mut self, with: NodeId, root: u64, now: Now, actions: &mut Vec<Action>) {
        let soon = self
            .compared
            .get(&with)
            .map_or(Duration::ZERO, |at| *at + COMPARE_EVERY);
        if root == self.map.root() || now.since_start < soon {
            return;
        }
        self.compared.insert(with, now.since_start);
        let marks = self.map.marks();
        let message = Message::Marks {
            marks,
            answer: true,
        };
        actions.push(Action::Send { to: with, message });
    }

    fn answer_marks(&self, to: NodeId, marks: &[u64], answer: bool, actions: &mut Vec<Action>) {
        let (beyond, missing) = self.map.beyond(marks);
        for entries in beyond.chunks(ENTRIES_MAX) {
            let entries = entries.to_vec();
            actions.push(Action::Send {
                to,
                message: Message::Entries { entries },
            });
        }
        if answer && missing > 0 {
            let marks = self.map.marks();
            let message = Message::Marks {
                marks,
                answer: false,
            };
            actions.push(Action::Send { to, message });
        }
    }

    /// Merges what another node knows.
    fn take(&mut self, entries: Vec<(Key, Register)>, now: Now, actions: &mut Vec<Action>) {
        let mut changed = Vec::new();
        let oldest = now.wall_ms.saturating_sub(TOMBSTONE_MS);
        for (key, register) in entries.into_iter().take(ENTRIES_MAX) {
            let is_over = register.value.is_none() && register.stamp.ms < oldest;
            let is_sane = self.clock.observe(register.stamp, now.wall_ms) && !is_over;
            let is_sane = is_sane && self.is_proven(&key, &register);
            if is_sane && self.map.merge(key.clone(), register) {
                changed.push(key);
            }
        }
        if changed.is_empty() {
            return;
        }
        self.follow_map(&changed, now);
        self.enforce(&changed, now, actions);
        actions.push(Action::Changed(changed));
    }

    /// Whether an entry that another node sent is signed, where it must be.
    fn is_proven(&self, key: &Key, register: &Register) -> bool {
        match (key, &register.value) {
            (Key::Revoked(id), Some(entry)) => revocation::is_signed(&self.map, *id, entry),
            _ => true,
        }
    }

    /// Knows nodes that the map has, forgets those that it has no more.
    fn follow_map(&mut self, changed: &[Key], now: Now) {
        for key in changed {
            let Key::Node(id) = key else { continue };
            if *id == self.own {
                continue;
            }
            match self.map.get(key) {
                Some(_) if self.is_revoked(*id) => {}
                Some(_) => self.know(*id, now),
                None if !self.peers.is_linked(*id) => {
                    self.peers.remove(*id);
                    self.dials.remove(*id);
                }
                None => {}
            }
        }
    }

    /// Ends sessions with revoked nodes, and writes this node's facts again where another node's
    /// user took them for those of a dead one.
    fn enforce(&mut self, changed: &[Key], now: Now, actions: &mut Vec<Action>) {
        for key in changed {
            match key {
                Key::Revoked(id) if self.map.get(key).is_some() => {
                    let life = self.peers.life(*id);
                    self.dials.remove(*id);
                    self.peers.remove(*id);
                    actions.push(Action::Unlink(*id));
                    if matches!(life, Some(Life::Alive | Life::Suspect)) {
                        actions.push(Action::Life(*id, Life::Dead));
                    }
                }
                Key::Node(id) if *id == self.own && !self.left => {
                    actions.push(Action::Life(*id, Life::Alive));
                    self.next_ping = now.since_start;
                }
                _ => {}
            }
        }
    }

    fn write(
        &mut self,
        key: Key,
        epoch: u64,
        value: Option<String>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let stamp = self.clock.stamp(now.wall_ms);
        let register = Register {
            epoch,
            stamp,
            value,
        };
        if !self.map.merge(key.clone(), register.clone()) {
            return; // an entry of a higher epoch, or no room
        }
        let changed = vec![key.clone()];
        self.follow_map(&changed, now);
        if !matches!(key, Key::Node(id) if id == self.own) {
            self.enforce(&changed, now, actions);
        }
        let entries = vec![(key, register)];
        self.tell_all(&Message::Entries { entries }, actions);
        actions.push(Action::Changed(changed));
    }

    /// Takes this node's facts away and tells the others.
    fn leave(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.write(Key::Node(self.own), 0, None, now, actions);
        self.left = true;
        let (id, incarnation) = (self.own, self.incarnation + 1);
        let life = Life::Left;
        let rumours = vec![Rumour {
            id,
            incarnation,
            life,
        }];
        self.tell_all(&Message::Gossip { rumours }, actions);
        actions.extend(self.peers.linked().map(Action::Unlink));
    }

    /// How far a peer's clock may be ahead or behind, for the judge of its hello.
    pub fn is_skewed(own_wall_ms: u64, their_wall_ms: u64) -> bool {
        own_wall_ms.abs_diff(their_wall_ms) > SKEW_MAX.as_millis() as u64
    }
}

#[cfg(test)]
mod tests;
