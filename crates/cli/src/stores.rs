//! Models over the cluster: where which parts lie, what is removed, and where a pulled one is sent.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::bail;
use paceline_base::Bytes;
use paceline_cluster::nodes::agent::local::{self, Progress};
use paceline_node::fleet::{Fleet, Holding, Outcome, OwnStore};
use paceline_store::{Entry, Error as StoreError, State, find_for_removal, free_space};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::instances::LoadProgress;
use crate::nodes::aligned;
use crate::output::{print, printable, tell};
use crate::pull::file_bytes;
use crate::{home, member};

/// Longest silence of a node that sends a model: it says how far it is five times a second.
const SILENCE: Duration = Duration::from_secs(60);

/// This machine's models, for its node.
///
/// # Errors
/// A home that cannot be had.
pub(crate) fn own(budget_bytes: Option<u64>) -> anyhow::Result<Arc<OwnStore>> {
    let home = home::home()?;
    let (listed, removed, folder) = (home.clone(), home.clone(), home.root().to_owned());
    Ok(Arc::new(OwnStore {
        list: Box::new(move || {
            let all = paceline_store::list(&listed).unwrap_or_default();
            let now = SystemTime::now();
            all.iter().map(|entry| holding(entry, now)).collect()
        }),
        remove: Box::new(move |name| {
            // Nodes name no paths.
            if Path::new(name).exists() || find_for_removal(&removed, name).is_err() {
                return Ok(None);
            }
            match paceline_store::remove(&removed, name) {
                Ok(done) => Ok(Some(done.bytes.0)),
                Err(StoreError::NotInStore { .. }) => Ok(None),
                Err(error) => Err(error.to_string()),
            }
        }),
        free: Box::new(move || {
            let there = folder.ancestors().find(|parent| parent.exists())?;
            free_space(there).ok()
        }),
        budget_bytes,
    }))
}

fn holding(entry: &Entry, now: SystemTime) -> Holding {
    let used = match &entry.state {
        State::Complete { last_used, .. } => *last_used,
        State::Partial | State::Damaged { .. } => None,
    };
    let unused = used.and_then(|used| now.duration_since(used).ok());
    Holding {
        name: entry.name.to_string(),
        bytes: file_bytes(entry).0,
        here_bytes: entry.bytes.0,
        unused_s: unused.map(|unused| unused.as_secs()),
        ..Holding::default()
    }
}

/// Answers `stores`: what each node has.
pub(crate) fn ask_stores(fleet: &Fleet, _: &Value) -> Result<Value, String> {
    let stores = fleet.stores();
    Ok(json!({ "nodes": stores }))
}

/// Arguments of `remove` and `send`; no nodes are all that live.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    model: String,
    #[serde(default)]
    nodes: Vec<String>,
}

/// Answers `remove`: what became of a model on each node.
pub(crate) fn ask_remove(fleet: &Fleet, arguments: &Value) -> Result<Value, String> {
    let Body { model, nodes } = Body::deserialize(arguments).map_err(|error| error.to_string())?;
    let removed = fleet.remove(&model, &nodes)?;
    told(&removed)
}

/// Answers `send`, and says how far it is.
pub(crate) fn ask_send(
    fleet: &Fleet,
    arguments: &Value,
    progress: &mut Progress<'_>,
) -> Result<Value, String> {
    let Body { model, nodes } = Body::deserialize(arguments).map_err(|error| error.to_string())?;
    let mut say = |done: u64, of: u64| {
        // A client that is gone wants it sent all the same.
        let _ = progress(json!([done, of]));
    };
    let sent = fleet.send(&model, &nodes, &mut say)?;
    told(&sent)
}

fn told(outcomes: &[Outcome]) -> Result<Value, String> {
    let outcomes = serde_json::to_value(outcomes).map_err(|error| error.to_string())?;
    Ok(json!({ "nodes": outcomes }))
}

/// Prints where which parts of which models lie.
///
/// # Errors
/// A node that does not run.
pub(crate) fn list(as_json: bool) -> anyhow::Result<()> {
    let told = member::ask("stores", json!({}))?;
    if as_json {
        return print(&told.to_string());
    }
    for line in table(&told) {
        print(&line)?;
    }
    Ok(())
}

fn table(told: &Value) -> Vec<String> {
    let heading = ["MODEL", "NODE", "HERE", "SIZE", "KIND"].map(str::to_owned);
    let mut rows = vec![heading];
    let mut notes = Vec::new();
    for store in told["nodes"].as_array().into_iter().flatten() {
        let node = printable(store["node"].as_str().unwrap_or_default()).into_owned();
        rows.extend(
            store["models"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|it| row(&node, it)),
        );
        notes.push(space(&node, store));
    }
    rows[1..].sort();
    let mut lines = aligned(&rows);
    lines.extend(notes);
    lines
}

