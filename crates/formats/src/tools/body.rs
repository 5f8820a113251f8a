//! The body of a call, in any family's syntax.

use super::elements::Elements;
use super::gemma::Gemma;
use super::input::Input;
use super::named::Named;
use super::object::Object;
use super::piece::{Piece, Status};

/// A call that is being read.
#[derive(Clone, Debug)]
pub(super) enum Body {
    Object(Object),
    Named(Named),
    Elements(Elements),
    Gemma(Gemma),
}

impl Body {
    /// Reads the available text.
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
