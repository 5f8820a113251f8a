//! The end of a prompt as text.

use crate::tokenizer::Tokenizer;

/// Tokens of a prompt in which the end of a reasoning's tag is looked for.
const TAIL_TOKENS: usize = 32;

/// The end of a prompt as text, names of control tokens included.
pub(super) fn tail_of(tokenizer: &Tokenizer, prompt: &[u32]) -> String {
    text_of(tokenizer, prompt, TAIL_TOKENS)
}

/// The last `tokens` of a prompt as text, names of control tokens included.
pub(super) fn text_of(tokenizer: &Tokenizer, prompt: &[u32], tokens: usize) -> String {
    let tail = &prompt[prompt.len().saturating_sub(tokens)..];
    let mut bytes = Vec::new();
    for id in tail {
        let name = tokenizer
            .token_text(*id)
            .filter(|_| tokenizer.is_control(*id));
        let text = tokenizer.token_bytes(*id).unwrap_or_default();
        bytes.extend_from_slice(name.map_or(text, str::as_bytes));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
