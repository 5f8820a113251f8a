//! Serving in a run: supervisors, workers, ingress nodes and clients of the instances.
//!
//! ```text
//! client -- its ingress, a node -- the owner's supervisor -- workers, one a rank
//!                \-- a copy of each token on another node, before the client gets it
//! ```
//! The [`Supervisor`] is the one that nodes run. Workers, ingress and clients are simulated by the
//! rules of `worker::process`, and of ingress and journals in `node::fleet`. A worker's connection
//! breaks after 1.5 s of silence. An ingress submits to the next owner when its connection is cut.
//! A client that lost its ingress resumes at a node that finds a copy.
//!
//! *Safety*: no token is wrong, lost or doubled.
//!
//! *Liveness*: each loaded instance is ready. Each answer requested in time is complete, unless all
//! nodes that had it were lost.
//!
//! Events here use their own random numbers, so that they do not change the rest of a run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use paceline_base::Rank;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::reach::BrokenPairs;
use paceline_cluster::workers::Event as CrewEvent;
use paceline_engine::{
    Finish, GenerationRequest, Reply, RequestFailure, RequestMessage, Submission, Ticket,
};
use paceline_fleet::{InstanceId, InstanceSpec, OwnedInstance, Report, State, WorkerStatus, specs};
use paceline_node::supervisor::{
    Action, Event, HELD_LIMIT, Health, Notice, Policy, SplitCandidate, Supervisor,
};
use paceline_process::Ending;
use paceline_worker::RankTraffic;
use paceline_worker::messages::{FromWorker, RankFacts};

use crate::scenario::{Scenario, SimRandom};
use crate::world::{SimNode, SimRun};

/// Silence after which a connection between two nodes is cut, as in `cluster::workers`.
const SILENCE: Duration = Duration::from_millis(1500);

/// Heartbeat interval of owners and workers.
const BEAT: Duration = Duration::from_millis(250);

/// Interval at which an ingress checks its requests.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Delay of a worker's message to its owner: constant, so that none overtakes another.
const WORD: Duration = Duration::from_millis(1);

/// Time between two tokens of an answer.
const TOKEN_EVERY: Duration = Duration::from_millis(30);

/// Time after which an owner that returned a request and answers others is not shutting down, as in
/// the ingress of `fleet`.
const SETTLED_AFTER: Duration = Duration::from_secs(1);
const AGAIN_MAX: u8 = 3;

/// Longest wait for a second node's copy of a token before the client gets it anyway.
const COPY_LIMIT: Duration = Duration::from_secs(2);

/// An answer requested in the last seconds of a run need not be complete. The limit covers a
/// recovery, a load from a slow disk, and the answer itself.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// A planned event.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ServingEvent {
    /// A client sends a request.
    Ask,
    /// A worker is killed; its node lives.
    Kill,
    /// A rank may not join: its node and another rank's cannot speak.
    Apart(u64, Rank, u64),
    /// The owner of that life detects a dead process.
    Exit(u64, Rank, u64),
    /// Owner and workers check each other's heartbeats.
    Beat(u64),
    /// The supervisor's tick is due.
    Tick(u64),
    /// A worker's message arrives.
    Say(u64, Rank, u64, FromWorker),
    /// A worker has loaded its weights, in that epoch.
    Loaded(u64, Rank, u64, u64),
    /// A leader has the next token.
    Token(u64, Rank, u64, Ticket),
    /// An ingress checks a request.
    Look(usize),
    /// Replies of an owner arrive.
    Drain(usize),
    /// A client has received this number of tokens in total, and perhaps the end.
    Told(usize, u64, usize, bool),
}

/// Events with their delays.
pub(crate) type Later = Vec<(Duration, ServingEvent)>;

/// The nodes and the state of the network, at one time.
pub(crate) struct NetworkView<'a> {
    pub(crate) nodes: &'a [SimNode],
    pub(crate) split: u64,
    pub(crate) deaf: &'a BTreeSet<(usize, usize)>,
    pub(crate) now: Duration,
}

impl NetworkView<'_> {
    fn lives(&self, node: usize) -> bool {
        self.nodes[node].member.is_some()
    }

    /// The record of an instance in a node's map.
    fn record(&self, node: usize, id: InstanceId) -> Option<InstanceSpec> {
        let member = self.nodes[node].member.as_ref()?;
        let mut all = specs(member.map());
        all.find(|(other, ..)| *other == id)
            .map(|(.., wanted)| wanted)
    }

    fn passes(&self, from: usize, to: usize) -> bool {
        let side = |node: usize| self.split.unbounded_shr(node as u32) & 1;
        side(from) == side(to) && !self.deaf.contains(&(from, to))
    }

    /// The `nodes` on which an instance of `own` may run ranks: they live and all speak to each
    /// other. Nodes measure that by the time at which ranks join.
    fn speaking(&self, own: usize, nodes: &[usize]) -> Vec<usize> {
        let reached = nodes.iter().filter(|node| self.reach(own, **node));
        let all: Vec<usize> = std::iter::once(own).chain(reached.copied()).collect();
        let each: BTreeSet<usize> = all.iter().copied().collect();
        let pairs = each
            .iter()
            .flat_map(|a| each.range(..a).map(move |b| (*a, *b)));
        let broken = pairs.filter(|(a, b)| !self.reach(*a, *b));
        let broken: BrokenPairs = broken
            .map(|(a, b)| (self.nodes[a].id, self.nodes[b].id))
            .collect();
        let ids: Vec<NodeId> = all.iter().map(|node| self.nodes[*node].id).collect();
        let group = broken.group(&ids).into_iter();
        group.map(|id| usize::from(id.0[15])).collect()
    }

    /// Whether a connection between two nodes works: it needs both directions.
    fn reach(&self, one: usize, two: usize) -> bool {
        let both = self.lives(one) && self.lives(two);
        both && (one == two || (self.passes(one, two) && self.passes(two, one)))
    }
}

