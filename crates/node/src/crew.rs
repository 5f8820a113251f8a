//! The workers of an instance, wherever they run.
//!
//! - [`LocalCrew`]: child processes of this machine.
//! - [`remote::RemoteCrew`]: workers on several machines, each over a [`line::Line`] to a machine
//!   that runs [`host::host`].

mod environment;
pub mod host;
pub mod line;
pub mod remote;

use std::ffi::OsString;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use paceline_base::{Rank, lock};
use paceline_cluster::sandbox::Sandbox;
use paceline_cluster::workers::{Event, LineSink, Spec, Workers};

use crate::Error;
use crate::messages::{FromWorker, ToWorker};

pub use environment::for_workers;

/// A worker's place, which only its machine knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Post {
    /// Where it is to listen for the other ranks; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The model's files there.
    pub model: PathBuf,
    /// The draft model's files there, where one guesses and the machine has it.
    pub draft: Option<PathBuf>,
    /// The files of adapters there, in the order of the instance's; none where they lie as they do
    /// at the owner.
    pub adapters: Vec<PathBuf>,
    /// The first of the cores that its threads are to stay on; anywhere without.
    pub first_core: Option<usize>,
    /// Its process, if it has one now.
    pub pid: Option<u32>,
}

/// Workers, one for each rank. All methods may be called from any thread; one thread receives.
pub trait Crew: Send + Sync + fmt::Debug {
    /// Starts a rank's worker, in place of what is left of an earlier one, whose events are
    /// forgotten. Returns when it runs.
    ///
    /// # Errors
    /// Why there is none: the rank has no worker then.
    fn start(&self, rank: Rank) -> Result<(), Error>;

    /// Sends a message. Waits a bounded time for a worker that does not read.
    ///
    /// # Errors
    /// The worker is of no use any more; or the message cannot be sent to anybody, see
    /// [`Error::is_of_message`].
    fn send(&self, rank: Rank, message: &ToWorker) -> Result<(), Error>;

    /// The next event, in order for each rank; nothing after `wait`, or after a
    /// [`wake`](Self::wake).
    fn receive(&self, wait: Duration) -> Option<Event<FromWorker>>;

    /// Has a [`receive`](Self::receive) that waits, or the next one, return nothing.
    fn wake(&self);

    /// Kills a rank's worker. No event tells of it.
    fn stop(&self, rank: Rank);

    /// Ends all workers, which get `grace` to end by themselves. Returns when none is left.
    fn end(&self, grace: Duration);

    /// Keeps a second worker of a rank on another machine, which [`start`](Self::start) takes in
    /// place of a new one once it has said [`Prepared`](FromWorker::Prepared). `message` prepares
    /// it, by its place; another `tag` than the last time prepares it anew. Blocks as `start` does,
    /// and while a machine copies the model. False where no other machine can: the machines of a
    /// crew of one are none.
    ///
    /// # Errors
    /// Why there is none.
    fn keep_spare(
        &self,
        rank: Rank,
        tag: u64,
        message: &dyn Fn(Post) -> ToWorker,
    ) -> Result<bool, Error> {
        let (_, _, _) = (rank, tag, message);
        Ok(false)
    }

    /// Whether [`keep_spare`](Self::keep_spare) would start or prepare one: there is none, it was
    /// lost, or it prepared for another tag. False while one is being started, and of crews that
    /// keep none.
    fn lacks_spare(&self, rank: Rank, tag: u64) -> bool {
        let (_, _) = (rank, tag);
        false
    }

    /// The place of a rank, as its machine describes it.
    fn post(&self, rank: Rank) -> Post;

    /// Where a rank is to listen for ranks of another crew; port 0 takes a free one.
    fn door(&self, rank: Rank) -> SocketAddr {
        self.post(rank).listen
    }

    /// Where ranks of another crew reach what a rank says that it listens at; `own` is this
    /// machine, as other machines reach it.
    fn seen(&self, rank: Rank, addr: SocketAddr, own: SocketAddr) -> SocketAddr {
        let (_, _) = (rank, own);
        addr
    }

    /// This machine, as another one of the crew reaches it; `None` where all are here.
    fn own_addr(&self) -> Option<SocketAddr> {
        None
    }

