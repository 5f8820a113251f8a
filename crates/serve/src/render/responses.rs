//! `/v1/responses`.
//!
//! A stream is `response.created`, then the items of the output, and at the end
//! `response.completed` with the whole response. An item is `response.output_item.added`, its parts
//! and deltas, and `response.output_item.done` with the whole item.

use std::collections::BTreeMap;
use std::sync::Arc;

use paceline_text::chat::{ChatMessage, ToolCall, call_arguments};
use serde_json::{Map, Value, json};

use super::{DialectWriter, ResponseFrame, ResponseUsage, StreamFraming};
use crate::access::ClientIdentity;
use crate::choice::{ChoiceOutput, Delta, FinishReason, ResponsePart};
use crate::rejection::Rejection;
use crate::store::{ResponseStore, StoredResponse};

/// Values that the response repeats from its request, and the conversation to store.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResponsesEcho {
    /// The repeated request fields.
    pub(crate) echo: Map<String, Value>,
    /// Namespaces by tool name.
    pub(crate) spaces: BTreeMap<String, String>,
    /// The conversation, if it is to be stored.
    pub(crate) keep: Option<Vec<ChatMessage>>,
}

/// Where to store the response, and for which client.
#[derive(Clone, Debug)]
pub(crate) struct ResponseKeep {
    pub(crate) store: Arc<ResponseStore>,
    pub(crate) client: ClientIdentity,
}

/// The output item in progress.
#[derive(Debug)]
struct OpenItem {
    kind: Kind,
    id: String,
    /// The text, or the arguments of the call.
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
    Call { id: String, name: String },
}

