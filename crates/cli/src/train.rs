//! `paceline train`: trains adapters and whole models, on one process or several, with the same
//! bits.
//!
//! It checks the options, places the workers (`placement`), merges an `mlx_lm` configuration
//! (`mlx_lm`), and prints progress; `paceline_train` trains.

mod drafter;
mod mlx_lm;
mod placement;

use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use paceline_train::{
    ALLOCATOR, Lora, Means, Method, OptimiserOptions, Post, Report, Rule, RunFigures, RunInfo,
    RunOptions, Schedule, Sharding, StepReporter, TrainOn, Trained, TrainingClass, TrainingJob,
    TrainingRun, TrainingWorkers, WorkerOptions, measured_flops, read_metrics, svg, targets,
};
use serde_json::json;

use crate::adapter::{UNNAMED, name_of_base};
use crate::interrupt::Signals;
use crate::output::{counted, print, print_err};
use crate::{home, load, process, pull};

pub(crate) use placement::{TrainHostArgs, TrainWorkerArgs, far, work};

const EXAMPLES: &str = "\
Examples:
  paceline train smollm2 --data chats.jsonl --steps 200 --output my-adapter
  paceline train smollm2 --data chats.jsonl --output my-adapter --nodes 2   the same bits
  paceline train smollm2 --data chats.jsonl --output my-adapter --resume    after a kill
  paceline train smollm2 --data chats.jsonl --output my-adapter --hosts 127.0.0.1,studio
  paceline train big.gguf --data chats.jsonl --output my-adapter --nodes 2 --stages 2
  paceline train ./model --data texts.jsonl --output new --method full --nodes 4 --shard all
  paceline train smollm2 --data chats.jsonl --output my-adapter --class mlx  on a GPU
  paceline train smollm2 --data prompts.jsonl --output my-head --drafter    guesses tokens faster
  paceline train --from-mlx-lm lora.yaml --output my-adapter --steps 50     as mlx_lm.lora would
  paceline run smollm2 --adapter my-adapter \"Hi\"

A line of FILE has messages, prompt and completion, text, conversations (ShareGPT), or instruction
and output (Alpaca). Exit codes: 0 ok, 1 failed or interrupted, 2 wrong usage.";