    /// Whether all ranks are on this machine, where nobody else hears what they send.
    fn is_one_machine(&self) -> bool;

    /// Whether all ranks reach each other over networks that their machines' owners trust, so that
    /// what they send need not be encrypted.
    fn is_trusted(&self) -> bool {
        false
    }
}

/// How to start workers on this machine.
pub struct LocalSpec {
    /// The program whose `args` run [`worker::run`](crate::worker::run).
    pub program: PathBuf,
    /// Arguments of every worker.
    pub args: Vec<OsString>,
    /// All of every worker's environment: see [`for_workers`].
    pub env: Vec<(OsString, OsString)>,
    /// Folders below which workers may write.
    pub writable: Vec<PathBuf>,
    /// GGUF file or Hugging Face folder.
    pub model: PathBuf,
    /// The same of a draft model, where one guesses.
    pub draft: Option<PathBuf>,
    /// Files of adapters; none where the instance's owner, on this machine, says where they are.
    pub adapters: Vec<PathBuf>,
    /// Workers.
    pub ranks: u32,
    /// Threads of each, where they are to stay on cores of their own, those of rank 0 first.
    pub pin: Option<usize>,
    /// Gets what workers write to standard error, by whole lines.
    pub on_line: Option<LineSink>,
}

impl fmt::Debug for LocalSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, ranks, .. } = self;
        write!(f, "{ranks} workers for {} on this machine", model.display())
    }
}

/// Reads `bytes` as messages between an owner and a host, for fuzzing.
pub(crate) fn parse(bytes: &[u8]) {
    host::parse(bytes);
}

/// Child processes of this machine, over pipes.
pub struct LocalCrew {
    model: PathBuf,
    draft: Option<PathBuf>,
    adapters: Vec<PathBuf>,
    pin: Option<usize>,
    workers: Workers<ToWorker, FromWorker>,
    /// Ranks whose first process no one has asked for yet.
    unasked: Mutex<Vec<bool>>,
}

impl LocalCrew {
    /// Starts all processes.
    ///
    /// # Errors
    /// Which cannot be started, and why; none is left then.
    pub fn spawn(spec: LocalSpec) -> Result<Self, Error> {
        let args = vec![spec.args; spec.ranks as usize];
        let mut workers = Spec::new(&spec.program, args);
        workers.env = spec.env;
        workers.env_alone = true;
        workers.on_line = spec.on_line;
        workers.sandbox = Some(Sandbox::Worker);
        workers.writable = spec.writable;
        Ok(Self {
            model: spec.model,
            draft: spec.draft,
            adapters: spec.adapters,
            pin: spec.pin,
            workers: Workers::spawn(workers)?,
            unasked: Mutex::new(vec![true; spec.ranks as usize]),
        })
    }
}

impl Crew for LocalCrew {
    fn start(&self, rank: Rank) -> Result<(), Error> {
        let fresh = lock(&self.unasked)
            .get_mut(rank.0 as usize)
            .is_some_and(std::mem::take);
        if !fresh {
            self.workers.replace(rank)?;
        }
        Ok(())
    }

    fn send(&self, rank: Rank, message: &ToWorker) -> Result<(), Error> {
        Ok(self.workers.send(rank, message)?)
    }

    fn receive(&self, wait: Duration) -> Option<Event<FromWorker>> {
        self.workers.recv(wait)
    }

    fn wake(&self) {
        self.workers.wake();
    }

    fn stop(&self, rank: Rank) {
        self.workers.kill(rank);
    }

    fn end(&self, grace: Duration) {
        self.workers.stop(grace);
    }

    fn post(&self, rank: Rank) -> Post {
        Post {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            model: self.model.clone(),
            draft: self.draft.clone(),
            adapters: self.adapters.clone(),
            first_core: self.pin.map(|threads| rank.0 as usize * threads),
            pid: self.workers.ids().get(rank.0 as usize).copied(),
        }
    }

    fn is_one_machine(&self) -> bool {
        true
    }
}

impl fmt::Debug for LocalCrew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LocalCrew").field(&self.workers).finish()
    }
}
