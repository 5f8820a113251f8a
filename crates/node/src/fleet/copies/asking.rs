//! Messages about copies between an owner and the nodes of its instance.

use std::collections::BTreeSet;
use std::time::Duration;

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::placement::Wanted;
use serde::{Deserialize, Serialize};

use super::{Mended, SILENCE, TELL_EVERY};
use crate::crew::host::ModelName;
use crate::crew::line::{hear, say};
use crate::fleet::places::Wire;
use crate::fleet::rooted::{self, Rooted};
use crate::fleet::{FETCH, name_of};

/// A model that a node is to have.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::fleet) struct Fetch {
    pub(in crate::fleet) model: ModelName,
    pub(in crate::fleet) bytes: u64,
    /// A node that lacks it is to say so, and copies nothing. Earlier versions copy it.
    #[serde(default)]
    pub(in crate::fleet) asks: bool,
    /// The parts that its workers need are enough. Earlier versions copy all of it.
    #[serde(default)]
    pub(in crate::fleet) parts: bool,
    /// The root of its hash tree, as the map of the asking node has it: that of the node that is
    /// asked may be older. Earlier versions copy the file from the asking node.
    #[serde(default)]
    pub(in crate::fleet) rooted: Option<Rooted>,
    /// Every byte of its copy is to be compared, not just those that it takes to open it. Earlier
    /// versions compare none.
    #[serde(default)]
    pub(in crate::fleet) checks: bool,
}

/// A node's report of its copy.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Told {
    /// Bytes that it has.
    Done(u64),
    Ready,
    /// It was damaged, and is ready now.
    Mended(Mended),
    Refused(String),
}

/// Reads `bytes` as messages about a copy, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<Fetch>(bytes);
    let _ = serde_json::from_slice::<Told>(bytes);
}

/// Has another node have the model of an instance; waits until it has. `progress` hears bytes.
pub(in crate::fleet) fn ensure(
    agent: &Agent,
    node: NodeId,
    wanted: &Wanted,
    progress: &dyn Fn(u64),
) -> Result<(), String> {
    let line = request(agent, node, &fetch(agent, wanted), SILENCE)?;
    follow(&line, progress).map(drop)
}

/// As [`ensure`], but a copy that the node has is checked to its last byte. Returns what of it was
/// mended.
pub(in crate::fleet) fn ensure_right(
    agent: &Agent,
    node: NodeId,
    wanted: &Wanted,
    progress: &dyn Fn(u64),
) -> Result<Option<Mended>, String> {
    let fetch = Fetch {
        checks: true,
        ..fetch(agent, wanted)
    };
    follow(&request(agent, node, &fetch, SILENCE)?, progress)
}

/// As [`ensure`], but the node fetches what it needs to open the file: its workers ask for the
/// rest while they load.
pub(in crate::fleet) fn ensure_part(
    agent: &Agent,
    node: NodeId,
    wanted: &Wanted,
    progress: &dyn Fn(u64),
) -> Result<(), String> {
    let fetch = Fetch {
        parts: true,
        ..fetch(agent, wanted)
    };
    follow(&request(agent, node, &fetch, SILENCE)?, progress).map(drop)
}

/// Waits until a node that was told to have a model has it.
fn follow(line: &Wire, progress: &dyn Fn(u64)) -> Result<Option<Mended>, String> {
    loop {
        // To hash a file of 100 GB on a slow disk takes minutes, in which nothing is said.
        let told = hear::<Told>(line, SILENCE * 20).map_err(|broken| broken.to_string())?;
        match told {
            Some(Told::Done(bytes)) => progress(bytes),
            Some(Told::Ready) => return Ok(None),
            Some(Told::Mended(mended)) => return Ok(Some(mended)),
            Some(Told::Refused(reason)) => return Err(reason),
            None => return Err("it says nothing about its copy of the model".to_owned()),
        }
    }
}

/// As [`ensure`], but waits only as long as `goes_on`, which is asked some times a second. The node
/// has `limit` to answer at all.
pub(in crate::fleet) fn ensure_while(
    agent: &Agent,
    node: NodeId,
    wanted: &Wanted,
    limit: Duration,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<(), String> {
    let line = request(agent, node, &fetch(agent, wanted), limit.min(SILENCE))?;
    while goes_on() {
        match hear::<Told>(&line, TELL_EVERY).map_err(|broken| broken.to_string())? {
            Some(Told::Ready | Told::Mended(_)) => return Ok(()),
            Some(Told::Refused(reason)) => return Err(reason),
            Some(Told::Done(_)) | None => {}
        }
    }
    Err("its copy of the model is not complete in time".to_owned())
}

/// The nodes, of those given, that have the model of an instance. A node that does not say so
/// within `limit` counts as one that lacks it.
pub(in crate::fleet) fn holders(
    agent: &Agent,
    nodes: &[NodeId],
    wanted: &Wanted,
    limit: Duration,
) -> BTreeSet<NodeId> {
    let fetch = Fetch {
        asks: true,
        ..fetch(agent, wanted)
    };
    let has = |node: NodeId| {
        let line = request(agent, node, &fetch, limit).ok()?;
        let told = hear::<Told>(&line, limit);
        matches!(told, Ok(Some(Told::Ready))).then_some(node)
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

/// Asks for a copy of an instance's model.
pub(super) fn fetch(agent: &Agent, wanted: &Wanted) -> Fetch {
    Fetch {
        model: name_of(wanted),
        bytes: wanted.bytes,
        asks: false,
        parts: false,
        rooted: rooted::of(&agent.map(), &wanted.sha256).ok(),
        checks: false,
    }
}

/// A line to a node that was told which model it is to have.
fn request(agent: &Agent, node: NodeId, fetch: &Fetch, limit: Duration) -> Result<Wire, String> {
    let opened = agent.open(node, FETCH, limit);
    let line = Wire(opened.map_err(|error| error.to_string())?);
    say(&line, fetch).map_err(|broken| broken.to_string())?;
    Ok(line)
}
