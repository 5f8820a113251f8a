//! Moves the work of a node to others before the node goes.
//!
//! ```text
//! leaver   says so in its facts                 others hand nothing to it
//! leaver   has the next owner copy the model    ... where it lacks it
//! leaver   writes a record without itself       the record's owner starts its instance
//! leaver   answers on, if it was the owner      ... which becomes ready
//! entries  see their line close                 hand their requests to the new owner
//! ```
//! The instance of the record before answers until the new one does, so that streams wait for one
//! hand-over and not for a load.
//!
//! Two nodes that leave at once may hand their work to each other before either reads the other's
//! facts. So the leaver follows each instance until another node answers with it. It hands an
//! instance on again whose owner died, and gives up at once where no node is left that stays.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::nodes::agent::NodeView;
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::placement::{self, Report, State, Wanted};
use paceline_cluster::nodes::{InstanceId, NodeId, Registers};

use super::{Inner, copies, report};

/// Between two reports that it still waits.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Between two looks at the map.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long lines to the instance before need to be closed: entries look every 200 ms.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Longest wait for nodes to say whether they have a model: a handshake and a look at a folder. A
/// node that hashes a large file for that takes longer, and counts as one that lacks it.
const ASK_LIMIT: Duration = Duration::from_secs(2);

/// A node whose work has moved is gone by then, since `up` gives its answers 5 s. And
/// `paceline leave` takes the node out of its cluster at once. A node that is still there stays.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// Whether a node can take work over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stand {
    Stays,
    Leaves,
    Gone,
}

/// Next step for an instance that this node hands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Nothing: others answer, or nobody wants it any more.
    Moved,
    /// Wait: its owner gets it ready, or a successor takes it over.
    Waits,
    /// Wait while there are nodes that stay: its owner leaves too, and hands it on.
    Passing,
    /// Give it to another node.
    Homeless,
    /// Nothing: nobody can have it.
    Stuck,
}

/// Time that is left for a leave, and what hears that it goes by.
struct Patience<'a> {
    until: Instant,
    told: Instant,
    wait: &'a mut dyn FnMut(),
}

