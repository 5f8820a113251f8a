//! The body of a call, in any family's syntax.

use super::elements::ElementCallParser;
use super::fragment::{BodyStatus, CallFragment};
use super::gemma::GemmaCallParser;
use super::input::UnreadText;
use super::named_call::NamedCallParser;
use super::object::ObjectCallParser;

/// A call that is being read.
#[derive(Clone, Debug)]
pub(super) enum CallBody {
    Object(ObjectCallParser),
    Named(NamedCallParser),
    Elements(ElementCallParser),
    Gemma(GemmaCallParser),
}

impl CallBody {
    /// Reads the available text.
    pub(super) fn read(
        &mut self,
        input: &mut UnreadText,
        out: &mut Vec<CallFragment>,
    ) -> BodyStatus {
        let status = match self {
            Self::Object(body) => body.read(input, out),
            Self::Named(body) => body.read(input, out),
            Self::Elements(body) => body.read(input, out),
            Self::Gemma(body) => body.read(input, out),
        };
        match status {
            BodyStatus::More if input.is_ended => BodyStatus::Bad,
            status => status,
        }
    }
}
