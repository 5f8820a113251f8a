//! LoRA adapters: pairs of small matrices whose scaled product is added to a matrix product.
//!
//! The packed base weights stay unchanged. `step::adapted` computes the products; this module
//! loads, checks and shards the pairs.
//!
//! ```text
//! y = W x + bias + scale B (A x)     A (r, in), B (out, r)
//! ```
//! **Definition.** Each element of `A x` is a chain of fused multiply-adds over the inputs from 0,
//! in f32, in every kernel class. Where the ranks of a stage split the inputs (attention output,
//! down), each leaf of the sum has its own chain. The tree adds the leaves. So each row and root
//! carries `r` more values over the link. The scaled sum continues from `y` as a chain over `r`.
//! Threads, batch, split and instruction set change no bit.
//!
//! The adapters of one base model are numbered from 1; 0 is the base alone. Each sequence of a
//! batch names its own adapter ([`BatchSequence::adapter`](crate::BatchSequence::adapter)).

pub mod files;

use std::collections::HashMap;
use std::ops::Range;

use paceline_base::Bytes;
use paceline_tensor::RopePairs;

use crate::split::Shard;
use crate::{Activation, Config, Error, LayerCache, LayerRole, LayerShape, ModelSource};

/// Maximum adapters of a model. A plan has one word for the adapter of each sequence, and every
/// adapter is resident in memory.
pub const ADAPTERS_MAX: usize = 256;

/// An adapter of a whole model, as its files store it: rows of queries and keys are in Hugging Face
/// order.
#[derive(Clone, Debug)]
pub struct Adapter {
    pub id: AdapterId,
    /// Factor of each pair's product.
    pub scale: f32,
    /// In any order, at most one for each matrix.
    pub pairs: Vec<AdapterPair>,
}

/// Identity of an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterId {
    /// Requests select the adapter by this name.
    pub name: String,
    /// SHA-256 of the values: equal for the same adapter in another file format or under another
    /// name.
    pub digest: [u8; 32],
}

/// The `A` and `B` matrices for one weight matrix.
#[derive(Clone, Debug)]
pub struct AdapterPair {
    /// Layer of the matrix.
    pub layer: usize,
    /// Which matrix of the layer. Of experts the index counts, and not how many there are.
    pub part: LayerRole,
    /// Inner dimension.
    pub rank: usize,
    /// `(rank, in)`
    pub a: Vec<f32>,
    /// `(out, rank)`
    pub b: Vec<f32>,
}

/// A rank's part of a pair, transposed so that kernels read consecutive lanes.
#[derive(Debug)]
pub(crate) struct AdapterShard {
    pub(crate) rank: usize,
    pub(crate) scale: f32,
    /// `(in, rank)`: this rank's inputs.
    pub(crate) a: Vec<f32>,
    /// `(rank, out)`: this rank's outputs.
    pub(crate) b: Vec<f32>,
}

impl AdapterShard {
    /// Length of this rank's part of the output.
    pub(crate) const fn outputs(&self) -> usize {
        self.b.len() / self.rank
    }
}

/// A rank's adapter parts for one layer.
type LayerAdapters = HashMap<LayerRole, AdapterShard>;

/// A rank's parts of all adapters.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    ids: Vec<AdapterId>,
    first_layer: usize,
    /// By adapter, then by layer of this rank.
    each: Vec<Vec<LayerAdapters>>,
}

impl Adapters {
    /// The parts of `adapters` that a rank needs.
    ///
    /// # Errors
    /// [`Error::Adapter`] for one that does not fit the model, [`Error::Adapters`] for too many.
    pub(crate) fn new(
        source: &ModelSource,
        config: &Config,
        shard: &Shard,
        adapters: &[Adapter],
    ) -> Result<Self, Error> {
        let (got, most) = (adapters.len(), ADAPTERS_MAX);
        if got > most {
            return Err(Error::Adapters { got, most });
        }
        // GGUF files store the rows of heads in rotation order.
        let turned = matches!(source, ModelSource::Gguf(_));
        let of = |adapter: &Adapter| {
            adapter.check(config)?;
            let mut layers: Vec<LayerAdapters> = shard
                .layers
                .clone()
                .map(|_| LayerAdapters::default())
                .collect();
            for pair in adapter
                .pairs
                .iter()
                .filter(|pair| pair.is_of(config, shard))
            {
                let held = pair.held(adapter.scale, (config, shard), turned);
                layers[pair.layer - shard.layers.start].insert(pair.part.uncounted(), held);
            }
            Ok::<_, Error>(layers)
        };
        Ok(Self {
            ids: adapters.iter().map(|adapter| adapter.id.clone()).collect(),
            first_layer: shard.layers.start,
            each: adapters.iter().map(of).collect::<Result<_, _>>()?,
        })
    }

