//! Model stores of all nodes: contents, disk budgets, and removal on request.
//!
//! ```text
//! asker -> stores: "List", {"Remove":"name"} or {"Has":["SHA256",..]}
//! asker <- {"Store":{..}}, {"Removed":bytes}, {"Has":["SHA256",..]} or {"Refused":"why"}
//! ```
//! Nothing is removed without a request: a node with a spent disk budget reports which removals
//! would free how much.

mod disk;

use std::collections::BTreeSet;
use std::fmt;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use paceline_base::{Bytes, CallbackError};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::{Agent, ClusterAct};
use paceline_cluster::nodes::member::Life;
use paceline_fleet::{InstanceSpec, specs};
use serde::{Deserialize, Serialize};

use super::copies;
use super::copies::{MendedFile, StoredFile};
use super::copies::{QuotaCheck, RepairReport};
use super::hosts::NodeConnection;
use super::{Error, Fleet, Inner, STORES, hub};
use crate::workers::connection::{MessageConnection, receive_message, send_message};
use disk::all;

/// Longest wait for another node's store contents, which it reads from disk.
const LIMIT: Duration = Duration::from_secs(5);

/// Why a node's answer is not understood.
const OTHER_VERSION: &str = "it speaks another version";

/// Why a node keeps a model of its user that another node asks it to remove.
const NOT_A_COPY: &str = "a model of that machine's user, which other machines remove only where \
                          `paceline up --allow-delete` runs";

/// Most models named in an advice.
const ADVICE_MAX: usize = 3;

/// Interval of progress reports of copies.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// A model, or a part of it, on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The model's name, as its user gave it.
    pub name: String,
    /// Length of its files.
    pub bytes: u64,
    /// Bytes of these that are present.
    pub here_bytes: u64,
    /// For a partial file: its ranges as first bytes and ends.
    #[serde(default)]
    pub parts: Vec<(u64, u64)>,
    /// For copies: SHA-256 of the file, in hexadecimal digits.
    #[serde(default)]
    pub sha256: Option<String>,
    /// Whether it was copied from other nodes and not fetched by this machine's user.
    #[serde(default)]
    pub is_copy: bool,
    /// Whether an instance uses it on this node.
    #[serde(default)]
    pub is_loaded: bool,
    /// Seconds since its last use, if known.
    #[serde(default)]
    pub unused_s: Option<u64>,
}

/// Models of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStore {
    pub node: String,
    /// Its models, by name.
    pub models: Vec<Holding>,
    /// Free bytes of its disk.
    pub free_bytes: Option<u64>,
    /// Disk budget for models in bytes.
    pub budget_bytes: Option<u64>,
    /// Why its contents are unknown.
    #[serde(default)]
    pub problem: Option<String>,
}

/// Result of an operation on a node's copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CopyOutcome {
    pub node: String,
    /// Bytes freed, or bytes that the node has now.
    pub bytes: Option<u64>,
    /// The repaired part of the node's copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mended: Option<RepairReport>,
    /// Why nothing was done.
    pub reason: Option<String>,
}

/// Lists the user's models.
pub(super) type ListModels = dyn Fn() -> Vec<Holding> + Send + Sync;

/// Removes one by its name; returns the bytes freed, or `None` if there is none.
pub(super) type RemoveModel = dyn Fn(&str) -> Result<Option<u64>, CallbackError> + Send + Sync;

/// The user's models on this machine, and the disk budget.
#[derive(derive_more::Debug)]
#[debug("models of at most {:?} bytes", self.budget_bytes)]
pub struct OwnStore {
    pub list: Box<ListModels>,
    /// SHA-256 of the files of its models, in hexadecimal digits.
    pub hashes: Box<dyn Fn() -> Vec<String> + Send + Sync>,
    pub remove: Box<RemoveModel>,
    /// Free bytes of the disk.
    pub free: Box<dyn Fn() -> Option<u64> + Send + Sync>,
    /// Disk budget for models and copies in bytes.
    pub budget_bytes: Option<u64>,
    /// Whether other nodes may remove the user's models. Copies they may remove in any case.
    pub lets_others_remove: bool,
}

