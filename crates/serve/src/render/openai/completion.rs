//! Choices of `/v1/completions`.

use paceline_engine::TokenLogprobs;
use paceline_text::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use crate::render::tokens::{escaped, number, starts};

/// A choice, whole or a chunk of it.
pub(super) fn choice(index: usize, text: &str, finish: Option<&str>, logprobs: Value) -> Value {
    json!({"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish})
}

/// A token of prompt or answer; a prompt's first has no log-probabilities.
pub(super) type EchoToken<'a> = (u32, Option<&'a TokenLogprobs>);

/// The tokens of a prompt with their log-probabilities; the first has none.
pub(super) fn scored<'a>((tokens, scores): (&[u32], &'a [TokenLogprobs])) -> Vec<EchoToken<'a>> {
    let scores = std::iter::once(None).chain(scores.iter().map(Some));
    tokens.iter().copied().zip(scores).collect()
}

/// The four parallel arrays of `logprobs`. `n_chars` counts the characters that began in earlier
/// tokens. A token's offset is that of its first byte, in characters from the text's start.
pub(super) fn logprobs(
    tokenizer: &Tokenizer,
    scored: &[EchoToken<'_>],
    n_chars: &mut usize,
) -> Value {
    let bytes = |token: u32| tokenizer.token_bytes(token).unwrap_or_default();
    // In OpenAI's notation for bytes that are not valid text; a control token has its name.
    let name = |token: u32| match std::str::from_utf8(bytes(token)) {
        Ok("") => tokenizer.token_text(token).unwrap_or_default().to_owned(),
        Ok(text) => text.to_owned(),
        Err(_) => format!("bytes:{}", escaped(bytes(token))),
    };
    let (mut tokens, mut values, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for (token, logprobs) in scored {
        let begins_inside = bytes(*token)
            .first()
            .is_some_and(|byte| byte & 0xc0 == 0x80);
        offsets.push(n_chars.saturating_sub(begins_inside.into()));
        *n_chars += starts(bytes(*token));
        tokens.push(name(*token));
        let Some(logprobs) = logprobs else {
            values.push(Value::Null);
            tops.push(Value::Null);
            continue;
        };
        values.push(number(logprobs.logprob).into());
        let mut top = Map::new();
        // Always includes the chosen token; of equal names the more probable stays.
        let chosen = (*token, logprobs.logprob);
        for (token, logprob) in logprobs.top.iter().copied().chain([chosen]) {
            top.entry(name(token)).or_insert(number(logprob).into());
        }
        tops.push(Value::Object(top));
    }
    json!({
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    })
}
