//! `paceline bench model`: prefill and decode speed.

use std::path::PathBuf;
use std::time::Instant;

use paceline_base::Bytes;
use paceline_engine::EngineConfig;
use paceline_model::{Batch, BatchSequence, BatchSize, Logits, Model, Workspace};
use paceline_tensor::{KvCache, PAGE};
use serde_json::json;

use super::peer::LlamaCpp;
use super::quantile;
use crate::interrupt::Signals;
use crate::load::{self, ComputeArgs};
use crate::output::print;
use crate::pull;

/// Arguments of `paceline bench model`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Alias, GGUF file, folder of safetensors, or hub id
    model: String,
    #[command(flatten)]
    compute: ComputeArgs,
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
    /// Measured runs, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Alternate with llama.cpp: a folder with the npm package node-llama-cpp 3.22.1
    /// (npm install --ignore-scripts --prefix DIR --no-save node-llama-cpp@3.22.1)
    #[arg(long, value_name = "DIR")]
    against: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Tokens per second of one run.
#[derive(Clone, Copy, Debug)]
struct Run {
    prefill: f64,
    decode: f64,
}

/// Measures and prints.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let found = pull::ensure(&args.model, signals)?;
    let kernels = load::kernels(args.compute)?;
    let threads = kernels.pool().threads();
    let start = Instant::now();
    let (_, model) = load::model(&found.path, args.compute.class, kernels)?;
    let load_s = start.elapsed().as_secs_f64();
    let peer = args.against.clone().map(|folder| LlamaCpp {
        folder,
        threads,
        prompt: args.prompt as usize,
        generate: args.r#gen as usize,
    });
    let mut bench = Bench::new(&model, args)?;
    bench.run();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..args.runs {
        ours.push(bench.run());
        if let Some(peer) = &peer {
            let (prefill, decode) = peer.run(&found.path)?;
            theirs.push(Run { prefill, decode });
        }
    }
    let report = Report {
        args,
        model: &model,
        threads,
        load_s,
        ours,
        theirs,
    };
    print(&if args.json {
        report.json().to_string()
    } else {
        report.table()
    })
}

/// Buffers of a measurement.
struct Bench<'a> {
    model: &'a Model,
    workspace: Workspace,
    cache: KvCache,
    pages: Vec<u32>,
    tokens: Vec<u32>,
    prompt: usize,
    depth: usize,
}

impl<'a> Bench<'a> {
    fn new(model: &'a Model, args: &Args) -> anyhow::Result<Self> {
        let prompt = args.prompt as usize;
        let depth = args.depth.map_or(prompt, |depth| depth as usize);
        let positions = prompt.max(depth + args.r#gen as usize);
        let cache = model.new_cache(positions)?;
        // The same ids as scripts/peers/llama_bench.py: spread over the vocabulary, without the
        // special tokens at its ends. A toy vocabulary has no room for that.
        let vocab = model.config().vocab;
        let spread = |i: usize| match vocab.checked_sub(100) {
            Some(inner @ 1..) => i * 7919 % inner + 50,
            _ => i % vocab,
        };
        let tokens = (0..positions).map(|i| spread(i) as u32).collect();
        // Steps as large as the engine makes them.
        let rows = EngineConfig::single("", positions).max_rows.min(positions);
        Ok(Self {
            model,
            workspace: Workspace::new(model, BatchSize::single(rows, positions)),
            pages: (0..positions.div_ceil(PAGE) as u32).collect(),
            cache,
            tokens,
            prompt,
            depth,
        })
    }

    fn forward(&mut self, from: usize, to: usize) {
        let sequence = BatchSequence {
            tokens: &self.tokens[from..to],
            position: from,
            pages: &self.pages,
            logits: Logits::Last,
        };
        let batch = Batch {
            sequences: &[sequence],
        };
        self.model
            .forward(&batch, &mut self.workspace, &mut self.cache)
            .expect("one rank alone cannot fail");
    }

    fn read(&mut self, from: usize, to: usize) {
        let rows = self.workspace.size().rows;
        for start in (from..to).step_by(rows) {
            self.forward(start, to.min(start + rows));
        }
    }

    fn run(&mut self) -> Run {
        let start = Instant::now();
        self.read(0, self.prompt);
        let prefill = self.prompt as f64 / start.elapsed().as_secs_f64();
        self.read(self.prompt, self.depth.max(self.prompt));
        let start = Instant::now();
        for position in self.depth..self.tokens.len().max(self.depth) {
            self.forward(position, position + 1);
        }
        let decoded = self.tokens.len() - self.depth;
        Run {
            prefill,
            decode: decoded as f64 / start.elapsed().as_secs_f64(),
        }
    }
}

/// What was measured.
struct Report<'a> {
    args: &'a Args,
    model: &'a Model,
    threads: usize,
    load_s: f64,
    ours: Vec<Run>,
    theirs: Vec<Run>,
}

impl Report<'_> {
    fn column(runs: &[Run], of: fn(&Run) -> f64) -> Vec<f64> {
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

    /// Weights that a decode step reads, per second.
    fn weight_rate(&self, decode: f64) -> f64 {
        self.model.weight_bytes().0 as f64 * decode / 1e9
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
                })
            })
        };
        let decode = quantile(&Self::column(&self.ours, |r| r.decode), 0.5);
        json!({
            "model": self.args.model,
            "class": self.model.class().name(),
            "instruction_set": self.model.kernels().instruction_set().name(),
            "threads": self.threads,
            "prompt": self.args.prompt,
            "gen": self.args.r#gen,
            "depth": self.args.depth.unwrap_or(self.args.prompt),
            "weight_bytes": self.model.weight_bytes().0,
            "load_s": self.load_s,
            "weights_gb_s": self.weight_rate(decode),
            "paceline": of(&self.ours),
            "llama_cpp": of(&self.theirs),
            "ratio": (!self.theirs.is_empty()).then(|| json!({
                "prefill": spread(self.ratios(|r| r.prefill)),
                "decode": spread(self.ratios(|r| r.decode)),
            })),
        })
    }

    fn table(&self) -> String {
        let head = format!(
            "{}, {} on {} with {} threads, weights {}, loaded in {:.2} s\n\
             prompt {}, decode {} from position {}, {} runs: median (p10 .. p90) tokens/s",
            self.args.model,
            self.model.class(),
            self.model.kernels().instruction_set().name(),
            self.threads,
            Bytes(self.model.weight_bytes().0),
            self.load_s,
            self.args.prompt,
            self.args.r#gen,
            self.args.depth.unwrap_or(self.args.prompt),
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
            "  {:.1} GB/s of weights",
            self.weight_rate(quantile(&decode, 0.5))
        );
        let mut text = head + &line("paceline", prefill, decode, &rate);
        if !self.theirs.is_empty() {
            let (prefill, decode) = columns(&self.theirs);
            text += &line("llama.cpp", prefill, decode, "");
            let (prefill, decode) = (self.ratios(|r| r.prefill), self.ratios(|r| r.decode));
            text += &line("ratio", prefill, decode, "");
        }
        text
    }
}

fn spread(values: &[f64]) -> String {
    let [low, median, high] = [0.1, 0.5, 0.9].map(|q| quantile(values, q));
    let digits = if median < 20.0 { 2 } else { 1 };
    format!("{median:8.digits$} ({low:.digits$} .. {high:.digits$})")
}
