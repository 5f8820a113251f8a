//! Machines of the cluster that compute for a local command.

use std::path::Path;
use std::time::Duration;

use paceline_cluster::nodes::agent::local;
use serde_json::{Value, json};

/// Timeout of the node's response.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// A machine that starts workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterMachine {
    /// The id of its node.
    pub id: String,
    /// Its name for people.
    pub name: String,
    /// Whether it is this machine.
    pub is_own: bool,
}

/// `count` machines of the cluster, this one first. `None` if no node of `home` that starts workers
/// runs here, or the cluster has fewer machines of this build.
///
/// # Errors
/// The error of this machine's node.
pub fn found(home: &Path, count: usize) -> Result<Option<Vec<ClusterMachine>>, local::Error> {
    let ask = |command| local::ask(home, command, json!({}), ANSWER_LIMIT, |_| {});
    let told = match ask("nodes") {
        Err(local::Error::NotUp) => return Ok(None),
        told => told?,
    };
    // A node with a fixed model (`up MODEL`) starts no workers, and has no store.
    let Ok(stores) = ask("stores") else {
        return Ok(None);
    };
    let stores = stores["nodes"].as_array().cloned().unwrap_or_default();
    let starts_workers = |node: &Value| {
        let mut stores = stores.iter();
        stores.any(|it| it["node"] == node["name"] && it["problem"].is_null())
    };
    let all = told["nodes"].as_array().cloned().unwrap_or_default();
    let own = all.iter().find(|node| node["found_by"] == "self").cloned();
    let Some(own) = own else { return Ok(None) };
    let fits = |node: &&Value| {
        let same = ["build", "numerics"]
            .iter()
            .all(|fact| node[*fact] == own[*fact]);
        node["state"] == "alive" && same && node["leaving"] != true && starts_workers(node)
    };
    let mut found: Vec<ClusterMachine> = all
        .iter()
        .filter(fits)
        .map(|node| {
            let text = |key: &str| node[key].as_str().unwrap_or_default().to_owned();
            ClusterMachine {
                id: text("id"),
                name: text("name"),
                is_own: node["found_by"] == "self",
            }
        })
        .collect();
    found.sort_by_key(|machine| (!machine.is_own, machine.id.clone()));
    if found.len() < count {
        return Ok(None);
    }
    found.truncate(count);
    Ok(Some(found))
}
