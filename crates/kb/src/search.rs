//! Ranked search: BM25 over the terms of [`crate::words`], and snippets that show why a finding was
//! found.
//!
//! Equal scores are ordered by id, and sums by the order of the query, so that the same query
//! always has the same result.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use serde::Serialize;

use crate::entry::Finding;
use crate::similarity::nearest;
use crate::words::{Word, words};

/// Length of a snippet in bytes: two to three lines of a terminal.
const SNIPPET_BYTES: usize = 200;

/// Most words of a query that are searched; a query may be a file piped in.
const QUERY_WORDS_MAX: usize = 256;

/// Most words that a prefix expands to, and fewest letters of a prefix that is expanded.
const EXPANSIONS_MAX: usize = 16;
const PREFIX_MIN: usize = 3;

/// BM25's usual constants: how soon a repeated term counts no more, and how much length counts.
const K1: f32 = 1.2;
const B: f32 = 0.75;

/// A finding that a query found.
#[derive(Debug, Clone, PartialEq)]
pub struct Hit {
    pub id: u32,
    /// BM25; only comparable within one search.
    pub score: f32,
    /// The field that the snippet is of, by its key in files.
    pub field: &'static str,
    /// Why it was found.
    pub snippet: Snippet,
}

/// A piece of a text in one line, with the places of what was looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snippet {
    /// The excerpt, with `…` where the text continues. Line breaks are spaces.
    pub text: String,
    /// Byte ranges of `text` that were looked for, ascending, apart from each other.
    pub marks: Vec<Range<usize>>,
}

/// A word of a query that no finding has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unknown {
    /// The typed word, in lower case.
    pub word: String,
    /// Words that findings do have and that look like it, nearest first.
    pub nearest: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct SearchResult {
    /// Best first.
    pub hits: Vec<Hit>,
    /// Findings with any of the words.
    pub n_found: usize,
    /// Words that no finding has.
    pub unknown: Vec<Unknown>,
    /// Words of the query without stop words.
    pub n_words: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Query {
    pub(crate) terms: Vec<String>,
    pub(crate) unknown: Vec<Unknown>,
    pub(crate) n_words: usize,
}

/// The index over all findings.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// The findings that have a term, with its weight there.
    postings: HashMap<String, BTreeMap<u32, f32>>,
    /// Every word as it is written, with its first term.
    vocabulary: BTreeMap<String, String>,
    n_findings: usize,
}

impl Index {
    /// Cost: linear in the text of all findings.
    pub(crate) fn new<'a>(findings: impl Iterator<Item = &'a Finding>) -> Self {
        let mut index = Self::default();
        let mut documents = Vec::new();
        for finding in findings {
            let mut terms = Vec::new();
            for word in words(&weighted_text(finding)) {
                let entry = index.vocabulary.entry(word.plain);
                entry.or_insert_with(|| word.terms[0].clone());
                terms.extend(word.terms);
            }
            documents.push((finding.id, terms));
        }
        index.n_findings = documents.len();
        let n_terms: usize = documents.iter().map(|(_, terms)| terms.len()).sum();
        let average = (n_terms as f64 / documents.len() as f64) as f32;
        for (id, terms) in documents {
            let length = 1.0 - B + B * (terms.len() as f32 / average);
            let mut counts: HashMap<String, f32> = HashMap::new();
            for term in terms {
                *counts.entry(term).or_default() += 1.0;
            }
            for (term, count) in counts {
                let weight = count * (K1 + 1.0) / (count + K1 * length);
                index.postings.entry(term).or_default().insert(id, weight);
            }
        }
        index
    }

    /// Number of different terms.
    pub(crate) fn n_terms(&self) -> usize {
        self.postings.len()
    }

    /// BM25's inverse document frequency of a term; highest for a term that no finding has.
    pub(crate) fn rarity(&self, term: &str) -> f32 {
        let frequency = self.postings.get(term).map_or(0, BTreeMap::len) as f32;
        let without = self.n_findings as f32 - frequency;
        (1.0 + (without + 0.5) / (frequency + 0.5)).ln()
    }

    /// The findings that have any of `terms` with their scores, best first.
    pub(crate) fn rank(&self, terms: &[String]) -> Vec<(u32, f32)> {
        let mut scores: BTreeMap<u32, f32> = BTreeMap::new();
        for term in terms {
            for (id, weight) in self.postings.get(term).into_iter().flatten() {
                *scores.entry(*id).or_default() += self.rarity(term) * weight;
            }
        }
        let mut ranked: Vec<(u32, f32)> = scores.into_iter().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        ranked
    }

    /// The terms to look for, and the words that no finding has.
    pub(crate) fn parse(&self, text: &str) -> Query {
        let mut query = Query::default();
        for mut word in words(text).into_iter().take(QUERY_WORDS_MAX) {
            query.n_words += 1;
            word.terms.retain(|term| self.postings.contains_key(term));
            if word.terms.is_empty() {
                word.terms = self.expand(&word.plain);
            }
            if word.terms.is_empty() && query.unknown.iter().all(|u| u.word != word.plain) {
                query.unknown.push(self.unknown(word.plain));
            }
            for term in word.terms {
                if !query.terms.contains(&term) {
                    query.terms.push(term);
                }
            }
        }
        query
    }

    /// Terms of the words that begin with `prefix`.
    fn expand(&self, prefix: &str) -> Vec<String> {
        if prefix.chars().count() < PREFIX_MIN {
            return Vec::new();
        }
        let words = self.vocabulary.range(prefix.to_owned()..);
        let words = words.take_while(|(word, _)| word.starts_with(prefix));
        words
            .take(EXPANSIONS_MAX)
            .map(|(_, term)| term.clone())
            .collect()
    }

    fn unknown(&self, word: String) -> Unknown {
        let close = nearest(&word, self.vocabulary.keys().map(String::as_str), 3);
        let nearest = close.into_iter().map(str::to_owned).collect();
        Unknown { word, nearest }
    }
}

