//! Selects the quick answer for a question, if any fits.
//!
//! Twelve answers are too few for statistics of their own, so a word's weight is its weight in the
//! findings. An answer must cover a good part of the question. A word counts in full if the
//! collected question has it, and less if only the answer or its findings do. Without a shared word
//! in a collected question or answer there is no answer, however well findings fit.

use crate::entry::{Finding, QuickAnswer};
use crate::search::Index;
use crate::words::{Word, words};

/// Weight of a word that the collected question has.
const IN_QUESTION: f32 = 1.0;
/// Weight of a word that the answer or its note has.
const IN_ANSWER: f32 = 0.7;
/// Weight of a word that one of the answer's findings has.
const IN_FINDINGS: f32 = 0.5;

/// Share of a question that an answer has to cover. `tests/questions.rs` holds the questions that
/// this was set by. Of those with an answer the least covered reaches 0.52, of those without one
/// the best covered 0.33.
const COVER_MIN: f32 = 0.42;

/// Most words of a question that are looked at; a longer one is no question.
const QUESTION_WORDS_MAX: usize = 256;

/// An answer and how well it fits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fit<'a> {
    pub answer: &'a QuickAnswer,
    /// Share of the question that it covers, from 0 to 1.
    pub cover: f32,
}

/// The terms of an answer by where they are.
#[derive(Debug)]
pub(crate) struct Known {
    question: Vec<String>,
    answer: Vec<String>,
    findings: Vec<String>,
}

impl Known {
    pub(crate) fn new<'a>(
        answer: &QuickAnswer,
        findings: impl Iterator<Item = &'a Finding>,
    ) -> Self {
        let of = |text: &str| -> Vec<String> {
            let mut terms: Vec<String> = words(text).into_iter().flat_map(|w| w.terms).collect();
            terms.sort_unstable();
            terms.dedup();
            terms
        };
        let texts =
            findings.map(|f| format!("{}\n{}\n{}", f.statement, f.evidence, f.tags.join(" \n")));
        Self {
            question: of(&answer.question),
            answer: of(&format!("{}\n{}", answer.answer, answer.note)),
            findings: of(&texts.collect::<Vec<_>>().join("\n")),
        }
    }

    /// Share of the collected question's terms that are in `question` too, from 0 to 1.
    fn shared(&self, question: &[Word]) -> f32 {
        let asked = |term: &&String| question.iter().any(|word| word.terms.contains(term));
        let shared = self.question.iter().filter(asked).count();
        shared as f32 / self.question.len().max(1) as f32
    }

    fn strength(&self, word: &Word) -> f32 {
        let has = |terms: &[String]| {
            word.terms
                .iter()
                .any(|term| terms.binary_search(term).is_ok())
        };
        if has(&self.question) {
            IN_QUESTION
        } else if has(&self.answer) {
            IN_ANSWER
        } else if has(&self.findings) {
            IN_FINDINGS
        } else {
            0.0
        }
    }

    /// Share of a question that is covered, from 0 to 1; 0 when its own words have none of it.
    pub(crate) fn cover(&self, question: &[Word], index: &Index) -> f32 {
        let rarity = |word: &Word| {
            let each = word.terms.iter().map(|term| index.rarity(term));
            each.fold(f32::INFINITY, f32::min)
        };
        let total: f32 = question.iter().map(rarity).sum();
        let strengths = || question.iter().map(|word| self.strength(word));
        if strengths().all(|strength| strength <= IN_FINDINGS) {
            return 0.0;
        }
        let covered: f32 = question
            .iter()
            .zip(strengths())
            .map(|(w, s)| s * rarity(w))
            .sum();
        covered / total
    }
}

/// The best of `answers` for `question`, with its index. Ties go to the answer whose own question
/// has the fewest extra terms, then to the first.
pub(crate) fn best(answers: &[Known], question: &str, index: &Index) -> Option<(usize, f32)> {
    let mut question = words(question);
    question.truncate(QUESTION_WORDS_MAX);
    let mut best: Option<(usize, f32, f32)> = None;
    for (place, known) in answers.iter().enumerate() {
        let cover = known.cover(&question, index);
        let shared = known.shared(&question);
        let better =
            |(_, most, most_shared): (usize, f32, f32)| (cover, shared) > (most, most_shared);
        if cover >= COVER_MIN && best.is_none_or(better) {
            best = Some((place, cover, shared));
        }
    }
    best.map(|(place, cover, _)| (place, cover))
}
