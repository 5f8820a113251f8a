//! Hosts of an instance's workers: the nodes that its record names, or other nodes of the instance
//! after a loss.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::{Bytes, Rank, lock};
use paceline_cluster::nodes::agent::{Agent, NodeView};
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::paths;
use paceline_cluster::nodes::reach::BrokenPairs;
use paceline_cluster::nodes::{NodeId, Registers};
use paceline_fleet::{InstanceSpec, SPARE_AUTO, specs};

use super::cables::CablePlan;
use super::error::no_path;
use super::flaps::{Flaps, UnusedNodes};
pub(super) use super::node_connection::NodeConnection;
use super::{CREW, copies};
use crate::workers::connection::{ConnectionError, pair};
use crate::workers::host::{HostSpec, host};
use crate::workers::remote::{WorkerHost, WorkerHosts};
use paceline_fleet::memory::{
    AUTO_USABLE, NoRoom, USABLE, all_records, fits, held, is_one_memory, own_part, usable,
};
use paceline_worker::messages::RankCables;

/// Longest wait for a channel to a node: two handshakes over a slow link.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// Longest wait for the measurement of an unmeasured pair. A route that answers takes some
/// milliseconds, a dead one 1.5 s. A recovery waits for it.
const NEW_LIMIT: Duration = Duration::from_secs(2);

/// Longest wait for other nodes' measurements to arrive in the map, after doubted routes were
/// measured. A change takes two gossip rounds at most.
const TOLD_LIMIT: Duration = Duration::from_millis(500);

/// Routes of pairs of nodes that this process has measured or used.
type PairRoutes = BTreeMap<(NodeId, NodeId), SocketAddr>;

/// Facts of an instance that its workers determine.
#[derive(Clone, Default)]
pub(super) struct RunningFacts {
    /// Name of its numbers, once its workers are ready.
    pub(super) numbers: Option<String>,
    /// Positions of a sequence, once its engine is planned.
    pub(super) context: Option<u32>,
    /// RDMA cables between the ranks of the last epoch.
    pub(super) cables: CablePlan,
    /// Transports between these ranks, for people.
    pub(super) wires: Option<String>,
    /// The split in use, once its workers are ready.
    pub(super) split: Option<String>,
    pub(super) seen: SeenHosts,
}

/// Observations of the instance's nodes by its present workers.
#[derive(Clone, Default)]
pub(super) struct SeenHosts {
    /// Pairs of nodes: a rank on one blamed the rank on the other.
    blamed: BrokenPairs,
    /// By rank: the node of its standby worker, if there is one.
    spares: BTreeMap<Rank, NodeId>,
    /// Routes that a recovery need not measure.
    known: PairRoutes,
}

/// Nodes of an instance, by rank.
#[derive(derive_more::Debug)]
#[debug("{} nodes", self.nodes.len())]
pub(super) struct InstanceNodes {
    pub(super) agent: Agent,
    /// The instance's record.
    pub(super) wanted: InstanceSpec,
    pub(super) nodes: Vec<NodeId>,
    pub(super) host: Arc<HostSpec>,
    /// Lost workers by node.
    pub(super) flaps: Arc<Flaps>,
    /// Set when a rank was lost and no other node of the instance has memory for it.
    pub(super) cramped: Arc<AtomicBool>,
    pub(super) unused: Arc<UnusedNodes>,
    pub(super) running: Arc<Mutex<RunningFacts>>,
}