#[derive(Debug, Serialize, Deserialize)]
enum StoreRequest {
    List,
    Remove(String),
    /// Which of these files it has, completely or partly.
    Has(Vec<String>),
}

#[derive(Debug, Serialize, Deserialize)]
enum StoreResponse {
    Store(NodeStore),
    Removed(u64),
    Has(Vec<String>),
    Refused(String),
}

/// Reads `bytes` as messages about stores, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<StoreRequest>(bytes);
    let _ = serde_json::from_slice::<StoreResponse>(bytes);
}

/// Serves another node, `peer`.
pub(super) fn answer(inner: &Arc<Inner>, line: &dyn MessageConnection, peer: NodeId) {
    let told = match receive_message::<StoreRequest>(line, LIMIT) {
        Ok(Some(StoreRequest::List)) => StoreResponse::Store(inner.own_store()),
        Ok(Some(StoreRequest::Remove(name))) => match inner.remove_here(&name, Some(peer)) {
            Ok(bytes) => StoreResponse::Removed(bytes),
            Err(error) => StoreResponse::Refused(error.to_string()),
        },
        Ok(Some(StoreRequest::Has(files))) => StoreResponse::Has(inner.have(&files)),
        _ => return line.close(),
    };
    // A lost node does not receive the answer.
    let _: Result<(), _> = send_message(line, &told);
}

/// The check of this node's disk budget.
pub(super) fn limit(store: &Arc<OwnStore>, folder: &Path, agent: &Agent) -> Box<QuotaCheck> {
    let (store, folder, agent) = (Arc::clone(store), folder.to_owned(), agent.clone());
    Box::new(move |more| {
        let free = (store.free)().unwrap_or(u64::MAX);
        let budget = store.budget_bytes;
        if more <= free && budget.is_none() {
            return Ok(());
        }
        let views = agent.nodes();
        let name = views.first().map_or("", |own| own.facts.name.as_str());
        let models = all(&store, &folder, &used(&agent));
        let fits = fits_disk(more, (free, &folder), &models, name).and_then(|()| match budget {
            Some(budget) => may_have(more, budget, &models, name),
            None => Ok(()),
        });
        fits.map_err(|short| short.to_string())
    })
}

/// Why a node takes no more bytes of models.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum NoRoom {
    #[error("{needed} more do not fit on the file system of {folder}, {free} are free: {advice}")]
    Disk {
        needed: Bytes,
        free: Bytes,
        folder: String,
        advice: String,
    },
    #[error(
        "{needed} more are over the disk budget of {budget}, of which {held} are spent: {advice}"
    )]
    Budget {
        needed: Bytes,
        budget: Bytes,
        held: Bytes,
        advice: String,
    },
}

/// Whether `more` bytes fit on the file system of `folder` with `free` bytes. Pure.
fn fits_disk(
    more: u64,
    (free, folder): (u64, &Path),
    models: &[Holding],
    node: &str,
) -> Result<(), NoRoom> {
    match more <= free {
        true => Ok(()),
        false => Err(NoRoom::Disk {
            needed: Bytes(more),
            free: Bytes(free),
            folder: folder.display().to_string(),
            advice: removals(models, node)
                .unwrap_or_else(|| "PACELINE_HOME may name a folder on a larger one".to_owned()),
        }),
    }
}

/// Whether `more` bytes fit in the budget in addition to these models. Pure.
fn may_have(more: u64, budget: u64, models: &[Holding], node: &str) -> Result<(), NoRoom> {
    let held: u64 = models.iter().map(|it| it.here_bytes).sum();
    match held.saturating_add(more) <= budget {
        true => Ok(()),
        false => Err(NoRoom::Budget {
            needed: Bytes(more),
            budget: Bytes(budget),
            held: Bytes(held),
            advice: removals(models, node)
                .unwrap_or_else(|| "`paceline up --disk-budget` takes a larger one".to_owned()),
        }),
    }
}

/// Commands that remove models and the bytes they free, least recently used first; `None` if every
/// model is loaded.
fn removals(models: &[Holding], node: &str) -> Option<String> {
    let mut idle: Vec<&Holding> = models.iter().filter(|it| !it.is_loaded).collect();
    idle.sort_by_key(|it| std::cmp::Reverse((it.unused_s.unwrap_or(u64::MAX), it.here_bytes)));
    let free = |it: &&Holding| {
        let bytes = Bytes(it.here_bytes);
        format!("`paceline rm {} --node {node}` frees {bytes}", it.name)
    };
    let removals: Vec<String> = idle.iter().take(ADVICE_MAX).map(free).collect();
    (!removals.is_empty()).then(|| removals.join(", "))
}

