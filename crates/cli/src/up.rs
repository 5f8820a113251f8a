//! `paceline up`: this machine's node, alone or with models behind the HTTP API.
//!
//! `run` starts one of four servers:
//! - `idle`: the node without a model; commands load and unload instances.
//! - `serve`: one model with its adapters, in this process or over local workers.
//! - `multi_model::run`: several models behind one API.
//! - `embed`: an encoder for embeddings.

mod adapters;
mod encoder;
mod multi_model;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::builder::NonEmptyStringValueParser;
use paceline_base::KernelClass;
use paceline_board::commands::{self, WAITING_MAX};
use paceline_board::worker_notices::lines;
use paceline_board::{Dashboard, DashboardOutputs, LocalInstances, figures, remover, servers};
use paceline_cluster::nodes::agent::Error as NodeError;
use paceline_engine::{EngineConfig, Service, StepTimeTarget};
use paceline_model::Config;
use paceline_node::context_size::ContextBudget;
use paceline_node::supervisor::Notice;
use paceline_node::{DRAFTS, Instance, Observer};
use paceline_serve::{
    DEFAULT_PORT, HttpServer, ProcessMetrics, ServedModel, ServerHandle, StatusSource, UpstreamArg,
};
use paceline_store::{Cancel, Error as StoreError, Home, PullOptions};

use crate::adapter;
use crate::compute::{ComputeArgs, EngineArgs};
use crate::error::Error;
use crate::home;
use crate::interrupt::Signals;
use crate::local_model::{self, LoadingBar, LocalModel, SplitArgs};
use crate::member::{self, NodeArgs, NodeGuard};
use crate::output::print_err;
use crate::process::{self, own_program, template_program, worker_env};
use crate::{bench, mapreduce, pull, train};

const EXAMPLES: &str = "\
Examples:
  paceline up
  paceline up smollm2 --nodes 2
  paceline up smollm2 gemma3-270m
  paceline up --upstream http://192.168.1.5:11434
  curl http://127.0.0.1:52415/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"model\": \"smollm2\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}'

The API is that of OpenAI (/v1/chat/completions, /v1/completions, /v1/responses, /v1/models,
/v1/embeddings for encoders such as all-MiniLM-L6-v2), of
Anthropic (/v1/messages), of Ollama (/api/chat, /api/generate) and of llama-server (/tokenize,
/infill); beside it /health, /metrics and /openapi.json. Ctrl-C ends it; answers that are under way get 5 seconds.";

/// A model and its service.
type HostedModel = (ServedModel, Arc<dyn Service>);

/// A model's names.
struct ModelNames {
    id: String,
    aliases: Vec<String>,
}

