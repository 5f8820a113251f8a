//! Parsers of messages from workers and other nodes, for fuzzing. The files of model copies, for
//! `sim`.

use crate::{fleet, workers};
pub use paceline_store::verified::damage::compare;
pub use paceline_store::verified::partial_file::VerifiedPartial;
pub use paceline_store::verified::tree::{HashGroups, Tree};
use paceline_worker::messages::{FromWorker, ToWorker};

/// Parses `bytes` as every kind of message between an owner, its workers, hosts and other nodes.
/// Returns for any input.
pub fn parse_messages(bytes: &[u8]) {
    let _ = serde_json::from_slice::<ToWorker>(bytes);
    let _ = serde_json::from_slice::<FromWorker>(bytes);
    workers::parse(bytes);
    fleet::parse(bytes);
}
