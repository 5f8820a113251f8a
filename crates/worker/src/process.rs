//! The program of a worker process: one rank of an instance, through any number of epochs.
//!
//! Its main thread reads the control channel. The leader's engine, or the follower loop of the
//! other ranks, runs on its own thread. After a failed epoch the worker reports the failure, keeps
//! its packed weights and waits for another assignment. Only a broken control channel ends the
//! process.

mod cables;
mod draft;
mod epoch;
mod joining;
mod kv_transfer;
mod model_files;
mod watchdog;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_cluster::{Control, EXIT_CODE_PARENT_GONE};
use paceline_comm::Backend;
use paceline_comm::provider::Provider;
use paceline_engine::Draft;
use paceline_model::{Config, Links, LoadedModel, ModelSource, PageStore, Shard};
use paceline_model_mlx::MlxPlaces;
use paceline_tensor::{Kernels, Pinning};
use tracing::{debug, info, warn};

use crate::adapters::read_all;
use crate::disk::Disk;
use crate::load::{PackedPlace, ShardSpec};
use crate::messages::{FromWorker, PeerWire, PrefillRole, RankAssignment, RankFacts, ToWorker};
use crate::stamp::WeightsStamp;
use crate::traffic::RankTraffic;
use crate::{AdapterOf, DiskCache, Error, partial_source};
use draft::DraftCache;
use epoch::{Epoch, EpochRole};
use kv_transfer::KvTransfer;
use watchdog::Watchdog;

type ControlChannel = Arc<Control<ToWorker, FromWorker>>;

type MakeKernels<'a> = dyn Fn(usize, Pinning) -> std::io::Result<Arc<Kernels>> + 'a;

/// Finds the transport provider of a backend; `None` for memory and sockets.
type ProviderLookup<'a> = dyn Fn(Backend) -> std::io::Result<Option<Box<dyn Provider>>> + 'a;

/// Longest wait for the other ranks' addresses, and for all ranks to join.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Poll interval of the epoch's health.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Settings of a worker that its machine decides.
#[derive(Debug)]
pub struct WorkerSettings {
    /// Search paths of MLX's library.
    pub mlx: MlxPlaces,
    /// Allowed listen ports for ranks of other machines; `None` for any.
    pub ports: Option<RangeInclusive<u16>>,
    /// The prefix cache on disk, if there is one.
    pub disk: Option<DiskCache>,
    /// Folder of packed weights on disk.
    pub packed: Option<PathBuf>,
    /// Whether weights that fit into memory are kept there too.
    pub keeps_packed: bool,
    /// Once set, the rank hangs at its next layer: an injected fault, to test the watchdog.
    pub halted: Arc<AtomicBool>,
}

/// Runs a worker on the control channel at this process's standard input, until its instance ends
/// it or is lost. Returns only if the channel breaks.
///
/// `kernels` makes the kernels for a number of threads and their pinning; `node_connection` finds
/// the transport provider of a backend.
pub fn run(
    kernels: impl Fn(usize, Pinning) -> std::io::Result<Arc<Kernels>>,
    wire: impl Fn(Backend) -> std::io::Result<Option<Box<dyn Provider>>>,
    settings: WorkerSettings,
) -> Result<std::convert::Infallible, Error> {
    let WorkerSettings {
        mlx,
        ports,
        disk,
        packed,
        keeps_packed,
        halted,
    } = settings;
    let channel = Control::from_stdin()?;
    // The instance closes the channel once it has this rank's last message.
    channel.on_end(|| paceline_model_mlx::exit(EXIT_CODE_PARENT_GONE));
    let mut worker = RankWorker {
        channel: Arc::new(channel),
        make_kernels: &kernels,
        find_wire: &wire,
        mlx,
        ports,
        disk,
        packed,
        keeps_packed,
        halted,
        number: 0,
        packings: 0,
        kernels: None,
        kept: None,
        drafting: DraftCache::default(),
        epoch: None,
        wires: Vec::new(),
    };
    loop {
        worker.turn()?;
    }
}

/// Kernels, with the thread count and pinning they were made for.
type KernelSet = (usize, Pinning, Arc<Kernels>);

/// Packed weights kept between epochs, and their identity.
struct RetainedWeights {
    of: Identity,
    weights: Arc<dyn LoadedModel>,
    /// Time of a row of a layer in the last epoch, if there was one.
    row_time: Option<Duration>,
}

