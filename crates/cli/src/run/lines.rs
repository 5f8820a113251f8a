//! Input lines of a chat.
//!
//! On a terminal lines are edited: arrow keys move and recall earlier lines, and a pasted text of
//! several lines is one. The user's lines are kept in `chat-history` of Paceline's folder, a JSON
//! string each, for this user alone; answers are not written to disk.

use std::fs::OpenOptions;
use std::io::{BufRead, ErrorKind, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::history::{History as _, MemHistory};
use rustyline::{Config, Editor};

use crate::output::print_err;
use crate::terminal;

const PROMPT: &str = "> ";

/// Maximum lines of history.
const HISTORY: usize = 1000;

/// Maximum history file that is read; a longer one begins anew. A thousand pasted pages have less.
const HISTORY_BYTES_MAX: u64 = 4 << 20;

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
pub(super) struct LineReader {
    editor: Option<Editor<(), MemHistory>>,
    /// The history file, unless lines are not to be kept.
    history: Option<PathBuf>,
    folder: Option<PathBuf>,
}

impl LineReader {
    /// Standard input, with an editor where standard output is a terminal too. `folder` has the
    /// history file.
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        let edited = std::io::stdout().is_terminal();
        let mut reader = Self {
            editor: edited.then(editor).flatten(),
            history: None,
            folder,
        };
        reader.keep(true);
        if let (Some(editor), Some(path)) = (&mut reader.editor, &reader.history) {
            for line in earlier(path) {
                // A repeated line is no error.
                let _ = editor.history_mut().add_owned(line);
            }
        }
        reader
    }

    /// Sets whether lines go to the history file.
    pub(super) fn keep(&mut self, on: bool) {
        let folder = self.folder.as_ref().filter(|_| on);
        self.history = folder.map(|folder| folder.join("chat-history"));
    }

    pub(super) fn next(&mut self) -> anyhow::Result<ChatLine> {
        let Some(editor) = &mut self.editor else {
            return plain();
        };
        let line = edited(editor.readline(PROMPT))?;
        if let (ChatLine::Line(text), Some(path)) = (&line, &self.history)
            && !text.trim().is_empty()
        {
            // A chat does not end because its folder is read-only.
            let _ = append(path, text);
        }
        Ok(line)
    }
}

/// Lines of earlier chats, the oldest first.
fn earlier(path: &Path) -> Vec<String> {
    let length = std::fs::metadata(path).map_or(0, |facts| facts.len());
    if length > HISTORY_BYTES_MAX {
        let _ = std::fs::remove_file(path); // it begins anew
        return Vec::new();
    }
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    let lines: Vec<String> = lines.collect();
    lines[lines.len().saturating_sub(HISTORY)..].to_vec()
}

/// Appends a line, which may be a pasted text of several.
fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    let options = options.append(true).create(true).mode(0o600);
    let text = serde_json::to_string(line).map_err(std::io::Error::other)?;
    options
        .open(path)?
        .write_all(format!("{text}\n").as_bytes())
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn lines_come_back_in_the_next_chat() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chat-history");
        assert!(earlier(&path).is_empty());
        for line in ["hi", "two\nlines"] {
            append(&path, line).unwrap();
        }
        std::fs::metadata(&path)
            .map(|facts| assert_eq!(facts.permissions().mode() & 0o777, 0o600))
            .unwrap();
        assert_eq!(earlier(&path), ["hi", "two\nlines"]);
    }
}
