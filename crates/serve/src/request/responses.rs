//! `POST /v1/responses`, as in OpenAI's specification of November 2026 and as Codex 0.169 sends
//! it: items to turns.
//!
//! Consecutive items of the assistant (reasoning, messages, calls) form one turn, as templates
//! expect. Tools in namespaces keep their own names, and hosted tools are dropped with a warning:
//! Codex always sends both.

use std::collections::BTreeMap;

use paceline_text::chat::{ChatMessage, ToolCall, call_arguments};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::bounds::{
    HOSTED_ITEMS, ITEM_PART_KINDS, MAX_COUNT, MAX_ITEM_PARTS, MAX_ITEM_TOOLS, MAX_NOTE, MAX_TEXT,
};
use super::sampling::{BasicSampling, Sampling};
use super::tools::{self, SchemaFormat, ToolChoiceField};
use super::{
    ApiDialect, Metadata, ModelName, ModelRequest, RequestParser, StreamOptions, unsupported,
};
use crate::conversation::{AnswerFormat, Conversation, Tool};
use crate::rejection::Rejection;
use crate::render::responses::ResponsesEcho;
use crate::schema::read;

/// Body of `POST /v1/responses`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct ResponseRequest {
    model: Option<ModelName>,
    /// A text, or items of a conversation.
    input: ResponseInput,
    /// Text before the conversation; not kept for later responses.
    #[schemars(length(max = MAX_TEXT))]
    instructions: Option<String>,
    /// A stored response that this one continues.
    #[schemars(length(min = 1, max = 128))]
    previous_response_id: Option<String>,
    /// Keeps the response in memory, among the latest. Default true.
    store: Option<bool>,
    /// Most tokens of the answer; the context bounds it as well. -1 and the default: the context.
    #[schemars(range(min = -1, max = MAX_COUNT), extend("not" = {"const": 0}))]
    max_output_tokens: Option<i64>,
    #[serde(flatten)]
    sampling: BasicSampling,
    /// Sends the answer as events. Default false.
    stream: Option<bool>,
    /// Functions, and namespaces of them; hosted tools are left out with a warning.
    #[schemars(length(max = MAX_ITEM_TOOLS))]
    tools: Option<Vec<ResponseTool>>,
    /// Whether and which tools are to be called. Default auto.
    tool_choice: Option<ToolChoiceField>,
    /// Whether one answer may have several calls. Default true.
    parallel_tool_calls: Option<bool>,
    /// format: form of the answer; verbosity.
    text: Option<TextOptions>,
    /// effort, for templates that know it; summary.
    reasoning: Option<ReasoningOptions>,
    #[serde(flatten)]
    _no_effect: NoEffect,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[expect(dead_code, reason = "accepted, and no effect on the answer")]
struct NoEffect {
    /// Accepted, no effect: events are not padded.
    stream_options: Option<Map<String, Value>>,
    /// Repeated in the response.
    metadata: Option<Metadata>,
    /// Accepted, no effect on the answer: a cache changes speed only.
    #[schemars(length(max = MAX_NOTE))]
    prompt_cache_key: Option<String>,
    #[serde(flatten)]
    other: Other,
}

no_effect!(Other {
    max_tool_calls, include, client_metadata, prompt_cache_retention, safety_identifier,
    service_tier, user
} only {
    truncation = ["disabled", "auto"] "the specification has \"disabled\" and \"auto\"",
    top_logprobs = [0] "log-probabilities are in answers of /v1/chat/completions",
    background = [false] "nothing is computed after a client has gone",
    conversation = [] "use previous_response_id",
    prompt = [] "no prompts are kept here"
});

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum ResponseInput {
    Text(String),
    Items(Vec<ResponseItem>),
}

