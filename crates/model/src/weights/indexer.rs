//! Weights of a lightning indexer; whole on every rank.

use paceline_tensor::PackedMatrix;

use super::{Linear, ShardLoader};
use crate::config::{self, Latent, Selection};
use crate::{Error, LayerRole, Role};

/// Letters: I queries of a row of X elements, A elements of a compressed query.
#[derive(Debug)]
pub(crate) struct Indexer {
    /// `(I X, A)`
    pub(crate) query: Linear,
    /// `(X, C)`
    pub(crate) key: Linear,
    /// `(X,)` each: weight and bias of the norm of keys.
    pub(crate) norm: [Vec<f32>; 2],
    /// `(I, C)`, in f32.
    pub(crate) weights: Linear,
    /// `(X, C)` and `(pool, X)`: gates of a pool's inputs and their biases.
    pub(crate) gate: Option<(PackedMatrix, Vec<f32>)>,
}

impl ShardLoader<'_> {
    /// The indexer of a layer; `None` where it has none of its own.
    pub(super) fn indexer(&self, layer: usize, of: Latent) -> Result<Option<Indexer>, Error> {
        let (Selection::Own(indexer), Some(rank)) = (of.selection, of.query_rank) else {
            return Ok(None);
        };
        let config::Indexer {
            heads, dim, pool, ..
        } = indexer;
        let width = self.config.width;
        let role = |part| Role::Layer(layer, part);
        let rows = |part, shape: [usize; 2]| {
            self.check_finite(role(part), shape)?;
            self.rows(role(part), shape, 0..shape[0])
        };
        let gate = || {
            let matrix = self.whole(role(LayerRole::IndexerGate), [dim, width], false)?;
            let biases = self.floats(role(LayerRole::IndexerGateBias), [pool, dim])?;
            Ok::<_, Error>((matrix, biases))
        };
        let weights = (role(LayerRole::IndexerWeights), [heads, width]);
        self.check_finite(weights.0, weights.1)?;
        Ok(Some(Indexer {
            query: rows(LayerRole::IndexerQuery, [heads * dim, rank])?,
            key: rows(LayerRole::IndexerKey, [dim, width])?,
            norm: self.names.layer_norm(role(LayerRole::IndexerNorm), dim)?,
            weights: Linear {
                matrix: self.whole(weights.0, weights.1, true)?,
                bias: None,
            },
            gate: (pool > 1).then(gate).transpose()?,
        }))
    }
}
