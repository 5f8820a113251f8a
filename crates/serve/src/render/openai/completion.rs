//! Choices of `/v1/completions`.

use paceline_formats::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use crate::choice::Entry;
use crate::render::tokens::{escaped, number, starts};

/// A choice, whole or a piece of it.
pub(super) fn choice(index: usize, text: &str, finish: Option<&str>, logprobs: Value) -> Value {
    json!({"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish})
}

/// Four arrays side by side. `n_chars` counts the characters of the answer that began in earlier
/// tokens: a token's offset is where its first byte is, in characters from the answer's start.
pub(super) fn logprobs(tokenizer: &Tokenizer, entries: &[Entry], n_chars: &mut usize) -> Value {
    let bytes = |token: u32| tokenizer.token_bytes(token).unwrap_or_default();
    // As OpenAI writes what is no text by itself.
    let name = |token: u32| match std::str::from_utf8(bytes(token)) {
        Ok(text) => text.to_owned(),
        Err(_) => format!("bytes:{}", escaped(bytes(token))),
    };
    let (mut tokens, mut values, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for Entry { token, logprobs } in entries {
        let begins_inside = bytes(*token)
            .first()
            .is_some_and(|byte| byte & 0xc0 == 0x80);
        offsets.push(n_chars.saturating_sub(begins_inside.into()));
        *n_chars += starts(bytes(*token));
        tokens.push(name(*token));
        values.push(number(logprobs.logprob));
        let mut top = Map::new();
        // The chosen token is always among them; of equal names the more probable stays.
        let chosen = (*token, logprobs.logprob);
        for (token, logprob) in logprobs.top.iter().copied().chain([chosen]) {
            top.entry(name(token)).or_insert(number(logprob).into());
        }
        tops.push(top);
    }
    json!({
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    })
}
