//! `paceline agent`: a coding agent with the environment that it needs for this server.
//!
//! The server is asked for its model's name and context; the agent then takes this process' place.
//! What is set is printed first, so that it can be set by hand elsewhere.

use std::env;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use paceline_serve::{DEFAULT_PORT, load};
use serde_json::{Value, json};

use crate::error::Error;
use crate::home;
use crate::output::tell;

const EXAMPLES: &str = "\
Examples:
  paceline up --model smollm2          in one terminal
  paceline agent claude                in another
  paceline agent codex exec \"explain this folder\"
  PACELINE_API_KEY=pl-... paceline agent --url https://192.168.1.5:52415 opencode

A server's own certificate is trusted where it is of this home; another machine's is given by
SSL_CERT_FILE.";

/// Longest wait for the server's answers, which need no model.
const PATIENCE: Duration = Duration::from_secs(10);

/// What stands for a key where the server asks for none: the programs want something.
const NO_KEY: &str = "paceline";

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
    program: Program,
    /// Arguments for it
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Agents that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Program {
    /// Claude Code
    Claude,
    /// Codex
    Codex,
    /// OpenCode
    Opencode,
}

impl Program {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Claude => "claude",
            Self::Codex => "codex",
            Self::Opencode => "opencode",
        }
    }

    /// The variable of a file of certificates that the program trusts beside those of the system.
    /// `SSL_CERT_FILE` would take their place, also for the programs that an agent starts.
    const fn trust(self) -> &'static str {
        match self {
            Self::Claude | Self::Opencode => "NODE_EXTRA_CA_CERTS",
            Self::Codex => "CODEX_CA_CERTIFICATE",
        }
    }

    /// The npm package that has it.
    pub(crate) const fn package(self) -> &'static str {
        match self {
            Self::Claude => "@anthropic-ai/claude-code",
            Self::Codex => "@openai/codex",
            Self::Opencode => "opencode-ai",
        }
    }
}

/// A server and the model that it serves.
#[derive(Debug)]
struct Served {
    url: String,
    key: Option<String>,
    model: String,
    /// Tokens of prompt and answer.
    context: u64,
    /// Certificates to trust for it, where they are not those that programs have.
    trusted: Option<PathBuf>,
}

/// What an agent is started with.
#[derive(Debug, PartialEq, Eq)]
struct Start {
    environment: Vec<(&'static str, String)>,
    /// Before the user's own.
    args: Vec<String>,
}

/// Starts the agent in this process' place.
///
/// # Errors
/// A server that does not answer, a program that is not installed.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let default = format!("http://127.0.0.1:{DEFAULT_PORT}");
    let url = args.url.clone().unwrap_or(default);
    let key = env::var("PACELINE_API_KEY").ok();
    let served = Served::ask(url.trim_end_matches('/'), key)?;
    let start = served.start(args.program);
    for (name, value) in &start.environment {
        let is_key = served.key.as_ref().is_some_and(|key| value.contains(key));
        let shown: &str = if is_key { "(with the key)" } else { value };
        tell(format_args!("set {name}={shown}"));
    }
    let all: Vec<&String> = start.args.iter().chain(&args.args).collect();
    let words: Vec<&str> = all.iter().map(|word| word.as_str()).collect();
    tell(format_args!(
        "start {} {}",
        args.program.name(),
        words.join(" ")
    ));
    if args.dry_run {
        return Ok(());
    }
    let mut command = Command::new(args.program.name());
    command.args(&all).envs(start.environment);
    // Comes back only when it cannot be started.
    let error = command.exec();
    let program = args.program;
    if error.kind() == io::ErrorKind::NotFound {
        return Err(Error::NoAgent { program }.into());
    }
    Err(error).with_context(|| format!("cannot start {}", program.name()))
}

impl Served {
    fn ask(url: &str, key: Option<String>) -> anyhow::Result<Self> {
        let (url, key) = (url.to_owned(), key.filter(|key| !key.is_empty()));
        let get = |path: &str| get(&format!("{url}{path}"), key.as_deref());
        let models = get("/v1/models")?;
        let model = models["data"][0]["id"].as_str().unwrap_or_default();
        let running = get("/api/ps")?;
        let context = running["models"][0]["context_length"].as_u64();
        let context = context.with_context(|| format!("the model of {url} is not ready"))?;
        Ok(Self {
            model: model.to_owned(),
            context,
            trusted: home::trusted(&url),
            url,
            key,
        })
    }

    fn key(&self) -> String {
        self.key.clone().unwrap_or_else(|| NO_KEY.to_owned())
    }

    fn start(&self, program: Program) -> Start {
        let mut start = match program {
            Program::Claude => self.claude(),
            Program::Codex => self.codex(),
            Program::Opencode => self.opencode(),
        };
        let trusted = self.trusted.iter();
        let trusted = trusted.map(|path| (program.trust(), path.display().to_string()));
        start.environment.extend(trusted);
        start
    }