/// An order of a supervisor that waits for the connection to its worker.
#[derive(Clone, Debug)]
enum PendingOrder {
    Assign(u64),
    Join,
    Leave,
    Submit(Ticket, usize, usize),
    Cancel(Ticket),
}

/// The worker of a rank.
#[derive(Debug, Default)]
struct SimWorker {
    at: usize,
    process: u64,
    alive: bool,
    /// Its node crashed, so that no exit is reported.
    lost: bool,
    epoch: Option<u64>,
    ready: bool,
    /// It has packed its weights.
    packed: bool,
    /// Requests, with their tokens so far.
    answers: BTreeMap<Ticket, (usize, usize)>,
    /// Since when it waits for another rank.
    stalled: Option<Duration>,
    /// Since when owner and worker receive no heartbeats of each other.
    silent: Option<Duration>,
    orders: VecDeque<PendingOrder>,
    held: VecDeque<FromWorker>,
}

/// An instance on the node that owns it, by one record.
///
/// As in `node::fleet`, the previous record's instance answers until that of the next record does:
/// on the same node, and on a draining node.
#[derive(Debug)]
struct SimOwner {
    node: usize,
    id: InstanceId,
    epoch: u64,
    /// Whether it was started before, by an earlier record or process of its node, and no other
    /// instance answers. A failure while it loads must not end it.
    goes_on: bool,
    nodes: Vec<usize>,
    supervisor: Supervisor,
    begun: Duration,
    tick: Option<Duration>,
    seats: Vec<SimWorker>,
    /// The requests by their tickets here.
    tickets: BTreeMap<Ticket, usize>,
    was_ready: bool,
}

/// The connection of an ingress to an owner.
#[derive(Debug)]
struct SimConnection {
    life: u64,
    ticket: Ticket,
    replies: VecDeque<Reply>,
    cut: Option<Duration>,
}

/// The node that took a request.
#[derive(Debug)]
struct SimIngress {
    node: usize,
    tokens: usize,
    line: Option<SimConnection>,
    /// When the owner returned the request, and whether it refused it.
    given_back: Option<(Duration, bool)>,
    again: u8,
    /// The owner has sent the end.
    ended: bool,
}

/// A client's request.
#[derive(Debug)]
struct SimRequest {
    id: InstanceId,
    /// Of its last submission.
    ticket: Ticket,
    length: usize,
    since: Duration,
    /// `None` while the client looks for a node.
    entry: Option<SimIngress>,
    /// Counts ingress nodes: messages of an earlier one do not arrive.
    entries: u64,
    /// Tokens that the client has.
    have: usize,
    /// Tokens that other nodes have copies of.
    copies: BTreeMap<usize, usize>,
    outcome: Option<RequestResult>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestResult {
    Whole,
    /// The instance was unloaded.
    Unloaded,
    /// All nodes that had it were lost.
    Gone,
    Lost,
}

/// All instances and clients of a run.
#[derive(Debug)]
pub(crate) struct Serving {
    random: SimRandom,
    owners: BTreeMap<u64, SimOwner>,
    last_life: u64,
    /// Records whose instance was ready once: a node without any of them answers no client.
    answered: BTreeSet<(InstanceId, u64)>,
    /// Records that a node has started, by its reports in the shared map, without those that failed
    /// to load.
    begun: BTreeSet<(usize, InstanceId, u64)>,
    asked: Vec<SimRequest>,
    /// Time of each node to read a model.
    disks: Vec<Duration>,
    pub(crate) violations: Vec<String>,
    /// Complete answers.
    pub(crate) whole: u64,
    /// How often a client resumed at another node, or an ingress at another owner.
    pub(crate) resumed: u64,
}

/// Token `i` of the answer to a request.
fn token(asked: usize, i: usize) -> u32 {
    asked as u32 * 1000 + i as u32
}

impl Serving {
    /// The serving state of this scenario, and its first events.
    pub(crate) fn new(scenario: &Scenario) -> (Self, Later) {
        let mut random = SimRandom::new(scenario.seed ^ 0xa45_e4ed);
        let disk = |_| Duration::from_millis([50, 300, 2500][random.below(3) as usize]);
        let disks = (0..scenario.nodes).map(disk).collect();
        let length = scenario.length.as_millis() as u64;
        let mut later = Later::new();
        for _ in 0..1 + random.below(5) {
            let at = Duration::from_millis(5000 + random.below(length * 2 / 3));
            later.push((at, ServingEvent::Ask));
        }
        for _ in 0..random.below(4) {
            let at = Duration::from_millis(5000 + random.below(length / 2));
            later.push((at, ServingEvent::Kill));
        }
        let serving = Self {
            random,
            owners: BTreeMap::new(),
            last_life: 0,
            answered: BTreeSet::new(),
            begun: BTreeSet::new(),
            asked: Vec::new(),
            disks,
            violations: Vec::new(),
            whole: 0,
            resumed: 0,
        };
        (serving, later)
    }

    fn way(&mut self) -> Duration {
        Duration::from_micros(100 + self.random.below(2000))
    }

