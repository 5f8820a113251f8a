//! `POST /api/chat` and `/api/generate`, as Ollama's Python client 0.6 and its server 0.13 have
//! them.

use paceline_engine::GenerationRequest;
use paceline_text::chat::{ChatMessage, ToolCall, call_arguments};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::bounds::{MAX_COUNT, MAX_TEXT, MAX_TOOL_CALLS, MAX_TOOLS};
use super::infill::InfillGap;
use super::sampling::{REPETITION, Sampling, Stop, penalty_of};
use super::tools::ToolFunction;
use super::{ApiDialect, ModelName, ParsedRequest, RequestParser, StreamOptions};
use crate::conversation::{AnswerFormat, Conversation, Thinking};
use crate::rejection::Rejection;
use crate::render::ollama::{Kind, rfc3339};
use crate::schema::read;

/// Body of `POST /api/chat`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct OllamaChat {
    #[serde(flatten)]
    shared: OllamaFields,
    /// The conversation; none loads the model.
    messages: Option<Vec<OllamaMessage>>,
    /// Functions that the model may call.
    #[schemars(length(max = MAX_TOOLS))]
    tools: Option<Vec<OllamaTool>>,
}

/// Body of `POST /api/generate`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct OllamaGenerate {
    #[serde(flatten)]
    shared: OllamaFields,
    /// Text to answer; none loads the model.
    #[schemars(length(max = MAX_TEXT))]
    prompt: Option<String>,
    /// Text after the answer, for models with tokens that fill a hole.
    #[schemars(length(max = MAX_TEXT))]
    suffix: Option<String>,
    /// Text before the prompt.
    #[schemars(length(max = MAX_TEXT))]
    system: Option<String>,
    /// Completes the prompt as it is, without a template. Default false.
    raw: Option<bool>,
    #[serde(flatten)]
    _no_effect: GenerateNoEffect,
}

no_effect!(GenerateNoEffect {} only {
    template = [""] "the model's own template is used; raw takes none",
    context = [[]] "use /api/chat with messages",
    images = [[]] "messages are text"
});

/// Fields of chat and generate.
#[derive(Debug, Deserialize, JsonSchema)]
struct OllamaFields {
    model: Option<ModelName>,
    /// Form of the answer: "json" or a JSON Schema.
    format: Option<OllamaFormat>,
    /// Sampling, and most tokens of the answer.
    options: Option<OllamaOptions>,
    /// Sends the answer in lines while it is made. Default true.
    stream: Option<bool>,
    /// true, false or an effort, for templates that know it.
    think: Option<Think>,
    #[serde(flatten)]
    _no_effect: SharedNoEffect,
}

