//! Advice: the changes that would make a model fit, and those that would make it faster.

use paceline_base::Bytes;

use crate::cost::Costs;
use crate::cost::memory::{Ends, usage};
use crate::error::{Infeasible, PlanChange};
use crate::placement::PipelineStage;
use crate::solver::{Options, SearchOutcome, holds, holds_all, solve, stream_from_disk};
use crate::{Calibration, Cluster, ClusterNode, Error, ModelShape, NodeLink, Workload};

/// The question again, with other facts: whether it has an answer.
fn fits(costs: &Costs<'_>, cluster: &Cluster, model: &ModelShape, workload: Workload) -> bool {
    let Ok(other) = costs.with(cluster, model, workload) else {
        return false;
    };
    feasible(&other)
}

/// A quick test for a placement: layers dealt greedily to single nodes, largest first, or all on
/// one group of all nodes. A cluster that passes has a placement.
pub(crate) fn feasible(costs: &Costs<'_>) -> bool {
    let mut order: Vec<usize> = (0..costs.cluster.nodes.len()).collect();
    order.sort_by(|&a, &b| {
        let budget = |node: usize| costs.cluster.nodes[node].budget();
        budget(b).total_cmp(&budget(a))
    });
    let mut start = 0;
    for node in order {
        let mut end = start;
        while end < costs.model.layers && holds(costs, &PipelineStage::whole(start..end + 1, node))
        {
            end += 1;
        }
        while end > start && end < costs.model.layers && !costs.model.can_cut(end) {
            end -= 1;
        }
        start = end;
    }
    start == costs.model.layers || holds_all(costs)
}

/// The shortfall of memory, and every single change that is enough.
pub(crate) fn infeasible(costs: &Costs<'_>, options: &Options) -> Infeasible {
    let nodes = &costs.cluster.nodes;
    let have: f64 = nodes.iter().map(ClusterNode::budget).sum();
    let whole = PipelineStage::whole(0..costs.model.layers, 0);
    let both = Ends {
        first: true,
        last: true,
    };
    let need = usage(
        costs.model,
        &costs.workload,
        &whole,
        &whole.members[0],
        both,
    )
    .total();
    let detail = if need <= have {
        ", but no cut of the layers fits node by node".to_owned()
    } else {
        String::new()
    };
    let changes = [
        context(costs),
        concurrency(costs),
        bits(costs),
        more_nodes(costs),
        memory(costs),
        disk(costs, options),
    ];
    Infeasible {
        model: costs.model.name.clone(),
        need: Bytes(need as u64),
        have: Bytes(have as u64),
        context: costs.workload.positions(),
        detail,
        changes: changes.into_iter().flatten().collect(),
    }
}

/// The largest whole number in `low..high` that passes, when `low` does.
fn largest(low: u32, high: u32, passes: impl Fn(u32) -> bool) -> Option<u32> {
    if low >= high || !passes(low) {
        return None;
    }
    let (mut good, mut bad) = (low, high);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if passes(middle) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    Some(good)
}

/// Down to what prompt and answer need.
fn context(costs: &Costs<'_>) -> Option<PlanChange> {
    let w = costs.workload;
    let with = |context| fits(costs, costs.cluster, costs.model, Workload { context, ..w });
    let tokens = largest(w.prompt.saturating_add(w.output), w.context, with)?;
    Some(PlanChange::Context { tokens })
}

fn concurrency(costs: &Costs<'_>) -> Option<PlanChange> {
    let w = costs.workload;
    let with = |concurrency| {
        fits(
            costs,
            costs.cluster,
            costs.model,
            Workload { concurrency, ..w },
        )
    };
    let requests = largest(1, w.concurrency, with)?;
    Some(PlanChange::Concurrency { requests })
}

/// Bits in steps of a quarter, down to 2.
fn bits(costs: &Costs<'_>) -> Option<PlanChange> {
    let total = costs.model.weight_bytes() * 8.0 / costs.model.params();
    let with = |quarters: u32| {
        let mut model = costs.model.clone();
        model.bits.experts = f64::from(quarters) / 4.0;
        model.bits.rest = f64::from(quarters) / 4.0;
        fits(costs, costs.cluster, &model, costs.workload)
    };
    let quarters = largest(8, (total * 4.0).ceil() as u32, with)?;
    Some(PlanChange::Bits {
        bits: f64::from(quarters) / 4.0,
    })
}

/// Nodes like the last one.
fn more_nodes(costs: &Costs<'_>) -> Option<PlanChange> {
    let last = costs.cluster.nodes.last()?;
    let most = 64;
    let with = |count: u32| {
        fits(
            costs,
            &grown(costs.cluster, count),
            costs.model,
            costs.workload,
        )
    };
    let count = (1..=most).find(|&count| with(count))?;
    Some(PlanChange::Nodes {
        count,
        kind: last.kind.clone(),
    })
}

