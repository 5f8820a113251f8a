//! `paceline up`: this machine's node, with one model behind the HTTP API.

mod revived;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use paceline_engine::{EngineConfig, Service};
use paceline_model::Config;
use paceline_serve::{Access, Clock, DEFAULT_PORT, Fact, Facts, Handle, Model, Server};
use paceline_store::{Cancel, Error as StoreError};

use crate::compute::{ComputeArgs, EngineArgs};
use crate::home;
use crate::interrupt::Signals;
use crate::loaded::{Opened, SplitArgs};
use crate::output::tell;
use crate::process::peak_memory_bytes;
use crate::pull;
use revived::Revived;

const EXAMPLES: &str = "\
Examples:
  paceline up --model smollm2 --nodes 2
  curl http://127.0.0.1:52415/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"model\": \"smollm2\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}'

The API is that of OpenAI: /v1/chat/completions, /v1/completions, /v1/models; beside it /health,
/metrics and /openapi.json. Ctrl-C ends it; answers that are under way get 5 seconds.";

/// How often a request to end is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Requests that wait for a place before further ones are refused as busy: one of every
/// connection that the server has room for by default, choices of one request not counted twice.
const WAITING_MAX: usize = 512;

/// Positions of a sequence unless asked for more, as of `run`.
const DEFAULT_CONTEXT: usize = 8192;

/// Arguments of `paceline up`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Alias (`smollm2`), GGUF file, folder of safetensors, or hub id to answer with
    #[arg(long)]
    model: String,
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
    /// Most tokens of a conversation and its answer [default: what the model was trained for, at
    /// most 8192]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    /// Address to listen on; may be given several times
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: Vec<IpAddr>,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = DEFAULT_PORT)]
    port: u16,
    /// Further name that clients may call this server by; may be given several times
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Web page that may use the API, such as https://chat.example.org; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// Let machines in that can reach --host, although there are no API keys
    #[arg(long)]
    no_keys: bool,
    /// Seconds from a request to the end of its answer, at most
    #[arg(long, value_name = "SECONDS", default_value_t = 600, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    request_timeout: u64,
}

/// Answers requests until a signal comes.
///
/// # Errors
/// A model that cannot be had or loaded, an address that cannot be listened on.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    args.split.check()?;
    let found = pull::ensure(&args.model, signals)?;
    let sizes = |config: &Config| args.engine(config);
    let mut opened = Opened::new(&found.path, (args.compute, args.engine), &args.split, sizes)?;
    opened.forecast();
    let model = args.served(&mut opened, &found.path);
    let served = signals.orderly(|cancel| serve(args, opened, model, cancel));
    match served {
        // A signal is how a server ends.
        Err(error) if matches!(error.downcast_ref(), Some(StoreError::Cancelled)) => Ok(()),
        other => other,
    }
}

fn serve(args: &Args, opened: Opened, model: Model, cancel: &Cancel) -> anyhow::Result<()> {
    let revived = Arc::new(Revived::new(opened));
    let service = Arc::clone(&revived) as Arc<dyn Service>;
    let server = Server::bind(args.config(&revived)?, model, service)?;
    let addresses = server.addresses().to_vec();
    let handle = server.handle();
    std::thread::scope(|scope| {
        let watch = || watch(&revived, &addresses, &handle, cancel);
        let watching = scope.spawn(watch);
        server.run();
        watching
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Keeps the workers alive until a signal comes, then stops the server. The first start must
/// succeed.
fn watch(
    revived: &Revived,
    addresses: &[SocketAddr],
    handle: &Handle,
    cancel: &Cancel,
) -> anyhow::Result<()> {
    let outcome = revived.start().map(|()| {
        for address in addresses {
            tell(format_args!("listening on http://{address}"));
        }
        while !cancel.is_cancelled() {
            revived.look();
            std::thread::sleep(LOOK_EVERY);
        }
        tell("stopping");
    });
    handle.shutdown();
    outcome
}

impl Args {
    fn engine(&self, config: &Config) -> EngineConfig {
        let context = self.context.map_or_else(
            || config.context.clamp(2, DEFAULT_CONTEXT),
            |context| context as usize,
        );
        let parallel = usize::from(self.parallel);
        EngineConfig {
            cache_positions: context.saturating_mul(parallel),
            max_running: parallel,
            max_waiting: WAITING_MAX,
            ..EngineConfig::single(self.model.clone(), context)
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
        let changed = std::fs::metadata(path).and_then(|facts| facts.modified());
        let since = changed
            .ok()
            .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let name = Path::new(&self.model).file_stem();
        let is_path = Path::new(&self.model).exists();
        let short = name
            .filter(|_| is_path)
            .map(|n| n.to_string_lossy().into_owned());
        Model {
            id: short.clone().unwrap_or_else(|| self.model.clone()),
            aliases: short.map(|_| self.model.clone()).into_iter().collect(),
            created_unix_s: since.map_or(0, |since| since.as_secs()),
            fingerprint: format!("{}-{}", opened.classes(), env!("CARGO_PKG_VERSION")),
            tokenizer: Arc::clone(&opened.tokenizer),
            template,
            context: opened.engine.context,
        }
    }

    fn config(&self, revived: &Arc<Revived>) -> anyhow::Result<paceline_serve::Config> {
        let unix_s = || {
            SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0, |since| since.as_secs())
        };
        let now = Instant::now;
        let mut config = paceline_serve::Config::new(self.port, Clock { now, unix_s });
        let bind = |host: &IpAddr| SocketAddr::new(*host, self.port);
        config.bind = self.host.iter().map(bind).collect();
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
        config.times.request = Duration::from_secs(self.request_timeout);
        let revived = Arc::clone(revived);
        config.facts = Facts(Arc::new(move || facts(&revived)));
        Ok(config)
    }
}

/// What `/metrics` tells of the processes.
fn facts(revived: &Revived) -> Vec<Fact> {
    let mut facts = vec![
        Fact {
            name: "nodes",
            help: "Nodes that compute the model together",
            value: f64::from(revived.nodes()),
        },
        Fact {
            name: "worker_restarts",
            help: "Times that the workers were started again after one failed",
            value: revived.restarts() as f64,
        },
    ];
    facts.push(Fact {
        name: "split_changes",
        help: "Times that the split was changed because another one was faster, or was to be",
        value: f64::from(revived.changes()),
    });
    let [predicted, measured] = revived.decode_tok_s();
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
        facts.extend(known.map(|value| Fact { name, help, value }));
    }
    let memory = peak_memory_bytes().map(|bytes| ("peak_memory_bytes", bytes));
    let sent = revived.sent().map(|bytes| ("wire_sent_bytes", bytes.0));
    let help = [
        "Most memory that the node's own process has had",
        "Bytes that the workers have sent to one another since they started",
    ];
    for (known, help) in [memory, sent].into_iter().zip(help) {
        facts.extend(known.map(|(name, value)| Fact {
            name,
            help,
            value: value as f64,
        }));
    }
    facts
}
