//! Why a request to the fleet fails: a load, an unload, a trace, or an operation on stored models.

use std::fmt::Display;

use paceline_base::CallbackError;
use paceline_cluster::nodes::agent::Kind;
use paceline_fleet::{InstanceId, NODES_MAX};

use super::REPLICAS_MAX;

/// Why a request to the fleet fails. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the node is stopping")]
    Stopping,
    /// No instance has this name or id.
    #[error("no instance of {name:?} is loaded")]
    UnknownInstance { name: String },
    #[error("no replica {replica} of {name:?} is loaded")]
    UnknownReplica { replica: u16, name: String },
    #[error("{id:?} is no instance")]
    InstanceId { id: String },
    #[error("instance {id} is not loaded")]
    NotLoaded { id: InstanceId },
    /// A leased instance ended while a program used it.
    #[error("{model} was unloaded")]
    Unloaded { model: String },
    /// The instance is loading or recovering.
    #[error("{model} does not answer yet")]
    NotReady { model: String },
    #[error("{node} does not answer")]
    Silent { node: String },
    #[error("the answer was lost")]
    AnswerLost,
    #[error("{replicas} replicas, expected 1 to {REPLICAS_MAX}")]
    Replicas { replicas: u16 },
    #[error("{got} {what}, expected {least} to {most}")]
    Count {
        what: &'static str,
        got: usize,
        least: usize,
        most: usize,
    },
    /// `notes` say which nodes were left out, or which pairs cannot speak.
    #[error("{wanted} nodes are wanted and {live} {how}{}", listed(notes))]
    TooFewNodes {
        wanted: usize,
        live: usize,
        how: &'static str,
        notes: Vec<String>,
    },
    #[error("{node} is named twice")]
    NamedTwice { node: String },
    #[error("{node} is to decode and to read prompts: name other --nodes")]
    ReadsAndDecodes { node: String },
    #[error(
        "a spare is kept by another node of the instance: ask for --nodes 2 or more, or for no --spare"
    )]
    SpareAlone,
    #[error("nodes for prompts read for one instance: ask for one replica")]
    ReadersOfReplicas,
    #[error("{node} has {kind}, which hands no pages to this node")]
    ReaderKind { node: String, kind: Kind },
    #[error("{name:?} is no name for one more adapter")]
    AdapterName { name: String },
    #[error("{model} makes vectors: every node that has it answers, so it has no replicas")]
    EncoderReplicas { model: String },
    /// Nodes of one model's replicas have other numerics, so that their bits differ.
    #[error("{a} has {kind_a}; {b} has {kind_b}: they share no model's replicas")]
    UnlikeNodes {
        a: String,
        kind_a: Kind,
        b: String,
        kind_b: Kind,
    },
    #[error("{name} is loaded: `paceline unload {name}` comes first")]
    InUse { name: String },
    #[error("it has no model {name:?}")]
    NoModel { name: String },
    /// The system has no random numbers for an id.
    #[error("no random id: {0}")]
    Random(getrandom::Error),
    #[error(transparent)]
    Agent(#[from] paceline_cluster::nodes::agent::Error),
    #[error(transparent)]
    Connection(#[from] crate::workers::connection::ConnectionError),
    /// An instance of this node.
    #[error(transparent)]
    Instance(#[from] crate::Error),
    /// An error about the model, adapter, node or file of this name.
    #[error("{name}: {source}")]
    Of { name: String, source: CallbackError },
    /// Of another node, of copies of files, or of a callback; in its own words.
    #[error(transparent)]
    Other(#[from] CallbackError),
}

impl Error {
    /// A number of nodes of one instance that is out of bounds.
    pub(super) const fn nodes(got: usize) -> Self {
        Self::Count {
            what: "nodes",
            got,
            least: 1,
            most: NODES_MAX,
        }
    }

    /// Fewer nodes live than a request wants; `notes` say which were left out.
    pub(super) const fn too_few(wanted: usize, live: usize, notes: Vec<String>) -> Self {
        Self::TooFewNodes {
            wanted,
            live,
            how: "live",
            notes,
        }
    }

    /// For `map_err`: an error about the thing of this name.
    pub(super) fn of<E: Into<CallbackError>>(name: impl Display) -> impl FnOnce(E) -> Self {
        move |source| Self::Of {
            name: name.to_string(),
            source: source.into(),
        }
    }
}

impl From<String> for Error {
    fn from(reason: String) -> Self {
        Self::Other(reason.into())
    }
}

/// For people: two nodes that cannot speak.
pub(super) fn no_path(a: &str, b: &str) -> String {
    format!("no path between {a} and {b} answers")
}

fn listed(notes: &[String]) -> String {
    notes.iter().map(|note| format!("; {note}")).collect()
}
