//! A sample of a layer's experts in place of all, for measurements.

use std::ops::Range;
use std::sync::Arc;

use super::Expert;
use crate::{Error, config};

/// Bias for the experts of the sample: far above any router score.
const PREFERRED: f32 = 1e4;

/// Router bias that selects the first experts.
pub(super) fn preferring(of: config::Experts) -> Vec<f32> {
    let bias = |expert| if expert < of.used { PREFERRED } else { 0.0 };
    (0..of.count).map(bias).collect()
}

/// Loads as many experts as a row uses, evenly spaced over `mine`, as the first ones; the others
/// repeat them. The shared expert comes last.
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
