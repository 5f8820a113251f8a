//! Latent attention, and the indexers that choose the positions a row attends to.

use paceline_tensor::{Choice, RopePairs};

/// Latent attention: all heads share one vector per position and expand it. A key is `rank` latent
/// elements and `turned` rotated ones; a value is the same latent elements. H heads.
///
/// Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1; the absorbed form of its appendix C.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// Size of the compressed query; `None` without compression.
    pub query_rank: Option<usize>,
    /// Latent elements of a position (r), a multiple of 32.
    pub rank: usize,
    /// Elements of a query without rotation, expanded (N), a multiple of 32.
    pub plain: usize,
    /// Rotated elements of a query and of a key, a multiple of 16.
    pub turned: usize,
    /// Size of a head's expanded value (V), a multiple of 16.
    pub value_dim: usize,
    /// Added to the mean square in the norms of compressed queries and of latent numbers.
    pub norm_eps: f32,
    /// Growth of queries with their position (Mistral); `None` without.
    pub growth: Option<PositionScaling>,
    /// Positions that a row attends to; of the model, those of layers with an indexer.
    pub selection: Selection,
    /// Whether the sigmoid of a gate multiplies each value of the attention output.
    pub gated: bool,
}

/// Positions that a row attends to, among those up to its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    All,
    /// The choice of the layer's indexer.
    Own(Indexer),
    /// The choice of the last indexer before.
    Before,
}

impl Selection {
    pub(super) const fn is_own(self) -> bool {
        matches!(self, Self::Own(_))
    }
}

/// A lightning indexer. It scores a position, or a pool of positions, by the sum over its queries
/// of `weight * max(query . key, 0)`; a row attends to the best, and to those behind the last whole
/// pool.
///
/// Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indexer {
    /// Positions that it chooses.
    pub top_k: usize,
    /// Queries of a row.
    pub heads: usize,
    /// Elements of a query and of a key, a multiple of 16. The first `turned` are rotated.
    pub dim: usize,
    /// Which of them are rotated together.
    pub pairs: RopePairs,
    /// Positions of a pool, chosen together by one key (GLM 5.3): a divisor of 64, 1 for none.
    pub pool: usize,
}

/// An indexer of pools or of blocks of positions. A pool has one key, made of all of its rows. Its
/// score is the sum over queries of `max(query . key, 0)`. A row attends to the positions of the
/// best pools, and to those behind the last whole one. A block has the score of its best position,
/// by one query for each KV head, which attends to the best blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolIndexer {
    pub choice: Choice,
    /// Queries of a row (I).
    pub heads: usize,
    /// Elements of a query and of a key (X), a multiple of 16.
    pub dim: usize,
}

/// Queries at position p are multiplied by `1 + rate * ln(1 + floor(p / length))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PositionScaling {
    /// Factor of the logarithm.
    pub rate: f64,
    /// Positions per step; at least 1.
    pub length: f64,
}

impl PositionScaling {
    /// The factor at `position`, computed in f64 and rounded once.
    pub fn at(self, position: usize) -> f32 {
        let periods = libm::floor(position as f64 / self.length);
        (1.0 + self.rate * libm::log(1.0 + periods)) as f32
    }
}

impl Latent {
    /// Elements of a head's query before its plain part is expanded.
    pub const fn query_dim(&self) -> usize {
        self.plain + self.turned
    }

    /// Cached elements of a position, without an index key.
    pub const fn key_dim(&self) -> usize {
        self.rank + self.turned
    }

    /// Elements of an index key; 0 in layers without one.
    pub const fn index_dim(&self) -> usize {
        match self.selection {
            Selection::Own(indexer) if self.has_pools() => 2 * indexer.dim, // with gates
            Selection::Own(indexer) => indexer.dim,
            Selection::All | Selection::Before => 0,
        }
    }

    /// Whether an indexer of the layer's own chooses pools of positions.
    pub const fn has_pools(&self) -> bool {
        matches!(self.selection, Selection::Own(indexer) if indexer.pool > 1)
    }

    /// The same for all layers of a model.
    pub(super) const fn without_selection(mut self) -> Self {
        self.selection = Selection::All;
        self
    }
}