/// Interval of shutdown checks.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Arguments of `paceline up`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Alias (`smollm2`), usual name (`qwen3:8b`), GGUF file, folder of safetensors, or hub id to
    /// answer with; several are chosen among by the `model` of a request; without one the node
    /// waits
    #[arg(value_name = "MODEL")]
    model: Vec<String>,
    /// The same as an option
    #[arg(
        id = "option",
        long = "model",
        value_name = "MODEL",
        conflicts_with = "model"
    )]
    option: Vec<String>,
    /// Answer with this adapter of the model: its folder, or its file of weights (PEFT's, MLX's or
    /// GGUF's form). With names, or several, the `model` of a request selects one, as NAME or
    /// MODEL:NAME, or the model without one; all share its weights
    #[arg(long, value_name = "[NAME=]FILE", value_parser = AdapterArg::parse)]
    adapter: Vec<AdapterArg>,
    /// The adapter of these arguments, if it is applied at run time.
    #[arg(skip)]
    tuned: Option<AdapterArg>,
    /// Another name that clients may call the model by, the first of several; may be given several
    /// times
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    alias: Vec<String>,
    /// An encoder such as all-MiniLM-L6-v2, for /v1/embeddings and /api/embed
    #[arg(long, value_name = "MODEL")]
    embed: Option<String>,
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    split: SplitArgs,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Answers that are computed at the same time; more wait
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Milliseconds between two tokens of an answer while prompts of other requests are read;
    /// `auto`: 2.5 times of what it takes without them; `off`: prompts first
    #[arg(long, value_name = "MS", default_value_t = StepTimeTarget::Auto)]
    pace: StepTimeTarget,
    /// Most tokens of an answer that are guessed, from its own text or by --draft, and checked in
    /// one step, where that pays; 0 for none [default: 8 on one node or with --draft, 0 on several]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=16))]
    drafts: Option<u8>,
    /// A small model of the same vocabulary that guesses tokens, which MODEL checks together: the
    /// same answers in less time, where that pays
    #[arg(long, value_name = "MODEL")]
    draft: Option<String>,
    /// Have nodes that compute slower than before, because somebody uses their cores, give work to
    /// the others meanwhile
    #[arg(long)]
    follow: bool,
    /// Most tokens of a conversation and its answer [default: what the model was trained for, as
    /// far as memory has room]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    /// Address to listen on; may be given several times. Other machines speak TLS with it
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: Vec<IpAddr>,
    /// Port to listen on; 0 takes a free one; may be given several times
    #[arg(long, value_name = "PORT", default_values_t = [DEFAULT_PORT])]
    port: Vec<u16>,
    /// Further name that clients may call this server by; may be given several times
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Web page that may use the API, such as https://chat.example.org; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// Let machines in that can reach --host, although there are no API keys
    #[arg(long)]
    no_keys: bool,
    /// Certificate for other machines, in PEM form, with those between it and its authority
    /// [default: one of this home's own, made once]
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Key of --tls-cert, in PEM form
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Speak plain HTTP with other machines too, as for a proxy that speaks TLS with them
    #[arg(long, conflicts_with = "tls_cert")]
    insecure_http: bool,
    /// Pass over fields of requests that no specification has, with a `warning` header, instead of
    /// refusing them
    #[arg(long)]
    lenient: bool,
    /// Append the node's events to FILE, a line of JSON each
    #[arg(long, value_name = "FILE")]
    events: Option<PathBuf>,
    /// Price of a kilowatt-hour, for what a million tokens cost on the dashboard
    #[arg(long, value_name = "PRICE", value_parser = price)]
    kwh_price: Option<f64>,
    /// Let clients remove models of this machine's store (Ollama's DELETE /api/delete), but not one
    /// that is being served. Also lets `rm --node` and `--everywhere` of other machines remove
    /// models that this machine's user fetched; without it, copies alone
    #[arg(long)]
    allow_delete: bool,
    /// Let clients fetch models into this machine's store (Ollama's POST /api/pull); where keys
    /// are in use, those with an admin's
    #[arg(long)]
    allow_pull: bool,
    /// Another server of OpenAI's API, such as Ollama, LM Studio, llama-server, vLLM or paceline.
    /// Its models are listed here, and requests for them go there. key=FILE has its API key,
    /// cert=FILE the certificates to trust. With replica it may also answer for models of the same
    /// name that are loaded here, with other bits. May be given several times
    #[arg(long, value_name = "URL[,key=FILE][,cert=FILE][,replica]")]
    upstream: Vec<UpstreamArg>,
    /// Seconds from a request to the end of its answer, at most
    #[arg(long, value_name = "SECONDS", default_value_t = 600, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    request_timeout: u64,
    /// End at once when the parent, which holds the other end of standard input, is gone: `chaos`
    #[arg(long, hide = true)]
    with_parent: bool,
}