    pub(crate) fn play(&mut self, due: ServingEvent, net: &NetworkView<'_>, later: &mut Later) {
        match due {
            ServingEvent::Ask => self.ask(net, later),
            ServingEvent::Kill => self.kill(net, later),
            ServingEvent::Exit(life, rank, process) => self.exit(life, rank, process, net, later),
            ServingEvent::Apart(life, rank, process) => {
                if self.seat(life, rank, process).is_some() {
                    let reason = "no path to another rank answers".to_owned();
                    self.step(life, Event::Unreachable { rank, reason }, net, later);
                }
            }
            ServingEvent::Beat(life) => self.beat(life, net, later),
            ServingEvent::Tick(life) => {
                if let Some(owner) = self.owners.get_mut(&life) {
                    owner.tick = None;
                    self.step(life, Event::Tick, net, later);
                }
            }
            ServingEvent::Say(life, rank, process, message) => {
                let Some(seat) = self.seat(life, rank, process) else {
                    return;
                };
                seat.held.push_back(message);
                self.hear(life, rank, net, later);
            }
            ServingEvent::Loaded(life, rank, process, epoch) => {
                self.loaded((life, rank, process), epoch, net, later);
            }
            ServingEvent::Token(life, rank, process, ticket) => {
                self.token((life, rank, process), ticket, net, later);
            }
            ServingEvent::Look(number) => self.look(number, net, later),
            ServingEvent::Drain(number) => self.drain(number, net, later),
            ServingEvent::Told(number, entry, count, ends) => {
                self.told(number, entry, (count, ends))
            }
        }
    }

    /// Sets a node's instances. An owner by an earlier record is kept until its successor answers:
    /// see [`bridges`](Self::bridges).
    pub(crate) fn owns(
        &mut self,
        node: usize,
        runs: &BTreeMap<InstanceId, SimRun>,
        net: &NetworkView<'_>,
        later: &mut Later,
    ) {
        let leaves = net.nodes[node].leaves;
        self.owners.retain(|_, owner| {
            let epoch = runs.get(&owner.id).map(|run| run.epoch);
            let is_current = epoch == Some(owner.epoch);
            let is_former = owner.was_ready && (leaves || epoch.is_some());
            owner.node != node || is_current || is_former
        });
        for (id, run) in runs {
            let is_it =
                |owner: &SimOwner| (owner.node, owner.id, owner.epoch) == (node, *id, run.epoch);
            if !self.owners.values().any(is_it) {
                self.begin(node, (*id, run), net, later);
            }
        }
    }

    /// The report of an instance's owner, as far as the rules use it.
    pub(crate) fn report(&self, id: InstanceId, epoch: u64, owner: usize) -> Option<Report> {
        let state = match self.answered.contains(&(id, epoch)) {
            true => State::Ready,
            false => self
                .begun
                .get(&(owner, id, epoch))
                .map(|_| State::Loading)?,
        };
        Some(Report {
            epoch,
            state,
            progress: None,
            reason: None,
            computing: Vec::new(),
            context: None,
            numbers: None,
            wires: None,
            split: None,
        })
    }

    /// An instance as its node observes it.
    pub(crate) fn observed(
        &self,
        node: usize,
        id: InstanceId,
        run: &SimRun,
        nodes: &[SimNode],
    ) -> OwnedInstance {
        let own = || {
            self.owners
                .iter()
                .filter(|(_, it)| (it.node, it.id) == (node, id))
        };
        let current = own().find(|(_, it)| it.epoch == run.epoch);
        let at = |seat: &SimWorker| seat.alive.then(|| nodes[seat.at].id);
        let open = |life: u64| {
            let lines = self
                .asked
                .iter()
                .filter_map(|it| it.entry.as_ref()?.line.as_ref());
            lines.filter(|line| line.life == life).count()
        };
        let status = current
            .filter(|(_, it)| it.was_ready)
            .map(|(life, it)| WorkerStatus {
                is_ready: it.supervisor.health() == Health::Ready,
                open: open(*life),
            });
        OwnedInstance {
            epoch: run.epoch,
            spec: run.spec.clone(),
            answers: status.is_some(),
            status,
            serves: own().any(|(_, it)| it.was_ready),
            ranks: current.map_or_else(Vec::new, |(_, it)| it.seats.iter().map(at).collect()),
            excluded: Vec::new(),
            is_cramped: false,
            is_slower: false,
        }
    }

    fn begin(
        &mut self,
        node: usize,
        (id, run): (InstanceId, &SimRun),
        net: &NetworkView<'_>,
        later: &mut Later,
    ) {
        let epoch = run.epoch;
        let nodes = run.spec.nodes.iter();
        let nodes: Vec<usize> = nodes.map(|id| usize::from(id.0[15])).collect();
        let way = SplitCandidate {
            name: "tensor".to_owned(),
            leader: Rank(0),
            tok_s: 1.0,
            key_s: 0.0,
            change: None,
        };
        self.begun.insert((node, id, epoch));
        let is_former = |owner: &SimOwner| (owner.node, owner.id) == (node, id);
        let goes_on = run.resumes && !self.owners.values().any(is_former);
        let policy = Policy {
            restart: true,
            resume: true,
            near: false,
            reads_near: false,
            held_max: 64,
            held_limit: HELD_LIMIT,
            holds: true,
            goes_on,
        };
        let ranks = nodes.len() as u32;
        let supervisor = Supervisor::new(vec![way], 0, ranks, policy).expect("a finite speed");
        self.last_life += 1;
        let life = self.last_life;
        let owner = SimOwner {
            node,
            id,
            epoch,
            goes_on,
            seats: nodes.iter().map(|_| SimWorker::default()).collect(),
            nodes,
            supervisor,
            begun: net.now,
            tick: None,
            tickets: BTreeMap::new(),
            was_ready: false,
        };
        self.owners.insert(life, owner);
        later.push((BEAT, ServingEvent::Beat(life)));
        self.step(life, Event::Begin, net, later);
    }

