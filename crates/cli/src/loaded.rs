//! A model that is ready to answer: what the command line says, handed to `paceline_node`.

use std::ffi::OsString;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use paceline_bench::model::Subject;
use paceline_board::holds::split_lines;
use paceline_board::served::fingerprint;
use paceline_comm::Backend;
use paceline_engine::{EngineConfig, Service};
use paceline_formats::chat::{ChatTemplate, Error as ChatError};
use paceline_formats::tokenizer::Tokenizer;
use paceline_model::{Config, SplitKind};
use paceline_node::classes::Classes;
use paceline_node::crew::{LocalCrew, LocalSpec};
use paceline_node::forecast::Setting;
use paceline_node::supervisor::Notice;
use paceline_node::{AdapterOf, Error as NodeError, Instance, Observer, Options, Prepared, texts};
use paceline_tensor::{Kernels, KvType};

use crate::compute::{self, ComputeArgs, EngineArgs};
use crate::error::Error;
use crate::home;
use crate::load::{self, LoadBar};
use crate::log;
use crate::output::tell;
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
    /// How nodes reach each other: any (shared memory where it can be had, else TCP), shm, tcp,
    /// rdma (by the device file that MLX_IBV_DEVICES names, with --plaintext)
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Transport::Any,
          hide_possible_values = true)]
    pub(crate) transport: Transport,
    /// Allow a transport that cannot encrypt
    #[arg(long)]
    pub(crate) plaintext: bool,
    /// Local nodes more that only read prompts, and hand them to the others while they go on: for
    /// long prompts beside answers. Short ones the others read themselves
    #[arg(long, value_name = "M", default_value_t = 0, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(0..=64))]
    pub(crate) prefill_nodes: u32,
    /// Have them read every prompt of which so many tokens are new, and no other [default: those
    /// that they read sooner]
    #[arg(long, value_name = "TOKENS", requires = "prefill_nodes", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(64..))]
    pub(crate) prefill_from: Option<u32>,
}

/// How the nodes of a model reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Transport {
    /// Shared memory where it can be had, else TCP
    Any,
    /// Shared memory
    Shm,
    /// TCP
    Tcp,
    /// RDMA
    Rdma,
}

impl Transport {
    pub(crate) const fn backend(self) -> Backend {
        match self {
            Self::Any => Backend::Any,
            Self::Shm => Backend::Shm,
            Self::Tcp => Backend::Tcp,
            Self::Rdma => Backend::Rdma,
        }
    }

    /// Whose cost is measured for predictions. Devices are for ranks in processes of their own, so
    /// two threads that are measured here take shared memory instead.
    pub(crate) const fn probed(self) -> Backend {
        match self {
            Self::Rdma => Backend::Any,
            other => other.backend(),
        }
    }
}

impl SplitArgs {
    /// Refuses what fits no model, before one is fetched for it.
    ///
    /// # Errors
    /// [`Error::Grid`], [`Error::Shares`].
    pub(crate) fn check(&self) -> Result<(), Error> {
        crate::wires::asked_for(self.transport.backend(), self.plaintext)?;
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
            transport: Transport::Any,
            plaintext: false,
            prefill_nodes: 0,
            prefill_from: None,
        }
    }
}

/// A model that was opened and cut, and is not loaded yet: what can be wrong with it is known.
pub(crate) struct Opened {
    path: PathBuf,
    compute: ComputeArgs,
    classes: Classes,
    prepared: Prepared,
    /// The model that guesses for it.
    draft: Option<PathBuf>,
    start: Instant,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Nothing when the model has none. What is wrong with one matters only to those who use it.
    pub(crate) template: Option<Result<ChatTemplate, ChatError>>,
}

