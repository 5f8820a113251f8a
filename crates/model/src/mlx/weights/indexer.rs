//! Weights of a lightning indexer; whole on every rank with heads.

use paceline_mlx::Array;

use super::super::matrix::Linear;
use super::Loader;
use crate::config::{self, Selection};
use crate::{Error, LayerRole, Role};

/// Letters: I queries of a row of X elements, A elements of a compressed query.
#[derive(Debug)]
pub(in crate::mlx) struct Indexer {
    /// `(I X, A)`
    pub(in crate::mlx) query: Linear,
    /// `(X, C)`
    pub(in crate::mlx) key: Linear,
    /// `(X,)` each, in f32: weight and bias of the norm of keys.
    pub(in crate::mlx) norm: [Array; 2],
    /// `(C, I)`, in f32.
    pub(in crate::mlx) weights: Array,
}

impl Indexer {
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        let linears = [&self.query, &self.key]
            .into_iter()
            .flat_map(Linear::arrays);
        linears.chain(&self.norm).chain([&self.weights])
    }
}

impl Loader<'_> {
    /// The indexer of a layer; `None` where it has none of its own.
    pub(super) fn indexer(
        &self,
        layer: usize,
        of: config::Latent,
    ) -> Result<Option<Indexer>, Error> {
        let (Selection::Own(indexer), Some(rank)) = (of.selection, of.query_rank) else {
            return Ok(None);
        };
        let config::Indexer { heads, dim, .. } = indexer;
        let (width, role) = (self.config.width, |part| Role::Layer(layer, part));
        let rows = |part, rows, cols| self.rows(role(part), [rows, cols], 0..rows);
        let norm = self.names.layer_norm(role(LayerRole::IndexerNorm), dim)?;
        let wide = |x: &Vec<f32>| self.stream.array_f32(x, &[dim as i32]);
        let [weight, bias] = norm.each_ref().map(wide);
        Ok(Some(Indexer {
            query: rows(LayerRole::IndexerQuery, heads * dim, rank)?,
            key: rows(LayerRole::IndexerKey, dim, width)?,
            norm: [weight?, bias?],
            weights: self.wide_rows(
                role(LayerRole::IndexerWeights),
                [heads, width],
                std::slice::from_ref(&(0..heads)),
            )?,
        }))
    }
}
