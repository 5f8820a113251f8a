//! SentencePiece's byte-pair encoding by scores, as Llama and Gemma files carry it.
//!
//! Text begins as single characters. Candidates are neighbours whose texts joined are a token. The
//! pair whose token has the highest score is joined, the leftmost of equals, until no pair is left.
//! Text that is then no token is spelt in byte tokens.
//!
//! The `tokenizers` crate cannot express this. Its BPE ranks *pairs*, each with a rank of its own,
//! and both parts must be tokens. Here the rank belongs to the *joined text*. Pairs that give
//! tokens of one score are equal and taken from the left, and a part need not be a token.
//!
//! Its Unigram maximises the sum of scores, which is another answer altogether. So this is an
//! implementation of our own, compared with llama.cpp (`llm_tokenizer_spm`) on recorded ids.
//!
//! One difference is wanted: control, unknown and byte tokens are never the result of a join, so
//! that no text can become a control token. SentencePiece itself does not join them either.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Error;
use super::vocab::{Kind, SPACE_MARK, TextIndex, Vocab, byte_token};

#[derive(Debug)]
pub(super) struct Spm {
    index: TextIndex,
    /// Score of each id as an integer of the same order.
    order: Vec<i32>,
    bytes: Vec<Option<u32>>,
    unknown: Option<u32>,
    token_bytes_max: usize,
    /// Whether a space is put before a text that follows no other text.
    pub(super) space_prefix: bool,
}

/// Characters of the text that are joined so far; `len` 0 once joined to the left neighbour.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: u32,
    len: u32,
    prev: u32,
    next: u32,
}

const NONE: u32 = u32::MAX;

/// Two neighbours that could be joined; the greatest goes first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MergeCandidate {
    order: i32,
    left: Reverse<u32>,
    right: u32,
    /// Bytes of both, to recognise pairs with a part that has been merged elsewhere since.
    len: u32,
}

impl Spm {
    /// `scores`: one per token.
    pub(super) fn new(
        vocab: &Vocab,
        scores: &[f32],
        unknown: Option<u32>,
        space_prefix: bool,
    ) -> Result<Self, Error> {
        if let Some(id) = scores.iter().position(|s| s.is_nan()) {
            return Err(Error::Score { id });
        }
        let mut bytes = vec![None; 256];
        for (id, text, kind) in vocab.iter() {
            if let (Kind::Byte, Some(byte)) = (kind, byte_token(text)) {
                bytes[usize::from(byte)].get_or_insert(id);
            }
        }
        let from_text = |k| matches!(k, Kind::Normal | Kind::UserDefined | Kind::Unused);
        Ok(Self {
            index: TextIndex::new(vocab, from_text),
            order: scores.iter().map(|s| order_of(*s)).collect(),
            bytes,
            unknown,
            token_bytes_max: vocab
                .iter()
                .map(|(_, text, _)| text.len())
                .max()
                .unwrap_or(1),
            space_prefix,
        })
    }

    /// Refuses a text that exceeds `tokens_max` tokens under any merges. No token spells more than
    /// the longest, and text that is no token takes one for each byte or character.
    pub(super) fn check_length(&self, text: &str, tokens_max: usize) -> Result<(), Error> {
        if text.len() / self.token_bytes_max.max(4) > tokens_max {
            return Err(Error::TooManyTokens { tokens_max });
        }
        Ok(())
    }

    /// Appends the ids of `text`; `after_text` says whether other text is before it.
    ///
    /// Cost: O(n log n) for n characters, 16 bytes per character and 16 per possible pair.
    pub(super) fn encode(
        &self,
        vocab: &Vocab,
        text: &str,
        after_text: bool,
        out: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let mut marked = String::with_capacity(text.len() + SPACE_MARK.len_utf8());
        if self.space_prefix && !after_text {
            marked.push(SPACE_MARK);
        }
        marked.extend(text.chars().map(|c| if c == ' ' { SPACE_MARK } else { c }));
        let mut merge = Merge::new(self, vocab, &marked)?;
        merge.run();
        for symbol in merge.symbols.iter().filter(|s| s.len > 0) {
            self.push_symbol(vocab, merge.slice(symbol.start, symbol.len), out)?;
        }
        Ok(())
    }

    fn push_symbol(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) -> Result<(), Error> {
        if let Some(id) = self.index.find(vocab, text) {
            out.push(id);
            return Ok(());
        }
        for byte in text.bytes() {
            let id = self.bytes[usize::from(byte)].or(self.unknown);
            out.push(id.ok_or(Error::NoByteToken { byte })?);
        }
        Ok(())
    }
}

/// An integer that sorts like `score`, with both zeros equal.
fn order_of(score: f32) -> i32 {
    let bits = (score + 0.0).to_bits() as i32;
    if bits < 0 { bits ^ i32::MAX } else { bits }
}

struct Merge<'a> {
    spm: &'a Spm,
    vocab: &'a Vocab,
    text: &'a str,
    symbols: Vec<Symbol>,
    queue: BinaryHeap<MergeCandidate>,
}

