//! The parent's side of an instance.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_base::{Bytes, KernelClass, Rank, lock};
use paceline_cluster::workers::{Event, LineSink, Spec, Workers};
use paceline_comm::Backend;
use paceline_engine::{
    EngineConfig, Failure, Movable, Reply, Request, Service, Sink, Snapshot, State, Status, Ticket,
};
use paceline_model::{Split, SplitKind};
use paceline_tensor::KvType;

use crate::cause::{Sign, cause};
use crate::messages::{FromWorker, Job, RankReady, ToWorker};
use crate::{Error, Moved};

/// Longest wait for a worker to listen: it has to start and to read the model's header.
const LISTEN_LIMIT: Duration = Duration::from_secs(30);

/// How long signs are gathered after the first, to find the one that is the cause. Together with
/// the 1.5 s after which a silent worker is noticed it stays below the 2 s in which a failure is
/// reported.
const SIGNS_WITHIN: Duration = Duration::from_millis(150);

/// Events that are taken in after that time: far more than workers that failed leave behind.
const EVENTS_LATE: u32 = 10_000;

/// How long workers have to end by themselves when the instance ends.
const GRACE: Duration = Duration::from_millis(300);

/// Longest wait for what the ranks say they sent: they answer between two messages.
const MEASURE_LIMIT: Duration = Duration::from_secs(1);

/// Longest wait of a rank for another's part of a step, in seconds. A step of 512 rows of an 8B
/// model takes minutes on a slow machine; one that died or is stopped is found in 2 s.
const PATIENCE_S: u64 = 600;

/// How often the thread that reads events looks whether the instance is to end.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What to start.
pub struct InstanceSpec {
    /// The program that is [`worker::run`](crate::worker::run), with its arguments.
    pub program: PathBuf,
    /// Arguments of every worker.
    pub args: Vec<OsString>,
    /// GGUF file or Hugging Face folder.
    pub model: PathBuf,
    /// How numbers are computed, by rank: the same within a stage.
    pub classes: Vec<KernelClass>,
    /// Threads of each worker.
    pub threads: usize,
    /// Whether they stay on cores of their own, those of rank 0 first.
    pub pin: bool,
    /// How keys and values are kept if not as the class does; not on MLX.
    pub kv: Option<KvType>,
    /// In which directions the model is cut.
    pub kind: SplitKind,
    /// Workers.
    pub ranks: u32,
    /// How much each gets, relative to the others; none for equal shares.
    pub shares: Vec<u32>,
    /// How they reach each other.
    pub backend: Backend,
    /// Who holds what by `kind` and `shares`; to know the leader.
    pub split: Split,
    /// Sizes of the engine.
    pub engine: EngineConfig,
    /// Gets what workers write to standard error, by whole lines.
    pub on_line: Option<LineSink>,
}

impl fmt::Debug for InstanceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            model, kind, ranks, ..
        } = self;
        write!(f, "{} over {ranks} ranks ({kind})", model.display())
    }
}

/// What a rank said of itself when it was ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFacts {
    /// Its process.
    pub pid: u32,
    /// Packed weights that it holds.
    pub weights: Bytes,
    /// Threads it computes with.
    pub threads: usize,
    /// Instruction set of its kernels.
    pub instruction_set: String,
}

/// A model that worker processes compute together. Dropping it ends them.
pub struct Instance {
    shared: Arc<Shared>,
    facts: Vec<RankFacts>,
    reader: Option<JoinHandle<()>>,
}

/// What callers and the thread that reads events share.
struct Shared {
    workers: Workers<ToWorker, FromWorker>,
    leader: Rank,
    requests: Mutex<HashMap<Ticket, Entry>>,
    state: Mutex<State>,
    last_ticket: AtomicU64,
    /// Gets what the ranks sent, while somebody waits for it.
    measuring: Mutex<Option<Sender<Moved>>>,
    /// Gets the requests that the leader gives back, while somebody takes them.
    taking: Mutex<Option<Sender<Taken>>>,
    ending: std::sync::atomic::AtomicBool,
}

/// A request that the leader gave back.
type Taken = (Ticket, Box<Snapshot>);

/// An open request.
#[derive(Clone)]
struct Entry {
    sink: Arc<Mutex<Sink>>,
    started: bool,
}

