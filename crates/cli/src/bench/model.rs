//! `paceline bench model`: prefill and decode speed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use paceline_base::Bytes;
use paceline_engine::{EngineConfig, Reply, Request, SamplingParams};
use paceline_model::Config;
use paceline_node::Moved;
use paceline_plan::draw::{Bar, Bars};
use paceline_tensor::{KvType, PAGE};
use serde_json::json;

use super::limits::Limit;
use super::peer::{Served, Task};
use super::quantile;
use crate::compute::{ComputeArgs, EngineArgs};
use crate::interrupt::Signals;
use crate::loaded::{Loaded, Opened, SplitArgs};
use crate::moved::{arrays, arrays_json};
use crate::output::{draw, print};
use crate::pull;
use crate::shared::{self, Instance};

/// Arguments of `paceline bench model`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Alias, GGUF file, folder of safetensors, or hub id
    model: String,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    split: SplitArgs,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,
    /// Tokens to decode after it, or after --depth
    #[arg(long, value_name = "N", default_value_t = 128,
          value_parser = clap::value_parser!(u32).range(1..))]
    r#gen: u32,
    /// Decode from this position instead of the prompt's end
    #[arg(long, value_name = "N")]
    depth: Option<u32>,
    /// Measure the instance of MODEL that this machine's node has loaded over the cluster
    #[arg(long, conflicts_with_all = ["against", "against_one", "against_process"])]
    instance: bool,
    /// With --instance, alternate with the same model over --nodes local processes, by --split and
    /// --transport
    #[arg(long, requires = "instance")]
    against_local: bool,
    /// Measured runs, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 9,
          value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Alternate with llama.cpp: a folder with the npm package node-llama-cpp 3.22.1
    /// (npm install --ignore-scripts --prefix DIR --no-save node-llama-cpp@3.22.1); or with
    /// `mlx-lm`, of the Python that PACELINE_MLX_PYTHON names, else of python3
    #[arg(long, value_name = "DIR|mlx-lm")]
    against: Option<PathBuf>,
    /// Alternate with one node that has the threads of one of the nodes
    #[arg(long, conflicts_with = "against")]
    against_one: bool,
    /// Alternate with one node that has the threads of all nodes
    #[arg(long, conflicts_with_all = ["against", "against_one"])]
    against_process: bool,
    /// Also write the speeds as a picture
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Tokens per second of one run.
#[derive(Clone, Copy, Debug)]
struct Run {
    prefill: f64,
    decode: f64,
    /// What nodes moved per token.
    moved: Option<Moved>,
    /// Plain reads of memory just before, by as many threads or by MLX's device, bytes per second.
    limit: f64,
}

/// Measures and prints.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    args.split.check()?;
    let instance = args.instance.then(|| shared::loaded(&args.model));
    let instance = instance.transpose()?;
    let path = match &instance {
        Some(instance) => instance.path.clone(),
        None => pull::ensure(&args.model, signals)?.path,
    };
    let open = |compute: ComputeArgs, split: &SplitArgs| {
        let sizes = |_: &Config| args.sizes();
        let mut opened = Opened::new(&path, (compute, args.engine), split, sizes)?;
        opened.forecast();
        opened.stay(); // all runs are of one split
        opened.load()
    };
    let loaded = match &instance {
        Some(instance) => args.at(instance)?,
        None => open(args.compute, &args.split)?,
    };
    let mut peer = peer(args, &path, &loaded, &open)?;
    let limit = limit(&loaded)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..=args.runs {
        // The first of each warms up.
        let run = measure(&loaded, &limit, args, round)?;
        ours.extend((round > 0).then_some(run));
        if let Some(peer) = &mut peer {
            let run = peer.run(args, round)?;
            theirs.extend((round > 0).then_some(run));
        }
    }
    let report = Report {
        args,
        loaded: &loaded,
        limit: limit.name(),
        peer: peer.as_ref().map_or("", Peer::name),
        ours,
        theirs,
    };
    draw(args.plot.as_deref(), || report.svg())?;
    print(&if args.json {
        report.json().to_string()
    } else {
        report.table()
    })
}

