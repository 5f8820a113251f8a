//! A conversation independent of the API dialect: the request parsers build it, and the chat
//! template renders it.
//!
//! ```text
//! OpenAI chat, responses --+
//! Anthropic messages ------+--> Conversation --> text::chat::Message + variables --> ids
//! Ollama chat -------------+
//! ```

use paceline_text::chat::{
    self, ChatMessage, ChatOptions, ChatTemplate, PromptLimits, TemplateError, ToolCall,
};
use paceline_text::grammar::Grammar;
use paceline_text::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The speaker of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum TurnRole {
    System,
    User,
    Assistant,
    Tool,
}

impl TurnRole {
    const fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A turn of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ConversationTurn {
    pub(crate) role: TurnRole,
    pub(crate) text: String,
    /// The speaker's name, or the tool's for a result.
    pub(crate) name: Option<String>,
    /// The assistant's thinking.
    pub(crate) reasoning: Option<String>,
    /// Tool calls of an assistant turn.
    pub(crate) calls: Vec<TurnToolCall>,
    /// For a tool result, the call's id.
    pub(crate) answers: Option<String>,
}

impl ConversationTurn {
    pub(crate) fn new(role: TurnRole, text: impl Into<String>) -> Self {
        Self {
            role,
            text: text.into(),
            name: None,
            reasoning: None,
            calls: Vec::new(),
            answers: None,
        }
    }

    /// The result of the tool call `id`.
    pub(crate) fn result(id: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            answers: Some(id.into()),
            ..Self::new(TurnRole::Tool, text)
        }
    }

    fn message(&self) -> ChatMessage {
        ChatMessage {
            role: self.role.name().to_owned(),
            content: self.text.clone(),
            reasoning: self.reasoning.clone(),
            tool_calls: self.calls.iter().map(TurnToolCall::for_template).collect(),
            tool_call_id: self.answers.clone(),
            name: self.name.clone(),
            ..ChatMessage::default()
        }
    }
}

/// A tool call in a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TurnToolCall {
    pub(crate) id: String,
    pub(crate) name: String,
    /// Parsed, because templates print or iterate over them; a string if the client's were not
    /// JSON.
    pub(crate) arguments: Value,
}

impl TurnToolCall {
    fn for_template(&self) -> ToolCall {
        ToolCall {
            id: self.id.clone(),
            name: self.name.clone(),
            arguments: self.arguments.clone(),
        }
    }
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// JSON Schema of the arguments.
    pub(crate) parameters: Value,
    /// Whether arguments must follow the schema to the letter.
    pub(crate) is_strict: bool,
}

impl Tool {
    /// In the form that `transformers` passes to templates.
    fn for_template(&self) -> Value {
        let parameters = Some(self.parameters.clone());
        chat::function_tool(&self.name, self.description.as_deref(), parameters)
    }

    /// The same with `strict`, which templates would print.
    pub(crate) fn for_rules(&self) -> Value {
        let mut tool = self.for_template();
        tool["function"]["strict"] = self.is_strict.into();
        tool
    }
}

/// `tool_choice`: whether and which tools to call.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No tools; the prompt has none.
    None,
    /// At least one call.
    Required,
    Named(String),
}

/// `response_format`: the required form of the response text.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum AnswerFormat {
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    JsonSchema(Value),
    /// Text that matches a grammar other than a schema.
    Grammar(Grammar),
}

/// Thinking options for the template.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Thinking {
    pub(crate) is_on: Option<bool>,
    /// `low`, `medium`, `high`...
    pub(crate) effort: Option<String>,
}

/// The conversation to continue, with tools and format.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Conversation {
    pub(crate) turns: Vec<ConversationTurn>,
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    /// Whether one turn may have several calls.
    pub(crate) is_parallel: bool,
    pub(crate) format: AnswerFormat,
    /// Name of the field that set `format`, for errors.
    pub(crate) format_at: &'static str,
    pub(crate) thinking: Thinking,
    /// More variables for the template.
    pub(crate) variables: Map<String, Value>,
}

/// Template variables that this module sets; clients may not.
pub(crate) const OWN_VARIABLES: [&str; 6] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
];

impl Conversation {
    /// Tools for the prompt.
    pub(crate) fn shown_tools(&self) -> &[Tool] {
        match self.choice {
            ToolChoice::None => &[],
            _ => &self.tools,
        }
    }

