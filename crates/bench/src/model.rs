//! Prefill and decode speed of a loaded model, over several runs, compared with another program's.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use paceline_base::Bytes;
use paceline_engine::{GenerationRequest, Reply, RequestFailure};
use paceline_node::ServingModel;
use paceline_plan::draw::{Bar, BarChart};
use paceline_tensor::KvType;
use paceline_text::tokenizer::Tokenizer;
use paceline_worker::InstanceTraffic;
use serde_json::json;

use crate::limits::Limit;
use crate::quantile;

/// The model under measurement.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    pub model: &'a ServingModel,
    pub tokenizer: &'a Tokenizer,
    /// Time from opening the model's files until it is ready for a prompt.
    pub load_time: Duration,
}

/// Settings of the measurement.
#[derive(Clone, Debug)]
pub struct SpeedSpec {
    /// The model's name.
    pub model: String,
    pub prompt: u32,
    /// Tokens to decode.
    pub generate: u32,
    /// Position that decoding starts from.
    pub depth: usize,
}

/// Tokens per second of one run.
#[derive(Clone, Copy, Debug)]
pub struct SpeedRun {
    pub prefill: f64,
    pub decode: f64,
    /// Traffic of nodes per token.
    pub moved: Option<InstanceTraffic>,
    /// Memory read bandwidth measured just before, in bytes per second, with as many threads or by
    /// MLX's device.
    pub limit: f64,
}

/// Runs once: measures prefill, and decode behind [`SpeedSpec::depth`]. Prompts differ by `round`.
///
/// # Errors
/// The computation failed, or ended its answer at once.
pub fn measure(
    subject: Subject<'_>,
    limit: &Limit,
    spec: &SpeedSpec,
    round: u32,
) -> Result<SpeedRun> {
    let limit = limit.measure()?;
    let prompt = spec.prompt as usize;
    let tokens = tokens(subject, spec.depth.max(prompt), round);
    let start = Instant::now();
    let read = generate(subject, &tokens[..prompt], 0)?;
    let prefill = prompt as f64 / (read.prompt_read - start).as_secs_f64();
    // Other tokens, so that the prefix cache has no match. A prompt has at least one token.
    let again = spec.depth != prompt; // long to read, and read once
    let round = if again { 0 } else { round };
    let tokens = self::tokens(subject, spec.depth.max(1), round + 1_000_000);
    let before = subject.model.moved();
    let generated = generate(subject, &tokens, spec.generate as usize + 1)?;
    let computed = (tokens.len() + generated.tokens - 1) as u64;
    let moved = subject.model.moved().zip(before);
    let moved = moved.map(|(after, before)| after.since(before).per(computed));
    let decoded = generated.tokens.saturating_sub(1);
    ensure!(
        decoded > 0,
        "the model ended its answer at once: nothing to measure"
    );
    let time = (generated.last - generated.prompt_read).as_secs_f64();
    Ok(SpeedRun {
        prefill,
        decode: decoded as f64 / time,
        moved,
        limit,
    })
}

/// `n` tokens spread over the vocabulary like those of scripts/peers/llama_bench.py, without the
/// special tokens at its ends, different in each round. A toy vocabulary has no room for that.
pub fn tokens(subject: Subject<'_>, n: usize, round: u32) -> Vec<u32> {
    let (vocab, round) = (subject.model.config().vocab, round as usize);
    let spread = |i: usize| match vocab.checked_sub(100) {
        Some(inner @ 1..) => (i * 7919 + round * 104_729) % inner + 50,
        _ => (i + round) % vocab,
    };
    (0..n).map(|i| spread(i) as u32).collect()
}

/// Times of a request's replies.
#[derive(Clone, Copy, Debug)]
pub struct ReplyTimes {
    /// End of prefill.
    pub prompt_read: Instant,
    /// End of the answer.
    pub last: Instant,
    pub tokens: usize,
}

/// Prefills `prompt` and decodes exactly `max_tokens`: no token ends the answer before.
pub fn generate(
    subject: Subject<'_>,
    prompt: &[u32],
    max_tokens: usize,
) -> std::result::Result<ReplyTimes, RequestFailure> {
    let answer = subject.model.submit(GenerationRequest {
        prompt: prompt.to_vec(),
        max_tokens,
        min_tokens: max_tokens,
        ..GenerationRequest::default()
    })?;
    let (mut prompt_read, mut tokens) = (Instant::now(), 0);
    loop {
        match answer.next()? {
            (at, Reply::PromptRead { .. }) => prompt_read = at,
            (_, Reply::Token { .. }) => tokens += 1,
            (_, Reply::Continued) => {}
            (last, Reply::Finished { .. }) => {
                return Ok(ReplyTimes {
                    prompt_read,
                    last,
                    tokens,
                });
            }
            (_, Reply::Failed(failure)) => return Err(failure),
        }
    }
}

