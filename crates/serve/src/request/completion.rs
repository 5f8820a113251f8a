//! Parses `POST /v1/completions`.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::bounds::{MAX_COUNT, MAX_TEXT};
use super::infill::InfillGap;
use super::sampling::OpenAiOptions;
use super::{ApiDialect, ModelName, ModelRequest, RequestParser};
use crate::conversation::AnswerFormat;
use crate::rejection::Rejection;
use crate::render::openai::{Kind, PromptEcho};
use crate::schema::read;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Body of `POST /v1/completions`. The source of OpenAI's fields is its Python SDK,
/// `completion_create_params.py`, as of November 2026.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct CompletionRequest {
    model: Option<ModelName>,
    /// Prompts to complete: a text, texts, token ids, or lists of token ids. Names of control
    /// tokens in texts are these tokens.
    prompt: Prompts,
    #[serde(flatten)]
    options: OpenAiOptions,
    /// Most tokens of a choice; the context bounds it as well, alone if -1. Default 16.
    #[schemars(range(min = -1, max = MAX_COUNT))]
    max_tokens: Option<i64>,
    /// Log-probabilities of the answer's tokens and of this number of most probable ones. With echo
    /// also those of the prompt, null for the first.
    #[schemars(range(min = 0, max = 5))]
    logprobs: Option<usize>,
    /// Puts the prompt before the answer. Default false.
    echo: Option<bool>,
    /// Text after the answer, for models with tokens that fill a hole; with one prompt of text.
    #[schemars(length(max = MAX_TEXT))]
    suffix: Option<String>,
    #[serde(flatten)]
    _no_effect: NoEffect,
}

no_effect!(NoEffect {} only { best_of = [1] "choices are not ranked" });

/// A text or token ids.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum Prompt {
    Text(String),
    Ids(Vec<i64>),
}

/// A prompt or several.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum Prompts {
    List(Vec<Prompt>),
    One(Prompt),
}

impl Prompts {
    /// The prompts with their paths in the body.
    ///
    /// # Errors
    /// [`Rejection::Length`] for none, or more than `most`.
    pub(super) fn named(
        self,
        field: &str,
        most: usize,
    ) -> Result<Vec<(String, Prompt)>, Rejection> {
        let list = match self {
            Self::One(prompt) => return Ok(vec![(field.to_owned(), prompt)]),
            Self::List(list) => list,
        };
        if !(1..=most).contains(&list.len()) {
            return Err(Rejection::Length {
                param: field.to_owned(),
                got: list.len(),
                unit: "prompts",
                expected: format!("1 to {most}"),
            });
        }
        let prompts = list.into_iter().enumerate();
        Ok(prompts
            .map(|(i, prompt)| (format!("{field}[{i}]"), prompt))
            .collect())
    }
}

impl RequestParser<'_> {
    /// Parses a completion request.
    ///
    /// Cost: encoding the prompts.
    pub(crate) fn completion(&self, body: Map<String, Value>) -> Result<ModelRequest, Rejection> {
        let mut body: CompletionRequest = read(body, self.notes)?;
        self.check_model(body.model)?;
        let (n, stream) = (
            body.options.choices(self.limits.choices)?,
            body.options.stream()?,
        );
        let guided = std::mem::take(&mut body.options.guided);
        let (format, at) = guided.format((AnswerFormat::Text, ""))?;
        let max_tokens = body.max_tokens.map_or(DEFAULT_MAX_TOKENS, |limit| {
            usize::try_from(limit).unwrap_or(usize::MAX)
        });
        let mut like = self.openai_request(body.options, max_tokens, body.logprobs)?;
        like.constraint = self.calling.whole(&format, at)?;
        let is_echo = body.echo == Some(true);
        like.prompt_logprobs = is_echo && body.logprobs.is_some();
        let prompts = match body.suffix.filter(|suffix| !suffix.is_empty()) {
            Some(suffix) => vec![self.before(body.prompt, &suffix)?],
            None => {
                let prompts = body
                    .prompt
                    .named("prompt", self.limits.prompts)?
                    .into_iter();
                prompts
                    .map(|(param, prompt)| self.tokens(prompt, param))
                    .collect::<Result<_, _>>()?
            }
        };
        let (ids, texts): (Vec<_>, Vec<_>) = prompts.into_iter().unzip();
        let echo_of = |(ids, text): (&Vec<u32>, Option<String>)| PromptEcho {
            text: text.unwrap_or_else(|| self.model.tokenizer.decode_all(ids)),
            tokens: like.prompt_logprobs.then(|| ids.clone()),
        };
        let echo = is_echo.then(|| ids.iter().zip(texts).map(echo_of).collect());
        let teller = ApiDialect::OpenAi(Kind::Completion { echo });
        Ok(self.plain(ids, n, &like, (teller, stream)))
    }

    /// The ids of a text prompt with `suffix` after the output, and its text.
    fn before(
        &self,
        prompt: Prompts,
        suffix: &str,
    ) -> Result<(Vec<u32>, Option<String>), Rejection> {
        let Prompts::One(Prompt::Text(text)) = prompt else {
            return Err(Rejection::Type {
                param: "prompt".into(),
                got: "an array".into(),
                expected: "a string, as suffix is given".into(),
            });
        };
        let hole = InfillGap {
            before: &text,
            after: suffix,
            ..InfillGap::default()
        };
        Ok((self.hole(&hole, "suffix")?, Some(text)))
    }

    /// The ids of a prompt, and its text if the client sent text.
    fn tokens(
        &self,
        prompt: Prompt,
        param: String,
    ) -> Result<(Vec<u32>, Option<String>), Rejection> {
        match prompt {
            Prompt::Text(text) => Ok((self.raw(&text, || param)?, Some(text))),
            // Used unchanged: no tokens are added.
            Prompt::Ids(ids) => {
                let ids = self.token_ids(&ids, &param)?;
                self.check_prompt(&ids, || param, "prompt")?;
                Ok((ids, None))
            }
        }
    }

    pub(super) fn token_ids(&self, ids: &[i64], param: &str) -> Result<Vec<u32>, Rejection> {
        let vocab = self.model.vocab();
        let id = |(i, id): (usize, &i64)| {
            let token = u32::try_from(*id).ok().filter(|token| *token < vocab);
            token.ok_or_else(|| Rejection::Range {
                param: format!("{param}[{i}]"),
                got: id.to_string(),
                expected: format!("0 to {}", vocab.saturating_sub(1)),
            })
        };
        ids.iter().enumerate().map(id).collect()
    }
}
