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
    pub id: String,
    pub name: String,
    pub is_own: bool,
}

/// `count` machines of the cluster, this one first. `None` if no node of `home` that starts workers
/// runs here, or the cluster has fewer machines of this build.
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
    let mut found: Vec<ClusterMachine> = all.iter().filter(fits).map(machine).collect();
    found.sort_by_key(|machine| (!machine.is_own, machine.id.clone()));
    if found.len() < count {
        return Ok(None);
    }
    found.truncate(count);
    Ok(Some(found))
}

/// Machines for programs of users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Consenting {
    /// Machines whose owners allow programs, and this one first, which needs no consent. Empty if
    /// no node runs here.
    pub machines: Vec<ClusterMachine>,
    /// An address of each machine that the others reach.
    pub addresses: Vec<String>,
    /// Names of the other living machines without consent.
    pub refusing: Vec<String>,
    /// Whether this machine runs programs of others.
    pub is_open: bool,
}

/// The living machines of the cluster that run programs for users of the node of `home`.
pub fn consenting(home: &Path) -> Result<Consenting, local::Error> {
    let told = match local::ask(home, "nodes", json!({}), ANSWER_LIMIT, |_| {}) {
        Err(local::Error::NotUp) => return Ok(Consenting::default()),
        told => told?,
    };
    Ok(by_consent(&told["nodes"]))
}

/// Divides `nodes`, the answer of a node, by consent.
fn by_consent(nodes: &Value) -> Consenting {
    let mut found = Consenting::default();
    let nodes = nodes.as_array().map_or(&[][..], Vec::as_slice);
    let Some(own) = nodes.iter().find(|node| node["found_by"] == "self") else {
        return found;
    };
    let paths = own["paths"].as_array().map_or(&[][..], Vec::as_slice);
    let way_to = |id: &Value| {
        let to = |path: &&Value| path["to"] == *id && path["up"] == true;
        let preferred = |path: &&Value| to(path) && path["preferred"] == true;
        let mut all = paths.iter();
        all.find(preferred).or_else(|| paths.iter().find(to))
    };
    let remote = |id: &Value| {
        let address: std::net::SocketAddr = way_to(id)?["remote"].as_str()?.parse().ok()?;
        Some(address.ip().to_string())
    };
    let is_alive = |node: &&Value| node["state"] == "alive" && node["leaving"] != true;
    let mut others: Vec<&Value> = nodes.iter().filter(|node| *node != own).collect();
    others.retain(|node| is_alive(node));
    others.sort_by_key(|node| node["id"].as_str().unwrap_or_default().to_owned());
    let local = others
        .iter()
        .find_map(|node| way_to(&node["id"])?["local"].as_str());
    found.is_open = own["programs"] == true;
    found.machines.push(machine(own));
    found
        .addresses
        .push(local.unwrap_or("127.0.0.1").to_owned());
    for node in others {
        match remote(&node["id"]).filter(|_| node["programs"] == true) {
            Some(address) => {
                found.machines.push(machine(node));
                found.addresses.push(address);
            }
            None => found.refusing.push(machine(node).name),
        }
    }
    found
}

/// A machine, by the answer of a node.
fn machine(node: &Value) -> ClusterMachine {
    let text = |key: &str| node[key].as_str().unwrap_or_default().to_owned();
    ClusterMachine {
        id: text("id"),
        name: text("name"),
        is_own: node["found_by"] == "self",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_consent_takes_no_part() {
        let node = |id: &str, programs: bool| {
            json!({ "id": id, "name": format!("m{id}"), "state": "alive",
                "found_by": "mdns", "programs": programs })
        };
        let mut own = node("7", false);
        own["found_by"] = json!("self");
        let path = |to: &str, remote: &str| json!({ "to": to, "local": "10.0.0.7", "remote": remote, "up": true });
        own["paths"] = json!([path("2", "10.0.0.2:52416"), path("1", "[fe80::1]:52416")]);
        let mut dead = node("3", true);
        dead["state"] = json!("dead");
        let all = json!([dead, node("2", true), own, node("1", false)]);
        let found = by_consent(&all);
        let names: Vec<&str> = found.machines.iter().map(|it| &*it.name).collect();
        assert_eq!(names, ["m7", "m2"]);
        assert_eq!(found.addresses, ["10.0.0.7", "10.0.0.2"]);
        assert_eq!(found.refusing, ["m1"]);
        assert_eq!(by_consent(&json!([])), Consenting::default());
    }
}