/// Prepares the peer that is measured in turn with `loaded`, the model at `path`; `None` where the
/// arguments name no peer. `open` loads the same model once more.
fn peer(
    args: &Args,
    path: &Path,
    loaded: &Loaded,
    open: &dyn Fn(ComputeArgs, &SplitArgs) -> anyhow::Result<Loaded>,
) -> anyhow::Result<Option<Peer>> {
    Ok(match &args.against {
        Some(given) => {
            let task = Task {
                threads: loaded.threads,
                prompt: args.prompt as usize,
                generate: args.r#gen as usize,
                depth: args.depth(),
            };
            Some(Peer::Other(if given == Path::new("mlx-lm") {
                Served::mlx_lm(path, task)?
            } else {
                Served::llama_cpp(given, path, task)?
            }))
        }
        None if args.against_local => {
            let local = open(args.compute, &args.split)?;
            Some(Peer::Local(Box::new((limit(&local)?, local))))
        }
        None if args.against_one || args.against_process => {
            let nodes = if args.against_one {
                1
            } else {
                loaded.nodes() as usize
            };
            let mut compute = args.compute;
            compute.threads = Some(u16::try_from(loaded.threads * nodes)?);
            let one = open(compute, &SplitArgs::one_node())?;
            Some(Peer::OneNode(Box::new((limit(&one)?, one))))
        }
        None => None,
    })
}

/// The limit of what a model computes on; of the processor where some nodes do on it.
fn limit(loaded: &Loaded) -> anyhow::Result<Limit> {
    if loaded.classes.each().iter().all(|class| class.is_mlx()) {
        return Limit::of_mlx();
    }
    Limit::of_cpu(loaded.threads * loaded.nodes() as usize)
}

/// What is measured in turn with the model.
enum Peer {
    Other(Served),
    OneNode(Box<(Limit, Loaded)>),
    Local(Box<(Limit, Loaded)>),
}

impl Peer {
    const fn name(&self) -> &'static str {
        match self {
            Self::Other(peer) => peer.name(),
            Self::OneNode(_) => "one node",
            Self::Local(_) => "local processes",
        }
    }

    fn run(&mut self, args: &Args, round: u32) -> anyhow::Result<Run> {
        let (prefill, decode) = match self {
            Self::Other(peer) => peer.run()?,
            Self::OneNode(one) | Self::Local(one) => return measure(&one.1, &one.0, args, round),
        };
        Ok(Run {
            prefill,
            decode,
            moved: None,
            limit: f64::NAN,
        })
    }
}

impl Args {
    fn depth(&self) -> usize {
        self.depth.unwrap_or(self.prompt) as usize
    }

    /// Positions of the longest sequence: one token more than is measured.
    fn context(&self) -> usize {
        self.depth().max(self.prompt as usize) + self.r#gen as usize + 2
    }

    /// The instance as a model that answers.
    fn at(&self, instance: &Instance) -> anyhow::Result<Loaded> {
        let split = SplitArgs {
            nodes: instance.nodes,
            split: instance.split,
            ..SplitArgs::one_node()
        };
        let sizes = |_: &Config| self.sizes();
        let opened = Opened::new(&instance.path, (self.compute, self.engine), &split, sizes)?;
        Ok(opened.elsewhere(Arc::clone(&instance.service), instance.on.clone()))
    }

    /// Sizes of the engine: room for a prompt beside the tokens before `--depth`, whose pages are
    /// kept from run to run.
    fn sizes(&self) -> EngineConfig {
        let context = self.context();
        EngineConfig {
            cache_positions: context + self.prompt as usize + 2 * PAGE,
            ..EngineConfig::single(self.model.clone(), context)
        }
    }
}

