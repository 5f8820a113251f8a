//! Whole lines of text from processes.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use paceline_base::{Rank, lock};

/// Maximum bytes of a line; longer ones are split. A panic message or a log line has some hundred
/// bytes, a Python traceback's line rarely a thousand.
pub const LINE_TEXT_BYTES_MAX: usize = 16 << 10;

/// Assembles whole lines from chunks of a pipe.
#[derive(Debug, Default)]
pub struct LineBuffer {
    partial: Vec<u8>,
}

impl LineBuffer {
    /// Appends a chunk, and passes each completed line on without its end (newline, or carriage
    /// return and newline). Bytes that are not UTF-8 become U+FFFD. Holds at most
    /// [`LINE_TEXT_BYTES_MAX`] bytes.
    pub fn feed(&mut self, piece: &[u8], mut each: impl FnMut(&str)) {
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            let (mut text, complete) = match part {
                [text @ .., b'\n'] => (text, true),
                text => (text, false),
            };
            while self.partial.len() + text.len() > LINE_TEXT_BYTES_MAX {
                let (fits, rest) = text.split_at(LINE_TEXT_BYTES_MAX - self.partial.len());
                self.partial.extend_from_slice(fits);
                text = rest;
                let keep = self.partial.split_off(character_end(&self.partial));
                self.give(&mut each);
                self.partial = keep;
            }
            self.partial.extend_from_slice(text);
            if complete {
                self.partial.pop_if(|byte| *byte == b'\r');
                self.give(&mut each);
            }
        }
    }

    /// Passes the unfinished last line on, if any.
    pub fn finish(&mut self, each: impl FnOnce(&str)) {
        if !self.partial.is_empty() {
            self.give(each);
        }
    }

    fn give(&mut self, each: impl FnOnce(&str)) {
        each(&String::from_utf8_lossy(&self.partial));
        self.partial.clear();
    }
}

/// End of the last whole character of `bytes`. The end of `bytes` if they are not text.
fn character_end(bytes: &[u8]) -> usize {
    let start = bytes.iter().rposition(|byte| byte & 0xc0 != 0x80);
    let Some(start) = start.filter(|start| bytes.len() - start <= 3) else {
        return bytes.len();
    };
    let unfinished = std::str::from_utf8(&bytes[start..]).is_err_and(|e| e.error_len().is_none());
    if unfinished { start } else { bytes.len() }
}

/// The last lines of an output, for failure reports.
#[derive(Clone, Debug, Default)]
pub struct LineTail {
    lines: VecDeque<String>,
    bytes: usize,
}

impl LineTail {
    /// Maximum lines: a panic with the start of its backtrace, or the end of a Python traceback.
    pub const LINES_MAX: usize = 20;
    /// Maximum bytes; the newest line is always kept whole.
    pub const BYTES_MAX: usize = 4 << 10;

    /// Adds a line, and drops the oldest at the limits.
    pub fn push(&mut self, line: &str) {
        self.bytes += line.len();
        self.lines.push_back(line.to_owned());
        while self.lines.len() > Self::LINES_MAX
            || (self.bytes > Self::BYTES_MAX && self.lines.len() > 1)
        {
            let oldest = self.lines.pop_front();
            self.bytes -= oldest.map_or(0, |line| line.len());
        }
    }

    /// The lines, oldest first.
    pub fn into_lines(self) -> Vec<String> {
        self.lines.into()
    }
}

/// An output for lines of many processes, each prefixed with its rank.
///
/// Each line is one write under a lock, so lines of different threads never mix.
#[derive(Debug)]
pub struct PrefixedWriter<W> {
    output: Mutex<W>,
}

impl<W: Write> PrefixedWriter<W> {
    /// Takes `output`; nothing else should write to it.
    pub fn new(output: W) -> Self {
        Self {
            output: Mutex::new(output),
        }
    }

    /// Writes `[rank] line` and a newline, and flushes.
    pub fn line(&self, rank: Rank, line: &str) -> io::Result<()> {
        self.labelled(rank.0, line)
    }