/// SHA-256 and names of the models that instances use on a node.
fn used(agent: &Agent) -> Vec<(String, String)> {
    let (map, own) = (agent.map(), agent.id());
    let computes =
        |wanted: &InstanceSpec| wanted.nodes.contains(&own) || wanted.prompts.contains(&own);
    let is_here = |wanted: &InstanceSpec| computes(wanted) || wanted.source == Some(own);
    let here = specs(&map).filter(|(.., wanted)| is_here(wanted));
    let models = here.flat_map(|(.., wanted)| wanted.files());
    models.map(|it| (it.sha256, it.model)).collect()
}

/// Whether another node may remove these models, all of one name: the user's own stay.
fn copies_only(models: &[Holding]) -> Result<(), String> {
    let own = models.iter().find(|it| !it.is_copy);
    match own.filter(|_| !models.iter().any(|it| it.is_copy)) {
        Some(own) => Err(format!("{} is {NOT_A_COPY}", own.name)),
        None => Ok(()),
    }
}

impl Inner {
    /// The models of this node.
    pub(super) fn own_store(&self) -> NodeStore {
        let store = &self.spec.store;
        let mut models = all(store, &self.copies.folder, &used(&self.agent));
        let map = self.agent.map();
        for model in &mut models {
            let origin = model.sha256.as_ref();
            if let Some(origin) = origin.and_then(|sha256| hub::of(&map, sha256)) {
                model.bytes = origin.bytes; // the full size of a download
            }
            let held = model
                .sha256
                .as_ref()
                .and_then(|sha256| self.copies.part(sha256));
            if let Some(held) = held.filter(|held| !held.partial.is_complete()) {
                let span = |(start, end): (u64, u64)| held.partial.groups().span(&(start..end));
                let spans = held.partial.runs().into_iter().map(span);
                model.parts = spans.map(|span| (span.start, span.end)).collect();
                model.here_bytes = held.partial.bytes_here();
            }
        }
        NodeStore {
            node: self.name(self.agent.id()),
            models,
            free_bytes: (store.free)(),
            budget_bytes: store.budget_bytes,
            problem: None,
        }
    }

    /// Removes a model of the user's store and all copies of this name, at the request of `asker`
    /// or of this node's user. Returns the bytes freed.
    fn remove_here(&self, name: &str, asker: Option<NodeId>) -> Result<u64, Error> {
        let models = self.own_store().models.into_iter();
        let models: Vec<Holding> = models.filter(|it| it.name == name).collect();
        if models.iter().any(|it| it.is_loaded) {
            let name = name.to_owned();
            return Err(Error::InUse { name });
        }
        let store = &self.spec.store;
        let mut freed = match asker.is_none() || store.lets_others_remove {
            true => (store.remove)(name)?,
            false => copies_only(&models).map(|()| None)?,
        };
        for copy in models.iter().filter_map(|it| it.sha256.as_deref()) {
            let bytes = self.copies.forget(copy).map_err(CallbackError::from)?;
            freed = Some(freed.unwrap_or(0) + bytes);
        }
        let freed = freed.ok_or_else(|| Error::NoModel {
            name: name.to_owned(),
        })?;
        self.agent.record(ClusterAct::Removed {
            name: name.to_owned(),
            by: asker.map(|id| self.name(id)),
        });
        Ok(freed)
    }

    /// The files of this list that this node has, completely or partly, by SHA-256.
    fn have(&self, files: &[String]) -> Vec<String> {
        let own: BTreeSet<String> = (self.spec.store.hashes)().into_iter().collect();
        let has = |file: &&String| own.contains(*file) || self.copies.has(file);
        files.iter().filter(has).cloned().collect()
    }

