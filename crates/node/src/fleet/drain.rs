//! Drain: moves the work of a node to others before the node leaves.
//!
//! ```text
//! leaver   says so in its facts                 others hand nothing to it
//! leaver   has the next owner copy the model    ... where it lacks it
//! leaver   writes a record without itself       the record's owner starts its instance
//! leaver   answers on, if it was the owner      ... which becomes ready
//! entries  see their line close                 hand their requests to the new owner
//! ```
//! The previous record's instance answers until the new one does, so that streams wait for one
//! handover and not for a load.
//!
//! Two draining nodes may hand their work to each other before either reads the other's facts. So a
//! draining node follows each instance until another node answers with it. It hands the instance
//! over again if that owner died, and gives up at once if no staying node is left.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::nodes::agent::NodeView;
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::placement::{self, InstanceSpec, Report, State};
use paceline_cluster::nodes::{InstanceId, NodeId, Registers};

use super::{Inner, copies, report};

/// Interval of reports while it waits.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Poll interval of the map.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Longest wait for connections to the previous instance to close: each ingress checks every 200
/// ms.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Longest wait for nodes to report whether they have a model: a handshake and a folder listing. A
/// node that must hash a large file takes longer and counts as lacking it.
const ASK_LIMIT: Duration = Duration::from_secs(2);

/// A drained node has left by then: `up` gives its answers 5 s, and `paceline leave` removes the
/// node at once. A node that is still there takes work again.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// Whether a node can take work over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DrainStatus {
    Stays,
    Leaves,
    Gone,
}

/// Next step for an instance that this node hands over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DrainStep {
    /// Done: other nodes answer, or it was unloaded.
    Moved,
    /// Wait: its owner is loading it, or a successor takes it over.
    Waits,
    /// Wait while there are staying nodes: its owner is draining too and hands it over.
    Passing,
    /// Hand it to another node.
    Homeless,
    /// Give up: no node can take it.
    Stuck,
}

/// Deadline of a drain, and the callback about its progress.
struct DrainDeadline<'a> {
    until: Instant,
    told: Instant,
    wait: &'a mut dyn FnMut(),
}

impl DrainDeadline<'_> {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Whether time is left. Call it at least once a second.
    fn goes_on(&mut self) -> bool {
        if self.told.elapsed() >= TELL_EVERY {
            self.told = Instant::now();
            (self.wait)();
        }
        !self.left().is_zero()
    }
}

impl Inner {
    pub(super) fn is_leaving(&self) -> bool {
        self.agent.is_leaving()
    }

    pub(super) fn runs(&self, id: InstanceId) -> bool {
        self.ready_instance(id).is_some()
    }

    /// Whether this node answers with an instance although another owns it, which is not ready.
    pub(super) fn bridges(&self, map: &Registers, id: InstanceId) -> bool {
        if !self.is_leaving() {
            return false;
        }
        let record = placement::wanted(map).find(|(other, ..)| *other == id);
        record.is_some_and(|(_, epoch, _)| !is_in(map, id, epoch, State::Ready))
    }

    /// As [`Fleet::leave`](super::Fleet::leave).
    pub(super) fn leave(&self, limit: Duration, wait: &mut dyn FnMut()) -> Vec<String> {
        *lock(&self.left) = None;
        self.agent.set_leaving(true);
        let told = Instant::now();
        let until = told + limit;
        let stuck = self.move_all(DrainDeadline { until, told, wait });
        match stuck.is_empty() {
            // It still drains: another draining node must not hand work to it.
            true => *lock(&self.left) = Some(Instant::now()),
            false => self.agent.set_leaving(false),
        }
        stuck
    }

    /// Takes work again if this node still runs after its drain.
    pub(super) fn stay(&self) {
        let is_late = |at: &mut Instant| at.elapsed() >= GONE_WITHIN;
        let stays = lock(&self.left).take_if(is_late).is_some();
        if stays && !self.rests.load(Ordering::SeqCst) {
            self.agent.set_leaving(false);
        }
    }

