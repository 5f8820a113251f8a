//! Parsers of what the hub sends, for fuzzing.

/// Parses `bytes` as a hub's file list and headers; must return for any bytes. No selected file
/// leaves the model's folder.
pub fn parse_hub(bytes: &[u8]) {
    crate::hub::parse(bytes);
    crate::download::parse(bytes);
}
