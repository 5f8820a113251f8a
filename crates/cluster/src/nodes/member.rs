//! Membership: a pure state machine for the live nodes of a cluster, the gossip between them, and
//! their sessions.
//!
//! [`Membership::step`] takes an event and returns actions; it never waits, and its only clock is
//! its argument. Its driver calls it with [`Event::Tick`] at [`Membership::next_wake`].
//!
//! **Lives.** SWIM (Das, Gupta, Motivala, DSN 2002) over the sessions. Each period one node is
//! pinged, round robin in shuffled order. Without an answer, other nodes ping it on request. Then
//! it is *suspect*, and *dead* if it does not object in time by raising its incarnation. Changes
//! spread with pings, and to a few nodes at once.
//!
//! **Messages.** Pings carry the map's root. With different roots, two nodes exchange marks, then
//! the differing entries. A write is sent to all linked nodes at once. Every entry has its writer's
//! signature, by the node's [`Signer`]; entries that break a rule of the map are passed over.
//!
//! **Sessions.** Every two nodes should have one. The node with the lower id dials first. Failed
//! attempts are repeated with growing pauses, also to dead nodes, so that partitions heal.
//!
//! Bounds: [`PEERS_MAX`] nodes; lists in messages have constants. Messages of another member cannot
//! make this node drop entries or exceed these bounds.

mod dials;
mod exchange;
mod messages;
mod peers;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use paceline_base::SplitMix64;

use super::clock::{HybridClock, Now, SKEW_MAX};
use super::registers::{HIDDEN_MS, SignedEntry};
use super::signature::Signer;
use super::{NodeId, RegisterKey, Registers};
pub use dials::DialTarget;
use dials::Dials;
pub use messages::{ENTRIES_MAX, GossipMessage, RUMOURS_MAX, Rumour};
use peers::Peers;
pub use peers::{Life, PEERS_MAX, PeerView};

/// Timing of failure detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Between two pings of this node.
    pub period: Duration,
    /// Time for the answer to a ping, before other nodes ping on request.
    pub answer: Duration,
    /// Time for an answer, direct or through others, before the node is suspect.
    pub missing: Duration,
    /// Time for a suspect to object; longer in clusters of more than eight.
    pub suspicion: Duration,
    /// Between two attempts to reach a node: the first pause, and the longest.
    pub redial: (Duration, Duration),
}

impl Pace {
    /// An answer to a ping that takes longer is late: half the time before other nodes ping. A node
    /// whose answers stay late is slow. Wired networks answer in well below a millisecond, wireless
    /// ones in some ten.
    pub fn late(&self) -> Duration {
        self.answer / 2
    }
}

impl Default for Pace {
    /// In clusters of up to four a node is declared dead within 2 s of its last message. It is
    /// pinged within 600 ms, since a node pings all others in turn. After 400 ms it is suspect, and
    /// after another second dead. With 400 ms between pings an owner's silence was reported after
    /// 2.04 s. The time for answers exceeds the longest delay of a thread on a loaded machine.
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
    /// Discovery or the user found an address of a node.
    Found(DialTarget),
    /// A session with a node began; with the dialled target, if this node dialled.
    Linked {
        id: NodeId,
        /// The target that was dialled.
        target: Option<DialTarget>,
    },
    /// The session with a node ended.
    Unlinked(NodeId),
    /// A message arrived over the session with `from`.
    Received {
        from: NodeId,
        message: GossipMessage,
    },
    /// Entries that another member sent next to its session.
    Learned(Vec<SignedEntry>),
    /// This node writes to the map.
    Write {
        key: RegisterKey,
        /// As of [`Register`].
        epoch: u64,
        /// JSON, or `None` to delete.
        value: Option<String>,
    },
    /// This node leaves for good.
    Leave,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Try to make a session.
    Dial(DialTarget),
    /// Send over the session with `to`; drop it if there is none.
    Send {
        to: NodeId,
        message: GossipMessage,
    },
    /// End the session with a dead or removed node.
    Unlink(NodeId),
    /// These entries of the map have other contents now.
    Changed(Vec<RegisterKey>),
    Life(NodeId, Life),
    /// A node did not answer this one directly. It may answer others, and then lives.
    Late(NodeId),
}

/// Membership state of a node.
#[derive(Clone, Debug)]
pub struct Membership {
    own: NodeId,
    signer: Arc<dyn Signer>,
    pace: Pace,
    clock: HybridClock,
    map: Registers,
    peers: Peers,
    dials: Dials,
    incarnation: u64,
    left: bool,
    random: SplitMix64,
    next_ping: Duration,
    next_forget: Duration,
    /// When this node may next write its entries again that another member deleted.
    next_restore: Duration,
    next_seq: u64,
    compared: BTreeMap<NodeId, Duration>,
}

/// Least interval between comparisons of two differing maps.
const COMPARE_EVERY: Duration = Duration::from_millis(300);

