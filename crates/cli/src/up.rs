//! `paceline up`: this machine's node. It loads the models of its command line, as `paceline load`
//! loads others.

mod models;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::builder::NonEmptyStringValueParser;
use paceline_base::{CallbackError, KernelClass};
use paceline_board::commands::ProgramStarter;
use paceline_board::host::HostProbes;
use paceline_board::{
    Dashboard, DashboardOutputs, commands, remover, servers, upgrade as cluster_upgrade,
};
use paceline_engine::StepTimeTarget;
use paceline_node::fleet::{Fleet, LoadRequest};
use paceline_node::tunnel;
use paceline_serve::{DEFAULT_PORT, HttpServer, StatusSource, UpstreamArg};
use paceline_store::{Cancel, Error as StoreError, Home, PullOptions};
use serde_json::json;

use crate::adapter;
use crate::compute::{ComputeArgs, EngineArgs, context};
use crate::draft_limit::DraftLimit;
use crate::home;
use crate::instances::LoadProgress;
use crate::interrupt::Signals;
use crate::local_model::{self, SplitArgs};
use crate::member::{self, NodeArgs, NodeGuard};
use crate::output::{LINES, print_err};
use crate::process::{self, own_program, template_program, worker_env};
use crate::{doctor, plan, pull, upgrade};

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

/// Steps that a new user takes in another terminal.
const NEXT_STEPS: &str = "\
next, in another terminal:
  paceline load smollm2      load a model; over several machines with --nodes N
  paceline nodes invite      let another machine in, by a code for `paceline join`
  paceline run smollm2       chat with it";

/// Interval of shutdown checks.
const LOOK_EVERY: Duration = Duration::from_millis(50);

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
    /// Another name that clients may call the model by, the first of several; may be given several
    /// times
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    alias: Vec<String>,
    /// An encoder such as all-MiniLM-L6-v2, for /v1/embeddings and /api/embed
    #[arg(long, value_name = "MODEL")]
    embed: Option<String>,
    /// Keep the models loaded after this command ends, until `paceline unload`: on other machines,
    /// and here after the next start
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    split: SplitArgs,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Answers that are computed at the same time; more wait
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Milliseconds between two tokens of an answer while prompts of other requests are read;
    /// `auto`: 2.5 times of what it takes without them; `off`: prompts first
    #[arg(long, value_name = "MS", default_value_t = StepTimeTarget::Auto)]
    pace: StepTimeTarget,
    /// Most tokens of an answer that are guessed and checked in one step, where that pays; 0 for
    /// none. auto: 8, none on MLX, none from the text on several nodes
    #[arg(long, value_name = "N", default_value_t)]
    drafts: DraftLimit,
    /// Guesses tokens, which MODEL checks together: a small model of the same vocabulary, or a
    /// draft head (EAGLE-3, DFlash, DSpark, Gemma 4's assistant). The same answers in less time
    /// [default: the prediction layer in MODEL's files, if there is one]
    #[arg(long, visible_alias = "drafter", value_name = "MODEL")]
    draft: Option<String>,
    /// Have nodes that compute slower than before, because somebody uses their cores, give work to
    /// the others meanwhile
    #[arg(long)]
    follow: bool,
    /// Most tokens of a conversation and its answer [default: what the model was trained for, as
    /// far as memory has room]; max: all of that
    #[arg(long, value_name = "N|max", allow_negative_numbers = true, value_parser = context)]
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

pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    if args.with_parent {
        process::end_with_parent().context("cannot watch the parent")?;
    }
    args.check()?;
    // Now: an upgrade gives the file of this process another name.
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let restart = Arc::default();
    ended(signals.orderly(|cancel| serve(args, signals, (cancel, &restart))))?;
    match restart.load(Ordering::SeqCst) {
        true => {
            let error = process::execute(&program, None);
            Err(anyhow!(error).context(format!("cannot execute {}", program.display())))
        }
        false => Ok(()),
    }
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