/// The text of a finding as it is indexed. The claim and the key words count twice: they say what
/// it is about, the rest says what it mentions.
fn weighted_text(finding: &Finding) -> String {
    let tags = finding.tags.join(" \n");
    [
        &finding.statement,
        &finding.statement,
        &tags,
        &tags,
        &finding.topic,
        &finding.evidence,
        &finding.conflict_note,
        &finding.source,
        &finding.id.to_string(),
    ]
    .map(String::as_str)
    .join("\n")
}

/// The hit for a finding that `terms` found: the snippet of the field where they weigh most.
pub(crate) fn hit(finding: &Finding, score: f32, terms: &[String], index: &Index) -> Hit {
    let weight = |word: &Word| {
        let found = word.terms.iter().filter(|term| terms.contains(term));
        found.map(|term| index.rarity(term)).fold(0.0, f32::max)
    };
    let tags = finding.tags.join(", ");
    let id = finding.id.to_string();
    let fields = [
        ("statement", finding.statement.as_str()),
        ("evidence", &finding.evidence),
        ("conflict_note", &finding.conflict_note),
        ("tags", &tags),
        ("topic", &finding.topic),
        ("source", &finding.source),
        ("id", &id),
    ];
    let mut best: Option<(f32, &str, Snippet)> = None;
    for (field, text) in fields {
        let Some(piece) = snippet(text, SNIPPET_BYTES, weight) else {
            continue;
        };
        let sum = marked_weight(&piece, weight);
        // In the order of preference: a later field has to weigh clearly more.
        if best.as_ref().is_none_or(|(most, ..)| sum > most * 1.01) {
            best = Some((sum, field, piece));
        }
    }
    let (_, field, snippet) = best.expect("a field has a term that found the finding");
    Hit {
        id: finding.id,
        score,
        field,
        snippet,
    }
}

/// Weight of the different words that a snippet marks.
fn marked_weight(piece: &Snippet, weight: impl Fn(&Word) -> f32) -> f32 {
    let mut seen = Vec::new();
    let mut sum = 0.0;
    for word in words(&piece.text) {
        if !seen.contains(&word.terms[0]) {
            sum += weight(&word);
            seen.push(word.terms[0].clone());
        }
    }
    sum
}