/// Serves requests until a signal.
///
/// # Errors
/// A model that cannot be found or loaded, an address that cannot be bound.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    if args.with_parent {
        process::end_with_parent().context("cannot watch the parent")?;
    }
    args.split.check()?;
    if args.model().is_none() && !args.adapter.is_empty() {
        return Err(Error::AdapterAlone.into());
    }
    let fuses = args.fuses()?;
    let each = args.each(fuses);
    args.check_draft(each.len())?;
    let models = each.iter().filter(|one| one.tuned.is_none()).count();
    if models > 1 && !args.adapter.is_empty() {
        return Err(Error::AdapterOfSeveral.into());
    }
    if each.len() > 1 {
        return multi_model::run(args, &each, signals);
    }
    let Some(model) = args.model().or(args.embed.as_deref()) else {
        return ended(signals.orderly(|cancel| idle(args, cancel)));
    };
    let found = pull::ensure(model, signals)?;
    if let Some(source) = encoder::source(&found.path) {
        args.check_encoder()?;
        let mut all = vec![encoder::load(
            args,
            &found.path,
            &source,
            args.named(model),
        )?];
        if args.model().is_some() {
            all.extend(args.beside(signals)?);
        }
        return ended(signals.orderly(|cancel| embed(args, all, cancel)));
    }
    let beside = args.beside(signals)?;
    let fused = args.only_adapter().filter(|_| fuses);
    let path = adapter::applied(found.path, fused)?;
    let sizes = |config: &Config| args.engine(&path, config);
    let mut opened = LocalModel::new(&path, (args.compute, args.engine), &args.split, sizes)?;
    if let Some(draft) = &args.draft {
        opened.set_draft(&pull::ensure(draft, signals)?.path)?;
    }
    if !fuses {
        args.adapt(&mut opened)?;
    }
    if args.follow {
        opened.follow_use();
    }
    opened.forecast();
    let model = args.served(&mut opened, &path);
    ended(signals.orderly(|cancel| serve(args, opened, (model, beside), cancel)))
}

fn ended(outcome: anyhow::Result<()>) -> anyhow::Result<()> {
    match outcome {
        // A signal is the normal end of a server.
        Err(error) if matches!(error.downcast_ref(), Some(StoreError::Cancelled)) => Ok(()),
        other => other,
    }
}

/// Parses a finite price.
fn price(text: &str) -> Result<f64, String> {
    let price: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    let is_price = price.is_finite() && price >= 0.0;
    is_price
        .then_some(price)
        .ok_or_else(|| "expected a number from 0 on".to_owned())
}

/// Runs the node, with models that are loaded and unloaded by commands.
fn idle(args: &Args, cancel: &Cancel) -> anyhow::Result<()> {
    let node = args.node.start(args.class())?;
    let agent = node.0.clone();
    let status = StatusSource(Arc::new(move || member::cluster(&agent)));
    let (config, board) = args.set_up(ProcessMetrics::default(), true)?;
    let (server, doors) = HttpServer::bind_node(config, status)?;
    node.0.set_api(server.addresses().to_vec());
    tell_urls(&server.urls());
    tell_node(&node);
    let fleet = commands::start(&node.0, args.node_spec()?, &doors)?;
    board.show_fleet(&node.0, &fleet, (home::home()?, home::api_keys()?));
    let _watching = board.watch(args.watch()?)?;
    let handle = server.handle();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait(cancel);
            if let Err(reason) = commands::leave(&fleet, &mut || {}) {
                print_err(format_args!("warning: {reason}"));
            }
            handle.shutdown();
        });
        server.run();
    });
    Ok(())
}

/// An adapter, and the name that it answers by.
#[derive(Clone, Debug)]
struct AdapterArg {
    name: Option<String>,
    path: PathBuf,
}

impl AdapterArg {
    /// Parses `NAME=FILE` or `FILE`; an existing path may have a `=` in it.
    fn parse(text: &str) -> Result<Self, String> {
        let named = text.split_once('=').filter(|(name, _)| !name.contains('/'));
        let (name, path) = match named.filter(|_| !Path::new(text).exists()) {
            Some(("", _)) => return Err("the name before = is empty".to_owned()),
            Some((name, path)) => (Some(name.to_owned()), path),
            None => (None, text),
        };
        Ok(Self {
            name,
            path: path.into(),
        })
    }

    /// Its name; by default that of its folder or file.
    fn id(&self) -> String {
        let name = self.name.clone();
        name.unwrap_or_else(|| adapter::name_of(&self.path))
    }
}

/// Prints the server's URLs. Programs wait for these lines.
fn tell_urls(urls: &[String]) {
    for url in urls {
        print_err(format_args!("listening on {url}"));
    }
}

fn tell_node(node: &NodeGuard) {
    let (agent, nodes) = (&node.0, node.0.nodes());
    let own = nodes.first().map_or("", |own| own.facts.name.as_str());
    print_err(format_args!(
        "node {own} of cluster {} on port {}",
        agent.cluster(),
        agent.port()
    ));
}

