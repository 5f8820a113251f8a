//! From text to the terms that search compares.
//!
//! A *word* is a stretch of text as people read it, `all_sum`, `26.2` or `full-mesh`. Its *terms*
//! are what it is found by: the whole, its pieces, and of English words the stem. So `cables` finds
//! `cable`, and `10 GbE` finds the tag `10gbe`.

use std::ops::Range;
use std::sync::LazyLock;

use frostem::{Algorithm, Stemmer};

/// Words that say nothing about what is looked for.
const STOP_WORDS: [&str; 116] = [
    "a", "about", "actually", "all", "also", "am", "an", "and", "any", "are", "as", "at", "be",
    "been", "best", "between", "but", "by", "can", "could", "did", "do", "does", "doing", "fit",
    "for", "from", "get", "give", "given", "had", "has", "have", "here", "how", "i", "if", "in",
    "into", "is", "it", "its", "kind", "like", "look", "looks", "many", "may", "me", "more",
    "most", "much", "my", "no", "not", "of", "on", "one", "only", "or", "other", "our", "over",
    "please", "real", "say", "several", "should", "show", "so", "some", "such", "tell", "than",
    "that", "the", "their", "them", "then", "there", "these", "they", "thing", "this", "those",
    "to", "too", "under", "up", "upon", "use", "used", "using", "was", "we", "were", "what",
    "when", "where", "whether", "which", "while", "who", "whose", "why", "will", "with", "within",
    "without", "work", "working", "works", "would", "yet", "you", "your",
];

/// Shortest run of letters next to digits that is a term of its own. `gbe` of `10gbe` is one. `m`
/// of `m3` is not, as it would match every `m`.
const LETTERS_MIN: usize = 3;

/// Synonymous stems, with the canonical one. Limited to those that questions about these findings
/// needed.
const SAME: [(&str, &str); 8] = [
    ("expens", "cost"),
    ("finetun", "train"),
    ("gbps", "gbit"),
    ("price", "cost"),
    ("speed", "fast"),
    ("tb5", "thunderbolt"),
    ("tune", "train"),
    ("watch", "monitor"),
];

static ENGLISH: LazyLock<Stemmer> = LazyLock::new(|| Stemmer::new(Algorithm::English));

/// A word of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Word {
    /// Bytes of the text.
    pub(crate) range: Range<usize>,
    /// Lower case, without joiners at its ends.
    pub(crate) plain: String,
    /// The terms that match it; never empty. The whole comes first.
    pub(crate) terms: Vec<String>,
}

/// The words of `text` in order, without stop words. Cost: linear.
pub(crate) fn words(text: &str) -> Vec<Word> {
    let mut found = Vec::new();
    let mut chars = text.char_indices().peekable();
    while let Some((start, c)) = chars.next() {
        if !c.is_alphanumeric() {
            continue;
        }
        let mut end = start + c.len_utf8();
        let mut last = c;
        while let Some(&(at, c)) = chars.peek() {
            let after = text[at + c.len_utf8()..].chars().next();
            if !c.is_alphanumeric() && !joins(last, c, after) {
                break;
            }
            end = at + c.len_utf8();
            last = c;
            chars.next();
        }
        found.extend(word(text, start..end));
    }
    found
}

/// Whether `c`, neither letter nor digit, continues a word before `after`.
fn joins(before: char, c: char, after: Option<char>) -> bool {
    let Some(after) = after else { return false };
    match c {
        ',' => before.is_ascii_digit() && after.is_ascii_digit(),
        '_' | '-' | '.' | '\'' => before.is_alphanumeric() && after.is_alphanumeric(),
        _ => false,
    }
}

fn word(text: &str, range: Range<usize>) -> Option<Word> {
    let plain = normal(&text[range.clone()]);
    if STOP_WORDS.binary_search(&plain.as_str()).is_ok() {
        return None;
    }
    let terms = terms(&plain);
    Some(Word {
        range,
        plain,
        terms,
    })
}

/// Lower case; `5,600` is 5600; both signs for micro are the letter u; `Mac's` is Mac.
fn normal(text: &str) -> String {
    let lower: String = text
        .chars()
        .filter(|c| *c != ',')
        .flat_map(char::to_lowercase)
        .map(|c| if matches!(c, 'µ' | 'μ') { 'u' } else { c })
        .collect();
    match lower.strip_suffix("'s") {
        Some(owner) => owner.to_owned(),
        None => lower,
    }
}

