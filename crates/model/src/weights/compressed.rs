//! Weights of attention to compressed keys: parts that every rank of a stage has, and the queries
//! and outputs of its own heads.

use paceline_tensor::PackedMatrix;

use super::{Linear, ShardLoader};
use crate::config::{self, KeyRuns};
use crate::{Error, LayerCache, LayerRole, Role};

/// Letters: H heads of D elements in G groups, A elements of a compressed query, R of a group's
/// output.
#[derive(Debug)]
pub(crate) struct Compressed {
    /// `(A, C)`, with the norm `(A,)`.
    pub(crate) query_down: (Linear, Vec<f32>),
    /// `(D, C)`, with the norm `(D,)`.
    pub(crate) key: (Linear, Vec<f32>),
    /// `(R, H D / G)` of each of this rank's groups.
    pub(crate) outputs: Vec<PackedMatrix>,
    /// Of keys, then of index keys.
    pub(crate) series: Vec<KeySeries>,
    /// Queries `(I X, A)` and their weights `(I, C)`, in f32.
    pub(crate) indexer: Option<[Linear; 2]>,
    /// `(X, D)`, from a compressed key to its index key, with the norm `(X,)`.
    pub(crate) index_key: Option<(Linear, Vec<f32>)>,
}

/// Inputs of compressed keys of D elements, N times.
#[derive(Debug)]
pub(crate) struct KeySeries {
    /// Inputs, and gates unless all are 0, `(N D, C)` each.
    pub(crate) linears: Vec<Linear>,
    /// `(run, N D)`: bias of each position's gate.
    pub(crate) bias: Vec<f32>,
    /// `(D,)`
    pub(crate) norm: Vec<f32>,
}

impl Compressed {
    /// Matrices whose input is as wide as the residual.
    pub(crate) fn of_width(&self) -> impl Iterator<Item = &PackedMatrix> {
        let series = self.series.iter().flat_map(|own| &own.linears);
        let weights = self.indexer.iter().map(|[_, weights]| weights);
        let all = [&self.query_down.0, &self.key.0].into_iter();
        all.chain(series).chain(weights).map(|own| &own.matrix)
    }

    /// Matrices whose input is a compressed query, besides the queries of heads.
    pub(crate) fn of_query(&self) -> impl Iterator<Item = &PackedMatrix> {
        self.indexer.iter().map(|[queries, _]| &queries.matrix)
    }
}

impl ShardLoader<'_> {
    /// Queries of this rank's heads, from compressed ones.
    pub(super) fn compressed_query(
        &self,
        layer: usize,
        of: config::Compressed,
    ) -> Result<Linear, Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        let dim = shape.head_dim;
        let mine = cut.heads.start * dim..cut.heads.end * dim;
        let all = [shape.heads * dim, of.query_rank];
        self.rows(Role::Layer(layer, LayerRole::QueryUp), all, mine)
    }

    /// The other weights of attention; `None` in other layers.
    pub(super) fn compressed(&self, layer: usize) -> Result<Option<Box<Compressed>>, Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        let LayerCache::Compressed(of) = shape.cache else {
            return Ok(None);
        };
        let (dim, each) = (shape.head_dim, shape.heads / of.groups);
        let role = |part| Role::Layer(layer, part);
        let down = |part, n| self.rows(role(part), [n, self.config.width], 0..n);
        let norm = |part, n| self.names.norm(role(part), n);
        let groups = cut.heads.start / each..cut.heads.end / each;
        let shape = [of.groups * of.group_rank, each * dim];
        let output = |group: usize| {
            let rows = group * of.group_rank..(group + 1) * of.group_rank;
            self.of_head(role(LayerRole::GroupOutput), shape, rows)
        };
        let indexer = of.runs.and_then(|runs| runs.indexer);
        let mut series = Vec::new();
        let mut index_key = None;
        if let Some(runs) = of.runs.filter(|runs| runs.of.is_none()) {
            series.push(self.key_series(layer, (runs, dim), &of, false)?);
            match runs.index_dim {
                0 => {}
                n if of.is_rounded => {
                    let key = self.rows(role(LayerRole::IndexerKey), [n, dim], 0..n)?;
                    index_key = Some((key, norm(LayerRole::IndexerNorm, n)?));
                }
                n => series.push(self.key_series(layer, (runs, n), &of, true)?),
            }
        }
        let indexer = indexer.map(|own| {
            let (queries, weights) = (
                role(LayerRole::IndexerQuery),
                role(LayerRole::IndexerWeights),
            );
            let all = [own.heads * own.dim, of.query_rank];
            let each = [own.heads, self.config.width];
            self.check_finite(queries, all)?;
            self.check_finite(weights, each)?;
            let matrix = self.whole(weights, each, true)?;
            Ok::<_, Error>([
                self.rows(queries, all, 0..all[0])?,
                Linear { matrix, bias: None },
            ])
        });
        Ok(Some(Box::new(Compressed {
            query_down: (
                down(LayerRole::QueryDown, of.query_rank)?,
                norm(LayerRole::QueryDownNorm, of.query_rank)?,
            ),
            key: (down(LayerRole::Key, dim)?, norm(LayerRole::KeyNorm, dim)?),
            outputs: groups.map(output).collect::<Result<_, _>>()?,
            series,
            index_key,
            indexer: indexer.transpose()?,
        })))
    }

    /// Inputs of the layer's compressed keys, or of its index keys.
    fn key_series(
        &self,
        layer: usize,
        (runs, dim): (KeyRuns, usize),
        of: &config::Compressed,
        is_index: bool,
    ) -> Result<KeySeries, Error> {
        let n = if runs.overlaps { 2 * dim } else { dim };
        let shape = [n, self.config.width];
        let role = |part: fn(bool) -> LayerRole| Role::Layer(layer, part(is_index));
        let rows = |role| {
            self.check_finite(role, shape)?;
            self.rows(role, shape, 0..n)
        };
        let mut linears = vec![rows(role(LayerRole::RunInput))?];
        if runs.len > 1 {
            linears.push(rows(role(LayerRole::RunGate))?);
        }
        Ok(KeySeries {
            linears,
            bias: match of.is_rounded {
                true => vec![0.0; runs.len * n],
                false => self.names.table(role(LayerRole::RunBias), [runs.len, n])?,
            },
            norm: self.names.norm(role(LayerRole::RunNorm), dim)?,
        })
    }
}
