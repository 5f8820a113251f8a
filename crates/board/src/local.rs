//! Instances of a process without a fleet, for its dashboard.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use paceline_base::lock;
use paceline_engine::{Service, State};
use paceline_node::trace::Stages;
use paceline_node::{Instance, InstanceSummary};
use serde_json::{Value, json};

use crate::Dashboard;

/// The models of a process without a fleet, with their workers. Clones share them.
#[derive(Clone, Default)]
pub struct LocalInstances(Arc<Mutex<Vec<LocalInstance>>>);

impl fmt::Debug for LocalInstances {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} models", lock(&self.0).len())
    }
}

/// A model of this process.
struct LocalInstance {
    id: String,
    model: String,
    instance: Weak<Instance>,
    nodes: u32,
}

impl LocalInstances {
    /// Without models.
    pub fn on(board: &Dashboard) -> Self {
        let shown = Self::default();
        let own = shown.clone();
        board.set_instances(Box::new(move || own.told()));
        let own = shown.clone();
        board.set_stages(Box::new(move |id| own.stages(id)));
        shown
    }

    /// Measures where a model's workers spend their time.
    fn stages(&self, id: &str) -> Result<Value, String> {
        let all = lock(&self.0);
        let found = all.iter().find(|local| local.id == id);
        let instance = found.and_then(|local| local.instance.upgrade());
        drop(all);
        let instance = instance.ok_or_else(|| format!("no instance of {id:?} is here"))?;
        Stages::look(&instance).map(|stages| json!(stages))
    }

    fn told(&self) -> (Vec<Value>, BTreeMap<String, InstanceSummary>) {
        lock(&self.0).iter().filter_map(LocalInstance::told).unzip()
    }

    /// Adds a model, which is shown while its instance exists.
    pub fn add(&self, model: &str, instance: &Arc<Instance>, nodes: u32) {
        let mut all = lock(&self.0);
        let id = match all.len() {
            0 => "local".to_owned(),
            n => format!("local-{}", n + 1),
        };
        all.push(LocalInstance {
            id,
            model: model.to_owned(),
            instance: Arc::downgrade(instance),
            nodes,
        });
    }
}

impl LocalInstance {
    /// The model as JSON, and its portrait.
    fn told(&self) -> Option<(Value, (String, InstanceSummary))> {
        let instance = self.instance.upgrade()?;
        let (state, reason) = match instance.status().state {
            State::Loading => ("loading", None),
            State::Ready => ("ready", None),
            State::Recovering(reason) => ("recovering", Some(reason)),
            State::Failed(reason) => ("failed", Some(reason)),
        };
        let workers = (0..self.nodes).map(|rank| format!("worker {rank}"));
        let view = json!({
            "id": self.id, "model": self.model, "state": state, "reason": reason,
            "nodes": workers.collect::<Vec<_>>(), "epoch": instance.epoch(),
            "split": instance.split().to_string(),
        });
        Some((view, (self.id.clone(), instance.portrait())))
    }
}
