//! Proposals for the ranks of an instance: how to cut a model over given nodes and which engine
//! computes on each, best first.
//!
//! A preview shows them. A load with an automatic split takes the first, and so does the search for
//! a better placement. So the running split is the one that a preview names.

use std::collections::BTreeMap;
use std::iter::zip;
use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::paths::Path;
use paceline_comm::Backend;
use paceline_fleet::InstanceId;
use paceline_fleet::InstanceSpec;
use paceline_fleet::memory::disk_bytes;
use paceline_model::{Config, ModelSource, Split, SplitKind};

use super::Inner;
use super::device_memory::{OpenModel, verdict};
use super::engines::state_classes;
use super::preview::{CPU, Proposal, pairs};
use crate::PreparedModel;
use crate::classes::EngineChoice;
use crate::forecast::machines::{
    MachineLink, Machines, RankedSplit, RemoteDevice, RemoteMachine, best_first,
};
use crate::forecast::{Forecast, Setting};
use crate::instance::{SpeedObserver, SpeedSample};

/// Nodes of an instance's ranks, and the known machines.
pub(super) type Nodes<'a> = (&'a [NodeId], &'a [(NodeId, RemoteMachine)]);

/// A record like that of the instance, but for nodes, split and engines; its id, if it is loaded.
pub(super) type Like<'a> = (Option<InstanceId>, &'a InstanceSpec);

pub(super) type Wishes<'a> = (SplitKind, &'a EngineChoice);

impl Inner {
    /// The splits of a model over `ranks` (the node of each rank), the fastest that fits first.
    /// Also returns why others were refused.
    pub(super) fn proposals(
        &self,
        (source, config, forecast): (&ModelSource, &Config, &Forecast),
        (kind, engines): Wishes<'_>,
        (ranks, machines): Nodes<'_>,
        like: Like<'_>,
    ) -> (Vec<Proposal>, Vec<String>) {
        let mut machines = match self.machines_of(ranks, machines) {
            Ok(machines) => machines,
            Err(reason) => return (Vec::new(), vec![reason]),
        };
        let kind = match pairs(&each_once(ranks).0).any(|(a, b)| self.is_apart(a, b)) {
            true if kind == SplitKind::Auto => SplitKind::Pipeline,
            _ => kind,
        };
        machines.wide = engines.is_wide() || config.family.needs_wide_activations();
        let (mut proposals, mut reasons) = (Vec::new(), Vec::new());
        for on_mlx in engine_sets((config, forecast), engines, &machines) {
            machines.on_mlx = on_mlx;
            if let Some(unknown) = unmeasured(&machines) {
                reasons.push(format!("{unknown} has not measured its engine mlx yet"));
                continue;
            }
            let (ranked, refused) = forecast.ranked(config, kind, &machines);
            let ranked = ranked.into_iter();
            proposals.extend(ranked.map(|said| {
                let mut said = self.proposal(ranks, &machines, said);
                self.fit((source, config), (ranks, engines), like, &mut said);
                said
            }));
            reasons.extend(
                refused
                    .into_iter()
                    .map(|(split, error)| format!("{} nodes, {split}: {error}", ranks.len())),
            );
        }
        proposals.sort_by(|a, b| best_first(a.speed(), b.speed()));
        (proposals, reasons)
    }

