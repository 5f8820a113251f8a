//! Speed forecast for this machine: measured kernel times, a prediction from them, and corrections
//! from earlier runs.
//!
//! ```text
//! probe (steps, wire)    ->  measured.json  ->  plan::predict  x  learned ratio  ->  tok/s
//!                                                                    ^
//! live decode timings of each run  ---------------------------------'
//! ```
//! The ratio of measured to predicted speed is stored per model, threads, nodes and split. `--split
//! auto` begins with the split of the best corrected prediction, so a split that was slower than
//! predicted is not chosen next time. `paceline_plan::steer` replaces it already during a run.

pub mod devices;
mod facts;
mod inputs;
mod layers;
pub mod machines;
mod probe;
mod products;
mod ranks;
mod streamed;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_comm::Backend;
use paceline_model::{Config, Experts, ModelSource, Shard, Split, SplitKind, StageKind, shape};
use paceline_plan::cost::memory::{Ends, least_streamed};
use paceline_plan::split_selection::KEYS;
use paceline_plan::{
    Costs, ModelShape, Pipeline, PipelineStage, Placement, StageMember, Workload, predict,
};
use paceline_tensor::Kernels;

use facts::FactsStore;
use probe::{Probe, StepMeasurements};
use ranks::{GroupCost, LinkCost, Splits, Team};
use streamed::StreamFacts;
pub use streamed::measure_disk;

use crate::sharding::asked;
use crate::{Error, PlannedSplit};

type Result<T, E = Error> = std::result::Result<T, E>;

/// The model, engine and connections that a forecast is about.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// The model's files.
    pub source: &'a ModelSource,
    pub config: &'a Config,
    /// How numbers are computed.
    pub class: KernelClass,
    /// Threads of each node.
    pub threads: usize,
    /// How nodes reach each other.
    pub backend: Backend,
}

/// Keys in the cache of a long answer, for which the cost of a key is predicted. The probe measures
/// with about as many.
const MANY_KEYS: u32 = 2048;

/// Seconds of a mean layer's matrix products for one row of a batch.
#[derive(Clone, Copy, Debug)]
struct RowCost {
    /// Without experts.
    common: f64,
    experts: f64,
}

/// Most concurrent answers that [`Forecast::predict_many`] predicts: the maximum of `--parallel`.
const TOGETHER_MAX: u32 = 1024;

/// A model's packed sample weights, for repeated measurements.
#[expect(missing_debug_implementations, reason = "packed weights say nothing")]
pub struct Probes<'a> {
    setting: Setting<'a>,
    alone: Probe,
    /// By number of ranks.
    teams: BTreeMap<u32, Team<'a>>,
}

impl<'a> Probes<'a> {
    /// Packs the weights for up to `nodes` nodes.
    ///
    /// # Errors
    /// What is wrong with the file or the system.
    pub fn new(
        setting: Setting<'a>,
        nodes: u32,
        kernels: impl Fn(usize) -> io::Result<Arc<Kernels>>,
    ) -> Result<Self> {
        let mut teams = BTreeMap::new();
        for splits in Splits::up_to(nodes, setting.config) {
            let team = Team::new(setting, &splits, || started(kernels(setting.threads)))?;
            teams.insert(splits.ranks(), team);
        }
        Ok(Self {
            setting,
            alone: Probe::new(setting, started(kernels(setting.threads))?)?,
            teams,
        })
    }

    /// Measures this machine with `split` now; stores nothing.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn now(&self, split: &Split) -> Result<Forecast> {
        let ranks = match split.tensor_ranks() {
            1 => split.ranks(),
            ranks => ranks as u32,
        };
        let mut together = BTreeMap::new();
        if let Some(team) = self.teams.get(&ranks) {
            together.insert(ranks, team.measure()?);
        }
        let apart = split.ranks() > 1;
        let wire = apart
            .then(|| ranks::wire(self.setting.backend))
            .transpose()?;
        let measured = self.alone.decode()?;
        Ok(Forecast::of(
            FactsStore::nowhere(),
            self.setting,
            measured,
            together,
            wire,
        ))
    }
}

/// Measurements of a model on this machine, and the predictions from them.
#[derive(Clone, Debug)]
pub struct Forecast {
    facts: FactsStore,
    key: String,
    measured: StepMeasurements,
    wire: Option<LinkCost>,
    /// By number of ranks that compute at the same time.
    together: BTreeMap<u32, GroupCost>,
    shape: ModelShape,
    threads: usize,
    /// Set where a rank may have less memory than its weights need.
    stream: Option<StreamFacts>,
}

