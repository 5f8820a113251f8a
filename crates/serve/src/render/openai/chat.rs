//! Choices of `/v1/chat/completions`.

use paceline_text::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::choice::{ChoiceOutput, CompletedCall, Delta, ResponsePart, ScoredToken};
use crate::render::tokens::{escaped, number};

/// A choice of a whole response.
pub(super) fn choice(index: usize, said: &ChoiceOutput, logprobs: Value) -> Value {
    let is_silent = said.text.is_empty() && !said.calls.is_empty();
    let content = (!is_silent).then_some(said.text.as_str());
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !said.reasoning.is_empty() {
        message["reasoning_content"] = said.reasoning.as_str().into();
    }
    if !said.calls.is_empty() {
        let calls: Vec<Value> = said.calls.iter().map(call).collect();
        message["tool_calls"] = calls.into();
    }
    json!({
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": said.finish_reason(),
    })
}

fn call(call: &CompletedCall) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"id": call.id, "type": "function", "function": function})
}

/// The first chunk of a choice.
pub(super) fn opening(index: usize) -> Value {
    let delta = json!({"role": "assistant", "content": "", "refusal": null});
    json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null})
}

/// Chunks of a delta; the first has the log-probabilities.
pub(super) fn deltas(index: usize, delta: &Delta, logprobs: Value) -> Vec<Value> {
    let mut parts: Vec<Value> = delta.pieces.iter().filter_map(part).collect();
    if parts.is_empty() && !delta.entries.is_empty() {
        parts.push(json!({"content": ""}));
    }
    let mut logprobs = Some(logprobs);
    let chunk = |part| {
        let logprobs = logprobs.take().unwrap_or_default();
        json!({"index": index, "delta": part, "logprobs": logprobs, "finish_reason": null})
    };
    parts.into_iter().map(chunk).collect()
}

fn part(piece: &ResponsePart) -> Option<Value> {
    let call = |value: Value| Some(json!({"tool_calls": [value]}));
    match piece {
        ResponsePart::Text(text) if text.is_empty() => None,
        ResponsePart::Text(text) => Some(json!({"content": text})),
        ResponsePart::Reasoning(text) => Some(json!({"reasoning_content": text})),
        ResponsePart::Call { index, id, name } => call(json!({
            "index": index, "id": id, "type": "function",
            "function": {"name": name, "arguments": ""},
        })),
        ResponsePart::Arguments { index, text } => {
            call(json!({"index": index, "function": {"arguments": text}}))
        }
        ResponsePart::CallEnd { .. } => None,
    }
}

/// The last chunk of a choice.
pub(super) fn closing(index: usize, finish: &str) -> Value {
    json!({"index": index, "delta": {}, "logprobs": null, "finish_reason": finish})
}

pub(super) fn logprobs(tokenizer: &Tokenizer, entries: &[ScoredToken]) -> Value {
    let one = |token: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(token).unwrap_or_default();
        json!({"token": escaped(bytes), "bytes": bytes, "logprob": number(logprob)})
    };
    let entry = |entry: &ScoredToken| {
        let mut value = one(entry.token, entry.logprobs.logprob);
        let top = entry.logprobs.top.iter();
        let top: Vec<Value> = top.map(|(token, logprob)| one(*token, *logprob)).collect();
        value["top_logprobs"] = top.into();
        value
    };
    let content: Vec<Value> = entries.iter().map(entry).collect();
    json!({"content": content, "refusal": null})
}
