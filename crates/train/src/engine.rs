//! The engines' trait: layers and their gradients.
//!
//! Training goes layer by layer: [`LayerEngine::forward`] from the first to the last, then
//! [`LayerEngine::backward`] from the last to the first. An engine keeps nothing between the two
//! but what it hands out. A caller may drop that and have it computed again, with the same bits.

use crate::error::Error;
use crate::rows::LeafRows;

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
