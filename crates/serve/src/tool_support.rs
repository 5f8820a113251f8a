//! Tool calls and thinking of the served model, and the grammar that constrains a response.
//!
//! ```text
//! Conversation, prompt --Calling--> Constraint for the engine, tools::Reader for the answer
//! ```

use std::sync::{Arc, OnceLock};

use paceline_engine::{ConstraintError, Grammars, MAX_SHOWN};
use paceline_text::chat::ChatTemplate;
use paceline_text::grammar::{Constraint, Grammar, strict};
use paceline_text::tokenizer::Tokenizer;
use paceline_text::tools::{
    CallGrammar, CallRules, ReaderOptions, ResponseTemplate, Syntax, ToolCallParser,
};
use serde_json::{Value, json};

use crate::conversation::{AnswerFormat, Conversation, Tool, ToolChoice};
use crate::model::ServedModel;
use crate::rejection::Rejection;
use crate::schema::FieldWarnings;

/// Parses and constrains one model's output.
pub(crate) struct ToolSupport {
    /// `None` for a model without a chat template.
    syntax: Option<Syntax>,
    /// The model's own description of its output; parsers prefer it.
    response: Option<Arc<ResponseTemplate>>,
    /// Whether the model was trained to call tools, in a known syntax.
    has_calls: bool,
    /// Control tokens that the parser needs in the text.
    shown: Vec<u32>,
    tokenizer: Arc<Tokenizer>,
    /// Built on first use: indexing a vocabulary is slow.
    grammars: OnceLock<Result<Grammars, ConstraintError>>,
}

impl std::fmt::Debug for ToolSupport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("Calling");
        out.field("syntax", &self.syntax).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct ToolConstraint {
    pub(crate) constraint: Option<Constraint>,
    /// The tools, for the parser; empty where calls are plain text.
    tools: Vec<Value>,
    /// Whether a grammar guarantees well-formed calls.
    is_safe: bool,
}

impl ToolSupport {
    /// Cost: O(vocabulary).
    pub(crate) fn new(model: &ServedModel) -> Self {
        let syntax = model.template.as_deref().map(Syntax::of);
        let response = model.template.as_deref().and_then(ChatTemplate::response);
        let tokenizer = &model.tokenizer;
        let shown = syntax.map(|syntax| syntax.shown_tokens(tokenizer));
        let mut shown = shown.unwrap_or_default();
        shown.extend(response.iter().flat_map(|it| it.shown_tokens(tokenizer)));
        shown.sort_unstable();
        shown.dedup();
        shown.truncate(MAX_SHOWN);
        Self {
            syntax,
            response: response.cloned(),
            has_calls: model.has_calls(),
            shown,
            tokenizer: Arc::clone(&model.tokenizer),
            grammars: OnceLock::new(),
        }
    }

    /// Control tokens to keep in the response's text; empty where no parser runs.
    pub(crate) fn shown(&self, terms: &ToolConstraint) -> &[u32] {
        let is_read = !terms.tools.is_empty() || self.reasons();
        if is_read { &self.shown } else { &[] }
    }

    /// Whether the model was trained to call tools, in a known syntax.
    pub(crate) const fn has_calls(&self) -> bool {
        self.has_calls
    }

    /// Whether the model may think before it answers.
    pub(crate) fn reasons(&self) -> bool {
        let by_response = self.response.as_ref().is_some_and(|it| it.reasons());
        by_response || self.syntax.is_some_and(|syntax| syntax.reasons())
    }