impl Forecast {
    /// The placement of a split whose ranks stream; `None` without a limit of memory.
    pub fn streamed(&self, config: &Config, split: &Split) -> Option<Placement> {
        let workload = Workload {
            prompt: KEYS,
            output: 1,
            concurrency: 1,
            context: KEYS + 1,
        };
        self.stream.as_ref()?;
        let memory = self.memory_of(split.ranks());
        Some(self.placement(config, split, &workload, |_| memory))
    }

    /// Memory of each of `ranks` ranks on this machine. Without a limit memory is not checked.
    fn memory_of(&self, ranks: u32) -> Bytes {
        let all = self.stream.as_ref().map(|stream| stream.memory.0);
        Bytes(all.map_or(1 << 44, |all| all / u64::from(ranks)))
    }

    /// The placement of `split`, with the layers that each rank must stream for its `memory`.
    fn placement(
        &self,
        config: &Config,
        split: &Split,
        workload: &Workload,
        memory: impl Fn(usize) -> Bytes,
    ) -> Placement {
        let mut pipeline = pipeline(config, split);
        if self.stream.is_none() {
            return Placement::single(pipeline);
        }
        let last = pipeline.stages.len().saturating_sub(1);
        for (place, stage) in pipeline.stages.iter_mut().enumerate() {
            let (first, last) = (place == 0, place == last);
            let of = |member: &StageMember| {
                let limit = (Ends { first, last }, memory(member.node).0 as f64);
                least_streamed(&self.shape, workload, stage, member, limit)
            };
            let streamed: Vec<u32> = stage.members.iter().map(of).collect();
            for (member, streamed) in stage.members.iter_mut().zip(streamed) {
                member.streamed = streamed;
            }
        }
        Placement::single(pipeline)
    }

    /// Loads the measurements for this model and these threads from `home`, or takes them; takes
    /// them again if a run contradicted them.
    ///
    /// # Errors
    /// The file or the system fails. Predictions are optional, so callers may continue without one.
    pub fn new(
        home: &Path,
        setting: Setting<'_>,
        nodes: u32,
        kernels: impl Fn(usize) -> io::Result<Arc<Kernels>>,
    ) -> Result<Self> {
        Self::with(FactsStore::load(home), setting, nodes, kernels)
    }

    fn with(
        mut facts: FactsStore,
        setting: Setting<'_>,
        nodes: u32,
        kernels: impl Fn(usize) -> io::Result<Arc<Kernels>>,
    ) -> Result<Self> {
        let key = facts::key(setting);
        let before = facts.forget(&key);
        let measured = match facts.measured(&key) {
            Some(known) => known,
            None => {
                let fresh = Probe::new(setting, started(kernels(setting.threads))?)?.measure()?;
                facts.set_measured(&key, fresh);
                if let Some(products) = before {
                    facts.rescale(&key, products / fresh.products);
                }
                fresh
            }
        };
        let together = together(&mut facts, &key, setting, nodes, &kernels)?;
        let wire = match (nodes > 1, facts.wire(setting.backend)) {
            (true, None) => {
                let fresh = ranks::wire(setting.backend)?;
                facts.set_wire(setting.backend, fresh);
                Some(fresh)
            }
            (_, known) => known,
        };
        facts.save();
        Ok(Self::of(facts, setting, measured, together, wire))
    }

    fn of(
        facts: FactsStore,
        setting: Setting<'_>,
        measured: StepMeasurements,
        together: BTreeMap<u32, GroupCost>,
        wire: Option<LinkCost>,
    ) -> Self {
        Self {
            facts,
            key: facts::key(setting),
            measured,
            wire,
            together,
            shape: shape::of(setting.source, setting.config),
            threads: setting.threads,
            stream: None,
        }
    }

    /// Decode tokens a second of `split`, corrected by earlier runs.
    ///
    /// # Errors
    /// The planner refuses the split.
    pub fn predict(&self, config: &Config, split: &Split) -> Result<f64> {
        self.predict_at(config, split, KEYS)
    }

    /// As [`predict`](Self::predict) with `keys` in the cache.
    ///
    /// # Errors
    /// As there.
    pub fn predict_at(&self, config: &Config, split: &Split, keys: u32) -> Result<f64> {
        Ok(self.facts_at(config, split, keys)? * self.ratio(config, split)?)
    }

    /// Decode tokens a second of `ingress` (at least 1) together, corrected by earlier runs of one
    /// answer.
    ///
    /// # Errors
    /// As [`predict`](Self::predict).
    pub fn predict_together(&self, config: &Config, split: &Split, answers: u32) -> Result<f64> {
        let ratio = self.ratio(config, split)?;
        Ok(self.facts_for(config, split, (KEYS, answers))? * ratio)
    }

