//! Byte-level byte-pair encoding, as GPT-2, Llama 3, Qwen and SmolLM files carry it, and pairs over
//! plain text, as those of Gemma 4 do.
//!
//! The merges are done by the `tokenizers` crate. Control and unknown tokens are left out of the
//! vocabulary that it gets, so that no text can become one.

use std::collections::HashSet;

use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Merges, Vocab as Texts};

use super::pretokenize::{PreTokenizer, Scheme};
use super::vocab::{Kind, SPACE_MARK, Vocab, byte_level_char};
use super::{Error, within};

#[derive(Debug)]
pub(super) struct ByteBpe {
    cutter: PreTokenizer,
    model: BPE,
    /// By byte: whether it has a token.
    spelt: Vec<bool>,
}

/// Merges over the characters of a line, spaces written as U+2581 (`tokenizer.ggml.model` =
/// `gemma4`).
#[derive(Debug)]
pub(super) struct TextBpe {
    model: BPE,
    /// Runs of line breaks that are one token, with their ids.
    breaks: Texts,
}

impl TextBpe {
    /// `merges`: pairs as `left right`, most important first.
    ///
    /// # Errors
    /// The errors of [`ByteBpe::new`]; [`Error::NoByteToken`] if a byte has no token, since byte
    /// tokens spell all other text.
    pub(super) fn new(vocab: &Vocab, merges: &[String]) -> Result<Self, Error> {
        let (by_text, forbidden) = usable(vocab);
        for byte in 0..=255 {
            if !by_text.contains_key(&byte_name(byte)) {
                return Err(Error::NoByteToken { byte });
            }
        }
        let pairs = merge_pairs(merges, &by_text, &forbidden)?;
        let is_breaks = |text: &str| !text.is_empty() && text.bytes().all(|b| b == b'\n');
        let breaks = by_text.iter().filter(|(text, _)| is_breaks(text));
        let breaks = breaks.map(|(text, id)| (text.clone(), *id)).collect();
        let builder = BPE::builder().vocab_and_merges(by_text, pairs);
        // The crate keeps its cache per thread and never frees it; lines seldom repeat.
        let model = builder.cache_capacity(0).byte_fallback(true).build();
        let model = model.map_err(|e| Error::Model {
            reason: e.to_string(),
        })?;
        Ok(Self { model, breaks })
    }

    /// Appends the ids of `text`. A run of line breaks that has a token is that token, as in
    /// llama.cpp.
    ///
    /// Cost: O(n log n) for the longest line, linear in the number of lines.
    pub(super) fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), Error> {
        let mut line = String::new();
        for run in text
            .as_bytes()
            .chunk_by(|a, b| (*a == b'\n') == (*b == b'\n'))
        {
            let run = std::str::from_utf8(run).expect("cut at line breaks");
            if let Some(id) = self.breaks.get(run) {
                out.push(*id);
                continue;
            }
            line.clear();
            line.extend(run.chars().map(|c| if c == ' ' { SPACE_MARK } else { c }));
            let tokens = self.model.tokenize(&line);
            let tokens = tokens.map_err(|e| Error::Encode {
                reason: e.to_string(),
            })?;
            out.extend(tokens.iter().map(|t| t.id));
        }
        Ok(())
    }
}

fn byte_name(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}

/// Tokens that text may become, and the names of those that it may not.
fn usable(vocab: &Vocab) -> (Texts, HashSet<&str>) {
    let mut by_text = Texts::with_capacity(vocab.len());
    let mut forbidden = HashSet::new();
    for (id, text, kind) in vocab.iter() {
        if matches!(kind, Kind::Control | Kind::Unknown) {
            forbidden.insert(text);
        } else {
            by_text.entry(text.to_owned()).or_insert(id);
        }
    }
    (by_text, forbidden)
}

impl ByteBpe {
    /// `merges`: pairs as `left right`, most important first.
    ///
    /// # Errors
    /// [`Error::Merge`] if a merge is not two tokens whose texts joined are a token.
    pub(super) fn new(vocab: &Vocab, merges: &[String], scheme: Scheme) -> Result<Self, Error> {
        let (by_text, forbidden) = usable(vocab);
        let spelt =
            |byte| by_text.contains_key(byte_level_char(byte).encode_utf8(&mut [0; 4]) as &str);
        let spelt = (0..=255).map(spelt).collect();
        let pairs = merge_pairs(merges, &by_text, &forbidden)?;
        let model = BPE::builder()
            .vocab_and_merges(by_text, pairs)
            // The crate keeps its cache per thread and never frees it; prompts repeat few words.
            .cache_capacity(0)
            .ignore_merges(scheme.ignore_merges)
            .build()
            .map_err(|e| Error::Model {
                reason: e.to_string(),
            })?;
        Ok(Self {
            cutter: PreTokenizer::new(scheme),
            model,
            spelt,
        })
    }

    /// Appends the ids of `text`. Bytes that the vocabulary cannot spell are left out, as in
    /// llama.cpp; only vocabularies without all 256 bytes have such.
    ///
    /// Cost: O(n log n) for the longest word, linear in the number of words.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`] after the word that makes `out` longer than `tokens_max`.
    pub(super) fn encode(
        &self,
        text: &str,
        tokens_max: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let mut word = String::new();
        for piece in self.cutter.cut(text) {
            // The crate would join what is left and right of a byte that it cannot spell.
            for part in piece.as_bytes().split(|b| !self.spelt[usize::from(*b)]) {
                word.clear();
                word.extend(part.iter().map(|b| byte_level_char(*b)));
                let tokens = self.model.tokenize(&word);
                let tokens = tokens.map_err(|e| Error::Encode {
                    reason: e.to_string(),
                })?;
                out.extend(tokens.iter().map(|t| t.id));
            }
            within(out, tokens_max)?;
        }
        Ok(())
    }
}

