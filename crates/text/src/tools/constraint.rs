//! Constraints of answers that are no calls, for models that may think before they answer.

use serde_json::Value as Json;

use super::tail::tail_of;
use super::{Syntax, ToolCallFormat, calls};
use crate::grammar::{Constraint, Grammar, Start};
use crate::tokenizer::Tokenizer;

/// Begins an answer of gpt-oss behind what it thought.
const HARMONY_FINAL: &str = "<|channel|>final<|message|>";

impl Syntax {
    /// An answer to `prompt` (token ids) that must match `grammar`. Where the prompt ends inside
    /// reasoning, the grammar binds behind it.
    pub fn bound(&self, tokenizer: &Tokenizer, prompt: &[u32], grammar: Grammar) -> Constraint {
        let after = |marker: &str| Start::After {
            marker: marker.to_owned(),
        };
        let start = match self.reasoning_end() {
            _ if self.family() == Some(ToolCallFormat::Harmony) => after(HARMONY_FINAL),
            Some(close) if self.opens_reasoning(&tail_of(tokenizer, prompt)) => after(close),
            _ => Start::Now,
        };
        Constraint { grammar, start }
    }

    /// An answer to `prompt` that is JSON of `schema`, behind reasoning if the model thinks first.
    /// The schema is one that [`strict`](crate::grammar::strict) gave.
    pub fn bound_json(&self, tokenizer: &Tokenizer, prompt: &[u32], schema: &Json) -> Constraint {
        let plain = Grammar::JsonSchema(schema.to_string());
        let bound = self.bound(tokenizer, prompt, plain);
        let Some((open, close)) = self.reasoning() else {
            return bound;
        };
        let mut lark = match bound.start {
            Start::Now => thought(tokenizer, open, close, "answer"),
            // Models write line ends behind what they thought.
            _ => "start: WS? answer\n".to_owned(),
        };
        lark += &calls::json_rule("answer", schema);
        Constraint {
            grammar: Grammar::Lark(lark + calls::SPACE),
            start: bound.start,
        }
    }
}

/// `start`: `rest`, which may be a choice, behind reasoning or without any.
pub(super) fn thought(tokenizer: &Tokenizer, open: &str, close: &str, rest: &str) -> String {
    let open = calls::literal(tokenizer, open);
    let free = calls::free_text(tokenizer, "thought", close);
    format!("start: ({open} thoughtv WS?)? ({rest})\n{free}")
}