no_effect!(SharedNoEffect { keep_alive, truncate, shift } only {
    logprobs = [false] "they are in answers of /v1/chat/completions",
    top_logprobs = [0] "they are in answers of /v1/chat/completions"
});

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum OllamaFormat {
    Json(#[schemars(extend("enum" = ["json", ""]))] String),
    Schema(Map<String, Value>),
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Think {
    Is(bool),
    Effort(String),
}

/// `options`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct OllamaOptions {
    #[serde(flatten)]
    sampling: Sampling,
    /// Divides positive and multiplies negative logits of the last tokens.
    #[schemars(range(min = REPETITION.0, max = REPETITION.1))]
    repeat_penalty: Option<f64>,
    /// Number of last tokens.
    #[schemars(range(min = 0, max = MAX_COUNT))]
    repeat_last_n: Option<usize>,
    /// Texts that end the answer.
    stop: Option<Stop>,
    /// Most tokens of the answer; below 0 the context is the bound.
    #[schemars(range(min = -2, max = MAX_COUNT))]
    num_predict: Option<i64>,
    /// Accepted, no effect: the context is fixed when the server starts.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    #[serde(rename = "num_ctx")]
    _num_ctx: Option<i64>,
    #[serde(flatten)]
    _no_effect: OptionsNoEffect,
}

no_effect!(OptionsNoEffect {
    num_keep, num_batch, num_gpu, main_gpu, num_thread, numa, use_mmap, use_mlock, low_vram, f16_kv,
    penalize_newline, draft_num_predict, mirostat_tau, mirostat_eta
} only {
    mirostat = [0] "tokens are not chosen by mirostat",
    typical_p = [1, 1.0] "tokens are not chosen by typicality",
    tfs_z = [1, 1.0] "tokens are not chosen by their tail"
});

/// A message of a chat.
#[derive(Debug, Deserialize, JsonSchema)]
struct OllamaMessage {
    /// The speaker; developer is system.
    #[schemars(extend("enum" = ["system", "developer", "user", "assistant", "tool"]))]
    role: String,
    /// Text of the message.
    #[schemars(length(max = MAX_TEXT))]
    content: Option<String>,
    /// Thinking of the role assistant.
    #[schemars(length(max = MAX_TEXT))]
    thinking: Option<String>,
    /// Calls of the role assistant.
    #[schemars(length(max = MAX_TOOL_CALLS))]
    tool_calls: Option<Vec<OllamaCall>>,
    /// For the role tool: the tool that answers.
    #[schemars(length(max = 256))]
    tool_name: Option<String>,
    /// For the role tool: the call that it answers.
    #[schemars(length(max = 256))]
    tool_call_id: Option<String>,
    #[serde(flatten)]
    _no_effect: MessageNoEffect,
}

no_effect!(MessageNoEffect {} only { images = [[]] "messages are text" });

#[derive(Debug, Deserialize, JsonSchema)]
struct OllamaCall {
    /// Name of the call.
    #[schemars(length(max = 256))]
    id: Option<String>,
    /// Always function.
    #[schemars(length(max = 64))]
    #[serde(rename = "type")]
    _type: Option<String>,
    /// Name and arguments.
    function: OllamaCallFunction,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct OllamaCallFunction {
    /// Name of the tool.
    #[schemars(length(min = 1, max = 256))]
    name: String,
    /// An object.
    arguments: Value,
    #[serde(flatten)]
    _no_effect: CallNoEffect,
}

no_effect!(CallNoEffect { index, description });

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = true))]
struct OllamaTool {
    function: ToolFunction,
}

/// Body of `POST /api/show` and of others that name a model only.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct NamedModel {
    /// The name of the model.
    #[schemars(length(min = 1, max = 256))]
    model: Option<String>,
    /// The older name of model.
    #[schemars(length(min = 1, max = 256))]
    name: Option<String>,
    /// Sends the answer in lines. Default true.
    stream: Option<bool>,
    #[serde(flatten)]
    _no_effect: NamedNoEffect,
}

no_effect!(NamedNoEffect {
    verbose,
    system,
    template,
    options,
    insecure
});

impl NamedModel {
    pub(crate) fn name(&self) -> Result<&str, Rejection> {
        let name = self.model.as_deref().or(self.name.as_deref());
        name.ok_or_else(|| Rejection::Missing {
            param: "model".into(),
            expected: "the name of a model".into(),
        })
    }

    pub(crate) fn is_stream(&self) -> bool {
        self.stream != Some(false)
    }
}

