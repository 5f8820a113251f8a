//! Writes a head in the form of `speculators`, which vLLM and [`paceline_model::DraftHead`] read.
//!
//! `config.json` and `model.safetensors`. Weights are bf16. `d2t` has the difference of each draft
//! token to the model's token, `t2d` which tokens of the model the head can propose. The embedding
//! is the model's.

use std::path::Path;

use paceline_model::adapter::files::tensors;
use serde_json::{Map, Value, json};

use super::Training;
use super::network::ROPE_BASE;
use crate::error::Error;

/// A tensor of the file: name, type, sizes and bytes.
type Saved = (String, &'static str, Vec<usize>, Vec<u8>);

/// Writes the files of a head; gives the bytes of its weights.
pub(super) fn write(output: &Path, training: &Training<'_>, params: &[f32]) -> Result<u64, Error> {
    let slots = training.network.layout.slots().iter();
    let mut saved: Vec<Saved> = slots
        .map(|slot| {
            let values = params[slot.range.clone()].iter();
            let bytes = values.flat_map(|x| bf16(*x).to_le_bytes()).collect();
            (slot.name.clone(), "BF16", slot.shape.clone(), bytes)
        })
        .collect();
    let (own, vocab) = (&training.vocabulary, training.run.model.config().vocab);
    let differences = own
        .iter()
        .zip(0i64..)
        .map(|(token, i)| i64::from(*token) - i);
    let d2t = differences.flat_map(i64::to_le_bytes).collect();
    saved.push(("d2t".to_owned(), "I64", vec![own.len()], d2t));
    let t2d = (0..vocab as u32).map(|token| u8::from(training.places.contains_key(&token)));
    saved.push(("t2d".to_owned(), "BOOL", vec![vocab], t2d.collect()));
    write_tensors(&output.join("model.safetensors"), &saved)?;
    let path = output.join("config.json");
    let text = serde_json::to_string_pretty(&config(training)).unwrap_or_default();
    tensors::replace(&path, |file| file.write_all(text.as_bytes()))?;
    Ok(saved.iter().map(|(.., bytes)| bytes.len() as u64).sum())
}

fn config(training: &Training<'_>) -> Value {
    let (shape, model) = (&training.network.shape, &training.run.model);
    json!({
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": true,
        "eagle_aux_hidden_state_layer_ids": model.captures(),
        "tie_word_embeddings": false,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{ "proposal_type": "greedy", "speculative_tokens": 4 }],
            "verifier": { "name_or_path": null, "architectures": [] },
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": shape.width,
            "intermediate_size": shape.ffn,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.norm_eps,
            "rope_parameters": { "rope_type": "default", "rope_theta": ROPE_BASE },
            "max_position_embeddings": model.config().context,
            "vocab_size": model.config().vocab,
            "attention_bias": false,
            "mlp_bias": false,
        },
    })
}

fn write_tensors(path: &Path, saved: &[Saved]) -> Result<(), Error> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut start = 0;
    for (name, dtype, shape, bytes) in saved {
        let end = start + bytes.len();
        let of = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), of);
        start = end;
    }
    let mut header = Value::Object(header).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    Ok(tensors::replace(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        saved
            .iter()
            .try_for_each(|(.., bytes)| file.write_all(bytes))
    })?)
}

/// The nearest bf16, the even one of two.
fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}
