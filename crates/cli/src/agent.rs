//! `paceline agent`: starts a coding agent with the environment for this server.
//!
//! Queries the server for its model's name and context, then replaces this process by the agent.
//! Prints the settings first, so that users can set them elsewhere.

use std::env;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use paceline_load_generator::trust;
use paceline_serve::DEFAULT_PORT;
use paceline_serve::agent::{AgentProgram, AgentServer};
use serde_json::{Value, json};
use ureq::config::ConfigBuilder;
use ureq::typestate::AgentScope;

use crate::error::{Error, failed};
use crate::output::print_err;
use crate::{home, member};

const EXAMPLES: &str = "\
Examples:
  paceline up smollm2                  in one terminal
  paceline agent claude                in another
  paceline agent codex exec \"explain this folder\"
  PACELINE_API_KEY=pl-... paceline agent --url https://192.168.1.5:52415 opencode

A server's own certificate is trusted where it is of this home; another machine's is given by
SSL_CERT_FILE.";

/// Timeout of the server's responses, which need no model.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Where the server is [default: this machine's node]
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
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let url = args.url.clone().unwrap_or_else(own_url);
    let key = env::var("PACELINE_API_KEY").ok();
    let served = ask(url.trim_end_matches('/'), key)?;
    let program = AgentProgram::from(args.program);
    let mut start = served.start(program);
    let direct = served.direct_hosts(&no_proxy());
    let direct = ["NO_PROXY", "no_proxy"].map(|name| (name, direct.clone()));
    start.environment.extend(direct);
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
        let text = format!("{} is not installed", program.name());
        let hint = format!("npm install -g {} installs it", program.package());
        return Err(failed(text, hint).into());
    }
    Err(error).with_context(|| format!("cannot start {}", program.name()))
}

/// The hosts that this environment has no proxy for.
fn no_proxy() -> String {
    let given = ["NO_PROXY", "no_proxy"].map(|name| env::var(name).ok());
    let mut given = given.into_iter().flatten();
    given.find(|hosts| !hosts.is_empty()).unwrap_or_default()
}

/// The URL of this home's node, else that of a node with default settings.
pub(crate) fn own_url() -> String {
    let told = member::ask_if_up("nodes", json!({})).ok().flatten();
    let served = told.and_then(|told| url_of(&told["nodes"]));
    served.unwrap_or_else(|| format!("http://127.0.0.1:{DEFAULT_PORT}"))
}

/// The URL for clients on the machine whose node lists these `nodes`, itself first.
fn url_of(nodes: &Value) -> Option<String> {
    let api = nodes[0]["api"].as_array()?.iter();
    let api = api.filter_map(|address| address.as_str()?.parse::<SocketAddr>().ok());
    let api: Vec<SocketAddr> = api.collect();
    let is_local = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified();
    // Loopback has no TLS.
    match api.iter().find(|address| is_local(address.ip())) {
        Some(local) if local.ip() == Ipv6Addr::LOCALHOST => {
            Some(format!("http://[::1]:{}", local.port()))
        }
        Some(local) => Some(format!("http://127.0.0.1:{}", local.port())),
        None => api.first().map(|address| format!("https://{address}")),
    }
}

fn ask(url: &str, key: Option<String>) -> anyhow::Result<AgentServer> {
    let (url, key) = (url.to_owned(), key.filter(|key| !key.is_empty()));
    let get = |path: &str| get(&format!("{url}{path}"), key.as_deref());
    let models = get("/v1/models")?;
    let not_ready = || not_ready(&url);
    let model = models["data"][0]["id"].as_str().ok_or_else(not_ready)?;
    let running = get("/api/ps")?;
    let context = running["models"][0]["context_length"].as_u64();
    let context = context.ok_or_else(not_ready)?;
    Ok(AgentServer {
        model: model.to_owned(),
        context,
        trusted: home::trusted(&url),
        url,
        key,
    })
}