fn row(node: &str, model: &Value) -> [String; 5] {
    let number = |name: &str| model[name].as_u64().unwrap_or(0);
    let (bytes, here) = (number("bytes"), number("here_bytes"));
    let kind = match (model["is_copy"] == true, model["is_loaded"] == true) {
        (false, false) => "pulled",
        (false, true) => "pulled, in use",
        (true, false) => "copy",
        (true, true) => "copy, in use",
    };
    let here = match here >= bytes {
        true => "all".to_owned(),
        false => format!("{} %", here * 100 / bytes.max(1)),
    };
    let name = printable(model["name"].as_str().unwrap_or_default()).into_owned();
    let size = Bytes(bytes).to_string();
    [name, node.to_owned(), here, size, kind.to_owned()]
}

/// What a node's disk has room for, or why that is not known.
fn space(node: &str, store: &Value) -> String {
    if let Some(problem) = store["problem"].as_str() {
        return format!("{node}: {}", printable(problem));
    }
    let free = store["free_bytes"].as_u64().map(Bytes);
    let free = free.map_or_else(|| "unknown space".to_owned(), |free| free.to_string());
    match store["budget_bytes"].as_u64() {
        Some(budget) => format!("{node}: {free} free, disk budget {}", Bytes(budget)),
        None => format!("{node}: {free} free"),
    }
}

/// Removes a model on the nodes of these names, or on all that live.
///
/// # Errors
/// A node that does not run, one that has the model and keeps it.
pub(crate) fn remove(model: &str, nodes: &[String], as_json: bool) -> anyhow::Result<()> {
    let told = member::ask("remove", json!({ "model": model, "nodes": nodes }))?;
    if as_json {
        print(&told.to_string())?;
    }
    let outcomes = told["nodes"].as_array();
    let outcomes = outcomes.map(Vec::as_slice).unwrap_or_default();
    if outcomes.is_empty() {
        bail!("no node has a model {:?}", printable(model));
    }
    say(outcomes, as_json, |node, bytes| {
        format!("removed {} on {node}, freed {bytes}", printable(model))
    })
}

/// Sends a model of this machine to the nodes of these names; `all` are all that live.
///
/// # Errors
/// A node that does not run, one that does not get the model.
pub(crate) fn send(model: &str, nodes: &[String], as_json: bool) -> anyhow::Result<()> {
    let named = match nodes {
        [all] if all == "all" => &[][..],
        named => named,
    };
    let mut bar = LoadProgress::new();
    let arguments = json!({ "model": model, "nodes": named });
    let told = local::ask(&home::folder()?, "send", arguments, SILENCE, |value| {
        let shown = json!({ "state": "sending", "progress": value });
        // It is no instance that could fail.
        let _ = bar.done(&shown);
    });
    // Clears the bar.
    let _ = bar.done(&json!({ "state": "ready" }));
    let told = told?;
    let outcomes = told["nodes"].as_array();
    let outcomes = outcomes.map(Vec::as_slice).unwrap_or_default();
    say(outcomes, as_json, |node, bytes| {
        format!("{} is on {node} ({bytes})", printable(model))
    })
}

/// Prints what became of each node.
fn say(
    outcomes: &[Value],
    as_json: bool,
    line: impl Fn(&str, Bytes) -> String,
) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    for outcome in outcomes {
        let node = printable(outcome["node"].as_str().unwrap_or_default());
        match (outcome["bytes"].as_u64(), outcome["reason"].as_str()) {
            (Some(bytes), _) if as_json => tell(line(&node, Bytes(bytes))),
            (Some(bytes), _) => print(&line(&node, Bytes(bytes)))?,
            (None, reason) => {
                let reason = printable(reason.unwrap_or("for no reason that it says"));
                failed.push(format!("{node}: {reason}"));
            }
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => bail!("{}", failed.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_space_are_told_by_node() {
        let told = json!({ "nodes": [
            { "node": "mini", "free_bytes": 5_000_000_000_u64, "budget_bytes": null,
              "problem": null, "models": [
                { "name": "qwen", "bytes": 300, "here_bytes": 100, "is_copy": true,
                  "is_loaded": true },
                { "name": "ada", "bytes": 7, "here_bytes": 7 } ] },
            { "node": "old", "models": [], "problem": "it does not answer" } ] });
        let lines = table(&told);
        assert!(lines[0].starts_with("MODEL"), "{lines:?}");
        assert!(
            lines[1].starts_with("ada ") && lines[1].contains(" all "),
            "{lines:?}"
        );
        assert!(
            lines[2].contains(" 33 % ") && lines[2].ends_with("copy, in use"),
            "{lines:?}"
        );
        assert!(
            lines[3].starts_with("mini: ") && lines[3].ends_with(" free"),
            "{lines:?}"
        );
        assert_eq!(lines[4], "old: it does not answer");
    }
}
