//! `paceline up`: this machine's node, alone or with models behind the HTTP API.

mod encoder;
mod several;
mod wire;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use clap::builder::NonEmptyStringValueParser;
use paceline_base::{Bytes, KernelClass, lock};
use paceline_cluster::machine;
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::agent::Error as NodeError;
use paceline_engine::{EngineConfig, Pace, Service, State};
use paceline_model::{Config, ExpertUses};
use paceline_node::fleet::Fleet;
use paceline_node::room::Room;
use paceline_node::supervisor::Notice;
use paceline_node::{Instance, Observer, Portrait};
use paceline_serve::tls::Wire;
use paceline_serve::{
    About, Access, Clock, DEFAULT_PORT, Fact, Facts, Handle, Model, Removal, Remover, Server,
    Status,
};
use paceline_store::{
    Cancel, EntryName, Error as StoreError, Home, Resolved, find_for_removal, resolve,
};
use serde_json::{Value, json};

use crate::adapter;
use crate::board::Board;
use crate::compute::{ComputeArgs, EngineArgs};
use crate::error::Error;
use crate::home;
use crate::instances;
use crate::interrupt::Signals;
use crate::loaded::{self, Loading, Opened, SplitArgs, tell_split};
use crate::member::{self, NodeArgs, Running};
use crate::output::tell;
use crate::process::{self, peak_memory_bytes};
use crate::pull;

const EXAMPLES: &str = "\
Examples:
  paceline up
  paceline up smollm2 --nodes 2
  paceline up smollm2 gemma3-270m
  curl http://127.0.0.1:52415/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"model\": \"smollm2\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}'

The API is that of OpenAI (/v1/chat/completions, /v1/completions, /v1/responses, /v1/models,
/v1/embeddings for encoders such as all-MiniLM-L6-v2), of
Anthropic (/v1/messages), of Ollama (/api/chat, /api/generate) and of llama-server (/tokenize,
/infill); beside it /health, /metrics and /openapi.json. Ctrl-C ends it; answers that are under way get 5 seconds.";

/// A model and what answers with it.
type Serving = (Model, Arc<dyn Service>);

/// A model's names.
struct Named {
    id: String,
    aliases: Vec<String>,
}

/// How often a request to end is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Requests that wait for a place before further ones are refused as busy: one of every
/// connection that the server has room for by default, choices of one request not counted twice.
pub(crate) const WAITING_MAX: usize = 512;

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
    /// Put this adapter into the model: its folder, or its file of weights (PEFT's or MLX's form)
    #[arg(long, value_name = "FILE")]
    adapter: Option<PathBuf>,
    /// Another name that clients may call the model by, the first of several; may be given several
    /// times
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    alias: Vec<String>,
    /// An encoder such as all-MiniLM-L6-v2 beside MODEL, for /v1/embeddings and /api/embed
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
    #[arg(long, value_name = "MS", default_value_t = Pace::Auto)]
    pace: Pace,
    /// Most tokens of an answer that are guessed from its own text and checked in one step, where
    /// that pays; 0 for none [default: 8 on one node, 0 on several]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=16))]
    drafts: Option<u8>,
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
    /// that is being served
    #[arg(long)]
    allow_delete: bool,
    /// Let clients fetch models into this machine's store (Ollama's POST /api/pull); where keys
    /// are in use, those with an admin's
    #[arg(long)]
    allow_pull: bool,
    /// Seconds from a request to the end of its answer, at most
    #[arg(long, value_name = "SECONDS", default_value_t = 600, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    request_timeout: u64,
    /// End at once when the parent, which holds the other end of standard input, is gone: `chaos`
    #[arg(long, hide = true)]
    with_parent: bool,
}

/// Answers requests until a signal comes.
///
/// # Errors
/// A model that cannot be had or loaded, an address that cannot be listened on.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    if args.with_parent {
        process::end_with_parent().context("cannot watch the parent")?;
    }
    args.split.check()?;
    let each = args.each();
    if each.len() > 1 {
        if args.adapter.is_some() {
            return Err(Error::AdapterOfSeveral.into());
        }
        return several::run(args, &each, signals);
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
    let path = adapter::applied(found.path, args.adapter.as_deref())?;
    let sizes = |config: &Config| args.engine(&path, config);
    let mut opened = Opened::new(&path, (args.compute, args.engine), &args.split, sizes)?;
    opened.forecast();
    let model = args.served(&mut opened, &path);
    ended(signals.orderly(|cancel| serve(args, opened, (model, beside), cancel)))
}