impl Instance {
    /// Starts workers and waits until all are ready; `progress(rank, done, of)` is called as they
    /// load. Takes as long as loading the largest shard.
    ///
    /// # Errors
    /// [`Error::Worker`] names the rank that failed; no worker is left then.
    pub fn start(
        mut spec: InstanceSpec,
        progress: impl FnMut(Rank, usize, usize),
    ) -> Result<Self, Error> {
        let mut group = [0; 16];
        getrandom::fill(&mut group).map_err(|error| Error::System {
            what: "draw random numbers",
            source: error.into(),
        })?;
        let args = vec![spec.args.clone(); spec.ranks as usize];
        let mut workers = Spec::new(&spec.program, args);
        workers.on_line = spec.on_line.take();
        let workers = Workers::spawn(workers)?;
        let facts = match start_ranks(&workers, &spec, group, progress) {
            Ok(facts) => facts,
            Err(error) => {
                workers.stop(GRACE);
                return Err(error);
            }
        };
        let shared = Arc::new(Shared {
            workers,
            leader: spec.split.leader(),
            requests: Mutex::default(),
            state: Mutex::new(State::Ready),
            last_ticket: AtomicU64::new(0),
            measuring: Mutex::default(),
            taking: Mutex::default(),
            ending: false.into(),
        });
        let own = Arc::clone(&shared);
        let reader = std::thread::Builder::new().name("instance".to_owned());
        let reader = reader.spawn(move || own.read_events());
        let reader = reader.map_err(|source| Error::System {
            what: "start a thread",
            source,
        })?;
        Ok(Self {
            shared,
            facts,
            reader: Some(reader),
        })
    }

    /// What the ranks said when they were ready, in rank order.
    pub fn facts(&self) -> &[RankFacts] {
        &self.facts
    }

    /// What all ranks together have moved so far; `None` when one does not say within a second.
    pub fn moved(&self) -> Option<Moved> {
        let (sender, receiver): (_, Receiver<Moved>) = channel();
        *lock(&self.shared.measuring) = Some(sender);
        let deadline = Instant::now() + MEASURE_LIMIT;
        let ranks = 0..self.shared.workers.count();
        let asked = ranks.clone().all(|rank| {
            let sent = self.shared.workers.send(Rank(rank), &ToWorker::Measure);
            sent.is_ok()
        });
        let next = |_| {
            let left = deadline.saturating_duration_since(Instant::now());
            receiver.recv_timeout(left).ok()
        };
        let sum = asked.then(|| ranks.map(next).sum()).flatten();
        *lock(&self.shared.measuring) = None;
        sum
    }
}

impl Movable for Instance {
    fn take_all(&self) -> Result<Vec<(Ticket, Snapshot)>, Failure> {
        let shared = &self.shared;
        let (sender, taken) = channel();
        *lock(&shared.taking) = Some(sender);
        let sent = shared.workers.send(shared.leader, &ToWorker::TakeAll);
        if sent.is_err() || shared.failed().is_some() {
            drop(lock(&shared.taking).take());
        }
        // Ends with the leader's last word, or with the instance.
        let taken = taken.iter().map(|(ticket, snapshot)| (ticket, *snapshot));
        let taken = taken.collect();
        match (shared.failed(), sent) {
            (Some(reason), _) => Err(Failure::Unavailable { reason }),
            (None, Err(error)) => Err(Failure::Unavailable {
                reason: error.to_string(),
            }),
            (None, Ok(())) => Ok(taken),
        }
    }

    fn resume(&self, snapshot: Snapshot, sink: Sink) -> Result<Ticket, Failure> {
        let snapshot = Box::new(snapshot);
        let message = |ticket| ToWorker::Resume { ticket, snapshot };
        self.shared.start(sink, message)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join(); // it has no result, and a panic there was reported
        }
        self.shared.workers.stop(GRACE);
        self.shared.lose("the instance was ended");
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "instance of {} ranks", self.shared.workers.count())
    }
}

impl Service for Instance {
    fn submit(&self, request: Request, sink: Sink) -> Result<Ticket, Failure> {
        let request = Box::new(request);
        let message = |ticket| ToWorker::Submit { ticket, request };
        self.shared.start(sink, message)
    }

    fn cancel(&self, ticket: Ticket) {
        if lock(&self.shared.requests).remove(&ticket).is_some() {
            // A leader that is gone has nothing left to stop.
            let _ = self
                .shared
                .workers
                .send(self.shared.leader, &ToWorker::Cancel { ticket });
        }
    }

