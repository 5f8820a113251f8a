//! Bytes of activations: those that are kept, and those of a layer.

use paceline_model::{LayerCache, LayerShape};

use crate::weights::delta_channels;

/// Bytes of activations that the leaves under way may keep for their backward pass. They are an
/// eighth of the free memory, since a machine may have several processes, and at least 512 MiB.
pub(crate) fn kept_bytes(available: Option<u64>) -> usize {
    let share = available.map_or(0, |bytes| usize::try_from(bytes / 8).unwrap_or(0));
    share.max(512 << 20)
}

/// Bytes that a layer's activations take.
pub(crate) fn layer_bytes(width: usize, layers: &[LayerShape], tokens: usize) -> usize {
    let of = |l: &LayerShape| {
        let heads = match l.latent {
            None if matches!(l.cache, LayerCache::Delta(_)) => {
                2 * delta_channels(l) + 3 * l.heads * l.value_dim
            }
            None => (if l.gated { 5 } else { 3 } * l.heads + 2 * l.kv_heads) * l.head_dim,
            Some(of) => {
                let compressed = 2 * (of.rank + of.query_rank.unwrap_or(0));
                compressed + 2 * l.heads * (of.query_dim() + of.value_dim)
            }
        };
        let ffn = match l.experts {
            None => 3 * l.ffn,
            Some(of) => {
                let shared = 3 * of.shared + usize::from(of.shared > 0) * 2 * width;
                2 * of.count + of.used * (3 * of.width + 2 * width) + shared
            }
        };
        heads + ffn + 5 * width
    };
    layers.iter().map(of).max().unwrap_or(0) * tokens * size_of::<f32>()
}
