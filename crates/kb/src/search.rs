//! Ranked search: BM25 of the crate `bm25` over the terms of [`crate::words`].
//!
//! The library weighs and counts. This module decides which words there are, what a misspelt word
//! may have meant and which piece of a finding is shown. Equal scores are ordered by id, so the
//! order never depends on a hash.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use bm25::{
    Embedder, EmbedderBuilder, Embedding, Scorer, TokenEmbedder, TokenEmbedding, Tokenizer,
};

use crate::entry::Finding;
use crate::nearest::nearest;
use crate::snippet::{Snippet, snippet};
use crate::words::{Word, words};

/// Length of a snippet in bytes: two to three lines of a terminal.
const SNIPPET_BYTES: usize = 200;

/// Most words of a query that are searched; a query may be a file piped in.
const QUERY_WORDS_MAX: usize = 256;

/// Most words that a prefix expands to.
const EXPANSIONS_MAX: usize = 16;

/// Fewest letters of a prefix that is expanded.
const PREFIX_MIN: usize = 3;

/// The field of a finding that matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    Statement,
    Evidence,
    /// Its conflict with others.
    ConflictNote,
    /// Its key words.
    Tags,
    /// Name of its topic.
    Topic,
    /// The source that it was taken from.
    Source,
    /// Its number.
    Id,
}

impl Field {
    /// The key that files use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Statement => "statement",
            Self::Evidence => "evidence",
            Self::ConflictNote => "conflict_note",
            Self::Tags => "tags",
            Self::Topic => "topic",
            Self::Source => "source",
            Self::Id => "id",
        }
    }
}

/// A finding that a query found.
#[derive(Debug, Clone, PartialEq)]
pub struct Hit {
    pub id: u32,
    /// BM25; only comparable within one search.
    pub score: f32,
    /// The field that the snippet is of.
    pub field: Field,
    /// Why it was found.
    pub snippet: Snippet,
}

/// A word of a query that no finding has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown {
    /// The typed word, in lower case.
    pub word: String,
    /// Words that findings do have and that look like it, nearest first.
    pub nearest: Vec<String>,
}

/// The result of a search.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Found {
    /// Best first.
    pub hits: Vec<Hit>,
    /// Findings with any of the words.
    pub n_found: usize,
    /// Words that no finding has.
    pub unknown: Vec<Unknown>,
    /// Words of the query without stop words.
    pub n_words: usize,
}

/// Terms are their own embedding: the library's embeddings are hashes, which may collide.
struct Term;

impl TokenEmbedder for Term {
    type EmbeddingSpace = String;

    fn embed(token: &str) -> String {
        token.to_owned()
    }
}

/// Splits the text of [`join`]. The library takes texts and tokenises them more than once. Finding
/// words is nearly all of the work, so it is done once, before.
struct Terms;

impl Tokenizer for Terms {
    fn tokenize(&self, joined: &str) -> Vec<String> {
        let terms = joined.split(BETWEEN).filter(|term| !term.is_empty());
        terms.map(str::to_owned).collect()
    }
}

/// No term has it: terms are letters, digits and what joins them.
const BETWEEN: char = '\n';

fn join<'a>(terms: impl Iterator<Item = &'a String>) -> String {
    let mut joined = String::new();
    for term in terms {
        joined.push_str(term);
        joined.push(BETWEEN);
    }
    joined
}

/// The index over all findings.
pub(crate) struct Index {
    scorer: Scorer<u32, String>,
    /// In how many findings a term occurs.
    frequencies: HashMap<String, u32>,
    /// Every word as it is written, with its first term.
    vocabulary: BTreeMap<String, String>,
    n_findings: usize,
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let terms = self.frequencies.len();
        write!(
            f,
            "Index {{ findings: {}, terms: {terms} }}",
            self.n_findings
        )
    }
}