/// One run: the time to read a prompt, and to decode behind `--depth`.
fn measure(loaded: &Loaded, limit: &Limit, args: &Args, round: u32) -> anyhow::Result<Run> {
    let limit = limit.measure()?;
    let prompt = args.prompt as usize;
    let tokens = tokens(loaded, args.depth().max(prompt), round);
    let start = Instant::now();
    let read = generate(loaded, &tokens[..prompt], 0)?;
    let prefill = prompt as f64 / (read.prompt_read - start).as_secs_f64();
    // Other tokens, so that nothing of the first prompt can be used again.
    // A prompt has at least one token.
    let again = args.depth() != prompt; // long to read, and read once
    let round = if again { 0 } else { round };
    let tokens = self::tokens(loaded, args.depth().max(1), round + 1_000_000);
    let before = loaded.moved();
    let generated = generate(loaded, &tokens, args.r#gen as usize + 1)?;
    let computed = (tokens.len() + generated.tokens - 1) as u64;
    let moved = loaded.moved().zip(before);
    let moved = moved.map(|(after, before)| after.since(before).per(computed));
    let decoded = generated.tokens.saturating_sub(1);
    anyhow::ensure!(
        decoded > 0,
        "the model ended its answer at once: nothing to measure"
    );
    let time = (generated.last - generated.prompt_read).as_secs_f64();
    Ok(Run {
        prefill,
        decode: decoded as f64 / time,
        moved,
        limit,
    })
}

/// `n` tokens spread over the vocabulary as those of scripts/peers/llama_bench.py, without the
/// special tokens at its ends; others in each round. A toy vocabulary has no room for that.
pub(super) fn tokens(loaded: &Loaded, n: usize, round: u32) -> Vec<u32> {
    let (vocab, round) = (loaded.config().vocab, round as usize);
    let spread = |i: usize| match vocab.checked_sub(100) {
        Some(inner @ 1..) => (i * 7919 + round * 104_729) % inner + 50,
        _ => (i + round) % vocab,
    };
    (0..n).map(|i| spread(i) as u32).collect()
}

/// When a request's replies came.
pub(super) struct Generated {
    pub(super) prompt_read: Instant,
    pub(super) last: Instant,
    pub(super) tokens: usize,
}

/// Reads `prompt` and decodes `max_tokens`, and not less: tokens that would end the answer are
/// made improbable.
pub(super) fn generate(
    loaded: &Loaded,
    prompt: &[u32],
    max_tokens: usize,
) -> anyhow::Result<Generated> {
    let ends = (0..loaded.config().vocab as u32)
        .filter(|token| loaded.tokenizer.is_end_of_generation(*token))
        .map(|token| (token, -100.0));
    let answer = loaded.submit(Request {
        prompt: prompt.to_vec(),
        max_tokens,
        sampling: SamplingParams {
            logit_bias: ends.collect(),
            ..SamplingParams::default()
        },
        stop: Vec::new(),
        logprobs: None,
        ..Request::default()
    })?;
    let (mut prompt_read, mut tokens) = (Instant::now(), 0);
    loop {
        match answer.next()? {
            (at, Reply::PromptRead { .. }) => prompt_read = at,
            (_, Reply::Token { .. }) => tokens += 1,
            (last, Reply::Finished { .. }) => {
                return Ok(Generated {
                    prompt_read,
                    last,
                    tokens,
                });
            }
            (_, Reply::Failed(failure)) => return Err(failure.into()),
        }
    }
}

/// What was measured.
struct Report<'a> {
    args: &'a Args,
    loaded: &'a Loaded,
    /// Whose reads the limit is of.
    limit: String,
    peer: &'static str,
    ours: Vec<Run>,
    theirs: Vec<Run>,
}

