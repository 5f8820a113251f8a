//! Parsers of what the hub and a package index send, for fuzzing.

/// Parses `bytes` as a hub's file list and headers, and as an index's page; must return for any
/// bytes. No selected file leaves the model's folder.
pub fn parse_hub(bytes: &[u8]) {
    crate::hub::parse(bytes);
    crate::download::parse(bytes);
    crate::package_index::parse(bytes);
}