fn ended(outcome: anyhow::Result<()>) -> anyhow::Result<()> {
    match outcome {
        // A signal is how a server ends.
        Err(error) if matches!(error.downcast_ref(), Some(StoreError::Cancelled)) => Ok(()),
        other => other,
    }
}

/// A price that can be multiplied.
fn price(text: &str) -> Result<f64, String> {
    let price: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    let is_price = price.is_finite() && price >= 0.0;
    is_price
        .then_some(price)
        .ok_or_else(|| "expected a number from 0 on".to_owned())
}

/// Runs the node, with models that `load` brings and `unload` takes away.
fn idle(args: &Args, cancel: &Cancel) -> anyhow::Result<()> {
    let node = args.node.start(args.class())?;
    let agent = node.0.clone();
    let status = Status(Arc::new(move || member::cluster(&agent)));
    let (config, board) = args.set_up(Facts::default(), true)?;
    let (server, doors) = Server::bind_node(config, status)?;
    node.0.set_api(server.addresses().to_vec());
    tell_urls(&server.urls());
    tell_node(&node);
    let fleet = instances::start((&node.0, &args.node), doors)?;
    show_fleet(&board, &node.0, &fleet);
    let _watching = board.watch(args.events.as_deref())?;
    let handle = server.handle();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait(cancel);
            if let Err(reason) = instances::leave(&fleet, &mut || {}) {
                tell(format_args!("warning: {reason}"));
            }
            handle.shutdown();
        });
        server.run();
    });
    Ok(())
}

/// Has the dashboard show and manage what is loaded over the cluster.
fn show_fleet(board: &Board, agent: &Agent, fleet: &Arc<Fleet>) {
    board.set_agent(agent);
    let own = Arc::downgrade(fleet);
    board.set_instances(Box::new(move || {
        own.upgrade().map_or_else(Default::default, |fleet| {
            let views = fleet.list().into_iter().map(|view| json!(view));
            (views.collect(), fleet.portraits())
        })
    }));
    let (own, agent) = (Arc::downgrade(fleet), agent.clone());
    board.set_manage(Box::new(move |command, arguments| {
        let fleet = own.upgrade().ok_or("the node is stopping")?;
        instances::manage((&agent, &fleet), command, arguments)
    }));
}

/// The models that this process has workers for, as its dashboard shows them. Clones are the same.
#[derive(Clone, Default)]
struct Shown(Arc<Mutex<Vec<Local>>>);

/// A model of this process.
struct Local {
    id: String,
    model: String,
    instance: Weak<Instance>,
    nodes: u32,
}

impl Shown {
    /// Shows none yet.
    fn on(board: &Board) -> Self {
        let shown = Self::default();
        let own = shown.clone();
        board.set_instances(Box::new(move || own.told()));
        shown
    }

    fn told(&self) -> (Vec<Value>, BTreeMap<String, Portrait>) {
        lock(&self.0).iter().filter_map(Local::told).unzip()
    }

    /// Shows a model from now on, as long as its instance is there.
    fn add(&self, model: &str, instance: &Arc<Instance>, nodes: u32) {
        let mut all = lock(&self.0);
        let id = match all.len() {
            0 => "local".to_owned(),
            n => format!("local-{}", n + 1),
        };
        all.push(Local {
            id,
            model: model.to_owned(),
            instance: Arc::downgrade(instance),
            nodes,
        });
    }
}

impl Local {
    /// Its line on the dashboard, and how it computes.
    fn told(&self) -> Option<(Value, (String, Portrait))> {
        let instance = self.instance.upgrade()?;
        let (state, reason) = match instance.status().state {
            State::Loading => ("loading", None),
            State::Ready => ("ready", None),
            State::Recovering(reason) => ("recovering", Some(reason)),
            State::Failed(reason) => ("failed", Some(reason)),
        };
        let workers = (0..self.nodes).map(|rank| format!("worker {rank}"));
        let view = json!({
            "id": self.id, "model": self.model, "state": state, "reason": reason,
            "nodes": workers.collect::<Vec<_>>(), "epoch": instance.epoch(),
            "split": instance.split().to_string(),
        });
        Some((view, (self.id.clone(), instance.portrait())))
    }
}

/// Says where the server is. Programs wait for these lines.
fn tell_urls(urls: &[String]) {
    for url in urls {
        tell(format_args!("listening on {url}"));
    }
}

