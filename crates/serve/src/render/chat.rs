//! Choices of `/v1/chat/completions`.

use paceline_formats::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::tokens::{escaped, number};
use crate::choice::{Delta, Entry};

/// A choice of a whole answer.
pub(super) fn choice(index: usize, delta: Delta, logprobs: Value) -> Value {
    let message = json!({"role": "assistant", "content": delta.text, "refusal": null});
    json!({
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": delta.finish,
    })
}

/// The first chunk of a choice.
pub(super) fn opening(index: usize) -> Value {
    let delta = json!({"role": "assistant", "content": "", "refusal": null});
    json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null})
}

/// A chunk with text.
pub(super) fn delta(index: usize, text: &str, logprobs: Value) -> Value {
    let delta = json!({"content": text});
    json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null})
}

/// The last chunk of a choice.
pub(super) fn closing(index: usize, finish: &str) -> Value {
    json!({"index": index, "delta": {}, "logprobs": null, "finish_reason": finish})
}

pub(super) fn logprobs(tokenizer: &Tokenizer, entries: &[Entry]) -> Value {
    let one = |token: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(token).unwrap_or_default();
        json!({"token": escaped(bytes), "bytes": bytes, "logprob": number(logprob)})
    };
    let entry = |entry: &Entry| {
        let mut value = one(entry.token, entry.logprobs.logprob);
        let top = entry.logprobs.top.iter();
        let top: Vec<Value> = top.map(|(token, logprob)| one(*token, *logprob)).collect();
        value["top_logprobs"] = top.into();
        value
    };
    let content: Vec<Value> = entries.iter().map(entry).collect();
    json!({"content": content, "refusal": null})
}