impl Opened {
    /// Opens the model at `path`; `sizes` says what for, by the shape of the model.
    ///
    /// # Errors
    /// What is wrong with the model, and its path; why it cannot be cut like that.
    pub(crate) fn new(
        path: &Path,
        (compute, engine): (ComputeArgs, EngineArgs),
        cut: &SplitArgs,
        sizes: impl FnOnce(&Config) -> EngineConfig,
    ) -> anyhow::Result<Self> {
        let start = Instant::now();
        let source = Arc::new(load::open(path)?);
        load::check_cpu()?;
        let classes = compute::classes(engine, compute.class, cut.nodes)?;
        compute.check(&classes)?;
        let options = Options {
            classes: classes.each().to_vec(),
            threads: load::threads(compute, cut.nodes + cut.prefill_nodes),
            kv: compute.kv,
            nodes: cut.nodes,
            kind: cut.split,
            shares: cut.shares.clone(),
            backend: cut.transport.backend(),
            probed: cut.transport.probed(),
        };
        let prepared = Prepared::new(Arc::clone(&source), options, sizes);
        let mut prepared = prepared.map_err(|error| in_model(path, error))?;
        if cut.prefill_nodes > 0 {
            let reads = prepared.read_prompts_on(cut.prefill_nodes, cut.prefill_from);
            reads.map_err(|error| in_model(path, error))?;
        }
        let bad = |what| format!("{}: cannot use its {what}", path.display());
        Ok(Self {
            tokenizer: Arc::new(texts::tokenizer(&source).with_context(|| bad("tokenizer"))?),
            template: texts::template(&source, &template_program()?),
            path: std::path::absolute(path).with_context(|| path.display().to_string())?,
            compute,
            classes,
            prepared,
            draft: None,
            start,
        })
    }

    /// Has the small model at `path` guess what this one will answer. Before
    /// [`forecast`](Self::forecast).
    ///
    /// # Errors
    /// What is wrong with it, such as another vocabulary.
    pub(crate) fn guess_with(&mut self, path: &Path) -> anyhow::Result<()> {
        let source = Arc::new(load::open(path)?);
        let guessed = self.prepared.guess_with(source);
        guessed.map_err(|error| in_model(path, error))?;
        let path = std::path::absolute(path).with_context(|| path.display().to_string())?;
        self.draft = Some(path);
        Ok(())
    }

    /// Has an adapter beside the model, which requests choose by `name`.
    ///
    /// # Errors
    /// What is wrong with it, or that it does not fit the model.
    pub(crate) fn adapt(&mut self, name: &str, path: &Path) -> anyhow::Result<()> {
        let path = std::path::absolute(path).with_context(|| path.display().to_string())?;
        match self.prepared.adapt(name, &path) {
            Err(NodeError::Adapter(error)) => Err(error.into()),
            other => other.map_err(|error| in_model(&self.path, error)),
        }
    }

    /// Adapters beside the model.
    pub(crate) fn adapters(&self) -> &[AdapterOf] {
        self.prepared.adapters()
    }

