//! What a worker process runs: one rank of an instance.
//!
//! Its main thread reads the control channel. The leader's engine runs on a thread of its own; so
//! does the loop of the other ranks. Whatever fails is told to the parent, and the process ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use paceline_base::{KernelClass, Rank, lock};
use paceline_cluster::Control;
use paceline_comm::tcp::{self, GroupId};
use paceline_comm::{Backend, Deadline, Error as CommError, Group, Seat, Strict, Wires, init};
use paceline_engine::{Engine, Failure, Follower, Reply, Runner, Service, Sink, State, Ticket};
use paceline_formats::tokenizer::Tokenizer;
use paceline_model::{Config, Links, MlxPlaces, Source, Split, Weights};
use paceline_tensor::{Kernels, Pinning};

use crate::Error;
use crate::load::Wanted;
use crate::messages::{FromWorker, Job, RankReady, ToWorker};
use crate::moved::RankMoved;

type Channel = Arc<Control<ToWorker, FromWorker>>;

/// Longest wait for the parent's next message while starting, and for all ranks to join.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How often the leader looks whether its engine still lives.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long a worker that cannot go on waits to be ended, so that the parent reads why first.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// How long a group may take to say again why it failed; it does so at once.
const LOST_LIMIT: Duration = Duration::from_millis(10);

/// Runs a worker on the control channel that is this process's standard input, until the parent
/// ends it or is gone; returns only when something failed, which the parent has been told.
///
/// `kernels` makes the kernels for a number of threads and their place, `wires` finds what a wire
/// needs that is neither memory nor sockets, by the name of its backend; `mlx` is where that
/// library is looked for.
///
/// # Errors
/// What failed.
pub fn run(
    kernels: impl FnOnce(usize, Pinning) -> std::io::Result<Arc<Kernels>>,
    wires: impl FnOnce(Backend) -> std::io::Result<Wires>,
    mlx: MlxPlaces,
) -> Result<std::convert::Infallible, Error> {
    let channel: Channel = Arc::new(Control::from_stdin()?);
    let error = match work(&channel, kernels, wires, &mlx) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    tell(&channel, &error);
    Err(error)
}

fn tell(channel: &Channel, error: &Error) {
    let failed = FromWorker::Failed {
        reason: error.to_string(),
        blamed: error.blamed().map(|rank| rank.0),
    };
    // A parent that does not listen is gone, and then nobody is left to tell.
    if channel.send(&failed).is_ok() {
        std::thread::sleep(LAST_WORDS);
    }
}

fn work(
    channel: &Channel,
    kernels: impl FnOnce(usize, Pinning) -> std::io::Result<Arc<Kernels>>,
    wires: impl FnOnce(Backend) -> std::io::Result<Wires>,
    mlx: &MlxPlaces,
) -> Result<std::convert::Infallible, Error> {
    let job = match next(channel, "Start")? {
        ToWorker::Start(job) => job,
        other => return Err(unexpected(&other, "Start")),
    };
    let class: KernelClass = parse(&job.class, "kernel class")?;
    // Where MLX computes, kernels only choose tokens.
    let threads = if class.is_mlx() { 1 } else { job.threads };
    let pinning = match job.pin {
        true => Pinning::Cores {
            first: job.rank as usize * threads,
        },
        false => Pinning::Free,
    };
    let kernels = kernels(threads, pinning).map_err(|source| Error::System {
        what: "start threads",
        source,
    })?;
    let source = Arc::new(Source::open(&job.model)?);
    let config = Config::read(&source)?;
    let split = Split::plan(&config, parse(&job.split, "split")?, job.ranks, &job.shares)?;
    let links = join(channel, &job, (&split, &config), wires)?;
    let progress = |done, of| {
        // Should the parent be gone, the reader of the channel ends this process.
        let _ = channel.send(&FromWorker::Loading { done, of });
    };
    let wanted = Wanted {
        source: &source,
        split: &split,
        rank: Rank(job.rank),
        class,
        kv: job.kv.as_deref().map(|kv| parse(kv, "kv")).transpose()?,
        engine: &job.engine,
        mlx,
    };
    let model = wanted.load(Some(links), kernels, progress)?;
    if model.shard().leads() {
        lead(channel, &job, &source, model)
    } else {
        follow(channel, &job, model)
    }
}

