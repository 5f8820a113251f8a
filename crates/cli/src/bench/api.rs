//! `paceline bench api`: load on a server, and how it answers.

use std::env;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use paceline_serve::DEFAULT_PORT;
use paceline_serve::load::{
    self, Arrivals, Goals, IN_FLIGHT_MAX, Lengths, Load, Predicted, Report, Server, Span, Times,
};
use serde_json::json;

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

/// Longest wait for what a server says of itself.
const PATIENCE: Duration = Duration::from_secs(10);

/// Arguments of `paceline bench api`.
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
    prompt: Span,
    /// Tokens of an answer, at most: N, or A..B
    #[arg(long, value_name = "LENGTH", default_value = "64")]
    output: Span,
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
    /// Goodput counts answers whose first token comes within so many milliseconds
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    ttft_limit: Option<u32>,
    /// Goodput counts answers whose mean gap between tokens is at most so many milliseconds
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

/// A rate that a load can have.
fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok();
    let rate = rate.filter(|rate| (0.001..=10_000.0).contains(rate));
    rate.ok_or_else(|| format!("{text:?}: expected 0.001 to 10000 requests a second"))
}

/// Measures and prints.
///
/// # Errors
/// A server that does not answer, a file that cannot be read; no request that was answered.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let load = args.load()?;
    let predicted = load.server.predicted(PATIENCE);
    let report = signals.orderly(|cancel| {
        let report = load::run(&load, Instant::now, &|| cancel.is_cancelled());
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
    fn load(&self) -> anyhow::Result<Load> {
        let millis = |ms: u32| Duration::from_millis(ms.into());
        Ok(Load {
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
            goals: Goals {
                ttft: self.ttft_limit.map(millis),
                gap: self.gap_limit.map(millis),
            },
            timeout: Duration::from_secs(self.timeout.into()),
        })
    }

    fn lengths(&self) -> anyhow::Result<Lengths> {
        let Some(file) = &self.lengths else {
            return Ok(Lengths::Drawn {
                prompt: self.prompt,
                output: self.output,
            });
        };
        let shown = file.display();
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
        Lengths::parse(&text).with_context(|| format!("in {shown}"))
    }

    fn server(&self) -> anyhow::Result<Server> {
        let default = format!("http://127.0.0.1:{DEFAULT_PORT}");
        let url = self.url.as_ref().unwrap_or(&default);
        let key = env::var("PACELINE_API_KEY").ok();
        let key = key.filter(|key| !key.is_empty());
        let mut server = Server::new(url, key, self.model.as_deref().unwrap_or_default());
        if let Some(certificates) = home::certificates_for(url)? {
            server = server.trusting(certificates);
        }
        Ok(match self.model {
            Some(_) => server,
            None => server.find(PATIENCE)?,
        })
    }
}

/// The predicted total speed of a closed loop's clients; Poisson arrivals have no number.
fn together(load: &Load, predicted: &Predicted) -> Option<f64> {
    let Arrivals::Closed { clients } = load.arrivals else {
        return None;
    };
    predicted.tok_s(u32::try_from(clients).ok()?)
}

fn object(load: &Load, predicted: &Predicted, report: &Report) -> serde_json::Value {
    let (clients, rate) = match load.arrivals {
        Arrivals::Closed { clients } => (Some(clients), None),
        Arrivals::Poisson { per_s } => (None, Some(per_s)),
    };
    json!({
        "url": load.server.url(),
        "model": load.server.model(),
        "clients": clients,
        "rate_per_s": rate,
        "seed": load.seed,
        "predicted_decode_tok_s": predicted.tok_s(1),
        "predicted_output_tok_s": together(load, predicted),
        "report": report,
    })
}

fn table(load: &Load, predicted: &Predicted, report: &Report) -> String {
    let arrivals = match load.arrivals {
        Arrivals::Closed { clients } => format!("{clients} clients in a closed loop"),
        Arrivals::Poisson { per_s } => format!("Poisson arrivals, {per_s} a second"),
    };
    let mut text = format!(
        "{} at {}, {arrivals}\n{} of {} requests answered in {:.1} s\n\
         prompts   {:>9} tokens, {} of them cached\n\
         answers   {:>9} tokens, {:.1} tokens/s, {:.2} answers/s\n\
         goodput   {:>9} answers, {:.2} answers/s",
        load.server.model(),
        load.server.url(),
        report.answered,
        report.requests,
        report.duration_s,
        report.prompt_tokens,
        report.cached_tokens,
        report.output_tokens,
        report.output_tok_s,
        report.answers_per_s,
        report.good,
        report.goodput_per_s,
    );
    if let Some(tok_s) = predicted.tok_s(1) {
        text += &format!("\npredicted {tok_s:>9.1} tokens/s of an answer alone");
    }
    if let Some(tok_s) = together(load, predicted) {
        text += &format!("\n          {tok_s:>9.1} tokens/s of all clients while they decode");
    }
    text += &format!(
        "\n\n{:<22}{:>9}{:>9}{:>9}{:>9}{:>9}",
        "ms", "mean", "p50", "p95", "p99", "max"
    );
    for (name, times) in [
        ("to the first token", report.ttft_ms),
        ("between two tokens", report.gap_ms),
        ("to the end", report.whole_ms),
    ] {
        text += &row(name, times);
    }
    let errors = report.errors.iter();
    errors.fold(text, |text, (error, n)| {
        text + &format!("\n{n} failed: {error}")
    })
}

fn row(name: &str, times: Option<Times>) -> String {
    let Some(times) = times else {
        return format!("\n{name:<22}{:>9}", "-");
    };
    let all = [times.mean, times.p50, times.p95, times.p99, times.max];
    all.iter().fold(format!("\n{name:<22}"), |text, ms| {
        text + &format!("{ms:>9.1}")
    })
}
