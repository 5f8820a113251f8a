//! The worker processes of an instance, on this machine or others, behind one trait.
//!
//! - [`LocalInstanceWorkers`]: child processes of this machine.
//! - [`remote::RemoteCrew`]: workers on several machines, each over a [`connection::Line`] to a
//!   machine that runs [`host::host`].

mod awake;
pub mod connection;
mod environment;
pub mod host;
mod relay;
pub mod remote;

use std::ffi::OsString;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use paceline_base::{Rank, lock};
use paceline_cluster::sandbox::Sandbox;
use paceline_cluster::workers::{Event, LineSink, WorkerSpec, Workers};

use crate::Error;
use awake::Awake;
use paceline_worker::messages::{FromWorker, RankCables, ToWorker};

pub use environment::for_workers;

/// Facts that only the worker's own machine knows: addresses, local paths and cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSite {
    /// Listen address for the other ranks; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The model's files there.
    pub model: PathBuf,
    /// The draft model's files there, if the instance uses one and the machine has it.
    pub draft: Option<PathBuf>,
    /// Adapter files there, in the instance's order; empty if the paths are those of the owner.
    pub adapters: Vec<PathBuf>,
    /// The first core its threads are pinned to; `None` for no pinning.
    pub first_core: Option<usize>,
    /// Its process, if it has one now.
    pub pid: Option<u32>,
}

/// Workers, one for each rank. All methods may be called from any thread; one thread receives.
pub trait InstanceWorkers: Send + Sync + fmt::Debug {
    /// Starts a rank's worker and replaces an earlier one, whose events are dropped. Returns when
    /// the process runs.
    ///
    /// # Errors
    /// Why there is none: the rank has no worker then.
    fn start(&self, rank: Rank) -> Result<(), Error>;

    /// Sends a message. Waits a bounded time if the worker does not read.
    ///
    /// # Errors
    /// The worker is lost, or the message itself cannot be sent: see [`Error::is_of_message`].
    fn send(&self, rank: Rank, message: &ToWorker) -> Result<(), Error>;

    /// The next event, in order for each rank; nothing after `wait`, or after a
    /// [`wake`](Self::wake).
    fn receive(&self, wait: Duration) -> Option<Event<FromWorker>>;

    /// Makes a waiting [`receive`](Self::receive), or the next one, return `None`.
    fn wake(&self);

    /// Kills a rank's worker without an event.
    fn stop(&self, rank: Rank);

    /// Ends all workers: each has `grace` to exit by itself. Returns when none is left.
    fn end(&self, grace: Duration);

    /// Keeps a standby worker of a rank on another machine. After
    /// [`PreparedModel`](FromWorker::Prepared), [`start`](Self::start) uses it instead of a new
    /// one. `message` builds the order that prepares it; a new `tag` prepares it again. Blocks as
    /// `start` does, and while a machine copies the model. Returns false if no other machine can
    /// host it, as with one machine.
    ///
    /// # Errors
    /// Why there is none.
    fn keep_spare(
        &self,
        rank: Rank,
        tag: u64,
        message: &dyn Fn(WorkerSite) -> ToWorker,
    ) -> Result<bool, Error> {
        let (_, _, _) = (rank, tag, message);
        Ok(false)
    }

    /// Whether [`keep_spare`](Self::keep_spare) would start or prepare one: there is none, it was
    /// lost, or it has another tag. False while one starts, and for workers without standby.
    fn lacks_spare(&self, rank: Rank, tag: u64) -> bool {
        let (_, _) = (rank, tag);
        false
    }

    /// A rank's site, as reported by its machine.
    fn post(&self, rank: Rank) -> WorkerSite;

    /// Listen address of a rank for the ranks of another instance; port 0 takes a free one.
    fn transfer_addr(&self, rank: Rank) -> SocketAddr {
        self.post(rank).listen
    }

    /// The address at which another instance's ranks reach a rank that listens at `addr`; `own` is
    /// this machine's address as seen by other machines.
    fn seen(&self, rank: Rank, addr: SocketAddr, own: SocketAddr) -> SocketAddr {
        let (_, _) = (rank, own);
        addr
    }

    /// This machine's address as seen by the other workers' machines; `None` if all are here.
    fn own_addr(&self) -> Option<SocketAddr> {
        None
    }

    /// Whether all ranks are on this machine, so that their traffic never leaves it.
    fn is_one_machine(&self) -> bool;

    /// RDMA cables between the ranks, as of now; `None` without any.
    fn cables(&self) -> Option<RankCables> {
        None
    }

    /// Whether all ranks connect over trusted networks, so that their traffic needs no encryption.
    fn is_trusted(&self) -> bool {
        false
    }
}

/// Command, files and pinning of workers on this machine.
#[derive(derive_more::Debug)]
#[debug("{ranks} workers for {} on this machine", model.display())]
pub struct LocalSpec {
    /// The program whose `args` run [`worker::run`](paceline_worker::process::run).
    pub program: PathBuf,
    /// Arguments of every worker.
    pub args: Vec<OsString>,
    /// The complete environment of every worker: see [`for_workers`].
    pub env: Vec<(OsString, OsString)>,
    /// Folders below which workers may write.
    pub writable: Vec<PathBuf>,
    /// GGUF file or Hugging Face folder.
    pub model: PathBuf,
    /// GGUF file or folder of the draft model, if there is one.
    pub draft: Option<PathBuf>,
    /// Adapter files; empty if the instance's owner, on this machine, names their paths.
    pub adapters: Vec<PathBuf>,
    /// Workers.
    pub ranks: u32,
    /// Threads per worker to pin to dedicated cores, rank 0 first; `None` for no pinning.
    pub pin: Option<usize>,
    /// Receives whole lines of the workers' standard error.
    pub on_line: Option<LineSink>,
}

/// Reads `bytes` as messages between an owner and a host, for fuzzing.
pub(crate) fn parse(bytes: &[u8]) {
    host::parse(bytes);
}

/// Child processes of this machine, over pipes.
pub struct LocalInstanceWorkers {
    model: PathBuf,
    draft: Option<PathBuf>,
    adapters: Vec<PathBuf>,
    pin: Option<usize>,
    workers: Workers<ToWorker, FromWorker>,
    /// By rank: whether its first process was not requested by `start` yet.
    unasked: Mutex<Vec<bool>>,
    _awake: Awake,
}

impl LocalInstanceWorkers {
    /// Starts one worker process for each rank.
    ///
    /// # Errors
    /// The process that did not start, and the reason; all others are ended then.
    pub fn spawn(spec: LocalSpec) -> Result<Self, Error> {
        let args = vec![spec.args; spec.ranks as usize];
        let mut workers = WorkerSpec::new(&spec.program, args);
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
            _awake: Awake::hold(),
        })
    }
}

impl InstanceWorkers for LocalInstanceWorkers {
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

    fn post(&self, rank: Rank) -> WorkerSite {
        WorkerSite {
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

impl fmt::Debug for LocalInstanceWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LocalCrew").field(&self.workers).finish()
    }
}
