//! Machines of the cluster that compute for a command beside this one.

use serde_json::{Value, json};

use crate::member;
use crate::output::tell;

/// A machine that starts workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    /// The id of its node.
    pub(crate) id: String,
    /// Its name for people.
    pub(crate) name: String,
    /// Whether it is this machine.
    pub(crate) is_own: bool,
}

/// `count` machines of the cluster, this one first, which are told; `None` where no node runs here
/// that starts workers, or the cluster has fewer machines of this build.
///
/// # Errors
/// The error of this machine's node.
pub(crate) fn chosen(count: usize) -> anyhow::Result<Option<Vec<Machine>>> {
    let found = found(count)?;
    if let Some(machines) = &found {
        let names: Vec<&str> = machines.iter().map(|it| it.name.as_str()).collect();
        tell(format_args!(
            "workers on {}; --local computes here",
            names.join(", ")
        ));
    }
    Ok(found)
}

fn found(count: usize) -> anyhow::Result<Option<Vec<Machine>>> {
    let Some(told) = member::ask_if_up("nodes", json!({}))? else {
        return Ok(None);
    };
    // A node that serves a fixed model (`up MODEL`) starts no workers, and has no store.
    let Ok(stores) = member::ask("stores", json!({})) else {
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
    let mut found: Vec<Machine> = all
        .iter()
        .filter(fits)
        .map(|node| {
            let text = |key: &str| node[key].as_str().unwrap_or_default().to_owned();
            Machine {
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
