//! The tensors and entries of a random Gemma 4. Every second layer sees a window. The others have
//! heads twice as large, one KV head, and keys that are their values. Of four layers or more the
//! last two use caches of others and have a wider feed-forward. Experts are part of every
//! feed-forward, and every layer has embeddings of its own.

use paceline_weights::gguf::{Array, MetadataValue};

use super::tiny::{Tiny, TinyFile};

/// Layers that use the caches of others.
const fn shared(tiny: &Tiny) -> usize {
    if tiny.layers < 4 { 0 } else { 2 }
}

const fn is_windowed(layer: usize) -> bool {
    layer.is_multiple_of(2)
}

/// Sizes of heads, and KV heads.
const fn heads(tiny: &Tiny, layer: usize) -> (usize, usize) {
    if is_windowed(layer) {
        (tiny.head_dim, tiny.kv_heads)
    } else {
        (2 * tiny.head_dim, 1)
    }
}

const fn ffn(tiny: &Tiny, layer: usize) -> usize {
    let own = tiny.layers - shared(tiny);
    if layer < own { tiny.ffn } else { 2 * tiny.ffn }
}

/// Entries beyond those of all families, some in place of these.
pub(super) fn entries(tiny: &Tiny) -> Vec<(&'static str, MetadataValue)> {
    let layers = 0..tiny.layers;
    let list = |of: &dyn Fn(usize) -> usize| {
        let list = layers.clone().map(|i| of(i) as u32);
        MetadataValue::Array(Array::U32(list.collect()))
    };
    let windowed: Vec<bool> = layers.clone().map(is_windowed).collect();
    let one = |n: usize| MetadataValue::U32(n as u32);
    vec![
        ("feed_forward_length", list(&|i| ffn(tiny, i))),
        ("attention.head_count_kv", list(&|i| heads(tiny, i).1)),
        ("attention.key_length", one(2 * tiny.head_dim)),
        ("attention.value_length", one(2 * tiny.head_dim)),
        ("attention.key_length_swa", one(tiny.head_dim)),
        ("attention.value_length_swa", one(tiny.head_dim)),
        ("attention.shared_kv_layers", one(shared(tiny))),
        (
            "attention.sliding_window_pattern",
            MetadataValue::Array(Array::Bool(windowed)),
        ),
        ("embedding_length_per_layer_input", one(tiny.width)),
        ("final_logit_softcapping", MetadataValue::F32(20.0)),
    ]
}

/// Tensors outside of the layers, beyond those of all families.
pub(super) fn tables(tiny: &Tiny, file: &mut TinyFile) {
    let all = tiny.layers * tiny.width;
    file.matrix("per_layer_token_embd", tiny.vocab, all);
    file.matrix("per_layer_model_proj", all, tiny.width);
    file.vector("per_layer_proj_norm.weight", tiny.width, 1.0);
    let mut factors = vec![1.0; tiny.head_dim];
    factors[tiny.head_dim / 4..].fill(1e30);
    file.put_f32("rope_freqs.weight", &factors);
}

/// A layer but for its experts.
pub(super) fn layer(tiny: &Tiny, file: &mut TinyFile, i: usize) {
    let ((dim, kv_heads), c, f) = (heads(tiny, i), tiny.width, ffn(tiny, i));
    let name = |part: &str| format!("blk.{i}.{part}");
    file.vector(&name("attn_norm.weight"), c, 4.0);
    file.matrix(&name("attn_q"), tiny.heads * dim, c);
    file.vector(&name("attn_q_norm.weight"), dim, 0.5);
    if i < tiny.layers - shared(tiny) {
        file.matrix(&name("attn_k"), kv_heads * dim, c);
        file.vector(&name("attn_k_norm.weight"), dim, 0.5);
        if is_windowed(i) {
            file.matrix(&name("attn_v"), kv_heads * dim, c);
        }
    }
    file.matrix(&name("attn_output"), c, tiny.heads * dim);
    file.matrix(&name("ffn_gate"), f, c);
    file.matrix(&name("ffn_up"), f, c);
    file.matrix(&name("ffn_down"), c, f);
    file.matrix(&name("inp_gate"), c, c);
    file.matrix(&name("proj"), c, c);
    let norms = "
        post_attention_norm ffn_norm post_ffw_norm post_ffw_norm_1 pre_ffw_norm_2 post_ffw_norm_2
        post_norm";
    for norm in norms.split_whitespace() {
        file.vector(&name(&format!("{norm}.weight")), c, 1.0);
    }
    file.vector(&name("layer_output_scale.weight"), 1, 1.0);
}

/// Scales of a layer's router and experts, which other families lack.
pub(super) fn scales(tiny: &Tiny, file: &mut TinyFile, experts: usize, i: usize) {
    file.vector(&format!("blk.{i}.ffn_gate_inp.scale"), tiny.width, 1.5);
    file.vector(&format!("blk.{i}.ffn_down_exps.scale"), experts, 1.0);
}

/// Whether a model computes without a tensor: values are keys then, or a layer has no factor.
pub(crate) fn may_lack(name: &str) -> bool {
    name.ends_with("attn_v.weight")
        || name.ends_with("layer_output_scale.weight")
        || name == "rope_freqs.weight"
}