    fn status(&self) -> Status {
        let state = lock(&self.shared.state).clone();
        let requests = lock(&self.shared.requests);
        let running = requests.values().filter(|entry| entry.started).count();
        Status {
            state,
            running,
            waiting: requests.len() - running,
        }
    }
}

impl Shared {
    /// Opens a request and sends it to the leader.
    fn start(
        &self,
        sink: Sink,
        message: impl FnOnce(Ticket) -> ToWorker,
    ) -> Result<Ticket, Failure> {
        let ticket = Ticket(self.last_ticket.fetch_add(1, Ordering::Relaxed) + 1);
        // Under one lock with the state, so that a failure finds either the request or its refusal.
        {
            let state = lock(&self.state);
            if let State::Failed(reason) = &*state {
                let reason = reason.clone();
                return Err(Failure::Unavailable { reason });
            }
            let entry = Entry {
                sink: Arc::new(Mutex::new(sink)),
                started: false,
            };
            lock(&self.requests).insert(ticket, entry);
        }
        if let Err(error) = self.workers.send(self.leader, &message(ticket)) {
            lock(&self.requests).remove(&ticket);
            let reason = error.to_string();
            return Err(Failure::Unavailable { reason });
        }
        Ok(ticket)
    }

    /// Hands replies out until the instance ends or fails.
    fn read_events(&self) {
        while !self.ending.load(Ordering::SeqCst) {
            let Some(event) = self.workers.recv(LOOK_EVERY) else {
                continue;
            };
            match Sign::of(event) {
                Ok(sign) => return self.fail(sign),
                // The leader sees only that it cannot go on, and ends next: the request stays open
                // until the cause is known.
                Err((_, FromWorker::Reply { reply, .. })) if is_consequence(&reply) => {}
                Err((_, FromWorker::Reply { ticket, reply })) => self.reply(ticket, reply),
                Err((_, FromWorker::Measured(moved))) => {
                    if let Some(sender) = &*lock(&self.measuring) {
                        let _ = sender.send(moved.into()); // nobody waits any more
                    }
                }
                Err((_, FromWorker::Taken { ticket, snapshot })) => {
                    // One that was cancelled meanwhile is nobody's.
                    if lock(&self.requests).remove(&ticket).is_some()
                        && let Some(sender) = &*lock(&self.taking)
                    {
                        let _ = sender.send((ticket, snapshot)); // nobody waits any more
                    }
                }
                Err((_, FromWorker::TakenAll)) => drop(lock(&self.taking).take()),
                Err(_) => {}
            }
        }
    }

    /// Hands a reply to its sink, outside of any lock but the sink's own.
    fn reply(&self, ticket: Ticket, reply: Reply) {
        let last = matches!(reply, Reply::Finished { .. } | Reply::Failed(_));
        let entry = {
            let mut requests = lock(&self.requests);
            if last {
                requests.remove(&ticket)
            } else {
                let entry = requests.get_mut(&ticket);
                entry.map(|entry| {
                    entry.started = true;
                    entry.clone()
                })
            }
        };
        if let Some(entry) = entry {
            (lock(&entry.sink))(reply);
        }
    }

    /// Ends the instance: finds the cause, ends all workers, and tells all open requests.
    fn fail(&self, first: Sign) {
        let mut signs = vec![first];
        let deadline = Instant::now() + SIGNS_WITHIN;
        // One that is held up meanwhile takes what has come, though not what goes on coming.
        let mut late = 0..EVENTS_LATE;
        while signs.len() <= self.workers.count() as usize * 2 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() && late.next().is_none() {
                break;
            }
            match self.workers.recv(left).map(Sign::of) {
                None if left.is_zero() => break,
                Some(Ok(sign)) => signs.push(sign),
                // What was computed before is still true; what failed with it is not the cause.
                Some(Err((_, FromWorker::Reply { ticket, reply }))) if !is_consequence(&reply) => {
                    self.reply(ticket, reply);
                }
                _ => {}
            }
        }
        let reason = cause(&signs).to_string();
        *lock(&self.state) = State::Failed(reason.clone());
        drop(lock(&self.taking).take());
        self.lose(&reason);
        self.workers.stop(GRACE);
    }

    /// Why it failed, if it did.
    fn failed(&self) -> Option<String> {
        match &*lock(&self.state) {
            State::Failed(reason) => Some(reason.clone()),
            State::Ready | State::Loading => None,
        }
    }

    /// Tells all open requests that their answers are lost.
    fn lose(&self, reason: &str) {
        let open: Vec<Entry> = lock(&self.requests).drain().map(|(_, e)| e).collect();
        for entry in open {
            let reason = reason.to_owned();
            (lock(&entry.sink))(Reply::Failed(Failure::Lost { reason }));
        }
    }
}

