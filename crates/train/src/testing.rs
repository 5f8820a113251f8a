//! Parsers of what the machines of a training say, for fuzzing.

/// Reads `bytes` as frames of another machine, and as the messages in them: it returns for any
/// bytes. No file that they name leads out of the folder of exchanged files.
pub fn parse_line(bytes: &[u8]) {
    crate::remote::parse(bytes);
}
