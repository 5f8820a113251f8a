//! Compact logits: the words a rank sends the leader when only the largest logits of a row are
//! needed.
//!
//! [`pack`] runs on every rank of the last stage, [`unpack`] and [`place_owed`] on the leader.
//!
//! ```text
//! a rank's part of a message, for each row:
//!     whole   its n logits
//!     best    place, logit                             the first of the largest
//!     top     count | place, logit | place, logit ..   the largest, filled up to a fixed length
//! ```
//!
//! Places and counts travel as the bits of an f32. The leader fills missing logits with NaN. No
//! search for the largest picks a NaN, and sampling gives it weight 0. So the leader chooses the
//! same token as from whole rows. A row whose compact form has as many words as its logits is sent
//! whole.
//!
//! [`TopLogits`] may select more logits than the fixed length holds, for example when all logits
//! are equal. The count then exceeds the room, and a second message carries those rows whole.

use std::ops::Range;

use crate::{Logits, TopLogits};

/// Words of a row that sends only its largest logit.
const BEST_WORDS: usize = 2;

/// Logits per chunk of the search for the largest.
const CHUNK: usize = 64;

/// Logits of a row that the leader needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitExtent {
    Whole,
    /// Only the largest, the first among equals.
    Best,
    Top(TopLogits),
}

impl LogitExtent {
    /// The request for a row's values alone.
    pub fn request(self) -> Logits {
        match self {
            Self::Whole => Logits::Last,
            Self::Best => Logits::Best,
            Self::Top(top) => Logits::Top(top),
        }
    }

    /// Words of a row of `n` logits in a message.
    fn words(self, n: usize) -> usize {
        let words = match self {
            Self::Whole => n,
            Self::Best => BEST_WORDS,
            Self::Top(top) => 1 + 2 * room(top),
        };
        words.min(n)
    }

    fn is_short(self, n: usize) -> bool {
        self.words(n) < n
    }

    /// How many of a row's largest logits show by [`is_covered`](Self::is_covered) whether they
    /// are all that is needed. `None` for whole rows.
    pub fn probe(self) -> Option<usize> {
        match self {
            Self::Whole => None,
            Self::Best => Some(1),
            Self::Top(top) => Some(room(top) + 1),
        }
    }

    /// Whether `largest`, the largest logits of a row in any order, are all that is needed of it.
    /// A single one must be the first among equals.
    pub fn is_covered(self, largest: &[f32]) -> bool {
        let is_below = |bound: f32| move |logit: &f32| logit.is_nan() || *logit < bound;
        match self {
            Self::Whole => false,
            Self::Best if largest.len() == 1 => !largest[0].is_nan(),
            Self::Best => {
                let best = largest.iter().copied().fold(f32::NAN, f32::max);
                largest.iter().any(is_below(best))
            }
            Self::Top(top) => {
                let mut high = largest.to_vec();
                let bound = last_of(&mut high, usize::from(top.n)) - 2f32.powi(top.within.into());
                largest.iter().any(is_below(bound))
            }
        }
    }
}

/// Capacity of the first message for [`TopLogits`], in logits: the requested number, plus a quarter
/// of it and 16 for near ties. An estimate: an overflow costs a second message and changes no bit.
fn room(top: TopLogits) -> usize {
    let n = usize::from(top.n);
    n + n / 4 + 16
}

/// A rank's message with the candidate logits of its rows.
#[derive(Debug, Default)]
pub(crate) struct CandidateMessage {
    /// The first message, of [`packed_len`] words.
    pub(crate) words: Vec<f32>,
    /// The second message: rows that do not fit into the first; empty if all fit.
    pub(crate) whole: Vec<f32>,
}

/// Words of the first message with rows of `n` logits.
pub(crate) fn packed_len(n: usize, extents: &[LogitExtent]) -> usize {
    extents.iter().map(|extent| extent.words(n)).sum()
}

/// Packs `logits`, `(rows, n)`; `None` if the message is `logits` itself.
pub(crate) fn pack(logits: &[f32], extents: &[LogitExtent]) -> Option<CandidateMessage> {
    let n = logits.len() / extents.len().max(1);
    if n == 0 || !extents.iter().any(|extent| extent.is_short(n)) {
        return None;
    }
    let mut message = CandidateMessage::default();
    message.words.reserve(packed_len(n, extents));
    for (row, extent) in logits.chunks_exact(n).zip(extents) {
        match extent {
            _ if !extent.is_short(n) => message.words.extend(row),
            LogitExtent::Top(top) => message.add_top(row, *top),
            LogitExtent::Best | LogitExtent::Whole => message.add_place(row, first_largest(row)),
        }
    }
    Some(message)
}

impl CandidateMessage {
    fn add_place(&mut self, row: &[f32], place: usize) {
        self.words
            .extend([f32::from_bits(place as u32), row[place]]);
    }

