//! A call as a name, a separator and JSON: Kimi K2, DeepSeek V3, Mistral.

use super::fragment::{BodyStatus, CallFragment, MAX_NAME_BYTES, name_of};
use super::input::{MarkerMatch, UnreadText};
use super::json::{Scanner, read_value};

/// Form of the text before the arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// `functions.NAME:0`, which is the id too.
    Kimi,
    /// `function<｜tool▁sep｜>NAME`, or the name alone.
    DeepSeek,
    /// `NAME`, or `NAME[CALL_ID]id`.
    Mistral,
}

/// The form of such calls.
#[derive(Debug)]
pub(super) struct NamedCallSyntax {
    pub(super) header: Header,
    /// Ends the header.
    pub(super) separator: &'static str,
    /// Optional text behind the arguments.
    pub(super) fence: &'static str,
    /// Texts that end the call; none if the arguments do.
    pub(super) ends: &'static [&'static str],
}

#[derive(Clone, Debug)]
enum State {
    Header(String),
    Arguments(Scanner),
    Fence,
    End,
}

/// Reads such a call.
#[derive(Clone, Debug)]
pub(super) struct NamedCallParser {
    form: &'static NamedCallSyntax,
    state: State,
    is_started: bool,
}

impl NamedCallParser {
    pub(super) const fn new(form: &'static NamedCallSyntax) -> Self {
        Self {
            form,
            state: State::Header(String::new()),
            is_started: false,
        }
    }

    /// A call whose name is known already.
    pub(super) fn with_name(form: &'static NamedCallSyntax) -> Self {
        Self {
            state: State::Arguments(Scanner::default()),
            ..Self::new(form)
        }
    }

    pub(super) fn read(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> BodyStatus {
        loop {
            let status = match &mut self.state {
                State::Header(_) => self.read_header(input, out),
                State::Arguments(_) => self.read_arguments(input, out),
                State::Fence => self.read_fence(input),
                State::End => return self.read_end(input),
            };
            if let Some(status) = status {
                return status;
            }
        }
    }

    fn read_header(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> Option<BodyStatus> {
        let State::Header(header) = &mut self.state else {
            return Some(BodyStatus::Bad);
        };
        let (n, is_whole) = match input.find(&[self.form.separator]) {
            MarkerMatch::Marker { before, .. } => (before, true),
            MarkerMatch::None { clear } => (clear, false),
        };
        // Cut at the bound, so that the verdict does not depend on the fragments.
        if header.len() + n > MAX_NAME_BYTES {
            return Some(BodyStatus::Bad);
        }
        header.push_str(&input.take(n));
        if !is_whole {
            return Some(BodyStatus::More);
        }
        input.skip(self.form.separator.len());
        let Some(name) = self.form.header.parse(header) else {
            return Some(BodyStatus::Bad);
        };
        out.push(name);
        self.state = State::Arguments(Scanner::default());
        None
    }

    fn read_arguments(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> Option<BodyStatus> {
        let State::Arguments(scanner) = &mut self.state else {
            return Some(BodyStatus::Bad);
        };
        if !self.is_started {
            input.skip_space();
            let Some(next) = input.rest().chars().next() else {
                return Some(BodyStatus::More);
            };
            if next != '{' {
                return Some(BodyStatus::Bad);
            }
            self.is_started = true;
        }
        let Some((piece, is_done)) = read_value(scanner, input) else {
            return Some(BodyStatus::Bad);
        };
        out.extend((!piece.is_empty()).then_some(CallFragment::Arguments(piece)));
        if !is_done {
            return Some(BodyStatus::More);
        }
        self.state = State::Fence;
        None
    }

    fn read_fence(&mut self, input: &mut UnreadText) -> Option<BodyStatus> {
        if self.form.ends.is_empty() {
            return Some(BodyStatus::Done);
        }
        input.skip_space();
        match input.starts_with(self.form.fence) {
            None => return Some(BodyStatus::More),
            Some(true) => input.skip(self.form.fence.len()),
            Some(false) => {}
        }
        self.state = State::End;
        None
    }

    /// The end may be missing where the answer ends: it is a token that ends generation.
    fn read_end(&self, input: &mut UnreadText) -> BodyStatus {
        input.skip_space();
        let found = self
            .form
            .ends
            .iter()
            .map(|end| (end, input.starts_with(end)));
        let found: Vec<(&&str, Option<bool>)> = found.collect();
        if let Some((end, _)) = found.iter().find(|(_, is_here)| *is_here == Some(true)) {
            input.skip(end.len());
            return BodyStatus::Done;
        }
        if input.is_ended && input.is_empty() {
            return BodyStatus::Done;
        }
        let may_come = found.iter().any(|(_, is_here)| is_here.is_none());
        if may_come {
            BodyStatus::More
        } else {
            BodyStatus::Bad
        }
    }
}

impl Header {
    fn parse(self, header: &str) -> Option<CallFragment> {
        let header = header.trim();
        match self {
            Self::Kimi => {
                let name = header.strip_prefix("functions.").unwrap_or(header);
                let name = match name.rsplit_once(':') {
                    Some((name, n)) if n.bytes().all(|b| b.is_ascii_digit()) => name,
                    _ => name,
                };
                let id = Some(header.to_owned());
                Some(CallFragment::Name {
                    name: name_of(name)?,
                    id,
                })
            }
            Self::DeepSeek => {
                let name = header.rsplit('>').next().unwrap_or(header);
                Some(CallFragment::Name {
                    name: name_of(name)?,
                    id: None,
                })
            }
            Self::Mistral => {
                let (name, id) = match header.split_once("[CALL_ID]") {
                    Some((name, id)) => (name, Some(id.trim().to_owned())),
                    None => (header, None),
                };
                Some(CallFragment::Name {
                    name: name_of(name)?,
                    id,
                })
            }
        }
    }
}
