//! The plan of a step, which the leader of a split model sends the other ranks before each step, as
//! 32-bit words:
//!
//! ```text
//! length in words | kind | sequences | windows, then for each sequence:
//!     tokens, position, logits, adapter, pages, then for each window: first page, pages
//! then for each sequence: its tokens, its pages, those of its windows, its draw
//! ```
//!
//! The words are padded to [`HEADER_WORDS`]. Plans come from another process, so [`StepPlan::read`]
//! checks every number against this rank's own sizes.

use std::ops::Range;

use paceline_tensor::PAGE;

use crate::WindowPages;

use crate::Error;
use crate::step::{Batch, BatchSequence, Logits, PlanLimits, TokenDraw};

/// Words of the first message of every plan. A decode step of one sequence of 8192 positions, or of
/// 30 short ones, fits into it.
pub(crate) const HEADER_WORDS: usize = 256;

/// Longest plan in words, 64 MiB: a step of a million rows over a million pages.
const WORDS_MAX: usize = 1 << 24;

/// Words of each sequence, without its windows.
const FIELDS: usize = 5;

/// Kinds of plans.
const STEP: u32 = 1;
const IDLE: u32 = 2;

/// A received and checked plan.
#[derive(Debug, Default)]
pub struct StepPlan {
    sequences: Vec<SequencePlan>,
    /// First page and pages of each window, sequence by sequence.
    windows: Vec<(usize, Range<usize>)>,
}

/// A sequence of a plan, as ranges of its words.
#[derive(Debug)]
struct SequencePlan {
    tokens: Range<usize>,
    pages: Range<usize>,
    position: usize,
    adapter: u32,
    logits: Logits,
}

const fn bad(what: &'static str, got: usize, limit: usize) -> Error {
    Error::Plan { what, got, limit }
}

const fn at_most(what: &'static str, got: usize, limit: usize) -> Result<usize, Error> {
    if got <= limit {
        Ok(got)
    } else {
        Err(bad(what, got, limit))
    }
}

impl StepPlan {
    /// Writes the plan of a step.
    pub fn write(batch: &Batch<'_>, words: &mut Vec<u32>) {
        words.clear();
        let windows = batch.sequences.first().map_or(0, |s| s.windows.len());
        words.extend([0, STEP, batch.sequences.len() as u32, windows as u32]);
        for s in batch.sequences {
            let pages = s.pages_in_use().len();
            words.extend([
                s.tokens.len() as u32,
                s.position as u32,
                s.logits.to_word(),
                s.adapter,
                pages as u32,
            ]);
            let window = |w: &WindowPages<'_>| [w.first_page as u32, w.pages.len() as u32];
            words.extend(s.windows.iter().flat_map(window));
        }
        for s in batch.sequences {
            words.extend_from_slice(s.tokens);
            words.extend_from_slice(s.pages_in_use());
            words.extend(s.windows.iter().flat_map(|w| w.pages));
            if let Logits::Drawn(draw) = s.logits {
                words.extend(draw.to_words());
            }
        }
        finish(words);
    }

    /// Writes a keepalive: a plan without work.
    pub(crate) fn write_idle(words: &mut Vec<u32>) {
        words.clear();
        words.extend([0, IDLE, 0, 0]);
        finish(words);
    }

    /// Words of the whole message that starts with `header`.
    pub(crate) fn len_of(header: &[u32]) -> Result<usize, Error> {
        at_most("words", header[0] as usize, WORDS_MAX)
    }

    /// Reads and checks the plan in `words`; `None` for a keepalive.
    pub fn read(words: &[u32], limits: &PlanLimits<'_>) -> Result<Option<Self>, Error> {
        match words[1] {
            IDLE => return Ok(None),
            STEP => {}
            kind => return Err(bad("kind", kind as usize, IDLE as usize)),
        }
        let n = at_most("sequences", words[2] as usize, limits.sequences)?;
        let w = at_most("windows", words[3] as usize, limits.windows.len())?;
        let fields = FIELDS + 2 * w;
        let mut at = 4 + fields * n;
        let mut take = |count: usize| {
            let range = at..at + count;
            at = range.end;
            at_most("words in use", range.end, words.len()).map(|_| range)
        };
        take(0)?;
        let (mut sequences, mut windows) = (Vec::with_capacity(n), Vec::with_capacity(n * w));
        for i in 0..n {
            let field = |field| words[4 + fields * i + field] as usize;
            let [tokens, position, logits, adapter, pages] = [0, 1, 2, 3, 4].map(field);
            let mut sequence = SequencePlan {
                tokens: take(at_most("rows", tokens, limits.rows)?)?,
                pages: take(at_most("pages", pages, limits.pages)?)?,
                position: at_most("position", position, limits.context)?,
                adapter: at_most("adapter", adapter, limits.adapters)? as u32,
                logits: Logits::from_word(logits as u32).ok_or_else(|| bad("logits", logits, 7))?,
            };
            for window in 0..w {
                let [first, pages] = [0, 1].map(|i| field(FIELDS + 2 * window + i));
                let pages = at_most("pages of a window", pages, limits.windows[window].pages)?;
                windows.push((at_most("first page", first, limits.context)?, take(pages)?));
            }
            if let Logits::Drawn(draw) = &mut sequence.logits {
                let own = TokenDraw::from_words(&words[take(TokenDraw::WORDS)?], limits.vocab);
                *draw = own.ok_or_else(|| bad("draw", i, n))?;
            }
            sequences.push(sequence);
        }
        let plan = Self { sequences, windows };
        plan.check(words, limits).map(|()| Some(plan))
    }

