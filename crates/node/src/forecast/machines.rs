//! Forecast of a split over several machines, and the measured links between them.
//!
//! A machine computes on its processor or on a device of MLX. The first has this machine's measured
//! kernels, scaled by its memory and compute speed; the second has its own rates. A rank on a
//! device waits for it before each exchange: a *crossing*. A tensor split has two a layer, a stage
//! of a pipeline one.

use std::cmp::Ordering;
use std::ops::Range;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_model::{Config, Split, SplitKind, StageKind};
use paceline_plan::cost::kernels::operations;
use paceline_plan::{
    Backend, Calibration, Cluster, ClusterNode, Costs, LinkTransport, NodeLink, Placement,
    Prediction, Rates, Workload, predict,
};

use super::devices::{DeviceSpeed, WeightBits};
use super::{Forecast, KEYS, Result, pipeline};
use crate::Error;

/// Answer length in tokens of a prediction.
const ANSWER: u32 = 128;

/// Answers of a predicted batch: the default of `--parallel`.
const TOGETHER: u32 = 4;

/// Sum of the shares of unlike machines.
const SHARES: f64 = 1000.0;

/// Ratio of the times of two machines for a layer up to which they get equal shares: predictions
/// are off by as much.
const ALIKE: f64 = 1.2;

/// A machine of an instance.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteMachine {
    pub name: String,
    /// Bytes that a model may use.
    pub memory: Bytes,
    /// Memory bandwidth as a multiple of this machine.
    pub reads: f64,
    /// Compute rate as a multiple of this machine.
    pub computes: f64,
    /// The device on which MLX computes there, if its rates are known.
    pub device: Option<RemoteDevice>,
}

/// A device of MLX on a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteDevice {
    pub speed: DeviceSpeed,
    /// Bytes that a model may use.
    pub memory: Bytes,
}

/// A link between two of the machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineLink {
    /// Index of the machine at one end.
    pub a: usize,
    /// The other end.
    pub b: usize,
    /// Seconds of a round trip.
    pub round_trip: f64,
    /// Bytes a second.
    pub bytes_per_s: f64,
}

/// The machines of an instance.
#[derive(Clone, Debug, PartialEq)]
pub struct Machines {
    /// Each once.
    pub all: Vec<RemoteMachine>,
    /// Whether MLX computes on each of them; all of these have a device.
    pub on_mlx: Vec<bool>,
    /// Whether MLX computes with 32 bits.
    pub wide: bool,
    /// Index of the machine of each rank. Ranks of one machine share its memory and speed.
    pub of_rank: Vec<usize>,
    /// Between every two machines.
    pub ways: Vec<MachineLink>,
}

impl Machines {
    /// Ranks that machine `index` has.
    fn ranks(&self, index: usize) -> f64 {
        self.of_rank.iter().filter(|of| **of == index).count() as f64
    }

    /// The device on which machine `index` computes; `None` for its processor.
    fn device(&self, index: usize) -> Option<&RemoteDevice> {
        self.all[index]
            .device
            .as_ref()
            .filter(|_| self.on_mlx[index])
    }

    /// Whether MLX computes on a machine.
    fn has_mlx(&self) -> bool {
        self.on_mlx.contains(&true)
    }

    fn way(&self, a: usize, b: usize) -> Option<&MachineLink> {
        let joins = |way: &&MachineLink| (way.a, way.b) == (a, b) || (way.a, way.b) == (b, a);
        self.ways.iter().find(joins)
    }
}

/// A split over machines and its prediction.
#[derive(Clone, Debug)]
pub struct RankedSplit {
    pub split: Split,
    /// Shares of its ranks; empty for equal ones.
    pub shares: Vec<u32>,
    pub prediction: Prediction,
    pub crossings: Crossings,
    /// Seconds until the ranks are ready, once the files are there; `None` before any load with
    /// these engines.
    pub load_s: Option<f64>,
}

/// Waits for devices of MLX in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Crossings {
    pub count: usize,
    /// All of them.
    pub seconds: f64,
}

