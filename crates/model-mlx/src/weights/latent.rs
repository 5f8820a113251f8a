//! Weights of latent attention: parts that every rank of a stage has, and the expansions of its
//! heads as stacks.

use paceline_mlx::Array;
use paceline_model::{Error, LayerRole, Nth, Role};

use super::super::matrix::{Linear, Matrix};
use super::{Indexer, Loader};

/// Letters: H heads of this rank, N plain elements of a query, R latent numbers, V of a value.
#[derive(Debug)]
pub(crate) struct Latent {
    /// The compression of queries and its norm.
    pub(crate) query_down: Option<(Linear, Array)>,
    pub(crate) query: Linear,
    pub(crate) down: Linear,
    pub(crate) norm: Array,
    /// A stack of H matrices `(R, N)`.
    pub(crate) keys: Matrix,
    /// A stack of H matrices `(V, R)`.
    pub(crate) values: Matrix,
    /// `(H V, C)`: gates of the attention output, where it has some.
    pub(crate) gate: Option<Linear>,
    /// Where the layer has one of its own.
    pub(crate) indexer: Option<Indexer>,
}

impl Latent {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let down = self.query_down.as_ref();
        let linears = [
            Some(&self.query),
            Some(&self.down),
            down.map(|(down, _)| down),
            self.gate.as_ref(),
        ];
        let linears = linears.into_iter().flatten().flat_map(Linear::arrays);
        let norms = [Some(&self.norm), down.map(|(_, norm)| norm)];
        let all = linears.chain(norms.into_iter().flatten());
        let stacks = [&self.keys, &self.values];
        let index = self.indexer.iter().flat_map(Indexer::arrays);
        all.chain(index)
            .chain(stacks.into_iter().flat_map(Matrix::arrays))
            .collect()
    }
}

impl Loader<'_> {
    pub(super) fn latent(&self, layer: usize, of: paceline_model::Latent) -> Result<Latent, Error> {
        let (width, role) = (self.config.width, |part| Role::Layer(layer, part));
        let rows = |part, rows| self.rows(role(part), [rows, width], 0..rows);
        let norm = |part, n| self.norm(role(part), n);
        let query_down = of.query_rank.map(|rank| {
            let down = rows(LayerRole::QueryDown, rank)?;
            Ok::<_, Error>((down, norm(LayerRole::QueryDownNorm, rank)?))
        });
        let (part, cols) = match of.query_rank {
            Some(rank) => (LayerRole::QueryUp, rank),
            None => (LayerRole::Query, width),
        };
        let heads = self.shard.layer(layer).heads.clone();
        let (all, dim) = (self.config.layers[layer].heads, of.query_dim());
        let of_heads = |dim: usize| heads.start * dim..heads.end * dim;
        let gate = || {
            let shape = [all * of.value_dim, width];
            self.rows(
                role(LayerRole::AttentionGate),
                shape,
                of_heads(of.value_dim),
            )
        };
        let [keys, values] = self.expansions(layer, of)?;
        Ok(Latent {
            query_down: query_down.transpose()?,
            query: self.rows(role(part), [all * dim, cols], of_heads(dim))?,
            down: rows(LayerRole::LatentDown, of.key_dim())?,
            norm: norm(LayerRole::LatentNorm, of.rank)?,
            keys,
            values,
            gate: of.gated.then(gate).transpose()?,
            indexer: self.indexer(layer, of)?,
        })
    }

    /// The expansions of this rank's heads to keys and to values.
    fn expansions(&self, layer: usize, of: paceline_model::Latent) -> Result<[Matrix; 2], Error> {
        let joined = Role::Layer(layer, LayerRole::LatentUp);
        if self.names.source.has_any(self.config.family, joined) {
            return self.joined_expansions(layer, of);
        }
        let heads = self.shard.layer(layer).heads.clone();
        let all = self.config.layers[layer].heads;
        let stack = |part: fn(Nth) -> LayerRole, shape: [usize; 2]| {
            let matrices = heads.clone().map(|index| {
                let role = Role::Layer(layer, part(Nth { index, of: all }));
                self.matrix(role, shape, 0..shape[0], 0..shape[1])
            });
            let matrices = matrices.collect::<Result<Vec<_>, Error>>()?;
            Matrix::stack(self.stream, &matrices)
        };
        Ok([
            stack(LayerRole::KeyUp, [of.rank, of.plain])?,
            stack(LayerRole::ValueUp, [of.value_dim, of.rank])?,
        ])
    }

    /// The same of a layer whose expansions are one matrix, `(H (N + V), R)`: floats, since a
    /// transposed matrix has no groups.
    fn joined_expansions(
        &self,
        layer: usize,
        of: paceline_model::Latent,
    ) -> Result<[Matrix; 2], Error> {
        let heads = self.shard.layer(layer).heads.clone();
        let dim = of.plain + of.value_dim;
        let shape = [self.config.layers[layer].heads * dim, of.rank];
        let rows = heads.start * dim..heads.end * dim;
        let role = Role::Layer(layer, LayerRole::LatentUp);
        let both = self.matrix(role, shape, rows, 0..of.rank)?;
        let both = both.plain(self.stream, self.dtype)?;
        let (n, rank) = (heads.len() as i32, of.rank as i32);
        let both = self.stream.reshape(&both, &[n, dim as i32, rank])?;
        let (plain, dim) = (of.plain as i32, dim as i32);
        let keys = self.stream.slice(&both, &[0, 0, 0], &[n, plain, rank])?;
        let values = self.stream.slice(&both, &[0, plain, 0], &[n, dim, rank])?;
        let values = self.stream.transpose(&values, &[0, 2, 1])?;
        self.kept.borrow_mut().push(both);
        Ok([Matrix::Float(keys), Matrix::Float(values)])
    }
}