impl InstanceNodes {
    /// Candidate nodes for a rank: its own, then the other live ones. Each rank starts at a
    /// different one, so that the ranks of a lost node are spread. Nodes that compute in another
    /// class come later, then draining and flapping ones. Suspected nodes come last: a frozen
    /// machine accepts a connection and is silent for [`OPEN_LIMIT`]. Without nodes that cannot
    /// speak to the others, and those that lack the model.
    fn candidates(&self, rank: Rank) -> Vec<NodeId> {
        let first = rank.0 as usize % self.nodes.len();
        let others = self.nodes.iter().cycle().skip(first).take(self.nodes.len());
        let speaking = self.speaking(&[]);
        let usable = |id: &&NodeId| speaking.contains(id) && !self.unused.is_lacking(**id);
        let mut all: Vec<NodeId> = others.filter(usable).copied().collect();
        // Without duplicates: a node may have several ranks.
        let mut seen = BTreeSet::new();
        all.retain(|id| seen.insert(*id));
        let class = self.class(rank);
        // A flapping or draining node is better than none.
        let (now, leavers) = (Instant::now(), leavers(&self.agent.nodes()));
        let is_silent = |id: NodeId| id != self.agent.id() && !self.lives(id);
        all.sort_by_key(|id| {
            let is_out = self.flaps.is_out(*id, now);
            let is_other = self.wanted.class_of(*id) != class;
            (is_silent(*id), leavers.contains(id), is_out, is_other)
        });
        all
    }

    /// The live nodes of the instance that can have ranks together with this one, which comes
    /// first: all can speak, or this one relays. `further` ones may run ranks of it, too.
    fn speaking(&self, further: &[NodeId]) -> Vec<NodeId> {
        let own = self.agent.id();
        let mut all = vec![own];
        for id in self.nodes.iter().chain(further) {
            if !all.contains(id) && self.agent.life(*id) != Life::Dead {
                all.push(*id);
            }
        }
        self.wanted.together(&self.broken_pairs(&all), &all)
    }

    /// Whether no path between two nodes answers.
    fn is_apart(&self, a: NodeId, b: NodeId) -> bool {
        self.route(a, b).is_none() || !self.broken_pairs(&[a, b]).is_empty()
    }

    /// The pairs of `nodes` that cannot speak, as measured. A pair that failed and has no measured
    /// route is one.
    fn broken_pairs(&self, nodes: &[NodeId]) -> BrokenPairs {
        let measured = self.agent.broken_pairs(nodes);
        let blamed = lock(&self.running).seen.blamed.clone();
        let is_lost = |a, b| self.route(a, b).is_none() && nodes.contains(&a) && nodes.contains(&b);
        let lost = blamed.iter().filter(|(a, b)| is_lost(*a, *b));
        measured.iter().chain(lost).collect()
    }

    /// Name of a rank's kernel class, wherever it runs.
    fn class(&self, rank: Rank) -> &str {
        self.wanted.class_of(self.nodes[rank.0 as usize])
    }

    fn is_on_mlx(&self, rank: Rank) -> bool {
        self.wanted.is_on_mlx(self.nodes[rank.0 as usize])
    }

    /// Checks whether a node has the engine for a rank planned for another node.
    fn engine_for(&self, rank: Rank, view: &NodeView) -> Result<(), ConnectionError> {
        match self.is_on_mlx(rank) && !view.facts.has_engine("mlx") {
            true => Err(ConnectionError::new(format!(
                "{} has no engine mlx",
                view.facts.name
            ))),
            false => Ok(()),
        }
    }

    fn name(&self, id: NodeId) -> String {
        let known = self.agent.nodes().into_iter().find(|node| node.id == id);
        known.map_or_else(|| id.to_string(), |node| node.facts.name)
    }

    fn reach(&self, id: NodeId) -> Result<WorkerHost, ConnectionError> {
        let name = self.name(id);
        if id == self.agent.id() {
            return here(name, id, &self.host);
        }
        let opened = self.agent.open(id, CREW, OPEN_LIMIT);
        let channel = opened.map_err(|error| ConnectionError::new(format!("{name}: {error}")))?;
        let (node, line) = (id, Box::new(NodeConnection(channel)));
        Ok(WorkerHost { name, node, line })
    }
}

/// This machine as a host, over a connection inside the process.
fn here(name: String, node: NodeId, spec: &Arc<HostSpec>) -> Result<WorkerHost, ConnectionError> {
    let (line, there) = pair();
    let spec = Arc::clone(spec);
    // The thread ends with the connection; the other end reports the reason.
    let run = move || drop(host(&there, &spec));
    let started = std::thread::Builder::new()
        .name("host".to_owned())
        .spawn(run);
    started.map_err(|error| ConnectionError::new(format!("{name}: a thread: {error}")))?;
    let line = Box::new(line);
    Ok(WorkerHost { name, node, line })
}