    /// The files of this list that some live node has; `None` if a node does not answer.
    pub(super) fn held_anywhere(&self, files: &[String]) -> Option<BTreeSet<String>> {
        let nodes = self.nodes_named(&[]).ok()?;
        let asked = StoreRequest::Has(files.to_vec());
        let ask = |node| self.ask_store(node, &asked);
        let mut held = BTreeSet::new();
        for (_, told) in self.ask_stores(&nodes, &ask) {
            match told {
                Ok(StoreResponse::Has(files)) => held.extend(files),
                _ => return None,
            }
        }
        Some(held)
    }

    /// Queries a node, which may be this one.
    fn ask_store(&self, node: NodeId, asked: &StoreRequest) -> Result<StoreResponse, Error> {
        if node == self.agent.id() {
            return match asked {
                StoreRequest::List => Ok(StoreResponse::Store(self.own_store())),
                StoreRequest::Remove(name) => {
                    self.remove_here(name, None).map(StoreResponse::Removed)
                }
                StoreRequest::Has(files) => Ok(StoreResponse::Has(self.have(files))),
            };
        }
        let line = NodeConnection(self.agent.open(node, STORES, LIMIT)?);
        send_message(&line, asked)?;
        // Removing a large file takes seconds on some disks.
        match receive_message(&line, LIMIT * 4)? {
            Some(StoreResponse::Refused(reason)) => Err(reason.into()),
            Some(told) => Ok(told),
            None => Err(Error::Silent { node: "it".into() }),
        }
    }