#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Alias (`smollm2`), GGUF file, folder of safetensors, or hub id `owner/name[:quantisation]`
    #[arg(required_unless_present = "from_mlx_lm")]
    model: Option<String>,
    /// Lines of JSON, or a folder with train.jsonl and valid.jsonl
    #[arg(long, value_name = "FILE", required_unless_present = "from_mlx_lm")]
    data: Option<PathBuf>,
    /// Lines of JSON that are held out, to see how well the model does on them
    #[arg(long, value_name = "FILE")]
    valid: Option<PathBuf>,
    /// Folder for the adapter, checkpoints and metrics
    #[arg(long, value_name = "DIR", required_unless_present = "from_mlx_lm")]
    output: Option<PathBuf>,
    /// Take what is not given here from a configuration of `mlx_lm.lora` (YAML, or its
    /// adapter_config.json)
    #[arg(long, value_name = "CONFIG")]
    from_mlx_lm: Option<PathBuf>,
    /// lora (two low-rank factors of each matrix), qlora (the same, the base stays as it is
    /// stored), full (every weight; folders only)
    #[arg(long, value_name = "HOW", default_value = "lora", value_parser = of_name::<Method>)]
    method: Method,
    /// Train a draft head (EAGLE-3) from the model's own answers to the prompts of --data, for
    /// `run --drafter` and `load --drafter`
    #[arg(long, conflicts_with_all = ["from_mlx_lm", "method", "class", "rank", "alpha", "targets",
          "layers", "dropout", "epochs", "pack", "train_on", "leaf", "stages", "shard"])]
    drafter: bool,
    /// Most tokens that a draft head can propose: the most frequent ones of the answers
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8000,
        requires = "drafter",
        allow_negative_numbers = true
    )]
    draft_vocab: usize,
    /// Arithmetic of the run: cpu (the same bits on every machine), mlx (Apple's MLX, for GPUs:
    /// bf16 where the model is, else f32), mlx-f32
    #[arg(long, value_name = "CLASS", default_value = "cpu", value_parser = of_name::<TrainingClass>)]
    class: TrainingClass,
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
    /// Matrices with adapters: all, attention, or names such as `q_proj,v_proj`; `experts` adds
    /// those of routed and shared experts
    #[arg(long, value_name = "NAMES", default_value = "all")]
    targets: String,
    /// How many of the last layers have adapters [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    layers: Option<usize>,
    /// Share of an adapter's inputs that are left out by chance while it is trained
    #[arg(
        long,
        value_name = "F",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    dropout: f32,
    /// Factor of the loss that keeps the routers of experts even; 0 for none
    #[arg(
        long,
        value_name = "F",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    router_aux: f32,
    /// Steps, an update each
    #[arg(long, value_name = "N", default_value_t = 100, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    steps: u64,
    /// See each row this often, in place of a number of steps
    #[arg(long, value_name = "N", conflicts_with = "steps", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    epochs: Option<u64>,
    /// Rows of a step
    #[arg(
        long,
        value_name = "B",
        default_value_t = 4,
        allow_negative_numbers = true
    )]
    batch: usize,
    /// Rows that go through the model together; the result depends on it, and on no machine
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_negative_numbers = true
    )]
    leaf: usize,
    /// Longest row; the rest of a longer example is left out
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2048,
        allow_negative_numbers = true
    )]
    max_tokens_per_row: usize,
    /// Put as many examples into a row as fit; they do not see each other
    #[arg(long)]
    pack: bool,
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
    /// Learning rate after the warm-up: cosine, linear, constant
    #[arg(long, value_name = "HOW", default_value = "cosine", value_parser = of_name::<Schedule>)]
    schedule: Schedule,
    /// Steps over which the learning rate rises
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: u64,
    /// Steps behind the warm-up over which the learning rate falls to 0, where it then stays
    /// [default: those that the run has left]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    decay_steps: Option<u64>,
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
    /// Chooses first values, the order of rows, and what --dropout leaves out
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
    /// Resume from the newest checkpoint of the folder, with the bits of a run without stop
    #[arg(long)]
    resume: bool,
    /// Compute with N workers: machines of the cluster where this machine's node runs and has as
    /// many, else processes here; the result has the same bits for any N
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    nodes: u32,
    /// Compute on these machines, a worker each, reached by `ssh`; what they lack of model and data
    /// is sent
    #[arg(
        long,
        value_name = "A,B",
        value_delimiter = ',',
        conflicts_with = "nodes"
    )]
    hosts: Vec<String>,
    /// Cut the model into stages, one after the other, for a base that does not fit one machine;
    /// the result has the same bits
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    stages: u32,
    /// Workers share out moments and gradients (state), values too (all), long rows (rows), or rows
    /// and experts (experts); auto is all for --method full, else state
    #[arg(long, value_name = "HOW", conflicts_with = "stages", value_parser = ShardArg::parse)]
    shard: Option<ShardArg>,
    /// Compute on this machine alone, without the cluster
    #[arg(long, conflicts_with = "hosts")]
    local: bool,
    /// Threads of each node [default: the cores, shared by the nodes of a machine]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum ShardArg {
    Auto,
    As(Sharding),
}

impl ShardArg {
    pub(crate) fn parse(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            name => of_name(name).map(Self::As),
        }
    }

    pub(crate) fn for_method(self, method: Method) -> Sharding {
        match (self, method) {
            (Self::As(sharding), _) => sharding,
            (Self::Auto, Method::Full) => Sharding::All,
            (Self::Auto, Method::Lora | Method::Qlora) => Sharding::State,
        }
    }
}

/// Parses a value by its name in files.
pub(crate) fn of_name<T: serde::de::DeserializeOwned>(name: &str) -> Result<T, String> {
    serde_json::from_value(json!(name)).map_err(|error| error.to_string())
}

impl Args {
    fn job(&self, model: PathBuf) -> anyhow::Result<TrainingJob> {
        let absolute =
            |path: &PathBuf| std::path::absolute(path).with_context(|| path.display().to_string());
        Ok(TrainingJob {
            trained: Trained {
                model: absolute(&model)?,
                method: self.method,
                lora: Lora {
                    rank: self.rank,
                    alpha: self.alpha.unwrap_or(2.0 * self.rank as f32),
                },
                targets: targets(&self.targets),
                layers: self.layers,
                dropout: self.dropout,
                balance: self.router_aux,
                class: self.class,
            },
            data: absolute(mlx_lm::needed(self.data.as_ref(), "--data")?)?,
            valid: self.valid.as_ref().map(absolute).transpose()?,
            train_on: self.train_on,
            tokens_max: self.max_tokens_per_row,
            pack: self.pack,
            batch: self.batch,
            leaf: self.leaf,
            seed: self.seed,
            epochs: self.epochs,
            optimiser: OptimiserOptions {
                rule: self.optimizer,
                lr: self.lr,
                warmup: self.warmup,
                schedule: self.schedule,
                steps: self.steps,
                decay_steps: self.decay_steps,
                decay: self.weight_decay,
                clip: self.clip,
            },
        })
    }

    fn workers(&self) -> usize {
        match self.hosts.len() {
            0 => (self.nodes as usize).max(self.stages as usize),
            hosts => hosts,
        }
    }

