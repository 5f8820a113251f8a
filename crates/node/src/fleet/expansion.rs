//! Expansion: moves instances to new or returned nodes when they are idle.
//!
//! ```text
//! a node dies      its ranks run on the nodes that are left    it comes back, or an idle one is
//!                                                              there: they run there
//! an owner dies,   the next record has fewer nodes than the    nodes come that compute nothing:
//! a node leaves    user asked for                              they are added
//! ```
//! The owner of an instance checks once a second. It writes the next record if the placement has
//! more of the nodes that its user asked for. Otherwise the predicted gain must be [`GAIN`]. It
//! waits until no request was open for [`QUIET`], at most [`BUSY`] in an exact kernel class. The
//! previous instance answers until the new one does. So a request waits for one handover and not
//! for a load, and both need memory at the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paceline_base::{KernelClass, Rank, lock};
use paceline_cluster::nodes::agent::NodeView;
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::placement::{self, InstanceSpec};
use paceline_cluster::nodes::{InstanceId, NodeId};
use paceline_engine::{Service, State};
use paceline_model::{Config, ModelSource, SplitKind};

use super::owner::{self, OwnedInstance};
use super::preview::Proposal;
use super::proposals::{Wishes, predictions};
use super::room::own_part;
use super::{Inner, proposals};
use crate::Instance;
use crate::classes::EngineChoice;
use crate::forecast::Forecast;

/// Idle time before a placement changes. The next question of a chat may take longer and then waits
/// for a handover.
const QUIET: Duration = Duration::from_secs(10);

/// How long an instance in use waits for a quiet moment. Its open answers continue with the same
/// bits. With [`LIVED`] and a load of some seconds, a returned node is used within 30 s.
const BUSY: Duration = Duration::from_secs(6);

/// Uptime before a node is used: one that restarts repeatedly is no gain.
const LIVED: Duration = Duration::from_secs(8);

/// Minimum predicted speedup: predictions are off by as much.
const GAIN: f64 = 1.15;

/// Time before the same placement of an instance is evaluated again, after a prediction without
/// enough gain: a load costs seconds to minutes.
const AGAIN_AFTER: Duration = Duration::from_secs(300);

/// The same after another obstacle, which may be gone by then: a path without measurements, memory.
/// As long again with each further attempt, at most [`ATTEMPTS_MAX`] times.
const RETRY_AFTER: Duration = Duration::from_secs(5);
const ATTEMPTS_MAX: u32 = 12;

/// The owner's state between checks.
#[derive(Debug, Default)]
pub(super) struct NodeExpansion {
    /// Since when each instance is idle.
    quiet: BTreeMap<InstanceId, Instant>,
    /// Since when each node has been seen alive.
    alive: BTreeMap<NodeId, Instant>,
    /// The other placement of each instance, and since when there is one.
    offers: BTreeMap<InstanceId, (Vec<NodeId>, Instant)>,
    /// The last evaluated placements.
    tried: BTreeMap<InstanceId, Attempt>,
    /// Whether a thread is evaluating one.
    busy: Arc<AtomicBool>,
}

/// An evaluation of another placement.
#[derive(Debug)]
struct Attempt {
    nodes: Vec<NodeId>,
    at: Instant,
    /// Attempts with these nodes so far.
    count: u32,
    /// Set if the prediction did not suffice.
    is_slower: Arc<AtomicBool>,
}

/// Why an instance stays where it is.
#[derive(Debug)]
enum Refusal {
    /// The predicted speed on the other nodes, as a multiple of that now.
    Gain(f64),
    /// It may be possible soon.
    NotYet(String),
}

impl NodeExpansion {
    /// Updates which nodes are live and stay.
    fn saw(&mut self, views: &[NodeView], now: Instant) {
        let stays = |view: &&NodeView| view.state == Life::Alive && !view.facts.leaving;
        let there: BTreeSet<NodeId> = views.iter().filter(stays).map(|view| view.id).collect();
        self.alive.retain(|id, _| there.contains(id));
        for id in there {
            self.alive.entry(id).or_insert(now);
        }
    }

    /// Nodes with an uptime of [`LIVED`].
    fn settled(&self, now: Instant) -> BTreeSet<NodeId> {
        let lived = |since: &Instant| now.saturating_duration_since(*since) >= LIVED;
        let all = self.alive.iter().filter(|(_, since)| lived(since));
        all.map(|(id, _)| *id).collect()
    }

    /// Updates an instance's open requests; returns whether it has been idle for [`QUIET`].
    fn is_quiet(&mut self, id: InstanceId, open: usize, now: Instant) -> bool {
        if open > 0 {
            self.quiet.remove(&id);
            return false;
        }
        let since = *self.quiet.entry(id).or_insert(now);
        now.saturating_duration_since(since) >= QUIET
    }

