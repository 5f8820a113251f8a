//! Memory that a shard's weights will take, from the sizes in the file: told before anything is
//! loaded.

use std::ops::Range;

use paceline_base::Bytes;
use paceline_mlx::Dtype;
use paceline_model::backend::{DeltaRowLayout, MatrixRows, WeightReader};
use paceline_model::{
    Compressed, Error, Latent, LayerCache, LayerCut, LayerRole, LayerShape, Nth, Role, Shard,
};

use super::super::stored::Stored;
use super::query_rows;
use super::streams::stream_matrices;

/// A matrix of a layer: its whole shape, and how many of its values this rank holds.
type Held = (LayerRole, [usize; 2], usize);

/// Bytes of matrices.
#[derive(Clone, Debug)]
pub(crate) struct PlannedBytes {
    /// Of each layer.
    pub(crate) layers: Vec<u64>,
    /// Of embeddings and the head.
    pub(crate) tables: u64,
}

impl PlannedBytes {
    pub(crate) fn total(&self) -> Bytes {
        Bytes(self.tables + self.layers.iter().sum::<u64>())
    }
}

/// The bytes of all matrices of `shard`, with up to `slots` experts of a layer. Vectors are
/// negligible.
///
/// # Errors
/// When the file lacks a matrix, or has one of another shape.
pub(crate) fn planned(
    names: &WeightReader<'_>,
    shard: &Shard,
    (tied, dtype): (bool, Dtype),
    slots: usize,
) -> Result<PlannedBytes, Error> {
    let c = names.config;
    let of = |role: Role, shape: [usize; 2], values: usize| {
        let matrix = names.located(role, shape)?;
        Ok::<_, Error>(Stored::bytes_of(&matrix, values as u64, dtype))
    };
    let layer = |(i, cut): (usize, &LayerCut)| {
        let held = held(names, (i, cut), slots);
        let held = held.into_iter();
        let held = held.map(|(part, shape, values)| of(Role::Layer(i, part), shape, values));
        let streams = stream_matrices(c, Some(i), [false; 2]).into_iter();
        let streams = streams.map(|(role, shape)| of(role, shape, shape[0] * shape[1]));
        held.chain(streams).sum::<Result<u64, Error>>()
    };
    let layers = shard.layers.clone().zip(shard.each_layer()).map(layer);
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    let mut sum = 0;
    let table = [c.vocab, c.width];
    let embeds = shard.embeds() || c.per_layer > 0;
    if embeds {
        sum += of(Role::TokenEmbedding, table, c.vocab * c.width)?;
    }
    if c.per_layer > 0 {
        let all = c.per_layer * c.layers.len();
        let mine = c.per_layer * shard.layers.len();
        let shape = [c.per_layer_vocab, all];
        sum += of(Role::PerLayerEmbedding, shape, shape[0] * all)?;
        sum += of(Role::PerLayerProjection, [all, c.width], mine * c.width)?;
    }
    for (role, shape) in stream_matrices(c, None, [shard.embeds(), shard.has_head()]) {
        sum += of(role, shape, shape[0] * shape[1])?;
    }
    let shared = tied && embeds && shard.vocab().len() == c.vocab;
    if shard.has_head() && !shared {
        let role = if tied {
            Role::TokenEmbedding
        } else {
            Role::Output
        };
        sum += of(role, table, shard.vocab().len() * c.width)?;
    }
    Ok(PlannedBytes {
        layers,
        tables: sum,
    })
}

/// The matrices of layer `i`, with up to `slots` experts.
fn held(names: &WeightReader<'_>, (i, cut): (usize, &LayerCut), slots: usize) -> Vec<Held> {
    let (width, per_layer) = (names.config.width, names.config.per_layer);
    let shape = &names.config.layers[i];
    let is_up = |part: &LayerRole| {
        matches!(
            part,
            LayerRole::Up | LayerRole::ExpertUp(_) | LayerRole::SharedUp
        )
    };
    let mut all = mixer(names, (i, cut));
    let outputs = shape.heads * shape.output_dim();
    let columns = cut.attention.columns().len();
    all.push((shape.output_role(), [width, outputs], width * columns));
    if shape.has_dense() {
        let (ffn, values) = (shape.ffn, width * cut.dense().columns().len());
        let [gate, up, down] = shape.dense_roles();
        all.push((gate, [ffn, width], values));
        all.push((up, [ffn, width], values));
        all.push((down, [width, ffn], values));
    }
    if let Some(experts) = shape.experts {
        let mine = cut.ffn();
        let (ffn, of) = (experts.width, experts.count);
        // All experts of a layer are of one type. Some folders' are read for it, so this rank's.
        let first = Nth {
            index: mine.start.min(of - 1),
            of,
        };
        let own = mine.end.min(of).saturating_sub(mine.start);
        let row = experts.row_width(width);
        let values = own.min(slots) * row * ffn;
        all.push((LayerRole::ExpertGate(first), [ffn, row], values));
        all.push((LayerRole::ExpertUp(first), [ffn, row], values));
        all.push((LayerRole::ExpertDown(first), [row, ffn], values));
        if experts.compressed.is_some() {
            all.push((LayerRole::ExpertsDown, [row, width], row * width));
            all.push((LayerRole::ExpertsUp, [width, row], row * width));
        }
        if mine.end > of {
            let (ffn, values) = (experts.shared, experts.shared * width);
            all.push((LayerRole::SharedGate, [ffn, width], values));
            all.push((LayerRole::SharedUp, [ffn, width], values));
            all.push((LayerRole::SharedDown, [width, ffn], values));
        }
    }
    if per_layer > 0 {
        let values = per_layer * width;
        all.push((LayerRole::PerLayerGate, [per_layer, width], values));
        all.push((LayerRole::PerLayerOutput, [width, per_layer], values));
    }
    all.retain(|(part, ..)| names.config.family.has_gates() || !is_up(part));
    all
}

