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
    Backend, Calibration, Cluster, ClusterNode, Costs, LinkTransport, NodeLink, Prediction, Rates,
    Workload, predict,
};

use super::devices::{DeviceSpeed, WeightBits};
use super::{Forecast, KEYS, Result};
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
        self.learn_reuse(decode_tok_s, |own| {
            Ok(own.uncorrected(config, split, machines)?.decode_tok_s)
        });
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
        // Within a limit of memory, a load plans fewer positions.
        let context = match self.stream {
            Some(_) => KEYS + ANSWER,
            None => config.context.try_into().unwrap_or(u32::MAX),
        };
        let said = |concurrency| {
            let workload = Workload {
                prompt: KEYS,
                output: ANSWER,
                concurrency,
                context,
            };
            let memory = |rank: usize| cluster.nodes[rank].memory;
            let placement = self.placement(config, split, &workload, memory);
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
        self.set_reuse(&mut calibration);
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
                memory: Bytes((device.memory.min(own.memory).0 as f64 / sharing) as u64),
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
            memory: Bytes((machine.memory.min(own.memory).0 as f64 / sharing) as u64),
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
mod tests;
