//! The state machine of a response template: finds the delimiters of fields in the response and
//! hands each region's text to its `Content`. [`ToolCallParser`](crate::tools::Reader) drives it.

use std::collections::BTreeMap;
use std::sync::Arc;

use regex_automata::hybrid::dfa::Cache;

use super::super::fragment::CallFragment;
use super::super::input::UnreadText;
use super::super::reader::Emitter;
use super::super::schema::Parameters;
use super::delimiter::{Delimiter, DelimiterMatch};
use super::{Field, Kind, RegionCall, ResponseTemplate};

/// Reads answers by a response template.
#[derive(Clone, Debug)]
pub(in crate::tools) struct Regions {
    template: Arc<ResponseTemplate>,
    parameters: Parameters,
    /// Without tools, calls are text.
    has_tools: bool,
    /// Working memory of the opening and of the closing delimiter of each field.
    caches: Vec<[Option<Cache>; 2]>,
    /// The field whose region is being read; `None` between regions.
    open: Option<usize>,
    /// All that was read of a region of calls, and where in it the text begins.
    text: String,
    begins_at: usize,
    /// Named groups of its opening delimiter.
    captures: BTreeMap<String, String>,
}

/// A delimiter in the unread text.
#[derive(Clone, Copy, Debug)]
struct RegionStart {
    field: usize,
    is_open: bool,
    start: usize,
    end: usize,
}

impl Regions {
    /// A parser for the response to a prompt that ends with the text `prompt`. Also returns the
    /// unparsed end of the prompt, which precedes the response.
    pub(in crate::tools) fn new(
        template: Arc<ResponseTemplate>,
        prompt: &str,
        parameters: Parameters,
        has_tools: bool,
    ) -> (Self, UnreadText) {
        let cache = |delimiter: &Option<Delimiter>| delimiter.as_ref().and_then(Delimiter::cache);
        let fields = template.fields.iter();
        let caches = fields.map(|field| [cache(&field.open), cache(&field.close)]);
        let mut regions = Self {
            caches: caches.collect(),
            parameters,
            has_tools,
            open: None,
            text: String::new(),
            begins_at: 0,
            captures: BTreeMap::new(),
            template,
        };
        let mut input = UnreadText::default();
        input.push(regions.template.opened(prompt));
        let mut unseen = Emitter::default();
        while regions.step(&mut input, &mut unseen) {}
        (regions, input)
    }

    /// Reads on; `false` when more text is needed.
    pub(in crate::tools) fn step(&mut self, input: &mut UnreadText, emitter: &mut Emitter) -> bool {
        match self.scan(input) {
            (Some(hit), _) => {
                let before = input.take(hit.start);
                self.pass(&before, emitter);
                self.cross(hit, input, emitter);
                true
            }
            (None, clear) => {
                let text = input.take(clear);
                self.pass(&text, emitter);
                if input.is_ended {
                    self.end(emitter);
                }
                false
            }
        }
    }

    /// The first delimiter that is certain, and how much text no delimiter is in. Of two at one
    /// place the longer counts, then one that opens, then the field that is named first.
    fn scan(&mut self, input: &UnreadText) -> (Option<RegionStart>, usize) {
        let template = Arc::clone(&self.template);
        let mut clear = input.rest().len();
        let mut first: Option<RegionStart> = None;
        for (field, is_open) in self.watched() {
            let (of_field, cache) = (&template.fields[field], &mut self.caches[field]);
            let (delimiter, cache) = match is_open {
                true => (&of_field.open, &mut cache[0]),
                false => (&of_field.close, &mut cache[1]),
            };
            let Some(delimiter) = delimiter else { continue };
            match delimiter.find(input, cache.as_mut()) {
                DelimiterMatch::NotBefore(at) => clear = clear.min(at),
                DelimiterMatch::At { start, end } => {
                    let hit = RegionStart {
                        field,
                        is_open,
                        start,
                        end,
                    };
                    let key = |hit: &RegionStart| (hit.start, usize::MAX - hit.end, !hit.is_open);
                    if first.is_none_or(|first| key(&hit) < key(&first)) {
                        first = Some(hit);
                    }
                }
            }
        }
        // A match that may begin earlier, or at the same place, may become the first.
        (first.filter(|hit| hit.start < clear), clear)
    }

    /// Delimiters that count now: the field, and whether the opening one.
    fn watched(&self) -> Vec<(usize, bool)> {
        if let Some(open) = self.open {
            return vec![(open, false)];
        }
        let fields = 0..self.template.fields.len();
        let implicit = self.template.implicit.map(|field| (field, false));
        fields.map(|field| (field, true)).chain(implicit).collect()
    }

