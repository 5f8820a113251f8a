//! Converts failures of groups to the exceptions that `paceline/errors.py` declares.

use paceline_base::Rank;
use paceline_comm::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// The exception of a failed call. Its text names the call and the rank; `rank` is that rank.
pub(crate) fn of_call(py: Python<'_>, error: Error) -> PyErr {
    let (class, rank) = match error {
        Error::PeerLost { rank, .. } => ("PeerLost", rank),
        Error::Timeout { rank, .. } => ("DeadlineExceeded", rank),
        Error::Mismatch { rank, .. } => ("Mismatch", rank),
        Error::Silent { rank, .. } => ("PeerSilent", rank),
        Error::Length { rank, .. } | Error::NoSuchRank { rank, .. } => ("Invalid", rank),
        Error::Unsupported { rank, .. } => ("Unsupported", rank),
        Error::Garbled { rank, .. } | Error::Library { rank, .. } | Error::System { rank, .. } => {
            ("CommError", rank)
        }
    };
    raise(py, class, &error.to_string(), Some(rank))
}

/// The exception of a failed join.
pub(crate) fn of_join(py: Python<'_>, error: &dyn std::error::Error) -> PyErr {
    raise(py, "JoinError", &error.to_string(), None)
}

fn raise(py: Python<'_>, class: &str, text: &str, rank: Option<Rank>) -> PyErr {
    let build = || {
        let class = py.import("paceline.errors")?.getattr(class)?;
        class.call1((text, rank.map(|rank| rank.0)))
    };
    match build() {
        Ok(exception) => PyErr::from_value(exception),
        Err(_) => PyRuntimeError::new_err(text.to_owned()),
    }
}