/// `cluster` with `count` more nodes like its last, linked to all others as that one is.
pub fn grown(cluster: &Cluster, count: u32) -> Cluster {
    let mut grown = cluster.clone();
    for _ in 0..count {
        let last = grown.nodes.len() - 1;
        let new = grown.nodes.len();
        let mut node = grown.nodes[last].clone();
        node.name = format!("{}+{new}", grown.nodes[0].kind);
        grown.nodes.push(node);
        let links: Vec<NodeLink> = grown
            .links
            .iter()
            .filter(|l| l.a == last || l.b == last)
            .cloned()
            .collect();
        for mut link in links.iter().cloned() {
            link.a = if link.a == last { new } else { link.a };
            link.b = if link.b == last { new } else { link.b };
            grown.links.push(link);
        }
        // The twin's link to the twin is like one that it has.
        if let Some(like) = links.first() {
            grown.links.push(NodeLink {
                a: last,
                b: new,
                ..like.clone()
            });
        }
    }
    grown
}

/// Memory on the node that has most, in steps of a sixty-fourth of what is missing at most.
fn memory(costs: &Costs<'_>) -> Option<PlanChange> {
    let nodes = &costs.cluster.nodes;
    let largest_node = (0..nodes.len()).max_by(|&a, &b| {
        nodes[a]
            .budget()
            .total_cmp(&nodes[b].budget())
            .then(b.cmp(&a))
    })?;
    let unit = (costs.model.weight_bytes() + 1e9) / 32.0;
    let with = |steps: u32| {
        let mut cluster = costs.cluster.clone();
        let node = &mut cluster.nodes[largest_node];
        let more = unit * f64::from(steps) / node.usable;
        node.memory = Bytes(node.memory.0.saturating_add(more as u64));
        fits(costs, &cluster, costs.model, costs.workload)
    };
    let steps = (1..=128).find(|&steps| with(steps))?;
    Some(PlanChange::Memory {
        bytes: Bytes((unit * f64::from(steps)) as u64),
    })
}

fn disk(costs: &Costs<'_>, _: &Options) -> Option<PlanChange> {
    let (_, said) = stream_from_disk(costs).ok()?;
    Some(PlanChange::Disk {
        tok_s: said.decode_tok_s,
    })
}

/// A change to the cluster and what it would do.
#[derive(Clone, Debug, PartialEq)]
pub struct Sensitivity {
    /// The change, in words.
    pub change: String,
    /// New over old by the objective's figure; above 1 is better.
    pub gain: f64,
    /// Decode tokens a second of one request after the change.
    pub decode_tok_s: f64,
}

/// Gains of single changes: other links, one node more or less, faster parts.
///
/// `links` are the kinds to try in place of the slowest kind that is used.
///
/// # Errors
/// Only those of a broken catalogue; changes that have no plan are left out.
pub fn sensitivity(
    costs: &Costs<'_>,
    calibration: &Calibration,
    options: &Options,
    now: &SearchOutcome,
    links: &[crate::catalogue::LinkKind],
) -> Result<Vec<Sensitivity>, Error> {
    let mut trials: Vec<(String, Cluster)> = Vec::new();
    let cluster = costs.cluster;
    if let Some(old) = cluster
        .links
        .iter()
        .max_by(|a, b| a.alpha.total_cmp(&b.alpha))
    {
        for kind in links.iter().filter(|kind| kind.kind != old.kind) {
            let mut other = cluster.clone();
            for link in other.links.iter_mut().filter(|link| link.kind == old.kind) {
                *link = kind.between(link.a, link.b);
            }
            trials.push((format!("{} instead of {}", kind.kind, old.kind), other));
        }
    }
    if cluster.nodes.len() < 32 {
        let kind = cluster.nodes.last().map_or("", |node| node.kind.as_str());
        trials.push((format!("one more {kind}"), grown(cluster, 1)));
    }
    trials.extend(faster(cluster));
    let mut all = Vec::new();
    for (change, cluster) in trials {
        let Ok(other) = Costs::new(&cluster, costs.model, costs.workload, calibration) else {
            continue;
        };
        let Ok(found) = solve(&other, options) else {
            continue;
        };
        all.push(Sensitivity {
            change,
            gain: now.best.score / found.best.score,
            decode_tok_s: found.best.prediction.decode_tok_s,
        });
    }
    Ok(all)
}

fn faster(cluster: &Cluster) -> Vec<(String, Cluster)> {
    let with = |change: &dyn Fn(&mut ClusterNode)| {
        let mut other = cluster.clone();
        other.nodes.iter_mut().for_each(change);
        other
    };
    vec![
        (
            "twice the memory bandwidth".to_owned(),
            with(&|node| node.bandwidth *= 2.0),
        ),
        (
            "twice the arithmetic".to_owned(),
            with(&|node| {
                if let Some(rates) = &mut node.rates {
                    rates.matmul *= 2.0;
                    rates.expert *= 2.0;
                    rates.attention *= 2.0;
                }
            }),
        ),
    ]
}
