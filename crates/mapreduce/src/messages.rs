//! What a job's parent and its workers say to each other.

use serde::{Deserialize, Serialize};

use crate::{Choice, Part, Partial, Task};

/// From the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToWorker {
    /// How to compute. Sent once, first.
    Start {
        /// Threads to compute with; 0 for as many as the worker's machine has cores.
        threads: usize,
        /// What is to compute besides.
        device: Choice,
    },
    /// The job to which the next leases belong.
    Job {
        /// Its number.
        job: u64,
        /// What is computed.
        task: Box<Task>,
    },
    /// A part to compute.
    Lease(Part),
}

/// From a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromWorker {
    /// The inputs of a job are open.
    Ready {
        /// Which job.
        job: u64,
        /// What the inputs look like there ([`Task::looks`]).
        inputs: u64,
        /// Threads that compute there.
        threads: usize,
    },
    /// Some of a part's result, which is too long for one message. Counts once the rest came.
    Piece {
        /// Of which job.
        job: u64,
        /// Of which part.
        part: u64,
        /// What is to be merged into the rest.
        partial: Partial,
    },
    /// A part is computed.
    Done {
        /// Of which job.
        job: u64,
        /// Which.
        part: u64,
        /// Its result, or what is left of it.
        partial: Partial,
        /// Whether a device has computed some of it.
        on_device: bool,
    },
    /// It cannot go on, and nor could another.
    Failed {
        /// Why.
        reason: String,
    },
}
