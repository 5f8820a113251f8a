//! A model that is ready to answer: in this process, or over worker processes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use paceline_base::{Bytes, Rank, lock};
use paceline_comm::Backend;
use paceline_engine::{Engine, EngineConfig, Failure, Reply, Request, Runner, Service, Ticket};
use paceline_formats::chat::{ChatTemplate, Error as ChatError};
use paceline_formats::tokenizer::Tokenizer;
use paceline_model::{Config, Shard, Source, Split, SplitKind};
use paceline_node::{Instance, InstanceSpec, Moved};
use paceline_tensor::KvType;

use crate::compute::{Classes, ComputeArgs, EngineArgs};
use crate::error::Error;
use crate::load::{self, LoadBar};
use crate::output::tell;
use crate::plan::local::{Local, Setting};
use crate::steered::{Change, Choice, Cut, Forecast, Start, Steered};

/// Options of every command that can compute over several nodes.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SplitArgs {
    /// Local nodes that compute the model together, each a process of its own
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) nodes: u32,
    /// How the model is cut: auto, tensor (all nodes share every layer), pipeline (each has layers
    /// of its own), or TENSORxPIPELINE such as 2x2
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
}

/// How the nodes of a model reach each other.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
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
            SplitKind::Grid { tensor, pipeline } if tensor * pipeline != nodes => {
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
        }
    }
}