    /// Whether the response must be a tool call.
    pub(crate) const fn needs_call(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// Lower bound of the prompt's bytes.
    pub(crate) fn text_bytes(&self) -> usize {
        let bytes = |turn: &ConversationTurn| {
            turn.text.len() + turn.reasoning.as_ref().map_or(0, String::len)
        };
        self.turns.iter().map(bytes).sum()
    }

    fn options(&self, (unix_s, bounds): (u64, PromptLimits)) -> ChatOptions {
        let mut variables = self.variables.clone();
        let Thinking { is_on, effort } = &self.thinking;
        if let Some(is_on) = is_on {
            // Names in Qwen's templates, and in DeepSeek's and Granite's.
            for name in ["enable_thinking", "thinking"] {
                variables.entry(name).or_insert((*is_on).into());
            }
        }
        if let Some(effort) = effort {
            variables
                .entry("reasoning_effort")
                .or_insert(effort.as_str().into());
        }
        ChatOptions {
            add_generation_prompt: true,
            now_unix_s: i64::try_from(unix_s).ok(),
            tools: self.shown_tools().iter().map(Tool::for_template).collect(),
            variables,
            bounds,
        }
    }

    /// Renders and tokenises the prompt.
    ///
    /// System turns are rendered in place. A template that rejects later ones gets them as user
    /// turns; one that requires alternating roles gets neighbours joined.
    ///
    /// Cost: one rendering and encoding; up to two more renderings for such a template.
    ///
    /// # Errors
    /// The template's or the tokenizer's.
    pub(crate) fn encode(
        &self,
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        (unix_s, bounds): (u64, PromptLimits),
    ) -> Result<Vec<u32>, chat::Error> {
        let options = self.options((unix_s, bounds));
        let try_with = |turns: &[ConversationTurn]| {
            template.encode_chat(tokenizer, &messages(turns), &options)
        };
        self.first_taken(try_with)
    }

    /// The prompt as text, for display.
    ///
    /// # Errors
    /// The errors of [`encode`](Self::encode).
    pub(crate) fn render(
        &self,
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        (unix_s, bounds): (u64, PromptLimits),
    ) -> Result<String, chat::Error> {
        let options = self.options((unix_s, bounds));
        self.first_taken(|turns| template.render(tokenizer, &messages(turns), &options))
    }

    fn first_taken<T>(
        &self,
        try_with: impl Fn(&[ConversationTurn]) -> Result<T, chat::Error>,
    ) -> Result<T, chat::Error> {
        let refused = match try_with(&self.turns) {
            Err(error @ chat::Error::Template(TemplateError::Raised { .. })) => error,
            other => return other,
        };
        for changed in [systems_first(&self.turns), joined(&self.turns)] {
            if changed == self.turns {
                continue;
            }
            match try_with(&changed) {
                Err(chat::Error::Template(TemplateError::Raised { .. })) => {}
                other => return other,
            }
        }
        Err(refused)
    }
}

fn messages(turns: &[ConversationTurn]) -> Vec<ChatMessage> {
    let mut messages: Vec<ChatMessage> = turns.iter().map(ConversationTurn::message).collect();
    chat::name_results(&mut messages);
    messages
}

/// Later system turns as user turns, in place.
fn systems_first(turns: &[ConversationTurn]) -> Vec<ConversationTurn> {
    let is_later = |i: usize| i > 0;
    let change = |(i, turn): (usize, &ConversationTurn)| {
        let mut turn = turn.clone();
        if turn.role == TurnRole::System && is_later(i) {
            turn.role = TurnRole::User;
        }
        turn
    };
    turns.iter().enumerate().map(change).collect()
}

/// As [`systems_first`], with neighbouring user turns joined.
fn joined(turns: &[ConversationTurn]) -> Vec<ConversationTurn> {
    let mut all: Vec<ConversationTurn> = Vec::with_capacity(turns.len());
    for turn in systems_first(turns) {
        match all.last_mut() {
            Some(last) if last.role == TurnRole::User && turn.role == TurnRole::User => {
                last.text.push_str("\n\n");
                last.text.push_str(&turn.text);
            }
            _ => all.push(turn),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_systems_become_users_and_neighbours_are_joined() {
        let turns = [
            ConversationTurn::new(TurnRole::System, "a"),
            ConversationTurn::new(TurnRole::User, "b"),
            ConversationTurn::new(TurnRole::System, "c"),
            ConversationTurn::new(TurnRole::Assistant, "d"),
        ];
        let roles =
            |turns: &[ConversationTurn]| turns.iter().map(|turn| turn.role).collect::<Vec<_>>();
        let first = systems_first(&turns);
        assert_eq!(
            roles(&first),
            [
                TurnRole::System,
                TurnRole::User,
                TurnRole::User,
                TurnRole::Assistant
            ]
        );
        let joined = joined(&turns);
        assert_eq!(
            roles(&joined),
            [TurnRole::System, TurnRole::User, TurnRole::Assistant]
        );
        assert_eq!(joined[1].text, "b\n\nc");
    }
}