impl Forecast {
    /// The splits of a model over `machines` of this `kind`, the fastest that fits first. An
    /// automatic split becomes the first of them. Also returns why others were refused.
    pub fn ranked(
        &self,
        config: &Config,
        kind: SplitKind,
        machines: &Machines,
    ) -> (Vec<RankedSplit>, Vec<(Split, Error)>) {
        let (mut ranked, mut refused) = (Vec::<RankedSplit>::new(), Vec::new());
        for (split, shares) in self.candidates(config, kind, machines) {
            let said = check_engines(&split, machines);
            match said.and_then(|()| self.across(config, &split, machines)) {
                Ok(prediction) => ranked.push(RankedSplit {
                    crossings: crossings(&split, machines),
                    load_s: self.load_across(config, &split, machines),
                    split,
                    shares,
                    prediction,
                }),
                // An automatic split leaves out what the engines do not compute.
                Err(Error::MixedStage { .. } | Error::Model(_)) if kind == SplitKind::Auto => {}
                Err(error) => refused.push((split, error)),
            }
        }
        let key = |it: &RankedSplit| (it.prediction.fits(), it.prediction.decode_tok_s);
        ranked.sort_by(|a, b| best_first(key(a), key(b)));
        // Of a pipeline with equal and with unequal shares the better one.
        let is_pipeline = |it: &RankedSplit| it.split.stages() == it.split.ranks() as usize;
        let best = ranked.iter().position(is_pipeline);
        let mut at = 0..;
        ranked.retain(|it| at.next() == best || !is_pipeline(it));
        (ranked, refused)
    }

    /// Splits with their shares. Machines of unlike speed get unlike parts of a pipeline with MLX.
    fn candidates(
        &self,
        config: &Config,
        kind: SplitKind,
        machines: &Machines,
    ) -> Vec<(Split, Vec<u32>)> {
        let all = splits(config, machines.of_rank.len(), kind);
        let mut all: Vec<_> = all.into_iter().map(|split| (split, Vec::new())).collect();
        let is_open = matches!(kind, SplitKind::Auto | SplitKind::Pipeline);
        let shares = self.shares(machines);
        if let Some(shares) = shares.filter(|_| is_open && machines.has_mlx()) {
            let n = shares.len() as u32;
            let unlike = Split::plan(config, SplitKind::Pipeline, n, &shares);
            all.extend(unlike.ok().map(|split| (split, shares)));
        }
        all
    }

    /// Shares of ranks in inverse proportion to their times for a layer; `None` for alike ones.
    fn shares(&self, machines: &Machines) -> Option<Vec<u32>> {
        let ranks = (0..).zip(&machines.of_rank);
        let speeds: Vec<f64> = ranks.map(|it| 1.0 / self.layer_s(it, machines)).collect();
        let (least, most) = speeds
            .iter()
            .fold((f64::INFINITY, 0.0f64), |(least, most), x| {
                (least.min(*x), most.max(*x))
            });
        let all: f64 = speeds.iter().sum();
        let share = |speed: &f64| ((speed / all * SHARES).round() as u32).max(1);
        (most > ALIKE * least).then(|| speeds.iter().map(share).collect())
    }

    /// Seconds of a mean layer for one row on a rank.
    fn layer_s(&self, rank: (usize, &usize), machines: &Machines) -> f64 {
        let layers = || 0..self.shape.layers;
        let n = f64::from(self.shape.layers);
        let bytes: f64 = layers().map(|layer| self.shape.read_bytes(layer)).sum();
        let count: f64 = layers().map(|layer| operations(&self.shape, layer)).sum();
        let device = machines.device(*rank.1);
        let op = device.map_or_else(|| self.op(), |device| device.speed.operation_s());
        bytes / n / self.rank(rank, machines).bandwidth + count / n * op
    }

