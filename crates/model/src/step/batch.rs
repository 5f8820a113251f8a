//! Input of a step: sequences with tokens, positions and cache pages, and the requested logits.
//!
//! The engine builds a [`Batch`] for each step. [`BatchSize`] bounds it when memory is reserved.

use paceline_tensor::{AttentionRows, PAGE};

use super::draw::TokenDraw;
use crate::WindowPool;
use crate::candidates::LogitExtent;

/// Rows of a sequence that need logits, and how many values of each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Logits {
    /// None, for a prompt chunk before the last.
    None,
    /// All logits of the last row.
    Last,
    /// The largest logit of the last row, the first among equals. Other logits computed by other
    /// ranks may be NaN.
    Best,
    /// The largest logits of the last row. Other logits computed by other ranks may be NaN.
    Top(TopLogits),
    /// All logits of all rows.
    All,
    /// As [`Best`](Self::Best), for all rows.
    AllBest,
    /// As [`Top`](Self::Top), for all rows.
    AllTop(TopLogits),
    /// The token behind the last row, which the step draws. The others' logits may be NaN. Only
    /// where a backend [draws](crate::Compute::draws_tokens).
    Drawn(TokenDraw),
}

/// How many of a row's largest logits are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopLogits {
    /// At least 1.
    pub n: u16,
    /// Margin: also needed are logits within 2 to this power of the n-th largest. Sampling weights
    /// in f32 may be equal where logits differ.
    pub within: i8,
}

impl Logits {
    /// Rows with logits, of `rows` rows in the sequence.
    pub const fn rows(self, rows: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Last | Self::Best | Self::Top(_) | Self::Drawn(_) => 1,
            Self::All | Self::AllBest | Self::AllTop(_) => rows,
        }
    }

    /// The same request for all rows instead of the last.
    pub const fn of_all_rows(self) -> Self {
        match self {
            Self::Last | Self::Drawn(_) => Self::All,
            Self::Best => Self::AllBest,
            Self::Top(top) => Self::AllTop(top),
            Self::None | Self::All | Self::AllBest | Self::AllTop(_) => self,
        }
    }

    /// The request for the first rows of a divided sequence.
    pub const fn before_the_last(self) -> Self {
        match self {
            Self::None | Self::Last | Self::Best | Self::Top(_) | Self::Drawn(_) => Self::None,
            Self::All | Self::AllBest | Self::AllTop(_) => self,
        }
    }

    /// Values that are needed of each row with logits.
    pub fn extent(self) -> LogitExtent {
        match self {
            Self::None | Self::Last | Self::All => LogitExtent::Whole,
            Self::Drawn(draw) => draw.extent(),
            Self::Best | Self::AllBest => LogitExtent::Best,
            Self::Top(top) | Self::AllTop(top) => LogitExtent::Top(top),
        }
    }

    /// Encoding in a plan: the kind in the lowest byte, the fields of [`TopLogits`] above it.
    pub(crate) fn to_word(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Last => 1,
            Self::All => 2,
            Self::Best => 3,
            Self::AllBest => 4,
            Self::Top(top) => top.to_word(TOP_KIND),
            Self::AllTop(top) => top.to_word(ALL_TOP_KIND),
            Self::Drawn(_) => DRAWN,
        }
    }

    /// Decodes a word of a plan; `None` if invalid. The words of a [`TokenDraw`] are apart.
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
            DRAWN => Some(Self::Drawn(TokenDraw::LARGEST)),
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

/// The word for [`Logits::Drawn`].
const DRAWN: u32 = 7;

/// Highest temperature, as a power of two, at which top-k provably selects from the [`TopLogits`].
/// It bounds the proof at [`TopLogits::of_draw`], and is far above usual requests.
const TOP_TEMPERATURE_MAX: i8 = 4;

/// Logits that differ by more than the temperature times 2 to this power have different weights.
const APART: i8 = -10;

impl TopLogits {
    /// The `n` largest logits, which top-k keeps, and all that may equal them at a temperature.
    /// Forbidden tokens are to be counted in addition, so that enough others remain.
    ///
    /// Top-k keeps by weight, then by token, and unlike logits may have equal weights. With `t`
    /// the logit less the largest, over the temperature: weights are above 0 from `t = -87.33` on.
    /// There two roundings move `t` by 1.1e-5 at most, and exponentials err by 3e-7 of the weight.
    /// So a logit that is `2^-10` temperatures below another has a smaller weight, or both have
    /// none. A rank's logit further below its own n-th largest is below n weights, and out.
    /// Top-p and min-p take from what top-k keeps, and the draw passes over weights of 0.
    pub fn of_draw(n: usize, temperature: f32) -> Option<Self> {
        let n = u16::try_from(n).ok()?;
        let is_above = |power: &i8| temperature <= 2f32.powi((*power).into());
        let power = (0..=TOP_TEMPERATURE_MAX).find(is_above)?;
        Some(Self {
            n,
            within: power + APART,
        })
    }