impl WorkerHosts for InstanceNodes {
    fn open(&self, rank: Rank) -> Result<WorkerHost, ConnectionError> {
        let mut reasons = Vec::new();
        self.flaps.vacated(rank);
        let (map, views) = (self.agent.map(), self.agent.nodes());
        let mut lacks = false;
        for id in self.candidates(rank) {
            let room = self.room_for(rank, id, (&views, &map));
            lacks |= room.is_err();
            match room.and_then(|()| self.reach(id)) {
                Ok(place) => {
                    self.flaps.started(rank, id);
                    return Ok(place);
                }
                Err(error) => reasons.push(error.reason),
            }
        }
        if lacks {
            self.cramped.store(true, Ordering::SeqCst);
        }
        Err(ConnectionError::new(match reasons.is_empty() {
            true => "none of its nodes lives".to_owned(),
            false => reasons.join("; "),
        }))
    }

    fn open_spare(&self, rank: Rank) -> Result<WorkerHost, ConnectionError> {
        let before = lock(&self.running).seen.spares.remove(&rank);
        let mut error = ConnectionError::new("no other node lives and has the memory");
        for id in self.spare_candidates(rank, before) {
            match self.get_model(id).and_then(|()| self.reach(id)) {
                Ok(place) => {
                    lock(&self.running).seen.spares.insert(rank, id);
                    return Ok(place);
                }
                Err(why) => error = why,
            }
        }
        Err(error)
    }

    fn lives(&self, node: NodeId) -> bool {
        self.agent.life(node) == Life::Alive
    }

    fn promoted(&self, rank: Rank) {
        self.flaps.vacated(rank);
        if let Some(node) = lock(&self.running).seen.spares.remove(&rank) {
            self.flaps.started(rank, node);
        }
    }

    fn route(&self, from: NodeId, to: NodeId) -> Option<SocketAddr> {
        self.agent.route(from, to)
    }

    fn relays_at(&self, from: NodeId, to: NodeId) -> Option<IpAddr> {
        let own = self.agent.id();
        let is_between = self.wanted.relayed && from != own && to != own && from != to;
        let is_needed = is_between && self.is_apart(from, to);
        is_needed.then(|| self.route(from, own))?.map(|it| it.ip())
    }

    fn is_trusted(&self, nodes: &[NodeId]) -> bool {
        let views = self.agent.nodes();
        let trusts = |id: NodeId, interface: &String| {
            let view = views.iter().find(|view| view.id == id);
            view.is_some_and(|view| view.facts.trusted.contains(interface))
        };
        // Workers of a node with a dedicated data interface listen there only, even if another
        // route is better.
        let listens = |id: NodeId, ip: IpAddr| {
            let view = views.iter().find(|view| view.id == id);
            view.is_some_and(|view| {
                view.facts.data.is_empty() || view.facts.data.contains(&ip.to_canonical())
            })
        };
        // The operating system may use any interface that leads to an address.
        let is_trusted = |(from, to): (NodeId, NodeId)| {
            let Some(ip) = self.route(from, to).map(|route| route.ip()) else {
                return false;
            };
            let mut used = self.agent.paths(from);
            used.retain(|path| path.to == to && path.remote.ip() == ip);
            let all = used.iter().all(|path| trusts(from, &path.interface));
            !used.is_empty() && all && listens(to, ip)
        };
        let mut pairs = ordered_pairs(nodes).peekable();
        pairs.peek().is_some() && pairs.all(is_trusted)
    }

    fn cables(&self, nodes: &[NodeId]) -> Option<RankCables> {
        let mut plan = CablePlan::new(nodes, |a, b| self.agent.cables(a, b));
        plan.is_plain = self.is_trusted(nodes);
        let trusted = plan.trusted.clone();
        lock(&self.running).cables = plan;
        (!trusted.is_bare()).then_some(trusted)
    }

