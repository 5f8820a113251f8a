//! Reports of the knowledge base: to people ([`show`], on a [`TextPage`]) and to programs
//! ([`json`]).
//!
//! Texts and values only: the caller knows the terminal and prints.

pub mod json;
mod page;
pub mod show;

use std::path::PathBuf;

pub use page::TextPage;

use crate::Contents;

/// Whether the program has a command with the options of a line such as `paceline plan MODEL`.
pub type CommandLookup = fn(&str) -> bool;

/// A user file that was added.
#[derive(Debug)]
pub struct Added {
    pub contents: Contents,
    pub path: PathBuf,
    /// False when the same file was there already.
    pub changed: bool,
}
