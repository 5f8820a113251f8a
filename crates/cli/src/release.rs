//! The version of this program, and that of its protocol between workers.
//!
//! Both are read from bytes of the program's file. A test makes a program of another release by
//! changing these bytes in a copy, instead of compiling for minutes.

use paceline_cluster::nodes::agent::PROTOCOL;

/// Marks the bytes in the file.
const MARK: &[u8; 17] = b"paceline-release:";

/// Most digits and dots of a version.
const VERSION_BYTES: usize = 15;

/// The mark, the version with spaces after it, a zero, and the protocol in little-endian order.
static RELEASE: [u8; 37] = release();

const fn release() -> [u8; 37] {
    let mut bytes = [b' '; 37];
    let (version, protocol) = (env!("CARGO_PKG_VERSION").as_bytes(), PROTOCOL.to_le_bytes());
    assert!(version.len() <= VERSION_BYTES, "the version is too long");
    let mut i = 0;
    while i < MARK.len() {
        bytes[i] = MARK[i];
        i += 1;
    }
    i = 0;
    while i < version.len() {
        bytes[MARK.len() + i] = version[i];
        i += 1;
    }
    bytes[MARK.len() + VERSION_BYTES] = 0;
    i = 0;
    while i < protocol.len() {
        bytes[MARK.len() + VERSION_BYTES + 1 + i] = protocol[i];
        i += 1;
    }
    bytes
}

/// The bytes in the file: the compiler may not assume them.
fn bytes() -> &'static [u8; 37] {
    std::hint::black_box(&RELEASE)
}

/// The version, such as 1.2.3.
pub(crate) fn version() -> &'static str {
    let text = &bytes()[MARK.len()..][..VERSION_BYTES];
    std::str::from_utf8(text).unwrap_or_default().trim_end()
}

/// The version of the protocol between the workers of an instance.
pub(crate) fn protocol() -> u32 {
    let last = bytes().last_chunk();
    u32::from_le_bytes(*last.expect("the array is longer"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_have_version_and_protocol() {
        assert_eq!(version(), env!("CARGO_PKG_VERSION"));
        assert_eq!(protocol(), PROTOCOL);
    }
}
