//! The thread of an instance: owns its supervisor, the sinks and the clock, and performs the
//! supervisor's actions.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_cluster::Error as ClusterError;
use paceline_cluster::workers::Event as CrewEvent;
use paceline_engine::{Reply, RequestFailure, RequestMessage, Sink, Submission, Ticket};
use paceline_model::trace::RankTrace;
use paceline_plan::rebalance::ShareMove;
use paceline_plan::split_selection::KEYS;
use paceline_worker::messages::{EpochKey, FromWorker, RankCables, ToWorker};
use tracing::{debug, info, warn};

use super::measures::RankMeasurements;
use super::rebalancing::Follower;
use super::spares::Keeper;
use super::{Command, GRACE, InstanceConfig, InstanceShared, Observer, SpeedObserver, SpeedSample};
use crate::Error;
use crate::supervisor::{Action, Event, Notice, Supervisor};

/// Longest wait for a worker's message; a message or a wake ends it sooner.
pub(super) const RECEIVE_LIMIT: Duration = Duration::from_secs(1);

/// Group name and secret by which the ranks of an epoch authenticate each other, and their cables.
#[derive(Default)]
pub(super) struct GroupCredentials {
    /// Names the group.
    pub(super) group: [u8; 16],
    pub(super) key: EpochKey,
    /// Of the instance's own ranks.
    pub(super) cables: Option<RankCables>,
}

impl GroupCredentials {
    /// Draws new random values.
    pub(super) fn renew(&mut self) -> Result<(), Error> {
        let drawn =
            getrandom::fill(&mut self.group).and_then(|()| getrandom::fill(&mut self.key.0));
        drawn.map_err(|error| Error::System {
            what: "draw random numbers",
            source: error.into(),
        })
    }
}

/// The thread's side.
pub(super) struct Shell {
    pub(super) shared: Arc<InstanceShared>,
    pub(super) spec: InstanceConfig,
    pub(super) supervisor: Supervisor,
    pub(super) observer: Observer,
    pub(super) begun: Instant,
    pub(super) sinks: HashMap<Ticket, Sink>,
    pub(super) meeting: GroupCredentials,
    pub(super) measuring: Vec<Sender<(Rank, RankMeasurements)>>,
    pub(super) tracing: Vec<Sender<(Rank, RankTrace)>>,
    /// Sends the result of the first start, once.
    pub(super) first: Option<Sender<Result<(), Error>>>,
    pub(super) keeper: Keeper,
    pub(super) follower: Option<Follower>,
    pub(super) over: bool,
}

impl Shell {
    pub(super) fn run(&mut self) {
        self.step(Event::Begin);
        while !self.over {
            let now = self.begun.elapsed();
            let due = self.supervisor.due();
            let wait = due.map_or(RECEIVE_LIMIT, |due| due.saturating_sub(now));
            let event = self.shared.crew.receive(wait.min(RECEIVE_LIMIT));
            match event {
                Some(event) => self.handle_event(event),
                None => self.step(Event::Tick),
            }
            self.ask();
            self.run_commands();
        }
        self.sinks.clear();
    }

    /// Queries the step times of all ranks, if shares are rebalanced by them.
    pub(super) fn ask(&mut self) {
        let is_computing = self.supervisor.load().0 > 0;
        let now = self.begun.elapsed();
        let follower = self.follower.as_mut().filter(|_| is_computing);
        if follower.is_some_and(|follower| follower.is_due(now)) {
            self.broadcast(&ToWorker::Look);
        }
    }

