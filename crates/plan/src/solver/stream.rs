//! Layers from disk, where memory does not hold them all.

use paceline_base::median;

use super::milp::{Streamed, Streamer, stream};
use super::request_hop;
use crate::cost::Costs;
use crate::cost::memory::{Ends, usage};
use crate::placement::{Pipeline, PipelineStage, Placement};
use crate::predict::{Prediction, predict};
use crate::{Error, LinkTable};

/// Most nodes for the integer program: it has four variables for each.
const NODES: usize = 16;

/// The best pipeline over single nodes when nodes with a known disk rate may stream layers: the
/// integer program [`super::milp::stream`] on the mean layer.
///
/// # Errors
/// [`Error::Program`] when even disks do not help; [`Error::Placement`] when the nodes used have no
/// links in the order of their speed.
pub fn stream_from_disk(costs: &Costs<'_>) -> Result<(Placement, Prediction), Error> {
    let n_layers = costs.model.layers;
    let bytes = (0..n_layers)
        .map(|i| costs.model.layer_bytes(i))
        .sum::<f64>()
        / f64::from(n_layers);
    let mut order: Vec<usize> = (0..costs.cluster.nodes.len()).collect();
    order.sort_by(|&a, &b| costs.speed(b).memory.total_cmp(&costs.speed(a).memory));
    order.truncate(NODES);
    let streamers = order
        .iter()
        .map(|&node| streamer(costs, node))
        .collect::<Result<Vec<_>, _>>()?;
    let hop = typical_hop(costs, &costs.network, &order);
    let (_, layers) = stream(&streamers, n_layers, bytes, hop)?;
    let placement = Placement::single(pipeline(&order, &layers));
    let prediction = predict(costs, &placement)?;
    Ok((placement, prediction))
}

fn streamer(costs: &Costs<'_>, node: usize) -> Result<Streamer, Error> {
    let n = costs.model.layers;
    let whole = PipelineStage::whole(0..n, node);
    let time = costs.stage(&whole, costs.decode_rows(1.0))?.compute;
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
    );
    let layers: f64 = (0..n).map(|i| costs.model.layer_bytes(i)).sum();
    let facts = &costs.cluster.nodes[node];
    // A mixture's token touches few experts; of a layer's bytes only those are read.
    let touched = (0..n).map(|i| costs.streamed_bytes(i)).sum::<f64>() / layers;
    Ok(Streamer {
        seconds: time / f64::from(n),
        memory: facts.budget(),
        cache: need.cache / f64::from(n),
        fixed: need.weights - layers + need.buffers,
        disk: facts.disk.map_or(0.0, |rate| rate / touched),
    })
}

fn typical_hop(costs: &Costs<'_>, network: &LinkTable, order: &[usize]) -> f64 {
    let answer = super::answer(costs);
    let pairs = order.windows(2).filter(|pair| network.joins(pair));
    let hops = pairs.filter_map(|p| request_hop(costs, false, &p[..1], &p[1..]));
    median(hops.map(|hop| hop / answer).collect())
}

fn pipeline(order: &[usize], layers: &[Streamed]) -> Pipeline {
    let mut start = 0;
    let mut stages = Vec::new();
    for (&node, part) in order.iter().zip(layers).filter(|(_, part)| part.layers > 0) {
        let mut stage = PipelineStage::whole(start..start + part.layers, node);
        stage.members[0].streamed = part.layers - part.resident.min(part.layers);
        start += part.layers;
        stages.push(stage);
    }
    Pipeline { stages }
}
