//! A tiny head against `speculators`, and captured rows against `transformers`.
//!
//! `scripts/golden/eagle_tiny.py` made the head and its golden values.

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_base::KernelClass;
use paceline_tensor::Kernels;
use paceline_weights::safetensors::Safetensors;
use serde_json::{Value, json};

use super::{EagleHead, HeadConfig};
use crate::{
    Batch, BatchSequence, BatchSize, Config, DraftHead as _, DraftHeadCompute, DraftPlace,
    HeadRows, LoadOptions, Logits, Model, ModelSource, PassKind, WindowPages, Workspace,
};

const MODEL: &str = "llama-untied-bf16";

/// The place in a head that drafts one token in a pass.
pub(crate) const ALONE: DraftPlace = DraftPlace {
    nth: 0,
    previous: 0,
};

pub(crate) fn golden(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/hf");
    root.join(name)
}

pub(crate) fn values(file: &Safetensors, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    let bytes = tensor.bytes.as_chunks().0.iter();
    bytes.map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

pub(crate) fn tokens(file: &Safetensors, name: &str) -> Vec<u32> {
    let words = file.bytes_of(file.info(name).unwrap());
    let words = words.as_chunks::<8>().0.iter();
    words.map(|word| i64::from_le_bytes(*word) as u32).collect()
}

pub(crate) fn check(got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len());
    let size = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let off = (got - expected).abs() / size;
        assert!(off <= tolerance, "{i}: {got}, expected {expected}");
    }
}

/// A pass in parts of several lengths, over a page's border, and one more token with the head's own
/// output as its feature.
#[test]
fn a_head_gives_the_logits_of_speculators() {
    let [head, source] =
        ["../heads/eagle3", MODEL].map(|name| ModelSource::open(&golden(name)).unwrap());
    let kernels = Arc::new(Kernels::new(2).unwrap());
    let head = EagleHead::load(&head, &source, KernelClass::CpuF32, kernels).unwrap();
    let file = Safetensors::open(golden("../heads/eagle3.golden.safetensors")).unwrap();
    let (captured, logits) = (values(&file, "captured"), values(&file, "logits"));
    let tokens = tokens(&file, "tokens");
    let (rows, n) = (tokens.len() - 1, head.config.draft_vocab);
    let (width, vocab) = (captured.len() / rows, Config::read(&source).unwrap().vocab);
    let places = head.tokens.clone();
    let mut compute = Arc::new(head).reserve(rows, 1, 128).unwrap();
    let of_draft = |compute: &mut dyn DraftHeadCompute| -> Vec<f32> {
        let mut all = vec![0.0; vocab];
        compute.write_logits(0, ALONE, &mut all);
        let left = all.iter().filter(|x| x.is_finite()).count();
        assert_eq!(left, n, "tokens that the head cannot propose");
        places.iter().map(|token| all[*token as usize]).collect()
    };
    let pass = HeadPass {
        tokens: &tokens,
        captured: (&captured, width),
        logits: (&logits, n),
        chained: &values(&file, "chained.logits"),
    };
    pass.check(&mut *compute, of_draft);
}

/// A pass in parts of several lengths, over a page's border, and one more token with the head's own
/// output as its feature.
pub(crate) struct HeadPass<'a> {
    /// A token more than rows.
    pub(crate) tokens: &'a [u32],
    /// Rows of features, and their width.
    pub(crate) captured: (&'a [f32], usize),
    /// Rows of logits, and their length.
    pub(crate) logits: (&'a [f32], usize),
    /// Logits of the last token.
    pub(crate) chained: &'a [f32],
}

impl HeadPass<'_> {
    /// Compares the logits that `read` takes from `compute`, to 1e-4.
    pub(crate) fn check(
        &self,
        compute: &mut dyn DraftHeadCompute,
        mut read: impl FnMut(&mut dyn DraftHeadCompute) -> Vec<f32>,
    ) {
        let ((captured, width), (logits, n)) = (self.captured, self.logits);
        let (rows, mut from) = (self.tokens.len() - 1, 0);
        for end in [1, 3, 66, rows] {
            let part = HeadRows {
                tokens: &self.tokens[from..end],
                features: &captured[from * width..end * width],
                position: from,
                pending: end - 1,
                pages: &[1, 0],
            };
            compute.forward(&[part], PassKind::First).unwrap();
            check(&read(compute), &logits[(end - 1) * n..end * n], 1e-4);
            from = end;
        }
        let features = compute.output(0).to_vec();
        let part = HeadRows {
            tokens: &self.tokens[rows..],
            features: &features,
            position: rows,
            pending: rows - 1,
            pages: &[1, 0],
        };
        compute.forward(&[part], PassKind::Next).unwrap();
        check(&read(compute), self.chained, 1e-4);
    }
}

