//! A conversation independent of the API dialect: the request parsers build it, and the chat
//! template renders it.
//!
//! ```text
//! OpenAI chat, responses --+
//! Anthropic messages ------+--> Conversation --> text::chat::Message + variables --> ids
//! Ollama chat -------------+
//! ```

use paceline_text::chat::{
    self, ChatMessage, ChatOptions, ChatTemplate, PromptLimits, TemplateError,
};
use paceline_text::grammar::Grammar;
use paceline_text::tokenizer::Tokenizer;
use serde_json::{Map, Value};

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
    pub(crate) turns: Vec<ChatMessage>,
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
        let bytes = |turn: &ChatMessage| {
            turn.content.len() + turn.reasoning.as_ref().map_or(0, String::len)
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
    pub(crate) fn encode(
        &self,
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        (unix_s, bounds): (u64, PromptLimits),
    ) -> Result<Vec<u32>, chat::Error> {
        let options = self.options((unix_s, bounds));
        let try_with =
            |turns: &[ChatMessage]| template.encode_chat(tokenizer, &messages(turns), &options);
        self.first_taken(try_with)
    }

    /// The prompt as text, for display.
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
        try_with: impl Fn(&[ChatMessage]) -> Result<T, chat::Error>,
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

fn messages(turns: &[ChatMessage]) -> Vec<ChatMessage> {
    let mut messages = turns.to_vec();
    chat::name_results(&mut messages);
    messages
}

/// Later system turns as user turns, in place.
fn systems_first(turns: &[ChatMessage]) -> Vec<ChatMessage> {
    let is_later = |i: usize| i > 0;
    let change = |(i, turn): (usize, &ChatMessage)| {
        let mut turn = turn.clone();
        if turn.role == "system" && is_later(i) {
            turn.role = "user".to_owned();
        }
        turn
    };
    turns.iter().enumerate().map(change).collect()
}

/// As [`systems_first`], with neighbouring user turns joined.
fn joined(turns: &[ChatMessage]) -> Vec<ChatMessage> {
    let mut all: Vec<ChatMessage> = Vec::with_capacity(turns.len());
    for turn in systems_first(turns) {
        match all.last_mut() {
            Some(last) if last.role == "user" && turn.role == "user" => {
                last.content.push_str("\n\n");
                last.content.push_str(&turn.content);
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
            ChatMessage::new("system", "a"),
            ChatMessage::new("user", "b"),
            ChatMessage::new("system", "c"),
            ChatMessage::new("assistant", "d"),
        ];
        let roles = |turns: &[ChatMessage]| {
            turns
                .iter()
                .map(|turn| turn.role.clone())
                .collect::<Vec<_>>()
        };
        let first = systems_first(&turns);
        assert_eq!(roles(&first), ["system", "user", "user", "assistant"]);
        let joined = joined(&turns);
        assert_eq!(roles(&joined), ["system", "user", "assistant"]);
        assert_eq!(joined[1].content, "b\n\nc");
    }
}