    fn proposal(&self, ranks: &[NodeId], machines: &Machines, said: RankedSplit) -> Proposal {
        let prediction = said.prediction;
        let device = |index: &usize| {
            let device = machines.all[*index].device.as_ref();
            device.filter(|_| machines.on_mlx[*index])
        };
        let devices = machines.of_rank.iter().map(device);
        let engine = |device: Option<&RemoteDevice>| match device {
            Some(device) => format!("mlx({})", device.speed.name),
            None => CPU.to_owned(),
        };
        let ranges = devices.clone().flatten().filter_map(|it| it.speed.range);
        let range = ranges.reduce(|a, b| [a[0].min(b[0]), a[1].max(b[1])]);
        Proposal {
            nodes: ranks.iter().map(|id| self.name(*id)).collect(),
            split: match ranks.len() {
                1 => "auto".to_owned(),
                _ => said.split.to_string(),
            },
            engines: devices.map(engine).collect(),
            shares: said.shares,
            decode_tok_s: prediction.decode_tok_s,
            decode_range: range.map(|range| range.map(|by| by * prediction.decode_tok_s)),
            batch_tok_s: prediction.throughput_tok_s,
            ttft_ms: prediction.ttft_s.map(|seconds| seconds * 1e3),
            load_s: said.load_s,
            crossings: said.crossings.count,
            crossings_ms: said.crossings.seconds * 1e3,
            fits: true,
            bytes: Vec::new(),
            from_disk: Vec::new(),
            paths: self.ways_told(&each_once(ranks).0),
            replicas: Vec::new(),
        }
    }

    /// States the bytes of a proposal's nodes, and whether these have them, as a load of it would.
    fn fit(
        &self,
        model: OpenModel<'_>,
        (ranks, engines): (&[NodeId], &EngineChoice),
        (id, like): Like<'_>,
        said: &mut Proposal,
    ) {
        let mut record = InstanceSpec {
            nodes: ranks.to_vec(),
            split: said.split.clone(),
            shares: said.shares_of(ranks),
            ..like.clone()
        };
        let classes = match engines {
            EngineChoice::Given(classes) => zip(ranks.to_vec(), classes.clone()).collect(),
            EngineChoice::Fastest => said.classes_of(ranks),
        };
        state_classes(classes, &mut record);
        let rooms = self.rooms_named(id, &record);
        (said.bytes, said.fits) = verdict(model, &mut record, &rooms);
        if record.options.memory.is_some() {
            let on_disk = |id: &NodeId| disk_bytes(&record, *id);
            said.from_disk = ranks.iter().map(on_disk).collect();
        }
    }

    /// The machines of `ranks`, each once, and the links between them.
    fn machines_of(
        &self,
        ranks: &[NodeId],
        known: &[(NodeId, RemoteMachine)],
    ) -> Result<Machines, String> {
        let (nodes, of_rank) = each_once(ranks);
        let machine = |id: &NodeId| {
            let known = known.iter().find(|(other, _)| other == id);
            let machine = known.map(|(_, machine)| machine.clone());
            machine.ok_or_else(|| format!("{} is not known", self.name(*id)))
        };
        Ok(Machines {
            all: nodes.iter().map(machine).collect::<Result<_, _>>()?,
            on_mlx: vec![false; nodes.len()],
            wide: false,
            of_rank,
            ways: self.ways(&nodes)?,
        })
    }

    /// An observer that corrects predictions for the nodes of a record by what its ranks measure.
    /// It takes no measurements of its own: without those of an earlier one it does nothing.
    pub(super) fn speed_observer(
        self: &Arc<Self>,
        wanted: &InstanceSpec,
        prepared: &PreparedModel,
    ) -> SpeedObserver {
        let (inner, wanted) = (Arc::downgrade(self), wanted.clone());
        let (source, config) = (Arc::clone(prepared.source()), prepared.config().clone());
        SpeedObserver(Arc::new(move |split, sample| {
            let Some(inner) = inner.upgrade() else { return };
            let (wanted, split) = (wanted.clone(), split.clone());
            let (source, config) = (Arc::clone(&source), config.clone());
            let run = move || inner.correct((&wanted, &split), (&source, &config), sample);
            // Other nodes are asked, which may take a moment. Without a thread nothing is learnt.
            let thread = std::thread::Builder::new().name("speeds".to_owned());
            let _ = thread.spawn(run);
        }))
    }

