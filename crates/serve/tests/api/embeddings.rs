//! Vectors over HTTP, of a tiny encoder (`tests-data/golden/encoder`) whose vectors `transformers`
//! recorded.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_engine::EncoderService;
use paceline_model::ModelSource;
use paceline_model::encoder::Encoder;
use paceline_serve::ServedModel;
use paceline_tensor::Kernels;
use paceline_text::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::rig::{Rig, refusal};
use crate::tiny;

const EMBED: &str = "/v1/embeddings";

fn golden(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/encoder");
    root.join(name)
}

/// A server of the tiny encoder.
fn rig() -> Rig {
    let folder = golden("bert-mean");
    let source = ModelSource::open(&folder).unwrap();
    let encoder = Encoder::load(&source, Arc::new(Kernels::new(2).unwrap())).unwrap();
    let model = ServedModel {
        tokenizer: Arc::new(Tokenizer::from_hf_dir(&folder).unwrap()),
        template: None,
        context: encoder.config().context,
        ..tiny::model()
    };
    Rig::over(Arc::new(EncoderService::new(encoder)), model)
}

/// Texts with their ids and vectors.
fn cases() -> Vec<Value> {
    let text = std::fs::read_to_string(golden("bert-mean.golden.json")).unwrap();
    let mut golden: Value = serde_json::from_str(&text).unwrap();
    serde_json::from_value(golden["cases"].take()).unwrap()
}

fn post(rig: &Rig, path: &str, mut body: Value) -> Value {
    body["model"] = "tiny".into();
    let response = rig.post(path, &body.to_string());
    assert_eq!(response.status, 200, "{body}");
    response.json()
}

fn numbers(vector: &Value) -> Vec<f64> {
    let vector = vector.as_array().unwrap().iter();
    vector.map(|x| x.as_f64().unwrap()).collect()
}

#[track_caller]
fn assert_near(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    let worst = got.iter().zip(expected).map(|(x, y)| (x - y).abs());
    assert!(worst.fold(0.0, f64::max) < 1e-6, "{got:?} {expected:?}");
}

/// The numbers of a vector in base64, by hand: the client's own way is in scripts/sdk.
fn of_base64(text: &str) -> Vec<f32> {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::new();
    for four in text.as_bytes().chunks(4) {
        let value = |c: &u8| LETTERS.iter().position(|l| l == c).unwrap_or(0) as u32;
        let bits = four.iter().fold(0, |bits, c| bits << 6 | value(c));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..]);
    }
    let (whole, _) = bytes.as_chunks::<4>();
    whole.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn texts_and_ids_give_the_vectors_of_transformers() {
    let rig = rig();
    let cases: Vec<Value> = cases().into_iter().filter(|c| c["text"] != "").collect();
    let pick = |name: &str| -> Vec<Value> { cases.iter().map(|c| c[name].clone()).collect() };
    let vectors = pick("vector");
    for input in [pick("text"), pick("ids")] {
        let answer = post(&rig, EMBED, json!({"input": input}));
        assert_eq!(answer["object"], "list");
        assert_eq!(answer["model"], "tiny");
        let data = answer["data"].as_array().unwrap();
        for (i, (entry, vector)) in data.iter().zip(&vectors).enumerate() {
            assert_eq!(
                (&entry["object"], &entry["index"]),
                (&json!("embedding"), &json!(i))
            );
            assert_near(&numbers(&entry["embedding"]), &numbers(vector));
        }
        assert_eq!(data.len(), vectors.len());
        let ids = pick("ids");
        let tokens: usize = ids.iter().map(|ids| ids.as_array().unwrap().len()).sum();
        let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
        assert_eq!(answer["usage"], usage);
    }
    for name in ["text", "ids"] {
        let alone = post(&rig, EMBED, json!({"input": cases[1][name]}));
        assert_near(
            &numbers(&alone["data"][0]["embedding"]),
            &numbers(&vectors[1]),
        );
    }
    let metrics = rig.get("/metrics").text();
    assert!(
        !metrics.contains("paceline_tokens_total{kind=\"prompt\"} 0\n"),
        "{metrics}"
    );
}

#[test]
fn vectors_come_in_base64_and_shorter() {
    let rig = rig();
    let ask = |more: Value| {
        let mut body = json!({"input": "hello", "user": "u"});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        post(&rig, EMBED, body)["data"][0]["embedding"].clone()
    };
    let whole = numbers(&ask(json!({"encoding_format": "float"})));
    let text = ask(json!({"encoding_format": "base64"}));
    let bytes = of_base64(text.as_str().unwrap());
    let same: Vec<f32> = whole.iter().map(|x| *x as f32).collect();
    assert_eq!(bytes, same, "to the bit");
    let short = numbers(&ask(json!({"dimensions": 7})));
    let length = whole[..7].iter().map(|x| x * x).sum::<f64>().sqrt();
    let expected: Vec<f64> = whole[..7].iter().map(|x| x / length).collect();
    assert_near(&short, &expected);
    assert_near(&numbers(&ask(json!({"dimensions": 48}))), &whole);
}