fn parse<T: std::str::FromStr>(value: &str, field: &'static str) -> Result<T, Error> {
    value.parse().map_err(|_| Error::Setting {
        field,
        got: value.to_owned(),
    })
}

fn next(channel: &Channel, expected: &'static str) -> Result<ToWorker, Error> {
    let message = channel.recv(START_LIMIT)?;
    message.ok_or(Error::Protocol {
        got: "nothing",
        expected,
    })
}

const fn unexpected(message: &ToWorker, expected: &'static str) -> Error {
    Error::Protocol {
        got: message.name(),
        expected,
    }
}

/// Meets the other ranks: listens, tells where, hears where they are.
fn join(
    channel: &Channel,
    job: &Job,
    (split, config): (&Split, &Config),
    wires: impl FnOnce(Backend) -> std::io::Result<Wires>,
) -> Result<Links, Error> {
    let listener = tcp::Listener::bind(job.listen).map_err(|source| Error::System {
        what: "listen for the other ranks",
        source,
    })?;
    let addr = listener.addr();
    channel.send(&FromWorker::Listening { addr })?;
    let addrs = match next(channel, "Join")? {
        ToWorker::Join { addrs } => addrs,
        other => return Err(unexpected(&other, "Join")),
    };
    let deadline = Deadline::at(Instant::now() + START_LIMIT);
    let seat = Seat {
        listener,
        rank: Rank(job.rank),
        addrs: &addrs,
        id: GroupId(job.group),
        config: tcp::Config::default(),
    };
    let backend = parse(&job.backend, "backend")?;
    let wires = wires(backend).map_err(|source| Error::System {
        what: "find the wires between ranks",
        source,
    })?;
    let world = init(backend, Strict::Yes, seat, &wires, deadline)?;
    let stage = split.shard(config, Rank(job.rank)).stage as u32;
    let stage = world.split(stage, job.rank, deadline)?;
    let patience = Duration::from_secs(job.patience_s);
    Ok(Links::new(world, stage, patience))
}

fn ready(channel: &Channel, model: &dyn Weights) -> Result<(), Error> {
    let kernels = model.kernels();
    Ok(channel.send(&FromWorker::Ready(RankReady {
        weight_bytes: model.weight_bytes().0,
        threads: kernels.pool().threads(),
        instruction_set: model.device(),
    }))?)
}

fn measured(channel: &Channel, model: &dyn Weights) -> Result<(), Error> {
    Ok(channel.send(&FromWorker::Measured(RankMoved::of(model)))?)
}

/// Computes what the leader plans, on a thread; answers the parent on this one.
fn follow(
    channel: &Channel,
    job: &Job,
    model: Arc<dyn Weights>,
) -> Result<std::convert::Infallible, Error> {
    let mut follower = Follower::new(Arc::clone(&model), &job.engine)?;
    let own = Arc::clone(channel);
    spawn("follower", move || {
        loop {
            if let Err(error) = follower.step() {
                tell(&own, &error.into());
                std::process::exit(1);
            }
        }
    })?;
    ready(channel, &*model)?;
    loop {
        match channel.recv(Duration::MAX)? {
            Some(ToWorker::Measure) => measured(channel, &*model)?,
            Some(other) => return Err(unexpected(&other, "Measure")),
            None => {}
        }
    }
}

/// Runs the engine, and hands requests and replies over.
fn lead(
    channel: &Channel,
    job: &Job,
    source: &Source,
    model: Arc<dyn Weights>,
) -> Result<std::convert::Infallible, Error> {
    let tokenizer = Arc::new(tokenizer(source)?);
    let engine = Engine::new(Arc::clone(&model), tokenizer, job.engine.clone())?;
    let runner = Runner::start(engine);
    let tickets = Tickets::default();
    ready(channel, &*model)?;
    loop {
        match channel.recv(LOOK_EVERY)? {
            Some(ToWorker::Submit { ticket, request }) => {
                tickets.start(channel, ticket, |sink| runner.submit(*request, sink))?;
            }
            Some(ToWorker::Resume { ticket, snapshot }) => {
                tickets.start(channel, ticket, |sink| runner.resume(*snapshot, sink))?;
            }
            Some(ToWorker::TakeAll) => give_back(channel, &runner, &tickets)?,
            Some(ToWorker::Cancel { ticket }) => {
                if let Some(own) = tickets.close(ticket) {
                    runner.cancel(own);
                }
            }
            Some(ToWorker::Measure) => measured(channel, &*model)?,
            Some(other) => return Err(unexpected(&other, "Submit")),
            None => {}
        }
        if let State::Failed(reason) = runner.status().state {
            let blamed = lost(&*model);
            return Err(Error::Stopped { reason, blamed });
        }
    }
}