impl Report<'_> {
    fn column(runs: &[Run], of: impl Fn(&Run) -> f64) -> Vec<f64> {
        runs.iter().map(of).collect()
    }

    /// Ratios of the pairs.
    fn ratios(&self, of: fn(&Run) -> f64) -> Vec<f64> {
        self.ours
            .iter()
            .zip(&self.theirs)
            .map(|(a, b)| of(a) / of(b))
            .collect()
    }

    fn weight_bytes(&self) -> u64 {
        self.loaded.weights().iter().map(|bytes| bytes.0).sum()
    }

    /// Decode tokens a second as predicted for the middle of what is measured.
    fn predicted(&self) -> Option<f64> {
        let keys = self.args.depth() + self.args.r#gen as usize / 2;
        self.loaded.predicted_at(u32::try_from(keys).ok()?)
    }

    /// What nodes moved per token, of the run whose bytes on the wire are the median.
    fn moved(&self) -> Option<Moved> {
        let moved: Option<Vec<Moved>> = self.ours.iter().map(|run| run.moved).collect();
        let mut moved = moved?;
        moved.sort_unstable_by_key(|moved| moved.sent);
        moved.get((moved.len().max(1) - 1) / 2).copied()
    }

    /// What a token costs more than the peer's, in milliseconds; the median of the pairs.
    fn extra_ms(&self) -> f64 {
        let pairs = self.ours.iter().zip(&self.theirs);
        let extra: Vec<f64> = pairs
            .map(|(a, b)| 1e3 / a.decode - 1e3 / b.decode)
            .collect();
        quantile(&extra, 0.5)
    }

    /// Weights that a decode step reads, per second.
    fn weight_rate(&self, decode: f64) -> f64 {
        self.weight_bytes() as f64 * decode / 1e9
    }

    /// Share of the read limit that decoding reaches; the median of the runs.
    fn of_limit(&self) -> f64 {
        let share = |run: &Run| 1e9 * self.weight_rate(run.decode) / run.limit;
        quantile(&Self::column(&self.ours, share), 0.5)
    }

    /// Decode speeds of both and of the prediction, and the reading of the prompt.
    fn svg(&self) -> String {
        let median = |runs: &[Run], of: fn(&Run) -> f64| {
            (!runs.is_empty()).then(|| quantile(&Self::column(runs, of), 0.5))
        };
        let row = |label: &str, value: Option<f64>| Bar {
            label: label.to_owned(),
            values: vec![value],
            note: String::new(),
        };
        let decode: fn(&Run) -> f64 = |run| run.decode;
        let prefill: fn(&Run) -> f64 = |run| run.prefill;
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
        let (model, nodes) = (&self.args.model, self.nodes());
        let bars = Bars {
            title: format!("{model}: tokens a second, {nodes}"),
            series: vec!["median".to_owned()],
            rows,
        };
        bars.svg()
    }

    fn json(&self) -> serde_json::Value {
        let spread = |values: Vec<f64>| {
            json!({
                "median": quantile(&values, 0.5),
                "p10": quantile(&values, 0.1),
                "p90": quantile(&values, 0.9),
                "runs": values,
            })
        };
        let of = |runs: &[Run]| {
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
            "model": self.args.model,
            "class": self.loaded.classes.to_string(),
            "kv_type": self.loaded.kv.map(KvType::name),
            "instruction_set": self.loaded.device(),
            "nodes": self.loaded.nodes(),
            "split": self.loaded.split().to_string(),
            "threads": self.loaded.threads,
            "wire_bytes_per_token": self.moved().map(|moved| moved.sent.0),
            "array_bytes_per_token": arrays_json(self.moved()),
            "prompt": self.args.prompt,
            "gen": self.args.r#gen,
            "depth": self.args.depth(),
            "weight_bytes": self.weight_bytes(),
            "load_s": self.loaded.load_time.as_secs_f64(),
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
        let threads = self.loaded.threads;
        let threads = format!("{threads} thread{}", if threads == 1 { "" } else { "s" });
        match self.loaded.nodes() {
            1 => threads,
            nodes => format!("{nodes} nodes ({}) of {threads}", self.loaded.split()),
        }
    }

    fn table(&self) -> String {
        let head = format!(
            "{}, {} on {} with {}, weights {}, loaded in {:.2} s\n\
             prompt {}, decode {} from position {}, {} runs: median (p10 .. p90) tokens/s",
            self.args.model,
            self.loaded.classes,
            self.loaded.device(),
            self.nodes(),
            Bytes(self.weight_bytes()),
            self.loaded.load_time.as_secs_f64(),
            self.args.prompt,
            self.args.r#gen,
            self.args.depth(),
            self.ours.len(),
        );
        let line = |name: &str, prefill: Vec<f64>, decode: Vec<f64>, unit: &str| {
            format!(
                "\n{name:10}  prefill {}  decode {}{unit}",
                spread(&prefill),
                spread(&decode)
            )
        };
        let columns = |runs: &[Run]| {
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
            text += &format!("\n{} per token on the wire{}", moved.sent, arrays(moved));
        }
        text
    }
}

impl Report<'_> {
    /// What plain reads reached just before each run.
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
