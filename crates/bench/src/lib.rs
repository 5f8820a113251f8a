//! Measurements of this machine, its collectives and its models, beside their limits and the
//! planner's predictions.
//!
//! - [`comm`]: the collectives of a group, by operation and size.
//! - [`kernels`]: matrix products of every weight type.
//! - [`limits`]: the best speed of reads of memory and of integer products.
//! - [`model`]: prefill and decode speed of a model that answers.
//! - [`peer`]: llama.cpp and mlx-lm, driven in turns with a model.
//! - [`plan`]: predictions beside measurements.
//! - [`ranks`]: the collectives of ranks in processes, here and on machines of a cluster.
//!
//! Each module has settings (`Spec`), `measure`, and a `Report` with a table for people and a
//! picture. The crate prints nothing, and only [`ranks`] and [`peer`] start processes.

pub mod comm;
mod error;
pub mod kernels;
pub mod limits;
pub mod model;
pub mod peer;
pub mod plan;
pub mod ranks;

pub use error::Error;

/// Some values of one kind.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Spread {
    /// A tenth of them is less.
    pub p10: f64,
    /// Half of them is less.
    pub median: f64,
    /// A tenth of them is more.
    pub p90: f64,
}

impl Spread {
    /// Of values that are not empty.
    pub fn of(values: &[f64]) -> Self {
        let [p10, median, p90] = [0.1, 0.5, 0.9].map(|share| quantile(values, share));
        Self { p10, median, p90 }
    }

    /// For people.
    pub fn text(&self) -> String {
        format!("{:.1} ({:.1} .. {:.1})", self.median, self.p10, self.p90)
    }
}

/// The value below which `share` of `values` lie; `values` are not empty.
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