impl Kind {
    /// The content part, of items with parts.
    fn part(&self, text: &str) -> Option<Value> {
        match self {
            Self::Message => Some(part(text)),
            Self::Reasoning => Some(json!({"type": "reasoning_text", "text": text})),
            Self::Call { .. } => None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Responses {
    frame: ResponseFrame,
    terms: ResponsesEcho,
    keeper: ResponseKeep,
    items: Vec<Value>,
    open: Option<OpenItem>,
    /// Number of events so far.
    events: u64,
    ending: Option<FinishReason>,
    said: ChoiceOutput,
}

impl Responses {
    pub(crate) fn new(frame: ResponseFrame, terms: ResponsesEcho, keeper: ResponseKeep) -> Self {
        Self {
            frame,
            terms,
            keeper,
            items: Vec::new(),
            open: None,
            events: 0,
            ending: None,
            said: ChoiceOutput::default(),
        }
    }

    fn id(&self) -> String {
        format!("resp_{}", self.frame.id)
    }

    fn response(&self, status: &str, usage: Option<&ResponseUsage>) -> Value {
        let cut = matches!(self.ending, Some(FinishReason::Length)) && status != "in_progress";
        let mut response = Map::new();
        response.insert("id".into(), self.id().into());
        response.insert("object".into(), "response".into());
        response.insert("created_at".into(), self.frame.created_unix_s.into());
        response.insert("status".into(), status.into());
        response.insert("error".into(), Value::Null);
        let why = cut.then(|| json!({"reason": "max_output_tokens"}));
        response.insert("incomplete_details".into(), why.into());
        response.insert("model".into(), self.frame.model.as_str().into());
        response.insert("output".into(), self.items.clone().into());
        response.extend(self.terms.echo.clone());
        response.insert("usage".into(), usage.map(tokens).into());
        response.into()
    }

    /// An event with its sequence number.
    fn event(&mut self, kind: &str, fields: Value) -> Value {
        let mut event = Map::new();
        event.insert("type".into(), kind.into());
        event.insert("sequence_number".into(), self.events.into());
        self.events += 1;
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        event.into()
    }

    fn item_event(&mut self, kind: &str, fields: Value) -> Value {
        let mut all = Map::new();
        let id = self.open.as_ref().map_or("", |open| open.id.as_str());
        all.insert("item_id".into(), id.into());
        all.insert("output_index".into(), self.items.len().into());
        if let Value::Object(fields) = fields {
            all.extend(fields);
        }
        self.event(kind, all.into())
    }

    /// The item in progress, as JSON.
    fn item(&self, open: &OpenItem, status: &str) -> Value {
        let (id, text) = (open.id.as_str(), open.text.as_str());
        let is_done = status == "completed";
        match &open.kind {
            Kind::Message => {
                let parts = if is_done { vec![part(text)] } else { vec![] };
                json!({"id": id, "type": "message", "status": status, "role": "assistant",
                       "content": parts})
            }
            Kind::Reasoning => {
                let parts = open.kind.part(text).filter(|_| is_done);
                let parts: Vec<Value> = parts.into_iter().collect();
                json!({"id": id, "type": "reasoning", "status": status, "summary": [],
                       "content": parts, "encrypted_content": null})
            }
            Kind::Call { id: call_id, name } => {
                let mut call = json!({"id": id, "type": "function_call", "status": status,
                       "call_id": call_id, "name": name, "arguments": text});
                if let Some(space) = self.terms.spaces.get(name) {
                    call["namespace"] = space.as_str().into();
                }
                call
            }
        }
    }

    fn open(&mut self, kind: Kind, out: &mut Vec<Value>) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close(out);
        let prefix = match kind {
            Kind::Message => "msg",
            Kind::Reasoning => "rs",
            Kind::Call { .. } => "fc",
        };
        let open = OpenItem {
            id: format!("{prefix}_{}_{}", self.frame.id, self.items.len()),
            text: String::new(),
            kind,
        };
        let (index, item) = (self.items.len(), self.item(&open, "in_progress"));
        let added = json!({"output_index": index, "item": item});
        out.push(self.event("response.output_item.added", added));
        let part = open.kind.part("");
        self.open = Some(open);
        if let Some(part) = part {
            let added = json!({"content_index": 0, "part": part});
            out.push(self.item_event("response.content_part.added", added));
        }
    }

    fn put(&mut self, text: String, out: &mut Vec<Value>) {
        let Some(open) = &mut self.open else { return };
        open.text.push_str(&text);
        let event = match open.kind {
            Kind::Message => {
                let delta = json!({"content_index": 0, "delta": text, "logprobs": []});
                self.item_event("response.output_text.delta", delta)
            }
            Kind::Reasoning => {
                let delta = json!({"content_index": 0, "delta": text});
                self.item_event("response.reasoning_text.delta", delta)
            }
            Kind::Call { .. } => {
                let delta = json!({"delta": text});
                self.item_event("response.function_call_arguments.delta", delta)
            }
        };
        out.push(event);
    }

    fn close(&mut self, out: &mut Vec<Value>) {
        let Some(open) = &self.open else { return };
        let (text, item) = (open.text.clone(), self.item(open, "completed"));
        match open.kind.clone() {
            Kind::Message => {
                let done = json!({"content_index": 0, "text": text, "logprobs": []});
                out.push(self.item_event("response.output_text.done", done));
                let done = json!({"content_index": 0, "part": part(&text)});
                out.push(self.item_event("response.content_part.done", done));
            }
            Kind::Reasoning => {
                let done = json!({"content_index": 0, "text": text});
                out.push(self.item_event("response.reasoning_text.done", done));
                let done = json!({"content_index": 0, "part": Kind::Reasoning.part(&text)});
                out.push(self.item_event("response.content_part.done", done));
            }
            Kind::Call { name, .. } => {
                let done = json!({"name": name, "arguments": text});
                out.push(self.item_event("response.function_call_arguments.done", done));
            }
        }
        let done = json!({"output_index": self.items.len(), "item": item});
        out.push(self.event("response.output_item.done", done));
        self.items.push(item);
        self.open = None;
    }

    fn piece(&mut self, piece: ResponsePart, out: &mut Vec<Value>) {
        match piece {
            ResponsePart::Text(text) if text.is_empty() => {}
            ResponsePart::Text(text) => {
                self.open(Kind::Message, out);
                self.put(text, out);
            }
            ResponsePart::Reasoning(text) => {
                self.open(Kind::Reasoning, out);
                self.put(text, out);
            }
            ResponsePart::Call { id, name, .. } => self.open(Kind::Call { id, name }, out),
            ResponsePart::Arguments { text, .. } => self.put(text, out),
            ResponsePart::CallEnd { .. } => self.close(out),
        }
    }

    /// The complete response; stores it if requested.
    fn complete(&mut self, usage: &ResponseUsage) -> Value {
        let status = match self.ending {
            Some(FinishReason::Length) => "incomplete",
            _ => "completed",
        };
        let response = self.response(status, Some(usage));
        if let Some(mut turns) = self.terms.keep.take() {
            turns.push(turn(&self.said));
            self.keeper.store.put(StoredResponse {
                id: self.id(),
                client: self.keeper.client.clone(),
                turns,
                response: response.clone(),
            });
        }
        response
    }
}

fn turn(said: &ChoiceOutput) -> ChatMessage {
    let mut turn = ChatMessage::new("assistant", said.text.as_str());
    turn.reasoning = (!said.reasoning.is_empty()).then(|| said.reasoning.clone());
    let calls = said.calls.iter().map(|call| ToolCall {
        id: call.id.clone(),
        name: call.name.clone(),
        arguments: call_arguments(&call.arguments),
    });
    turn.tool_calls = calls.collect();
    turn
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn tokens(usage: &ResponseUsage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    })
}

impl DialectWriter for Responses {
    fn framing(&self) -> StreamFraming {
        StreamFraming::Named
    }

