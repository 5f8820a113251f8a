//! `paceline bench`: benchmarks as commands.

mod api;
mod comm;
mod kernels;
mod model;
mod plan;

use crate::interrupt::Signals;

/// What to measure.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Prefill and decode speed, optionally against llama.cpp
    Model(model::Args),
    /// Predicted against measured speed of local nodes
    Plan(plan::Args),
    /// Matrix products of every weight type, against this machine's limits
    Kernels(kernels::Args),
    /// Latency and bandwidth of collectives, optionally against MLX or Open MPI
    Comm(comm::Args),
    /// Load on a server of OpenAI's API: latencies, throughput, goodput
    Api(api::Args),
}

pub(crate) fn run(command: &Command, signals: &Signals) -> anyhow::Result<()> {
    match command {
        Command::Model(args) => model::run(args, signals),
        Command::Plan(args) => plan::run(args, signals),
        Command::Kernels(args) => kernels::run(args),
        Command::Comm(args) => comm::run(args),
        Command::Api(args) => api::run(args, signals),
    }
}
