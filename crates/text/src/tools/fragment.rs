//! The parts of a call that is being read, in any family's form.

/// Longest name of a tool or of a parameter, in bytes. OpenAI allows 64 characters.
pub(super) const MAX_NAME_BYTES: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallFragment {
    /// Comes once, first.
    Name {
        name: String,
        /// The model's own id.
        id: Option<String>,
    },
    /// Next part of the arguments as JSON.
    Arguments(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyStatus {
    /// More text is needed.
    More,
    /// The call is complete.
    Done,
    /// This is no call.
    Bad,
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