    /// Whether a machine's device decodes this model faster than its processor. MLX on a processor
    /// is not compared: it would give up exact answers for little.
    pub fn is_faster_on_mlx(&self, config: &Config, machine: &RemoteMachine) -> bool {
        let is_gpu = |device: &RemoteDevice| device.speed.backend != Backend::Cpu;
        if !machine.device.as_ref().is_some_and(is_gpu) {
            return false;
        }
        let alone = |on_mlx| {
            let machines = Machines {
                all: vec![machine.clone()],
                on_mlx: vec![on_mlx],
                wide: config.family.needs_wide_activations(),
                of_rank: vec![0],
                ways: Vec::new(),
            };
            let said = self.across(config, &Split::whole(config), &machines);
            said.map_or(0.0, |said| said.decode_tok_s)
        };
        alone(true) > alone(false)
    }

    /// Predicts `split` over `machines`, corrected by earlier answers of it over them.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan): the planner refuses the split, a machine or a link.
    pub fn across(
        &self,
        config: &Config,
        split: &Split,
        machines: &Machines,
    ) -> Result<Prediction> {
        let said = self.uncorrected(config, split, machines)?;
        let ratio = self.facts.ratio(&self.run_across(split, machines));
        let ratio = ratio.unwrap_or(1.0);
        Ok(Prediction {
            decode_tok_s: said.decode_tok_s * ratio,
            throughput_tok_s: said.throughput_tok_s * ratio,
            ..said
        })
    }

    /// The key of a split over machines.
    fn run_across(&self, split: &Split, machines: &Machines) -> String {
        let rank = |index: &usize| {
            let engine = match (machines.on_mlx[*index], machines.wide) {
                (true, true) => "mlx in 32 bits",
                (true, false) => "mlx",
                (false, _) => "cpu",
            };
            format!("{} {engine}", machines.all[*index].name)
        };
        let ranks: Vec<String> = machines.of_rank.iter().map(rank).collect();
        format!("{}, {split} over {}", self.key, ranks.join(", "))
    }

    /// Stores the decode speed of an answer over machines.
    pub(crate) fn learn_across(
        &mut self,
        config: &Config,
        (split, machines): (&Split, &Machines),
        decode_tok_s: f64,
    ) {
        let Ok(said) = self.uncorrected(config, split, machines) else {
            return;
        };
        if decode_tok_s.is_finite() && decode_tok_s > 0.0 {
            let run = self.run_across(split, machines);
            self.facts.correct(&run, decode_tok_s, said.decode_tok_s);
            self.facts.save();
        }
    }

    /// Stores the time of a load over machines, and with it the rate of their engines.
    pub(crate) fn loaded_across(
        &mut self,
        config: &Config,
        (split, machines): (&Split, &Machines),
        seconds: f64,
    ) {
        let run = self.run_across(split, machines);
        self.facts.set_load(&run, seconds);
        let bytes = self.largest_part(config, split);
        self.facts
            .set_load(&load_key(machines), seconds / bytes.max(1.0));
        self.facts.save();
    }

    /// Seconds of a load over machines: the last one of this split. Without one, the bytes of the
    /// largest part over the rate of the last load with these engines.
    fn load_across(&self, config: &Config, split: &Split, machines: &Machines) -> Option<f64> {
        let known = self.facts.load_s(&self.run_across(split, machines));
        let rate = self.facts.load_s(&load_key(machines));
        known.or_else(|| Some(rate? * self.largest_part(config, split)))
    }

    /// Bytes of the layers of the rank with the most.
    fn largest_part(&self, config: &Config, split: &Split) -> f64 {
        let part = |rank: u32| {
            let shard = split.shard(config, Rank(rank));
            let layers = shard.layers.clone().map(|layer| layer as u32);
            let bytes: f64 = layers.map(|layer| self.shape.read_bytes(layer)).sum();
            bytes / shard.stage_ranks().len().max(1) as f64
        };
        (0..split.ranks()).map(part).fold(0.0, f64::max)
    }

