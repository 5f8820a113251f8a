//! Input lines of a chat.
//!
//! On a terminal lines are edited: arrow keys move and recall earlier lines, and a pasted text of
//! several lines is one. The history is in memory only: chats are not written to disk.

use std::io::{BufRead, ErrorKind, IsTerminal, Write};

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Config, Editor};

use crate::output::print_err;
use crate::terminal;

/// The prompt.
const PROMPT: &str = "> ";

/// Maximum lines of history.
const HISTORY: usize = 1000;

/// The result of reading a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ChatLine {
    /// A line, or a pasted text.
    Line(String),
    /// Ctrl-C: the line is dropped.
    Dropped,
    /// Bytes that are not text.
    NoText,
    /// Ctrl-D, or the end of the input.
    End,
}

/// Source of lines: the editor, or plain standard input.
pub(super) struct LineReader(Option<Editor<(), MemHistory>>);

impl LineReader {
    /// Standard input, with an editor where standard output is a terminal too.
    pub(super) fn new() -> Self {
        let edited = std::io::stdout().is_terminal();
        Self(edited.then(editor).flatten())
    }

    /// Waits for the next line.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn next(&mut self) -> anyhow::Result<ChatLine> {
        match &mut self.0 {
            Some(editor) => edited(editor.readline(PROMPT)),
            None => plain(),
        }
    }
}

/// A line editor; `None` if the terminal does not support one.
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

fn edited(line: rustyline::Result<String>) -> anyhow::Result<ChatLine> {
    Ok(match line {
        Ok(line) => ChatLine::Line(line),
        Err(ReadlineError::Interrupted) => ChatLine::Dropped,
        Err(ReadlineError::Eof) => ChatLine::End,
        Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => ChatLine::NoText,
        Err(error) => return Err(error).context("cannot read your input"),
    })
}

/// A line of standard input. Invalid bytes are replaced: a slip should not end a chat.
fn plain() -> anyhow::Result<ChatLine> {
    let mut prompt = std::io::stderr().lock();
    // A failure only hides the prompt.
    let _ = prompt
        .write_all(PROMPT.as_bytes())
        .and_then(|()| prompt.flush());
    drop(prompt);
    let mut line = Vec::new();
    let read = std::io::stdin().lock().read_until(b'\n', &mut line);
    if read.context("cannot read your input")? == 0 {
        print_err("");
        return Ok(ChatLine::End);
    }
    Ok(ChatLine::Line(String::from_utf8_lossy(&line).into_owned()))
}
