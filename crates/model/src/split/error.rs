//! Why a model cannot be cut.

use std::ops::Range;

use paceline_base::Rank;

/// Maximum ranks of a split: far more than any published cluster of this kind. Bounds the memory
/// that a wrong argument can allocate.
pub const MAX_RANKS: u32 = 1024;

/// Why a split is not possible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An unknown split name.
    #[error(
        "split is {got:?}, expected auto, tensor, pipeline, experts, TENSORxPIPELINE (as 2x3) or \
         2x3-experts, up to {MAX_RANKS} each"
    )]
    Kind { got: String },
    /// The number of ranks is out of range.
    #[error("{got} ranks, expected 1 to {MAX_RANKS}")]
    Ranks { got: u32 },
    #[error("split {tensor}x{pipeline} is for {} ranks, there are {ranks}", tensor * pipeline)]
    Grid {
        tensor: u32,
        pipeline: u32,
        ranks: u32,
    },
    #[error("{got} shares for {ranks} ranks, expected one for each")]
    Shares { got: usize, ranks: u32 },
    #[error("the share of {rank} is 0, expected 1 or more")]
    ZeroShare { rank: Rank },
    #[error("{stages} pipeline stages for {layers} layers, expected at most one for each")]
    Stages {
        stages: u32,
        /// Layers of the model; those that share a cache count as one.
        layers: usize,
    },
    /// The stages do not cover every layer of the model once, in order.
    #[error("a stage of layers {layers:?} after {after} layers")]
    Layers {
        /// Layers of the stage, or the missing layers.
        layers: Range<usize>,
        /// End of the earlier stages' layers.
        after: usize,
    },
    /// A cut between layers that share a cache.
    #[error(
        "no stage can begin with layer {layer}: a layer behind it uses the cache of one before"
    )]
    Shared { layer: usize },
    /// A stage that shares experts has layers without experts.
    #[error("layers {layers:?} have no experts that ranks could share")]
    NoExperts { layers: Range<usize> },
    /// A stage does not assign every leaf of a sum to a rank.
    #[error("a stage of {ranks} ranks does not deal {leaves} leaves to all of them")]
    Leaves {
        /// Leaves of the sum, or blocks of rows.
        leaves: usize,
        ranks: usize,
    },
    /// A rank of a tensor split would have no work.
    #[error(
        "{rank} gets nothing: its stage shares {heads} blocks of heads and {ffn} blocks of \
         feed-forward over {tensor} ranks"
    )]
    NothingLeft {
        rank: Rank,
        /// Leaves of the attention sum.
        heads: usize,
        /// Leaves of the feed-forward sum.
        ffn: usize,
        tensor: u32,
    },
}
