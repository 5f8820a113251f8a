//! Loads a model for a command: from options and files to a service.

use std::io;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use paceline_base::KernelClass;
use paceline_bench::model::Subject;
use paceline_comm::Backend;
use paceline_engine::{EngineConfig, Service};
use paceline_mlx::Library;
use paceline_model::{Config, Error as ModelError, SplitKind};
use paceline_node::supervisor::Notice;
use paceline_node::worker_notices::split_lines;
use paceline_node::workers::{LocalInstanceWorkers, LocalSpec};
use paceline_node::{Error as NodeError, Instance, Observer, Options, PrefillOptions};
use paceline_node::{PreparedModel, ServingModel};
use paceline_tensor::{Kernels, Pinning};
use paceline_text::chat::{ChatTemplate, Error as ChatError};
use paceline_text::tokenizer::Tokenizer;
use paceline_worker::load::PackedPlace;
use paceline_worker::texts;

use crate::compute::{self, ComputeArgs, EngineArgs, FIT_CLASSES};
use crate::error::{Error, misused};
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
                let all = tensor * pipeline;
                Err(misused(
                    format!(
                        "--split {tensor}x{pipeline} is for {all} nodes, but --nodes is {nodes}"
                    ),
                    format!("add --nodes {all}, or leave out --split to have it chosen"),
                ))
            }
            _ if got != 0 && got != nodes as usize => Err(misused(
                format!(
                    "--shares has {got} numbers, but --nodes is {nodes}, expected one for each \
                     node"
                ),
                match nodes {
                    1 => format!("add --nodes {got}: one node has no shares"),
                    // The first has the most.
                    _ => {
                        let example = format!("2{}", ",1".repeat(nodes as usize - 1));
                        format!("give {nodes} numbers, as in --shares {example}")
                    }
                },
            )),
            _ => Ok(()),
        }
    }

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

/// A model with files read and split chosen, not loaded yet: a [`PreparedModel`] with its texts. It
/// becomes a [`ReadyModel`] in this process, over workers, or on nodes of the cluster.
pub(crate) struct LocalModel {
    path: PathBuf,
    /// Whether threads are pinned to cores.
    pin: bool,
    /// Start of opening the model, for the load time.
    since: Instant,
    prepared: PreparedModel,
    draft: Option<PathBuf>,
    tokenizer: Arc<Tokenizer>,
    /// `None` if the model has none. An error matters only to callers that need the template.
    pub(crate) template: Option<Result<ChatTemplate, ChatError>>,
}

impl Deref for LocalModel {
    type Target = PreparedModel;

    fn deref(&self) -> &Self::Target {
        &self.prepared
    }
}

