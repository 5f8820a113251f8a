//! `paceline bench`: benchmarks as commands.

mod api;
mod comm;
mod kernels;
mod model;
mod plan;

use crate::interrupt::Signals;

pub(crate) use comm::start_rank;

/// What to measure.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Prefill and decode speed of a model, beside llama.cpp if asked
    Model(model::Args),
    /// What the planner says of local nodes, beside what they do
    Plan(plan::Args),
    /// Matrix products of every weight type, beside what this machine can do at best
    Kernels(kernels::Args),
    /// Latency and bandwidth of the collectives, beside MLX or Open MPI if asked
    Comm(comm::Args),
    /// Load on a server of OpenAI's API: latencies, throughput, goodput
    Api(api::Args),
}

/// Runs a benchmark.
pub(crate) fn run(command: &Command, signals: &Signals) -> anyhow::Result<()> {
    match command {
        Command::Model(args) => model::run(args, signals),
        Command::Plan(args) => plan::run(args, signals),
        Command::Kernels(args) => kernels::run(args),
        Command::Comm(args) => comm::run(args),
        Command::Api(args) => api::run(args, signals),
    }
}
