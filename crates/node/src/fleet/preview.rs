//! Placements of a model over the live nodes, each with a prediction, before anything loads.
//!
//! Candidates are this node alone and with 1, 2, .. others in order of their routes (or just the
//! named nodes), in every split. [`Fleet::load`](super::Fleet::load) takes the nodes and the split
//! of one of them.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::{Bytes, KernelClass};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::NodeView;
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::paths;
use paceline_comm::Backend;
use paceline_fleet::{InstanceSpec, NODES_MAX};
use paceline_model::{Config, ModelSource};
use serde::Serialize;

use super::hosts::NodeConnection;
use super::speed::{self, MeasuredSpeed};
use super::{Error, Inner, LoadRequest, SPEED};
use crate::forecast::devices::DeviceSpeed;
use crate::forecast::machines::{RemoteDevice, RemoteMachine, best_first};
use crate::forecast::{Forecast, Setting, measure_disk};
use crate::workers::connection::receive_message;
use paceline_fleet::memory::{mlx_device, usable};

/// Nodes of the largest placement proposed by default.
pub(super) const COUNT_MAX: usize = 8;

/// Engine of a node that computes on its processor with our own kernels.
pub(super) const CPU: &str = "cpu";

/// Longest wait for another node's measurements to arrive.
const TOLD_LIMIT: Duration = Duration::from_secs(2);

/// A proposed placement of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Proposal {
    /// Names of its nodes, the owner first, as [`Ask::nodes`] takes them.
    pub nodes: Vec<String>,
    /// The split, as [`Ask::split`] takes it.
    pub split: String,
    /// Engine of each node, such as `cpu` or `mlx(metal)`, in the order of `nodes`.
    pub engines: Vec<String>,
    /// Relative parts of the nodes; empty for equal ones.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<u32>,
    /// Tokens a second of one answer alone.
    pub decode_tok_s: f64,
    /// Slowest and fastest, where the rates of a device are constants of its class; absent where
    /// they were measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_range: Option<[f64; 2]>,
    /// Tokens a second of four answers together.
    pub batch_tok_s: f64,
    /// Milliseconds until the first token of a short prompt.
    pub ttft_ms: Option<f64>,
    /// Seconds until it is ready, once the files are there, by earlier loads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_s: Option<f64>,
    /// Waits for devices of MLX in a token.
    pub crossings: usize,
    /// All of them, in milliseconds.
    pub crossings_ms: f64,
    /// Whether every node has the memory for its part.
    pub fits: bool,
    /// Bytes that each node needs, in the order of `nodes`.
    pub bytes: Vec<u64>,
    /// Within a limit of memory: about how many further bytes each node reads from its disk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub from_disk: Vec<u64>,
    /// The measured route of every pair, such as `n0 to n1: eth0 (0.10 ms, 940 MB/s)`.
    pub paths: Vec<String>,
    /// With several replicas: the nodes of each, in the order of `nodes`. The speed is that of the
    /// first replica.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<Vec<String>>,
}

impl Proposal {
    /// Whether it fits, and its speed, as [`best_first`] compares them.
    pub(super) const fn speed(&self) -> (bool, f64) {
        (self.fits, self.decode_tok_s)
    }

    /// Unequal shares by node, as a record has them, where `nodes` are those of the proposal.
    pub(super) fn shares_of(&self, nodes: &[NodeId]) -> BTreeMap<NodeId, u32> {
        let shares = nodes.iter().copied().zip(self.shares.iter().copied());
        shares.collect()
    }

    /// Whether MLX computes the rank at `place`.
    pub(super) fn is_on_mlx(&self, place: usize) -> bool {
        self.engines.get(place).is_some_and(|engine| engine != CPU)
    }

    /// The kernel classes of `nodes`, those of the proposal.
    pub(super) fn classes_of(&self, nodes: &[NodeId]) -> Vec<(NodeId, KernelClass)> {
        let class = |(place, id): (usize, &NodeId)| match self.is_on_mlx(place) {
            true => (*id, KernelClass::Mlx),
            false => (*id, KernelClass::Cpu),
        };
        nodes.iter().enumerate().map(class).collect()
    }
}

