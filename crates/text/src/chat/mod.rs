//! Renders a conversation to prompt tokens with the model's chat template.
//!
//! ```text
//! messages --guard--> changed messages --template--> text --cut at control names--> fragments
//!          --change the text fragments back, encode as ordinary text--> ids
//! ```
//!
//! Invariants:
//!
//! - The control tokens of a prompt are those that the template writes, and no text of a message
//!   becomes one (see `guard`).
//! - A template runs in an interpreter without files, network or clock, and stops at a limit of
//!   steps and of output.
//! - A template's length and nesting are bounded before it is parsed (`depth`).
//!
//! The interpreter of this process counts neither the memory of values that a template makes and
//! does not print, nor the time of one step. [`ChatTemplate::with`] takes an [`Interpreter`] that
//! does. `paceline_worker::interpreter` runs templates in a child process with limits.
//!
//! Not here: a default template for models without one. Such a model was not trained to chat.

mod clock;
mod depth;
mod guard;
mod interpreter;
mod json;
mod message;
mod openai;
mod sources;
mod template;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value as Json};

use crate::tokenizer::{self, Fragment, Tokenizer};
use crate::tools::ResponseTemplate;
pub use clock::strftime;
use guard::{Guard, GuardMode, TextKind};
pub use interpreter::{Here, Interpreter, RenderInput, TemplateError};
use message::MessageFormat;
pub use message::{ChatMessage, ToolCall};
pub use openai::{call_arguments, function_tool, name_results};
use paceline_weights::gguf::Metadata;
pub use sources::{TOOL_USE_FILE, TemplateSources};

/// Why a conversation could not be made a prompt.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model has no chat template: it is a base model, which completes text.
    #[error("the model has no chat template: it is a base model and completes plain text only")]
    NoTemplate,
    /// The model has named templates, and none for a conversation of this kind.
    #[error(
        "the model has no chat template for a conversation {}, only {}",
        with_tools(*has_tools), names.join(", ")
    )]
    NoNamedTemplate { has_tools: bool, names: Vec<String> },
    /// Metadata of a GGUF is of another type.
    #[error(transparent)]
    Metadata(#[from] paceline_weights::gguf::Error),
    #[error("reading {}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A configuration file is not JSON of the expected form.
    #[error("{}: {reason}", path.display())]
    Malformed { path: PathBuf, reason: String },
    /// The file that holds the template is longer than any real one.
    #[error("{}: {size} bytes, expected at most {limit}", path.display())]
    TooLong {
        path: PathBuf,
        /// Its size in bytes.
        size: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The template cannot be used, failed, or refuses the conversation.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A role that is no known word: templates make names of control tokens of roles.
    #[error("role {role:?} is not one of {}", ROLES.join(", "))]
    UnknownRole { role: String },
    /// No character is left to keep messages apart from control tokens.
    #[error("the messages use all private-use characters of Unicode")]
    NoFreeCharacter,
    /// A part of the prompt could not be encoded.
    #[error(transparent)]
    Tokenizer(#[from] tokenizer::Error),
}

/// Roles that a message may have: those of OpenAI's and Hugging Face's message formats, and what
/// Llama (`ipython`) and Gemma (`model`) call two of them.
pub const ROLES: [&str; 8] = [
    "system",
    "user",
    "assistant",
    "tool",
    "developer",
    "function",
    "ipython",
    "model",
];

/// Options of rendering.
#[derive(Clone, Debug, Default)]
pub struct ChatOptions {
    /// Ends the prompt with the beginning of an answer. Almost always wanted.
    pub add_generation_prompt: bool,
    /// Seconds since 1970 (UTC) for templates that write the date. Without it such templates take
    /// the date they were made with.
    pub now_unix_s: Option<i64>,
    /// Tools that the model may call: `{"type": "function", "function": {"name", "description",
    /// "parameters"}}` each. None hides tools from the template.
    pub tools: Vec<Json>,
    /// More variables for the template, such as `enable_thinking` or `reasoning_effort`.
    pub variables: Map<String, Json>,
    pub bounds: PromptLimits,
}

/// Limits on a prompt's length. Rendering and encoding stop with an error once one is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLimits {
    /// Bytes of the text that the template writes.
    pub text_bytes: usize,
    pub tokens: usize,
}

impl Default for PromptLimits {
    /// 16 MiB of text, and any number of tokens.
    fn default() -> Self {
        Self {
            text_bytes: template::MAX_OUTPUT_BYTES,
            tokens: usize::MAX,
        }
    }
}

impl PromptLimits {
    /// Limits for prompts of up to `tokens` tokens of at most `token_bytes` bytes each.
    pub fn of(tokens: usize, token_bytes: usize) -> Self {
        let bytes = tokens
            .saturating_mul(token_bytes)
            .saturating_mul(DISGUISE_BYTES);
        Self {
            text_bytes: bytes.min(template::MAX_OUTPUT_BYTES),
            tokens,
        }
    }
}

/// Bytes of a private-use character, which replaces a character of one byte or more while a
/// template runs.
const DISGUISE_BYTES: usize = 4;

/// The templates of one model, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    default: Option<OneTemplate>,
    /// For conversations with tools, where the model has its own for them.
    tool_use: Option<OneTemplate>,
    names: Vec<String>,
    /// The texts of both templates.
    source: String,
    response: Option<Arc<ResponseTemplate>>,
}