/// Sends a GET request to a server.
pub(crate) fn get(url: &str, key: Option<&str>) -> anyhow::Result<Value> {
    let failed = |reason: String| no_server(url, &reason);
    let config = client(url, PATIENCE)?.build();
    let mut request = ureq::Agent::new_with_config(config).get(url);
    if let Some(key) = key {
        request = request.header("Authorization", format!("Bearer {key}"));
    }
    let mut response = request
        .call()
        .map_err(|error| failure(url, &error, key.is_some()))?;
    let text = response.body_mut().read_to_string();
    let text = text.map_err(|error| failed(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| failed(error.to_string()).into())
}

/// Sends JSON to a server; `hear` gets each line of the answer within `limit`.
pub(crate) fn post(
    (url, key): (&str, Option<&str>),
    body: &Value,
    limit: Duration,
    hear: &mut dyn FnMut(&str),
) -> anyhow::Result<()> {
    let failed = |reason: String| no_server(url, &reason);
    let config = client(url, limit)?.http_status_as_error(false).build();
    let request = ureq::Agent::new_with_config(config).post(url);
    let mut request = request.header("Content-Type", "application/json");
    if let Some(key) = key {
        request = request.header("Authorization", format!("Bearer {key}"));
    }
    let response = request.send(body.to_string());
    let mut response = response.map_err(|error| failure(url, &error, key.is_some()))?;
    if !response.status().is_success() {
        let text = response.body_mut().read_to_string().unwrap_or_default();
        let told: Value = serde_json::from_str(&text).unwrap_or_default();
        let reason = told["error"]["message"].as_str();
        let status = || format!("status {}", response.status().as_u16());
        return Err(failed(reason.map_or_else(status, str::to_owned)).into());
    }
    for line in BufReader::new(response.body_mut().as_reader()).lines() {
        hear(&line.map_err(|error| failed(error.to_string()))?);
    }
    Ok(())
}

/// A client for `url` without a proxy.
fn client(url: &str, limit: Duration) -> anyhow::Result<ConfigBuilder<AgentScope>> {
    Ok(ureq::Agent::config_builder()
        .timeout_global(Some(limit))
        .tls_config(trust(home::certificates_for(url)?.as_deref()))
        .proxy(None))
}

/// The error of a failed request; `has_key` says whether it had a key.
fn failure(url: &str, error: &ureq::Error, has_key: bool) -> Error {
    let reason = error.to_string();
    match error {
        ureq::Error::StatusCode(401) => {
            let (done, wrong) = match has_key {
                true => ("refuses the key", "is not a key of it"),
                false => ("asks for a key", "is not set"),
            };
            let hint = format!(
                "PACELINE_API_KEY {wrong}: `paceline key api new NAME` makes one on a machine of \
                 the cluster"
            );
            failed(format!("{url} {done}"), hint)
        }
        ureq::Error::StatusCode(503) => not_ready(url),
        // The text of rustls for each fault of a certificate.
        ureq::Error::Io(_) if reason.contains("invalid peer certificate") => failed(
            format!("the certificate of {url} is not trusted: {reason}"),
            "copy tls/cert.pem of the server's PACELINE_HOME here: SSL_CERT_FILE=cert.pem",
        ),
        _ => no_server(url, &reason),
    }
}

/// A server without a model that answers.
fn not_ready(url: &str) -> Error {
    failed(
        format!("no model answers at {url} yet"),
        "`paceline ps` there says whether one loads; paceline load MODEL loads one",
    )
}

fn no_server(url: &str, reason: &str) -> Error {
    failed(
        format!("no paceline answers at {url}: {reason}"),
        "start it in another terminal: paceline up MODEL; with --url for another place",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_keys_and_certificates_are_not_a_missing_server() {
        let io = |text: &str| ureq::Error::Io(io::Error::other(text));
        for (error, has_key, expected) in [
            (ureq::Error::StatusCode(401), false, "asks for a key"),
            (ureq::Error::StatusCode(401), true, "refuses the key"),
            (ureq::Error::StatusCode(503), true, "no model answers"),
            (
                io("invalid peer certificate: Issuer"),
                true,
                "is not trusted",
            ),
            (io("connection refused"), true, "no paceline answers"),
        ] {
            let told = failure("https://a/v1/models", &error, has_key).to_string();
            assert!(told.contains(expected), "{told}");
        }
    }

    #[test]
    fn the_own_node_is_asked_at_its_own_port() {
        let url = |api: Value| url_of(&json!([{ "name": "own", "api": api }, { "api": ["x"] }]));
        for (api, expected) in [
            (json!(["127.0.0.1:56100"]), Some("http://127.0.0.1:56100")),
            (json!(["[::1]:7"]), Some("http://[::1]:7")),
            (
                json!(["10.0.0.1:7", "0.0.0.0:8"]),
                Some("http://127.0.0.1:8"),
            ),
            (json!(["10.0.0.1:7"]), Some("https://10.0.0.1:7")),
            (json!([]), None),
        ] {
            assert_eq!(url(api.clone()).as_deref(), expected, "{api}");
        }
    }
}
