//! The parser of responses: generated text in, events out ([`ToolCallParser::push`]).
//!
//! A [`ToolCallParser`] chooses a state machine by the model's syntax: tagged calls here, channels
//! in `harmony`, response templates in `response`. The machines parse, and an `Emitter` numbers
//! calls, trims white space and returns text that turned out to be no call. A caller has one reader
//! per response. Schemas only give values their types here; arguments are not validated.

use super::body::CallBody;
use super::elements::ElementCallParser;
use super::form::{Calls, Item, MISTRAL, Tags};
use super::fragment::{BodyStatus, CallFragment};
use super::gemma::GemmaCallParser;
use super::harmony::Harmony;
use super::input::{MarkerMatch, UnreadText};
use super::named_call::NamedCallParser;
use super::object::ObjectCallParser;
use super::response::Regions;
use super::schema::Parameters;
use super::{Event, ToolCallFormat};

/// Options of parsing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReaderOptions {
    /// Report a call only when it is complete. Then no call is ever retracted; without it, a call's
    /// name and arguments stream as they are written.
    pub holds_calls: bool,
    /// Makes the ids of calls; another number for each answer.
    pub id_seed: u64,
}

/// Reads one answer.
///
/// Bounded by the answer: it holds the text of the call that is being read, else the beginning of
/// a marker and white space.
#[derive(Clone, Debug)]
pub struct ToolCallParser {
    input: UnreadText,
    emitter: Emitter,
    machine: ResponseParser,
}

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each answer")]
enum ResponseParser {
    Tagged(Tagged),
    Harmony(Harmony),
    Regions(Box<Regions>),
}

impl ToolCallParser {
    pub(super) fn tagged(
        tags: Option<&'static Tags>,
        calls: Option<&'static Calls>,
        parameters: Parameters,
        is_reasoning: bool,
        options: ReaderOptions,
    ) -> Self {
        let family = calls.map(|calls| calls.family);
        let state = if is_reasoning {
            State::Reasoning
        } else {
            State::Text
        };
        Self {
            input: UnreadText::default(),
            emitter: Emitter::new(options, family),
            machine: ResponseParser::Tagged(Tagged {
                tags,
                calls,
                parameters,
                state,
            }),
        }
    }

    pub(super) fn harmony(machine: Harmony, options: ReaderOptions) -> Self {
        Self {
            input: UnreadText::default(),
            emitter: Emitter::new(options, Some(ToolCallFormat::Harmony)),
            machine: ResponseParser::Harmony(machine),
        }
    }

    /// `input` is the end of the prompt that belongs to the answer.
    pub(super) fn regions(machine: Regions, input: UnreadText, options: ReaderOptions) -> Self {
        let mut emitter = Emitter::new(options, None);
        emitter.trims_start = machine.strips();
        Self {
            input,
            emitter,
            machine: ResponseParser::Regions(Box::new(machine)),
        }
    }

    /// Reads the next piece of the answer.
    pub fn push(&mut self, piece: &str) -> Vec<Event> {
        self.input.push(piece);
        self.run();
        std::mem::take(&mut self.emitter.events)
    }

    /// Ends the response: emits the text held back. An incomplete call is text.
    pub fn finish(&mut self) -> Vec<Event> {
        self.input.is_ended = true;
        self.run();
        self.emitter.flush_space();
        std::mem::take(&mut self.emitter.events)
    }

    /// Calls so far that could not be parsed and were emitted as text.
    pub const fn failed_calls(&self) -> usize {
        self.emitter.failed
    }

    /// Calls so far that were read to their end.
    pub const fn complete_calls(&self) -> usize {
        self.emitter.complete
    }

    fn run(&mut self) {
        let (input, emitter) = (&mut self.input, &mut self.emitter);
        match &mut self.machine {
            ResponseParser::Tagged(machine) => while machine.step(input, emitter) {},
            ResponseParser::Harmony(machine) => while machine.step(input, emitter) {},
            ResponseParser::Regions(machine) => while machine.step(input, emitter) {},
        }
    }
}

/// Reads answers with reasoning in tags and calls behind markers.
#[derive(Clone, Debug)]
struct Tagged {
    tags: Option<&'static Tags>,
    calls: Option<&'static Calls>,
    parameters: Parameters,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Reasoning,
    Text,
    Calls(Section),
    /// A call that could not be read, until its end.
    Broken {
        text: String,
        is_started: bool,
        close: &'static str,
    },
}

