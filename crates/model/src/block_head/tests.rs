//! Tiny heads against `speculators`, and configurations of all publishers.
//!
//! `scripts/golden/block_tiny.py` made the heads and their golden values.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;

use paceline_base::KernelClass;
use paceline_tensor::Kernels;
use paceline_weights::safetensors::Safetensors;
use serde_json::{Value, json};

use super::markov::MarkovKind;
use super::{BlockConfig, BlockHead};
use crate::eagle::tests::{check, golden, tokens, values};
use crate::{Config, DraftHead as _, DraftPlace, HeadRows, ModelSource, PassKind};

const MODEL: &str = "llama-untied-bf16";

/// Context in parts of several lengths, over a page's border, then a block.
#[test]
fn a_block_has_the_logits_of_speculators() {
    let source = ModelSource::open(&golden(MODEL)).unwrap();
    for name in ["dflash", "dspark", "dspark-gated", "dspark-rnn"] {
        let head = ModelSource::open(&golden(&format!("../heads/{name}"))).unwrap();
        let kernels = Arc::new(Kernels::new(2).unwrap());
        let head = BlockHead::load(&head, &source, KernelClass::CpuF32, kernels).unwrap();
        let file = golden(&format!("../heads/{name}.golden.safetensors"));
        let file = Safetensors::open(file).unwrap();
        let (captured, logits) = (values(&file, "captured"), values(&file, "logits"));
        let token = tokens(&file, "token")[0];
        let n = head.config.shape.draft_vocab;
        let (places, first, drafts) = (
            head.tokens.clone(),
            head.config.first(),
            head.config.drafts(),
        );
        let width = head.width() * head.captures().len();
        let rows = captured.len() / width;
        let (bias, previous) = match head.markov {
            Some(_) => (values(&file, "bias"), tokens(&file, "previous")),
            None => (vec![0.0; logits.len()], vec![token; head.config.block]),
        };
        let vocab = Config::read(&source).unwrap().vocab;
        let mut compute = Arc::new(head).reserve(rows, 2, 256).unwrap();
        let mut from = 0;
        for end in [1, 3, 66, rows] {
            let part = HeadRows {
                tokens: &vec![token; end - from],
                features: &captured[from * width..end * width],
                position: from,
                pending: end - 1,
                pages: &[1, 0],
            };
            let pass = match end == rows {
                true => PassKind::First,
                false => PassKind::Read,
            };
            compute.forward(&[part], pass).unwrap();
            from = end;
        }
        for nth in 0..drafts {
            let (mut all, previous) = (vec![0.0; vocab], previous[first + nth]);
            compute.write_logits(0, DraftPlace { nth, previous }, &mut all);
            let got: Vec<f32> = places.iter().map(|token| all[*token as usize]).collect();
            let of = (first + nth) * n..(first + nth + 1) * n;
            let of = logits[of.clone()].iter().zip(&bias[of]);
            let expected: Vec<f32> = of.map(|(x, bias)| x + bias).collect();
            check(&got, &expected, 1e-4);
        }
    }
}

#[test]
fn configurations_of_all_publishers_are_read_and_others_refused() {
    let model = Config::read(&ModelSource::open(&golden(MODEL)).unwrap()).unwrap();
    let text = std::fs::read(golden("../heads/dspark/config.json")).unwrap();
    let usual: Value = serde_json::from_slice(&text).unwrap();
    let expected = BlockConfig::read(&usual, &model).unwrap();
    assert_eq!(expected.drafts(), 5);
    assert_eq!(expected.markov, Some((MarkovKind::Vanilla, 32)));
    let mut flat = usual["transformer_layer_config"].clone();
    let own = [
        ("architectures", json!(["DFlashDraftModel"])),
        ("block_size", json!(5)),
        ("draft_vocab_size", json!(96)),
        (
            "dflash_config",
            json!({ "mask_token_id": 7, "target_layer_ids": [0, 1] }),
        ),
    ];
    own.into_iter().for_each(|(name, value)| flat[name] = value);
    let of_zlab = BlockConfig {
        is_anchored: false,
        markov: None,
        ..expected.clone()
    };
    assert_eq!(BlockConfig::read(&flat, &model).unwrap(), of_zlab);
    for (field, value) in [
        ("/architectures", json!(["DFlash2DraftModel"])),
        ("/markov_head_type", json!("lstm")),
        ("/mask_token_id", json!(300)),
        ("/block_size", json!(1000)),
        ("/aux_hidden_state_layer_ids", json!([1, 3])),
        ("/transformer_layer_config/model_type", json!("gemma4")),
        ("/transformer_layer_config/attention_bias", json!(true)),
        (
            "/transformer_layer_config/layer_types/1",
            json!("sliding_attention"),
        ),
        ("/transformer_layer_config/hidden_size", json!(32)),
    ] {
        let mut json = usual.clone();
        *json.pointer_mut(field).unwrap() = value.clone();
        if field == "/architectures" {
            json["speculators_model_type"] = Value::Null;
        }
        let refused = BlockConfig::read(&json, &model);
        assert!(refused.is_err(), "{field} {value}: {refused:?}");
    }
}