#[derive(Debug)]
struct OneTemplate {
    interpreter: Box<dyn Interpreter>,
    shape: MessageFormat,
}

impl OneTemplate {
    fn new(source: &str, interpreter: Box<dyn Interpreter>) -> Self {
        let render = |messages: &[Json]| {
            let mut variables = defaults();
            variables.insert("messages".into(), messages.into());
            let job = RenderInput {
                variables,
                now_unix_s: None,
                output_bytes_max: template::MAX_OUTPUT_BYTES,
            };
            interpreter.render(job).ok()
        };
        Self {
            shape: MessageFormat::of(source, render),
            interpreter,
        }
    }
}

const fn with_tools(has_tools: bool) -> &'static str {
    if has_tools {
        "with tools"
    } else {
        "without tools"
    }
}

impl ChatTemplate {
    /// Compiles `source`, to run in this process.
    ///
    /// # Errors
    /// [`TemplateError::TooLong`], [`TemplateError::TooDeep`], [`TemplateError::Syntax`].
    pub fn new(source: &str) -> Result<Self, Error> {
        Self::here(&source.into())
    }

    fn here(sources: &TemplateSources) -> Result<Self, Error> {
        Self::with(sources, |source| Ok(Box::new(Here::compile(source)?)))
    }

    /// Has `start` compile each of `sources`, and runs them there.
    ///
    /// Cost: one to ten renderings of short messages for each, to find the message format.
    ///
    /// # Errors
    /// The failure of `start`, as [`Error::Template`].
    pub fn with(
        sources: &TemplateSources,
        start: impl Fn(&str) -> Result<Box<dyn Interpreter>, TemplateError>,
    ) -> Result<Self, Error> {
        let compile = |source: &Option<String>| {
            let source = source.as_deref();
            let one = source.map(|source| Ok(OneTemplate::new(source, start(source)?)));
            one.transpose().map_err(Error::Template)
        };
        let texts = [&sources.default, &sources.tool_use].into_iter();
        let texts: Vec<&str> = texts.filter_map(|text| text.as_deref()).collect();
        Ok(Self {
            default: compile(&sources.default)?,
            tool_use: compile(&sources.tool_use)?,
            names: sources.names(),
            source: texts.join("\n"),
            response: None,
        })
    }

    fn of(&self, has_tools: bool) -> Result<&OneTemplate, Error> {
        let own = self.tool_use.as_ref().filter(|_| has_tools);
        let none = || Error::NoNamedTemplate {
            has_tools,
            names: self.names.clone(),
        };
        own.or(self.default.as_ref()).ok_or_else(none)
    }

    /// With the model's description of its answers, where it has one.
    #[must_use]
    pub fn with_response(mut self, response: Option<ResponseTemplate>) -> Self {
        self.response = response.map(Arc::new);
        self
    }

    /// The model's description of its answers.
    pub const fn response(&self) -> Option<&Arc<ResponseTemplate>> {
        self.response.as_ref()
    }

