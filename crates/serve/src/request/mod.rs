//! From the body of a request to what the engine is asked: every field is checked, honoured,
//! or refused by name.
//!
//! Reading order: [`fields`] says what there is, [`messages`] and [`completion`] make prompts, this
//! file has what both endpoints share.

pub(crate) mod chat;
pub(crate) mod completion;
pub(crate) mod fields;
pub(crate) mod messages;
pub(crate) mod schema;

use paceline_engine::{MAX_LOGIT_BIAS, Request, SamplingParams};
use serde_json::{Map, Value};

use crate::config::Limits;
use crate::field::{Fields, clip, wrong_type};
use crate::json::show;
use crate::model::Model;
use crate::rejection::Rejection;

/// Most stop texts, as in OpenAI's specification.
pub(crate) const MAX_STOPS: usize = 4;

/// Longest stop text; the engine holds as much of an answer back. Longer than any known use.
pub(crate) const MAX_STOP_CHARS: usize = 1024;

/// Entries of `metadata`, and longest name and value: OpenAI's specification.
pub(crate) const MAX_NOTES: usize = 16;
pub(crate) const MAX_NOTE_NAME: usize = 64;
pub(crate) const MAX_NOTE: usize = 512;

/// Which endpoint was asked, with what only its answers have.
#[derive(Clone, Debug)]
pub(crate) enum Dialect {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`; per prompt, what `echo` puts before each answer.
    Completion { echo: Option<Vec<String>> },
}

/// How a stream is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamOptions {
    /// Whether a chunk with the usage ends it.
    pub(crate) has_usage: bool,
}

/// A request that was understood.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) dialect: Dialect,
    /// Choices in the order of their indices: all of the first prompt, then of the second.
    pub(crate) requests: Vec<Request>,
    /// Choices of each prompt.
    pub(crate) n: usize,
    /// Tokens of all prompts, each counted once.
    pub(crate) prompt_tokens: usize,
    pub(crate) stream: Option<StreamOptions>,
}

/// What a request is read against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    pub(crate) model: &'a Model,
    pub(crate) limits: &'a Limits,
    /// For templates that write the date.
    pub(crate) unix_s: u64,
    /// For requests that give no seed.
    pub(crate) fresh_seed: u64,
}

impl Reader<'_> {
    /// # Errors
    /// [`Rejection::Model`].
    fn check_model(&self, fields: &Fields) -> Result<(), Rejection> {
        let model = fields.text("model").unwrap_or_default();
        if self.model.is_called(model) {
            return Ok(());
        }
        let (model, served) = (model.to_owned(), self.model.id.clone());
        Err(Rejection::Model { model, served })
    }

    /// `n`.
    fn choices(&self, fields: &Fields) -> Result<usize, Rejection> {
        let Some(value) = fields.get("n") else {
            return Ok(1);
        };
        let most = self.limits.choices;
        let integer = crate::field::integer(value);
        let integer = integer.ok_or_else(|| wrong_type("n".into(), value, "an integer"))?;
        if (1..=most as i128).contains(&integer) {
            return Ok(integer as usize);
        }
        Err(Rejection::Range {
            param: "n".into(),
            got: show(value),
            expected: format!("1 to {most}"),
        })
    }

    /// A request per prompt and choice. Choice `i` of a prompt has the request's seed plus `i`, so
    /// that it can be had again alone.
    fn fan_out(&self, prompts: Vec<Vec<u32>>, n: usize, like: &Request) -> Vec<Request> {
        let choice = |prompt: &Vec<u32>, i: usize| {
            let mut request = Request {
                prompt: prompt.clone(),
                ..like.clone()
            };
            request.sampling.seed = like.sampling.seed.wrapping_add(i as u64);
            request
        };
        let of_prompt = |prompt| (0..n).map(move |i| (prompt, i));
        let all = prompts.iter().flat_map(of_prompt);
        all.map(|(prompt, i)| choice(prompt, i)).collect()
    }

    /// A request without its prompt.
    fn request(
        &self,
        fields: &mut Fields,
        max_tokens: usize,
        logprobs: Option<usize>,
    ) -> Result<Request, Rejection> {
        Ok(Request {
            prompt: Vec::new(),
            max_tokens,
            sampling: self.sampling(fields)?,
            stop: stop(fields.take("stop"))?,
            logprobs,
        })
    }

    fn sampling(&self, fields: &mut Fields) -> Result<SamplingParams, Rejection> {
        let number = |name: &str, default: f32| fields.number(name).map_or(default, |n| n as f32);
        let mut sampling = SamplingParams {
            // OpenAI's defaults.
            temperature: number("temperature", 1.0),
            // 0, which OpenAI allows, keeps one token; the engine wants a share above 0.
            top_p: number("top_p", 1.0).max(f32::MIN_POSITIVE),
            top_k: fields.count("top_k").unwrap_or(0),
            min_p: number("min_p", 0.0),
            presence_penalty: number("presence_penalty", 0.0),
            frequency_penalty: number("frequency_penalty", 0.0),
            repetition_penalty: number("repetition_penalty", 1.0).clamp(1e-3, 1e3),
            seed: fields
                .integer("seed")
                .map_or(self.fresh_seed, |seed| seed as u64),
            ..SamplingParams::default()
        };
        sampling.logit_bias = self.logit_bias(fields.take("logit_bias"))?;
        Ok(sampling)
    }

    fn logit_bias(&self, value: Option<Value>) -> Result<Vec<(u32, f32)>, Rejection> {
        let Some(value) = value else {
            return Ok(Vec::new());
        };
        let Value::Object(map) = value else {
            let expected = "an object of token ids and numbers";
            return Err(wrong_type("logit_bias".into(), &value, expected));
        };
        if map.len() > MAX_LOGIT_BIAS {
            return Err(Rejection::Length {
                param: "logit_bias".into(),
                got: map.len(),
                unit: "entries",
                expected: format!("at most {MAX_LOGIT_BIAS}"),
            });
        }
        map.iter().map(|(id, bias)| self.bias(id, bias)).collect()
    }

    fn bias(&self, id: &str, bias: &Value) -> Result<(u32, f32), Rejection> {
        let vocab = self.model.vocab();
        let token = id.parse().ok().filter(|token| *token < vocab);
        // Digits only and no leading zero, so that no token comes twice.
        let token = token.filter(|token: &u32| token.to_string() == id);
        let param = format!("logit_bias.{}", clip(id));
        let Some(token) = token else {
            return Err(Rejection::Range {
                param,
                got: "no token".into(),
                expected: format!("a token id from 0 to {}", vocab.saturating_sub(1)),
            });
        };
        let Some(number) = bias.as_f64() else {
            return Err(wrong_type(param, bias, "a number"));
        };
        if !(-100.0..=100.0).contains(&number) {
            return Err(Rejection::Range {
                param,
                got: show(bias),
                expected: "-100 to 100".into(),
            });
        }
        Ok((token, number as f32))
    }

    /// # Errors
    /// [`Rejection::EmptyPrompt`], [`Rejection::ContextLength`].
    fn check_prompt(
        &self,
        tokens: &[u32],
        param: impl FnOnce() -> String,
        field: &'static str,
    ) -> Result<(), Rejection> {
        let (tokens, context) = (tokens.len(), self.model.context);
        if tokens == 0 {
            return Err(Rejection::EmptyPrompt { param: param() });
        }
        if tokens >= context {
            let param = field;
            return Err(Rejection::ContextLength {
                tokens,
                context,
                param,
            });
        }
        Ok(())
    }
}

fn stop(value: Option<Value>) -> Result<Vec<String>, Rejection> {
    let texts = match value {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![Value::String(text)],
        Some(Value::Array(texts)) if texts.len() <= MAX_STOPS => texts,
        Some(Value::Array(texts)) => {
            return Err(Rejection::Length {
                param: "stop".into(),
                got: texts.len(),
                unit: "texts",
                expected: format!("at most {MAX_STOPS}"),
            });
        }
        Some(other) => {
            let expected = "a string or an array of strings";
            return Err(wrong_type("stop".into(), &other, expected));
        }
    };
    let text = |(i, value): (usize, Value)| match value {
        Value::String(text) => match text.chars().count() {
            1..=MAX_STOP_CHARS => Ok(text),
            got => Err(Rejection::Length {
                param: format!("stop[{i}]"),
                got,
                unit: "characters",
                expected: format!("1 to {MAX_STOP_CHARS}"),
            }),
        },
        other => Err(wrong_type(format!("stop[{i}]"), &other, "a string")),
    };
    texts.into_iter().enumerate().map(text).collect()
}

fn stream(fields: &mut Fields) -> Result<Option<StreamOptions>, Rejection> {
    let is_stream = fields.is_true("stream");
    let Some(value) = fields.take("stream_options") else {
        let has_usage = false;
        return Ok(is_stream.then_some(StreamOptions { has_usage }));
    };
    let Value::Object(map) = value else {
        return Err(wrong_type("stream_options".into(), &value, "an object"));
    };
    let options = Fields::new(map, fields::STREAM_OPTION, "stream_options.")?;
    if !is_stream {
        let (param, condition) = ("stream_options", "without stream: true");
        return Err(Rejection::Conflict { param, condition });
    }
    let has_usage = options.is_true("include_usage");
    Ok(Some(StreamOptions { has_usage }))
}

/// `metadata` is not used, but what is no metadata is a mistake all the same.
fn check_metadata(value: Option<Value>) -> Result<(), Rejection> {
    let map = match value {
        None => return Ok(()),
        Some(Value::Object(map)) => map,
        Some(other) => {
            let expected = "an object of strings";
            return Err(wrong_type("metadata".into(), &other, expected));
        }
    };
    if map.len() > MAX_NOTES {
        return Err(Rejection::Length {
            param: "metadata".into(),
            got: map.len(),
            unit: "entries",
            expected: format!("at most {MAX_NOTES}"),
        });
    }
    map.iter()
        .try_for_each(|(name, value)| check_note(name, value))
}

fn check_note(name: &str, value: &Value) -> Result<(), Rejection> {
    let param = || format!("metadata.{}", clip(name));
    let Some(text) = value.as_str() else {
        return Err(wrong_type(param(), value, "a string"));
    };
    for (got, most, unit) in [
        (
            name.chars().count(),
            MAX_NOTE_NAME,
            "characters in its name",
        ),
        (text.chars().count(), MAX_NOTE, "characters"),
    ] {
        if got > most {
            return Err(Rejection::Length {
                param: param(),
                got,
                unit,
                expected: format!("at most {most}"),
            });
        }
    }
    Ok(())
}

/// An object at `param`.
fn object(value: Value, param: impl FnOnce() -> String) -> Result<Map<String, Value>, Rejection> {
    match value {
        Value::Object(map) => Ok(map),
        other => Err(wrong_type(param(), &other, "an object")),
    }
}
