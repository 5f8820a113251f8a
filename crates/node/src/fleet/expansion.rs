//! Expansion: moves instances to new or returned nodes when they are idle.
//!
//! ```text
//! a node dies      its ranks run on the nodes that are left    it comes back, or an idle one is
//!                                                              there: they run there
//! an owner dies,   the next record has fewer nodes than the    nodes come that compute nothing:
//! a node leaves    user asked for                              they are added
//! ```
//! The owner of an instance checks once a second. If no request was open for [`QUIET`] and the
//! predicted gain of another placement is at least [`GAIN`], it writes the next record. The
//! previous instance answers until the new one does, so a request waits for one handover and not
//! for a load. Both need memory at the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_cluster::nodes::agent::NodeView;
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::placement::{self, InstanceSpec};
use paceline_cluster::nodes::{InstanceId, NodeId};
use paceline_engine::{Service, State};
use paceline_model::{Config, ModelSource, SplitKind};

use super::owner::{self, OwnedInstance};
use super::preview::Proposal;
use super::proposals::Wishes;
use super::{Inner, proposals};
use crate::Instance;
use crate::classes::EngineChoice;
use crate::forecast::Forecast;

/// Idle time before a placement changes. The next question of a chat may take longer and then waits
/// for a handover.
const QUIET: Duration = Duration::from_secs(10);

/// Uptime before a node is used: one that restarts repeatedly is no gain.
const LIVED: Duration = Duration::from_secs(30);

/// Minimum predicted speedup: predictions are off by as much.
const GAIN: f64 = 1.15;

/// Time before another placement of the same instance is evaluated: a load costs seconds to
/// minutes.
const AGAIN_AFTER: Duration = Duration::from_secs(300);

/// The owner's state between checks.
#[derive(Debug, Default)]
pub(super) struct NodeExpansion {
    /// Since when each instance is idle.
    quiet: BTreeMap<InstanceId, Instant>,
    /// Since when each node has been seen alive.
    alive: BTreeMap<NodeId, Instant>,
    /// When another placement was last evaluated.
    tried: BTreeMap<InstanceId, Instant>,
    /// Whether a thread is evaluating one.
    busy: Arc<AtomicBool>,
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

    /// Whether another placement of an instance may be evaluated.
    fn is_due(&self, id: InstanceId, now: Instant) -> bool {
        let last = self.tried.get(&id);
        let last = last.map(|at| now.saturating_duration_since(*at));
        last.is_none_or(|last| last >= AGAIN_AFTER) && !self.busy.load(Ordering::SeqCst)
    }

    fn keep(&mut self, ids: &BTreeSet<InstanceId>) {
        self.quiet.retain(|id, _| ids.contains(id));
        self.tried.retain(|id, _| ids.contains(id));
    }
}

/// A ready instance and alternative nodes for it.
struct Chance {
    owned: OwnedInstance,
    instance: Arc<Instance>,
    nodes: Vec<NodeId>,
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
            let id = owned.id;
            let is_quiet = widening.is_quiet(id, open(&instance), now);
            if !is_quiet || !widening.is_due(id, now) {
                continue;
            }
            if let Some(nodes) = self.chance(&owned, &settled, Instant::now()) {
                widening.tried.insert(id, now);
                widening.busy.store(true, Ordering::SeqCst);
                let chance = Chance {
                    owned,
                    instance,
                    nodes,
                };
                self.take(chance, Arc::clone(&widening.busy));
            }
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
        let mut nodes = wanted.nodes.clone();
        if homes.any(is_back) {
            return Some(nodes);
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
        let mut idle = idle.filter(|id| settled.contains(id) && !used.contains(id) && may(id));
        let is_dead = |id: NodeId| matches!(self.agent.life(id), Life::Dead | Life::Left);
        for node in &mut nodes[1..] {
            if is_dead(*node)
                && let Some(other) = idle.next()
            {
                *node = other;
            }
        }
        nodes.extend(idle.take(lacks));
        (nodes != wanted.nodes).then_some(nodes)
    }

    /// Evaluates a chance on its own thread, since predictions take measurements.
    fn take(self: &Arc<Self>, chance: Chance, busy: Arc<AtomicBool>) {
        let (inner, done) = (Arc::clone(self), Arc::clone(&busy));
        let run = move || {
            let model = &chance.owned.wanted.model;
            if let Err(reason) = inner.try_take(&chance) {
                (inner.spec.tell)(&format!("{model} stays on its machines: {reason}"));
            }
            done.store(false, Ordering::SeqCst);
        };
        let thread = std::thread::Builder::new().name("widen".to_owned());
        if let Err(error) = thread.spawn(run) {
            busy.store(false, Ordering::SeqCst);
            (self.spec.tell)(&format!("error: cannot start a thread: {error}"));
        }
    }

