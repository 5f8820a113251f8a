//! Stored models of the cluster: inventory, removal, and transfer.

use std::time::Duration;

use anyhow::bail;
use paceline_base::Bytes;
use paceline_board::tables;
use paceline_cluster::nodes::agent::local;
use serde_json::{Value, json};

use crate::instances::LoadProgress;
use crate::output::{print, print_err};
use crate::{home, member};

/// Read timeout of a transfer; the node reports five times a second.
pub(crate) const SILENCE: Duration = Duration::from_secs(60);

/// Prints the stored model ranges, per node.
pub(crate) fn list(as_json: bool) -> anyhow::Result<()> {
    let told = member::ask("stores", json!({}))?;
    if as_json {
        return print(&told.to_string());
    }
    for line in tables::stores(&told) {
        print(&line)?;
    }
    Ok(())
}

/// Removes a model on the named nodes, or on all live ones.
pub(crate) fn remove(model: &str, nodes: &[String], as_json: bool) -> anyhow::Result<()> {
    let told = member::ask("remove", json!({ "model": model, "nodes": nodes }))?;
    if as_json {
        print(&told.to_string())?;
    }
    let outcomes = told["nodes"].as_array();
    let outcomes = outcomes.map(Vec::as_slice).unwrap_or_default();
    if outcomes.is_empty() {
        bail!("no node has a model {model:?}");
    }
    say(outcomes, as_json, |node, bytes, _| {
        format!("removed {model} on {node}, freed {bytes}")
    })
}

/// Sends a local model to the named nodes; `all` means all live ones.
pub(crate) fn send(model: &str, nodes: &[String], as_json: bool) -> anyhow::Result<()> {
    let named = match nodes {
        [all] if all == "all" => &[][..],
        named => named,
    };
    let mut bar = LoadProgress::new();
    let arguments = json!({ "model": model, "nodes": named });
    let told = local::ask(&home::folder()?, "send", arguments, SILENCE, |value| {
        let shown = json!({ "state": "sending", "progress": value });
        // Not an instance, so it cannot fail.
        let _ = bar.done(&shown);
    });
    // Clears the bar.
    let _ = bar.done(&json!({ "state": "ready" }));
    let told = told?;
    let outcomes = told["nodes"].as_array();
    let outcomes = outcomes.map(Vec::as_slice).unwrap_or_default();
    say(outcomes, as_json, |node, bytes, outcome| {
        let mended = mended(&outcome["mended"]);
        format!("{model} is on {node} ({bytes}){mended}")
    })
}

/// The repaired part of a node's copy, as text; empty if none.
fn mended(mended: &Value) -> String {
    match (mended["blocks"].as_u64(), mended["bytes"].as_u64()) {
        (Some(blocks), Some(bytes)) => {
            let plural = if blocks == 1 { "" } else { "s" };
            format!(
                ", mended {blocks} block{plural} ({}) of its copy",
                Bytes(bytes)
            )
        }
        _ => String::new(),
    }
}

/// Prints the result of each node.
fn say(
    outcomes: &[Value],
    as_json: bool,
    line: impl Fn(&str, Bytes, &Value) -> String,
) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    for outcome in outcomes {
        let node = outcome["node"].as_str().unwrap_or_default();
        match (outcome["bytes"].as_u64(), outcome["reason"].as_str()) {
            (Some(bytes), _) if as_json => print_err(line(node, Bytes(bytes), outcome)),
            (Some(bytes), _) => print(&line(node, Bytes(bytes), outcome))?,
            (None, reason) => {
                let reason = reason.unwrap_or("for no reason that it says");
                failed.push(format!("{node}: {reason}"));
            }
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => bail!("{}", failed.join("; ")),
    }
}