/// Runs the node, and loads the command line's models on it. The node is a member of its cluster
/// while it fetches them.
fn serve(
    args: &Args,
    signals: &Signals,
    (cancel, restart): (&Cancel, &Arc<AtomicBool>),
) -> anyhow::Result<()> {
    let node = args.node.start(args.class())?;
    let agent = node.0.clone();
    let status = StatusSource(Arc::new(move || member::cluster(&agent)));
    let (config, board) = args.set_up()?;
    let (server, doors) = HttpServer::bind_node(config, status)?;
    node.0.set_api(server.addresses().to_vec());
    tell_node(&node);
    let fleet = commands::start(&node.0, args.node_spec()?, &doors)?;
    board.show_fleet(&node.0, &fleet, (home::home()?, home::api_keys()?));
    board.set_host(host_probes());
    cluster_upgrade::serve_restart(&node.0, &fleet, Arc::clone(restart));
    let _watching = board.watch(args.watch()?)?;
    let (handle, urls) = (server.handle(), server.urls());
    let loading = args.has_models().then(|| doors.begin_loading());
    std::thread::scope(|scope| {
        let working = scope.spawn(|| {
            let requests = args.requests(signals);
            let loaded = requests.and_then(|requests| {
                load_all(args, (&node, &fleet), &requests, cancel)?;
                Ok(requests)
            });
            drop(loading);
            if let Ok(requests) = &loaded {
                tell_urls(&urls);
                tell_next(&urls, requests);
                wait(cancel, restart);
                if let Err(reason) = commands::leave(&fleet, &mut || {}) {
                    print_err(format_args!("warning: {reason}"));
                }
            }
            handle.shutdown();
            loaded.map(drop)
        });
        server.run();
        working
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Loads models in turn, so that each sees the memory that remains.
fn load_all(
    args: &Args,
    (node, fleet): (&NodeGuard, &Fleet),
    requests: &[LoadRequest],
    cancel: &Cancel,
) -> anyhow::Result<()> {
    for request in requests {
        if cancel.is_cancelled() {
            return Err(StoreError::Cancelled.into());
        }
        let request = LoadRequest {
            nodes: vec![node.0.id().to_string()],
            ..request.clone()
        };
        let id = match args.keep {
            true => fleet.load_once(&request),
            false => fleet.lease(&request),
        };
        await_ready(fleet, &id?.to_string(), cancel)?;
    }
    Ok(())
}

/// Waits until an instance answers, or is unloaded.
fn await_ready(fleet: &Fleet, id: &str, cancel: &Cancel) -> anyhow::Result<()> {
    let mut bar = LoadProgress::new();
    while !cancel.is_cancelled() {
        let Some(view) = fleet.list().into_iter().find(|view| view.id == id) else {
            return Ok(());
        };
        if bar.done(&json!(view))? {
            return Ok(());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Err(StoreError::Cancelled.into())
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

/// Prints the page's address and, without a model, the next steps.
fn tell_next(urls: &[String], requests: &[LoadRequest]) {
    let Some(url) = urls.first() else { return };
    print_err(format_args!("the page: {url}/"));
    if requests.is_empty() {
        print_err(NEXT_STEPS);
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

/// Waits for a signal, or for the command to restart.
fn wait(cancel: &Cancel, restart: &AtomicBool) {
    while !cancel.is_cancelled() {
        if restart.load(Ordering::SeqCst) {
            return print_err("restarting");
        }
        std::thread::sleep(LOOK_EVERY);
    }
    print_err("stopping");
}

impl Args {
    /// The node's default kernel class.
    fn class(&self) -> KernelClass {
        self.compute.class.unwrap_or_default()
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
        let home::StoreSettings { home, options } = home::StoreSettings::from_env()?;
        let starters = self.starters(&program)?;
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
            starters,
            tell: Arc::new(|line| print_err(line)),
        })
    }

    /// Starters of programs for other machines: copies of `program` in other roles.
    fn starters(&self, program: &Path) -> anyhow::Result<Vec<(&'static str, ProgramStarter)>> {
        let starter = |words: &[&str], more| process::starter(program, words, more);
        let installed = std::env::current_exe().context("cannot find this program's own file")?;
        let (own, folder) = (program.to_owned(), home::folder()?);
        let receiver = move || upgrade::start_receiver(&own, &installed, &folder, &worker_env());
        let programs = self.node.program_args();
        let programs = programs.map(|args| starter(&["programs", "--far"], args));
        let mut all = vec![
            (
                tunnel::TRAIN,
                starter(&["train-far", "--store-only"], vec![]),
            ),
            (
                tunnel::BENCH,
                starter(&["bench", "comm", "--elsewhere"], self.node.rank_args()),
            ),
            (
                tunnel::ARRAYS,
                starter(
                    &["mapreduce", "worker", "--stdio", "--lent"],
                    self.node.array_args()?,
                ),
            ),
            (
                cluster_upgrade::SERVICE,
                Box::new(receiver) as ProgramStarter,
            ),
        ];
        all.extend(programs.map(|starter| (tunnel::PROGRAMS, starter)));
        Ok(all)
    }

    /// The server's settings, and the board; [`watch`](Dashboard::watch) then starts the audit log
    /// and `--events`.
    fn set_up(&self) -> anyhow::Result<(paceline_serve::Config, Dashboard)> {
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
        Ok(options.set_up()?)
    }
}

/// Rates, health and printed lines of this machine, for the dashboard.
fn host_probes() -> HostProbes {
    let failed = |error: anyhow::Error| CallbackError::from(format!("{error:#}"));
    HostProbes::new(
        move || plan::own_rates().map_err(failed),
        move || doctor::own_checks().map_err(failed),
        &LINES,
    )
}

/// Settings of the dashboard's downloads.
fn downloads() -> Result<(Home, PullOptions), CallbackError> {
    let settings = home::StoreSettings::from_env().map_err(|error| format!("{error:#}"))?;
    Ok((settings.home, settings.options))
}