/// The matrices that make queries, keys and values.
fn mixer(names: &WeightReader<'_>, (i, cut): (usize, &LayerCut)) -> Vec<Held> {
    let (shape, width) = (&names.config.layers[i], names.config.width);
    let (heads, kv_heads) = (cut.heads.len(), cut.kv_heads.len());
    if heads == 0 {
        return Vec::new();
    }
    let rows = |part, all: usize, mine: usize| (part, [all, width], mine * width);
    match (shape.cache, shape.latent) {
        (LayerCache::Delta(net), _) => {
            let places = DeltaRowLayout::new(width, shape, cut);
            let all = names.delta_matrices(i, places, net);
            let own = |(part, shape, rows): &MatrixRows| {
                let rows: usize = rows.iter().map(Range::len).sum();
                (*part, *shape, rows * shape[1])
            };
            all.all().map(own).collect()
        }
        (LayerCache::Compressed(of), _) => compressed(width, (shape, heads), of),
        (_, Some(latent)) => latent_matrices(names, (i, heads), latent),
        _ => {
            let [query, key, value] = shape.input_roles();
            let query = rows(
                query,
                query_rows(shape, shape.heads),
                query_rows(shape, heads),
            );
            let of_kv = |part, dim: usize| rows(part, shape.kv_heads * dim, kv_heads * dim);
            let key = shape.has_keys().then(|| of_kv(key, shape.head_dim));
            let value = shape.has_values().then(|| of_kv(value, shape.value_dim));
            [Some(query), key, value].into_iter().flatten().collect()
        }
    }
}

/// Matrices of attention to compressed keys, of `heads` heads. Inputs of such keys are narrow.
fn compressed(width: usize, (shape, heads): (&LayerShape, usize), of: Compressed) -> Vec<Held> {
    let rows = |part, all: usize, mine: usize| (part, [all, width], mine * width);
    let (dim, all) = (shape.head_dim, shape.heads * shape.head_dim);
    let each = shape.heads / of.groups;
    let outputs = [of.groups * of.group_rank, each * dim];
    let mine = heads / each * of.group_rank * outputs[1];
    vec![
        rows(LayerRole::QueryDown, of.query_rank, of.query_rank),
        (
            LayerRole::QueryUp,
            [all, of.query_rank],
            heads * dim * of.query_rank,
        ),
        rows(LayerRole::Key, dim, dim),
        (LayerRole::GroupOutput, outputs, mine),
    ]
}

/// Matrices of latent attention in layer `i`, of `heads` heads.
fn latent_matrices(
    names: &WeightReader<'_>,
    (i, heads): (usize, usize),
    latent: Latent,
) -> Vec<Held> {
    let (shape, width) = (&names.config.layers[i], names.config.width);
    let rows = |part, all: usize, mine: usize| (part, [all, width], mine * width);
    let (query, all) = (latent.query_dim() * heads, latent.query_dim() * shape.heads);
    let down = latent.key_dim();
    let mut held = vec![rows(LayerRole::LatentDown, down, down)];
    match latent.query_rank {
        Some(rank) => {
            held.push(rows(LayerRole::QueryDown, rank, rank));
            held.push((LayerRole::QueryUp, [all, rank], query * rank));
        }
        None => held.push(rows(LayerRole::Query, all, query)),
    }
    let (keys, values) = (latent.plain, latent.value_dim);
    if latent.gated {
        let gates = rows(
            LayerRole::AttentionGate,
            shape.heads * values,
            heads * values,
        );
        held.push(gates);
    }
    let joined = Role::Layer(i, LayerRole::LatentUp);
    if names.source.has_any(names.config.family, joined) {
        let all = [shape.heads * (keys + values), latent.rank];
        let mine = heads * (keys + values) * latent.rank;
        held.push((LayerRole::LatentUp, all, mine));
    } else {
        let nth = Nth {
            index: 0,
            of: shape.heads,
        };
        let (rank, mine) = (latent.rank, heads * latent.rank);
        held.push((LayerRole::KeyUp(nth), [rank, keys], mine * keys));
        held.push((LayerRole::ValueUp(nth), [values, rank], mine * values));
    }
    held
}