    fn trust(&self, nodes: &[NodeId]) {
        let ways = ordered_pairs(nodes).filter_map(|(from, to)| {
            let route = self.route(from, to)?;
            Some(((from, to), route))
        });
        let ways: Vec<_> = ways.collect();
        lock(&self.running).seen.known.extend(ways);
    }

    fn settle(&self, nodes: &[NodeId], doubted: &[NodeId]) {
        if nodes.iter().any(|id| doubted.contains(id)) {
            self.agent.measure(nodes, paths::PathProbe::Latency);
            let until = Instant::now() + TOLD_LIMIT;
            let is_relayed = self.wanted.relayed;
            while !is_relayed && self.broken_pairs(nodes).is_empty() && Instant::now() < until {
                std::thread::sleep(TOLD_LIMIT / 20);
            }
        } else {
            let known = lock(&self.running).seen.known.clone();
            let new = ends_of_new(nodes, &known, |from, to| self.route(from, to));
            if !new.is_empty() {
                let latency = paths::PathProbe::Latency;
                self.agent.measure_within(&new, latency, NEW_LIMIT);
            }
        }
        self.trust(nodes);
    }

    fn blamed(&self, a: NodeId, b: NodeId) {
        if a != b {
            lock(&self.running).seen.blamed.insert(a, b);
        }
    }

    fn apart(&self, nodes: &[NodeId]) -> BTreeMap<NodeId, String> {
        let stay = self.speaking(nodes);
        let all: Vec<NodeId> = stay.iter().chain(nodes).copied().collect();
        let broken = self.broken_pairs(&all);
        let leave = nodes.iter().filter(|id| !stay.contains(id));
        leave
            .map(|id| (*id, self.told_apart(*id, &stay, &broken)))
            .collect()
    }

    fn displaced(&self, rank: Rank) {
        self.flaps.vacated(rank);
    }
}

impl InstanceNodes {
    /// Why a node has no rank together with nodes that `stay`.
    fn told_apart(&self, id: NodeId, stay: &[NodeId], broken: &BrokenPairs) -> String {
        let other = stay.iter().find(|other| broken.contains(id, **other));
        let other = other.map_or_else(|| "the others".to_owned(), |other| self.name(*other));
        no_path(&self.name(id), &other)
    }

    /// Candidate nodes for a rank's standby: those of the instance, fewest standbys first, then
    /// idle ones. The node that had it `before` comes last: the standby was lost or failed to start
    /// there.
    fn spare_candidates(&self, rank: Rank, before: Option<NodeId>) -> Vec<NodeId> {
        let (at, now) = (self.flaps.node_of(rank), Instant::now());
        let (map, views) = (self.agent.map(), self.agent.nodes());
        let mut all = self.candidates(rank);
        all.extend(idle(&views, &busy(&map)));
        let has_room = |id: NodeId| {
            let view = views.iter().find(|view| view.id == id);
            view.is_none_or(|view| {
                self.engine_for(rank, view).is_ok() && self.has_room(rank, view, &map)
            })
        };
        all.retain(|id| Some(*id) != at && !self.flaps.is_out(*id, now));
        let leavers = leavers(&views);
        all.retain(|id| self.lives(*id) && !leavers.contains(id) && has_room(*id));
        let speaking = self.speaking(&[]);
        let mut both = speaking.clone();
        both.extend(&all);
        let broken = self.broken_pairs(&both);
        all.retain(|id| match self.wanted.relayed {
            true => !broken.contains(*id, self.agent.id()),
            false => broken.suits(*id, &speaking),
        });
        let spares = lock(&self.running).seen.spares.clone();
        let spares_at = |id: NodeId| spares.values().filter(|node| **node == id).count();
        all.sort_by_key(|id| {
            let is_idle = !self.nodes.contains(id);
            (Some(*id) == before, is_idle, spares_at(*id))
        });
        all
    }

