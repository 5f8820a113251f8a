//! A pseudo-terminal: what a person sees and types.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};

use super::PATIENCE;

pub(crate) struct Terminal {
    person: File,
    /// The side of the process, kept open so that its settings can be asked for at the end.
    process: File,
    settings: String,
    shown: Receiver<Vec<u8>>,
    /// The output since the start, without control sequences.
    screen: Vec<u8>,
    /// The same with them.
    raw: Vec<u8>,
    /// Where in a control sequence the screen is.
    sequence: EscapeSequence,
    /// How much of it was waited for.
    seen: usize,
    pub(crate) child: Child,
}

impl Terminal {
    /// Starts `command` with its input, output and diagnostics on a terminal of its own.
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::of_width(command, None)
    }

    /// As [`start`](Self::start), with this many columns.
    pub(crate) fn of_width(command: &mut Command, columns: Option<u16>) -> Self {
        let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&person).unwrap();
        unlockpt(&person).unwrap();
        // A copy, which programs do not inherit: else nobody would see this test's end.
        let person = person.try_clone().unwrap();
        let name = ptsname(&person, Vec::new()).unwrap();
        let path = OsStr::from_bytes(name.as_bytes());
        let process = File::options().read(true).write(true).open(path).unwrap();
        let side = || process.try_clone().unwrap();
        if let Some(ws_col) = columns {
            let size = Winsize {
                ws_row: 25,
                ws_col,
                ws_xpixel: 0,
                ws_ypixel: 0,
            };
            tcsetwinsize(&process, size).unwrap();
        }
        let settings = settings(&process);
        let child = command
            .stdin(side())
            .stdout(side())
            .stderr(side())
            .spawn()
            .unwrap();
        let person = File::from(person);
        let mut reader = person.try_clone().unwrap();
        let (send, shown) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = reader.read(&mut buffer) {
                if send.send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            person,
            process,
            settings,
            shown,
            screen: Vec::new(),
            raw: Vec::new(),
            sequence: EscapeSequence::Outside,
            seen: 0,
            child,
        }
    }

    /// Types `keys`; the terminal echoes them.
    pub(crate) fn type_keys(&mut self, keys: &str) {
        self.type_bytes(keys.as_bytes());
    }

    /// Types what need not be text.
    pub(crate) fn type_bytes(&mut self, bytes: &[u8]) {
        self.person.write_all(bytes).unwrap();
    }

    /// Waits until `text` is shown after what was waited for before, and returns what came up to
    /// its end. Newlines are single characters here.
    pub(crate) fn expect(&mut self, text: &str) -> String {
        let start = Instant::now();
        loop {
            let new = &self.screen[self.seen..];
            let mut places = new.windows(text.len());
            if let Some(at) = places.position(|place| place == text.as_bytes()) {
                let shown = &new[..at + text.len()];
                self.seen += shown.len();
                return String::from_utf8_lossy(shown).into_owned();
            }
            let left = PATIENCE.saturating_sub(start.elapsed());
            match self.shown.recv_timeout(left) {
                Ok(bytes) => self.show(&bytes),
                Err(_) => panic!("{text:?}, but {:?}", String::from_utf8_lossy(new)),
            }
        }
    }

    fn show(&mut self, bytes: &[u8]) {
        self.raw.extend(bytes);
        for byte in bytes {
            let next = self.sequence.next(*byte);
            let outside =
                (self.sequence, next) == (EscapeSequence::Outside, EscapeSequence::Outside);
            if outside && *byte != b'\r' {
                self.screen.push(*byte);
            }
            self.sequence = next;
        }
    }

    /// Everything shown that was not waited for, once the process has ended.
    pub(crate) fn rest(&mut self) -> String {
        // What the process wrote before its end is in the terminal's buffer; this mark is behind.
        self.process.write_all(b"\x00end").unwrap();
        let rest = self.expect("\0end");
        rest.trim_end_matches("\0end").to_owned()
    }

    /// All output to the end, with control sequences.
    pub(crate) fn raw(&mut self) -> String {
        self.rest();
        String::from_utf8_lossy(&self.raw).into_owned()
    }

    /// Fails when the process has changed the terminal, or hidden its cursor.
    pub(crate) fn assert_usable(&self) {
        assert_eq!(settings(&self.process), self.settings);
        let screen = String::from_utf8_lossy(&self.raw);
        let count = |sequence: &str| screen.matches(sequence).count();
        assert_eq!(
            count("\x1b[?25l"),
            count("\x1b[?25h"),
            "the cursor is hidden: {screen:?}"
        );
        assert_eq!(
            count("\x1b[?2004h"),
            count("\x1b[?2004l"),
            "pasted text stays marked: {screen:?}"
        );
    }
}

/// Where a byte is in a control sequence: ESC, `[`, parameters, a letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EscapeSequence {
    Outside,
    Escape,
    Parameters,
}

impl EscapeSequence {
    const fn next(self, byte: u8) -> Self {
        match (self, byte) {
            (Self::Outside, 0x1b) => Self::Escape,
            (Self::Escape, b'[') => Self::Parameters,
            (Self::Parameters, 0x20..=0x3f) => Self::Parameters,
            _ => Self::Outside,
        }
    }
}

fn settings(terminal: impl AsFd) -> String {
    let settings: Termios = tcgetattr(terminal).unwrap();
    format!("{settings:?}")
}