    fn uncorrected(
        &self,
        config: &Config,
        split: &Split,
        machines: &Machines,
    ) -> Result<Prediction> {
        let ranks = (0..).zip(&machines.of_rank);
        let cluster = Cluster {
            name: "machines".to_owned(),
            nodes: ranks.map(|it| self.rank(it, machines)).collect(),
            links: self.links_across(machines),
        };
        let calibration = self.calibration_across(machines)?;
        let placement = Placement::single(pipeline(config, split));
        let said = |concurrency| {
            let workload = Workload {
                prompt: KEYS,
                output: ANSWER,
                concurrency,
                context: config.context.try_into().unwrap_or(u32::MAX),
            };
            let costs = Costs::new(&cluster, &self.shape, workload, &calibration)?;
            Ok::<_, Error>(predict(&costs, &placement)?)
        };
        // Each step also costs the leader the last norm and the sampling, and the wait for its
        // device.
        let leader = machines.of_rank[split.leader().0 as usize];
        let waits = machines.device(leader).map(|it| it.speed.crossing_s());
        let waits = waits.unwrap_or(0.0);
        let (alone, batch) = (said(1)?, said(TOGETHER)?);
        let together = f64::from(TOGETHER);
        let step = together / batch.throughput_tok_s + waits;
        Ok(Prediction {
            decode_tok_s: 1.0 / (1.0 / alone.decode_tok_s + self.measured.step + waits),
            throughput_tok_s: together / (step + together * self.measured.step),
            ttft_s: alone.ttft_s.map(|seconds| seconds + waits),
            ..alone
        })
    }

    /// The planner's constants with those of the machines' devices.
    fn calibration_across(&self, machines: &Machines) -> Result<Calibration> {
        let mut calibration = Calibration::builtin()?;
        calibration.set("op.paceline-cpu", self.op().max(1e-9));
        for index in 0..machines.all.len() {
            if let Some(RemoteDevice { speed, .. }) = machines.device(index) {
                let (op, crossing) = (speed.operation_s(), speed.crossing_s());
                calibration.add_measured(&engine_of(index), op.max(1e-9), crossing.max(1e-9));
            }
        }
        Ok(calibration)
    }

    /// A rank as the planner's node: its part of its machine.
    fn rank(&self, (rank, index): (usize, &usize), machines: &Machines) -> ClusterNode {
        let (machine, sharing) = (&machines.all[*index], machines.ranks(*index));
        let own = self.node(0, (1.0, 1.0), self.prompt_row());
        let name = format!("rank {rank} of {}", machine.name);
        if let Some(device) = machines.device(*index) {
            let weights = WeightBits {
                bits: self.shape.bits.rest,
                wide: machines.wide,
            };
            return ClusterNode {
                name,
                memory: Bytes((device.memory.0 as f64 / sharing) as u64),
                bandwidth: device.speed.reads(weights) / sharing,
                rates: Some(Rates::uniform(device.speed.computes(weights) / sharing)),
                backend: device.speed.backend,
                engine: engine_of(*index),
                ..own
            };
        }
        let rates = own.rates.map(|mut rates| {
            let part = machine.computes / sharing;
            rates.matmul *= part;
            rates.expert *= part;
            rates.attention *= part;
            rates
        });
        ClusterNode {
            name,
            memory: Bytes((machine.memory.0 as f64 / sharing) as u64),
            bandwidth: own.bandwidth * machine.reads / sharing,
            rates,
            ..own
        }
    }

    /// Links between every two ranks. Ranks of one machine exchange through its memory.
    fn links_across(&self, machines: &Machines) -> Vec<NodeLink> {
        let own = self.node(0, (1.0, 1.0), self.prompt_row());
        let ranks = || machines.of_rank.iter().copied().enumerate();
        let pairs = ranks().flat_map(|a| ranks().skip(a.0 + 1).map(move |b| (a, b)));
        let link = |((a, at), (b, to)): ((usize, usize), (usize, usize))| {
            let (round_trip, bytes_per_s) = match at == to {
                true => (0.0, own.bandwidth * machines.all[at].reads),
                false => {
                    let way = machines.way(at, to)?;
                    (way.round_trip, way.bytes_per_s)
                }
            };
            Some(NodeLink {
                a,
                b,
                kind: "measured".to_owned(),
                transport: LinkTransport::Tcp,
                alpha: round_trip / 2.0,
                beta: bytes_per_s,
                shared: false,
            })
        };
        pairs.filter_map(link).collect()
    }
}

/// Name of the engine of a machine's device among the planner's constants.
fn engine_of(index: usize) -> String {
    format!("mlx-of-{index}")
}