    /// Checks whether a node has the engine and the memory for a rank planned for another node.
    /// Counts what records place there and further ranks of this instance.
    fn room_for(
        &self,
        rank: Rank,
        id: NodeId,
        (views, map): (&[NodeView], &Registers),
    ) -> Result<(), ConnectionError> {
        let is_home = self.nodes[rank.0 as usize] == id;
        let Some(view) = views.iter().find(|view| view.id == id && !is_home) else {
            return Ok(());
        };
        self.engine_for(rank, view)?;
        let is_on_mlx = self.is_on_mlx(rank);
        let is_beside = |other: bool| is_one_memory(view, is_on_mlx, other);
        let part = |home: NodeId| own_part(&self.wanted, home);
        let shard = part(self.nodes[rank.0 as usize]);
        let ranks = (0..).map(Rank).zip(&self.nodes);
        let here = ranks.filter(|(other, home)| {
            let at = self.flaps.node_of(*other).unwrap_or(**home);
            *other != rank && at == id && is_beside(self.is_on_mlx(*other))
        });
        let here = here.map(|(_, home)| part(*home));
        // The record counts the part of this instance at each of its nodes.
        let is_counted = self.nodes.contains(&id) && is_beside(self.wanted.is_on_mlx(id));
        let own = if is_counted { part(id) } else { 0 };
        let held = held(&all_records(map), view, is_on_mlx).saturating_sub(own);
        let held = here.fold(held, u64::saturating_add);
        let usable = usable(view, is_on_mlx);
        match fits(usable, held, shard) {
            true => Ok(()),
            false => {
                let room = usable.saturating_sub(held);
                Err(ConnectionError::new(NoRoom {
                    node: view.facts.name.clone(),
                    part: Bytes(shard),
                    room: Bytes(room),
                }))
            }
        }
    }

    /// Whether a node has the memory for a rank's standby, on top of its shards by all records and
    /// this instance's standbys.
    fn has_room(&self, rank: Rank, view: &NodeView, map: &Registers) -> bool {
        let is_on_mlx = self.is_on_mlx(rank);
        let held = held(&all_records(map), view, is_on_mlx);
        let spares = lock(&self.running).seen.spares.clone();
        let spares = spares.values().filter(|node| **node == view.id).count() as u64;
        let shard = own_part(&self.wanted, self.nodes[rank.0 as usize]);
        let held = held.saturating_add(spares.saturating_mul(shard));
        // An automatic standby leaves more memory to other programs.
        let usable = usable(view, is_on_mlx);
        let usable = match self.wanted.spare {
            SPARE_AUTO => (usable as f64 * AUTO_USABLE / USABLE) as u64,
            _ => usable,
        };
        fits(usable, held, shard)
    }

    /// Makes an idle node copy the model; the instance's nodes have it.
    fn get_model(&self, id: NodeId) -> Result<(), ConnectionError> {
        match self.nodes.contains(&id) {
            true => Ok(()),
            false => {
                let mut models = self.wanted.clone().files();
                let had =
                    models.try_for_each(|model| copies::ensure(&self.agent, id, &model, &|_| ()));
                had.map_err(ConnectionError::new)
            }
        }
    }
}

/// All ordered pairs of nodes.
fn ordered_pairs(nodes: &[NodeId]) -> impl Iterator<Item = (NodeId, NodeId)> + '_ {
    nodes.iter().flat_map(move |from| {
        let from = *from;
        let others = nodes.iter().filter(move |to| **to != from);
        others.map(move |to| (from, *to))
    })
}

/// The nodes of pairs whose route is not the known one: unmeasured, or with another address now.
fn ends_of_new(
    nodes: &[NodeId],
    known: &PairRoutes,
    route: impl Fn(NodeId, NodeId) -> Option<SocketAddr>,
) -> Vec<NodeId> {
    let is_new = |(from, to): &(NodeId, NodeId)| {
        let way = route(*from, *to);
        way.is_none() || way.as_ref() != known.get(&(*from, *to))
    };
    let new = ordered_pairs(nodes).filter(is_new);
    let ends: BTreeSet<NodeId> = new.flat_map(|(from, to)| [from, to]).collect();
    ends.into_iter().collect()
}