    /// Records another placement of an instance; returns whether it was possible for [`BUSY`].
    fn has_waited(&mut self, id: InstanceId, nodes: &[NodeId], now: Instant) -> bool {
        let offer = self.offers.entry(id).or_insert((nodes.to_vec(), now));
        if offer.0 != nodes {
            *offer = (nodes.to_vec(), now);
        }
        now.saturating_duration_since(offer.1) >= BUSY
    }

    /// Whether this placement of an instance may be evaluated.
    fn is_due(&self, id: InstanceId, nodes: &[NodeId], now: Instant) -> bool {
        let is_over = |last: &Attempt| {
            let wait = match last.is_slower.load(Ordering::SeqCst) {
                true => AGAIN_AFTER,
                false => RETRY_AFTER * last.count.min(ATTEMPTS_MAX),
            };
            last.nodes != nodes || now.saturating_duration_since(last.at) >= wait
        };
        self.tried.get(&id).is_none_or(is_over) && !self.busy.load(Ordering::SeqCst)
    }

    /// Records that a placement is evaluated now.
    fn tries(&mut self, id: InstanceId, nodes: &[NodeId], now: Instant) -> Arc<AtomicBool> {
        let is_slower = Arc::<AtomicBool>::default();
        let before = self.tried.get(&id).filter(|last| last.nodes == nodes);
        let attempt = Attempt {
            nodes: nodes.to_vec(),
            at: now,
            count: before.map_or(1, |last| last.count.saturating_add(1)),
            is_slower: Arc::clone(&is_slower),
        };
        self.tried.insert(id, attempt);
        self.busy.store(true, Ordering::SeqCst);
        is_slower
    }

    fn keep(&mut self, ids: &BTreeSet<InstanceId>) {
        self.quiet.retain(|id, _| ids.contains(id));
        self.offers.retain(|id, _| ids.contains(id));
        self.tried.retain(|id, _| ids.contains(id));
    }
}

/// A ready instance and alternative nodes for it.
struct Chance {
    owned: OwnedInstance,
    instance: Arc<Instance>,
    nodes: Vec<NodeId>,
    /// Whether it moves although requests are open.
    in_use: bool,
    /// As of the [`Attempt`].
    is_slower: Arc<AtomicBool>,
}

impl Chance {
    /// Whether its user asked for more nodes than compute now, and these are more.
    fn is_asked(&self) -> bool {
        let count = |nodes: &[NodeId]| nodes.iter().collect::<BTreeSet<_>>().len();
        let (now, then) = (count(&self.owned.nodes_now()), count(&self.nodes));
        now < then && now < usize::from(self.owned.wanted.width.unwrap_or(0))
    }
}

impl Inner {
    /// Checks whether other nodes would make an instance of this node faster.
    pub(super) fn widen(self: &Arc<Self>, widening: &mut NodeExpansion, now: Instant) {
        if self.is_leaving() {
            return;
        }
        widening.saw(&self.agent.nodes(), now);
        let settled = widening.settled(now);
        let all = self.answering();
        widening.keep(&all.iter().map(|(owned, _)| owned.id).collect());
        for (owned, instance) in all {
            let (id, requests) = (owned.id, open(&instance));
            let is_quiet = widening.is_quiet(id, requests, now);
            let Some(nodes) = self.chance(&owned, &settled, now) else {
                widening.offers.remove(&id);
                owned.unused.refuse(None);
                continue;
            };
            let has_waited = widening.has_waited(id, &nodes, now);
            let in_use = has_waited && requests != usize::MAX && owned.is_exact();
            if !(is_quiet || in_use) || !widening.is_due(id, &nodes, now) {
                continue;
            }
            let chance = Chance {
                is_slower: widening.tries(id, &nodes, now),
                owned,
                instance,
                nodes,
                in_use,
            };
            self.take(chance, Arc::clone(&widening.busy));
        }
    }

    /// The ready instances of this node whose record is current.
    fn answering(&self) -> Vec<(OwnedInstance, Arc<Instance>)> {
        let owned = lock(&self.owned);
        let answering = owned.values().filter_map(|it| {
            let instance = it.answers.as_ref()?.instance()?;
            Some((it.owned.clone(), Arc::clone(instance)))
        });
        answering.collect()
    }

