//! `/api/chat` and `/api/generate`: a JSON object per line, the last with the statistics.

use paceline_text::chat::{call_arguments, strftime};
use serde_json::{Map, Value, json};

use super::{DialectWriter, ResponseUsage, StreamFraming};
use crate::choice::{ChoiceOutput, CompletedCall, Delta, FinishReason, ResponsePart};
use crate::rejection::{ErrorStyle, Rejection};

/// Which of the two endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Chat,
    Generate,
}

/// Renders both.
#[derive(Debug)]
pub(crate) struct Ollama {
    kind: Kind,
    /// The model as the client wrote it.
    model: String,
    created_at: String,
    /// The tool call in progress.
    call: Option<CompletedCall>,
    /// Number of calls sent.
    calls: usize,
    ending: Option<FinishReason>,
}

impl Ollama {
    pub(crate) fn new(kind: Kind, model: String, created_unix_s: u64) -> Self {
        Self {
            kind,
            model,
            created_at: rfc3339(created_unix_s),
            call: None,
            calls: 0,
            ending: None,
        }
    }

    fn head(&self) -> Map<String, Value> {
        let mut head = Map::new();
        head.insert("model".into(), self.model.as_str().into());
        head.insert("created_at".into(), self.created_at.as_str().into());
        head
    }

    fn line(&self, text: &str, reasoning: &str, calls: &[CompletedCall]) -> Map<String, Value> {
        let mut line = self.head();
        match self.kind {
            Kind::Chat => {
                line.insert(
                    "message".into(),
                    message(text, reasoning, calls, self.calls),
                );
            }
            Kind::Generate => {
                line.insert("response".into(), text.into());
                if !reasoning.is_empty() {
                    line.insert("thinking".into(), reasoning.into());
                }
            }
        }
        line.insert("done".into(), false.into());
        line
    }

    fn last(
        &self,
        mut line: Map<String, Value>,
        ending: Option<FinishReason>,
        usage: &ResponseUsage,
    ) -> Value {
        let ns = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let reason = match ending {
            Some(FinishReason::Length) => "length",
            _ => "stop",
        };
        line.insert("done".into(), true.into());
        line.insert("done_reason".into(), reason.into());
        let writing = usage.total.saturating_sub(usage.reading);
        for (name, value) in [
            ("total_duration", ns(usage.total)),
            ("load_duration", 0),
            ("prompt_eval_count", usage.prompt as u64),
            ("prompt_eval_duration", ns(usage.reading)),
            ("eval_count", usage.completion as u64),
            ("eval_duration", ns(writing)),
        ] {
            line.insert(name.into(), value.into());
        }
        line.into()
    }

    fn piece(&mut self, piece: ResponsePart) -> Option<Value> {
        match piece {
            ResponsePart::Text(text) if text.is_empty() => None,
            ResponsePart::Text(text) => Some(self.line(&text, "", &[]).into()),
            ResponsePart::Reasoning(text) => Some(self.line("", &text, &[]).into()),
            ResponsePart::Call { id, name, .. } => {
                let arguments = String::new();
                self.call = Some(CompletedCall {
                    id,
                    name,
                    arguments,
                });
                None
            }
            ResponsePart::Arguments { text, .. } => {
                self.call.as_mut()?.arguments.push_str(&text);
                None
            }
            // Ollama sends calls whole.
            ResponsePart::CallEnd { .. } => {
                let call = self.call.take()?;
                let line = self.line("", "", &[call]);
                self.calls += 1;
                Some(line.into())
            }
        }
    }
}

/// `first` is the index of the first call in the response.
fn message(text: &str, reasoning: &str, calls: &[CompletedCall], first: usize) -> Value {
    let mut message = json!({"role": "assistant", "content": text});
    if !reasoning.is_empty() {
        message["thinking"] = reasoning.into();
    }
    if !calls.is_empty() {
        let call = |(i, call): (usize, &CompletedCall)| {
            let arguments = call_arguments(&call.arguments);
            let index = first + i;
            let function = json!({"index": index, "name": call.name, "arguments": arguments});
            json!({"id": call.id, "function": function})
        };
        let calls: Vec<Value> = calls.iter().enumerate().map(call).collect();
        message["tool_calls"] = calls.into();
    }
    message
}

impl DialectWriter for Ollama {
    fn framing(&self) -> StreamFraming {
        StreamFraming::Lines
    }

    fn start(&mut self, _usage: &ResponseUsage) -> Vec<Value> {
        Vec::new()
    }

    fn delta(&mut self, _index: usize, delta: Delta) -> Vec<Value> {
        self.ending = delta.ending.or(self.ending);
        let pieces = delta.pieces.into_iter();
        pieces.filter_map(|piece| self.piece(piece)).collect()
    }

    fn end(&mut self, usage: &ResponseUsage) -> Vec<Value> {
        vec![self.last(self.line("", "", &[]), self.ending, usage)]
    }

    fn whole(&mut self, said: Vec<ChoiceOutput>, usage: &ResponseUsage) -> Value {
        let said = said.into_iter().next().unwrap_or_default();
        let line = self.line(&said.text, &said.reasoning, &said.calls);
        self.last(line, said.ending, usage)
    }

    fn failed(&mut self, rejection: &Rejection) -> Value {
        rejection.body_as(ErrorStyle::Ollama)
    }
}

/// The time as `2026-11-23T18:40:00Z`.
pub(crate) fn rfc3339(unix_s: u64) -> String {
    strftime(i64::try_from(unix_s).unwrap_or(i64::MAX), "%FT%TZ")
}