/// An item; without a type it is a message.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseItem {
    FunctionCall(FunctionCall),
    CustomToolCall(CustomCall),
    LocalShellCall(ActionCall),
    ShellCall(ActionCall),
    ApplyPatchCall(ActionCall),
    FunctionCallOutput(CallOutput),
    CustomToolCallOutput(CallOutput),
    LocalShellCallOutput(CallOutput),
    ShellCallOutput(ShellOutput),
    ApplyPatchCallOutput(CallOutput),
    Reasoning(Reasoning),
    #[serde(untagged)]
    Message(Box<ItemMessage>),
    #[serde(untagged)]
    Hosted(HostedItem),
}

/// An item of a tool that a provider runs.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = true))]
struct HostedItem {
    #[schemars(extend(
        "enum" = HOSTED_ITEMS,
        "x-why" = "items are messages, calls and their outputs, and reasoning",
    ))]
    #[serde(rename = "type")]
    kind: String,
}

no_effect!(ItemNoEffect { id, status });
no_effect!(ItemMessageNoEffect { id, status, phase });
no_effect!(ItemPartNoEffect {
    annotations,
    logprobs
});
no_effect!(ReasoningNoEffect {
    id,
    status,
    encrypted_content
});

#[derive(Debug, Deserialize, JsonSchema)]
struct ItemMessage {
    /// Always message.
    #[schemars(extend("const" = "message"))]
    #[serde(rename = "type")]
    _type: Option<String>,
    /// The speaker.
    role: ItemRole,
    /// A text or parts.
    content: ItemText,
    #[serde(flatten)]
    _no_effect: ItemMessageNoEffect,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum ItemRole {
    User,
    Assistant,
    System,
    Developer,
}

/// Text of a message, of a result and of reasoning.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum ItemText {
    Text(String),
    Parts(#[schemars(length(max = MAX_ITEM_PARTS))] Vec<ItemPart>),
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ItemPart {
    /// The kind of part.
    #[schemars(extend("enum" = ITEM_PART_KINDS, "x-why" = "messages are text"))]
    #[serde(rename = "type")]
    _type: String,
    /// Text of the part.
    #[schemars(length(max = MAX_TEXT))]
    text: Option<String>,
    /// Text of a refusal.
    #[schemars(length(max = MAX_TEXT))]
    refusal: Option<String>,
    #[serde(flatten)]
    _no_effect: ItemPartNoEffect,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct FunctionCall {
    /// Name of the call.
    #[schemars(length(min = 1, max = 256))]
    call_id: String,
    /// Name of the function.
    #[schemars(length(min = 1, max = 256))]
    name: String,
    /// Place of the function.
    #[schemars(length(max = 256))]
    #[serde(rename = "namespace")]
    _namespace: Option<String>,
    /// JSON in a string.
    #[schemars(length(max = MAX_TEXT))]
    arguments: String,
    #[serde(flatten)]
    _no_effect: ItemNoEffect,
}

/// A call of a custom tool, whose argument is a text.
#[derive(Debug, Deserialize, JsonSchema)]
struct CustomCall {
    /// Name of the call.
    #[schemars(length(min = 1, max = 256))]
    call_id: String,
    /// Name of the tool.
    #[schemars(length(min = 1, max = 256))]
    name: String,
    /// Text for the tool.
    #[schemars(length(max = MAX_TEXT))]
    input: String,
    #[serde(flatten)]
    _no_effect: ItemNoEffect,
}

/// A call of a shell or of a patch.
#[derive(Debug, Deserialize, JsonSchema)]
struct ActionCall {
    /// Name of the call.
    #[schemars(length(min = 1, max = 256))]
    call_id: String,
    /// Command of a shell.
    action: Option<Map<String, Value>>,
    /// Change of a patch.
    operation: Option<Map<String, Value>>,
    #[serde(flatten)]
    _no_effect: ItemNoEffect,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct CallOutput {
    /// Name of the call.
    #[schemars(length(min = 1, max = 256))]
    call_id: String,
    /// A text or parts.
    output: ItemText,
    #[serde(flatten)]
    _no_effect: ItemNoEffect,
}

/// Output of a shell, whose parts have texts under names of their own.
#[derive(Debug, Deserialize, JsonSchema)]
struct ShellOutput {
    /// Name of the call.
    #[schemars(length(min = 1, max = 256))]
    call_id: String,
    /// A text or parts.
    output: ShellText,
    #[serde(flatten)]
    _no_effect: ItemNoEffect,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum ShellText {
    Text(String),
    Parts(Vec<Value>),
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Reasoning {
    /// Parts of text.
    summary: Option<ItemText>,
    /// Parts of text.
    content: Option<ItemText>,
    #[serde(flatten)]
    _no_effect: ReasoningNoEffect,
}

/// An entry of `tools`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseTool {
    Function(ResponseFunction),
    Namespace(Namespace),
    #[serde(untagged)]
    Hosted(HostedTool),
}

/// An entry of a namespace.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(extend("x-why" = "functions are the only tools of a namespace"))]
enum NamespaceTool {
    Function(ResponseFunction),
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ResponseFunction {
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
    #[serde(flatten)]
    _no_effect: FunctionNoEffect,
}

no_effect!(FunctionNoEffect {
    defer_loading,
    output_schema
});
no_effect!(NamespaceNoEffect { description });
no_effect!(TextNoEffect { verbosity });
no_effect!(EffortNoEffect {
    summary,
    generate_summary
});

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Namespace {
    /// Name of the namespace.
    #[schemars(length(min = 1, max = 256))]
    name: String,
    /// Functions.
    #[schemars(length(max = MAX_ITEM_TOOLS))]
    tools: Vec<NamespaceTool>,
    #[serde(flatten)]
    _no_effect: NamespaceNoEffect,
}

/// A tool that a provider runs.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = true))]
struct HostedTool {
    #[schemars(extend("not" = {"const": "mcp"}))]
    #[serde(rename = "type")]
    kind: String,
}

/// `text`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct TextOptions {
    /// Form of the answer.
    format: Option<TextFormat>,
    #[serde(flatten)]
    _no_effect: TextNoEffect,
}

/// `text.format`: the schema's fields are flattened into it.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(
    deny_unknown_fields,
    extend("x-why" = "its type is text, json_object or json_schema")
)]
enum TextFormat {
    Text,
    JsonObject,
    JsonSchema(SchemaFormat),
}

/// `reasoning`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ReasoningOptions {
    /// Given to templates that know it.
    #[schemars(length(min = 1, max = 32))]
    effort: Option<String>,
    #[serde(flatten)]
    _no_effect: EffortNoEffect,
}

impl RequestParser<'_> {
    pub(crate) fn response(&self, body: Map<String, Value>) -> Result<ModelRequest, Rejection> {
        let echo = echo(&body);
        let body: ResponseRequest = read(body, self.notes)?;
        self.check_model(body.model)?;
        let most = body.max_output_tokens.unwrap_or(-1);
        let has_usage = true;
        let stream = (body.stream == Some(true)).then_some(StreamOptions { has_usage });
        let sampling = Sampling {
            basic: body.sampling,
            ..Sampling::default()
        };
        let like = self.request(&sampling, usize::try_from(most).unwrap_or(usize::MAX), None);
        let mut conversation = Conversation {
            turns: self.earlier(body.previous_response_id)?,
            is_parallel: body.parallel_tool_calls != Some(false),
            ..Conversation::default()
        };
        self.input(body.input, &mut conversation.turns)?;
        let keep = (body.store != Some(false)).then(|| conversation.turns.clone());
        // Not stored: a later response has its own instructions.
        let instructions = body.instructions.filter(|text| !text.is_empty());
        let instructions = instructions.map(|text| ChatMessage::new("system", text));
        conversation.turns.splice(..0, instructions);
        let tools = body.tools.unwrap_or_default();
        let spaces = self.response_tools(tools, &mut conversation.tools)?;
        tools::choose(body.tool_choice, &mut conversation)?;
        if let Some(reasoning) = body.reasoning {
            conversation.thinking = super::chat::thinking(reasoning.effort);
        }
        conversation.format_at = "text.format";
        conversation.format = match body.text.and_then(|text| text.format) {
            None | Some(TextFormat::Text) => AnswerFormat::Text,
            Some(TextFormat::JsonObject) => AnswerFormat::JsonObject,
            Some(TextFormat::JsonSchema(format)) => format.format(),
        };
        let teller = ApiDialect::Responses(Box::new(ResponsesEcho { echo, spaces, keep }));
        self.converse(&conversation, 1, &like, "input", (teller, stream))
    }

    /// The turns of a previous response.
    fn earlier(&self, id: Option<String>) -> Result<Vec<ChatMessage>, Rejection> {
        let Some(id) = id else { return Ok(Vec::new()) };
        let stored = self.store.get(&id, self.client);
        let stored = stored.ok_or(Rejection::NoResponse { id })?;
        Ok(stored.turns.clone())
    }

    fn input(&self, input: ResponseInput, turns: &mut Vec<ChatMessage>) -> Result<(), Rejection> {
        let items = match input {
            ResponseInput::Text(text) => {
                turns.push(ChatMessage::new("user", text));
                return Ok(());
            }
            ResponseInput::Items(items) => items,
        };
        let least = usize::from(turns.is_empty());
        self.check_messages("input", items.len(), least)?;
        for (i, item) in items.into_iter().enumerate() {
            match item {
                // The provider ran the tool, and its result is in the answer that follows.
                ResponseItem::Hosted(HostedItem { kind }) => self.notes.warn(format!(
                    "input[{i}] of type {kind} is hosted and was left out"
                )),
                item => item.add(turns),
            }
        }
        Ok(())
    }

    /// Adds the functions to `to`; returns the namespaces by tool name.
    fn response_tools(
        &self,
        tools: Vec<ResponseTool>,
        to: &mut Vec<Tool>,
    ) -> Result<BTreeMap<String, String>, Rejection> {
        let mut spaces = BTreeMap::new();
        for (i, tool) in tools.into_iter().enumerate() {
            let place = format!("tools[{i}]");
            match tool {
                ResponseTool::Function(function) => function.add(&place, to)?,
                ResponseTool::Namespace(space) => {
                    for (i, NamespaceTool::Function(function)) in
                        space.tools.into_iter().enumerate()
                    {
                        spaces.insert(function.name.clone(), space.name.clone());
                        function.add(&format!("{place}.tools[{i}]"), to)?;
                    }
                }
                // It may be what the answer is about, and would reach other machines.
                ResponseTool::Hosted(HostedTool { kind }) if kind == "mcp" => {
                    let why = "this server calls no MCP servers";
                    return Err(unsupported(format!("{place}.type"), "\"mcp\"", why));
                }
                ResponseTool::Hosted(HostedTool { kind }) => {
                    let text = format!("{place} of type {kind} is hosted and was left out");
                    self.notes.warn(text);
                }
            }
        }
        Ok(spaces)
    }
}

impl ResponseFunction {
    /// # Errors
    /// [`Rejection::Unsupported`] for a second function of a name.
    fn add(self, place: &str, to: &mut Vec<Tool>) -> Result<(), Rejection> {
        let name = self.name;
        if to.iter().any(|tool| tool.name == name) {
            let why = "another tool has this name";
            return Err(unsupported(
                format!("{place}.name"),
                format!("{name:?}"),
                why,
            ));
        }
        to.push(Tool {
            name,
            description: self.description,
            is_strict: self.strict == Some(true),
            parameters: tools::parameters(self.parameters),
        });
        Ok(())
    }
}

impl ResponseItem {
    fn add(self, turns: &mut Vec<ChatMessage>) {
        match self {
            Self::Message(message) => message.add(turns),
            Self::FunctionCall(call) => assistant(turns).tool_calls.push(ToolCall {
                id: call.call_id,
                name: call.name,
                arguments: call_arguments(&call.arguments),
            }),
            Self::CustomToolCall(call) => assistant(turns).tool_calls.push(ToolCall {
                id: call.call_id,
                name: call.name,
                arguments: json!({"input": call.input}),
            }),
            Self::LocalShellCall(call) => call.add("local_shell", turns),
            Self::ShellCall(call) => call.add("shell", turns),
            Self::ApplyPatchCall(call) => call.add("apply_patch", turns),
            Self::FunctionCallOutput(output)
            | Self::CustomToolCallOutput(output)
            | Self::LocalShellCallOutput(output)
            | Self::ApplyPatchCallOutput(output) => {
                turns.push(ChatMessage::tool_result(
                    output.call_id,
                    output.output.text(),
                ));
            }
            Self::ShellCallOutput(output) => {
                let text = match output.output {
                    ShellText::Text(text) => text,
                    ShellText::Parts(parts) => Value::Array(parts).to_string(),
                };
                turns.push(ChatMessage::tool_result(output.call_id, text));
            }
            Self::Reasoning(reasoning) => {
                let content = reasoning.content.filter(|text| !text.is_empty());
                let text = content.or(reasoning.summary).map(ItemText::text);
                if let Some(text) = text.filter(|text| !text.is_empty()) {
                    assistant(turns).reasoning = Some(text);
                }
            }
            Self::Hosted(_) => {}
        }
    }
}

impl ItemMessage {
    fn add(self, turns: &mut Vec<ChatMessage>) {
        let text = self.content.text();
        match self.role {
            ItemRole::User => turns.push(ChatMessage::new("user", text)),
            ItemRole::System | ItemRole::Developer => {
                turns.push(ChatMessage::new("system", text));
            }
            ItemRole::Assistant => {
                let turn = assistant(turns);
                if !turn.content.is_empty() {
                    turn.content.push('\n');
                }
                turn.content.push_str(&text);
            }
        }
    }
}

impl ActionCall {
    fn add(self, name: &str, turns: &mut Vec<ChatMessage>) {
        let action = self.action.or(self.operation).unwrap_or_default();
        assistant(turns).tool_calls.push(ToolCall {
            id: self.call_id,
            name: name.to_owned(),
            arguments: Value::Object(action),
        });
    }
}

impl ItemText {
    fn is_empty(&self) -> bool {
        matches!(self, Self::Parts(parts) if parts.is_empty())
    }