impl DerefMut for LocalModel {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.prepared
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
        let prompts = PrefillOptions {
            nodes: cut.prefill_nodes,
            from: cut.prefill_from,
            class: cut.prefill_class,
        };
        let prepared = PreparedModel::new(Arc::clone(&source), options, sizes);
        let mut prepared = prepared.map_err(|error| in_model(path, error))?;
        if prompts.nodes > 0 {
            let apart = prepared.read_prompts_on(prompts);
            apart.map_err(|error| in_model(path, error))?;
        }
        let tokenizer = texts::tokenizer(&source)
            .with_context(|| format!("{}: cannot use its tokenizer", path.display()))?;
        Ok(Self {
            path: absolute(path)?,
            pin: compute.pin,
            since,
            prepared,
            draft: None,
            tokenizer: Arc::new(tokenizer),
            template: texts::template(&source, &template_program()?),
        })
    }

    /// Adds the model's path to an error, unless it has it.
    fn explain(&self, error: NodeError) -> anyhow::Error {
        in_model(&self.path, error)
    }

    /// Uses the small model at `path` as draft model. Call before [`forecast`](Self::forecast).
    pub(crate) fn set_draft(&mut self, path: &Path) -> anyhow::Result<()> {
        let guessed = self.prepared.guess_with(Arc::new(load::open(path)?));
        guessed.map_err(|error| in_model(path, error))?;
        self.draft = Some(absolute(path)?);
        Ok(())
    }

    /// Uses the prediction layer of the model's own files, if they have one and there is no other
    /// draft, on the CPU. Call before [`forecast`](Self::forecast).
    pub(crate) fn set_own_draft(&mut self) -> anyhow::Result<()> {
        let is_set = self.prepared.guess_with_own_layer();
        if is_set.map_err(|error| self.explain(error))? {
            self.draft = Some(self.path.clone());
        }
        Ok(())
    }

    /// Adds an adapter, which requests select by `name`.
    pub(crate) fn add_adapter(&mut self, name: &str, path: &Path) -> anyhow::Result<()> {
        match self.prepared.adapt(name, &absolute(path)?) {
            Err(NodeError::Adapter(error)) => Err(error.into()),
            other => other.map_err(|error| self.explain(error)),
        }
    }

    /// Predicts speeds by measuring this machine or from records, and chooses the split for
    /// `--split auto`.
    pub(crate) fn forecast(&mut self) {
        if let Ok(home) = home::home() {
            let _busy = busy("measuring what this machine can do");
            self.prepared.forecast(home.root(), kernels);
        }
    }

    /// Loads it: in this process for one node without prefill workers, else over workers.
    pub(crate) fn load(self) -> anyhow::Result<ReadyModel> {
        if self.nodes() > 1 || self.prompts().is_some() {
            let mut bar = LoadingBar::new(self.nodes());
            let observer: Observer = Box::new(move |notice, _| bar.update(notice));
            let instance = self.start(observer)?;
            self.ready(&instance)?;
            return self.into_ready(|prepared, _| Ok(prepared.loaded(instance)));
        }
        let pinning = match self.pin {
            true => Pinning::Cores { first: 0 },
            false => Pinning::Free,
        };
        // With MLX the CPU only samples tokens.
        let threads = match self.options().classes.first().is_mlx() {
            true => 1,
            false => self.options().threads,
        };
        let kernels = load::kernels_at(threads, pinning)?;
        let (mut bar, places) = (LoadBar::new(), home::mlx_places()?);
        let path = self.path.clone();
        self.into_ready(|prepared, tokenizer| {
            let shown = |done, of| bar.show(done, of);
            let loaded = prepared.here(tokenizer, &places, kernels, shown);
            bar.clear();
            loaded.map_err(|error| in_model(&path, error))
        })
    }

    /// Serves by a service of this machine's node; `on` names the nodes.
    pub(crate) fn with_service(
        self,
        service: Arc<dyn Service>,
        on: String,
    ) -> anyhow::Result<ReadyModel> {
        self.into_ready(|prepared, _| Ok(prepared.elsewhere(service, on)))
    }

    fn into_ready(
        self,
        load: impl FnOnce(PreparedModel, Arc<Tokenizer>) -> anyhow::Result<ServingModel>,
    ) -> anyhow::Result<ReadyModel> {
        let rehearsal = self.prepared.rehearsal();
        let mut model = load(self.prepared, Arc::clone(&self.tokenizer))?;
        if let Some(rehearsal) = rehearsal {
            let _busy = busy("measuring how often experts are reused");
            model.rehearse(&rehearsal);
        }
        Ok(ReadyModel {
            model,
            tokenizer: self.tokenizer,
            template: self.template,
            load_time: self.since.elapsed(),
        })
    }

    pub(crate) fn keep_packed(&mut self) -> anyhow::Result<()> {
        let (folder, model) = (home::packed()?, self.path.clone());
        let kept = self.prepared.keep_packed(PackedPlace { folder, model });
        kept.map_err(|error| self.explain(error))
    }

    /// Checks that the engine of its classes opens: workers' errors arrive only as text.
    pub(crate) fn check_engine(&self) -> anyhow::Result<()> {
        if self.options().classes.on_cpu() {
            return Ok(());
        }
        let opened = Library::open(&home::mlx_places()?).map_err(ModelError::from);
        opened.map(drop).map_err(|error| self.explain(error.into()))
    }

    /// Starts workers; `observer` receives their notices. Does not wait until they are ready.
    fn start(&self, observer: Observer) -> anyhow::Result<Instance> {
        self.check_engine()?;
        // Computed before the workers start, as they would wait for it.
        self.identity()?;
        let options = self.options();
        let own = self.crew(options.nodes, self.pin.then_some(options.threads), "")?;
        let started = match self.prompts() {
            None => self.over(own, false, observer),
            Some(prompts) => {
                // Not pinned: the decode workers occupy the first cores.
                let prompts = self.crew(prompts.options().nodes, None, "prompts ")?;
                self.over_apart(own, prompts, false, observer)
            }
        };
        started.map_err(|error| self.explain(error))
    }

    /// Workers of this program for `ranks` ranks; `of` prefixes the ranks in output lines.
    fn crew(
        &self,
        ranks: u32,
        pin: Option<usize>,
        of: &'static str,
    ) -> anyhow::Result<Box<LocalInstanceWorkers>> {
        let (mut args, mut writable) = (log::worker_args(), Vec::new());
        if self.keeps_packed() {
            args.push("--packed".into());
            writable.extend(home::make_packed()?);
        }
        let crew = LocalInstanceWorkers::spawn(LocalSpec {
            program: own_program().context("cannot find this program's own file")?,
            args,
            env: worker_env(),
            writable,
            model: self.path.clone(),
            draft: self.draft.clone(),
            adapters: Vec::new(),
            ranks,
            pin,
            on_line: Some(Box::new(move |rank, line| {
                print_err(format_args!("[{of}{rank}] {line}"));
            })),
        });
        crew.map(Box::new).map_err(|error| self.explain(error))
    }

    /// Waits until the workers of an instance are ready.
    fn ready(&self, instance: &Instance) -> anyhow::Result<()> {
        let _busy = busy(match self.nodes() {
            1 => "starting 1 node".to_owned(),
            nodes => format!("starting {nodes} nodes"),
        });
        instance.ready().map_err(|error| self.explain(error))
    }
}

