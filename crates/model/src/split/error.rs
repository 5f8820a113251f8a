//! Why a model cannot be cut.

use std::ops::Range;

use paceline_base::Rank;

/// Most ranks of a split. More than any published cluster of this kind by far; it bounds what a
/// wrong argument can allocate.
pub const MAX_RANKS: u32 = 1024;

/// Why a model cannot be cut like that.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The name of a split is not one.
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
    Shares {
        /// Number of shares.
        got: usize,
        ranks: u32,
    },
    #[error("the share of {rank} is 0, expected 1 or more")]
    ZeroShare { rank: Rank },
    #[error("{stages} pipeline stages for {layers} layers, expected at most one for each")]
    Stages {
        stages: u32,
        /// Layers of the model, those that share a cache as one.
        layers: usize,
    },
    /// Stages that do not have every layer of the model once, in order.
    #[error("a stage of layers {layers:?} after {after} layers")]
    Layers {
        /// Of the stage, or those that no stage has.
        layers: Range<usize>,
        /// Layers of the stages before.
        after: usize,
    },
    /// A cut between layers that share a cache.
    #[error(
        "no stage can begin with layer {layer}: a layer behind it uses the cache of one before"
    )]
    Shared { layer: usize },
    /// Ranks of a stage are to share the experts of layers that have none.
    #[error("layers {layers:?} have no experts that ranks could share")]
    NoExperts { layers: Range<usize> },
    /// A stage does not say which of its ranks has which leaves of a sum.
    #[error("a stage of {ranks} ranks does not deal {leaves} leaves to all of them")]
    Leaves {
        /// Leaves of the sum, or blocks of rows.
        leaves: usize,
        ranks: usize,
    },
    /// A rank of a tensor split is left without work.
    #[error(
        "{rank} gets nothing: its stage shares {heads} blocks of heads and {ffn} blocks of \
         feed-forward over {tensor} ranks"
    )]
    NothingLeft {
        rank: Rank,
        /// Leaves of the attention's sum.
        heads: usize,
        /// Leaves of the feed-forward's sum.
        ffn: usize,
        tensor: u32,
    },
}