    /// The text, or the joined parts.
    fn text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => {
                let text = |part: ItemPart| part.text.or(part.refusal).unwrap_or_default();
                let texts: Vec<String> = parts.into_iter().map(text).collect();
                texts.join("\n")
            }
        }
    }
}

/// The assistant turn of an item; starts one if needed.
fn assistant(turns: &mut Vec<ChatMessage>) -> &mut ChatMessage {
    let is_open = turns.last().is_some_and(|turn| turn.role == "assistant");
    if !is_open {
        turns.push(ChatMessage::new("assistant", ""));
    }
    turns.last_mut().expect("a turn was just added")
}

/// The request fields that the response repeats.
fn echo(body: &Map<String, Value>) -> Map<String, Value> {
    let fields = [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", true.into()),
        ("previous_response_id", Value::Null),
        ("reasoning", Value::Null),
        ("store", true.into()),
        ("temperature", Value::Null),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", "auto".into()),
        ("tools", json!([])),
        ("top_p", Value::Null),
        ("truncation", "disabled".into()),
    ];
    let said = |(name, default): (&str, Value)| {
        let given = body
            .get(name)
            .filter(|given| !given.is_null() && name != "truncation");
        (name.to_owned(), given.cloned().unwrap_or(default))
    };
    fields.into_iter().map(said).collect()
}
