//! Parsers of data from other nodes and of models' Markdown for fuzzing. Requests of clients are
//! fuzzed over a socket.

use std::time::Instant;

use serde_json::Value;

use crate::markdown::{DEPTH_MAX, SCHEMES, tree};

/// Parses `bytes` as a journal and a response from another node; must return for any bytes.
pub fn parse_kept(bytes: &[u8]) {
    crate::journal::parse(bytes, Instant::now());
}

/// Parses `text` as Markdown of a model; must return for any text.
///
/// # Panics
/// When the tree is too deep or has a link to anything but the web.
pub fn parse_markdown(text: &str) {
    for node in tree(text).into_iter().flatten() {
        check(&serde_json::json!(node), 1);
    }
}

/// Checks the promises of a tree whose root lies at `depth`.
fn check(node: &Value, depth: usize) {
    assert!(
        node.is_string() || depth <= DEPTH_MAX,
        "an element at {depth}"
    );
    if let Some(address) = node["href"].as_str() {
        let address = address.to_ascii_lowercase();
        assert!(
            SCHEMES.iter().any(|it| address.starts_with(it)),
            "{address}"
        );
    }
    for child in node["children"].as_array().into_iter().flatten() {
        check(child, depth + 1);
    }
}
