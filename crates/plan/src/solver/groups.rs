//! Candidate groups for a stage: their split, their memory check, and the cost of any range of
//! layers in constant time.

use std::ops::Range;

use crate::cost::Costs;
use crate::cost::kernels::StepRows;
use crate::cost::memory::usage;
use crate::placement::{PipelineStage, Split, StageMember};
use crate::workload::CHUNK;
use crate::{AttentionKind, Error, ModelShape};

/// Nodes that would share layers, and the cost of every range in constant time.
#[derive(Clone, Debug)]
pub(crate) struct NodeGroup {
    /// Nodes, the first speaks for the group.
    pub(crate) nodes: Vec<usize>,
    pub(crate) split: Split,
    /// Whether the prompt is in `request`.
    pub(crate) prompt: bool,
    shares: Vec<f64>,
    /// `request[l]`: seconds that layers `0..l` cost one request.
    request: Vec<f64>,
    /// `step[l]`: seconds that layers `0..l` take for a decode step of the batch.
    step: Vec<f64>,
    /// Extra cost of a layer that is not on the first stage, per request and per step.
    later: (f64, f64),
    /// `reach[l]`: the largest end of a range that starts at `l` and fits.
    pub(crate) reach: Vec<u32>,
}

/// The load for which ranges are costed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RangeLoad {
    /// Whether the prompt counts.
    pub(crate) prompt: bool,
    /// Sequences in a decode step that the slowest stage sets the pace of.
    pub(crate) batch: f64,
}

impl NodeGroup {
    /// `None` where members lack a link or any layer does not fit.
    pub(crate) fn new(
        costs: &Costs<'_>,
        nodes: Vec<usize>,
        split: Split,
        weights: RangeLoad,
    ) -> Option<Self> {
        let shares = shares_of(costs, &nodes, split);
        let n_layers = costs.model.layers;
        let mut group = Self {
            nodes,
            split,
            prompt: weights.prompt,
            shares,
            request: vec![0.0],
            step: vec![0.0],
            later: (0.0, 0.0),
            reach: Vec::new(),
        };
        group.fill_reach(costs);
        if group
            .reach
            .iter()
            .zip(0..)
            .all(|(&end, start)| end <= start)
        {
            return None;
        }
        group.later = group.later_layer(costs);
        let mut known: Option<(bool, f64, f64)> = None;
        for index in 0..n_layers {
            let (kind, ends) = (costs.model.is_moe(index), index + 1 == n_layers);
            let (request, step) = match known {
                Some((k, request, step)) if k == kind && !ends => (request, step),
                _ => group.layer(costs, index, weights).ok()?,
            };
            known = Some((kind, request, step));
            group.request.push(group.request[index as usize] + request);
            group.step.push(group.step[index as usize] + step);
        }
        Some(group)
    }

    /// The stage that this group would be.
    pub(crate) fn stage(&self, layers: Range<u32>) -> PipelineStage {
        stage(&self.nodes, &self.shares, self.split, layers)
    }

    /// The same group made of other nodes of the same classes.
    pub(crate) fn with_nodes(&self, nodes: Vec<usize>) -> Self {
        Self {
            nodes,
            ..self.clone()
        }
    }

    /// Seconds per request and per step of layers `from..to`.
    pub(crate) fn range(&self, from: u32, to: u32) -> (f64, f64) {
        let (a, b) = (from as usize, to as usize);
        let later = if from > 0 { f64::from(to - from) } else { 0.0 };
        (
            self.request[b] - self.request[a] + later * self.later.0,
            self.step[b] - self.step[a] + later * self.later.1,
        )
    }

    /// Extra cost of each layer once it is not on the first stage.
    fn later_layer(&self, costs: &Costs<'_>) -> (f64, f64) {
        let each = costs.later_layer(self.nodes[0]);
        let chunks = costs.workload.prompt.div_ceil(CHUNK);
        let prompt = if self.prompt { f64::from(chunks) } else { 0.0 };
        (each * (prompt + super::answer(costs)), each)
    }

    fn layer(&self, costs: &Costs<'_>, index: u32, w: RangeLoad) -> Result<(f64, f64), Error> {
        let stage = self.stage(index..index + 1);
        let time = |rows| Ok::<f64, Error>(costs.stage_here(&stage, rows)?.total());
        let decode = time(costs.decode_rows(1.0))?;
        let step = time(costs.decode_rows(w.batch))?;
        let prompt = if w.prompt {
            prompt_seconds(costs, &stage)?
        } else {
            0.0
        };
        // A lone token and the prompt, weighed as one request has them.
        Ok((prompt + super::answer(costs) * decode, step))
    }

