//! Bytes that a rank takes on MLX, known from the file's header: weights, cache and a step.

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_mlx::Dtype;
use paceline_model::backend::WeightReader;
use paceline_model::{
    BatchSize, Config, Error, Experts, Kinds, LayerCache, LayerCut, LayerShape, ModelSource, Shard,
    Split,
};
use paceline_tensor::PAGE;

use super::cache::{self, DeltaSizes, LayerSizes};
use super::weights;

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

/// Values of a row in passing: the residual, its norm and sum; queries, keys, values and scores.
/// Gate, up and their product follow, of every expert that a row has. Logits are small in
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
    4 * c.width + widths.max().unwrap_or(0)
}

/// Sizes of the caches of `shard`'s layers, for steps of up to `size` and `positions` positions.
pub(super) fn cache_shape(
    c: &Config,
    shard: &Shard,
    (size, positions): (BatchSize, usize),
    dtype: Dtype,
) -> cache::Shape {
    let kinds = Kinds::new(c);
    let pages = kinds.pages(size, positions);
    let layers = shard.layers.clone().zip(shard.each_layer());
    let layers = layers.map(|(i, cut)| (layer_sizes(&c.layers[i], cut), pages[kinds.of(i)]));
    cache::Shape {
        layers: layers.collect(),
        dtype,
    }
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
    /// Of `shard` in `class`, for steps of `size`; its context is the positions of all sequences.
    /// Reads headers only. The rank's worker admits it by the same sum.
    ///
    /// # Errors
    /// The files lack a matrix, or it has another shape.
    pub fn planned(
        (source, config): (&ModelSource, &Config),
        shard: &Shard,
        class: KernelClass,
        size: BatchSize,
    ) -> Result<Self, Error> {
        let names = WeightReader { source, config };
        let tied = names.is_tied()?;
        let dtype = weights::activations(&names, config.family, class)?;
        Self::of(&names, shard, size, (tied, dtype))
    }

    pub(super) fn of(
        names: &WeightReader<'_>,
        shard: &Shard,
        size: BatchSize,
        (tied, dtype): (bool, Dtype),
    ) -> Result<Self, Error> {
        let c = names.config;
        Ok(Self {
            weights: weights::planned(names, shard, (tied, dtype), usize::MAX)?,
            cache: Bytes(cache_shape(c, shard, (size, size.context), dtype).bytes()),
            step: Bytes(4 * (size.rows * widest(c, shard) + shard.vocab().len()) as u64),
        })
    }

    /// As [`of`](Self::of) within `memory`: with the slots for experts of each layer that this
    /// leaves, or `None` where all of them fit.
    ///
    /// # Errors
    /// [`Error::StreamEngine`] for a model that does not fit and has no experts, or some with
    /// biases; [`Error::StreamMemory`] without room for a token's experts.
    pub(super) fn within(
        self,
        (names, shard, form): (&WeightReader<'_>, &Shard, (bool, Dtype)),
        memory: Bytes,
    ) -> Result<(Self, Option<usize>), Error> {
        if self.total() <= memory {
            return Ok((self, None));
        }
        let has_biases = names.config.family.has_sinks_and_biases();
        let Some(of) = names.config.experts().filter(|_| !has_biases) else {
            return Err(Error::StreamEngine { engine: "mlx" });
        };
        let with = |slots| {
            let weights = weights::planned(names, shard, form, slots)?;
            Ok::<_, Error>(Self { weights, ..self })
        };
        let (none, one) = (with(0)?.total(), with(1)?.total());
        let each = (one.0 - none.0).max(1);
        let slots = (memory.0.saturating_sub(none.0) / each) as usize;
        if slots < of.used {
            let units = Bytes(each * of.used as u64);
            return Err(Error::StreamMemory {
                given: memory,
                needed: Bytes(none.0 + units.0),
                units,
            });
        }
        Ok((with(slots)?, Some(slots)))
    }

    /// All of them.
    pub const fn total(self) -> Bytes {
        Bytes(self.weights.0 + self.cache.0 + self.step.0)
    }
}

/// Bytes that [`PAGE`] more positions take on MLX over all layers, in a long context: layers with
/// a window keep only part of them. `class` computes with 2 bytes a value, or with 4.
pub fn mlx_page_bytes(config: &Config, class: KernelClass) -> usize {
    const MANY: usize = 1 << 20;
    let is_wide = class == KernelClass::MlxF32 || config.family.needs_wide_activations();
    let dtype = if is_wide { Dtype::F32 } else { Dtype::F16 };
    let shard = Split::whole(config).shard(config, Rank(0));
    let bytes = |positions| {
        let sizes = (BatchSize::single(1, 1), positions);
        cache_shape(config, &shard, sizes, dtype).bytes()
    };
    ((bytes(2 * MANY) - bytes(MANY)) / (MANY / PAGE) as u64) as usize
}

/// Sizes of one layer's cache.
const fn layer_sizes(shape: &LayerShape, cut: &LayerCut) -> LayerSizes {
    let (heads, kv_heads) = (
        cut.heads.end - cut.heads.start,
        cut.kv_heads.end - cut.kv_heads.start,
    );
    let (key, value) = (shape.head_dim, shape.value_dim);
    if heads == 0 {
        return LayerSizes::Nothing;
    }
    match (shape.cache, shape.latent) {
        (
            LayerCache::Of(_)
            | LayerCache::State(_)
            | LayerCache::Conv(_)
            | LayerCache::Compressed(_),
            _,
        ) => LayerSizes::Nothing,
        (LayerCache::Delta(_), _) => {
            let of = DeltaSizes {
                heads,
                key_heads: kv_heads,
                key,
                value,
                channels: 2 * kv_heads * key + heads * value,
            };
            LayerSizes::Delta(of)
        }
        (LayerCache::Rows, Some(latent)) => {
            let index = latent.index_dim();
            LayerSizes::Latent {
                key: key + index,
                value,
                index,
            }
        }
        (LayerCache::Rows, None) => LayerSizes::Rows {
            heads: kv_heads,
            key,
            value,
        },
    }
}
