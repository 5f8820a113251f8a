//! Parsers of messages from workers and other nodes, for fuzzing. The files of model copies, for
//! `sim`.

pub use crate::fleet::damage::compare;
pub use crate::fleet::partial_file::VerifiedPartial;
pub use crate::fleet::tree::{HashGroups, Tree};
use crate::messages::{FromWorker, ToWorker};
use crate::{fleet, workers};

/// Parses `bytes` as every kind of message between an owner, its workers, hosts and other nodes.
/// Returns for any input.
pub fn parse_messages(bytes: &[u8]) {
    let _ = serde_json::from_slice::<ToWorker>(bytes);
    let _ = serde_json::from_slice::<FromWorker>(bytes);
    workers::parse(bytes);
    fleet::parse(bytes);
}
