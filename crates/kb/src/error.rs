//! Faults of a file of findings, with line and key.

use std::fmt;

/// Most problems of one file that are reported; a file of another kind would have thousands.
pub const PROBLEMS_MAX: usize = 20;

/// Why a file of findings is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Larger than a file of findings can reasonably be.
    #[error("the file is larger than {max} bytes")]
    TooLarge {
        /// The limit in bytes.
        max: usize,
    },
    #[error("line {line}: not UTF-8 text, byte {at} is {byte:#04x}")]
    NotUtf8 {
        /// From 1.
        line: usize,
        /// Offset in the file, from 0.
        at: usize,
        /// The byte there.
        byte: u8,
    },
    #[error("line {line}, column {column}{}: {message}", in_key(key.as_deref()))]
    Syntax {
        /// From 1.
        line: usize,
        /// In characters, from 1.
        column: usize,
        /// The key or header that was being read.
        key: Option<String>,
        message: String,
    },
    #[error("{}", list(problems, *more))]
    Invalid {
        /// By line, at most [`PROBLEMS_MAX`].
        problems: Vec<Problem>,
        /// Number of further problems.
        more: usize,
    },
}

/// A fault and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// From 1; the line of the entry's header when a key is missing.
    pub line: usize,
    /// The entry, such as `[[finding]] 3 (id 901)`; empty at the top of the file.
    pub entry: String,
    /// The key; empty when the entry as a whole is meant.
    pub key: String,
    pub fault: Fault,
}

/// A fault of a key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("missing")]
    Missing,
    #[error("empty")]
    Empty,
    #[error("expected {expected}, got {got}")]
    WrongType {
        /// A phrase, such as `a string`.
        expected: &'static str,
        /// TOML's name of the type.
        got: &'static str,
    },
    #[error("expected a whole number from 1 to 4294967295, got {}", got.replace(char::is_control, " "))]
    NotAnId {
        /// The text of the value.
        got: String,
    },
    #[error("unknown key{}, expected one of {known}", meant(nearest.as_deref()))]
    UnknownKey {
        /// A known key that looks like it.
        nearest: Option<String>,
        known: String,
    },
    #[error("expected verified, high, medium or low, got {got:?}")]
    NotAConfidence { got: String },
    #[error("{id} is taken by {by}")]
    IdTaken {
        id: u32,
        /// The other finding, in words.
        by: String,
    },
    #[error("no finding has the id {id}")]
    NoSuchFinding { id: u32 },
    #[error("finding {id} is in conflict with itself")]
    ConflictsWithItself { id: u32 },
    /// A topic that is nearly the name of another.
    #[error("no topic is called {name:?}{}", meant(Some(nearest)))]
    NearTopic {
        name: String,
        /// The topic that looks like it.
        nearest: String,
    },
    #[error("topic {name:?} exists already, in {by}")]
    TopicTaken { name: String, by: String },
    #[error("control character {code:#04x} in the text")]
    ControlCharacter { code: u32 },
    #[error("nothing to add: expected at least one [[finding]] or [[answer]]")]
    NothingThere,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}", self.line)?;
        if !self.entry.is_empty() {
            write!(f, ", {}", self.entry)?;
        }
        f.write_str(&in_key(
            Some(self.key.as_str()).filter(|key| !key.is_empty()),
        ))?;
        write!(f, ": {}", self.fault)
    }
}

fn in_key(key: Option<&str>) -> String {
    // A key in quotes may hold anything; a terminal should not have it as it is.
    key.map_or_else(String::new, |key| format!(", key `{}`", key.escape_debug()))
}

fn meant(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |name| format!(", did you mean {name:?}?"))
}

fn list(problems: &[Problem], more: usize) -> String {
    let mut lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    lines.join("\n  ")
}
