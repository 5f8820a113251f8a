//! Forecasts of trainings, as JSON and text, and the machines for them.

mod models;

use std::time::Instant;

use paceline_base::Bytes;
use paceline_cluster::machine;
use paceline_cluster::telemetry::Sampler;
use paceline_plan::Cluster;
use paceline_tensor::Kernels;
use paceline_train::{FitChange, Forecast, TrainingMachine, measured_flops};
use serde_json::{Value, json};

pub use models::ModelSizes;

/// Fraction of quoted rates that training reaches: training.md's assumption for Apple's GPUs, 11 of
/// 28 Tflop/s. Measured rates count in full.
const REACHED: f64 = 0.4;

/// The forecast as a JSON object; `would_fit` lists changes if it does not fit.
pub fn json(
    said: &Forecast,
    machines: &[TrainingMachine],
    steps: Option<u64>,
    would_fit: Option<Vec<String>>,
) -> Value {
    json!({
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
        "training_s": steps.map(|steps| steps as f64 * said.step_s),
        "fits": would_fit.is_none(),
        "would_fit": would_fit,
    })
}

/// The forecast as text: steps of `tokens` tokens, over `nodes` processes.
pub fn report(said: &Forecast, tokens: usize, steps: Option<u64>, nodes: usize) -> String {
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
    if let Some(steps) = steps {
        let hours = steps as f64 * said.step_s / 3600.0;
        text += &format!("\ntraining   {hours:.2} hours for {steps} steps");
    }
    text
}

/// The changes that would make it fit, a sentence each.
pub fn told(changes: &[FitChange]) -> Vec<String> {
    let of = |change: &FitChange| match change {
        FitChange::Qlora => "it fits with --method qlora".to_owned(),
        FitChange::Row(tokens) => format!("it fits with --row {tokens}"),
        FitChange::Rank(rank) => format!("it fits with --rank {rank}"),
        FitChange::OneProcess => "it fits with one process on each machine".to_owned(),
        FitChange::Stages(stages) => {
            format!("it fits with --stages {stages} on {stages} machines like the largest")
        }
    };
    changes.iter().map(of).collect()
}

/// This machine, measured with `kernels` on all cores; `watts` if known.
pub fn this_machine(kernels: &Kernels, watts: Option<f64>, processes: usize) -> TrainingMachine {
    let start = Instant::now();
    let mut sampler = Sampler::new("/");
    let _ = sampler.sample(start.elapsed()); // the second sample has the first watts
    let flops = measured_flops(kernels, &|| start.elapsed().as_secs_f64());
    let measured = sampler.sample(start.elapsed()).watts();
    let room = machine::memory().map_or(u64::MAX, |memory| memory.total.0);
    TrainingMachine {
        name: "this machine".to_owned(),
        memory_bytes: room,
        flops,
        watts: watts.or(measured),
        processes,
    }
}

/// The machines of a cluster, a process each, and the bytes a second of its slowest link.
pub fn of_cluster(cluster: &Cluster) -> (Vec<TrainingMachine>, Option<f64>) {
    let machine = |node: &paceline_plan::ClusterNode| {
        let rate = node.rates.map_or(0.0, |rates| rates.matmul);
        TrainingMachine {
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
    (machines, slowest.is_finite().then_some(slowest))
}