    /// A node's process ends without notice. All its owners, workers, requests and copies are lost.
    pub(crate) fn crash(&mut self, node: usize) {
        self.owners.retain(|_, owner| owner.node != node);
        for owner in self.owners.values_mut() {
            for seat in owner.seats.iter_mut().filter(|seat| seat.at == node) {
                seat.lost |= seat.alive;
                seat.alive = false;
            }
        }
        for asked in &mut self.asked {
            asked.copies.remove(&node);
            if asked.entry.as_ref().is_some_and(|entry| entry.node == node) {
                asked.entry = None;
                asked.entries += 1;
            }
        }
    }

    /// Passes an event to a supervisor and executes its actions.
    fn step(&mut self, life: u64, event: Event, net: &NetworkView<'_>, later: &mut Later) {
        let Some(owner) = self.owners.get_mut(&life) else {
            return;
        };
        let now = net.now - owner.begun;
        let actions = owner.supervisor.step(now, event);
        let due = owner.supervisor.due();
        if due.is_some() && due != owner.tick {
            owner.tick = due;
            let wait = due.unwrap_or_default().saturating_sub(now);
            later.push((wait, ServingEvent::Tick(life)));
        }
        for action in actions {
            self.act(life, action, net, later);
        }
    }

    fn act(&mut self, life: u64, action: Action, net: &NetworkView<'_>, later: &mut Later) {
        let Some(owner) = self.owners.get_mut(&life) else {
            return;
        };
        let order = match action {
            Action::Start(rank) => return owner.start(rank, net),
            Action::Stop(rank) => return owner.stop(rank),
            Action::Deliver(ticket, reply) => {
                let number = owner.tickets.get(&ticket).copied();
                return self.deliver((life, ticket), number, reply, later);
            }
            Action::Tell(Notice::Ready { .. }) => {
                owner.was_ready = true;
                return self.follow(life);
            }
            Action::Tell(Notice::Failed { again_in: None, .. }) => {
                self.begun.remove(&(owner.node, owner.id, owner.epoch));
                return;
            }
            Action::Assign { rank, epoch, .. } => (rank, PendingOrder::Assign(epoch)),
            Action::Join { rank, .. } => {
                let apart = owner.apart(net);
                if apart.contains(&rank) {
                    let process = owner.seats[rank.0 as usize].process;
                    later.push((Duration::ZERO, ServingEvent::Apart(life, rank, process)));
                }
                if !apart.is_empty() {
                    return;
                }
                (rank, PendingOrder::Join)
            }
            Action::Leave(rank) => (rank, PendingOrder::Leave),
            Action::Request { rank, message } => match message {
                RequestMessage::Submit(it) => {
                    let number = it.request.prompt[0] as usize;
                    let expected = (0..it.tokens.len()).map(|i| token(number, i));
                    if !it.tokens.iter().copied().eq(expected) {
                        let said = format!(
                            "answer {number} goes on after other tokens: {:?}",
                            it.tokens
                        );
                        self.violations.push(said);
                        return;
                    }
                    let count = it.tokens.len();
                    (rank, PendingOrder::Submit(it.ticket, number, count))
                }
                RequestMessage::Cancel(ticket) => (rank, PendingOrder::Cancel(ticket)),
            },
            Action::Forget(_)
            | Action::ShrinkSteps
            | Action::Tell(_)
            | Action::Learn { .. }
            | Action::Loaded { .. }
            | Action::End => return,
        };
        owner.seats[order.0.0 as usize].orders.push_back(order.1);
        self.obey(life, order.0, net, later);
    }

    /// An instance is ready: its earlier owner on its node ends.
    fn follow(&mut self, life: u64) {
        let Some(owner) = self.owners.get(&life) else {
            return;
        };
        let (node, id, epoch) = (owner.node, owner.id, owner.epoch);
        self.answered.insert((id, epoch));
        let is_former = |it: &SimOwner| (it.node, it.id) == (node, id) && it.epoch < epoch;
        self.owners.retain(|_, it| !is_former(it));
    }

    /// Whether an owner without a duty is kept: its node drains, and the next owner does not answer
    /// yet.
    fn bridges(&self, owner: &SimOwner, net: &NetworkView<'_>) -> bool {
        let is_next = |it: &SimOwner| it.id == owner.id && it.epoch > owner.epoch && it.was_ready;
        let node = &net.nodes[owner.node];
        let is_wanted = net.record(owner.node, owner.id).is_some();
        node.leaves && is_wanted && !self.owners.values().any(is_next)
    }

    fn seat(&mut self, life: u64, rank: Rank, process: u64) -> Option<&mut SimWorker> {
        let owner = self.owners.get_mut(&life)?;
        let seat = owner.seats.get_mut(rank.0 as usize)?;
        (seat.process == process).then_some(seat)
    }

    /// Whether the owner and a rank's live worker reach each other.
    fn hears(&self, life: u64, rank: Rank, net: &NetworkView<'_>) -> bool {
        let Some(owner) = self.owners.get(&life) else {
            return false;
        };
        let seat = &owner.seats[rank.0 as usize];
        seat.alive && net.reach(owner.node, seat.at)
    }