    /// Alternative nodes of an instance: a rank's own node that is back, an idle node for a dead
    /// one, or additional nodes as requested.
    fn chance(
        &self,
        owned: &OwnedInstance,
        settled: &BTreeSet<NodeId>,
        now: Instant,
    ) -> Option<Vec<NodeId>> {
        let wanted = &owned.wanted;
        if wanted.nodes.iter().any(|id| owned.flaps.is_out(*id, now)) {
            return None; // a new record would include it again
        }
        let at = |rank: u32| owned.flaps.node_of(Rank(rank));
        let mut homes = (0..).zip(&wanted.nodes);
        let is_back = |(rank, home): (u32, &NodeId)| {
            at(rank).is_some_and(|at| at != *home) && settled.contains(home)
        };
        let speaks = |nodes: &[NodeId]| {
            let broken = self.agent.broken_pairs(nodes);
            wanted.together(&broken, nodes).len() == nodes.len()
        };
        let mut nodes = wanted.nodes.clone();
        if homes.any(is_back) {
            return Some(nodes).filter(|nodes| speaks(nodes));
        }
        let lacks = usize::from(wanted.width.unwrap_or(0)).saturating_sub(nodes.len());
        let map = self.agent.map();
        let used: BTreeSet<NodeId> = placement::wanted(&map)
            .flat_map(|(.., wanted)| wanted.nodes.into_iter().chain(wanted.prompts))
            .collect();
        let (order, _) = self.ranked();
        // If its user named nodes, it moves to no others.
        let may = |id: &NodeId| !wanted.named || wanted.successors.contains(id);
        let idle = order.into_iter();
        let idle = idle.filter(|id| settled.contains(id) && !nodes.contains(id) && may(id));
        let mut idle: Vec<NodeId> = idle.collect();
        idle.sort_by_key(|id| used.contains(id)); // stable: keeps the order of routes
        let mut idle = idle.into_iter();
        let is_dead = |id: NodeId| matches!(self.agent.life(id), Life::Dead | Life::Left);
        for node in &mut nodes[1..] {
            if is_dead(*node)
                && let Some(other) = idle.next()
            {
                *node = other;
            }
        }
        nodes.extend(idle.take(lacks));
        (nodes != wanted.nodes && speaks(&nodes)).then_some(nodes)
    }

    /// Evaluates a chance on its own thread, since predictions take measurements.
    fn take(self: &Arc<Self>, chance: Chance, busy: Arc<AtomicBool>) {
        let (inner, done) = (Arc::clone(self), Arc::clone(&busy));
        let run = move || {
            let model = &chance.owned.wanted.model;
            let refused = inner.try_take(&chance).err().map(|refusal| match refusal {
                Refusal::Gain(gain) => {
                    chance.is_slower.store(true, Ordering::SeqCst);
                    format!("predicted {gain:.2} times as fast")
                }
                Refusal::NotYet(reason) => reason,
            });
            let names: Vec<String> = chance.nodes.iter().map(|id| inner.name(*id)).collect();
            let told = |reason| format!("it does not move to {}: {reason}", names.join(", "));
            let told = refused.map(told);
            if chance.owned.unused.refuse(told.clone())
                && let Some(told) = told
            {
                (inner.spec.tell)(&format!("{model}: {told}"));
            }
            done.store(false, Ordering::SeqCst);
        };
        let thread = std::thread::Builder::new().name("widen".to_owned());
        if let Err(error) = thread.spawn(run) {
            busy.store(false, Ordering::SeqCst);
            (self.spec.tell)(&format!("error: cannot start a thread: {error}"));
        }
    }

    /// Writes the next record if its user asked for the nodes, or the gain is sufficient.
    fn try_take(&self, chance: &Chance) -> Result<(), Refusal> {
        let (owned, nodes) = (&chance.owned, &chance.nodes);
        let (now, then) = self.predicted(owned, nodes).map_err(Refusal::NotYet)?;
        let gain = now.map(|now| then[0].decode_tok_s / now.max(f64::MIN_POSITIVE));
        match gain {
            _ if chance.is_asked() => {}
            Ok(gain) if gain >= GAIN => {}
            Ok(gain) => return Err(Refusal::Gain(gain)),
            Err(reason) => return Err(Refusal::NotYet(reason)),
        }
        if !chance.in_use && open(&chance.instance) > 0 {
            return Err(Refusal::NotYet("it is in use".to_owned()));
        }
        let next = next_record(&owned.wanted, nodes, &then);
        let written = self.want(owned.id, owned.epoch + 1, Some(&next));
        written.map_err(Refusal::NotYet)?;
        let names: Vec<String> = nodes.iter().map(|id| self.name(*id)).collect();
        let (model, names) = (&owned.wanted.model, names.join(", "));
        let gain = gain.map_or(String::new(), |gain| {
            format!(": {gain:.1} times as fast, as predicted")
        });
        (self.spec.tell)(&format!("{model} moves to {names}{gain}"));
        Ok(())
    }

