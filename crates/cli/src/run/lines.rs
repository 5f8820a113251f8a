//! Lines that a person types in a chat.
//!
//! On a terminal they are edited: arrow keys move and bring back earlier lines, and a pasted text
//! of several lines is one. Earlier lines are kept in memory only: what is said in a chat is not
//! written to disk.

use std::io::{BufRead, ErrorKind, IsTerminal, Write};

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Config, Editor};

use crate::output::tell;
use crate::terminal;

/// The text before a line.
const PROMPT: &str = "> ";

/// Lines that the up arrow brings back.
const HISTORY: usize = 1000;

/// The action of the person at the terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Typed {
    /// A line, or a pasted text.
    Line(String),
    /// Ctrl-C: the line is dropped.
    Dropped,
    /// Bytes that are no text.
    NoText,
    /// Ctrl-D, or the end of the input.
    End,
}

/// Where lines come from.
pub(super) struct Lines(Option<Editor<(), MemHistory>>);

impl Lines {
    /// Standard input, with an editor where standard output is a terminal too.
    pub(super) fn new() -> Self {
        let edited = std::io::stdout().is_terminal();
        Self(edited.then(editor).flatten())
    }

    /// Waits for the next line.
    ///
    /// # Errors
    /// What the system says when the input cannot be read.
    pub(super) fn next(&mut self) -> anyhow::Result<Typed> {
        match &mut self.0 {
            Some(editor) => edited(editor.readline(PROMPT)),
            None => plain(),
        }
    }
}

/// `None` for a terminal that cannot be used so.
fn editor() -> Option<Editor<(), MemHistory>> {
    let config = Config::builder()
        .max_history_size(HISTORY)
        .ok()?
        .auto_add_history(true)
        .build();
    terminal::keep();
    let history = MemHistory::with_config(&config);
    Editor::with_history(config, history).ok()
}

fn edited(line: rustyline::Result<String>) -> anyhow::Result<Typed> {
    Ok(match line {
        Ok(line) => Typed::Line(line),
        Err(ReadlineError::Interrupted) => Typed::Dropped,
        Err(ReadlineError::Eof) => Typed::End,
        Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => Typed::NoText,
        Err(error) => return Err(error).context("cannot read your input"),
    })
}

/// A line of standard input. Bytes that are no text are replaced: a slip of the terminal should
/// not end a chat.
fn plain() -> anyhow::Result<Typed> {
    let mut prompt = std::io::stderr().lock();
    // Nobody sees the prompt where this fails.
    let _ = prompt
        .write_all(PROMPT.as_bytes())
        .and_then(|()| prompt.flush());
    drop(prompt);
    let mut line = Vec::new();
    let read = std::io::stdin().lock().read_until(b'\n', &mut line);
    if read.context("cannot read your input")? == 0 {
        tell("");
        return Ok(Typed::End);
    }
    Ok(Typed::Line(String::from_utf8_lossy(&line).into_owned()))
}