/// The properties by which packed weights can be used in another epoch.
#[derive(Clone, Debug, PartialEq)]
struct Identity {
    model: PathBuf,
    /// Stamp of the file, which may have been replaced.
    stamp: WeightsStamp,
    class: String,
    kv: Option<String>,
    memory: Option<u64>,
    threads: usize,
    first_core: Option<usize>,
    shard: Shard,
    adapters: Vec<AdapterOf>,
}

struct RankWorker<'a> {
    channel: ControlChannel,
    make_kernels: &'a MakeKernels<'a>,
    find_wire: &'a ProviderLookup<'a>,
    mlx: MlxPlaces,
    /// Allowed listen ports for ranks of other machines; `None` for any.
    ports: Option<RangeInclusive<u16>>,
    /// The prefix cache on disk, if there is one.
    disk: Option<DiskCache>,
    /// See [`WorkerSettings`], as `keeps_packed`.
    packed: Option<PathBuf>,
    keeps_packed: bool,
    /// See [`WorkerSettings::halted`].
    halted: Arc<AtomicBool>,
    /// Number of the last epoch.
    number: u64,
    /// How often it packed weights.
    packings: u64,
    kernels: Option<KernelSet>,
    kept: Option<RetainedWeights>,
    drafting: DraftCache,
    epoch: Option<Epoch>,
    /// The cables of the last group.
    wires: Vec<PeerWire>,
}

