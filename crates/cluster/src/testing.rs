//! Parsers of the bytes that children send and print, for fuzzing.

use paceline_process::processes::{LINE_TEXT_BYTES_MAX, LineBuffer};

use crate::wire::{Assembler, decode};

/// Most bytes parsed. Enough for several messages and lines.
const SHORT: usize = 4096;

/// Parses `bytes` as a child's messages and output, in two pieces. Returns for any input, and
/// asserts that the place of the cut does not matter.
pub fn parse_children(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(SHORT)];
    for cut in [0, bytes.len() / 2, bytes.len()] {
        let pieces = bytes.split_at(cut);
        assert_eq!(messages(pieces), messages((bytes, &[])));
    }
    let mut lines = LineBuffer::default();
    let check = |line: &str| assert!(line.len() <= 3 * LINE_TEXT_BYTES_MAX, "{}", line.len());
    lines.feed(bytes, check);
    lines.finish(check);
}

/// Numbers of messages and of lines on the control channel.
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
