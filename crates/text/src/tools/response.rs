//! A model's own description of its answers: `response_template` of `tokenizer_config.json`,
//! version 1.
//!
//! ```text
//! {"start_anchor": "<|im_start|>assistant\n", "fields": {
//!     "thinking":   {"open": "<think>", "close": "</think>"},
//!     "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json",
//!                    "transform": {"type": "function", "function": "{content}"}},
//!     "content":    {"close": "<|im_end|>"}}}
//! ```
//!
//! An answer is a row of regions, each between an opening and a closing delimiter. The one field
//! without an opening delimiter has the text between the regions. [`Regions`] reads answers,
//! [`content`] makes calls of the text of a region, [`Delimiter`] finds texts and regular
//! expressions in text that arrives in pieces.
//!
//! Differences from transformers 5.23, whose reader this follows:
//!
//! - Text of several regions of one field is joined, as streams show it.
//! - Without tools, calls are text.
//! - A call that cannot be read is text and counted.
//! - Lookaround and back references are refused.

mod content;
mod delimiter;
mod regions;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json};

use super::reader::{ReaderOptions, ToolCallParser};
use super::schema::Parameters;
use super::tail::text_of;
use crate::tokenizer::Tokenizer;
use content::{Content, Placeholders};
use delimiter::Delimiter;
pub(super) use regions::Regions;

/// Largest template as JSON, in bytes. Those of transformers have 2 KiB at most.
const MAX_BYTES: usize = 64 << 10;

/// Most fields of a template. Known ones have three.
const MAX_FIELDS: usize = 32;

/// Tokens of a prompt in which the last anchor is looked for. The text after it in the prompt is
/// the beginning of the answer, a tag or a few words.
const ANCHOR_TOKENS: usize = 512;

const KEYS: [&str; 5] = [
    "version",
    "defaults",
    "fields",
    "start_anchor",
    "start_anchor_pattern",
];

const FIELD_KEYS: [&str; 11] = [
    "open",
    "open_pattern",
    "close",
    "close_pattern",
    "content",
    "content_args",
    "repeats",
    "join",
    "optional",
    "transform",
    "transform_each",
];

/// Why a response template cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResponseError {
    #[error("response_template has {got} bytes, expected at most {}", MAX_BYTES)]
    TooLarge {
        /// Its bytes.
        got: usize,
    },
    /// It has no fields, or more than any real one.
    #[error("response_template has {got} fields, expected 1 to {}", MAX_FIELDS)]
    Fields { got: usize },
    #[error("response_template has version {got}, expected 1")]
    Version { got: String },
    /// A key that the format does not have: it may change the meaning of the others.
    #[error("{place}: key {key:?} is not known")]
    Key {
        /// The template, or the field.
        place: String,
        key: String,
    },
    #[error("{place}: {key} is {got}, expected {expected}")]
    Value {
        /// The template, or the field.
        place: String,
        key: &'static str,
        got: String,
        expected: &'static str,
    },
    #[error("{place}: {key} is no regular expression that can be used: {reason}")]
    Pattern {
        /// The template, or the field.
        place: String,
        key: &'static str,
        /// First line of the error of the compiler of expressions.
        reason: String,
    },
    #[error("fields {first:?} and {second:?} both have no open, expected one at most")]
    TwoImplicit {
        first: String,
        /// Another.
        second: String,
    },
    #[error("response_template has no start_anchor")]
    NoAnchor,
}

/// A model's own description of its response format.
#[derive(Debug)]
pub struct ResponseTemplate {
    anchor: Delimiter,
    fields: Vec<Field>,
    /// The field that has the text between regions.
    implicit: Option<usize>,
    /// Texts of delimiters, for [`mentions`](Self::mentions).
    texts: Vec<String>,
}

/// Kind of a field of a message, for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Reasoning,
    Calls,
}

#[derive(Debug)]
struct Field {
    kind: Kind,
    open: Option<Delimiter>,
    close: Option<Delimiter>,
    content: Content,
    /// Makes calls of the content.
    transform: Option<Json>,
    /// Whether the content is a list, and each element is transformed.
    is_each: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct RegionCall {
    name: String,
    id: Option<String>,
    arguments: Map<String, Json>,
}

impl ResponseTemplate {
    /// The value of `response_template`.
    ///
    /// Cost: compiles the regular expressions, below a millisecond each.
    ///
    /// # Errors
    /// [`ResponseError`] for the first thing that is wrong.
    pub fn read(template: &Json) -> Result<Self, ResponseError> {
        let got = template.to_string().len();
        if got > MAX_BYTES {
            return Err(ResponseError::TooLarge { got });
        }
        let scope = Scope::new("response_template", template, &KEYS)?;
        if let Some(version) = scope.get("version").filter(|version| **version != 1) {
            let got = clip(version);
            return Err(ResponseError::Version { got });
        }
        let none = Map::new();
        let raw = scope.get("fields").and_then(Json::as_object);
        let raw = raw.unwrap_or(&none);
        if !(1..=MAX_FIELDS).contains(&raw.len()) {
            return Err(ResponseError::Fields { got: raw.len() });
        }
        let anchor = scope.delimiter("start_anchor", "start_anchor_pattern")?;
        let anchor = anchor.ok_or(ResponseError::NoAnchor)?;
        let fields = raw.iter().map(|(name, field)| Field::read(name, field));
        let fields: Vec<Field> = fields.collect::<Result<_, _>>()?;
        Ok(Self {
            implicit: implicit(raw, &fields)?,
            texts: texts_in(template),
            anchor,
            fields,
        })
    }