/// The crate trusts that merges make tokens, so that is checked here. Merges that lead to a
/// forbidden token are left out.
fn merge_pairs(
    merges: &[String],
    by_text: &Texts,
    forbidden: &HashSet<&str>,
) -> Result<Merges, Error> {
    let mut joined = String::new();
    let mut pairs = Vec::with_capacity(merges.len());
    for (index, merge) in merges.iter().enumerate() {
        let bad = || Error::Merge {
            index,
            text: merge.clone(),
        };
        let (left, right) = split_merge(merge).ok_or_else(bad)?;
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        let texts = [left, right, joined.as_str()];
        if texts.iter().all(|t| by_text.contains_key(*t)) {
            pairs.push((left.to_owned(), right.to_owned()));
        } else if !texts.iter().any(|t| forbidden.contains(t)) {
            return Err(bad());
        }
    }
    Ok(pairs)
}

/// Cuts at the first space; the first character of all does not count, it may be a space itself.
fn split_merge(merge: &str) -> Option<(&str, &str)> {
    let space = merge.bytes().skip(1).position(|b| b == b' ')? + 1;
    Some((&merge[..space], &merge[space + 1..]))
}

#[cfg(test)]
mod tests {
    use super::super::vocab::Spelling;
    use super::*;

    fn tiny(merges: &[&str], ignore_merges: bool) -> Result<ByteBpe, Error> {
        let mut vocab = Vocab::new(Spelling::ByteLevel);
        for (text, kind) in [
            ("<s>", Kind::Control),
            ("a", Kind::Normal),
            ("b", Kind::Normal),
            ("Ġ", Kind::Normal),
            ("ab", Kind::Normal),
            ("Ġa", Kind::Normal),
            ("aba", Kind::Normal),
            ("ba", Kind::Control),
        ] {
            vocab.push(text, kind);
        }
        let merges: Vec<String> = merges.iter().map(|m| (*m).to_owned()).collect();
        let mut scheme = Scheme::by_name("gpt-2").unwrap();
        scheme.ignore_merges = ignore_merges;
        ByteBpe::new(&vocab, &merges, scheme)
    }

    fn ids(bpe: &ByteBpe, text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        bpe.encode(text, usize::MAX, &mut out).unwrap();
        out
    }

    #[test]
    fn merges_in_order_of_rank() {
        let bpe = tiny(&["Ġ a", "a b"], false).unwrap();
        assert!(ids(&bpe, "").is_empty());
        assert_eq!(ids(&bpe, "ab ab"), [4, 5, 2]);
        assert_eq!(ids(&bpe, "aba"), [4, 1]);
        assert_eq!(
            ids(&bpe, "ba"),
            [2, 1],
            "a control token is never made of text"
        );
        assert_eq!(
            ids(&bpe, "aXb"),
            [1, 2],
            "bytes without a token are left out"
        );
        let whole = tiny(&["Ġ a", "a b", "b a"], true).unwrap();
        assert_eq!(ids(&whole, "aba ba"), [6, 3, 2, 1]);
    }

    /// Tokens after the 256 of bytes, from id 256 on.
    fn lines(merges: &[&str]) -> Result<TextBpe, Error> {
        let mut vocab = Vocab::new(Spelling::Sentence);
        (0..=255).for_each(|byte| vocab.push(&byte_name(byte), Kind::Byte));
        for text in ["a", "b", "\u{2581}", "ab", "\u{2581}a", "\n", "\n\n"] {
            vocab.push(text, Kind::Normal);
        }
        vocab.push("ba", Kind::Control);
        let merges: Vec<String> = merges.iter().map(|m| (*m).to_owned()).collect();
        TextBpe::new(&vocab, &merges)
    }

    #[test]
    fn lines_are_merged_and_other_characters_spelt() {
        let bpe = lines(&["\u{2581} a", "a b", "b a", "\n \n"]).unwrap();
        let ids = |text: &str| {
            let mut out = Vec::new();
            bpe.encode(text, &mut out).unwrap();
            out
        };
        assert!(ids("").is_empty());
        assert_eq!(ids("ab ab"), [259, 260, 257]);
        assert_eq!(
            ids("ba"),
            [257, 256],
            "a control token is never made of text"
        );
        assert_eq!(ids("a\n\nb"), [256, 262, 257]);
        assert_eq!(ids("\n\n\n"), [262, 261], "no token for three: merged");
        assert_eq!(ids("a\u{e9}b"), [256, 0xc3, 0xa9, 257]);
        assert_eq!(ids("<0x41>"), [0x3c, 0x30, 0x78, 0x34, 0x31, 0x3e]);
    }

    #[test]
    fn bad_merges_are_refused() {
        for (merge, index) in [
            ("ab", 0),
            ("", 0),
            ("a x", 0),
            ("b b", 0),
            (" ", 0),
            ("  ", 0),
        ] {
            let error = tiny(&[merge], false).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("merge {index} {merge:?} does not join two tokens to a third")
            );
        }
    }
}
