//! Control messages of our own scripts within the output of other programs.
//!
//! A mark is a line `RS TOKEN WORDS`: the record separator, an unguessable token, words. It may
//! follow text without a newline, so that a program's last, unfinished line is unchanged. All other
//! bytes pass through unchanged.

/// Longest words of a mark: a number or a path (4096 bytes on Linux).
const WORDS_BYTES_MAX: usize = 5000;

/// A random token for the marks of one run. It is no secret; it must only never be printed by
/// accident.
pub(crate) fn token() -> String {
    let mut bytes = [0; 16];
    let filled = getrandom::fill(&mut bytes);
    filled.expect("the system has random numbers: std's hash maps need them too");
    format!("{:032x}", u128::from_le_bytes(bytes))
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StreamPart<'a> {
    /// Output of some program.
    Text(&'a [u8]),
    /// A mark's words.
    Mark(&'a str),
}

/// Finds marks in a stream that arrives in fragments.
#[derive(Debug)]
pub(crate) struct Marks {
    start: Vec<u8>,
    held: Vec<u8>,
}

impl Marks {
    pub(crate) fn new(token: &str) -> Self {
        Self {
            start: format!("\x1e{token} ").into_bytes(),
            held: Vec::new(),
        }
    }

    /// Processes the next bytes. Holds back only a possible beginning of a mark.
    pub(crate) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(StreamPart<'_>)) {
        self.held.extend_from_slice(bytes);
        let mut from = 0;
        while let Some(at) = find(&self.held[from..], &self.start).map(|at| from + at) {
            give(&self.held[from..at], &mut each);
            from = at;
            let words = at + self.start.len();
            let Some(length) = self.held[words..].iter().position(|byte| *byte == b'\n') else {
                break;
            };
            each(StreamPart::Mark(&String::from_utf8_lossy(
                &self.held[words..words + length],
            )));
            from = words + length + 1;
        }
        let rest = &self.held[from..];
        let keep = if rest.starts_with(&self.start) && rest.len() <= WORDS_BYTES_MAX {
            rest.len()
        } else {
            may_begin(rest, &self.start)
        };
        let until = self.held.len() - keep;
        give(&self.held[from..until], &mut each);
        self.held.drain(..until);
    }

    /// Returns the bytes held back, at the end of the stream.
    pub(crate) fn finish(&mut self, mut each: impl FnMut(StreamPart<'_>)) {
        give(&std::mem::take(&mut self.held), &mut each);
    }
}

fn give(text: &[u8], each: &mut impl FnMut(StreamPart<'_>)) {
    if !text.is_empty() {
        each(StreamPart::Text(text));
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|part| part == what)
}

/// Number of last bytes that are a proper prefix of `what`.
fn may_begin(bytes: &[u8], what: &[u8]) -> usize {
    let longest = bytes.len().min(what.len() - 1);
    let fits = |n: &usize| bytes.ends_with(&what[..*n]);
    (1..=longest).rev().find(fits).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(parts: &[&[u8]]) -> (Vec<u8>, Vec<String>) {
        let (mut text, mut marks) = (Vec::new(), Vec::new());
        let mut stream = Marks::new("tok");
        let mut note = |piece: StreamPart<'_>| match piece {
            StreamPart::Text(bytes) => text.extend_from_slice(bytes),
            StreamPart::Mark(words) => marks.push(words.to_owned()),
        };
        parts.iter().for_each(|part| stream.feed(part, &mut note));
        stream.finish(note);
        (text, marks)
    }

    #[test]
    fn marks_are_told_from_text() {
        let cases: [(&[u8], &str, &[&str]); 7] = [
            (b"", "", &[]),
            (b"plain\n", "plain\n", &[]),
            (b"\x1etok ready 7\n", "", &["ready 7"]),
            (b"a\x1etok x\nb\x1etok y\nc", "abc", &["x", "y"]),
            (b"\x1etok \n", "", &[""]),
            (b"\x1etox z\n", "\x1etox z\n", &[]),
            (b"end \x1etok unfinished", "end \x1etok unfinished", &[]),
        ];
        for (input, text, marks) in cases {
            let found = pieces(&[input]);
            assert_eq!(
                (found.0.as_slice(), &found.1[..]),
                (
                    text.as_bytes(),
                    &marks.iter().map(|m| (*m).to_owned()).collect::<Vec<_>>()[..]
                )
            );
            let bytes: Vec<&[u8]> = input.chunks(1).collect();
            assert_eq!(pieces(&bytes), found, "byte by byte");
        }
    }

    #[test]
    fn text_is_not_held_back() {
        let mut stream = Marks::new("tok");
        let mut seen = Vec::new();
        stream.feed(b"name? \x1e", |piece| seen.push(format!("{piece:?}")));
        assert_eq!(seen, [format!("{:?}", StreamPart::Text(b"name? "))]);
        let endless = [b"\x1etok ".as_slice(), &[b'x'; 2 * WORDS_BYTES_MAX]].concat();
        let mut length = 0;
        stream.feed(&endless, |piece| match piece {
            StreamPart::Text(bytes) => length += bytes.len(),
            StreamPart::Mark(words) => panic!("{words}"),
        });
        assert_eq!(length, endless.len() + 1);
    }

    #[test]
    fn tokens_differ() {
        assert_ne!(token(), token());
        assert_eq!(token().len(), 32);
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(input in "[\u{1e}tok \na]{0,40}", size in 1_usize..9) {
            let parts: Vec<&[u8]> = input.as_bytes().chunks(size).collect();
            prop_assert_eq!(pieces(&parts), pieces(&[input.as_bytes()]));
        }
    }
}
