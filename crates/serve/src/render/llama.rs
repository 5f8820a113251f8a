//! `/infill`, as llama-server answers it.

use serde_json::{Value, json};

use super::{DialectWriter, ResponseFrame, ResponseUsage, StreamFraming};
use crate::choice::{ChoiceOutput, Delta, FinishReason};
use crate::rejection::Rejection;

/// Renders the filled-in text.
#[derive(Debug)]
pub(crate) struct Infill {
    frame: ResponseFrame,
    stops: Vec<String>,
    ending: Option<FinishReason>,
}

impl Infill {
    pub(crate) const fn new(frame: ResponseFrame, stops: Vec<String>) -> Self {
        let ending = None;
        Self {
            frame,
            stops,
            ending,
        }
    }

    fn last(&self, text: &str, ending: Option<FinishReason>, usage: &ResponseUsage) -> Value {
        let (kind, word) = match ending {
            Some(FinishReason::Length) => ("limit", ""),
            Some(FinishReason::StopText(i)) => {
                ("word", self.stops.get(i).map_or("", String::as_str))
            }
            _ => ("eos", ""),
        };
        json!({
            "index": 0,
            "content": text,
            "stop": true,
            "model": self.frame.model,
            "tokens_predicted": usage.completion,
            "tokens_evaluated": usage.prompt,
            "tokens_cached": usage.cached,
            "stop_type": kind,
            "stopping_word": word,
        })
    }
}

impl DialectWriter for Infill {
    fn framing(&self) -> StreamFraming {
        StreamFraming::Bare
    }

    fn start(&mut self, _usage: &ResponseUsage) -> Vec<Value> {
        Vec::new()
    }

    fn delta(&mut self, _index: usize, delta: Delta) -> Vec<Value> {
        self.ending = delta.ending.or(self.ending);
        let mut said = ChoiceOutput::default();
        said.add(delta);
        let line = json!({"index": 0, "content": said.text, "stop": false});
        (!said.text.is_empty())
            .then_some(line)
            .into_iter()
            .collect()
    }

    fn end(&mut self, usage: &ResponseUsage) -> Vec<Value> {
        vec![self.last("", self.ending, usage)]
    }

    fn whole(&mut self, said: Vec<ChoiceOutput>, usage: &ResponseUsage) -> Value {
        let said = said.into_iter().next().unwrap_or_default();
        self.last(&said.text, said.ending, usage)
    }

    fn failed(&mut self, rejection: &Rejection) -> Value {
        rejection.body()
    }
}