/// Proposals, the fastest that fits first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Preview {
    /// The user's name for the model.
    pub model: String,
    /// All candidates.
    pub placements: Vec<Proposal>,
    /// Why nodes were left out: another numerics revision, unmeasured pairs.
    pub notes: Vec<String>,
}

/// An eligible node and its facts.
struct NodeCandidate {
    view: NodeView,
    /// Cost of the route from this node, by [`paths::Path::cost`]; 0 for this node itself.
    cost: f64,
}

impl Inner {
    /// Computes the placements of a request.
    pub(super) fn preview(self: &Arc<Self>, ask: &LoadRequest) -> Result<Preview, Error> {
        self.await_facts();
        if ask.replicas > 1 {
            let (placements, notes) = self.preview_spread(ask)?;
            let model = ask.model.clone();
            return Ok(Preview {
                model,
                placements,
                notes,
            });
        }
        let path = self.copies.of_user(&ask.model)?;
        let source = ModelSource::open(&path).map_err(crate::Error::from)?;
        let config = Config::read(&source).map_err(crate::Error::from)?;
        let (sets, mut notes) = self.sets(ask)?;
        let largest = sets.last().cloned().unwrap_or_default();
        self.measure_unknown(&largest);
        self.measure_disk(ask, &path);
        let of = (self.threads(ask), ask.options.memory);
        let forecast = self.forecast(&source, &config, of)?;
        notes.extend(forecast.reuse_told(&config).map(str::to_owned));
        let machines = self.machines(&largest);
        let mut placements = Vec::new();
        for set in &sets {
            let of_set = (&set[..], &machines[..]);
            let engines = match self.engine_choice(ask, set) {
                Ok(engines) => engines,
                Err(reason) if sets.len() == 1 => return Err(reason.into()),
                Err(reason) => {
                    notes.push(reason);
                    continue;
                }
            };
            let wishes = (ask.split, &engines);
            let model = (&source, &config, &forecast);
            let like = (None, &unnamed_record(ask, &source));
            let (proposals, reasons) = self.proposals(model, wishes, of_set, like);
            let reasons = reasons.into_iter().chain(why(&proposals));
            placements.extend(proposals);
            let new = reasons.filter(|it| !notes.contains(it));
            notes.extend(new.collect::<Vec<_>>());
        }
        placements.sort_by(|a, b| best_first(a.speed(), b.speed()));
        let model = ask.model.clone();
        Ok(Preview {
            model,
            placements,
            notes,
        })
    }

    /// Candidate sets of nodes, each with one node more than the last, and why some nodes are left
    /// out.
    fn sets(&self, ask: &LoadRequest) -> Result<(Vec<Vec<NodeId>>, Vec<String>), Error> {
        if !ask.nodes.is_empty() {
            return Ok((vec![self.choose(ask)?], Vec::new()));
        }
        let (order, notes) = self.ranked();
        let (least, most) = match ask.count {
            None | Some(0) => (1, COUNT_MAX),
            Some(count) if count <= order.len() => (count, count),
            Some(count) => return Err(Error::too_few(count, order.len(), Vec::new())),
        };
        let most = most.min(order.len()).min(NODES_MAX);
        Ok(((least..=most).map(|n| order[..n].to_vec()).collect(), notes))
    }

    /// Live nodes with this node's numerics that do not drain. This node is first, then the others
    /// by route cost; among equal routes the one with the most memory comes first. Also returns
    /// which were left out.
    pub(super) fn ranked(&self) -> (Vec<NodeId>, Vec<String>) {
        let all = self.agent.nodes();
        let own = all.first().map(|node| node.facts.kind());
        let (mut order, mut notes) = (Vec::new(), Vec::new());
        let paths = self.agent.paths(self.agent.id());
        for view in all.into_iter().filter(|node| node.state == Life::Alive) {
            if view.facts.leaving {
                notes.push(takes_none(&view));
                continue;
            }
            let (kind, name) = (view.facts.kind(), &view.facts.name);
            if let Some(own) = own.as_ref().filter(|own| **own != kind) {
                notes.push(format!(
                    "{name} has {kind}; this node has {own}: they share no instance"
                ));
                continue;
            }
            let used = paths
                .iter()
                .find(|path| path.to == view.id && path.preferred);
            let cost = match view.id == self.agent.id() {
                true => 0.0,
                false => used.map_or(f64::INFINITY, paths::Path::cost),
            };
            order.push(NodeCandidate { view, cost });
        }
        // Routes that differ by less than a factor of two count as equal, so that noise does not
        // choose a node.
        let class = |cost: f64| cost.max(1e-9).log2().round();
        order.sort_by(|a, b| {
            let near = class(a.cost).total_cmp(&class(b.cost));
            near.then(Reverse(a.view.facts.memory_bytes).cmp(&Reverse(b.view.facts.memory_bytes)))
        });
        (order.into_iter().map(|it| it.view.id).collect(), notes)
    }