    /// A worker executes its pending orders, if its connection works.
    fn obey(&mut self, life: u64, rank: Rank, net: &NetworkView<'_>, later: &mut Later) {
        while self.hears(life, rank, net) {
            let Some(owner) = self.owners.get_mut(&life) else {
                return;
            };
            let seat = &mut owner.seats[rank.0 as usize];
            let Some(order) = seat.orders.pop_front() else {
                return;
            };
            let process = seat.process;
            match order {
                PendingOrder::Assign(epoch) => {
                    (seat.epoch, seat.ready, seat.stalled) = (Some(epoch), false, None);
                    seat.answers.clear();
                    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
                    self.say(life, rank, FromWorker::Listening { addr }, later);
                }
                PendingOrder::Join => {
                    let Some(epoch) = seat.epoch else { continue };
                    let load = match seat.packed {
                        true => Duration::from_millis(10),
                        false => self.disks[seat.at],
                    };
                    later.push((load, ServingEvent::Loaded(life, rank, process, epoch)));
                }
                PendingOrder::Leave => {
                    let Some(epoch) = seat.epoch.take() else {
                        continue;
                    };
                    seat.ready = false;
                    seat.answers.clear();
                    let moved = RankTraffic::default();
                    self.say(life, rank, FromWorker::Left { epoch, moved }, later);
                }
                PendingOrder::Submit(ticket, number, tokens) if seat.ready => {
                    seat.answers.insert(ticket, (number, tokens));
                    later.push((
                        TOKEN_EVERY,
                        ServingEvent::Token(life, rank, process, ticket),
                    ));
                }
                PendingOrder::Submit(..) => {} // it has failed meanwhile, as its owner will learn
                PendingOrder::Cancel(ticket) => drop(seat.answers.remove(&ticket)),
            }
        }
    }

    /// A worker sends a message, which arrives after those before it.
    fn say(&self, life: u64, rank: Rank, message: FromWorker, later: &mut Later) {
        if let Some(owner) = self.owners.get(&life) {
            let process = owner.seats[rank.0 as usize].process;
            later.push((WORD, ServingEvent::Say(life, rank, process, message)));
        }
    }

    /// An owner receives what has arrived from a worker, if their connection works.
    fn hear(&mut self, life: u64, rank: Rank, net: &NetworkView<'_>, later: &mut Later) {
        loop {
            let Some(owner) = self.owners.get_mut(&life) else {
                return;
            };
            let node = owner.node;
            let seat = &mut owner.seats[rank.0 as usize];
            if !net.reach(node, seat.at) {
                return;
            }
            let Some(message) = seat.held.pop_front() else {
                return;
            };
            let event = Event::Worker(CrewEvent::Message { rank, message });
            self.step(life, event, net, later);
        }
    }

    fn loaded(
        &mut self,
        (life, rank, process): (u64, Rank, u64),
        epoch: u64,
        net: &NetworkView<'_>,
        later: &mut Later,
    ) {
        let bad = self.absent_mate(life, rank, net);
        let Some(seat) = self.seat(life, rank, process) else {
            return;
        };
        if !seat.alive || seat.epoch != Some(epoch) {
            return;
        }
        seat.packed = true;
        if let Some(bad) = bad {
            return self.fail(life, rank, (epoch, bad), later);
        }
        seat.ready = true;
        let facts = RankFacts {
            pid: 1,
            weight_bytes: 1,
            packings: 1,
            threads: 1,
            instruction_set: "simulated".to_owned(),
            wires: Vec::new(),
        };
        self.say(life, rank, FromWorker::Ready(facts), later);
    }

    /// The first rank that another one does not reach.
    fn absent_mate(&self, life: u64, rank: Rank, net: &NetworkView<'_>) -> Option<u32> {
        let owner = self.owners.get(&life)?;
        let at = owner.seats[rank.0 as usize].at;
        let mates = (0..).zip(&owner.seats);
        let mut absent = mates.filter(|(_, mate)| !mate.alive || !net.reach(at, mate.at));
        absent.next().map(|(other, _)| other)
    }

    /// A rank fails its epoch because of another one.
    fn fail(&self, life: u64, rank: Rank, (epoch, blamed): (u64, u32), later: &mut Later) {
        let reason = format!("rank {blamed} is silent");
        let blamed = Some(blamed);
        let failed = FromWorker::Failed {
            epoch,
            reason,
            blamed,
            interrupted: false,
        };
        self.say(life, rank, failed, later);
    }

    /// The next token of an answer, or its end.
    fn token(
        &mut self,
        (life, rank, process): (u64, Rank, u64),
        ticket: Ticket,
        net: &NetworkView<'_>,
        later: &mut Later,
    ) {
        let bad = self.absent_mate(life, rank, net);
        let lengths: Vec<usize> = self.asked.iter().map(|asked| asked.length).collect();
        let Some(seat) = self.seat(life, rank, process) else {
            return;
        };
        let Some((number, count)) = seat.answers.get_mut(&ticket) else {
            return;
        };
        let Some(epoch) = seat.epoch.filter(|_| seat.alive && seat.ready) else {
            return;
        };
        if let Some(bad) = bad {
            let since = *seat.stalled.get_or_insert(net.now);
            if net.now - since < SILENCE {
                later.push((
                    TOKEN_EVERY * 3,
                    ServingEvent::Token(life, rank, process, ticket),
                ));
                return;
            }
            seat.ready = false;
            seat.answers.clear();
            return self.fail(life, rank, (epoch, bad), later);
        }
        seat.stalled = None;
        let reply = match *count < lengths[*number] {
            true => Reply::Token {
                token: token(*number, *count),
                text: String::new(),
                logprobs: None,
            },
            false => Reply::Finished {
                text: String::new(),
                reason: Finish::Length,
                drafts: paceline_engine::DraftCounts::default(),
            },
        };
        *count += 1;
        match reply {
            Reply::Finished { .. } => drop(seat.answers.remove(&ticket)),
            _ => later.push((
                TOKEN_EVERY,
                ServingEvent::Token(life, rank, process, ticket),
            )),
        }
        let word = FromWorker::Reply {
            ticket,
            at_us: Some(net.now.as_micros() as u64),
            reply,
        };
        self.say(life, rank, word, later);
    }

