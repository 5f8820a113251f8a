//! Fill-in-the-middle: `/infill`, and `suffix` of completions.
//!
//! Models trained for it have three special tokens. They stand before the prefix, before the
//! suffix, and before the output.

use paceline_engine::TemperatureOrder;
use paceline_text::tokenizer::Specials;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::bounds::{MAX_COUNT, MAX_EXTRA, MAX_TEXT};
use super::sampling::LlamaOptions;
use super::{ApiDialect, ModelName, ModelRequest, RequestParser, StreamOptions, unsupported};
use crate::rejection::Rejection;
use crate::schema::read;

/// Names of the three tokens by family, in this order:
/// - Qwen 2.5 Coder and later
/// - StarCoder, Granite and SmolLM
/// - Code Gemma
/// - DeepSeek Coder
/// - Codestral, which has the text behind the hole first
const NAMES: [[&str; 3]; 5] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    ["<PRE>", "<SUF>", "<MID>"],
];

/// Body of `POST /infill`, as at llama-server.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct InfillRequest {
    model: Option<ModelName>,
    /// Text before the hole.
    #[schemars(length(max = MAX_TEXT))]
    input_prefix: Option<String>,
    /// Text after the hole.
    #[schemars(length(max = MAX_TEXT))]
    input_suffix: Option<String>,
    /// Other files: filename and text.
    #[schemars(length(max = MAX_EXTRA))]
    input_extra: Option<Vec<InfillFile>>,
    /// Start of the answer, added to input_prefix.
    #[schemars(length(max = MAX_TEXT))]
    prompt: Option<String>,
    /// Most tokens of the answer; -1 for the rest of the context. Default -1.
    #[schemars(range(min = -1, max = MAX_COUNT))]
    n_predict: Option<i64>,
    #[serde(flatten)]
    options: LlamaOptions,
    #[serde(flatten)]
    _no_effect: NoEffect,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = true))]
#[serde(default)]
struct InfillFile {
    filename: String,
    text: String,
}

no_effect!(NoEffect {
    samplers,
    t_max_prompt_ms,
    t_max_predict_ms,
    n_indent,
    id_slot,
    response_fields
});

/// A prefix and a suffix around the gap. Names of special tokens in them are these tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InfillGap<'a> {
    /// Other files; special names in them stay text.
    pub(super) context: &'a str,
    pub(super) before: &'a str,
    pub(super) after: &'a str,
}

impl RequestParser<'_> {
    /// The fill-in-the-middle prompt; `param` is the field for errors.
    ///
    /// # Errors
    /// [`Rejection::Unsupported`] for a model without these tokens.
    pub(super) fn hole(
        &self,
        hole: &InfillGap<'_>,
        param: &'static str,
    ) -> Result<Vec<u32>, Rejection> {
        let [prefix, suffix, middle] = self.hole_tokens().ok_or_else(|| {
            unsupported(param, "given", "the model has no tokens that fill a hole")
        })?;
        let InfillGap {
            context,
            before,
            after,
        } = hole;
        self.check_bytes(context.len() + before.len() + after.len(), param)?;
        let tokenizer = &self.model.tokenizer;
        let text = |text: &str, specials| self.encode(text, (specials, false), param);
        let mut ids: Vec<u32> = Vec::new();
        ids.extend(tokenizer.bos().filter(|_| tokenizer.adds_bos()));
        ids.extend(text(context, Specials::AsText)?);
        ids.push(prefix);
        ids.extend(text(before, Specials::Parse)?);
        ids.push(suffix);
        ids.extend(text(after, Specials::Parse)?);
        ids.push(middle);
        self.check_prompt(&ids, || param.into(), param)?;
        Ok(ids)
    }

    /// The ids of the three tokens, if the model has them.
    pub(crate) fn hole_tokens(&self) -> Option<[u32; 3]> {
        let tokenizer = &self.model.tokenizer;
        let id = |name: &str| match tokenizer.encode(name, Specials::Parse, false) {
            Ok(ids) => match ids[..] {
                [id] if tokenizer.token_text(id) == Some(name) => Some(id),
                _ => None,
            },
            Err(_) => None,
        };
        let ids = |names: &[&str; 3]| Some([id(names[0])?, id(names[1])?, id(names[2])?]);
        NAMES.iter().find_map(ids)
    }

    pub(crate) fn infill(&self, body: Map<String, Value>) -> Result<ModelRequest, Rejection> {
        let body: InfillRequest = read(body, self.notes)?;
        self.check_model(body.model)?;
        let max_tokens = usize::try_from(body.n_predict.unwrap_or(-1)).unwrap_or(usize::MAX);
        let has_usage = true;
        let stream = (body.options.stream == Some(true)).then_some(StreamOptions { has_usage });
        let mut like = self.llama_request(body.options, max_tokens)?;
        like.sampling.order = TemperatureOrder::Last;
        let before = body.input_prefix.unwrap_or_default() + &body.prompt.unwrap_or_default();
        let files = body.input_extra.unwrap_or_default().into_iter();
        let files = files.map(|InfillFile { filename, text }| format!("{filename}\n{text}\n"));
        let hole = InfillGap {
            context: &files.collect::<String>(),
            before: &before,
            after: &body.input_suffix.unwrap_or_default(),
        };
        let prompt = self.hole(&hole, "input_prefix")?;
        Ok(self.plain(vec![prompt], 1, &like, (ApiDialect::Infill, stream)))
    }
}
