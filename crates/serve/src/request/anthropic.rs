//! `POST /v1/messages` and `/v1/messages/count_tokens` (version 2023-06-01 and the fields of Claude
//! Code 2.1): blocks to turns.
//!
//! System messages stay in place, so that the prompt keeps its prefix from turn to turn. For the
//! same reason the header that Claude Code puts before its system prompt is removed: it changes
//! between requests.

use paceline_text::chat::{ChatMessage, ToolCall};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::bounds::{MAX_COUNT, MAX_TEXT};
use super::sampling::{BasicSampling, Sampling, Stop};
use super::{
    ApiDialect, CacheControl, ModelName, ModelRequest, RequestParser, StreamOptions, tools,
};
use crate::conversation::{AnswerFormat, Conversation, Thinking, Tool, ToolChoice};
use crate::rejection::Rejection;
use crate::schema::read;

/// A line of Claude Code about itself, removed from the prompt.
const VOLATILE: &str = "x-anthropic-billing-header:";

/// Maximum blocks of a message, and tools of a request.
const MAX_BLOCKS: usize = 1024;
const MAX_TOOLS: usize = 512;

/// Why blocks of other types are refused.
const BLOCKS: &str = "messages are text, calls and results";

/// Body of `POST /v1/messages`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct MessageRequest {
    #[serde(flatten)]
    prompt: PromptFields,
    /// Most tokens of the answer; the context bounds it as well.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    max_tokens: usize,
    #[serde(flatten)]
    sampling: BasicSampling,
    /// Number of most probable tokens to keep; 0 and -1 keep all. Default: the model's own.
    #[schemars(range(min = -1, max = MAX_COUNT))]
    top_k: Option<i64>,
    /// Texts that end the answer and are no part of it.
    stop_sequences: Option<Stop>,
    /// Sends the answer as events. Default false.
    stream: Option<bool>,
    #[serde(flatten)]
    _no_effect: MessageNoEffect,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[expect(dead_code, reason = "accepted, and no effect")]
struct MessageNoEffect {
    /// Accepted, no effect: names the client's user.
    metadata: Option<Map<String, Value>>,
    /// Accepted, no effect: there is one tier.
    #[schemars(length(max = 64))]
    service_tier: Option<String>,
    #[serde(flatten)]
    other: MessageOther,
}

no_effect!(MessageOther { inference_geo } only { container = [] "no code is run here" });

/// Body of `POST /v1/messages/count_tokens`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct CountRequest {
    #[serde(flatten)]
    prompt: PromptFields,
}

/// Fields of the prompt.
#[derive(Debug, Deserialize, JsonSchema)]
struct PromptFields {
    model: Option<ModelName>,
    /// The conversation.
    messages: Vec<AnthropicMessage>,
    /// Text before the conversation: a text, or blocks of text.
    system: Option<Blocks<TextBlock>>,
    /// Tools that the model may call; those that a provider would host are left out.
    #[schemars(length(max = MAX_TOOLS))]
    tools: Option<Vec<AnthropicTool>>,
    /// auto, any, tool with a name, or none; disable_parallel_tool_use.
    tool_choice: Option<AnthropicChoice>,
    /// enabled, adaptive or disabled, for templates that know it; display.
    thinking: Option<ThinkingField>,
    /// effort, for templates that know it; format, JSON of a schema.
    output_config: Option<OutputConfig>,
    #[serde(flatten)]
    _no_effect: PromptNoEffect,
}

no_effect!(PromptNoEffect { context_management, speed, betas, cache_control } only {
    mcp_servers = [[]] "tools are called by the client"
});

