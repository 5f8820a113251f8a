//! The engines' trait: layers and their gradients.
//!
//! Training goes layer by layer: [`LayerEngine::forward`] from the first to the last, then
//! [`LayerEngine::backward`] from the last to the first. An engine keeps nothing between the two
//! but what it hands out. A caller may drop that and have it computed again, with the same bits.

use paceline_model::Rope;

use crate::error::Error;

/// The tokens of a leaf by their sequences: what attention may see, and their angles.
#[derive(Clone, Debug)]
pub struct LeafRows {
    /// Length of each sequence; they lie one after the other, and never see one another.
    pub lengths: Vec<usize>,
    /// For each of the model's rotations: `(cos, sin)` of each pair, by position in a sequence.
    pub(crate) angles: Vec<Vec<(f32, f32)>>,
}

impl LeafRows {
    /// Sequences of these lengths, turned by `ropes`.
    pub(crate) fn new(lengths: Vec<usize>, ropes: &[Rope]) -> Self {
        let mut rows = Self {
            lengths,
            angles: Vec::with_capacity(ropes.len()),
        };
        for rope in ropes {
            let mut angles = Vec::new();
            rope.angles(0..rows.longest(), &mut angles);
            rows.angles.push(angles);
        }
        rows
    }

    /// Length of the longest sequence.
    pub(crate) fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// The position of each token in its sequence.
    pub(crate) fn positions(&self) -> impl Iterator<Item = usize> {
        self.lengths.iter().flat_map(|len| 0..*len)
    }

    /// The first token and the length of each sequence.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = (usize, usize)> {
        self.lengths.iter().scan(0, |next, len| {
            let first = *next;
            *next += len;
            Some((first, *len))
        })
    }
}

/// Layers and their gradients. T tokens, C the model's width.
pub trait LayerEngine {
    /// Values that a forward pass may keep for the backward one.
    type Kept;

    /// x (T, C) -> y (T, C)
    ///
    /// # Errors
    /// [`Error::Model`] of a device that fails or hangs; none on the CPU.
    fn forward(
        &self,
        params: &[f32],
        layer: usize,
        rows: &LeafRows,
        x: &[f32],
    ) -> Result<(Vec<f32>, Self::Kept), Error>;

    /// dy (T, C) -> dx (T, C), at the layer's input `x`. Adds to `grads`, as long as `params`, what
    /// the layer's trained tensors get. Without `kept` the forward pass is computed again.
    ///
    /// # Errors
    /// The errors of [`forward`](Self::forward).
    fn backward(
        &self,
        params: &[f32],
        at: (usize, &LeafRows, &[f32]),
        kept: Option<Self::Kept>,
        dy: &[f32],
        grads: &mut [f32],
    ) -> Result<Vec<f32>, Error>;
}
