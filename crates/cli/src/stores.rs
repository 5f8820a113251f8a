//! Models over the cluster: where which parts lie, what is removed, and where a pulled one is sent.

use std::time::Duration;

use anyhow::bail;
use paceline_base::Bytes;
use paceline_cluster::nodes::agent::local;
use serde_json::{Value, json};

use crate::instances::LoadProgress;
use crate::nodes::aligned;
use crate::output::{print, printable, tell};
use crate::{home, member};

/// Longest silence of a node that sends a model: it says how far it is five times a second.
const SILENCE: Duration = Duration::from_secs(60);

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
