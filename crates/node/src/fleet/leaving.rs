//! A node that goes: its work moves first.
//!
//! ```text
//! leaver   writes a record without itself       the record's owner starts its instance
//! leaver   answers on, if it was the owner      ... which becomes ready
//! entries  see their line close                 hand their requests to the new owner
//! ```
//! The instance of the record before answers until the new one does, so that streams wait for one
//! hand-over and not for a load.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::placement::{self, State, Wanted};
use paceline_cluster::nodes::{InstanceId, NodeId, Registers};

use super::{Inner, report};

/// Between two reports that it still waits.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Between two looks at the map.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long lines to the instance before need to be closed: entries look every 200 ms.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

impl Inner {
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::SeqCst)
    }

    pub(super) fn runs(&self, id: InstanceId) -> bool {
        self.ready_instance(id).is_some()
    }

    /// Gives an instance to other nodes; whether there are any.
    pub(super) fn hand_on(&self, id: InstanceId, epoch: u64, wanted: Wanted) -> bool {
        let own = self.agent.id();
        let mut others = self.agent.nodes();
        others.retain(|node| node.id != own && node.state == Life::Alive);
        others.sort_by_key(|node| std::cmp::Reverse(node.facts.memory_bytes));
        let others: Vec<NodeId> = others.iter().map(|node| node.id).collect();
        let next = placement::without(wanted, own, &others, |id| self.agent.life(id));
        next.is_some_and(|next| self.want(id, epoch + 1, Some(&next)).is_ok())
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
        self.leaving.store(true, Ordering::SeqCst);
        let stuck = self.move_all(limit, wait);
        self.leaving.store(false, Ordering::SeqCst);
        stuck
    }

    fn move_all(&self, limit: Duration, wait: &mut dyn FnMut()) -> Vec<String> {
        let (own, begun) = (self.agent.id(), Instant::now());
        let nodes = self.agent.nodes();
        if !nodes
            .iter()
            .any(|it| it.id != own && it.state == Life::Alive)
        {
            return Vec::new(); // nobody is left to do anything
        }
        let (mut moved, mut stuck) = (Vec::new(), Vec::new());
        for (id, epoch, wanted) in placement::wanted(&self.agent.map()) {
            if !wanted.nodes.contains(&own) {
                continue;
            }
            let model = wanted.model.clone();
            match self.hand_on(id, epoch, wanted) {
                true => moved.push((id, model)),
                false => stuck.push(model),
            }
        }
        let mut told = begun;
        while begun.elapsed() < limit {
            let map = self.agent.map();
            let failed = moved.extract_if(.., |(id, _)| self.is_told(&map, *id, State::Failed));
            stuck.extend(failed.map(|(_, model)| model));
            let is_wanted = |id| placement::wanted(&map).any(|(other, ..)| other == id);
            moved.retain(|(id, _)| is_wanted(*id) && !self.is_told(&map, *id, State::Ready));
            if moved.is_empty() {
                break;
            }
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                wait();
            }
            std::thread::sleep(LOOK_EVERY);
        }
        stuck.extend(moved.into_iter().map(|(_, model)| model));
        self.close_bridges();
        stuck
    }

    /// Whether the others that have an instance are in this state with it.
    fn is_told(&self, map: &Registers, id: InstanceId, state: State) -> bool {
        let record = placement::wanted(map).find(|(other, ..)| *other == id);
        record.is_some_and(|(_, epoch, wanted)| {
            !wanted.nodes.contains(&self.agent.id()) && is_in(map, id, epoch, state)
        })
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
