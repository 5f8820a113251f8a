//! Output: results to stdout, all else to stderr; closed outputs never panic.

use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use anyhow::Context;
use paceline_base::lock;
pub(crate) use paceline_base::{counted, printable};
use paceline_board::host::LogLines;

use crate::error::Error;
use crate::log;

/// The last lines of [`print_err`], for the dashboard of a node.
pub(crate) static LINES: LogLines = LogLines::new();

/// Held while printing to stdout, and for good once the process ends.
static RUNNING: Mutex<()> = Mutex::new(());

/// How long the end waits for an unfinished print. A terminal takes microseconds, unless it is
/// stopped (Ctrl-S).
const LAST_PIECE: Duration = Duration::from_millis(20);

/// Stops the output before the process ends during an answer. Ends the line on a terminal, so that
/// the shell's prompt gets its own.
pub(crate) fn end_line() {
    let start = Instant::now();
    let guard = loop {
        match RUNNING.try_lock() {
            Err(TryLockError::WouldBlock) if start.elapsed() < LAST_PIECE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => break other,
        }
    };
    if std::io::stderr().is_terminal() {
        print_err("");
    }
    std::mem::forget(guard);
}

pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    show(&format!("{text}\n"))
}

/// Prints a part of a result to stdout, unbuffered; on a terminal without control characters of
/// models, files and peers.
///
/// # Errors
/// [`Error::ReaderGone`] when stdout is closed, for example by `head`; else the system's error.
pub(crate) fn show(text: &str) -> anyhow::Result<()> {
    if std::io::stdout().is_terminal() {
        return show_formatted(&printable(text));
    }
    show_formatted(text)
}

/// Prints text with the program's own colours, whose foreign parts are printable already.
pub(crate) fn show_formatted(text: &str) -> anyhow::Result<()> {
    let _running = lock(&RUNNING);
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Error::ReaderGone.into()),
        other => other.context("cannot write to standard output"),
    }
}

/// Writes the picture of `--plot`.
pub(crate) fn draw(path: Option<&Path>, picture: impl FnOnce() -> String) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let written = std::fs::write(path, picture());
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// Prints a line to stderr, without control characters. Ignores errors of a full or closed stderr
/// (`eprintln!` would panic).
pub(crate) fn print_err(line: impl Display) {
    let line = line.to_string();
    let line = printable(&line);
    LINES.put(&line);
    if log::line(&line) {
        return;
    }
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
