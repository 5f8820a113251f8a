//! Parsers of the bytes that children send and print, for fuzzing.

use paceline_process::processes::{LINE_TEXT_BYTES_MAX, Lines};

use crate::wire::{Assembler, decode};

/// Most bytes that are read. Enough for several messages and lines; each is cut and read again.
const SHORT: usize = 4096;

/// Reads `bytes` as what a child sends and prints, in two pieces: whatever they are, this returns,
/// and where they are cut changes nothing.
pub fn parse_children(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(SHORT)];
    for cut in [0, bytes.len() / 2, bytes.len()] {
        let pieces = bytes.split_at(cut);
        assert_eq!(messages(pieces), messages((bytes, &[])));
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