    /// Writes the next record if the gain is sufficient.
    fn try_take(&self, chance: &Chance) -> Result<(), String> {
        let (owned, nodes) = (&chance.owned, &chance.nodes);
        let (gain, then) = self.gain(owned, nodes)?;
        if gain < GAIN {
            return Err(format!("others would be {gain:.2} times as fast"));
        }
        if open(&chance.instance) > 0 {
            return Err("it is in use".to_owned());
        }
        let next = next_record(&owned.wanted, nodes, &then);
        self.want(owned.id, owned.epoch + 1, Some(&next))?;
        let names: Vec<String> = nodes.iter().map(|id| self.name(*id)).collect();
        let (model, names) = (&owned.wanted.model, names.join(", "));
        (self.spec.tell)(&format!(
            "{model} moves to {names}: {gain:.1} times as fast, as predicted"
        ));
        Ok(())
    }

    /// The predicted speedup of an instance on `nodes`, and its split there.
    fn gain(&self, owned: &OwnedInstance, nodes: &[NodeId]) -> Result<(f64, Proposal), String> {
        let wanted = &owned.wanted;
        let path = owner::path_of(self, wanted)?;
        let (source, config) = open_model(&path)?;
        let ranks = (0..).map(Rank).zip(&wanted.nodes);
        let at: Vec<NodeId> = ranks
            .map(|(rank, home)| owned.flaps.node_of(rank).unwrap_or(*home))
            .collect();
        let all: BTreeSet<NodeId> = nodes.iter().chain(&at).copied().collect();
        let all: Vec<NodeId> = all.into_iter().collect();
        self.measure_unknown(&all);
        let threads = usize::from(wanted.threads.max(1));
        let forecast = self.forecast(&source, &config, threads)?;
        let machines = self.machines(&all);
        let kind = wanted.split.parse().unwrap_or(SplitKind::Auto);
        let best = |ranks: &[NodeId]| {
            let class = |id: &NodeId| wanted.class_of(*id).parse().unwrap_or_default();
            let engines = EngineChoice::Given(ranks.iter().map(class).collect());
            self.fastest((&config, &forecast), (kind, &engines), (ranks, &machines))
        };
        let now = best(&at)?;
        let then = best(nodes)?;
        let rooms = self.rooms_beside(None, wanted);
        for (id, bytes) in nodes.iter().zip(&then.bytes) {
            if rooms.get(id).is_some_and(|room| room < bytes) {
                let name = self.name(*id);
                return Err(format!("{name} has no memory for both placements"));
            }
        }
        let gain = then.decode_tok_s / now.decode_tok_s.max(f64::MIN_POSITIVE);
        Ok((gain, then))
    }

    /// The prediction for the fastest split over `nodes` that fits.
    fn fastest(
        &self,
        model: (&Config, &Forecast),
        wishes: Wishes<'_>,
        nodes: proposals::Nodes<'_>,
    ) -> Result<Proposal, String> {
        let (proposals, mut reasons) = self.proposals(model, wishes, nodes);
        let first = proposals.into_iter().next().filter(|it| it.fits);
        first.ok_or_else(|| reasons.pop().unwrap_or_else(|| "no split fits".to_owned()))
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

fn open_model(path: &Path) -> Result<(ModelSource, Config), String> {
    let source = ModelSource::open(path).map_err(|error| error.to_string())?;
    let config = Config::read(&source).map_err(|error| error.to_string())?;
    Ok((source, config))
}

/// The spec with these nodes and the split of `then`; its former owners and successors come first.
fn next_record(wanted: &InstanceSpec, nodes: &[NodeId], then: &Proposal) -> InstanceSpec {
    let mut next = wanted.clone();
    next.split.clone_from(&then.split);
    next.shares = then.shares_of(nodes);
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
        assert_eq!(settled(29, Life::Alive), 0);
        assert_eq!(settled(29, Life::Dead), 0);
        assert_eq!(settled(30, Life::Alive), 0);
        assert_eq!(settled(60, Life::Alive), 1);
    }

    #[test]
    fn an_instance_is_looked_at_now_and_then_and_one_at_a_time() {
        let (mut widening, start, id) = (NodeExpansion::default(), Instant::now(), InstanceId(3));
        assert!(widening.is_due(id, start));
        widening.tried.insert(id, start);
        assert!(!widening.is_due(id, start + Duration::from_secs(299)));
        assert!(widening.is_due(id, start + AGAIN_AFTER));
        widening.busy.store(true, Ordering::SeqCst);
        assert!(!widening.is_due(id, start + AGAIN_AFTER));
    }
}