    /// Prefill seconds of a prompt of `tokens` tokens on the ranks of `split`, while no other split
    /// computes.
    ///
    /// # Errors
    /// As [`predict`](Self::predict).
    pub fn predict_prompt(&self, config: &Config, split: &Split, tokens: u32) -> Result<f64> {
        let at_once = split.ranks() as usize; // each stage computes another chunk
        let (cluster, calibration) = self.cluster(split, at_once, self.prompt_row())?;
        let workload = Workload {
            prompt: tokens,
            output: 1,
            concurrency: 1,
            context: tokens.saturating_add(1),
        };
        let costs = Costs::new(&cluster, &self.shape, workload, &calibration)?;
        let placement = Placement::single(pipeline(config, split));
        predict(&costs, &placement)?
            .ttft_s
            .ok_or(Error::NotMeasured {
                what: "nothing is known of prompts",
            })
    }

    /// [`predict_together`](Self::predict_together) for 2, 4, 8, .. answers and `most`, up to
    /// 1,024. Empty for one answer, and if the planner refuses the split.
    pub fn predict_many(&self, config: &Config, split: &Split, most: u32) -> Vec<(u32, f64)> {
        let most = most.min(TOGETHER_MAX);
        let powers = (1..).map(|power| 1 << power);
        let answers = powers.take_while(|n| *n < most);
        let answers = answers.chain((most > 1).then_some(most));
        let said = |n| Some((n, self.predict_together(config, split, n).ok()?));
        answers.filter_map(said).collect()
    }

    /// Ratio of measured to predicted speed in earlier runs of a split; 1 before any.
    fn ratio(&self, config: &Config, split: &Split) -> Result<f64> {
        let base = self.facts_at(config, split, KEYS)?;
        let ratio = self.facts.ratio_to(&self.run_key(split), base);
        Ok(ratio.unwrap_or(1.0))
    }

    /// Seconds that one more key in the cache adds to a token of `split`, averaged up to
    /// [`MANY_KEYS`]. 0 if the planner refuses the split.
    pub fn key_s(&self, config: &Config, split: &Split) -> f64 {
        let token_s = |keys| Some(1.0 / self.predict_at(config, split, keys).ok()?);
        let grown = token_s(MANY_KEYS).zip(token_s(KEYS));
        let grown = grown.map_or(0.0, |(many, few)| many - few);
        (grown / f64::from(MANY_KEYS - KEYS)).max(0.0)
    }

    /// Stores the speed of a run with `keys` in the cache.
    pub fn learn(&mut self, config: &Config, split: &Split, (keys, decode_tok_s): (u32, f64)) {
        self.learn_reuse(decode_tok_s, |own| own.facts_at(config, split, keys));
        let said = |keys| self.facts_at(config, split, keys);
        let (Ok(said), Ok(base)) = (said(keys), said(KEYS)) else {
            return;
        };
        if decode_tok_s.is_finite() && decode_tok_s > 0.0 {
            let run = self.run_key(split);
            let model = self.stream.as_ref().map_or(&self.key, |own| &own.model);
            self.facts.learn((model, &run), decode_tok_s, (said, base));
            self.facts.save();
        }
    }

    /// The splits of a model over `nodes`, each once, with corrected decode tokens a second; tensor
    /// first.
    pub fn ways(&self, config: &Config, nodes: u32, shares: &[u32]) -> Vec<PlannedSplit> {
        let grids = (2..nodes).filter(|tensor| nodes.is_multiple_of(*tensor));
        let grids = grids.flat_map(|tensor| {
            let pipeline = nodes / tensor;
            let of_experts = SplitKind::GridOfExperts { tensor, pipeline };
            [SplitKind::Grid { tensor, pipeline }, of_experts]
        });
        let kinds = [SplitKind::Tensor, SplitKind::Pipeline, SplitKind::Experts].into_iter();
        let way = |kind| {
            let placement = asked(config, kind, nodes, shares).ok()?;
            let way = PlannedSplit::new(config, placement, None).ok()?;
            let tok_s = Some(self.predict(config, &way.split).ok()?);
            Some(PlannedSplit { tok_s, ..way })
        };
        let mut ways: Vec<PlannedSplit> = Vec::new();
        for way in kinds.chain(grids).filter_map(way) {
            // Without experts, an expert-parallel grid equals a plain one.
            if ways.iter().all(|known| known.split != way.split) {
                ways.push(way);
            }
        }
        ways
    }

    /// Stores the load time of `split` in seconds.
    pub fn loaded(&mut self, split: &Split, seconds: f64) {
        self.facts.set_load(&self.run_key(split), seconds);
        self.facts.save();
    }

    /// Seconds of the last load of `split`.
    pub fn load_s(&self, split: &Split) -> Option<f64> {
        self.facts.load_s(&self.run_key(split))
    }

    fn run_key(&self, split: &Split) -> String {
        format!("{}, {} nodes, {split}", self.key, split.ranks())
    }

