//! Drain: moves the work of a node to others before the node leaves, step by step as
//! [`rules::drain`](paceline_fleet::rules::drain) decides.
//!
//! The previous record's instance answers until the new one does, so that streams wait for one
//! handover and not for a load.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::nodes::NodeId;
use paceline_fleet::rules::drain::{self, DrainStep};
use paceline_fleet::{InstanceId, InstanceSpec};

use super::{Inner, copies};

/// Interval of reports while it waits.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Longest drain of a node whose battery is low, as after a signal.
const BATTERY_LIMIT: Duration = Duration::from_secs(300);

/// Poll interval of the map.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Longest wait for connections to the previous instance to close: each ingress checks every 200
/// ms.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Longest wait for nodes to report whether they have a model: a handshake and a folder listing. A
/// node that must hash a large file takes longer and counts as lacking it.
const ASK_LIMIT: Duration = Duration::from_secs(2);

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

    /// As [`Fleet::leave`](super::Fleet::leave).
    pub(super) fn leave(&self, limit: Duration, wait: &mut dyn FnMut()) -> Vec<String> {
        lock(&self.state).drained = None;
        self.agent.set_leaving(true);
        let told = Instant::now();
        let until = told + limit;
        let stuck = self.move_all(DrainDeadline { until, told, wait });
        match stuck.is_empty() {
            // It still drains: another draining node must not hand work to it.
            true => lock(&self.state).drained = Some(Instant::now()),
            false => self.agent.set_leaving(false),
        }
        stuck
    }

    /// Drains this node on its own thread, since models may have to be copied: its battery is low.
    pub(super) fn drain_meanwhile(self: &Arc<Self>) {
        (self.spec.tell)("the battery is low: this machine's work moves to others");
        let inner = Arc::clone(self);
        self.spawn("rest", move || {
            let stuck = inner.leave(BATTERY_LIMIT, &mut || ());
            if !stuck.is_empty() {
                let models = stuck.join(", ");
                (inner.spec.tell)(&format!("no other machine takes {models}"));
            }
        });
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
        let (observed, specs) = self.observe();
        if drain::is_stranded(&observed, &specs) {
            (self.spec.tell)("all other machines leave too: this one's models move to none");
        }
        drain::is_last(&observed)
    }

    /// Instances that this node has to hand over, and the users' names for their models.
    fn work(&self) -> BTreeMap<InstanceId, String> {
        let (observed, specs) = self.observe();
        drain::work(&observed, &specs)
    }

    /// Takes the next step for an instance.
    fn look_after(&self, id: InstanceId, patience: &mut DrainDeadline<'_>) -> DrainStep {
        let (observed, specs) = self.observe();
        let record = specs.get(id);
        match (drain::step(&observed, record), record) {
            (DrainStep::Homeless, Some(it)) => {
                match self.transfer_ownership((id, it.epoch), &it.spec, patience) {
                    true => DrainStep::Waits,
                    false => DrainStep::Stuck,
                }
            }
            (step, _) => step,
        }
    }

    /// Other live nodes that can have an instance.
    fn heirs(&self, wanted: &InstanceSpec) -> Vec<NodeId> {
        drain::heirs(&self.observe().0, wanted)
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
        let order = drain::by_preference(heirs.clone(), &wanted.successors, &has);
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
        let next = drain::handed_over(self.agent.id(), wanted.clone(), heirs, owner);
        let written = next.map(|next| self.want(id, epoch + 1, Some(&next)));
        // Refused if another node wrote first; its record is handled next.
        matches!(written, Some(Ok(()))) || self.epoch_of(id).is_none_or(|now| now > epoch)
    }

    /// The epoch of an instance's record; `None` once it is unloaded.
    fn epoch_of(&self, id: InstanceId) -> Option<u64> {
        self.observe().1.get(id).map(|record| record.epoch)
    }

    /// Waits until no ingress uses the instances that this node bridged.
    fn close_bridges(&self) {
        let begun = Instant::now();
        let bridges = || {
            let (observed, specs) = self.observe();
            let elsewhere = specs
                .iter()
                .filter(|(_, it)| it.spec.nodes[0] != observed.own);
            elsewhere
                .filter(|(id, _)| self.ready_instance(*id).is_some())
                .count()
        };
        while bridges() > 0 && begun.elapsed() < CLOSE_LIMIT {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
