//! The planner's description of this machine's ranks.

use std::collections::BTreeMap;

use paceline_model::{Config, Split};
use paceline_plan::cost::kernels::operations;
use paceline_plan::cost::moe::touched;
use paceline_plan::split_selection::KEYS;
use paceline_plan::{
    Backend as Engine, Calibration, Cluster, ClusterNode, Costs, EXPERT_REUSE, LinkTransport,
    NodeLink, Rates, STEPS_MAX, Workload, predict,
};

use super::ranks::{GroupCost, LinkCost};
use super::{Forecast, Result, RowCost, cores};

impl Forecast {
    /// Decode tokens a second from measurements alone, without corrections.
    ///
    /// # Errors
    /// The planner refuses the split.
    pub fn facts(&self, config: &Config, split: &Split) -> Result<f64> {
        self.facts_at(config, split, KEYS)
    }

    /// As [`facts`](Self::facts) with `keys` in the cache.
    ///
    /// # Errors
    /// As there.
    pub fn facts_at(&self, config: &Config, split: &Split, keys: u32) -> Result<f64> {
        self.facts_for(config, split, (keys, 1))
    }

    /// Decode tokens a second of `ingress` together, each with the given number of keys.
    pub(super) fn facts_for(
        &self,
        config: &Config,
        split: &Split,
        (keys, answers): (u32, u32),
    ) -> Result<f64> {
        let at_once = match answers {
            1 => split.tensor_ranks(),
            _ => split.ranks() as usize, // each stage computes another step
        };
        // A stage's part of the answers, or the rows of a prompt.
        let row = match answers {
            1 => self.prompt_row(),
            _ => {
                let parts = split.stages().min(STEPS_MAX) as u32;
                self.row_of(f64::from(answers.div_ceil(parts)))
            }
        };
        let (cluster, calibration) = self.cluster(split, at_once, row)?;
        let workload = Workload {
            prompt: keys,
            output: 1,
            concurrency: answers,
            context: keys + 1,
        };
        let costs = Costs::new(&cluster, &self.shape, workload, &calibration)?;
        let memory = self.memory_of(split.ranks());
        let placement = self.placement(config, split, &workload, |_| memory);
        let answers = f64::from(answers);
        let round = answers / predict(&costs, &placement)?.throughput_tok_s;
        // Followers sleep until the leader announces a step. In a pipeline the hop back already
        // counts that.
        let alone = split.ranks() == 1 || split.stages() > 1;
        let told = self.wire.filter(|_| !alone).map_or(0.0, |wire| wire.wake);
        // The leader samples one token after the other.
        Ok(answers / (round + answers * self.measured.step + told))
    }

    /// Seconds of products for a row of a prompt.
    pub(super) fn prompt_row(&self) -> RowCost {
        RowCost {
            common: self.measured.prompt_row,
            experts: self.measured.prompt_expert,
        }
    }

    /// Seconds of products per row of a batch of `rows`; an expert gets its average number of them.
    pub(super) fn row_of(&self, rows: f64) -> RowCost {
        let of_expert = self.shape.moe.map_or(rows, |moe| {
            let (all, active) = (f64::from(moe.experts), f64::from(moe.active));
            rows * active / touched(all, active, rows)
        });
        RowCost {
            common: self.measured.row_of(rows),
            experts: self.measured.experts_of(of_expert.max(1.0)),
        }
    }

    /// This machine as the planner's nodes; `at_once` of them compute at the same time. Each has
    /// the time of a row of a layer's products and the slowdown by the others.
    pub(super) fn cluster(
        &self,
        split: &Split,
        at_once: usize,
        row: RowCost,
    ) -> Result<(Cluster, Calibration)> {
        // Ranks with more threads than cores share the cores in turns.
        let crowd = ((at_once * self.threads) as f64 / cores() as f64).max(1.0);
        let mut calibration = Calibration::builtin()?;
        let op = self.op() * crowd;
        calibration.set("op.paceline-cpu", op.max(1e-9));
        self.set_reuse(&mut calibration);
        let known = known_for(&self.together, split.tensor_ranks() as u32);
        calibration.set("handover.own.tcp", known.map_or(1e-7, GroupCost::exchange));
        let sharing = self.sharing(split, (at_once, crowd));
        let cluster = Cluster {
            name: "this machine".to_owned(),
            nodes: (0..split.ranks())
                .map(|rank| ClusterNode {
                    memory: self.memory_of(split.ranks()),
                    ..self.node(rank, (crowd, sharing), row)
                })
                .collect(),
            links: self.links(split),
        };
        Ok((cluster, calibration))
    }

    /// Has experts be found in memory as answers of this model showed.
    pub(super) fn set_reuse(&self, calibration: &mut Calibration) {
        if let Some(reuse) = self.stream.as_ref().and_then(|stream| stream.reuse) {
            calibration.set(EXPERT_REUSE, reuse);
        }
    }

