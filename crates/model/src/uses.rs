//! How often experts were chosen, as every rank of a stage counts it: all of them have the router.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::Config;

/// Uses of the experts of one layer, since the model was loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertUses {
    /// Layer of the model.
    pub layer: usize,
    /// `(experts,)`: rows that chose each.
    pub rows: Vec<u64>,
}

/// Counters of one layer; none where it has no experts.
#[derive(Debug)]
pub(crate) struct LayerUses(Vec<AtomicU64>);

impl LayerUses {
    /// For each of `layers` of a model.
    pub(crate) fn of(config: &Config, layers: std::ops::Range<usize>) -> Vec<Self> {
        let count = |shape: &crate::LayerShape| shape.experts.map_or(0, |experts| experts.count);
        let counters = |n| Self((0..n).map(|_| AtomicU64::new(0)).collect());
        config.layers[layers]
            .iter()
            .map(count)
            .map(counters)
            .collect()
    }

    /// Counts a row for each of `chosen`; a shared expert, which lies behind the last, is not one.
    pub(crate) fn count(&self, chosen: impl Iterator<Item = usize>) {
        for counter in chosen.filter_map(|expert| self.0.get(expert)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The counts so far, of layer `layer` of the model; `None` without experts.
    pub(crate) fn told(&self, layer: usize) -> Option<ExpertUses> {
        let rows = self.0.iter().map(|counter| counter.load(Ordering::Relaxed));
        (!self.0.is_empty()).then(|| ExpertUses {
            layer,
            rows: rows.collect(),
        })
    }
}
