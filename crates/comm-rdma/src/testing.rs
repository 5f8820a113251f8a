//! Parsers of peers' bytes, for fuzzing: they return for any input.

use super::{group, join, message, side_channel};

/// Parses `bytes` as messages between ranks over RDMA, over cables and during a join.
pub fn parse_cables(bytes: &[u8]) {
    message::parse(bytes);
    join::parse(bytes);
}

/// Parses `bytes` as messages of JACCL's side channel.
pub fn parse_side(bytes: &[u8]) {
    if let Some(said) = side_channel::parse(bytes) {
        let met = group::meeting(&said);
        assert!(met.is_err() || met.is_ok_and(|(_, addrs)| addrs.len() == said.len()));
    }
}
