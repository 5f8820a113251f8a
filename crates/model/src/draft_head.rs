//! Draft heads: small networks that propose tokens from a model's residual stream.
//!
//! ```text
//! model      ... t u         rows of t and u computed; v is chosen
//! head       (h_t, u) (h_u, v) -> w        h: captured rows of the model
//!            (o, w) -> x                   o: the head's own output after w
//! ```
//!
//! - [`EagleHead`](crate::EagleHead): EAGLE-3, a folder of its own.
//! - [`BlockHead`](crate::BlockHead): DFlash and DSpark, which draft a block in a pass.
//! - [`AssistantHead`](crate::AssistantHead): Gemma 4's, which reads keys and values of the model.
//! - [`NextTokenHead`](crate::NextTokenHead): multi-token prediction, a layer in the model's files.
//!
//! Answers never depend on a head, so its bits have no class.

pub(crate) mod files;
pub(crate) mod rows;

use std::fmt;
use std::sync::Arc;

use paceline_base::Bytes;
use paceline_tensor::Kernels;

use crate::Error;

/// A loaded draft head.
pub trait DraftHead: fmt::Debug + Send + Sync {
    /// Layers of the model whose input it reads, in ascending order; see
    /// [`Model::with_captures`](crate::Model::with_captures).
    fn captures(&self) -> &[usize];

    /// C: width of the model's residual stream.
    fn width(&self) -> usize;

    /// The blocks that it drafts; `None` if it drafts a token in a pass.
    fn block(&self) -> Option<DraftBlock> {
        None
    }

    /// Kernels that its weights are packed for.
    fn kernels(&self) -> &Kernels;

    /// Bytes of its packed weights.
    fn weight_bytes(&self) -> Bytes;

    /// Memory for passes of up to `rows` rows of `sequences` sequences, with a cache of `positions`
    /// positions over all of them.
    ///
    /// # Errors
    /// [`Error::Cache`] if the memory cannot be reserved.
    fn reserve(
        self: Arc<Self>,
        rows: usize,
        sequences: usize,
        positions: usize,
    ) -> Result<Box<dyn DraftHeadCompute>, Error>;
}

/// A block of tokens that a head drafts in one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftBlock {
    /// Draft tokens, at least one.
    pub drafts: usize,
    /// Positions of the cache that it takes, from that of the last token on.
    pub positions: usize,
}

/// The purpose of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassKind {
    /// Features are captured rows, and no logits are read.
    Read,
    /// Features are captured rows, and a draft begins.
    First,
    /// Features are outputs of the head: of the token before.
    Next,
}

/// The place of a token in the draft of a pass.
#[derive(Clone, Copy, Debug)]
pub struct DraftPlace {
    /// From 0; always 0 in a head without [blocks](DraftHead::block).
    pub nth: usize,
    /// The token before it.
    pub previous: u32,
}

/// Rows of one sequence in a pass.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows<'a> {
    pub tokens: &'a [u32],
    /// Of the position before each token: captured rows of the model, `(rows, captures, C)`, or
    /// outputs of this head, `(rows, C)`.
    pub features: &'a [f32],
    /// Position of the first token in the head's cache.
    pub position: usize,
    /// Position there of the last token that is no draft.
    pub pending: usize,
    /// Cache pages of its positions.
    pub pages: &'a [u32],
}

/// A draft head with its cache and buffers.
pub trait DraftHeadCompute: fmt::Debug + Send {
    /// Cache pages.
    fn pages(&self) -> usize;

    /// Computes a pass. Blocks for it.
    ///
    /// # Errors
    /// None on the CPU.
    ///
    /// # Panics
    /// If rows exceed the reserved sizes, tokens the vocabulary, or positions the pages.
    fn forward(&mut self, sequences: &[HeadRows<'_>], pass: PassKind) -> Result<(), Error>;

    /// Writes the logits of a draft token of sequence `i` of the last pass, by tokens of the model.
    /// Tokens that the head cannot propose have minus infinity.
    fn write_logits(&mut self, i: usize, place: DraftPlace, out: &mut [f32]);

    /// The output of the last row of sequence `i` of the last pass, `(C,)`. It is the feature of
    /// the token after that row; empty in a head with [blocks](DraftHead::block).
    fn output(&self, i: usize) -> &[f32];
}
