//! Prediction of a placement's speed, latency, memory, power and price from the costs of its
//! stages.

use crate::cost::memory::{Usage, usage};
use crate::cost::{Costs, PipelineTime};
use crate::placement::{Pipeline, PipelineStage, Placement};
use crate::{Error, LinkTransport, NodeLink};

/// Most steps of a pipeline under way at once, as our engine has them. More residuals than these
/// have no room with the ranks that wait for them (`STEPS_MAX` of `model/src/links.rs`).
pub const STEPS_MAX: usize = 9;

/// A node's part in a prediction.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeUse {
    /// Index of the node.
    pub node: usize,
    /// Bytes it needs.
    pub usage: Usage,
    /// Bytes it may use.
    pub budget: f64,
    /// Share of the time that its kernels run.
    pub busy: f64,
    /// Watts on average, where its idle and load watts are known.
    pub watts: Option<f64>,
}

/// A link that a placement uses.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkUse {
    /// Stage indices that it joins; equal inside a stage.
    pub stages: (usize, usize),
    pub kind: String,
    pub transport: LinkTransport,
}

/// Predicted figures of a placement under the workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Seconds until the first token of one request; `None` where a node's arithmetic is unknown.
    pub ttft_s: Option<f64>,
    /// Prompt tokens a second of one request.
    pub prefill_tok_s: Option<f64>,
    /// Tokens a second of one request alone.
    pub decode_tok_s: f64,
    /// Tokens a second over all requests.
    pub throughput_tok_s: f64,
    /// Share of a lone request's token that is exchanges and boundaries.
    pub comm_share: f64,
    /// Seconds for one request: first token and the rest of the answer. Without `ttft_s`, the
    /// answer alone.
    pub request_s: f64,
    /// Watts of the nodes in use while all requests run.
    pub watts: Option<f64>,
    /// Joules per token at that load.
    pub joules_per_token: Option<f64>,
    /// Price of the nodes in use.
    pub price_usd: Option<f64>,
    pub nodes: Vec<NodeUse>,
    /// Links of the first replica.
    pub links: Vec<LinkUse>,
}

impl Prediction {
    /// Whether every node has the memory for its part.
    pub fn fits(&self) -> bool {
        self.nodes
            .iter()
            .all(|node| node.usage.total() <= node.budget)
    }

    /// Dollars per token a second over all requests.
    pub fn usd_per_tok_s(&self) -> Option<f64> {
        self.price_usd.map(|usd| usd / self.throughput_tok_s)
    }
}

/// Predicts `placement`, whether or not it fits into memory: see [`Prediction::fits`].
///
/// # Errors
/// [`Error::Placement`] when it does not suit the model or the links, [`Error::MissingFact`] when
/// prompts are sent to a node of unknown arithmetic.
pub fn predict(costs: &Costs<'_>, placement: &Placement) -> Result<Prediction, Error> {
    placement.check(costs.model, costs.cluster.nodes.len())?;
    let alone = costs.pipeline(&placement.replicas[0], costs.decode_rows(1.0))?;
    let loads = placement
        .replicas
        .iter()
        .map(|replica| full_load(costs, placement, replica));
    let loads = loads.collect::<Result<Vec<_>, _>>()?;
    let throughput: f64 = loads.iter().map(|load| load.tok_s).sum();
    let ttft = first_token(costs, placement)?;
    let answer = f64::from(costs.workload.output.saturating_sub(1)) * alone.total();
    let nodes = node_uses(costs, placement, &loads);
    let watts: Option<f64> = nodes.iter().map(|node| node.watts).sum();
    let prices = nodes
        .iter()
        .map(|node| costs.cluster.nodes[node.node].price_usd);
    Ok(Prediction {
        ttft_s: ttft,
        prefill_tok_s: ttft.map(|s| f64::from(costs.workload.prompt) / s),
        decode_tok_s: 1.0 / alone.total(),
        throughput_tok_s: throughput,
        comm_share: alone.comm() / alone.total(),
        request_s: ttft.unwrap_or(0.0) + answer,
        watts,
        joules_per_token: watts.map(|w| w / throughput),
        price_usd: prices.sum(),
        nodes,
        links: links(costs, &placement.replicas[0]),
    })
}