/// A loaded model, with the facts that programs report.
#[derive(Debug)]
pub(crate) struct ReadyModel {
    model: ServingModel,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// As of [`LocalModel`].
    pub(crate) template: Option<Result<ChatTemplate, ChatError>>,
    /// Time from opening the files until ready for a prompt.
    pub(crate) load_time: Duration,
}

impl Deref for ReadyModel {
    type Target = ServingModel;

    fn deref(&self) -> &Self::Target {
        &self.model
    }
}

impl ReadyModel {
    /// Each node's share: a heading, and a line each.
    pub(crate) fn split_lines(&self) -> Vec<String> {
        let (threads, weights) = (self.options().threads, self.weights());
        split_lines(self.config(), self.split(), threads, &weights)
    }
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| path.display().to_string())
}

pub(crate) fn kernels(threads: usize) -> io::Result<Arc<Kernels>> {
    load::kernels(threads).map_err(io::Error::other)
}

/// Adds the model's path, unless the error has it.
fn in_model(path: &Path, error: NodeError) -> anyhow::Error {
    match error {
        NodeError::Model(error) => load::in_model(path, error),
        NodeError::Split(error) => error.into(),
        NodeError::Engine(error) => error.into(),
        NodeError::MixedStage { a, b } => misused(
            format!(
                "nodes that share layers compute as {a} and as {b}, expected one class in a stage"
            ),
            FIT_CLASSES,
        )
        .into(),
        other => anyhow::Error::new(other).context(format!("cannot start {}", path.display())),
    }
}

/// Progress bar of an instance's loading ranks.
pub(crate) struct LoadingBar {
    bar: LoadBar,
    ranks: Vec<(usize, usize)>,
}

impl LoadingBar {
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

pub(crate) fn subject(loaded: &ReadyModel) -> Subject<'_> {
    Subject {
        model: loaded,
        tokenizer: &loaded.tokenizer,
        load_time: loaded.load_time,
    }
}