    /// Makes all of `nodes` measure their routes unless every pair is known.
    pub(super) fn measure_unknown(&self, nodes: &[NodeId]) {
        self.measure_unless(nodes, |way| {
            way.is_some_and(|way| way.bytes_per_s.is_some())
        });
    }

    /// As [`measure_unknown`](Self::measure_unknown), but pairs without a route were measured
    /// before.
    pub(super) fn measure_rates(&self, nodes: &[NodeId]) {
        self.measure_unless(nodes, |way| way.is_none_or(|way| way.bytes_per_s.is_some()));
    }

    fn measure_unless(&self, nodes: &[NodeId], is_enough: impl Fn(Option<paths::Path>) -> bool) {
        let is_known = |(from, to): (NodeId, NodeId)| is_enough(self.way(from, to));
        if pairs(nodes).all(is_known) {
            return;
        }
        self.agent.measure(nodes, paths::PathProbe::Bandwidth);
        // The measurements of other nodes arrive with the shared map.
        let until = Instant::now() + TOLD_LIMIT;
        while !pairs(nodes).all(is_known) && Instant::now() < until {
            std::thread::sleep(TOLD_LIMIT / 40);
        }
    }

    /// The route from one node to another, with its bandwidth if that was measured.
    pub(super) fn way(&self, from: NodeId, to: NodeId) -> Option<paths::Path> {
        let route = self.agent.route(from, to)?;
        let there = self.agent.paths(from).into_iter();
        let back = self.agent.paths(to).into_iter();
        let there = there.filter(|it| it.to == to && it.remote.ip() == route.ip());
        let back = back.filter(|it| it.to == from && it.local == route.ip());
        measured_first(there.chain(back))
    }

    /// The path between each pair of `nodes` with its measurements, one line a pair.
    pub(super) fn ways_told(&self, nodes: &[NodeId]) -> Vec<String> {
        let told = |(from, to): (NodeId, NodeId)| {
            let way = self.way(from, to).map(|way| way.told());
            let way = way.unwrap_or_else(|| "a way that nothing was measured of".to_owned());
            format!("{} to {}: {way}", self.name(from), self.name(to))
        };
        pairs(nodes).map(told).collect()
    }

    pub(super) fn threads(&self, ask: &LoadRequest) -> usize {
        ask.threads.map_or(self.spec.threads, usize::from)
    }

    /// Measures the disk with the model at `path`, where a load may read weights from it.
    pub(super) fn measure_disk(&self, ask: &LoadRequest, path: &Path) {
        if ask.options.memory.is_some() {
            measure_disk(&self.spec.home, path);
        }
    }

    /// The forecast of a model, computed by `threads` threads within a limit of memory.
    pub(super) fn forecast(
        &self,
        source: &ModelSource,
        config: &Config,
        (threads, memory): (usize, Option<u64>),
    ) -> Result<Forecast, Error> {
        let setting = Setting {
            source,
            config,
            class: KernelClass::Cpu,
            threads,
            backend: Backend::Tcp,
        };
        let kernels = &self.spec.kernels;
        let mut forecast = Forecast::new(&self.spec.home, setting, 1, kernels)?;
        if let Some(memory) = memory {
            forecast.stream(Bytes(memory));
        }
        Ok(forecast)
    }