    /// Measurements of ranks that compute one after the other, for stages of one rank. Each rank
    /// sleeps until the previous one is done.
    fn pipeline_cost(&self, split: &Split) -> Option<&GroupCost> {
        known_for(&self.together, split.ranks()).filter(|_| split.tensor_ranks() == 1)
    }

    /// Seconds of all products for one rank alone on the machine.
    pub(super) fn alone(&self) -> f64 {
        f64::from(self.shape.layers) * self.measured.products + self.measured.head
    }

    /// Slowdown of a rank's products by concurrent ranks, which share memory bandwidth; 1 means
    /// none.
    pub(super) fn sharing(&self, split: &Split, (at_once, crowd): (usize, f64)) -> f64 {
        let (layers, alone) = (f64::from(self.shape.layers), self.alone());
        if let Some(turns) = self.pipeline_cost(split).filter(|_| at_once == 1) {
            return (layers * turns.turns + self.measured.head) / alone;
        }
        let part = |t: &GroupCost| (layers * t.free + t.head) / alone;
        let measured = sharing(&self.together, at_once as u32, part);
        measured.unwrap_or(crowd).max(1.0)
    }

    /// Seconds of one operation: the planner models a layer's measured overhead as a number of
    /// operations.
    pub(super) fn op(&self) -> f64 {
        let each = (0..self.shape.layers).map(|layer| operations(&self.shape, layer));
        self.measured.other * f64::from(self.shape.layers) / each.sum::<f64>()
    }

    /// A rank as the planner's node. `crowd` is threads per core. The rank's products take
    /// `sharing` times as long as alone. `row` is the time of a row of a layer's products without a
    /// memory limit.
    pub(super) fn node(
        &self,
        rank: u32,
        (crowd, sharing): (f64, f64),
        row: RowCost,
    ) -> ClusterNode {
        let layers = || 0..self.shape.layers;
        let read: f64 = layers().map(|layer| self.shape.read_bytes(layer)).sum();
        let bytes = read + self.shape.head_bytes();
        let common: f64 = layers().map(|layer| self.shape.common_params(layer)).sum();
        let seconds = |one: f64| (f64::from(self.shape.layers) * one).max(1e-12);
        let matmul = 2.0 * common / seconds(row.common);
        let experts = self.shape.moe.map_or(0.0, |moe| {
            let mixtures = f64::from(self.shape.mixtures(&layers()));
            mixtures * f64::from(moe.active) * self.shape.expert_params()
        });
        let expert = if experts > 0.0 {
            2.0 * experts / seconds(row.experts)
        } else {
            matmul
        };
        let attention = self.shape.attention.decode_pair_flops() / self.measured.key.max(1e-12);
        ClusterNode {
            name: format!("rank {rank}"),
            kind: "this machine".to_owned(),
            memory: self.memory_of(1),
            usable: 1.0,
            bandwidth: bytes / self.alone() / sharing,
            measured: true,
            rates: Some(Rates {
                matmul: matmul / crowd,
                expert: expert / crowd,
                attention: attention / crowd,
            }),
            disk: self.stream.as_ref().map(|stream| stream.disk),
            idle_w: None,
            load_w: None,
            price_usd: None,
            backend: Engine::Cpu,
            engine: "paceline-cpu".to_owned(),
        }
    }

    /// The links between every two ranks of `split`.
    pub(super) fn links(&self, split: &Split) -> Vec<NodeLink> {
        let (ranks, n) = (split.tensor_ranks(), split.ranks() as usize);
        let Some(mut wire) = self.wire else {
            return Vec::new();
        };
        wire.wake = self
            .pipeline_cost(split)
            .map_or(wire.wake, |turns| turns.hop);
        let of = |a| (a + 1..n).map(move |b| loopback(a, b, ranks, wire));
        (0..n).flat_map(of).collect()
    }
}

/// Slowdown of `ranks` concurrent ranks against each alone. `part` returns the measured time of a
/// rank's part next to the others, as a fraction of the whole. Beyond the largest measured number,
/// more ranks add no throughput.
pub(super) fn sharing(
    together: &BTreeMap<u32, GroupCost>,
    ranks: u32,
    part: impl Fn(&GroupCost) -> f64,
) -> Option<f64> {
    Some(f64::from(ranks) * part(known_for(together, ranks)?))
}

/// Measurements for `ranks` ranks, or for the largest smaller number; `None` for one.
pub(super) fn known_for(together: &BTreeMap<u32, GroupCost>, ranks: u32) -> Option<&GroupCost> {
    let known = together.range(..=ranks).next_back();
    known.filter(|_| ranks > 1).map(|(_, known)| known)
}

/// The link between two ranks in stages of `ranks`. Exchanges inside a stage are measured as a
/// whole, apart from their bytes; a stage waits for the previous one.
pub(super) fn loopback(a: usize, b: usize, ranks: usize, wire: LinkCost) -> NodeLink {
    NodeLink {
        a,
        b,
        kind: "this machine".to_owned(),
        transport: LinkTransport::Tcp,
        alpha: if a / ranks == b / ranks {
            0.0
        } else {
            wire.wake
        },
        beta: wire.bytes_per_s,
        shared: false,
    }
}
