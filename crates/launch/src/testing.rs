//! Parsers of the bytes that other machines send, for fuzzing.

use crate::hostfile::Hostfile;
use crate::marks::{Marks, Piece};

/// Bytes in which no words of ours are too long to be a mark.
const SHORT: usize = 4096;

/// Reads `bytes` as what machines say that are asked over ssh, as the output of a program among
/// marks, and as a file of hosts. Where the output is cut changes nothing.
pub fn parse_hosts(bytes: &[u8]) {
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

/// The output of programs among the words of our scripts, and how many words there are.
fn unmarked((first, second): (&[u8], &[u8])) -> (Vec<u8>, usize) {
    let (mut text, mut marks) = (Vec::new(), 0);
    let mut each = |piece: Piece<'_>| match piece {
        Piece::Text(bytes) => text.extend_from_slice(bytes),
        Piece::Mark(_) => marks += 1,
    };
    let mut reader = Marks::new("token");
    reader.feed(first, &mut each);
    reader.feed(second, &mut each);
    reader.finish(each);
    (text, marks)
}