/// Calls behind one opening marker.
#[derive(Clone, Debug)]
struct Section {
    body: Option<CallBody>,
    /// Whether a name was read of the body.
    has_name: bool,
    calls: usize,
    /// Text that ends the section; may be empty.
    close: &'static str,
    /// Whether nothing else ends it.
    needs_close: bool,
    /// Whether a plain answer may look like it.
    is_bare: bool,
    /// Whether the calls are JSON objects, where the family has two forms.
    is_list: bool,
}

impl Tagged {
    /// Reads on; `false` when more text is needed.
    fn step(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        match &mut self.state {
            State::Reasoning => self.read_reasoning(input, emitter),
            State::Text => self.read_text(input, emitter),
            State::Calls(_) => self.read_calls(input, emitter),
            State::Broken { .. } => self.read_broken(input, emitter),
        }
    }

    fn read_reasoning(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        let close = self.tags.map_or("", |tags| tags.close);
        match input.find(&[close]) {
            MarkerMatch::Marker { before, .. } => {
                emitter.reasoning(&input.take(before));
                emitter.end_reasoning();
                input.skip(close.len());
                self.state = State::Text;
                true
            }
            MarkerMatch::None { clear } => {
                emitter.reasoning(&input.take(clear));
                false
            }
        }
    }

    fn read_text(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        if let Some(is_bare) = self.bare_call(input, emitter) {
            return is_bare;
        }
        let opens = self.calls.map_or(&[][..], |calls| calls.opens);
        let mut markers = opens.to_vec();
        // Only before anything else was said: later it is a word of the answer.
        markers.extend(
            self.tags
                .filter(|_| !emitter.has_text)
                .map(|tags| tags.open),
        );
        match input.find(&markers) {
            MarkerMatch::None { clear } => {
                emitter.text(&input.take(clear));
                false
            }
            MarkerMatch::Marker { before, .. } if before > 0 => {
                emitter.text(&input.take(before));
                true
            }
            MarkerMatch::Marker { which, .. } if which == opens.len() => {
                emitter.begin_reasoning();
                input.skip(markers[which].len());
                self.state = State::Reasoning;
                true
            }
            MarkerMatch::Marker { which, .. } => {
                input.remember();
                self.open(which, input);
                true
            }
        }
    }

    /// Looks for a call that is a bare object at the beginning of the answer. `None` when the
    /// text is to be read as usual.
    fn bare_call(&mut self, input: &mut UnreadText, emitter: &Emitter) -> Option<bool> {
        self.calls.filter(|calls| calls.item == Item::Bare)?;
        if emitter.has_text || input.rest().trim_start().is_empty() {
            return None;
        }
        if !input.rest().trim_start().starts_with('{') {
            return None;
        }
        input.remember();
        self.state = State::Calls(Section {
            body: None,
            has_name: false,
            calls: 0,
            close: "",
            needs_close: false,
            is_bare: true,
            is_list: true,
        });
        Some(true)
    }

    fn open(&mut self, which: usize, input: &mut UnreadText) {
        let Some(calls) = self.calls else { return };
        // An opening marker that is the beginning of a call replaces the section's own.
        let open = calls.opens[which];
        let is_short = open == calls.begin;
        if !is_short {
            input.skip(open.len());
        }
        self.state = State::Calls(Section {
            body: None,
            has_name: false,
            calls: 0,
            close: calls.close,
            needs_close: !is_short && !calls.close.is_empty(),
            is_bare: false,
            is_list: false,
        });
    }

    fn read_calls(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        let (State::Calls(section), Some(calls)) = (&mut self.state, self.calls) else {
            return false;
        };
        let Some(body) = &mut section.body else {
            return self.between_calls(input, emitter);
        };
        let mut pieces = Vec::new();
        let mut status = body.read(input, &mut pieces);
        section.has_name |= !pieces.is_empty();
        let unknown = |piece: &CallFragment| match piece {
            CallFragment::Name { name, .. } => !self.parameters.has_tool(name),
            CallFragment::Arguments(_) => false,
        };
        if calls.item == Item::Bare && pieces.iter().any(unknown) {
            status = BodyStatus::Bad;
        } else {
            emitter.pieces(pieces);
        }
        match status {
            BodyStatus::More => false,
            BodyStatus::Bad => {
                self.fail(input, emitter);
                true
            }
            BodyStatus::Done => {
                emitter.end_call();
                section.body = None;
                section.calls += 1;
                input.remember();
                true
            }
        }
    }