    fn correct(
        &self,
        (wanted, split): (&InstanceSpec, &Split),
        (source, config): (&ModelSource, &Config),
        sample: SpeedSample,
    ) {
        let setting = Setting {
            source,
            config,
            class: KernelClass::Cpu,
            threads: usize::from(wanted.threads.max(1)),
            backend: Backend::Tcp,
        };
        let unknown = |_| Err(std::io::Error::other("nothing was measured"));
        let Ok(mut forecast) = Forecast::new(&self.spec.home, setting, 1, unknown) else {
            return;
        };
        if let Some(memory) = wanted.options.memory {
            forecast.stream(Bytes(memory));
        }
        let known = self.machines(&wanted.nodes);
        let Ok(mut machines) = self.machines_of(&wanted.nodes, &known) else {
            return;
        };
        let class = |id: &NodeId| {
            wanted
                .class_of(*id)
                .parse::<KernelClass>()
                .unwrap_or_default()
        };
        let classes: Vec<KernelClass> = wanted.nodes.iter().map(class).collect();
        // Predictions know one class of the CPU.
        if classes
            .iter()
            .any(|it| !it.is_mlx() && *it != KernelClass::Cpu)
        {
            return;
        }
        machines.on_mlx = on_mlx(&classes, &machines);
        machines.wide =
            classes.contains(&KernelClass::MlxF32) || config.family.needs_wide_activations();
        let of = (split, &machines);
        match sample {
            SpeedSample::Decode(tok_s) => forecast.learn_across(config, of, tok_s),
            SpeedSample::Load(took) => forecast.loaded_across(config, of, took.as_secs_f64()),
        }
    }

    fn ways(&self, nodes: &[NodeId]) -> Result<Vec<MachineLink>, String> {
        let at = |id: NodeId| nodes.iter().position(|other| *other == id);
        let way = |(from, to): (NodeId, NodeId)| {
            let unknown = || {
                let (from, to) = (self.name(from), self.name(to));
                format!(
                    "no way from {from} to {to} answers: `paceline doctor --peer {to}` on {from}"
                )
            };
            let ends = (at(from).unwrap_or(0), at(to).unwrap_or(0));
            let direct = || self.way(from, to).map(|path| link_of(ends, &path));
            let relayed = || self.relayed_link((from, to), nodes, ends);
            let link = match self.is_apart(from, to) {
                true => relayed(),
                false => direct(),
            };
            link.ok_or_else(unknown)
        };
        pairs(nodes).map(way).collect()
    }

    /// Whether no path between two nodes answers.
    pub(super) fn is_apart(&self, a: NodeId, b: NodeId) -> bool {
        self.way(a, b).is_none() || !self.agent.broken_pairs(&[a, b]).is_empty()
    }

    /// The link of two nodes through the first of `nodes` that reaches both.
    fn relayed_link(
        &self,
        (from, to): (NodeId, NodeId),
        nodes: &[NodeId],
        ends: (usize, usize),
    ) -> Option<MachineLink> {
        let reaches = |id: &&NodeId| !self.is_apart(**id, from) && !self.is_apart(**id, to);
        let hub = nodes.iter().find(reaches)?;
        let [one, other] = [from, to].map(|end| self.way(*hub, end));
        let (one, other) = (link_of(ends, &one?), link_of(ends, &other?));
        Some(MachineLink {
            round_trip: one.round_trip + other.round_trip,
            bytes_per_s: one.bytes_per_s.min(other.bytes_per_s),
            ..one
        })
    }
}

/// Whether MLX computes on each machine, in each set of engines worth a comparison. An automatic
/// set has the fastest engine of each machine; with a GPU among them, exact answers on all
/// processors are the other one.
fn engine_sets(
    (config, forecast): (&Config, &Forecast),
    engines: &EngineChoice,
    machines: &Machines,
) -> Vec<Vec<bool>> {
    match engines {
        EngineChoice::Given(ranks) => vec![on_mlx(ranks, machines)],
        EngineChoice::Fastest => {
            let all = machines.all.iter();
            let fastest = all.map(|machine| forecast.is_faster_on_mlx(config, machine));
            let mut sets = vec![fastest.collect(), machines.on_mlx.clone()];
            sets.dedup();
            sets
        }
    }
}