    /// Whether it separates tool calls from text.
    pub fn has_calls(&self) -> bool {
        self.fields.iter().any(|field| field.kind == Kind::Calls)
    }

    /// Whether it separates reasoning from text.
    pub fn reasons(&self) -> bool {
        let mut fields = self.fields.iter();
        fields.any(|field| field.kind == Kind::Reasoning)
    }

    /// Control tokens that the reader must see as text: a delimiter has their name in it.
    pub fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let is_shown = |id: &u32| {
            let name = tokenizer.token_text(*id).unwrap_or_default();
            tokenizer.is_control(*id) && !tokenizer.is_end_of_generation(*id) && self.mentions(name)
        };
        ids.filter(is_shown).collect()
    }

    /// Whether a delimiter has the name of a control token in it.
    fn mentions(&self, token: &str) -> bool {
        !token.is_empty() && self.texts.iter().any(|text| text.contains(token))
    }

    /// A reader of the answer to `prompt` (token ids) for a request with `tools`; without tools,
    /// calls are text.
    pub fn reader(
        self: &Arc<Self>,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        tools: &[Json],
        options: ReaderOptions,
    ) -> ToolCallParser {
        let prompt = text_of(tokenizer, prompt, ANCHOR_TOKENS);
        self.reader_after(&prompt, tools, options)
    }

    /// A reader of the answer to a prompt that ends with the text `prompt`.
    pub(super) fn reader_after(
        self: &Arc<Self>,
        prompt: &str,
        tools: &[Json],
        options: ReaderOptions,
    ) -> ToolCallParser {
        let (parameters, has_tools) = (Parameters::of(tools), !tools.is_empty());
        let (machine, input) = Regions::new(Arc::clone(self), prompt, parameters, has_tools);
        ToolCallParser::regions(machine, input, options)
    }

    /// The part of `prompt` that belongs to the answer: all behind the last anchor, if any.
    fn opened<'a>(&self, prompt: &'a str) -> &'a str {
        self.anchor
            .last_end(prompt)
            .map_or("", |end| &prompt[end..])
    }
}

impl Field {
    fn read(name: &str, field: &Json) -> Result<Self, ResponseError> {
        let scope = Scope::new(&format!("field {name:?}"), field, &FIELD_KEYS)?;
        let kind = match name {
            "tool_calls" => Kind::Calls,
            "thinking" | "reasoning" | "reasoning_content" => Kind::Reasoning,
            _ => Kind::Text,
        };
        Ok(Self {
            kind,
            open: scope.delimiter("open", "open_pattern")?,
            close: scope.delimiter("close", "close_pattern")?,
            content: Content::read(&scope)?,
            transform: scope.get("transform").cloned(),
            is_each: scope.flag("transform_each", false)?,
        })
    }

    /// The calls of a region with this text; `None` where there is none that can be read.
    fn calls(
        &self,
        text: &str,
        captures: &BTreeMap<String, String>,
        parameters: &Parameters,
    ) -> Option<Vec<RegionCall>> {
        let value = self.content.value(text)?;
        let transformed = match &self.transform {
            None => value,
            Some(transform) if self.is_each => {
                let each = |item: &Json| {
                    let scope = Placeholders::of_item(captures, item)?;
                    scope.fill(transform)
                };
                let items = value.as_array()?.iter().map(each);
                Json::Array(items.collect::<Option<_>>()?)
            }
            Some(transform) => Placeholders::of_content(captures, value).fill(transform)?,
        };
        let calls: Option<Vec<RegionCall>> = match &transformed {
            Json::Array(items) => items.iter().map(|item| call(item, parameters)).collect(),
            item => call(item, parameters).map(|call| vec![call]),
        };
        calls.filter(|calls| !calls.is_empty())
    }
}