    /// Memory and speed of each known node; speeds are multiples of this node's.
    pub(super) fn machines(&self, nodes: &[NodeId]) -> Vec<(NodeId, RemoteMachine)> {
        let own = self.own_speed();
        let views = self.agent.nodes();
        std::thread::scope(|scope| {
            let asked: Vec<_> = nodes
                .iter()
                .map(|id| scope.spawn(move || (*id, self.speed_of(*id))))
                .collect();
            let speeds = asked.into_iter().map(|thread| {
                let ended = thread.join();
                ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            speeds
                .filter_map(|(id, speed)| {
                    let view = views.iter().find(|view| view.id == id)?;
                    Some((id, machine(view, speed, own, views.first()?)))
                })
                .collect()
        })
    }

    pub(super) fn own_speed(&self) -> Option<MeasuredSpeed> {
        let kernels = || (self.spec.kernels)(self.spec.threads);
        self.speed.get(kernels).ok()
    }

    fn speed_of(&self, id: NodeId) -> Option<MeasuredSpeed> {
        if id == self.agent.id() {
            return self.own_speed();
        }
        let line = NodeConnection(self.agent.open(id, SPEED, speed::LIMIT).ok()?);
        receive_message::<Option<MeasuredSpeed>>(&line, speed::LIMIT)
            .ok()?
            .flatten()
    }
}

/// The fields of a request's record that decide the memory of its instance.
pub(super) fn unnamed_record(ask: &LoadRequest, source: &ModelSource) -> InstanceSpec {
    InstanceSpec {
        model: ask.model.clone(),
        bytes: source.file_bytes().0,
        options: ask.options,
        machine: ask.machine.clone(),
        ..InstanceSpec::default()
    }
}

/// The first path that is up and has a bandwidth, else the first that is up.
pub(super) fn measured_first(paths: impl Iterator<Item = paths::Path>) -> Option<paths::Path> {
    let up = paths.filter(|path| path.up);
    up.min_by_key(|path| path.bytes_per_s.is_none()) // the first of equals
}

/// Each two of `nodes`.
pub(super) fn pairs(nodes: &[NodeId]) -> impl Iterator<Item = (NodeId, NodeId)> + '_ {
    let later = |(i, from): (usize, &NodeId)| {
        let from = *from;
        nodes[i + 1..].iter().map(move |to| (from, *to))
    };
    nodes.iter().enumerate().flat_map(later)
}

/// Message for a draining node, which takes no work. A node also drains while its battery is low,
/// and before its end.
pub(super) fn takes_none(node: &NodeView) -> String {
    let reason = match node.state {
        Life::Dead | Life::Left => "it was ended",
        Life::Alive | Life::Suspect => "it leaves, or its battery is low",
    };
    format!("{} takes no work: {reason}", node.facts.name)
}

/// Why a placement is no tensor split, if crossings cost that more time than a tensor split won.
pub(super) fn why(proposals: &[Proposal]) -> Option<String> {
    let best = proposals.first()?;
    let other = proposals.iter().find(|other| {
        other.nodes == best.nodes && other.engines == best.engines && other.split != best.split
    })?;
    let (more, ms) = (other.crossings, other.crossings_ms);
    (more > best.crossings).then(|| {
        format!(
            "split {}: a {} split waits for its devices {more} times a token, {ms:.1} ms, and gives \
             {:.1} tokens/s",
            best.split, other.split, other.decode_tok_s
        )
    })
}

/// A node's speed relative to this one: by both measurements, else by their cores.
fn machine(
    view: &NodeView,
    speed: Option<MeasuredSpeed>,
    own: Option<MeasuredSpeed>,
    own_view: &NodeView,
) -> RemoteMachine {
    let cores = |view: &NodeView| f64::from(view.facts.cores.max(1));
    let by_cores = cores(view) / cores(own_view);
    let (reads, computes) = match (speed, own) {
        (Some(it), Some(own)) => (it.reads / own.reads, it.computes / own.computes),
        _ => (by_cores, by_cores),
    };
    let device = mlx_device(&view.facts).and_then(|device| {
        Some(RemoteDevice {
            speed: DeviceSpeed::of(device)?,
            memory: Bytes(usable(view, true)),
        })
    });
    RemoteMachine {
        name: view.facts.name.clone(),
        memory: Bytes(usable(view, false)),
        reads,
        computes,
        device,
    }
}