    /// The constraint for the response to `prompt`, which is `conversation` as ids.
    ///
    /// Cost: compiles the grammar, to reject what the engine would.
    ///
    /// # Errors
    /// Names the field that cannot be enforced.
    pub(crate) fn terms(
        &self,
        conversation: &Conversation,
        prompt: &[u32],
        notes: &FieldWarnings,
    ) -> Result<ToolConstraint, Rejection> {
        let tools = conversation.shown_tools();
        if !tools.is_empty() && !self.has_calls() {
            return Err(Rejection::Unsupported {
                param: "tools".into(),
                got: "an array".into(),
                why: "the model was not trained to call tools, or in a form that is not known",
            });
        }
        let schema = schema_of(conversation)?;
        let mut terms = ToolConstraint {
            constraint: None,
            tools: tools.iter().map(Tool::for_rules).collect(),
            is_safe: false,
        };
        if terms.tools.is_empty() {
            terms.constraint = self.of_format(conversation, prompt, schema.as_ref())?;
        } else {
            let bound = self.of_calls(conversation, prompt, schema.as_ref(), notes)?;
            terms.is_safe = bound.is_some();
            terms.constraint = bound;
        }
        Ok(terms)
    }

    /// The constraint of a request without a conversation; it covers the whole response.
    pub(crate) fn whole(
        &self,
        format: &AnswerFormat,
        at: &str,
    ) -> Result<Option<Constraint>, Rejection> {
        let constraint = match format {
            AnswerFormat::Text => return Ok(None),
            AnswerFormat::JsonObject => Constraint::whole(Grammar::JsonObject),
            AnswerFormat::JsonSchema(schema) => {
                Constraint::whole(Grammar::JsonSchema(held(schema, at)?.to_string()))
            }
            AnswerFormat::Grammar(grammar) => Constraint::whole(grammar.clone()),
        };
        self.checked(constraint, at).map(Some)
    }

    /// The parser of a response; `None` where all of it is text.
    pub(crate) fn reader(
        &self,
        terms: &ToolConstraint,
        prompt: &[u32],
        is_stream: bool,
        id_seed: u64,
    ) -> Option<ToolCallParser> {
        let syntax = self.syntax?;
        let has_tools = !terms.tools.is_empty();
        if !has_tools && !self.reasons() {
            return None;
        }
        let options = ReaderOptions {
            // Streamed parts of a call cannot be taken back.
            holds_calls: !(is_stream && terms.is_safe),
            id_seed,
        };
        let (tokenizer, tools) = (&self.tokenizer, &terms.tools);
        let tells = |it: &&Arc<ResponseTemplate>| match has_tools {
            true => it.has_calls(),
            false => it.reasons(),
        };
        Some(match self.response.as_ref().filter(tells) {
            Some(response) => response.reader(tokenizer, prompt, tools, options),
            None => syntax.reader(tokenizer, prompt, tools, options),
        })
    }

    fn of_format(
        &self,
        conversation: &Conversation,
        prompt: &[u32],
        schema: Option<&Value>,
    ) -> Result<Option<Constraint>, Rejection> {
        let Some(syntax) = self.syntax else {
            return Ok(None);
        };
        let constraint = match (schema, &conversation.format) {
            (Some(schema), _) => syntax.bound_json(&self.tokenizer, prompt, schema),
            (None, AnswerFormat::Grammar(grammar)) => {
                syntax.bound(&self.tokenizer, prompt, grammar.clone())
            }
            (None, _) => return Ok(None),
        };
        self.checked(constraint, conversation.format_at).map(Some)
    }

    fn of_calls(
        &self,
        conversation: &Conversation,
        prompt: &[u32],
        schema: Option<&Value>,
        notes: &FieldWarnings,
    ) -> Result<Option<Constraint>, Rejection> {
        check_strict(conversation)?;
        let is_called = |tool: &&Tool| match &conversation.choice {
            ToolChoice::Named(name) => tool.name == *name,
            _ => true,
        };
        let tools = conversation.shown_tools().iter().filter(is_called);
        let tools: Vec<Value> = tools.map(Tool::for_rules).collect();
        let rules = CallRules {
            tools: &tools,
            is_required: conversation.needs_call(),
            is_parallel: conversation.is_parallel,
            has_any_arguments: false,
            answer: schema,
        };
        let Some(grammar) = self.grammar(prompt, &rules)? else {
            return unbound(conversation, notes).map(|()| None);
        };
        for (tool, keyword) in &grammar.relaxed {
            notes.warn(format!("tool {tool}: {keyword}, and does not count"));
        }
        let error = match self.check(&grammar.constraint) {
            Ok(()) => return Ok(Some(grammar.constraint)),
            Err(error) => error,
        };
        if conversation.tools.iter().any(|tool| tool.is_strict) {
            return Err(unusable("tools", &error));
        }
        notes.warn(format!("arguments are not held to schemas: {error}"));
        let rules = CallRules {
            has_any_arguments: true,
            ..rules
        };
        let Some(grammar) = self.grammar(prompt, &rules)? else {
            return Ok(None);
        };
        self.checked(grammar.constraint, "tools").map(Some)
    }

