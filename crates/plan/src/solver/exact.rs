//! Every way to put groups of nodes in a row and cut the layers among them, by dynamic programme.
//!
//! State: how many nodes of each class are used, the group used last, and the first layer not yet
//! placed. `f[used][last][l]` is the least cost of layers `0..l`; the next group takes a
//! range from `l` and adds its cost and the hop from `last`. Cost is a sum (one request) or a
//! maximum (the slowest stage). The states are visited in order of nodes used, so every
//! predecessor is final.
//!
//! Exact for the sum of stages and hops. The token's way back from the last stage to the first is
//! not in the state. The caller adds it when it compares whole placements.

use std::collections::BTreeMap;

use super::classes::{ClassCounts, Classes};
use super::groups::NodeGroup;
use crate::cost::Costs;
use crate::placement::Pipeline;

/// The way in which costs of stages combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Combine {
    /// Sum of the stages, which one request passes.
    Sum,
    /// The slowest stage sets the pace.
    Max,
}

/// A kind of group: how many nodes of each class, and what they cost as a stage.
#[derive(Clone, Debug)]
pub(crate) struct GroupType {
    pub(crate) counts: ClassCounts,
    pub(crate) group: NodeGroup,
}

/// f of one state and last group.
#[derive(Debug)]
struct ValueTable {
    value: Vec<f64>,
    /// For each `l`: where the last stage starts, and the key of the table before.
    from: Vec<Option<(u32, usize)>>,
    kind: usize,
    used: ClassCounts,
}

/// A finished pipeline with its value.
#[derive(Clone, Debug)]
pub(crate) struct ExactPipeline {
    pub(crate) value: f64,
    pub(crate) pipeline: Pipeline,
}

/// Work that [`solve`] would have for these kinds of groups: transitions times layer pairs.
pub(crate) fn work(limit: &[u8], kinds: &[GroupType], n_layers: u32) -> f64 {
    let states: f64 = limit.iter().map(|&n| f64::from(n) + 1.0).product();
    let n = kinds.len() as f64;
    states * n * n * f64::from(n_layers).powi(2) / 4.0
}

/// The best pipeline for every set of nodes (up to exchanges) within `limit`, best first.
pub(crate) fn solve(
    costs: &Costs<'_>,
    classes: &Classes,
    limit: &[u8],
    kinds: &[GroupType],
    combine: Combine,
) -> Vec<ExactPipeline> {
    let n_layers = costs.model.layers;
    let hops = hop_table(costs, classes, limit, kinds, combine);
    let mut tables: Vec<ValueTable> = Vec::new();
    let mut by_state: BTreeMap<(usize, ClassCounts, usize), usize> = BTreeMap::new();
    let zero = vec![0; limit.len()];
    for kind in 0..kinds.len() {
        extend(
            &mut tables,
            &mut by_state,
            kinds,
            GroupTransition::first(kind, &zero, limit),
            n_layers,
            combine,
        );
    }
    // BTreeMap keys start with the number of nodes used, so predecessors come first.
    let mut cursor: Option<(usize, ClassCounts, usize)> = None;
    while let Some((key, table)) = next_key(&by_state, cursor.as_ref()) {
        for (kind, hop) in hops[tables[table].kind].iter().enumerate() {
            let Some(hop) = *hop else { continue };
            let used = tables[table].used.clone();
            let step = GroupTransition {
                kind,
                used: &used,
                limit,
                before: Some((table, hop)),
            };
            extend(&mut tables, &mut by_state, kinds, step, n_layers, combine);
        }
        cursor = Some(key);
    }
    collect(&tables, kinds, classes, n_layers)
}

fn next_key(
    all: &BTreeMap<(usize, ClassCounts, usize), usize>,
    after: Option<&(usize, ClassCounts, usize)>,
) -> Option<((usize, ClassCounts, usize), usize)> {
    use std::ops::Bound::{Excluded, Unbounded};
    let start = after.map_or(Unbounded, Excluded);
    all.range((start, Unbounded))
        .next()
        .map(|(key, &table)| (key.clone(), table))
}

/// A transition: the next group, from which state.
#[derive(Clone, Copy, Debug)]
struct GroupTransition<'a> {
    kind: usize,
    used: &'a [u8],
    limit: &'a [u8],
    before: Option<(usize, f64)>,
}

impl<'a> GroupTransition<'a> {
    fn first(kind: usize, used: &'a [u8], limit: &'a [u8]) -> Self {
        Self {
            kind,
            used,
            limit,
            before: None,
        }
    }

    /// The state after it, where enough nodes are left.
    fn after(&self, counts: &[u8]) -> Option<ClassCounts> {
        let sums = self.used.iter().zip(counts).zip(self.limit);
        sums.map(|((&u, &c), &max)| u.checked_add(c).filter(|&sum| sum <= max))
            .collect()
    }
}

