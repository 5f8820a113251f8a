//! Sharded training: each rank of a group has a part of the values, of their gradients and moments.
//!
//! ```text
//! values of a layer   all ranks' slices --all-gather--> the layer, ahead of its need
//! gradients of it     roots of own leaves --all-to-all--> own slice of all roots --tree--> own sum
//! update              own slice; the slice of the rank before, a copy, with the same gradient
//! ```
//!
//! The order of a sum is the tree over logical leaves, as in one process, so the bits are those of
//! one process. Every rank has a copy of the shard of the rank before it. That rank sends it summed
//! gradients, from which both compute the same values and moments. A lost rank gets its shard from
//! the copy, and the step is repeated. The sums that all ranks gather at the end of a step are its
//! commit. A rank that has them knows that every rank has its gradients.
//!
//! Bytes sent by a rank of N, for P trained numbers: 4 P (N - 1) / N to gather forward. It sends as
//! much to gather back, as much for gradients, and 4 P / N for the copy. Source of the first three:
//! Rajbhandari et al., ZeRO, 2020.

mod cuts;
mod link;
mod rank;
mod state;

use serde::{Deserialize, Serialize};

pub(crate) use cuts::ShardCuts;
pub(crate) use link::{GroupPlan, Link, Pending, SecretKey, listen};
pub(crate) use rank::RankWorker;
pub(crate) use state::{ShardFile, share};

/// Parts of a training that the ranks of a group share out among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharding {
    /// Moments and gradients: ZeRO's stage 2. Every rank has all values.
    State,
    /// Values too: ZeRO's stage 3. They are gathered layer by layer.
    All,
    /// No state, but the rows of every leaf: see [`rows`](crate::rows).
    Rows,
    /// The rows, and the experts of every layer: see [`cpu`](crate::cpu).
    Experts,
}

impl Sharding {
    /// Whether the ranks have the state of the training.
    pub(crate) const fn has_state(self) -> bool {
        matches!(self, Self::State | Self::All)
    }
}

/// A rank of a sharded training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShardRole {
    pub(crate) rank: usize,
    /// Number of ranks.
    pub(crate) of: usize,
    pub(crate) sharding: Sharding,
}

impl ShardRole {
    /// The rank and the number of ranks, where they have parts of the experts.
    pub(crate) fn of_experts(self) -> Option<(usize, usize)> {
        (self.sharding == Sharding::Experts).then_some((self.rank, self.of))
    }

    /// The rank whose shard this one has a copy of.
    pub(crate) const fn before(self) -> usize {
        (self.rank + self.of - 1) % self.of
    }

    /// The rank that has a copy of this one's shard.
    pub(crate) const fn behind(self) -> usize {
        (self.rank + 1) % self.of
    }
}