/// A message.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "role", rename_all = "lowercase")]
enum AnthropicMessage {
    User(Said<UserBlock>),
    Assistant(Said<AssistantBlock>),
    System(Said<TextBlock>),
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Said<B> {
    /// A text or blocks.
    content: Blocks<B>,
    #[serde(flatten)]
    _cache_control: CacheControl,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Blocks<B> {
    Text(String),
    Blocks(#[schemars(length(max = MAX_BLOCKS))] Vec<B>),
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(extend("x-why" = BLOCKS))]
enum TextBlock {
    Text(TextFields),
    ToolReference(ToolReference),
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(extend("x-why" = BLOCKS))]
enum UserBlock {
    Text(TextFields),
    ToolResult(ToolResult),
    ToolReference(ToolReference),
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(extend("x-why" = BLOCKS))]
enum AssistantBlock {
    Text(TextFields),
    Thinking(ThinkingBlock),
    RedactedThinking {
        #[serde(flatten)]
        _no_effect: RedactedNoEffect,
    },
    ToolUse(ToolUse),
}

#[derive(Debug, Deserialize, JsonSchema)]
struct TextFields {
    /// Text of the block.
    #[schemars(length(max = MAX_TEXT))]
    text: String,
    #[serde(flatten)]
    _no_effect: TextNoEffect,
}

no_effect!(TextNoEffect {
    citations,
    cache_control
});
no_effect!(ThinkingNoEffect {
    signature,
    cache_control
});
no_effect!(RedactedNoEffect {
    data,
    cache_control
});
no_effect!(ToolUseNoEffect {
    caller,
    toolset_name,
    cache_control
});

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = true))]
struct ToolReference {
    /// Name of a deferred tool.
    tool_name: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ThinkingBlock {
    /// Text of the thinking.
    #[schemars(length(max = MAX_TEXT))]
    thinking: String,
    #[serde(flatten)]
    _no_effect: ThinkingNoEffect,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ToolUse {
    /// Name of the call.
    #[schemars(length(min = 1, max = 256))]
    id: String,
    /// Name of the tool.
    #[schemars(length(min = 1, max = 256))]
    name: String,
    /// The arguments.
    input: Value,
    #[serde(flatten)]
    _no_effect: ToolUseNoEffect,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ToolResult {
    /// Name of the call.
    #[schemars(length(min = 1, max = 256))]
    tool_use_id: String,
    /// A text or blocks of text.
    content: Option<Blocks<TextBlock>>,
    /// Whether the call failed; no effect.
    #[serde(rename = "is_error")]
    _is_error: Option<bool>,
    #[serde(flatten)]
    _cache_control: CacheControl,
}

/// A tool; without a type it is custom.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum AnthropicTool {
    Custom(Box<CustomTool>),
    Hosted(HostedTool),
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct CustomTool {
    /// Always custom.
    #[schemars(with = "Option<String>", extend("const" = "custom"))]
    #[serde(rename = "type")]
    _type: Option<CustomType>,
    /// Name of the tool.
    #[schemars(length(min = 1, max = 256))]
    name: String,
    /// Purpose of the tool.
    #[schemars(length(max = MAX_TEXT))]
    description: Option<String>,
    /// JSON Schema of its arguments.
    input_schema: Map<String, Value>,
    /// Whether arguments follow the schema to the letter.
    strict: Option<bool>,
    /// Leaves it out until a tool_reference names it.
    defer_loading: Option<bool>,
    #[serde(flatten)]
    _no_effect: ToolNoEffect,
}

no_effect!(ToolNoEffect {
    eager_input_streaming,
    input_examples,
    allowed_callers,
    cache_control
});

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CustomType {
    Custom,
}

/// A tool that a provider runs.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = true))]
struct HostedTool {
    #[serde(rename = "type")]
    kind: String,
}

/// `tool_choice`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct AnthropicChoice {
    /// Which tools are to be called.
    #[serde(rename = "type")]
    kind: ChoiceKind,
    /// For the type tool.
    #[schemars(length(min = 1, max = 256))]
    name: Option<String>,
    /// Whether one answer has one call at most.
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum ChoiceKind {
    Auto,
    Any,
    Tool,
    None,
}

/// `thinking`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ThinkingField {
    /// Whether the model thinks.
    #[serde(rename = "type")]
    kind: ThinkingKind,
    /// omitted hides the thinking.
    #[schemars(length(min = 1, max = 64))]
    display: Option<String>,
    #[serde(flatten)]
    _no_effect: ThinkingBudget,
}

// `max_tokens` bounds the answer.
no_effect!(ThinkingBudget { budget_tokens });

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum ThinkingKind {
    Enabled,
    Adaptive,
    Disabled,
}

/// `output_config`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct OutputConfig {
    /// Given to templates that know it.
    #[schemars(length(min = 1, max = 32))]
    effort: Option<String>,
    /// JSON of a schema.
    format: Option<OutputFormat>,
    #[serde(flatten)]
    _no_effect: TaskBudget,
}

no_effect!(TaskBudget { task_budget });

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = true))]
struct OutputFormat {
    /// Always json_schema.
    #[schemars(extend(
        "enum" = ["json_schema"],
        "x-why" = "its type is json_schema and it has a schema",
    ))]
    #[serde(rename = "type")]
    _type: String,
    /// JSON Schema of the answer.
    schema: Value,
}

