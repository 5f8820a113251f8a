//! Arguments and environment that connect a coding agent to a server of this crate.
use std::net::IpAddr;
use std::path::PathBuf;

use serde_json::{Value, json};

/// Placeholder key for servers without API keys: the agents require some value.
const NO_KEY: &str = "paceline";

/// Supported coding agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentProgram {
    Claude,
    Codex,
    Opencode,
}

impl AgentProgram {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Claude => "claude",
            Self::Codex => "codex",
            Self::Opencode => "opencode",
        }
    }

    /// The environment variable that adds a file of certificates to those of the system.
    /// `SSL_CERT_FILE` would replace them, also for programs that an agent starts.
    const fn trust(self) -> &'static str {
        match self {
            Self::Claude | Self::Opencode => "NODE_EXTRA_CA_CERTS",
            Self::Codex => "CODEX_CA_CERTIFICATE",
        }
    }

    /// The npm package that has it.
    pub const fn package(self) -> &'static str {
        match self {
            Self::Claude => "@anthropic-ai/claude-code",
            Self::Codex => "@openai/codex",
            Self::Opencode => "opencode-ai",
        }
    }
}

/// A server and the model that it serves.
#[derive(Clone, derive_more::Debug)]
#[debug("{} at {}", self.model, self.url)]
pub struct AgentServer {
    /// Base URL, without a trailing slash.
    pub url: String,
    /// API key, if the server requires one.
    pub key: Option<String>,
    /// The name by which requests call the model.
    pub model: String,
    /// Tokens of prompt and answer.
    pub context: u64,
    /// File of certificates to trust, if the system's do not include the server's.
    pub trusted: Option<PathBuf>,
}

/// Arguments and environment that an agent is started with.
#[derive(Debug, PartialEq, Eq)]
pub struct AgentLaunch {
    /// Variables.
    pub environment: Vec<(&'static str, String)>,
    /// Arguments, before the user's own.
    pub args: Vec<String>,
}

impl AgentServer {
    /// Hosts that the agent reaches without a proxy, for `NO_PROXY`: those of `given`, this
    /// machine, and the server if it is in the local network.
    pub fn direct_hosts(&self, given: &str) -> String {
        let mut hosts: Vec<&str> = given.split(',').map(str::trim).collect();
        hosts.retain(|host| !host.is_empty());
        let of_server = host_of(&self.url).filter(|host| is_local(host));
        for host in ["127.0.0.1", "localhost", "::1"]
            .into_iter()
            .chain(of_server)
        {
            if !hosts.contains(&host) {
                hosts.push(host);
            }
        }
        hosts.join(",")
    }

    fn key(&self) -> String {
        self.key.clone().unwrap_or_else(|| NO_KEY.to_owned())
    }

    /// Arguments and environment that point `program` at this server.
    pub fn start(&self, program: AgentProgram) -> AgentLaunch {
        let mut start = match program {
            AgentProgram::Claude => self.claude(),
            AgentProgram::Codex => self.codex(),
            AgentProgram::Opencode => self.opencode(),
        };
        let trusted = self.trusted.iter();
        let trusted = trusted.map(|path| (program.trust(), path.display().to_string()));
        start.environment.extend(trusted);
        start
    }

    /// The names are what Claude Code 2.1 reads. Its countdown of tokens and its header would
    /// change the prompt's beginning from turn to turn.
    fn claude(&self) -> AgentLaunch {
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
        AgentLaunch { environment, args }
    }

    fn codex(&self) -> AgentLaunch {
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
        AgentLaunch {
            environment: vec![("PACELINE_API_KEY", self.key())],
            args: settings.into_iter().flat_map(words).collect(),
        }
    }

    fn opencode(&self) -> AgentLaunch {
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
        AgentLaunch {
            environment: vec![
                ("OPENCODE_CONFIG_CONTENT", config.to_string()),
                ("OPENCODE_DISABLE_AUTOUPDATE", "1".into()),
            ],
            args: Vec::new(),
        }
    }
}

/// The host of a URL, without brackets.
fn host_of(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    let authority = rest.split('/').next()?;
    match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map(|(host, _)| host),
        None => authority.split(':').next(),
    }
}

/// Whether a host is of this machine or its network, which no proxy outside reaches.
fn is_local(host: &str) -> bool {
    match host.parse() {
        Ok(IpAddr::V4(ip)) => ip.is_loopback() || ip.is_private() || ip.is_link_local(),
        Ok(IpAddr::V6(ip)) => {
            ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local()
        }
        Err(_) => !host.contains('.') || host.ends_with(".local"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served() -> AgentServer {
        AgentServer {
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
        let starts = [
            AgentProgram::Claude,
            AgentProgram::Codex,
            AgentProgram::Opencode,
        ];
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
    fn local_servers_are_reached_without_a_proxy() {
        let own = "127.0.0.1,localhost,::1";
        for (url, given, expected) in [
            ("http://127.0.0.1:1", "", own.to_owned()),
            (
                "http://[::1]:1",
                " a.b, ,localhost",
                "a.b,localhost,127.0.0.1,::1".into(),
            ),
            ("https://192.168.1.5:1", "", format!("{own},192.168.1.5")),
            ("https://[fe80::1]:1/v1", "", format!("{own},fe80::1")),
            ("https://mini.local:1", "", format!("{own},mini.local")),
            ("https://gpu", "", format!("{own},gpu")),
            ("https://8.8.8.8", "", own.to_owned()),
            ("https://llm.example.org", "", own.to_owned()),
        ] {
            let served = AgentServer {
                url: url.into(),
                ..served()
            };
            assert_eq!(served.direct_hosts(given), expected, "{url}");
        }
    }

    #[test]
    fn each_agent_gets_url_model_and_context() {
        let served = served();
        let claude = served.start(AgentProgram::Claude).environment;
        for (name, value) in [
            ("ANTHROPIC_BASE_URL", "http://127.0.0.1:1"),
            ("ANTHROPIC_AUTH_TOKEN", "paceline"),
            ("ANTHROPIC_DEFAULT_HAIKU_MODEL", "tiny \"1\""),
            ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "4096"),
        ] {
            assert!(claude.contains(&(name, value.to_owned())), "{name}");
        }
        let codex = served.start(AgentProgram::Codex).args;
        for word in [
            "model=\"tiny \\\"1\\\"\"",
            "model_context_window=4096",
            "model_providers.paceline.base_url=\"http://127.0.0.1:1/v1\"",
        ] {
            assert!(codex.contains(&word.to_owned()), "{codex:?}");
        }
        let opencode = served.start(AgentProgram::Opencode).environment;
        let config: Value = serde_json::from_str(&opencode[0].1).unwrap();
        let provider = &config["provider"]["paceline"];
        assert_eq!(provider["options"]["baseURL"], "http://127.0.0.1:1/v1");
        assert_eq!(provider["models"]["tiny \"1\""]["limit"]["context"], 4096);
        assert_eq!(config["model"], "paceline/tiny \"1\"");
    }
}
