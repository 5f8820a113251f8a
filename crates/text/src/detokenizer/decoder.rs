//! Bytes of tokens to whole characters.

use serde::{Deserialize, Serialize};

/// Turns the bytes of tokens into text without ever cutting a character.
///
/// A byte string may be cut in any way. The outputs of [`push`](Self::push) and
/// [`finish`](Self::finish) joined together equal `String::from_utf8_lossy` of the whole. Bytes
/// that are no UTF-8 become U+FFFD.
///
/// At most 3 bytes are held back: the beginning of a character of at most 4 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamDecoder {
    /// A proper beginning of a character, or empty.
    pending: Vec<u8>,
    /// Whether the next byte, if it is a space, is the one that a SentencePiece tokenizer put in
    /// front of the text.
    drop_space: bool,
}

impl StreamDecoder {
    /// A decoder for text that continues other text, such as an answer: every byte counts.
    pub fn new() -> Self {
        Self::default()
    }

    /// A decoder for text from its beginning; with `space_prefix` it drops one leading space.
    ///
    /// SentencePiece vocabularies that add a space before a text (`Tokenizer::adds_space_prefix`)
    /// would otherwise give back one space more than was put in.
    pub fn at_start(space_prefix: bool) -> Self {
        Self {
            pending: Vec::new(),
            drop_space: space_prefix,
        }
    }

    /// Adds the bytes of a token; returns the characters that are complete now.
    ///
    /// Cost: linear in `bytes`.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        let bytes = self.without_prefix(bytes);
        let mut all = std::mem::take(&mut self.pending);
        all.extend_from_slice(bytes);
        let mut text = String::with_capacity(all.len());
        let mut chunks = all.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let is_last = chunks.peek().is_none();
            if is_last && is_unfinished(chunk.invalid()) {
                self.pending = chunk.invalid().to_vec();
            } else if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        text
    }

    /// Ends the text: an unfinished character becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        if std::mem::take(&mut self.pending).is_empty() {
            String::new()
        } else {
            char::REPLACEMENT_CHARACTER.to_string()
        }
    }

    fn without_prefix<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        if bytes.is_empty() || !std::mem::take(&mut self.drop_space) {
            return bytes;
        }
        bytes.strip_prefix(b" ").unwrap_or(bytes)
    }
}

/// Whether `bytes`, which end a text, begin a character that more bytes could complete.
fn is_unfinished(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(e) if e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(pieces: &[&[u8]]) -> String {
        let mut decoder = StreamDecoder::new();
        let mut text: String = pieces.iter().map(|p| decoder.push(p)).collect();
        text.push_str(&decoder.finish());
        text
    }

    #[test]
    fn every_cut_in_two_and_three_equals_the_whole() {
        let cases: [&[u8]; 8] = [
            "aé中\u{1f468}\u{200d}\u{1f469}z".as_bytes(),
            b"",
            b"\xff\xfe\xc0\x80",
            b"\xe4\xb8",
            b"\xf0\x9f\x91x\xf0\x9f\x91\xa8",
            b"\xed\xa0\x80 \xf4\x90\x80\x80",
            b"\x80\x80a\xc3",
            b"\xe4\xe4\xb8\xe4\xb8\xad",
        ];
        for bytes in cases {
            let whole = String::from_utf8_lossy(bytes);
            for i in 0..=bytes.len() {
                for j in i..=bytes.len() {
                    let pieces = [&bytes[..i], &bytes[i..j], &bytes[j..]];
                    assert_eq!(decode(&pieces), whole, "{bytes:x?} cut at {i} and {j}");
                }
            }
        }
    }

    #[test]
    fn a_character_comes_out_with_its_last_byte() {
        let mut decoder = StreamDecoder::new();
        let out: Vec<String> = "中a".bytes().map(|b| decoder.push(&[b])).collect();
        assert_eq!(out, ["", "", "中", "a"]);
        assert_eq!(decoder.finish(), "");
    }

    #[test]
    fn one_leading_space_is_dropped_at_the_start_only() {
        for (pieces, expected) in [
            (&[" a", " b"] as &[&str], "a b"),
            (&["  a"], " a"),
            (&["", " ", "a"], "a"),
            (&["a", " b"], "a b"),
        ] {
            let mut decoder = StreamDecoder::at_start(true);
            let text: String = pieces.iter().map(|p| decoder.push(p.as_bytes())).collect();
            assert_eq!(text, expected, "{pieces:?}");
            let mut decoder = StreamDecoder::at_start(false);
            let text: String = pieces.iter().map(|p| decoder.push(p.as_bytes())).collect();
            assert_eq!(text, pieces.concat());
        }
    }

    proptest! {
        /// Bytes drawn around the borders of UTF-8, cut anywhere, the state moved at each cut.
        #[test]
        fn equals_lossy_decoding(
            pieces in prop::collection::vec(
                prop::collection::vec(
                    prop::sample::select(
                        vec![0x41u8, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc2, 0xe0, 0xed, 0xef, 0xf0, 0xf4, 0xff],
                    ),
                    0..4,
                ),
                0..12,
            ),
        ) {
            let mut decoder = StreamDecoder::new();
            let mut text = String::new();
            for piece in &pieces {
                text.push_str(&decoder.push(piece));
                prop_assert!(decoder.pending.len() <= 3);
                let state = serde_json::to_string(&decoder).unwrap();
                decoder = serde_json::from_str(&state).unwrap();
            }
            text.push_str(&decoder.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&pieces.concat()).into_owned());
        }
    }
}
