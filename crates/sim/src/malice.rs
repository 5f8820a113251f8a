//! A cluster with one malicious member, which sends what it likes over its sessions.
//!
//! Honest nodes are [`Membership`]s that write facts, paths, API keys, an instance's record and its
//! reports. The bad node is none: it draws messages from the seed. It signs as itself, forges and
//! replays the signatures of others, and uses any key, epoch, timestamp and value. From [`ATTACK`]
//! to the end it sends several hundred. At [`REVOKED`] a user revokes it at one honest node after
//! the other, a second apart, until all nodes have revoked it.
//!
//! *Safety*, after each change: a node sees of each honest node the facts that this node wrote, or
//! none if the bad node revoked it. It revokes one honest node at most.
//!
//! *Liveness*, [`LIMIT`] after [`REVOKED`]: all honest nodes have revoked the bad one and no other.
//! None sees an entry of it, and each sees all entries that honest nodes wrote.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use paceline_cluster::nodes::member::{
    Action, DialTarget, ENTRIES_MAX, Event, GossipMessage, Life, Pace, Rumour,
};
use paceline_cluster::nodes::registers::{SignedEntry, VALUE_BYTES_MAX};
use paceline_cluster::nodes::signature::Signer;
use paceline_cluster::nodes::{
    HybridTimestamp, Membership, NodeId, Now, Register, RegisterKey, Registers,
};
use paceline_cluster::testing::SimulatedSigner;
use paceline_fleet::InstanceId;

use crate::scenario::SimRandom;

/// Start of the attack: all honest nodes have met.
const ATTACK: Duration = Duration::from_secs(3);

/// When the user begins to revoke the bad node.
const REVOKED: Duration = Duration::from_secs(8);

/// Time in which all nodes have revoked it and nothing of it is left.
const LIMIT: Duration = Duration::from_secs(5);

/// Start time of all clocks; arbitrary.
const WALL_MS: u64 = 1_800_000_000_000;

/// The number of the bad node; honest ones follow.
const BAD: usize = 0;

enum Due {
    Tick(usize),
    /// A message over session `link`.
    Arrive {
        from: usize,
        to: usize,
        link: u64,
        message: GossipMessage,
    },
    Meet(usize, usize),
    Attack,
    Revoke,
}

struct World {
    random: SimRandom,
    now: Duration,
    ids: Vec<NodeId>,
    /// The honest ones; `None` for the bad one.
    members: Vec<Option<Membership>>,
    links: BTreeMap<(usize, usize), u64>,
    queue: BTreeMap<(Duration, u64), Due>,
    count: u64,
    loss_per_mille: u64,
    slowest_us: u64,
    /// Whether the bad node fills its part of the map.
    fills: bool,
    /// Writes of honest nodes, by key: the latest value and its writer.
    written: BTreeMap<RegisterKey, (usize, String)>,
    /// All values that honest nodes wrote.
    honest: BTreeSet<(RegisterKey, String)>,
    /// Entries that the bad node received.
    seen: Vec<SignedEntry>,
    /// Honest nodes at which the user has not revoked the bad one yet.
    signers: Vec<usize>,
    violations: Vec<String>,
}