    fn handle_event(&mut self, event: CrewEvent<FromWorker>) {
        let event = match event {
            CrewEvent::Message {
                rank,
                message: FromWorker::Traced(trace),
            } => {
                self.tracing
                    .retain(|asker| asker.send((rank, (*trace).clone())).is_ok());
                return;
            }
            event => event,
        };
        if let CrewEvent::Message { rank, message } = &event {
            match message {
                FromWorker::Measured {
                    moved,
                    uses,
                    sent_to,
                    guesses,
                } => {
                    let measured = RankMeasurements {
                        moved: (*moved).into(),
                        uses: uses.clone(),
                        sent_to: sent_to.clone(),
                        guesses: *guesses,
                    };
                    if guesses.steps > 0 {
                        lock(&self.shared.state).status.drafts = *guesses; // of the leader
                    }
                    self.measuring
                        .retain(|asker| asker.send((*rank, measured.clone())).is_ok());
                    return;
                }
                FromWorker::Busy { epoch, busy } => {
                    let follower = self.follower.as_mut();
                    let better = follower.and_then(|it| it.record_busy(*rank, *epoch, *busy));
                    let Some(ShareMove { to, gain }) = better else {
                        return;
                    };
                    match &mut self.follower {
                        Some(follower) if self.supervisor.is_refused(to) => follower.close(to),
                        _ => self.step(Event::Move { to, gain }),
                    }
                    return;
                }
                FromWorker::Left { moved, .. } => {
                    let view = &mut lock(&self.shared.state).status;
                    view.moved = [view.moved, (*moved).into()].into_iter().sum();
                }
                _ => {}
            }
        }
        self.handle_page_event(event);
    }

    /// Routes a worker's messages about KV transfer to the prefill thread; handles all others as
    /// events.
    fn handle_page_event(&mut self, event: CrewEvent<FromWorker>) {
        let event = match (event, &self.spec.hears) {
            (CrewEvent::Message { rank, message }, Some(hears)) => {
                let Some(message) = hears.worker(rank, message) else {
                    return;
                };
                CrewEvent::Message { rank, message }
            }
            (event, _) => event,
        };
        self.step(Event::Worker(event));
    }

    /// Executes the callers' commands.
    fn run_commands(&mut self) {
        loop {
            let command = lock(&self.shared.state).commands.pop_front();
            match command {
                None => return,
                Some(Command::Accept(submission, sink)) => self.accept(submission, sink),
                Some(Command::Cancel(ticket)) => {
                    self.step(Event::Request(RequestMessage::Cancel(ticket)));
                }
                Some(Command::Measure(asker)) => {
                    self.measuring.push(asker);
                    self.broadcast(&ToWorker::Measure);
                }
                Some(Command::Trace) => self.broadcast(&ToWorker::Trace { on: true }),
                Some(Command::Traced(asker)) => {
                    self.tracing.push(asker);
                    self.broadcast(&ToWorker::Trace { on: false });
                }
                Some(Command::Tell(notice)) => self.notify(&notice),
                Some(Command::End) => self.step(Event::End),
            }
        }
    }

    /// Only a bad node submits a ticket twice: the request that has it continues.
    pub(super) fn accept(&mut self, submission: Submission, mut sink: Sink) {
        let ticket = submission.ticket;
        if self.sinks.contains_key(&ticket) {
            let reason = format!("request {} is computed already", ticket.0);
            return sink(Reply::Failed(RequestFailure::Invalid { reason }));
        }
        self.sinks.insert(ticket, sink);
        self.step(Event::Request(RequestMessage::Submit(submission)));
    }

    /// Sends a message to every rank; a lost rank is detected elsewhere.
    fn broadcast(&self, message: &ToWorker) {
        let ranks = (0..self.spec.ranks()).map(Rank);
        ranks.for_each(|rank| drop(self.shared.crew.send(rank, message)));
    }

