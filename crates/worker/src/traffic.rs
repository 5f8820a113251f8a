//! Traffic of an instance's ranks in bytes.

use paceline_base::Bytes;
use paceline_model::LoadedModel;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Bytes that ranks have moved since they started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceTraffic {
    /// Sent to other ranks.
    pub sent: Bytes,
    /// Activations on MLX, sent and received directly from and into its arrays.
    pub in_place: Bytes,
    /// Activations converted to another type at a stage boundary.
    pub converted: Bytes,
    /// Activations copied only for the exchange.
    pub staged: Bytes,
}

impl InstanceTraffic {
    fn with(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        let f = |of: fn(&Self) -> Bytes| Bytes(f(of(&self).0, of(&other).0));
        Self {
            sent: f(|moved| moved.sent),
            in_place: f(|moved| moved.in_place),
            converted: f(|moved| moved.converted),
            staged: f(|moved| moved.staged),
        }
    }

    /// The bytes moved since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        self.with(before, u64::saturating_sub)
    }

    /// Bytes per unit for `n` units, such as tokens; 0 for none.
    #[must_use]
    pub fn per(self, n: u64) -> Self {
        self.with(Self::default(), |moved, _| {
            moved.checked_div(n).unwrap_or(0)
        })
    }

    /// Whether arrays of MLX took part.
    pub fn has_arrays(self) -> bool {
        self.in_place.0 + self.converted.0 + self.staged.0 > 0
    }

    /// How values left and entered arrays, as the end of a sentence; empty if no node uses MLX.
    pub fn arrays(self) -> String {
        if !self.has_arrays() {
            return String::new();
        }
        let (in_place, converted, staged) = (self.in_place, self.converted, self.staged);
        format!(" (MLX's arrays: {in_place} in place, {converted} converted, {staged} staged)")
    }

    /// The same for programs.
    pub fn arrays_json(self) -> Option<Value> {
        self.has_arrays().then(|| {
            json!({
                "in_place": self.in_place.0,
                "converted": self.converted.0,
                "staged": self.staged.0,
            })
        })
    }
}

impl std::iter::Sum for InstanceTraffic {
    fn sum<I: Iterator<Item = Self>>(ranks: I) -> Self {
        ranks.fold(Self::default(), |a, b| a.with(b, |a, b| a + b))
    }
}

/// Bytes between the ranks of an instance in its epoch so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveTraffic {
    pub id: String,
    /// Number of the epoch; each epoch counts from 0.
    pub epoch: u64,
    /// Names of the ranks' nodes, in rank order.
    pub nodes: Vec<String>,
    /// Bytes, by sending and receiving rank.
    pub sent: Vec<Vec<u64>>,
}

/// [`InstanceTraffic`] on the control channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankTraffic {
    sent: u64,
    in_place: u64,
    converted: u64,
    staged: u64,
}

impl RankTraffic {
    pub fn of(model: &dyn LoadedModel) -> Self {
        let arrays = model.exchanged();
        Self {
            sent: model.links().map_or(0, |links| links.sent().0),
            in_place: arrays.in_place.0,
            converted: arrays.converted.0,
            staged: arrays.staged.0,
        }
    }
}

impl From<RankTraffic> for InstanceTraffic {
    fn from(rank: RankTraffic) -> Self {
        Self {
            sent: Bytes(rank.sent),
            in_place: Bytes(rank.in_place),
            converted: Bytes(rank.converted),
            staged: Bytes(rank.staged),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(sent: u64, in_place: u64) -> InstanceTraffic {
        let (sent, in_place) = (Bytes(sent), Bytes(in_place));
        InstanceTraffic {
            sent,
            in_place,
            ..InstanceTraffic::default()
        }
    }

    #[test]
    fn ranks_add_up_and_shares_are_of_what_came_after() {
        let all: InstanceTraffic = [moved(10, 4), moved(20, 6)].into_iter().sum();
        assert_eq!(all, moved(30, 10));
        assert_eq!(all.since(moved(10, 0)).per(2), moved(10, 5));
        assert_eq!(all.per(0), moved(0, 0));
        assert!(all.has_arrays() && !moved(1, 0).has_arrays());
    }
}
