//! The rewriting steps of a `tokenizer.json`: its normaliser and its pre-tokenizer, with bounds.
//!
//! The file is untrusted. Thirty rules may each double a text, which ends the program. One pattern
//! may try 2^20 ways at each letter, which keeps a thread for ever. So each step runs by itself,
//! between checks:
//!
//! - A normaliser's step may not make a text longer than [`MAX_GROWTH`] times the original and
//!   [`GROWTH_SLACK`]. A replacement counts its matches before it makes the text.
//! - The pre-tokenizers that make a text longer do so at most [`MAX_SPLIT_GROWTH`] times together.
//! - Patterns of the file search with a deadline.

use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use fancy_regex::Regex;
use serde::Serialize;
use tokenizers::normalizers::{NormalizerWrapper, Precompiled};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::tokenizer::pattern::{Invert, Pattern};
use tokenizers::tokenizer::{Normalizer as _, PreTokenizer as _};
use tokenizers::tokenizer::{PreTokenizedString, SplitDelimiterBehavior};
use tokenizers::{ModelWrapper, NormalizedString, Offsets, Result};

/// Longest normalised text, in lengths of the original. A space that becomes "▁" takes three
/// bytes for one.
const MAX_GROWTH: usize = 8;

/// Bytes by which any text may grow besides.
const GROWTH_SLACK: usize = 64 << 10;

/// Largest product of the growths of pre-tokenizers: ByteLevel has 2, Metaspace 4, and real
/// files have one of the two.
const MAX_SPLIT_GROWTH: usize = 16;

/// Steps of one kind in a file. Real files have up to ten.
const MAX_STEPS: usize = 64;

/// Longest text, in bytes, of a rule of a precompiled map and of an affix of a model. Real maps
/// have up to 33.
const MAX_RULE_BYTES: usize = 64;

/// Letters of a word that WordPiece looks up, at a cost of their square: real files have 100.
const MAX_WORD_CHARS: usize = 1000;

/// Part of a text, in bytes, that is normalised to measure its growth. It takes about a megabyte:
/// [`MAX_RULE_BYTES`] for a letter, and 17 bytes of alignment for each of these.
const SAMPLE_BYTES: usize = 1 << 10;

/// Time of one encoding: patterns of real files read some megabytes a second, on a busy core too.
const MIN_TIME: Duration = Duration::from_secs(10);
const TIME_PER_BYTE: Duration = Duration::from_micros(10);

/// The time by which a text of `bytes` has to be encoded.
pub(super) fn deadline(bytes: usize) -> Instant {
    Instant::now() + MIN_TIME + TIME_PER_BYTE * u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// # Errors
/// The deadline has passed.
pub(super) fn check(deadline: Instant) -> Result<()> {
    if Instant::now() > deadline {
        return Err("tokenizer.json needs too much time for this text".into());
    }
    Ok(())
}

/// Refuses a model with parameters that cost time or memory beyond the text's length.
///
/// # Errors
/// The parameter and its limit.
pub(super) fn check_model(model: &ModelWrapper) -> std::result::Result<(), String> {
    let affixes = match model {
        ModelWrapper::BPE(model) => [
            model.continuing_subword_prefix.as_deref(),
            model.end_of_word_suffix.as_deref(),
        ],
        ModelWrapper::WordPiece(model) => {
            within(
                "max_input_chars_per_word",
                model.max_input_chars_per_word,
                MAX_WORD_CHARS,
            )?;
            [Some(model.continuing_subword_prefix.as_str()), None]
        }
        _ => [None, None],
    };
    let longest = affixes.into_iter().flatten().map(str::len).max();
    within(
        "bytes of a subword's affix",
        longest.unwrap_or(0),
        MAX_RULE_BYTES,
    )
}

fn within(what: &str, value: usize, limit: usize) -> std::result::Result<(), String> {
    if value > limit {
        return Err(format!("{what}: {value}, at most {limit} are read"));
    }
    Ok(())
}

/// Normaliser and pre-tokenizer of a file, as lists of steps.
pub(super) struct Steps {
    normalizers: Vec<Rewrite>,
    pre_tokenizers: Vec<SplitStep>,
}

impl Steps {
    /// # Errors
    /// A step that could grow a text without bound, or too many steps.
    pub(super) fn new(inner: &tokenizers::Tokenizer) -> std::result::Result<Self, String> {
        let mut normalizers = Vec::new();
        if let Some(normalizer) = inner.get_normalizer() {
            flatten_normalizer(normalizer, &mut normalizers);
        }
        let mut pre_tokenizers = Vec::new();
        if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
            flatten_pre_tokenizer(pre_tokenizer, &mut pre_tokenizers);
        }
        within("normalizers", normalizers.len(), MAX_STEPS)?;
        within("pre_tokenizers", pre_tokenizers.len(), MAX_STEPS)?;
        let growths = pre_tokenizers.iter().map(|step| split_growth(step));
        let growth = growths.fold(1, usize::saturating_mul);
        within("growth by pre_tokenizers", growth, MAX_SPLIT_GROWTH)?;
        Ok(Self {
            normalizers: collect(&normalizers, Rewrite::new)?,
            pre_tokenizers: collect(&pre_tokenizers, SplitStep::new)?,
        })
    }

    /// Runs all steps over the parts of `text` that have no tokens yet.
    pub(super) fn run(&self, text: &mut PreTokenizedString, deadline: Instant) -> Result<()> {
        text.normalize(|part| {
            let limit = part.get_original().len().saturating_mul(MAX_GROWTH) + GROWTH_SLACK;
            let mut steps = self.normalizers.iter();
            steps.try_for_each(|step| step.run(part, limit, deadline))
        })?;
        let mut steps = self.pre_tokenizers.iter();
        steps.try_for_each(|step| step.run(text, deadline))
    }
}

