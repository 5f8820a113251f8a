//! Models of the cluster that this node does not answer with now, for its HTTP server.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use paceline_base::lock;
use paceline_cluster::nodes::Registers;
use paceline_fleet::{InstanceId, InstanceSpec, State, specs};

use super::Inner;
use paceline_fleet::replica_names::Name;
use paceline_fleet::report;

/// Attempts to get the beginning of a model's file. After them this node is unlikely to answer with
/// the model: it has several files, or no source is left.
const ATTEMPTS: u32 = 3;

/// A model that this node does not answer with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnservedModel {
    /// Names that clients call it by.
    pub names: Vec<String>,
    pub state: UnservedState,
}

/// Why a node does not answer with a model; the first of several replicas' states holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnservedState {
    /// It loads, or this node is about to answer with it.
    Loading,
    /// Other nodes answer with it; addresses of the owner's HTTP API.
    Elsewhere(Vec<SocketAddr>),
    /// It failed, for this reason.
    Failed(String),
}

impl Inner {
    /// Tells the server the models that this node does not answer with.
    pub(super) fn tell_unserved(&self, map: &Registers) {
        let mut models: BTreeMap<Name, UnservedModel> = BTreeMap::new();
        for (id, epoch, wanted) in specs(map) {
            let name = Name::of(&wanted);
            if lock(&self.state).open.contains_key(&name) {
                continue;
            }
            let state = self.unserved_state(map, (id, epoch, &wanted));
            let known = models.entry(name).or_insert_with(|| UnservedModel {
                names: names(&wanted),
                state: state.clone(),
            });
            known.state = known.state.clone().min(state);
        }
        self.spec.doors.set_unserved(models.into_values().collect());
    }

    fn unserved_state(
        &self,
        map: &Registers,
        (id, epoch, wanted): (InstanceId, u64, &InstanceSpec),
    ) -> UnservedState {
        let Some(report) = report(map, id).filter(|report| report.epoch == epoch) else {
            return UnservedState::Loading;
        };
        match report.state {
            State::Failed => UnservedState::Failed(report.reason.unwrap_or_default()),
            State::Ready => {
                let tried = lock(&self.state)
                    .tried
                    .get(&id)
                    .map_or(0, |(_, count)| *count);
                match tried < ATTEMPTS {
                    true => UnservedState::Loading,
                    false => UnservedState::Elsewhere(self.api_of(wanted)),
                }
            }
            State::Fetching | State::Loading | State::Recovering => UnservedState::Loading,
        }
    }

    /// Addresses of the HTTP API of an instance's owner.
    pub(super) fn api_of(&self, wanted: &InstanceSpec) -> Vec<SocketAddr> {
        let mut views = self.agent.nodes().into_iter();
        let owner = views.find(|view| view.id == wanted.nodes[0]);
        owner.map_or_else(Vec::new, |owner| owner.facts.api)
    }
}

/// Names of an instance and its adapters.
fn names(wanted: &InstanceSpec) -> Vec<String> {
    let adapters = wanted.adapters.iter();
    let adapters = adapters.map(|adapter| wanted.adapted(&adapter.name));
    std::iter::once(wanted.model.clone())
        .chain(adapters)
        .collect()
}
