//! Rules about the words of comments: first words, length of sentences, banned idioms.
//!
//! A doc comment names its subject first; the words of [`OPENERS`] name none. A sentence makes one
//! claim. [`IDIOMS`] are paraphrases of names, counts and the field's words.
//!
//! The counts are of the whole tree, so that old text may wait while new text cannot add to it.
//! [`paragraphs`] selects the text for the first two, all comments are read for the third.

use super::text::find_word;
use super::{RustFile, TidyFinding};

/// First words that name no subject.
const OPENERS: [&str; 5] = ["What", "Who", "One", "Those", "Whoever"];

/// Doc comments of the tree that begin with one of [`OPENERS`]. It only falls.
const OPENERS_MAX: usize = 67;

/// Words of a sentence. The house style's figure.
const SENTENCE_WORDS_MAX: usize = 25;

/// Sentences of the tree that are longer. It only falls.
const LONG_SENTENCES_MAX: usize = 22;

/// Paraphrases in comments, in lower case: of a name or a count, of an actor, of an event.
const IDIOMS: [&str; 13] = [
    "so many", "of which", "is told", "are told", "hears", "heard of", "goes on", "go on",
    "be had", "beside", "whoever", "whatever", "who has",
];

/// Lines of comments of the tree with one of [`IDIOMS`]. It only falls.
const IDIOMS_MAX: usize = 0;

/// Places that a finding lists.
const LISTED_MAX: usize = 40;

/// A paragraph or an item of a list in a doc comment.
struct Paragraph {
    /// Line of its first word, from 1.
    line: usize,
    /// It begins the comment.
    first: bool,
    text: String,
}

/// Findings about the whole tree, one for each count that is over its limit.
pub(crate) fn check(files: &[RustFile]) -> Vec<TidyFinding> {
    let openers = (
        "opener",
        format!("doc comments begin with {}", OPENERS.join(", ")),
        places(files, openers),
        OPENERS_MAX,
    );
    let sentences = (
        "sentence",
        format!("sentences over {SENTENCE_WORDS_MAX} words in doc comments"),
        places(files, long_sentences),
        LONG_SENTENCES_MAX,
    );
    let idioms = (
        "idiom",
        format!("lines of comments with {}", IDIOMS.join(", ")),
        places(files, idioms),
        IDIOMS_MAX,
    );
    let mut findings = Vec::new();
    for (rule, subject, places, max) in [openers, sentences, idioms] {
        if places.len() > max {
            let listed = places[..places.len().min(LISTED_MAX)].join(" ");
            let message = format!("{} {subject}, at most {max}: {listed} ...", places.len());
            findings.push(TidyFinding::error(
                "xtask/src/tidy/words.rs",
                1,
                rule,
                message,
            ));
        }
    }
    findings
}

/// `path:line` of everything that `find` finds in the files.
fn places(files: &[RustFile], find: fn(&[String]) -> Vec<usize>) -> Vec<String> {
    let in_file = |file: &RustFile| -> Vec<String> {
        let lines = find(&file.comments);
        lines
            .iter()
            .map(|line| format!("{}:{line}", file.path))
            .collect()
    };
    files.iter().flat_map(in_file).collect()
}

/// Lines of comments with an idiom. Code in backticks does not count.
fn idioms(comments: &[String]) -> Vec<usize> {
    let has_idiom = |line: &String| {
        let prose: String = line.to_lowercase().split('`').step_by(2).collect();
        IDIOMS
            .iter()
            .any(|idiom| find_word(&prose, idiom).is_some())
    };
    let lines = comments.iter().zip(1..);
    lines
        .filter(|(line, _)| has_idiom(line))
        .map(|(_, number)| number)
        .collect()
}

/// Lines of comments whose first word names no subject.
fn openers(comments: &[String]) -> Vec<usize> {
    let paragraphs = paragraphs(comments);
    let is_opener = |paragraph: &&Paragraph| {
        let mut words = paragraph.text.split(|c: char| !c.is_alphanumeric());
        words.next().is_some_and(|word| OPENERS.contains(&word))
    };
    let first = paragraphs.iter().filter(|paragraph| paragraph.first);
    first
        .filter(is_opener)
        .map(|paragraph| paragraph.line)
        .collect()
}

/// Lines of the paragraphs of sentences that are too long, one for each sentence.
fn long_sentences(comments: &[String]) -> Vec<usize> {
    let mut found = Vec::new();
    for paragraph in paragraphs(comments) {
        let mut words = 0;
        for word in paragraph.text.split_whitespace() {
            words += usize::from(word.contains(char::is_alphanumeric));
            if word.trim_end_matches(')').ends_with(['.', '!', '?']) {
                found.extend((words > SENTENCE_WORDS_MAX).then_some(paragraph.line));
                words = 0;
            }
        }
        found.extend((words > SENTENCE_WORDS_MAX).then_some(paragraph.line));
    }
    found
}