/// Contents of a message's blocks.
#[derive(Default)]
struct BlockContents {
    texts: Vec<String>,
    thoughts: Vec<String>,
    calls: Vec<ToolCall>,
    /// Tool results with the ids of their calls.
    results: Vec<(String, String)>,
    /// Names of deferred tools in the results.
    named: Vec<String>,
}

impl RequestParser<'_> {
    pub(crate) fn anthropic(&self, body: Map<String, Value>) -> Result<ModelRequest, Rejection> {
        let body: MessageRequest = read(body, self.notes)?;
        let sampling = Sampling {
            basic: body.sampling,
            top_k: body.top_k,
            ..Sampling::default()
        };
        let like = self.request(&sampling, body.max_tokens, body.stop_sequences);
        let has_usage = true;
        let stream = (body.stream == Some(true)).then_some(StreamOptions { has_usage });
        let display = body.prompt.thinking.as_ref();
        let display = display.and_then(|thinking| thinking.display.as_deref());
        let shows_thinking = display != Some("omitted");
        let conversation = self.anthropic_conversation(body.prompt)?;
        let teller = ApiDialect::Anthropic { shows_thinking };
        self.converse(&conversation, 1, &like, "messages", (teller, stream))
    }

    pub(crate) fn count_tokens(&self, body: Map<String, Value>) -> Result<Value, Rejection> {
        let body: CountRequest = read(body, self.notes)?;
        let conversation = self.anthropic_conversation(body.prompt)?;
        let tokens = match self.prompt(&conversation, "messages") {
            Ok(prompt) => prompt.len(),
            Err(Rejection::ContextLength { tokens, .. }) => tokens,
            Err(other) => return Err(other),
        };
        Ok(json!({"input_tokens": tokens}))
    }

    fn anthropic_conversation(&self, prompt: PromptFields) -> Result<Conversation, Rejection> {
        self.check_model(prompt.model)?;
        self.check_messages("messages", prompt.messages.len(), 0)?;
        let mut conversation = Conversation {
            is_parallel: true,
            turns: prompt.system.and_then(system).into_iter().collect(),
            ..Conversation::default()
        };
        let mut named = Vec::new();
        for message in prompt.messages {
            let (role, mut contents) = message.contents();
            named.append(&mut contents.named);
            contents.into_turns(role, &mut conversation.turns);
        }
        for (i, tool) in prompt.tools.into_iter().flatten().enumerate() {
            match tool {
                AnthropicTool::Hosted(HostedTool { kind }) => self.notes.warn(format!(
                    "tools[{i}] of type {kind} is hosted and was left out"
                )),
                AnthropicTool::Custom(tool)
                    if tool.defer_loading == Some(true) && !named.contains(&tool.name) => {}
                AnthropicTool::Custom(tool) => conversation.tools.push(Tool {
                    name: tool.name,
                    description: tool.description,
                    is_strict: tool.strict == Some(true),
                    parameters: Value::Object(tool.input_schema),
                }),
            }
        }
        if let Some(choice) = prompt.tool_choice {
            conversation.is_parallel = choice.disable_parallel_tool_use != Some(true);
            conversation.choice = match choice.kind {
                ChoiceKind::Auto => ToolChoice::Auto,
                ChoiceKind::Any => ToolChoice::Required,
                ChoiceKind::None => ToolChoice::None,
                ChoiceKind::Tool => ToolChoice::Named(choice.name.unwrap_or_default()),
            };
            tools::check_choice(&conversation)?;
        }
        let output = prompt.output_config;
        let (effort, format) = output.map_or((None, None), |output| (output.effort, output.format));
        conversation.thinking = Thinking {
            is_on: prompt.thinking.and_then(|thinking| match thinking.kind {
                ThinkingKind::Enabled => Some(true),
                ThinkingKind::Disabled => Some(false),
                ThinkingKind::Adaptive => None,
            }),
            effort,
        };
        if let Some(format) = format {
            conversation.format_at = "output_config.format";
            conversation.format = AnswerFormat::JsonSchema(format.schema);
        }
        Ok(conversation)
    }
}

