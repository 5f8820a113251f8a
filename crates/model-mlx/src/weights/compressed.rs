//! Weights of attention to compressed keys: parts that every rank of a stage has, and the queries
//! and outputs of its own heads.

use paceline_mlx::Array;
use paceline_model::{Error, KeyRuns, LayerRole, Role};

use super::super::matrix::{Linear, Matrix};
use super::Loader;

/// A matrix, and the norm or the weights that go with it.
type WithVector = (Linear, Array);

/// Letters: H heads of D elements in G groups of this rank, A elements of a compressed query, R of
/// a group's output.
#[derive(Debug)]
pub(crate) struct Compressed {
    /// `(A, C)`, with the norm `(A,)`.
    pub(crate) query_down: WithVector,
    /// `(H D, A)`, with the norm `(D,)` of each head, which has no weights.
    pub(crate) query: WithVector,
    /// `(D, C)`, with the norm `(D,)`.
    pub(crate) key: WithVector,
    /// `(H,)`
    pub(crate) sinks: Option<Array>,
    /// A stack of G matrices `(R, H D / G)`.
    pub(crate) outputs: Matrix,
    /// Of keys, then of index keys.
    pub(crate) series: Vec<KeySeries>,
    /// Queries `(I X, A)`, and their weights `(C, I)` in f32.
    pub(crate) indexer: Option<WithVector>,
    /// `(X, D)`, from a compressed key to its index key, with the norm `(X,)` in f32.
    pub(crate) index_key: Option<WithVector>,
}

/// Inputs of compressed keys of D elements, N times.
#[derive(Debug)]
pub(crate) struct KeySeries {
    /// Inputs, and gates unless all are 0, `(N D, C)` each.
    pub(crate) linears: Vec<Linear>,
    /// `(1, run, N D)`, in f32: bias of each position's gate.
    pub(crate) bias: Array,
    /// `(D,)`, in f32
    pub(crate) norm: Array,
}

impl Compressed {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let pairs = [&self.query_down, &self.query, &self.key].into_iter();
        let pairs = pairs.chain(&self.indexer).chain(&self.index_key);
        let pairs = pairs.flat_map(|(linear, vector)| linear.arrays().chain([vector]));
        let series = self.series.iter().flat_map(|own| {
            let linears = own.linears.iter().flat_map(Linear::arrays);
            linears.chain([&own.bias, &own.norm])
        });
        let outputs = self.outputs.arrays();
        let all = pairs.chain(series).chain(outputs);
        all.chain(&self.sinks).collect()
    }
}

impl Loader<'_> {
    pub(super) fn compressed(
        &self,
        layer: usize,
        of: paceline_model::Compressed,
    ) -> Result<Compressed, Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        let (dim, each) = (shape.head_dim, shape.heads / of.groups);
        let role = |part| Role::Layer(layer, part);
        let down = |part, n| self.rows(role(part), [n, self.config.width], 0..n);
        let groups = cut.heads.start / each..cut.heads.end / each;
        let all = [of.groups * of.group_rank, each * dim];
        let output = |group: usize| {
            let rows = group * of.group_rank..(group + 1) * of.group_rank;
            self.matrix(role(LayerRole::GroupOutput), all, rows, 0..all[1])
        };
        let outputs = groups.map(output).collect::<Result<Vec<_>, Error>>()?;
        let queries = cut.heads.start * dim..cut.heads.end * dim;
        let all = [shape.heads * dim, of.query_rank];
        let (series, index_key) = self.run_inputs(layer, of)?;
        Ok(Compressed {
            query_down: (
                down(LayerRole::QueryDown, of.query_rank)?,
                self.norm(role(LayerRole::QueryDownNorm), of.query_rank)?,
            ),
            query: (
                self.rows(role(LayerRole::QueryUp), all, queries)?,
                self.floats(&vec![1.0; dim])?,
            ),
            key: (
                down(LayerRole::Key, dim)?,
                self.norm(role(LayerRole::KeyNorm), dim)?,
            ),
            sinks: self.sinks(layer)?,
            outputs: Matrix::stack(self.stream, &outputs)?,
            series,
            indexer: self.run_indexer(layer, of)?,
            index_key,
        })
    }

    /// Inputs of the layer's own compressed keys and of their index keys, or the matrix from one to
    /// the other.
    fn run_inputs(
        &self,
        layer: usize,
        of: paceline_model::Compressed,
    ) -> Result<(Vec<KeySeries>, Option<WithVector>), Error> {
        let dim = self.config.layers[layer].head_dim;
        let Some(runs) = of.runs.filter(|runs| runs.of.is_none()) else {
            return Ok((Vec::new(), None));
        };
        let mut series = vec![self.key_series(layer, (runs, dim), (of.is_rounded, false))?];
        let n = runs.index_dim;
        if n > 0 && !of.is_rounded {
            series.push(self.key_series(layer, (runs, n), (false, true))?);
        }
        let index_key = (n > 0 && of.is_rounded).then(|| {
            let role = |part| Role::Layer(layer, part);
            let key = self.rows(role(LayerRole::IndexerKey), [n, dim], 0..n)?;
            let norm = self.wide(&self.names.norm(role(LayerRole::IndexerNorm), n)?)?;
            Ok::<_, Error>((key, norm))
        });
        Ok((series, index_key.transpose()?))
    }

    fn run_indexer(
        &self,
        layer: usize,
        of: paceline_model::Compressed,
    ) -> Result<Option<WithVector>, Error> {
        let Some(own) = of.runs.and_then(|runs| runs.indexer) else {
            return Ok(None);
        };
        let role = |part| Role::Layer(layer, part);
        let all = [own.heads * own.dim, of.query_rank];
        let queries = self.rows(role(LayerRole::IndexerQuery), all, 0..all[0])?;
        let each = [own.heads, self.config.width];
        let whole = 0..own.heads;
        let weights = role(LayerRole::IndexerWeights);
        let weights = self.wide_rows(weights, each, std::slice::from_ref(&whole))?;
        Ok(Some((queries, weights)))
    }

    /// Inputs of compressed keys of `dim` elements, or of index keys.
    fn key_series(
        &self,
        layer: usize,
        (runs, dim): (KeyRuns, usize),
        (is_rounded, is_index): (bool, bool),
    ) -> Result<KeySeries, Error> {
        let n = if runs.overlaps { 2 * dim } else { dim };
        let role = |part: fn(bool) -> LayerRole| Role::Layer(layer, part(is_index));
        let rows = |role| self.rows(role, [n, self.config.width], 0..n);
        let mut linears = vec![rows(role(LayerRole::RunInput))?];
        if runs.len > 1 {
            linears.push(rows(role(LayerRole::RunGate))?);
        }
        let bias = match is_rounded {
            true => vec![0.0; runs.len * n],
            false => self.names.table(role(LayerRole::RunBias), [runs.len, n])?,
        };
        let sizes = [1, runs.len as i32, n as i32];
        Ok(KeySeries {
            linears,
            bias: self.stream.array_f32(&bias, &sizes)?,
            norm: self.wide(&self.names.norm(role(LayerRole::RunNorm), dim)?)?,
        })
    }
}
