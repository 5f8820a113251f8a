//! `paceline plan MODEL --train`: what a training would take on this machine, or on a cluster.

use std::path::Path;
use std::time::Instant;

use paceline_base::Bytes;
use paceline_cluster::machine;
use paceline_cluster::telemetry::Sampler;
use paceline_model::{Config, Role, Source};
use paceline_plan::Catalogue;
use paceline_train::{
    Change, Forecast, Lora, Machine, Method, Plan, TARGETS, changes, forecast, measured_flops,
    too_small,
};
use serde_json::json;

use super::{Error, local_path};
use crate::load;
use crate::output::print;
use crate::train::of_name;

/// Share of quoted rates that training reaches: training.md's assumption for Apple's GPUs, 11 of 28
/// Tflop/s. Measured rates count in full.
const REACHED: f64 = 0.4;

/// What is asked about a training.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct TrainPlan {
    /// Say what training the model would take, instead of answering with it: on this machine, which
    /// is measured, or on those of --cluster
    #[arg(long)]
    train: bool,
    /// lora, qlora or full
    #[arg(long, value_name = "HOW", default_value = "lora", requires = "train",
          value_parser = of_name::<Method>)]
    method: Method,
    /// Inner dimension of adapters
    #[arg(long, value_name = "R", default_value_t = 16, requires = "train")]
    rank: usize,
    /// Rows of a step
    #[arg(long, value_name = "B", default_value_t = 4, requires = "train")]
    batch: usize,
    /// Tokens of a row
    #[arg(long, value_name = "N", default_value_t = 512, requires = "train")]
    row: usize,
    /// Worker processes on this machine
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        requires = "train",
        conflicts_with = "cluster"
    )]
    nodes: usize,
    /// Stages that the model is cut into, at most one a node
    #[arg(long, value_name = "N", default_value_t = 1, requires = "train")]
    stages: usize,
    /// Steps of the training, for what all of it takes
    #[arg(long, value_name = "N", requires = "train")]
    steps: Option<u64>,
    /// Watts of this machine under load [default: as measured now, where the system tells]
    #[arg(long, value_name = "W", requires = "train", conflicts_with = "cluster")]
    watts: Option<f64>,
    /// Price of a kilowatt-hour in dollars
    #[arg(long, value_name = "PRICE", requires = "train")]
    kwh_usd: Option<f64>,
}

impl TrainPlan {
    pub(super) const fn is_asked(&self) -> bool {
        self.train
    }
}

/// Prints what a training would take.
///
/// # Errors
/// [`Error::TrainingTooLarge`] with what would fit; what is wrong with the model or the cluster.
pub(super) fn run(
    model: &str,
    (args, cluster): (&TrainPlan, &[String]),
    as_json: bool,
) -> anyhow::Result<()> {
    let path = local_path(model).ok_or_else(|| Error::NoFiles(model.to_owned()))?;
    let (machines, link) = match cluster {
        [] => (vec![this_machine(args)?], None),
        [one] => of_cluster(one)?,
        several => return Err(Error::Clusters(several.len()).into()),
    };
    let nodes: usize = machines.iter().map(|machine| machine.processes).sum();
    let stages = args.stages.clamp(1, nodes);
    let source = Source::open(Path::new(&path))?;
    let config = Config::read(&source)?;
    let targets = TARGETS.map(|(_, _, name)| name.to_owned());
    let plan = Plan {
        method: args.method,
        lora: Lora {
            rank: args.rank,
            alpha: 2.0 * args.rank as f32,
        },
        targets: &targets,
        file_bytes: source.file_bytes().0,
        tied: is_tied(&source, &config)?,
        tokens: args.row,
        leaves: args.batch,
        nodes,
        stages,
    };
    let said = forecast(&config, &plan, &machines, (link, args.kwh_usd));
    let lacking = too_small(&config, &plan, &machines);
    if as_json {
        let whole = args.steps.map(|steps| steps as f64 * said.step_s);
        let facts = json!({
            "numbers": said.numbers,
            "memory_bytes": said.memory_bytes,
            "step_flop": said.step_flop,
            "exchange_bytes": said.exchange_bytes,
            "machine_flops": machines.iter().map(|machine| machine.flops).sum::<f64>(),
            "step_s": said.step_s,
            "exchange_s": said.exchange_s,
            "tokens_s": said.tokens_s,
            "joules": said.joules,
            "usd_per_million_tokens": said.usd_per_million,
            "training_s": whole,
            "fits": lacking.is_none(),
            "would_fit": lacking.map(|_| told(&changes(&config, &plan, &machines))),
        });
        return print(&facts.to_string());
    }
    if let Some((machine, needs, has)) = lacking {
        return Err(Error::TrainingTooLarge {
            machine: machines[machine].name.clone(),
            needs: Bytes(needs),
            has: Bytes(has),
            changes: told(&changes(&config, &plan, &machines)),
        }
        .into());
    }
    print(&report(&said, args, nodes))
}