/// Gives all requests back, unless the engine failed, which is told otherwise.
fn give_back(channel: &Channel, runner: &Runner, tickets: &Tickets) -> Result<(), Error> {
    let Ok(taken) = runner.take_all() else {
        return Ok(());
    };
    for (own, snapshot) in taken {
        if let Some(ticket) = tickets.close_own(own) {
            let snapshot = Box::new(snapshot);
            channel.send(&FromWorker::Taken { ticket, snapshot })?;
        }
    }
    Ok(channel.send(&FromWorker::TakenAll)?)
}

/// The rank that the groups of a model have lost. A group that failed says so again at once; one
/// that did not has no time to do anything.
fn lost(model: &dyn Weights) -> Option<Rank> {
    let links = model.links()?;
    let of = |group: &dyn Group| match group.barrier(Deadline::at(Instant::now() + LOST_LIMIT)) {
        Err(
            CommError::PeerLost { rank, .. }
            | CommError::Silent { rank, .. }
            | CommError::Garbled { rank, .. },
        ) => Some(rank),
        _ => None,
    };
    let first = links.world.rank().0 - links.stage.rank().0;
    of(&*links.world).or_else(|| Some(Rank(first + of(&*links.stage)?.0)))
}

/// Open requests: the parent's name for each, and the engine's once it has one. A request may be
/// over before the engine has said what it calls it.
#[derive(Clone, Debug, Default)]
struct Tickets(Arc<Mutex<HashMap<Ticket, Option<Ticket>>>>);

impl Tickets {
    fn lock(&self) -> MutexGuard<'_, HashMap<Ticket, Option<Ticket>>> {
        lock(&self.0)
    }

    /// Hands a request to the engine; what it says against it is told to the parent.
    fn start(
        &self,
        channel: &Channel,
        ticket: Ticket,
        submit: impl FnOnce(Sink) -> Result<Ticket, Failure>,
    ) -> Result<(), Error> {
        match submit(self.open(channel, ticket)) {
            Ok(own) => self.took(ticket, own),
            Err(failure) => {
                self.close(ticket);
                let reply = Reply::Failed(failure);
                channel.send(&FromWorker::Reply { ticket, reply })?;
            }
        }
        Ok(())
    }

    /// Starts a request: a sink that sends its replies to the parent.
    fn open(&self, channel: &Channel, ticket: Ticket) -> Sink {
        self.lock().insert(ticket, None);
        let (channel, tickets) = (Arc::clone(channel), self.clone());
        Box::new(move |reply| {
            if matches!(reply, Reply::Finished { .. } | Reply::Failed(_)) {
                tickets.close(ticket);
            }
            // A parent that is gone ends this process by the reader of the channel.
            let _ = channel.send(&FromWorker::Reply { ticket, reply });
        })
    }

    /// Notes what the engine calls a request, if it is still open.
    fn took(&self, ticket: Ticket, own: Ticket) {
        if let Some(entry) = self.lock().get_mut(&ticket) {
            *entry = Some(own);
        }
    }

    /// Forgets a request that the engine calls `own`; says what the parent calls it.
    fn close_own(&self, own: Ticket) -> Option<Ticket> {
        let mut open = self.lock();
        let of_it =
            |(ticket, known): (&Ticket, &Option<Ticket>)| (*known == Some(own)).then_some(*ticket);
        let ticket = open.iter().find_map(of_it)?;
        open.remove(&ticket);
        Some(ticket)
    }

    /// Forgets a request; says what the engine calls it.
    fn close(&self, ticket: Ticket) -> Option<Ticket> {
        self.lock().remove(&ticket).flatten()
    }
}

fn tokenizer(source: &Source) -> Result<Tokenizer, Error> {
    Ok(match source {
        Source::Gguf(file) => Tokenizer::from_gguf(file.metadata())?,
        Source::Hf(folder) => Tokenizer::from_hf_dir(folder.path())?,
    })
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let builder = std::thread::Builder::new().name(name.to_owned());
    let started = builder.spawn(run).map_err(|source| Error::System {
        what: "start a thread",
        source,
    });
    started.map(drop)
}