/// Plays the cluster of a seed; returns the violations, none for a correct run.
pub fn run_malice(seed: u64) -> Vec<String> {
    let mut world = World::new(seed);
    for node in 1..world.ids.len() {
        world.add(Duration::from_millis(1), Due::Tick(node));
        for other in 0..world.ids.len() {
            let at = Duration::from_millis(1 + world.random.below(500));
            world.add(at, Due::Meet(node, other));
        }
        world.write_all(node);
    }
    let attacks = 20 + world.random.below(100);
    for _ in 0..attacks {
        let length = (REVOKED + LIMIT - ATTACK).as_millis() as u64;
        let at = ATTACK + Duration::from_millis(world.random.below(length));
        world.add(at, Due::Attack);
    }
    world.add(REVOKED, Due::Revoke);
    while let Some(((at, _), due)) = world.queue.pop_first() {
        if at > REVOKED + LIMIT {
            break;
        }
        world.now = at;
        world.play(due);
        if world.violations.len() > 5 {
            break;
        }
    }
    world.check_end();
    world.violations
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = SimRandom::new(seed ^ 0x0bad);
        let honest = 3 + random.below(4) as usize;
        let id = |number: usize| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&random.next().to_be_bytes());
            bytes[15] = number as u8;
            NodeId(bytes)
        };
        let ids: Vec<NodeId> = (0..=honest).map(id).collect();
        let now = Now {
            since_start: Duration::ZERO,
            wall_ms: WALL_MS,
        };
        let mut member = |id: &NodeId| {
            let signer = Arc::new(SimulatedSigner(*id));
            let pace = Pace::default();
            Membership::new(signer, Registers::default(), pace, random.next(), now)
        };
        let members = ids[1..].iter().map(|id| Some(member(id)));
        let members = std::iter::once(None).chain(members).collect();
        let mut signers: Vec<usize> = (1..=honest).collect();
        signers.rotate_left(random.below(honest as u64) as usize);
        Self {
            loss_per_mille: [0, 20, 100][random.below(3) as usize],
            slowest_us: [2000, 20_000, 80_000][random.below(3) as usize],
            fills: random.chance(100),
            random,
            now: Duration::ZERO,
            ids,
            members,
            links: BTreeMap::new(),
            queue: BTreeMap::new(),
            count: 0,
            written: BTreeMap::new(),
            honest: BTreeSet::new(),
            seen: Vec::new(),
            signers,
            violations: Vec::new(),
        }
    }

    fn add(&mut self, at: Duration, due: Due) {
        self.count += 1;
        self.queue.insert((at, self.count), due);
    }

    fn way(&mut self) -> Duration {
        Duration::from_micros(100 + self.random.below(self.slowest_us))
    }

    /// The entries of an honest node; each names its writer.
    fn write_all(&mut self, node: usize) {
        let id = self.ids[node];
        let instance = InstanceId(node as u64);
        let record = format!("{{\"nodes\":[\"{id}\"],\"by\":{node}}}");
        for (key, epoch, value) in [
            (RegisterKey::Node(id), 0, format!("{{\"facts\":{node}}}")),
            (
                RegisterKey::Named(format!("paths/{id}")),
                0,
                format!("[{node}]"),
            ),
            (RegisterKey::api_key(id, "k"), 0, format!("\"key {node}\"")),
            (RegisterKey::Record(instance), 1, record),
            (
                RegisterKey::Report(instance),
                1,
                format!("\"ready {node}\""),
            ),
        ] {
            self.honest.insert((key.clone(), value.clone()));
            self.written.insert(key.clone(), (node, value.clone()));
            let value = Some(value);
            self.step(node, Event::Write { key, epoch, value });
        }
    }

    fn play(&mut self, due: Due) {
        match due {
            Due::Tick(node) => {
                self.step(node, Event::Tick);
                let member = self.members[node].as_ref().expect("honest nodes tick");
                let next = member.next_wake().max(self.now + Duration::from_millis(1));
                self.add(next, Due::Tick(node));
            }
            Due::Arrive {
                from,
                to,
                link,
                message,
            } => {
                if self.links.get(&pair(from, to)) != Some(&link) {
                    return;
                }
                if to == BAD {
                    return self.overhear(from, message);
                }
                let from = self.ids[from];
                self.step(to, Event::Received { from, message });
            }
            Due::Meet(one, two) => self.meet(one, two),
            Due::Attack => self.attack(),
            Due::Revoke => self.revoke(),
        }
    }

    /// A session begins, unless there is one.
    fn meet(&mut self, one: usize, two: usize) {
        if one == two || self.links.contains_key(&pair(one, two)) {
            return;
        }
        self.count += 1;
        self.links.insert(pair(one, two), self.count);
        for (at, other) in [(two, one), (one, two)] {
            let id = self.ids[other];
            let target = (at == one).then_some(DialTarget::Node(id));
            self.step(at, Event::Linked { id, target });
        }
        if one.min(two) == BAD {
            // Its facts, so that it is a member.
            let entry = self.signed(
                RegisterKey::Node(self.ids[BAD]),
                0,
                self.stamp(),
                Some("{}"),
            );
            let entries = vec![entry];
            self.send(BAD, one.max(two), GossipMessage::Entries { entries });
        }
    }

    fn step(&mut self, node: usize, event: Event) {
        let now = Now {
            since_start: self.now,
            wall_ms: WALL_MS + self.now.as_millis() as u64,
        };
        let Some(member) = &mut self.members[node] else {
            return;
        };
        let mut is_changed = false;
        for action in member.step(now, event) {
            match action {
                Action::Send { to, message } => {
                    let to = usize::from(to.0[15]);
                    self.send(node, to, message);
                }
                Action::Dial(DialTarget::Node(id)) => {
                    // Ids that the bad node made up lead nowhere.
                    if let Some(other) = self.ids.iter().position(|it| *it == id) {
                        let at = self.now + self.way();
                        self.add(at, Due::Meet(node, other));
                    }
                }
                Action::Unlink(id) => {
                    let other = self.ids.iter().position(|it| *it == id);
                    if let Some(other) = other
                        && self.links.remove(&pair(node, other)).is_some()
                    {
                        let (own, theirs) = (self.ids[node], self.ids[other]);
                        self.step(node, Event::Unlinked(theirs));
                        self.step(other, Event::Unlinked(own));
                    }
                }
                Action::Changed(_) => is_changed = true,
                Action::Dial(DialTarget::Peer(_)) | Action::Life(..) | Action::Late(_) => {}
            }
        }
        if is_changed && self.now > ATTACK {
            self.check(node);
        }
    }

    fn send(&mut self, from: usize, to: usize, message: GossipMessage) {
        let Some(link) = self.links.get(&pair(from, to)).copied() else {
            return;
        };
        let copies = match self.random.below(1000) {
            one if one < self.loss_per_mille => 0,
            one if one > 970 => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let at = self.now + self.way();
            let message = message.clone();
            self.add(
                at,
                Due::Arrive {
                    from,
                    to,
                    link,
                    message,
                },
            );
        }
    }

    /// The bad node answers pings, so that it counts as alive, and keeps entries.
    fn overhear(&mut self, from: usize, message: GossipMessage) {
        match message {
            GossipMessage::Ping { seq, root, .. } => {
                let rumours = Vec::new();
                self.send(BAD, from, GossipMessage::Ack { seq, root, rumours });
            }
            GossipMessage::Entries { entries } if self.seen.len() < 500 => {
                self.seen.extend(entries);
            }
            _ => {}
        }
    }

    /// A user revokes the bad node at an honest one, and looks again after a second.
    fn revoke(&mut self) {
        let bad = self.ids[BAD];
        let members = self.members.iter().flatten();
        let is_done = members.clone().all(|it| it.map().revoked().contains(&bad));
        let is_clean = members.clone().all(|it| it.map().revoked().len() == 1);
        if is_done && is_clean {
            return;
        }
        if let Some(node) = self.signers.pop() {
            let (key, value) = (RegisterKey::Revoked(bad), Some("{}".to_owned()));
            let epoch = 0;
            self.step(node, Event::Write { key, epoch, value });
            self.add(self.now + Duration::from_secs(1), Due::Revoke);
        }
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.random.below(from.len() as u64) as usize].clone()
    }

    fn stamp(&self) -> HybridTimestamp {
        HybridTimestamp {
            ms: WALL_MS + self.now.as_millis() as u64,
            count: 0,
            node: self.ids[BAD],
        }
    }

    /// An entry with the bad node's signature.
    fn signed(
        &self,
        key: RegisterKey,
        epoch: u64,
        stamp: HybridTimestamp,
        value: Option<&str>,
    ) -> SignedEntry {
        let value = value.map(str::to_owned);
        let register = Register {
            epoch,
            stamp,
            value,
        };
        let message = SignedEntry::message(&key, &register);
        let signature = SimulatedSigner(self.ids[BAD]).sign(&message);
        SignedEntry {
            key,
            register,
            signature: signature.expect("a simulated one needs no random numbers"),
        }
    }

    fn key(&mut self) -> RegisterKey {
        let id = self.pick(&self.ids.clone());
        let instance = InstanceId(self.random.below(8));
        match self.random.below(9) {
            0 => RegisterKey::Node(id),
            1 | 2 => RegisterKey::Revoked(id),
            3 => RegisterKey::Record(instance),
            4 => RegisterKey::Report(instance),
            5 => RegisterKey::api_key(id, "k"),
            6 => RegisterKey::api_key(id, "new"),
            7 => RegisterKey::Named(format!("paths/{id}")),
            _ => RegisterKey::Named(format!("weights/{}", self.random.below(2000))),
        }
    }

    fn forged(&mut self) -> SignedEntry {
        let bad = self.ids[BAD];
        let mut stamp = self.stamp();
        stamp.ms = match self.random.below(6) {
            0 => 0,
            1 => stamp.ms - self.random.below(8 * 24 * 3_600_000),
            2 => stamp.ms + 59_000,
            3 => u64::MAX,
            _ => stamp.ms,
        };
        stamp.count = self.random.next() as u32;
        let epochs = [0, 0, 1, 2, 1 << 20, (1 << 20) + 2, u64::MAX - 1, u64::MAX];
        let epoch = self.pick(&epochs);
        let long = "x".repeat(VALUE_BYTES_MAX);
        let record = format!("{{\"nodes\":[\"{bad}\"]}}");
        let value = self.pick(&[None, Some("\"bad\""), Some(&*record), Some(&*long)]);
        let key = self.key();
        let mut entry = self.signed(key, epoch, stamp, value);
        match self.random.below(8) {
            // In the name of another, with its own signature or one of a write of that node.
            0 => entry.register.stamp.node = self.pick(&self.ids.clone()),
            1 if !self.seen.is_empty() => {
                let mut theirs = self.replayed();
                match self.random.below(4) {
                    0 => theirs.register.epoch = epoch,
                    1 => theirs.register.value = entry.register.value,
                    2 => theirs.register.stamp.ms += 1 + self.random.below(1000),
                    _ => theirs.key = entry.key,
                }
                return theirs;
            }
            2 if !self.seen.is_empty() => return self.replayed(),
            _ => {}
        }
        entry
    }

    /// An entry that the bad node received.
    fn replayed(&mut self) -> SignedEntry {
        let at = self.random.below(self.seen.len() as u64) as usize;
        self.seen[at].clone()
    }

    fn attack(&mut self) {
        let to = 1 + self.random.below(self.ids.len() as u64 - 1) as usize;
        self.meet(BAD, to);
        let message = match self.random.below(20) {
            0 => GossipMessage::Marks {
                marks: (0..self.random.below(50)).map(|it| it * 7).collect(),
                answer: true,
            },
            1 | 2 => GossipMessage::Gossip {
                rumours: vec![Rumour {
                    id: self.pick(&self.ids.clone()),
                    incarnation: self.pick(&[0, WALL_MS, WALL_MS + 20_000, u64::MAX]),
                    life: self.pick(&[Life::Alive, Life::Suspect, Life::Dead]),
                }],
            },
            3 if self.fills => {
                // Fills its part of the map.
                for _ in 0..8 {
                    let entries = (0..ENTRIES_MAX).map(|_| {
                        let name = format!("fill/{}", self.random.below(5000));
                        let (stamp, long) = (self.stamp(), "x".repeat(VALUE_BYTES_MAX / 4));
                        self.signed(RegisterKey::Named(name), 0, stamp, Some(&long))
                    });
                    let entries = entries.collect();
                    self.send(BAD, to, GossipMessage::Entries { entries });
                }
                return;
            }
            _ => {
                let entries = (0..1 + self.random.below(20)).map(|_| self.forged());
                let entries = entries.collect();
                GossipMessage::Entries { entries }
            }
        };
        self.send(BAD, to, message);
    }

    /// Whether what node `viewer` sees of honest nodes is what these wrote.
    fn check(&mut self, viewer: usize) {
        let member = self.members[viewer].as_ref().expect("an honest node");
        let map = member.map();
        let is_honest = |id: &&NodeId| self.ids[1..].contains(*id);
        let cut: Vec<&NodeId> = map.revoked().iter().filter(is_honest).collect();
        let mut found = Vec::new();
        if cut.len() > 1 {
            found.push(format!("{} honest nodes are revoked", cut.len()));
        }
        for (key, (node, _)) in &self.written {
            let is_about = match key {
                RegisterKey::Node(_) | RegisterKey::Named(_) => true,
                // Any member may delete a key, and load or unload an instance.
                RegisterKey::ApiKey(_) => map.get(key).is_some(),
                RegisterKey::Report(id) => {
                    let record = map.register(&RegisterKey::Record(*id));
                    let is_bad = |it: &Register| it.stamp.node == self.ids[BAD];
                    !record.is_some_and(is_bad) && map.get(key).is_some()
                }
                _ => false,
            };
            if !is_about || cut.contains(&&self.ids[*node]) {
                continue;
            }
            let seen = map.get(key).map(str::to_owned);
            let is_written = |value: String| self.honest.contains(&(key.clone(), value));
            if !seen.clone().is_some_and(is_written) {
                found.push(format!("node {node}'s {key:?} is {seen:?}"));
            }
        }
        let at = self.now;
        let found = found
            .into_iter()
            .map(|it| format!("{at:?}, node {viewer}: {it}"));
        self.violations.extend(found);
    }

    fn check_end(&mut self) {
        let bad = self.ids[BAD];
        for (number, member) in self.members.iter().enumerate().skip(1) {
            let map = member.as_ref().expect("an honest node").map();
            let gone: Vec<&NodeId> = map
                .revoked()
                .iter()
                .filter(|id| self.ids.contains(id))
                .collect();
            if gone != [&bad] {
                let said = format!("in the end node {number} has revoked {gone:?}");
                self.violations.push(said);
            }
            let left = map.iter().filter(|(key, register)| {
                register.stamp.node == bad && !matches!(key, RegisterKey::Revoked(_))
            });
            let left: Vec<&RegisterKey> = left.map(|(key, _)| key).collect();
            if !left.is_empty() {
                let said = format!("in the end node {number} has {left:?} of the bad node");
                self.violations.push(said);
            }
            for (key, (_, value)) in &self.written {
                if map.get(key) != Some(value) {
                    let said = format!("in the end node {number} has lost {key:?}");
                    self.violations.push(said);
                }
            }
        }
    }
}

fn pair(one: usize, two: usize) -> (usize, usize) {
    (one.min(two), one.max(two))
}
