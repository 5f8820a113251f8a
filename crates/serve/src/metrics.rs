//! The text of `/metrics`, in the OpenMetrics format that Prometheus reads.
//!
//! Latencies are measured where replies leave the engine, so slow clients do not change them.

use std::sync::Arc;
use std::time::Instant;

use paceline_engine::{Reply, ServiceStatus};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::facts::{MetricSample, ProcessMetrics};
use crate::live_requests::{LiveRequests, ProgressUpdater};
use crate::model::ServedModel;

/// The media type of `/metrics`.
pub(crate) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Names of a model's metrics as Prometheus stores them, without the caller's. A histogram is
/// listed by its `_bucket`.
pub const METRIC_NAMES: [&str; 11] = [
    "paceline_build_info",
    "paceline_http_requests_total",
    "paceline_answers_total",
    "paceline_tool_calls_total",
    "paceline_requests_in_flight",
    "paceline_sequences_running",
    "paceline_sequences_waiting",
    "paceline_tokens_total",
    "paceline_first_token_seconds_bucket",
    "paceline_inter_token_seconds_bucket",
    "paceline_tokens_per_second_bucket",
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    /// The route, or `other`; not the path, which a client chooses.
    endpoint: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CutLabels {
    /// The server's name for the model, not the client's.
    model: String,
    /// The model's split when the request was submitted.
    split: String,
}

type Buckets = fn() -> Histogram;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TokenKind {
    kind: &'static str,
}

/// Counters and histograms of one model.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    answers: Family<OutcomeLabels, Counter>,
    calls: Family<OutcomeLabels, Counter>,
    prompt_tokens: Counter,
    generated_tokens: Counter,
    first_token_s: Family<CutLabels, Histogram, Buckets>,
    between_tokens_s: Family<CutLabels, Histogram, Buckets>,
    tokens_per_s: Histogram,
    in_flight: Gauge,
    running: Gauge,
    waiting: Gauge,
    live: LiveRequests,
    model: String,
}

impl Metrics {
    pub(crate) fn new(model: &ServedModel, live: LiveRequests) -> Self {
        let tokens = Family::<TokenKind, Counter>::default();
        let of_kind = |kind| tokens.get_or_create(&TokenKind { kind }).clone();
        let mut metrics = Self {
            registry: Registry::with_prefix("paceline"),
            requests: Family::default(),
            answers: Family::default(),
            calls: Family::default(),
            prompt_tokens: of_kind("prompt"),
            generated_tokens: of_kind("generated"),
            // From a tiny model's millisecond to a long prompt's minutes: 1 ms to 524 s.
            first_token_s: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(1e-3, 2.0, 20))
            }),
            // 0.1 ms to 3.3 s.
            between_tokens_s: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(1e-4, 2.0, 16))
            }),
            // 0.5 to 16 k.
            tokens_per_s: Histogram::new(exponential_buckets(0.5, 2.0, 16)),
            in_flight: Gauge::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            live,
            model: model.id.clone(),
        };
        metrics.register(model, tokens);
        metrics
    }

    fn register(&mut self, model: &ServedModel, tokens: Family<TokenKind, Counter>) {
        let registry = &mut self.registry;
        let build = Info::new(vec![
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("model", model.id.clone()),
            ("fingerprint", model.fingerprint.clone()),
        ]);
        registry.register("build", "What runs here", build);
        let requests = "HTTP requests by endpoint and status";
        registry.register("http_requests", requests, self.requests.clone());
        let answers = "Answers of the model by how they ended";
        registry.register("answers", answers, self.answers.clone());
        let calls = "Calls of tools by whether they could be read; else they are told as text";
        registry.register("tool_calls", calls, self.calls.clone());
        let in_flight = "Requests to the model from their headers to the end of their answer";
        registry.register("requests_in_flight", in_flight, self.in_flight.clone());
        let running = "Sequences that are computed";
        registry.register("sequences_running", running, self.running.clone());
        let waiting = "Sequences that wait to be computed";
        registry.register("sequences_waiting", waiting, self.waiting.clone());
        registry.register("tokens", "Tokens read and generated", tokens);
        let first = "From a request's headers to a choice's first token";
        registry.register("first_token_seconds", first, self.first_token_s.clone());
        let between = "From a choice's token to its next";
        registry.register(
            "inter_token_seconds",
            between,
            self.between_tokens_s.clone(),
        );
        let rate = "Tokens per second of a choice after its first";
        registry.register("tokens_per_second", rate, self.tokens_per_s.clone());
    }

    /// Counts a request whose status is known.
    pub(crate) fn request(&self, endpoint: &str, status: u16) {
        let endpoint = endpoint.to_owned();
        let labels = RequestLabels { endpoint, status };
        self.requests.get_or_create(&labels).inc();
    }

    /// Counts a finished response.
    pub(crate) fn answered(&self, outcome: &'static str) {
        self.answers.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    pub(crate) fn embedded(&self, tokens: usize) {
        self.prompt_tokens.inc_by(tokens as u64);
    }

    /// Counts a choice's tool calls: parsed, and unparseable.
    pub(crate) fn calls(&self, (read, unreadable): (usize, usize)) {
        for (outcome, n) in [("read", read), ("unreadable", unreadable)] {
            let calls = self.calls.get_or_create(&OutcomeLabels { outcome });
            calls.inc_by(n as u64);
        }
    }

    /// A meter for a choice of a model with this split.
    pub(crate) fn meter(
        self: &Arc<Self>,
        asked: Instant,
        prompt_tokens: usize,
        split: String,
    ) -> ReplyMeter {
        let model = self.model.clone();
        ReplyMeter {
            labels: CutLabels { model, split },
            metrics: Arc::clone(self),
            asked,
            prompt_tokens: prompt_tokens as u64,
            first: None,
            last: asked,
            tokens: 0,
            watched: self.live.begin(&self.model, asked, prompt_tokens as u64),
        }
    }

    pub(crate) fn text(
        &self,
        status: &ServiceStatus,
        in_flight: usize,
        facts: &ProcessMetrics,
    ) -> String {
        self.in_flight.set(in_flight as i64);
        self.running.set(status.running as i64);
        self.waiting.set(status.waiting as i64);
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("a String takes everything");
        // The caller's metrics go before the last line.
        text.truncate(text.len() - END.len());
        text + &facts_text(facts) + END
    }
}

