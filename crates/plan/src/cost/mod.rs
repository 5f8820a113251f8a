//! Seconds, bytes and watts of a placement. docs/planner.md derives each term and names sources.
//!
//! ```text
//! token    = sum over stages (layers + exchanges) + sum over boundaries + way back
//! layer    = sum over kernel classes max(bytes / memory rate, operations / rate) + launches
//! exchange = all-reduce(alpha, beta, ranks, bytes) + handover
//! ```

pub mod comm;
pub mod kernels;
pub mod memory;
pub mod moe;

use kernels::{LayerPart, StepRows};
use memory::{Ends, usage};

use crate::calibration::{Calibration, EngineProfile, Speed};
use crate::placement::{Pipeline, PipelineStage, Split, StageMember};
use crate::workload::CHUNK;
use crate::{Cluster, Error, LinkTable, ModelShape, NodeLink, Workload};

/// Inputs of all costs, looked up once.
#[derive(Debug)]
pub struct Costs<'a> {
    /// Machines.
    pub cluster: &'a Cluster,
    pub network: LinkTable,
    pub model: &'a ModelShape,
    pub workload: Workload,
    calibration: &'a Calibration,
    speeds: Vec<Speed>,
}

/// Seconds of a stage for one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTime {
    /// Kernels of the slowest member.
    pub compute: f64,
    /// Exchanges inside the stage.
    pub comm: f64,
}

/// Seconds of a step through a pipeline.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PipelineTime {
    pub stages: Vec<StageTime>,
    /// Boundaries between stages, and the way back of the token.
    pub hops: f64,
    /// The longest that any node reads from disk.
    pub disk: f64,
    /// Reads that nothing hides: an expert is known once its layer's rows are routed.
    pub waits: f64,
}

impl StageTime {
    /// Both.
    pub fn total(&self) -> f64 {
        self.compute + self.comm
    }
}

impl PipelineTime {
    /// From the first stage's start to the token's return. Reads of layers overlap with everything
    /// else.
    pub fn total(&self) -> f64 {
        let stages: f64 = self.stages.iter().map(StageTime::total).sum();
        (stages + self.hops + self.waits).max(self.disk)
    }

    /// The part that is exchanges and boundaries.
    pub fn comm(&self) -> f64 {
        self.stages.iter().map(|stage| stage.comm).sum::<f64>() + self.hops
    }

    /// The slowest stage: what limits a full pipeline.
    pub fn slowest(&self) -> f64 {
        let stages = self.stages.iter().map(StageTime::total);
        stages.fold(self.disk, f64::max) + self.waits
    }
}

/// Whether the members of a stage have parts of the output head.
fn shares_head(stage: &PipelineStage, engine: &EngineProfile) -> bool {
    match stage.split {
        Split::Whole => false,
        Split::Tensor => engine.head_split,
        Split::Expert => engine.head_split && engine.deals_experts,
    }
}

impl<'a> Costs<'a> {
    /// Looks up speeds and links.
    ///
    /// # Errors
    /// Faults of cluster, model or workload.
    pub fn new(
        cluster: &'a Cluster,
        model: &'a ModelShape,
        workload: Workload,
        calibration: &'a Calibration,
    ) -> Result<Self, Error> {
        cluster.check()?;
        model.check()?;
        workload.check()?;
        Ok(Self {
            cluster,
            network: LinkTable::new(cluster),
            model,
            workload,
            calibration,
            speeds: cluster
                .nodes
                .iter()
                .map(|node| calibration.speed(node, model))
                .collect(),
        })
    }

