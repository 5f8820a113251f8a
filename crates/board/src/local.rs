//! Instances of a process that has no fleet, for its dashboard.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use paceline_base::lock;
use paceline_engine::{Service, State};
use paceline_node::trace::Stages;
use paceline_node::{Instance, Portrait};
use serde_json::{Value, json};

use crate::Board;

/// The models that a process without a fleet has workers for, as its dashboard shows them. Clones
/// are the same.
#[derive(Clone, Default)]
pub struct Local(Arc<Mutex<Vec<Shown>>>);

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} models", lock(&self.0).len())
    }
}

/// A model of this process.
struct Shown {
    id: String,
    model: String,
    instance: Weak<Instance>,
    nodes: u32,
}

impl Local {
    /// Shows none yet.
    pub fn on(board: &Board) -> Self {
        let shown = Self::default();
        let own = shown.clone();
        board.set_instances(Box::new(move || own.told()));
        let own = shown.clone();
        board.set_stages(Box::new(move |id| own.stages(id)));
        shown
    }

    /// Looks at where the time of a model's workers goes.
    fn stages(&self, id: &str) -> Result<Value, String> {
        let all = lock(&self.0);
        let found = all.iter().find(|local| local.id == id);
        let instance = found.and_then(|local| local.instance.upgrade());
        drop(all);
        let instance = instance.ok_or_else(|| format!("no instance of {id:?} is here"))?;
        Stages::look(&instance).map(|stages| json!(stages))
    }

    fn told(&self) -> (Vec<Value>, BTreeMap<String, Portrait>) {
        lock(&self.0).iter().filter_map(Shown::told).unzip()
    }

    /// Shows a model from now on, as long as its instance is there.
    pub fn add(&self, model: &str, instance: &Arc<Instance>, nodes: u32) {
        let mut all = lock(&self.0);
        let id = match all.len() {
            0 => "local".to_owned(),
            n => format!("local-{}", n + 1),
        };
        all.push(Shown {
            id,
            model: model.to_owned(),
            instance: Arc::downgrade(instance),
            nodes,
        });
    }
}

impl Shown {
    /// Its line on the dashboard, and how it computes.
    fn told(&self) -> Option<(Value, (String, Portrait))> {
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
