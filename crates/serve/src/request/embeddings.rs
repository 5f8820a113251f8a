//! Parses embedding requests: `/v1/embeddings`, `/api/embed`, `/api/embeddings`.

use paceline_engine::Embedder;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::bounds::{MAX_COUNT, MAX_INPUTS, MAX_NOTE, MAX_TEXT};
use super::completion::{Prompt, Prompts};
use super::{ModelName, RequestParser};
use crate::rejection::Rejection;
use crate::render::embeddings::EmbeddingFormat;
use crate::schema::read;

/// Body of `POST /v1/embeddings`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct OpenAiEmbeddings {
    model: Option<ModelName>,
    /// A text, texts, token ids, or lists of token ids. Ids are taken as they are; around a text
    /// go the tokens that the model was trained with.
    input: Prompts,
    /// float for numbers, base64 for little-endian f32. Default float.
    #[schemars(extend(
        "enum" = ["float", "base64", null],
        "x-why" = "vectors are float or base64",
    ))]
    encoding_format: Option<String>,
    /// First numbers of a vector to keep, scaled to length 1 again. Default: all.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    dimensions: Option<usize>,
    /// Accepted, no effect: names the client's user.
    #[schemars(length(max = MAX_NOTE))]
    #[serde(rename = "user")]
    _user: Option<String>,
}

/// Body of `POST /api/embed`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct OllamaEmbed {
    model: Option<ModelName>,
    /// A text, texts, token ids, or lists of token ids. Ids are taken as they are; around a text
    /// go the tokens that the model was trained with.
    input: Prompts,
    /// Cuts texts to the model's context; false refuses longer ones. Default true.
    truncate: Option<bool>,
    /// First numbers of a vector to keep, scaled to length 1 again. Default: all.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    dimensions: Option<usize>,
    #[serde(flatten)]
    _no_effect: NoEffect,
}

/// Body of `POST /api/embeddings`, Ollama's older form.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct OllamaEmbeddings {
    model: Option<ModelName>,
    /// The text; longer ones are cut to the model's context.
    #[schemars(length(max = MAX_TEXT))]
    prompt: String,
    #[serde(flatten)]
    _no_effect: NoEffect,
}

no_effect!(NoEffect {
    options,
    keep_alive
});

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
    pub(crate) fn embeddings(
        &self,
        body: Map<String, Value>,
        embedder: &dyn Embedder,
    ) -> Result<EmbeddingRequest, Rejection> {
        let body: OpenAiEmbeddings = read(body, self.notes)?;
        self.check_model(body.model)?;
        Ok(EmbeddingRequest {
            dimensions: dimensions(body.dimensions, embedder)?,
            texts: self.embedding_inputs(body.input, InputPolicy::Refuse)?,
            form: EmbeddingFormat::OpenAi {
                is_base64: body.encoding_format.as_deref() == Some("base64"),
            },
        })
    }

    /// Parses Ollama's request. An empty input gives no vectors, as in Ollama.
    pub(crate) fn ollama_embed(
        &self,
        body: Map<String, Value>,
        embedder: &dyn Embedder,
    ) -> Result<EmbeddingRequest, Rejection> {
        let body: OllamaEmbed = read(body, self.notes)?;
        let model = self.check_model(body.model)?;
        let care = match body.truncate {
            Some(false) => InputPolicy::Whole,
            _ => InputPolicy::Cut,
        };
        Ok(EmbeddingRequest {
            texts: match body.input {
                Prompts::One(Prompt::Text(text)) if text.is_empty() => Vec::new(),
                input => self.embedding_inputs(input, care)?,
            },
            dimensions: dimensions(body.dimensions, embedder)?,
            form: EmbeddingFormat::Ollama { model },
        })
    }

    pub(crate) fn ollama_embeddings(
        &self,
        body: Map<String, Value>,
        embedder: &dyn Embedder,
    ) -> Result<EmbeddingRequest, Rejection> {
        let body: OllamaEmbeddings = read(body, self.notes)?;
        self.check_model(body.model)?;
        let prompt = Prompt::Text(body.prompt);
        Ok(EmbeddingRequest {
            texts: vec![self.embedding_input(&prompt, "prompt", InputPolicy::Cut)?],
            dimensions: embedder.dimensions(),
            form: EmbeddingFormat::OllamaOld,
        })
    }

    fn embedding_inputs(
        &self,
        input: Prompts,
        care: InputPolicy,
    ) -> Result<Vec<Vec<u32>>, Rejection> {
        let items = input.named("input", MAX_INPUTS)?.into_iter();
        items
            .map(|(param, input)| self.embedding_input(&input, &param, care))
            .collect()
    }

    /// Tokenises an input and fits it into the context; truncation keeps the last special token.
    fn embedding_input(
        &self,
        input: &Prompt,
        param: &str,
        care: InputPolicy,
    ) -> Result<Vec<u32>, Rejection> {
        let tokenizer = &self.model.tokenizer;
        let (mut ids, last) = match input {
            Prompt::Text(text) if text.is_empty() && care == InputPolicy::Refuse => {
                (Vec::new(), None)
            }
            Prompt::Text(text) => (tokenizer.encode_whole(text)?, tokenizer.last()),
            // Used unchanged: no tokens are added.
            Prompt::Ids(ids) => (self.token_ids(ids, param)?, None),
        };
        let (tokens, context) = (ids.len(), self.model.context);
        let param = param.to_owned();
        if tokens == 0 {
            return Err(Rejection::EmptyPrompt { param });
        }
        if tokens <= context {
            return Ok(ids);
        }
        if care != InputPolicy::Cut {
            return Err(Rejection::LongInput {
                param,
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
fn dimensions(wanted: Option<usize>, embedder: &dyn Embedder) -> Result<usize, Rejection> {
    let most = embedder.dimensions();
    let wanted = wanted.unwrap_or(most);
    if wanted <= most {
        return Ok(wanted);
    }
    Err(Rejection::Range {
        param: "dimensions".into(),
        got: wanted.to_string(),
        expected: format!("1 to {most}"),
    })
}