/// How far a node's incarnation in others' rumours may be ahead of this machine's clock, in
/// milliseconds. It starts as the time of the node's start: its clock and the other's may each be
/// [`SKEW_MAX`] ahead. So no member can declare a node dead with a number that the node cannot
/// exceed. A node that started with a wrong clock may itself send a higher one.
const INCARNATION_AHEAD_MAX: u64 = 2 * SKEW_MAX.as_millis() as u64;

/// Up to here a node exceeds any incarnation in others' rumours, such as that of an earlier start
/// with a wrong clock. From here on it increments its own, so that it never overflows.
const INCARNATION_LEAP_MAX: u64 = u64::MAX / 2;

/// Interval of removing old tombstones.
const FORGET_EVERY: Duration = Duration::from_secs(600);

/// Age at which this node signs a revocation that has one signer, so that its signer can write
/// another one. In this day a user can revoke that signer.
const CONFIRM_MS: u64 = HIDDEN_MS;

/// Least interval of writing this node's entries again that another member deleted.
const RESTORE_EVERY: Duration = Duration::from_secs(1);

/// Number of nodes that ping an unresponsive node on request, and that receive a change first.
const HELPERS: usize = 3;

impl Membership {
    /// The node of `signer` with the initial map `map`, such as a saved one; `seed` is any random
    /// number.
    pub fn new(
        signer: Arc<dyn Signer>,
        mut map: Registers,
        pace: Pace,
        seed: u64,
        now: Now,
    ) -> Self {
        let own = signer.id();
        map.set_own(own);
        let mut member = Self {
            own,
            signer,
            pace,
            clock: HybridClock::new(own),
            map,
            peers: Peers::default(),
            dials: Dials::default(),
            // A later start has a higher one; it is raised if the clock was wrong.
            incarnation: now.wall_ms,
            left: false,
            random: SplitMix64::new(seed),
            next_ping: now.since_start,
            next_forget: now.since_start + FORGET_EVERY,
            next_restore: now.since_start,
            next_seq: 0,
            compared: BTreeMap::new(),
        };
        let known: Vec<RegisterKey> = member.map.iter().map(|(key, _)| key.clone()).collect();
        for (_, register) in member.map.iter() {
            member.clock.observe(register.stamp, now.wall_ms);
        }
        member.follow_map(&known, now);
        member
    }

    pub const fn own(&self) -> NodeId {
        self.own
    }

    /// Signer of this node's writes.
    pub(super) fn signer(&self) -> Arc<dyn Signer> {
        Arc::clone(&self.signer)
    }

    /// This node's copy of the map.
    pub const fn map(&self) -> &Registers {
        &self.map
    }

    /// The other nodes, as this one sees them.
    pub fn peers(&self) -> impl Iterator<Item = PeerView> {
        self.peers.views()
    }

    /// The life of a node; this one is alive, and an unknown one is dead.
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