/// `(T, captures, C)` of a text in a page or two.
pub(crate) fn captured_by(source: &ModelSource, tokens: &[u32], layers: &[usize]) -> Vec<f32> {
    let kernels = Arc::new(Kernels::new(2).unwrap());
    let options = LoadOptions {
        class: KernelClass::CpuF32,
    };
    let model = Model::load(source, options, kernels, |_, _| {}).unwrap();
    let model = model.with_captures(layers);
    let size = BatchSize::single(tokens.len(), tokens.len());
    let (mut ws, mut cache) = (
        Workspace::new(&model, size),
        model.whole_cache(128).unwrap(),
    );
    let (pages, windows) = ([0, 1], model.kinds().windows(cache.pool_pages()));
    let windows: Vec<WindowPages<'_>> = windows
        .iter()
        .map(|_| WindowPages {
            first_page: 0,
            pages: &pages,
        })
        .collect();
    let sequence = BatchSequence {
        tokens,
        position: 0,
        pages: &pages,
        windows: &windows,
        adapter: 0,
        logits: Logits::Last,
    };
    let batch = [sequence];
    let batch = Batch::new(&batch);
    model.forward(&batch, &mut ws, &mut cache).unwrap();
    ws.captured().to_vec()
}

#[test]
fn captured_rows_are_the_hidden_states_of_transformers() {
    let source = ModelSource::open(&golden(MODEL)).unwrap();
    let model = Config::read(&source).unwrap();
    assert_eq!(
        model.captures(&[2, 0, 99]),
        [0, 2],
        "in order, of the model"
    );
    let json = std::fs::read(golden(&format!("{MODEL}.golden.json"))).unwrap();
    let json: Value = serde_json::from_slice(&json).unwrap();
    let tokens: Vec<u32> = serde_json::from_value(json["prompt"].clone()).unwrap();
    let captured = captured_by(&source, &tokens, &[2, 0, 99]);
    let file = Safetensors::open(golden(&format!("{MODEL}.golden.safetensors"))).unwrap();
    let width = model.width;
    for (nth, layer) in [0, 2].into_iter().enumerate() {
        let rows = captured.chunks(2 * width);
        let rows: Vec<f32> = rows
            .flat_map(|row| &row[nth * width..][..width])
            .copied()
            .collect();
        check(&rows, &values(&file, &format!("hidden.{layer}")), 1e-5);
    }
}

/// Fields that change what a head computes are refused by name.
#[test]
fn a_configuration_that_would_be_computed_wrongly_is_refused() {
    let source = ModelSource::open(&golden(MODEL)).unwrap();
    let model = Config::read(&source).unwrap();
    let text = std::fs::read(golden("../heads/eagle3/config.json")).unwrap();
    let usual: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(
        HeadConfig::read(&usual, &model).unwrap().captures,
        [0, 1, 2]
    );
    for (field, value) in [
        ("/architectures", json!(["LlamaForCausalLM"])),
        ("/draft_vocab_size", json!(301)),
        ("/eagle_aux_hidden_state_layer_ids", json!([0, 3])),
        ("/eagle_aux_hidden_state_layer_ids", json!([1, 0])),
        ("/norm_output", json!(true)),
        ("/fc_norm", json!(true)),
        ("/transformer_layer_config/hidden_size", json!(32)),
        ("/transformer_layer_config/num_hidden_layers", json!(2)),
        ("/transformer_layer_config/num_key_value_heads", json!(3)),
        ("/transformer_layer_config/head_dim", json!(1u64 << 40)),
        ("/transformer_layer_config/attention_bias", json!(true)),
        ("/transformer_layer_config/model_type", json!("qwen3")),
        ("/transformer_layer_config/hidden_act", json!("gelu")),
    ] {
        let mut json = usual.clone();
        *json.pointer_mut(field).unwrap() = value.clone();
        json["speculators_model_type"] = json!("eagle3");
        if field == "/architectures" {
            json["speculators_model_type"] = Value::Null;
        }
        let refused = HeadConfig::read(&json, &model);
        assert!(refused.is_err(), "{field} {value}: {refused:?}");
    }
}
