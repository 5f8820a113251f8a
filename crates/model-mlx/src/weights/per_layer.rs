//! Embeddings that each layer has of its own (Gemma 3n and 4).

use paceline_mlx::Array;
use paceline_model::{Error, LayerRole, Role};

use super::super::matrix::{Linear, Matrix};
use super::Loader;

/// How a layer's own embeddings get into the residual: every rank has all of it. P is their width.
#[derive(Debug)]
pub(crate) struct PerLayer {
    /// `(P, C)`
    pub(crate) gate: Matrix,
    /// `(C, P)`
    pub(crate) output: Matrix,
    /// `(C,)`, on what that gives.
    pub(crate) norm: Array,
}

/// The embeddings of layers, and what a token's embedding adds to them.
#[derive(Debug)]
pub(crate) struct PerLayerInputs {
    /// `(vocabulary, layers P)`
    pub(crate) embedding: Linear,
    /// `(layers held P, C)`
    pub(crate) projection: Linear,
    /// `(P,)`
    pub(crate) norm: Array,
}

impl PerLayer {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let matrices = [&self.gate, &self.output].into_iter();
        matrices
            .flat_map(Matrix::arrays)
            .chain([&self.norm])
            .collect()
    }
}

impl PerLayerInputs {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let linears = [&self.embedding, &self.projection].into_iter();
        linears
            .flat_map(Linear::arrays)
            .chain([&self.norm])
            .collect()
    }
}

impl Loader<'_> {
    /// The embeddings of layers, where they have some: all, and what multiplies them for the
    /// layers that this rank holds.
    pub(super) fn per_layer_inputs(&self) -> Result<Option<PerLayerInputs>, Error> {
        let (c, held) = (self.config, &self.shard.layers);
        let (p, all) = (c.per_layer, c.per_layer * c.layers.len());
        if p == 0 {
            return Ok(None);
        }
        let mine = held.start * p..held.end * p;
        Ok(Some(PerLayerInputs {
            embedding: self.rows(
                Role::PerLayerEmbedding,
                [c.per_layer_vocab, all],
                0..c.per_layer_vocab,
            )?,
            projection: self.rows(Role::PerLayerProjection, [all, c.width], mine)?,
            norm: self.norm(Role::PerLayerNorm, p)?,
        }))
    }

    /// A layer's own part of them.
    pub(super) fn per_layer(&self, layer: usize) -> Result<Option<PerLayer>, Error> {
        let (p, width) = (self.config.per_layer, self.config.width);
        if p == 0 {
            return Ok(None);
        }
        let matrix = |part, shape: [usize; 2]| {
            self.matrix(Role::Layer(layer, part), shape, 0..shape[0], 0..shape[1])
        };
        Ok(Some(PerLayer {
            gate: matrix(LayerRole::PerLayerGate, [p, width])?,
            output: matrix(LayerRole::PerLayerOutput, [width, p])?,
            norm: self.norm(Role::Layer(layer, LayerRole::PostPerLayerNorm), width)?,
        }))
    }
}