/// A model that was opened and cut, and is not loaded yet: what can be wrong with it is known.
pub(crate) struct Opened {
    source: Arc<Source>,
    path: PathBuf,
    compute: ComputeArgs,
    classes: Classes,
    cut: SplitArgs,
    start: Instant,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Nothing when the model has none. What is wrong with one matters only to those who use it.
    pub(crate) template: Option<Result<ChatTemplate, ChatError>>,
    pub(crate) config: Config,
    pub(crate) split: Split,
    pub(crate) engine: EngineConfig,
    /// Of each node.
    pub(crate) threads: usize,
    /// What this machine will do with it; `None` where nobody asked, or nothing can be measured.
    forecast: Option<Forecast>,
    /// Whether a split that turns out worse than another is left.
    steers: bool,
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
        let source = load::open(path)?;
        let config = Config::read(&source).map_err(|error| load::in_model(path, error))?;
        let bad = |what| format!("{}: cannot use its {what}", path.display());
        load::check_cpu()?;
        let classes = Classes::new(engine.engine, compute.class, cut.nodes)?;
        compute.check(&classes)?;
        Ok(Self {
            split: Split::plan(&config, cut.split, cut.nodes, &cut.shares)?,
            tokenizer: Arc::new(tokenizer(&source).with_context(|| bad("tokenizer"))?),
            template: template(&source),
            threads: load::threads(compute, cut.nodes),
            engine: sizes(&config),
            path: std::path::absolute(path).with_context(|| path.display().to_string())?,
            source: Arc::new(source),
            compute,
            classes,
            cut: cut.clone(),
            start,
            config,
            forecast: None,
            steers: false,
        })
    }

    /// What a forecast is about.
    pub(crate) fn setting(&self, backend: Backend) -> Setting<'_> {
        Setting {
            source: &self.source,
            config: &self.config,
            class: self.classes.first(),
            threads: self.threads,
            backend,
        }
    }

    /// Measures what this machine will do with it, or looks that up. An open `--split` is then
    /// chosen by that, and left when it turns out worse. Nothing changes where nothing can be
    /// measured: nothing depends on a forecast. Engines other than our own are not measured.
    pub(crate) fn forecast(&mut self) {
        if !self.classes.on_cpu() {
            return;
        }
        let setting = self.setting(self.cut.transport.probed());
        let local = Local::new(setting, self.cut.nodes, load::kernels).ok();
        self.forecast = local.map(|local| Arc::new(Mutex::new(local)));
        self.steers = self.cut.nodes > 1 && self.cut.split == SplitKind::Auto;
        let cuts = self.cuts();
        let best = &cuts[best(&cuts)];
        (self.cut.split, self.split) = (best.kind, best.split.clone());
    }

    /// Keeps the split that was chosen, whatever comes of it.
    pub(crate) const fn stay(&mut self) {
        self.steers = false;
    }

    /// The ways to cut it that may be used: all if it steers.
    fn cuts(&self) -> Vec<Cut> {
        let local = self.forecast.as_ref();
        let local = local.map(|local| lock(local));
        let (nodes, shares) = (self.cut.nodes, &self.cut.shares);
        let mut cuts = Vec::new();
        if let (true, Some(local)) = (self.steers, &local) {
            let ways = local.ways(&self.config, nodes, shares).into_iter();
            cuts.extend(ways.map(|(kind, split, tok_s)| Cut {
                kind,
                split,
                tok_s: Some(tok_s),
            }));
            cuts.retain(|cut| self.classes.check(&self.config, &cut.split).is_ok());
        }
        if cuts.is_empty() {
            let tok_s = local.and_then(|local| local.predict(&self.config, &self.split).ok());
            cuts.push(Cut {
                kind: self.cut.split,
                split: self.split.clone(),
                tok_s,
            });
        }
        cuts
    }

    /// Loads it: in this process when there is one node, else over workers.
    ///
    /// # Errors
    /// What is wrong with the model, and its path; which worker failed, and how.
    pub(crate) fn load(self) -> anyhow::Result<Loaded> {
        let (computing, instruction_set) = if self.cut.nodes == 1 {
            self.here()?
        } else {
            let workers = self.start_workers(|_| {})?;
            let facts = workers.facts();
            let set = facts.into_iter().next().map(|rank| rank.instruction_set);
            (Computing::Workers(workers), set.unwrap_or_default())
        };
        Ok(Loaded {
            computing,
            forecast: self.forecast,
            tokenizer: self.tokenizer,
            template: self.template,
            config: self.config,
            split: self.split,
            kv: self.compute.kv_type(&self.classes),
            classes: self.classes,
            engine: self.engine,
            threads: self.threads,
            instruction_set,
            load_time: self.start.elapsed(),
        })
    }

    fn here(&self) -> anyhow::Result<(Computing, String)> {
        let (class, compute) = (self.classes.first(), self.compute);
        // Where MLX computes, kernels only choose tokens.
        let threads = if class.is_mlx() { 1 } else { self.threads };
        let kernels = load::kernels_at(threads, compute.pinning())?;
        let numbers = (class, compute.kv);
        let model = load::model(&self.path, &self.source, numbers, &self.engine, kernels)?;
        let (set, weights) = (model.device(), model.weight_bytes());
        let tokenizer = Arc::clone(&self.tokenizer);
        let engine = Engine::new(model, tokenizer, self.engine.clone())?;
        Ok((Computing::Here(Runner::start(engine), weights), set))
    }

    /// Starts the workers, with a progress bar on stderr when that takes a while; `told` hears of
    /// each change of the split.
    ///
    /// # Errors
    /// Which worker failed, and how.
    pub(crate) fn start_workers(&self, told: fn(&Change)) -> anyhow::Result<Steered> {
        let cuts = self.cuts();
        let choice = Choice {
            config: self.config.clone(),
            first: best(&cuts),
            cuts,
            forecast: self.forecast.clone(),
        };
        Steered::start(choice, self.start(), told)
    }

    fn start(&self) -> Start {
        let (config, classes) = (self.config.clone(), self.classes.clone());
        let (path, cut, engine) = (self.path.clone(), self.cut.clone(), self.engine.clone());
        let (threads, compute) = (self.threads, self.compute);
        Box::new(move |kind, split| {
            classes.check(&config, split)?;
            if !classes.on_cpu() {
                load::check_mlx(&path)?; // here, since of a worker's error only the text arrives
            }
            let spec = InstanceSpec {
                program: std::env::current_exe().context("cannot find this program's own file")?,
                args: vec![OsString::from("worker")],
                model: path.clone(),
                classes: classes.each().to_vec(),
                threads,
                pin: compute.pin,
                kv: compute.kv,
                kind,
                ranks: cut.nodes,
                shares: cut.shares.clone(),
                backend: cut.transport.backend(),
                split: split.clone(),
                engine: engine.clone(),
                on_line: Some(Box::new(|rank, line| tell(format_args!("[{rank}] {line}")))),
            };
            start_instance(spec)
        })
    }

    /// Tells what each node of `workers` holds, a line each.
    pub(crate) fn tell_split(&self, workers: &Steered) {
        tell_split(
            &self.config,
            &workers.split(),
            self.threads,
            &workers.weights(),
        );
    }

    /// How numbers are computed.
    pub(crate) const fn classes(&self) -> &Classes {
        &self.classes
    }
}

