//! Measurements of this machine, its collectives and its models, compared with limits and the
//! planner's predictions.
//!
//! - [`comm`]: the collectives of a group, by operation and size.
//! - [`kernels`]: matrix products of every weight type.
//! - [`limits`]: the best speed of memory reads and of integer products.
//! - [`model`]: prefill and decode speed of a loaded model.
//! - [`peer`]: llama.cpp and mlx-lm, run in turns with a model.
//! - [`plan`]: predictions against measurements.
//! - [`ranks`]: the collectives of ranks in processes, here and on machines of a cluster.
//! - [`selftest`]: a test of an installed program on its user's machine.
//!
//! Each module has settings (`Spec`), `measure`, and a `Report` with a text table and a chart. The
//! crate prints nothing, and only [`ranks`], [`peer`] and [`selftest`] start processes.

pub mod comm;
pub mod kernels;
pub mod limits;
pub mod model;
pub mod peer;
pub mod plan;
pub mod ranks;
pub mod selftest;

/// Percentiles of some values.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Spread {
    /// Tenth percentile.
    pub p10: f64,
    pub median: f64,
    /// 90th percentile.
    pub p90: f64,
}

impl Spread {
    /// The percentiles of nonempty `values`.
    pub fn of(values: &[f64]) -> Self {
        let [p10, median, p90] = [0.1, 0.5, 0.9].map(|share| quantile(values, share));
        Self { p10, median, p90 }
    }

    /// Formats the values for people.
    pub fn text(&self) -> String {
        format!("{:.1} ({:.1} .. {:.1})", self.median, self.p10, self.p90)
    }
}

/// The `share` quantile of nonempty `values`.
pub fn quantile(values: &[f64], share: f64) -> f64 {
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
