//! `paceline train`: adapters and whole models, on one process or several, with the same bits.

mod watch;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use paceline_train::{
    Crew, Job, Lora, Method, OptimiserOptions, Processes, Report, Rule, Run, RunOptions, Schedule,
    TARGETS, TrainOn, Trained, read_metrics, svg, worker,
};
use serde_json::json;

use crate::error::Error;
use crate::interrupt::Signals;
use crate::output::{print, tell};
use crate::process::own_program;
use crate::{load, pull};
use watch::Watch;

const EXAMPLES: &str = "\
Examples:
  paceline train smollm2 --data chats.jsonl --steps 200 --output my-adapter
  paceline train smollm2 --data chats.jsonl --output my-adapter --nodes 2   the same bits
  paceline train smollm2 --data chats.jsonl --output my-adapter --resume    after a kill
  paceline run smollm2 --adapter my-adapter \"Hi\"

A line of FILE has messages, prompt and completion, text, conversations (ShareGPT), or instruction
and output (Alpaca). Exit codes: 0 ok, 1 failed or interrupted, 2 wrong usage.";

/// Arguments of `paceline train`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Alias (`smollm2`), GGUF file, folder of safetensors, or hub id `owner/name[:quantisation]`
    model: String,
    /// Lines of JSON, or a folder with train.jsonl and valid.jsonl
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Lines of JSON that are held out, to see how well the model does on them
    #[arg(long, value_name = "FILE")]
    valid: Option<PathBuf>,
    /// Folder for the adapter, checkpoints and metrics
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// lora (a pair of small matrices beside each), qlora (the same, the base stays as it is
    /// stored), full (every weight; folders only)
    #[arg(long, value_name = "HOW", default_value = "lora", value_parser = of_name::<Method>)]
    method: Method,
    /// Inner dimension of adapters
    #[arg(
        long,
        value_name = "R",
        default_value_t = 16,
        allow_negative_numbers = true
    )]
    rank: usize,
    /// Adapters are multiplied by this divided by the rank [default: twice the rank]
    #[arg(long, value_name = "A", allow_negative_numbers = true)]
    alpha: Option<f32>,
    /// Matrices with adapters: all, attention, or names such as `q_proj,v_proj`
    #[arg(long, value_name = "NAMES", default_value = "all")]
    targets: String,
    /// Steps, an update each
    #[arg(long, value_name = "N", default_value_t = 100, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    steps: u64,
    /// Sequences of a step
    #[arg(
        long,
        value_name = "B",
        default_value_t = 4,
        allow_negative_numbers = true
    )]
    batch: usize,
    /// Sequences that go through the model together; the result depends on it, and on no machine
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_negative_numbers = true
    )]
    leaf: usize,
    /// Longest sequence; the rest of a longer one is left out
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2048,
        allow_negative_numbers = true
    )]
    max_tokens_per_row: usize,
    /// Which tokens of a conversation are trained on: assistant (its turns), last (its last turn),
    /// all
    #[arg(long, value_name = "WHICH", default_value = "assistant",
          value_parser = of_name::<TrainOn>)]
    train_on: TrainOn,
    /// Highest learning rate
    #[arg(
        long,
        value_name = "F",
        default_value_t = 2e-4,
        allow_negative_numbers = true
    )]
    lr: f64,
    /// How it goes on after the warm-up: cosine, linear, constant
    #[arg(long, value_name = "HOW", default_value = "cosine", value_parser = of_name::<Schedule>)]
    schedule: Schedule,
    /// Steps over which the learning rate rises
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: u64,
    /// adamw or sgd
    #[arg(long, value_name = "RULE", default_value = "adamw", value_parser = of_name::<Rule>)]
    optimizer: Rule,
    /// Decay of weights
    #[arg(
        long,
        value_name = "F",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    weight_decay: f64,
    /// Largest norm of a gradient; 0 for any
    #[arg(
        long,
        value_name = "F",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    clip: f64,
    /// Chooses first values and the order of examples
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Steps between looks at what is held out
    #[arg(long, value_name = "N", default_value_t = 50,
          value_parser = clap::value_parser!(u64).range(1..))]
    eval_every: u64,
    /// Steps between checkpoints; the newest two are kept
    #[arg(long, value_name = "N", default_value_t = 50,
          value_parser = clap::value_parser!(u64).range(1..))]
    save_every: u64,
    /// Go on from the newest checkpoint of the folder, with the bits of not having stopped
    #[arg(long)]
    resume: bool,
    /// Compute with N worker processes; the result has the same bits for any N
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    nodes: u32,
    /// Threads of each node [default: the cores, shared by the nodes]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// A value by the name that files have for it.
