//! Words and pictures for placements.

use std::fmt::Write;

use crate::predict::{LinkUse, NodeUse};
use crate::{Costs, Pipeline, PipelineStage, Placement, Prediction, Split};

/// A placement in a few words: `tensor over 2`, `pipeline over 3`, `tensor 2 x pipeline 2`.
pub fn label(placement: &Placement) -> String {
    let first = pipeline_label(&placement.replicas[0]);
    let copies = match placement.replicas.len() {
        1 => first,
        n => format!("{n} replicas, each {first}"),
    };
    match &placement.prefill {
        Some(_) => format!("prompts apart, answers {copies}"),
        None => copies,
    }
}

fn pipeline_label(pipeline: &Pipeline) -> String {
    let stages = pipeline.stages.len();
    let widths: Vec<usize> = pipeline.stages.iter().map(|s| s.members.len()).collect();
    let equal = widths.iter().all(|&width| width == widths[0]);
    match (stages, equal.then_some(widths[0])) {
        (1, Some(1)) => "one node".to_owned(),
        (1, _) => format!("{} over {}", split(&pipeline.stages[0]), widths[0]),
        (n, Some(1)) => format!("pipeline over {n}"),
        (n, Some(width)) => format!("{} {width} x pipeline {n}", split(&pipeline.stages[0])),
        (n, None) => {
            let list: Vec<String> = widths.iter().map(ToString::to_string).collect();
            format!("pipeline {n} over groups of {}", list.join(" + "))
        }
    }
}

fn split(stage: &PipelineStage) -> &'static str {
    match stage.split {
        Split::Whole => "whole",
        Split::Tensor => "tensor",
        Split::Expert => "experts",
    }
}

/// The placement drawn: stages from top to bottom, nodes with a bar of their memory.
pub(super) fn drawing(costs: &Costs<'_>, placement: &Placement, said: &Prediction) -> String {
    let mut text = String::new();
    if let Some(prefill) = &placement.prefill {
        text.push_str("prompts:\n");
        text.push_str(&drawn(costs, prefill, said, &[]));
        text.push_str("answers:\n");
    }
    text.push_str(&drawn(costs, &placement.replicas[0], said, &said.links));
    let more = placement.replicas.len() - 1;
    if more > 0 {
        let nodes = placement.replicas[1..].iter().flat_map(Pipeline::nodes);
        let names: Vec<&str> = nodes
            .map(|n| costs.cluster.nodes[n].name.as_str())
            .collect();
        let _ = writeln!(text, "and {more} more like it on {}", names.join(", "));
    }
    let used = placement.nodes();
    let out: Vec<&str> = (0..costs.cluster.nodes.len())
        .filter(|node| !used.contains(node))
        .map(|node| costs.cluster.nodes[node].name.as_str())
        .collect();
    if !out.is_empty() {
        let _ = writeln!(text, "left out: {}", out.join(", "));
    }
    text
}

fn drawn(costs: &Costs<'_>, pipeline: &Pipeline, said: &Prediction, links: &[LinkUse]) -> String {
    let mut text = String::new();
    let last = pipeline.stages.len() - 1;
    for (i, stage) in pipeline.stages.iter().enumerate() {
        let inside = links.iter().find(|link| link.stages == (i, i));
        let how = inside.map_or(String::new(), |link| {
            format!(", {} over {}", split(stage), link.kind)
        });
        let layers = format!("layers {} to {}", stage.layers.start, stage.layers.end - 1);
        let _ = writeln!(text, "  ┌ stage {i}: {layers}{how}");
        for member in &stage.members {
            let Some(node) = said.nodes.iter().find(|node| node.node == member.node) else {
                continue;
            };
            let share = format!("{:>5.1} %", member.share * 100.0);
            let _ = writeln!(text, "  │ {}  {share}  {}", name(costs, node), bar(node));
            if member.streamed > 0 {
                let _ = writeln!(
                    text,
                    "  │   {} layers from disk for every token",
                    member.streamed
                );
            }
        }
        let next = links.iter().find(|link| link.stages == (i, i + 1));
        match next.filter(|_| i < last) {
            Some(link) => {
                let _ = writeln!(text, "  └─┐ {}", link.kind);
            }
            None => text.push_str("  └\n"),
        }
    }
    text
}

fn name(costs: &Costs<'_>, node: &NodeUse) -> String {
    let facts = &costs.cluster.nodes[node.node];
    format!("{:<8} {:<24}", facts.name, facts.kind)
}

/// Twenty cells of memory: weights, cache, buffers, free; then the numbers.
fn bar(node: &NodeUse) -> String {
    const CELLS: f64 = 20.0;
    let cells = |bytes: f64| (bytes / node.budget * CELLS).round().clamp(0.0, CELLS) as usize;
    let weights = cells(node.usage.weights);
    let cache = cells(node.usage.weights + node.usage.cache).saturating_sub(weights);
    let all = cells(node.usage.total()).max(weights + cache);
    let buffers = all - weights - cache;
    let free = (CELLS as usize).saturating_sub(all);
    let bar = [
        "█".repeat(weights),
        "▓".repeat(cache),
        "▒".repeat(buffers),
        "·".repeat(free),
    ];
    let gb = |bytes: f64| bytes / 1e9;
    format!(
        "[{}] {:.1} of {:.1} GB",
        bar.concat(),
        gb(node.usage.total()),
        gb(node.budget)
    )
}