    /// The predicted speed of an instance as it is, and its splits on `nodes`, fastest first. At
    /// least one, and one of each kind where its user left the split open.
    fn predicted(
        &self,
        owned: &OwnedInstance,
        nodes: &[NodeId],
    ) -> Result<(Result<f64, String>, Vec<Proposal>), String> {
        let wanted = &owned.wanted;
        let path = owner::path_of(self, wanted)?;
        let (source, config) = open_model(&path)?;
        let at = owned.nodes_now();
        let all: BTreeSet<NodeId> = nodes.iter().chain(&at).copied().collect();
        let all: Vec<NodeId> = all.into_iter().collect();
        self.measure_unknown(&all);
        let threads = usize::from(wanted.threads.max(1));
        let forecast = self.forecast(&source, &config, threads)?;
        let machines = self.machines(&all);
        let kind = wanted.split.parse().unwrap_or(SplitKind::Auto);
        let best = |ranks: &[NodeId], kind| {
            let class = |id: &NodeId| wanted.class_of(*id).parse().unwrap_or_default();
            let engines = EngineChoice::Given(ranks.iter().map(class).collect());
            let model = (&source, &config, &forecast);
            let like = (Some(owned.id), wanted);
            self.fastest(model, (kind, &engines), (ranks, &machines), like)
        };
        let then = match wanted.predicted.is_empty() {
            true => best(nodes, kind)?,
            false => best(nodes, SplitKind::Auto)?,
        };
        let rooms = self.rooms_beside(Some(owned.id), wanted);
        for (id, bytes) in nodes.iter().zip(&then[0].bytes) {
            let homes = wanted.nodes.iter().zip(&at).filter(|(_, at)| *at == id);
            let held: u64 = homes.map(|(home, _)| own_part(wanted, *home)).sum();
            let room = rooms.get(id).map(|room| room.saturating_sub(held));
            if room.is_some_and(|room| room < *bytes) {
                let name = self.name(*id);
                return Err(format!("{name} has no memory for both placements"));
            }
        }
        Ok((best(&at, kind).map(|now| now[0].decode_tok_s), then))
    }

    /// The predictions for splits over `nodes`, the fastest that fits first.
    fn fastest(
        &self,
        model: (&ModelSource, &Config, &Forecast),
        wishes: Wishes<'_>,
        nodes: proposals::Nodes<'_>,
        like: proposals::Like<'_>,
    ) -> Result<Vec<Proposal>, String> {
        let (proposals, mut reasons) = self.proposals(model, wishes, nodes, like);
        match proposals.first().is_some_and(|first| first.fits) {
            true => Ok(proposals),
            false => Err(reasons.pop().unwrap_or_else(|| "no split fits".to_owned())),
        }
    }
}

impl OwnedInstance {
    /// Whether the bits of its answers depend on no placement.
    fn is_exact(&self) -> bool {
        let mut classes = self
            .wanted
            .nodes
            .iter()
            .map(|id| self.wanted.class_of(*id).parse());
        classes.all(|class| class.is_ok_and(KernelClass::is_exact))
    }
}

/// Open requests of an instance; `usize::MAX` if it does not answer.
fn open(instance: &Instance) -> usize {
    let status = instance.status();
    match status.state {
        State::Ready => status.running + status.waiting,
        _ => usize::MAX,
    }
}

pub(super) fn open_model(path: &Path) -> Result<(ModelSource, Config), String> {
    let source = ModelSource::open(path).map_err(|error| error.to_string())?;
    let config = Config::read(&source).map_err(|error| error.to_string())?;
    Ok((source, config))
}