fn collect<'a, A, B>(
    items: &[&'a A],
    make: impl Fn(&'a A) -> std::result::Result<B, String>,
) -> std::result::Result<Vec<B>, String> {
    items.iter().map(|item| make(item)).collect()
}

fn flatten_normalizer<'a>(step: &'a NormalizerWrapper, out: &mut Vec<&'a NormalizerWrapper>) {
    match step {
        NormalizerWrapper::Sequence(steps) => {
            for step in steps.as_ref() {
                flatten_normalizer(step, out);
            }
        }
        step => out.push(step),
    }
}

fn flatten_pre_tokenizer<'a>(
    step: &'a PreTokenizerWrapper,
    out: &mut Vec<&'a PreTokenizerWrapper>,
) {
    match step {
        PreTokenizerWrapper::Sequence(steps) => {
            for step in steps.as_ref() {
                flatten_pre_tokenizer(step, out);
            }
        }
        step => out.push(step),
    }
}

/// By how much a pre-tokenizer lengthens a text at most: a byte becomes a letter of two bytes, a
/// space one of four.
fn split_growth(step: &PreTokenizerWrapper) -> usize {
    match step {
        PreTokenizerWrapper::ByteLevel(_) => 2,
        PreTokenizerWrapper::Metaspace(_) => char::MAX.len_utf8(),
        _ => 1,
    }
}

/// A step of a normaliser.
enum Rewrite {
    Replace {
        regex: Regex,
        content: String,
    },
    Other {
        step: NormalizerWrapper,
        growth: Growth,
    },
}

/// Upper bound of the bytes that a step makes.
#[derive(Clone, Copy)]
enum Growth {
    /// Times the text's bytes.
    Times(usize),
    /// Bytes for each letter.
    Letter(usize),
    /// Bytes more.
    Plus(usize),
}

impl Growth {
    fn bytes(self, text: &str) -> usize {
        match self {
            Self::Times(factor) => text.len().saturating_mul(factor),
            Self::Letter(bytes) => text.chars().count().saturating_mul(bytes.max(4)),
            Self::Plus(bytes) => text.len().saturating_add(bytes),
        }
    }
}

