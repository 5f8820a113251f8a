//! `/v1/messages`.
//!
//! A stream is `message_start`, then per block `content_block_start`, deltas and
//! `content_block_stop`, then `message_delta` with the reason and the usage, and `message_stop`.

use paceline_text::chat::call_arguments;
use serde_json::{Value, json};

use super::{DialectWriter, ResponseFrame, ResponseUsage, StreamFraming};
use crate::choice::{ChoiceOutput, Delta, FinishReason, ResponsePart};
use crate::rejection::{ErrorStyle, Rejection};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenBlock {
    Text,
    Thinking,
    Call(usize),
}

/// Renders messages.
#[derive(Debug)]
pub(crate) struct Anthropic {
    frame: ResponseFrame,
    /// Stop texts, in the request's order.
    stops: Vec<String>,
    /// Whether the client requested the thinking.
    shows_thinking: bool,
    open: Option<OpenBlock>,
    /// Number of blocks so far.
    blocks: usize,
    ending: Option<FinishReason>,
}

impl Anthropic {
    pub(crate) const fn new(
        frame: ResponseFrame,
        stops: Vec<String>,
        shows_thinking: bool,
    ) -> Self {
        Self {
            frame,
            stops,
            shows_thinking,
            open: None,
            blocks: 0,
            ending: None,
        }
    }

    fn message(
        &self,
        content: Value,
        ending: Option<FinishReason>,
        usage: &ResponseUsage,
    ) -> Value {
        let (reason, stop) = self.reason(ending);
        json!({
            "id": format!("msg_{}", self.frame.id),
            "type": "message",
            "role": "assistant",
            "model": self.frame.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": tokens(usage),
        })
    }

    /// `stop_reason` and `stop_sequence`.
    fn reason(&self, ending: Option<FinishReason>) -> (Option<&'static str>, Option<&str>) {
        match ending {
            None => (None, None),
            Some(FinishReason::Said) => (Some("end_turn"), None),
            Some(FinishReason::Length) => (Some("max_tokens"), None),
            Some(FinishReason::Calls) => (Some("tool_use"), None),
            Some(FinishReason::StopText(i)) => {
                (Some("stop_sequence"), self.stops.get(i).map(String::as_str))
            }
        }
    }

    fn close(&mut self, out: &mut Vec<Value>) {
        let Some(open) = self.open.take() else { return };
        let index = self.blocks;
        if open == OpenBlock::Thinking {
            let delta = json!({"type": "signature_delta", "signature": ""});
            out.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
        }
        out.push(json!({"type": "content_block_stop", "index": index}));
        self.blocks += 1;
    }

    /// Opens a block of this kind, unless it is open.
    fn open(&mut self, kind: OpenBlock, block: Value, out: &mut Vec<Value>) {
        if self.open == Some(kind) {
            return;
        }
        self.close(out);
        self.open = Some(kind);
        let index = self.blocks;
        out.push(json!({"type": "content_block_start", "index": index, "content_block": block}));
    }

    fn put(&self, delta: Value, out: &mut Vec<Value>) {
        let index = self.blocks;
        out.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
    }

    fn piece(&mut self, piece: ResponsePart, out: &mut Vec<Value>) {
        match piece {
            ResponsePart::Text(text) if text.is_empty() => {}
            ResponsePart::Text(text) => {
                self.open(OpenBlock::Text, json!({"type": "text", "text": ""}), out);
                self.put(json!({"type": "text_delta", "text": text}), out);
            }
            ResponsePart::Reasoning(text) => {
                let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                self.open(OpenBlock::Thinking, block, out);
                if self.shows_thinking {
                    self.put(json!({"type": "thinking_delta", "thinking": text}), out);
                }
            }
            ResponsePart::Call { index, id, name } => {
                let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.open(OpenBlock::Call(index), block, out);
            }
            ResponsePart::Arguments { text, .. } => {
                self.put(
                    json!({"type": "input_json_delta", "partial_json": text}),
                    out,
                );
            }
            ResponsePart::CallEnd { .. } => self.close(out),
        }
    }
}

/// Anthropic's `usage`: cached tokens are not part of `input_tokens`.
fn tokens(usage: &ResponseUsage) -> Value {
    json!({
        "input_tokens": usage.prompt.saturating_sub(usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    })
}

impl DialectWriter for Anthropic {
    fn framing(&self) -> StreamFraming {
        StreamFraming::Named
    }

    fn start(&mut self, usage: &ResponseUsage) -> Vec<Value> {
        let message = self.message(json!([]), None, usage);
        vec![json!({"type": "message_start", "message": message})]
    }

    fn delta(&mut self, _index: usize, delta: Delta) -> Vec<Value> {
        let mut out = Vec::new();
        for piece in delta.pieces {
            self.piece(piece, &mut out);
        }
        self.ending = delta.ending.or(self.ending);
        out
    }

    fn end(&mut self, usage: &ResponseUsage) -> Vec<Value> {
        let mut out = Vec::new();
        self.close(&mut out);
        let (reason, stop) = self.reason(self.ending);
        let delta = json!({"stop_reason": reason, "stop_sequence": stop});
        out.push(json!({"type": "message_delta", "delta": delta, "usage": tokens(usage)}));
        out.push(json!({"type": "message_stop"}));
        out
    }

    fn whole(&mut self, said: Vec<ChoiceOutput>, usage: &ResponseUsage) -> Value {
        let said = said.into_iter().next().unwrap_or_default();
        let mut content = Vec::new();
        if !said.reasoning.is_empty() {
            let thinking = if self.shows_thinking {
                said.reasoning.as_str()
            } else {
                ""
            };
            content.push(json!({"type": "thinking", "thinking": thinking, "signature": ""}));
        }
        if !said.text.is_empty() {
            content.push(json!({"type": "text", "text": said.text}));
        }
        content.extend(said.calls.iter().map(|call| {
            let input = call_arguments(&call.arguments);
            json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
        }));
        self.message(content.into(), said.ending, usage)
    }

    fn failed(&mut self, rejection: &Rejection) -> Value {
        rejection.body_as(ErrorStyle::Anthropic)
    }

    fn beat(&self) -> Option<Value> {
        Some(json!({"type": "ping"}))
    }
}
