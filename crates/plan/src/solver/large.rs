//! Clusters too large for every sequence: a few orders, cut exactly.

use paceline_base::median;

use super::classes::Classes;
use super::exact::Combine;
use super::groups::{NodeGroup, RangeLoad, splits};
use super::milp::{Kind, select, select_greedy};
use super::{group_order, request_hop};
use crate::cost::Costs;
use crate::placement::Pipeline;

/// Groups that may be left out between two that are used, where nothing was selected before.
const SKIPS: usize = 2;

/// Candidate pipelines of groups of 1, 2, 4, ... nodes of one class. The groups are those that an
/// integer program selects, and all groups, by speed and by nearness.
pub(crate) fn pipelines(
    costs: &Costs<'_>,
    classes: &Classes,
    limit: &[u8],
    weights: RangeLoad,
) -> Vec<Pipeline> {
    let mut all = Vec::new();
    for width in [1, 2, 4, 8, 16] {
        for split in splits(costs, width) {
            let groups = groups(costs, classes, limit, weights, width, split);
            let flat: Vec<&NodeGroup> = groups.iter().flatten().collect();
            if flat.is_empty() {
                continue;
            }
            let chosen = selected(costs, &groups);
            for (groups, skips) in [(chosen, 0), (flat, SKIPS)] {
                for order in orders(costs, groups) {
                    let sum = group_order::solve(costs, &order, Combine::Sum, skips);
                    all.extend(sum.map(|found| found.pipeline));
                    if weights.batch > 1.0 {
                        let max = group_order::solve(costs, &order, Combine::Max, skips);
                        all.extend(max.map(|found| found.pipeline));
                    }
                }
            }
        }
    }
    all
}

/// Groups of `width` nodes, class by class.
fn groups(
    costs: &Costs<'_>,
    classes: &Classes,
    limit: &[u8],
    weights: RangeLoad,
    width: usize,
    split: crate::Split,
) -> Vec<Vec<NodeGroup>> {
    let mut all = Vec::new();
    for (members, &max) in classes.members.iter().zip(limit) {
        let usable = &members[..usize::from(max)];
        let mut chunks = usable.chunks_exact(width);
        let Some(first) = chunks.next() else { continue };
        if !costs.network.joins(first) {
            continue;
        }
        let Some(model) = NodeGroup::new(costs, first.to_vec(), split, weights) else {
            continue;
        };
        let rest = chunks.map(|nodes| model.with_nodes(nodes.to_vec()));
        all.push(std::iter::once(model.clone()).chain(rest).collect());
    }
    all
}

/// The groups that are worth their hops.
fn selected<'g>(costs: &Costs<'_>, classes: &'g [Vec<NodeGroup>]) -> Vec<&'g NodeGroup> {
    let n_layers = costs.model.layers;
    let kinds: Vec<Kind> = classes
        .iter()
        .map(|groups| {
            let middle = (n_layers / 2) as usize;
            let reach = groups[0].reach[middle].saturating_sub(n_layers / 2);
            Kind {
                count: u32::try_from(groups.len()).unwrap_or(u32::MAX),
                // The second half may not show how many layers fit when the first does.
                layers: groups[0].reach[0].max(reach).max(1),
                seconds: groups[0].range(0, n_layers).0 / f64::from(n_layers),
            }
        })
        .collect();
    let hop = typical_hop(costs, classes);
    let chosen = select(&kinds, n_layers, hop)
        .ok()
        .or_else(|| select_greedy(&kinds, n_layers));
    let counts = chosen.unwrap_or_default();
    let take = counts.iter().zip(classes).flat_map(|(&(n, _), groups)| {
        // One more than the layers need: ends of the model need room too.
        groups.iter().take(n as usize + usize::from(n > 0))
    });
    take.collect()
}

/// The middle of the hops from each class to the next.
fn typical_hop(costs: &Costs<'_>, classes: &[Vec<NodeGroup>]) -> f64 {
    let firsts: Vec<&NodeGroup> = classes
        .iter()
        .flat_map(|groups| groups.iter().take(2))
        .collect();
    let hops = firsts
        .windows(2)
        .filter_map(|pair| request_hop(costs, pair[0].prompt, &pair[0].nodes, &pair[1].nodes));
    median(hops.collect())
}

/// Orders to try: fastest first, and from the fastest always on to the nearest.
fn orders<'g>(costs: &Costs<'_>, mut groups: Vec<&'g NodeGroup>) -> Vec<Vec<&'g NodeGroup>> {
    let n = costs.model.layers;
    groups.sort_by(|a, b| {
        a.range(0, n)
            .0
            .total_cmp(&b.range(0, n).0)
            .then_with(|| a.nodes.cmp(&b.nodes))
    });
    let mut left = groups.clone();
    let mut near: Vec<&NodeGroup> = Vec::new();
    while !left.is_empty() {
        let hop = |to: &NodeGroup| {
            let from = near.last()?;
            request_hop(costs, from.prompt, &from.nodes, &to.nodes)
        };
        let key = |i: &usize| hop(left[*i]).unwrap_or(f64::INFINITY);
        let next = (0..left.len())
            .min_by(|a, b| key(a).total_cmp(&key(b)))
            .unwrap_or(0);
        near.push(left.remove(next));
    }
    let same = near.iter().zip(&groups).all(|(a, b)| a.nodes == b.nodes);
    if same {
        vec![groups]
    } else {
        vec![groups, near]
    }
}
