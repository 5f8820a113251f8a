//! Attention to a window and to compressed keys of earlier positions.

use paceline_tensor::Runs;

use super::PoolIndexer;

/// Attention in which all heads share one key per position, which is its value too. A row attends
/// to the last positions and to runs of all earlier ones, each compressed to one key. H heads.
///
/// Source: DeepSeek-AI 2026 (DeepSeek-V4), section 2.3; `modeling_deepseek_v4.py` of transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// Size of the compressed query (A).
    pub query_rank: usize,
    /// Rotated elements at the end of a query and of a key (P), a multiple of 16.
    pub turned: usize,
    /// Groups of heads whose outputs are compressed together (G), a divisor of H.
    pub groups: usize,
    /// Elements of a group's compressed output (R), a multiple of 32.
    pub group_rank: usize,
    /// Positions of the window, a row's own included.
    pub window: usize,
    /// Whether keys are rounded to 8 bits, and compressed and index keys to 4 (DeepSeek V4.1).
    /// Queries then have no norm, and an index key is made of the compressed key.
    pub is_rounded: bool,
    /// `None` where rows attend to their window only.
    pub runs: Option<KeyRuns>,
}

/// Runs of positions with one key each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRuns {
    /// Positions of a run: a divisor or a multiple of a page's.
    pub len: usize,
    /// Whether a key is made of its run and of the one before.
    pub overlaps: bool,
    /// Earlier layer whose compressed keys these are; `None` for its own.
    pub of: Option<usize>,
    /// Elements of an index key; 0 without.
    pub index_dim: usize,
    /// The choice of keys. Without one it is that of the layer before which has one; layers without
    /// index keys attend to all.
    pub indexer: Option<PoolIndexer>,
}

impl Compressed {
    /// Runs of keys of `dim` elements.
    pub fn runs(&self, dim: usize) -> Option<Runs> {
        let of = self.runs?;
        Some(Runs {
            len: of.len,
            overlaps: of.overlaps,
            dim,
            index_dim: of.index_dim,
            index_inputs: of.index_dim > 0 && !self.is_rounded,
        })
    }

    /// Cached elements of a position with a key of `dim` elements.
    pub fn row(&self, dim: usize) -> usize {
        let own = self.runs(dim).filter(|_| !self.uses_earlier());
        own.map_or(dim, Runs::row)
    }

    /// Whether its compressed keys are those of an earlier layer.
    pub const fn uses_earlier(&self) -> bool {
        matches!(self.runs, Some(KeyRuns { of: Some(_), .. }))
    }

    /// Positions that a row reads, its own included.
    pub(super) const fn looks_back(&self) -> usize {
        let runs = match self.runs {
            Some(KeyRuns { of: Some(_), .. }) => 0,
            Some(runs) if runs.overlaps => 2 * runs.len,
            Some(runs) => runs.len,
            None => 0,
        };
        if runs > self.window {
            runs
        } else {
            self.window
        }
    }

    /// Weights of a layer of `heads` heads of `dim` elements in a model of this width, without
    /// norms.
    pub(super) fn parameters(&self, (heads, dim): (usize, usize), width: usize) -> usize {
        let queries = self.query_rank * (width + heads * dim);
        let outputs = self.group_rank * (heads * dim + self.groups * width);
        let inputs = self.runs.map_or(0, |runs| {
            let series = if runs.overlaps { 2 } else { 1 };
            let index = runs.indexer.map_or(0, |own| {
                own.heads * (own.dim * self.query_rank + width) + 2 * series * own.dim * width
            });
            2 * series * dim * width + index
        });
        queries + outputs + width * dim + inputs
    }
}