    fn add_top(&mut self, row: &[f32], top: TopLogits) {
        let room = room(top);
        let end = self.words.len() + 1 + 2 * room;
        let places = largest(row, top, room);
        self.words.push(f32::from_bits(places.len() as u32));
        if places.len() > room {
            self.whole.extend(row);
        } else {
            let places = places.into_iter();
            places.for_each(|place| self.add_place(row, place));
        }
        self.words.resize(end, 0.0);
    }
}

/// Writes the rows of a first message into the `columns` of `all`, `(rows, vocabulary)`. Returns
/// the rows that a second message carries whole. Skips places outside the columns, which only a
/// rank with another model sends.
pub(crate) fn unpack(
    message: &[f32],
    extents: &[LogitExtent],
    columns: &Range<usize>,
    all: &mut [f32],
) -> Vec<usize> {
    let (n, vocab) = (columns.len(), all.len() / extents.len().max(1));
    let (mut rest, mut owed) = (message, Vec::new());
    let rows = all.chunks_exact_mut(vocab.max(1)).zip(extents);
    for (i, (row, extent)) in rows.enumerate() {
        let own = &mut row[columns.clone()];
        let (part, behind) = rest.split_at(extent.words(n));
        rest = behind;
        if !extent.is_short(n) {
            own.copy_from_slice(part);
            continue;
        }
        let pairs = match extent {
            LogitExtent::Top(_) => counted(part).unwrap_or_else(|| {
                owed.push(i);
                &[]
            }),
            LogitExtent::Best | LogitExtent::Whole => part,
        };
        place_pairs(pairs, own);
    }
    owed
}

/// The place and logit words after the count; `None` if the count exceeds the room.
fn counted(part: &[f32]) -> Option<&[f32]> {
    let (count, pairs) = part.split_first()?;
    let words = (count.to_bits() as usize).checked_mul(2)?;
    pairs.get(..words)
}

fn place_pairs(pairs: &[f32], own: &mut [f32]) {
    own.fill(f32::NAN);
    for pair in pairs.chunks_exact(2) {
        let place = own.get_mut(pair[0].to_bits() as usize);
        place.into_iter().for_each(|place| *place = pair[1]);
    }
}

/// Writes the rows of a second message, `(owed, n)`, into the `columns` of `all`, `(rows,
/// vocabulary)`.
pub(crate) fn place_owed(
    message: &[f32],
    owed: &[usize],
    columns: &Range<usize>,
    (all, vocab): (&mut [f32], usize),
) {
    for (part, row) in message.chunks_exact(columns.len().max(1)).zip(owed) {
        all[row * vocab..][columns.clone()].copy_from_slice(part);
    }
}

/// Index of the largest, the first among equals; a NaN only if all values are NaN.
fn first_largest(row: &[f32]) -> usize {
    let mut best = (f32::NEG_INFINITY, 0);
    for (i, logit) in row.iter().enumerate() {
        if *logit > best.0 {
            best = (*logit, i);
        }
    }
    best.1
}

/// Ascending places of the logits that [`TopLogits`] selects: the largest, and those within its
/// margin. NaN never counts. Returns all numbers if there are fewer, and at most `room + 1`.
fn largest(row: &[f32], top: TopLogits, room: usize) -> Vec<usize> {
    let n = usize::from(top.n);
    let least = reached_by(row, n);
    let mut high: Vec<f32> = row.iter().copied().filter(|x| *x >= least).collect();
    let bound = match high.len() < n {
        true => f32::NEG_INFINITY,
        false => last_of(&mut high, n) - 2f32.powi(top.within.into()),
    };
    let places = row.iter().enumerate().filter(|(_, x)| **x >= bound);
    places.map(|(place, _)| place).take(room + 1).collect()
}

/// A value that at least `n` (1 or more) elements of the row reach: the n-th largest of the chunk
/// maxima. Minus infinity if there are fewer chunks.
fn reached_by(row: &[f32], n: usize) -> f32 {
    let larger = |a: f32, b: &f32| if *b > a { *b } else { a };
    let peak = |chunk: &[f32]| chunk.iter().fold(f32::NEG_INFINITY, larger);
    let mut peaks: Vec<f32> = row.chunks(CHUNK).map(peak).collect();
    match peaks.len() < n {
        true => f32::NEG_INFINITY,
        false => last_of(&mut peaks, n),
    }
}

/// The n-th largest of at least `n` values.
fn last_of(values: &mut [f32], n: usize) -> f32 {
    *values
        .select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a))
        .1
}