    fn fill_reach(&mut self, costs: &Costs<'_>) {
        let n_layers = costs.model.layers;
        let mut end = 0;
        for start in 0..n_layers {
            end = end.max(start);
            if !costs.model.can_cut(start) {
                self.reach.push(start);
                continue;
            }
            while end < n_layers && holds(costs, &self.stage(start..end + 1)) {
                end += 1;
            }
            self.reach.push(end);
        }
    }
}

/// Layers shared by these nodes.
fn stage(nodes: &[usize], shares: &[f64], split: Split, layers: Range<u32>) -> PipelineStage {
    let members = nodes.iter().zip(shares).map(|(&node, &share)| StageMember {
        node,
        share,
        streamed: 0,
    });
    PipelineStage {
        layers,
        split,
        members: members.collect(),
    }
}

/// Whether all members of a stage hold their parts.
pub(crate) fn holds(costs: &Costs<'_>, stage: &PipelineStage) -> bool {
    let ends = costs.ends(stage);
    let mut last: Option<(f64, f64)> = None; // Members with equal shares need the same.
    stage.members.iter().all(|member| {
        let need = match last {
            Some((share, need)) if share == member.share => need,
            _ => usage(costs.model, &costs.workload, stage, member, ends).total(),
        };
        last = Some((member.share, need));
        need <= costs.cluster.nodes[member.node].budget()
    })
}

/// Whether all nodes together hold the model as one group, which takes a link between any two.
pub(crate) fn holds_all(costs: &Costs<'_>) -> bool {
    let nodes: Vec<usize> = (0..costs.cluster.nodes.len()).collect();
    if !costs.network.joins(&nodes) {
        return false;
    }
    let held = |split| {
        let shares = shares_of(costs, &nodes, split);
        holds(costs, &stage(&nodes, &shares, split, 0..costs.model.layers))
    };
    splits(costs, nodes.len()).into_iter().any(held)
}

/// The splits of a layer of the model that `n` nodes support.
pub(crate) fn splits(costs: &Costs<'_>, n: usize) -> Vec<Split> {
    if n == 1 {
        return vec![Split::Whole];
    }
    let n = u32::try_from(n).unwrap_or(u32::MAX);
    let mut splits = Vec::new();
    if n <= costs.model.attention.units() {
        splits.push(Split::Tensor);
    }
    if costs.model.moe.is_some_and(|moe| n <= moe.experts) {
        splits.push(Split::Expert);
    }
    splits
}

/// Seconds of the workload's prompt at a stage, chunk by chunk. Where a node's arithmetic is not
/// known the prompt does not count.
fn prompt_seconds(costs: &Costs<'_>, stage: &PipelineStage) -> Result<f64, Error> {
    let tokens = costs.workload.prompt;
    let chunk = CHUNK.min(tokens);
    let rows = StepRows {
        rows: f64::from(chunk),
        sequences: 1.0,
        keys: f64::from(tokens) / 2.0,
        prefill: true,
    };
    match costs.stage_here(stage, rows) {
        Ok(time) => Ok(time.total() * f64::from(tokens) / f64::from(chunk)),
        Err(Error::MissingFact { .. }) => Ok(0.0),
        Err(other) => Err(other),
    }
}

/// Shares by speed, in whole heads.
fn shares_of(costs: &Costs<'_>, nodes: &[usize], split: Split) -> Vec<f64> {
    let speeds: Vec<f64> = nodes.iter().map(|&node| costs.speed(node).memory).collect();
    let equal = speeds.iter().all(|speed| *speed == speeds[0]);
    let n = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
    let units = match split {
        Split::Whole => return vec![1.0],
        Split::Tensor => head_units(costs.model, n),
        Split::Expert => costs.model.moe.map_or(n, |moe| moe.experts),
    };
    if units < n || (equal && units.is_multiple_of(n)) {
        return vec![1.0 / f64::from(n); nodes.len()];
    }
    let counts = super::shares(units, &speeds);
    counts
        .iter()
        .map(|&count| f64::from(count.max(1)) / f64::from(units))
        .collect()
}

/// Pieces that attention is dealt in: KV heads with their queries when those go round evenly,
/// single heads otherwise.
fn head_units(model: &ModelShape, ranks: u32) -> u32 {
    match model.attention {
        AttentionKind::Gqa { kv_heads, .. } if kv_heads.is_multiple_of(ranks) => kv_heads,
        _ => model.attention.heads(),
    }
}
