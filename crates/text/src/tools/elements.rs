//! A call as elements: a name, and parameters with untyped values.
//!
//! ```text
//! <function=NAME> <parameter=KEY>\nvalue\n</parameter> </function>              Qwen
//! <invoke name="NAME"> <parameter name="KEY">value</parameter> </invoke>       MiniMax, DSML
//! NAME <arg_key>KEY</arg_key> <arg_value>value</arg_value>                      GLM
//! ```

use serde_json::Value as Json;

use super::fragment::{BodyStatus, CallFragment, MAX_NAME_BYTES, name_of};
use super::input::{MarkerMatch, UnreadText};
use super::schema::{Parameters, Types};

/// The form of such calls.
#[derive(Debug)]
pub(super) struct ElementSyntax {
    /// Texts that end the name of the tool.
    pub(super) name_ends: &'static [&'static str],
    /// Whether that text belongs to what follows.
    pub(super) keeps_name_end: bool,
    /// Begins a parameter.
    pub(super) key_open: &'static str,
    pub(super) key_end: &'static str,
    /// Text between key and value; `>` where attributes may precede it.
    pub(super) value_open: &'static str,
    /// Whether `string="true"` before `value_open` marks a text.
    pub(super) has_attributes: bool,
    /// Texts that end a value.
    pub(super) value_ends: &'static [&'static str],
    /// Whether a line end at the beginning of a value is none of it.
    pub(super) trims_line_end: bool,
    pub(super) end: &'static str,
    /// Whether that text belongs to what follows.
    pub(super) keeps_end: bool,
}

/// Position in a call.
#[derive(Clone, Debug)]
enum State {
    Name(String),
    Between,
    Key(String),
    Attributes(String),
    ValueStart,
    Value,
}

/// Reads such a call.
#[derive(Clone, Debug)]
pub(super) struct ElementCallParser {
    form: &'static ElementSyntax,
    parameters: Parameters,
    state: State,
    tool: String,
    key: String,
    /// Whether the value is text, as far as the attributes say.
    told: Option<bool>,
    types: Types,
    /// Text of a value that is not streamed.
    value: String,
    n_parameters: usize,
}

impl ElementCallParser {
    pub(super) fn new(form: &'static ElementSyntax, parameters: &Parameters) -> Self {
        Self {
            form,
            parameters: parameters.clone(),
            state: State::Name(String::new()),
            tool: String::new(),
            key: String::new(),
            told: None,
            types: Types::default(),
            value: String::new(),
            n_parameters: 0,
        }
    }

