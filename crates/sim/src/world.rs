//! The simulated world: nodes, links and the event queue.
//!
//! A link is a session. Its messages are delayed, lost, repeated and reordered, which is harsher
//! than a real session. It breaks when either end crashes or closes it. An attempt to connect takes
//! a message each way. A partition keeps links, like a pulled cable: no message passes, until one
//! side gives up.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_cluster::nodes::agent::NodeFacts;
use paceline_cluster::nodes::member::{Action, DialTarget, Event, GossipMessage, Pace};
use paceline_cluster::nodes::{Membership, NodeId, Now, RegisterKey, Registers};
use paceline_cluster::testing::SimulatedSigner;
use paceline_fleet::rules::relocate::standbys;
use paceline_fleet::{EPOCH_UNWANTED, History, InstanceId, InstanceSpec, ROUND, SPLIT_ANY, specs};

use crate::check;
use crate::scenario::{Fault, Scenario, SimRandom};
use crate::serving::{self, Later, NetworkView, Serving};

/// Start time of all clocks, before their skew; arbitrary.
const WALL_MS: u64 = 1_800_000_000_000;

/// How long a restarted node waits before it owns the instances of its saved map: others may have
/// taken over.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// The outcome of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimOutcome {
    /// Violations, in order of detection; empty for a correct run.
    pub violations: Vec<String>,
    /// Number of simulated events.
    pub events: u64,
    /// A hash of all events: equal for equal runs.
    pub trace: u64,
    /// Instances that a successor took over.
    pub takeovers: u64,
    /// Instances that a draining node handed over.
    pub moves: u64,
    /// Instances that moved to more nodes.
    pub widened: u64,
    /// When all nodes first saw all others alive, with equal maps.
    pub settled: Option<Duration>,
    /// Complete answers that clients received.
    pub answers: u64,
    /// How often an answer resumed at another node or owner.
    pub resumed: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum ScheduledEvent {
    Tick(usize),
    /// A node reconciles.
    Look(usize, u64),
    Fault(usize),
    /// A message over link `link` between `from` and `to`.
    Arrive {
        from: usize,
        to: usize,
        link: u64,
        message: Box<GossipMessage>,
    },
    /// An attempt to connect arrives, from this life of the dialler.
    Knock {
        from: usize,
        to: usize,
        life: u64,
    },
    /// The end at `at` detects that the link is broken.
    Broken {
        at: usize,
        from: usize,
        link: u64,
    },
    Find {
        at: usize,
        other: usize,
        life: u64,
    },
    Serve(serving::ServingEvent),
}

pub(crate) struct SimNode {
    pub(crate) id: NodeId,
    pub(crate) member: Option<Membership>,
    saved: Registers,
    /// Counts its processes.
    pub(crate) life: u64,
    pub(crate) started: Duration,
    /// It drains: hands over its instances and takes none.
    pub(crate) leaves: bool,
    /// Time of the valid tick.
    tick: Option<Duration>,
    skew_ms: u64,
    memory_bytes: u64,
    pub(crate) runs: BTreeMap<InstanceId, SimRun>,
    pub(crate) hands_over: BTreeSet<InstanceId>,
    /// Past observations of its rules; `None` while they run.
    pub(crate) history: Option<History>,
    /// Highest epoch that it ever ran, by instance.
    pub(crate) highest: BTreeMap<InstanceId, u64>,
}

/// A record by which a node runs an instance.
#[derive(Clone, Debug)]
pub(crate) struct SimRun {
    pub(crate) epoch: u64,
    pub(crate) spec: InstanceSpec,
    /// It was started before.
    pub(crate) resumes: bool,
}

pub(crate) struct SimWorld {
    pub(crate) nodes: Vec<SimNode>,
    pub(crate) wanted: BTreeSet<InstanceId>,
    pub(crate) unwanted: BTreeSet<InstanceId>,
    pub(crate) violations: Vec<String>,
    queue: BTreeMap<(Duration, u64), ScheduledEvent>,
    pub(crate) now: Duration,
    /// Origin of virtual time for the rules, which only compare times.
    pub(crate) origin: Instant,
    count: u64,
    random: SimRandom,
    scenario: Scenario,
    /// The session of each two nodes, lower number first, as each end knows it.
    links: BTreeMap<(usize, usize), u64>,
    pub(crate) split: u64,
    pub(crate) deaf: BTreeSet<(usize, usize)>,
    trace: u64,
    pub(crate) takeovers: u64,
    pub(crate) moves: u64,
    pub(crate) widened: u64,
    /// `None` while it is in use.
    pub(crate) serving: Option<Serving>,
}

