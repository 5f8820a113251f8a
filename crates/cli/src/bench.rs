//! `paceline bench`: measurements as commands of the product.

mod comm;
mod kernels;
mod model;
mod peer;

use crate::interrupt::Signals;

/// What to measure.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Prefill and decode speed of a model, beside llama.cpp if asked
    Model(model::Args),
    /// Matrix products of every weight type, beside what this machine can do at best
    Kernels(kernels::Args),
    /// Latency and bandwidth of the collectives, beside MLX or Open MPI if asked
    Comm(comm::Args),
}

/// Runs a measurement.
pub(crate) fn run(command: &Command, signals: &Signals) -> anyhow::Result<()> {
    match command {
        Command::Model(args) => model::run(args, signals),
        Command::Kernels(args) => kernels::run(args),
        Command::Comm(args) => comm::run(args),
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
