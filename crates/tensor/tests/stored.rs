//! Decodes of stored blocks against those recorded from the `gguf` package.
//!
//! The data and the script that makes it are described in `tests-data/golden/README.md`.

mod delta_net;

use std::path::PathBuf;

use paceline_base::BlockType;
use paceline_tensor::storage::{Chunk, chunk, dequantise};

/// A recorded file of the folder `dequant`.
fn golden(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests-data/golden/dequant")
        .join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The stored blocks of a type and the bits of the values they hold.
fn recorded(block_type: BlockType) -> (Vec<u8>, Vec<u32>) {
    let values = golden(&format!("{block_type}.f32"));
    let bits = values
        .as_chunks()
        .0
        .iter()
        .map(|bytes| u32::from_le_bytes(*bytes))
        .collect();
    (golden(&format!("{block_type}.bin")), bits)
}

/// Compares to the bit, the sign of zero included, and names the first columns that differ.
#[track_caller]
fn assert_same_bits(block_type: BlockType, got: &[f32], want: &[u32]) {
    assert_eq!(got.len(), want.len(), "{block_type}: number of values");
    let wrong: Vec<_> = (0..want.len())
        .filter(|&i| got[i].to_bits() != want[i])
        .map(|i| (i, got[i], f32::from_bits(want[i])))
        .take(5)
        .collect();
    assert!(
        wrong.is_empty(),
        "{block_type}: first (index, decoded, recorded): {wrong:?}"
    );
}

#[test]
fn every_type_decodes_to_the_recorded_bits() {
    for block_type in BlockType::GGUF {
        let (bytes, want) = recorded(block_type);
        assert!(
            want.len() >= 256,
            "{block_type}: {} values recorded",
            want.len()
        );
        let mut got = vec![f32::NAN; want.len()];
        dequantise(block_type, &bytes, &mut got);
        assert_same_bits(block_type, &got, &want);
    }
}

#[test]
fn chunks_hold_the_recorded_bits() {
    let has_chunks = |t: &BlockType| !t.computed().is_float();
    for block_type in BlockType::GGUF.into_iter().filter(has_chunks) {
        let (bytes, want) = recorded(block_type);
        let got: Vec<f32> = (0..want.len() / Chunk::LEN)
            .flat_map(|index| chunk(block_type, &bytes, index).weights())
            .collect();
        assert_same_bits(block_type, &got, &want);
    }
}
