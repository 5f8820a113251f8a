//! Results to stdout, everything else to stderr; neither may panic when nobody reads.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{ErrorKind, Write};

use anyhow::Context;

use crate::error::Error;

/// Prints a result and a newline to stdout.
///
/// # Errors
/// As of [`show`].
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    show(&format!("{text}\n"))
}

/// Prints a piece of a result to stdout, at once.
///
/// # Errors
/// [`Error::ReaderGone`] when the reader has gone away, such as `head`; else what the system says.
pub(crate) fn show(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Error::ReaderGone.into()),
        other => other.context("cannot write to standard output"),
    }
}

/// Prints a line to stderr. A stderr that is full or closed leaves nobody to tell, so errors are
/// dropped (`eprintln!` would panic).
pub(crate) fn tell(line: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Text of a model as a terminal may show it. Control characters could move the cursor, change
/// settings of the terminal or reach the clipboard, so all but newline and tab are replaced.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let harmful = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if text.contains(harmful) {
        text.replace('\r', "").replace(harmful, "\u{fffd}").into()
    } else {
        text.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        for (text, shown) in [
            ("plain\n\ttext ü 🙂", "plain\n\ttext ü 🙂"),
            ("a\r\nb", "a\nb"),
            ("\x1b]52;c;eA==\x07", "\u{fffd}]52;c;eA==\u{fffd}"),
            ("\u{9b}31m\x7f\0", "\u{fffd}31m\u{fffd}\u{fffd}"),
        ] {
            assert_eq!(printable(text), shown, "{text:?}");
        }
    }
}
