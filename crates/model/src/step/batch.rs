//! What a step is asked for: sequences with their pages, and how many there may be.

use paceline_tensor::{AttentionRows, PAGE};

use crate::WindowPool;

/// Which positions of a sequence give logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: more of the prompt follows.
    None,
    /// The last row's.
    Last,
    /// The last row's, of which the largest alone is wanted, the first among equals: others that
    /// another rank has computed may be NaN.
    Best,
    /// All rows'.
    All,
}

/// One sequence's share of a batch: consecutive rows at consecutive positions.
#[derive(Clone, Copy, Debug)]
pub struct BatchSequence<'a> {
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// Position of the first.
    pub position: usize,
    /// The sequence's pages in order of position; covers all positions up to the last token's.
    pub pages: &'a [u32],
    /// Its pages in each kind of layers that lets pages go ([`Kinds`](crate::Kinds)); empty where
    /// every kind has `pages`.
    pub windows: &'a [WindowPages<'a>],
    /// What is wanted.
    pub logits: Logits,
}

/// The pages that a kind of layers still has of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPages<'a> {
    /// How many pages of the sequence were let go.
    pub first_page: usize,
    /// Those behind, in order of position, up to the last token's.
    pub pages: &'a [u32],
}

impl<'a> BatchSequence<'a> {
    /// Its rows as layers of a kind see them.
    pub(crate) fn rows_of(&self, kind: usize) -> AttentionRows<'a> {
        let all = WindowPages {
            first_page: 0,
            pages: self.pages,
        };
        let window = kind
            .checked_sub(1)
            .and_then(|window| self.windows.get(window));
        let WindowPages { first_page, pages } = *window.unwrap_or(&all);
        AttentionRows {
            rows: self.tokens.len(),
            position: self.position,
            pages,
            first_page,
        }
    }

    /// The pages that hold its positions up to the last token's.
    pub(crate) fn pages_in_use(&self) -> &[u32] {
        &self.pages[..(self.position + self.tokens.len()).div_ceil(PAGE)]
    }
}

/// What a step computes: sequences that need not know of one another.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// In the order of their rows.
    pub sequences: &'a [BatchSequence<'a>],
}

impl Batch<'_> {
    /// Rows of the batch.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|s| s.tokens.len()).sum()
    }

    /// Rows whose logits are wanted, in order.
    pub(crate) fn wanted(&self, out: &mut Vec<usize>) {
        out.clear();
        let mut first = 0;
        for sequence in self.sequences {
            let end = first + sequence.tokens.len();
            match sequence.logits {
                Logits::None => {}
                Logits::Last | Logits::Best => out.push(end - 1),
                Logits::All => out.extend(first..end),
            }
            first = end;
        }
    }

    /// For each wanted row whether its largest logit alone is wanted.
    pub(crate) fn best(&self) -> Vec<bool> {
        let rows = |s: &BatchSequence<'_>| match s.logits {
            Logits::None => (false, 0),
            Logits::Last => (false, 1),
            Logits::Best => (true, 1),
            Logits::All => (false, s.tokens.len()),
        };
        let rows = self.sequences.iter().map(rows);
        rows.flat_map(|(best, n)| std::iter::repeat_n(best, n))
            .collect()
    }

    pub(crate) fn logit_rows(&self) -> usize {
        let rows = |s: &BatchSequence<'_>| match s.logits {
            Logits::None => 0,
            Logits::Last | Logits::Best => 1,
            Logits::All => s.tokens.len(),
        };
        self.sequences.iter().map(rows).sum()
    }
}

/// The largest batch that a [`Workspace`] is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSize {
    /// Rows of all sequences.
    pub rows: usize,
    /// Rows whose logits are wanted.
    pub logit_rows: usize,
    /// Sequences.
    pub sequences: usize,
    /// Positions of a sequence.
    pub context: usize,
}

impl BatchSize {
    /// For one sequence of up to `context` positions, `rows` of them at a time, of which the last
    /// gives logits.
    pub const fn single(rows: usize, context: usize) -> Self {
        Self {
            rows,
            logit_rows: 1,
            sequences: 1,
            context,
        }
    }
}

/// What a plan from another rank may ask for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits<'a> {
    pub(crate) rows: usize,
    pub(crate) logit_rows: usize,
    pub(crate) sequences: usize,
    pub(crate) context: usize,
    /// Pages of the layers that look at all positions.
    pub(crate) pages: usize,
    /// Those of the others.
    pub(crate) windows: &'a [WindowPool],
    pub(crate) vocab: usize,
}

impl<'a> Limits<'a> {
    pub(crate) const fn new(
        size: BatchSize,
        (pages, windows): (usize, &'a [WindowPool]),
        vocab: usize,
    ) -> Self {
        Self {
            rows: size.rows,
            logit_rows: size.logit_rows,
            sequences: size.sequences,
            context: size.context,
            pages,
            windows,
            vocab,
        }
    }
}