    /// Begins the next call, or leaves the section.
    fn between_calls(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        let (State::Calls(section), Some(calls)) = (&mut self.state, self.calls) else {
            return false;
        };
        input.skip_space();
        if input.is_empty() && !input.is_ended {
            return false;
        }
        if !section.close.is_empty() {
            match input.starts_with(section.close) {
                None => return false,
                Some(true) if section.calls > 0 => {
                    input.skip(section.close.len());
                    return self.leave(input, emitter);
                }
                _ => {}
            }
        }
        if section.calls > 0 && input.is_empty() {
            return self.leave(input, emitter);
        }
        match section.begin(calls, &self.parameters, input) {
            Some(true) => true,
            Some(false) if section.calls > 0 && !section.needs_close => self.leave(input, emitter),
            Some(false) => {
                self.fail(input, emitter);
                true
            }
            None => false,
        }
    }

    fn leave(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        input.recall();
        emitter.trims_start = true;
        self.state = State::Text;
        true
    }

    /// Gives up the call that is being read.
    fn fail(&mut self, input: &mut UnreadText, emitter: &mut Emitter) {
        let State::Calls(section) = &self.state else {
            return;
        };
        let (text, is_started) = (input.recall(), emitter.is_started());
        if !section.needs_close {
            let counts = !section.is_bare || is_started;
            emitter.fail(text, is_started, counts);
            self.state = State::Text;
        } else {
            let close = section.close;
            self.state = State::Broken {
                text,
                is_started,
                close,
            };
        }
    }

    fn read_broken(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        let State::Broken {
            text,
            is_started,
            close,
        } = &mut self.state
        else {
            return false;
        };
        let (n, is_over) = match input.find(&[*close]) {
            MarkerMatch::Marker { before, .. } => (before + close.len(), true),
            MarkerMatch::None { clear } => (clear, input.is_ended),
        };
        text.push_str(&input.take(n));
        if is_over {
            let (text, is_started) = (std::mem::take(text), *is_started);
            emitter.fail(text, is_started, true);
            self.state = State::Text;
        }
        is_over && !input.is_empty()
    }
}

impl Section {
    /// Begins a call if the text continues with one; `None` until that is certain.
    fn begin(
        &mut self,
        calls: &Calls,
        parameters: &Parameters,
        input: &mut UnreadText,
    ) -> Option<bool> {
        if self.calls > 0 && (self.is_list || calls.item == Item::Bare) {
            let separator = input.rest().starts_with([',', ';']);
            input.skip(usize::from(separator));
            input.skip_space();
        }
        if input.is_empty() && !input.is_ended {
            return None;
        }
        if calls.item == Item::Mistral {
            return Some(self.begin_mistral(calls, input));
        }
        let is_here = input.starts_with(calls.begin)?;
        if !is_here {
            return Some(false);
        }
        if !matches!(calls.item, Item::Object | Item::Bare | Item::Gemma) {
            input.skip(calls.begin.len());
        }
        self.body = Some(match &calls.item {
            Item::Object | Item::Mistral => CallBody::Object(ObjectCallParser::new(false)),
            Item::Bare => CallBody::Object(ObjectCallParser::new(true)),
            Item::Named(form) => CallBody::Named(NamedCallParser::new(form)),
            Item::Elements(form) => CallBody::Elements(ElementCallParser::new(form, parameters)),
            Item::Gemma => CallBody::Gemma(GemmaCallParser::new()),
        });
        Some(true)
    }

    /// `[{...}, {...}]`, `{...}`, or `NAME[ARGS]{...}`.
    fn begin_mistral(&mut self, calls: &Calls, input: &mut UnreadText) -> bool {
        if self.calls == 0 && input.rest().starts_with('[') {
            input.skip(1);
            input.skip_space();
            (self.is_list, self.close, self.needs_close) = (true, "]", true);
        }
        if self.is_list || input.rest().starts_with('{') {
            self.body = Some(CallBody::Object(ObjectCallParser::new(false)));
            return true;
        }
        if self.calls > 0 {
            return false;
        }
        let form = calls.second.unwrap_or(&MISTRAL);
        self.body = Some(CallBody::Named(NamedCallParser::new(form)));
        true
    }
}

