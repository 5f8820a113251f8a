//! The control channel's format: one JSON value a line, and empty lines as heartbeats.
//!
//! No JSON value is empty and compact JSON has no newline, so an empty line is always a heartbeat.
//! Depth is bounded by `serde_json` (128 levels), length by [`LINE_BYTES_MAX`].

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Garbage};

/// Longest line in bytes, without its newline: 64 MiB.
///
/// A prompt of a million tokens is 7 MB as JSON numbers, and its text about as much; the rest is
/// reserve.
pub const LINE_BYTES_MAX: usize = 64 << 20;

/// Heartbeat interval of a child: seven heartbeats in the default limit of 1.5 s of silence. So a
/// scheduling delay of a busy machine does not look like a death. Costs one byte each.
pub const BEAT: Duration = Duration::from_millis(200);

pub(crate) const BEAT_LINE: &[u8] = b"\n";

/// Most bytes of foreign text in an error: one line of a terminal.
const EXCERPT_BYTES: usize = 60;

/// Most bytes of a decoder's message in an error: it quotes the offending value in full.
const REASON_BYTES: usize = 160;

/// The line of a message, its newline included.
pub(crate) fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, Error> {
    let mut line = Bounded(Vec::new());
    match serde_json::to_writer(&mut line, message) {
        Ok(()) => {}
        Err(error) if error.is_io() => {
            return Err(Error::TooLong {
                bytes_max: LINE_BYTES_MAX,
            });
        }
        Err(error) => {
            let reason = shorten_text(&error.to_string());
            return Err(Error::Unencodable { reason });
        }
    }
    let mut line = line.0;
    assert!(!line.contains(&b'\n'), "compact JSON has no newline");
    line.push(b'\n');
    Ok(line)
}

/// The message of a line without its newline.
pub(crate) fn decode<T: DeserializeOwned>(line: &[u8]) -> Result<T, Garbage> {
    serde_json::from_slice(line).map_err(|error| Garbage::Malformed {
        reason: shorten_text(&error.to_string()),
        excerpt: shorten(line),
    })
}

/// The beginning of `bytes` in quotes, and their number if it is truncated.
fn shorten(bytes: &[u8]) -> String {
    let shown = &bytes[..bytes.len().min(EXCERPT_BYTES)];
    let quoted = format!("\"{}\"", shown.escape_ascii());
    match bytes.len() {
        0..=EXCERPT_BYTES => quoted,
        all => format!("{quoted}... ({all} bytes)"),
    }
}

fn shorten_text(text: &str) -> String {
    if text.len() <= REASON_BYTES {
        return text.to_owned();
    }
    // The end of serde's message has the expected type and the position, so both ends are kept.
    let (head, tail) = (REASON_BYTES * 2 / 3, REASON_BYTES / 3);
    let head = text.floor_char_boundary(head);
    let tail = text.ceil_char_boundary(text.len() - tail);
    format!("{} ... {}", &text[..head], &text[tail..])
}

/// A buffer that refuses to grow over [`LINE_BYTES_MAX`].
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > LINE_BYTES_MAX - self.0.len() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Assembles lines from the pieces read from a socket.
#[derive(Debug)]
pub(crate) struct Assembler {
    partial: Vec<u8>,
    bytes_max: usize,
}

impl Assembler {
    /// For lines of up to [`LINE_BYTES_MAX`].
    pub(crate) fn new() -> Self {
        Self {
            partial: Vec::new(),
            bytes_max: LINE_BYTES_MAX,
        }
    }

