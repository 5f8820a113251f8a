//! What can go wrong in `paceline kb`, and what to do about it.

use std::path::PathBuf;

use crate::output::printable;

/// Why a command of the knowledge base ends early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No finding has this id.
    #[error("no finding has the id {id}")]
    NoSuchFinding {
        /// The id asked for.
        id: u32,
        /// Ids that look like it.
        near: Vec<u32>,
    },
    /// No skill and no topic has this name.
    #[error("no topic is called {name:?}")]
    NoSuchTopic {
        /// As typed.
        name: String,
        /// Names that look like it.
        near: Vec<String>,
    },
    /// Several topics have this in their name.
    #[error("{name:?} is part of the names of {} topics, need one", choices.len())]
    AmbiguousTopic {
        /// As typed.
        name: String,
        /// The topics as one types them.
        choices: Vec<String>,
    },
    /// A query or a question without words, or of stop words only.
    #[error("nothing to look for in {text:?}")]
    NoWords {
        /// As typed.
        text: String,
    },
    /// The path is no file.
    #[error("{} is not a file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The file's name cannot be kept.
    #[error("{} has no name that its findings could be kept under", path.display())]
    NoName {
        /// The path.
        path: PathBuf,
    },
    /// The file is not valid, by itself or beside what is there.
    #[error("{} is not taken: {source}", path.display())]
    Invalid {
        /// The path.
        path: PathBuf,
        /// What is wrong, with line and key.
        source: paceline_kb::Error,
    },
    /// Another file of the user's would be left without findings that it refers to.
    #[error("your findings in {name} would be left out then: {source}")]
    Orphan {
        /// The other file.
        name: String,
        /// What would be wrong with it.
        source: paceline_kb::Error,
    },
    /// A file of this name, with other contents, is there already.
    #[error("{} is there already, with other findings", kept.display())]
    Taken {
        /// The file in the knowledge base's folder.
        kept: PathBuf,
    },
}

impl Error {
    /// What the user can do.
    pub(crate) fn hint(&self) -> String {
        match self {
            Self::NoSuchFinding { near, .. } => {
                let near: Vec<String> = near.iter().map(ToString::to_string).collect();
                format!(
                    "did you mean {}? `paceline kb search WORDS` finds ids",
                    near.join(", ")
                )
            }
            Self::NoSuchTopic { near, .. } if near.is_empty() => {
                "`paceline kb skill` lists the topics".into()
            }
            Self::NoSuchTopic { near, .. } => {
                let near = near.join(" or ");
                format!(
                    "did you mean {}? `paceline kb skill` lists the topics",
                    printable(&near)
                )
            }
            Self::AmbiguousTopic { choices, .. } => {
                format!("name one of {}", printable(&choices.join(", ")))
            }
            Self::NoWords { .. } => "give it words that say what it is about, such as RDMA".into(),
            Self::NotAFile { .. } => "findings come as a TOML file; docs/kb.md shows one".into(),
            Self::NoName { .. } => "give the file a name that ends in .toml".into(),
            Self::Invalid { .. } => {
                "nothing was changed; docs/kb.md has an example and all keys".into()
            }
            Self::Orphan { .. } => {
                "nothing was changed; keep those findings, or change the other file first".into()
            }
            Self::Taken { .. } => {
                "rename your file to keep both, or replace the old one with --replace".into()
            }
        }
    }
}
