//! Grammars in requests, under vLLM's names `guided_json`, `guided_regex`, `guided_choice` and
//! `guided_grammar`; llama-server calls the last `grammar`. Grammars are in the Lark dialect of
//! `llguidance`, whose compiler rejects GBNF.

use paceline_text::grammar::{Grammar, MAX_GRAMMAR_BYTES};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::conversation::AnswerFormat;
use crate::rejection::Rejection;

/// The grammar fields; a request may have one.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct Guided {
    /// A JSON Schema that the answer matches. Not OpenAI's.
    guided_json: Option<Map<String, Value>>,
    /// A regular expression that the answer matches. Not OpenAI's.
    #[schemars(length(min = 1, max = MAX_GRAMMAR_BYTES))]
    guided_regex: Option<String>,
    /// The texts that the answer may be. Not OpenAI's.
    #[schemars(length(min = 1), inner(length(min = 1)))]
    guided_choice: Option<Vec<String>>,
    /// A grammar in the Lark dialect of llguidance that the answer matches. Not OpenAI's.
    #[schemars(length(min = 1, max = MAX_GRAMMAR_BYTES))]
    guided_grammar: Option<String>,
    /// Another name of guided_grammar; GBNF is not taken. Not OpenAI's.
    #[schemars(length(min = 1, max = MAX_GRAMMAR_BYTES))]
    grammar: Option<String>,
}

impl Guided {
    /// The response format of a grammar field or of `other`, and the name of its field.
    ///
    /// # Errors
    /// [`Rejection::Conflict`] for two of them.
    pub(super) fn format(
        self,
        other: (AnswerFormat, &'static str),
    ) -> Result<(AnswerFormat, &'static str), Rejection> {
        let schema = |schema| AnswerFormat::JsonSchema(Value::Object(schema));
        let fields = [
            ("grammar", self.grammar.map(Grammar::Lark)),
            ("guided_regex", self.guided_regex.map(Grammar::Regex)),
            ("guided_grammar", self.guided_grammar.map(Grammar::Lark)),
            ("guided_choice", self.guided_choice.map(Grammar::Choice)),
        ];
        let fields = fields.map(|(name, grammar)| (grammar.map(AnswerFormat::Grammar), name));
        let mut given = [(self.guided_json.map(schema), "guided_json")]
            .into_iter()
            .chain(fields)
            .filter_map(|(format, name)| Some((format?, name)));
        given.try_fold(other, |format, given| match format {
            (AnswerFormat::Text, _) => Ok(given),
            _ => Err(Rejection::Conflict {
                param: given.1,
                condition: "together with another grammar or format",
            }),
        })
    }
}
