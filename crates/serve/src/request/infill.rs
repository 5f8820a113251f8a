//! Fill-in-the-middle: `/infill`, and `suffix` of completions.
//!
//! Models trained for it have three special tokens. They stand before the prefix, before the
//! suffix, and before the output.

use paceline_text::tokenizer::Specials;
use serde_json::{Map, Value};

use super::bounds::MAX_EXTRA;
use super::fields::llama::INFILL;
use super::{
    ApiDialect, ModelRequest, RequestParser, StreamOptions, array, object, stop, unsupported,
};
use crate::rejection::Rejection;

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

    /// Parses `/infill`.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn infill(&self, body: Map<String, Value>) -> Result<ModelRequest, Rejection> {
        let mut fields = self.fields(body, INFILL, "")?;
        self.check_model(&fields)?;
        let max_tokens = fields.count("n_predict").unwrap_or(usize::MAX);
        let stop = stop(fields.take("stop"), "stop")?;
        let like = self.request(&mut fields, max_tokens, None, stop)?;
        let context = self.extra(fields.take("input_extra"))?;
        let text = |name| fields.text(name).unwrap_or_default();
        let before = format!("{}{}", text("input_prefix"), text("prompt"));
        let hole = InfillGap {
            context: &context,
            before: &before,
            after: text("input_suffix"),
        };
        let prompt = self.hole(&hole, "input_prefix")?;
        let has_usage = true;
        let stream = fields
            .is_true("stream")
            .then_some(StreamOptions { has_usage });
        Ok(self.plain(vec![prompt], 1, &like, (ApiDialect::Infill, stream)))
    }

    /// Other files, each after its name.
    fn extra(&self, value: Option<Value>) -> Result<String, Rejection> {
        let Some(value) = value else {
            return Ok(String::new());
        };
        let mut context = String::new();
        let files = array(value, "input_extra", MAX_EXTRA, "files")?;
        for (i, file) in files.into_iter().enumerate() {
            let file = object(file, || format!("input_extra[{i}]"))?;
            let text = |name: &str| file.get(name).and_then(Value::as_str).unwrap_or_default();
            context += &format!("{}\n{}\n", text("filename"), text("text"));
        }
        Ok(context)
    }
}