/// Runs a scenario to its end.
pub fn run(scenario: &Scenario) -> SimOutcome {
    let mut world = SimWorld::new(scenario.clone());
    let (mut events, mut settled) = (0, None);
    while let Some(((at, _), due)) = world.queue.pop_first() {
        if at > scenario.length {
            break;
        }
        world.now = at;
        world.play(due);
        events += 1;
        if settled.is_none() && events % 64 == 0 && check::is_settled(&world) {
            settled = Some(at);
        }
        if world.violations.len() > 20 {
            break;
        }
    }
    check::in_the_end(&mut world);
    let serving = world.serving.as_ref();
    SimOutcome {
        answers: serving.map_or(0, |serving| serving.whole),
        resumed: serving.map_or(0, |serving| serving.resumed),
        violations: world.violations,
        events,
        trace: world.trace,
        takeovers: world.takeovers,
        moves: world.moves,
        widened: world.widened,
        settled,
    }
}

impl SimWorld {
    fn new(scenario: Scenario) -> Self {
        let mut random = SimRandom::new(scenario.seed ^ 0x5eed);
        let node = |number: usize| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&random.next().to_be_bytes());
            bytes[15] = number as u8;
            SimNode {
                id: NodeId(bytes),
                member: None,
                saved: Registers::default(),
                life: 0,
                started: Duration::ZERO,
                leaves: false,
                tick: None,
                skew_ms: scenario.skew_ms[number],
                memory_bytes: (4 << random.below(3)) << 30,
                runs: BTreeMap::new(),
                hands_over: BTreeSet::new(),
                history: None,
                highest: BTreeMap::new(),
            }
        };
        let nodes = (0..scenario.nodes).map(node).collect();
        let mut world = Self {
            nodes,
            wanted: BTreeSet::new(),
            unwanted: BTreeSet::new(),
            violations: Vec::new(),
            queue: BTreeMap::new(),
            now: Duration::ZERO,
            origin: Instant::now(),
            count: 0,
            random,
            links: BTreeMap::new(),
            split: 0,
            deaf: BTreeSet::new(),
            trace: 0,
            takeovers: 0,
            moves: 0,
            widened: 0,
            serving: None,
            scenario,
        };
        let (serving, later) = Serving::new(&world.scenario);
        world.serving = Some(serving);
        for (at, due) in later {
            world.add(at, ScheduledEvent::Serve(due));
        }
        for happening in 0..world.scenario.happenings.len() {
            let at = world.scenario.happenings[happening].at;
            world.add(at, ScheduledEvent::Fault(happening));
        }
        for node in 0..world.nodes.len() {
            world.start(node);
        }
        world
    }

    pub(crate) const fn length(&self) -> Duration {
        self.scenario.length
    }

    fn add(&mut self, at: Duration, due: ScheduledEvent) {
        self.count += 1;
        self.queue.insert((at, self.count), due);
    }

    fn time_of(&self, node: usize) -> Now {
        Now {
            since_start: self.now,
            wall_ms: WALL_MS + self.now.as_millis() as u64 + self.nodes[node].skew_ms,
        }
    }

    fn start(&mut self, node: usize) {
        if self.nodes[node].member.is_some() {
            return;
        }
        let (now, seed) = (self.time_of(node), self.random.next());
        let own = &mut self.nodes[node];
        own.life += 1;
        (own.started, own.tick, own.leaves) = (self.now, None, false);
        own.hands_over.clear();
        own.history = Some(History::new(self.origin + self.now));
        let (id, saved, life) = (own.id, own.saved.clone(), own.life);
        let signer = Arc::new(SimulatedSigner(id));
        own.member = Some(Membership::new(signer, saved, Pace::default(), seed, now));
        self.write_facts(node);
        self.add(self.now + PATIENCE, ScheduledEvent::Look(node, life));
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            for (at, other) in [(node, other), (other, node)] {
                let wait = Duration::from_millis(self.random.below(1000));
                let life = self.nodes[at].life;
                self.add(self.now + wait, ScheduledEvent::Find { at, other, life });
            }
        }
    }

    /// Writes the node's facts: the number of its process, and whether it drains.
    fn write_facts(&mut self, node: usize) {
        let own = &self.nodes[node];
        let facts = NodeFacts {
            boot: own.life,
            leaving: own.leaves,
            memory_bytes: own.memory_bytes,
            ..NodeFacts::default()
        };
        let facts = serde_json::to_string(&facts).expect("facts are JSON");
        let facts = Event::Write {
            key: RegisterKey::Node(own.id),
            epoch: 0,
            value: Some(facts),
        };
        self.step(node, facts);
    }

    fn crash(&mut self, node: usize) {
        let Some(member) = self.nodes[node].member.take() else {
            return;
        };
        self.nodes[node].saved = member.map().clone();
        self.nodes[node].runs.clear();
        if let Some(serving) = &mut self.serving {
            serving.crash(node);
        }
        let cut: Vec<(usize, usize)> = self.links.keys().copied().collect();
        for (one, two) in cut
            .into_iter()
            .filter(|(one, two)| *one == node || *two == node)
        {
            self.cut(node, one + two - node);
        }
    }

    /// Node `from` closes a link; the other end detects it, if messages get through.
    fn cut(&mut self, from: usize, other: usize) {
        let Some(link) = self.links.remove(&pair(from, other)) else {
            return;
        };
        if self.passes(from, other) {
            let at = self.now + self.way();
            self.add(
                at,
                ScheduledEvent::Broken {
                    at: other,
                    from,
                    link,
                },
            );
        }
    }

    fn way(&mut self) -> Duration {
        let (least, most) = self.scenario.delay;
        let span = (most - least).as_micros() as u64 + 1;
        least + Duration::from_micros(self.random.below(span))
    }

    /// Whether a message from `from` can reach `to` now.
    pub(crate) fn passes(&self, from: usize, to: usize) -> bool {
        let side = |node: usize| self.split.unbounded_shr(node as u32) & 1;
        side(from) == side(to) && !self.deaf.contains(&(from, to))
    }

    fn play(&mut self, due: ScheduledEvent) {
        match due {
            ScheduledEvent::Tick(node) if self.nodes[node].tick == Some(self.now) => {
                self.nodes[node].tick = None;
                self.step(node, Event::Tick);
            }
            ScheduledEvent::Tick(_) => {} // superseded by an earlier one
            ScheduledEvent::Look(node, life) if life == self.nodes[node].life => {
                self.round(node);
                self.add(self.now + ROUND, ScheduledEvent::Look(node, life));
            }
            ScheduledEvent::Look(..) => {}
            ScheduledEvent::Fault(number) => self.fault(number),
            ScheduledEvent::Find { at, other, life } if life == self.nodes[at].life => {
                let found = Event::Found(DialTarget::Node(self.nodes[other].id));
                self.step(at, found);
            }
            ScheduledEvent::Find { .. } => {}
            ScheduledEvent::Knock { from, to, life } => self.knock(from, to, life),
            ScheduledEvent::Serve(due) => {
                self.serve(|serving, net, later| serving.play(due, net, later))
            }
            ScheduledEvent::Broken { at, from, .. } => {
                if !self.links.contains_key(&pair(at, from)) {
                    let id = self.nodes[from].id;
                    self.step(at, Event::Unlinked(id));
                }
            }
            ScheduledEvent::Arrive {
                from,
                to,
                link,
                message,
            } => {
                if self.links.get(&pair(from, to)) == Some(&link) {
                    let from = self.nodes[from].id;
                    let message = *message;
                    self.step(to, Event::Received { from, message });
                }
            }
        }
    }

    pub(crate) fn serve(&mut self, run: impl FnOnce(&mut Serving, &NetworkView<'_>, &mut Later)) {
        let Some(mut serving) = self.serving.take() else {
            return;
        };
        let mut later = Later::new();
        let net = NetworkView {
            nodes: &self.nodes,
            split: self.split,
            deaf: &self.deaf,
            now: self.now,
        };
        run(&mut serving, &net, &mut later);
        self.serving = Some(serving);
        for (after, due) in later {
            self.add(self.now + after, ScheduledEvent::Serve(due));
        }
    }

    fn fault(&mut self, number: usize) {
        let fault = self.scenario.happenings[number].fault.clone();
        match fault {
            Fault::Crash(node) => self.crash(node),
            Fault::Leave(node) => self.leave(node),
            Fault::Start(node) => self.start(node),
            Fault::Split(side) => self.split = side,
            Fault::Deaf(from, to) => {
                self.deaf.insert((from, to));
            }
            Fault::Heal => {
                self.split = 0;
                self.deaf.clear();
            }
            Fault::Load(node, wide) => self.load(node, wide),
            Fault::Unload(node) => self.unload(node),
        }
    }

    /// Loads an instance over `wide` live nodes that do not drain, or as many as there are.
    fn load(&mut self, node: usize, wide: usize) {
        let Some((observed, specs)) = self.observe(node) else {
            return;
        };
        let mut nodes = observed.ranked.clone();
        nodes.truncate(wide);
        let id = InstanceId(self.random.next());
        let mut wanted = InstanceSpec {
            model: "model".into(),
            bytes: (1 + self.random.below(4)) << 30,
            width: u16::try_from(nodes.len()).ok(),
            split: SPLIT_ANY.into(),
            threads: 1,
            ..InstanceSpec::default()
        };
        let used = nodes.iter().copied().collect();
        let standbys = standbys(&observed, &specs, &wanted, &used);
        wanted.successors = nodes.iter().skip(1).copied().chain(standbys).collect();
        wanted.nodes = nodes;
        self.wanted.insert(id);
        self.write_record(node, id, 1, Some(&wanted));
    }

    fn unload(&mut self, node: usize) {
        let known = self.nodes[node]
            .member
            .as_ref()
            .and_then(|member| specs(member.map()).map(|(id, ..)| id).next());
        if let Some(id) = known {
            self.unwanted.insert(id);
            self.write_record(node, id, EPOCH_UNWANTED, None);
        }
    }

    fn leave(&mut self, node: usize) {
        if self.nodes[node].member.is_none() {
            return;
        }
        self.nodes[node].leaves = true;
        self.write_facts(node);
        self.hand_on(node);
    }

    pub(crate) fn write_record(
        &mut self,
        node: usize,
        id: InstanceId,
        epoch: u64,
        wanted: Option<&InstanceSpec>,
    ) {
        let value = wanted.map(|wanted| serde_json::to_string(wanted).expect("JSON"));
        let key = RegisterKey::Record(id);
        self.step(node, Event::Write { key, epoch, value });
    }

    /// An attempt to connect arrives.
    fn knock(&mut self, from: usize, to: usize, life: u64) {
        let lives = self.nodes[from].life == life && self.nodes[from].member.is_some();
        let answers = self.nodes[to].member.is_some() && self.passes(from, to);
        if !lives || !answers || !self.passes(to, from) || self.links.contains_key(&pair(from, to))
        {
            return;
        }
        self.count += 1;
        self.links.insert(pair(from, to), self.count);
        for (at, other) in [(to, from), (from, to)] {
            let id = self.nodes[other].id;
            let target = (at == from).then_some(DialTarget::Node(id));
            self.step(at, Event::Linked { id, target });
        }
    }

    fn step(&mut self, node: usize, event: Event) {
        let now = self.time_of(node);
        let Some(member) = &mut self.nodes[node].member else {
            return;
        };
        let actions = member.step(now, event);
        let wake = member.next_wake().max(self.now);
        let mut changed = false;
        for action in actions {
            self.note(node, &action);
            match action {
                Action::Send { to, message } => self.send(node, to, message),
                Action::Dial(DialTarget::Node(id)) => self.dial(node, id),
                Action::Dial(DialTarget::Peer(_)) => {}
                Action::Unlink(id) => self.unlink(node, id),
                Action::Changed(_) | Action::Life(..) => changed = true,
                Action::Late(_) => {} // paths are not measured here
            }
        }
        self.wake(node, wake.max(self.now + Duration::from_millis(1)));
        if changed {
            self.round(node);
        }
    }

    /// Plans a tick of the node at `at`, unless an earlier one is planned.
    fn wake(&mut self, node: usize, at: Duration) {
        if self.nodes[node].tick.is_none_or(|tick| at < tick) {
            self.nodes[node].tick = Some(at);
            self.add(at, ScheduledEvent::Tick(node));
        }
    }

    fn note(&mut self, node: usize, action: &Action) {
        let kind = match action {
            Action::Send { .. } => 1,
            Action::Dial(_) => 2,
            Action::Unlink(_) => 3,
            Action::Changed(_) => 4,
            Action::Life(_, life) => 5 + *life as u64,
            Action::Late(_) => 9,
        };
        let now = self.now.as_nanos() as u64;
        let mut random = SimRandom::new(self.trace ^ now ^ (kind << 8 | node as u64));
        self.trace = random.next();
    }

    pub(crate) fn index(&self, id: NodeId) -> usize {
        usize::from(id.0[15])
    }

    fn send(&mut self, from: usize, to: NodeId, message: GossipMessage) {
        let to = self.index(to);
        let Some(link) = self.links.get(&pair(from, to)).copied() else {
            return;
        };
        if !self.passes(from, to) || self.random.chance(self.scenario.loss_per_mille) {
            return;
        }
        let copies = 1 + u32::from(self.random.chance(self.scenario.twice_per_mille));
        for _ in 0..copies {
            let at = self.now + self.way();
            let message = Box::new(message.clone());
            self.add(
                at,
                ScheduledEvent::Arrive {
                    from,
                    to,
                    link,
                    message,
                },
            );
        }
    }

    fn dial(&mut self, from: usize, id: NodeId) {
        let to = self.index(id);
        if self.random.chance(self.scenario.loss_per_mille) {
            return;
        }
        let (at, life) = (self.now + self.way() + self.way(), self.nodes[from].life);
        self.add(at, ScheduledEvent::Knock { from, to, life });
    }

    fn unlink(&mut self, node: usize, id: NodeId) {
        let other = self.index(id);
        self.cut(node, other);
        // The shell reports it as soon as the session is closed.
        self.add(
            self.now,
            ScheduledEvent::Broken {
                at: node,
                from: other,
                link: 0,
            },
        );
    }
}

fn pair(one: usize, two: usize) -> (usize, usize) {
    (one.min(two), one.max(two))
}
