//! Loads a model for a command: converts options for `paceline_board`.

use std::ffi::OsString;
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use paceline_base::KernelClass;
use paceline_bench::model::Subject;
use paceline_board::local_model::{self, LocalOptions, WorkerLaunch};
use paceline_comm::Backend;
use paceline_engine::{EngineConfig, Service};
use paceline_model::{Config, SplitKind};
use paceline_node::supervisor::Notice;
use paceline_node::{Error as NodeError, Instance, Observer, Options, PrefillOptions};
use paceline_tensor::Kernels;

pub(crate) use paceline_board::local_model::ReadyModel;

use crate::compute::{self, ComputeArgs, EngineArgs};
use crate::error::Error;
use crate::home;
use crate::load::{self, LoadBar};
use crate::log;
use crate::output::print_err;
use crate::process::{own_program, template_program, worker_env};
use crate::progress::busy;

/// Options of every command that can compute over several nodes.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SplitArgs {
    /// Local nodes that compute the model together, each a process of its own
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) nodes: u32,
    /// How the model is cut: auto, tensor (all nodes share every layer), pipeline (each has layers
    /// of its own), experts (all share the experts alone), TENSORxPIPELINE such as 2x2, or
    /// 2x2-experts
    #[arg(long, value_name = "SPLIT", default_value_t)]
    pub(crate) split: SplitKind,
    /// How much each node gets, relative to the others, such as 3,1 [default: the same]
    #[arg(long, value_name = "A,B,..", value_delimiter = ',', allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) shares: Vec<u32>,
    /// How nodes reach each other: any (shared memory where available, else TCP), shm, tcp, rdma
    /// (by the device file that MLX_IBV_DEVICES names, with --plaintext)
    #[arg(long, value_enum, value_name = "HOW", default_value_t = NodeTransport::Any,
          hide_possible_values = true)]
    pub(crate) transport: NodeTransport,
    /// Allow a transport that cannot encrypt
    #[arg(long)]
    pub(crate) plaintext: bool,
    /// Further local nodes that only read prompts, and transfer their KV to the others, which
    /// decode meanwhile: for long prompts. The others read short ones
    #[arg(long, value_name = "M", default_value_t = 0, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(0..=64))]
    pub(crate) prefill_nodes: u32,
    /// Have them read all prompts with at least this many new tokens, and no other [default: those
    /// that they read sooner]
    #[arg(long, value_name = "TOKENS", requires = "prefill_nodes", allow_negative_numbers = true,
          hide = true,
          value_parser = clap::value_parser!(u32).range(64..))]
    pub(crate) prefill_from: Option<u32>,
    /// Have them compute in this class: answers are near those of the other nodes, and name both.
    /// Not with --strict
    #[arg(long, value_name = "CLASS", requires = "prefill_nodes", hide = true)]
    pub(crate) prefill_class: Option<KernelClass>,
}

/// How the nodes of a model reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum NodeTransport {
    /// Shared memory where available, else TCP
    Any,
    /// Shared memory
    Shm,
    /// TCP
    Tcp,
    /// RDMA
    Rdma,
}

impl NodeTransport {
    pub(crate) const fn backend(self) -> Backend {
        match self {
            Self::Any => Backend::Any,
            Self::Shm => Backend::Shm,
            Self::Tcp => Backend::Tcp,
            Self::Rdma => Backend::Rdma,
        }
    }

    /// The transport to measure for predictions. Devices need ranks in separate processes, so two
    /// threads use shared memory instead.
    pub(crate) const fn probed(self) -> Backend {
        match self {
            Self::Rdma => Backend::Any,
            other => other.backend(),
        }
    }
}

impl SplitArgs {
    /// Rejects options that fit no model, before a download.
    pub(crate) fn check(&self) -> Result<(), Error> {
        crate::plaintext::asked_for(self.transport.backend(), self.plaintext)?;
        let (nodes, got) = (self.nodes, self.shares.len());
        match self.split {
            SplitKind::Grid { tensor, pipeline }
            | SplitKind::GridOfExperts { tensor, pipeline }
                if tensor * pipeline != nodes =>
            {
                Err(Error::Grid {
                    tensor,
                    pipeline,
                    nodes,
                })
            }
            _ if got != 0 && got != nodes as usize => Err(Error::Shares { got, nodes }),
            _ => Ok(()),
        }
    }

