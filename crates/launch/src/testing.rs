//! Parsers of the bytes that other machines send, for fuzzing.

use crate::hostfile::Hostfile;
use crate::marks::{Marks, StreamPart};

/// Length limit below which no words can be too long for a mark.
const SHORT: usize = 4096;

/// For fuzzing: parses `bytes` as probe output of machines, as program output with marks, as a
/// hostfile, and as frames of programs on joined machines. The fragment boundaries must not matter.
pub fn parse_hosts(bytes: &[u8]) {
    crate::joined::read_all(bytes);
    crate::topology::parse(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = Hostfile::parse(text);
    }
    let bytes = &bytes[..bytes.len().min(SHORT)];
    for cut in [0, bytes.len() / 2, bytes.len()] {
        let pieces = bytes.split_at(cut);
        assert_eq!(unmarked(pieces), unmarked((bytes, &[])));
    }
}

/// The program output and the number of marks.
fn unmarked((first, second): (&[u8], &[u8])) -> (Vec<u8>, usize) {
    let (mut text, mut marks) = (Vec::new(), 0);
    let mut each = |piece: StreamPart<'_>| match piece {
        StreamPart::Text(bytes) => text.extend_from_slice(bytes),
        StreamPart::Mark(_) => marks += 1,
    };
    let mut reader = Marks::new("token");
    reader.feed(first, &mut each);
    reader.feed(second, &mut each);
    reader.finish(each);
    (text, marks)
}