    /// Identities, in the order of adapter numbers.
    pub(crate) fn ids(&self) -> &[AdapterId] {
        &self.ids
    }

    /// This rank's part of the pair for one matrix; `adapter` counts from 0.
    pub(crate) fn held(
        &self,
        adapter: usize,
        (layer, part): (usize, LayerRole),
    ) -> Option<&AdapterShard> {
        self.each[adapter][layer - self.first_layer].get(&part.uncounted())
    }

    /// Largest rank of the pairs whose inputs are split over ranks; 0 without any.
    pub(crate) fn summed_rank_max(&self) -> usize {
        let summed = [LayerRole::AttentionOutput, LayerRole::Down];
        let layers = self.each.iter().flatten();
        let pairs = layers.flat_map(|layer| summed.map(|part| layer.get(&part)));
        pairs.flatten().map(|held| held.rank).max().unwrap_or(0)
    }

    /// Memory of all of them.
    pub(crate) fn bytes(&self) -> Bytes {
        let pairs = self.each.iter().flatten().flat_map(HashMap::values);
        let numbers: usize = pairs.map(|held| held.a.len() + held.b.len()).sum();
        Bytes((numbers * size_of::<f32>()) as u64)
    }
}

impl Adapter {
    /// Checks the pairs against the model's layers and shapes.
    ///
    /// # Errors
    /// [`Error::Adapter`] with the first pair that does not fit.
    pub fn check(&self, config: &Config) -> Result<(), Error> {
        let wrong = |reason: String| Error::Adapter {
            name: self.id.name.clone(),
            reason,
        };
        if config.family.joins_qkv() {
            let reason = "the model has queries, keys and values in one matrix";
            return Err(wrong(reason.to_owned()));
        }
        let is_gated = config.activation != Activation::ReluSquared;
        for pair in &self.pairs {
            let place = format!("layer {}, {:?}", pair.layer, pair.part);
            let shape = config.layers.get(pair.layer);
            let sizes = shape
                .filter(|_| is_gated || pair.part.expert_among(0).is_none())
                .and_then(|shape| sizes(config.width, shape, pair.part));
            let Some([out, inputs]) = sizes else {
                return Err(wrong(format!("{place}: the model has no such matrix")));
            };
            let r = pair.rank;
            if r == 0 || pair.a.len() != r * inputs || pair.b.len() != out * r {
                let (a, b) = (pair.a.len(), pair.b.len());
                return Err(wrong(format!(
                    "{place}: {a} and {b} numbers of rank {r}, the model's matrix is [{out}, \
                     {inputs}]"
                )));
            }
            if !pair.a.iter().chain(&pair.b).all(|x| x.is_finite()) {
                return Err(wrong(format!("{place}: a number is infinite or NaN")));
            }
        }
        Ok(())
    }
}

impl AdapterPair {
    /// Whether a rank computes with the pair: it has the layer, and the expert.
    fn is_of(&self, config: &Config, shard: &Shard) -> bool {
        let Some(experts) = config.layers[self.layer].experts else {
            return shard.layers.contains(&self.layer);
        };
        let expert = self.part.expert_among(experts.count);
        shard.layers.contains(&self.layer)
            && expert.is_none_or(|own| shard.layer(self.layer).ffn().contains(&own))
    }

