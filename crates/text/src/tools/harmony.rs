//! Answers of gpt-oss: messages with a channel and perhaps a recipient.
//!
//! ```text
//! <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>commentary
//! to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
//! ```
//!
//! Source: the harmony response format as OpenAI publishes it with the models.

use super::body::CallBody;
use super::fragment::{BodyStatus, CallFragment, MAX_NAME_BYTES, name_of};
use super::input::{MarkerMatch, UnreadText};
use super::named_call::{Header, NamedCallParser, NamedCallSyntax};
use super::reader::Emitter;

pub(super) const START: &str = "<|start|>";
pub(super) const CHANNEL: &str = "<|channel|>";
pub(super) const MESSAGE: &str = "<|message|>";
pub(super) const CONSTRAIN: &str = "<|constrain|>";
const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];

static CALL: NamedCallSyntax = NamedCallSyntax {
    header: Header::DeepSeek,
    separator: MESSAGE,
    fence: "",
    ends: &ENDS,
};

#[derive(Clone, Debug)]
enum State {
    /// Between messages.
    Start,
    Header,
    Reasoning,
    Text,
    Call(Box<CallBody>),
    /// A call that could not be read, until its end.
    Broken {
        text: String,
        is_started: bool,
    },
}

/// Reads such an answer.
#[derive(Clone, Debug)]
pub(super) struct Harmony {
    state: State,
    /// Whether calls are looked for.
    has_tools: bool,
}

impl Harmony {
    /// `header` is what the prompt has of the first message's header, or `None` when the prompt
    /// does not begin a message.
    pub(super) fn new(opened: Option<&str>, has_tools: bool) -> Self {
        let state = match opened {
            None => State::Start,
            Some(header) if !header.contains(MESSAGE) => State::Header,
            Some(header) if header.contains("analysis") => State::Reasoning,
            Some(_) => State::Text,
        };
        Self { state, has_tools }
    }

    /// Reads on; `false` when more text is needed.
    pub(super) fn step(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        match self.state {
            State::Start => self.read_start(input),
            State::Header => self.read_header(input, emitter),
            State::Reasoning | State::Text => self.read_message(input, emitter),
            State::Call(_) => self.read_call(input, emitter),
            State::Broken { .. } => self.read_broken(input, emitter),
        }
    }

    fn read_start(&mut self, input: &mut UnreadText) -> bool {
        if input.is_empty() {
            return false;
        }
        match input.starts_with(START) {
            None => return false,
            Some(true) => input.skip(START.len()),
            // A header without its start, or no message at all: the header decides.
            Some(false) => {}
        }
        self.state = State::Header;
        true
    }

    fn read_header(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        let marks = [MESSAGE, ENDS[0], ENDS[1], ENDS[2], START];
        let (n, is_whole) = match input.find(&marks) {
            MarkerMatch::Marker { before, which: 0 } => (before, true),
            MarkerMatch::Marker { before, which } => {
                // No header: text that a model puts between messages.
                emitter.text(&input.take(before));
                input.skip(if which < 4 { marks[which].len() } else { 0 });
                self.state = State::Start;
                return true;
            }
            MarkerMatch::None { clear } => (clear, false),
        };
        let is_header = n <= MAX_NAME_BYTES;
        if is_header && !is_whole && !input.is_ended {
            return false;
        }
        if !is_header || !is_whole {
            // No header: a model that does not keep to the format just speaks.
            self.state = State::Text;
            return !input.is_empty();
        }
        let header = input.rest()[..n].to_owned();
        input.remember();
        input.skip(n + MESSAGE.len());
        self.open(&header, input, emitter);
        true
    }

    fn open(&mut self, header: &str, input: &mut UnreadText, emitter: &mut Emitter) {
        let after = |mark: &str| header.split_once(mark).map(|(_, rest)| rest);
        let word = |text: &str| {
            let end = text.find(|c: char| c.is_whitespace() || c == '<');
            text[..end.unwrap_or(text.len())].to_owned()
        };
        let channel = after(CHANNEL).map(|rest| word(rest.trim_start()));
        let recipient = after("to=").map(word).filter(|_| self.has_tools);
        if let Some(recipient) = recipient {
            return self.open_call(&recipient, emitter);
        }
        input.recall();
        emitter.begin_reasoning();
        self.state = match channel.as_deref() {
            Some("analysis") => State::Reasoning,
            _ => State::Text,
        };
    }

    fn open_call(&mut self, recipient: &str, emitter: &mut Emitter) {
        let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
        let Some(name) = name_of(name) else {
            let (text, is_started) = (String::new(), false);
            self.state = State::Broken { text, is_started };
            return;
        };
        emitter.pieces(vec![CallFragment::Name { name, id: None }]);
        let body = CallBody::Named(NamedCallParser::with_name(&CALL));
        self.state = State::Call(Box::new(body));
    }

    fn read_message(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        let marks = [ENDS[0], ENDS[1], ENDS[2], START];
        let (n, mark) = match input.find(&marks) {
            MarkerMatch::Marker { before, which } => (before, Some(which)),
            MarkerMatch::None { clear } => (clear, None),
        };
        let text = input.take(n);
        if matches!(self.state, State::Reasoning) {
            emitter.reasoning(&text);
        } else {
            emitter.text(&text);
        }
        let Some(which) = mark else { return false };
        if which < ENDS.len() {
            input.skip(marks[which].len());
        }
        if matches!(self.state, State::Reasoning) {
            emitter.end_reasoning();
        }
        self.state = State::Start;
        true
    }

    fn read_call(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        let State::Call(body) = &mut self.state else {
            return false;
        };
        let mut pieces = Vec::new();
        let status = body.read(input, &mut pieces);
        emitter.pieces(pieces);
        match status {
            BodyStatus::More => return false,
            BodyStatus::Done => {
                emitter.end_call();
                input.recall();
                self.state = State::Start;
            }
            BodyStatus::Bad => {
                let (text, is_started) = (input.recall(), emitter.is_started());
                self.state = State::Broken { text, is_started };
            }
        }
        true
    }

    fn read_broken(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        let State::Broken { text, is_started } = &mut self.state else {
            return false;
        };
        let (n, is_over) = match input.find(&ENDS) {
            MarkerMatch::Marker { before, which } => (before + ENDS[which].len(), true),
            MarkerMatch::None { clear } => (clear, input.is_ended),
        };
        if text.is_empty() {
            text.push_str(&input.recall());
        }
        text.push_str(&input.take(n));
        if is_over {
            let (text, is_started) = (std::mem::take(text), *is_started);
            emitter.fail(text, is_started, true);
            self.state = State::Start;
        }
        is_over && !input.is_empty()
    }
}
