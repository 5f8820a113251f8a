//! Messages between a job's parent and its workers.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{DeviceChoice, JobSpec, PartialResult, RowPartition};

/// Bytes, which are base64 in a message.
#[derive(Debug)]
pub(crate) struct PackedPartial(pub(crate) Vec<u8>);

impl Serialize for PackedPartial {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for PackedPartial {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        STANDARD.decode(text).map(Self).map_err(D::Error::custom)
    }
}

/// From the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToWorker {
    /// Options of the computation. Sent once, first.
    Start {
        /// Threads to compute with; 0 for as many as the worker's machine has cores.
        threads: usize,
        /// The devices that compute besides.
        device: DeviceChoice,
    },
    /// The job to which the next leases belong.
    Job { job: u64, task: Box<JobSpec> },
    /// A part to compute.
    Lease(RowPartition),
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromWorker {
    /// The inputs of a job are open.
    Ready {
        job: u64,
        /// The number of the inputs there ([`JobSpec::looks`]).
        inputs: u64,
        /// Threads that compute there.
        threads: usize,
    },
    /// Some of a part's result, which is too long for one message. Counts once `Done` has arrived.
    Piece {
        job: u64,
        part: u64,
        /// The partial that is merged into the rest.
        partial: PartialResult,
    },
    /// Rows for the parent to write, of a worker that does not share its folder.
    Rows {
        job: u64,
        first_row: u64,
        /// Their values ([`pack`](crate::parent::pack)).
        values: PackedPartial,
    },
    /// A part is computed.
    Done {
        job: u64,
        part: u64,
        /// Its result, or what is left of it.
        partial: PartialResult,
        /// Whether a device has computed some of it.
        on_device: bool,
    },
    /// The worker failed for a reason that would stop every other worker too.
    Failed {
        /// Why.
        reason: String,
    },
}
