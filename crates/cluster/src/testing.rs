//! Parsers of the bytes that children send and print, for fuzzing, and signatures of simulated
//! nodes.

use paceline_base::SplitMix64;
use paceline_process::{LINE_TEXT_BYTES_MAX, LineBuffer};

use crate::nodes::identity::Error;
use crate::nodes::signature::Signer;
use crate::nodes::{NodeId, Signature};
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

/// A signer of simulated nodes: fast, repeatable, and without a secret.
#[derive(Debug)]
pub struct SimulatedSigner(pub NodeId);

impl SimulatedSigner {
    fn digits(by: NodeId, message: &[u8]) -> String {
        let words = message.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        let hash = words.fold(message.len() as u64, |sum, word| {
            SplitMix64::new(sum ^ word).next()
        });
        format!("{by}{hash:016x}")
    }
}

impl Signer for SimulatedSigner {
    fn id(&self) -> NodeId {
        self.0
    }

    fn sign(&self, message: &[u8]) -> Result<Signature, Error> {
        Ok(Signature::simulated(Self::digits(self.0, message)))
    }

    fn is_of(&self, signature: &Signature, by: NodeId, message: &[u8]) -> bool {
        signature.digits() == Self::digits(by, message)
    }
}