    fn start(&mut self, _usage: &ResponseUsage) -> Vec<Value> {
        let response = json!({"response": self.response("in_progress", None)});
        let created = self.event("response.created", response.clone());
        vec![created, self.event("response.in_progress", response)]
    }

    fn delta(&mut self, _index: usize, delta: Delta) -> Vec<Value> {
        let mut out = Vec::new();
        for piece in &delta.pieces {
            self.piece(piece.clone(), &mut out);
        }
        self.ending = delta.ending.or(self.ending);
        self.said.add(delta);
        out
    }

    fn end(&mut self, usage: &ResponseUsage) -> Vec<Value> {
        let mut out = Vec::new();
        self.close(&mut out);
        let response = self.complete(usage);
        let kind = match self.ending {
            Some(FinishReason::Length) => "response.incomplete",
            _ => "response.completed",
        };
        out.push(self.event(kind, json!({"response": response})));
        out
    }

    fn whole(&mut self, said: Vec<ChoiceOutput>, usage: &ResponseUsage) -> Value {
        let said = said.into_iter().next().unwrap_or_default();
        let mut out = Vec::new();
        if !said.reasoning.is_empty() {
            self.piece(ResponsePart::Reasoning(said.reasoning.clone()), &mut out);
        }
        self.piece(ResponsePart::Text(said.text.clone()), &mut out);
        for (index, call) in said.calls.iter().cloned().enumerate() {
            let (id, name, text) = (call.id, call.name, call.arguments);
            self.piece(ResponsePart::Call { index, id, name }, &mut out);
            self.piece(ResponsePart::Arguments { index, text }, &mut out);
        }
        self.close(&mut out);
        self.ending = said.ending;
        self.said = said;
        self.complete(usage)
    }

    fn failed(&mut self, rejection: &Rejection) -> Value {
        let body = rejection.body();
        let mut response = self.response("failed", None);
        let (code, message) = (&body["error"]["code"], &body["error"]["message"]);
        response["error"] = json!({"code": code, "message": message});
        // Repeats the last sequence number, so that a client that resumes after it misses nothing.
        self.events = self.events.saturating_sub(1);
        self.event("response.failed", json!({"response": response}))
    }
}
