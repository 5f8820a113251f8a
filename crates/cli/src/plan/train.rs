//! `paceline plan MODEL --train`: what a training would take on this machine.

use std::path::Path;
use std::time::Instant;

use paceline_base::Bytes;
use paceline_cluster::machine;
use paceline_model::{Config, Source};
use paceline_train::{Lora, Method, Plan, TARGETS, forecast, measured_flops};
use serde_json::json;

use super::{Error, facts};
use crate::load;
use crate::output::print;
use crate::train::of_name;

/// What is asked about a training.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct TrainPlan {
    /// Say what training the model on this machine would take, instead of answering with it
    #[arg(long, conflicts_with = "cluster")]
    train: bool,
    /// lora, qlora or full
    #[arg(long, value_name = "HOW", default_value = "lora", requires = "train",
          value_parser = of_name::<Method>)]
    method: Method,
    /// Inner dimension of adapters
    #[arg(long, value_name = "R", default_value_t = 16, requires = "train")]
    rank: usize,
    /// Sequences of a step
    #[arg(long, value_name = "B", default_value_t = 4, requires = "train")]
    batch: usize,
    /// Tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 512, requires = "train")]
    row: usize,
    /// Worker processes
    #[arg(long, value_name = "N", default_value_t = 1, requires = "train")]
    nodes: usize,
}

impl TrainPlan {
    pub(super) const fn is_asked(&self) -> bool {
        self.train
    }
}

/// Prints what a training would take, and whether it fits.
///
/// # Errors
/// [`Error::TrainingTooLarge`] when it does not; what is wrong with the model.
pub(super) fn run(model: &str, args: &TrainPlan, as_json: bool) -> anyhow::Result<()> {
    let path = facts::local_path(model).ok_or_else(|| Error::NotHere(model.to_owned()))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let start = Instant::now();
    let kernels = load::free_kernels(threads)?;
    let flops = measured_flops(&kernels, &|| start.elapsed().as_secs_f64());
    let asked = ask(Path::new(&path), args)?;
    let seconds = asked.step_flop / flops;
    let tokens = args.batch * args.row;
    let all = asked.memory_bytes * args.nodes as u64;
    let room = machine::memory().map(|memory| memory.total.0);
    if as_json {
        let facts = json!({
            "numbers": asked.numbers,
            "memory_bytes": asked.memory_bytes,
            "step_flop": asked.step_flop,
            "exchange_bytes": asked.exchange_bytes,
            "machine_flops": flops,
            "step_s": seconds,
            "tokens_s": tokens as f64 / seconds,
            "fits": room.is_none_or(|room| all <= room),
        });
        return print(&facts.to_string());
    }
    if let Some(room) = room.filter(|room| all > *room) {
        let (needs, has) = (Bytes(all), Bytes(room));
        return Err(Error::TrainingTooLarge { needs, has }.into());
    }
    print(&format!(
        "trained    {} numbers\nmemory     {} a process, {} processes\nstep       {:.2} s for {tokens} \
         tokens: {:.0} tokens/s ({:.0} Gflop at {:.0} Gflop/s)\nexchanged  {} a step",
        asked.numbers,
        Bytes(asked.memory_bytes),
        args.nodes,
        seconds,
        tokens as f64 / seconds,
        asked.step_flop / 1e9,
        flops / 1e9,
        Bytes(asked.exchange_bytes)
    ))
}

fn ask(path: &Path, args: &TrainPlan) -> anyhow::Result<paceline_train::Forecast> {
    let source = Source::open(path)?;
    let config = Config::read(&source)?;
    let role = paceline_model::Role::Output;
    let tied = match config.tied {
        Some(tied) => tied,
        None => source.opt_weight(config.family, role)?.is_none(),
    };
    let targets = TARGETS.map(|(_, _, name)| name.to_owned());
    let plan = Plan {
        method: args.method,
        lora: Lora {
            rank: args.rank,
            alpha: 2.0 * args.rank as f32,
        },
        targets: &targets,
        file_bytes: source.file_bytes().0,
        tied,
        tokens: args.row,
        leaves: args.batch,
        nodes: args.nodes,
    };
    Ok(forecast(&config, plan))
}