fn extend(
    tables: &mut Vec<ValueTable>,
    by_state: &mut BTreeMap<(usize, ClassCounts, usize), usize>,
    kinds: &[GroupType],
    step: GroupTransition<'_>,
    n_layers: u32,
    combine: Combine,
) {
    let kind = &kinds[step.kind];
    let Some(used) = step.after(&kind.counts) else {
        return;
    };
    let n_used = used.iter().map(|&n| usize::from(n)).sum();
    let target = *by_state
        .entry((n_used, used.clone(), step.kind))
        .or_insert_with(|| {
            tables.push(ValueTable {
                value: vec![f64::INFINITY; n_layers as usize + 1],
                from: vec![None; n_layers as usize + 1],
                kind: step.kind,
                used,
            });
            tables.len() - 1
        });
    let starts = if step.before.is_some() {
        1..n_layers
    } else {
        0..1
    };
    for start in starts {
        let (value, hop) = match step.before {
            Some((table, hop)) => (tables[table].value[start as usize], hop),
            None => (0.0, 0.0),
        };
        if value.is_finite() {
            relax(
                &mut tables[target],
                &kind.group,
                (start, value, hop),
                step.before,
                combine,
            );
        }
    }
}

/// Tries every end of a range from `start`.
fn relax(
    table: &mut ValueTable,
    group: &NodeGroup,
    (start, value, hop): (u32, f64, f64),
    before: Option<(usize, f64)>,
    combine: Combine,
) {
    let before = before.map_or(usize::MAX, |(table, _)| table);
    for end in start + 1..=group.reach[start as usize] {
        let (request, step) = group.range(start, end);
        let new = match combine {
            Combine::Sum => value + hop + request,
            Combine::Max => value.max(step + hop),
        };
        if new < table.value[end as usize] {
            table.value[end as usize] = new;
            table.from[end as usize] = Some((start, before));
        }
    }
}

/// Hops from kind to kind, per request (sum) or per step (max). `None` without a link or where both
/// together need more nodes than there are.
fn hop_table(
    costs: &Costs<'_>,
    classes: &Classes,
    limit: &[u8],
    kinds: &[GroupType],
    combine: Combine,
) -> Vec<Vec<Option<f64>>> {
    let zero = vec![0; limit.len()];
    let hop = |a: &GroupType, b: &GroupType| {
        let enough = a.counts.iter().zip(&b.counts).zip(limit);
        enough
            .map(|((x, y), max)| x.checked_add(*y).filter(|s| s <= max))
            .collect::<Option<ClassCounts>>()?;
        let (from, to) = (
            classes.pick(&a.counts, &zero),
            classes.pick(&b.counts, &a.counts),
        );
        match combine {
            Combine::Sum => super::request_hop(costs, a.group.prompt, &from, &to),
            Combine::Max => costs.hop(&from, &to, 1.0).map(|_| 0.0),
        }
    };
    kinds
        .iter()
        .map(|a| kinds.iter().map(|b| hop(a, b)).collect())
        .collect()
}

fn collect(
    tables: &[ValueTable],
    kinds: &[GroupType],
    classes: &Classes,
    n_layers: u32,
) -> Vec<ExactPipeline> {
    let whole = n_layers as usize;
    let mut best: BTreeMap<&ClassCounts, (f64, usize)> = BTreeMap::new();
    for (index, table) in tables
        .iter()
        .enumerate()
        .filter(|(_, t)| t.value[whole].is_finite())
    {
        let value = table.value[whole];
        let entry = best.entry(&table.used).or_insert((value, index));
        if value < entry.0 {
            *entry = (value, index);
        }
    }
    let mut found: Vec<ExactPipeline> = best
        .values()
        .map(|&(value, table)| ExactPipeline {
            value,
            pipeline: walk(tables, kinds, classes, table, n_layers),
        })
        .collect();
    found.sort_by(|a, b| a.value.total_cmp(&b.value));
    found
}

/// Follows the choices back from the last layer.
fn walk(
    tables: &[ValueTable],
    kinds: &[GroupType],
    classes: &Classes,
    last: usize,
    n_layers: u32,
) -> Pipeline {
    let mut ranges = Vec::new();
    let (mut table, mut end) = (last, n_layers);
    while let Some((start, before)) = tables[table].from[end as usize] {
        ranges.push((tables[table].kind, start..end));
        if before == usize::MAX {
            break;
        }
        (table, end) = (before, start);
    }
    ranges.reverse();
    let mut used = vec![0u8; classes.members.len()];
    let mut stages = Vec::new();
    for (kind, layers) in ranges {
        let nodes = classes.pick(&kinds[kind].counts, &used);
        for (u, c) in used.iter_mut().zip(&kinds[kind].counts) {
            *u += c;
        }
        stages.push(kinds[kind].group.with_nodes(nodes).stage(layers));
    }
    Pipeline { stages }
}