    fn move_all(&self, mut patience: DrainDeadline<'_>) -> Vec<String> {
        if self.is_last() {
            return Vec::new();
        }
        let mut open = self.work();
        let mut stuck: BTreeMap<InstanceId, String> = BTreeMap::new();
        loop {
            open.retain(|id, model| {
                let fate = self.look_after(*id, &mut patience);
                if fate == DrainStep::Stuck {
                    stuck.insert(*id, model.clone());
                }
                !matches!(fate, DrainStep::Moved | DrainStep::Stuck)
            });
            if open.is_empty() || !patience.goes_on() {
                break;
            }
            std::thread::sleep(LOOK_EVERY);
            // Instances that another draining node handed to this node meanwhile.
            let work = self.work().into_iter();
            open.extend(work.filter(|(id, _)| !stuck.contains_key(id)));
        }
        stuck.extend(open);
        self.close_bridges();
        stuck.into_values().collect()
    }

    /// Whether no other node can take work. Logs it if other nodes exist but drain too.
    pub(super) fn is_last(&self) -> bool {
        let own = self.agent.id();
        let mut others = self.agent.nodes();
        others.retain(|node| node.id != own && node.state == Life::Alive);
        let is_last = others.iter().all(|node| node.facts.leaving);
        if is_last && !others.is_empty() && !self.work().is_empty() {
            (self.spec.tell)("all other machines leave too: this one's models move to none");
        }
        is_last
    }

    /// Instances with this node, and the users' names for their models. Those that it leases end
    /// with it.
    fn work(&self) -> BTreeMap<InstanceId, String> {
        let (own, map) = (self.agent.id(), self.agent.map());
        let all = placement::wanted(&map).filter(|(.., wanted)| wanted.nodes.contains(&own));
        let all = all.filter(|(.., wanted)| wanted.lender != Some(own));
        all.map(|(id, _, wanted)| (id, wanted.model)).collect()
    }

    /// Takes the next step for an instance.
    fn look_after(&self, id: InstanceId, patience: &mut DrainDeadline<'_>) -> DrainStep {
        let (own, map, nodes) = (self.agent.id(), self.agent.map(), self.agent.nodes());
        let found = placement::wanted(&map).find(|(other, ..)| *other == id);
        let record = found.as_ref().map(|(_, epoch, wanted)| (*epoch, wanted));
        let told = report(&map, id);
        let fate = fate(own, record, told.as_ref(), |id| stand(&nodes, id));
        match (fate, record) {
            (DrainStep::Homeless, Some((epoch, wanted))) => {
                match self.transfer_ownership((id, epoch), wanted, patience) {
                    true => DrainStep::Waits,
                    false => DrainStep::Stuck,
                }
            }
            (DrainStep::Passing, Some((_, wanted))) if self.heirs(wanted).is_empty() => {
                DrainStep::Stuck
            }
            (fate, _) => fate,
        }
    }

    /// Other live nodes that stay. They have this node's numerics or are part of the instance
    /// already, so that answers stay the same.
    fn heirs(&self, wanted: &InstanceSpec) -> Vec<NodeId> {
        let (own, nodes) = (self.agent.id(), self.agent.nodes());
        let (mut heirs, _) = self.ranked();
        heirs.retain(|id| *id != own);
        let others = nodes
            .iter()
            .filter(|node| node.id != own && !node.facts.leaving);
        let others = others.filter(|node| node.state == Life::Alive);
        for member in others.filter(|node| wanted.nodes.contains(&node.id)) {
            if !heirs.contains(&member.id) {
                heirs.push(member.id);
            }
        }
        heirs
    }

    /// Hands an instance to other nodes; false if none can take it. Waits until the next owner has
    /// the model.
    fn transfer_ownership(
        &self,
        at: (InstanceId, u64),
        wanted: &InstanceSpec,
        patience: &mut DrainDeadline<'_>,
    ) -> bool {
        let heirs = self.heirs(wanted);
        let owner = wanted.nodes[0];
        if heirs.contains(&owner) {
            return self.give(at, wanted, &heirs, owner);
        }
        let limit = patience.left().min(ASK_LIMIT);
        let has = copies::holders(&self.agent, &heirs, wanted, limit);
        let order = by_preference(heirs.clone(), &wanted.successors, &has);
        let takes = |heir: &NodeId| {
            if !self.equip(*heir, wanted, patience) {
                return false;
            }
            // A large model takes minutes to copy: another node may have left meanwhile.
            let heirs = self.heirs(wanted);
            heirs.contains(heir) && self.give(at, wanted, &heirs, *heir)
        };
        order.iter().any(takes)
    }