fn tell_node(node: &Running) {
    let (agent, nodes) = (&node.0, node.0.nodes());
    let own = nodes.first().map_or("", |own| own.facts.name.as_str());
    tell(format_args!(
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
    tell("stopping");
}

/// Starts the node beside a model. A model is served without one too: a second model of this home,
/// or a port that is taken, is no reason to fail.
fn join_in(args: &Args) -> Option<Running> {
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
            tell(format_args!("warning: in no cluster: {reason}"));
            None
        }
    }
}

fn serve(
    args: &Args,
    opened: Opened,
    (model, beside): (Model, Option<Serving>),
    cancel: &Cancel,
) -> anyhow::Result<()> {
    let instance = Arc::new(opened.start(true, observer(&opened))?);
    let service = Arc::clone(&instance) as Arc<dyn Service>;
    let (measured, nodes) = (Arc::clone(&instance), opened.nodes());
    let facts = Facts(Arc::new(move || facts(&measured, nodes)));
    let (config, board) = args.set_up(facts, false)?;
    Shown::on(&board).add(&model.id, &instance, nodes);
    let server = match beside {
        None => Server::bind(config, model, service)?,
        Some(beside) => Server::bind_all(config, vec![(model, service), beside])?,
    };
    let urls = server.urls();
    let node = join_in(args);
    if let Some(node) = &node {
        node.0.set_api(server.addresses().to_vec());
        board.set_agent(&node.0);
    }
    let _watching = board.watch(args.events.as_deref())?;
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

/// Makes embeddings until a signal comes.
fn embed(args: &Args, all: Vec<Serving>, cancel: &Cancel) -> anyhow::Result<()> {
    let (config, board) = args.set_up(Facts::default(), false)?;
    let server = Server::bind_all(config, all)?;
    let node = join_in(args);
    if let Some(node) = &node {
        node.0.set_api(server.addresses().to_vec());
        board.set_agent(&node.0);
    }
    let _watching = board.watch(args.events.as_deref())?;
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

/// Waits for a signal, then stops the server. The first start must succeed.
fn watch(
    opened: &Opened,
    instance: &Instance,
    urls: &[String],
    handle: &Handle,
    cancel: &Cancel,
) -> anyhow::Result<()> {
    let outcome = opened.ready(instance).map(|()| {
        tell_urls(urls);
        wait(cancel);
    });
    handle.shutdown();
    outcome
}

/// Tells people what becomes of the workers.
fn observer(opened: &Opened) -> Observer {
    let mut loading = Loading::new(opened.nodes());
    let (config, threads) = (opened.config().clone(), opened.threads());
    let mut told = false;
    Box::new(move |notice, cuts| {
        loading.hear(notice);
        match notice {
            Notice::Loading { .. } => {}
            // A change of the split has a line of its own.
            Notice::Ready { again: false, .. } if std::mem::replace(&mut told, true) => {}
            Notice::Ready {
                way, facts, again, ..
            } => {
                let cut = &cuts[*way];
                let weights = facts.iter().map(|rank| Bytes(rank.weight_bytes));
                let weights: Vec<Bytes> = weights.collect();
                tell_split(&config, &cut.split, threads, &weights);
                if let Some(tok_s) = cut.tok_s {
                    tell(format_args!(
                        "an answer alone is predicted to get {tok_s:.1} tokens/s"
                    ));
                }
                if *again {
                    tell("the workers are ready again");
                }
            }
            Notice::Changed(change) => tell(change.line()),
            Notice::Failed {
                reason,
                again_in: Some(wait),
                ..
            } if wait.is_zero() => tell(format_args!(
                "error: {reason}; starting the workers again, answers wait"
            )),
            Notice::Failed {
                reason,
                again_in: Some(wait),
                ..
            } => tell(format_args!(
                "error: {reason}; starting the workers again in {:.1} s",
                wait.as_secs_f64()
            )),
            Notice::Failed { again_in: None, .. } => {} // whoever waits for it says so
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

    /// Arguments for each model alone, once; aliases are the first one's.
    fn each(&self) -> Vec<Self> {
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
        each
    }

    /// The kernel class that this node computes by default.
    fn class(&self) -> KernelClass {
        self.compute.class.unwrap_or_default()
    }

    fn engine(&self, path: &Path, config: &Config) -> EngineConfig {
        let parallel = usize::from(self.parallel);
        let room = Room::of(
            (path, config),
            (self.compute.in_memory(self.engine), machine::available()),
            self.context,
            parallel,
        );
        EngineConfig {
            max_running: parallel,
            max_waiting: WAITING_MAX,
            pace: self.pace,
            drafts: self.drafts(),
            ..room.engine(self.model().unwrap_or_default())
        }
    }

    /// Over several nodes the measured speed of answers decides which split is kept, and answers
    /// with drafts are no measure of a split.
    fn drafts(&self) -> usize {
        let default = if self.split.nodes == 1 { 8 } else { 0 };
        self.drafts.unwrap_or(default).into()
    }

    /// The model's names for clients: a file's or folder's own name, and the argument as given.
    fn named(&self, given: &str) -> Named {
        let name = Path::new(given).file_stem();
        let is_path = Path::new(given).exists();
        let short = name
            .filter(|_| is_path)
            .map(|n| n.to_string_lossy().into_owned());
        let aliases = short.is_some().then(|| given.to_owned()).into_iter();
        Named {
            aliases: aliases.chain(self.alias.iter().cloned()).collect(),
            id: short.unwrap_or_else(|| given.to_owned()),
        }
    }

    /// The encoder of `--embed`, which has none of the model's further names.
    ///
    /// # Errors
    /// A model that cannot be had or is no encoder.
    fn beside(&self, signals: &Signals) -> anyhow::Result<Option<Serving>> {
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

    /// Refuses what an encoder cannot follow.
    ///
    /// # Errors
    /// [`Error::OfDecoders`].
    fn check_encoder(&self) -> Result<(), Error> {
        let class = self.compute.class;
        let given = [
            ("--nodes", self.split.nodes != 1),
            ("--shares", !self.split.shares.is_empty()),
            ("--context", self.context.is_some()),
            ("--engine", self.engine.engine.is_some()),
            (
                "--class",
                class.is_some_and(|class| class != KernelClass::CpuF32),
            ),
            ("--kv", self.compute.kv.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => Err(Error::OfDecoders { option }),
            None => Ok(()),
        }
    }

    /// The model as clients see it.
    fn served(&self, opened: &mut Opened, path: &Path) -> Model {
        let template = match opened.template.take() {
            Some(Ok(template)) => Some(Arc::new(template)),
            Some(Err(error)) => {
                tell(format_args!(
                    "warning: no chat, the model's template cannot be used: {error}"
                ));
                None
            }
            None => None,
        };
        let Named { id, aliases } = self.named(self.model().unwrap_or_default());
        Model {
            id,
            aliases,
            created_unix_s: loaded::changed_unix_s(path),
            fingerprint: opened.fingerprint(),
            tokenizer: Arc::clone(&opened.tokenizer),
            template,
            context: opened.engine().context,
            sampling: loaded::sampling(path),
            about: About {
                architecture: opened.config().family.name().to_owned(),
                bytes: loaded::size(path),
                parameters: 0,
                quantization: String::new(),
            },
        }
    }

    /// Options with which every server of this command starts: its settings, and the board, whose
    /// [`watch`](Board::watch) writes the audit log and `--events`.
    ///
    /// # Errors
    /// Settings that cannot be read.
    fn set_up(
        &self,
        facts: Facts,
        manages: bool,
    ) -> anyhow::Result<(paceline_serve::Config, Board)> {
        let mut config = self.config(facts)?;
        let board = Board::new(config.live.clone());
        let (own, others) = (board.clone(), config.facts);
        config.facts = Facts(Arc::new(move || {
            let mut facts = (others.0)();
            facts.extend(own.facts());
            facts
        }));
        config.board = board.for_server(manages);
        if let Some(price) = self.kwh_price {
            board.set_kwh_price(price);
        }
        Ok((config, board))
    }

    fn config(&self, facts: Facts) -> anyhow::Result<paceline_serve::Config> {
        let unix_s = || {
            SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0, |since| since.as_secs())
        };
        let now = Instant::now;
        let mut config = paceline_serve::Config::new(self.port[0], Clock { now, unix_s });
        let hosts = self.host.iter();
        let all = hosts.flat_map(|host| self.port.iter().map(|port| SocketAddr::new(*host, *port)));
        config.bind = all.collect();
        let keys = home::api_keys()?;
        config.access = Access {
            hosts: self.allow_host.clone(),
            origins: self.allow_origin.clone(),
            keys: keys
                .try_exists()
                .context("cannot look for API keys")?
                .then_some(keys),
            open_to_network: self.no_keys,
        };
        config.is_lenient = self.lenient;
        config.remover = self.allow_delete.then(remover).transpose()?;
        config.puller = self.allow_pull.then(pull::for_clients).transpose()?;
        config.times.request = Duration::from_secs(self.request_timeout);
        config.facts = facts;
        // A server that would let everybody in makes no certificate.
        config.check()?;
        config.wire = self.wire()?;
        if !matches!(config.wire, Wire::Plain) {
            config.access.hosts.extend(wire::own_names());
        }
        Ok(config)
    }
}

/// Removes models from the store, by their names there: clients name no paths.
fn remover() -> anyhow::Result<Remover> {
    let home = home::home()?;
    let remove = move |name: &str, served: &[String]| {
        if Path::new(name).exists() {
            return Ok(Removal::NotKept);
        }
        if is_served(&home, name, served) {
            return Ok(Removal::InUse);
        }
        match paceline_store::remove(&home, name) {
            Ok(_) => Ok(Removal::Done),
            Err(StoreError::NotInStore { .. }) => Ok(Removal::NotKept),
            Err(error) => Err(error.to_string()),
        }
    };
    Ok(Remover(Arc::new(remove)))
}

/// Whether `name` means the stored model that one of the names in `served` means. A model has
/// several names: its alias, its usual name, its hub id, and a path.
fn is_served(home: &Home, name: &str, served: &[String]) -> bool {
    let Ok(own) = find_for_removal(home, name) else {
        return false;
    };
    served
        .iter()
        .any(|other| stored(home, other).as_ref() == Some(&own))
}

/// The stored model that a server was given as `spec`.
fn stored(home: &Home, spec: &str) -> Option<EntryName> {
    let loaded = match resolve(home, spec) {
        Ok(Resolved::Path(found)) => found.name,
        _ => None,
    };
    // A path into the store is found as a path only.
    loaded.or_else(|| find_for_removal(home, spec).ok())
}

/// What `/metrics` tells of the processes.
fn facts(instance: &Instance, nodes: u32) -> Vec<Fact> {
    let mut facts = vec![
        Fact {
            name: "nodes",
            help: "Nodes that compute the model together",
            labels: String::new(),
            value: f64::from(nodes),
        },
        Fact {
            name: "worker_restarts",
            help: "Times that the workers were started again after one failed",
            labels: String::new(),
            value: instance.restarts() as f64,
        },
    ];
    facts.push(Fact {
        name: "split_changes",
        help: "Times that the split was changed because another one was faster, or was to be",
        labels: String::new(),
        value: f64::from(instance.n_changes()),
    });
    let (predicted, measured) = (instance.predicted(), instance.measured());
    for (known, name, help) in [
        (
            predicted,
            "decode_tok_s_predicted",
            "Tokens a second of an answer alone, as predicted",
        ),
        (
            measured,
            "decode_tok_s_measured",
            "Tokens a second of the last answers that were alone",
        ),
    ] {
        facts.extend(known.map(|value| Fact {
            name,
            help,
            labels: String::new(),
            value,
        }));
    }
    let memory = peak_memory_bytes().map(|bytes| ("peak_memory_bytes", bytes));
    let sent = instance
        .moved()
        .map(|moved| ("wire_sent_bytes", moved.sent.0));
    let help = [
        "Most memory that the node's own process has had",
        "Bytes that the workers have sent to one another since they started",
    ];
    for (known, help) in [memory, sent].into_iter().zip(help) {
        facts.extend(known.map(|(name, value)| Fact {
            name,
            help,
            labels: String::new(),
            value: value as f64,
        }));
    }
    facts.extend(instance.expert_uses().iter().flat_map(uses_of_layer));
    facts
}

/// How often each expert of a layer was chosen.
fn uses_of_layer(uses: &ExpertUses) -> impl Iterator<Item = Fact> {
    let of = |(expert, rows): (usize, &u64)| Fact {
        name: "expert_rows",
        help: "Rows that chose the expert of the layer since the weights were loaded",
        labels: format!("layer=\"{}\",expert=\"{expert}\"", uses.layer),
        value: *rows as f64,
    };
    uses.rows.iter().enumerate().map(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_served_file_is_known_under_its_other_names() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        for name in ["one", "two"] {
            let folder = home.models_dir().join(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("m.gguf"), b"GGUFdata").unwrap();
        }
        let path = home.models_dir().join("one/m.gguf");
        let path = path.to_string_lossy().into_owned();
        for (served, expected) in [
            ("one", true),
            (path.as_str(), true),
            ("two", false),
            ("x", false),
        ] {
            let served = ["mine".to_owned(), served.to_owned()];
            assert_eq!(is_served(&home, "one", &served), expected, "{served:?}");
        }
        assert!(!is_served(&home, "three", &["three".to_owned()]));
    }
}
