//! Parsers of what other machines send, for fuzzing. What clients send is fuzzed over a socket.

use std::time::Instant;

/// Reads `bytes` as what other nodes keep for this one, journals and responses: whatever they are,
/// this returns.
pub fn parse_kept(bytes: &[u8]) {
    crate::journal::parse(bytes, Instant::now());
}

/// Reads `bytes` as the stream of a server that is measured.
pub fn parse_events(bytes: &[u8]) {
    crate::load::parse(bytes, Instant::now);
}
