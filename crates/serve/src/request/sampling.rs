//! Sampling fields, which all dialects share under the same names.

use paceline_engine::{GenerationRequest, MAX_LOGIT_BIAS, SamplingParams, SchedulingParams};
use serde_json::Value;

use super::RequestParser;
use crate::field::{FieldValues, clip, wrong_type};
use crate::json::show;
use crate::rejection::Rejection;

/// Logit bias that makes an end token practically impossible.
const NEVER: f32 = -100.0;

/// The seed that asks for a random one.
const RANDOM_SEED: i64 = -1;

impl RequestParser<'_> {
    /// An engine request without its prompt.
    pub(super) fn request(
        &self,
        fields: &mut FieldValues,
        max_tokens: usize,
        logprobs: Option<usize>,
        stop: Vec<String>,
    ) -> Result<GenerationRequest, Rejection> {
        Ok(GenerationRequest {
            prompt: Vec::new(),
            max_tokens,
            min_tokens: fields.count("min_tokens").unwrap_or(0),
            sampling: self.sampling(fields)?,
            stop,
            logprobs,
            order: self.order(fields),
            ..GenerationRequest::default()
        })
    }

    /// Scheduling order: each key is a client of its own, and each machine without one.
    fn order(&self, fields: &FieldValues) -> SchedulingParams {
        let priority = fields.integer("priority").unwrap_or(0);
        let millis = |seconds: f64| (seconds * 1e3).ceil() as u32;
        SchedulingParams {
            priority: priority as i32, // at most 100
            deadline_ms: fields.number("deadline").map(millis),
            client: self.client.number(),
        }
    }

    /// Parses the sampling; missing parameters are the model's own.
    fn sampling(&self, fields: &mut FieldValues) -> Result<SamplingParams, Rejection> {
        let own = &self.model.sampling;
        let number = |name: &str, own: f32| fields.number(name).map_or(own, |n| n as f32);
        let repetition = fields.number("repetition_penalty");
        let repetition = repetition.or(fields.number("repeat_penalty"));
        let repetition = repetition.map_or(own.repetition_penalty, |n| n as f32);
        // -1 keeps all tokens.
        let top_k = match fields.integer("top_k") {
            None => own.top_k,
            Some(k) => usize::try_from(k).unwrap_or(0),
        };
        let mut sampling = SamplingParams {
            temperature: number("temperature", own.temperature),
            // OpenAI allows 0, which keeps one token; the engine requires a value above 0.
            top_p: number("top_p", own.top_p).max(f32::MIN_POSITIVE),
            top_k,
            min_p: number("min_p", own.min_p),
            presence_penalty: number("presence_penalty", own.presence_penalty),
            frequency_penalty: number("frequency_penalty", own.frequency_penalty),
            repetition_penalty: repetition.clamp(1e-3, 1e3),
            penalty_window: fields.count("repeat_last_n").unwrap_or(own.penalty_window),
            seed: fields
                .integer("seed")
                .filter(|seed| *seed != RANDOM_SEED)
                .map_or(self.fresh_seed, |seed| seed as u64),
            logit_bias: Vec::new(),
        };
        sampling.logit_bias = self.logit_bias(fields.take("logit_bias"))?;
        if fields.is_true("ignore_eos") {
            self.forbid_ends(&mut sampling.logit_bias);
        }
        Ok(sampling)
    }

    fn forbid_ends(&self, bias: &mut Vec<(u32, f32)>) {
        let ends = self.model.tokenizer.end_of_generation();
        bias.retain(|(token, _)| !ends.contains(token));
        bias.extend(ends.iter().map(|token| (*token, NEVER)));
        bias.truncate(MAX_LOGIT_BIAS);
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
        // No leading zeros, so that no token occurs twice.
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
}
