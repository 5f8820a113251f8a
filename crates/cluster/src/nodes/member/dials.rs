//! Dial targets, and the time of the next attempt for each.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::NodeId;

/// Most targets: every node, and some named by the user.
const TARGETS_MAX: usize = 2048;

/// A longer pause is cut short when the node is discovered. Shorter ones stay, so that replayed
/// beacons cost at most an attempt a second.
const PAUSE_LONG: Duration = Duration::from_secs(1);

/// A target that may be dialled.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DialTarget {
    /// A node whose addresses are known from discovery or its facts.
    Node(NodeId),
    /// An address that the user named, `host` or `host:port`.
    Peer(String),
}

#[derive(Clone, Debug)]
struct Dial {
    /// Time of the next attempt; `None` while there is a session.
    at: Option<Duration>,
    pause: Duration,
    /// The node that answered there.
    id: Option<NodeId>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Dials(BTreeMap<DialTarget, Dial>);

impl Dials {
    pub(super) fn add(&mut self, target: DialTarget, at: Duration) {
        if self.0.len() >= TARGETS_MAX {
            return;
        }
        let id = match &target {
            DialTarget::Node(id) => Some(*id),
            DialTarget::Peer(_) => None,
        };
        self.0.entry(target).or_insert(Dial {
            at: Some(at),
            pause: Duration::ZERO,
            id,
        });
    }

    /// Removes a node, but not the addresses named by the user.
    pub(super) fn remove(&mut self, id: NodeId) {
        self.0.remove(&DialTarget::Node(id));
    }

    /// No target that leads to `id` is dialled while there is a session.
    pub(super) fn linked(&mut self, id: NodeId, target: Option<DialTarget>) {
        if let Some(dial) = target.and_then(|target| self.0.get_mut(&target)) {
            dial.id = Some(id);
        }
        for dial in self.0.values_mut().filter(|dial| dial.id == Some(id)) {
            (dial.at, dial.pause) = (None, Duration::ZERO);
        }
    }

    /// Targets that lead to `id` are dialled again, at once at first.
    pub(super) fn unlinked(&mut self, id: NodeId, now: Duration) {
        for dial in self.0.values_mut().filter(|dial| dial.id == Some(id)) {
            dial.at.get_or_insert(now);
        }
    }

    /// A node was discovered: it is dialled now, regardless of earlier failures.
    pub(super) fn hurry(&mut self, id: NodeId, now: Duration) {
        if let Some(dial) = self.0.get_mut(&DialTarget::Node(id))
            && dial.at.is_some_and(|at| at > now)
            && dial.pause >= PAUSE_LONG
        {
            (dial.at, dial.pause) = (Some(now), Duration::ZERO);
        }
    }

    pub(super) fn next(&self) -> Option<Duration> {
        self.0.values().filter_map(|dial| dial.at).min()
    }

    pub(super) fn due(&mut self, now: Duration, pauses: (Duration, Duration)) -> Vec<DialTarget> {
        let mut due = Vec::new();
        for (target, dial) in &mut self.0 {
            if dial.at.is_some_and(|at| at <= now) {
                dial.pause = (dial.pause * 2).clamp(pauses.0, pauses.1);
                dial.at = Some(now + dial.pause);
                due.push(target.clone());
            }
        }
        due
    }
}