    /// Queries nodes in parallel; returns each with its name, in order.
    fn ask_stores<T: Send>(
        &self,
        nodes: &[NodeId],
        ask: &(dyn Fn(NodeId) -> Result<T, Error> + Sync),
    ) -> Vec<(String, Result<T, Error>)> {
        std::thread::scope(|scope| {
            let asked = nodes.iter().map(|node| scope.spawn(move || ask(*node)));
            let asked: Vec<_> = asked.collect();
            let answers = asked.into_iter().map(|thread| {
                let ended = thread.join();
                ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            let names = nodes.iter().map(|node| self.name(*node));
            names.zip(answers).collect()
        })
    }

    /// The nodes of these names; all live ones if there are no names.
    fn nodes_named(&self, names: &[String]) -> Result<Vec<NodeId>, Error> {
        if names.is_empty() {
            let nodes = self.agent.nodes().into_iter();
            let living = nodes.filter(|node| matches!(node.state, Life::Alive | Life::Suspect));
            let mut ids: Vec<NodeId> = living.map(|node| node.id).collect();
            if !ids.contains(&self.agent.id()) {
                ids.insert(0, self.agent.id());
            }
            return Ok(ids);
        }
        let find = |name: &String| Ok(self.agent.find(name)?.id);
        names.iter().map(find).collect()
    }
}

impl Fleet {
    /// The models of each live node, this one first.
    pub fn stores(&self) -> Vec<NodeStore> {
        let inner = &self.inner;
        let nodes = inner.nodes_named(&[]).unwrap_or_default();
        let ask = |node| inner.ask_store(node, &StoreRequest::List);
        let store = |(node, told): (String, Result<StoreResponse, Error>)| match told {
            // The node's own name may not be unique.
            Ok(StoreResponse::Store(store)) => NodeStore { node, ..store },
            told => NodeStore {
                node,
                models: Vec::new(),
                free_bytes: None,
                budget_bytes: None,
                problem: Some(match told {
                    Err(error) => error.to_string(),
                    Ok(_) => OTHER_VERSION.to_owned(),
                }),
            },
        };
        inner
            .ask_stores(&nodes, &ask)
            .into_iter()
            .map(store)
            .collect()
    }

    /// Removes a model on the nodes of these names, or on all live nodes that have it.
    ///
    /// # Errors
    /// A name without a node.
    pub fn remove(&self, model: &str, names: &[String]) -> Result<Vec<CopyOutcome>, Error> {
        let inner = &self.inner;
        let mut nodes = inner.nodes_named(names)?;
        if names.is_empty() {
            let has = |node| inner.ask_store(node, &StoreRequest::List);
            let told = inner.ask_stores(&nodes, &has);
            let lacks = |told: &Result<StoreResponse, Error>| match told {
                Ok(StoreResponse::Store(store)) => store.models.iter().all(|it| it.name != model),
                _ => false,
            };
            let mut told = told.iter();
            nodes.retain(|_| told.next().is_some_and(|(_, told)| !lacks(told)));
        }
        let remove = |node| inner.ask_store(node, &StoreRequest::Remove(model.to_owned()));
        let outcome = |(node, told): (String, Result<StoreResponse, Error>)| match told {
            Ok(StoreResponse::Removed(bytes)) => CopyOutcome::done(node, bytes),
            Ok(_) => CopyOutcome::not(node, OTHER_VERSION),
            Err(error) => CopyOutcome::not(node, error),
        };
        let told = inner.ask_stores(&nodes, &remove);
        Ok(told.into_iter().map(outcome).collect())
    }

    /// Repairs a file of this machine's store from other nodes or the hub. `progress` is called
    /// with the bytes compared or fetched so far, some times a second; false ends the call.
    ///
    /// # Errors
    /// The damaged bytes, and why no source supplied them.
    pub fn mend(
        &self,
        file: &StoredFile,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Option<MendedFile>, Error> {
        let (inner, done, is_over) = (&self.inner, AtomicU64::new(0), AtomicBool::new(false));
        let count = |bytes: u64| {
            done.fetch_add(bytes, Ordering::Relaxed);
            !is_over.load(Ordering::Relaxed)
        };
        std::thread::scope(|scope| {
            let mend = || inner.copies.mend_stored(&inner.agent, file, &count);
            let mending = scope.spawn(mend);
            while !mending.is_finished() {
                is_over.fetch_or(!progress(done.load(Ordering::Relaxed)), Ordering::Relaxed);
                std::thread::sleep(TELL_EVERY);
            }
            let ended = mending.join();
            Ok(ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
        })
    }

    /// Makes the nodes of these names, or all live ones, fetch all of a model of this machine. Each
    /// fetches from all nodes with parts of it. Verifies every byte of existing copies and repairs
    /// them. `progress` receives bytes done and total, some times a second.
    ///
    /// # Errors
    /// The model is not on this machine, or a name has no node.
    pub fn send(
        &self,
        model: &str,
        names: &[String],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<CopyOutcome>, Error> {
        let inner = &self.inner;
        let mut nodes = inner.nodes_named(names)?;
        nodes.retain(|node| *node != inner.agent.id());
        let wanted = std::thread::scope(|scope| {
            let hashed = scope.spawn(|| inner.sent(model));
            while !hashed.is_finished() {
                progress(0, 0);
                std::thread::sleep(TELL_EVERY);
            }
            let ended = hashed.join();
            ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        let done: Vec<AtomicU64> = nodes.iter().map(|_| AtomicU64::new(0)).collect();
        let all = wanted.bytes.saturating_mul(nodes.len() as u64);
        let ensure = |node: NodeId| {
            let at = nodes.iter().position(|other| *other == node);
            let told = |bytes: u64| {
                if let Some(at) = at {
                    done[at].store(bytes, Ordering::Relaxed);
                }
            };
            Ok(copies::ensure_right(&inner.agent, node, &wanted, &told)?)
        };
        let told = std::thread::scope(|scope| {
            let (nodes, ensure) = (&nodes, &ensure);
            let asked = scope.spawn(move || inner.ask_stores(nodes, ensure));
            while !asked.is_finished() {
                progress(done.iter().map(|it| it.load(Ordering::Relaxed)).sum(), all);
                std::thread::sleep(TELL_EVERY);
            }
            let ended = asked.join();
            ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        let outcome = |(node, told): (String, Result<Option<RepairReport>, Error>)| match told {
            Ok(mended) => CopyOutcome {
                mended,
                ..CopyOutcome::done(node, wanted.bytes)
            },
            Err(error) => CopyOutcome::not(node, error),
        };
        Ok(told.into_iter().map(outcome).collect())
    }
}

impl CopyOutcome {
    fn done(node: String, bytes: u64) -> Self {
        Self {
            node,
            bytes: Some(bytes),
            mended: None,
            reason: None,
        }
    }

    fn not(node: String, reason: impl fmt::Display) -> Self {
        Self {
            node,
            bytes: None,
            mended: None,
            reason: Some(reason.to_string()),
        }
    }
}

#[cfg(test)]
mod tests;
