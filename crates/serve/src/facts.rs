//! Metrics that the caller adds to `/metrics`.
use std::sync::Arc;

/// Supplies the process's own metrics, such as memory and bytes sent; called at every scrape.
#[derive(Clone, derive_more::Debug)]
#[debug("Facts(..)")]
pub struct ProcessMetrics(pub Arc<dyn Fn() -> Vec<MetricSample> + Send + Sync>);

impl Default for ProcessMetrics {
    fn default() -> Self {
        Self(Arc::new(Vec::new))
    }
}

/// A gauge `paceline_<name>` of `/metrics`. Both texts are printed unchanged.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricSample {
    /// Lower-case letters, digits and `_`, the unit last.
    pub name: &'static str,
    /// Help text: one line without a full stop.
    pub help: &'static str,
    /// Labels such as `layer="3",expert="7"`; empty for a single value. Samples of one name must be
    /// consecutive.
    pub labels: String,
    pub value: f64,
}