    /// The setting that a forecast is about.
    pub(crate) fn setting(&self, backend: Backend) -> Setting<'_> {
        self.prepared.setting(backend)
    }

    /// Kernel classes, version and the model's identity. With request and seed they determine the
    /// bits of an answer.
    pub(crate) fn fingerprint(&self) -> String {
        fingerprint(&self.classes().to_string(), self.prepared.identity())
    }

    /// The shape.
    pub(crate) const fn config(&self) -> &Config {
        self.prepared.config()
    }

    /// Sizes of the engine.
    pub(crate) const fn engine(&self) -> &EngineConfig {
        self.prepared.engine()
    }

    /// Number of nodes.
    pub(crate) fn nodes(&self) -> u32 {
        self.prepared.split().ranks()
    }

    /// Measures what this machine will do with it, or looks that up, and chooses an open `--split`
    /// by that.
    pub(crate) fn forecast(&mut self) {
        if let Ok(home) = home::home() {
            let _busy = busy("measuring what this machine can do");
            self.prepared.forecast(home.root(), kernels);
        }
    }

    /// Has nodes that compute slower than before give work away meanwhile.
    pub(crate) fn follow_use(&mut self) {
        self.prepared.follow_use();
    }

    /// Keeps the split that was chosen, whatever comes of it.
    pub(crate) const fn stay(&mut self) {
        self.prepared.stay();
    }

    /// Loads it: in this process when there is one node, else over workers.
    ///
    /// # Errors
    /// What is wrong with the model, and its path; which worker failed, and how.
    pub(crate) fn load(self) -> anyhow::Result<Loaded> {
        let (threads, engine) = (self.threads(), self.engine().clone());
        let kv = self.compute.kv_type(&self.classes);
        let model = if self.nodes() == 1 && self.prepared.prompts().is_none() {
            let kernels = self.own_kernels()?;
            here(self.prepared, &self.path, &self.tokenizer, kernels)?
        } else {
            let mut bar = Loading::new(self.nodes());
            let observer: Observer = Box::new(move |notice, _| bar.hear(notice));
            let instance = self.start((log::worker_args(), Vec::new()), false, observer)?;
            self.ready(&instance)?;
            self.prepared.loaded(instance)
        };
        Ok(Loaded {
            model,
            tokenizer: self.tokenizer,
            template: self.template,
            classes: self.classes,
            engine,
            threads,
            kv,
            load_time: self.start.elapsed(),
        })
    }

    /// Takes a service of this machine's node as what answers; `on` names its nodes.
    pub(crate) fn elsewhere(self, service: Arc<dyn Service>, on: String) -> Loaded {
        Loaded {
            threads: self.threads(),
            engine: self.engine().clone(),
            kv: self.compute.kv_type(&self.classes),
            model: self.prepared.elsewhere(service, on),
            tokenizer: self.tokenizer,
            template: self.template,
            classes: self.classes,
            load_time: self.start.elapsed(),
        }
    }

    /// Kernels of this process. Where MLX computes, they only choose tokens.
    fn own_kernels(&self) -> anyhow::Result<Arc<Kernels>> {
        let mlx = self.classes.first().is_mlx();
        let threads = if mlx { 1 } else { self.threads() };
        load::kernels_at(threads, self.compute.pinning())
    }

    /// Starts the workers, this program with `worker_args`, which may write below the folders
    /// `writable`; `observer` hears what becomes of them. Does not wait until they are ready.
    ///
    /// # Errors
    /// What the system refuses.
    pub(crate) fn start(
        &self,
        (worker_args, writable): (Vec<OsString>, Vec<PathBuf>),
        restart: bool,
        observer: Observer,
    ) -> anyhow::Result<Instance> {
        if !self.classes.on_cpu() {
            load::check_mlx(&self.path)?; // here, since of a worker's error only the text arrives
        }
        let options = self.prepared.options();
        // Before there are workers, which would wait for it.
        self.prepared.identity()?;
        let program = own_program().context("cannot find this program's own file")?;
        let pin = self.compute.pin.then_some(options.threads);
        let crew = |ranks: u32, pin: Option<usize>, of: &'static str| {
            let crew = LocalCrew::spawn(LocalSpec {
                program: program.clone(),
                args: worker_args.clone(),
                env: worker_env(),
                writable: writable.clone(),
                model: self.path.clone(),
                draft: self.draft.clone(),
                adapters: Vec::new(),
                ranks,
                pin,
                on_line: Some(Box::new(move |rank, line| {
                    tell(format_args!("[{of}{rank}] {line}"));
                })),
            });
            crew.map(Box::new)
                .map_err(|error| in_model(&self.path, error))
        };
        let own = crew(options.nodes, pin, "")?;
        let instance = match self.prepared.prompts() {
            None => self.prepared.over(own, restart, observer),
            Some(prompts) => {
                // The others have the first cores, which these would share.
                let prompts = crew(prompts.options().nodes, None, "prompts ")?;
                self.prepared.over_apart(own, prompts, restart, observer)
            }
        };
        instance.map_err(|error| in_model(&self.path, error))
    }

    /// Waits until the workers of an instance are ready.
    ///
    /// # Errors
    /// Which worker failed, and how.
    pub(crate) fn ready(&self, instance: &Instance) -> anyhow::Result<()> {
        let _busy = busy(match self.nodes() {
            1 => "starting 1 node".to_owned(),
            nodes => format!("starting {nodes} nodes"),
        });
        instance
            .ready()
            .map_err(|error| in_model(&self.path, error))
    }

    /// How numbers are computed.
    pub(crate) const fn classes(&self) -> &Classes {
        &self.classes
    }

    /// Threads of each node.
    pub(crate) const fn threads(&self) -> usize {
        self.prepared.options().threads
    }
}