    fn check(&self, words: &[u32], limits: &PlanLimits<'_>) -> Result<(), Error> {
        let windows: Vec<WindowPages<'_>> = self.windows(words).collect();
        let batch: Vec<BatchSequence<'_>> = self.batch(words, &windows).collect();
        let batch = Batch::new(&batch);
        at_most("rows", batch.rows(), limits.rows)?;
        at_most("rows of logits", batch.logit_rows(), limits.logit_rows)?;
        for s in batch.sequences {
            let last = s.position + s.tokens.len();
            at_most("positions", last, limits.context)?;
            at_most("pages needed", last.div_ceil(PAGE), s.pages.len())?;
            if s.tokens.is_empty() {
                return Err(bad("rows of a sequence", 0, limits.rows));
            }
            for token in s.tokens {
                at_most("token", *token as usize, limits.vocab - 1)?;
            }
            for page in s.pages {
                at_most("page", *page as usize, limits.pages_in_all(s) - 1)?;
            }
            limits.check_windows(s)?;
        }
        Ok(())
    }

    /// Pages of the windows in the plan, sequence by sequence.
    pub fn windows<'a>(&'a self, words: &'a [u32]) -> impl Iterator<Item = WindowPages<'a>> + 'a {
        self.windows.iter().map(|(first_page, pages)| WindowPages {
            first_page: *first_page,
            pages: &words[pages.clone()],
        })
    }

    /// Sequences of the plan in `words`, with its [`windows`](Self::windows).
    pub fn batch<'a>(
        &'a self,
        words: &'a [u32],
        windows: &'a [WindowPages<'a>],
    ) -> impl Iterator<Item = BatchSequence<'a>> + 'a {
        let each = windows.len() / self.sequences.len().max(1);
        let parts = self.sequences.iter().enumerate();
        parts.map(move |(i, part)| BatchSequence {
            windows: &windows[i * each..(i + 1) * each],
            tokens: &words[part.tokens.clone()],
            position: part.position,
            adapter: part.adapter,
            pages: &words[part.pages.clone()],
            logits: part.logits,
        })
    }
}

impl PlanLimits<'_> {
    /// Pages of the smallest pool, for sequences that use the same pages in every kind of layers.
    fn pages_in_all(&self, sequence: &BatchSequence<'_>) -> usize {
        let windows = self.windows.iter().filter(|_| sequence.windows.is_empty());
        windows
            .map(|window| window.pages)
            .fold(self.pages, usize::min)
    }

    /// Checks that the windows of a sequence have all pages its rows read.
    fn check_windows(&self, s: &BatchSequence<'_>) -> Result<(), Error> {
        let kinds = self.windows.len();
        if !s.windows.is_empty() && s.windows.len() != kinds {
            return Err(bad("windows", s.windows.len(), kinds));
        }
        for (pool, window) in self.windows.iter().zip(s.windows) {
            at_most("first page", window.first_page, pool.first_page(s.position))?;
            let needed = (s.position + s.tokens.len()).div_ceil(PAGE);
            at_most(
                "pages needed",
                needed,
                window.first_page + window.pages.len(),
            )?;
            for page in window.pages {
                at_most(
                    "page of a window",
                    *page as usize,
                    pool.pages.saturating_sub(1),
                )?;
            }
        }
        Ok(())
    }
}

/// Parses `words` as a plan, for fuzzing.
pub(crate) fn parse(words: &[u32]) {
    if words.len() < HEADER_WORDS {
        return;
    }
    let limits = PlanLimits {
        rows: 300,
        logit_rows: 8,
        sequences: 4,
        context: 400,
        pages: 20,
        windows: &[crate::WindowPool {
            every: 1,
            back: 70,
            pages: 20,
        }],
        vocab: 1000,
        adapters: 2,
    };
    let _ = StepPlan::len_of(words);
    if let Ok(Some(plan)) = StepPlan::read(words, &limits) {
        let windows: Vec<_> = plan.windows(words).collect();
        let rows: usize = plan.batch(words, &windows).map(|s| s.tokens.len()).sum();
        assert!(rows <= limits.rows, "{rows} rows");
    }
}

/// Writes the length and pads to a header.
fn finish(words: &mut Vec<u32>) {
    let len = words.len().max(HEADER_WORDS);
    words.resize(len, 0);
    words[0] = len as u32;
}

#[cfg(test)]
mod tests;
