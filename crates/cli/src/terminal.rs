//! The terminal: its width, and its settings while a line is edited.
//!
//! The line editor uses raw mode. A signal that ends the process meanwhile restores the settings
//! saved by [`keep`], for the shell.

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Mutex;

use paceline_base::lock;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::wrap::wrapped;

/// The settings of standard input before any line was edited.
static KEPT: Mutex<Option<Termios>> = Mutex::new(None);

/// Disables bracketed paste.
const PASTE_MARKS_OFF: &[u8] = b"\x1b[?2004l";

/// Saves the terminal's settings, for [`restore`].
pub(crate) fn keep() {
    *lock(&KEPT) = tcgetattr(std::io::stdin()).ok();
}

/// Restores the terminal's settings, if a line is being edited.
pub(crate) fn restore() {
    let Some(kept) = lock(&KEPT).take() else {
        return;
    };
    let edits = |now: &Termios| !now.local_modes.contains(LocalModes::ICANON);
    if tcgetattr(std::io::stdin()).is_ok_and(|now| edits(&now)) {
        // Errors cannot be reported any more.
        let _ = std::io::stdout().write_all(PASTE_MARKS_OFF);
        let _ = std::io::stdout().flush();
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &kept);
    }
}

/// Columns of the terminal on stderr; `None` without one, or if unknown.
pub(crate) fn columns() -> Option<u16> {
    columns_of(std::io::stderr())
}

/// `text` wrapped to the terminal on stdout; as it is without one.
pub(crate) fn fitted(text: &str) -> String {
    match columns_of(std::io::stdout()) {
        Some(columns) => wrapped(text, usize::from(columns)),
        None => text.to_owned(),
    }
}

fn columns_of(stream: impl AsFd) -> Option<u16> {
    let size = tcgetwinsize(stream).ok()?;
    (size.ws_col > 0).then_some(size.ws_col)
}