#[test]
fn ollama_gets_lists_of_vectors() {
    let rig = rig();
    let cases = cases();
    let (text, vector) = (&cases[0]["text"], numbers(&cases[0]["vector"]));
    let answer = post(
        &rig,
        "/api/embed",
        json!({"input": text, "keep_alive": "5m"}),
    );
    assert_near(&numbers(&answer["embeddings"][0]), &vector);
    assert_eq!(answer["model"], "tiny");
    let tokens = cases[0]["ids"].as_array().unwrap().len();
    assert_eq!(answer["prompt_eval_count"], tokens);
    assert!(answer["total_duration"].as_u64().unwrap() > 0);
    let old = post(&rig, "/api/embeddings", json!({"prompt": text}));
    assert_near(&numbers(&old["embedding"]), &vector);
    let none = post(&rig, "/api/embed", json!({"input": ""}));
    assert_eq!(none["embeddings"], json!([]));
    // Long texts are cut, their last token kept; or refused where that is not wanted.
    let long = "word ".repeat(400);
    let cut = post(&rig, "/api/embed", json!({"input": [long, "", text]}));
    assert_eq!(cut["embeddings"].as_array().unwrap().len(), 3);
    assert_eq!(cut["prompt_eval_count"], 60 + 2 + tokens);
    let body = json!({"model": "tiny", "input": ["a", long], "truncate": false}).to_string();
    let refused = rig.post("/api/embed", &body);
    assert_eq!(refused.status, 400);
    let message = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(message.starts_with("input[1] has ") && message.ends_with("the context is 60"));
    let show = rig.post("/api/show", r#"{"model":"tiny"}"#).json();
    assert_eq!(show["capabilities"], json!(["embedding"]));
}

#[test]
fn wrong_inputs_are_refused_by_name() {
    let rig = rig();
    let long = vec![5; 61];
    for (fields, code, param) in [
        (json!({}), "missing_required_parameter", "input"),
        (json!({"input": ""}), "invalid_value", "input"),
        (json!({"input": []}), "invalid_value", "input"),
        (json!({"input": 7}), "invalid_type", "input"),
        (json!({"input": [""]}), "invalid_value", "input[0]"),
        (json!({"input": ["a", []]}), "invalid_value", "input[1]"),
        (json!({"input": ["a", {}]}), "invalid_type", "input[1]"),
        (json!({"input": [1, "a"]}), "invalid_type", "input[1]"),
        (json!({"input": [[1, 300]]}), "invalid_value", "input[0][1]"),
        (json!({"input": [-1]}), "invalid_value", "input[0]"),
        (json!({"input": long}), "context_length_exceeded", "input"),
        (json!({"input": vec!["a"; 2049]}), "invalid_value", "input"),
        (
            json!({"input": "a", "dimensions": 49}),
            "invalid_value",
            "dimensions",
        ),
        (
            json!({"input": "a", "dimensions": 0}),
            "invalid_value",
            "dimensions",
        ),
        (
            json!({"input": "a", "encoding_format": "int8"}),
            "unsupported_parameter",
            "encoding_format",
        ),
        (
            json!({"input": "a", "temperature": 1}),
            "unknown_parameter",
            "temperature",
        ),
    ] {
        let mut body = fields.clone();
        body["model"] = "tiny".into();
        let (status, got, at, message) = refusal(rig.post(EMBED, &body.to_string()));
        assert_eq!((status, got.as_str()), (400, code), "{fields}: {message}");
        assert_eq!(at.as_deref(), Some(param), "{fields}: {message}");
    }
    let other = refusal(rig.post(EMBED, r#"{"model":"other","input":"a"}"#));
    assert_eq!((other.0, other.1.as_str()), (404, "model_not_found"));
}

#[test]
fn a_model_does_what_it_was_made_for() {
    let encoder = rig();
    for (path, body) in [
        ("/v1/chat/completions", r#"{"model":"tiny","messages":[]}"#),
        ("/v1/completions", r#"{"model":"tiny","prompt":"a"}"#),
        ("/v1/responses", r#"{"model":"tiny","input":"a"}"#),
        ("/v1/messages", r#"{"model":"tiny"}"#),
        ("/api/generate", r#"{"model":"tiny","prompt":"a"}"#),
        ("/infill", "{}"),
    ] {
        let response = encoder.post(path, body);
        assert_eq!(response.status, 501, "{path}");
        assert!(response.text().contains("makes embeddings"), "{path}");
    }
    let words = encoder.post("/tokenize", r#"{"content":"the man"}"#).json();
    let back = encoder.post("/detokenize", &words.to_string()).json();
    assert_eq!(back["content"], "the man");
    let decoder = Rig::new();
    for path in [EMBED, "/api/embed", "/api/embeddings"] {
        let response = decoder.post(path, r#"{"model":"tiny","input":"a"}"#);
        assert_eq!(response.status, 501, "{path}");
        assert!(response.text().contains("generates text"), "{path}");
    }
    let document = encoder.get("/openapi.json").json();
    assert!(document["paths"][EMBED]["post"].is_object());
    let document = decoder.get("/openapi.json").json();
    assert!(document["paths"][EMBED].is_null());
}
