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

mod network_view;
mod requests;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use paceline_base::Rank;
use paceline_engine::{RequestMessage, Ticket};
use paceline_fleet::{InstanceId, OwnedInstance, Report, State, WorkerStatus};
use paceline_node::supervisor::{
    Action, Event, HELD_LIMIT, Health, Notice, Policy, SplitCandidate, Supervisor,
};
use paceline_worker::messages::FromWorker;

use crate::scenario::{Scenario, SimRandom};
use crate::world::{SimNode, SimRun};
pub(crate) use network_view::NetworkView;
use requests::{RequestResult, SimRequest};
use workers::SimWorker;

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

pub(crate) type Later = Vec<(Duration, ServingEvent)>;

/// An order of a supervisor that waits for the connection to its worker.
#[derive(Clone, Debug)]
enum PendingOrder {
    Assign(u64),
    Join,
    Leave,
    Submit(Ticket, usize, usize),
    Cancel(Ticket),
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
