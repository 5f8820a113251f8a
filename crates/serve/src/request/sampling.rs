//! Fields that dialects share: sampling, the end of an answer, scheduling.

use paceline_engine::{GenerationRequest, MAX_LOGIT_BIAS, SamplingParams, SchedulingParams};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::bounds::{MAX_COUNT, MAX_STOP_CHARS, MAX_STOPS};
use super::grammars::Guided;
use super::{NoEffectUser, RequestParser, StreamOptions};
use crate::rejection::Rejection;
use crate::schema::clip;

/// Logit bias that makes an end token practically impossible.
const NEVER: f32 = -100.0;

/// The seed that asks for a random one, as clients of llama-server, Ollama and LM Studio send it.
const RANDOM_SEED: i64 = -1;

/// Range of the engine's repetition penalty.
pub(super) const REPETITION: (f64, f64) = (1e-3, 1e3);

/// Sampling in every dialect.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct BasicSampling {
    /// Divides the logits; 0 takes the most probable token always. Default: the model's own.
    #[schemars(range(min = 0.0, max = 2.0))]
    temperature: Option<f64>,
    /// Keeps the fewest most probable tokens whose probabilities sum to this. Default: the model's
    /// own.
    #[schemars(range(min = 0.0, max = 1.0))]
    top_p: Option<f64>,
}

/// Sampling, under the names that OpenAI, llama-server and Ollama share.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct Sampling {
    #[serde(flatten)]
    pub(super) basic: BasicSampling,
    /// Number of most probable tokens to keep; 0 and -1 keep all. Default: the model's own. Not
    /// OpenAI's.
    #[schemars(range(min = -1, max = MAX_COUNT))]
    pub(super) top_k: Option<i64>,
    /// Keeps tokens at least this probable, as a share of the most probable. Default: the model's
    /// own. Not OpenAI's.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub(super) min_p: Option<f64>,
    /// Subtracted once from the logits of tokens that the answer has. Default 0.
    #[schemars(range(min = -2.0, max = 2.0))]
    pub(super) presence_penalty: Option<f64>,
    /// Subtracted from the logits of tokens as often as the answer has them. Default 0.
    #[schemars(range(min = -2.0, max = 2.0))]
    pub(super) frequency_penalty: Option<f64>,
    /// Starts the random numbers: equal requests with equal seeds give equal answers while
    /// system_fingerprint is equal. Choice i of n equals a request with seed + i. -1 and the
    /// default: a random one.
    #[schemars(range(min = i64::MIN, max = i64::MAX))]
    pub(super) seed: Option<i64>,
}

/// Fields that OpenAI's endpoints and llama-server share.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct LlamaOptions {
    #[serde(flatten)]
    sampling: Sampling,
    /// Another name of repetition_penalty, which goes first. Not OpenAI's.
    #[schemars(range(min = REPETITION.0, max = REPETITION.1))]
    repeat_penalty: Option<f64>,
    /// Forbids the tokens that end an answer. Default false. Not OpenAI's.
    ignore_eos: Option<bool>,
    /// Added to the logits of tokens, by token id; at most 1024.
    #[schemars(extend(
        "additionalProperties" = {"type": "number", "minimum": -100, "maximum": 100},
        "propertyNames" = {"$ref": "#/components/schemas/TokenId"},
        "maxProperties" = MAX_LOGIT_BIAS,
    ))]
    logit_bias: Option<Map<String, Value>>,
    /// Texts that end the answer and are no part of it.
    stop: Option<Stop>,
    /// Sends the answer as server-sent events while it is made. Default false.
    pub(super) stream: Option<bool>,
    /// Accepted, no effect on the answer: prompts are always cached.
    #[serde(rename = "cache_prompt")]
    _cache_prompt: Option<bool>,
}

/// Fields of both of OpenAI's endpoints.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct OpenAiOptions {
    #[serde(flatten)]
    shared: LlamaOptions,
    #[serde(flatten)]
    pub(super) guided: Guided,
    /// Divides positive and multiplies negative logits of the last 64 tokens. Default: the model's
    /// own. Not OpenAI's.
    #[schemars(range(min = REPETITION.0, max = REPETITION.1))]
    repetition_penalty: Option<f64>,
    /// Tokens before which the answer does not end by itself. Default 0. Not OpenAI's.
    #[schemars(range(min = 0, max = MAX_COUNT))]
    min_tokens: Option<usize>,
    /// Waiting requests of a higher priority get their turn first. Default 0. Not OpenAI's.
    #[schemars(range(min = -100, max = 100))]
    priority: Option<i32>,
    /// Seconds after which the answer ends early, with the finish reason length. Among requests of
    /// equal priority the first due gets its turn first. Not OpenAI's.
    #[schemars(range(min = 1e-3, max = 86_400.0))]
    deadline: Option<f64>,
    /// Choices of an answer. Default 1.
    n: Option<i64>,
    /// Only with stream.
    stream_options: Option<StreamFields>,
    /// Accepted, no effect: the model stays loaded.
    #[serde(rename = "keep_alive")]
    _keep_alive: Option<Value>,
    #[serde(flatten)]
    _user: NoEffectUser,
}

/// `stream_options`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct StreamFields {
    /// Ends the stream with a chunk without choices that has the usage. Default false.
    include_usage: Option<bool>,
    #[serde(flatten)]
    _no_effect: StreamNoEffect,
}

no_effect!(StreamNoEffect {} only {
    include_obfuscation = [false] "events are not padded to hide the lengths of tokens"
});

/// Stop texts, one or a list.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum Stop {
    One(#[schemars(length(min = 1, max = MAX_STOP_CHARS))] String),
    Many(
        #[schemars(length(max = MAX_STOPS), inner(length(min = 1, max = MAX_STOP_CHARS)))]
        Vec<String>,
    ),
}