/// Time to the first token. With prefill elsewhere, keys and values of a layer travel while the
/// next is computed; what the link cannot hide is added.
fn first_token(costs: &Costs<'_>, placement: &Placement) -> Result<Option<f64>, Error> {
    let tokens = costs.workload.prompt;
    let pipeline = placement.prefill.as_ref().unwrap_or(&placement.replicas[0]);
    let compute = match costs.prefill(pipeline, tokens) {
        Err(Error::MissingFact { .. }) => return Ok(None),
        other => other?,
    };
    let Some(prefill) = &placement.prefill else {
        return Ok(Some(compute));
    };
    let (from, to) = (prefill.nodes(), placement.replicas[0].nodes());
    let bytes = f64::from(tokens) * costs.model.kv_bytes_per_token();
    let link = costs.network.between(&from, &to, bytes);
    let link = link.ok_or_else(|| Error::Placement {
        problem: "no direct link between prefill and decode nodes".to_owned(),
    })?;
    // The last layer's part cannot hide behind compute.
    let tail = link.seconds(bytes / f64::from(costs.model.layers));
    Ok(Some(compute.max(bytes / link.beta) + tail))
}

/// A replica with all requests that fall to it.
#[derive(Debug)]
struct ReplicaLoad {
    tok_s: f64,
    /// Seconds of a round in which every sequence gets one token.
    round: f64,
    /// Micro-batches in a round.
    parts: f64,
    time: PipelineTime,
}

/// Sequences are cut into as many micro-batches as stages, or fewer. Then stages work at the same
/// time, but each reads its weights once per micro-batch. The best number is taken, of at most
/// [`STEPS_MAX`]. By Little's law a round takes the longer of one micro-batch's way and all of them
/// at the slowest stage.
fn full_load(
    costs: &Costs<'_>,
    placement: &Placement,
    replica: &Pipeline,
) -> Result<ReplicaLoad, Error> {
    let replicas = placement.replicas.len() as f64;
    let batch = (f64::from(costs.workload.concurrency) / replicas).max(1.0);
    let mut best: Option<ReplicaLoad> = None;
    for parts in 1..=replica.stages.len().min(STEPS_MAX) {
        let parts = parts as f64;
        if parts > batch {
            break;
        }
        let time = costs.pipeline(replica, costs.decode_rows(batch / parts))?;
        let round = time.total().max(parts * time.slowest());
        let tok_s = batch / round;
        if best.as_ref().is_none_or(|b| tok_s > b.tok_s) {
            best = Some(ReplicaLoad {
                tok_s,
                round,
                parts,
                time,
            });
        }
    }
    best.ok_or_else(|| Error::Placement {
        problem: "a replica without stages".to_owned(),
    })
}

fn node_uses(costs: &Costs<'_>, placement: &Placement, loads: &[ReplicaLoad]) -> Vec<NodeUse> {
    let mut uses = Vec::new();
    for (replica, load) in placement.replicas.iter().zip(loads) {
        for (stage, time) in replica.stages.iter().zip(&load.time.stages) {
            // Waiting for the slowest member or for the wire spins, which costs as much as work.
            let busy = (load.parts * time.total() / load.round).min(1.0);
            push_uses(costs, stage, busy, &mut uses);
        }
    }
    for stage in placement.prefill.iter().flat_map(|p| &p.stages) {
        push_uses(costs, stage, 0.0, &mut uses);
    }
    uses.sort_by_key(|node| node.node);
    uses
}

fn push_uses(costs: &Costs<'_>, stage: &PipelineStage, busy: f64, uses: &mut Vec<NodeUse>) {
    for member in &stage.members {
        let node = &costs.cluster.nodes[member.node];
        let watts = node.load_w.zip(node.idle_w);
        uses.push(NodeUse {
            node: member.node,
            usage: usage(
                costs.model,
                &costs.workload,
                stage,
                member,
                costs.ends(stage),
            ),
            budget: node.budget(),
            busy,
            watts: watts.map(|(load, idle)| idle + (load - idle).max(0.0) * busy),
        });
    }
}

fn links(costs: &Costs<'_>, pipeline: &Pipeline) -> Vec<LinkUse> {
    let used = |a: usize, b: usize, link: &NodeLink| LinkUse {
        stages: (a, b),
        kind: link.kind.clone(),
        transport: link.transport,
    };
    let mut links = Vec::new();
    for (i, stage) in pipeline.stages.iter().enumerate() {
        let bytes = f64::from(costs.model.width) * 4.0;
        let inside = costs.network.slowest(&stage.nodes(), bytes);
        links.extend(inside.map(|link| used(i, i, link)));
        if let Some(next) = pipeline.stages.get(i + 1) {
            let hop = costs.hop_link(&stage.nodes(), &next.nodes(), 1.0);
            links.extend(hop.map(|link| used(i, i + 1, link)));
        }
    }
    links
}
