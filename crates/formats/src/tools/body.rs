//! The inside of a call, whatever the family's form.

use super::elements::Elements;
use super::gemma::Gemma;
use super::input::Input;
use super::named::Named;
use super::object::Object;

/// Longest name of a tool or of a parameter, in bytes. OpenAI allows 64 characters.
pub(super) const MAX_NAME_BYTES: usize = 512;

/// A piece of a call that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// Comes once, first.
    Name {
        name: String,
        /// As the model wrote it.
        id: Option<String>,
    },
    /// Next part of the arguments as JSON.
    Arguments(String),
}

/// How far a body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// More text is needed.
    More,
    /// The call is complete.
    Done,
    /// This is no call.
    Bad,
}

/// A call that is being read.
#[derive(Clone, Debug)]
pub(super) enum Body {
    Object(Object),
    Named(Named),
    Elements(Elements),
    Gemma(Gemma),
}

impl Body {
    /// Reads as far as the text has come.
    pub(super) fn read(&mut self, input: &mut Input, out: &mut Vec<Piece>) -> Status {
        let status = match self {
            Self::Object(body) => body.read(input, out),
            Self::Named(body) => body.read(input, out),
            Self::Elements(body) => body.read(input, out),
            Self::Gemma(body) => body.read(input, out),
        };
        match status {
            Status::More if input.is_ended => Status::Bad,
            status => status,
        }
    }
}

/// A name that a tool could have, without the space around it.
pub(super) fn name_of(text: &str) -> Option<String> {
    let name = text.trim();
    let is_name = !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && !name
            .chars()
            .any(|c| c.is_control() || matches!(c, '<' | '>' | '{' | '}' | '"'));
    is_name.then(|| name.to_owned())
}
