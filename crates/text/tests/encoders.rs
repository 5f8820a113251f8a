//! Tokenizers of encoders against the ids that `transformers` gives
//! (`tests-data/golden/encoder`, made by `scripts/golden/encoder_tiny.py`).

#![allow(clippy::unwrap_used, reason = "a helper of a test may fail the test")]

use std::path::PathBuf;

use paceline_base::testing::from_package;
use paceline_text::tokenizer::Tokenizer;
use paceline_weights::gguf::Gguf;
use paceline_weights::gguf::testing::GgufWriter;
use serde_json::Value;

use crate::support::test_model;

fn golden(name: &str) -> PathBuf {
    from_package(
        env!("CARGO_MANIFEST_DIR"),
        "../../tests-data/golden/encoder",
    )
    .join(name)
}

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn check(name: &str, tokenizer: &Tokenizer) {
    let golden = json(golden(&format!("{name}.golden.json")));
    for case in golden["cases"].as_array().unwrap() {
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let text = case["text"].as_str().unwrap();
        assert_eq!(
            tokenizer.encode_whole(text).unwrap(),
            ids,
            "{name} {text:?}"
        );
    }
}

#[test]
fn folders_of_encoders_have_the_ids_of_transformers() {
    for name in ["bert-mean", "roberta-first", "qwen3-last"] {
        check(name, &Tokenizer::from_hf_dir(&golden(name)).unwrap());
    }
    if let Some(folder) = test_model("folders_of_encoders", "all-minilm-l6-v2") {
        check("minilm", &Tokenizer::from_hf_dir(&folder).unwrap());
    }
}

/// A vocabulary of BERT as `convert_hf_to_gguf.py` of llama.cpp converts it.
#[test]
fn a_gguf_vocabulary_of_bert_has_the_ids_of_its_folder() {
    let tokenizer = json(golden("bert-mean/tokenizer.json"));
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    for (text, id) in vocab {
        let is_name = text.starts_with('[') && text.ends_with(']');
        let piece = text.strip_prefix("##").map(str::to_owned);
        let written = piece.unwrap_or_else(|| format!("\u{2581}{text}"));
        tokens[id.as_u64().unwrap() as usize] = if is_name { text.clone() } else { written };
    }
    let mut kinds = vec![1; tokens.len()];
    kinds[..5].fill(3); // control tokens
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bert.gguf");
    GgufWriter::new()
        .meta("general.architecture", "bert")
        .meta("tokenizer.ggml.model", "bert")
        .meta("tokenizer.ggml.tokens", tokens)
        .meta("tokenizer.ggml.token_type", kinds)
        .meta("tokenizer.ggml.unknown_token_id", 1u32)
        .meta("tokenizer.ggml.seperator_token_id", 3u32)
        .meta("tokenizer.ggml.cls_token_id", 2u32)
        .write(&path);
    let file = Gguf::open(&path).unwrap();
    check("bert-mean", &Tokenizer::from_gguf(file.metadata()).unwrap());
}
