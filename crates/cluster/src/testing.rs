//! Parsers of what children and other machines print, for fuzzing.

use crate::hostfile::Hostfile;
use crate::marks::{Marks, Piece};
use crate::processes::{LINE_TEXT_BYTES_MAX, Lines};
use crate::wire::{Assembler, decode};

/// Bytes in which no words of ours are too long to be a mark.
const SHORT: usize = 4096;

/// Reads `bytes` as what a child sends and prints, in two pieces: whatever they are, this returns,
/// and where they are cut changes nothing.
pub fn parse_children(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(SHORT)];
    for cut in [0, bytes.len() / 2, bytes.len()] {
        let pieces = bytes.split_at(cut);
        assert_eq!(messages(pieces), messages((bytes, &[])));
        assert_eq!(unmarked(pieces), unmarked((bytes, &[])));
    }
    let mut lines = Lines::default();
    let check = |line: &str| assert!(line.len() <= 3 * LINE_TEXT_BYTES_MAX, "{}", line.len());
    lines.feed(bytes, check);
    lines.finish(check);
}

/// Lines of the control channel that are messages, and how many there are.
fn messages((first, second): (&[u8], &[u8])) -> (usize, usize) {
    let (mut all, mut understood) = (0, 0);
    let mut each = |line: Vec<u8>| {
        all += 1;
        understood += usize::from(decode::<serde_json::Value>(&line).is_ok());
    };
    let mut assembler = Assembler::new();
    let _ = assembler.feed(first, &mut each);
    let _ = assembler.feed(second, &mut each);
    (all, understood)
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

/// Reads `bytes` as what machines say that are asked over ssh, and as a file of hosts.
pub fn parse_hosts(bytes: &[u8]) {
    crate::topology::parse(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = Hostfile::parse(text);
    }
}
