//! The knowledge base behind `paceline kb`: findings on distributed GPU computing, their topics,
//! quick answers, conflicts between findings and the planner's assumptions about them.
//!
//! It is built into the program (`data/findings.toml`, `data/planner.toml`). User files extend it
//! and are passed as bytes: this crate does no input and output, and has no clock and no terminal.
//!
//! ```
//! use paceline_kb::{Area, KnowledgeBase};
//!
//! let kb = KnowledgeBase::built_in();
//! let fit = kb.ask("which parallelism over 10 GbE?").expect("there is an answer");
//! assert!(fit.answer.findings.contains(&431));
//! assert!(kb.ask("how do I bake bread?").is_none());
//! assert!(matches!(kb.area("jaccl-backend"), Area::Topic(topic) if topic.ids.contains(&415)));
//! ```
//!
//! Reading order: the entries ([`Finding`]), `file` (user files and their errors),
//! [`KnowledgeBase`], `words` (text to terms), `search` (ranking and snippets), `question` (quick
//! answers) and [`report`].
//!
//! There is no stored index: a start reads and indexes all in some milliseconds. There is no query
//! language, no language but English, and no meaning of words.

#![forbid(unsafe_code)]

mod base;
mod entry;
mod error;
mod file;
mod question;
pub mod report;
mod search;
mod similarity;
mod words;

pub use base::{Area, Contents, KnowledgeBase, Skill, Stats};
pub use entry::{Assumption, BUILT_IN, Check, Finding, GRADES, QuickAnswer, Topic};
pub use error::{EntryError, Error, KeyError, PROBLEMS_MAX};
pub use file::{FILE_BYTES_MAX, UserFile};
pub use question::Fit;
pub use search::{Hit, SearchResult, Snippet, Unknown};