    /// Makes a node fetch the model of an instance; whether it has it within the time left.
    fn equip(&self, heir: NodeId, wanted: &InstanceSpec, patience: &mut DrainDeadline<'_>) -> bool {
        let limit = patience.left();
        if limit.is_zero() {
            return false;
        }
        let mut goes_on = || patience.goes_on();
        let had = copies::ensure_while(&self.agent, heir, wanted, limit, &mut goes_on);
        if let Err(reason) = &had {
            let (name, model) = (self.name(heir), &wanted.model);
            (self.spec.tell)(&format!("{name} cannot take over {model}: {reason}"));
        }
        had.is_ok()
    }

    /// Writes the next record without this node, with an owner from `heirs`. Returns whether a
    /// newer record exists now.
    fn give(
        &self,
        (id, epoch): (InstanceId, u64),
        wanted: &InstanceSpec,
        heirs: &[NodeId],
        owner: NodeId,
    ) -> bool {
        if self.epoch_of(id) != Some(epoch) {
            return true; // during the copy a newer record was written, or it was unloaded
        }
        let mut before = wanted.clone();
        if before.nodes[0] != owner {
            // The first successor replaces the departing owner.
            before.successors.retain(|other| *other != owner);
            before.successors.insert(0, owner);
        }
        let life = |id| match heirs.contains(&id) {
            true => Life::Alive,
            false => Life::Left,
        };
        let next = placement::without(before, self.agent.id(), &[], life);
        let written = next.map(|next| self.want(id, epoch + 1, Some(&next)));
        // Refused if another node wrote first; its record is handled next.
        matches!(written, Some(Ok(()))) || self.epoch_of(id).is_none_or(|now| now > epoch)
    }

    /// The epoch of an instance's record; `None` once it is unloaded.
    fn epoch_of(&self, id: InstanceId) -> Option<u64> {
        let map = self.agent.map();
        let record = placement::wanted(&map).find(|(other, ..)| *other == id);
        record.map(|(_, epoch, _)| epoch)
    }