/// Loads a model into this process, with a progress bar on stderr when that takes a while.
fn here(
    prepared: Prepared,
    path: &Path,
    tokenizer: &Arc<Tokenizer>,
    kernels: Arc<Kernels>,
) -> anyhow::Result<paceline_node::Loaded> {
    let (mut bar, places) = (LoadBar::new(), home::mlx_places()?);
    let progress = |done, of| bar.show(done, of);
    let loaded = prepared.here(Arc::clone(tokenizer), &places, kernels, progress);
    bar.clear();
    loaded.map_err(|error| in_model(path, error))
}

/// Kernels for measurements.
pub(crate) fn kernels(threads: usize) -> io::Result<Arc<Kernels>> {
    load::kernels(threads).map_err(io::Error::other)
}

/// Adds the model's path where the error does not have it.
fn in_model(path: &Path, error: NodeError) -> anyhow::Error {
    match error {
        NodeError::Model(error) => load::in_model(path, error),
        NodeError::Split(error) => error.into(),
        NodeError::Engine(error) => error.into(),
        NodeError::MixedStage { a, b } => Error::MixedStage { a, b }.into(),
        other => anyhow::Error::new(other).context(format!("cannot start {}", path.display())),
    }
}

/// Shows how the ranks of an instance load.
pub(crate) struct Loading {
    bar: LoadBar,
    ranks: Vec<(usize, usize)>,
}

impl Loading {
    /// Of so many ranks.
    pub(crate) fn new(ranks: u32) -> Self {
        Self {
            bar: LoadBar::new(),
            ranks: vec![(0, 0); ranks as usize],
        }
    }

    /// Shows what a notice tells about loading; anything else takes the bar away.
    pub(crate) fn hear(&mut self, notice: &Notice) {
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

/// A model that is ready to answer, with what commands tell about it.
pub(crate) struct Loaded {
    model: paceline_node::Loaded,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// As of [`Opened`].
    pub(crate) template: Option<Result<ChatTemplate, ChatError>>,
    pub(crate) classes: Classes,
    pub(crate) engine: EngineConfig,
    /// Of each node.
    pub(crate) threads: usize,
    /// How the CPU's nodes keep keys and values; `None` where all are on MLX.
    pub(crate) kv: Option<KvType>,
    /// From opening the model's files to being ready for a prompt.
    pub(crate) load_time: Duration,
}

impl Deref for Loaded {
    type Target = paceline_node::Loaded;

    fn deref(&self) -> &Self::Target {
        &self.model
    }
}

impl Loaded {
    /// The subject of measurements.
    pub(crate) fn subject(&self) -> Subject<'_> {
        Subject {
            model: &self.model,
            tokenizer: &self.tokenizer,
            classes: &self.classes,
            kv: self.kv,
            threads: self.threads,
            load_time: self.load_time,
        }
    }

    /// Tells what each node holds, a line each.
    pub(crate) fn tell_split(&self) {
        let weights = self.weights();
        let lines = split_lines(self.config(), self.split(), self.threads, &weights);
        lines.iter().for_each(tell);
    }
}