/// Waits for a signal.
fn wait(cancel: &Cancel) {
    while !cancel.is_cancelled() {
        std::thread::sleep(LOOK_EVERY);
    }
    print_err("stopping");
}

/// Starts the node in addition to a model. The model is served without it too: a second model of
/// this home, or a port in use, is no error.
fn join_in(args: &Args) -> Option<NodeGuard> {
    match args.node.start(args.class()) {
        Ok(node) => {
            tell_node(&node);
            Some(node)
        }
        Err(reason) => {
            let reason = match reason.downcast_ref() {
                Some(NodeError::Port { port, .. }) => format!("control port {port} is taken"),
                _ => format!("{reason:#}"),
            };
            print_err(format_args!("warning: in no cluster: {reason}"));
            None
        }
    }
}

fn serve(
    args: &Args,
    opened: LocalModel,
    (model, beside): (ServedModel, Option<HostedModel>),
    cancel: &Cancel,
) -> anyhow::Result<()> {
    let workers = (args.node.worker_args(), args.node.worker_folders()?);
    let instance = Arc::new(opened.start(workers, true, observer(&opened))?);
    let service = Arc::clone(&instance) as Arc<dyn Service>;
    let (measured, nodes) = (Arc::clone(&instance), opened.nodes());
    let facts = ProcessMetrics(Arc::new(move || figures::facts(&measured, nodes)));
    let (config, board) = args.set_up(facts, false)?;
    LocalInstances::on(&board).add(&model.id, &instance, nodes);
    let mut all = opened.api_models((model, service), args.only_adapter().is_some());
    all.extend(beside);
    let server = match <[HostedModel; 1]>::try_from(all) {
        Ok([(model, service)]) => HttpServer::bind(config, model, service)?,
        Err(all) => HttpServer::bind_all(config, all)?,
    };
    let urls = server.urls();
    let node = join_in(args);
    if let Some(node) = &node {
        node.0.set_api(server.addresses().to_vec());
        board.set_agent(&node.0);
    }
    let _watching = board.watch(args.watch()?)?;
    let handle = server.handle();
    std::thread::scope(|scope| {
        let watch = || watch(&opened, &instance, &urls, &handle, cancel);
        let watching = scope.spawn(watch);
        server.run();
        watching
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Serves embeddings until a signal.
fn embed(args: &Args, all: Vec<HostedModel>, cancel: &Cancel) -> anyhow::Result<()> {
    let (config, board) = args.set_up(ProcessMetrics::default(), false)?;
    let server = HttpServer::bind_all(config, all)?;
    let node = join_in(args);
    if let Some(node) = &node {
        node.0.set_api(server.addresses().to_vec());
        board.set_agent(&node.0);
    }
    let _watching = board.watch(args.watch()?)?;
    tell_urls(&server.urls());
    let handle = server.handle();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait(cancel);
            handle.shutdown();
        });
        server.run();
    });
    Ok(())
}

/// Waits for a signal, then stops the server. The first start of workers must succeed.
fn watch(
    opened: &LocalModel,
    instance: &Instance,
    urls: &[String],
    handle: &ServerHandle,
    cancel: &Cancel,
) -> anyhow::Result<()> {
    let outcome = opened.ready(instance).map(|()| {
        tell_urls(urls);
        wait(cancel);
    });
    handle.shutdown();
    outcome
}

/// Prints the workers' notices.
fn observer(opened: &LocalModel) -> Observer {
    let mut loading = LoadingBar::new(opened.nodes());
    let (config, threads) = (opened.config().clone(), opened.options().threads);
    let mut told = false;
    Box::new(move |notice, cuts| {
        loading.update(notice);
        match notice {
            Notice::Loading { .. } => {}
            // A split change has its own line.
            Notice::Ready { again: false, .. } if std::mem::replace(&mut told, true) => {}
            notice => lines(notice, cuts, (&config, threads))
                .iter()
                .for_each(print_err),
        }
    })
}

impl Args {
    fn model(&self) -> Option<&str> {
        self.models().next()
    }

    fn models(&self) -> impl Iterator<Item = &str> {
        self.model.iter().chain(&self.option).map(String::as_str)
    }