/// Makes events: numbers calls, holds them back on request, and trims white space between
/// reasoning, text and calls.
#[derive(Clone, Debug, Default)]
pub(super) struct Emitter {
    options: ReaderOptions,
    family: Option<ToolCallFormat>,
    events: Vec<Event>,
    /// White space that counts only if something of its kind follows.
    space: String,
    /// White space before the call that began.
    before_call: String,
    /// Whether white space at the front of the next text is dropped.
    pub(super) trims_start: bool,
    /// Whether the answer has text that is not white space.
    pub(super) has_text: bool,
    /// Calls that began.
    index: usize,
    /// A call that began, and what of it is held back.
    call: Option<Vec<Event>>,
    complete: usize,
    failed: usize,
}

impl Emitter {
    fn new(options: ReaderOptions, family: Option<ToolCallFormat>) -> Self {
        Self {
            options,
            family,
            events: Vec::new(),
            space: String::new(),
            before_call: String::new(),
            trims_start: false,
            has_text: false,
            index: 0,
            call: None,
            complete: 0,
            failed: 0,
        }
    }

    /// Text without the white space at its borders that is not certain to count.
    fn trim(&mut self, text: &str) -> Option<String> {
        let text = if self.trims_start {
            text.trim_start()
        } else {
            text
        };
        let core = text.trim_end();
        if core.is_empty() {
            self.space.push_str(text);
            return None;
        }
        self.trims_start = false;
        let mut out = std::mem::take(&mut self.space);
        out.push_str(core);
        self.space.push_str(&text[core.len()..]);
        Some(out)
    }

    pub(super) fn text(&mut self, text: &str) {
        if let Some(text) = self.trim(text) {
            self.has_text = true;
            self.events.push(Event::Text(text));
        }
    }

    pub(super) fn begin_reasoning(&mut self) {
        self.space.clear();
        self.trims_start = true;
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        if let Some(text) = self.trim(text) {
            self.events.push(Event::Reasoning(text));
        }
    }

    pub(super) fn end_reasoning(&mut self) {
        self.begin_reasoning();
    }

    /// White space that ended up at the end of the answer.
    fn flush_space(&mut self) {
        let space = std::mem::take(&mut self.space);
        if !space.is_empty() && self.has_text && !self.trims_start {
            self.events.push(Event::Text(space));
        }
    }

    pub(super) const fn is_started(&self) -> bool {
        self.call.is_some()
    }

    pub(super) fn pieces(&mut self, pieces: Vec<CallFragment>) {
        let index = self.index;
        for piece in pieces {
            let event = match piece {
                CallFragment::Name { name, id } => {
                    self.call = Some(Vec::new());
                    let id = id
                        .filter(|id| !id.is_empty())
                        .unwrap_or_else(|| self.new_id());
                    Event::CallStart { index, id, name }
                }
                CallFragment::Arguments(piece) => Event::Arguments { index, piece },
            };
            match &mut self.call {
                Some(held) if self.options.holds_calls => held.push(event),
                _ => self.push_call(event),
            }
        }
    }

    /// White space between two calls, or before the first, is no text.
    fn push_call(&mut self, event: Event) {
        if matches!(event, Event::CallStart { .. }) {
            self.before_call = std::mem::take(&mut self.space);
        }
        self.events.push(event);
    }

    fn new_id(&self) -> String {
        let seed = self.options.id_seed.wrapping_add(self.index as u64);
        match self.family {
            Some(ToolCallFormat::Mistral) => letters(seed, 9),
            _ => format!("call_{}", letters(seed, 24)),
        }
    }

    pub(super) fn end_call(&mut self) {
        let index = self.index;
        let held = self.call.take().unwrap_or_default();
        self.space.clear();
        self.events.extend(held);
        self.events.push(Event::CallEnd { index });
        self.index += 1;
        self.complete += 1;
    }

    /// A call that is none; `text` is all that was read of it.
    pub(super) fn fail(&mut self, text: String, is_started: bool, counts: bool) {
        self.failed += usize::from(counts);
        self.call = None;
        if is_started && !self.options.holds_calls {
            let index = self.index;
            self.index += 1;
            self.has_text = true;
            let text = std::mem::take(&mut self.before_call) + &text;
            self.events.push(Event::CallFailed { index, text });
            return;
        }
        self.trims_start = false;
        self.text(&text);
    }
}

/// `n` letters and digits made from `seed`.
fn letters(seed: u64, n: usize) -> String {
    const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let mut state = seed;
    let letter = |_| {
        // SplitMix64 (Steele, Lea, Flood 2014).
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        char::from(LETTERS[((z ^ (z >> 31)) % 62) as usize])
    };
    (0..n).map(letter).collect()
}