impl Patience<'_> {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Whether time is left. Called at least once a second.
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
        let stuck = self.move_all(Patience { until, told, wait });
        match stuck.is_empty() {
            // It still leaves: a node that leaves after it must not hand anything to it.
            true => *lock(&self.left) = Some(Instant::now()),
            false => self.agent.set_leaving(false),
        }
        stuck
    }

    /// Takes work again if this node is still there after its work has moved.
    pub(super) fn stay(&self) {
        let is_late = |at: &mut Instant| at.elapsed() >= GONE_WITHIN;
        let stays = lock(&self.left).take_if(is_late).is_some();
        if stays && !self.rests.load(Ordering::SeqCst) {
            self.agent.set_leaving(false);
        }
    }

    fn move_all(&self, mut patience: Patience<'_>) -> Vec<String> {
        if self.is_last() {
            return Vec::new();
        }
        let mut open = self.work();
        let mut stuck: BTreeMap<InstanceId, String> = BTreeMap::new();
        loop {
            open.retain(|id, model| {
                let fate = self.look_after(*id, &mut patience);
                if fate == Fate::Stuck {
                    stuck.insert(*id, model.clone());
                }
                !matches!(fate, Fate::Moved | Fate::Stuck)
            });
            if open.is_empty() || !patience.goes_on() {
                break;
            }
            std::thread::sleep(LOOK_EVERY);
            // Instances that another leaving node has handed to this node meanwhile.
            let work = self.work().into_iter();
            open.extend(work.filter(|(id, _)| !stuck.contains_key(id)));
        }
        stuck.extend(open);
        self.close_bridges();
        stuck.into_values().collect()
    }

    /// Whether no other node is left to do anything. Says so if others are there and leave too.
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

    /// Instances that this node is part of, and what their users call the models.
    fn work(&self) -> BTreeMap<InstanceId, String> {
        let (own, map) = (self.agent.id(), self.agent.map());
        let all = placement::wanted(&map).filter(|(.., wanted)| wanted.nodes.contains(&own));
        all.map(|(id, _, wanted)| (id, wanted.model)).collect()
    }

    /// Does what is to be done about an instance.
    fn look_after(&self, id: InstanceId, patience: &mut Patience<'_>) -> Fate {
        let (own, map, nodes) = (self.agent.id(), self.agent.map(), self.agent.nodes());
        let found = placement::wanted(&map).find(|(other, ..)| *other == id);
        let record = found.as_ref().map(|(_, epoch, wanted)| (*epoch, wanted));
        let told = report(&map, id);
        let fate = fate(own, record, told.as_ref(), |id| stand(&nodes, id));
        match (fate, record) {
            (Fate::Homeless, Some((epoch, wanted))) => {
                match self.hand_on((id, epoch), wanted, patience) {
                    true => Fate::Waits,
                    false => Fate::Stuck,
                }
            }
            (Fate::Passing, Some((_, wanted))) if self.heirs(wanted).is_empty() => Fate::Stuck,
            (fate, _) => fate,
        }
    }

    /// Other nodes that live and stay. They compute as this one does or are part of the instance
    /// already, so that they give the same numbers.
    fn heirs(&self, wanted: &Wanted) -> Vec<NodeId> {
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

    /// Gives an instance to other nodes; whether there are any that can have it. Waits until the
    /// next owner has the model.
    fn hand_on(&self, at: (InstanceId, u64), wanted: &Wanted, patience: &mut Patience<'_>) -> bool {
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
            // A large model takes minutes to copy: another node may have gone meanwhile.
            let heirs = self.heirs(wanted);
            heirs.contains(heir) && self.give(at, wanted, &heirs, *heir)
        };
        order.iter().any(takes)
    }

    /// Has a node have the model of an instance; whether it has, within the time that is left.
    fn equip(&self, heir: NodeId, wanted: &Wanted, patience: &mut Patience<'_>) -> bool {
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

    /// Writes the record after this node goes, with an owner of the `heirs`; whether there is a
    /// newer one now.
    fn give(
        &self,
        (id, epoch): (InstanceId, u64),
        wanted: &Wanted,
        heirs: &[NodeId],
        owner: NodeId,
    ) -> bool {
        if self.epoch_of(id) != Some(epoch) {
            return true; // somebody wrote a newer one, or unloaded it, while the model was copied
        }
        let mut before = wanted.clone();
        if before.nodes[0] != owner {
            // In place of an owner that goes comes the first successor.
            before.successors.retain(|other| *other != owner);
            before.successors.insert(0, owner);
        }
        let life = |id| match heirs.contains(&id) {
            true => Life::Alive,
            false => Life::Left,
        };
        let next = placement::without(before, self.agent.id(), &[], life);
        let written = next.map(|next| self.want(id, epoch + 1, Some(&next)));
        // It is refused where another node was faster, whose record is looked at next.
        matches!(written, Some(Ok(()))) || self.epoch_of(id).is_none_or(|now| now > epoch)
    }

    /// The epoch of an instance's record; `None` once it is unwanted.
    fn epoch_of(&self, id: InstanceId) -> Option<u64> {
        let map = self.agent.map();
        let record = placement::wanted(&map).find(|(other, ..)| *other == id);
        record.map(|(_, epoch, _)| epoch)
    }

    /// Waits until entries have left the instances that this node answered with meanwhile.
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

/// Whether the owner of a record says that it is in this state.
fn is_in(map: &Registers, id: InstanceId, epoch: u64, state: State) -> bool {
    report(map, id).is_some_and(|it| it.epoch >= epoch && it.state == state)
}

/// How the node with this id stands, by what is known of all nodes.
fn stand(nodes: &[NodeView], id: NodeId) -> Stand {
    let lives = |node: &&NodeView| matches!(node.state, Life::Alive | Life::Suspect);
    match nodes.iter().filter(lives).find(|node| node.id == id) {
        Some(node) if node.facts.leaving => Stand::Leaves,
        Some(_) => Stand::Stays,
        None => Stand::Gone,
    }
}

/// Next step for an instance that node `own` hands on, by its record with the epoch and by
/// what its owner says.
fn fate(
    own: NodeId,
    record: Option<(u64, &Wanted)>,
    told: Option<&Report>,
    stand: impl Fn(NodeId) -> Stand,
) -> Fate {
    let Some((epoch, wanted)) = record else {
        return Fate::Moved;
    };
    if wanted.nodes.contains(&own) {
        return Fate::Homeless;
    }
    let state = told.filter(|it| it.epoch >= epoch).map(|it| it.state);
    match (stand(wanted.nodes[0]), state) {
        (Stand::Gone, _) => {
            // A successor that leaves takes nothing over.
            let mut stands = wanted.successors.iter().map(|id| stand(*id));
            match stands.find(|it| *it != Stand::Gone) {
                Some(Stand::Stays) => Fate::Waits,
                _ => Fate::Homeless,
            }
        }
        (_, Some(State::Ready)) => Fate::Moved,
        (_, Some(State::Failed)) => Fate::Stuck,
        (Stand::Leaves, _) => Fate::Passing,
        (Stand::Stays, _) => Fate::Waits,
    }
}

/// Nodes that may own an instance, those first that have its model, then its successors in order.
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
    use paceline_cluster::nodes::placement::Weights;

    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    fn wanted(nodes: &[u8], successors: &[u8]) -> Wanted {
        Wanted {
            model: "smollm2".to_owned(),
            sha256: String::new(),
            bytes: 0,
            nodes: nodes.iter().map(|number| node(*number)).collect(),
            successors: successors.iter().map(|number| node(*number)).collect(),
            named: false,
            split: "auto".to_owned(),
            threads: 1,
            context: None,
            parallel: 1,
            spare: 0,
            width: None,
            replica: 0,
            source: None,
            lender: None,
            draft: None,
            adapters: Vec::new(),
            drafts: None,
            follow: false,
            grows: false,
            added: false,
            weights: Weights::Auto,
            prompts: Vec::new(),
        }
    }

    /// Of what node 15 hands on at epoch 3; nodes from 8 on leave, those from 16 on are gone.
    fn fate_of(nodes: &[u8], successors: &[u8], told: Option<(u64, State)>) -> Fate {
        let stand = |id: NodeId| match id.0[0] {
            0..8 => Stand::Stays,
            8..16 => Stand::Leaves,
            16.. => Stand::Gone,
        };
        let told = told.map(|(epoch, state)| Report {
            epoch,
            state,
            progress: None,
            reason: None,
        });
        let wanted = wanted(nodes, successors);
        fate(node(15), Some((3, &wanted)), told.as_ref(), stand)
    }

    #[test]
    fn work_is_followed_until_another_node_answers() {
        assert_eq!(fate(node(15), None, None, |_| Stand::Gone), Fate::Moved);
        assert_eq!(fate_of(&[2, 15], &[15], None), Fate::Homeless);
        assert_eq!(fate_of(&[2], &[15], None), Fate::Waits);
        let before = Some((2, State::Ready));
        assert_eq!(
            fate_of(&[2], &[15], before),
            Fate::Waits,
            "of another epoch"
        );
        assert_eq!(fate_of(&[2], &[15], Some((3, State::Loading))), Fate::Waits);
        assert_eq!(fate_of(&[2], &[15], Some((3, State::Ready))), Fate::Moved);
        assert_eq!(fate_of(&[2], &[15], Some((3, State::Failed))), Fate::Stuck);
    }

    #[test]
    fn two_that_leave_do_not_wait_for_each_other() {
        assert_eq!(fate_of(&[8], &[15], None), Fate::Passing);
        assert_eq!(fate_of(&[8, 2], &[2, 15], None), Fate::Passing);
        assert_eq!(fate_of(&[8], &[15], Some((3, State::Ready))), Fate::Moved);
        assert_eq!(fate_of(&[16], &[15], None), Fate::Homeless);
        assert_eq!(fate_of(&[16], &[8, 2], None), Fate::Homeless);
        assert_eq!(fate_of(&[16], &[17, 2], None), Fate::Waits, "2 takes over");
        let told = Some((3, State::Ready));
        assert_eq!(fate_of(&[16], &[], told), Fate::Homeless, "it was ready");
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