    /// Arguments of each distinct model; aliases belong to the first. Fused adapters are models of
    /// their own.
    fn each(&self, fuses: bool) -> Vec<Self> {
        let mut each: Vec<Self> = Vec::new();
        for model in self.models() {
            if each.iter().all(|one| one.model() != Some(model)) {
                let alias = if each.is_empty() {
                    &self.alias[..]
                } else {
                    &[]
                };
                each.push(Self {
                    model: vec![model.to_owned()],
                    option: Vec::new(),
                    alias: alias.to_vec(),
                    ..self.clone()
                });
            }
        }
        let beside: &[AdapterArg] = match self.only_adapter() {
            None if fuses => &self.adapter[..],
            _ => &[],
        };
        let model = self.model().map(str::to_owned);
        each.extend(beside.iter().map(|tuned| Self {
            model: model.clone().into_iter().collect(),
            option: Vec::new(),
            alias: Vec::new(),
            tuned: Some(tuned.clone()),
            ..self.clone()
        }));
        each
    }

    /// The only adapter, which replaces the model.
    fn only_adapter(&self) -> Option<&Path> {
        match self.adapter.as_slice() {
            [AdapterArg { name: None, path }] => Some(path.as_path()),
            _ => None,
        }
    }

    /// The node's default kernel class.
    fn class(&self) -> KernelClass {
        self.compute.class.unwrap_or_default()
    }

    fn engine(&self, path: &Path, config: &Config) -> EngineConfig {
        let parallel = usize::from(self.parallel);
        let room = ContextBudget::of(
            (path, config),
            self.compute.kv_memory(self.engine),
            self.context,
            parallel,
        );
        EngineConfig {
            max_running: parallel,
            max_waiting: WAITING_MAX,
            pace: self.pace,
            drafts: self.drafts(),
            strict: self.engine.strict,
            ..room.engine(self.model().unwrap_or_default())
        }
    }

    /// Maximum draft tokens. On several nodes the measured speed of answers selects the split, and
    /// drafts would distort it.
    fn drafts(&self) -> usize {
        let is_default = self.split.nodes == 1 || self.draft.is_some();
        let default = if is_default { DRAFTS } else { 0 };
        self.drafts.map_or(default, usize::from)
    }

    /// Rejects a draft model unless there is one model with drafts.
    ///
    /// # Errors
    /// [`Error::DraftOf`].
    fn check_draft(&self, models: usize) -> Result<(), Error> {
        let wrong = match models {
            _ if self.draft.is_none() => None,
            1 if self.drafts == Some(0) => Some("--drafts 0, which is for no guesses"),
            1 => None,
            0 => Some("no model"),
            _ => Some("several models"),
        };
        wrong.map_or(Ok(()), |with| Err(Error::DraftOf { with }))
    }

    /// The model's names for clients: that of its file or folder, and the argument.
    fn named(&self, given: &str) -> ModelNames {
        if let Some(tuned) = &self.tuned {
            return ModelNames {
                aliases: Vec::new(),
                id: tuned.id(),
            };
        }
        let name = Path::new(given).file_stem();
        let is_path = Path::new(given).exists();
        let short = name
            .filter(|_| is_path)
            .map(|n| n.to_string_lossy().into_owned());
        let aliases = short.is_some().then(|| given.to_owned()).into_iter();
        ModelNames {
            aliases: aliases.chain(self.alias.iter().cloned()).collect(),
            id: short.unwrap_or_else(|| given.to_owned()),
        }
    }

    /// The encoder of `--embed`, without the model's aliases.
    ///
    /// # Errors
    /// A model that cannot be found or is not an encoder.
    fn beside(&self, signals: &Signals) -> anyhow::Result<Option<HostedModel>> {
        let Some(given) = self.embed.as_deref() else {
            return Ok(None);
        };
        let found = pull::ensure(given, signals)?;
        let no_encoder = || Error::NoEncoder {
            model: given.to_owned(),
        };
        let source = encoder::source(&found.path).ok_or_else(no_encoder)?;
        let mut named = self.named(given);
        named.aliases.retain(|name| !self.alias.contains(name));
        encoder::load(self, &found.path, &source, named).map(Some)
    }

