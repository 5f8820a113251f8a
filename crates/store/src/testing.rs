//! Parsers of what the hub sends, for fuzzing.

/// Reads `bytes` as a hub's list of files, and as its headers: whatever they are, this returns. No
/// file that is chosen leads out of the model's folder.
pub fn parse_hub(bytes: &[u8]) {
    crate::hub::parse(bytes);
    crate::download::parse(bytes);
}