    /// Handles an event; returns the actions, in order.
    pub fn step(&mut self, now: Now, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Tick => self.tick(now, &mut actions),
            Event::Found(target) => self.found(target, now),
            Event::Linked { id, target } => self.linked(id, target, now, &mut actions),
            Event::Unlinked(id) => self.unlinked(id, now),
            Event::Received { from, message } => self.receive(from, message, now, &mut actions),
            Event::Learned(entries) => self.merge_entries(entries, now, &mut actions),
            Event::Write { key, epoch, value } => self.write(key, epoch, value, now, &mut actions),
            Event::Leave => self.leave(now, &mut actions),
        }
        actions
    }

    fn found(&mut self, target: DialTarget, now: Now) {
        match target {
            DialTarget::Node(id) if id == self.own || self.is_revoked(id) => {}
            DialTarget::Node(id) => {
                self.know(id, now);
                self.dials.hurry(id, now.since_start);
            }
            DialTarget::Peer(addr) => self.dials.add(DialTarget::Peer(addr), now.since_start),
        }
    }

    /// Adds a node, and dials it.
    fn know(&mut self, id: NodeId, now: Now) {
        if id != self.own && self.peers.add(id, now.since_start) {
            // The other side dials at once; this one dials if that fails.
            let wait = if self.own < id {
                Duration::ZERO
            } else {
                self.pace.period * 2
            };
            self.dials.add(DialTarget::Node(id), now.since_start + wait);
        }
    }

    fn linked(
        &mut self,
        id: NodeId,
        target: Option<DialTarget>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
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
        self.map.revoked().contains(&id)
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
            for id in self.map.unconfirmed(now.wall_ms.saturating_sub(CONFIRM_MS)) {
                let (key, value) = (RegisterKey::Revoked(id), Some("{}".to_owned()));
                self.write(key, 0, value, now, actions);
            }
        }
        for target in self.dials.due(now.since_start, self.pace.redial) {
            actions.push(Action::Dial(target));
        }
    }

    /// Checks for pings without an answer, and suspects without an objection.
    fn judge(&mut self, now: Now, actions: &mut Vec<Action>) {
        for id in self.peers.unanswered(now.since_start, self.pace.answer) {
            actions.push(Action::Late(id));
            self.ask_others(id, actions);
        }
        for id in self.peers.missing(now.since_start, self.pace.missing) {
            if self.peers.life(id) == Some(Life::Dead) {
                // Another session may work.
                self.peers.unlink(id);
                self.dials.unlinked(id, now.since_start);
                actions.push(Action::Unlink(id));
                continue;
            }
            let known = self.peers.incarnation(id);
            self.apply_rumour(
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
            self.apply_rumour(
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
        let message = GossipMessage::Ping { seq, root, rumours };
        actions.push(Action::Send { to: id, message });
    }

    fn ask_others(&mut self, id: NodeId, actions: &mut Vec<Action>) {
        for helper in self.peers.some_linked(HELPERS, Some(id), &mut self.random) {
            let message = GossipMessage::PingFor { id };
            actions.push(Action::Send {
                to: helper,
                message,
            });
        }
    }

    /// The rumours for `id`; wrong ones about `id` itself first, so that it can object.
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
        // News of a dead node that lives may have been lost on the way to this one alone.
        rumours.extend(self.peers.some_dead(&mut self.random));
        rumours.truncate(RUMOURS_MAX);
        rumours
    }

    fn receive(
        &mut self,
        from: NodeId,
        message: GossipMessage,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        if self.left || !self.peers.is_linked(from) {
            return; // the session ended meanwhile
        }
        self.peers.heard(from);
        match message {
            GossipMessage::Ping { seq, root, rumours } => {
                self.apply_rumours(from, rumours, now, actions);
                let (own, rumours) = (self.map.root(), self.rumours_for(from));
                let message = GossipMessage::Ack {
                    seq,
                    root: own,
                    rumours,
                };
                actions.push(Action::Send { to: from, message });
                self.compare(from, root, now, actions);
            }
            GossipMessage::Ack { seq, root, rumours } => {
                let late = self.pace.late();
                self.peers.answered(from, seq, now.since_start, late);
                self.apply_rumours(from, rumours, now, actions);
                self.compare(from, root, now, actions);
            }
            GossipMessage::PingFor { id } => self.ping_for(from, id, actions),
            GossipMessage::PingFrom { asker } => {
                let message = GossipMessage::Lives {
                    id: self.own,
                    asker,
                };
                actions.push(Action::Send { to: from, message });
            }
            GossipMessage::Lives { id, asker } if asker == self.own => self.peers.heard(id),
            GossipMessage::Lives { id, asker } => {
                let message = GossipMessage::Lives { id, asker };
                actions.push(Action::Send { to: asker, message });
            }
            GossipMessage::Gossip { rumours } => self.apply_rumours(from, rumours, now, actions),
            GossipMessage::Marks { marks, answer } => {
                self.answer_marks(from, &marks, answer, actions)
            }
            GossipMessage::Entries { entries } => self.merge_entries(entries, now, actions),
        }
    }

    fn ping_for(&self, asker: NodeId, id: NodeId, actions: &mut Vec<Action>) {
        if self.peers.is_linked(id) && id != asker {
            let message = GossipMessage::PingFrom { asker };
            actions.push(Action::Send { to: id, message });
        }
    }

    fn apply_rumours(
        &mut self,
        from: NodeId,
        rumours: Vec<Rumour>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let mut newer = Vec::new();
        for rumour in rumours.into_iter().take(RUMOURS_MAX) {
            newer.extend(self.peers.alive_since(rumour));
            if rumour.incarnation <= self.latest_incarnation(from, rumour.id, now) {
                self.apply_rumour(rumour, now, actions);
            }
        }
        if !newer.is_empty() {
            let message = GossipMessage::Gossip { rumours: newer };
            actions.push(Action::Send { to: from, message });
        }
    }

    /// The highest incarnation of `id` accepted from `from`.
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

    fn apply_rumour(&mut self, rumour: Rumour, now: Now, actions: &mut Vec<Action>) {
        if rumour.id == self.own {
            return self.object(rumour, actions);
        }
        let Some(life) = self.peers.hear(rumour, now.since_start) else {
            return;
        };
        actions.push(Action::Life(rumour.id, life));
        if matches!(life, Life::Dead | Life::Left) && self.peers.is_linked(rumour.id) {
            // A session to a node declared dead by others is established again.
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

    /// Objects to a rumour about this node by raising its incarnation.
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
            self.broadcast(&GossipMessage::Gossip { rumours }, actions);
        }
    }

    /// Sends a change to a few nodes at once; the others get it with pings.
    fn spread(&mut self, rumour: Rumour, actions: &mut Vec<Action>) {
        for to in self.peers.some_linked(HELPERS, None, &mut self.random) {
            let rumours = vec![rumour];
            let message = GossipMessage::Gossip { rumours };
            actions.push(Action::Send { to, message });
        }
    }

    /// Whether a peer's clock is too far off, for the check of its hello.
    pub fn is_skewed(own_wall_ms: u64, their_wall_ms: u64) -> bool {
        own_wall_ms.abs_diff(their_wall_ms) > SKEW_MAX.as_millis() as u64
    }
}

#[cfg(test)]
mod tests;