    /// Rejects options that encoders do not support.
    ///
    /// # Errors
    /// [`Error::OfDecoders`].
    fn check_encoder(&self) -> Result<(), Error> {
        let class = self.compute.class;
        let given = [
            ("--nodes", self.split.nodes != 1),
            ("--shares", !self.split.shares.is_empty()),
            ("--prefill-nodes", self.split.prefill_nodes != 0),
            ("--context", self.context.is_some()),
            ("--engine", self.engine.engine.is_some()),
            (
                "--class",
                class.is_some_and(|class| class != KernelClass::CpuF32),
            ),
            ("--kv", self.compute.kv.is_some()),
            ("--draft", self.draft.is_some()),
            ("--adapter", !self.adapter.is_empty()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => Err(Error::OfDecoders { option }),
            None => Ok(()),
        }
    }

    /// Outputs of the board: its files, and warnings.
    fn watch(&self) -> anyhow::Result<DashboardOutputs> {
        Ok(DashboardOutputs {
            events: self.events.clone(),
            home: home::home()?,
            tell: Arc::new(|line| print_err(line)),
        })
    }

    /// The node's settings for models of the cluster.
    fn node_spec(&self) -> anyhow::Result<commands::NodeSettings> {
        let program = own_program().context("cannot find this program's own file")?;
        let [train_program, bench_program, array_program] = [(); 3].map(|()| program.clone());
        let bench_args = self.node.rank_args();
        let home::StoreSettings { home, options } = home::StoreSettings::from_env()?;
        let array_args = self.node.array_args()?;
        Ok(commands::NodeSettings {
            home,
            program: (program, self.node.worker_args()),
            worker_env: worker_env(),
            worker_folders: self.node.worker_folders()?,
            disk_budget: self.node.disk_budget(),
            lets_others_remove: self.allow_delete,
            is_durable: self.node.is_durable(),
            pull: options,
            templates: template_program()?,
            kernels: Box::new(local_model::kernels),
            interface: self.node.data_interface().map(str::to_owned),
            start_far: Box::new(move || train::start_far(&train_program)),
            start_rank: Box::new(move || bench::start_rank(&bench_program, &bench_args)),
            start_arrays: Box::new(move || mapreduce::start_far(&array_program, &array_args)),
            tell: Arc::new(|line| print_err(line)),
        })
    }

    /// The model for the API.
    fn served(&self, opened: &mut LocalModel, path: &Path) -> ServedModel {
        let ModelNames { id, aliases } = self.named(self.model().unwrap_or_default());
        opened.served((id, aliases), path, &|line| print_err(line))
    }

    /// The settings of every server of this command, and the board; [`watch`](Board::watch) then
    /// starts the audit log and `--events`.
    ///
    /// # Errors
    /// Invalid settings.
    fn set_up(
        &self,
        facts: ProcessMetrics,
        manages: bool,
    ) -> anyhow::Result<(paceline_serve::Config, Dashboard)> {
        let (folder, tls) = (home::folder()?, self.tls_cert.as_deref());
        let remover = match self.allow_delete {
            true => Some(remover(home::home()?)),
            false => None,
        };
        let options = servers::Options {
            home: &folder,
            hosts: &self.host,
            ports: &self.port,
            names: &self.allow_host,
            origins: &self.allow_origin,
            open_to_network: self.no_keys,
            is_lenient: self.lenient,
            remover,
            puller: self.allow_pull.then(pull::for_clients).transpose()?,
            upstreams: &self.upstream,
            request: Duration::from_secs(self.request_timeout),
            kwh_price: self.kwh_price,
            certificate: tls.zip(self.tls_key.as_deref()),
            plain: self.insecure_http,
            downloads: Arc::new(downloads),
            tell: Arc::new(|line| print_err(line)),
        };
        Ok(options.set_up(facts, manages)?)
    }
}

/// Settings of the dashboard's downloads.
fn downloads() -> Result<(Home, PullOptions), String> {
    let settings = home::StoreSettings::from_env().map_err(|error| format!("{error:#}"))?;
    Ok((settings.home, settings.options))
}
