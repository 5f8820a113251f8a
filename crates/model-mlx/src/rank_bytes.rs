//! Bytes that a rank takes on MLX, known from the file's header: weights, cache and a step.

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_mlx::Dtype;
use paceline_model::backend::WeightReader;
use paceline_model::{
    BatchSize, Compressed, Config, Error, Experts, Kinds, LayerCache, LayerCut, LayerShape,
    ModelSource, Shard, Split,
};
use paceline_tensor::{KvType, PAGE};

use super::cache::{self, LayerSizes, PooledSizes, RecurrentSizes, StateSizes, bits_of};
use super::step::entry_rows;
use super::weights::{self, BLOCKS, RingPlan};

/// The most positions, in whole pages and fewer than `positions`, for which `fits` holds; 0 if for
/// none. It holds for all fewer.
pub(super) fn most_fitting(positions: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut fitting, mut more) = (0, positions.div_ceil(PAGE));
    while fitting + 1 < more {
        let middle = fitting.midpoint(more);
        match fits(middle * PAGE) {
            true => fitting = middle,
            false => more = middle,
        }
    }
    fitting * PAGE
}

/// Values of a row in passing: the residual streams, their norm and sum; queries, keys, values and
/// scores. Gate, up and their product follow, of every expert that a row has. Logits are small in
/// comparison: one row for each sequence.
fn widest(c: &Config, shard: &Shard) -> usize {
    let shapes = c.layers[shard.layers.clone()].iter();
    let widths = shapes.zip(shard.each_layer()).map(|(shape, cut)| {
        let heads = cut.heads.len() * shape.head_dim.max(shape.value_dim);
        let dense = match shape.has_dense() {
            true => cut.dense().columns().len(),
            false => 0,
        };
        let of_experts = |experts: Experts| experts.used * (3 * experts.width + 2 * c.width);
        4 * (heads + dense) + shape.experts.map_or(0, of_experts)
    });
    4 * c.residual_width() + widths.max().unwrap_or(0)
}

/// The type of activations, and the bits of quantised keys and values.
pub(super) type CacheType = (Dtype, Option<usize>);

/// Sizes of the caches of `shard`'s layers, for steps of up to `size` and `positions` positions.
pub(super) fn cache_shape(
    c: &Config,
    shard: &Shard,
    (size, positions): (BatchSize, usize),
    (dtype, bits): CacheType,
) -> cache::Shape {
    let kinds = Kinds::new(c);
    let pages = kinds.pages(size, positions);
    let layers = shard.layers.clone().zip(shard.each_layer());
    let layers = layers.map(|(i, cut)| (layer_sizes(&c.layers[i], cut), pages[kinds.of(i)]));
    // Compressed keys of all layers follow, in pages that keep all positions.
    let has_entries = c.layers.iter().any(|layer| compressed_of(layer).is_some());
    let entries = shard.layers.clone().zip(shard.each_layer());
    let entries = entries.filter(|_| has_entries);
    let entries = entries.map(|(i, cut)| (entry_sizes(&c.layers[i], cut), pages[0]));
    cache::Shape {
        layers: layers.chain(entries).collect(),
        dtype,
        bits,
    }
}

/// Bytes of a layer without its matrices in a model of `width`. They are eight vectors in f32, and
/// half of 4 KiB for each of some 60 arrays on disk.
const fn beside(width: usize) -> u64 {
    32 * width as u64 + (120 << 10)
}

/// The part of a rank's weights that is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// All in memory.
    Whole,
    /// All but experts, which have this many slots in each layer.
    Slots(usize),
    /// Some layers; the others are read in each step.
    Ring(RingPlan),
}

/// Bytes of a rank on MLX.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MlxRankBytes {
    /// Weights in MLX's form.
    pub weights: Bytes,
    /// Keys, values and states.
    pub cache: Bytes,
    /// Results of one step.
    pub step: Bytes,
}

impl MlxRankBytes {
    /// Of `shard` in `class`, for steps of `size` that capture the input of layers. The context of
    /// `size` is the positions of all sequences. Reads headers only. The rank's worker admits it by
    /// the same sum.
    ///
    /// # Errors
    /// The files lack a matrix, or it has another shape.
    pub fn planned(
        (source, config): (&ModelSource, &Config),
        shard: &Shard,
        (class, kv): (KernelClass, Option<KvType>),
        (size, captures): (BatchSize, &[usize]),
    ) -> Result<Self, Error> {
        let names = WeightReader { source, config };
        let tied = names.is_tied()?;
        let dtype = weights::activations(&names, config.family, class)?;
        let all = Self::of(&names, shard, size, (tied, (dtype, bits_of(kv))))?;
        Ok(all.capturing((config, shard), size.rows, captures))
    }