impl Rewrite {
    fn new(step: &NormalizerWrapper) -> std::result::Result<Self, String> {
        // The factors of normal forms: Unicode Standard Annex 15, table of maximum expansions.
        let growth = match step {
            NormalizerWrapper::Replace(replace) => {
                let content = replace.content.clone();
                let regex = regex_of(replace)?;
                return Ok(Self::Replace { regex, content });
            }
            NormalizerWrapper::NFC(_) | NormalizerWrapper::NFD(_) => Growth::Times(3),
            NormalizerWrapper::NFKC(_) | NormalizerWrapper::NFKD(_) => Growth::Times(11),
            NormalizerWrapper::BertNormalizer(_) => Growth::Times(6),
            NormalizerWrapper::Lowercase(_) | NormalizerWrapper::ByteLevel(_) => Growth::Times(2),
            NormalizerWrapper::Precompiled(map) => Growth::Letter(longest_rule(map)?),
            NormalizerWrapper::Prepend(prepend) => Growth::Plus(prepend.prepend.len()),
            NormalizerWrapper::StripNormalizer(_)
            | NormalizerWrapper::StripAccents(_)
            | NormalizerWrapper::Nmt(_)
            | NormalizerWrapper::Sequence(_) => Growth::Times(1),
        };
        let step = step.clone();
        Ok(Self::Other { step, growth })
    }

    fn run(&self, text: &mut NormalizedString, limit: usize, deadline: Instant) -> Result<()> {
        check(deadline)?;
        match self {
            Self::Replace { regex, content } => {
                let room = limit.saturating_sub(text.get().len());
                let search = Search {
                    regex,
                    matches_max: room / content.len().max(1),
                    deadline,
                };
                text.replace(search, content)
            }
            Self::Other { step, growth } => {
                match growth {
                    _ if growth.bytes(text.get()) <= limit => {}
                    Growth::Plus(_) => return Err(GROWS.into()),
                    _ => measure(step, text.get(), limit, deadline)?,
                }
                step.normalize(text)
            }
        }
    }
}

/// Normalises `text` in parts, which takes little memory for any step.
///
/// # Errors
/// The parts together are longer than `limit`.
fn measure(
    step: &NormalizerWrapper,
    mut text: &str,
    limit: usize,
    deadline: Instant,
) -> Result<()> {
    let mut bytes = 0;
    while !text.is_empty() {
        let (part, rest) = text.split_at(text.floor_char_boundary(SAMPLE_BYTES));
        let mut part = NormalizedString::from(part);
        step.normalize(&mut part)?;
        bytes += part.get().len();
        if bytes > limit {
            return Err(GROWS.into());
        }
        check(deadline)?;
        text = rest;
    }
    Ok(())
}

const GROWS: &str = "the normalizer of tokenizer.json makes this text more than 8 times as long";

/// The pattern of a rule, compiled as the crate compiles it.
fn regex_of(rule: &impl Serialize) -> std::result::Result<Regex, String> {
    let rule = serde_json::to_value(rule).map_err(|e| e.to_string())?;
    let pattern = &rule["pattern"];
    let pattern = match (pattern["String"].as_str(), pattern["Regex"].as_str()) {
        (Some(text), _) => fancy_regex::escape(text).into_owned(),
        (None, Some(pattern)) => pattern.to_owned(),
        (None, None) => return Err(format!("a rule without a pattern: {pattern}")),
    };
    Regex::new(&pattern).map_err(|e| e.to_string())
}

/// The bytes of the longest text in a precompiled map: texts end with a byte 0, behind a table
/// whose length comes first.
fn longest_rule(map: &Precompiled) -> std::result::Result<usize, String> {
    let value = serde_json::to_value(map).map_err(|e| e.to_string())?;
    let map = value["precompiled_charsmap"].as_str().unwrap_or_default();
    let map = BASE64_STANDARD.decode(map).map_err(|e| e.to_string())?;
    let (table, rest) = map.split_first_chunk().unwrap_or((&[0; 4], &[]));
    let texts = rest.get(u32::from_le_bytes(*table) as usize..);
    let texts = texts.unwrap_or_default().split(|byte| *byte == 0);
    let longest = texts.map(<[u8]>::len).max().unwrap_or(0);
    within("bytes of a precompiled rule", longest, MAX_RULE_BYTES)?;
    Ok(longest)
}

/// A step of a pre-tokenizer.
enum SplitStep {
    Pattern {
        regex: Regex,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    },
    Other(PreTokenizerWrapper),
}

impl SplitStep {
    fn new(step: &PreTokenizerWrapper) -> std::result::Result<Self, String> {
        let PreTokenizerWrapper::Split(split) = step else {
            return Ok(Self::Other(step.clone()));
        };
        Ok(Self::Pattern {
            regex: regex_of(split)?,
            behavior: split.behavior,
            invert: split.invert,
        })
    }

