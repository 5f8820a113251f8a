//! Authentication: API keys of clients and TLS certificates of servers.
//!
//! - [`keys`]: API keys in a file, kept as hashes.
//! - [`tls`]: certificates, for addresses that other machines reach.
//!
//! `serve` uses both for its connections, `board` and `cli` make keys and certificates.

pub mod keys;
pub mod tls;