    /// The text of the template, or the texts of both.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The templates in the metadata of a GGUF file, to run in this process.
    ///
    /// # Errors
    /// The errors of [`TemplateSources::in_gguf`] and [`new`](Self::new).
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, Error> {
        Self::here(&TemplateSources::in_gguf(metadata)?)
    }

    /// The templates of a Hugging Face folder, to run in this process.
    ///
    /// # Errors
    /// The errors of [`TemplateSources::in_dir`] and [`new`](Self::new).
    pub fn from_hf_dir(dir: &Path) -> Result<Self, Error> {
        Self::here(&TemplateSources::in_dir(dir)?)
    }

    /// The text of the prompt, as the template writes it. For display only: a message may contain
    /// the text of a control token, so ids must come from [`encode_chat`](Self::encode_chat).
    ///
    /// # Errors
    /// [`Error::Template`], [`Error::NoNamedTemplate`].
    pub fn render(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<String, Error> {
        let names = BosEosNames::of(tokenizer);
        let shape = &self.of(options.has_tools())?.shape;
        let messages: Vec<Json> = messages.iter().map(|m| shape.dress(m)).collect();
        self.render_with(&names, messages, options.template_variables(), options)
    }

    /// The ids of the prompt. Only the template's control tokens become control tokens: the same
    /// text in a message is ordinary text. BOS goes first if the model wants it and the template
    /// has not written it.
    ///
    /// Cost: one rendering, or two if a message has a character that control tokens begin or end
    /// with, and one encoding of the text.
    ///
    /// # Errors
    /// The errors of [`render`](Self::render), [`Error::UnknownRole`], [`Error::NoFreeCharacter`],
    /// [`Error::Tokenizer`].
    pub fn encode_chat(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<Vec<u32>, Error> {
        if let Some(bad) = messages.iter().find(|m| !ROLES.contains(&m.role.as_str())) {
            return Err(Error::UnknownRole {
                role: bad.role.clone(),
            });
        }
        let texts = texts_of(messages, &options.template_variables());
        let all = texts
            .iter()
            .map(String::as_str)
            .chain([self.source.as_str()]);
        let guard = Guard::new(tokenizer.control_texts(), all)?;
        let marked =
            self.render_guarded(tokenizer, &guard, GuardMode::Marked, messages, options)?;
        if texts.iter().any(|text| guard.needs_disguise(text)) {
            let guise = GuardMode::Disguised;
            let disguised = self.render_guarded(tokenizer, &guard, guise, messages, options)?;
            if control_ids(tokenizer, &marked) != control_ids(tokenizer, &disguised) {
                return encode_guarded(tokenizer, &guard, &disguised, options.bounds.tokens);
            }
        }
        encode_guarded(tokenizer, &guard, &marked, options.bounds.tokens)
    }

    fn render_guarded(
        &self,
        tokenizer: &Tokenizer,
        guard: &Guard<'_>,
        guise: GuardMode,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<String, Error> {
        let shape = &self.of(options.has_tools())?.shape;
        let change = |message: &ChatMessage| shape.dress(&change_message(message, guard, guise));
        let messages: Vec<Json> = messages.iter().map(change).collect();
        let variables = change_values(&options.template_variables(), guard, guise);
        self.render_with(&BosEosNames::of(tokenizer), messages, variables, options)
    }

    fn render_with(
        &self,
        names: &BosEosNames<'_>,
        messages: Vec<Json>,
        variables: Map<String, Json>,
        options: &ChatOptions,
    ) -> Result<String, Error> {
        let mut all = defaults();
        all.extend(variables);
        all.insert("messages".into(), messages.into());
        all.insert(
            "add_generation_prompt".into(),
            options.add_generation_prompt.into(),
        );
        all.insert("bos_token".into(), names.bos.into());
        all.insert("eos_token".into(), names.eos.into());
        let job = RenderInput {
            variables: all,
            now_unix_s: options.now_unix_s,
            output_bytes_max: options.bounds.text_bytes,
        };
        let template = self.of(options.has_tools())?;
        Ok(template.interpreter.render(job)?)
    }
}

impl ChatOptions {
    const fn has_tools(&self) -> bool {
        !self.tools.is_empty()
    }

    /// All that the caller gives to the template besides the messages.
    fn template_variables(&self) -> Map<String, Json> {
        let mut given = self.variables.clone();
        if !self.tools.is_empty() {
            given.insert("tools".into(), self.tools.clone().into());
        }
        given
    }
}

/// Variables that `transformers` defines even if they are not given.
fn defaults() -> Map<String, Json> {
    let none = |name: &str| (name.to_owned(), Json::Null);
    ["tools", "documents"].map(none).into_iter().collect()
}

/// Names by which the template calls BOS and EOS; empty if the model has none.
struct BosEosNames<'a> {
    bos: &'a str,
    eos: &'a str,
}

impl<'a> BosEosNames<'a> {
    fn of(tokenizer: &'a Tokenizer) -> Self {
        let name = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id));
        Self {
            bos: name(tokenizer.bos()).unwrap_or_default(),
            eos: name(tokenizer.eos()).unwrap_or_default(),
        }
    }
}

