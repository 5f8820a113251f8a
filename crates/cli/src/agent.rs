//! `paceline agent`: starts a coding agent with the environment for this server.
//!
//! Queries the server for its model's name and context, then replaces this process by the agent.
//! Prints the settings first, so that users can set them elsewhere.

use std::env;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use paceline_serve::agent::{AgentProgram, AgentServer};
use paceline_serve::{DEFAULT_PORT, load_generator};
use serde_json::Value;

use crate::error::Error;
use crate::home;
use crate::output::print_err;

const EXAMPLES: &str = "\
Examples:
  paceline up --model smollm2          in one terminal
  paceline agent claude                in another
  paceline agent codex exec \"explain this folder\"
  PACELINE_API_KEY=pl-... paceline agent --url https://192.168.1.5:52415 opencode

A server's own certificate is trusted where it is of this home; another machine's is given by
SSL_CERT_FILE.";

/// Timeout of the server's responses, which need no model.
const PATIENCE: Duration = Duration::from_secs(10);

/// Arguments of `paceline agent`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Where the server is [default: this machine's]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Print what would be set and started, and end
    #[arg(long)]
    dry_run: bool,
    /// Which agent
    program: AgentName,
    /// Arguments for it
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Agents that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum AgentName {
    /// Claude Code
    Claude,
    /// Codex
    Codex,
    /// OpenCode
    Opencode,
}

impl From<AgentName> for AgentProgram {
    fn from(named: AgentName) -> Self {
        match named {
            AgentName::Claude => Self::Claude,
            AgentName::Codex => Self::Codex,
            AgentName::Opencode => Self::Opencode,
        }
    }
}

/// Replaces this process by the agent.
///
/// # Errors
/// An unreachable server, a missing program.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let default = format!("http://127.0.0.1:{DEFAULT_PORT}");
    let url = args.url.clone().unwrap_or(default);
    let key = env::var("PACELINE_API_KEY").ok();
    let served = ask(url.trim_end_matches('/'), key)?;
    let program = AgentProgram::from(args.program);
    let start = served.start(program);
    for (name, value) in &start.environment {
        let is_key = served.key.as_ref().is_some_and(|key| value.contains(key));
        let shown: &str = if is_key { "(with the key)" } else { value };
        print_err(format_args!("set {name}={shown}"));
    }
    let all: Vec<&String> = start.args.iter().chain(&args.args).collect();
    let words: Vec<&str> = all.iter().map(|word| word.as_str()).collect();
    print_err(format_args!("start {} {}", program.name(), words.join(" ")));
    if args.dry_run {
        return Ok(());
    }
    let mut command = Command::new(program.name());
    command.args(&all).envs(start.environment);
    // Returns only on failure.
    let error = command.exec();
    if error.kind() == io::ErrorKind::NotFound {
        return Err(Error::NoAgent { program }.into());
    }
    Err(error).with_context(|| format!("cannot start {}", program.name()))
}

/// Queries the server at `url` for its model.
fn ask(url: &str, key: Option<String>) -> anyhow::Result<AgentServer> {
    let (url, key) = (url.to_owned(), key.filter(|key| !key.is_empty()));
    let get = |path: &str| get(&format!("{url}{path}"), key.as_deref());
    let models = get("/v1/models")?;
    let model = models["data"][0]["id"].as_str().unwrap_or_default();
    let running = get("/api/ps")?;
    let context = running["models"][0]["context_length"].as_u64();
    let context = context.with_context(|| format!("the model of {url} is not ready"))?;
    Ok(AgentServer {
        model: model.to_owned(),
        context,
        trusted: home::trusted(&url),
        url,
        key,
    })
}

/// Sends a GET request to a server.
///
/// # Errors
/// [`Error::NoServer`] with the reason.
pub(crate) fn get(url: &str, key: Option<&str>) -> anyhow::Result<Value> {
    let failed = |reason: String| Error::NoServer {
        url: url.to_owned(),
        reason,
    };
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .tls_config(load_generator::trust(
            home::certificates_for(url)?.as_deref(),
        ))
        .proxy(None)
        .build();
    let mut request = ureq::Agent::new_with_config(config).get(url);
    if let Some(key) = key {
        request = request.header("Authorization", format!("Bearer {key}"));
    }
    let mut response = request.call().map_err(|error| failed(error.to_string()))?;
    let text = response.body_mut().read_to_string();
    let text = text.map_err(|error| failed(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| failed(error.to_string()).into())
}