    /// The last measured speed of a split.
    pub fn last(&self, split: &Split) -> Option<f64> {
        self.facts.last(&self.run_key(split))
    }
}

/// Measures [`Forecast::together`] for all numbers of ranks up to `nodes`.
fn together(
    memory: &mut FactsStore,
    key: &str,
    setting: Setting<'_>,
    nodes: u32,
    kernels: impl Fn(usize) -> io::Result<Arc<Kernels>>,
) -> Result<BTreeMap<u32, GroupCost>> {
    let mut all = BTreeMap::new();
    for splits in Splits::up_to(nodes, setting.config) {
        let ranks = splits.ranks();
        let key = format!("{key}, {ranks} ranks, {}", setting.backend.name());
        let known = memory.together(&key);
        let together = match known {
            Some(known) => known,
            None => {
                let fresh =
                    Team::new(setting, &splits, || started(kernels(setting.threads)))?.measure()?;
                memory.set_together(&key, fresh);
                fresh
            }
        };
        all.insert(ranks, together);
    }
    Ok(all)
}

fn started(kernels: io::Result<Arc<Kernels>>) -> Result<Arc<Kernels>> {
    kernels.map_err(|source| Error::System {
        what: "start threads",
        source,
    })
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The split in the planner's form.
fn pipeline(config: &Config, split: &Split) -> Pipeline {
    let kinds: Vec<StageKind> = split.kinds().collect();
    let mut stages: Vec<PipelineStage> = Vec::new();
    for rank in 0..split.ranks() {
        let shard = split.shard(config, Rank(rank));
        let share = share_of(config, &shard);
        let member = StageMember {
            node: rank as usize,
            share,
            streamed: 0,
        };
        match stages.get_mut(shard.stage) {
            Some(stage) => stage.members.push(member),
            None => stages.push(PipelineStage {
                layers: shard.layers.start as u32..shard.layers.end as u32,
                split: match kinds[shard.stage] {
                    StageKind::Tensor => paceline_plan::Split::Tensor,
                    StageKind::Experts => paceline_plan::Split::Expert,
                },
                members: vec![member],
            }),
        }
    }
    for stage in &mut stages {
        if stage.members.len() == 1 {
            stage.split = paceline_plan::Split::Whole;
            stage.members[0].share = 1.0;
        }
    }
    Pipeline { stages }
}

/// A rank's mean share of its layers' feed-forward. A rank without any gets a small share, as the
/// planner requires.
fn share_of(config: &Config, shard: &Shard) -> f64 {
    let part = |index: usize| {
        let layer = &config.layers[index];
        let experts = |of: Experts| of.count + usize::from(of.shared > 0);
        let all = layer.experts.map_or(layer.ffn, experts);
        shard.layer(index).ffn().len() as f64 / all.max(1) as f64
    };
    let sum: f64 = shard.layers.clone().map(part).sum();
    (sum / shard.layers.len() as f64).max(1e-9)
}

#[cfg(test)]
mod auto_tests;

#[cfg(test)]
mod tests {
    use super::inputs::sharing;
    use super::*;

    #[test]
    fn rows_together_cost_what_was_measured() {
        let measured = StepMeasurements {
            products: 8.0,
            other: 0.0,
            key: 0.0,
            head: 0.0,
            step: 0.0,
            few_row: 2.0,
            prompt_row: 1.0,
            experts: 0.0,
            few_expert: 0.0,
            prompt_expert: 0.0,
        };
        let rows = [1.0, 4.5, 8.0, 64.0, 640.0].map(|n| measured.row_of(n));
        assert_eq!(rows, [8.0, 12.0 / 4.5, 2.0, 1.0, 1.0]);
        // Three of its eight seconds belong to experts.
        let mixed = StepMeasurements {
            experts: 3.0,
            few_row: 1.0,
            few_expert: 1.0,
            prompt_expert: 0.5,
            ..measured
        };
        let rows = [1.0, 8.0].map(|n| (mixed.row_of(n), mixed.experts_of(n)));
        assert_eq!(rows, [(5.0, 3.0), (1.0, 1.0)]);
        assert_eq!(mixed.experts_of(100.0), 0.5);
    }

    #[test]
    fn ranks_that_were_not_measured_share_what_fewer_have() {
        let two = GroupCost {
            free: 0.75,
            synced: 0.8,
            head: 0.0,
            turns: 1.0,
            hop: 0.1,
        };
        let together = BTreeMap::from([(2, two)]);
        let shares = [1, 2, 4].map(|ranks| sharing(&together, ranks, |t| t.free));
        assert_eq!(shares, [None, Some(1.5), Some(3.0)]);
        assert_eq!(sharing(&BTreeMap::new(), 3, |t| t.free), None);
    }
}