impl RequestParser<'_> {
    /// Parses `/api/chat`; without messages it only checks that the model is loaded.
    pub(crate) fn ollama_chat(&self, body: Map<String, Value>) -> Result<ParsedRequest, Rejection> {
        let OllamaChat {
            shared,
            messages,
            tools,
        } = read(body, self.notes)?;
        let model = self.check_model(shared.model)?;
        let messages = messages.unwrap_or_default();
        if messages.is_empty() {
            let message = json!({"role": "assistant", "content": ""});
            return Ok(self.loaded(&model, "message", message));
        }
        self.check_messages("messages", messages.len(), 0)?;
        let turns = messages.into_iter().map(OllamaMessage::message).collect();
        let tools = tools.into_iter().flatten();
        let conversation = Conversation {
            tools: tools.map(|tool| tool.function.tool()).collect(),
            ..conversation(turns, shared.format, shared.think)
        };
        let like = self.ollama_request(shared.options.unwrap_or_default());
        let kind = Kind::Chat;
        let how = (ApiDialect::Ollama { kind, model }, stream(shared.stream));
        let ask = self.converse(&conversation, 1, &like, "messages", how)?;
        Ok(ParsedRequest::Generation(Box::new(ask)))
    }

    /// Parses `/api/generate`; without a prompt it only checks that the model is loaded.
    pub(crate) fn ollama_generate(
        &self,
        body: Map<String, Value>,
    ) -> Result<ParsedRequest, Rejection> {
        let body: OllamaGenerate = read(body, self.notes)?;
        let shared = body.shared;
        let model = self.check_model(shared.model)?;
        let prompt = body.prompt.unwrap_or_default();
        if prompt.is_empty() {
            return Ok(self.loaded(&model, "response", "".into()));
        }
        let mut like = self.ollama_request(shared.options.unwrap_or_default());
        let kind = Kind::Generate;
        let how = (ApiDialect::Ollama { kind, model }, stream(shared.stream));
        let suffix = body.suffix.unwrap_or_default();
        let is_raw = body.raw == Some(true) || self.model.template.is_none();
        if suffix.is_empty() && !is_raw {
            let system = body.system.filter(|text| !text.is_empty());
            let system = system.map(|text| ChatMessage::new("system", text));
            let user = ChatMessage::new("user", prompt);
            let turns = system.into_iter().chain([user]).collect();
            let conversation = conversation(turns, shared.format, shared.think);
            let ask = self.converse(&conversation, 1, &like, "prompt", how)?;
            return Ok(ParsedRequest::Generation(Box::new(ask)));
        }
        like.constraint = self.calling.whole(&format(shared.format), "format")?;
        let prompt = if suffix.is_empty() {
            self.raw(&prompt, || "prompt".into())?
        } else {
            let hole = InfillGap {
                before: &prompt,
                after: &suffix,
                ..InfillGap::default()
            };
            self.hole(&hole, "suffix")?
        };
        let ask = self.plain(vec![prompt], 1, &like, how);
        Ok(ParsedRequest::Generation(Box::new(ask)))
    }

    /// The response to an empty request: the model is loaded.
    fn loaded(&self, model: &str, name: &str, value: Value) -> ParsedRequest {
        let mut line = json!({"model": model, "created_at": rfc3339(self.unix_s)});
        line[name] = value;
        line["done"] = true.into();
        line["done_reason"] = "load".into();
        ParsedRequest::Immediate(line)
    }

    fn ollama_request(&self, options: OllamaOptions) -> GenerationRequest {
        let most = options.num_predict.unwrap_or(-1);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let mut request = self.request(&options.sampling, most, options.stop);
        let sampling = &mut request.sampling;
        if let Some(penalty) = options.repeat_penalty {
            sampling.repetition_penalty = penalty_of(penalty);
        }
        sampling.penalty_window = options.repeat_last_n.unwrap_or(sampling.penalty_window);
        request
    }
}

impl OllamaMessage {
    fn message(self) -> ChatMessage {
        let calls = self.tool_calls.into_iter().flatten();
        let role = match self.role.as_str() {
            "developer" => "system",
            role => role,
        };
        ChatMessage {
            reasoning: self.thinking,
            name: self.tool_name,
            tool_call_id: self.tool_call_id,
            tool_calls: calls.map(OllamaCall::call).collect(),
            ..ChatMessage::new(role, self.content.unwrap_or_default())
        }
    }
}

impl OllamaCall {
    fn call(self) -> ToolCall {
        ToolCall {
            id: self.id.unwrap_or_default(),
            name: self.function.name,
            arguments: match self.function.arguments {
                Value::String(text) => call_arguments(&text),
                arguments => arguments,
            },
        }
    }
}

fn conversation(
    turns: Vec<ChatMessage>,
    form: Option<OllamaFormat>,
    think: Option<Think>,
) -> Conversation {
    Conversation {
        turns,
        is_parallel: true,
        format: format(form),
        format_at: "format",
        thinking: match think {
            None => Thinking::default(),
            Some(Think::Is(is_on)) => Thinking {
                is_on: Some(is_on),
                effort: None,
            },
            Some(Think::Effort(effort)) => super::chat::thinking(Some(effort)),
        },
        ..Conversation::default()
    }
}

/// Ollama streams by default.
fn stream(given: Option<bool>) -> Option<StreamOptions> {
    let has_usage = true;
    (given != Some(false)).then_some(StreamOptions { has_usage })
}

fn format(given: Option<OllamaFormat>) -> AnswerFormat {
    match given {
        Some(OllamaFormat::Json(word)) if word == "json" => AnswerFormat::JsonObject,
        None | Some(OllamaFormat::Json(_)) => AnswerFormat::Text,
        Some(OllamaFormat::Schema(schema)) => AnswerFormat::JsonSchema(Value::Object(schema)),
    }
}
