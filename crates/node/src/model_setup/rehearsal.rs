//! The first answer of a model that reads experts from disk, to nobody.
//!
//! Such a model is as fast as its steps choose the same experts again. No file says how often they
//! do. So the first load answers a short text before it is ready, and the forecast learns the reuse
//! of experts from the speed. Later loads have it from the forecast.

use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_engine::{GenerationRequest, Reply, Service};
use paceline_model::{Config, Split};
use paceline_worker::texts;

use super::PreparedModel;
use super::serving_model::ReplyStream;
use crate::{Instance, SharedForecast};

const PROMPT: &str = "The river was high that spring and the ferry could not cross. Travellers \
                      waited at the inn, and the oldest of them began to tell";

/// Tokens of the answer: as many as `run` needs to learn from, twice.
const TOKENS: usize = 32;

/// Tokens that a slow model must reach within [`PATIENCE`] for its speed to count.
const TOKENS_MIN: usize = 4;

/// Longest time that it delays a first load, which also writes the packed file. Below 0.4 tokens a
/// second nothing is learned, and the next load tries again.
const PATIENCE: Duration = Duration::from_secs(10);

/// A short answer that measures the reuse of experts.
#[derive(Debug)]
pub struct Rehearsal {
    forecast: SharedForecast,
    config: Config,
    split: Split,
    prompt: Vec<u32>,
}

impl PreparedModel {
    /// The answer to measure before the first request; `None` if steps read no experts from disk,
    /// or their reuse is known.
    pub fn rehearsal(&self) -> Option<Rehearsal> {
        let forecast = self.forecast.as_ref()?;
        if !lock(forecast).lacks_reuse(&self.config, &self.cut.split) {
            return None;
        }
        let tokenizer = texts::tokenizer(&self.source).ok()?;
        Some(Rehearsal {
            forecast: forecast.clone(),
            config: self.config.clone(),
            split: self.cut.split.clone(),
            prompt: tokenizer.encode_prompt(PROMPT, usize::MAX).ok()?,
        })
    }
}

impl Rehearsal {
    /// Answers, and gives the decode tokens a second that are predicted then. Blocks for up to
    /// [`PATIENCE`]. `None` if the answer fails or is too slow to count.
    pub(super) fn run(&self, service: &dyn Service) -> Option<f64> {
        let request = GenerationRequest {
            prompt: self.prompt.clone(),
            max_tokens: TOKENS,
            min_tokens: TOKENS,
            ..GenerationRequest::default()
        };
        let (answer, began) = (ReplyStream::begin(service, request).ok()?, Instant::now());
        let mut arrived: Vec<Instant> = Vec::with_capacity(TOKENS);
        while let Some(left) = PATIENCE.checked_sub(began.elapsed()) {
            match answer.next_within(left) {
                Ok(Some((at, Reply::Token { .. }))) => arrived.push(at),
                Ok(None | Some((_, Reply::Finished { .. }))) | Err(_) => break,
                Ok(Some(_)) => {}
            }
        }
        let (first, last) = (arrived.first()?, arrived.last()?);
        let tok_s = (arrived.len() - 1) as f64 / last.duration_since(*first).as_secs_f64();
        if arrived.len() < TOKENS_MIN {
            return None;
        }
        let keys = (self.prompt.len() + arrived.len() / 2) as u32;
        let mut forecast = lock(&self.forecast);
        forecast.rehearsed(&self.config, &self.split, (keys, tok_s));
        forecast.predict(&self.config, &self.split).ok()
    }
}

impl Instance {
    /// Lets a ready instance answer `rehearsal`, whose speed its prediction then has.
    pub fn rehearse(&mut self, rehearsal: &Rehearsal) {
        if let Some(tok_s) = rehearsal.run(self) {
            self.expect(tok_s);
        }
    }
}
