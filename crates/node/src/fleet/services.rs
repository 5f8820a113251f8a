//! Services of a node: which models it answers with, over which replicas.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use paceline_base::lock;
use paceline_engine::{AdaptedService, Service};
use paceline_fleet::replica_names::Name;
use paceline_fleet::rules::route::ReadyReplica;
use paceline_fleet::{AdapterFile, AdapterNaming, InstanceId, InstanceSpec, Specs, State, report};

use super::replicas::Replicas;
use super::{Inner, OwnerService, RoutedModel, copies, encoders, name_of, owner};

impl Inner {
    /// Forgets the attempts about models that are gone.
    pub(super) fn forget_unloaded(&self, specs: &Specs) {
        let names: BTreeSet<Name> = specs.iter().map(|(_, it)| Name::of(&it.spec)).collect();
        let is_ready = |id| specs.get(id).is_some_and(|it| it.is_in(State::Ready));
        let mut state = lock(&self.state);
        state.starts.retain(|name| names.contains(name));
        state.tried.retain(|id, _| is_ready(*id));
    }

    /// Whether this node answers with a ready instance of this name, or cannot.
    pub(super) fn is_settled(&self, name: &Name, id: InstanceId) -> bool {
        let state = lock(&self.state);
        match state.open.get(name) {
            Some(RoutedModel::Replicas(all)) => all.has(id),
            Some(RoutedModel::Encoder | RoutedModel::Own(_)) => true,
            None => state.starts.failed(name),
        }
    }

    /// Answers requests for a model by these instances.
    pub(super) fn route(
        self: &Arc<Self>,
        name: &Name,
        ready: &[ReadyReplica],
        all: &BTreeSet<InstanceId>,
    ) {
        let open = lock(&self.state).open.get(name).cloned();
        if let Some(RoutedModel::Replicas(replicas)) = open {
            for it in ready {
                replicas.admit(self, it);
            }
            replicas.retain(all);
        }
    }

    /// Whether an instance is one that this node computes for its own life.
    fn leases(&self, wanted: &InstanceSpec) -> bool {
        wanted.lender == Some(self.agent.id()) && wanted.machine.is_some()
    }

    /// Removes the registrations of a model.
    pub(super) fn close(&self, name: &Name) {
        drop(lock(&self.state).open.remove(name));
        let keys = std::iter::once(name.key()).chain(name.adapter_keys());
        keys.for_each(|key| self.spec.doors.close(&key));
    }

    /// Registers a model on its own thread, unless one is running. Present parts of the file are
    /// hashed first, and reconciliation must not wait for that.
    pub(super) fn open(self: &Arc<Self>, name: Name, id: InstanceId, wanted: InstanceSpec) {
        lock(&self.state).starts.begin(&name);
        let (inner, tried) = (Arc::clone(self), name.clone());
        let run = move || {
            let opened = inner.try_open(&name, id, &wanted);
            let mut state = lock(&inner.state);
            state.starts.end(&name, opened, Instant::now());
        };
        if !self.spawn("service", run) {
            let mut state = lock(&self.state);
            state.starts.end(&tried, false, Instant::now());
        }
    }

    /// Registers a model; false if this node has too little of its file.
    fn try_open(self: &Arc<Self>, name: &Name, id: InstanceId, wanted: &InstanceSpec) -> bool {
        // A node without a shard of it may lack the file.
        let Ok(path) = owner::part_of(self, wanted) else {
            self.get_part(id, wanted);
            return false;
        };
        if encoders::is_encoder(&path) {
            // An encoder computes here, with all weights.
            let model = (&self.agent, &name_of(wanted));
            let Ok(path) = self.copies.find_right(model, copies::CheckRange::All) else {
                return false;
            };
            return self.open_encoder(name, id, wanted, &path);
        }
        let map = self.agent.map();
        let mut wanted = wanted.clone();
        let context = || report(&map, id).and_then(|report| report.context);
        wanted.options.context = wanted.options.context.or_else(context);
        if let Some(own) = self.ready_instance(id).filter(|_| self.leases(&wanted)) {
            self.answer_with(name, &wanted, &path, own);
            lock(&self.state)
                .open
                .insert(name.clone(), RoutedModel::Own(id));
            return true;
        }
        let all = Arc::new(Replicas::new(&wanted.model, Arc::clone(&self.spec.tell)));
        for it in self.ready_of(name) {
            all.admit(self, &it);
        }
        self.answer_with(name, &wanted, &path, Arc::clone(&all) as Arc<dyn Service>);
        lock(&self.state)
            .open
            .insert(name.clone(), RoutedModel::Replicas(all));
        true
    }

    fn ready_of(&self, name: &Name) -> Vec<ReadyReplica> {
        let specs = Specs::read(&self.agent.map());
        let of_name = specs.iter().filter(|(_, it)| Name::of(&it.spec) == *name);
        let ready = of_name.filter(|(_, it)| it.is_in(State::Ready));
        ready.map(|(id, it)| ReadyReplica::of(id, it)).collect()
    }

    fn answer_with(&self, name: &Name, wanted: &InstanceSpec, path: &Path, with: Arc<dyn Service>) {
        let open = |key: &str, adapter: Option<&AdapterFile>, with: Arc<dyn Service>| {
            let called = match adapter {
                Some(adapter) => wanted.adapted(&adapter.name),
                None => wanted.id().to_owned(),
            };
            match self.spec.doors.open(key, (wanted, adapter), path, with) {
                Ok(()) => (self.spec.tell)(&format!("answering as {called}")),
                Err(reason) => (self.spec.tell)(&format!("error: {called}: {reason}")),
            }
        };
        if wanted.adapter_naming != AdapterNaming::Model {
            open(&name.key(), None, Arc::clone(&with));
        }
        for (key, adapter) in name.adapter_keys().zip(&wanted.adapters) {
            let adapted = AdaptedService::new(Arc::clone(&with), &*adapter.name);
            open(&key, Some(adapter), Arc::new(adapted));
        }
    }

    /// Registers this node's own copy of an encoder, which it loads unless it owns the instance.
    fn open_encoder(
        &self,
        name: &Name,
        id: InstanceId,
        wanted: &InstanceSpec,
        path: &Path,
    ) -> bool {
        let own = lock(&self.state)
            .owned
            .get(&id)
            .and_then(|it| it.answers.clone());
        let loaded = match own {
            Some(OwnerService::Encoder(service)) => Ok(service),
            _ => encoders::load(path, wanted),
        };
        match loaded {
            Ok(service) => self.answer_with(name, wanted, path, service),
            Err(reason) => {
                (self.spec.tell)(&format!("error: {}: {reason}", wanted.id()));
                return false;
            }
        }
        // Reconciliation closes it if it was unloaded meanwhile.
        lock(&self.state)
            .open
            .insert(name.clone(), RoutedModel::Encoder);
        true
    }
}