/// The turn of `system`, unless it is empty.
fn system(blocks: Blocks<TextBlock>) -> Option<ChatMessage> {
    let mut texts = BlockContents::of(blocks, TextBlock::add).texts;
    texts.retain(|text| !text.trim_start().starts_with(VOLATILE));
    let text = texts.join("\n");
    (!text.is_empty()).then(|| ChatMessage::new("system", text))
}

impl AnthropicMessage {
    fn contents(self) -> (&'static str, BlockContents) {
        match self {
            Self::User(said) => ("user", BlockContents::of(said.content, UserBlock::add)),
            Self::Assistant(said) => {
                let contents = BlockContents::of(said.content, AssistantBlock::add);
                ("assistant", contents)
            }
            Self::System(said) => ("system", BlockContents::of(said.content, TextBlock::add)),
        }
    }
}

impl TextBlock {
    fn add(self, to: &mut BlockContents) {
        match self {
            Self::Text(block) => to.texts.push(block.text),
            Self::ToolReference(tool) => to.named.extend(tool.tool_name),
        }
    }
}

impl UserBlock {
    fn add(self, to: &mut BlockContents) {
        match self {
            Self::Text(block) => to.texts.push(block.text),
            Self::ToolReference(tool) => to.named.extend(tool.tool_name),
            Self::ToolResult(result) => {
                let inner = result
                    .content
                    .map(|inner| BlockContents::of(inner, TextBlock::add));
                let mut inner = inner.unwrap_or_default();
                to.named.append(&mut inner.named);
                to.results
                    .push((result.tool_use_id, inner.texts.join("\n")));
            }
        }
    }
}

impl AssistantBlock {
    fn add(self, to: &mut BlockContents) {
        match self {
            Self::Text(block) => to.texts.push(block.text),
            Self::Thinking(block) => to.thoughts.push(block.thinking),
            Self::RedactedThinking { .. } => {}
            Self::ToolUse(call) => to.calls.push(ToolCall {
                id: call.id,
                name: call.name,
                arguments: call.input,
            }),
        }
    }
}

impl BlockContents {
    fn of<B>(blocks: Blocks<B>, add: impl Fn(B, &mut Self)) -> Self {
        let mut contents = Self::default();
        match blocks {
            Blocks::Text(text) => contents.texts.push(text),
            Blocks::Blocks(blocks) => {
                blocks
                    .into_iter()
                    .for_each(|block| add(block, &mut contents));
            }
        }
        contents
    }

    /// A turn per result, then the text.
    fn into_turns(self, role: &str, turns: &mut Vec<ChatMessage>) {
        let has_results = !self.results.is_empty();
        let results = self.results.into_iter();
        turns.extend(results.map(|(id, text)| ChatMessage::tool_result(id, text)));
        if has_results && self.texts.is_empty() {
            return;
        }
        let mut turn = ChatMessage::new(role, self.texts.join("\n"));
        let thoughts = self.thoughts.join("\n");
        turn.reasoning = (!thoughts.is_empty()).then_some(thoughts);
        turn.tool_calls = self.calls;
        turns.push(turn);
    }
}