impl RankWorker<'_> {
    /// Handles one message, or checks the epoch's health.
    fn turn(&mut self) -> Result<(), Error> {
        let computes = self.epoch.is_some();
        let wait = if computes { LOOK_EVERY } else { Duration::MAX };
        match self.channel.recv(wait)? {
            Some(ToWorker::Assign(job)) => {
                self.leave();
                self.end_if_hung();
                self.number = job.epoch;
                self.begin(&job)
            }
            Some(ToWorker::Prepare(job)) => {
                self.leave();
                self.end_if_hung();
                self.prepare(&job)
            }
            Some(ToWorker::Leave) => {
                let moved = self.leave();
                let epoch = self.number;
                self.send(&FromWorker::Left { epoch, moved })
            }
            Some(message) => self.handle_message(message),
            None => self.poll(),
        }
    }

    /// Ends this process where a GPU of this machine hung with fast waits: each call would hang
    /// again. The next process waits by the system.
    fn end_if_hung(&self) {
        if self.mlx.has_hung() {
            paceline_model_mlx::exit(1);
        }
    }

    fn send(&self, message: &FromWorker) -> Result<(), Error> {
        Ok(self.channel.send(message)?)
    }

    /// Starts an epoch, or reports why it cannot.
    fn begin(&mut self, job: &RankAssignment) -> Result<(), Error> {
        debug!(
            rank = job.rank,
            epoch = job.epoch,
            backend = job.backend,
            "enter epoch"
        );
        match self.enter(job) {
            Ok(Some(epoch)) => {
                let wires = std::mem::take(&mut self.wires);
                let ready = ready(&*epoch.weights, self.packings, wires);
                info!(
                    rank = job.rank,
                    epoch = job.epoch,
                    bytes = ready.weight_bytes,
                    "ready"
                );
                self.epoch = Some(epoch);
                self.send(&FromWorker::Ready(ready))
            }
            Ok(None) => {
                let (epoch, moved) = (self.number, RankTraffic::default());
                self.send(&FromWorker::Left { epoch, moved })
            }
            Err(error) => self.report_error(&error),
        }
    }

    fn report_error(&self, error: &Error) -> Result<(), Error> {
        warn!(epoch = self.number, %error, "cannot go on");
        self.send(&failed(self.number, error))
    }

    /// Packs the weights of a possible later assignment, without a group, and reports
    /// `PreparedModel`.
    fn prepare(&mut self, job: &RankAssignment) -> Result<(), Error> {
        match self.pack(job) {
            Ok(kept) => {
                self.kept = Some(kept);
                self.send(&FromWorker::Prepared)
            }
            // A standby that fails here is not used.
            Err(error) => self.report_error(&error),
        }
    }

    fn pack(&mut self, job: &RankAssignment) -> Result<RetainedWeights, Error> {
        let (source, of) = self.part(job)?;
        let class = parse(&job.class, "kernel class")?;
        let kernels = self.kernels(job, class)?;
        if let Some(kept) = self.kept.take().filter(|kept| kept.of == of) {
            return Ok(kept);
        }
        let weights = self.load(job, (class, &source), kernels, None)?;
        Ok(RetainedWeights {
            of,
            weights,
            row_time: None,
        })
    }

    /// Joins the other ranks, loads and starts to compute; `None` if ordered to leave meanwhile.
    fn enter(&mut self, job: &RankAssignment) -> Result<Option<Epoch>, Error> {
        let class: KernelClass = parse(&job.class, "kernel class")?;
        let kernels = self.kernels(job, class)?;
        let (source, of) = self.part(job)?;
        let Some(links) = self.join(job, &of.shard)? else {
            return Ok(None);
        };
        let (weights, row_time) = match self.kept.take().filter(|kept| kept.of == of) {
            Some(kept) => (
                kept.weights.linked(links).ok_or(Error::Held)?,
                kept.row_time,
            ),
            None => {
                let loaded = self.load(job, (class, &source), Arc::clone(&kernels), Some(links));
                (loaded?, None)
            }
        };
        let draft = match of.shard.leads() {
            true => self.draft(job, (&source, &kernels))?,
            false => None,
        };
        let disk = match job.hands {
            Some(PrefillRole::Give) => None, // it sends all its pages away
            Some(PrefillRole::Take) | None => self.store(job, &*weights),
        };
        let (handing, store) = KvTransfer::new(job, &*weights, disk)?;
        let epoch = Epoch::start(
            &self.channel,
            job,
            (&source, draft),
            (weights, store, handing),
            (of, row_time),
        );
        epoch.map(Some)
    }

    /// The draft of an assignment. Epochs after the first continue without a draft that no longer
    /// loads, so that no answer is lost.
    fn draft(
        &mut self,
        job: &RankAssignment,
        (model, kernels): (&ModelSource, &Arc<Kernels>),
    ) -> Result<Option<Draft>, Error> {
        match self.drafting.of(job, (model, kernels), &self.mlx) {
            Err(error) if job.epoch > 1 => {
                warn!(rank = job.rank, %error, "go on without the draft model");
                Ok(None)
            }
            other => other,
        }
    }

    /// The store of this rank's KV pages beyond the epoch, if there is one.
    fn store(&self, job: &RankAssignment, weights: &dyn LoadedModel) -> Option<Box<dyn PageStore>> {
        // In a mixed instance the pages of a rank would have other bits than its class gives alone,
        // under the same name.
        let disk = self.disk.as_ref().filter(|_| !job.mixed)?;
        // The identity only samples the weights, so another file may match: the stamp is compared
        // too.
        let stamp = WeightsStamp::of(&job.model).ok()?;
        let mut identity = format!("{}/{stamp:?}", job.identity);
        if weights
            .config()
            .ropes
            .iter()
            .any(|rope| rope.long.is_some())
        {
            // The context decides how keys are rotated.
            identity += &format!("/{}", job.engine.context);
        }
        match Disk::open(disk, &identity, weights) {
            Ok(disk) => Some(Box::new(disk)),
            Err(error) => {
                warn!(folder = %disk.folder.display(), %error, "no prefix cache");
                None
            }
        }
    }

    /// The kernels for an assignment; reuses the current ones if possible.
    fn kernels(&mut self, job: &RankAssignment, class: KernelClass) -> Result<Arc<Kernels>, Error> {
        // With MLX, kernels only sample tokens and compute a draft head.
        let is_idle = class.is_mlx() && job.captures.is_empty();
        let threads = if is_idle { 1 } else { job.threads };
        let first = job.first_core;
        let pinning = first.map_or(Pinning::Free, |first| Pinning::Cores { first });
        if let Some((of, at, kernels)) = &self.kernels
            && (*of, *at) == (threads, pinning)
        {
            return Ok(Arc::clone(kernels));
        }
        self.kept = None; // packed for other kernels
        self.drafting = DraftCache::default();
        let made = (self.make_kernels)(threads, pinning).map_err(|source| Error::System {
            what: "start threads",
            source,
        })?;
        self.kernels = Some((threads, pinning, Arc::clone(&made)));
        Ok(made)
    }

    fn load(
        &mut self,
        job: &RankAssignment,
        (class, source): (KernelClass, &Arc<ModelSource>),
        kernels: Arc<Kernels>,
        links: Option<Links>,
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        self.announce(job, source)?;
        let progress = |done, of| {
            // If the instance is lost, the reader of the channel ends this process.
            let _ = self.channel.send(&FromWorker::Loading { done, of });
        };
        // Files that are still fetched change until they are complete.
        let folder = self.packed.as_ref();
        let folder = folder.filter(|_| self.keeps_packed || job.memory.is_some());
        let folder = folder.filter(|_| !partial_source::is_partial(&job.model));
        let packed = folder.map(|folder| PackedPlace {
            folder: folder.clone(),
            model: job.model.clone(),
        });
        let wanted = ShardSpec {
            source,
            split: &job.split,
            rank: Rank(job.rank),
            class,
            kv: job.kv.as_deref().map(|kv| parse(kv, "kv")).transpose()?,
            engine: &job.engine,
            mlx: &self.mlx,
            adapters: &read_all(&job.adapters, &Config::read(source)?)?,
            captures: &job.captures,
            packed: packed.as_ref(),
            memory: job.memory.map(Bytes),
        };
        let weights = wanted.load(links, kernels, progress)?;
        self.packings += 1;
        Ok(weights)
    }

    /// Handles a message of an epoch. Ignores it between epochs, when it is late.
    fn handle_message(&mut self, message: ToWorker) -> Result<(), Error> {
        let Some(epoch) = &self.epoch else {
            return Ok(());
        };
        match (message, &epoch.part) {
            (ToWorker::Measure, _) => self.channel.send(&epoch.measured())?,
            (ToWorker::Look, _) => self.channel.send(&epoch.busy(self.number))?,
            (ToWorker::Trace { on }, _) => epoch.trace(&self.channel, on)?,
            (ToWorker::Receive(wanted), _) => {
                let ports = self.ports.clone();
                epoch.handing.receive(&self.channel, ports, &wanted)?;
            }
            (ToWorker::HandTo(wanted), _) => epoch.handing.hand_to(&self.channel, *wanted)?,
            (ToWorker::Expect { number, page }, _) => {
                epoch.handing.expect(&self.channel, number, page)?;
            }
            (ToWorker::Request(message), EpochRole::Leads(leader)) => {
                leader.request(&self.channel, message)?;
            }
            (other, _) => {
                self.report_error(&unexpected(Some(&other), "Submit, Measure, Trace or Leave"))?
            }
        }
        self.poll()
    }

    /// Leaves a failed epoch, so that other ranks detect it; a leader reports why. Reports a hang,
    /// after which its instance ends this process.
    fn poll(&mut self) -> Result<(), Error> {
        if self.halted.load(Ordering::Relaxed) {
            self.epoch.iter().for_each(Epoch::halt);
        }
        let hang = self.epoch.as_mut().and_then(Epoch::hang);
        if let Some(error) = hang {
            return self.report_error(&error);
        }
        match self.epoch.as_ref().and_then(Epoch::failure) {
            None => Ok(()),
            Some(failure) => {
                self.leave();
                failure.map_or(Ok(()), |error| self.report_error(&error))
            }
        }
    }

    /// Leaves the epoch, if there is one, after the current step; keeps the weights. Returns the
    /// bytes that this rank moved in it.
    fn leave(&mut self) -> RankTraffic {
        let Some(epoch) = self.epoch.take() else {
            return RankTraffic::default();
        };
        let moved = RankTraffic::of(&*epoch.weights);
        self.kept = epoch.leave();
        moved
    }
}

fn failed(epoch: u64, error: &Error) -> FromWorker {
    FromWorker::Failed {
        epoch,
        reason: error.to_string(),
        blamed: error.blamed().map(|rank| rank.0),
        interrupted: error.is_interrupted(),
    }
}

fn parse<T: std::str::FromStr>(value: &str, field: &'static str) -> Result<T, Error> {
    value.parse().map_err(|_| Error::Setting {
        field,
        got: value.to_owned(),
    })
}

fn unexpected(message: Option<&ToWorker>, expected: &'static str) -> Error {
    Error::Protocol {
        got: message.map_or("nothing", ToWorker::name),
        expected,
    }
}

fn ready(weights: &dyn LoadedModel, packings: u64, wires: Vec<PeerWire>) -> RankFacts {
    RankFacts {
        pid: std::process::id(),
        weight_bytes: weights.weight_bytes().0,
        packings,
        threads: weights.kernels().pool().threads(),
        instruction_set: weights.device(),
        wires,
    }
}
