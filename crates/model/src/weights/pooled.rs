//! Weights of an indexer of pools; whole on every rank.

use super::{Linear, ShardLoader};
use crate::{Error, LayerRole, Role};

/// Letters: I queries of a row of X elements.
#[derive(Debug)]
pub(crate) struct PoolIndexer {
    /// `((I + 1) X, C)`: queries, then the key.
    pub(crate) query_key: Linear,
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
        let shape = [(of.heads + 1) * of.dim, self.config.width];
        self.check_finite(role(LayerRole::IndexerQuery), shape)?;
        Ok(Some(PoolIndexer {
            query_key: self.rows(role(LayerRole::IndexerQuery), shape, 0..shape[0])?,
            query_norm: self.names.norm(role(LayerRole::IndexerQueryNorm), of.dim)?,
            key_norm: self.names.norm(role(LayerRole::IndexerNorm), of.dim)?,
        }))
    }
}
