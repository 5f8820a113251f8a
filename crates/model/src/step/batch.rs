//! Input of a step: sequences with their pages, and how many there may be.

use paceline_tensor::{AttentionRows, PAGE};

use crate::WindowPool;
use crate::candidates::Extent;

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
    /// The last row's logits that may be among its largest; others that another rank has computed
    /// may be NaN.
    Top(TopLogits),
    /// All rows'.
    All,
    /// As [`Best`](Self::Best), of all rows.
    AllBest,
    /// As [`Top`](Self::Top), of all rows.
    AllTop(TopLogits),
}

/// The largest logits of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopLogits {
    /// How many, at least 1.
    pub n: u16,
    /// Logits that are less than 2 to this power below the last of them are wanted too. Weights in
    /// f32 may be equal where logits are not.
    pub within: i8,
}

impl Logits {
    /// Rows with logits, of a sequence of `rows`.
    pub const fn rows(self, rows: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Last | Self::Best | Self::Top(_) => 1,
            Self::All | Self::AllBest | Self::AllTop(_) => rows,
        }
    }

    /// The same for all rows as for the last one.
    pub const fn of_all_rows(self) -> Self {
        match self {
            Self::Last => Self::All,
            Self::Best => Self::AllBest,
            Self::Top(top) => Self::AllTop(top),
            Self::None | Self::All | Self::AllBest | Self::AllTop(_) => self,
        }
    }

    /// The logits of a sequence's first rows, if this is for the whole.
    pub(crate) const fn before_the_last(self) -> Self {
        match self {
            Self::None | Self::Last | Self::Best | Self::Top(_) => Self::None,
            Self::All | Self::AllBest | Self::AllTop(_) => self,
        }
    }

    /// How much is wanted of each row with logits.
    const fn extent(self) -> Extent {
        match self {
            Self::None | Self::Last | Self::All => Extent::Whole,
            Self::Best | Self::AllBest => Extent::Best,
            Self::Top(top) | Self::AllTop(top) => Extent::Top(top),
        }
    }

    /// As a word of a plan: the kind in the lowest byte, what [`TopLogits`] has above it.
    pub(crate) fn to_word(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Last => 1,
            Self::All => 2,
            Self::Best => 3,
            Self::AllBest => 4,
            Self::Top(top) => top.to_word(TOP_KIND),
            Self::AllTop(top) => top.to_word(ALL_TOP_KIND),
        }
    }

    /// From a word of a plan; `None` for one that says nothing.
    pub(crate) fn from_word(word: u32) -> Option<Self> {
        let [kind, within, low, high] = word.to_le_bytes();
        let top = TopLogits {
            n: u16::from_le_bytes([low, high]),
            within: i8::from_le_bytes([within]),
        };
        match word {
            0 => Some(Self::None),
            1 => Some(Self::Last),
            2 => Some(Self::All),
            3 => Some(Self::Best),
            4 => Some(Self::AllBest),
            _ => match (kind, top.n) {
                (TOP_KIND, 1..) => Some(Self::Top(top)),
                (ALL_TOP_KIND, 1..) => Some(Self::AllTop(top)),
                _ => None,
            },
        }
    }
}

/// The lowest byte of the words for [`Logits::Top`] and [`Logits::AllTop`].
const TOP_KIND: u8 = 5;
const ALL_TOP_KIND: u8 = 6;

impl TopLogits {
    fn to_word(self, kind: u8) -> u32 {
        let ([low, high], [within]) = (self.n.to_le_bytes(), self.within.to_le_bytes());
        u32::from_le_bytes([kind, within, low, high])
    }
}

/// A sequence's share of a batch: consecutive rows at consecutive positions.
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
    /// The adapter of its rows, counted from 1 in the order of
    /// [`Weights::adapters`](crate::Weights::adapters); 0 for none.
    pub adapter: u32,
    /// Logits that are wanted.
    pub logits: Logits,
}

/// The pages that a kind of layers still has of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPages<'a> {
    /// How many pages of the sequence were let go.
    pub first_page: usize,
    /// Pages behind those let go, in order of position, up to the last token's.
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

/// Sequences that a step computes; they need not know of one another.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// In the order of their rows.
    pub sequences: &'a [BatchSequence<'a>],
}

impl Batch<'_> {
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|s| s.tokens.len()).sum()
    }

    /// The largest number of an adapter.
    pub(crate) fn adapters(&self) -> usize {
        let adapters = self.sequences.iter().map(|s| s.adapter);
        adapters.max().unwrap_or(0) as usize
    }

    /// Rows whose logits are wanted, in order.
    pub(crate) fn wanted(&self, out: &mut Vec<usize>) {
        out.clear();
        let mut first = 0;
        for sequence in self.sequences {
            let end = first + sequence.tokens.len();
            let rows = sequence.logits.rows(sequence.tokens.len());
            out.extend(end - rows..end);
            first = end;
        }
    }

    /// How much of each wanted row is wanted.
    pub(crate) fn extents(&self) -> Vec<Extent> {
        let rows = |s: &BatchSequence<'_>| {
            std::iter::repeat_n(s.logits.extent(), s.logits.rows(s.tokens.len()))
        };
        self.sequences.iter().flat_map(rows).collect()
    }

    pub(crate) fn logit_rows(&self) -> usize {
        let rows = |s: &BatchSequence<'_>| s.logits.rows(s.tokens.len());
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

/// Limits of a plan from another rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits<'a> {
    pub(crate) rows: usize,
    pub(crate) logit_rows: usize,
    pub(crate) sequences: usize,
    pub(crate) context: usize,
    /// Pages of the layers that look at all positions.
    pub(crate) pages: usize,
    /// Pages of the other layers.
    pub(crate) windows: &'a [WindowPool],
    pub(crate) vocab: usize,
    pub(crate) adapters: usize,
}

impl<'a> Limits<'a> {
    pub(crate) const fn new(
        size: BatchSize,
        (pages, windows): (usize, &'a [WindowPool]),
        (vocab, adapters): (usize, usize),
    ) -> Self {
        Self {
            rows: size.rows,
            logit_rows: size.logit_rows,
            sequences: size.sequences,
            context: size.context,
            pages,
            windows,
            vocab,
            adapters,
        }
    }
}
