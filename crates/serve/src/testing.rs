//! Parsers of data from other nodes for fuzzing. Requests of clients are fuzzed over a
//! socket.

use std::time::Instant;

/// Parses `bytes` as a journal and a response from another node; must return for any bytes.
pub fn parse_kept(bytes: &[u8]) {
    crate::journal::parse(bytes, Instant::now());
}
