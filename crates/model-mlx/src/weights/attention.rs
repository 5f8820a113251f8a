//! Weights of attention by heads, this rank's.

use std::ops::Range;

use paceline_mlx::Array;
use paceline_model::{Error, LayerRole, Role};

use super::super::matrix::Linear;
use super::{Loader, PoolIndexer, query_rows};

/// Attention over keys and values of each KV head, this rank's.
#[derive(Debug)]
pub(crate) struct Attention {
    pub(crate) query: Linear,
    /// None where it uses another layer's.
    pub(crate) key: Option<Linear>,
    /// None where it uses another layer's, or its keys.
    pub(crate) value: Option<Linear>,
    pub(crate) query_norm: Option<Array>,
    pub(crate) key_norm: Option<Array>,
    /// `(E,)`: ones, where values have a norm.
    pub(crate) value_norm: Option<Array>,
    /// `(H,)`
    pub(crate) sinks: Option<Array>,
    /// `None` where rows attend to all positions.
    pub(crate) pooled: Option<PoolIndexer>,
}

impl Attention {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let linears = [Some(&self.query), self.key.as_ref(), self.value.as_ref()];
        let vectors = [
            &self.query_norm,
            &self.key_norm,
            &self.value_norm,
            &self.sinks,
        ];
        let linears = linears.into_iter().flatten().flat_map(Linear::arrays);
        let pooled = self.pooled.iter().flat_map(PoolIndexer::arrays);
        let vectors = vectors.into_iter().flatten();
        linears.chain(vectors).chain(pooled).collect()
    }
}

impl Loader<'_> {
    pub(super) fn attention(&self, i: usize) -> Result<Attention, Error> {
        let (c, shape, cut) = (self.config, &self.config.layers[i], self.shard.layer(i));
        let rows = |part, all, mine| self.rows(Role::Layer(i, part), [all, c.width], mine);
        let of_kv = |there: bool, part, dim: usize| {
            let mine = cut.kv_heads.start * dim..cut.kv_heads.end * dim;
            let own = || rows(part, shape.kv_heads * dim, mine);
            there.then(own).transpose()
        };
        let queries = query_rows(shape, cut.heads.start)..query_rows(shape, cut.heads.end);
        let [query_norm, key_norm] = self.query_key_norms(i)?;
        let ones = || self.floats(&vec![1.0; shape.value_dim]);
        Ok(Attention {
            query: rows(LayerRole::Query, query_rows(shape, shape.heads), queries)?,
            key: of_kv(shape.has_keys(), LayerRole::Key, shape.head_dim)?,
            value: of_kv(shape.has_values(), LayerRole::Value, shape.value_dim)?,
            query_norm,
            key_norm,
            value_norm: shape.value_norm.then(ones).transpose()?,
            sinks: self.sinks(i)?,
            pooled: self.pool_indexer(i)?,
        })
    }

    /// The norms on queries and keys: of a head, or this rank's part of those over all heads.
    fn query_key_norms(&self, i: usize) -> Result<[Option<Array>; 2], Error> {
        let (shape, cut) = (&self.config.layers[i], self.shard.layer(i));
        let (role, dim) = (|part| Role::Layer(i, part), shape.head_dim);
        if self.config.family.norms_projections() {
            let of = |part, all: usize, mine: &Range<usize>| {
                let whole = self.names.norm(role(part), all * dim)?;
                self.floats(&whole[mine.start * dim..mine.end * dim])
            };
            return Ok([
                Some(of(LayerRole::QueryNorm, shape.heads, &cut.heads)?),
                Some(of(LayerRole::KeyNorm, shape.kv_heads, &cut.kv_heads)?),
            ]);
        }
        let there = self.names.norms_heads(i)?;
        let of = |there: bool, part| there.then(|| self.norm(role(part), dim)).transpose();
        Ok([
            of(there, LayerRole::QueryNorm)?,
            of(there && shape.has_kv(), LayerRole::KeyNorm)?,
        ])
    }

    /// The sinks of this rank's heads.
    pub(super) fn sinks(&self, i: usize) -> Result<Option<Array>, Error> {
        if !self.config.family.has_sinks() {
            return Ok(None);
        }
        let heads = self.shard.layer(i).heads.clone();
        let role = Role::Layer(i, LayerRole::Sinks);
        let all = self.names.finite(role, self.config.layers[i].heads)?;
        self.floats(&all[heads]).map(Some)
    }
}