    /// Waits until no ingress uses the instances that this node bridged.
    fn close_bridges(&self) {
        let begun = Instant::now();
        let own = self.agent.id();
        let bridges = || {
            let map = self.agent.map();
            let others = placement::wanted(&map).filter(|(.., wanted)| wanted.nodes[0] != own);
            others.filter(|(id, ..)| self.runs(*id)).count()
        };
        while bridges() > 0 && begun.elapsed() < CLOSE_LIMIT {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Whether the owner of a record reports this state.
fn is_in(map: &Registers, id: InstanceId, epoch: u64, state: State) -> bool {
    report(map, id).is_some_and(|it| it.epoch >= epoch && it.state == state)
}

/// Status of the node with this id, from the known nodes.
fn stand(nodes: &[NodeView], id: NodeId) -> DrainStatus {
    let lives = |node: &&NodeView| matches!(node.state, Life::Alive | Life::Suspect);
    match nodes.iter().filter(lives).find(|node| node.id == id) {
        Some(node) if node.facts.leaving => DrainStatus::Leaves,
        Some(_) => DrainStatus::Stays,
        None => DrainStatus::Gone,
    }
}

/// Next step for an instance that node `own` hands over, from its record with the epoch and its
/// owner's report.
fn fate(
    own: NodeId,
    record: Option<(u64, &InstanceSpec)>,
    told: Option<&Report>,
    stand: impl Fn(NodeId) -> DrainStatus,
) -> DrainStep {
    let Some((epoch, wanted)) = record else {
        return DrainStep::Moved;
    };
    if wanted.nodes.contains(&own) {
        return DrainStep::Homeless;
    }
    let state = told.filter(|it| it.epoch >= epoch).map(|it| it.state);
    match (stand(wanted.nodes[0]), state) {
        (DrainStatus::Gone, _) => {
            // A draining successor takes nothing over.
            let mut stands = wanted.successors.iter().map(|id| stand(*id));
            match stands.find(|it| *it != DrainStatus::Gone) {
                Some(DrainStatus::Stays) => DrainStep::Waits,
                _ => DrainStep::Homeless,
            }
        }
        (_, Some(State::Ready)) => DrainStep::Moved,
        (_, Some(State::Failed)) => DrainStep::Stuck,
        (DrainStatus::Leaves, _) => DrainStep::Passing,
        (DrainStatus::Stays, _) => DrainStep::Waits,
    }
}

/// Possible owners of an instance: first nodes with its model, then its successors in order.
fn by_preference(
    mut heirs: Vec<NodeId>,
    successors: &[NodeId],
    has: &BTreeSet<NodeId>,
) -> Vec<NodeId> {
    let place = |id: &NodeId| {
        let at = successors.iter().position(|other| other == id);
        at.unwrap_or(usize::MAX)
    };
    heirs.sort_by_key(|id| (!has.contains(id), place(id)));
    heirs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    fn wanted(nodes: &[u8], successors: &[u8]) -> InstanceSpec {
        InstanceSpec {
            model: "smollm2".to_owned(),
            nodes: nodes.iter().map(|number| node(*number)).collect(),
            successors: successors.iter().map(|number| node(*number)).collect(),
            split: "auto".to_owned(),
            threads: 1,
            ..InstanceSpec::default()
        }
    }

    /// Step for an instance of node 15 at epoch 3; nodes from 8 on are draining, those from 16 on
    /// are gone.
    fn fate_of(nodes: &[u8], successors: &[u8], told: Option<(u64, State)>) -> DrainStep {
        let stand = |id: NodeId| match id.0[0] {
            0..8 => DrainStatus::Stays,
            8..16 => DrainStatus::Leaves,
            16.. => DrainStatus::Gone,
        };
        let told = told.map(|(epoch, state)| Report {
            epoch,
            state,
            progress: None,
            wires: None,
            reason: None,
            computing: Vec::new(),
            context: None,
            numbers: None,
            split: None,
        });
        let wanted = wanted(nodes, successors);
        fate(node(15), Some((3, &wanted)), told.as_ref(), stand)
    }

    #[test]
    fn work_is_followed_until_another_node_answers() {
        assert_eq!(
            fate(node(15), None, None, |_| DrainStatus::Gone),
            DrainStep::Moved
        );
        assert_eq!(fate_of(&[2, 15], &[15], None), DrainStep::Homeless);
        assert_eq!(fate_of(&[2], &[15], None), DrainStep::Waits);
        let before = Some((2, State::Ready));
        assert_eq!(
            fate_of(&[2], &[15], before),
            DrainStep::Waits,
            "of another epoch"
        );
        assert_eq!(
            fate_of(&[2], &[15], Some((3, State::Loading))),
            DrainStep::Waits
        );
        assert_eq!(
            fate_of(&[2], &[15], Some((3, State::Ready))),
            DrainStep::Moved
        );
        assert_eq!(
            fate_of(&[2], &[15], Some((3, State::Failed))),
            DrainStep::Stuck
        );
    }

    #[test]
    fn two_that_leave_do_not_wait_for_each_other() {
        assert_eq!(fate_of(&[8], &[15], None), DrainStep::Passing);
        assert_eq!(fate_of(&[8, 2], &[2, 15], None), DrainStep::Passing);
        assert_eq!(
            fate_of(&[8], &[15], Some((3, State::Ready))),
            DrainStep::Moved
        );
        assert_eq!(fate_of(&[16], &[15], None), DrainStep::Homeless);
        assert_eq!(fate_of(&[16], &[8, 2], None), DrainStep::Homeless);
        assert_eq!(
            fate_of(&[16], &[17, 2], None),
            DrainStep::Waits,
            "2 takes over"
        );
        let told = Some((3, State::Ready));
        assert_eq!(
            fate_of(&[16], &[], told),
            DrainStep::Homeless,
            "it was ready"
        );
    }

    #[test]
    fn those_that_have_the_model_come_first() {
        let heirs = vec![node(2), node(3), node(4), node(5)];
        let has = BTreeSet::from([node(4), node(5)]);
        let order = by_preference(heirs.clone(), &[node(3), node(5)], &has);
        assert_eq!(order, [node(5), node(4), node(3), node(2)]);
        let order = by_preference(heirs, &[], &BTreeSet::new());
        assert_eq!(order, [node(2), node(3), node(4), node(5)]);
    }
}
