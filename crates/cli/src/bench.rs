//! `paceline bench`: measurements as commands of the product.

mod api;
mod comm;
mod kernels;
mod limits;
mod model;
mod peer;
mod plan;

use crate::interrupt::Signals;

pub(crate) use comm::start_rank;
pub(crate) use limits::measured as measured_limits;

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

/// Runs a measurement.
pub(crate) fn run(command: &Command, signals: &Signals) -> anyhow::Result<()> {
    match command {
        Command::Model(args) => model::run(args, signals),
        Command::Plan(args) => plan::run(args, signals),
        Command::Kernels(args) => kernels::run(args),
        Command::Comm(args) => comm::run(args),
        Command::Api(args) => api::run(args, signals),
    }
}

/// Some values of one kind.
#[derive(Clone, Copy, Debug, serde::Serialize)]
struct Spread {
    p10: f64,
    median: f64,
    p90: f64,
}

impl Spread {
    /// Of values that are not empty.
    fn of(values: &[f64]) -> Self {
        let [p10, median, p90] = [0.1, 0.5, 0.9].map(|share| quantile(values, share));
        Self { p10, median, p90 }
    }

    fn text(&self) -> String {
        format!("{:.1} ({:.1} .. {:.1})", self.median, self.p10, self.p90)
    }
}

/// The value below which `share` of `values` lie; `values` are not empty.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

#[cfg(test)]
mod tests {
    use super::quantile;

    #[test]
    fn quantiles_are_values_that_occur() {
        let values = [5.0, 1.0, 3.0];
        assert_eq!(
            [0.0, 0.5, 1.0].map(|q| quantile(&values, q)),
            [1.0, 3.0, 5.0]
        );
        assert_eq!(quantile(&[2.0], 0.9), 2.0);
    }
}