    /// Threads of a worker on this machine, which has `local` workers.
    fn threads(&self, here: usize) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let even = (cores / here.max(1)).max(1);
        self.threads.map_or(even, usize::from)
    }
}

/// Trains. The process begins anew if glibc has no settings yet.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    if cfg!(target_env = "gnu")
        && std::env::var_os(ALLOCATOR.0).is_none()
        && let Ok(program) = process::own_program()
    {
        process::execute(&program, Some(ALLOCATOR)); // if that fails, a step takes longer
    }
    let with_config = args.from_mlx_lm.as_deref();
    let merged = with_config
        .map(|path| mlx_lm::merged(args, path))
        .transpose()?;
    let args = merged.as_ref().unwrap_or(args);
    let output = mlx_lm::needed(args.output.as_ref(), "--output")?;
    let name = mlx_lm::needed(args.model.as_ref(), "MODEL")?;
    let found = pull::ensure(name, signals)?;
    if args.drafter {
        return drafter::run(args, (name, &found.path), signals);
    }
    let base = match args.method {
        Method::Lora | Method::Qlora => name_of_base(&found)?,
        Method::Full => None,
    };
    let job = args.job(found.path)?;
    let (report, (nodes, threads)) = signals.orderly(|cancel| {
        let stop = || cancel.is_cancelled();
        train(args, (&job, output, name), base.clone(), &stop)
    })?;
    if base.is_none() && args.method != Method::Full {
        print_err(UNNAMED);
    }
    let metrics = read_metrics(&output.join("metrics.jsonl"))?;
    let curve = output.join("loss.svg");
    std::fs::write(&curve, svg(&metrics)).with_context(|| curve.display().to_string())?;
    if args.json {
        let about = RunInfo {
            output,
            class: args.class,
            nodes,
            stages: args.stages,
            threads,
        };
        return print(&report.json(&about).to_string());
    }
    let [first, last] = report.loss;
    print(&format!(
        "{}: loss {first:.4} -> {last:.4} in {}",
        output.display(),
        counted(report.steps as usize, "step")
    ))
}

fn train(
    args: &Args,
    (job, output, name): (&TrainingJob, &Path, &str),
    base: Option<String>,
    stop: &dyn Fn() -> bool,
) -> anyhow::Result<(Report, WorkerCounts)> {
    let posts = placement::posts(args, name)?;
    let here = posts.iter().filter(|post| post.place.is_empty()).count();
    let threads = args.threads(here.max(1));
    let kernels = load::free_kernels(threads)?;
    let start = Instant::now();
    let clock = || start.elapsed().as_secs_f64();
    // Unknown speeds of other machines and GPUs: their shares are not printed.
    let all_here = here == posts.len();
    let flops = if all_here && args.class == TrainingClass::Cpu {
        measured_flops(&kernels, &clock) * posts.len().max(1) as f64
    } else {
        0.0
    };
    let means = Means {
        kernels,
        mlx: home::mlx_places()?,
    };
    let run = TrainingRun::open(job, means, posts.is_empty())?.with_base(base);
    let nodes = posts.len().max(1);
    let mut crew = match posts.is_empty() {
        true => TrainingWorkers::here(),
        false => TrainingWorkers::start(processes(args, posts, output)?, &run)?,
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let options = RunOptions {
        output,
        resume: args.resume,
        save_every: args.save_every,
        eval_every: args.eval_every,
        clock: &clock,
        stop,
        figures: RunFigures {
            epoch_s: now.map_or(0.0, |now| now.as_secs_f64()) - clock(),
            flops,
            memory: &process::peak_memory_bytes,
        },
    };
    let told = args.threads.map(usize::from);
    let told = told.or_else(|| all_here.then_some(threads));
    let mut watch = StepReporter::new(nodes, told);
    let report = run.train(&mut crew, options, &mut |progress| {
        watch
            .lines_for(progress, clock())
            .iter()
            .for_each(print_err);
    });
    watch.end().iter().for_each(print_err);
    let report = report?;
    if report.lost > 0 {
        print_err(format_args!("{} workers were lost on the way", report.lost));
    }
    Ok((report, (nodes, told)))
}

fn processes(args: &Args, posts: Vec<Post>, output: &Path) -> anyhow::Result<WorkerOptions> {
    Ok(WorkerOptions {
        program: process::own_program().context("cannot find this program's own file")?,
        posts,
        env: match args.hosts.is_empty() {
            true => process::worker_env(),
            false => process::ssh_env(),
        },
        stages: args.stages as usize,
        sharding: args.shard.map(|shard| shard.for_method(args.method)),
        exchange: std::path::absolute(output.join(".exchange"))?,
    })
}

/// Nodes, and threads of each, if known.
type WorkerCounts = (usize, Option<usize>);
