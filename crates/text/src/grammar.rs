//! Rules that a constrained answer must match, as data.
//!
//! A [`Constraint`] travels with a request to the process that samples, and with the snapshot of a
//! sequence to the next one. The engine compiles it. Nothing here looks into a grammar; the sizes
//! are bounded so that a request cannot make the compiler work without end.

use serde::{Deserialize, Serialize};

mod exclusive;
mod format;
mod schema;

pub use schema::{Unsupported, compilable, relaxed, strict};

/// Longest grammar in bytes, as text: schemas of coding agents with 60 tools have 100 KB.
pub const MAX_GRAMMAR_BYTES: usize = 1 << 20;

/// Longest marker in bytes.
pub const MAX_MARKER_BYTES: usize = 256;

/// Most markers of a [`Start::Lazily`].
pub const MAX_MARKERS: usize = 16;

/// A language of texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grammar {
    /// JSON that a schema accepts; the schema as JSON text.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// A regular expression, anchored at both ends.
    Regex(String),
    /// A choice among these texts, which are not empty.
    Choice(Vec<String>),
    /// A grammar in the Lark dialect of `llguidance`; control tokens are written `<name>`.
    Lark(String),
}

impl Grammar {
    /// Its size as text, in bytes.
    pub fn size(&self) -> usize {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::JsonObject => 0,
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
        }
    }
}

/// From where on an answer must match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Start {
    /// From the first token; the answer ends with the grammar.
    Now,
    /// Behind the first time that this text was generated (`</think>`); free before. The answer
    /// ends with the grammar.
    After {
        /// Text, or the name of a control token.
        marker: String,
    },
    /// Behind each time that one of these texts was generated; free before, and free again when
    /// the grammar is complete. The markers are not part of the grammar.
    Lazily {
        /// Texts, or names of control tokens. Of several the longest that fits counts.
        markers: Vec<String>,
        /// Spans without markers: markup inside reasoning is no call.
        except: Option<DelimitedSpan>,
    },
}

/// A part of an answer between two texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelimitedSpan {
    /// Begins it, such as `<think>`.
    pub open: String,
    /// Ends it.
    pub close: String,
    /// Whether the answer begins inside, because the prompt has the opening text.
    pub is_open: bool,
}

/// The grammar that an answer must match, and from where on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Constraint {
    pub grammar: Grammar,
    /// From where on.
    pub start: Start,
}

impl Constraint {
    /// A constraint of the whole answer.
    pub const fn whole(grammar: Grammar) -> Self {
        let start = Start::Now;
        Self { grammar, start }
    }
}
