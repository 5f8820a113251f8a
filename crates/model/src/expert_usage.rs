//! Counters of expert routing per layer. Every rank of a stage runs the router, so all have the
//! same counts.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::Config;

/// Routing counts of one layer since the model was loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertUses {
    pub layer: usize,
    /// `(experts,)`: rows routed to each.
    pub rows: Vec<u64>,
}

/// Counters of one layer; empty without experts.
#[derive(Debug)]
pub(crate) struct LayerUses(Vec<AtomicU64>);

impl LayerUses {
    /// One per layer in `layers`.
    pub(crate) fn of(config: &Config, layers: std::ops::Range<usize>) -> Vec<Self> {
        let count = |shape: &crate::LayerShape| shape.experts.map_or(0, |experts| experts.count);
        let counters = |n| Self((0..n).map(|_| AtomicU64::new(0)).collect());
        config.layers[layers]
            .iter()
            .map(count)
            .map(counters)
            .collect()
    }

    /// Counts a row for each of `chosen`. The shared expert, whose index follows the last, is not
    /// counted.
    pub(crate) fn count(&self, chosen: impl Iterator<Item = usize>) {
        for counter in chosen.filter_map(|expert| self.0.get(expert)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Current counts of `layer`; `None` without experts.
    pub(crate) fn counts(&self, layer: usize) -> Option<ExpertUses> {
        let rows = self.0.iter().map(|counter| counter.load(Ordering::Relaxed));
        (!self.0.is_empty()).then(|| ExpertUses {
            layer,
            rows: rows.collect(),
        })
    }
}