/// Whether a reply of the leader says that its engine failed, rather than something about the
/// request.
const fn is_consequence(reply: &Reply) -> bool {
    matches!(
        reply,
        Reply::Failed(Failure::Lost { .. } | Failure::Unavailable { .. })
    )
}

/// Has every rank listen, join the others and load.
fn start_ranks(
    workers: &Workers<ToWorker, FromWorker>,
    spec: &InstanceSpec,
    group: [u8; 16],
    mut progress: impl FnMut(Rank, usize, usize),
) -> Result<Vec<RankFacts>, Error> {
    for rank in (0..spec.ranks).map(Rank) {
        workers.send(rank, &ToWorker::Start(Box::new(job(spec, rank, group))))?;
    }
    let deadline = Some(Instant::now() + LISTEN_LIMIT);
    let addrs = collect(workers, "listen", deadline, |_, message| match message {
        FromWorker::Listening { addr } => Some(addr),
        _ => None,
    })?;
    for rank in (0..spec.ranks).map(Rank) {
        let addrs = addrs.clone();
        workers.send(rank, &ToWorker::Join { addrs })?;
    }
    let ready = collect(workers, "load", None, |rank, message| match message {
        FromWorker::Ready(ready) => Some(ready),
        FromWorker::Loading { done, of } => {
            progress(rank, done, of);
            None
        }
        _ => None,
    })?;
    let facts = |(ready, pid): (RankReady, &u32)| RankFacts {
        pid: *pid,
        weights: Bytes(ready.weight_bytes),
        threads: ready.threads,
        instruction_set: ready.instruction_set,
    };
    Ok(ready.into_iter().zip(workers.ids()).map(facts).collect())
}

fn job(spec: &InstanceSpec, rank: Rank, group: [u8; 16]) -> Job {
    Job {
        rank: rank.0,
        ranks: spec.ranks,
        model: spec.model.clone(),
        class: spec.classes[rank.0 as usize].to_string(),
        split: spec.kind.to_string(),
        backend: spec.backend.name().to_owned(),
        shares: spec.shares.clone(),
        threads: spec.threads,
        pin: spec.pin,
        kv: spec.kv.map(|kv| kv.name().to_owned()),
        engine: spec.engine.clone(),
        group,
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        patience_s: PATIENCE_S,
    }
}

/// Waits until `pick` has found its message from every rank.
fn collect<T>(
    workers: &Workers<ToWorker, FromWorker>,
    what: &'static str,
    deadline: Option<Instant>,
    mut pick: impl FnMut(Rank, FromWorker) -> Option<T>,
) -> Result<Vec<T>, Error> {
    let mut found: Vec<Option<T>> = (0..workers.count()).map(|_| None).collect();
    while let Some(missing) = found.iter().position(Option::is_none) {
        let left = deadline.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        });
        let Some(event) = workers.recv(left) else {
            return Err(Error::Slow {
                rank: Rank(missing as u32),
                what,
                limit: LISTEN_LIMIT,
            });
        };
        match Sign::of(event) {
            Ok(sign) => return Err(worker_error(workers, sign)),
            Err((rank, message)) => {
                let slot = &mut found[rank.0 as usize];
                *slot = pick(rank, message).or(slot.take());
            }
        }
    }
    Ok(found.into_iter().flatten().collect())
}

/// The cause of a failure while starting.
fn worker_error(workers: &Workers<ToWorker, FromWorker>, first: Sign) -> Error {
    let mut signs = vec![first];
    let deadline = Instant::now() + SIGNS_WITHIN;
    while let Some(event) = workers.recv(deadline.saturating_duration_since(Instant::now())) {
        signs.extend(Sign::of(event as Event<FromWorker>).ok());
        if Instant::now() >= deadline {
            break;
        }
    }
    let sign = cause(&signs);
    Error::Worker {
        rank: sign.rank(),
        reason: sign.to_string(),
    }
}