impl<'a> Merge<'a> {
    fn new(spm: &'a Spm, vocab: &'a Vocab, text: &'a str) -> Result<Self, Error> {
        if u32::try_from(text.len()).is_err() {
            return Err(Error::TextTooLong { size: text.len() });
        }
        let symbol = |(i, (start, c)): (usize, (usize, char))| Symbol {
            start: start as u32,
            len: c.len_utf8() as u32,
            prev: (i as u32).wrapping_sub(1),
            next: i as u32 + 1,
        };
        let mut symbols: Vec<Symbol> = text.char_indices().enumerate().map(symbol).collect();
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        Ok(Self {
            spm,
            vocab,
            text,
            symbols,
            queue: BinaryHeap::new(),
        })
    }

    fn slice(&self, start: u32, len: u32) -> &'a str {
        &self.text[start as usize..(start + len) as usize]
    }

    fn run(&mut self) {
        for right in 1..self.symbols.len() as u32 {
            self.offer(right - 1, right);
        }
        while let Some(pair) = self.queue.pop() {
            let (left, right) = (pair.left.0, pair.right);
            let (l, r) = (self.symbols[left as usize], self.symbols[right as usize]);
            if l.len == 0 || r.len == 0 || l.len + r.len != pair.len {
                continue;
            }
            self.symbols[left as usize].len = pair.len;
            self.symbols[left as usize].next = r.next;
            self.symbols[right as usize].len = 0;
            if r.next != NONE {
                self.symbols[r.next as usize].prev = left;
            }
            self.offer(l.prev, left);
            self.offer(left, r.next);
        }
    }

    /// Queues the pair if it is a token.
    fn offer(&mut self, left: u32, right: u32) {
        if left == NONE || right == NONE {
            return;
        }
        let (l, r) = (self.symbols[left as usize], self.symbols[right as usize]);
        let len = l.len + r.len;
        if let Some(id) = self.spm.index.find(self.vocab, self.slice(l.start, len)) {
            self.queue.push(MergeCandidate {
                order: self.spm.order[id as usize],
                left: Reverse(left),
                right,
                len,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocab::Spelling;
    use super::*;

    /// Tokens with scores; the byte tokens of `b`, `c` and `\n`.
    fn tiny(space_prefix: bool) -> (Vocab, Spm) {
        let mut vocab = Vocab::new(Spelling::Sentence);
        let tokens = [
            ("<unk>", Kind::Unknown, 0.0),
            ("<s>", Kind::Control, 0.0),
            ("<0x62>", Kind::Byte, 0.0),
            ("<0x63>", Kind::Byte, 0.0),
            ("a", Kind::Normal, -9.0),
            ("ab", Kind::Normal, -2.0),
            ("ba", Kind::Normal, -1.0),
            ("aba", Kind::Normal, -3.0),
            ("\u{2581}", Kind::Normal, -4.0),
            ("\u{2581}a", Kind::Normal, -5.0),
            ("<", Kind::Normal, -6.0),
            ("<s", Kind::Normal, -7.0),
            ("s>", Kind::Normal, -8.0),
            ("aa", Kind::Normal, -1.0),
        ];
        for (text, kind, _) in tokens {
            vocab.push(text, kind);
        }
        let scores = tokens.map(|t| t.2);
        let spm = Spm::new(&vocab, &scores, Some(0), space_prefix).unwrap();
        (vocab, spm)
    }

    fn ids(space_prefix: bool, text: &str, after_text: bool) -> Vec<u32> {
        let (vocab, spm) = tiny(space_prefix);
        let mut out = Vec::new();
        spm.encode(&vocab, text, after_text, &mut out).unwrap();
        out
    }

    #[test]
    fn joins_by_score_then_from_the_left() {
        for (text, expected) in [
            ("", &[] as &[u32]),
            ("a", &[4]),
            ("ab", &[5]),
            ("aba", &[4 + 3]), // ba first (-1), then a+ba = aba
            ("b", &[2]),
            ("bc", &[2, 3]),
            ("x", &[0]),
            ("aaa", &[13, 4]), // equal scores: the left pair
            ("aaaa", &[13, 13]),
            (" a", &[9]),
            ("<s>", &[11, 0]), // never the control token, although "<s" and ">" join to its text
        ] {
            assert_eq!(ids(false, text, false), expected, "{text:?}");
        }
    }

    #[test]
    fn the_space_prefix_goes_before_the_first_text() {
        assert_eq!(ids(true, "a", false), [9]);
        assert_eq!(ids(true, "a", true), [4]);
        assert_eq!(ids(true, " a", false), [8, 9]);
    }

    #[test]
    fn order_follows_the_scores() {
        let scores = [
            f32::NEG_INFINITY,
            -1e9,
            -1.0,
            -1e-9,
            0.0,
            1e-9,
            2.0,
            f32::INFINITY,
        ];
        assert!(scores.windows(2).all(|w| order_of(w[0]) < order_of(w[1])));
        assert_eq!(order_of(-0.0), order_of(0.0));
    }

    #[test]
    fn missing_byte_tokens_and_bad_scores_are_errors() {
        let (vocab, mut spm) = tiny(false);
        spm.unknown = None;
        let error = spm.encode(&vocab, "x", false, &mut Vec::new()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the vocabulary has no token for byte 0x78"
        );
        let error = Spm::new(&vocab, &[0.0, f32::NAN], None, false).unwrap_err();
        assert_eq!(error.to_string(), "score of token 1 is not a number");
    }
}
