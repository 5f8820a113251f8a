//! Weights of a lightning indexer; whole on every rank with heads.

use paceline_mlx::Array;
use paceline_model::{Error, LayerRole, Role, Selection};

use super::super::matrix::Linear;
use super::Loader;

/// Letters: I queries of a row of X elements, A elements of a compressed query.
#[derive(Debug)]
pub(crate) struct Indexer {
    /// `(I X, A)`
    pub(crate) query: Linear,
    /// `(X, C)`
    pub(crate) key: Linear,
    /// `(X,)` each, in f32: weight and bias of the norm of keys.
    pub(crate) norm: [Array; 2],
    /// `(C, I)`, in f32.
    pub(crate) weights: Array,
    /// `(X, C)`, and `(1, 1, pool, X)` in f32: gates of a pool's inputs and their biases.
    pub(crate) gate: Option<(Linear, Array)>,
}

impl Indexer {
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        let linears = [&self.query, &self.key]
            .into_iter()
            .flat_map(Linear::arrays);
        let gate = self.gate.iter();
        let gate = gate.flat_map(|(gate, biases)| gate.arrays().chain([biases]));
        linears.chain(&self.norm).chain([&self.weights]).chain(gate)
    }
}

impl Loader<'_> {
    /// The indexer of a layer; `None` where it has none of its own.
    pub(super) fn indexer(
        &self,
        layer: usize,
        of: paceline_model::Latent,
    ) -> Result<Option<Indexer>, Error> {
        let (Selection::Own(indexer), Some(rank)) = (of.selection, of.query_rank) else {
            return Ok(None);
        };
        let paceline_model::Indexer {
            heads, dim, pool, ..
        } = indexer;
        let (width, role) = (self.config.width, |part| Role::Layer(layer, part));
        let rows = |part, rows, cols| self.rows(role(part), [rows, cols], 0..rows);
        let norm = self.names.layer_norm(role(LayerRole::IndexerNorm), dim)?;
        let wide = |x: &Vec<f32>| self.stream.array_f32(x, &[dim as i32]);
        let [weight, bias] = norm.each_ref().map(wide);
        let gate = || {
            let biases = self
                .names
                .table(role(LayerRole::IndexerGateBias), [pool, dim])?;
            let sizes = [1, 1, pool as i32, dim as i32];
            let biases = self.stream.array_f32(&biases, &sizes)?;
            Ok::<_, Error>((rows(LayerRole::IndexerGate, dim, width)?, biases))
        };
        Ok(Some(Indexer {
            query: rows(LayerRole::IndexerQuery, heads * dim, rank)?,
            key: rows(LayerRole::IndexerKey, dim, width)?,
            norm: [weight?, bias?],
            gate: (pool > 1).then(gate).transpose()?,
            weights: self.wide_rows(
                role(LayerRole::IndexerWeights),
                [heads, width],
                std::slice::from_ref(&(0..heads)),
            )?,
        }))
    }
}