fn terms(plain: &str) -> Vec<String> {
    let mut terms = vec![stem(plain)];
    let mut add = |term: String| {
        if !terms.contains(&term) {
            terms.push(term);
        }
    };
    let number = plain.chars().all(|c| c.is_ascii_digit() || c == '.');
    let one_piece = plain.chars().all(char::is_alphabetic);
    if !number && !one_piece {
        for piece in plain.split(|c: char| !c.is_alphanumeric()) {
            if !piece.is_empty() && STOP_WORDS.binary_search(&piece).is_err() {
                add(stem(piece));
                letters_and_digits(piece).map(stem).for_each(&mut add);
            }
        }
    }
    let same = |term: &String| SAME.iter().find(|(stem, _)| stem == term);
    let others: Vec<&str> = terms
        .iter()
        .filter_map(same)
        .map(|(_, other)| *other)
        .collect();
    terms.extend(others.into_iter().map(str::to_owned));
    terms
}

/// `10gbe` gives `10` and `gbe`; nothing where the letters are too few.
fn letters_and_digits(piece: &str) -> impl Iterator<Item = &str> {
    let digit = |c: char| c.is_ascii_digit();
    let first_is_digit = piece.starts_with(digit);
    let border = piece
        .find(|c: char| digit(c) != first_is_digit)
        .unwrap_or(piece.len());
    let (head, tail) = piece.split_at(border);
    let letters = if first_is_digit { tail } else { head };
    let digits = if first_is_digit { head } else { tail };
    let split = letters.chars().count() >= LETTERS_MIN
        && letters.chars().all(char::is_alphabetic)
        && !digits.is_empty()
        && digits.chars().all(digit);
    split.then_some([head, tail]).into_iter().flatten()
}

/// The stem of an English word; of anything else the thing itself.
fn stem(word: &str) -> String {
    if word.chars().all(|c| c.is_ascii_lowercase()) {
        ENGLISH.stem(word).into_owned()
    } else {
        word.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_terms(text: &str) -> Vec<String> {
        words(text)
            .into_iter()
            .flat_map(|word| word.terms)
            .collect()
    }

    #[test]
    fn stop_words_are_sorted() {
        assert!(STOP_WORDS.is_sorted());
    }

    #[test]
    fn words_are_what_people_read() {
        for (text, plain) in [
            ("", &[][..]),
            ("the of And", &[]),
            ("-- ... ,", &[]),
            ("RDMA Thunderbolt", &["rdma", "thunderbolt"]),
            ("mlx.launch, all_sum.", &["mlx.launch", "all_sum"]),
            ("$13,198 or 5,600 W", &["13198", "5600", "w"]),
            ("macOS 26.2; 5-9 µs", &["macos", "26.2", "5-9", "us"]),
            ("`rdma_ctl enable`", &["rdma_ctl", "enable"]),
            ("Mac's N(N-1)/2", &["mac", "n", "n-1", "2"]),
            ("x- -y a.b.", &["x", "y", "a.b"]),
            ("Zürich, 日本", &["zürich", "日本"]),
        ] {
            let found: Vec<String> = words(text).into_iter().map(|word| word.plain).collect();
            assert_eq!(found, plain, "{text}");
        }
    }

    #[test]
    fn terms_are_the_whole_and_its_pieces() {
        for (text, terms) in [
            ("cables", &["cabl"][..]),
            ("full-mesh", &["full-mesh", "full", "mesh"]),
            ("10gbe", &["10gbe", "10", "gbe"]),
            ("thunderbolt5", &["thunderbolt5", "thunderbolt", "5"]),
            ("M3", &["m3"]),
            ("26.2", &["26.2"]),
            ("TB5 prices", &["tb5", "thunderbolt", "price", "cost"]),
            ("Qwen3-235B", &["qwen3-235b", "qwen3", "qwen", "3", "235b"]),
            ("point-to-point", &["point-to-point", "point"]),
        ] {
            assert_eq!(all_terms(text), terms, "{text}");
        }
    }

    #[test]
    fn ranges_are_those_of_the_text() {
        let text = "é über all_sum, 5,600!";
        let cut: Vec<&str> = words(text).iter().map(|w| &text[w.range.clone()]).collect();
        assert_eq!(cut, ["é", "über", "all_sum", "5,600"]);
    }

    proptest::proptest! {
        #[test]
        fn any_text_has_words_with_terms(text in ".{0,200}") {
            let mut end = 0;
            for word in words(&text) {
                assert!(word.range.start >= end && !word.terms.is_empty());
                assert!(text.get(word.range.clone()).is_some());
                end = word.range.end;
            }
        }
    }
}