/// Draining nodes.
fn leavers(views: &[NodeView]) -> BTreeSet<NodeId> {
    let leavers = views.iter().filter(|node| node.facts.leaving);
    leavers.map(|node| node.id).collect()
}

/// Nodes that compute for any instance.
fn busy(map: &Registers) -> BTreeSet<NodeId> {
    let records = specs(map);
    let nodes = records.flat_map(|(.., wanted)| wanted.nodes.into_iter().chain(wanted.prompts));
    nodes.collect()
}

/// Live nodes that stay, have the numerics of this node (the first of `views`), and are not `busy`.
fn idle(views: &[NodeView], busy: &BTreeSet<NodeId>) -> Vec<NodeId> {
    let own = views.first().map(|view| view.facts.kind());
    let is_idle = |view: &&NodeView| {
        let stays = view.state == Life::Alive && !view.facts.leaving;
        stays && Some(view.facts.kind()) == own && !busy.contains(&view.id)
    };
    views.iter().filter(is_idle).map(|view| view.id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: u8, state: Life, numerics: u32) -> NodeView {
        NodeView {
            id: NodeId([number; 16]),
            state,
            found_by: String::new(),
            heard_by: Vec::new(),
            linked: true,
            slow_ms: None,
            facts: paceline_cluster::nodes::agent::NodeFacts {
                numerics,
                ..Default::default()
            },
        }
    }

    #[test]
    fn idle_nodes_live_compute_alike_and_hold_nothing() {
        let view = node;
        let views = [
            view(1, Life::Alive, 1),
            view(2, Life::Alive, 1),
            view(3, Life::Suspect, 1),
            view(4, Life::Alive, 2),
            view(5, Life::Alive, 1),
            NodeView {
                facts: paceline_cluster::nodes::agent::NodeFacts {
                    protocol: 1,
                    ..view(7, Life::Alive, 1).facts
                },
                ..view(7, Life::Alive, 1)
            },
            NodeView {
                facts: paceline_cluster::nodes::agent::NodeFacts {
                    leaving: true,
                    ..view(6, Life::Alive, 1).facts
                },
                ..view(6, Life::Alive, 1)
            },
        ];
        let busy = [1, 2].map(|number| NodeId([number; 16]));
        assert_eq!(idle(&views, &BTreeSet::from(busy)), [NodeId([5; 16])]);
        assert_eq!(idle(&[], &BTreeSet::new()), []);
    }

    #[test]
    fn only_ways_that_are_new_or_lead_elsewhere_are_measured() {
        let nodes = [1, 2, 3].map(|number| NodeId([number; 16]));
        let way = |from: NodeId, to: NodeId| SocketAddr::from(([10, 0, from.0[0], to.0[0]], 52416));
        let known: PairRoutes = ordered_pairs(&nodes)
            .map(|(from, to)| ((from, to), way(from, to)))
            .collect();
        assert_eq!(known.len(), 6);
        let measured = |nodes: &[NodeId], route: &dyn Fn(NodeId, NodeId) -> Option<SocketAddr>| {
            ends_of_new(nodes, &known, route)
        };
        let same = |from: NodeId, to: NodeId| Some(way(from, to));
        assert_eq!(measured(&nodes, &same), []);
        assert_eq!(measured(&nodes[..1], &same), []);
        let none = |_: NodeId, _: NodeId| None::<SocketAddr>;
        assert_eq!(measured(&nodes, &none), nodes, "known once, and down now");
        let moved = |from: NodeId, to: NodeId| {
            let over = if (from, to) == (nodes[0], nodes[2]) {
                nodes[1]
            } else {
                to
            };
            Some(way(from, over))
        };
        assert_eq!(measured(&nodes, &moved), [nodes[0], nodes[2]]);
        let idle = [nodes[0], NodeId([4; 16])];
        assert_eq!(measured(&idle, &same), idle, "was no part of it before");
    }
}