/// The spec with these nodes and the first split of `then`; its former owners and successors come
/// first.
fn next_record(wanted: &InstanceSpec, nodes: &[NodeId], then: &[Proposal]) -> InstanceSpec {
    let mut next = wanted.clone();
    next.split.clone_from(&then[0].split);
    if !wanted.predicted.is_empty() {
        next.predicted = predictions(then);
    }
    next.shares = then[0].shares_of(nodes);
    next.needs = BTreeMap::new(); // of the former split
    let new = nodes[1..]
        .iter()
        .filter(|id| !wanted.successors.contains(id));
    next.successors.extend(new.copied());
    next.nodes = nodes.to_vec();
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    #[test]
    fn a_moment_is_quiet_after_a_while_without_requests() {
        let (mut widening, start, id) = (NodeExpansion::default(), Instant::now(), InstanceId(3));
        let mut quiet = |s: u64, open| {
            let now = start + Duration::from_secs(s);
            widening.is_quiet(id, open, now)
        };
        assert!(!quiet(0, 0));
        assert!(!quiet(9, 0));
        assert!(quiet(10, 0));
        assert!(!quiet(11, 1));
        assert!(!quiet(12, 0));
        assert!(!quiet(21, 0));
        assert!(quiet(22, 0));
    }

    #[test]
    fn an_open_split_is_chosen_again_for_other_nodes() {
        let of = |split: &str, tok_s| Proposal {
            split: split.to_owned(),
            decode_tok_s: tok_s,
            fits: true,
            ..Proposal::default()
        };
        let then = [of("pipeline", 6.25), of("tensor", 0.5)];
        let mut wanted = InstanceSpec {
            split: "tensor".to_owned(),
            nodes: vec![node(1), node(2)],
            ..InstanceSpec::default()
        };
        let nodes = [1, 2, 3].map(node);
        let named = next_record(&wanted, &nodes, &then[1..]);
        assert_eq!((&*named.split, named.predicted.len()), ("tensor", 0));
        wanted.predicted.insert("tensor".to_owned(), 20_000);
        let next = next_record(&wanted, &nodes, &then);
        let predicted = [("pipeline".to_owned(), 6250), ("tensor".to_owned(), 500)];
        assert_eq!((&*next.split, next.nodes), ("pipeline", nodes.to_vec()));
        assert_eq!(next.predicted, predicted.into());
    }

    #[test]
    fn a_node_that_comes_and_goes_is_not_used() {
        let (mut widening, start) = (NodeExpansion::default(), Instant::now());
        let view = |state| NodeView {
            id: node(1),
            state,
            found_by: String::new(),
            heard_by: Vec::new(),
            linked: true,
            slow_ms: None,
            facts: paceline_cluster::nodes::agent::NodeFacts::default(),
        };
        let mut settled = |s: u64, state| {
            let now = start + Duration::from_secs(s);
            widening.saw(&[view(state)], now);
            widening.settled(now).len()
        };
        assert_eq!(settled(0, Life::Alive), 0);
        assert_eq!(settled(7, Life::Alive), 0);
        assert_eq!(settled(7, Life::Dead), 0);
        assert_eq!(settled(8, Life::Alive), 0);
        assert_eq!(settled(16, Life::Alive), 1);
    }

    #[test]
    fn an_instance_is_looked_at_now_and_then_and_one_at_a_time() {
        let (mut widening, start, id) = (NodeExpansion::default(), Instant::now(), InstanceId(3));
        let after = |wait: Duration| start + wait;
        let (two, three) = ([1, 2].map(node), [1, 2, 3].map(node));
        assert!(widening.is_due(id, &two, start));
        widening.tries(id, &two, start);
        assert!(!widening.is_due(id, &three, start), "one at a time");
        widening.busy.store(false, Ordering::SeqCst);
        assert!(!widening.is_due(id, &two, after(RETRY_AFTER / 2)));
        assert!(
            widening.is_due(id, &two, after(RETRY_AFTER)),
            "it may be possible now"
        );
        let is_slower = widening.tries(id, &two, start);
        widening.busy.store(false, Ordering::SeqCst);
        assert!(!widening.is_due(id, &two, after(RETRY_AFTER)), "less often");
        assert!(widening.is_due(id, &two, after(2 * RETRY_AFTER)));
        is_slower.store(true, Ordering::SeqCst);
        assert!(!widening.is_due(id, &two, after(AGAIN_AFTER / 2)));
        assert!(widening.is_due(id, &two, after(AGAIN_AFTER)));
        assert!(widening.is_due(id, &three, start), "another placement");
    }

    /// Of the 30 s until a returned machine is used, a load has ten left.
    #[test]
    fn an_instance_in_use_waits_for_a_quiet_moment_for_a_while() {
        let (mut widening, start, id) = (NodeExpansion::default(), Instant::now(), InstanceId(3));
        let (two, three) = ([1, 2].map(node), [1, 2, 3].map(node));
        let waited = |widening: &mut NodeExpansion, nodes: &[NodeId], s| {
            widening.has_waited(id, nodes, start + Duration::from_secs(s))
        };
        assert!(!waited(&mut widening, &two, 0));
        assert!(!waited(&mut widening, &two, 5) && waited(&mut widening, &two, 6));
        assert!(!waited(&mut widening, &three, 7), "another one begins anew");
        assert!(waited(&mut widening, &three, 13));
        assert!(LIVED + BUSY.max(QUIET) <= Duration::from_secs(20));
    }
}