    fn grammar(
        &self,
        prompt: &[u32],
        rules: &CallRules<'_>,
    ) -> Result<Option<CallGrammar>, Rejection> {
        let Some(syntax) = self.syntax else {
            return Ok(None);
        };
        let grammar = syntax.constraint(&self.tokenizer, prompt, rules);
        grammar.map_err(|error| unusable("tools", &error))
    }

    fn checked(&self, constraint: Constraint, at: &str) -> Result<Constraint, Rejection> {
        let checked = self.check(&constraint);
        checked.map_err(|error| unusable(at, &error))?;
        Ok(constraint)
    }

    fn check(&self, constraint: &Constraint) -> Result<(), ConstraintError> {
        let make = || Grammars::new(&self.tokenizer, self.tokenizer.vocab_size());
        match self.grammars.get_or_init(make) {
            Ok(grammars) => grammars.check(constraint),
            Err(error) => Err(error.clone()),
        }
    }
}

/// The schema that a text response must match, if any.
fn schema_of(conversation: &Conversation) -> Result<Option<Value>, Rejection> {
    match &conversation.format {
        AnswerFormat::Text => Ok(None),
        AnswerFormat::JsonObject => Ok(Some(json!({"type": "object"}))),
        AnswerFormat::JsonSchema(schema) => held(schema, conversation.format_at).map(Some),
        AnswerFormat::Grammar(_) if conversation.shown_tools().is_empty() => Ok(None),
        AnswerFormat::Grammar(_) => {
            let (param, condition) = (conversation.format_at, "together with tools");
            Err(Rejection::Conflict { param, condition })
        }
    }
}

/// Makes a schema strict, so that the grammar can enforce it.
fn held(schema: &Value, at: &str) -> Result<Value, Rejection> {
    strict(schema).map_err(|error| unusable(at, &error))
}

fn unusable(at: &str, error: &dyn std::fmt::Display) -> Rejection {
    let (param, reason) = (at.to_owned(), error.to_string());
    Rejection::Grammar { param, reason }
}

/// # Errors
/// [`Rejection::Grammar`] with the tool's name.
fn check_strict(conversation: &Conversation) -> Result<(), Rejection> {
    let tools = conversation.shown_tools().iter();
    for tool in tools.filter(|tool| tool.is_strict) {
        let reason = |error| format!("the schema of {:?}, which is strict: {error}", tool.name);
        strict(&tool.parameters).map_err(|error| unusable("tools", &reason(error)))?;
    }
    Ok(())
}

/// Accepts or rejects a request whose calls no grammar can constrain.
fn unbound(conversation: &Conversation, notes: &FieldWarnings) -> Result<(), Rejection> {
    let why = "calls in this model's form are not bound to a grammar";
    let refused = |param: &str| {
        let (param, got) = (param.to_owned(), "given".to_owned());
        Err(Rejection::Unsupported { param, got, why })
    };
    if conversation.needs_call() {
        return refused("tool_choice");
    }
    if conversation.format != AnswerFormat::Text {
        return refused(conversation.format_at);
    }
    if conversation.tools.iter().any(|tool| tool.is_strict) {
        notes.warn(format!("strict does not count: {why}"));
    }
    Ok(())
}
