//! Dynamic programme over groups in a given order: which groups to use and where to cut.
//!
//! `f[g][l]`: least cost of layers `0..l` with group g last; any earlier group may come before it.
//! Exact for the order, G^2 L^2 / 4 steps; with one hop cost for all pairs, G L^2 / 2.

use super::exact::{Combine, ExactPipeline};
use super::groups::NodeGroup;
use crate::cost::Costs;
use crate::placement::Pipeline;

/// The best pipeline that takes groups in the order given, leaving some out; `None` when none fits.
/// `skips` bounds how many groups may be left out between two that are used.
pub(crate) fn solve(
    costs: &Costs<'_>,
    order: &[&NodeGroup],
    combine: Combine,
    skips: usize,
) -> Option<ExactPipeline> {
    let n = costs.model.layers as usize;
    let mut value = vec![vec![f64::INFINITY; n + 1]; order.len()];
    let mut from = vec![vec![None; n + 1]; order.len()];
    for g in 0..order.len() {
        for before in (g.saturating_sub(skips + 1)..g).map(Some).chain([None]) {
            let hop = match before {
                None => Some(0.0),
                Some(b) => {
                    super::request_hop(costs, order[g].prompt, &order[b].nodes, &order[g].nodes)
                }
            };
            let Some(hop) = hop else { continue };
            let hop = if combine == Combine::Sum { hop } else { 0.0 };
            let starts = if before.is_some() { 1..n } else { 0..1 };
            for start in starts {
                let base = before.map_or(0.0, |b| value[b][start]);
                if !base.is_finite() {
                    continue;
                }
                for end in start + 1..=order[g].reach[start] as usize {
                    let (request, step) = order[g].range(start as u32, end as u32);
                    let new = match combine {
                        Combine::Sum => base + hop + request,
                        Combine::Max => base.max(step),
                    };
                    if new < value[g][end] {
                        value[g][end] = new;
                        from[g][end] = Some((start, before));
                    }
                }
            }
        }
    }
    let last = (0..order.len()).min_by(|&a, &b| value[a][n].total_cmp(&value[b][n]))?;
    let total = value[last][n];
    total.is_finite().then(|| ExactPipeline {
        value: total,
        pipeline: walk(order, &from, last, n),
    })
}

type Predecessor = Option<(usize, Option<usize>)>;

fn walk(order: &[&NodeGroup], from: &[Vec<Predecessor>], last: usize, n_layers: usize) -> Pipeline {
    let mut stages = Vec::new();
    let (mut g, mut end) = (last, n_layers);
    while let Some((start, before)) = from[g][end] {
        stages.push(order[g].stage(start as u32..end as u32));
        let Some(before) = before else { break };
        (g, end) = (before, start);
    }
    stages.reverse();
    Pipeline { stages }
}