    /// With the rows that a step captures for a draft head, in this stage or before it.
    pub(super) fn capturing(
        self,
        (config, shard): (&Config, &Shard),
        rows: usize,
        captures: &[usize],
    ) -> Self {
        let end = shard.layers.end + usize::from(shard.has_head());
        let held = config
            .captures(captures)
            .partition_point(|layer| *layer < end);
        let step = Bytes(self.step.0 + 4 * (held * rows * config.width) as u64);
        Self { step, ..self }
    }

    pub(super) fn of(
        names: &WeightReader<'_>,
        shard: &Shard,
        size: BatchSize,
        (tied, cached): (bool, CacheType),
    ) -> Result<Self, Error> {
        let c = names.config;
        Ok(Self {
            weights: weights::planned(names, shard, (tied, cached.0), usize::MAX)?.total(),
            cache: Bytes(cache_shape(c, shard, (size, size.context), cached).bytes()),
            step: Bytes(4 * (size.rows * widest(c, shard) + shard.vocab().len()) as u64),
        })
    }

    /// As [`of`](Self::of) within `memory`: experts in slots, else layers in a ring, where not all
    /// fit.
    ///
    /// # Errors
    /// [`Error::StreamMemory`] without room for a token's experts, or for some layers.
    pub(super) fn within(
        self,
        of: (&WeightReader<'_>, &Shard, (bool, Dtype)),
        memory: Bytes,
    ) -> Result<(Self, Held), Error> {
        if self.total() <= memory {
            return Ok((self, Held::Whole));
        }
        let config = of.0.config;
        let has_biases = config.family.has_sinks_and_biases();
        match config.experts().filter(|_| !has_biases) {
            Some(experts) => self.in_slots(of, experts, memory),
            None => self.in_ring(of, memory),
        }
    }

    /// Each layer with as many slots for experts as there is room for.
    fn in_slots(
        self,
        (names, shard, form): (&WeightReader<'_>, &Shard, (bool, Dtype)),
        of: Experts,
        memory: Bytes,
    ) -> Result<(Self, Held), Error> {
        let with = |slots| {
            let weights = weights::planned(names, shard, form, slots)?.total();
            Ok::<_, Error>(Self { weights, ..self })
        };
        let (none, one) = (with(0)?.total(), with(1)?.total());
        let each = (one.0 - none.0).max(1);
        let slots = (memory.0.saturating_sub(none.0) / each) as usize;
        // A rank may hold fewer experts than a token uses.
        let held = ((self.total().0 - none.0) / each) as usize;
        let least = of.used.min(held.max(1));
        if slots < least {
            let units = Bytes(each * least as u64);
            return Err(Error::StreamMemory {
                given: memory,
                needed: Bytes(none.0 + units.0),
                units,
            });
        }
        Ok((with(slots)?, Held::Slots(slots)))
    }

    /// Layers that stay as far as there is room, and a ring of the others.
    fn in_ring(
        self,
        (names, shard, form): (&WeightReader<'_>, &Shard, (bool, Dtype)),
        memory: Bytes,
    ) -> Result<(Self, Held), Error> {
        let planned = weights::planned(names, shard, form, usize::MAX)?;
        let layers = planned
            .layers
            .iter()
            .map(|bytes| bytes + beside(names.config.width));
        let largest = layers.clone().max().unwrap_or(0);
        // The arrays of the layer that computes.
        let others = planned.tables + self.cache.0 + self.step.0 + largest;
        let least = others + largest;
        if memory.0 < least {
            return Err(Error::StreamMemory {
                given: memory,
                needed: Bytes(least),
                units: Bytes(2 * largest),
            });
        }
        let (mut stay, mut kept) = (0, 0);
        for layer in layers {
            if others + BLOCKS * largest + kept + layer > memory.0 {
                break;
            }
            (stay, kept) = (stay + 1, kept + layer);
        }
        let blocks = ((memory.0 - others - kept) / largest.max(1)).clamp(1, BLOCKS);
        let weights = Bytes(planned.tables + kept + (1 + blocks) * largest);
        Ok((
            Self { weights, ..self },
            Held::Ring(RingPlan { stay, blocks }),
        ))
    }

    /// The same where weights beyond a limit of memory stay on the disk.
    #[must_use]
    pub fn limited(self, memory: Option<Bytes>) -> Self {
        let others = self.cache.0 + self.step.0;
        let most = memory.map_or(u64::MAX, |memory| memory.0.saturating_sub(others));
        let weights = Bytes(self.weights.0.min(most));
        Self { weights, ..self }
    }

    /// All of them.
    pub const fn total(self) -> Bytes {
        Bytes(self.weights.0 + self.cache.0 + self.step.0)
    }
}

/// Bytes that [`PAGE`] more positions take on MLX over all layers, in a long context: layers with
/// a window keep only part of them. `class` computes with 2 bytes a value, or with 4; `kv` has
/// fewer.
pub fn mlx_page_bytes(config: &Config, class: KernelClass, kv: Option<KvType>) -> usize {
    const MANY: usize = 1 << 20;
    let is_wide = class == KernelClass::MlxF32 || config.family.needs_wide_activations();
    let dtype = if is_wide { Dtype::F32 } else { Dtype::F16 };
    let shard = Split::whole(config).shard(config, Rank(0));
    let bytes = |positions| {
        let sizes = (BatchSize::single(1, 1), positions);
        cache_shape(config, &shard, sizes, (dtype, bits_of(kv))).bytes()
    };
    ((bytes(2 * MANY) - bytes(MANY)) / (MANY / PAGE) as u64) as usize
}

/// Attention to compressed keys, if the layer has it.
pub(super) const fn compressed_of(shape: &LayerShape) -> Option<Compressed> {
    match shape.cache {
        LayerCache::Compressed(of) => Some(of),
        _ => None,
    }
}

/// Sizes of a layer's compressed keys, spread over the positions of their runs.
fn entry_sizes(shape: &LayerShape, cut: &LayerCut) -> LayerSizes {
    let of = compressed_of(shape).filter(|of| !cut.heads.is_empty() && !of.uses_earlier());
    let runs = of.and_then(|of| of.runs(shape.head_dim));
    runs.map_or(LayerSizes::Nothing, |runs| {
        LayerSizes::Wide(entry_rows(runs.len, runs.dim + runs.index_dim).1)
    })
}

/// Sizes of one layer's cache.
fn layer_sizes(shape: &LayerShape, cut: &LayerCut) -> LayerSizes {
    let (heads, kv_heads) = (
        cut.heads.end - cut.heads.start,
        cut.kv_heads.end - cut.kv_heads.start,
    );
    let (key, value) = (shape.head_dim, shape.value_dim);
    if heads == 0 {
        return LayerSizes::Nothing;
    }
    match (shape.cache, shape.latent) {
        (LayerCache::Of(_) | LayerCache::State(_), _) => LayerSizes::Nothing,
        (LayerCache::Compressed(of), _) => LayerSizes::Wide(of.row(key)),
        (LayerCache::Conv(_), _) => LayerSizes::Recurrent(RecurrentSizes {
            channels: heads * value,
            state: None,
        }),
        (LayerCache::Delta(net), _) => LayerSizes::Recurrent(RecurrentSizes {
            channels: 2 * kv_heads * key + heads * value,
            state: Some(StateSizes {
                heads,
                key_heads: kv_heads,
                key,
                value,
                decays: net.rule.decays(key),
            }),
        }),
        (LayerCache::Rows, Some(latent)) if latent.has_pools() => LayerSizes::Pooled(PooledSizes {
            heads: 1,
            key,
            value,
            is_latent: true,
            index: latent.index_dim(),
        }),
        (LayerCache::Rows, Some(latent)) => {
            let index = latent.index_dim();
            LayerSizes::Latent {
                key: key + index,
                value,
                index,
            }
        }
        (LayerCache::Rows, None) => match shape.pooled {
            Some(indexer) => LayerSizes::Pooled(PooledSizes {
                heads: kv_heads,
                key,
                value,
                is_latent: false,
                index: indexer.dim,
            }),
            None => LayerSizes::Rows {
                heads: kv_heads,
                key,
                value,
            },
        },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail")]
mod tests {
    use std::path::Path;

    use paceline_model::SplitKind;

    use super::*;

    /// Rows go with the stream from the stage that captures them to the last one.
    #[test]
    fn captured_rows_count_where_they_are_held() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/hf");
        let source = ModelSource::open(&golden.join("llama-untied-bf16")).unwrap();
        let config = Config::read(&source).unwrap();
        let split = Split::plan(&config, SplitKind::Pipeline, 3, &[]).unwrap();
        let held = |rank, captures: &[usize]| {
            let shard = split.shard(&config, Rank(rank));
            let bytes = MlxRankBytes::default().capturing((&config, &shard), 8, captures);
            bytes.step.0 / (4 * 8 * config.width as u64)
        };
        let layers = config.layers.len();
        assert_eq!([0, 1, 2].map(|rank| held(rank, &[0, 1, layers])), [1, 2, 3]);
        assert_eq!([0, 1, 2].map(|rank| held(rank, &[])), [0; 3]);
    }
}
