//! `/infill`, as llama-server answers it.

use serde_json::{Value, json};

use super::{Frame, Framing, Usage, Writer};
use crate::choice::{Delta, Ending, Said};
use crate::rejection::Rejection;

/// Renders the filled-in text.
#[derive(Debug)]
pub(crate) struct Infill {
    frame: Frame,
    stops: Vec<String>,
    ending: Option<Ending>,
}

impl Infill {
    pub(crate) const fn new(frame: Frame, stops: Vec<String>) -> Self {
        let ending = None;
        Self {
            frame,
            stops,
            ending,
        }
    }

    fn last(&self, text: &str, ending: Option<Ending>, usage: &Usage) -> Value {
        let (kind, word) = match ending {
            Some(Ending::Length) => ("limit", ""),
            Some(Ending::StopText(i)) => ("word", self.stops.get(i).map_or("", String::as_str)),
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

impl Writer for Infill {
    fn framing(&self) -> Framing {
        Framing::Bare
    }

    fn start(&mut self, _usage: &Usage) -> Vec<Value> {
        Vec::new()
    }

    fn delta(&mut self, _index: usize, delta: Delta) -> Vec<Value> {
        self.ending = delta.ending.or(self.ending);
        let mut said = Said::default();
        said.add(delta);
        let line = json!({"index": 0, "content": said.text, "stop": false});
        (!said.text.is_empty())
            .then_some(line)
            .into_iter()
            .collect()
    }

    fn end(&mut self, usage: &Usage) -> Vec<Value> {
        vec![self.last("", self.ending, usage)]
    }

    fn whole(&mut self, said: Vec<Said>, usage: &Usage) -> Value {
        let said = said.into_iter().next().unwrap_or_default();
        self.last(&said.text, said.ending, usage)
    }

    fn failed(&mut self, rejection: &Rejection) -> Value {
        rejection.body()
    }
}
