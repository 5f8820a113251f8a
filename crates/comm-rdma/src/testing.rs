//! Readers of what peers send, for fuzzing: whatever the bytes are, these return.

use super::{group, join, message, side};

/// Reads `bytes` as what ranks over RDMA send each other, over cables and while they join.
pub fn parse_cables(bytes: &[u8]) {
    message::parse(bytes);
    join::parse(bytes);
}

/// Reads `bytes` as what ranks say over JACCL's side channel.
pub fn parse_side(bytes: &[u8]) {
    if let Some(said) = side::parse(bytes) {
        let met = group::meeting(&said);
        assert!(met.is_err() || met.is_ok_and(|(_, addrs)| addrs.len() == said.len()));
    }
}