/// The ranks of each stage of a split, with its kind and its number of layers.
fn stages(split: &Split) -> impl Iterator<Item = (Range<usize>, StageKind, usize)> + '_ {
    let mut first = 0;
    split
        .each_stage()
        .zip(split.kinds())
        .map(move |((layers, shares), kind)| {
            let ranks = first..first + shares.len();
            first = ranks.end;
            (ranks, kind, layers.len())
        })
}

/// Exchanges between ranks in a step, each a wait for the network.
pub fn exchanges(split: &Split) -> usize {
    let of_stage = |(ranks, _, layers): (Range<usize>, StageKind, usize)| match ranks.len() {
        1 => 1,
        _ => 2 * layers + 1,
    };
    stages(split).map(of_stage).sum()
}

/// Refuses stages of unlike engines.
fn check_engines(split: &Split, machines: &Machines) -> Result<()> {
    for (ranks, ..) in stages(split) {
        let class = |rank| match machines.on_mlx[machines.of_rank[rank]] {
            true => KernelClass::Mlx,
            false => KernelClass::Cpu,
        };
        let a = class(ranks.start);
        if let Some(b) = ranks.clone().map(class).find(|b| *b != a) {
            return Err(Error::MixedStage { a, b });
        }
    }
    Ok(())
}

/// The waits for devices in a step of one row.
fn crossings(split: &Split, machines: &Machines) -> Crossings {
    let mut all = Crossings::default();
    for (ranks, kind, layers) in stages(split) {
        let exchanges = match (ranks.len(), kind) {
            (1, _) => 0,
            (_, StageKind::Tensor) => 2 * layers,
            (_, StageKind::Experts) => layers,
        };
        let devices = ranks.filter_map(|rank| machines.device(machines.of_rank[rank]));
        let slowest = devices
            .map(|device| device.speed.crossing_s())
            .reduce(f64::max);
        if let Some(seconds) = slowest {
            all.count += exchanges + 1;
            all.seconds += seconds * (exchanges + 1) as f64;
        }
    }
    all
}

/// The splits of a model over `n` ranks, each once, or the requested one.
fn splits(config: &Config, n: usize, kind: SplitKind) -> Vec<Split> {
    use SplitKind::{Auto, Experts, Pipeline, Tensor};
    let kinds = match kind {
        Auto if n > 1 => vec![Tensor, Pipeline, Experts, Auto],
        kind => vec![kind],
    };
    let n = u32::try_from(n).unwrap_or(u32::MAX);
    let mut all: Vec<Split> = Vec::new();
    for split in kinds
        .into_iter()
        .filter_map(|kind| Split::plan(config, kind, n, &[]).ok())
    {
        if !all.contains(&split) {
            all.push(split);
        }
    }
    all
}

/// The key of the seconds a byte of loads with these engines.
fn load_key(machines: &Machines) -> String {
    let engines = match (machines.has_mlx(), machines.on_mlx.contains(&false)) {
        (true, true) => "cpu and mlx",
        (true, false) => "mlx",
        (false, _) => "cpu",
    };
    format!("a byte of a load on {engines}")
}