pub(crate) fn of_name<T: serde::de::DeserializeOwned>(name: &str) -> Result<T, String> {
    serde_json::from_value(json!(name)).map_err(|error| error.to_string())
}

impl Args {
    fn job(&self, model: PathBuf) -> anyhow::Result<Job> {
        let absolute =
            |path: &PathBuf| std::path::absolute(path).with_context(|| path.display().to_string());
        Ok(Job {
            trained: Trained {
                model: absolute(&model)?,
                method: self.method,
                lora: Lora {
                    rank: self.rank,
                    alpha: self.alpha.unwrap_or(2.0 * self.rank as f32),
                },
                targets: self.targets(),
            },
            data: absolute(&self.data)?,
            valid: self.valid.as_ref().map(absolute).transpose()?,
            train_on: self.train_on,
            tokens_max: self.max_tokens_per_row,
            batch: self.batch,
            leaf: self.leaf,
            seed: self.seed,
            optimiser: OptimiserOptions {
                rule: self.optimizer,
                lr: self.lr,
                warmup: self.warmup,
                schedule: self.schedule,
                steps: self.steps,
                decay: self.weight_decay,
                clip: self.clip,
            },
        })
    }

    fn targets(&self) -> Vec<String> {
        let of_block = |wanted: &'static [&'static str]| {
            let all = TARGETS
                .iter()
                .filter(|(_, block, _)| wanted.contains(block));
            all.map(|(_, _, name)| (*name).to_owned()).collect()
        };
        match self.targets.as_str() {
            "all" => of_block(&["self_attn", "mlp"]),
            "attention" => of_block(&["self_attn"]),
            names => names
                .split(',')
                .map(|name| name.trim().to_owned())
                .collect(),
        }
    }

    fn threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let even = (cores / self.nodes as usize).max(1);
        self.threads.map_or(even, usize::from)
    }
}

/// Trains.
///
/// # Errors
/// What is wrong with model, data or options, each before the first step.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let found = pull::ensure(&args.model, signals)?;
    let job = args.job(found.path)?;
    let report = signals.orderly(|cancel| {
        let stop = || cancel.is_cancelled();
        train(args, &job, &stop)
    })?;
    let metrics = read_metrics(&args.output.join("metrics.jsonl"))?;
    let curve = args.output.join("loss.svg");
    std::fs::write(&curve, svg(&metrics)).with_context(|| curve.display().to_string())?;
    if args.json {
        return print(&as_json(&report, args).to_string());
    }
    let [first, last] = report.loss;
    print(&format!(
        "{}: loss {first:.4} -> {last:.4} in {} steps",
        args.output.display(),
        report.steps
    ))
}

/// `paceline train-worker`: one of the processes of a training; its parent is told what fails, so
/// nothing is printed.
///
/// # Errors
/// What failed.
pub(crate) fn work() -> anyhow::Result<()> {
    let kernels = |threads| load::free_kernels(threads).map_err(std::io::Error::other);
    match worker::run(kernels) {
        Ok(never) => match never {},
        Err(paceline_train::Error::Cluster(_)) => Err(Error::WorkerByHand.into()),
        Err(error) => Err(error.into()),
    }
}

fn train(args: &Args, job: &Job, stop: &dyn Fn() -> bool) -> anyhow::Result<Report> {
    let threads = args.threads();
    let here = args.nodes == 1;
    let run = Run::open(job, load::free_kernels(threads)?, here)?;
    let mut crew = match here {
        true => Crew::here(),
        false => Crew::start(
            Processes {
                program: own_program().context("cannot find this program's own file")?,
                args: vec!["train-worker".into()],
                nodes: args.nodes,
                threads,
                exchange: std::path::absolute(args.output.join(".exchange"))?,
            },
            job,
        )?,
    };
    let start = Instant::now();
    let clock = || start.elapsed().as_secs_f64();
    let options = RunOptions {
        output: &args.output,
        resume: args.resume,
        save_every: args.save_every,
        eval_every: args.eval_every,
        clock: &clock,
        stop,
    };
    let mut watch = Watch::new(args.steps, args.nodes, threads);
    let report = run.train(&mut crew, options, &mut |progress| watch.hear(progress));
    watch.end();
    let report = report?;
    if report.lost > 0 {
        tell(format_args!("{} workers were lost on the way", report.lost));
    }
    Ok(report)
}

fn as_json(report: &Report, args: &Args) -> serde_json::Value {
    json!({
        "output": args.output,
        "steps": report.steps,
        "first_loss": report.loss[0],
        "loss": report.loss[1],
        "val_loss": report.val_loss,
        "digest": report.digest,
        "nodes": args.nodes,
        "threads": args.threads(),
        "lost": report.lost,
        "files": report.files,
    })
}
