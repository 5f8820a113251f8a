//! Errors of a user file, with line and key.

use std::fmt;

/// Most problems of one file that are reported; a file of another kind would have thousands.
pub const PROBLEMS_MAX: usize = 20;

/// Why a user file is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the file is larger than {max} bytes")]
    TooLarge { max: usize },
    /// `at` is the offset of the byte in the file.
    #[error("line {line}: not UTF-8 text, byte {at} is {byte:#04x}")]
    NotUtf8 { line: usize, at: usize, byte: u8 },
    /// `column` counts characters; `key` is the key or header on the line or above it.
    #[error("line {line}, column {column}{}: {message}", in_key(key))]
    Syntax {
        line: usize,
        column: usize,
        key: String,
        message: String,
    },
    /// The first [`PROBLEMS_MAX`] problems by line, and the number of further ones.
    #[error("{}", list(problems, *more))]
    Invalid {
        problems: Vec<EntryError>,
        more: usize,
    },
}

/// A fault and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryError {
    /// From 1; the line of the entry's header when a key is missing.
    pub line: usize,
    /// The entry, such as `[[finding]] 3 (id 901)`; empty at the top of the file.
    pub entry: String,
    /// The key; empty when the entry as a whole is meant.
    pub key: String,
    pub fault: KeyError,
}

/// A fault of a key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("missing")]
    Missing,
    #[error("empty")]
    Empty,
    #[error("expected {expected}, got {got}")]
    WrongType {
        expected: &'static str,
        got: &'static str,
    },
    #[error("expected a whole number from 1 to 4294967295, got {}", got.replace(char::is_control, " "))]
    NotAnId { got: String },
    #[error("unknown key{}, expected one of {known}", meant(nearest))]
    UnknownKey { nearest: String, known: String },
    #[error("expected verified, high, medium or low, got {got:?}")]
    NotAConfidence { got: String },
    #[error("{id} is taken by {by}")]
    IdTaken { id: u32, by: String },
    #[error("no finding has the id {id}")]
    NoSuchFinding { id: u32 },
    #[error("finding {id} is in conflict with itself")]
    ConflictsWithItself { id: u32 },
    #[error("no topic is called {name:?}{}", meant(nearest))]
    NearTopic { name: String, nearest: String },
    #[error("topic {name:?} exists already, in {by}")]
    TopicTaken { name: String, by: String },
    #[error("control character {code:#04x} in the text")]
    ControlCharacter { code: u32 },
    #[error("nothing to add: expected at least one [[finding]] or [[answer]]")]
    NothingThere,
}

impl fmt::Display for EntryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if self.entry.is_empty() { "" } else { ", " };
        let (line, entry, key) = (self.line, &self.entry, in_key(&self.key));
        write!(f, "line {line}{separator}{entry}{key}: {}", self.fault)
    }
}

impl Error {
    /// `Ok` without problems, else the first of them by line.
    pub(crate) fn of(mut problems: Vec<EntryError>) -> Result<(), Self> {
        if problems.is_empty() {
            return Ok(());
        }
        problems.sort_by_key(|problem| problem.line);
        let more = problems.len().saturating_sub(PROBLEMS_MAX);
        problems.truncate(PROBLEMS_MAX);
        Err(Self::Invalid { problems, more })
    }
}

fn in_key(key: &str) -> String {
    match key {
        "" => String::new(),
        // A key in quotes may hold control characters.
        key => format!(", key `{}`", key.escape_debug()),
    }
}

fn meant(nearest: &str) -> String {
    match nearest {
        "" => String::new(),
        name => format!(", did you mean {name:?}?"),
    }
}

fn list(problems: &[EntryError], more: usize) -> String {
    let mut lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    lines.join("\n  ")
}