/// A call of `{"type": "function", "function": {"name": ..., "arguments": ...}}`, or of the inner
/// object alone. Arguments that are text become what the tool's schema says.
fn call(value: &Json, parameters: &Parameters) -> Option<RegionCall> {
    let function = value.get("function").unwrap_or(value);
    let name = super::fragment::name_of(function.get("name")?.as_str()?)?;
    let mut arguments = match function.get("arguments") {
        None | Some(Json::Null) => Map::new(),
        Some(Json::Object(map)) => map.clone(),
        Some(Json::String(text)) => serde_json::from_str(text).ok()?,
        Some(_) => return None,
    };
    for (key, argument) in &mut arguments {
        let types = parameters.types(&name, key);
        if let Some(text) = argument.as_str().filter(|_| !types.is_empty()) {
            *argument = types.value(text);
        }
    }
    let id = value.get("id").or_else(|| function.get("id"));
    let id = id.and_then(Json::as_str).map(str::to_owned);
    Some(RegionCall {
        name,
        id,
        arguments,
    })
}

/// The one field without an opening delimiter.
fn implicit(raw: &Map<String, Json>, fields: &[Field]) -> Result<Option<usize>, ResponseError> {
    let mut without = (0..fields.len()).filter(|at| fields[*at].open.is_none());
    let (first, second) = (without.next(), without.next());
    let name = |at: usize| raw.keys().nth(at).cloned().unwrap_or_default();
    match (first, second) {
        (Some(first), Some(second)) => Err(ResponseError::TwoImplicit {
            first: name(first),
            second: name(second),
        }),
        (first, _) => Ok(first),
    }
}

/// An object of a template, whose keys are known.
struct Scope<'a> {
    place: String,
    object: &'a Map<String, Json>,
}

impl<'a> Scope<'a> {
    fn new(place: &str, value: &'a Json, keys: &[&str]) -> Result<Self, ResponseError> {
        let place = place.to_owned();
        let Some(object) = value.as_object() else {
            let (key, got, expected) = ("the whole", clip(value), "an object");
            return Err(ResponseError::Value {
                place,
                key,
                got,
                expected,
            });
        };
        match object.keys().find(|key| !keys.contains(&key.as_str())) {
            Some(key) => Err(ResponseError::Key {
                place,
                key: key.clone(),
            }),
            None => Ok(Self { place, object }),
        }
    }

    fn get(&self, key: &str) -> Option<&'a Json> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn flag(&self, key: &'static str, default: bool) -> Result<bool, ResponseError> {
        match self.get(key) {
            None => Ok(default),
            Some(Json::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(key, other, "a boolean")),
        }
    }

    /// A text; `default` where there is none.
    fn text(&self, key: &'static str, default: &str) -> Result<String, ResponseError> {
        match self.get(key) {
            None => Ok(default.to_owned()),
            Some(Json::String(text)) if !text.is_empty() => Ok(text.clone()),
            Some(other) => Err(self.wrong(key, other, "a text that is not empty")),
        }
    }

    fn wrong(&self, key: &'static str, got: &Json, expected: &'static str) -> ResponseError {
        ResponseError::Value {
            place: self.place.clone(),
            key,
            got: clip(got),
            expected,
        }
    }

    fn bad_pattern(&self, key: &'static str, reason: &str) -> ResponseError {
        let reason = reason.lines().last().unwrap_or_default().to_owned();
        let place = self.place.clone();
        ResponseError::Pattern { place, key, reason }
    }

    /// A text, a list of texts, or a regular expression.
    fn delimiter(
        &self,
        key: &'static str,
        pattern_key: &'static str,
    ) -> Result<Option<Delimiter>, ResponseError> {
        const EXPECTED: &str = "a text that is not empty, a list of such, or a pattern instead";
        match (self.get(key), self.get(pattern_key)) {
            (None, None) => Ok(None),
            (Some(value), None) => {
                let texts = match value {
                    Json::Array(items) => items.iter().collect(),
                    one => vec![one],
                };
                let text = |value: &Json| value.as_str().map(str::to_owned);
                let texts: Option<Vec<String>> = texts.into_iter().map(text).collect();
                let is_fit = |texts: &Vec<String>| {
                    !texts.is_empty() && texts.iter().all(|text| !text.is_empty())
                };
                let texts = texts.filter(is_fit);
                let texts = texts.ok_or_else(|| self.wrong(key, value, EXPECTED))?;
                Ok(Some(Delimiter::Texts(texts)))
            }
            (None, Some(Json::String(pattern))) => Delimiter::pattern(pattern)
                .map(Some)
                .map_err(|reason| self.bad_pattern(pattern_key, &reason)),
            (_, Some(pattern)) => Err(self.wrong(pattern_key, pattern, EXPECTED)),
        }
    }
}

/// A value as an error shows it.
fn clip(value: &Json) -> String {
    const MOST: usize = 80;
    value.to_string().chars().take(MOST).collect()
}

/// All texts of a template, without the backslashes of regular expressions.
fn texts_in(value: &Json) -> Vec<String> {
    match value {
        Json::String(text) => vec![text.replace('\\', "")],
        Json::Array(items) => items.iter().flat_map(texts_in).collect(),
        Json::Object(map) => map.values().flat_map(texts_in).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
pub(super) mod tests;