impl Index {
    /// Cost: linear in the text of all findings.
    pub(crate) fn new<'a>(findings: impl Iterator<Item = &'a Finding>) -> Self {
        let mut vocabulary = BTreeMap::new();
        let texts: Vec<(u32, String)> = findings
            .map(|finding| {
                let words = words(&weighted_text(finding));
                let joined = join(words.iter().flat_map(|word| &word.terms));
                for mut word in words {
                    let entry = vocabulary.entry(word.plain);
                    entry.or_insert_with(|| word.terms.swap_remove(0));
                }
                (finding.id, joined)
            })
            .collect();
        let corpus: Vec<&str> = texts.iter().map(|(_, text)| text.as_str()).collect();
        let embedder: Embedder<Term, Terms> =
            EmbedderBuilder::with_tokenizer_and_fit_to_corpus(Terms, &corpus).build();
        let mut index = Self {
            scorer: Scorer::new(),
            frequencies: HashMap::new(),
            vocabulary,
            n_findings: texts.len(),
        };
        for (id, text) in &texts {
            let mut embedding = embedder.embed(text);
            // The library repeats a term as often as it occurs, with the same value each time.
            embedding.0.sort_by(|a, b| a.index.cmp(&b.index));
            embedding.0.dedup_by(|a, b| a.index == b.index);
            for term in embedding.indices() {
                *index.frequencies.entry(term.clone()).or_insert(0) += 1;
            }
            index.scorer.upsert(id, embedding);
        }
        index
    }

    /// Number of different terms.
    pub(crate) fn n_terms(&self) -> usize {
        self.frequencies.len()
    }

    /// BM25's inverse document frequency of a term; highest for a term that no finding has.
    pub(crate) fn rarity(&self, term: &str) -> f32 {
        let frequency = self.frequencies.get(term).copied().unwrap_or(0) as f32;
        let without = self.n_findings as f32 - frequency;
        (1.0 + (without + 0.5) / (frequency + 0.5)).ln()
    }

    /// Scores of the findings that have any word of `query`, best first, with what it consists of.
    pub(crate) fn rank(&self, query: &str) -> (Vec<(u32, f32)>, Query) {
        let query = self.understand(query);
        let terms = query.terms.iter().map(|term| TokenEmbedding {
            index: term.clone(),
            value: 1.0,
        });
        let mut ranked: Vec<(u32, f32)> = self
            .scorer
            .matches(&Embedding(terms.collect()))
            .into_iter()
            .map(|scored| (scored.id, scored.score))
            .collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        (ranked, query)
    }

    /// The terms to look for, and the words that cannot be looked for.
    fn understand(&self, text: &str) -> Query {
        let mut query = Query::default();
        for word in words(text).into_iter().take(QUERY_WORDS_MAX) {
            query.n_words += 1;
            let mut terms = self.known(&word);
            if terms.is_empty() {
                terms = self.begun_by(&word.plain);
            }
            if terms.is_empty() && query.unknown.iter().all(|u| u.word != word.plain) {
                query.unknown.push(self.unknown(word.plain));
            }
            for term in terms {
                if !query.terms.contains(&term) {
                    query.terms.push(term);
                }
            }
        }
        query
    }

    fn known(&self, word: &Word) -> Vec<String> {
        let known = |term: &&String| self.frequencies.contains_key(*term);
        word.terms.iter().filter(known).cloned().collect()
    }

    /// Terms of the words that begin with `beginning`.
    fn begun_by(&self, beginning: &str) -> Vec<String> {
        if beginning.chars().count() < PREFIX_MIN {
            return Vec::new();
        }
        let from = self.vocabulary.range(beginning.to_owned()..);
        from.take_while(|(word, _)| word.starts_with(beginning))
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

/// A query as it was understood.
#[derive(Debug, Default)]
pub(crate) struct Query {
    pub(crate) terms: Vec<String>,
    pub(crate) unknown: Vec<Unknown>,
    pub(crate) n_words: usize,
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
    // In the order of preference: a later field has to weigh clearly more.
    let fields = [
        (Field::Statement, finding.statement.as_str()),
        (Field::Evidence, &finding.evidence),
        (Field::ConflictNote, &finding.conflict_note),
        (Field::Tags, &tags),
        (Field::Topic, &finding.topic),
        (Field::Source, &finding.source),
        (Field::Id, &id),
    ];
    let mut best: Option<(f32, Field, Snippet)> = None;
    for (field, text) in fields {
        let Some(piece) = snippet(text, SNIPPET_BYTES, weight) else {
            continue;
        };
        let sum = marked_weight(&piece, weight);
        if best.as_ref().is_none_or(|(most, ..)| sum > most * 1.01) {
            best = Some((sum, field, piece));
        }
    }
    let (field, snippet) = best.map_or_else(
        || (Field::Statement, beginning(&finding.statement)),
        |(_, field, piece)| (field, piece),
    );
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

/// The first words of a text, unmarked.
fn beginning(text: &str) -> Snippet {
    let end = text.char_indices().nth(SNIPPET_BYTES);
    let cut = end.map_or(text, |(at, _)| &text[..at]);
    let tail = if end.is_some() { "…" } else { "" };
    Snippet {
        text: format!("{}{tail}", cut.replace(['\n', '\t', '\r'], " ")),
        marks: Vec::new(),
    }
}
