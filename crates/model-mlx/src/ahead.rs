//! The step after one whose tokens the device chooses, submitted before these are read.
//!
//! ```text
//! device     | step 1     | step 2     | step 3     |
//! host       submit 2     read 1, choose, submit 3     read 2, ..
//! ```
//!
//! A step whose rows all ask for the largest logit or a drawn token is usually followed by one row
//! more of the same sequences. The tokens of these rows are on the device already, so that step is
//! submitted at once. The leader's next plan is compared with it, word by word. Equal plans take
//! its logits. Otherwise they are dropped. The rows that it wrote to the cache are written again
//! before a row reads them: a page that is not full has one owner. The state behind a page follows
//! from the state before it and from its rows, so that it is written again with its last row.
//!
//! Of eight sequences, one begins a page in every eighth step, and the leader alone names pages.
//! Where all rows go to lanes, the step is submitted with [`UNKNOWN_PAGE`] for the new one. The
//! plan that follows names it.
//!
//! The ranks of a tensor split exchange their tokens
//! ([`choose_tokens`](super::step::Step::choose_tokens)). Each then computes the next step, with
//! its exchanges, while the leader's caller reads the tokens. All of them decide by the plans and
//! what they exchanged, so that no rank waits for another's part in vain. Memory for lanes is each
//! rank's own, so each tells with its tokens whether a page may begin.

use paceline_model::backend::StepPlan;
use paceline_model::{Batch, BatchSequence, Error, Logits, WindowPages, WindowPool};
use paceline_tensor::PAGE;

use super::cache::UNKNOWN_PAGE;
use super::logits::StepLogits;
use super::step::RankStep;

/// Most steps without a step ahead after plans that differed. A schedule that never repeats its
/// sequences pays for one step in 64.
const PAUSE_MAX: u32 = 64;

/// Results of a step ahead.
#[derive(Debug)]
pub(super) enum Results {
    /// Of a step on one device, which may still compute it.
    Logits(Box<StepLogits>),
    /// Of a step of several ranks.
    Ranks(RankStep),
}

/// A submitted step.
#[derive(Debug)]
struct Submitted {
    /// The plan that it computes.
    words: Vec<u32>,
    /// Places in `words` of pages that the leader has not named yet.
    unknown: Vec<usize>,
    /// `None` for a step of several ranks that is to be computed.
    results: Option<Result<Results, Error>>,
}

/// The step ahead of the leader's plans.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    submitted: Option<Submitted>,
    /// Steps to come without a step ahead.
    pause: u32,
    /// The pause after the next plan that differs.
    next_pause: u32,
}

impl Ahead {
    /// The results of the plan in `words`, if its step was submitted.
    ///
    /// # Errors
    /// Errors of the step, also where its plan differs: the ranks' exchanges have failed.
    pub(super) fn take(&mut self, words: &[u32]) -> Result<Option<Results>, Error> {
        let Some(submitted) = self.submitted.take() else {
            self.pause = self.pause.saturating_sub(1);
            return Ok(None);
        };
        let results = submitted.results.transpose()?;
        let mut expected = submitted.words;
        for place in submitted.unknown {
            expected[place] = words.get(place).copied().unwrap_or(UNKNOWN_PAGE);
        }
        if expected == words {
            self.next_pause = 0;
            return Ok(results);
        }
        self.pause = self.next_pause;
        self.next_pause = (2 * self.next_pause + 1).min(PAUSE_MAX);
        Ok(None)
    }

    pub(super) const fn is_submitted(&self) -> bool {
        self.submitted.is_some()
    }

    pub(super) const fn pauses(&self) -> bool {
        self.pause > 0
    }

    /// Notes the step `next` with these tokens. It was submitted with these results, or else the
    /// ranks are to compute it.
    pub(super) fn note(&mut self, next: &NextStep<'_>, tokens: &[u32], results: Option<Results>) {
        let [words, others] = [UNKNOWN_PAGE, 0].map(|page| next.words(tokens, page));
        let places = words.iter().zip(&others).enumerate();
        let unknown = places.filter(|(_, (one, other))| one != other);
        self.submitted = Some(Submitted {
            unknown: unknown.map(|(place, _)| place).collect(),
            words,
            results: results.map(Ok),
        });
    }