    fn kill(&mut self, net: &NetworkView<'_>, later: &mut Later) {
        let alive = |owner: &SimOwner| {
            let seats = (0..).map(Rank).zip(&owner.seats);
            let alive = seats.filter(|(_, seat)| seat.alive && net.reach(owner.node, seat.at));
            alive.map(|(rank, _)| rank).collect::<Vec<Rank>>()
        };
        let all = self.owners.iter();
        let all =
            all.flat_map(|(life, owner)| alive(owner).into_iter().map(move |rank| (*life, rank)));
        let all: Vec<(u64, Rank)> = all.collect();
        if all.is_empty() {
            return;
        }
        let (life, rank) = all[self.random.below(all.len() as u64) as usize];
        if let Some(owner) = self.owners.get_mut(&life) {
            let seat = &mut owner.seats[rank.0 as usize];
            seat.alive = false;
            let exit = ServingEvent::Exit(life, rank, seat.process);
            later.push((Duration::from_millis(20), exit));
        }
    }

    fn exit(
        &mut self,
        life: u64,
        rank: Rank,
        process: u64,
        net: &NetworkView<'_>,
        later: &mut Later,
    ) {
        let Some(seat) = self.seat(life, rank, process) else {
            return;
        };
        seat.lost = true;
        let at = seat.at;
        let is_told = |owner: &SimOwner| net.reach(owner.node, at);
        if !self.owners.get(&life).is_some_and(is_told) {
            return; // the next heartbeat reports it
        }
        if let Some(seat) = self.seat(life, rank, process) {
            seat.lost = false;
        }
        let exited = CrewEvent::Exited {
            rank,
            ending: Ending::Signal(9),
            tail: Vec::new(),
        };
        self.step(life, Event::Worker(exited), net, later);
    }

    /// An owner and its workers check each other's heartbeats.
    fn beat(&mut self, life: u64, net: &NetworkView<'_>, later: &mut Later) {
        let Some(owner) = self.owners.get(&life) else {
            return;
        };
        let has_duty = net.nodes[owner.node].runs.contains_key(&owner.id);
        if !has_duty && !self.bridges(owner, net) {
            self.owners.remove(&life);
            return;
        }
        later.push((BEAT, ServingEvent::Beat(life)));
        for rank in (0..owner.seats.len() as u32).map(Rank) {
            if self.has_lost(life, rank, net) {
                let reason = "its machine is out of reach".to_owned();
                let gone = Event::Worker(CrewEvent::Gone { rank, reason });
                self.step(life, gone, net, later);
            } else {
                self.hear(life, rank, net, later);
                self.obey(life, rank, net, later);
            }
        }
    }

    /// Whether a rank's worker is declared lost now; its machine ends it at the same time.
    fn has_lost(&mut self, life: u64, rank: Rank, net: &NetworkView<'_>) -> bool {
        let hears = self.hears(life, rank, net);
        let Some(owner) = self.owners.get_mut(&life) else {
            return false;
        };
        let node = owner.node;
        let seat = &mut owner.seats[rank.0 as usize];
        if seat.lost && net.reach(node, seat.at) {
            seat.lost = false;
            return true;
        }
        if hears || !(seat.alive || seat.lost) {
            seat.silent = None;
            return false;
        }
        let since = *seat.silent.get_or_insert(net.now);
        let is_over = net.now - since >= SILENCE;
        if is_over {
            (seat.alive, seat.lost, seat.silent) = (false, false, None);
        }
        is_over
    }

    /// A client sends a request to a live node for an instance in the node's map that was ready
    /// once. Before that no node answers for its model.
    fn ask(&mut self, net: &NetworkView<'_>, later: &mut Later) {
        let alive: Vec<usize> = (0..net.nodes.len())
            .filter(|node| net.lives(*node))
            .collect();
        let node = alive.get(self.random.below(alive.len().max(1) as u64) as usize);
        let known = node.and_then(|node| {
            let member = net.nodes[*node].member.as_ref()?;
            let answered = |id, epoch| self.answered.range((id, 0)..=(id, epoch)).next();
            let mut all = specs(member.map());
            all.find_map(|(id, epoch, _)| answered(id, epoch).map(|_| id))
        });
        let (Some(node), Some(id)) = (node, known) else {
            later.push((Duration::from_secs(2), ServingEvent::Ask));
            return;
        };
        let number = self.asked.len();
        let length = [0, 5, 40, 90][self.random.below(4) as usize];
        self.asked.push(SimRequest {
            id,
            ticket: Ticket((number as u64) << 8),
            length,
            since: net.now,
            entry: Some(SimIngress::new(*node, 0)),
            entries: 0,
            have: 0,
            copies: BTreeMap::new(),
            outcome: None,
        });
        self.look(number, net, later);
    }

    /// Delivers an owner's reply to the ingress of the request, if it still has it.
    fn deliver(
        &mut self,
        (life, ticket): (u64, Ticket),
        number: Option<usize>,
        reply: Reply,
        later: &mut Later,
    ) {
        let way = self.way();
        let Some(number) = number else { return };
        let entry = self.asked[number].entry.as_mut();
        let line = entry.and_then(|entry| entry.line.as_mut());
        if let Some(line) = line.filter(|line| (line.life, line.ticket) == (life, ticket)) {
            line.replies.push_back(reply);
            later.push((way, ServingEvent::Drain(number)));
        }
    }