/// Place of the way that is expected to be fastest, the first of such; the first where nothing is
/// expected.
fn best(cuts: &[Cut]) -> usize {
    let speed = |i: usize| cuts[i].tok_s.unwrap_or(0.0);
    (0..cuts.len()).fold(0, |best, i| if speed(i) > speed(best) { i } else { best })
}

fn start_instance(spec: InstanceSpec) -> anyhow::Result<Instance> {
    let (mut bar, n, path) = (LoadBar::new(), spec.ranks as usize, spec.model.clone());
    let mut ranks = vec![(0, 0); n];
    let instance = Instance::start(spec, |rank, done, of| {
        ranks[rank.0 as usize] = (done, of);
        let sum = |part: fn(&(usize, usize)) -> usize| ranks.iter().map(part).sum();
        bar.show(sum(|r| r.0), sum(|r| r.1));
    });
    bar.clear();
    instance.with_context(|| format!("cannot start {}", path.display()))
}

/// A model that is ready to answer.
pub(crate) struct Loaded {
    computing: Computing,
    forecast: Option<Forecast>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// As of [`Opened`].
    pub(crate) template: Option<Result<ChatTemplate, ChatError>>,
    pub(crate) config: Config,
    /// As it began.
    split: Split,
    pub(crate) classes: Classes,
    pub(crate) engine: EngineConfig,
    /// Of each node.
    pub(crate) threads: usize,
    /// How the CPU's nodes keep keys and values; `None` where all are on MLX.
    pub(crate) kv: Option<KvType>,
    pub(crate) instruction_set: String,
    /// From opening the model's files to being ready for a prompt.
    pub(crate) load_time: Duration,
}

enum Computing {
    /// With its packed weights.
    Here(Runner, Bytes),
    Workers(Steered),
}

impl Loaded {
    /// What answers.
    pub(crate) fn service(&self) -> &dyn Service {
        match &self.computing {
            Computing::Here(runner, _) => runner,
            Computing::Workers(workers) => workers,
        }
    }

    /// How it is cut now.
    pub(crate) fn split(&self) -> Split {
        match &self.computing {
            Computing::Here(..) => self.split.clone(),
            Computing::Workers(workers) => workers.split(),
        }
    }

    /// Packed weights of each rank.
    pub(crate) fn weights(&self) -> Vec<Bytes> {
        match &self.computing {
            Computing::Here(_, weights) => vec![*weights],
            Computing::Workers(workers) => workers.weights(),
        }
    }

    /// Decode tokens a second that are expected, as far as runs until the start taught; `None`
    /// where nothing was measured.
    pub(crate) fn predicted(&self) -> Option<f64> {
        match &self.computing {
            Computing::Here(..) => {
                let local = lock(self.forecast.as_ref()?);
                local.predict(&self.config, &self.split).ok()
            }
            Computing::Workers(workers) => workers.predicted(),
        }
    }

    /// As [`predicted`](Self::predicted) with `keys` in the cache.
    pub(crate) fn predicted_at(&self, keys: u32) -> Option<f64> {
        let local = lock(self.forecast.as_ref()?);
        local.predict_at(&self.config, &self.split(), keys).ok()
    }

    /// Remembers how fast an answer was decoded. Workers are watched anyway.
    pub(crate) fn learn(&self, decode_tok_s: f64) {
        if let (Computing::Here(..), Some(forecast)) = (&self.computing, &self.forecast) {
            lock(forecast).learn(&self.config, &self.split, decode_tok_s);
        }
    }

