//! `tools`, `tool_choice` and `response_format` in OpenAI's forms.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::CacheControl;
use super::bounds::MAX_TEXT;
use crate::conversation::{AnswerFormat, Conversation, Tool, ToolChoice};
use crate::rejection::Rejection;

/// A tool of a chat.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(super) struct ChatTool {
    /// Always function.
    #[schemars(extend("enum" = ["function"], "x-why" = "functions are the only tools"))]
    #[serde(rename = "type")]
    _type: String,
    /// Name, description and parameters.
    function: ToolFunction,
    #[serde(flatten)]
    _cache_control: CacheControl,
}

/// A function that the model may call.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(super) struct ToolFunction {
    /// Name of the function.
    #[schemars(length(min = 1, max = 256))]
    name: String,
    /// Purpose of the function.
    #[schemars(length(max = MAX_TEXT))]
    description: Option<String>,
    /// JSON Schema of its arguments.
    parameters: Option<Map<String, Value>>,
    /// Whether arguments follow the schema to the letter.
    strict: Option<bool>,
}

/// `tool_choice`: a word, a named function, or allowed tools.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum ToolChoiceField {
    Word(ChoiceWord),
    Object(Box<ChoiceObject>),
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ChoiceWord {
    Auto,
    None,
    Required,
    // Another name of required.
    Any,
}

/// Chat nests a name in `function`, and a list in `allowed_tools`; responses put them next to
/// `type`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(extend("x-why" = "its type is \"function\" or \"allowed_tools\""))]
pub(super) enum ChoiceObject {
    Function {
        function: Option<ToolName>,
        name: Option<String>,
    },
    AllowedTools {
        allowed_tools: Option<AllowedTools>,
        #[serde(flatten)]
        flat: Option<AllowedTools>,
    },
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct ToolName {
    name: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct AllowedTools {
    mode: AllowedMode,
    tools: Vec<AllowedTool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum AllowedMode {
    Auto,
    Required,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct AllowedTool {
    #[schemars(extend("enum" = ["function"], "x-why" = "functions are the only tools"))]
    #[serde(rename = "type")]
    _type: String,
    function: Option<ToolName>,
    name: Option<String>,
}

/// `response_format`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(
    deny_unknown_fields,
    extend("x-why" = "its type is text, json_object or json_schema")
)]
pub(super) enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: SchemaFormat },
}

/// A JSON Schema of the answer.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(super) struct SchemaFormat {
    /// JSON Schema of the answer.
    schema: Option<Map<String, Value>>,
    #[serde(flatten)]
    _no_effect: SchemaNotes,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[expect(dead_code, reason = "accepted, and no effect")]
struct SchemaNotes {
    /// Accepted, no effect.
    #[schemars(length(max = 256))]
    name: Option<String>,
    /// Accepted, no effect.
    #[schemars(length(max = MAX_TEXT))]
    description: Option<String>,
    /// Accepted, no effect: schemas always hold.
    strict: Option<bool>,
}

impl ChatTool {
    pub(super) fn tool(self) -> Tool {
        self.function.tool()
    }
}

impl ToolFunction {
    pub(super) fn tool(self) -> Tool {
        Tool {
            name: self.name,
            description: self.description,
            parameters: parameters(self.parameters),
            is_strict: self.strict == Some(true),
        }
    }
}

/// The schema of a tool's arguments, or that of none.
pub(super) fn parameters(given: Option<Map<String, Value>>) -> Value {
    given.map_or_else(
        || json!({"type": "object", "properties": {}}),
        Value::Object,
    )
}

impl ResponseFormat {
    pub(super) fn format(self) -> AnswerFormat {
        match self {
            Self::Text => AnswerFormat::Text,
            Self::JsonObject => AnswerFormat::JsonObject,
            Self::JsonSchema { json_schema } => json_schema.format(),
        }
    }
}

impl SchemaFormat {
    pub(super) fn format(self) -> AnswerFormat {
        AnswerFormat::JsonSchema(Value::Object(self.schema.unwrap_or_default()))
    }
}

/// Applies `tool_choice` to the tools of a conversation.
///
/// # Errors
/// [`Rejection::Missing`] for objects without names, and those of [`check_choice`].
pub(super) fn choose(
    choice: Option<ToolChoiceField>,
    conversation: &mut Conversation,
) -> Result<(), Rejection> {
    let object = match choice {
        None => return Ok(()),
        Some(ToolChoiceField::Word(word)) => {
            conversation.choice = match word {
                ChoiceWord::Auto => ToolChoice::Auto,
                ChoiceWord::None => ToolChoice::None,
                ChoiceWord::Required | ChoiceWord::Any => ToolChoice::Required,
            };
            return check_choice(conversation);
        }
        Some(ToolChoiceField::Object(object)) => *object,
    };
    match object {
        ChoiceObject::Function { function, name } => {
            let name = function.map(|function| function.name).or(name);
            let missing = || needs("tool_choice.function.name", "the name of a tool");
            conversation.choice = ToolChoice::Named(name.ok_or_else(missing)?);
        }
        ChoiceObject::AllowedTools {
            allowed_tools,
            flat,
        } => {
            let missing = || needs("tool_choice.allowed_tools", "mode and tools");
            let allowed = allowed_tools.or(flat).ok_or_else(missing)?;
            conversation.choice = match allowed.mode {
                AllowedMode::Auto => ToolChoice::Auto,
                AllowedMode::Required => ToolChoice::Required,
            };
            let names = allowed.tools.into_iter().map(AllowedTool::name);
            let names: Option<Vec<String>> = names.collect();
            let missing = || {
                needs(
                    "tool_choice.tools",
                    "tools of type function, each with its name",
                )
            };
            let names = names.ok_or_else(missing)?;
            conversation.tools.retain(|tool| names.contains(&tool.name));
        }
    }
    check_choice(conversation)
}

impl AllowedTool {
    fn name(self) -> Option<String> {
        self.function.map(|function| function.name).or(self.name)
    }
}

fn needs(param: &str, expected: &str) -> Rejection {
    let (param, expected) = (param.to_owned(), expected.to_owned());
    Rejection::Missing { param, expected }
}

/// # Errors
/// [`Rejection::Conflict`] for required calls without tools.
pub(super) fn check_choice(conversation: &Conversation) -> Result<(), Rejection> {
    let has = |name: &String| conversation.tools.iter().any(|tool| tool.name == *name);
    let condition = match &conversation.choice {
        ToolChoice::Required if conversation.tools.is_empty() => "without tools",
        ToolChoice::Named(name) if !has(name) => "for a tool that is not among tools",
        _ => return Ok(()),
    };
    let param = "tool_choice";
    Err(Rejection::Conflict { param, condition })
}
