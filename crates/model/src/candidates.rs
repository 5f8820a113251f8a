//! Rows of logits of which the largest alone is wanted: what a rank sends of them to the leader.
//!
//! ```text
//! a rank's part of a message: for each row either its n logits, or the largest and its place
//! ```
//!
//! The place is the first among equals, and the bits of a f32 carry it. The leader puts NaN for the
//! logits that it does not get: no search for the largest takes one. So it finds the same token as
//! in whole rows. Rows of two columns or less are sent whole.

use std::ops::Range;

/// Words of a row whose largest logit alone is sent.
const WORDS: usize = 2;

const fn is_short(n: usize, best: bool) -> bool {
    best && n > WORDS
}

/// Words of a message with rows of `n` logits.
pub(crate) fn packed_len(n: usize, best: &[bool]) -> usize {
    let words = |best: &bool| if is_short(n, *best) { WORDS } else { n };
    best.iter().map(words).sum()
}

/// The message for `logits`, `(rows, n)`; `None` where that is `logits` itself.
pub(crate) fn pack(logits: &[f32], best: &[bool]) -> Option<Vec<f32>> {
    let n = logits.len() / best.len().max(1);
    if n == 0 || !best.iter().any(|best| is_short(n, *best)) {
        return None;
    }
    let mut message = Vec::with_capacity(packed_len(n, best));
    for (row, best) in logits.chunks_exact(n).zip(best) {
        if is_short(n, *best) {
            let place = first_largest(row);
            message.extend([row[place], f32::from_bits(place as u32)]);
        } else {
            message.extend(row);
        }
    }
    Some(message)
}

/// Puts the rows of a message into the `columns` of `all`, `(rows, vocabulary)`. A place outside of
/// them, from a rank that computes another model, is left out.
pub(crate) fn unpack(message: &[f32], best: &[bool], columns: &Range<usize>, all: &mut [f32]) {
    let (n, vocab) = (columns.len(), all.len() / best.len().max(1));
    let mut rest = message;
    for (row, best) in all.chunks_exact_mut(vocab.max(1)).zip(best) {
        let own = &mut row[columns.clone()];
        let words = if is_short(n, *best) { WORDS } else { n };
        let (part, behind) = rest.split_at(words);
        rest = behind;
        if is_short(n, *best) {
            own.fill(f32::NAN);
            let place = own.get_mut(part[1].to_bits() as usize);
            place.into_iter().for_each(|place| *place = part[0]);
        } else {
            own.copy_from_slice(part);
        }
    }
}

/// Where the largest is, the first among equals; a NaN only if there is nothing else.
fn first_largest(row: &[f32]) -> usize {
    let mut best = (f32::NEG_INFINITY, 0);
    for (i, logit) in row.iter().enumerate() {
        if *logit > best.0 {
            best = (*logit, i);
        }
    }
    best.1
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

    #[test]
    fn the_largest_of_all_ranks_is_found_in_what_is_sent() {
        for (seed, n) in (0..40).flat_map(|seed| [(seed, 9), (seed, 12), (seed, 30)]) {
            let ranks = [0..n / 3, n / 3..n / 3 + 2, n / 3 + 2..n];
            let best = [seed % 2 == 0, true, seed % 3 == 0];
            let rows: Vec<Vec<f32>> = (0..3).map(|i| row(seed + i, n)).collect();
            let mut all = vec![7.0; 3 * n];
            for columns in &ranks {
                let mine: Vec<f32> = rows
                    .iter()
                    .flat_map(|r| r[columns.clone()].to_vec())
                    .collect();
                let packed = pack(&mine, &best);
                let message = packed.as_deref().unwrap_or(&mine);
                assert_eq!(message.len(), packed_len(columns.len(), &best));
                unpack(message, &best, columns, &mut all);
            }
            for ((got, row), best) in all.chunks(n).zip(&rows).zip(best) {
                assert_eq!(first_largest(got), first_largest(row), "{row:?}");
                let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(best || bits(got) == bits(row), "{got:?} {row:?}");
            }
        }
    }

    #[test]
    fn a_place_outside_of_the_columns_is_left_out() {
        let mut all = vec![1.0; 8];
        unpack(&[9.0, f32::from_bits(4)], &[true], &(4..8), &mut all);
        assert_eq!(all[..4], [1.0; 4]);
        assert!(all[4..].iter().all(|logit| logit.is_nan()));
    }
}