    /// The field that text belongs to now.
    fn field(&self) -> Option<&Field> {
        let field = self.open.or(self.template.implicit);
        field.map(|field| &self.template.fields[field])
    }

    fn kind(&self) -> Option<Kind> {
        self.field().map(|field| field.kind)
    }

    /// Whether white space at the front of the next text is dropped.
    pub(in crate::tools) fn strips(&self) -> bool {
        self.field().is_none_or(|field| field.content.strips())
    }

    /// Emits text of the region, or between regions. Text without a field is dropped.
    fn pass(&mut self, text: &str, emitter: &mut Emitter) {
        match self.kind() {
            Some(Kind::Text) => emitter.text(text),
            Some(Kind::Reasoning) => emitter.reasoning(text),
            Some(Kind::Calls) => self.text.push_str(text),
            None => {}
        }
    }

    /// Goes over a delimiter.
    fn cross(&mut self, hit: RegionStart, input: &mut UnreadText, emitter: &mut Emitter) {
        let captures = match &self.template.fields[hit.field].open {
            // The text before it was parsed.
            Some(open) if hit.is_open => open.captures(input.rest(), 0),
            _ => BTreeMap::new(),
        };
        let delimiter = input.take(hit.end - hit.start);
        if !hit.is_open {
            return self.close(&delimiter, emitter);
        }
        self.end_implicit(emitter);
        self.open = Some(hit.field);
        self.captures = captures;
        self.text = delimiter;
        self.begins_at = self.text.len();
        self.trim(hit.field, emitter);
    }

    /// White space at the borders of regions is none of them, unless the field keeps that at its
    /// own.
    fn trim(&self, field: usize, emitter: &mut Emitter) {
        if self.template.fields[field].content.strips() {
            emitter.begin_reasoning();
        }
    }

    fn close(&mut self, delimiter: &str, emitter: &mut Emitter) {
        let Some(field) = self.open else {
            return self.end_implicit(emitter);
        };
        if self.kind() == Some(Kind::Calls) {
            let text = self.text.split_off(self.begins_at);
            let opening = std::mem::take(&mut self.text);
            self.end_calls(field, &text, &[&opening, delimiter], emitter);
        } else {
            self.trim(field, emitter);
        }
        self.open = None;
    }

    /// Ends the text between regions.
    fn end_implicit(&mut self, emitter: &mut Emitter) {
        let Some(field) = self.template.implicit else {
            return;
        };
        if self.template.fields[field].kind == Kind::Calls {
            let text = std::mem::take(&mut self.text);
            if !text.trim().is_empty() {
                self.end_calls(field, &text, &["", ""], emitter);
            }
        } else {
            self.trim(field, emitter);
        }
    }

    /// Ends the answer. A region without a closing delimiter ends here; one that lacks its own is
    /// cut off, so that its calls are text.
    fn end(&mut self, emitter: &mut Emitter) {
        let Some(field) = self.open.take() else {
            return self.end_implicit_at_end(emitter);
        };
        let of_field = &self.template.fields[field];
        if of_field.kind != Kind::Calls {
            return;
        }
        if of_field.close.is_some() {
            let counts = self.has_tools;
            return emitter.fail(std::mem::take(&mut self.text), false, counts);
        }
        let text = self.text.split_off(self.begins_at);
        let opening = std::mem::take(&mut self.text);
        self.end_calls(field, &text, &[&opening, ""], emitter);
    }

    /// At its end the answer keeps white space, as it does without a template.
    fn end_implicit_at_end(&mut self, emitter: &mut Emitter) {
        if self.kind() == Some(Kind::Calls) {
            self.end_implicit(emitter);
        }
    }

    /// Emits the calls of a region with this text between these delimiters.
    fn end_calls(&mut self, field: usize, text: &str, around: &[&str; 2], emitter: &mut Emitter) {
        let whole = || [around[0], text, around[1]].concat();
        if !self.has_tools {
            return emitter.fail(whole(), false, false);
        }
        let captures = std::mem::take(&mut self.captures);
        let of_field = &self.template.fields[field];
        let Some(calls) = of_field.calls(text, &captures, &self.parameters) else {
            return emitter.fail(whole(), false, true);
        };
        calls.into_iter().for_each(|call| emit_call(call, emitter));
    }
}

fn emit_call(call: RegionCall, emitter: &mut Emitter) {
    let RegionCall {
        name,
        id,
        arguments,
    } = call;
    let arguments = serde_json::Value::Object(arguments).to_string();
    emitter.pieces(vec![
        CallFragment::Name { name, id },
        CallFragment::Arguments(arguments),
    ]);
    emitter.end_call();
}