    fn run(&self, text: &mut PreTokenizedString, deadline: Instant) -> Result<()> {
        check(deadline)?;
        match self {
            Self::Other(step) => step.pre_tokenize(text),
            Self::Pattern {
                regex,
                behavior,
                invert,
            } => text.split(|_, part| {
                let search = Search {
                    regex,
                    matches_max: usize::MAX,
                    deadline,
                };
                match invert {
                    true => part.split(Invert(search), *behavior),
                    false => part.split(search, *behavior),
                }
            }),
        }
    }
}

/// A pattern that searches with bounds.
struct Search<'a> {
    regex: &'a Regex,
    matches_max: usize,
    deadline: Instant,
}

impl Pattern for Search<'_> {
    /// The same parts as the crate's patterns give, but a search that ends early is an error.
    fn find_matches(&self, inside: &str) -> Result<Vec<(Offsets, bool)>> {
        if inside.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let mut parts = Vec::new();
        let mut end = 0;
        for (count, found) in self.regex.find_iter(inside).enumerate() {
            let found = found?;
            check(self.deadline)?;
            if count >= self.matches_max {
                return Err(GROWS.into());
            }
            if end != found.start() {
                parts.push(((end, found.start()), false));
            }
            parts.push(((found.start(), found.end()), true));
            end = found.end();
        }
        if end != inside.len() {
            parts.push(((end, inside.len()), false));
        }
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn rewrite(step: &Value) -> Rewrite {
        Rewrite::new(&serde_json::from_value(step.clone()).unwrap()).unwrap()
    }

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    /// The text of `length` letters after a step, or its error.
    fn run(step: &Value, letter: &str, length: usize) -> std::result::Result<String, String> {
        let mut text = NormalizedString::from(letter.repeat(length));
        let limit = text.get().len() * MAX_GROWTH + GROWTH_SLACK;
        let result = rewrite(step).run(&mut text, limit, deadline(length));
        result
            .map(|()| text.get().to_owned())
            .map_err(|e| e.to_string())
    }

    #[test]
    fn a_step_grows_a_text_up_to_its_bound() {
        let literal = replace(json!({"String": "a"}), "0123456");
        assert_eq!(run(&literal, "a", 100_000).unwrap().len(), 700_000);
        let literal = replace(json!({"String": "a"}), "0123456789");
        assert_eq!(run(&literal, "a", 100_000).unwrap_err(), GROWS);
        let empty = replace(json!({"Regex": ""}), "0123456789");
        assert_eq!(run(&empty, "a", 100_000).unwrap_err(), GROWS);
        let long = json!({"type": "Prepend", "prepend": "p".repeat(70_000)});
        assert_eq!(run(&long, "a", 1).unwrap_err(), GROWS);
        // NFKD writes the last letter, of 3 bytes, with 33.
        let form = json!({"type": "NFKD"});
        assert_eq!(run(&form, "a", 100_000).unwrap().len(), 100_000);
        assert_eq!(run(&form, "\u{fdfa}", 100_000).unwrap_err(), GROWS);
    }

    #[test]
    fn a_map_with_a_long_rule_is_refused() {
        for (length, is_read) in [(MAX_RULE_BYTES, true), (MAX_RULE_BYTES + 1, false)] {
            let texts = format!("ab\0{}\0", "c".repeat(length));
            let map = [&[4, 0, 0, 0][..], &[0; 4], texts.as_bytes()].concat();
            let map = json!({"type": "Precompiled",
                             "precompiled_charsmap": BASE64_STANDARD.encode(map)});
            let step: NormalizerWrapper = serde_json::from_value(map).unwrap();
            assert_eq!(Rewrite::new(&step).is_ok(), is_read, "{length}");
        }
    }

    #[test]
    fn a_pattern_that_tries_for_ever_ends_by_its_deadline() {
        // At each letter 2^18 ways fail before one letter is a match. Without a look ahead in each
        // way, `a|a` would be one.
        let split = json!({"type": "Split", "behavior": "Isolated", "invert": false,
                           "pattern": {"Regex": "(?:a(?!b)|a(?!c)){18}(?=b)|a"}});
        let split = SplitStep::new(&serde_json::from_value(split).unwrap()).unwrap();
        let mut text = PreTokenizedString::from("a".repeat(100_000));
        let error = split.run(&mut text, Instant::now() + Duration::from_millis(20));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("too much time"), "{error}");
    }
}