    /// Writes `[label] line` and a newline, and flushes: for lines without a rank.
    pub fn labelled(&self, label: impl Display, line: &str) -> io::Result<()> {
        let whole = format!("[{label}] {line}\n");
        let mut output = lock(&self.output);
        output.write_all(whole.as_bytes())?;
        output.flush()
    }

    /// Returns the output.
    pub fn into_inner(self) -> W {
        let output = self.output.into_inner();
        output.unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(pieces: &[&[u8]]) -> Vec<String> {
        let mut lines = LineBuffer::default();
        let mut found = Vec::new();
        for piece in pieces {
            lines.feed(piece, |line| found.push(line.to_owned()));
        }
        lines.finish(|line| found.push(line.to_owned()));
        found
    }

    #[test]
    fn pieces_become_lines() {
        let cases: [(&[&[u8]], &[&str]); 8] = [
            (&[], &[]),
            (&[b"\n"], &[""]),
            (&[b"a"], &["a"]),
            (&[b"a\n"], &["a"]),
            (&[b"a\nb", b"c\n", b"\nd"], &["a", "bc", "", "d"]),
            (&[b"a\r", b"\nb\rc\n"], &["a", "b\rc"]),
            (&[b"\xc3", b"\xa9\n"], &["\u{e9}"]),
            (&[b"\xff\n"], &["\u{fffd}"]),
        ];
        for (pieces, expected) in cases {
            assert_eq!(lines(pieces), expected, "{pieces:?}");
        }
    }

    #[test]
    fn long_lines_are_cut_between_characters() {
        let text = format!("x{}", "\u{e9}".repeat(LINE_TEXT_BYTES_MAX));
        let found = lines(&[text.as_bytes()]);
        assert!(found.len() == 3, "{}", found.len());
        assert!(found.iter().all(|line| line.len() <= LINE_TEXT_BYTES_MAX));
        assert_eq!(found.concat(), text);
        let binary = vec![0x80; LINE_TEXT_BYTES_MAX * 2 + 1];
        assert_eq!(lines(&[&binary]).len(), 3, "no text, no boundary to find");
        let exact = vec![b'x'; LINE_TEXT_BYTES_MAX];
        assert_eq!(lines(&[&exact, b"\n"]).len(), 1);
    }

    #[test]
    fn a_tail_is_bounded() {
        let mut tail = LineTail::default();
        for i in 0..100 {
            tail.push(&i.to_string());
        }
        let kept = tail.clone().into_lines();
        assert_eq!((kept.len(), kept[0].as_str()), (LineTail::LINES_MAX, "80"));
        tail.push(&"x".repeat(LineTail::BYTES_MAX + 1));
        assert_eq!(tail.clone().into_lines().len(), 1);
        tail.push("last");
        assert_eq!(tail.into_lines(), ["last"]);
    }

    #[test]
    fn lines_of_many_threads_do_not_mix() {
        /// Accepts a byte at a time, like a slow terminal.
        struct SlowWriter(Vec<u8>);
        impl Write for SlowWriter {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.push(bytes[0]);
                std::thread::yield_now();
                Ok(1)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let output = PrefixedWriter::new(SlowWriter(Vec::new()));
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let output = &output;
                scope.spawn(move || {
                    for i in 0..50 {
                        output.line(Rank(rank), &format!("line {i}")).unwrap();
                    }
                });
            }
        });
        let text = String::from_utf8(output.into_inner().0).unwrap();
        for rank in 0..4 {
            let prefix = format!("[{rank}] ");
            let of_rank = text.lines().filter_map(|line| line.strip_prefix(&prefix));
            let expected: Vec<String> = (0..50).map(|i| format!("line {i}")).collect();
            assert_eq!(of_rank.collect::<Vec<_>>(), expected);
        }
        assert_eq!(text.lines().count(), 200);
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(text in "[ab\u{e9}\u{1f600}\n\r]{0,60}", size in 1_usize..7) {
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
            let found = lines(&pieces);
            let expected: Vec<&str> = text
                .split_inclusive('\n')
                .map(|line| match line.strip_suffix('\n') {
                    Some(line) => line.strip_suffix('\r').unwrap_or(line),
                    None => line,
                })
                .collect();
            prop_assert_eq!(found, expected);
        }
    }
}
