//! Embedding responses of OpenAI and Ollama.
//!
//! Numbers are written with the fewest digits that parse to the same f32. A JSON value is an f64
//! and could not do that, so bodies are serialised from own types.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;

/// Response format, by API.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum EmbeddingFormat {
    /// A list of objects; vectors optionally in base64.
    OpenAi { is_base64: bool },
    /// A list of vectors; `model` as the client wrote it.
    Ollama { model: String },
    /// A single vector.
    OllamaOld,
}

/// Metadata of the response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EmbeddingStats<'a> {
    /// The model's own name.
    pub(crate) model: &'a str,
    pub(crate) tokens: usize,
    /// Time from the request to its vectors.
    pub(crate) took: Duration,
}

#[derive(Serialize)]
struct EmbeddingList<'a> {
    object: &'static str,
    data: Vec<EmbeddingEntry<'a>>,
    model: &'a str,
    usage: EmbeddingTokens,
}

#[derive(Serialize)]
struct EmbeddingEntry<'a> {
    object: &'static str,
    index: usize,
    embedding: EncodedVector<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EncodedVector<'a> {
    Numbers(&'a [f32]),
    Text(String),
}

#[derive(Serialize)]
struct EmbeddingTokens {
    prompt_tokens: usize,
    total_tokens: usize,
}

#[derive(Serialize)]
struct OllamaVectors<'a> {
    model: &'a str,
    embeddings: &'a [Vec<f32>],
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

#[derive(Serialize)]
struct OllamaVector<'a> {
    embedding: &'a [f32],
}

pub(crate) fn body(
    form: &EmbeddingFormat,
    vectors: &[Vec<f32>],
    facts: EmbeddingStats<'_>,
) -> String {
    let text = match form {
        EmbeddingFormat::OpenAi { is_base64 } => {
            serde_json::to_string(&list(vectors, *is_base64, facts))
        }
        EmbeddingFormat::Ollama { model } => serde_json::to_string(&OllamaVectors {
            model,
            embeddings: vectors,
            total_duration: u64::try_from(facts.took.as_nanos()).unwrap_or(u64::MAX),
            load_duration: 0,
            prompt_eval_count: facts.tokens,
        }),
        EmbeddingFormat::OllamaOld => serde_json::to_string(&OllamaVector {
            embedding: vectors.first().map_or(&[], Vec::as_slice),
        }),
    };
    text.expect("numbers and strings can be written")
}

fn list<'a>(
    vectors: &'a [Vec<f32>],
    is_base64: bool,
    facts: EmbeddingStats<'a>,
) -> EmbeddingList<'a> {
    let entry = |(index, vector): (usize, &'a Vec<f32>)| EmbeddingEntry {
        object: "embedding",
        index,
        embedding: match is_base64 {
            true => EncodedVector::Text(base64_of(vector)),
            false => EncodedVector::Numbers(vector),
        },
    };
    EmbeddingList {
        object: "list",
        data: vectors.iter().enumerate().map(entry).collect(),
        model: facts.model,
        usage: EmbeddingTokens {
            prompt_tokens: facts.tokens,
            total_tokens: facts.tokens,
        },
    }
}

/// The little-endian bytes of the numbers.
fn base64_of(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}

/// Truncates to `n` numbers, and normalises the rest to length 1 if it was longer.
pub(crate) fn shorten(vector: &mut Vec<f32>, n: usize) {
    if n >= vector.len() {
        return;
    }
    vector.truncate(n);
    let square = |x: &f32| f64::from(*x) * f64::from(*x);
    let length = vector.iter().map(square).sum::<f64>().sqrt();
    if length > 0.0 {
        for x in vector {
            *x = (f64::from(*x) / length) as f32;
        }
    }
}
