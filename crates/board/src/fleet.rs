//! A board that shows and manages what is loaded over a cluster.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use paceline_cluster::nodes::agent::Agent;
use paceline_node::fleet::Fleet;
use paceline_store::Home;
use serde_json::json;

use crate::{Board, commands};

/// Longest wait for the counts of bytes that an instance's ranks have sent. Ranks answer between
/// two messages, and the dashboard that asks is to stay quick when one is gone.
const COUNT_LIMIT: Duration = Duration::from_millis(250);

impl Board {
    /// Shows and manages what is loaded over the cluster, with the store and the file of keys.
    pub fn show_fleet(&self, agent: &Agent, fleet: &Arc<Fleet>, (home, keys): (Home, PathBuf)) {
        self.set_agent(agent);
        let own = Arc::downgrade(fleet);
        self.set_instances(Box::new(move || {
            own.upgrade().map_or_else(Default::default, |fleet| {
                let views = fleet.list().into_iter().map(|view| json!(view));
                (views.collect(), fleet.portraits())
            })
        }));
        let own = Arc::downgrade(fleet);
        self.set_stages(Box::new(move |id| {
            let fleet = own.upgrade().ok_or("the node is stopping")?;
            fleet.stages(id).map(|stages| json!(stages))
        }));
        let own = Arc::downgrade(fleet);
        self.set_counts(Box::new(move || {
            let fleet = own.upgrade();
            fleet.map_or_else(Vec::new, |fleet| fleet.exchanged(COUNT_LIMIT))
        }));
        let (own, agent) = (Arc::downgrade(fleet), agent.clone());
        self.set_manage(Box::new(move |command, arguments| {
            let fleet = own.upgrade().ok_or("the node is stopping")?;
            commands::manage((&agent, &fleet), (&home, &keys), command, arguments)
        }));
    }
}
