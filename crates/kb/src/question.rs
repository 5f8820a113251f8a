//! Selects the quick answer for a question, if any fits.
//!
//! Twelve answers are too few for statistics of their own, so a word's weight is its weight in the
//! findings. An answer must cover a good part of the question. Without a shared word in a collected
//! question or answer there is no answer, however well findings fit.

use std::collections::{BTreeMap, BTreeSet};

use crate::entry::{Finding, QuickAnswer};
use crate::search::Index;
use crate::words::{Word, words};

/// Weight of a word that the collected question has, else the answer or its note, else one of its
/// findings.
const WEIGHTS: [f32; 3] = [1.0, 0.7, 0.5];

/// Share of a question that an answer has to cover. `tests/questions.txt` holds the questions that
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

/// The terms of an answer by where they are, in the order of [`WEIGHTS`].
#[derive(Debug)]
pub(crate) struct AnswerTerms([BTreeSet<String>; 3]);

impl AnswerTerms {
    pub(crate) fn new(answer: &QuickAnswer, findings: &BTreeMap<u32, Finding>) -> Self {
        let text = |f: &Finding| format!("{}\n{}\n{}", f.statement, f.evidence, f.tags.join(" \n"));
        let findings = answer.findings.iter().filter_map(|id| findings.get(id));
        let findings: Vec<String> = findings.map(text).collect();
        let texts = [
            answer.question.clone(),
            format!("{}\n{}", answer.answer, answer.note),
            findings.join("\n"),
        ];
        Self(texts.map(|text| {
            words(&text)
                .into_iter()
                .flat_map(|word| word.terms)
                .collect()
        }))
    }

    /// Share of the collected question's terms that are in `question` too, from 0 to 1.
    fn shared(&self, question: &[Word]) -> f32 {
        let asked = |term: &&String| question.iter().any(|word| word.terms.contains(term));
        let own = &self.0[0];
        own.iter().filter(asked).count() as f32 / own.len().max(1) as f32
    }

    fn strength(&self, word: &Word) -> f32 {
        let has = |terms: &BTreeSet<String>| word.terms.iter().any(|term| terms.contains(term));
        self.0
            .iter()
            .position(has)
            .map_or(0.0, |place| WEIGHTS[place])
    }

    /// Share of a question that is covered, from 0 to 1; 0 when only findings have its words.
    fn cover(&self, question: &[Word], index: &Index) -> f32 {
        let (mut total, mut covered, mut strongest) = (0.0, 0.0, 0.0f32);
        for word in question {
            let terms = word.terms.iter().map(|term| index.rarity(term));
            let rarity = terms.fold(f32::INFINITY, f32::min);
            let strength = self.strength(word);
            total += rarity;
            covered += strength * rarity;
            strongest = strongest.max(strength);
        }
        if strongest > WEIGHTS[2] {
            covered / total
        } else {
            0.0
        }
    }
}

/// The place of the best of `answers` for `question`, with its cover. Ties go to the answer whose
/// own question has the fewest extra terms, then to the first.
pub(crate) fn best(answers: &[AnswerTerms], question: &str, index: &Index) -> Option<(usize, f32)> {
    let mut question = words(question);
    question.truncate(QUESTION_WORDS_MAX);
    let mut best: Option<(usize, (f32, f32))> = None;
    for (place, answer) in answers.iter().enumerate() {
        let fit = (answer.cover(&question, index), answer.shared(&question));
        if fit.0 >= COVER_MIN && best.is_none_or(|(_, most)| fit > most) {
            best = Some((place, fit));
        }
    }
    best.map(|(place, (cover, _))| (place, cover))
}
