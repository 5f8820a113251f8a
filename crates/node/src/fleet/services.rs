//! Services of a node: which models it answers with, over which replicas.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use paceline_base::lock;
use paceline_engine::{AdaptedService, Service};
use paceline_fleet::replica_names::Name;
use paceline_fleet::{
    AdapterFile, AdapterNaming, InstanceId, InstanceSpec, Report, State, report, specs,
};

use super::replicas::Replicas;
use super::{Inner, OwnerService, RoutedModel, copies, encoders, name_of, owner};

impl Inner {
    /// Registers each model with a ready replica and removes the registrations of unloaded models.
    pub(super) fn update_services(self: &Arc<Self>) {
        let map = self.agent.map();
        let mut named: BTreeMap<Name, BTreeSet<InstanceId>> = BTreeMap::new();
        let mut ready = Vec::new();
        for (id, _, wanted) in specs(&map) {
            let name = Name::of(&wanted);
            let is_begun = || {
                lock(&self.state)
                    .owned
                    .get(&id)
                    .is_some_and(|it| it.answers.is_some())
            };
            let is_ready =
                |it: &Report| it.state == State::Ready && (!self.leases(&wanted) || is_begun());
            if let Some(report) = report(&map, id).filter(is_ready) {
                self.admit(&name, id, &wanted);
                if let Some(replicas) = self.replicas_with(id) {
                    replicas.set_numbers(id, wanted.numbers_name(report.numbers));
                }
                ready.push((name.clone(), id));
            }
            named.entry(name).or_default().insert(id);
        }
        lock(&self.state)
            .opening
            .retain(|name| named.contains_key(name));
        lock(&self.state)
            .tried
            .retain(|id, _| ready.iter().any(|(_, of)| of == id));
        self.see(ready);
        self.tell_unserved(&map);
        let gone = |name: &Name, door: &mut RoutedModel| match (named.get(name), door) {
            (None, _) => true,
            (Some(ids), RoutedModel::Own(id)) => !ids.contains(id),
            (Some(_), _) => false,
        };
        let gone: Vec<_> = lock(&self.state).open.extract_if(.., gone).collect();
        gone.iter().for_each(|(name, _)| self.close(name));
        let open = lock(&self.state).open.clone();
        for (name, door) in open {
            if let (RoutedModel::Replicas(all), Some(ids)) = (door, named.get(&name)) {
                all.retain(ids);
            }
        }
    }

    /// Whether an instance is one that this node computes for its own life.
    fn leases(&self, wanted: &InstanceSpec) -> bool {
        wanted.lender == Some(self.agent.id()) && wanted.machine.is_some()
    }

    /// Removes the registrations of a model.
    pub(super) fn close(&self, name: &Name) {
        let keys = std::iter::once(name.key()).chain(name.adapter_keys());
        keys.for_each(|key| self.spec.doors.close(&key));
    }

    /// Adds a ready replica to the service of its model.
    fn admit(self: &Arc<Self>, name: &Name, id: InstanceId, wanted: &InstanceSpec) {
        let door = lock(&self.state).open.get(name).cloned();
        match door {
            Some(RoutedModel::Replicas(all)) => all.admit(self, id, wanted),
            Some(RoutedModel::Encoder | RoutedModel::Own(_)) => {}
            None => self.open_door(name, id, wanted),
        }
    }

    /// Records the ready instances that this node answers with, or cannot.
    fn see(&self, ready: Vec<(Name, InstanceId)>) {
        // Locked throughout, so that a concurrent registration adds to this set.
        let mut state = lock(&self.state);
        let is_settled = |name: &Name| state.open.contains_key(name) || state.opening.failed(name);
        let settled = ready.into_iter().filter(|(name, _)| is_settled(name));
        state.seen = settled.map(|(_, id)| id).collect();
    }

    /// Registers a model on its own thread, unless one is running. Present parts of the file are
    /// hashed first, and reconciliation must not wait for that.
    fn open_door(self: &Arc<Self>, name: &Name, id: InstanceId, wanted: &InstanceSpec) {
        if !lock(&self.state).opening.begin(name, Instant::now()) {
            return;
        }
        let (inner, name, wanted) = (Arc::clone(self), name.clone(), wanted.clone());
        let tried = name.clone();
        let run = move || {
            let opened = inner.try_door(&name, id, &wanted);
            lock(&inner.state)
                .opening
                .end(&name, opened, Instant::now());
            let ready = inner.ready_of(&name).into_iter();
            lock(&inner.state).seen.extend(ready.map(|(id, _)| id));
        };
        if !self.spawn("door", run) {
            lock(&self.state).opening.end(&tried, false, Instant::now());
        }
    }

    /// Registers a model; false if this node has too little of its file.
    fn try_door(self: &Arc<Self>, name: &Name, id: InstanceId, wanted: &InstanceSpec) -> bool {
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
        for (id, wanted) in self.ready_of(name) {
            all.admit(self, id, &wanted);
            let named = report(&map, id).and_then(|report| report.numbers);
            all.set_numbers(id, wanted.numbers_name(named));
        }
        self.answer_with(name, &wanted, &path, Arc::clone(&all) as Arc<dyn Service>);
        lock(&self.state)
            .open
            .insert(name.clone(), RoutedModel::Replicas(all));
        true
    }

    /// The instances of a name that are ready.
    fn ready_of(&self, name: &Name) -> Vec<(InstanceId, InstanceSpec)> {
        let map = self.agent.map();
        let of_name = specs(&map).filter(|(.., wanted)| Name::of(wanted) == *name);
        let is_ready = |id: InstanceId| report(&map, id).is_some_and(|it| it.state == State::Ready);
        let ready = of_name.filter(|(id, ..)| is_ready(*id));
        ready.map(|(id, _, wanted)| (id, wanted)).collect()
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
