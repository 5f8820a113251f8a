//! A few experts of a layer in the places of all, for measurements.

use std::ops::Range;
use std::sync::Arc;

use super::Expert;
use crate::{Error, config};

/// Added to the scores of experts that every row is to choose: far above what a router says.
const PREFERRED: f32 = 1e4;

/// The bias of a router that chooses the first experts.
pub(super) fn preferring(of: config::Experts) -> Vec<f32> {
    let bias = |expert| if expert < of.used { PREFERRED } else { 0.0 };
    (0..of.count).map(bias).collect()
}

/// As many experts as a row uses, from all over `mine`, in the places of the first; the others are
/// these again. The shared one is behind.
pub(super) fn experts(
    of: config::Experts,
    mine: Range<usize>,
    expert: impl Fn(usize) -> Result<Expert, Error>,
) -> Result<Vec<Arc<Expert>>, Error> {
    let routed = mine.start..mine.end.min(of.count);
    let nth = |i: usize| expert(routed.start + i * routed.len() / of.used).map(Arc::new);
    let some = (0..of.used).map(nth).collect::<Result<Vec<_>, _>>()?;
    let mut all: Vec<Arc<Expert>> = routed.map(|e| Arc::clone(&some[e % of.used])).collect();
    for shared in of.count..mine.end {
        all.push(Arc::new(expert(shared)?));
    }
    Ok(all)
}
