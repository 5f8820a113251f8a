//! Keys and values of 8 or 4 bits: in groups along a head, with a scale and a bias each.
//!
//! A position's groups are of its own values alone, so they do not depend on what is written with
//! it. They are MLX's affine groups, as `QuantizedKVCache` of mlx-lm keeps them. Attention reads
//! them in the type of activations.
//!
//! Heads are [rotated] before, so that a few large values are spread over a group, as on the CPU
//! (`tensor/src/kv.rs`). Products of rotated queries and keys are those of the plain ones.

use paceline_mlx::{Array, Dtype, Quantised, QuantisedMode, Stream};
use paceline_model::{Config, Error, LayerCache};
use paceline_tensor::KvType;

/// Bits of a 32-bit word of packed values.
const WORD: usize = 32;

/// Elements of a group in a head of `dim`: mlx-lm's 64, else 32, which MLX also has. `None` where
/// neither divides it.
fn group_of(dim: usize) -> Option<usize> {
    [64, 32]
        .into_iter()
        .find(|group| dim.is_multiple_of(*group))
}

/// Bits of a value of type `kv`; `None` for a type that is kept as activations are.
pub(crate) const fn bits_of(kv: Option<KvType>) -> Option<usize> {
    match kv {
        Some(KvType::Q8) => Some(8),
        Some(KvType::Q4) => Some(4),
        _ => None,
    }
}

/// Checks that the keys and values of all layers can be of type `kv`.
///
/// # Errors
/// [`Error::KvEngine`].
pub(crate) fn check(config: &Config, kv: Option<KvType>) -> Result<(), Error> {
    let Some(kv) = kv.filter(|kv| kv.is_quantised()) else {
        return Ok(());
    };
    let mut layers = config.layers.iter();
    let reason = layers.find_map(|layer| match (layer.cache, layer.latent) {
        (LayerCache::Rows, Some(_)) => Some("latent attention has keys alone"),
        (LayerCache::Rows, None) if layer.pooled.is_some() => Some("an indexer chooses positions"),
        (LayerCache::Rows, None) => {
            let has_groups = group_of(layer.head_dim).and(group_of(layer.value_dim));
            let is_cut = has_groups.is_none();
            is_cut.then_some("a head is not a multiple of 32 elements")
        }
        _ => None,
    });
    let (engine, kv) = ("mlx", kv.name());
    reason.map_or(Ok(()), |reason| Err(Error::KvEngine { engine, kv, reason }))
}

/// Bytes of a key or value of `dim` elements in `bits` bits, its scales and biases of type `dtype`.
pub(super) fn row_bytes(dim: usize, bits: usize, dtype: Dtype) -> usize {
    let groups = group_of(dim).map_or(0, |group| dim / group);
    dim * bits / 8 + 2 * groups * dtype.bytes()
}

/// Zeros for `rows` rows of `heads` heads of `dim` elements: packed values, scales and biases.
pub(super) fn zeros(
    stream: &Stream,
    [heads, rows, dim]: [usize; 3],
    (bits, dtype): (usize, Dtype),
) -> Result<[Array; 3], Error> {
    let groups = dim / group_of(dim).unwrap_or(dim);
    let part = |columns: usize, dtype| {
        let shape = [1, heads, rows, columns].map(|n| n as i32);
        Ok::<_, Error>(stream.zeros(&shape, dtype)?)
    };
    let factors = || part(groups, dtype);
    Ok([part(dim * bits / WORD, Dtype::U32)?, factors()?, factors()?])
}

/// `new (1, heads, rows, D)` as packed values, scales and biases.
pub(super) fn quantised(stream: &Stream, new: &Array, bits: usize) -> Result<[Array; 3], Error> {
    let dim = new.shape()[3] as usize;
    let group = group_of(dim).unwrap_or(dim);
    Ok(stream.quantise(&rotated(stream, new)?, group as i32, bits as i32)?)
}

/// Heads `(.., D)` times the Hadamard matrix of D, which is its own inverse. D that is no power of
/// two has none, and stays.
pub(super) fn rotated(stream: &Stream, x: &Array) -> Result<Array, Error> {
    let dim = x.shape().last().map_or(1, |dim| *dim as usize);
    match dim.is_power_of_two() {
        true => Ok(stream.hadamard(x)?),
        false => Ok(x.clone()),
    }
}

/// The rotated values of `parts`, packed ones, scales and biases, `(1, heads, rows, D)`.
pub(super) fn values(
    stream: &Stream,
    [packed, scales, biases]: [Array; 3],
    bits: usize,
) -> Result<Array, Error> {
    let dim = packed.shape()[3] as usize * WORD / bits;
    let dtype = scales.dtype();
    let quantised = Quantised {
        group: (dim / scales.shape()[3] as usize) as i32,
        packed,
        scales,
        biases: Some(biases),
        bits: bits as i32,
        mode: QuantisedMode::Affine,
    };
    Ok(stream.dequantise(&quantised, dtype)?)
}
