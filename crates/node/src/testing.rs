//! Parsers of what workers and other nodes say, for fuzzing.

use crate::messages::{FromWorker, ToWorker};
use crate::{crew, fleet};

/// Reads `bytes` as every message between an owner, its workers, hosts and other nodes: whatever
/// they are, this returns.
pub fn parse_messages(bytes: &[u8]) {
    let _ = serde_json::from_slice::<ToWorker>(bytes);
    let _ = serde_json::from_slice::<FromWorker>(bytes);
    crew::parse(bytes);
    fleet::parse(bytes);
}