impl Stop {
    pub(super) fn texts(stop: Option<Self>) -> Vec<String> {
        match stop {
            None => Vec::new(),
            Some(Self::One(text)) => vec![text],
            Some(Self::Many(texts)) => texts,
        }
    }
}

impl OpenAiOptions {
    /// `n`, within the configured limit.
    pub(super) fn choices(&self, most: usize) -> Result<usize, Rejection> {
        let n = self.n.unwrap_or(1);
        let choices = usize::try_from(n).ok().filter(|n| (1..=most).contains(n));
        choices.ok_or_else(|| Rejection::Range {
            param: "n".into(),
            got: n.to_string(),
            expected: format!("1 to {most}"),
        })
    }

    /// # Errors
    /// [`Rejection::Conflict`] for options without a stream.
    pub(super) fn stream(&self) -> Result<Option<StreamOptions>, Rejection> {
        let is_stream = self.shared.stream == Some(true);
        if self.stream_options.is_some() && !is_stream {
            let (param, condition) = ("stream_options", "without stream: true");
            return Err(Rejection::Conflict { param, condition });
        }
        let options = self.stream_options.as_ref();
        let has_usage = options.is_some_and(|options| options.include_usage == Some(true));
        Ok(is_stream.then_some(StreamOptions { has_usage }))
    }
}

impl RequestParser<'_> {
    /// An engine request with OpenAI's options, without its prompt.
    pub(super) fn openai_request(
        &self,
        options: OpenAiOptions,
        max_tokens: usize,
        logprobs: Option<usize>,
    ) -> Result<GenerationRequest, Rejection> {
        let mut request = self.llama_request(options.shared, max_tokens)?;
        if let Some(penalty) = options.repetition_penalty {
            request.sampling.repetition_penalty = penalty_of(penalty);
        }
        request.min_tokens = options.min_tokens.unwrap_or(0);
        request.logprobs = logprobs;
        request.order.priority = options.priority.unwrap_or(0);
        let millis = |seconds: f64| (seconds * 1e3).ceil() as u32;
        request.order.deadline_ms = options.deadline.map(millis);
        Ok(request)
    }

    /// An engine request with llama-server's options, without its prompt.
    pub(super) fn llama_request(
        &self,
        options: LlamaOptions,
        max_tokens: usize,
    ) -> Result<GenerationRequest, Rejection> {
        let mut request = self.request(&options.sampling, max_tokens, options.stop);
        let sampling = &mut request.sampling;
        if let Some(penalty) = options.repeat_penalty {
            sampling.repetition_penalty = penalty_of(penalty);
        }
        let biases = options.logit_bias.iter().flatten();
        sampling.logit_bias = biases
            .map(|(id, bias)| self.bias(id, bias))
            .collect::<Result<_, _>>()?;
        if options.ignore_eos == Some(true) {
            self.forbid_ends(&mut sampling.logit_bias);
        }
        Ok(request)
    }

    /// An engine request without its prompt; missing parameters are the model's own.
    pub(super) fn request(
        &self,
        sampling: &Sampling,
        max_tokens: usize,
        stop: Option<Stop>,
    ) -> GenerationRequest {
        let own = &self.model.sampling;
        let number = |given: Option<f64>, own: f32| given.map_or(own, |given| given as f32);
        let seed = sampling.seed.filter(|seed| *seed != RANDOM_SEED);
        let sampling = SamplingParams {
            temperature: number(sampling.basic.temperature, own.temperature),
            // OpenAI allows 0, which keeps one token; the engine requires a value above 0.
            top_p: number(sampling.basic.top_p, own.top_p).max(f32::MIN_POSITIVE),
            // -1 keeps all tokens.
            top_k: sampling
                .top_k
                .map_or(own.top_k, |k| usize::try_from(k).unwrap_or(0)),
            min_p: number(sampling.min_p, own.min_p),
            presence_penalty: number(sampling.presence_penalty, own.presence_penalty),
            frequency_penalty: number(sampling.frequency_penalty, own.frequency_penalty),
            repetition_penalty: penalty_of(own.repetition_penalty.into()),
            penalty_window: own.penalty_window,
            seed: seed.map_or(self.fresh_seed, |seed| seed as u64),
            ..SamplingParams::default()
        };
        GenerationRequest {
            max_tokens,
            sampling,
            stop: Stop::texts(stop),
            // Each key is a client of its own, and each machine without one.
            order: SchedulingParams {
                client: self.client.number(),
                ..SchedulingParams::default()
            },
            ..GenerationRequest::default()
        }
    }

    fn forbid_ends(&self, bias: &mut Vec<(u32, f32)>) {
        let ends = self.model.tokenizer.end_of_generation();
        bias.retain(|(token, _)| !ends.contains(token));
        bias.extend(ends.iter().map(|token| (*token, NEVER)));
        bias.truncate(MAX_LOGIT_BIAS);
    }

    fn bias(&self, id: &str, bias: &Value) -> Result<(u32, f32), Rejection> {
        let vocab = self.model.vocab();
        let token = id.parse().ok().filter(|token| *token < vocab);
        // No leading zeros, so that no token occurs twice.
        let token = token.filter(|token: &u32| token.to_string() == id);
        let token = token.ok_or_else(|| Rejection::Range {
            param: format!("logit_bias.{}", clip(id)),
            got: "no token".into(),
            expected: format!("a token id from 0 to {}", vocab.saturating_sub(1)),
        })?;
        Ok((token, bias.as_f64().unwrap_or(0.0) as f32))
    }
}

/// A repetition penalty within the engine's range.
pub(super) fn penalty_of(penalty: f64) -> f32 {
    (penalty as f32).clamp(REPETITION.0 as f32, REPETITION.1 as f32)
}