    /// No split.
    pub(crate) const fn one_node() -> Self {
        Self {
            nodes: 1,
            split: SplitKind::Auto,
            shares: Vec::new(),
            transport: NodeTransport::Any,
            plaintext: false,
            prefill_nodes: 0,
            prefill_from: None,
            prefill_class: None,
        }
    }
}

/// A model with files read and split chosen, not loaded yet.
pub(crate) struct LocalModel(local_model::SplitModel);

impl Deref for LocalModel {
    type Target = local_model::SplitModel;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for LocalModel {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl LocalModel {
    /// Opens the model at `path`; `sizes` computes the engine's sizes from the shape.
    pub(crate) fn new(
        path: &Path,
        (compute, engine): (ComputeArgs, EngineArgs),
        cut: &SplitArgs,
        sizes: impl FnOnce(&Config) -> EngineConfig,
    ) -> anyhow::Result<Self> {
        let since = Instant::now();
        let source = Arc::new(load::open(path)?);
        load::check_cpu()?;
        let classes = compute::classes(engine, compute.class, cut.nodes)?;
        compute.check(&classes)?;
        let options = Options {
            classes,
            threads: load::threads(compute, cut.nodes + cut.prefill_nodes),
            kv: compute.kv,
            nodes: cut.nodes,
            kind: cut.split,
            shares: cut.shares.clone(),
            backend: cut.transport.backend(),
            probed: cut.transport.probed(),
        };
        let asked = LocalOptions {
            options,
            pin: compute.pin,
            prompts: PrefillOptions {
                nodes: cut.prefill_nodes,
                from: cut.prefill_from,
                class: cut.prefill_class,
            },
            since,
        };
        let files = (source, absolute(path)?);
        let opened = local_model::SplitModel::new(files, asked, &template_program()?, sizes);
        opened.map(Self).map_err(|error| match error {
            NodeError::Tokenizer(error) => anyhow::Error::new(error)
                .context(format!("{}: cannot use its tokenizer", path.display())),
            error => in_model(path, error),
        })
    }

    /// Uses the small model at `path` as draft model. Call before [`forecast`](Self::forecast).
    pub(crate) fn set_draft(&mut self, path: &Path) -> anyhow::Result<()> {
        let source = Arc::new(load::open(path)?);
        let guessed = self.0.set_draft(source, absolute(path)?);
        guessed.map_err(|error| in_model(path, error))
    }

    /// Uses the model's own prediction layer as draft, if it has one and no other draft.
    pub(crate) fn set_own_draft(&mut self) -> anyhow::Result<()> {
        let set = self.0.set_own_draft();
        set.map_err(|error| in_model(self.path(), error))
    }

    /// Adds an adapter, which requests select by `name`.
    pub(crate) fn add_adapter(&mut self, name: &str, path: &Path) -> anyhow::Result<()> {
        match self.0.adapt(name, &absolute(path)?) {
            Err(NodeError::Adapter(error)) => Err(error.into()),
            other => other.map_err(|error| in_model(self.path(), error)),
        }
    }

    /// Predicts speeds by measuring this machine or from records, and chooses the split for
    /// `--split auto`.
    pub(crate) fn forecast(&mut self) {
        if let Ok(home) = home::home() {
            let _busy = busy("measuring what this machine can do");
            self.0.forecast(home.root(), kernels);
        }
    }

    /// Loads it: in this process for one node, else over workers.
    pub(crate) fn load(self) -> anyhow::Result<ReadyModel> {
        if !self.is_alone() {
            let mut bar = LoadingBar::new(self.nodes());
            let observer: Observer = Box::new(move |notice, _| bar.update(notice));
            let instance = self.start(self.worker_args()?, false, observer)?;
            self.ready(&instance)?;
            return Ok(self.0.loaded(instance));
        }
        let (threads, pinning) = self.own_threads();
        let kernels = load::kernels_at(threads, pinning)?;
        let (mut bar, places) = (LoadBar::new(), home::mlx_places()?);
        let path = self.path().to_owned();
        let loaded = self
            .0
            .load_here(&places, kernels, |done, of| bar.show(done, of));
        bar.clear();
        loaded.map_err(|error| in_model(&path, error))
    }

    /// Keeps packed weights on disk.
    pub(crate) fn keep_packed(&mut self) -> anyhow::Result<()> {
        Ok(self.0.keep_packed(home::packed()?)?)
    }

    /// Arguments of workers, and folders that they may write to.
    fn worker_args(&self) -> anyhow::Result<(Vec<OsString>, Vec<PathBuf>)> {
        let mut args = log::worker_args();
        if !self.keeps_packed() {
            return Ok((args, Vec::new()));
        }
        args.push("--packed".into());
        Ok((args, home::make_packed()?.into_iter().collect()))
    }

    /// Serves by a service of this machine's node; `on` names the nodes.
    pub(crate) fn with_service(self, service: Arc<dyn Service>, on: String) -> ReadyModel {
        self.0.with_service(service, on)
    }

    /// Checks that the engine of its classes opens.
    pub(crate) fn check_engine(&self) -> anyhow::Result<()> {
        if self.options().classes.on_cpu() {
            return Ok(());
        }
        let checked = self.check_mlx(&home::mlx_places()?);
        checked.map_err(|error| in_model(self.path(), error))
    }

    /// Starts workers: this program with `args`, with write access to the folders `writable`.
    /// `observer` receives their notices. Does not wait until they are ready.
    pub(crate) fn start(
        &self,
        (args, writable): (Vec<OsString>, Vec<PathBuf>),
        restart: bool,
        observer: Observer,
    ) -> anyhow::Result<Instance> {
        self.check_engine()?;
        self.identity()?;
        let workers = WorkerLaunch {
            program: own_program().context("cannot find this program's own file")?,
            args,
            env: worker_env(),
            writable,
            tell: Arc::new(|line| print_err(line)),
        };
        let started = self.0.start(&workers, restart, observer);
        started.map_err(|error| in_model(self.path(), error))
    }

    /// Waits until the workers of an instance are ready.
    pub(crate) fn ready(&self, instance: &Instance) -> anyhow::Result<()> {
        let _busy = busy(match self.nodes() {
            1 => "starting 1 node".to_owned(),
            nodes => format!("starting {nodes} nodes"),
        });
        instance
            .ready()
            .map_err(|error| in_model(self.path(), error))
    }
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| path.display().to_string())
}

/// Kernels for benchmarks.
pub(crate) fn kernels(threads: usize) -> io::Result<Arc<Kernels>> {
    load::kernels(threads).map_err(io::Error::other)
}

/// Adds the model's path, unless the error has it.
fn in_model(path: &Path, error: NodeError) -> anyhow::Error {
    match error {
        NodeError::Model(error) => load::in_model(path, error),
        NodeError::Split(error) => error.into(),
        NodeError::Engine(error) => error.into(),
        NodeError::MixedStage { a, b } => Error::MixedStage { a, b }.into(),
        other => anyhow::Error::new(other).context(format!("cannot start {}", path.display())),
    }
}

/// Progress bar of an instance's loading ranks.
pub(crate) struct LoadingBar {
    bar: LoadBar,
    ranks: Vec<(usize, usize)>,
}

impl LoadingBar {
    /// A bar for `ranks` ranks.
    pub(crate) fn new(ranks: u32) -> Self {
        Self {
            bar: LoadBar::new(),
            ranks: vec![(0, 0); ranks as usize],
        }
    }

    /// Shows the loading state of a notice; other notices remove the bar.
    pub(crate) fn update(&mut self, notice: &Notice) {
        let Notice::Loading { rank, done, of } = notice else {
            self.bar.clear();
            *self = Self::new(self.ranks.len() as u32);
            return;
        };
        self.ranks[rank.0 as usize] = (*done, *of);
        let sum = |part: fn(&(usize, usize)) -> usize| self.ranks.iter().map(part).sum();
        self.bar.show(sum(|r| r.0), sum(|r| r.1));
    }
}

/// The subject of a benchmark.
pub(crate) fn subject(loaded: &ReadyModel) -> Subject<'_> {
    Subject {
        model: loaded,
        tokenizer: &loaded.tokenizer,
        load_time: loaded.load_time,
    }
}
