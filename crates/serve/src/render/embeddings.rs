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
pub(crate) enum Form {
    /// A list of objects; vectors optionally in base64.
    OpenAi { is_base64: bool },
    /// A list of vectors; `model` as the client wrote it.
    Ollama { model: String },
    /// A single vector.
    OllamaOld,
}

/// Metadata of the response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts<'a> {
    /// The model's own name.
    pub(crate) model: &'a str,
    /// Tokens of all texts.
    pub(crate) tokens: usize,
    /// Time from the request to its vectors.
    pub(crate) took: Duration,
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Entry<'a>>,
    model: &'a str,
    usage: Usage,
}

#[derive(Serialize)]
struct Entry<'a> {
    object: &'static str,
    index: usize,
    embedding: Vector<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector<'a> {
    Numbers(&'a [f32]),
    Text(String),
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}

#[derive(Serialize)]
struct Ollama<'a> {
    model: &'a str,
    embeddings: &'a [Vec<f32>],
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

#[derive(Serialize)]
struct OllamaOld<'a> {
    embedding: &'a [f32],
}

/// The response body.
pub(crate) fn body(form: &Form, vectors: &[Vec<f32>], facts: Facts<'_>) -> String {
    let text = match form {
        Form::OpenAi { is_base64 } => serde_json::to_string(&list(vectors, *is_base64, facts)),
        Form::Ollama { model } => serde_json::to_string(&Ollama {
            model,
            embeddings: vectors,
            total_duration: u64::try_from(facts.took.as_nanos()).unwrap_or(u64::MAX),
            load_duration: 0,
            prompt_eval_count: facts.tokens,
        }),
        Form::OllamaOld => serde_json::to_string(&OllamaOld {
            embedding: vectors.first().map_or(&[], Vec::as_slice),
        }),
    };
    text.expect("numbers and strings can be written")
}

fn list<'a>(vectors: &'a [Vec<f32>], is_base64: bool, facts: Facts<'a>) -> List<'a> {
    let entry = |(index, vector): (usize, &'a Vec<f32>)| Entry {
        object: "embedding",
        index,
        embedding: match is_base64 {
            true => Vector::Text(base64_of(vector)),
            false => Vector::Numbers(vector),
        },
    };
    List {
        object: "list",
        data: vectors.iter().enumerate().map(entry).collect(),
        model: facts.model,
        usage: Usage {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_vector_has_length_1() {
        let mut vector = vec![0.6, 0.0, 0.8];
        shorten(&mut vector, 3);
        assert_eq!(vector, [0.6, 0.0, 0.8]);
        shorten(&mut vector, 2);
        assert_eq!(vector, [1.0, 0.0]);
        let mut nothing = vec![0.0, 1.0];
        shorten(&mut nothing, 1);
        assert_eq!(nothing, [0.0]);
    }

    #[test]
    fn numbers_come_back_to_the_bit() {
        let vectors = vec![vec![0.1_f32, -1.0 / 3.0, f32::MIN_POSITIVE]];
        let facts = Facts {
            model: "m",
            tokens: 3,
            took: Duration::from_nanos(7),
        };
        let old = body(&Form::OllamaOld, &vectors, facts);
        assert_eq!(old, r#"{"embedding":[0.1,-0.33333334,1.1754944e-38]}"#);
        let is_base64 = true;
        let list = body(&Form::OpenAi { is_base64 }, &vectors, facts);
        // By Python: base64.b64encode(struct.pack("<3f", 0.1, -1/3, 2**-126)).
        assert!(list.contains(r#""embedding":"zczMPauqqr4AAIAA""#), "{list}");
    }
}
