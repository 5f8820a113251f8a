//! Cluster commands about stored models: inventory, removal, transfer.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use paceline_cluster::nodes::agent::local::CommandProgress;
use paceline_node::fleet::{CopyOutcome, Fleet, Holding, OwnStore, StoredFile};
use paceline_store::{Error as StoreError, State, StoreEntry, find_for_removal, free_space};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::CommandError;
use crate::commands::NodeSettings;

/// The local store, for this machine's node, with the limits of `spec`.
pub(crate) fn own(spec: &NodeSettings) -> Arc<OwnStore> {
    let home = &spec.home;
    let (listed, removed, folder) = (home.clone(), home.clone(), home.root().to_owned());
    let hashed = home.clone();
    Arc::new(OwnStore {
        list: Box::new(move || {
            let all = paceline_store::list(&listed).unwrap_or_default();
            let now = SystemTime::now();
            all.iter().map(|entry| holding(entry, now)).collect()
        }),
        hashes: Box::new(move || {
            let all = paceline_store::list(&hashed).unwrap_or_default();
            all.into_iter().flat_map(hashes).collect()
        }),
        remove: Box::new(move |name| {
            // Other nodes cannot name paths.
            if Path::new(name).exists() || find_for_removal(&removed, name).is_err() {
                return Ok(None);
            }
            match paceline_store::remove(&removed, name) {
                Ok(done) => Ok(Some(done.bytes.0)),
                Err(StoreError::NotInStore { .. }) => Ok(None),
                Err(error) => Err(error.into()),
            }
        }),
        free: Box::new(move || {
            let there = folder.ancestors().find(|parent| parent.exists())?;
            free_space(there).ok()
        }),
        budget_bytes: spec.disk_budget,
        lets_others_remove: spec.lets_others_remove,
    })
}

/// SHA-256 hashes of a complete model's files.
fn hashes(entry: StoreEntry) -> Vec<String> {
    match entry.state {
        State::Complete { files, .. } => files.into_iter().map(|file| file.sha256).collect(),
        State::Partial | State::Damaged { .. } => Vec::new(),
    }
}

fn holding(entry: &StoreEntry, now: SystemTime) -> Holding {
    let used = match &entry.state {
        State::Complete { last_used, .. } => *last_used,
        State::Partial | State::Damaged { .. } => None,
    };
    let unused = used.and_then(|used| now.duration_since(used).ok());
    Holding {
        name: entry.name.to_string(),
        bytes: entry.file_bytes().0,
        here_bytes: entry.bytes.0,
        unused_s: unused.map(|unused| unused.as_secs()),
        ..Holding::default()
    }
}

/// Handles `stores`: the inventory of each node.
pub(crate) fn ask_stores(fleet: &Fleet, upstreams: Vec<Value>) -> Result<Value, CommandError> {
    let stores = fleet.stores();
    Ok(json!({ "nodes": stores, "upstreams": upstreams }))
}

/// Arguments of `remove` and `send`; an empty list means all live nodes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TransferArguments {
    model: String,
    #[serde(default)]
    nodes: Vec<String>,
}

/// Handles `remove`: the result on each node.
pub(crate) fn ask_remove(fleet: &Fleet, arguments: &Value) -> Result<Value, CommandError> {
    let TransferArguments { model, nodes } = TransferArguments::deserialize(arguments)?;
    told(&fleet.remove(&model, &nodes)?)
}

/// Handles `send`, with progress.
pub(crate) fn ask_send(
    fleet: &Fleet,
    arguments: &Value,
    progress: &mut CommandProgress<'_>,
) -> Result<Value, CommandError> {
    let TransferArguments { model, nodes } = TransferArguments::deserialize(arguments)?;
    let mut say = |done: u64, of: u64| {
        // Continues without the client.
        let _ = progress(json!([done, of]));
    };
    told(&fleet.send(&model, &nodes, &mut say)?)
}

/// Repairs a file of this machine's store; null for an intact one. The command ends with its
/// client.
pub(crate) fn ask_mend(
    fleet: &Fleet,
    arguments: &Value,
    progress: &mut CommandProgress<'_>,
) -> Result<Value, CommandError> {
    let file = StoredFile::deserialize(arguments)?;
    let mended = fleet.mend(&file, &mut |done| progress(json!(done)))?;
    Ok(serde_json::to_value(mended)?)
}

fn told(outcomes: &[CopyOutcome]) -> Result<Value, CommandError> {
    let outcomes = serde_json::to_value(outcomes)?;
    Ok(json!({ "nodes": outcomes }))
}