/// Order of predictions (fits, tokens a second): the fastest that fits first.
pub fn best_first(a: (bool, f64), b: (bool, f64)) -> Ordering {
    b.0.cmp(&a.0).then(b.1.total_cmp(&a.1))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use paceline_cluster::nodes::agent::{DeviceRates, EngineDevice, FormRates};
    use paceline_comm::Backend;
    use paceline_model::ModelSource;

    use super::super::facts::FactsStore;
    use super::super::probe::StepMeasurements;
    use super::super::{Forecast, Setting};
    use super::*;

    /// A small model, and a forecast by which a layer's products take 10 ms.
    fn forecast() -> (Config, Forecast) {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden/hf");
        let source = ModelSource::open(&golden.join("llama-rope3-sharded")).unwrap();
        let mut config = Config::read(&source).unwrap();
        for layer in &mut config.layers {
            layer.ffn = 64 * config.ffn_leaf; // as much as can be shared
        }
        config.layers = config.layers.iter().cycle().take(8).copied().collect();
        let measured = StepMeasurements {
            products: 1e-2,
            other: 1e-5,
            key: 1e-8,
            head: 1e-2,
            step: 1e-5,
            few_row: 1e-2,
            prompt_row: 1e-2,
            experts: 0.0,
            few_expert: 0.0,
            prompt_expert: 0.0,
        };
        let setting = Setting {
            source: &source,
            config: &config,
            class: KernelClass::Cpu,
            threads: 1,
            backend: Backend::Tcp,
        };
        let facts = FactsStore::nowhere();
        let forecast = Forecast::of(facts, setting, measured, BTreeMap::new(), None);
        (config, forecast)
    }

    /// Machines like this one, with this round trip between each two of them.
    fn machines(of_rank: &[usize], round_trip: f64) -> Machines {
        let n = of_rank.iter().max().map_or(0, |last| last + 1);
        let machine = |i: usize| RemoteMachine {
            name: format!("n{i}"),
            memory: Bytes(1 << 30),
            reads: 1.0,
            computes: 1.0,
            device: None,
        };
        let pairs = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b)));
        let way = |(a, b)| MachineLink {
            a,
            b,
            round_trip,
            bytes_per_s: 1e9,
        };
        Machines {
            all: (0..n).map(machine).collect(),
            on_mlx: vec![false; n],
            wide: false,
            of_rank: of_rank.to_vec(),
            ways: pairs.map(way).collect(),
        }
    }

    fn first(round_trip: f64) -> String {
        let (config, forecast) = forecast();
        let machines = machines(&[0, 1], round_trip);
        let (ranked, refused) = forecast.ranked(&config, SplitKind::Auto, &machines);
        assert!(ranked.len() == 2 && refused.is_empty(), "{refused:?}");
        let tok_s = |i: usize| ranked[i].prediction.decode_tok_s;
        assert!(tok_s(0) >= tok_s(1));
        ranked[0].split.to_string()
    }

    #[test]
    fn predictions_over_machines_are_corrected_by_what_is_seen() {
        let (config, mut forecast) = forecast();
        let machines = machines(&[0, 1], 1e-4);
        let said = |forecast: &Forecast| {
            let (ranked, _) = forecast.ranked(&config, SplitKind::Auto, &machines);
            ranked
        };
        let before = said(&forecast);
        assert_eq!(
            (before[0].split.to_string().as_str(), before[0].load_s),
            ("tensor", None)
        );
        let (tensor, tok_s) = (before[0].split.clone(), before[0].prediction.decode_tok_s);
        for _ in 0..2 {
            forecast.learn_across(&config, (&tensor, &machines), tok_s / 4.0);
        }
        forecast.loaded_across(&config, (&tensor, &machines), 8.0);
        let after = said(&forecast);
        assert_eq!(
            after[0].split, before[1].split,
            "the other split is faster now"
        );
        let corrected = after[1].prediction.decode_tok_s;
        assert!(
            (corrected / tok_s * 4.0 - 1.0).abs() < 1e-9,
            "{corrected} {tok_s}"
        );
        assert_eq!(after[1].load_s, Some(8.0));
        assert!(
            (after[0].load_s.unwrap() - 8.0).abs() < 1e-6,
            "equal parts, as fast a load"
        );
    }

    #[test]
    fn an_open_split_is_a_pipeline_over_long_links() {
        assert_eq!(first(1e-4), "tensor");
        assert_eq!(first(0.1), "pipeline");
        // The direction still fits when a single node is left.
        let (config, _) = forecast();
        for kind in [SplitKind::Tensor, SplitKind::Pipeline] {
            assert!(Split::plan(&config, kind, 1, &[]).is_ok(), "{kind}");
        }
    }

    /// Machines with GPUs, each `faster` times as fast as the processor of [`forecast`]; `crossing`
    /// is in seconds.
    fn on_gpus(
        (config, forecast): (&Config, &Forecast),
        n: usize,
        (faster, crossing): (f64, f64),
    ) -> Machines {
        let ranks: Vec<usize> = (0..n).collect();
        let mut all = machines(&ranks, 1e-5);
        for machine in &mut all.all {
            machine.device = gpu(forecast, faster, crossing);
            assert!(forecast.is_faster_on_mlx(config, machine));
        }
        all.on_mlx = vec![true; n];
        all
    }

    fn gpu(forecast: &Forecast, faster: f64, crossing: f64) -> Option<RemoteDevice> {
        let own = forecast.node(0, (1.0, 1.0), forecast.prompt_row());
        let bits = forecast.shape.bits.rest;
        let form = |held| FormRates {
            bits: held,
            wide: held == 32,
            reads: (faster * own.bandwidth * f64::from(held) / bits) as u64,
            computes: 1 << 40,
        };
        let device = EngineDevice {
            backend: "metal".to_owned(),
            rates: Some(DeviceRates {
                forms: [5, 9, 16, 32].map(form).to_vec(),
                operation_ns: 100,
                crossing_ns: (crossing * 1e9) as u64,
            }),
            ..EngineDevice::default()
        };
        DeviceSpeed::of(&device).map(|speed| RemoteDevice {
            speed,
            memory: Bytes(1 << 30),
        })
    }

    #[test]
    fn a_split_crosses_to_the_device_as_seldom_as_that_is_dear() {
        let (config, forecast) = forecast();
        let layers = config.layers.len();
        for (crossing, first) in [(4e-6, "tensor"), (150e-6, "pipeline")] {
            // A layer takes 0.1 ms.
            let machines = on_gpus((&config, &forecast), 2, (100.0, crossing));
            let (ranked, refused) = forecast.ranked(&config, SplitKind::Auto, &machines);
            assert!(ranked.len() == 2 && refused.is_empty(), "{refused:?}");
            assert_eq!(ranked[0].split.to_string(), first, "{crossing}");
            for it in &ranked {
                let expected = match &*it.split.to_string() {
                    "tensor" => 2 * layers + 1,
                    _ => 2,
                };
                assert_eq!(it.crossings.count, expected);
                let seconds = it.crossings.seconds / expected as f64;
                assert!((seconds / crossing - 1.0).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn unlike_engines_form_a_pipeline_with_more_of_the_model_on_the_faster() {
        let (config, forecast) = forecast();
        let mut machines = on_gpus((&config, &forecast), 2, (2.0, 1e-6));
        machines.on_mlx[1] = false;
        let (ranked, refused) = forecast.ranked(&config, SplitKind::Auto, &machines);
        assert!(refused.is_empty(), "{refused:?}");
        let [only] = &ranked[..] else {
            panic!("{ranked:?}")
        };
        assert_eq!(only.split.to_string(), "pipeline");
        assert!(only.shares[0] > 3 * only.shares[1] / 2, "{:?}", only.shares);
        let (ranked, refused) = forecast.ranked(&config, SplitKind::Tensor, &machines);
        assert!(ranked.is_empty());
        assert!(matches!(refused[..], [(_, Error::MixedStage { .. })]));
        // A device that is waited for too long is left alone.
        let mut slow = machines.all.remove(0);
        slow.device = gpu(&forecast, 2.0, 10.0);
        assert!(!forecast.is_faster_on_mlx(&config, &slow));
    }

    #[test]
    fn ranks_share_the_machine_that_they_run_on() {
        let (config, forecast) = forecast();
        let speed = |of_rank: &[usize]| {
            let kind = SplitKind::Tensor;
            let split = Split::plan(&config, kind, of_rank.len() as u32, &[]).unwrap();
            let said = forecast.across(&config, &split, &machines(of_rank, 1e-4));
            let said = said.unwrap();
            assert_eq!(said.nodes.len(), of_rank.len(), "a part for each rank");
            said.decode_tok_s
        };
        let (apart, together) = (speed(&[0, 1]), speed(&[0, 0]));
        assert!(together < apart, "{together} and {apart} tokens/s");
    }

    #[test]
    fn what_fits_comes_first() {
        let mut all = [(false, 9.0), (true, 1.0), (true, 2.0)];
        all.sort_by(|a, b| best_first(*a, *b));
        assert_eq!(all, [(true, 2.0), (true, 1.0), (false, 9.0)]);
    }
}
