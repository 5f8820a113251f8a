//! The vocabulary: name, kind and bytes of each id.

use std::hash::{BuildHasher, RandomState};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A piece of text.
    Normal,
    /// Stands for what the vocabulary cannot spell.
    Unknown,
    /// Steers the model; never made of ordinary text.
    Control,
    /// A piece of text that is cut out before the others.
    UserDefined,
    /// Not in use by the model.
    Unused,
    /// A single byte, called `<0xNN>`.
    Byte,
    /// No token has this id.
    Hole,
}

impl Kind {
    /// The kind that the number of a GGUF's `tokenizer.ggml.token_type` means (llama.cpp,
    /// `llama_token_type`); what is not known there is handled as unused.
    pub(super) fn from_gguf(number: i32) -> Self {
        match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            6 => Self::Byte,
            _ => Self::Unused,
        }
    }

    /// Whether the token shows up in text.
    fn is_visible(self) -> bool {
        matches!(self, Self::Normal | Self::UserDefined | Self::Byte)
    }
}

/// A vocabulary's encoding of bytes as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Each byte is one printable character, as in GPT-2.
    ByteLevel,
    /// Plain text with U+2581 for a space, as in SentencePiece.
    Sentence,
    /// Plain words; a piece that continues a word begins with `##`, as in BERT.
    WordPiece,
}

/// Prefix of a piece that continues a word.
const CONTINUING: &str = "##";

/// U+2581, which SentencePiece writes for a space.
pub(super) const SPACE_MARK: char = '\u{2581}';

/// Items of unequal length in one allocation: 262,144 of Gemma's tokens as `String`s would be as
/// many allocations on the way to the first token.
#[derive(Debug, Default)]
struct Packed {
    data: Vec<u8>,
    /// End of item i; it begins at the end of item i - 1.
    ends: Vec<usize>,
}

impl Packed {
    fn get(&self, i: usize) -> Option<&[u8]> {
        let end = *self.ends.get(i)?;
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        Some(&self.data[start..end])
    }

    /// Ends the item that was appended to `data`.
    fn end_item(&mut self) {
        self.ends.push(self.data.len());
    }
}

/// All tokens, by id.
#[derive(Debug)]
pub(super) struct Vocab {
    spelling: Spelling,
    /// UTF-8, because only `str` is appended.
    texts: Packed,
    bytes: Packed,
    kinds: Vec<Kind>,
}

impl Vocab {
    pub(super) fn new(spelling: Spelling) -> Self {
        Self {
            spelling,
            texts: Packed::default(),
            bytes: Packed::default(),
            kinds: Vec::new(),
        }
    }

    /// Appends the token with the next id.
    pub(super) fn push(&mut self, text: &str, kind: Kind) {
        self.texts.data.extend_from_slice(text.as_bytes());
        self.texts.end_item();
        if kind.is_visible() {
            push_bytes(&mut self.bytes.data, text, kind, self.spelling);
        }
        self.bytes.end_item();
        self.kinds.push(kind);
    }

    /// Number of ids.
    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// The kind of `id`; ids out of range are holes.
    pub(super) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Hole)
    }

    pub(super) fn text(&self, id: u32) -> Option<&str> {
        if self.kind(id) == Kind::Hole {
            return None;
        }
        let text = self.texts.get(id as usize)?;
        Some(std::str::from_utf8(text).expect("texts are appended as str"))
    }

    /// The bytes of `id`; none for tokens that do not show up in text.
    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        if self.kind(id) == Kind::Hole {
            return None;
        }
        self.bytes.get(id as usize)
    }

    /// All tokens in order of ids.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &str, Kind)> {
        (0..self.len() as u32).filter_map(|id| Some((id, self.text(id)?, self.kind(id))))
    }
}

fn push_bytes(out: &mut Vec<u8>, text: &str, kind: Kind, spelling: Spelling) {
    match (kind, spelling) {
        (Kind::Byte, _) => match byte_token(text) {
            Some(byte) => out.push(byte),
            None => out.extend_from_slice(text.as_bytes()),
        },
        (Kind::UserDefined, Spelling::ByteLevel) => out.extend_from_slice(text.as_bytes()),
        (_, Spelling::ByteLevel) => push_byte_level(out, text),
        (_, Spelling::WordPiece) => match text.strip_prefix(CONTINUING) {
            Some(rest) => out.extend_from_slice(rest.as_bytes()),
            None => {
                out.push(b' ');
                out.extend_from_slice(text.as_bytes());
            }
        },
        (_, Spelling::Sentence) => {
            let mut rest = text;
            while let Some(at) = rest.find(SPACE_MARK) {
                out.extend_from_slice(&rest.as_bytes()[..at]);
                out.push(b' ');
                rest = &rest[at + SPACE_MARK.len_utf8()..];
            }
            out.extend_from_slice(rest.as_bytes());
        }
    }
}

