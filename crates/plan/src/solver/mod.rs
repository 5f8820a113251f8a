//! Chooses a placement.
//!
//! 1. Equivalent nodes are counted, not named ([`classes`]).
//! 2. Candidate groups are costed for every range of layers ([`groups`]): one node, or several that
//!    split tensors or experts.
//! 3. Small clusters: every sequence of groups and every cut ([`exact`]). Large ones: an integer
//!    program chooses how many nodes of each kind are worth their hops ([`milp`]). A dynamic
//!    programme then cuts the layers for a few fixed orders ([`group_order`]).
//! 4. Replicas, and disaggregated prefill, are tried on top.
//! 5. Every candidate is predicted in full; the objective chooses. Fewer nodes win ties.

mod classes;
mod exact;
mod group_order;
mod groups;
mod large;
pub mod milp;
mod program;
mod search;
mod stream;

pub(crate) use groups::{holds, holds_all};
pub use program::NAME as PROGRAMS;
pub use search::{Options, PlacementCandidate, PlacementFamily, SearchOutcome, solve};
pub use stream::stream_from_disk;

use crate::cost::Costs;
use crate::workload::CHUNK;

/// `total` dealt in proportion to `weights` by largest remainder; ties go to the first.
pub fn shares(total: u32, weights: &[f64]) -> Vec<u32> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|w| f64::from(total) * w / sum).collect();
    let mut counts: Vec<u32> = exact.iter().map(|x| x.floor() as u32).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    let rest = |i: usize| exact[i] - exact[i].floor();
    order.sort_by(|&a, &b| rest(b).total_cmp(&rest(a)).then(a.cmp(&b)));
    let missing = total.saturating_sub(counts.iter().sum()) as usize;
    for &i in order.iter().take(missing) {
        counts[i] += 1;
    }
    counts
}

/// Decode steps of a request after its first token, at least one.
fn answer(costs: &Costs<'_>) -> f64 {
    f64::from(costs.workload.output.saturating_sub(1)).max(1.0)
}

/// Seconds that a boundary costs one request: once for the prompt, and for every further token.
fn request_hop(costs: &Costs<'_>, prompt: bool, from: &[usize], to: &[usize]) -> Option<f64> {
    let rows = f64::from(costs.workload.prompt.min(CHUNK));
    let prompt = if prompt {
        costs.hop(from, to, rows)?
    } else {
        0.0
    };
    Some(prompt + answer(costs) * costs.hop(from, to, 1.0)?)
}