fn report(said: &Forecast, args: &TrainPlan, nodes: usize) -> String {
    let tokens = args.batch * args.row;
    let mut text = format!(
        "trained    {} numbers\nmemory     {} a process, {nodes} processes\nstep       {:.2} s for \
         {tokens} tokens: {:.0} tokens/s ({:.0} Gflop)\nexchanged  {} a step, {:.2} s",
        said.numbers,
        Bytes(said.memory_bytes),
        said.step_s,
        said.tokens_s,
        said.step_flop / 1e9,
        Bytes(said.exchange_bytes),
        said.exchange_s,
    );
    if let Some(joules) = said.joules {
        let each = joules / tokens.max(1) as f64;
        text += &format!("\nenergy     {joules:.0} J a step, {each:.2} J a token");
    }
    if let Some(usd) = said.usd_per_million {
        text += &format!("\ncost       {usd:.2} USD a million tokens");
    }
    if let Some(steps) = args.steps {
        let hours = steps as f64 * said.step_s / 3600.0;
        text += &format!("\ntraining   {hours:.2} hours for {steps} steps");
    }
    text
}

fn told(changes: &[Change]) -> Vec<String> {
    let of = |change: &Change| match change {
        Change::Qlora => "it fits with --method qlora".to_owned(),
        Change::Row(tokens) => format!("it fits with --row {tokens}"),
        Change::Rank(rank) => format!("it fits with --rank {rank}"),
        Change::OneProcess => "it fits with one process on each machine".to_owned(),
        Change::Stages(stages) => {
            format!("it fits with --stages {stages} on {stages} machines like the largest")
        }
    };
    changes.iter().map(of).collect()
}

fn is_tied(source: &Source, config: &Config) -> anyhow::Result<bool> {
    Ok(match config.tied {
        Some(tied) => tied,
        None => source.opt_weight(config.family, Role::Output)?.is_none(),
    })
}

/// This machine, measured.
fn this_machine(args: &TrainPlan) -> anyhow::Result<Machine> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let start = Instant::now();
    let kernels = load::free_kernels(threads)?;
    let mut sampler = Sampler::new("/");
    let _ = sampler.sample(start.elapsed()); // power is told from the second sample on
    let flops = measured_flops(&kernels, &|| start.elapsed().as_secs_f64());
    let watts = sampler.sample(start.elapsed()).watts();
    let room = machine::memory().map_or(u64::MAX, |memory| memory.total.0);
    Ok(Machine {
        name: "this machine".to_owned(),
        memory_bytes: room,
        flops,
        watts: args.watts.or(watts),
        processes: args.nodes.max(1),
    })
}

/// The machines of a cluster, a process each, and bytes a second of its slowest link.
fn of_cluster(text: &str) -> anyhow::Result<(Vec<Machine>, Option<f64>)> {
    let cluster = super::cluster(text, &mut Catalogue::builtin()?)?;
    let machine = |node: &paceline_plan::Node| {
        let rate = node.rates.map_or(0.0, |rates| rates.matmul);
        Machine {
            name: node.name.clone(),
            memory_bytes: node.budget() as u64,
            flops: if node.measured { rate } else { REACHED * rate },
            watts: node.load_w,
            processes: 1,
        }
    };
    let links = cluster.links.iter().map(|link| link.beta);
    let slowest = links.fold(f64::INFINITY, f64::min);
    let machines = cluster.nodes.iter().map(machine).collect();
    Ok((machines, slowest.is_finite().then_some(slowest)))
}
