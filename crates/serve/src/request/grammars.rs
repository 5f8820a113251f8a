//! Grammars in requests, under vLLM's names `guided_json`, `guided_regex`, `guided_choice` and
//! `guided_grammar`; llama-server calls the last `grammar`. Grammars are in the Lark dialect of
//! `llguidance`, whose compiler rejects GBNF.

use paceline_text::grammar::Grammar;
use serde_json::Value;

use super::RequestParser;
use crate::conversation::AnswerFormat;
use crate::field::{FieldValues, wrong_type};
use crate::rejection::Rejection;

/// The grammar fields; a request may have one.
const NAMES: [&str; 5] = [
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "grammar",
];

impl RequestParser<'_> {
    /// The response format of a grammar field or of `other`, and the name of its field.
    ///
    /// # Errors
    /// [`Rejection::Conflict`] for two of them.
    pub(super) fn guided(
        &self,
        fields: &mut FieldValues,
        (other, at): (AnswerFormat, &'static str),
    ) -> Result<(AnswerFormat, &'static str), Rejection> {
        let mut format = (other, at);
        for name in NAMES.iter().rev() {
            let Some(value) = fields.take(name) else {
                continue;
            };
            if format.0 != AnswerFormat::Text {
                let condition = "together with another grammar or format";
                let param = name;
                return Err(Rejection::Conflict { param, condition });
            }
            format = (guide(name, value)?, name);
        }
        Ok(format)
    }
}

fn guide(name: &str, value: Value) -> Result<AnswerFormat, Rejection> {
    let grammar = match (name, value) {
        ("guided_json", schema) => return Ok(AnswerFormat::JsonSchema(schema)),
        ("guided_choice", list) => Grammar::Choice(texts(name, list)?),
        ("guided_regex", Value::String(pattern)) => Grammar::Regex(pattern),
        (_, Value::String(lark)) => Grammar::Lark(lark),
        (_, other) => return Err(wrong_type(name.into(), &other, "a string")),
    };
    Ok(AnswerFormat::Grammar(grammar))
}

fn texts(name: &str, list: Value) -> Result<Vec<String>, Rejection> {
    let wrong = |value: &Value| wrong_type(name.into(), value, "an array of strings");
    let Value::Array(list) = list else {
        return Err(wrong(&list));
    };
    let text = |value: Value| match value {
        Value::String(text) => Ok(text),
        other => Err(wrong(&other)),
    };
    list.into_iter().map(text).collect()
}