    /// Takes the next piece and returns every line that it completes, without its newline and
    /// without heartbeats. Buffers at most one line. Cost: one pass over `piece`.
    ///
    /// # Errors
    /// [`Garbage::TooLong`]: later line boundaries are lost.
    pub(crate) fn feed(
        &mut self,
        piece: &[u8],
        mut each: impl FnMut(Vec<u8>),
    ) -> Result<(), Garbage> {
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            let (text, complete) = match part {
                [text @ .., b'\n'] => (text, true),
                text => (text, false),
            };
            if text.len() > self.bytes_max - self.partial.len() {
                self.partial
                    .extend_from_slice(&text[..text.len().min(EXCERPT_BYTES)]);
                return Err(Garbage::TooLong {
                    bytes_max: self.bytes_max,
                    excerpt: shorten(&std::mem::take(&mut self.partial)),
                });
            }
            self.partial.extend_from_slice(text);
            if complete && !self.partial.is_empty() {
                each(std::mem::take(&mut self.partial));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum TestMessage {
        Unit,
        Text(String),
        Numbers { values: Vec<u32> },
    }

    fn lines(assembler: &mut Assembler, piece: &[u8]) -> Result<Vec<Vec<u8>>, Garbage> {
        let mut lines = Vec::new();
        assembler.feed(piece, |line| lines.push(line))?;
        Ok(lines)
    }

    #[test]
    fn messages_are_one_line_and_come_back() {
        let samples = [
            TestMessage::Unit,
            TestMessage::Text(String::new()),
            TestMessage::Text("line\nline\r\n\0 \u{2028} \u{1f600}".into()),
            TestMessage::Numbers { values: vec![0; 3] },
        ];
        for sample in samples {
            let line = encode(&sample).unwrap();
            let [text @ .., b'\n'] = line.as_slice() else {
                panic!("{line:?}");
            };
            assert!(!text.contains(&b'\n') && !text.is_empty());
            assert_eq!(decode::<TestMessage>(text), Ok(sample));
        }
        assert_eq!(
            encode(&()).unwrap(),
            b"null\n",
            "no message looks like a beat"
        );
    }

    #[test]
    fn garbage_is_named_shortly() {
        let long = format!("\"{}\"", "x".repeat(1 << 20));
        let deep = "[".repeat(100_000);
        for bytes in [
            b"".as_slice(),
            b"\xff\xfe\x00",
            b"{\"Text\":",
            b"{} {}",
            long.as_bytes(),
            deep.as_bytes(),
        ] {
            let Err(error) = decode::<TestMessage>(bytes) else {
                panic!("{}", shorten(bytes));
            };
            let text = error.to_string();
            assert!(text.len() < 500 && text.is_ascii(), "{text}");
        }
        let error = decode::<u32>(&[b'['; 61]).unwrap_err().to_string();
        assert!(error.starts_with("\"[[["), "{error}");
        assert!(
            error.contains("... (61 bytes) is not a message: "),
            "{error}"
        );
        let error = decode::<Vec<u32>>(format!("[{long}]").as_bytes()).unwrap_err();
        assert!(error.to_string().contains("expected u32"), "{error}");
    }

    #[test]
    fn unencodable_messages_are_refused() {
        let keys = BTreeMap::from([(vec![1], 1)]);
        assert!(matches!(encode(&keys), Err(Error::Unencodable { .. })));
        let text = "x".repeat(LINE_BYTES_MAX - 1);
        assert!(matches!(encode(&text), Err(Error::TooLong { .. })));
        let text = "x".repeat(LINE_BYTES_MAX - 2);
        assert_eq!(encode(&text).unwrap().len(), LINE_BYTES_MAX + 1);
    }

    #[test]
    fn lines_may_have_the_limit_and_no_byte_more() {
        let mut assembler = Assembler {
            partial: Vec::new(),
            bytes_max: 4,
        };
        assert_eq!(lines(&mut assembler, b"abcd"), Ok(vec![]));
        assert_eq!(lines(&mut assembler, b"\nabc"), Ok(vec![b"abcd".to_vec()]));
        let error = lines(&mut assembler, b"de\n").unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"abcde\" has more than 4 bytes, the most that a message may have"
        );
    }

    proptest! {
        /// The lines are the same for any cut of the stream, and heartbeats are no lines.
        #[test]
        fn cuts_do_not_matter(bytes in "[ab\n]{0,40}", size in 1_usize..7) {
            let mut assembler = Assembler::new();
            let mut found = Vec::new();
            for piece in bytes.as_bytes().chunks(size) {
                found.extend(lines(&mut assembler, piece).unwrap());
            }
            let complete = bytes.rsplit_once('\n').map_or("", |(complete, _)| complete);
            let expected: Vec<&[u8]> =
                complete.split('\n').filter(|l| !l.is_empty()).map(str::as_bytes).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