/// The measurements of a model.
#[derive(Clone, Debug)]
pub struct Report<'a> {
    /// The settings of the measurement.
    pub spec: &'a SpeedSpec,
    pub subject: Subject<'a>,
    /// The reader that measured the limit.
    pub limit: String,
    /// The program that was measured in turn with it; empty if none.
    pub peer: &'static str,
    /// Runs of the model; at least one.
    pub ours: Vec<SpeedRun>,
    /// Runs of the peer: one for each of ours, or none.
    pub theirs: Vec<SpeedRun>,
}

impl Report<'_> {
    fn column(runs: &[SpeedRun], of: impl Fn(&SpeedRun) -> f64) -> Vec<f64> {
        runs.iter().map(of).collect()
    }

    /// Ratios of ours to theirs, by pair.
    fn ratios(&self, of: fn(&SpeedRun) -> f64) -> Vec<f64> {
        self.ours
            .iter()
            .zip(&self.theirs)
            .map(|(a, b)| of(a) / of(b))
            .collect()
    }

    fn weight_bytes(&self) -> u64 {
        self.subject
            .model
            .weights()
            .iter()
            .map(|bytes| bytes.0)
            .sum()
    }

    /// Predicted decode tokens per second, at the middle of the measured positions.
    fn predicted(&self) -> Option<f64> {
        let keys = self.spec.depth + self.spec.generate as usize / 2;
        self.subject.model.predicted_at(u32::try_from(keys).ok()?)
    }

    /// Traffic of nodes per token, from the run with the median bytes on the wire.
    fn moved(&self) -> Option<InstanceTraffic> {
        let moved: Option<Vec<InstanceTraffic>> = self.ours.iter().map(|run| run.moved).collect();
        let mut moved = moved?;
        moved.sort_unstable_by_key(|moved| moved.sent);
        moved.get((moved.len().max(1) - 1) / 2).copied()
    }

    /// Time of a token beyond the peer's, in milliseconds; the median of the pairs.
    fn extra_ms(&self) -> f64 {
        let pairs = self.ours.iter().zip(&self.theirs);
        let extra: Vec<f64> = pairs
            .map(|(a, b)| 1e3 / a.decode - 1e3 / b.decode)
            .collect();
        quantile(&extra, 0.5)
    }

    /// Weight bytes that decode steps read per second.
    fn weight_rate(&self, decode: f64) -> f64 {
        self.weight_bytes() as f64 * decode / 1e9
    }

    /// Fraction of the read limit that decoding reaches; the median of the runs.
    fn of_limit(&self) -> f64 {
        let share = |run: &SpeedRun| 1e9 * self.weight_rate(run.decode) / run.limit;
        quantile(&Self::column(&self.ours, share), 0.5)
    }

    /// Decode speeds of both and of the prediction, and prefill speeds.
    pub fn svg(&self) -> String {
        let median = |runs: &[SpeedRun], of: fn(&SpeedRun) -> f64| {
            (!runs.is_empty()).then(|| quantile(&Self::column(runs, of), 0.5))
        };
        let row = |label: &str, value: Option<f64>| Bar {
            label: label.to_owned(),
            values: vec![value],
            note: String::new(),
        };
        let decode: fn(&SpeedRun) -> f64 = |run| run.decode;
        let prefill: fn(&SpeedRun) -> f64 = |run| run.prefill;
        let mut rows = vec![row("decode", median(&self.ours, decode))];
        rows.extend(
            self.predicted()
                .map(|tok_s| row("decode, predicted", Some(tok_s))),
        );
        if !self.theirs.is_empty() {
            rows.push(row(
                &format!("decode, {}", self.peer),
                median(&self.theirs, decode),
            ));
        }
        rows.push(row("prompt", median(&self.ours, prefill)));
        if !self.theirs.is_empty() {
            rows.push(row(
                &format!("prompt, {}", self.peer),
                median(&self.theirs, prefill),
            ));
        }
        let (model, nodes) = (&self.spec.model, self.nodes());
        let bars = BarChart {
            title: format!("{model}: tokens a second, {nodes}"),
            series: vec!["median".to_owned()],
            rows,
        };
        bars.svg()
    }

    /// The report as JSON.
    pub fn json(&self) -> serde_json::Value {
        let spread = |values: Vec<f64>| {
            json!({
                "median": quantile(&values, 0.5),
                "p10": quantile(&values, 0.1),
                "p90": quantile(&values, 0.9),
                "runs": values,
            })
        };
        let of = |runs: &[SpeedRun]| {
            (!runs.is_empty()).then(|| {
                json!({
                    "prefill_tok_s": spread(Self::column(runs, |r| r.prefill)),
                    "decode_tok_s": spread(Self::column(runs, |r| r.decode)),
                    "read_limit_gb_s": spread(Self::column(runs, |r| r.limit / 1e9)),
                })
            })
        };
        let decode = quantile(&Self::column(&self.ours, |r| r.decode), 0.5);
        json!({
            "model": self.spec.model,
            "class": self.subject.model.options().classes.to_string(),
            "kv_type": self.subject.model.options().kv_type().map(KvType::name),
            "instruction_set": self.subject.model.device(),
            "nodes": self.subject.model.nodes(),
            "split": self.subject.model.split().to_string(),
            "threads": self.subject.model.options().threads,
            "wire_bytes_per_token": self.moved().map(|moved| moved.sent.0),
            "array_bytes_per_token": self.moved().and_then(InstanceTraffic::arrays_json),
            "prompt": self.spec.prompt,
            "gen": self.spec.generate,
            "depth": self.spec.depth,
            "weight_bytes": self.weight_bytes(),
            "load_s": self.subject.load_time.as_secs_f64(),
            "predicted_decode_tok_s": self.predicted(),
            "weights_gb_s": self.weight_rate(decode),
            "of_read_limit": self.of_limit(),
            "read_limit_of": self.limit,
            "paceline": of(&self.ours),
            "peer": (!self.theirs.is_empty()).then_some(self.peer),
            "peer_result": of(&self.theirs),
            "extra_ms_per_token": (!self.theirs.is_empty()).then(|| self.extra_ms()),
            "ratio": (!self.theirs.is_empty()).then(|| json!({
                "prefill": spread(self.ratios(|r| r.prefill)),
                "decode": spread(self.ratios(|r| r.decode)),
            })),
        })
    }

    fn nodes(&self) -> String {
        let threads = self.subject.model.options().threads;
        let threads = format!("{threads} thread{}", if threads == 1 { "" } else { "s" });
        match self.subject.model.nodes() {
            1 => threads,
            nodes => format!(
                "{nodes} nodes ({}) of {threads}",
                self.subject.model.split()
            ),
        }
    }

    /// The report as a text table.
    pub fn table(&self) -> String {
        let head = format!(
            "{}, {} on {} with {}, weights {}, loaded in {:.2} s\n\
             prompt {}, decode {} from position {}, {} runs: median (p10 .. p90) tokens/s",
            self.spec.model,
            self.subject.model.options().classes,
            self.subject.model.device(),
            self.nodes(),
            Bytes(self.weight_bytes()),
            self.subject.load_time.as_secs_f64(),
            self.spec.prompt,
            self.spec.generate,
            self.spec.depth,
            self.ours.len(),
        );
        let line = |name: &str, prefill: Vec<f64>, decode: Vec<f64>, unit: &str| {
            format!(
                "\n{name:10}  prefill {}  decode {}{unit}",
                spread(&prefill),
                spread(&decode)
            )
        };
        let columns = |runs: &[SpeedRun]| {
            (
                Self::column(runs, |r| r.prefill),
                Self::column(runs, |r| r.decode),
            )
        };
        let (prefill, decode) = columns(&self.ours);
        let rate = format!(
            "  {:.1} GB/s of weights, {:.0} % of plain reads",
            self.weight_rate(quantile(&decode, 0.5)),
            100.0 * self.of_limit()
        );
        let mut text = head + &line("paceline", prefill, decode, &rate);
        if !self.theirs.is_empty() {
            let (prefill, decode) = columns(&self.theirs);
            text += &line(self.peer, prefill, decode, "");
            let (prefill, decode) = (self.ratios(|r| r.prefill), self.ratios(|r| r.decode));
            text += &line("ratio", prefill, decode, "");
            text += &format!("  {:+.3} ms a token", self.extra_ms());
        }
        if let Some(predicted) = self.predicted() {
            let median = quantile(&Self::column(&self.ours, |r| r.decode), 0.5);
            text += &format!(
                "\npredicted   decode {predicted:8.1}, {:+.0} % of what was measured",
                100.0 * (predicted / median - 1.0)
            );
        }
        text += &self.limits();
        if let Some(moved) = self.moved() {
            text += &format!("\n{} per token on the wire{}", moved.sent, moved.arrays());
        }
        text
    }
}

impl Report<'_> {
    /// Speeds of plain reads just before each run.
    fn limits(&self) -> String {
        let of = |runs| spread(&Self::column(runs, |run| run.limit / 1e9));
        let ours = of(&self.ours);
        let ours = format!("\nread limit  {} GB/s ({})", ours.trim_start(), self.limit);
        match self.theirs.first() {
            Some(run) if run.limit.is_finite() => {
                format!(
                    "{ours}, {} for {}",
                    of(&self.theirs).trim_start(),
                    self.peer
                )
            }
            _ => ours,
        }
    }
}

fn spread(values: &[f64]) -> String {
    let [low, median, high] = [0.1, 0.5, 0.9].map(|q| quantile(values, q));
    let digits = if median < 20.0 { 2 } else { 1 };
    format!("{median:8.digits$} ({low:.digits$} .. {high:.digits$})")
}