    /// An ingress receives what its owner has sent.
    fn drain(&mut self, number: usize, net: &NetworkView<'_>, later: &mut Later) {
        loop {
            let asked = &mut self.asked[number];
            let Some(entry) = &mut asked.entry else {
                return;
            };
            let Some(line) = &mut entry.line else { return };
            let owner = self.owners.get(&line.life);
            if !owner.is_some_and(|owner| net.reach(entry.node, owner.node)) {
                return;
            }
            let Some(reply) = line.replies.pop_front() else {
                return;
            };
            match reply {
                Reply::PromptRead { .. } | Reply::Continued => {}
                Reply::Token { token: got, .. } => {
                    if got != token(number, entry.tokens) {
                        let said = format!("answer {number} gets {got} after {}", entry.tokens);
                        self.violations.push(said);
                    }
                    entry.tokens += 1;
                    entry.again = 0;
                    self.copy(number, false, net, later);
                }
                Reply::Finished { .. } => {
                    if entry.tokens != asked.length {
                        let said = format!("answer {number} ends after {}", entry.tokens);
                        self.violations.push(said);
                    }
                    (entry.line, entry.ended) = (None, true);
                    self.copy(number, true, net, later);
                }
                Reply::Failed(RequestFailure::Lost { .. }) => {
                    entry.given_back = Some((net.now, false));
                }
                Reply::Failed(RequestFailure::Unavailable { .. }) => {
                    entry.given_back = Some((net.now, true));
                }
                Reply::Failed(failure) => {
                    let said = format!("answer {number} is refused: {failure}");
                    self.violations.push(said);
                    asked.outcome = Some(RequestResult::Lost);
                    return;
                }
            }
        }
    }

    /// Another node gets a copy of an ingress's tokens, then the client gets them.
    fn copy(&mut self, number: usize, ends: bool, net: &NetworkView<'_>, later: &mut Later) {
        let way = self.way();
        let asked = &mut self.asked[number];
        let Some(entry) = &asked.entry else { return };
        let mut others = (0..net.nodes.len()).filter(|node| *node != entry.node);
        let keeper = others.find(|node| net.reach(entry.node, *node));
        let wait = match keeper {
            Some(keeper) => {
                asked.copies.insert(keeper, entry.tokens);
                way * 2
            }
            None => COPY_LIMIT,
        };
        later.push((
            wait,
            ServingEvent::Told(number, asked.entries, entry.tokens, ends),
        ));
    }

    /// A client receives tokens from its ingress.
    fn told(&mut self, number: usize, entry: u64, (count, ends): (usize, bool)) {
        let asked = &mut self.asked[number];
        if asked.entries != entry || asked.outcome.is_some() {
            return;
        }
        // A copy that took 2 s may arrive after a later, faster one.
        asked.have = asked.have.max(count);
        if ends {
            asked.outcome = Some(RequestResult::Whole);
            self.whole += 1;
            if asked.have != asked.length {
                let said = format!("a client has {} tokens of answer {number}", asked.have);
                self.violations.push(said);
            }
        }
    }

    /// An ingress, or a client without one, checks a request.
    fn look(&mut self, number: usize, net: &NetworkView<'_>, later: &mut Later) {
        if self.asked[number].outcome.is_some() {
            return;
        }
        later.push((LOOK_EVERY, ServingEvent::Look(number)));
        if self.asked[number].entry.is_none() {
            return self.come_back(number, net, later);
        }
        self.drain(number, net, later);
        self.check_line(number, net, later);
        let asked = &self.asked[number];
        let entry = asked.entry.as_ref();
        let waits = entry.is_some_and(|entry| entry.line.is_none() && !entry.ended);
        if waits && asked.outcome.is_none() {
            self.connect(number, net, later);
        }
    }

    /// A client that lost its ingress resumes at a node that finds a copy of its tokens.
    fn come_back(&mut self, number: usize, net: &NetworkView<'_>, later: &mut Later) {
        let node = self.random.below(net.nodes.len() as u64) as usize;
        let way = self.way();
        let asked = &mut self.asked[number];
        // A node that has just started may not have the record yet, and refuses.
        if !net.lives(node) || net.record(node, asked.id).is_none() {
            return;
        }
        let has = asked.copies.values().copied().max();
        if has.is_none_or(|has| has < asked.have) && asked.have > 0 {
            asked.outcome = Some(RequestResult::Gone); // all that had it were lost
            return;
        }
        let found = asked.copies.iter().filter(|(at, _)| net.reach(node, **at));
        let found = found.map(|(_, count)| *count).max();
        let count = match found {
            Some(count) if count >= asked.have => count,
            None if asked.have == 0 => 0, // it sends a new request
            _ => return,
        };
        asked.entry = Some(SimIngress::new(node, count));
        self.resumed += 1;
        later.push((way, ServingEvent::Told(number, asked.entries, count, false)));
    }

    /// Closes a connection that is cut or whose owner is lost, and settles returned requests.
    fn check_line(&mut self, number: usize, net: &NetworkView<'_>, later: &mut Later) {
        let Some(entry) = &mut self.asked[number].entry else {
            return;
        };
        let Some(line) = &mut entry.line else { return };
        let (life, ticket) = (line.life, line.ticket);
        let Some(owner) = self.owners.get(&life) else {
            (entry.line, entry.given_back) = (None, None);
            return;
        };
        if net.reach(entry.node, owner.node) {
            line.cut = None;
        } else if net.now - *line.cut.get_or_insert(net.now) >= SILENCE {
            (entry.line, entry.given_back) = (None, None);
            let cancel = RequestMessage::Cancel(ticket);
            self.step(life, Event::Request(cancel), net, later);
            return;
        }
        let Some((at, refused)) = entry.given_back else {
            return;
        };
        if owner.supervisor.health() != Health::Ready || net.now - at < SETTLED_AFTER {
            return;
        }
        if refused && entry.again < AGAIN_MAX {
            (entry.line, entry.given_back) = (None, None);
            entry.again += 1;
            return;
        }
        self.asked[number].outcome = Some(RequestResult::Lost);
    }

