//! Arrays and tables that follow from a model's configuration, and that all steps use.

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::{Config, Error, Kinds, LayerCache, LayerCut, LayerShape, Shard};

use super::cache::SpanKind;
use super::gates::Gates;
use super::step::Triangles;

/// Arrays and tables that follow from the configuration.
#[derive(Debug)]
pub(super) struct Constants {
    pub(super) gates: Gates,
    pub(super) embedding_scale: Array,
    /// Each once.
    pub(super) span_kinds: Vec<SpanKind>,
    /// Which of them a layer of the whole model has; unused where it has no keys.
    pub(super) span_kind_of: Vec<usize>,
    /// Which of them compressed keys have; unused without these.
    pub(super) entries_kind: usize,
    /// Of each layer held, the query heads of each KV head that this rank holds; empty when all
    /// have as many.
    pub(super) groups: Vec<Vec<Range<i32>>>,
    /// Which pages a layer of the whole model has.
    pub(super) kinds: Kinds,
    /// For the rows of a page of delta nets.
    pub(super) triangles: Triangles,
}

impl Constants {
    /// With lines for the model's owner.
    pub(super) fn new(
        stream: &Stream,
        config: &Config,
        shard: &Shard,
        dtype: Dtype,
    ) -> Result<(Self, Vec<String>), Error> {
        let (gates, notes) = Gates::new(stream, config, dtype)?;
        let kinds = Kinds::new(config);
        let (mut span_kinds, span_kind_of) = span_kinds(config, &kinds);
        let entries_kind = span_kinds.len();
        let mut layers = config.layers.iter();
        if layers.any(|layer| matches!(layer.cache, LayerCache::Compressed(_))) {
            let (kind, window) = (0, None);
            span_kinds.push(SpanKind { kind, window });
        }
        let constants = Self {
            gates,
            embedding_scale: stream.scalar(config.embedding_scale, dtype)?,
            span_kinds,
            span_kind_of,
            entries_kind,
            groups: groups(config, shard),
            kinds,
            triangles: Triangles::new(stream)?,
        };
        Ok((constants, notes))
    }
}

/// See [`Constants::span_kinds`] and [`Constants::span_kind_of`].
fn span_kinds(config: &Config, kinds: &Kinds) -> (Vec<SpanKind>, Vec<usize>) {
    let mut all = Vec::new();
    let of = config.layers.iter().enumerate().map(|(i, layer)| {
        if layer.is_recurrent() {
            return 0;
        }
        let own = SpanKind {
            kind: kinds.of(i),
            window: layer.window,
        };
        let known = all.iter().position(|known| *known == own);
        known.unwrap_or_else(|| {
            all.push(own);
            all.len() - 1
        })
    });
    let of = of.collect();
    (all, of)
}

/// See [`Constants::groups`].
fn groups(config: &Config, shard: &Shard) -> Vec<Vec<Range<i32>>> {
    let layers = config.layers[shard.layers.clone()].iter();
    let layers = layers.zip(shard.each_layer());
    layers.map(|(shape, cut)| groups_of(shape, cut)).collect()
}

fn groups_of(shape: &LayerShape, cut: &LayerCut) -> Vec<Range<i32>> {
    let (group, heads) = (shape.heads / shape.kv_heads, &cut.heads);
    let of = |kv: usize| {
        let start = (kv * group).max(heads.start) - heads.start;
        let end = ((kv + 1) * group).min(heads.end) - heads.start;
        start as i32..end as i32
    };
    let kv_heads = cut.kv_heads.clone().filter(|_| !shape.is_recurrent());
    let groups: Vec<Range<i32>> = kv_heads.map(of).collect();
    let even = groups.iter().all(|g| g.len() == groups[0].len());
    if even { Vec::new() } else { groups }
}