    /// The same constants for other facts.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with<'b>(
        &self,
        cluster: &'b Cluster,
        model: &'b ModelShape,
        workload: Workload,
    ) -> Result<Costs<'b>, Error>
    where
        'a: 'b,
    {
        Costs::new(cluster, model, workload, self.calibration)
    }

    pub fn engine(&self, node: usize) -> &'a EngineProfile {
        self.calibration.engine(&self.cluster.nodes[node].engine)
    }

    /// A node's rates as reached.
    pub fn speed(&self, node: usize) -> &Speed {
        &self.speeds[node]
    }

    /// The ends of the model that `stage` has.
    pub fn ends(&self, stage: &PipelineStage) -> Ends {
        Ends {
            first: stage.layers.start == 0,
            last: stage.layers.end == self.model.layers,
        }
    }

    /// Seconds of one stage for a step.
    ///
    /// # Errors
    /// [`Error::Placement`] when members have no link; [`Error::MissingFact`] for prompts on a node
    /// whose arithmetic rate is unknown.
    pub fn stage(&self, stage: &PipelineStage, rows: StepRows) -> Result<StageTime, Error> {
        let mut time = self.stage_here(stage, rows)?;
        if stage.layers.start > 0 {
            time.comm += f64::from(stage.n_layers()) * self.later_layer(stage.members[0].node);
        }
        Ok(time)
    }

    /// Seconds that a layer costs besides when another node has the first layers.
    pub fn later_layer(&self, node: usize) -> f64 {
        self.calibration.remote_layer(self.engine(node))
    }

    /// Like [`stage`](Self::stage), without the cost of distance from the first stage.
    ///
    /// # Errors
    /// The errors of [`stage`](Self::stage).
    pub fn stage_here(&self, stage: &PipelineStage, rows: StepRows) -> Result<StageTime, Error> {
        let mut compute: f64 = 0.0;
        let mut last: Option<&StageMember> = None; // Members of a kind take equally long.
        for member in &stage.members {
            if !last.is_some_and(|known| self.alike(known, member)) {
                compute = compute.max(self.member(stage, member, rows)?);
                last = Some(member);
            }
        }
        Ok(StageTime {
            compute,
            comm: self.exchanges(stage, rows)?,
        })
    }

    /// Whether kernels take both members of a stage equally long.
    fn alike(&self, a: &StageMember, b: &StageMember) -> bool {
        let same_engine = std::ptr::eq(self.engine(a.node), self.engine(b.node));
        a.share == b.share && self.speed(a.node) == self.speed(b.node) && same_engine
    }

    /// Kernels of one member.
    fn member(
        &self,
        stage: &PipelineStage,
        member: &StageMember,
        rows: StepRows,
    ) -> Result<f64, Error> {
        let node = member.node;
        let part = LayerPart {
            deals: self.engine(node).deals_experts,
            ..memory::part_of(stage, member)
        };
        let speed = self.speed(node);
        let mut seconds = 0.0;
        let mut last: Option<(bool, f64)> = None; // Layers of a kind take equally long.
        for index in stage.layers.clone() {
            let kind = self.model.is_moe(index);
            let one = match last {
                Some((known, seconds)) if known == kind => seconds,
                _ => kernels::layer(self.model, index, part, rows, speed)
                    .map_err(|error| self.named(error, node))?,
            };
            last = Some((kind, one));
            seconds += one;
        }
        if self.ends(stage).last {
            // A prompt's logits are computed for the last row of each sequence only.
            let split = shares_head(stage, self.engine(node));
            let share = if split { member.share } else { 1.0 };
            seconds += kernels::head(self.model, share, rows.sequences, speed);
        }
        Ok(seconds)
    }

    fn named(&self, error: Error, node: usize) -> Error {
        match error {
            Error::MissingFact { fact, .. } => Error::MissingFact {
                node: self.cluster.nodes[node].name.clone(),
                fact,
            },
            other => other,
        }
    }

    /// Seconds of the exchanges inside a stage.
    fn exchanges(&self, stage: &PipelineStage, rows: StepRows) -> Result<f64, Error> {
        let engine = self.engine(stage.members[0].node);
        let count: u32 = match stage.split {
            Split::Whole => return Ok(0.0),
            Split::Tensor => 2 * stage.n_layers(),
            // Layers without experts share their feed-forward where experts are dealt.
            Split::Expert if engine.deals_experts => stage.n_layers(),
            Split::Expert => self.model.mixtures(&stage.layers),
        };
        let nodes = stage.nodes();
        let bytes = rows.rows * f64::from(self.model.width) * engine.activation_bytes;
        let link = self.network.slowest(&nodes, bytes);
        let link = link.ok_or_else(|| self.no_link(&nodes, &nodes))?;
        // All wait for the member whose handover takes longest.
        let handovers = nodes.iter().map(|node| {
            let engine = self.engine(*node);
            self.calibration.handover(engine, link.transport)
        });
        let handover = handovers.fold(0.0, f64::max);
        let sums = f64::from(count) * (comm::all_reduce(link, nodes.len(), bytes).1 + handover);
        Ok(sums + self.logits(stage, rows, link, handover))
    }

    /// Seconds until a split head's logits are at the rank that samples. All others send theirs to
    /// it, so its own link is what they wait for.
    fn logits(&self, stage: &PipelineStage, rows: StepRows, link: &NodeLink, handover: f64) -> f64 {
        const LOGIT: f64 = 4.0; // bytes
        let engine = self.engine(stage.members[0].node);
        if !shares_head(stage, engine) || !self.ends(stage).last {
            return 0.0;
        }
        let others = 1.0 - stage.members[0].share;
        let bytes = rows.sequences * f64::from(self.model.vocab) * LOGIT * others;
        link.seconds(bytes) + handover
    }

    fn no_link(&self, from: &[usize], to: &[usize]) -> Error {
        let name = |i: &usize| self.cluster.nodes[*i].name.clone();
        let names = |nodes: &[usize]| nodes.iter().map(name).collect::<Vec<_>>().join(", ");
        Error::Placement {
            problem: format!("no direct link between {} and {}", names(from), names(to)),
        }
    }

    /// The link between two stages for `rows` rows.
    pub fn hop_link(&self, from: &[usize], to: &[usize], rows: f64) -> Option<&NodeLink> {
        let bytes = rows * f64::from(self.model.width) * self.engine(from[0]).activation_bytes;
        self.network.between(from, to, bytes)
    }

    /// Seconds of a boundary between two groups for `rows` rows; `None` without a link.
    pub fn hop(&self, from: &[usize], to: &[usize], rows: f64) -> Option<f64> {
        let engine = self.engine(from[0]);
        let link = self.hop_link(from, to, rows)?;
        let bytes = rows * f64::from(self.model.width) * engine.activation_bytes;
        let handover = self.calibration.handover(engine, link.transport);
        // An engine with a measured boundary has the handover in it; one with many messages per
        // boundary pays the link for each, and no handover apart.
        let fixed = match self.calibration.boundary(engine) {
            Some(boundary) => boundary,
            None if engine.boundary_messages > 1.0 => 0.0,
            None => handover,
        };
        Some(fixed + engine.boundary_messages * link.alpha + bytes / link.beta)
    }

    /// Seconds for a token to return from the last stage to the first.
    fn way_back(&self, last: &[usize], first: &[usize]) -> Option<f64> {
        const TOKEN: f64 = 4.0; // bytes
        if last == first || self.engine(first[0]).boundary_messages > 1.0 {
            return Some(0.0);
        }
        Some(self.network.between(last, first, TOKEN)?.seconds(TOKEN))
    }

    /// Seconds of one step of `rows` through a pipeline, one step at a time.
    ///
    /// # Errors
    /// The errors of [`stage`](Self::stage), and where stages have no link.
    pub fn pipeline(&self, pipeline: &Pipeline, rows: StepRows) -> Result<PipelineTime, Error> {
        let mut time = PipelineTime::default();
        for stage in &pipeline.stages {
            time.stages.push(self.stage(stage, rows)?);
            let [disk, waits] = self.disk(stage)?;
            time.disk = time.disk.max(disk);
            time.waits += waits;
        }
        for pair in pipeline.stages.windows(2) {
            let (from, to) = (pair[0].nodes(), pair[1].nodes());
            let hop = self.hop(&from, &to, rows.rows);
            time.hops += hop.ok_or_else(|| self.no_link(&from, &to))?;
        }
        let ends = [pipeline.stages.last(), pipeline.stages.first()];
        if let [Some(last), Some(first)] = ends.map(|s| s.map(PipelineStage::nodes)) {
            // Without a direct link the token returns along the stages.
            time.hops += self.way_back(&last, &first).unwrap_or(time.hops);
        }
        Ok(time)
    }

    /// Seconds that a stage's nodes read from disk for every step, and those of them for experts.
    fn disk(&self, stage: &PipelineStage) -> Result<[f64; 2], Error> {
        let mut worst = [0.0_f64; 2];
        for member in stage.members.iter().filter(|m| m.streamed > 0) {
            let node = &self.cluster.nodes[member.node];
            let rate = node.disk.ok_or_else(|| Error::MissingFact {
                node: node.name.clone(),
                fact: "disk rate",
            })?;
            let [common, experts] = self.read_bytes(stage, member);
            for (worst, bytes) in worst.iter_mut().zip([common + experts, experts]) {
                *worst = worst.max(bytes / rate);
            }
        }
        Ok(worst)
    }

    /// Bytes that a member reads for a step: of streamed layers without routed experts, and of
    /// experts of all its layers, which share one memory. In a mixture, memory outside the window
    /// keeps the former first, then experts. Steps choose some experts more often than others, so
    /// they find more of theirs there than the share that fits ([`Calibration::expert_reuse`]).
    fn read_bytes(&self, stage: &PipelineStage, member: &StageMember) -> [f64; 2] {
        let (model, part) = (self.model, memory::part_of(stage, member));
        let [mut common, mut touched, mut all, mut whole] = [0.0; 4];
        for index in stage.layers.clone() {
            let own = memory::streamed_bytes(model, &self.workload, part, index);
            let experts = model.routed_params(index) * model.bits.experts / 8.0;
            (touched, all) = (touched + own[1], all + experts);
            match index < stage.layers.start + member.streamed {
                true => common += own[0],
                false => whole += experts,
            }
        }
        if touched == 0.0 {
            return [common, 0.0];
        }
        let need = usage(model, &self.workload, stage, member, self.ends(stage));
        let spare = self.cluster.nodes[member.node].budget() - need.total();
        let kept = spare.clamp(0.0, common);
        let [all, whole] = [all, whole].map(|bytes| bytes * memory::shares(part)[1]);
        let share = ((whole + spare - kept) / all).clamp(0.0, 1.0);
        let hits = share.powf(self.calibration.expert_reuse());
        [common - kept, touched * (1.0 - hits)]
    }

    /// Bytes of a streamed layer that one token touches: of experts only the active ones.
    pub fn streamed_bytes(&self, index: u32) -> f64 {
        let whole = LayerPart {
            split: Split::Whole,
            share: 1.0,
            ranks: 1,
            deals: false,
        };
        memory::streamed_bytes(self.model, &self.workload, whole, index)
            .iter()
            .sum()
    }

    /// A decode step of `batch` sequences.
    pub fn decode_rows(&self, batch: f64) -> StepRows {
        StepRows {
            rows: batch,
            sequences: batch,
            keys: self.workload.decode_context(),
            prefill: false,
        }
    }

    /// Seconds until a prompt of `tokens` is computed. Chunks follow each other through the stages,
    /// so all but the first cost the slowest stage. (Pipeline fill: Huang et al., GPipe, NeurIPS
    /// 2019.)
    ///
    /// # Errors
    /// The errors of [`pipeline`](Self::pipeline).
    pub fn prefill(&self, pipeline: &Pipeline, tokens: u32) -> Result<f64, Error> {
        let (mut first, mut rest, mut done) = (0.0, 0.0, 0);
        while done < tokens {
            let chunk = CHUNK.min(tokens - done);
            let rows = StepRows {
                rows: f64::from(chunk),
                sequences: 1.0,
                keys: f64::from(done) + f64::from(chunk) / 2.0,
                prefill: true,
            };
            let time = self.pipeline(pipeline, rows)?;
            if done == 0 {
                first = time.total();
            } else {
                rest += time.slowest();
            }
            done += chunk;
        }
        Ok(first + rest)
    }
}
