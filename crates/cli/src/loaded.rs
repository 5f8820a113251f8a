//! A model that is ready to answer: in this process, or over worker processes.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use paceline_base::{Bytes, KernelClass, Rank};
use paceline_engine::{Engine, EngineConfig, Failure, Reply, Request, Runner, Service, Ticket};
use paceline_formats::chat::{ChatTemplate, Error as ChatError};
use paceline_formats::tokenizer::Tokenizer;
use paceline_model::{Config, Source, Split, SplitKind};
use paceline_node::{Instance, InstanceSpec};

use crate::load::{self, ComputeArgs, LoadBar};
use crate::output::tell;

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
}

impl SplitArgs {
    /// No split.
    pub(crate) const fn one_node() -> Self {
        Self {
            nodes: 1,
            split: SplitKind::Auto,
            shares: Vec::new(),
        }
    }
}

/// Where a model is computed when there is only one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OneNode {
    /// In this process.
    Here,
    /// In a worker, whose crash leaves this process alive.
    Worker,
}

/// A model that is ready to answer.
pub(crate) struct Loaded {
    computing: Computing,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Nothing when the model has none. What is wrong with one matters only to those who use it.
    pub(crate) template: Option<Result<ChatTemplate, ChatError>>,
    pub(crate) config: Config,
    pub(crate) split: Split,
    pub(crate) class: KernelClass,
    pub(crate) engine: EngineConfig,
    /// Of each node.
    pub(crate) threads: usize,
    pub(crate) instruction_set: String,
    /// Packed weights of each rank.
    pub(crate) weights: Vec<Bytes>,
    /// From opening the model's files to being ready for a prompt.
    pub(crate) load_time: Duration,
}

enum Computing {
    Here(Runner),
    Workers(Arc<Instance>),
}

impl Loaded {
    /// Loads the model at `path`; `sizes` says what for, by the shape of the model.
    ///
    /// # Errors
    /// What is wrong with the model, and its path; which worker failed, and how.
    pub(crate) fn open(
        path: &Path,
        compute: ComputeArgs,
        cut: &SplitArgs,
        one_node: OneNode,
        sizes: impl FnOnce(&Config) -> EngineConfig,
    ) -> anyhow::Result<Self> {
        let start = Instant::now();
        let source = load::open(path)?;
        let config = Config::read(&source).map_err(|error| load::in_model(path, error))?;
        let split = Split::plan(&config, cut.split, cut.nodes, &cut.shares)?;
        let bad = |what| format!("{}: cannot use its {what}", path.display());
        let tokenizer = Arc::new(tokenizer(&source).with_context(|| bad("tokenizer"))?);
        let engine = sizes(&config);
        let threads = load::threads(compute, cut.nodes);
        let computed = if cut.nodes == 1 && one_node == OneNode::Here {
            here(path, &source, compute.class, threads, &tokenizer, &engine)?
        } else {
            workers(path, compute.class, threads, cut, &split, &engine)?
        };
        Ok(Self {
            computing: computed.computing,
            template: template(&source),
            tokenizer,
            config,
            split,
            class: compute.class,
            engine,
            threads,
            instruction_set: computed.instruction_set,
            weights: computed.weights,
            load_time: start.elapsed(),
        })
    }

    /// What answers.
    pub(crate) fn service(&self) -> &dyn Service {
        match &self.computing {
            Computing::Here(runner) => runner,
            Computing::Workers(instance) => &**instance,
        }
    }

    /// The workers, if there are any.
    pub(crate) fn instance(&self) -> Option<&Arc<Instance>> {
        match &self.computing {
            Computing::Here(_) => None,
            Computing::Workers(instance) => Some(instance),
        }
    }

    /// Number of nodes.
    pub(crate) fn nodes(&self) -> u32 {
        self.split.ranks()
    }

    /// Bytes that the nodes have sent to one another so far; `None` for one node, or when one does
    /// not say.
    pub(crate) fn sent(&self) -> Option<Bytes> {
        let several = self.nodes() > 1;
        self.instance().filter(|_| several)?.sent()
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

    /// One line for each node: what it holds.
    pub(crate) fn tell_split(&self) {
        let ranks = self.split.ranks();
        let threads = match self.threads {
            1 => "1 thread".to_owned(),
            n => format!("{n} threads"),
        };
        tell(format_args!(
            "{ranks} nodes, split {}, {threads} each:",
            self.split
        ));
        for (rank, weights) in (0..ranks).map(Rank).zip(&self.weights) {
            let shard = self.split.shard(&self.config, rank);
            let c = &self.config;
            let percent = |part: usize, all: usize| (100.0 * part as f64 / all as f64).round();
            let mut line = format!(
                "  {rank}: layers {}-{}, heads {} of {}, feed-forward {} %",
                shard.layers.start,
                shard.layers.end - 1,
                shard.heads.len(),
                c.heads,
                percent(shard.ffn().len(), c.ffn),
            );
            if shard.has_head() {
                line += &format!(", vocabulary {} %", percent(shard.vocab().len(), c.vocab));
            }
            line += &format!(", {weights}");
            tell(line + if shard.leads() { ", leads" } else { "" });
        }
    }
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

/// What loading gave.
struct Computed {
    computing: Computing,
    instruction_set: String,
    weights: Vec<Bytes>,
}

fn here(
    path: &Path,
    source: &Source,
    class: KernelClass,
    threads: usize,
    tokenizer: &Arc<Tokenizer>,
    engine: &EngineConfig,
) -> anyhow::Result<Computed> {
    let kernels = load::kernels(threads)?;
    let instruction_set = kernels.instruction_set().name().to_owned();
    let model = Arc::new(load::model(path, source, class, kernels)?);
    let weights = vec![model.weight_bytes()];
    let engine = Engine::new(model, Arc::clone(tokenizer), engine.clone())?;
    Ok(Computed {
        computing: Computing::Here(Runner::start(engine)),
        instruction_set,
        weights,
    })
}

fn workers(
    path: &Path,
    class: KernelClass,
    threads: usize,
    cut: &SplitArgs,
    split: &Split,
    engine: &EngineConfig,
) -> anyhow::Result<Computed> {
    load::check_cpu()?;
    let spec = InstanceSpec {
        program: std::env::current_exe().context("cannot find this program's own file")?,
        args: vec![OsString::from("worker")],
        model: std::path::absolute(path).with_context(|| path.display().to_string())?,
        class,
        threads,
        kind: cut.split,
        ranks: cut.nodes,
        shares: cut.shares.clone(),
        split: split.clone(),
        engine: engine.clone(),
        on_line: Some(Box::new(|rank, line| tell(format_args!("[{rank}] {line}")))),
    };
    let mut bar = LoadBar::new();
    let mut ranks = vec![(0, 0); cut.nodes as usize];
    let instance = Instance::start(spec, |rank, done, of| {
        ranks[rank.0 as usize] = (done, of);
        let sum = |part: fn(&(usize, usize)) -> usize| ranks.iter().map(part).sum();
        bar.show(sum(|r| r.0), sum(|r| r.1));
    });
    bar.clear();
    let instance = instance.with_context(|| format!("cannot start {}", path.display()))?;
    let facts = instance.facts();
    Ok(Computed {
        instruction_set: facts[0].instruction_set.clone(),
        weights: facts.iter().map(|rank| rank.weights).collect(),
        computing: Computing::Workers(Arc::new(instance)),
    })
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