/// Whether MLX computes on each machine, by the classes of the ranks.
fn on_mlx(ranks: &[KernelClass], machines: &Machines) -> Vec<bool> {
    let place = |machine| machines.of_rank.iter().position(|of| *of == machine);
    let class = |machine| place(machine).and_then(|rank| ranks.get(rank));
    let is_on_mlx = |machine| class(machine).is_some_and(|class| class.is_mlx());
    (0..machines.all.len()).map(is_on_mlx).collect()
}

/// Decode tokens in a thousand seconds of each split that fits the nodes and engines of the first.
pub(super) fn predictions(all: &[Proposal]) -> BTreeMap<String, u64> {
    let (first, mut predicted) = (all.first(), BTreeMap::new());
    let is_like =
        |it: &&Proposal| it.fits && first.is_some_and(|first| first.engines == it.engines);
    for it in all.iter().filter(is_like) {
        let tok_ks = ((it.decode_tok_s * 1e3) as u64).max(1);
        predicted.entry(it.split.clone()).or_insert(tok_ks);
    }
    predicted
}

/// The link over a path. A slow network has a delay before it has a rate, which is guessed then:
/// splits differ by the delay.
fn link_of((a, b): (usize, usize), path: &Path) -> MachineLink {
    MachineLink {
        a,
        b,
        round_trip: path.latency_us as f64 / 1e6,
        bytes_per_s: path.rate(),
    }
}

/// The first machine on which MLX is to compute with unknown rates.
fn unmeasured(machines: &Machines) -> Option<&str> {
    let mut all = machines.all.iter().zip(&machines.on_mlx);
    let unknown = all.find(|(machine, on_mlx)| **on_mlx && machine.device.is_none());
    unknown.map(|(machine, _)| &*machine.name)
}

/// The nodes of `ranks`, each once, and the place of each rank's node among them.
fn each_once(ranks: &[NodeId]) -> (Vec<NodeId>, Vec<usize>) {
    let mut nodes: Vec<NodeId> = Vec::new();
    let place = |id: &NodeId| {
        nodes.iter().position(|node| node == id).unwrap_or_else(|| {
            nodes.push(*id);
            nodes.len() - 1
        })
    };
    let of_rank = ranks.iter().map(place).collect();
    (nodes, of_rank)
}

#[cfg(test)]
mod tests {
    use super::super::preview::measured_first;
    use super::*;

    /// Without a link no split would be planned, and the load would take any.
    #[test]
    fn a_path_whose_rate_is_unknown_still_has_its_delay() {
        let path = |latency_us, bytes_per_s, up| Path {
            to: NodeId([1; 16]),
            interface: String::new(),
            local: [10, 0, 0, 1].into(),
            remote: ([10, 0, 0, 2], 1).into(),
            latency_us,
            bytes_per_s,
            up,
            preferred: false,
        };
        let all = [
            path(7, Some(1), false),
            path(100_000, None, true),
            path(100_002, Some(2_000_000), true),
        ];
        let used = |n: usize| measured_first(all[..n].iter().cloned());
        assert_eq!(used(1), None);
        let slow = link_of((0, 1), &used(2).unwrap());
        assert_eq!((slow.round_trip, slow.bytes_per_s > 1e6), (0.1, true));
        assert_eq!(link_of((0, 1), &used(3).unwrap()).bytes_per_s, 2e6);
    }

    #[test]
    fn a_machine_with_two_ranks_is_one_machine() {
        let node = |number: u8| NodeId([number; 16]);
        let of = |ranks: &[u8]| each_once(&ranks.iter().copied().map(node).collect::<Vec<_>>());
        assert_eq!(of(&[]), (vec![], vec![]));
        assert_eq!(
            of(&[1, 2, 3]),
            ([1, 2, 3].map(node).to_vec(), vec![0, 1, 2])
        );
        assert_eq!(of(&[1, 2, 1]), ([1, 2].map(node).to_vec(), vec![0, 1, 0]));
    }
}
