//! Parsers of what other ranks say, for fuzzing, and what a leader gets of a row of logits.

use std::ops::Range;

use crate::TopLogits;
use crate::candidates::{self, Extent};

/// Reads `words` as a plan of the leader: whatever they are, this returns. A plan that is taken has
/// no more rows than this rank has room for.
pub fn parse_plan(words: &[u32]) {
    crate::plan::parse(words);
}

/// A tensor split's leader's copy of a row of logits, `(vocabulary,)`, when those of
/// [`Logits::Top`](crate::Logits::Top) are wanted. `parts` are the ranks' columns, which follow one
/// another; the leader's are the first.
///
/// # Panics
/// If the parts are not within the row.
pub fn gathered(row: &[f32], parts: &[Range<usize>], top: TopLogits) -> Vec<f32> {
    candidates::gathered(row, parts, Extent::Top(top))
}