    pub(super) fn read(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> BodyStatus {
        loop {
            let status = match self.state {
                State::Name(_) => self.read_name(input, out),
                State::Between => self.read_between(input, out),
                State::Key(_) => self.read_key(input),
                State::Attributes(_) => self.read_attributes(input),
                State::ValueStart => self.begin_value(input, out),
                State::Value => self.read_value(input, out),
            };
            if let Some(status) = status {
                return status;
            }
        }
    }

    fn read_name(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> Option<BodyStatus> {
        let (State::Name(text), form) = (&mut self.state, self.form) else {
            return Some(BodyStatus::Bad);
        };
        let which = match read_until(input, form.name_ends, text) {
            Ok(which) => which,
            Err(status) => return Some(status),
        };
        let Some(name) = name_of(text) else {
            return Some(BodyStatus::Bad);
        };
        if !form.keeps_name_end {
            input.skip(form.name_ends[which].len());
        }
        self.tool.clone_from(&name);
        out.push(CallFragment::Name { name, id: None });
        self.state = State::Between;
        None
    }

    fn read_between(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> Option<BodyStatus> {
        input.skip_space();
        let form = self.form;
        match (
            input.starts_with(form.key_open),
            input.starts_with(form.end),
        ) {
            (Some(true), _) => {
                input.skip(form.key_open.len());
                self.state = State::Key(String::new());
                None
            }
            (_, Some(true)) => {
                if !form.keeps_end {
                    input.skip(form.end.len());
                }
                let end = if self.n_parameters == 0 { "{}" } else { "}" };
                out.push(CallFragment::Arguments(end.to_owned()));
                Some(BodyStatus::Done)
            }
            (None, _) | (_, None) => Some(BodyStatus::More),
            _ => Some(BodyStatus::Bad),
        }
    }

    fn read_key(&mut self, input: &mut UnreadText) -> Option<BodyStatus> {
        let (State::Key(text), form) = (&mut self.state, self.form) else {
            return Some(BodyStatus::Bad);
        };
        if let Err(status) = read_until(input, &[form.key_end], text) {
            return Some(status);
        }
        input.skip(form.key_end.len());
        let Some(key) = name_of(text) else {
            return Some(BodyStatus::Bad);
        };
        self.types = self.parameters.types(&self.tool, &key);
        self.key = key;
        self.told = None;
        self.state = match form.value_open {
            "" => State::ValueStart,
            _ => State::Attributes(String::new()),
        };
        None
    }

    fn read_attributes(&mut self, input: &mut UnreadText) -> Option<BodyStatus> {
        let (State::Attributes(text), form) = (&mut self.state, self.form) else {
            return Some(BodyStatus::Bad);
        };
        if let Err(status) = read_until(input, &[form.value_open], text) {
            return Some(status);
        }
        input.skip(form.value_open.len());
        if form.has_attributes {
            self.told = Some(!text.contains("string=\"false\""));
        } else if !text.trim().is_empty() {
            return Some(BodyStatus::Bad);
        }
        self.state = State::ValueStart;
        None
    }

    /// Whether the value is certainly text and can be streamed.
    fn is_text(&self) -> bool {
        self.told.unwrap_or_else(|| self.types.is_text())
    }

    fn begin_value(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> Option<BodyStatus> {
        if input.is_empty() {
            return Some(BodyStatus::More);
        }
        if self.form.trims_line_end && input.rest().starts_with('\n') {
            input.skip(1);
        }
        let open = if self.n_parameters == 0 { "{" } else { ", " };
        let quote = if self.is_text() { "\"" } else { "" };
        let key = Json::from(self.key.as_str());
        out.push(CallFragment::Arguments(format!("{open}{key}: {quote}")));
        self.n_parameters += 1;
        self.value.clear();
        self.state = State::Value;
        None
    }

    fn read_value(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> Option<BodyStatus> {
        let (n, end) = match input.find(self.form.value_ends) {
            MarkerMatch::Marker { before, which } => (before, Some(which)),
            MarkerMatch::None { clear } => (clear, None),
        };
        let text = input.take(n);
        if self.is_text() {
            let escaped = Json::from(text).to_string();
            let inner = &escaped[1..escaped.len() - 1];
            out.extend((!inner.is_empty()).then(|| CallFragment::Arguments(inner.to_owned())));
        } else {
            self.value.push_str(&text);
        }
        let Some(which) = end else {
            return Some(BodyStatus::More);
        };
        input.skip(self.form.value_ends[which].len());
        let last = match self.told {
            _ if self.is_text() => "\"".to_owned(),
            Some(_) => json_or_string(&self.value),
            None => self.types.value(&self.value).to_string(),
        };
        out.push(CallFragment::Arguments(last));
        self.state = State::Between;
        None
    }
}

/// A value that the model marks as JSON; text if it does not parse.
fn json_or_string(text: &str) -> String {
    let json: Option<Json> = serde_json::from_str(text.trim()).ok();
    json.unwrap_or_else(|| Json::from(text)).to_string()
}

/// Moves the text before one of `ends` to `text`; which of them follows.
fn read_until(
    input: &mut UnreadText,
    ends: &[&str],
    text: &mut String,
) -> Result<usize, BodyStatus> {
    let (n, end) = match input.find(ends) {
        MarkerMatch::Marker { before, which } => (before, Ok(which)),
        MarkerMatch::None { clear } => (clear, Err(BodyStatus::More)),
    };
    if text.len() + n > MAX_NAME_BYTES {
        return Err(BodyStatus::Bad);
    }
    text.push_str(&input.take(n));
    end
}
