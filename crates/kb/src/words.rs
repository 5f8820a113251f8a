//! From text to the terms that search compares.
//!
//! A *word* is a stretch of text as people read it, `all_sum`, `26.2` or `full-mesh`. Its *terms*
//! are what it is found by: the whole, its pieces, and of English words the stem. So `cables` finds
//! `cable`, and `10 GbE` finds the tag `10gbe`.

use std::ops::Range;
use std::sync::LazyLock;

use frostem::{Algorithm, Stemmer};
use regex::Regex;

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

/// Letters and digits, joined by `_`, `-`, `.` and `'`, and digits by a comma.
static WORD: LazyLock<Regex> = LazyLock::new(|| {
    const PIECE: &str = r"(?:[0-9](?:,[0-9])*|[\p{Alphabetic}\p{N}])";
    Regex::new(&format!("{PIECE}(?:[-_.']?{PIECE})*")).expect("a valid expression")
});

/// Digits before or after at least three letters; both are terms of their own, such as `gbe` of
/// `10gbe`. The `m` of `m3` is none, as it would match every `m`.
static DIGITS_AND_LETTERS: LazyLock<Regex> = LazyLock::new(|| {
    let mixed = r"^(?:([0-9]+)(\p{Alphabetic}{3,})|(\p{Alphabetic}{3,})([0-9]+))$";
    Regex::new(mixed).expect("a valid expression")
});

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
    let found = WORD.find_iter(text).filter_map(|found| {
        let plain = normal(found.as_str());
        is_looked_for(&plain).then(|| Word {
            range: found.range(),
            terms: terms(&plain),
            plain,
        })
    });
    found.collect()
}

fn is_looked_for(word: &str) -> bool {
    STOP_WORDS.binary_search(&word).is_err()
}

/// Lower case; `5,600` is 5600; both signs for micro are the letter u; `Mac's` is Mac.
fn normal(text: &str) -> String {
    let lower = text.replace(',', "").to_lowercase();
    let lower = lower.replace(['µ', 'μ'], "u");
    lower.strip_suffix("'s").unwrap_or(&lower).to_owned()
}

fn terms(plain: &str) -> Vec<String> {
    let mut terms = vec![stem(plain)];
    let number = plain.chars().all(|c| c.is_ascii_digit() || c == '.');
    if !number && !plain.chars().all(char::is_alphabetic) {
        let pieces = plain.split(|c: char| !c.is_alphanumeric());
        for piece in pieces.filter(|piece| !piece.is_empty() && is_looked_for(piece)) {
            let mixed = DIGITS_AND_LETTERS.captures(piece);
            let parts = mixed
                .iter()
                .flat_map(|parts| parts.iter().skip(1).flatten());
            for part in [piece].into_iter().chain(parts.map(|part| part.as_str())) {
                let term = stem(part);
                if !terms.contains(&term) {
                    terms.push(term);
                }
            }
        }
    }
    let synonym = |term: &String| SAME.iter().find(|(stem, _)| stem == term);
    let others: Vec<_> = terms.iter().filter_map(synonym).collect();
    terms.extend(others.into_iter().map(|(_, other)| (*other).to_owned()));
    terms
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
