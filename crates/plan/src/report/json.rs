//! A plan as one JSON object.

use crate::advice::Sensitivity;
use crate::drafts::Drafted;
use crate::origin::PredictionBasis;
use crate::predict::{LinkUse, NodeUse};
use crate::solver::PlacementCandidate;
use crate::{Costs, Pipeline, PipelineStage, Placement, Prediction, Split, StageMember};
use serde_json::{Value, json};

use super::{PlanReport, PlanRequest, hosted, layout};

/// The plan, its origin, its alternatives and what would change it.
pub(super) fn plan(question: &PlanRequest, costs: &Costs<'_>, answer: &PlanReport) -> Value {
    let outcome = &answer.outcome;
    let said = &outcome.best.prediction;
    let others = outcome.alternatives.iter().map(|c| candidate(costs, c));
    json!({
        "model": costs.model.name,
        "cluster": costs.cluster.name,
        "workload": {
            "prompt": costs.workload.prompt,
            "output": costs.workload.output,
            "concurrency": costs.workload.concurrency,
            "context": costs.workload.context,
        },
        "plan": candidate(costs, &outcome.best),
        "origin": answer.origin.as_ref().map(|it| origin(it, said)),
        "price_date": super::price_date(question, costs, said),
        "drafts": answer.drafted.map(drafts),
        "hosted": question.hosted_usd.map(|usd| hosted::json(said, usd)),
        "alternatives": others.collect::<Vec<_>>(),
        "changes": answer.changes.iter().map(change).collect::<Vec<_>>(),
        "considered": outcome.considered,
        "exact": outcome.exact,
    })
}

fn drafts(with: Drafted) -> Value {
    json!({
        "accepted": with.accepted,
        "depth": with.depth,
        "tokens_per_step": with.per_step,
        "decode_tok_s": with.tok_s,
    })
}

fn origin(origin: &PredictionBasis, said: &Prediction) -> Value {
    json!({
        "engines": origin.engines,
        "published_runs": origin.runs,
        "same_machine": origin.same_machine,
        "decode_tok_s_range": origin.range(said.decode_tok_s),
    })
}

fn change(change: &Sensitivity) -> Value {
    json!({
        "change": change.change,
        "gain": change.gain,
        "decode_tok_s": change.decode_tok_s,
    })
}

/// A placement with its prediction.
pub(super) fn candidate(costs: &Costs<'_>, candidate: &PlacementCandidate) -> Value {
    json!({
        "label": layout::label(&candidate.placement),
        "placement": placement(costs, &candidate.placement),
        "prediction": prediction(costs, &candidate.prediction),
        "without_prefill": super::without_prefill(costs, &candidate.placement)
            .map(|alone| prediction(costs, &alone)),
    })
}

fn placement(costs: &Costs<'_>, placement: &Placement) -> Value {
    let used = placement.nodes();
    let out = (0..costs.cluster.nodes.len()).filter(|node| !used.contains(node));
    json!({
        "replicas": placement.replicas.iter().map(|p| pipeline(costs, p)).collect::<Vec<_>>(),
        "prefill": placement.prefill.as_ref().map(|p| pipeline(costs, p)),
        "left_out": out.map(|node| costs.cluster.nodes[node].name.as_str()).collect::<Vec<_>>(),
    })
}

fn pipeline(costs: &Costs<'_>, pipeline: &Pipeline) -> Value {
    pipeline.stages.iter().map(|s| stage(costs, s)).collect()
}

fn stage(costs: &Costs<'_>, stage: &PipelineStage) -> Value {
    let split = match stage.split {
        Split::Whole => "whole",
        Split::Tensor => "tensor",
        Split::Expert => "expert",
    };
    let member = |m: &StageMember| {
        json!({
            "node": costs.cluster.nodes[m.node].name,
            "share": m.share,
            "streamed_layers": m.streamed,
        })
    };
    json!({
        "layers": [stage.layers.start, stage.layers.end],
        "split": split,
        "nodes": stage.members.iter().map(member).collect::<Vec<_>>(),
    })
}

fn prediction(costs: &Costs<'_>, said: &Prediction) -> Value {
    let node = |node: &NodeUse| {
        json!({
            "node": costs.cluster.nodes[node.node].name,
            "weight_bytes": node.usage.weights as u64,
            "cache_bytes": node.usage.cache as u64,
            "buffer_bytes": node.usage.buffers as u64,
            "headroom_bytes": (node.budget - node.usage.total()) as i64,
            "busy": node.busy,
            "watts": node.watts,
        })
    };
    let link =
        |link: &LinkUse| json!({ "stages": [link.stages.0, link.stages.1], "kind": link.kind });
    json!({
        "ttft_s": said.ttft_s,
        "prefill_tok_s": said.prefill_tok_s,
        "decode_tok_s": said.decode_tok_s,
        "throughput_tok_s": said.throughput_tok_s,
        "request_s": said.request_s,
        "comm_share": said.comm_share,
        "watts": said.watts,
        "joules_per_token": said.joules_per_token,
        "price_usd": said.price_usd,
        "usd_per_tok_s": said.usd_per_tok_s(),
        "nodes": said.nodes.iter().map(node).collect::<Vec<_>>(),
        "links": said.links.iter().map(link).collect::<Vec<_>>(),
    })
}