/// The piece of `text`, at most about `width` bytes, with the heaviest words by `weight`; `None`
/// where no word has a weight. Of equal pieces the first.
fn snippet(text: &str, width: usize, weight: impl Fn(&Word) -> f32) -> Option<Snippet> {
    let found = words(text).into_iter().map(|word| (weight(&word), word));
    let found: Vec<(f32, Word)> = found.filter(|(weight, _)| *weight > 0.0).collect();
    let piece = widen(text, heaviest(&found, width)?, width);
    let lead = if piece.start > 0 { "…" } else { "" };
    let tail = if piece.end < text.len() { "…" } else { "" };
    let flat = text[piece.clone()].replace(['\n', '\t', '\r'], " ");
    let ranges = found.iter().map(|(_, word)| &word.range);
    let inside = ranges.filter(|range| piece.start <= range.start && range.end <= piece.end);
    let place = |at: usize| at - piece.start + lead.len();
    Some(Snippet {
        text: format!("{lead}{flat}{tail}"),
        marks: inside
            .map(|range| place(range.start)..place(range.end))
            .collect(),
    })
}

/// The bytes of the run of words within `width` bytes that weighs most; a word counts once in it.
fn heaviest(found: &[(f32, Word)], width: usize) -> Option<Range<usize>> {
    let mut best: Option<(f32, Range<usize>)> = None;
    for (n, (_, first)) in found.iter().enumerate() {
        let start = first.range.start;
        // A single word wider than the whole piece is still shown.
        let mut end = first.range.end;
        let mut seen: Vec<&str> = Vec::new();
        let mut sum = 0.0;
        let within = |(_, word): &&(f32, Word)| word.range.end - start <= width;
        for (weight, word) in found[n..].iter().take_while(within) {
            if !seen.contains(&word.plain.as_str()) {
                seen.push(&word.plain);
                sum += weight;
            }
            end = word.range.end;
        }
        if best.as_ref().is_none_or(|(most, _)| sum > *most) {
            best = Some((sum, start..end));
        }
    }
    best.map(|(_, range)| range)
}

/// Grows `core` on both sides to `width` bytes, cut where words begin and end.
fn widen(text: &str, core: Range<usize>, width: usize) -> Range<usize> {
    // A third before, the rest after: what follows a word explains it more often.
    let before = width.saturating_sub(core.len()) / 3;
    let mut start = core.start.saturating_sub(before);
    let end = (start + width).min(text.len());
    if end == text.len() {
        start = start.min(end.saturating_sub(width));
    }
    let mut start = text.floor_char_boundary(start);
    let mut end = text.ceil_char_boundary(end.max(core.end));
    if start > 0 {
        let cut = text[start..core.start].split_once(char::is_whitespace);
        start = core.start - cut.map_or(0, |(_, rest)| rest.trim_start().len());
    }
    if end < text.len() {
        let cut = text[core.end..end].rfind(char::is_whitespace);
        end = core.end + cut.unwrap_or(0);
    }
    start..end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_piece_with_most_of_the_words_is_shown() {
        let text = "A ring of cables. Nothing here at all, really nothing to see. A mesh of cables \
                    and ports, with a µ in it.\nThe end of the text is here.";
        let whole = text.replace('\n', " ").replace("mesh", "[mesh]");
        for (width, wanted, shown) in [
            (500, &["mesh"][..], Some(whole.as_str())),
            (30, &["ring"], Some("A [ring] of cables. Nothing…")),
            (30, &["mesh", "cables"], Some("…A [mesh] of [cables] and…")),
            (20, &["text"], Some("…the [text] is here.")),
            (0, &["mesh"], Some("…[mesh]…")),
            (30, &["zebra"], None),
        ] {
            let weight = |word: &Word| f32::from(u8::from(wanted.contains(&word.plain.as_str())));
            let marked = snippet(text, width, weight).map(|snippet| {
                let mut shown = snippet.text;
                for mark in snippet.marks.iter().rev() {
                    shown.insert(mark.end, ']');
                    shown.insert(mark.start, '[');
                }
                shown
            });
            assert_eq!(marked.as_deref(), shown, "{width} {wanted:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn marks_lie_in_the_piece(text in "[a-dµ🙂 \n]{0,120}", width in 0usize..60) {
            let piece = snippet(&text, width, |word| word.plain.len() as f32 - 1.0);
            if let Some(piece) = piece {
                let mut end = 0;
                for mark in &piece.marks {
                    assert!(mark.start >= end && piece.text.get(mark.clone()).is_some());
                    end = mark.end;
                }
                assert!(!piece.marks.is_empty() && !piece.text.contains('\n'));
            }
        }
    }
}
