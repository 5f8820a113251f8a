//! The terminal: its width, and its settings while a line is edited.
//!
//! The line editor puts the terminal into raw mode. A signal that ends the process meanwhile puts
//! back what [`keep`] noted, so that the shell gets the terminal as it was.

use std::io::Write;
use std::sync::Mutex;

use paceline_base::lock;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// The settings of standard input before any line was edited.
static KEPT: Mutex<Option<Termios>> = Mutex::new(None);

/// Tells the terminal that pasted text needs no marks.
const PASTE_MARKS_OFF: &[u8] = b"\x1b[?2004l";

/// Notes the terminal's settings, for [`restore`].
pub(crate) fn keep() {
    *lock(&KEPT) = tcgetattr(std::io::stdin()).ok();
}

/// Gives the terminal its settings back, if a line is being edited.
pub(crate) fn restore() {
    let Some(kept) = lock(&KEPT).take() else {
        return;
    };
    let edits = |now: &Termios| !now.local_modes.contains(LocalModes::ICANON);
    if tcgetattr(std::io::stdin()).is_ok_and(|now| edits(&now)) {
        // Nobody is left to be told where this fails.
        let _ = std::io::stdout().write_all(PASTE_MARKS_OFF);
        let _ = std::io::stdout().flush();
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &kept);
    }
}

/// Columns of the terminal that stderr is; `None` where it is none, or does not say.
pub(crate) fn columns() -> Option<u16> {
    let size = tcgetwinsize(std::io::stderr()).ok()?;
    (size.ws_col > 0).then_some(size.ws_col)
}
