//! Errors of a node's reports and of loading a model.

use std::error::Error as StdError;
use std::io;
use std::path::{Path, PathBuf};

use paceline_auth::keys;
use paceline_base::CallbackError;
use paceline_store::Error as StoreError;
use paceline_text::tokenizer;

use crate::downloads::reason;

/// Why a node cannot report on itself, or cannot load a model.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot write events to {}", path.display())]
    Events { path: PathBuf, source: io::Error },
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// A model's files are unusable; the cause does not name them.
    #[error("cannot load {}", path.display())]
    Load {
        path: PathBuf,
        source: Box<paceline_model::Error>,
    },
    /// A model's files are unusable; the cause names them.
    #[error(transparent)]
    Model(Box<paceline_model::Error>),
    #[error(transparent)]
    Tokenizer(#[from] tokenizer::Error),
}

impl Error {
    /// Adds the path, unless the error already names the right one of several files.
    pub(crate) fn of_model(path: &Path, source: paceline_model::Error) -> Self {
        let source = Box::new(source);
        match source.to_string().starts_with(&path.display().to_string()) {
            true => Self::Model(source),
            false => Self::Load {
                path: path.to_owned(),
                source,
            },
        }
    }
}

/// Why a command of a node fails.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("the node is starting")]
    Starting,
    #[error("the node is stopping")]
    Stopping,
    #[error("the node has no command {command:?}")]
    UnknownCommand { command: String },
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("missing field `model`")]
    NoModel,
    #[error("no other machine could take over {}", models.join(", "))]
    NotMoved { models: Vec<String> },
    /// Each of `users` is an instance with its machines.
    #[error("{model} is loaded: {}", users.join("; "))]
    Loaded { model: String, users: Vec<String> },
    #[error("{model} is on this machine")]
    OnMachine { model: String },
    #[error("{model} is being fetched")]
    Downloading { model: String },
    #[error("{limit} models are being fetched: wait for one")]
    TooManyDownloads { limit: usize },
    #[error("no machine has the id {id:?}")]
    UnknownNode { id: String },
    #[error("the node does not send its lines")]
    NoLines,
    /// The text has all causes.
    #[error("{}", reason(.0))]
    Store(StoreError),
    /// The text has all causes.
    #[error("{}", chain(.0))]
    Keys(keys::Error),
    #[error(transparent)]
    Fleet(#[from] paceline_node::fleet::Error),
    /// From another crate, or from the program around the node.
    #[error(transparent)]
    Other(#[from] CallbackError),
}

impl CommandError {
    pub(crate) fn other(error: impl Into<CallbackError>) -> Self {
        Self::Other(error.into())
    }
}

/// An error with all of its causes, on one line.
pub fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_causes_are_told() {
        let error = Error::Events {
            path: "a".into(),
            source: io::Error::other("full"),
        };
        assert_eq!(chain(&error), "cannot write events to a: full");
    }
}
