//! Errors of the commands themselves, with advice.

use paceline_engine::ParamError;

/// Maximum prompt from standard input. It is far above any context, so a larger input is a mistake,
/// such as another kind of file.
pub(crate) const PROMPT_BYTES_MAX: u64 = 16 << 20;

/// Why a command ends early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Stdout was closed. Not a failure: the command ends quietly.
    #[error("nobody reads standard output")]
    ReaderGone,
    /// A signal ended a command before it had its result.
    #[error("interrupted")]
    Interrupted,
    /// A number on the command line is out of range.
    #[error("--{} is {}, expected {}", .0.name.replace('_', "-"), .0.got, .0.expected)]
    Param(ParamError),
    /// A failure that no caller tells from others.
    #[error("{text}")]
    Failed { text: String, hints: Vec<String> },
    /// Wrong usage, which has an exit code of its own.
    #[error("{text}")]
    Misused { text: String, hint: String },
}

/// A failure with advice.
pub(crate) fn failed(text: impl Into<String>, hint: impl Into<String>) -> Error {
    Error::Failed {
        text: text.into(),
        hints: vec![hint.into()],
    }
}

/// Wrong usage with advice.
pub(crate) fn misused(text: impl Into<String>, hint: impl Into<String>) -> Error {
    Error::Misused {
        text: text.into(),
        hint: hint.into(),
    }
}

/// A hidden worker command that a person started.
pub(crate) fn started_by_hand() -> Error {
    misused(
        "`paceline worker` is a part of a model that other commands start, not a command",
        "`paceline run MODEL --nodes 2` starts two of them",
    )
}

impl Error {
    pub(crate) const fn is_usage(&self) -> bool {
        matches!(self, Self::Param(_) | Self::Misused { .. })
    }

    pub(crate) fn hints(&self) -> Vec<String> {
        match self {
            Self::ReaderGone | Self::Interrupted => Vec::new(),
            Self::Param(_) => vec!["`paceline run --help` explains the options".into()],
            Self::Failed { hints, .. } => hints.clone(),
            Self::Misused { hint, .. } => vec![hint.clone()],
        }
    }
}