    /// The names are what Claude Code 2.1 reads. Its countdown of tokens and its header would
    /// change the prompt's beginning from turn to turn.
    fn claude(&self) -> Start {
        let (model, context) = (&self.model, self.context.to_string());
        let mut environment = vec![
            ("ANTHROPIC_BASE_URL", self.url.clone()),
            ("ANTHROPIC_API_KEY", String::new()),
            ("ANTHROPIC_AUTH_TOKEN", self.key()),
            ("CLAUDE_CODE_ATTRIBUTION_HEADER", "0".into()),
            ("CLAUDE_CODE_TOTAL_TOKENS_REMINDER", "off".into()),
            ("CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS", "1".into()),
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".into()),
            ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", context.clone()),
            ("CLAUDE_CODE_AUTO_COMPACT_WINDOW", context),
        ];
        for name in [
            "ANTHROPIC_MODEL",
            "ANTHROPIC_DEFAULT_OPUS_MODEL",
            "ANTHROPIC_DEFAULT_SONNET_MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL",
            "CLAUDE_CODE_SUBAGENT_MODEL",
        ] {
            environment.push((name, model.clone()));
        }
        let args = Vec::new();
        Start { environment, args }
    }

    fn codex(&self) -> Start {
        // Values are TOML; a JSON string is one of its strings.
        let text = |text: &str| Value::from(text).to_string();
        let provider = "model_providers.paceline";
        let settings = [
            ("model_provider".to_owned(), text("paceline")),
            ("model".to_owned(), text(&self.model)),
            ("model_context_window".to_owned(), self.context.to_string()),
            (format!("{provider}.name"), text("paceline")),
            (
                format!("{provider}.base_url"),
                text(&format!("{}/v1", self.url)),
            ),
            (format!("{provider}.wire_api"), text("responses")),
            (format!("{provider}.env_key"), text("PACELINE_API_KEY")),
        ];
        let words = |(name, value): (String, String)| ["-c".to_owned(), format!("{name}={value}")];
        Start {
            environment: vec![("PACELINE_API_KEY", self.key())],
            args: settings.into_iter().flat_map(words).collect(),
        }
    }

    fn opencode(&self) -> Start {
        // A quarter for the answer, as its own catalogue has it for small models.
        let limit = json!({"context": self.context, "output": self.context / 4});
        let mut models = serde_json::Map::new();
        models.insert(
            self.model.clone(),
            json!({"name": self.model, "limit": limit}),
        );
        let provider = json!({
            "npm": "@ai-sdk/openai-compatible",
            "name": "paceline",
            "options": {"baseURL": format!("{}/v1", self.url), "apiKey": self.key()},
            "models": models,
        });
        let name = format!("paceline/{}", self.model);
        let config = json!({
            "provider": {"paceline": provider},
            "model": name,
            "small_model": name,
        });
        Start {
            environment: vec![
                ("OPENCODE_CONFIG_CONTENT", config.to_string()),
                ("OPENCODE_DISABLE_AUTOUPDATE", "1".into()),
            ],
            args: Vec::new(),
        }
    }
}

/// Asks a server.
///
/// # Errors
/// [`Error::NoServer`] says why it does not answer.
pub(crate) fn get(url: &str, key: Option<&str>) -> anyhow::Result<Value> {
    let failed = |reason: String| Error::NoServer {
        url: url.to_owned(),
        reason,
    };
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .tls_config(load::trust(home::certificates_for(url)?.as_deref()))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn served() -> Served {
        Served {
            url: "http://127.0.0.1:1".into(),
            key: None,
            model: "tiny \"1\"".into(),
            context: 4096,
            trusted: None,
        }
    }

    #[test]
    fn each_agent_trusts_the_certificate_beside_its_own() {
        let mut served = served();
        let starts = [Program::Claude, Program::Codex, Program::Opencode];
        let names = ["NODE_EXTRA_CA_CERTS", "CODEX_CA_CERTIFICATE"];
        for program in starts {
            let environment = served.start(program).environment;
            assert!(environment.iter().all(|(name, _)| !names.contains(name)));
        }
        served.trusted = Some("/home/p/tls/cert.pem".into());
        for (program, name) in starts.into_iter().zip([names[0], names[1], names[0]]) {
            let expected = (name, "/home/p/tls/cert.pem".to_owned());
            assert!(served.start(program).environment.contains(&expected));
        }
    }

    #[test]
    fn each_agent_gets_url_model_and_context() {
        let served = served();
        let claude = served.start(Program::Claude).environment;
        for (name, value) in [
            ("ANTHROPIC_BASE_URL", "http://127.0.0.1:1"),
            ("ANTHROPIC_AUTH_TOKEN", "paceline"),
            ("ANTHROPIC_DEFAULT_HAIKU_MODEL", "tiny \"1\""),
            ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "4096"),
        ] {
            assert!(claude.contains(&(name, value.to_owned())), "{name}");
        }
        let codex = served.start(Program::Codex).args;
        for word in [
            "model=\"tiny \\\"1\\\"\"",
            "model_context_window=4096",
            "model_providers.paceline.base_url=\"http://127.0.0.1:1/v1\"",
        ] {
            assert!(codex.contains(&word.to_owned()), "{codex:?}");
        }
        let opencode = served.start(Program::Opencode).environment;
        let config: Value = serde_json::from_str(&opencode[0].1).unwrap();
        let provider = &config["provider"]["paceline"];
        assert_eq!(provider["options"]["baseURL"], "http://127.0.0.1:1/v1");
        assert_eq!(provider["models"]["tiny \"1\""]["limit"]["context"], 4096);
        assert_eq!(config["model"], "paceline/tiny \"1\"");
    }
}