/// The byte of a token called `<0xNN>`.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// The character for `byte` in a byte-level vocabulary. Printable characters of Latin-1 encode
/// themselves; the other 68 bytes are U+0100 and up, in order.
///
/// Source: `bytes_to_unicode` of OpenAI's GPT-2 encoder.
pub(super) const fn byte_level_char(byte: u8) -> char {
    let code = match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => byte as u32,
        0x00..=0x20 => 0x100 + byte as u32,
        0x7f..=0xa0 => 0x121 + (byte as u32 - 0x7f),
        0xad => 0x143,
    };
    match char::from_u32(code) {
        Some(c) => c,
        None => unreachable!(),
    }
}

/// The byte that `c` encodes, see [`byte_level_char`].
fn byte_of_char(c: char) -> Option<u8> {
    let code = c as u32;
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// A character that encodes no byte is copied.
fn push_byte_level(out: &mut Vec<u8>, text: &str) {
    for c in text.chars() {
        match byte_of_char(c) {
            Some(byte) => out.push(byte),
            None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

/// Ids by text, for the tokens that ordinary text may become.
///
/// Open addressing over ids, so that no text is stored twice. The hash has a random key, because
/// the texts are untrusted and could collide on purpose. No result depends on the order of the
/// table.
#[derive(Debug)]
pub(super) struct TextIndex {
    hasher: RandomState,
    /// Ids, or `EMPTY`; at most half full, a power of two long.
    slots: Vec<u32>,
}

const EMPTY: u32 = u32::MAX;

impl TextIndex {
    /// Indexes the tokens of the kinds that `wanted` picks; of equal texts the lowest id counts.
    pub(super) fn new(vocab: &Vocab, wanted: impl Fn(Kind) -> bool) -> Self {
        let mut index = Self {
            hasher: RandomState::new(),
            slots: vec![EMPTY; (vocab.len() * 2).next_power_of_two()],
        };
        for (id, text, kind) in vocab.iter() {
            if wanted(kind) {
                let slot = index.slot(vocab, text);
                if index.slots[slot] == EMPTY {
                    index.slots[slot] = id;
                }
            }
        }
        index
    }

    /// The id of the token called `text`.
    pub(super) fn find(&self, vocab: &Vocab, text: &str) -> Option<u32> {
        let id = self.slots[self.slot(vocab, text)];
        (id != EMPTY).then_some(id)
    }

    /// The slot of `text`, or the free slot where it belongs.
    fn slot(&self, vocab: &Vocab, text: &str) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = self.hasher.hash_one(text) as usize & mask;
        while self.slots[at] != EMPTY && vocab.text(self.slots[at]) != Some(text) {
            at = (at + 1) & mask;
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_characters_are_a_bijection() {
        let chars: std::collections::BTreeSet<char> = (0..=255).map(byte_level_char).collect();
        assert_eq!(chars.len(), 256);
        for byte in 0..=255 {
            assert_eq!(byte_of_char(byte_level_char(byte)), Some(byte));
        }
        assert_eq!((byte_level_char(b' '), byte_level_char(b'\n')), ('Ġ', 'Ċ'));
        assert_eq!(byte_of_char('中'), None);
    }

    #[test]
    fn bytes_of_every_kind() {
        for (text, kind, spelling, bytes) in [
            ("Ġa", Kind::Normal, Spelling::ByteLevel, &b" a"[..]),
            ("中", Kind::Normal, Spelling::ByteLevel, "中".as_bytes()),
            ("Ġ", Kind::UserDefined, Spelling::ByteLevel, "Ġ".as_bytes()),
            (
                "\u{2581}a\u{2581}\u{2581}",
                Kind::Normal,
                Spelling::Sentence,
                b" a  ",
            ),
            ("<0x0A>", Kind::Byte, Spelling::Sentence, b"\n"),
            ("<0x0A>", Kind::Normal, Spelling::Sentence, b"<0x0A>"),
            ("<0xZZ>", Kind::Byte, Spelling::Sentence, b"<0xZZ>"),
            ("<s>", Kind::Control, Spelling::Sentence, b""),
            ("", Kind::Normal, Spelling::Sentence, b""),
        ] {
            let mut vocab = Vocab::new(spelling);
            vocab.push("first", Kind::Normal);
            vocab.push(text, kind);
            assert_eq!(vocab.bytes(1), Some(bytes), "{text}");
            assert_eq!(vocab.text(1), Some(text));
            assert_eq!((vocab.bytes(2), vocab.kind(2)), (None, Kind::Hole));
        }
    }

    #[test]
    fn index_finds_the_lowest_id_of_the_wanted_kinds() {
        let mut vocab = Vocab::new(Spelling::Sentence);
        for (text, kind) in [
            ("a", Kind::Control),
            ("b", Kind::Normal),
            ("a", Kind::Normal),
            ("a", Kind::Normal),
            ("", Kind::Normal),
        ] {
            vocab.push(text, kind);
        }
        let index = TextIndex::new(&vocab, |k| k == Kind::Normal);
        let found = ["a", "b", "", "c"].map(|t| index.find(&vocab, t));
        assert_eq!(found, [Some(2), Some(1), Some(4), None]);
    }
}
