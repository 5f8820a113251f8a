//! Weights of an indexer of pools or blocks of positions; whole on every rank with heads.

use paceline_mlx::Array;
use paceline_model::{Error, LayerRole, Role};

use super::super::matrix::Linear;
use super::Loader;

/// Letters: I queries of a row of X elements.
#[derive(Debug)]
pub(crate) struct PoolIndexer {
    /// `((I + 1) X, C)`: queries, then the key; of blocks `(I X, C)`.
    pub(crate) query_key: Linear,
    /// `(X, C)`, of blocks.
    pub(crate) key: Option<Linear>,
    /// `(X,)` each, in f32; the second of a pool's mean.
    pub(crate) query_norm: Array,
    pub(crate) key_norm: Array,
}

impl PoolIndexer {
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        let linears = [&self.query_key].into_iter().chain(&self.key);
        let norms = [&self.query_norm, &self.key_norm];
        linears.flat_map(Linear::arrays).chain(norms)
    }
}

impl Loader<'_> {
    /// The indexer of a layer; `None` where it has none.
    pub(super) fn pool_indexer(&self, layer: usize) -> Result<Option<PoolIndexer>, Error> {
        let Some(of) = self.config.layers[layer].pooled else {
            return Ok(None);
        };
        let role = |part| Role::Layer(layer, part);
        let has_key = of.choice.local > 0;
        let rows = |part, n: usize| self.rows(role(part), [n, self.config.width], 0..n);
        let norm = |part| self.wide(&self.names.norm(role(part), of.dim)?);
        let queries = of.heads + usize::from(!has_key);
        let key = has_key.then(|| rows(LayerRole::IndexerKey, of.dim));
        Ok(Some(PoolIndexer {
            query_key: rows(LayerRole::IndexerQuery, queries * of.dim)?,
            key: key.transpose()?,
            query_norm: norm(LayerRole::IndexerQueryNorm)?,
            key_norm: norm(LayerRole::IndexerNorm)?,
        }))
    }
}