    /// Changes of the split so far.
    pub(crate) fn changes(&self) -> Vec<Change> {
        match &self.computing {
            Computing::Here(..) => Vec::new(),
            Computing::Workers(workers) => workers.changes(),
        }
    }

    /// Number of nodes.
    pub(crate) fn nodes(&self) -> u32 {
        self.split.ranks()
    }

    /// What the nodes have moved so far; `None` for one node, or when one does not say.
    pub(crate) fn moved(&self) -> Option<Moved> {
        match &self.computing {
            Computing::Here(..) => None,
            Computing::Workers(workers) => workers.moved(),
        }
    }

    /// Starts an answer.
    ///
    /// # Errors
    /// Refusals that are known at once.
    pub(crate) fn submit(&self, request: Request) -> Result<Answer<'_>, Failure> {
        let (sender, replies) = channel();
        let sink = Box::new(move |reply| {
            let _ = sender.send((Instant::now(), reply)); // nobody waits for it any more
        });
        let ticket = self.service().submit(request, sink)?;
        Ok(Answer {
            loaded: self,
            ticket,
            replies,
        })
    }

    /// Tells what each node holds, a line each.
    pub(crate) fn tell_split(&self) {
        tell_split(&self.config, &self.split(), self.threads, &self.weights());
    }
}

fn tell_split(config: &Config, split: &Split, threads: usize, weights: &[Bytes]) {
    let (nodes, plural) = (split.ranks(), if threads == 1 { "" } else { "s" });
    tell(format_args!(
        "{nodes} nodes, split {split}, {threads} thread{plural} each:"
    ));
    for (rank, weights) in (0..nodes).map(Rank).zip(weights) {
        tell(shard_line(config, &split.shard(config, rank), *weights));
    }
}

fn shard_line(config: &Config, shard: &Shard, weights: Bytes) -> String {
    let percent = |part: usize, all: usize| (100.0 * part as f64 / all as f64).round();
    let mut line = format!(
        "  {}: layers {}-{}, heads {} of {}, feed-forward {} %",
        shard.rank,
        shard.layers.start,
        shard.layers.end - 1,
        shard.heads.len(),
        config.heads,
        percent(shard.ffn().len(), config.ffn),
    );
    if shard.has_head() {
        let vocab = percent(shard.vocab().len(), config.vocab);
        line += &format!(", vocabulary {vocab} %");
    }
    line += &format!(", {weights}");
    line + if shard.leads() { ", leads" } else { "" }
}

/// An answer that is being computed. Dropping it stops it.
pub(crate) struct Answer<'a> {
    loaded: &'a Loaded,
    ticket: Ticket,
    replies: Receiver<(Instant, Reply)>,
}

impl Answer<'_> {
    /// Waits for the next reply; says when it came.
    ///
    /// # Errors
    /// [`Failure`] when the answer will not be completed.
    pub(crate) fn next(&self) -> Result<(Instant, Reply), Failure> {
        match self.replies.recv() {
            Ok((_, Reply::Failed(failure))) => Err(failure),
            Ok(reply) => Ok(reply),
            Err(_) => Err(Failure::Lost {
                reason: "what computed it ended".to_owned(),
            }),
        }
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        self.loaded.service().cancel(self.ticket); // does nothing for one that is complete
    }
}

fn tokenizer(source: &Source) -> anyhow::Result<Tokenizer> {
    Ok(match source {
        Source::Gguf(file) => Tokenizer::from_gguf(file.metadata())?,
        Source::Hf(folder) => Tokenizer::from_hf_dir(folder.path())?,
    })
}

fn template(source: &Source) -> Option<Result<ChatTemplate, ChatError>> {
    let template = match source {
        Source::Gguf(file) => ChatTemplate::from_gguf(file.metadata()),
        Source::Hf(folder) => ChatTemplate::from_hf_dir(folder.path()),
    };
    (!matches!(template, Err(ChatError::NoTemplate))).then_some(template)
}
