//! Memory and standby nodes of instances, as the owner's threads and loads ask for them.

use std::collections::BTreeSet;
use std::time::Instant;

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::member::Life;
use paceline_fleet::memory::NoRoom;
use paceline_fleet::rules::relocate;
use paceline_fleet::{InstanceId, InstanceSpec, NodeMemory};

use super::owner::OwnedInstance;
use super::{Inner, LOOK_EVERY};
use crate::supervisor::LONGEST_WAIT;

impl Inner {
    /// As [`relocate::standbys`].
    pub(super) fn reserves(&self, wanted: &InstanceSpec, nodes: &BTreeSet<NodeId>) -> Vec<NodeId> {
        let (observed, specs) = self.observe();
        relocate::standbys(&observed, &specs, wanted, nodes)
    }

    /// As [`relocate::check_room`].
    pub(super) fn check_room(&self, id: InstanceId, wanted: &InstanceSpec) -> Result<(), NoRoom> {
        let (observed, specs) = self.observe();
        relocate::check_room(&observed, &specs, (id, wanted), |id| self.name(id))
    }

    /// As [`Observed::rooms`](paceline_fleet::Observed::rooms).
    pub(super) fn rooms_beside(
        &self,
        without: Option<InstanceId>,
        wanted: &InstanceSpec,
    ) -> NodeMemory {
        let (observed, specs) = self.observe();
        observed.rooms(&specs, without, wanted)
    }

    fn living(&self) -> BTreeSet<NodeId> {
        let mut views = self.agent.nodes();
        views.retain(|view| view.state == Life::Alive);
        views.into_iter().map(|view| view.id).collect()
    }
}

impl OwnedInstance {
    /// Waits until a node joins or leaves, at most [`LONGEST_WAIT`], before the next attempt to
    /// start. False if a newer record makes the attempt useless.
    pub(super) fn wait_for_nodes(&self, inner: &Inner) -> bool {
        let (before, since) = (inner.living(), Instant::now());
        while inner.has_begun(self.id, self.epoch) {
            let (observed, specs) = inner.observe_with_paths();
            let next = relocate::with_room(&observed, &specs, self.id, &self.wanted);
            if next.nodes != self.wanted.nodes
                && inner.want(self.id, self.epoch + 1, Some(&next)).is_ok()
            {
                return false;
            }
            if inner.living() != before || since.elapsed() >= LONGEST_WAIT {
                return true;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        false
    }
}
