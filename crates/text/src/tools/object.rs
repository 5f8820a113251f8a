//! A call as a JSON object: `{"name": "f", "arguments": {...}}`.

use serde_json::Value as Json;

use super::fragment::{BodyStatus, CallFragment, name_of};
use super::input::UnreadText;
use super::json::{Scanner, read_value};

/// Keys that hold the arguments, by family.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// Keys that a call may have besides, which say nothing.
const KNOWN: [&str; 3] = ["name", "type", "id"];

#[derive(Clone, Debug)]
enum State {
    Open,
    KeyOrEnd,
    Key,
    Colon,
    Value,
    CommaOrEnd,
}

/// Reads a call that is a JSON object.
#[derive(Clone, Debug)]
pub(super) struct ObjectCallParser {
    state: State,
    /// State of the current key or value.
    scanner: Scanner,
    /// Text of it that is received and not yet emitted.
    text: String,
    key: String,
    /// Whether the value is streamed.
    streams: bool,
    has_name: bool,
    has_arguments: bool,
    /// Arguments that preceded the name.
    early: Option<String>,
    /// Whether a key that calls do not have makes it no call.
    is_strict: bool,
}

impl ObjectCallParser {
    /// A call that begins with the next character. `is_strict` for models whose plain responses may
    /// be JSON too.
    pub(super) fn new(is_strict: bool) -> Self {
        Self {
            state: State::Open,
            scanner: Scanner::default(),
            text: String::new(),
            key: String::new(),
            streams: false,
            has_name: false,
            has_arguments: false,
            early: None,
            is_strict,
        }
    }

    pub(super) fn read(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> BodyStatus {
        loop {
            if !matches!(self.state, State::Key | State::Value) {
                input.skip_space();
            }
            let Some(next) = input.rest().chars().next() else {
                return BodyStatus::More;
            };
            let status = match self.state {
                State::Key => self.read_key(input),
                State::Value => self.read_part(input, out),
                _ => self.punctuation(next, input, out),
            };
            if let Some(status) = status {
                return status;
            }
        }
    }

    fn punctuation(
        &mut self,
        next: char,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> Option<BodyStatus> {
        self.state = match (&self.state, next) {
            (State::Open, '{') => State::KeyOrEnd,
            // The key's quote is read with the key.
            (State::KeyOrEnd, '"') => {
                self.begin();
                self.state = State::Key;
                return None;
            }
            (State::Colon, ':') => {
                input.skip(1);
                input.skip_space();
                self.begin();
                self.state = State::Value;
                return None;
            }
            (State::CommaOrEnd, ',') => State::KeyOrEnd,
            (State::KeyOrEnd | State::CommaOrEnd, '}') => {
                input.skip(1);
                return Some(self.end(out));
            }
            _ => return Some(BodyStatus::Bad),
        };
        input.skip(1);
        None
    }

    fn begin(&mut self) {
        self.scanner = Scanner::default();
        self.text.clear();
        self.streams = false;
    }

    fn read_key(&mut self, input: &mut UnreadText) -> Option<BodyStatus> {
        let Some((piece, is_done)) = read_value(&mut self.scanner, input) else {
            return Some(BodyStatus::Bad);
        };
        self.text.push_str(&piece);
        if !is_done {
            return Some(BodyStatus::More);
        }
        self.key = serde_json::from_str(&self.text).unwrap_or_default();
        let is_known = KNOWN.contains(&self.key.as_str()) || is_arguments(&self.key);
        if self.is_strict && !is_known {
            return Some(BodyStatus::Bad);
        }
        self.state = State::Colon;
        None
    }

    fn read_part(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> Option<BodyStatus> {
        let is_start = self.text.is_empty() && !self.streams;
        if is_start && input.rest().starts_with(char::is_whitespace) {
            input.skip_space();
            return None;
        }
        if is_start && is_arguments(&self.key) && self.has_name && input.rest().starts_with('{') {
            self.streams = true;
        }
        let Some((piece, is_done)) = read_value(&mut self.scanner, input) else {
            return Some(BodyStatus::Bad);
        };
        if self.streams {
            out.extend((!piece.is_empty()).then_some(CallFragment::Arguments(piece)));
        } else {
            self.text.push_str(&piece);
        }
        if !is_done {
            return Some(BodyStatus::More);
        }
        self.state = State::CommaOrEnd;
        self.take_value(out)
    }

    /// Does what the value that ended is for.
    fn take_value(&mut self, out: &mut Vec<CallFragment>) -> Option<BodyStatus> {
        if self.key == "name" {
            if self.has_name {
                return Some(BodyStatus::Bad);
            }
            let name = serde_json::from_str::<String>(&self.text).ok();
            let Some(name) = name.and_then(|name| name_of(&name)) else {
                return Some(BodyStatus::Bad);
            };
            out.push(CallFragment::Name { name, id: None });
            self.has_name = true;
            out.extend(self.early.take().map(CallFragment::Arguments));
        } else if is_arguments(&self.key) {
            if self.has_arguments {
                return Some(BodyStatus::Bad);
            }
            self.has_arguments = true;
            if !self.streams {
                return self.take_arguments(out);
            }
        }
        None
    }

    /// Emits arguments that were not streamed.
    fn take_arguments(&mut self, out: &mut Vec<CallFragment>) -> Option<BodyStatus> {
        let Some(arguments) = object_text(&self.text) else {
            return Some(BodyStatus::Bad);
        };
        if self.has_name {
            out.push(CallFragment::Arguments(arguments));
        } else {
            self.early = Some(arguments);
        }
        None
    }

    fn end(&self, out: &mut Vec<CallFragment>) -> BodyStatus {
        if !self.has_name {
            return BodyStatus::Bad;
        }
        if !self.has_arguments {
            out.push(CallFragment::Arguments("{}".to_owned()));
        }
        BodyStatus::Done
    }
}

fn is_arguments(key: &str) -> bool {
    ARGUMENTS.contains(&key)
}

/// Arguments as the text of an object: an object, the text of one in a string, or nothing.
fn object_text(text: &str) -> Option<String> {
    match serde_json::from_str::<Json>(text).ok()? {
        Json::Object(_) => Some(text.to_owned()),
        Json::Null => Some("{}".to_owned()),
        Json::String(inner) => {
            let is_object = serde_json::from_str::<Json>(&inner).ok()?.is_object();
            is_object.then_some(inner)
        }
        _ => None,
    }
}
