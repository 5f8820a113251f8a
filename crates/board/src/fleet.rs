//! Connects a board to the fleet: instances, commands and traffic.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use paceline_cluster::nodes::agent::Agent;
use paceline_node::fleet::Fleet;
use paceline_store::Home;
use serde_json::json;

use crate::{CommandError, Dashboard, commands, figures};

/// Timeout of traffic counts from an instance's ranks. Ranks answer between two messages, and the
/// dashboard must stay responsive when one is gone.
const COUNT_LIMIT: Duration = Duration::from_millis(250);

impl Dashboard {
    /// Adds the fleet's instances and commands, with the store and the key file.
    pub fn show_fleet(&self, agent: &Agent, fleet: &Arc<Fleet>, (home, keys): (Home, PathBuf)) {
        self.set_agent(agent);
        let own = Arc::downgrade(fleet);
        let _ = self.0.instances.set(Box::new(move || {
            own.upgrade().map_or_else(Default::default, |fleet| {
                let views = fleet.list().into_iter().map(|view| json!(view));
                (views.collect(), fleet.portraits())
            })
        }));
        let own = Arc::downgrade(fleet);
        let _ = self.0.stages.set(Box::new(move |id| {
            let fleet = own.upgrade().ok_or(CommandError::Stopping)?;
            Ok(json!(fleet.stages(id)?))
        }));
        let own = Arc::downgrade(fleet);
        let _ = self.0.figures.set(Box::new(move || {
            let Some(fleet) = own.upgrade() else {
                return Vec::new();
            };
            let views = fleet.list();
            let ready = fleet.ready().into_iter().filter_map(|(id, instance)| {
                let view = views.iter().find(|view| view.id == id)?;
                Some((view.clone(), instance))
            });
            figures::facts(&ready.collect::<Vec<_>>())
        }));
        let own = Arc::downgrade(fleet);
        let _ = self.0.counts.set(Box::new(move || {
            let fleet = own.upgrade();
            fleet.map_or_else(Vec::new, |fleet| fleet.exchanged(COUNT_LIMIT))
        }));
        let (own, agent) = (Arc::downgrade(fleet), agent.clone());
        let _ = self.0.manage.set(Box::new(move |command, arguments| {
            let fleet = own.upgrade().ok_or(CommandError::Stopping)?;
            let node = (&agent, &*fleet);
            Ok(commands::manage(node, (&home, &keys), command, arguments)?)
        }));
    }
}