    /// The plan of the step that the ranks are to compute, if there is one, and the places of its
    /// unknown pages.
    pub(super) fn planned(&self) -> Option<(Vec<u32>, Vec<usize>)> {
        let submitted = self.submitted.as_ref();
        let planned = submitted.filter(|submitted| submitted.results.is_none());
        planned.map(|submitted| (submitted.words.clone(), submitted.unknown.clone()))
    }

    /// Notes how the planned step ended.
    pub(super) fn computed(&mut self, step: Result<RankStep, Error>) {
        if let Some(submitted) = &mut self.submitted {
            submitted.results = Some(step.map(Results::Ranks));
        }
    }
}

/// The step after a batch.
pub(super) struct NextStep<'a> {
    sequences: Vec<NextRow<'a>>,
}

struct NextRow<'a> {
    /// Without the row's token.
    of: BatchSequence<'a>,
    windows: Vec<WindowPages<'a>>,
    /// Whether the row is the first of a page.
    begins_page: bool,
}

impl<'a> NextStep<'a> {
    /// The next row of each sequence of `batch`, where the device has the tokens of all. `pools`
    /// are the pages of windows, `context` the positions of a sequence.
    pub(super) fn after(batch: &Batch<'a>, pools: &[WindowPool], context: usize) -> Option<Self> {
        let next = |s: &BatchSequence<'a>| {
            let position = s.position + s.tokens.len();
            let logits = match s.logits {
                Logits::Best => Logits::Best,
                Logits::Drawn(draw) => Logits::Drawn(draw.next()),
                _ => return None,
            };
            let is_next = position < context && s.pages.len() == position.div_ceil(PAGE);
            let window = |(pool, window): (&WindowPool, &WindowPages<'a>)| {
                let first_page = pool.first_page(position).max(window.first_page);
                let pages = window.pages.get(first_page - window.first_page..)?;
                Some(WindowPages { first_page, pages })
            };
            let windows: Option<Vec<_>> = pools.iter().zip(s.windows).map(window).collect();
            let row = NextRow {
                of: BatchSequence {
                    position,
                    logits,
                    ..*s
                },
                windows: windows?,
                begins_page: position.is_multiple_of(PAGE),
            };
            is_next.then_some(row)
        };
        let sequences = batch.sequences.iter().map(next);
        let sequences: Option<Vec<_>> = sequences.collect();
        sequences.map(|sequences| Self { sequences })
    }

    /// Whether a row is the first of a page, which the leader is still to name.
    pub(super) fn begins_pages(&self) -> bool {
        self.sequences.iter().any(|row| row.begins_page)
    }

    /// Runs `run` with the step as a batch of these tokens. Pages that begin are called `page`.
    pub(super) fn with<T>(
        &self,
        (tokens, page): (&[u32], u32),
        run: impl FnOnce(&Batch<'_>) -> T,
    ) -> T {
        let pages = self.sequences.iter().map(|row| {
            let begun = row.begins_page.then_some(page);
            row.of.pages.iter().copied().chain(begun).collect()
        });
        let pages: Vec<Vec<u32>> = pages.collect();
        let parts = self.sequences.iter().zip(tokens.chunks(1)).zip(&pages);
        let sequences: Vec<BatchSequence<'_>> = parts
            .map(|((row, tokens), pages)| BatchSequence {
                tokens,
                pages,
                windows: &row.windows,
                ..row.of
            })
            .collect();
        run(&Batch::new(&sequences))
    }

    /// The leader's plan of the step with these tokens, if it names pages that begin `page`.
    fn words(&self, tokens: &[u32], page: u32) -> Vec<u32> {
        let mut words = Vec::new();
        self.with((tokens, page), |batch| StepPlan::write(batch, &mut words));
        words
    }

    pub(super) const fn rows(&self) -> usize {
        self.sequences.len()
    }
}
