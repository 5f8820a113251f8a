//! Parsers of data from other nodes and servers, for fuzzing. Requests of clients are fuzzed over a
//! socket.

use std::time::Instant;

/// Parses `bytes` as a journal and a response from another node; must return for any bytes.
pub fn parse_kept(bytes: &[u8]) {
    crate::journal::parse(bytes, Instant::now());
}

/// Parses `bytes` as the stream of a measured server.
pub fn parse_events(bytes: &[u8]) {
    crate::load_generator::parse(bytes, Instant::now);
}
