//! The instances that this node runs.

use std::sync::Arc;

use super::OwnerService;
use super::owner::OwnedInstance;
use crate::Instance;

/// An instance of this node, by the epoch of its record.
pub(super) struct RunningInstance {
    pub(super) owned: OwnedInstance,
    /// Set once it answers.
    pub(super) answers: Option<OwnerService>,
    /// Service of the previous record, which answers until this one does.
    pub(super) former: Option<OwnerService>,
}

impl RunningInstance {
    /// Its workers, once they answer by this record.
    pub(super) fn own_instance(&self) -> Option<Arc<Instance>> {
        self.answers.as_ref()?.instance().cloned()
    }

    /// The workers that answer, by this record or the one before.
    pub(super) fn any_instance(&self) -> Option<Arc<Instance>> {
        let answers = self.answers.as_ref().or(self.former.as_ref());
        answers?.instance().cloned()
    }

    pub(super) fn into_instances(self) -> impl Iterator<Item = Arc<Instance>> {
        let services = self.answers.into_iter().chain(self.former);
        services.filter_map(|service| service.instance().cloned())
    }
}