    /// This rank's part of the pair. The pair must have passed [`Adapter::check`].
    fn held(&self, scale: f32, (config, shard): (&Config, &Shard), turned: bool) -> AdapterShard {
        let (r, shape) = (self.rank, &config.layers[self.layer]);
        let cut = shard.layer(self.layer);
        let inputs = self.a.len() / r;
        let of_heads = |heads: &Range<usize>, dim: usize| heads.start * dim..heads.end * dim;
        let (rows, cols) = match self.part {
            LayerRole::Query => (of_heads(&cut.heads, shape.head_dim), 0..inputs),
            LayerRole::Key => (of_heads(&cut.kv_heads, shape.head_dim), 0..inputs),
            LayerRole::Value => (of_heads(&cut.kv_heads, shape.value_dim), 0..inputs),
            LayerRole::AttentionOutput => (0..config.width, cut.attention.columns()),
            LayerRole::Down => (0..config.width, cut.dense().columns()),
            LayerRole::Gate | LayerRole::Up => (cut.dense().columns(), 0..inputs),
            _ => (0..self.b.len() / r, 0..inputs),
        };
        let is_rotated = matches!(self.part, LayerRole::Query | LayerRole::Key);
        let adjacent = config.ropes[shape.rope].pairs == RopePairs::Adjacent;
        let head_dim = (turned && is_rotated && adjacent).then_some(shape.head_dim);
        let row = |row: usize| adapter_row(row, head_dim) * r;
        AdapterShard {
            rank: r,
            scale,
            a: cols
                .flat_map(|col| (0..r).map(move |i| self.a[i * inputs + col]))
                .collect(),
            b: (0..r)
                .flat_map(|i| rows.clone().map(move |out| self.b[row(out) + i]))
                .collect(),
        }
    }
}

/// Maps a row of the model file to the row of the adapter. With `head_dim`, the file interleaves
/// the two halves of each head, and the adapter stores the halves one after the other. The inverse
/// of llama.cpp's `permute`.
const fn adapter_row(row: usize, head_dim: Option<usize>) -> usize {
    match head_dim {
        None => row,
        Some(size) => {
            let (head, i) = (row / size, row % size);
            head * size + i / 2 + (i % 2) * (size / 2)
        }
    }
}

/// Outputs and inputs of a matrix of a layer. `None` where the layer has no such matrix, or
/// computes it by a path without adapters.
fn sizes(width: usize, shape: &LayerShape, part: LayerRole) -> Option<[usize; 2]> {
    let has_heads = matches!(
        shape.cache,
        LayerCache::Rows | LayerCache::Of(_) | LayerCache::State(_)
    );
    let is_plain = shape.latent.is_none() && !shape.gated && has_heads;
    let of = |there: bool, out: usize, inputs: usize| there.then_some([out, inputs]);
    let (heads, kv) = (shape.heads, shape.kv_heads);
    match part {
        LayerRole::Query => of(is_plain, heads * shape.head_dim, width),
        LayerRole::Key => of(is_plain && shape.has_keys(), kv * shape.head_dim, width),
        LayerRole::Value => of(is_plain && shape.has_values(), kv * shape.value_dim, width),
        LayerRole::AttentionOutput => of(has_heads, width, heads * shape.output_dim()),
        LayerRole::Gate | LayerRole::Up => of(shape.has_dense(), shape.ffn, width),
        LayerRole::Down => of(shape.has_dense(), width, shape.ffn),
        _ => expert_sizes(width, shape, part),
    }
}

/// The same of a matrix of an expert.
fn expert_sizes(width: usize, shape: &LayerShape, part: LayerRole) -> Option<[usize; 2]> {
    let of = shape.experts?;
    let expert = part.expert_among(of.count)?;
    let ffn = if expert < of.count {
        of.width
    } else {
        of.shared
    };
    let is_there = expert < of.count || expert == of.count && of.shared > 0;
    let is_down = matches!(part, LayerRole::ExpertDown(_) | LayerRole::SharedDown);
    is_there.then_some(if is_down { [width, ffn] } else { [ffn, width] })
}

#[cfg(test)]
mod tests {
    use super::adapter_row;
    use super::files::file_row;

    #[test]
    fn rows_of_heads_are_turned_back() {
        for size in [2, 4, 64].map(Some) {
            for row in 0..3 * 64 {
                assert_eq!(file_row(adapter_row(row, size), size), row);
            }
        }
        assert_eq!(adapter_row(7, None), 7);
    }
}