    fn to_word(self, kind: u8) -> u32 {
        let ([low, high], [within]) = (self.n.to_le_bytes(), self.within.to_le_bytes());
        u32::from_le_bytes([kind, within, low, high])
    }
}

/// A sequence in a batch: consecutive rows at consecutive positions.
#[derive(Clone, Copy, Debug)]
pub struct BatchSequence<'a> {
    /// At least one.
    pub tokens: &'a [u32],
    /// Position of the first token.
    pub position: usize,
    /// The sequence's cache pages in order of position, up to the last token's position at least.
    pub pages: &'a [u32],
    /// Pages in each kind of layers that releases pages ([`Kinds`](crate::Kinds)); empty if every
    /// kind uses `pages`.
    pub windows: &'a [WindowPages<'a>],
    /// Adapter number of its rows, counted from 1 in the order of
    /// [`Weights::adapters`](crate::Weights::adapters); 0 for none.
    pub adapter: u32,
    pub logits: Logits,
}

/// A sequence's remaining pages in one kind of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPages<'a> {
    /// Released pages.
    pub first_page: usize,
    /// Remaining pages in order of position, up to the last token's.
    pub pages: &'a [u32],
}

impl<'a> BatchSequence<'a> {
    /// Rows of the base model's own weights, in layers that all keep `pages`.
    pub const fn plain(
        tokens: &'a [u32],
        position: usize,
        pages: &'a [u32],
        logits: Logits,
    ) -> Self {
        Self {
            tokens,
            position,
            pages,
            windows: &[],
            adapter: 0,
            logits,
        }
    }

    /// Its rows for the attention of one kind of layers.
    pub fn rows_of(&self, kind: usize) -> AttentionRows<'a> {
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

    /// Pages of its positions up to the last token's.
    pub(crate) fn pages_in_use(&self) -> &[u32] {
        &self.pages[..(self.position + self.tokens.len()).div_ceil(PAGE)]
    }
}

/// Sequences computed in one step, independently of each other.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    pub sequences: &'a [BatchSequence<'a>],
}

impl<'a> Batch<'a> {
    pub const fn new(sequences: &'a [BatchSequence<'a>]) -> Self {
        Self { sequences }
    }

    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|s| s.tokens.len()).sum()
    }

    /// Largest adapter number.
    pub(crate) fn adapters(&self) -> usize {
        let adapters = self.sequences.iter().map(|s| s.adapter);
        adapters.max().unwrap_or(0) as usize
    }

    /// Rows that need logits, in order.
    pub fn wanted(&self, out: &mut Vec<usize>) {
        out.clear();
        let mut first = 0;
        for sequence in self.sequences {
            let end = first + sequence.tokens.len();
            let rows = sequence.logits.rows(sequence.tokens.len());
            out.extend(end - rows..end);
            first = end;
        }
    }

    /// Values that are needed of each row with logits.
    pub fn extents(&self) -> Vec<LogitExtent> {
        let requests = self.requests();
        requests.iter().map(|request| request.extent()).collect()
    }

    /// The use of each row with logits.
    pub fn requests(&self) -> Vec<Logits> {
        let rows =
            |s: &BatchSequence<'_>| std::iter::repeat_n(s.logits, s.logits.rows(s.tokens.len()));
        self.sequences.iter().flat_map(rows).collect()
    }

    /// Rows with logits, of all sequences.
    pub fn logit_rows(&self) -> usize {
        let rows = |s: &BatchSequence<'_>| s.logits.rows(s.tokens.len());
        self.sequences.iter().map(rows).sum()
    }
}

/// The largest batch of a [`Workspace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSize {
    pub rows: usize,
    /// Rows with logits.
    pub logit_rows: usize,
    pub sequences: usize,
    /// Positions of a sequence.
    pub context: usize,
}

impl BatchSize {
    /// For one sequence of up to `context` positions, in chunks of `rows` rows with logits for the
    /// last.
    pub const fn single(rows: usize, context: usize) -> Self {
        Self {
            rows,
            logit_rows: 1,
            sequences: 1,
            context,
        }
    }
}

/// Bounds for a plan from another rank.
#[derive(Clone, Copy, Debug)]
pub struct PlanLimits<'a> {
    pub(crate) rows: usize,
    pub(crate) logit_rows: usize,
    pub(crate) sequences: usize,
    pub(crate) context: usize,
    /// Pages of layers that attend to all positions.
    pub(crate) pages: usize,
    /// Pages of the other kinds of layers.
    pub(crate) windows: &'a [WindowPool],
    pub(crate) vocab: usize,
    pub(crate) adapters: usize,
}

impl<'a> PlanLimits<'a> {
    /// Bounds of a plan: the reserved sizes, the cache's pages, and the model's vocabulary and
    /// adapters.
    pub const fn new(
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