/// The leader's copy of a `row` whose consecutive `parts` lie on the ranks. The first part is
/// whole; of the others it has the columns in `extent`.
pub fn gathered(row: &[f32], parts: &[Range<usize>], extent: LogitExtent) -> Vec<f32> {
    let (mut all, vocab) = (vec![0.0; row.len()], row.len());
    for (rank, columns) in parts.iter().enumerate() {
        let mine = &row[columns.clone()];
        let extents = [if rank == 0 {
            LogitExtent::Whole
        } else {
            extent
        }];
        let packed = pack(mine, &extents);
        let words = packed
            .as_ref()
            .map_or(mine, |packed| packed.words.as_slice());
        assert_eq!(words.len(), packed_len(columns.len(), &extents));
        let owed = unpack(words, &extents, columns, &mut all);
        let whole = packed.map(|packed| packed.whole).unwrap_or_default();
        place_owed(&whole, &owed, columns, (&mut all[..], vocab));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of a small vocabulary with equal logits, NaN and infinities.
    fn row(seed: usize, n: usize) -> Vec<f32> {
        let values = [0.5, -1.0, 3.0, 3.0, f32::NAN, f32::NEG_INFINITY, 2.0, -0.0];
        (0..n)
            .map(|i| values[(i * 5 + seed * 3 + i * seed) % 8])
            .collect()
    }

    fn bits(row: &[f32]) -> Vec<u32> {
        row.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn the_largest_of_all_ranks_is_found_in_what_is_sent() {
        for (seed, n) in (0..40).flat_map(|seed| [(seed, 9), (seed, 12), (seed, 30)]) {
            let ranks = [0..n / 3, n / 3..n / 3 + 2, n / 3 + 2..n];
            let extent = |is_best| {
                if is_best {
                    LogitExtent::Best
                } else {
                    LogitExtent::Whole
                }
            };
            let extents = [seed % 2 == 0, true, seed % 3 == 0].map(extent);
            let rows: Vec<Vec<f32>> = (0..3).map(|i| row(seed + i, n)).collect();
            let mut all = vec![7.0; 3 * n];
            for columns in &ranks {
                let mine: Vec<f32> = rows
                    .iter()
                    .flat_map(|r| r[columns.clone()].to_vec())
                    .collect();
                let packed = pack(&mine, &extents);
                let message = packed
                    .as_ref()
                    .map_or(mine.as_slice(), |packed| packed.words.as_slice());
                assert_eq!(message.len(), packed_len(columns.len(), &extents));
                assert!(unpack(message, &extents, columns, &mut all).is_empty());
            }
            for ((got, row), extent) in all.chunks(n).zip(&rows).zip(extents) {
                assert_eq!(first_largest(got), first_largest(row), "{row:?}");
                assert!(
                    extent == LogitExtent::Best || bits(got) == bits(row),
                    "{got:?} {row:?}"
                );
            }
        }
    }

    #[test]
    fn a_place_outside_of_the_columns_is_left_out() {
        let mut all = vec![1.0; 8];
        unpack(
            &[f32::from_bits(4), 9.0],
            &[LogitExtent::Best],
            &(4..8),
            &mut all,
        );
        assert_eq!(all[..4], [1.0; 4]);
        assert!(all[4..].iter().all(|logit| logit.is_nan()));
    }

    /// Rows with equal logits, with logits far apart, and with few numbers.
    #[test]
    fn every_logit_that_is_wanted_is_sent() {
        let top = TopLogits { n: 3, within: -2 };
        for seed in 0..40 {
            let row: Vec<f32> = match seed % 4 {
                0 => row(seed, 200),
                1 => (0..200).map(|i| ((i * 37 + seed) % 200) as f32).collect(),
                2 => (0..200)
                    .map(|i| [f32::NAN, 1.0][usize::from(i == seed)])
                    .collect(),
                _ => vec![f32::NEG_INFINITY; 200],
            };
            let got = gathered(&row, &[0..50, 50..130, 130..200], LogitExtent::Top(top));
            assert_eq!(bits(&got[..50]), bits(&row[..50]), "the leader's own");
            for columns in [50..130, 130..200] {
                let (mine, got) = (&row[columns.clone()], &got[columns]);
                for (logit, got) in mine.iter().zip(got) {
                    let above = mine.iter().filter(|other| **other - 0.25 > *logit).count();
                    let is_wanted = !logit.is_nan() && above < 3;
                    assert!(got.to_bits() == logit.to_bits() || (!is_wanted && got.is_nan()));
                }
            }
        }
    }

    /// The second message has the rows that overflow the first; otherwise it is empty.
    #[test]
    fn rows_of_many_equal_logits_follow_whole() {
        let extents = [LogitExtent::Top(TopLogits { n: 1, within: -2 }); 2];
        let steep = (0..100).map(|i| i as f32);
        let rows: Vec<f32> = std::iter::repeat_n(2.0, 100).chain(steep).collect();
        let message = pack(&rows, &extents).unwrap();
        assert_eq!(message.whole, rows[..100]);
        let mut all = vec![5.0; 400];
        let owed = unpack(&message.words, &extents, &(100..200), &mut all);
        assert_eq!(owed, [0]);
        place_owed(&message.whole, &owed, &(100..200), (&mut all[..], 200));
        assert_eq!(all[100..200], rows[..100]);
        assert!(all[300..399].iter().all(|logit| logit.is_nan()));
        assert_eq!((all[399], all[99], all[200]), (99.0, 5.0, 5.0));
    }
}