    /// Connects to the owner of the instance, by the map of the ingress.
    fn connect(&mut self, number: usize, net: &NetworkView<'_>, later: &mut Later) {
        let asked = &mut self.asked[number];
        let Some(entry) = &mut asked.entry else {
            return;
        };
        let Some(member) = &net.nodes[entry.node].member else {
            return;
        };
        let Some(wanted) = net.record(entry.node, asked.id) else {
            asked.outcome = Some(RequestResult::Unloaded);
            return;
        };
        let id = wanted.nodes[0];
        let node = usize::from(id.0[15]);
        let lives = matches!(member.life(id), Life::Alive | Life::Suspect);
        if !lives || !net.reach(entry.node, node) {
            return;
        }
        let is_it =
            |owner: &SimOwner| owner.node == node && owner.id == asked.id && owner.was_ready;
        let found = self.owners.iter_mut().find(|(_, owner)| is_it(owner));
        let Some((life, owner)) = found else { return };
        asked.ticket = asked.ticket.again();
        let (life, ticket) = (*life, asked.ticket);
        owner.tickets.insert(ticket, number);
        let tokens: Vec<u32> = (0..entry.tokens).map(|i| token(number, i)).collect();
        self.resumed += u64::from(!tokens.is_empty());
        entry.line = Some(SimConnection {
            life,
            ticket,
            replies: VecDeque::new(),
            cut: None,
        });
        let request = Box::new(GenerationRequest {
            prompt: vec![number as u32],
            max_tokens: asked.length,
            ..GenerationRequest::default()
        });
        let submission = Submission {
            ticket,
            request,
            tokens,
        };
        let submit = Event::Request(RequestMessage::Submit(submission));
        self.step(life, submit, net, later);
    }

    /// Checks the final state. `wanted`: the instances that must run; `deaf`: broken paths.
    ///
    /// The first load of an instance may fail, with the owner's reason: it is not restarted without
    /// a new request. A request to a node that does not reach the owner waits.
    pub(crate) fn in_the_end(
        &self,
        length: Duration,
        wanted: &BTreeSet<InstanceId>,
        deaf: &BTreeSet<(usize, usize)>,
    ) -> Vec<String> {
        let mut found = self.violations.clone();
        for id in wanted {
            let owners = self.owners.values().filter(|owner| owner.id == *id);
            let told = |owner: &SimOwner| (owner.node, owner.epoch, owner.supervisor.health());
            let told: Vec<_> = owners.map(told).collect();
            let is_refused = |owner: &SimOwner| {
                let is_over = matches!(
                    owner.supervisor.health(),
                    Health::Failed { again: false, .. }
                );
                owner.id == *id && is_over && owner.epoch == 1 && !owner.goes_on
            };
            let is_refused = self.owners.values().any(is_refused);
            if !is_refused && !told.iter().any(|(.., stand)| *stand == Health::Ready) {
                found.push(format!("instance {id} is not ready again: {told:?}"));
            }
        }
        for (number, asked) in self.asked.iter().enumerate() {
            let mut owners = self.owners.values().filter(|owner| owner.id == asked.id);
            let is_cut = asked.entry.as_ref().is_some_and(|entry| {
                let is_deaf = |a: usize, b: usize| deaf.contains(&(a, b)) || deaf.contains(&(b, a));
                owners.any(|owner| is_deaf(entry.node, owner.node))
            });
            let is_due = asked.since + ANSWER_LIMIT <= length && wanted.contains(&asked.id);
            let is_due = is_due && !is_cut;
            let is_whole = matches!(
                asked.outcome,
                Some(RequestResult::Whole | RequestResult::Gone)
            );
            if is_due && !is_whole {
                found.push(format!("answer {number} is not whole: {asked:?}"));
            }
        }
        found
    }
}

impl SimOwner {
    /// Starts a worker on the first reachable node of the record, from the rank's own on. Draining
    /// nodes come last.
    fn start(&mut self, rank: Rank, net: &NetworkView<'_>) {
        let (first, count) = (rank.0 as usize, self.nodes.len());
        let places = (0..count).map(|i| self.nodes[(first + i) % count]);
        let speaking = net.speaking(self.node, &self.nodes);
        let reached = places.filter(|node| speaking.contains(node));
        let at = reached.min_by_key(|node| net.nodes[*node].leaves);
        let at = at.unwrap_or(self.node);
        self.stop(rank);
        let seat = &mut self.seats[first];
        (seat.at, seat.alive) = (at, true);
    }

    /// The ranks whose nodes cannot speak to the others' nodes.
    fn apart(&self, net: &NetworkView<'_>) -> Vec<Rank> {
        let speaking = net.speaking(self.node, &self.nodes);
        let ranks = (0..).map(Rank).zip(&self.seats);
        let apart = ranks.filter(|(_, seat)| !speaking.contains(&seat.at));
        apart.map(|(rank, _)| rank).collect()
    }

    /// Ends a worker; its messages no longer arrive.
    fn stop(&mut self, rank: Rank) {
        let seat = &mut self.seats[rank.0 as usize];
        *seat = SimWorker {
            at: seat.at,
            process: seat.process + 1,
            ..SimWorker::default()
        };
    }
}

impl SimIngress {
    const fn new(node: usize, tokens: usize) -> Self {
        Self {
            node,
            tokens,
            line: None,
            given_back: None,
            again: 0,
            ended: false,
        }
    }
}
