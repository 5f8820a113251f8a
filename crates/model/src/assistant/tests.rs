//! A tiny assistant against `transformers`, and configurations that do not fit.
//!
//! `scripts/golden/assistant_tiny.py` made the assistant and its golden values.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::fs;
use std::sync::Arc;

use paceline_base::KernelClass;
use paceline_tensor::Kernels;
use paceline_weights::safetensors::Safetensors;
use serde_json::{Value, json};

use super::{AssistantHead, AssistantSizes};
use crate::eagle::tests::{ALONE, captured_by, check, golden, tokens, values};
use crate::{Config, DraftHead as _, HeadRows, ModelSource, PassKind};

const MODEL: &str = "gemma4-e-bf16";

/// Captured rows in parts of several lengths, over a page's border, then a draft; with and without
/// ordered logits.
#[test]
fn an_assistant_drafts_the_tokens_of_transformers() {
    let source = ModelSource::open(&golden(MODEL)).unwrap();
    let file = golden("../heads/assistant.golden.safetensors");
    let file = Safetensors::open(file).unwrap();
    let captured = values(&file, "captured");
    let folder = tempfile::tempdir().unwrap();
    let weights = golden("../heads/assistant/model.safetensors");
    fs::copy(weights, folder.path().join("model.safetensors")).unwrap();
    for (name, is_ordered) in [("ordered", true), ("dense", false)] {
        let mut json = usual();
        json["use_ordered_embeddings"] = json!(is_ordered);
        let text = serde_json::to_vec(&json).unwrap();
        fs::write(folder.path().join("config.json"), text).unwrap();
        let head = ModelSource::open(folder.path()).unwrap();
        let kernels = Arc::new(Kernels::new(2).unwrap());
        let head = AssistantHead::load(&head, &source, KernelClass::CpuF32, kernels).unwrap();
        assert_eq!(head.captures(), [2, 3, 6]);
        let (logits, tokens) = (
            values(&file, name),
            tokens(&file, &format!("{name}.tokens")),
        );
        let (width, vocab) = (head.width() * 3, Config::read(&source).unwrap().vocab);
        let (rows, scored) = (captured.len() / width, head.output.scored());
        let mut compute = Arc::new(head).reserve(rows, 1, 128).unwrap();
        // The row of a token has the features of the position before.
        let (mut from, mut state) = (1, Vec::new());
        for (nth, end) in [2, 4, 67, rows + 1, rows + 2, rows + 3]
            .into_iter()
            .enumerate()
        {
            let draft = nth.checked_sub(3);
            let features = &captured[(from - 1).min(rows) * width..(end - 1).min(rows) * width];
            let part = HeadRows {
                tokens: &tokens[from..end],
                features: if draft > Some(0) { &state } else { features },
                position: from - 1,
                pending: (end - 1).min(rows) - 1,
                pages: &[1, 0],
            };
            let pass = match draft {
                None => PassKind::Read,
                Some(0) => PassKind::First,
                Some(_) => PassKind::Next,
            };
            compute.forward(&[part], pass).unwrap();
            from = end;
            let Some(draft) = draft else { continue };
            state = compute.output(0).to_vec();
            let mut got = vec![0.0; vocab];
            compute.write_logits(0, ALONE, &mut got);
            let of = got.iter().zip(&logits[draft * vocab..]);
            let (got, expected): (Vec<f32>, Vec<f32>) = of.filter(|(x, _)| x.is_finite()).unzip();
            assert_eq!(got.len(), scored, "tokens with a logit");
            check(&got, &expected, 1e-4);
        }
    }
    let rows = captured.len() / (3 * 64);
    let text = &tokens(&file, "dense.tokens")[..rows];
    check(&captured_by(&source, text, &[2, 3, 6]), &captured, 1e-4);
}

fn usual() -> Value {
    let text = fs::read(golden("../heads/assistant/config.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// Fields that change what an assistant computes are refused by name.
#[test]
fn a_configuration_that_does_not_fit_is_refused() {
    let read = |name: &str| Config::read(&ModelSource::open(&golden(name)).unwrap()).unwrap();
    let model = read(MODEL);
    assert_eq!(
        AssistantSizes::read(&usual(), &model).unwrap().keepers,
        [2, 3]
    );
    assert!(AssistantSizes::read(&usual(), &read("llama-untied-bf16")).is_err());
    for (field, value) in [
        ("/backbone_hidden_size", json!(32)),
        ("/num_centroids", json!(7)),
        ("/centroid_intermediate_top_k", json!(21)),
        ("/text_config/vocab_size", json!(301)),
        ("/text_config/head_dim", json!(32)),
        ("/text_config/num_attention_heads", json!(3)),
        ("/text_config/enable_moe_block", json!(true)),
        ("/text_config/hidden_size_per_layer_input", json!(8)),
        ("/text_config/hidden_activation", json!("silu")),
        ("/text_config/num_hidden_layers", json!(1u64 << 40)),
    ] {
        let mut json = usual();
        *json.pointer_mut(field).unwrap() = value.clone();
        let refused = AssistantSizes::read(&json, &model);
        assert!(refused.is_err(), "{field} {value}: {refused:?}");
    }
}
