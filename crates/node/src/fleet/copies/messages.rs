//! Messages about copies between an owner and the nodes of its instance.

use std::collections::BTreeSet;
use std::time::Duration;

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::Agent;
use paceline_fleet::InstanceSpec;
use serde::{Deserialize, Serialize};

use super::{RepairReport, SILENCE, TELL_EVERY};
use crate::fleet::hosts::NodeConnection;
use crate::fleet::roots::{self, FileRoot};
use crate::fleet::{FETCH, name_of};
use crate::workers::connection::{receive_message, send_message};
use crate::workers::host::ModelName;

/// Request that a node fetches a model. A node of a build without the fields with a default copies
/// the whole file from the requesting node and verifies nothing.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::fleet) struct Fetch {
    pub(in crate::fleet) model: ModelName,
    pub(in crate::fleet) bytes: u64,
    /// A node that lacks the model only says so.
    #[serde(default)]
    pub(in crate::fleet) asks: bool,
    /// The parts that its workers need are sufficient.
    #[serde(default)]
    pub(in crate::fleet) parts: bool,
    /// Bytes of it that the node's workers will fetch, at least: refused if the disk lacks them.
    #[serde(default)]
    pub(in crate::fleet) share: u64,
    /// The root of its hash tree in the requesting node's map; the receiver's map may be older.
    #[serde(default)]
    pub(in crate::fleet) rooted: Option<FileRoot>,
    /// Verify every byte of the copy, not only those needed to open it.
    #[serde(default)]
    pub(in crate::fleet) checks: bool,
}

/// A node's report of its copy.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum CopyReport {
    /// Bytes fetched so far.
    Done(u64),
    Ready,
    /// It was damaged, and is ready now.
    Mended(RepairReport),
    Refused(String),
}

/// Reads `bytes` as messages about a copy, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<Fetch>(bytes);
    let _ = serde_json::from_slice::<CopyReport>(bytes);
}

/// Makes another node fetch the model of an instance and waits for it. `progress` receives byte
/// counts.
pub(in crate::fleet) fn ensure(
    agent: &Agent,
    node: NodeId,
    wanted: &InstanceSpec,
    progress: &dyn Fn(u64),
) -> Result<(), String> {
    let line = request(agent, node, &fetch(agent, wanted), SILENCE)?;
    follow(&line, progress).map(drop)
}

/// As [`ensure`], but verifies every byte of an existing copy. Returns what was repaired.
pub(in crate::fleet) fn ensure_right(
    agent: &Agent,
    node: NodeId,
    wanted: &InstanceSpec,
    progress: &dyn Fn(u64),
) -> Result<Option<RepairReport>, String> {
    let fetch = Fetch {
        checks: true,
        ..fetch(agent, wanted)
    };
    follow(&request(agent, node, &fetch, SILENCE)?, progress)
}

/// As [`ensure`], but the node only fetches the bytes needed to open the file. Its workers request
/// the rest while they load, at least `share` bytes. A node without disk space for them refuses.
pub(in crate::fleet) fn ensure_part(
    agent: &Agent,
    node: NodeId,
    (wanted, share): (&InstanceSpec, u64),
    progress: &dyn Fn(u64),
) -> Result<(), String> {
    let fetch = Fetch {
        parts: true,
        share,
        ..fetch(agent, wanted)
    };
    follow(&request(agent, node, &fetch, SILENCE)?, progress).map(drop)
}

/// Waits until a node has fetched the requested model.
fn follow(line: &NodeConnection, progress: &dyn Fn(u64)) -> Result<Option<RepairReport>, String> {
    loop {
        // Hashing a file of 100 GB on a slow disk takes minutes without a message.
        let told = receive_message::<CopyReport>(line, SILENCE * 20)
            .map_err(|broken| broken.to_string())?;
        match told {
            Some(CopyReport::Done(bytes)) => progress(bytes),
            Some(CopyReport::Ready) => return Ok(None),
            Some(CopyReport::Mended(mended)) => return Ok(Some(mended)),
            Some(CopyReport::Refused(reason)) => return Err(reason),
            None => return Err("it says nothing about its copy of the model".to_owned()),
        }
    }
}

/// As [`ensure`], but waits only while `goes_on` returns true; it is called some times a second.
/// `limit` bounds the first answer.
pub(in crate::fleet) fn ensure_while(
    agent: &Agent,
    node: NodeId,
    wanted: &InstanceSpec,
    limit: Duration,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<(), String> {
    let line = request(agent, node, &fetch(agent, wanted), limit.min(SILENCE))?;
    while goes_on() {
        match receive_message::<CopyReport>(&line, TELL_EVERY)
            .map_err(|broken| broken.to_string())?
        {
            Some(CopyReport::Ready | CopyReport::Mended(_)) => return Ok(()),
            Some(CopyReport::Refused(reason)) => return Err(reason),
            Some(CopyReport::Done(_)) | None => {}
        }
    }
    Err("its copy of the model is not complete in time".to_owned())
}

/// The given nodes that have the model of an instance. A node that does not confirm it within
/// `limit` counts as lacking it.
pub(in crate::fleet) fn holders(
    agent: &Agent,
    nodes: &[NodeId],
    wanted: &InstanceSpec,
    limit: Duration,
) -> BTreeSet<NodeId> {
    let fetch = Fetch {
        asks: true,
        ..fetch(agent, wanted)
    };
    let has = |node: NodeId| {
        let line = request(agent, node, &fetch, limit).ok()?;
        let told = receive_message::<CopyReport>(&line, limit);
        matches!(told, Ok(Some(CopyReport::Ready))).then_some(node)
    };
    std::thread::scope(|scope| {
        let has = &has;
        let asked: Vec<_> = nodes
            .iter()
            .map(|node| scope.spawn(move || has(*node)))
            .collect();
        let answers = asked.into_iter().filter_map(|thread| {
            let ended = thread.join();
            ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        answers.collect()
    })
}

/// The request for an instance's model.
pub(super) fn fetch(agent: &Agent, wanted: &InstanceSpec) -> Fetch {
    Fetch {
        model: name_of(wanted),
        bytes: wanted.bytes,
        asks: false,
        parts: false,
        share: 0,
        rooted: roots::of(&agent.map(), &wanted.sha256).ok(),
        checks: false,
    }
}

/// Opens a connection to a node and sends it the request.
fn request(
    agent: &Agent,
    node: NodeId,
    fetch: &Fetch,
    limit: Duration,
) -> Result<NodeConnection, String> {
    let opened = agent.open(node, FETCH, limit);
    let line = NodeConnection(opened.map_err(|error| error.to_string())?);
    send_message(&line, fetch).map_err(|broken| broken.to_string())?;
    Ok(line)
}
