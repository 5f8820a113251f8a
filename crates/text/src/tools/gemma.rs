//! Calls of Gemma 4: `call:NAME{key:<|"|>text<|"|>,n:1,list:[true]}`.
//!
//! Keys have no quotes and texts have quotes of their own, so that nothing in them is escaped.

use serde_json::Value as Json;

use super::fragment::{BodyStatus, CallFragment, MAX_NAME_BYTES, name_of};
use super::input::{MarkerMatch, UnreadText};
use super::json::{JsonScanStatus, Scanner};

const PREFIX: &str = "call:";
/// Begins and ends a text.
pub(super) const QUOTE: &str = "<|\"|>";

#[derive(Clone, Debug)]
enum State {
    Prefix,
    Name(String),
    /// In the arguments, outside of keys and texts.
    Outside,
    Key(String),
    Text,
}

/// Reads such a call.
#[derive(Clone, Debug)]
pub(super) struct GemmaCallParser {
    state: State,
    scanner: Scanner,
}

impl GemmaCallParser {
    pub(super) fn new() -> Self {
        Self {
            state: State::Prefix,
            scanner: Scanner::default(),
        }
    }

    pub(super) fn read(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> BodyStatus {
        let mut arguments = String::new();
        let status = loop {
            let status = match self.state {
                State::Prefix => self.read_prefix(input),
                State::Name(_) => self.read_name(input, out),
                State::Outside => self.read_outside(input, &mut arguments),
                State::Key(_) => self.read_key(input, &mut arguments),
                State::Text => self.read_text(input, &mut arguments),
            };
            if let Some(status) = status {
                break status;
            }
        };
        out.extend((!arguments.is_empty()).then_some(CallFragment::Arguments(arguments)));
        status
    }

    fn read_prefix(&mut self, input: &mut UnreadText) -> Option<BodyStatus> {
        match input.starts_with(PREFIX) {
            None => return Some(BodyStatus::More),
            Some(false) => return Some(BodyStatus::Bad),
            Some(true) => input.skip(PREFIX.len()),
        }
        self.state = State::Name(String::new());
        None
    }

    fn read_name(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> Option<BodyStatus> {
        let State::Name(text) = &mut self.state else {
            return Some(BodyStatus::Bad);
        };
        if let Err(status) = read_until(input, '{', text) {
            return Some(status);
        }
        let Some(name) = name_of(text) else {
            return Some(BodyStatus::Bad);
        };
        out.push(CallFragment::Name { name, id: None });
        self.state = State::Outside;
        None
    }

    fn read_outside(&mut self, input: &mut UnreadText, out: &mut String) -> Option<BodyStatus> {
        let Some(next) = input.rest().chars().next() else {
            return Some(BodyStatus::More);
        };
        match input.starts_with(QUOTE) {
            None => return Some(BodyStatus::More),
            Some(true) => {
                input.skip(QUOTE.len());
                self.state = State::Text;
                return self.feed("\"", out);
            }
            Some(false) => {}
        }
        let is_bare = next.is_alphanumeric() || matches!(next, '_' | '$');
        if self.scanner.expects_key() && is_bare {
            self.state = State::Key(String::new());
            return None;
        }
        input.skip(next.len_utf8());
        self.feed(next.encode_utf8(&mut [0; 4]), out)
    }

    fn read_key(&mut self, input: &mut UnreadText, out: &mut String) -> Option<BodyStatus> {
        let State::Key(text) = &mut self.state else {
            return Some(BodyStatus::Bad);
        };
        if let Err(status) = read_until(input, ':', text) {
            return Some(status);
        }
        let key = Json::from(text.trim()).to_string();
        self.state = State::Outside;
        self.feed(&key, out)
    }

    fn read_text(&mut self, input: &mut UnreadText, out: &mut String) -> Option<BodyStatus> {
        let (n, is_whole) = match input.find(&[QUOTE]) {
            MarkerMatch::Marker { before, .. } => (before, true),
            MarkerMatch::None { clear } => (clear, false),
        };
        let escaped = Json::from(input.take(n)).to_string();
        if let Some(status) = self.feed(&escaped[1..escaped.len() - 1], out) {
            return Some(status);
        }
        if !is_whole {
            return Some(BodyStatus::More);
        }
        input.skip(QUOTE.len());
        self.state = State::Outside;
        self.feed("\"", out)
    }

    /// Adds JSON; the verdict when it ends the arguments.
    fn feed(&mut self, json: &str, out: &mut String) -> Option<BodyStatus> {
        for c in json.chars() {
            match self.scanner.push(c, out) {
                JsonScanStatus::More => {}
                JsonScanStatus::Done => return Some(BodyStatus::Done),
                JsonScanStatus::DoneBefore | JsonScanStatus::Bad => return Some(BodyStatus::Bad),
            }
        }
        None
    }
}

/// Moves the text before `end` to `text`, and leaves `end`.
fn read_until(input: &mut UnreadText, end: char, text: &mut String) -> Result<(), BodyStatus> {
    let found = input.rest().find(end);
    let n = found.unwrap_or(input.rest().len());
    if text.len() + n > MAX_NAME_BYTES {
        return Err(BodyStatus::Bad);
    }
    text.push_str(&input.take(n));
    found.map(drop).ok_or(BodyStatus::More)
}
