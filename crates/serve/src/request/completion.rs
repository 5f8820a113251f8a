//! Parses `POST /v1/completions`.

use serde_json::{Map, Value};

use super::fields::COMPLETION;
use super::infill::InfillGap;
use super::{ApiDialect, ModelRequest, RequestParser, stop, stream};
use crate::conversation::AnswerFormat;
use crate::field::{integer, wrong_type};
use crate::json::show;
use crate::rejection::Rejection;
use crate::render::openai::{Kind, PromptEcho};

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A prompt as ids, with its text if the client sent text.
struct PromptTokens {
    ids: Vec<u32>,
    text: Option<String>,
}

impl RequestParser<'_> {
    /// Parses a completion request.
    ///
    /// Cost: encoding the prompts.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn completion(&self, body: Map<String, Value>) -> Result<ModelRequest, Rejection> {
        let mut fields = self.fields(body, COMPLETION, "")?;
        self.check_model(&fields)?;
        let n = self.choices(&fields)?;
        let stream = stream(&mut fields, self.notes)?;
        let (echo, logprobs) = (fields.is_true("echo"), fields.count("logprobs"));
        let max_tokens = match fields.integer("max_tokens") {
            None => DEFAULT_MAX_TOKENS,
            Some(limit) => usize::try_from(limit).unwrap_or(usize::MAX),
        };
        let stop = stop(fields.take("stop"), "stop")?;
        let mut like = self.request(&mut fields, max_tokens, logprobs, stop)?;
        let (format, at) = self.guided(&mut fields, (AnswerFormat::Text, ""))?;
        like.constraint = self.calling.whole(&format, at)?;
        like.prompt_logprobs = echo && logprobs.is_some();
        let prompt = fields.take("prompt").unwrap_or_default();
        let suffix = fields.text("suffix").unwrap_or_default();
        let prompts = if suffix.is_empty() {
            self.prompts(prompt)?
        } else {
            vec![self.before(prompt, suffix)?]
        };
        let (ids, texts): (Vec<_>, Vec<_>) = prompts.into_iter().map(|p| (p.ids, p.text)).unzip();
        let echo_of = |(ids, text): (&Vec<u32>, Option<String>)| PromptEcho {
            text: text.unwrap_or_else(|| self.model.tokenizer.decode_all(ids)),
            tokens: like.prompt_logprobs.then(|| ids.clone()),
        };
        let echo = echo.then(|| ids.iter().zip(texts).map(echo_of).collect());
        let teller = ApiDialect::OpenAi(Kind::Completion { echo });
        Ok(self.plain(ids, n, &like, (teller, stream)))
    }

    /// A text prompt with `suffix` after the output.
    fn before(&self, prompt: Value, suffix: &str) -> Result<PromptTokens, Rejection> {
        let Value::String(text) = prompt else {
            let expected = "a string, as suffix is given";
            return Err(wrong_type("prompt".into(), &prompt, expected));
        };
        let hole = InfillGap {
            before: &text,
            after: suffix,
            ..InfillGap::default()
        };
        let ids = self.hole(&hole, "suffix")?;
        let text = Some(text);
        Ok(PromptTokens { ids, text })
    }

    fn prompts(&self, value: Value) -> Result<Vec<PromptTokens>, Rejection> {
        match value {
            Value::String(text) => Ok(vec![self.text_prompt(text, || "prompt".into())?]),
            Value::Array(items) if items.iter().any(Value::is_number) => {
                Ok(vec![self.id_prompt(&items, "prompt")?])
            }
            Value::Array(items) => self.prompt_list(items),
            other => {
                let expected = "a string, or an array of strings or token ids";
                Err(wrong_type("prompt".into(), &other, expected))
            }
        }
    }

    fn prompt_list(&self, items: Vec<Value>) -> Result<Vec<PromptTokens>, Rejection> {
        let most = self.limits.prompts;
        if !(1..=most).contains(&items.len()) {
            return Err(Rejection::Length {
                param: "prompt".into(),
                got: items.len(),
                unit: "prompts",
                expected: format!("1 to {most}"),
            });
        }
        let prompt = |(i, item)| match item {
            Value::String(text) => self.text_prompt(text, || format!("prompt[{i}]")),
            Value::Array(ids) => self.id_prompt(&ids, &format!("prompt[{i}]")),
            other => {
                let expected = "a string or an array of token ids";
                Err(wrong_type(format!("prompt[{i}]"), &other, expected))
            }
        };
        items.into_iter().enumerate().map(prompt).collect()
    }

    fn text_prompt(
        &self,
        text: String,
        param: impl FnOnce() -> String,
    ) -> Result<PromptTokens, Rejection> {
        let ids = self.raw(&text, param)?;
        let text = Some(text);
        Ok(PromptTokens { ids, text })
    }

    /// Ids are used unchanged: no tokens are added.
    fn id_prompt(&self, items: &[Value], param: &str) -> Result<PromptTokens, Rejection> {
        let ids = self.token_ids(items, param)?;
        self.check_prompt(&ids, || param.to_owned(), "prompt")?;
        Ok(PromptTokens { ids, text: None })
    }

    /// Token ids of the vocabulary.
    pub(super) fn token_ids(&self, items: &[Value], param: &str) -> Result<Vec<u32>, Rejection> {
        let vocab = self.model.vocab();
        let id = |(i, item): (usize, &Value)| {
            let at = || format!("{param}[{i}]");
            let id = integer(item).ok_or_else(|| wrong_type(at(), item, "a token id"))?;
            let id = u32::try_from(id).ok().filter(|id| *id < vocab);
            id.ok_or_else(|| Rejection::Range {
                param: at(),
                got: show(item),
                expected: format!("0 to {}", vocab.saturating_sub(1)),
            })
        };
        items.iter().enumerate().map(id).collect()
    }
}
