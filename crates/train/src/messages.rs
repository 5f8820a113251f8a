//! What a run's process and its workers say to each other. Numbers go through files.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::run::Job;

/// To a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToWorker {
    /// What the run is. Sent once, first.
    Start {
        job: Box<Job>,
        threads: usize,
        /// Folder of exchanged files.
        exchange: PathBuf,
    },
    /// Leaves `start..end` of a step are to be computed.
    Compute { step: u64, start: usize, end: usize },
}

/// From a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromWorker {
    /// The model is loaded.
    Ready,
    /// The roots of these leaves are in a file.
    Done {
        step: u64,
        start: usize,
        end: usize,
        /// Of each leaf, as bits: text would round.
        losses: Vec<u64>,
        /// SHA-256 of the file.
        digest: String,
    },
    /// It cannot go on, and nor could another.
    Failed { reason: String },
}

/// The values before a step.
pub(crate) fn params_file(exchange: &Path, step: u64) -> PathBuf {
    exchange.join(format!("params-{step}"))
}

/// The roots of leaves of a step.
pub(crate) fn roots_file(exchange: &Path, step: u64, start: usize, end: usize) -> PathBuf {
    exchange.join(format!("roots-{step}-{start}-{end}"))
}
