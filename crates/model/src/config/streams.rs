//! Residual streams, and how layers read and write them.

/// Residual streams of a position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Streams {
    /// Number of streams (S): 2 to [`MAX_STREAMS`], or [`MAX_BLOCKS`] where these are blocks.
    pub count: usize,
    /// Rank of the matrices that weigh the mix, or of the path parallel to attention (R); 0 without
    /// these.
    pub rank: usize,
    pub rule: StreamRule,
}

/// Rule by which layers read and write residual streams.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StreamRule {
    /// Each half of a layer reads a mix and adds its output, with a weight, to every stream.
    ///
    /// Source: Zhu et al. 2024 (Hyper-Connections); `Qwen4ExpTextGatedResidual` of transformers.
    Gated,
    /// A layer predicts all streams, computes the first, and corrects all by the difference.
    ///
    /// Source: Baykal et al. 2023 (Alternating Updates); `Gemma3nTextAltUp` of transformers.
    Alternating,
    /// Each half of a layer reads a weighted sum of the streams. It adds its output, with weights,
    /// to a mix of them by a matrix whose rows and columns sum to 1.
    ///
    /// Source: Xie et al. 2026 (Manifold-Constrained Hyper-Connections);
    /// `DeepseekV4HyperConnection` of transformers.
    Constrained(Constraint),
    /// The first stream is the sum since the current block of layers began; the others are the sums
    /// of the blocks before. Each half attends to all of them.
    ///
    /// Source: `kimi_k3.py` of mlx-lm 0.32.
    Attended {
        /// Layers of a block.
        block: usize,
    },
}

/// Constraints on the mixes of residual streams.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constraint {
    /// Times that rows and columns are divided by their sums.
    pub rounds: usize,
    /// Added to weights and sums.
    pub eps: f32,
    /// Whether the output head reads a weighted sum of the streams; otherwise their mean.
    pub weighs_head: bool,
    /// Whether the sum that a half reads has the weights of the half before (DeepSeek V4.1). The
    /// first half then reads the first stream, and the output head has weights of the last half.
    pub is_late: bool,
}

/// Maximum residual streams: twice those of published models.
pub(crate) const MAX_STREAMS: usize = 8;

/// Maximum streams where these are blocks of layers: several times those of published models.
pub(crate) const MAX_BLOCKS: usize = 64;