/// The texts of a message changed, but not its role.
fn change_message(message: &ChatMessage, guard: &Guard<'_>, guise: GuardMode) -> ChatMessage {
    let other = |text: &String| guard.change(text, guise, TextKind::Other);
    let call = |call: &ToolCall| ToolCall {
        id: other(&call.id),
        name: other(&call.name),
        arguments: guard.change_json(&call.arguments, guise),
    };
    ChatMessage {
        role: message.role.clone(),
        content: guard.change(&message.content, guise, TextKind::Content),
        reasoning: (message.reasoning.as_deref())
            .map(|text| guard.change(text, guise, TextKind::Content)),
        tool_calls: message.tool_calls.iter().map(call).collect(),
        tool_call_id: message.tool_call_id.as_ref().map(other),
        name: message.name.as_ref().map(other),
        extra: change_values(&message.extra, guard, guise),
    }
}

/// Keys are words of the template and not changed at this level.
fn change_values(
    map: &Map<String, Json>,
    guard: &Guard<'_>,
    guise: GuardMode,
) -> Map<String, Json> {
    let change = |(key, value): (&String, &Json)| (key.clone(), guard.change_json(value, guise));
    map.iter().map(change).collect()
}

/// Everything that the caller put into a conversation, as text.
fn texts_of(messages: &[ChatMessage], variables: &Map<String, Json>) -> Vec<String> {
    let json = |map: &Map<String, Json>| {
        (!map.is_empty()).then(|| serde_json::to_string(map).unwrap_or_default())
    };
    let calls = |m: &ChatMessage| {
        (!m.tool_calls.is_empty()).then(|| serde_json::to_string(&m.tool_calls).unwrap_or_default())
    };
    let message = |m: &ChatMessage| {
        let plain = [
            Some(&m.content),
            m.reasoning.as_ref(),
            m.tool_call_id.as_ref(),
            m.name.as_ref(),
        ];
        let made = [json(&m.extra), calls(m)];
        plain.map(Option::<&String>::cloned).into_iter().chain(made)
    };
    let texts = messages.iter().flat_map(message).flatten();
    texts.chain(json(variables)).collect()
}

fn control_ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let id = |fragment: &Fragment<'_>| match *fragment {
        Fragment::Token { id, .. } => Some(id),
        Fragment::Text(_) => None,
    };
    tokenizer.cut_control(text).iter().filter_map(id).collect()
}

/// The ids of a rendered text, with the changes taken back between the control tokens.
fn encode_guarded(
    tokenizer: &Tokenizer,
    guard: &Guard<'_>,
    rendered: &str,
    tokens_max: usize,
) -> Result<Vec<u32>, Error> {
    let fragments = tokenizer.cut_control(rendered);
    let texts: Vec<String> = fragments.iter().map(|f| guard.restore(f.text())).collect();
    let pieces: Vec<Fragment<'_>> = fragments
        .iter()
        .zip(&texts)
        .map(|(fragment, text)| match *fragment {
            Fragment::Token { id, .. } => Fragment::Token { id, text },
            Fragment::Text(_) => Fragment::Text(text),
        })
        .collect();
    let mut ids = tokenizer.encode_pieces(&pieces, tokens_max)?;
    if tokenizer.adds_bos() && ids.first().copied() != tokenizer.bos() {
        ids.splice(..0, tokenizer.bos());
    }
    Ok(ids)
}
