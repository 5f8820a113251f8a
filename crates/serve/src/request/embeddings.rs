//! Parses embedding requests: `/v1/embeddings`, `/api/embed`, `/api/embeddings`.

use paceline_engine::Embedder;
use serde_json::{Map, Value};

use super::RequestParser;
use super::bounds::MAX_INPUTS;
use super::fields::embeddings::{OLLAMA, OLLAMA_OLD, OPENAI};
use crate::field::{Field, FieldValues, wrong_type};
use crate::rejection::Rejection;
use crate::render::embeddings::EmbeddingFormat;

/// A parsed embedding request.
#[derive(Debug, PartialEq)]
pub(crate) struct EmbeddingRequest {
    /// Texts as ids, each of 1 to the model's context tokens.
    pub(crate) texts: Vec<Vec<u32>>,
    /// Length of the returned vectors.
    pub(crate) dimensions: usize,
    pub(crate) form: EmbeddingFormat,
}

/// Policy for texts that are too long or empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InputPolicy {
    /// Rejects both.
    Refuse,
    /// Rejects long texts, accepts empty ones.
    Whole,
    /// Truncates long texts, accepts empty ones.
    Cut,
}

impl RequestParser<'_> {
    /// Parses OpenAI's request.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn embeddings(
        &self,
        body: Map<String, Value>,
        embedder: &dyn Embedder,
    ) -> Result<EmbeddingRequest, Rejection> {
        let mut fields = self.named_fields(body, OPENAI)?;
        let dimensions = dimensions(&fields, embedder)?;
        let is_base64 = fields.text("encoding_format") == Some("base64");
        let input = fields.take("input").unwrap_or_default();
        Ok(EmbeddingRequest {
            texts: self.inputs(input, InputPolicy::Refuse)?,
            dimensions,
            form: EmbeddingFormat::OpenAi { is_base64 },
        })
    }

    /// Parses Ollama's request. An empty input gives no vectors, as in Ollama.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn ollama_embed(
        &self,
        body: Map<String, Value>,
        embedder: &dyn Embedder,
    ) -> Result<EmbeddingRequest, Rejection> {
        let mut fields = self.named_fields(body, OLLAMA)?;
        let care = match fields.get("truncate") {
            Some(Value::Bool(false)) => InputPolicy::Whole,
            _ => InputPolicy::Cut,
        };
        let input = fields.take("input").unwrap_or_default();
        let is_nothing = matches!(&input, Value::String(text) if text.is_empty());
        Ok(EmbeddingRequest {
            texts: match is_nothing {
                true => Vec::new(),
                false => self.inputs(input, care)?,
            },
            dimensions: dimensions(&fields, embedder)?,
            form: EmbeddingFormat::Ollama {
                model: self.check_model(&fields)?,
            },
        })
    }

    /// Parses Ollama's older request.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn ollama_embeddings(
        &self,
        body: Map<String, Value>,
        embedder: &dyn Embedder,
    ) -> Result<EmbeddingRequest, Rejection> {
        let fields = self.named_fields(body, OLLAMA_OLD)?;
        let text = fields.text("prompt").unwrap_or_default();
        Ok(EmbeddingRequest {
            texts: vec![self.text_input(text, "prompt", InputPolicy::Cut)?],
            dimensions: embedder.dimensions(),
            form: EmbeddingFormat::OllamaOld,
        })
    }

    fn named_fields(
        &self,
        body: Map<String, Value>,
        table: &[Field],
    ) -> Result<FieldValues, Rejection> {
        let fields = self.fields(body, table, "")?;
        self.check_model(&fields)?;
        Ok(fields)
    }

    fn inputs(&self, input: Value, care: InputPolicy) -> Result<Vec<Vec<u32>>, Rejection> {
        let items = match input {
            Value::String(text) => return Ok(vec![self.text_input(&text, "input", care)?]),
            Value::Array(items) => items,
            other => {
                let expected = "a string, or an array of strings or token ids";
                return Err(wrong_type("input".into(), &other, expected));
            }
        };
        if items.iter().any(Value::is_number) {
            return Ok(vec![self.id_input(&items, "input", care)?]);
        }
        if !(1..=MAX_INPUTS).contains(&items.len()) {
            return Err(Rejection::Length {
                param: "input".into(),
                got: items.len(),
                unit: "texts",
                expected: format!("1 to {MAX_INPUTS}"),
            });
        }
        let item = |(i, item): (usize, &Value)| {
            let param = format!("input[{i}]");
            match item {
                Value::String(text) => self.text_input(text, &param, care),
                Value::Array(ids) => self.id_input(ids, &param, care),
                other => {
                    let expected = "a string or an array of token ids";
                    Err(wrong_type(param, other, expected))
                }
            }
        };
        items.iter().enumerate().map(item).collect()
    }

    fn text_input(
        &self,
        text: &str,
        param: &str,
        care: InputPolicy,
    ) -> Result<Vec<u32>, Rejection> {
        if text.is_empty() && care == InputPolicy::Refuse {
            let param = param.to_owned();
            return Err(Rejection::EmptyPrompt { param });
        }
        let tokenizer = &self.model.tokenizer;
        let ids = tokenizer.encode_whole(text)?;
        self.fitted(ids, tokenizer.last(), param, care)
    }

    /// Ids are used unchanged: no tokens are added.
    fn id_input(
        &self,
        items: &[Value],
        param: &str,
        care: InputPolicy,
    ) -> Result<Vec<u32>, Rejection> {
        self.fitted(self.token_ids(items, param)?, None, param, care)
    }

    /// Fits `ids` into the context; truncation keeps `last` as the last.
    fn fitted(
        &self,
        mut ids: Vec<u32>,
        last: Option<u32>,
        param: &str,
        care: InputPolicy,
    ) -> Result<Vec<u32>, Rejection> {
        let (tokens, context) = (ids.len(), self.model.context);
        let param = || param.to_owned();
        if tokens == 0 {
            return Err(Rejection::EmptyPrompt { param: param() });
        }
        if tokens <= context {
            return Ok(ids);
        }
        if care != InputPolicy::Cut {
            return Err(Rejection::LongInput {
                param: param(),
                tokens,
                context,
            });
        }
        ids.truncate(context - last.iter().len());
        ids.extend(last);
        Ok(ids)
    }
}

/// # Errors
/// [`Rejection::Range`] above the model's dimensions.
fn dimensions(fields: &FieldValues, embedder: &dyn Embedder) -> Result<usize, Rejection> {
    let most = embedder.dimensions();
    let wanted = fields.count("dimensions").unwrap_or(most);
    if wanted <= most {
        return Ok(wanted);
    }
    Err(Rejection::Range {
        param: "dimensions".into(),
        got: wanted.to_string(),
        expected: format!("1 to {most}"),
    })
}
