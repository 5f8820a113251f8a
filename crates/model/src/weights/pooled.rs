//! Weights of an indexer of pools; whole on every rank.

use super::{Linear, ShardLoader};
use crate::{Error, LayerRole, Role};

/// Letters: I queries of a row of X elements.
#[derive(Debug)]
pub(crate) struct PoolIndexer {
    /// `((I + 1) X, C)`: queries, then the key; of blocks `(I X, C)`.
    pub(crate) query_key: Linear,
    /// `(X, C)`, of blocks.
    pub(crate) key: Option<Linear>,
    /// `(X,)`
    pub(crate) query_norm: Vec<f32>,
    /// `(X,)`, of a pool's mean.
    pub(crate) key_norm: Vec<f32>,
}

impl ShardLoader<'_> {
    /// The indexer of a layer; `None` where it has none.
    pub(super) fn pool_indexer(&self, layer: usize) -> Result<Option<PoolIndexer>, Error> {
        let Some(of) = self.config.layers[layer].pooled else {
            return Ok(None);
        };
        let role = |part| Role::Layer(layer, part);
        let has_key = of.choice.local > 0;
        let queries = of.heads + usize::from(!has_key);
        let rows = |part, n: usize| {
            let shape = [n, self.config.width];
            self.check_finite(role(part), shape)?;
            self.rows(role(part), shape, 0..n)
        };
        let key = has_key.then(|| rows(LayerRole::IndexerKey, of.dim));
        Ok(Some(PoolIndexer {
            query_key: rows(LayerRole::IndexerQuery, queries * of.dim)?,
            key: key.transpose()?,
            query_norm: self.names.norm(role(LayerRole::IndexerQueryNorm), of.dim)?,
            key_norm: self.names.norm(role(LayerRole::IndexerNorm), of.dim)?,
        }))
    }
}
