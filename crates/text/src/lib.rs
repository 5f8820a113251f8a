//! Text: tokenizers, chat templates, tool calls and grammars of model files.
//!
//! [`tokenizer`] turns text into ids, [`chat`] turns a conversation into a prompt, [`detokenizer`]
//! turns generated ids back into text piece by piece. [`tools`] finds calls in an answer, and
//! [`grammar`] makes the grammars that constrain one. Vocabularies and templates come from a GGUF
//! file's metadata or from a Hugging Face folder.
//!
//! Invariants:
//!
//! - Nothing that comes with a model is executed. Chat templates run in a sandboxed interpreter
//!   with a limit on steps and output.
//! - Bad input is an error that names the place and the values, never a panic; a panic of an
//!   outside crate becomes one ([`panics`]).

pub mod chat;
pub mod detokenizer;
pub mod grammar;
pub mod panics;
mod surrogates;
pub mod tokenizer;
pub mod tools;

mod limited_read;

pub use surrogates::replace_lone_surrogates;
