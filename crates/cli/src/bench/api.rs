//! `paceline bench api`: load test of a server.

use std::env;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use paceline_load_generator::{
    Arrivals, GoodputLimits, IN_FLIGHT_MAX, LoadProfile, RequestLengths, TargetServer, TokenRange,
    object, table,
};
use paceline_serve::DEFAULT_PORT;

use crate::home;
use crate::interrupt::Signals;
use crate::output::{print, printable};

const EXAMPLES: &str = "\
Examples:
  paceline bench api
  paceline bench api --rate 2 --requests 200 --prompt 100..2000 --output 50..300 --ttft-limit 1000
  paceline bench api --url http://192.168.1.5:8080 --clients 16 --json

The key of a server that asks for one is taken from PACELINE_API_KEY. A word of a prompt is about
one token; the table has the tokens that the server counted.";

/// Timeout of queries about the server.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Server of OpenAI's API, with or without /v1 [default: this machine's]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Model to ask for [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Requests in all
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Closed loop: clients that each ask again when they have their answer
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u16).range(1..=IN_FLIGHT_MAX as i64))]
    clients: u16,
    /// Poisson arrivals instead: requests a second, on average
    #[arg(long, value_name = "PER_S", conflicts_with = "clients", value_parser = rate)]
    rate: Option<f64>,
    /// Words of a prompt: N, or A..B for a uniform distribution
    #[arg(long, value_name = "LENGTH", default_value = "128")]
    prompt: TokenRange,
    /// Tokens of an answer, at most: N, or A..B
    #[arg(long, value_name = "LENGTH", default_value = "64")]
    output: TokenRange,
    /// File of lengths instead, used in turn: lines of PROMPT OUTPUT
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "output"])]
    lengths: Option<PathBuf>,
    /// Words that all prompts begin with, before their own
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u32).range(0..=10_000_000))]
    shared_prefix: u32,
    /// Let no answer end before its length (paceline, llama-server and vLLM know the field)
    #[arg(long)]
    ignore_eos: bool,
    /// Decides prompts, lengths and arrivals
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Longest time to the first token that goodput counts, in milliseconds
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    ttft_limit: Option<u32>,
    /// Longest mean gap between tokens that goodput counts, in milliseconds
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    gap_limit: Option<u32>,
    /// Longest time of one request, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600,
          value_parser = clap::value_parser!(u32).range(1..=86_400))]
    timeout: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Parses an arrival rate.
fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok();
    let rate = rate.filter(|rate| (0.001..=10_000.0).contains(rate));
    rate.ok_or_else(|| format!("{text:?}: expected 0.001 to 10000 requests a second"))
}

/// Measures and prints.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let load = args.load()?;
    let predicted = load.server.predicted(PATIENCE);
    let report = signals.orderly(|cancel| {
        let report = paceline_load_generator::run(&load, Instant::now, &|| cancel.is_cancelled());
        anyhow::Ok(report)
    })?;
    print(&match args.json {
        true => object(&load, &predicted, &report).to_string(),
        false => printable(&table(&load, &predicted, &report)).into_owned(),
    })?;
    anyhow::ensure!(report.answered > 0, "no request was answered");
    Ok(())
}

impl Args {
    fn load(&self) -> anyhow::Result<LoadProfile> {
        let millis = |ms: u32| Duration::from_millis(ms.into());
        Ok(LoadProfile {
            arrivals: match self.rate {
                Some(per_s) => Arrivals::Poisson { per_s },
                None => Arrivals::Closed {
                    clients: self.clients.into(),
                },
            },
            requests: self.requests as usize,
            lengths: self.lengths()?,
            server: self.server()?,
            shared_prefix: self.shared_prefix,
            ignore_eos: self.ignore_eos,
            seed: self.seed,
            goals: GoodputLimits {
                ttft: self.ttft_limit.map(millis),
                gap: self.gap_limit.map(millis),
            },
            timeout: Duration::from_secs(self.timeout.into()),
        })
    }

    fn lengths(&self) -> anyhow::Result<RequestLengths> {
        let Some(file) = &self.lengths else {
            return Ok(RequestLengths::Drawn {
                prompt: self.prompt,
                output: self.output,
            });
        };
        let shown = file.display();
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
        RequestLengths::parse(&text).with_context(|| format!("in {shown}"))
    }

    fn server(&self) -> anyhow::Result<TargetServer> {
        let default = format!("http://127.0.0.1:{DEFAULT_PORT}");
        let url = self.url.as_ref().unwrap_or(&default);
        let key = env::var("PACELINE_API_KEY").ok();
        let key = key.filter(|key| !key.is_empty());
        let mut server = TargetServer::new(url, key, self.model.as_deref().unwrap_or_default());
        if let Some(certificates) = home::certificates_for(url)? {
            server = server.trusting(certificates);
        }
        Ok(match self.model {
            Some(_) => server,
            None => server.find(PATIENCE)?,
        })
    }
}