/// Last line of OpenMetrics text.
pub(crate) const END: &str = "# EOF\n";

/// Merges the texts of several models, without the last line: families in the first text's order,
/// each sample labelled with its `model`.
pub(crate) fn merged(texts: &[(&str, String)]) -> String {
    let mut families: Vec<(&str, Vec<&str>, String)> = Vec::new();
    for (model, text) in texts {
        let mut at = 0;
        for line in text.lines().filter(|line| *line != END.trim_end()) {
            if let Some(comment) = line.strip_prefix("# ") {
                let name = comment.split(' ').nth(1).unwrap_or_default();
                at = match families.iter().position(|(known, ..)| *known == name) {
                    Some(at) => at,
                    None => {
                        families.push((name, Vec::new(), String::new()));
                        families.len() - 1
                    }
                };
                let comments = &mut families[at].1;
                if !comments.contains(&line) {
                    comments.push(line);
                }
            } else if let Some((_, _, samples)) = families.get_mut(at) {
                *samples += &labelled(line, model);
            }
        }
    }
    let mut all = String::new();
    for (_, comments, samples) in families {
        comments.iter().for_each(|line| all += &format!("{line}\n"));
        all += &samples;
    }
    all
}

/// Adds the label `model` to a sample without it.
fn labelled(line: &str, model: &str) -> String {
    let model = model.replace('\\', "\\\\").replace('"', "\\\"");
    let label = format!("model=\"{}\"", model.replace('\n', "\\n"));
    let name = line.find(['{', ' ']).unwrap_or(line.len());
    let (name, rest) = line.split_at(name);
    match rest.strip_prefix('{') {
        Some(labels) if labels.contains("model=\"") => format!("{line}\n"),
        Some(labels) => format!("{name}{{{label},{labels}\n"),
        None => format!("{name}{{{label}}}{rest}\n"),
    }
}

/// The caller's metrics as gauges. Waits for those of workers, which blocks no other request.
pub(crate) fn facts_text(facts: &ProcessMetrics) -> String {
    let (mut text, mut last) = (String::new(), "");
    for fact in tokio::task::block_in_place(|| (facts.0)()) {
        let MetricSample {
            name,
            help,
            labels,
            value,
        } = fact;
        if name != last {
            text += &format!("# HELP paceline_{name} {help}.\n# TYPE paceline_{name} gauge\n");
            last = name;
        }
        let labels = match labels.is_empty() {
            true => labels,
            false => format!("{{{labels}}}"),
        };
        text += &format!("paceline_{name}{labels} {value}\n");
    }
    text
}

/// Measures the replies of one choice.
#[derive(Debug)]
pub(crate) struct ReplyMeter {
    metrics: Arc<Metrics>,
    labels: CutLabels,
    asked: Instant,
    prompt_tokens: u64,
    /// Arrival of the first token.
    first: Option<Instant>,
    last: Instant,
    tokens: u64,
    watched: ProgressUpdater,
}

impl ReplyMeter {
    pub(crate) fn reply(&mut self, reply: &Reply, now: Instant) {
        match reply {
            Reply::PromptRead { .. } => drop(self.metrics.prompt_tokens.inc_by(self.prompt_tokens)),
            Reply::Token { .. } => self.token(now),
            Reply::Continued => {}
            Reply::Finished { .. } => self.finished(),
            Reply::Failed(_) => self.watched.end("failed"),
        }
    }

    fn token(&mut self, now: Instant) {
        self.metrics.generated_tokens.inc();
        self.tokens += 1;
        self.watched.token(now);
        let metrics = &self.metrics;
        let (times, before) = match self.first {
            None => (&metrics.first_token_s, self.asked),
            Some(_) => (&metrics.between_tokens_s, self.last),
        };
        let took = now.saturating_duration_since(before);
        let times = times.get_or_create(&self.labels);
        times.observe(took.as_secs_f64());
        self.first = self.first.or(Some(now));
        self.last = now;
    }

    fn finished(&mut self) {
        self.watched.end("complete");
        let Some(first) = self.first else { return };
        let seconds = self.last.saturating_duration_since(first).as_secs_f64();
        if self.tokens > 1 && seconds > 0.0 {
            let rate = (self.tokens - 1) as f64 / seconds;
            self.metrics.tokens_per_s.observe(rate);
        }
    }
}
