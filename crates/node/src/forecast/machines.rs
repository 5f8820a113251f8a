//! Forecast of a split over several machines: this machine's measured kernels, scaled by the
//! others' memory and compute speed, and the measured links between them.

use std::cmp::Ordering;

use paceline_base::Bytes;
use paceline_model::{Config, Split, SplitKind};
use paceline_plan::{
    Calibration, Cluster, ClusterNode, Costs, LinkTransport, NodeLink, Placement, Prediction,
    Workload, predict,
};

use super::{Forecast, KEYS, Result, pipeline};
use crate::Error;

/// Answer length in tokens of a prediction.
const ANSWER: u32 = 128;

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

    fn way(&self, a: usize, b: usize) -> Option<&MachineLink> {
        let joins = |way: &&MachineLink| (way.a, way.b) == (a, b) || (way.a, way.b) == (b, a);
        self.ways.iter().find(joins)
    }
}

/// A split over machines and its prediction.
pub type Ranked = (Split, Prediction);

impl Forecast {
    /// The splits of a model over `machines` of this `kind`, the fastest that fits first. An
    /// automatic split becomes the first of them. Also returns why others were refused.
    pub fn ranked(
        &self,
        config: &Config,
        kind: SplitKind,
        machines: &Machines,
    ) -> (Vec<Ranked>, Vec<(Split, Error)>) {
        let (mut ranked, mut refused) = (Vec::new(), Vec::new());
        for split in splits(config, machines.of_rank.len(), kind) {
            match self.across(config, &split, machines) {
                Ok(said) => ranked.push((split, said)),
                Err(error) => refused.push((split, error)),
            }
        }
        let key = |said: &Prediction| (said.fits(), said.decode_tok_s);
        ranked.sort_by(|(_, a), (_, b)| best_first(key(a), key(b)));
        (ranked, refused)
    }

    /// Predicts `split` over `machines`.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan): the planner refuses the split, a machine or a link.
    pub fn across(
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
        let mut calibration = Calibration::builtin()?;
        calibration.set("op.paceline-cpu", self.op().max(1e-9));
        let workload = Workload {
            prompt: KEYS,
            output: ANSWER,
            concurrency: 1,
            context: config.context.try_into().unwrap_or(u32::MAX),
        };
        let costs = Costs::new(&cluster, &self.shape, workload, &calibration)?;
        let mut said = predict(&costs, &Placement::single(pipeline(config, split)))?;
        // Each step also costs the leader the last norm and the sampling.
        said.decode_tok_s = 1.0 / (1.0 / said.decode_tok_s + self.measured.step);
        Ok(said)
    }

    /// A rank as the planner's node: its part of its machine.
    fn rank(&self, (rank, index): (usize, &usize), machines: &Machines) -> ClusterNode {
        let (machine, sharing) = (&machines.all[*index], machines.ranks(*index));
        let own = self.node(0, (1.0, 1.0), self.prompt_row());
        let rates = own.rates.map(|mut rates| {
            let part = machine.computes / sharing;
            rates.matmul *= part;
            rates.expert *= part;
            rates.attention *= part;
            rates
        });
        ClusterNode {
            name: format!("rank {rank} of {}", machine.name),
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

/// Order of predictions (fits, tokens a second): the fastest that fits first.
pub fn best_first(a: (bool, f64), b: (bool, f64)) -> Ordering {
    b.0.cmp(&a.0).then(b.1.total_cmp(&a.1))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use paceline_base::KernelClass;
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
            of_rank: of_rank.to_vec(),
            ways: pairs.map(way).collect(),
        }
    }

    fn first(round_trip: f64) -> String {
        let (config, forecast) = forecast();
        let machines = machines(&[0, 1], round_trip);
        let (ranked, refused) = forecast.ranked(&config, SplitKind::Auto, &machines);
        assert!(ranked.len() == 2 && refused.is_empty(), "{refused:?}");
        assert!(ranked[0].1.decode_tok_s >= ranked[1].1.decode_tok_s);
        ranked[0].0.to_string()
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