    pub(super) fn step(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let now = self.begun.elapsed();
            let actions = self.supervisor.step(now, event);
            self.publish();
            for action in actions {
                events.extend(self.act(action));
            }
        }
    }

    /// Publishes the status to callers.
    pub(super) fn publish(&self) {
        let supervisor = &self.supervisor;
        let view = &mut lock(&self.shared.state).status;
        view.health = supervisor.health();
        view.door = supervisor.check();
        view.load = supervisor.load();
        view.epoch = supervisor.epoch();
        view.way = supervisor.way();
        view.restarts = supervisor.restarts();
        view.continued = supervisor.continued();
        view.measured = supervisor.measured();
        view.n_changes = supervisor.changes();
    }

    /// Executes an action; returns the event it causes, if any.
    pub(super) fn act(&mut self, action: Action) -> Option<Event> {
        self.log(&action);
        match action {
            Action::Start(rank) => {
                let started = self.shared.crew.start(rank);
                return started.err().map(|error| unreachable(rank, &error));
            }
            Action::Assign { rank, epoch, way } => {
                if rank == Rank(0)
                    && let Err(error) = self.meeting.renew()
                {
                    return Some(unreachable(rank, &error));
                }
                let crew = &*self.shared.crew;
                if rank == Rank(0) {
                    self.meeting.cables = crew.cables();
                }
                let job = self.spec.job(crew, rank, (epoch, way), &self.meeting);
                return self.send(rank, &ToWorker::Assign(Box::new(job)));
            }
            Action::ShrinkSteps => self.shrink_steps(),
            Action::Join { rank, addrs } => return self.send(rank, &ToWorker::Join { addrs }),
            Action::Leave(rank) => return self.send(rank, &ToWorker::Leave),
            Action::Stop(rank) => self.shared.crew.stop(rank),
            Action::Request { rank, message } => return self.request(rank, message),
            Action::Deliver(ticket, reply) => self.deliver(ticket, reply),
            Action::Forget(ticket) => drop(self.sinks.remove(&ticket)),
            Action::Learn { way, tok_s } => self.learn(way, tok_s),
            Action::Loaded { way, took } => {
                if let Some(follower) = &mut self.follower {
                    follower.ready(self.supervisor.epoch(), way, took);
                }
                if let Some(forecast) = &self.spec.forecast {
                    let split = &self.spec.cuts[way].split;
                    lock(forecast).loaded(split, took.as_secs_f64());
                }
                self.observe(way, SpeedSample::Load(took));
            }
            Action::Tell(notice) => self.notify(&notice),
            Action::End => {
                self.over = true;
                self.keeper.end();
                self.shared.crew.end(GRACE);
            }
        }
        None
    }

    pub(super) fn send(&self, rank: Rank, message: &ToWorker) -> Option<Event> {
        let error = self.shared.crew.send(rank, message).err()?;
        unsent(rank, &error)
    }

    pub(super) fn request(&self, rank: Rank, message: RequestMessage) -> Option<Event> {
        let submitted = match &message {
            RequestMessage::Submit(submission) => Some(submission.ticket),
            RequestMessage::Cancel(_) => None,
        };
        let sent = self.shared.crew.send(rank, &ToWorker::Request(message));
        let error = sent.err()?;
        let ticket = submitted?; // a lost leader has nothing to cancel
        if error.is_of_message() {
            let reason = error.to_string();
            return Some(Event::Unsendable { ticket, reason });
        }
        unsent(rank, &error)
    }

    /// Delivers a reply to its sink; removes the sink after the last one.
    pub(super) fn deliver(&mut self, ticket: Ticket, reply: Reply) {
        if matches!(reply, Reply::Finished { .. } | Reply::Failed(_)) {
            if let Some(mut sink) = self.sinks.remove(&ticket) {
                sink(reply);
            }
        } else if let Some(sink) = self.sinks.get_mut(&ticket) {
            sink(reply);
        }
    }

    /// Reduces the rows of later epochs' steps, as far as they can be.
    fn shrink_steps(&mut self) {
        let engine = &mut self.spec.engine;
        if engine.shrink_rows() {
            let (model, rows) = (engine.model.as_str(), engine.max_rows);
            warn!(model, rows, "a device interrupted a step: smaller steps");
        }
    }

    /// Corrects the forecast by a measured speed, unless drafts make the speed depend on the text.
    /// MLX has none.
    pub(super) fn learn(&self, way: usize, tok_s: f64) {
        let has_drafts = self.spec.engine.drafts > 0;
        if has_drafts && !self.spec.classes.iter().all(|class| class.is_mlx()) {
            return;
        }
        if let Some(forecast) = &self.spec.forecast {
            let split = &self.spec.cuts[way].split;
            lock(forecast).learn(&self.spec.config, split, (KEYS, tok_s));
        }
        self.observe(way, SpeedSample::Decode(tok_s));
    }

    pub(super) fn observe(&self, way: usize, sample: SpeedSample) {
        if let Some(SpeedObserver(observer)) = &self.spec.observer {
            observer(&self.spec.cuts[way].split, sample);
        }
    }

    /// Logs actions on workers; never requests or their text.
    fn log(&self, action: &Action) {
        let model = self.spec.engine.model.as_str();
        match action {
            Action::Start(rank) => info!(model, rank = rank.0, "start worker"),
            Action::Stop(rank) => warn!(model, rank = rank.0, "stop worker"),
            Action::Assign { rank, epoch, way } => {
                let split = self.spec.cuts[*way].split.to_string();
                info!(model, rank = rank.0, epoch, split, "assign shard");
            }
            Action::Join { rank, .. } => debug!(model, rank = rank.0, "join ranks"),
            Action::Leave(rank) => debug!(model, rank = rank.0, "leave epoch"),
            Action::Request { rank, message } => match message {
                RequestMessage::Submit(Submission { ticket, .. }) => {
                    debug!(model, rank = rank.0, ticket = ticket.0, "submit request");
                }
                RequestMessage::Cancel(ticket) => {
                    debug!(model, rank = rank.0, ticket = ticket.0, "cancel request");
                }
            },
            Action::Learn { tok_s, .. } => debug!(model, tok_s, "measured decode speed"),
            Action::Loaded { took, .. } => {
                info!(model, seconds = took.as_secs_f64(), "shards are loaded");
            }
            Action::End => info!(model, "end instance"),
            Action::ShrinkSteps | Action::Deliver(..) | Action::Forget(_) | Action::Tell(_) => {}
        }
    }

    fn notify(&mut self, notice: &Notice) {
        match notice {
            Notice::Ready {
                facts, way, epoch, ..
            } => {
                lock(&self.shared.state).status.facts = facts.clone();
                self.keep_spares(*epoch, *way);
            }
            Notice::Changed(change) => lock(&self.shared.state).status.changes.push(change.clone()),
            Notice::Failed {
                rank,
                reason,
                again_in,
            } => {
                warn!(
                    model = self.spec.engine.model,
                    rank = rank.0,
                    reason,
                    "epoch failed"
                );
                lock(&self.shared.state).status.facts.clear();
                self.keeper.end(); // ranks load now, or are replaced by standbys
                if again_in.is_none() {
                    let reason = reason.clone();
                    self.started(Err(Error::RankFailed {
                        rank: *rank,
                        reason,
                    }));
                }
            }
            Notice::Continued { answers } => {
                let model = self.spec.engine.model.as_str();
                warn!(model, answers, "answers continue with near numbers");
            }
            Notice::Loading { .. } | Notice::Prompts(_) => {}
        }
        if let Some(hears) = &self.spec.hears {
            hears.notice(notice, |way| self.spec.cuts[way].split.clone());
        }
        (self.observer)(notice, &self.spec.cuts);
        // After the observer, so that the owner's first report has what it learns here.
        if let Notice::Ready { .. } = notice {
            self.started(Ok(()));
        }
    }

    /// Keeps standby workers from now on. Without one, a later recovery loads the weights.
    pub(super) fn keep_spares(&mut self, epoch: u64, way: usize) {
        let Some(after) = self.spec.spares else {
            return;
        };
        let ranks = (0..self.spec.ranks()).map(Rank);
        let crew = &*self.shared.crew;
        let jobs = ranks.map(|rank| self.spec.job(crew, rank, (epoch, way), &self.meeting));
        let jobs = jobs.collect();
        self.keeper.begin(&self.shared, (jobs, way as u64), after);
    }

    pub(super) fn started(&mut self, outcome: Result<(), Error>) {
        if let Some(first) = self.first.take() {
            let _ = first.send(outcome); // its caller waits
        }
    }
}

/// The event of an unsent message. None for a closed channel: the worker's exit follows within
/// `CLOSED_LIMIT` of the monitor, with its reason. The supervisor stops an unreachable worker,
/// which would lose that reason.
pub(super) fn unsent(rank: Rank, error: &Error) -> Option<Event> {
    let is_closed = matches!(error, Error::Cluster(ClusterError::Closed { .. }));
    (!is_closed).then(|| unreachable(rank, error))
}

pub(super) fn unreachable(rank: Rank, error: &Error) -> Event {
    Event::Unreachable {
        rank,
        reason: error.to_string(),
    }
}