/// The paragraphs of all doc comments of a file, given its lines with the code blanked out.
/// Headings, tables and samples of code are left out.
fn paragraphs(comments: &[String]) -> Vec<Paragraph> {
    let mut found: Vec<Paragraph> = Vec::new();
    let (mut kind, mut first, mut fenced, mut open) = ("", true, false, false);
    for (at, line) in comments.iter().enumerate() {
        let Some((marker, text)) = doc_text(line) else {
            (kind, open) = ("", false);
            continue;
        };
        if marker != kind {
            (kind, first, fenced, open) = (marker, true, false, false);
        }
        if text.starts_with("```") {
            fenced = !fenced;
        }
        let (text, is_item) = item_text(text);
        let skipped = fenced || text.starts_with(['#', '|']) || text.starts_with("```");
        if skipped || text.is_empty() {
            open = false;
            first &= text.is_empty();
            continue;
        }
        match found.last_mut().filter(|_| open && !is_item) {
            Some(last) => {
                last.text.push(' ');
                last.text.push_str(text);
            }
            None => found.push(Paragraph {
                line: at + 1,
                first,
                text: text.into(),
            }),
        }
        (open, first) = (true, false);
    }
    found
}

fn doc_text(line: &str) -> Option<(&'static str, &str)> {
    let line = line.trim();
    let marker = ["///", "//!"]
        .into_iter()
        .find(|marker| line.starts_with(*marker))?;
    let text = &line[marker.len()..];
    (!text.starts_with('/')).then(|| (marker, text.trim()))
}

/// A line without the mark of a list's item, and whether it had one.
fn item_text(line: &str) -> (&str, bool) {
    let unnumbered = line.trim_start_matches(|c: char| c.is_ascii_digit());
    let rest = match line.strip_prefix("- ").or_else(|| line.strip_prefix("* ")) {
        Some(rest) => Some(rest),
        None if unnumbered.len() < line.len() => unnumbered.strip_prefix(". "),
        None => None,
    };
    rest.map_or((line, false), |rest| (rest.trim_start(), true))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Vec<RustFile> {
        vec![RustFile::parse("crates/a/src/lib.rs", text).expect("the sample is Rust")]
    }

    #[test]
    fn first_words_that_name_nothing_are_counted() {
        let cases = [
            ("/// What it is.\nfn f() {}", 1),
            (
                "//! Who asks.\n\n/// Those before.\nfn f() {}\n/// One more.\nfn g() {}",
                3,
            ),
            (
                "/// The leader. What it does.\n/// Who asks is told.\nfn f() {}",
                0,
            ),
            ("/// The leader.\n///\n/// What follows.\nfn f() {}", 0),
            ("// What a plain comment says.\nfn f() {}", 0),
            ("/// Whatever.\nfn f() { g(\"/// What\"); }", 0),
        ];
        for (text, expected) in cases {
            assert_eq!(places(&file(text), openers).len(), expected, "{text}");
        }
    }

    #[test]
    fn sentences_are_counted_by_their_words() {
        let words = |n: usize| vec!["word"; n].join(" ");
        let cases = [
            (format!("/// {}.\nfn f() {{}}", words(25)), 0),
            (format!("/// {}.\nfn f() {{}}", words(26)), 1),
            (
                format!("/// {}\n/// {}.\nfn f() {{}}", words(20), words(6)),
                1,
            ),
            (format!("/// {}. {}.\nfn f() {{}}", words(20), words(20)), 0),
            (
                format!("/// ({}.) {}.\nfn f() {{}}", words(20), words(20)),
                0,
            ),
            (
                format!("/// {}\n///\n/// {}\nfn f() {{}}", words(20), words(20)),
                0,
            ),
            (
                format!("/// {}:\n/// - {}\nfn f() {{}}", words(20), words(20)),
                0,
            ),
            (
                format!("/// - {}\n///   {}\nfn f() {{}}", words(20), words(20)),
                1,
            ),
            (
                format!("/// {} - = + {}.\nfn f() {{}}", words(20), words(5)),
                0,
            ),
            (
                format!("/// ```text\n/// {}\n/// ```\nfn f() {{}}", words(40)),
                0,
            ),
            (format!("// {}.\nfn f() {{}}", words(40)), 0),
        ];
        for (text, expected) in cases {
            assert_eq!(
                places(&file(&text), long_sentences).len(),
                expected,
                "{text}"
            );
        }
    }

    #[test]
    fn idioms_are_counted_by_the_line() {
        let cases = [
            (
                "/// So many rows, of which one is told.\n// Goes on.\nfn f() {}",
                2,
            ),
            ("fn f() {} // whatever comes", 1),
            (
                "/// Besides, it forgoes one.\n/// The field [`beside`] `so many`.\nfn f() {}",
                0,
            ),
            ("fn f() { g(\"so many\"); }", 0),
        ];
        for (text, expected) in cases {
            assert_eq!(places(&file(text), idioms).len(), expected, "{text}");
        }
    }

    #[test]
    fn a_place_is_the_line_where_the_paragraph_begins() {
        let text = format!(
            "fn f() {{}}\n\n/// Short.\n///\n/// {}\nfn g() {{}}",
            "word ".repeat(30)
        );
        assert_eq!(
            places(&file(&text), long_sentences),
            ["crates/a/src/lib.rs:5"]
        );
    }
}
