//! Parses `POST /v1/chat/completions`.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::bounds::{MAX_COUNT, MAX_NOTE};
use super::messages::OpenAiMessage;
use super::sampling::OpenAiOptions;
use super::tools::{ChatTool, ResponseFormat, ToolChoiceField};
use super::{ApiDialect, Metadata, ModelName, ModelRequest, RequestParser, tools};
use crate::conversation::{AnswerFormat, Conversation, OWN_VARIABLES, Thinking};
use crate::rejection::Rejection;
use crate::render::openai::Kind;
use crate::schema::read;

/// Body of `POST /v1/chat/completions`. The source of OpenAI's fields is its Python SDK,
/// `completion_create_params.py`, as of November 2026.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct ChatRequest {
    #[serde(flatten)]
    conversation: ConversationFields,
    model: Option<ModelName>,
    #[serde(flatten)]
    options: OpenAiOptions,
    /// Most tokens of a choice; the context bounds it as well. -1 and the default: the context.
    #[schemars(range(min = -1, max = MAX_COUNT), extend("not" = {"const": 0}))]
    max_completion_tokens: Option<i64>,
    /// The older name of max_completion_tokens; not both.
    #[schemars(range(min = -1, max = MAX_COUNT), extend("not" = {"const": 0}))]
    max_tokens: Option<i64>,
    /// Tells log-probabilities of the answer's tokens. Default false.
    logprobs: Option<bool>,
    /// Number of most probable tokens with log-probabilities as well; needs logprobs. Default 0.
    #[schemars(range(min = 0, max = 20))]
    top_logprobs: Option<usize>,
    /// Form of the answer: text, a JSON object, or JSON of a schema.
    response_format: Option<ResponseFormat>,
    #[serde(flatten)]
    _no_effect: NoEffect,
}

/// The conversation, and the variables of its template.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct ConversationFields {
    /// The conversation, one message or more.
    messages: Vec<OpenAiMessage>,
    /// Functions that the model may call.
    #[schemars(length(max = super::bounds::MAX_TOOLS))]
    tools: Option<Vec<ChatTool>>,
    /// Whether and which tools are to be called. Default auto.
    tool_choice: Option<ToolChoiceField>,
    /// Whether one answer may have several calls. Default true.
    parallel_tool_calls: Option<bool>,
    /// More variables for the chat template, such as enable_thinking. Not OpenAI's.
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Given to templates that know it; none switches thinking off where that can be.
    #[schemars(length(min = 1, max = 32))]
    reasoning_effort: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[expect(dead_code, reason = "accepted, and no effect on the answer")]
struct NoEffect {
    /// Accepted, no effect: names the client's user to OpenAI.
    #[schemars(length(max = MAX_NOTE))]
    safety_identifier: Option<String>,
    /// Accepted, no effect: notes for a stored answer, and nothing is stored.
    metadata: Option<Metadata>,
    /// Accepted, no effect: nothing is ever stored.
    store: Option<bool>,
    /// Accepted, no effect on the answer: a cache changes speed only.
    #[schemars(length(max = MAX_NOTE))]
    prompt_cache_key: Option<String>,
    /// Accepted, no effect on the answer: a cache changes speed only.
    prompt_cache_options: Option<Map<String, Value>>,
    /// Accepted, no effect on the answer: a guess at it, for speed only.
    prediction: Option<Map<String, Value>>,
    #[serde(flatten)]
    only: Only,
}

no_effect!(Only {} only {
    prompt_cache_retention = ["in_memory", "in-memory", "24h"]
        "the specification has \"in_memory\" and \"24h\"",
    service_tier = ["auto", "default"] "there is one tier of service, \"default\"",
    functions = [[]] "use tools and tool_choice",
    function_call = ["none", "auto"] "use tools and tool_choice",
    modalities = [["text"]] "answers are text",
    audio = [] "answers are text",
    verbosity = ["medium"] "how much a model says is not controlled here",
    web_search_options = [] "nothing is searched for",
    moderation = [] "nothing is moderated"
});

impl RequestParser<'_> {
    /// Parses a chat request.
    ///
    /// Cost: rendering and encoding the conversation.
    pub(crate) fn chat(&self, body: Map<String, Value>) -> Result<ModelRequest, Rejection> {
        let mut body: ChatRequest = read(body, self.notes)?;
        let (max_tokens, logprobs) = (body.max_tokens()?, body.logprobs()?);
        self.check_model(body.model)?;
        let (n, stream) = (
            body.options.choices(self.limits.choices)?,
            body.options.stream()?,
        );
        let format = body
            .response_format
            .map_or_else(Default::default, ResponseFormat::format);
        let guided = std::mem::take(&mut body.options.guided);
        let format = guided.format((format, "response_format"))?;
        let like = self.openai_request(body.options, max_tokens, logprobs)?;
        let conversation = self.conversation(body.conversation, format)?;
        let teller = ApiDialect::OpenAi(Kind::Chat);
        self.converse(&conversation, n, &like, "messages", (teller, stream))
    }

    /// The conversation of a chat, with the form of its answer and the field that has it.
    pub(super) fn conversation(
        &self,
        fields: ConversationFields,
        (format, format_at): (AnswerFormat, &'static str),
    ) -> Result<Conversation, Rejection> {
        let mut conversation = Conversation {
            turns: self.messages(fields.messages)?,
            format,
            format_at,
            thinking: thinking(fields.reasoning_effort),
            variables: variables(fields.chat_template_kwargs.unwrap_or_default())?,
            is_parallel: fields.parallel_tool_calls != Some(false),
            tools: fields
                .tools
                .into_iter()
                .flatten()
                .map(ChatTool::tool)
                .collect(),
            ..Conversation::default()
        };
        tools::choose(fields.tool_choice, &mut conversation)?;
        Ok(conversation)
    }
}

impl ChatRequest {
    fn max_tokens(&self) -> Result<usize, Rejection> {
        if self.max_completion_tokens.is_some() && self.max_tokens.is_some() {
            let (param, condition) = ("max_tokens", "together with max_completion_tokens");
            return Err(Rejection::Conflict { param, condition });
        }
        let most = self.max_completion_tokens.or(self.max_tokens);
        Ok(usize::try_from(most.unwrap_or(-1)).unwrap_or(usize::MAX))
    }

    fn logprobs(&self) -> Result<Option<usize>, Rejection> {
        if self.logprobs == Some(true) {
            return Ok(Some(self.top_logprobs.unwrap_or(0)));
        }
        if self.top_logprobs.is_some() {
            let (param, condition) = ("top_logprobs", "without logprobs: true");
            return Err(Rejection::Conflict { param, condition });
        }
        Ok(None)
    }
}

/// Thinking options of an effort; `none` disables thinking.
pub(super) fn thinking(effort: Option<String>) -> Thinking {
    Thinking {
        is_on: effort.as_ref().map(|effort| effort != "none"),
        effort: effort.filter(|effort| effort != "none"),
    }
}

/// Checks `chat_template_kwargs`, which may not replace rendered variables.
fn variables(given: Map<String, Value>) -> Result<Map<String, Value>, Rejection> {
    let own = given
        .keys()
        .find(|name| OWN_VARIABLES.contains(&name.as_str()));
    match own {
        Some(name) => Err(super::unsupported(
            format!("chat_template_kwargs.{name}"),
            "given",
            "the request itself says it",
        )),
        None => Ok(given),
    }
}
