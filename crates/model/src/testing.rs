//! Entry points for fuzz targets and tests: the parser of other ranks' plans, and the leader's
//! gathered logits.

use std::ops::Range;

use crate::TopLogits;
use crate::candidates::{self, Extent};

/// Parses `words` as a plan of the leader; must never panic. An accepted plan has at most this
/// rank's maximum of rows.
pub fn parse_plan(words: &[u32]) {
    crate::plan::parse(words);
}

/// The leader's copy of a row of logits, `(vocabulary,)`, gathered from a tensor split with
/// [`Logits::Top`](crate::Logits::Top). `parts` are the consecutive columns of the ranks, the
/// leader's first.
///
/// # Panics
/// If the parts are not within the row.
pub fn gathered(row: &[f32], parts: &[Range<usize>], top: TopLogits) -> Vec<f32> {
    candidates::gathered(row, parts, Extent::Top(top))
}
