//! Quick sums of a file's groups, so that a load notices damage at the speed of memory.
//!
//! ```text
//! m.gguf.sums, SHA256.sums   8 bytes for each group of the hash tree; BLAKE3 of its root and these
//! ```
//! BLAKE3 takes 0.17 s a gigabyte, and a load has to compare all that it reads. So the first
//! comparison with the tree also writes these sums, of the same bytes, which take 0.06 s. They find
//! damage and no forgery: what another node sends is compared with the tree. A group whose sum
//! differs is compared with the tree too.

use std::fs;
use std::io;
use std::path::Path;

use super::damage::GroupCheck;
use super::tree::{HashGroups, Tree};
use crate::storage::{self, FileSystem, StoredFile};

/// Extension of the file.
pub const SUMS: &str = "sums";

/// Odd, with bits throughout: 2^64 over the golden ratio.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// Running sums, which do not wait for each other's products.
const LANES: usize = 8;

/// Bytes of the BLAKE3 hash at the end.
const SEAL_BYTES: usize = 32;

/// The sums of a file's groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSums {
    groups: HashGroups,
    sums: Vec<u64>,
}

impl GroupSums {
    /// The sums at `place`; `None` if there are none, and if they are damaged or of another tree.
    pub fn read(place: &Path, tree: &Tree) -> Option<Self> {
        let bytes = fs::read(place).ok()?;
        let (sums, own) = bytes.split_last_chunk::<SEAL_BYTES>()?;
        let (sums, rest) = sums.as_chunks::<8>();
        let is_whole = rest.is_empty() && sums.len() as u64 == tree.groups.count();
        let sums = Self {
            groups: tree.groups,
            sums: sums.iter().map(|sum| u64::from_le_bytes(*sum)).collect(),
        };
        (is_whole && sums.seal(tree) == *own).then_some(sums)
    }

    /// Compares all of a complete file with its tree, and writes the sums of the same bytes to
    /// `place`.
    ///
    /// # Errors
    /// The file differs, or the system's error.
    pub fn make(file: &dyn StoredFile, tree: &Tree, place: &Path) -> io::Result<()> {
        let (groups, mut bytes) = (tree.groups, Vec::new());
        let mut sums = Vec::with_capacity(groups.count() as usize);
        for index in 0..groups.count() {
            let span = groups.span(&(index..index + 1));
            bytes.resize((span.end - span.start) as usize, 0);
            file.read_at(&mut bytes, span.start)?;
            if !tree.holds(index, &bytes) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            sums.push(sum(&bytes));
        }
        let sums = Self { groups, sums };
        let mut bytes: Vec<u8> = sums.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        bytes.extend(sums.seal(tree));
        storage::replace(&FileSystem, place, &bytes)
    }

    /// BLAKE3 of the tree's root and the sums.
    fn seal(&self, tree: &Tree) -> [u8; SEAL_BYTES] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&tree.root());
        for sum in &self.sums {
            hasher.update(&sum.to_le_bytes());
        }
        *hasher.finalize().as_bytes()
    }
}

impl GroupCheck for GroupSums {
    fn groups(&self) -> HashGroups {
        self.groups
    }

    fn holds(&self, index: u64, bytes: &[u8]) -> bool {
        let own = self.sums.get(index as usize);
        own.is_some_and(|own| sum(bytes) == *own)
    }
}

/// A sum that damage leaves equal with a probability of 2^-64. Each step folds a product of 128
/// bits, which spreads a changed bit over the whole sum. Cost: a product for 8 bytes, 15 GB/s.
fn sum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, word: u64| {
        let product = u128::from(sum ^ word) * u128::from(FACTOR);
        (product as u64) ^ ((product >> 64) as u64)
    };
    let mut lanes: [u64; LANES] = std::array::from_fn(|lane| lane as u64);
    let (blocks, rest) = bytes.as_chunks::<{ 8 * LANES }>();
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
            *lane = step(*lane, u64::from_le_bytes(*word));
        }
    }
    let start = step(FACTOR, bytes.len() as u64);
    let all = rest
        .iter()
        .fold(start, |sum, byte| step(sum, u64::from(*byte)));
    lanes.into_iter().fold(all, step)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::storage::{OpenMode, Storage as _};

    #[test]
    fn any_flipped_bit_changes_the_sum() {
        let bytes: Vec<u8> = (0..1000).map(|i| (i / 7) as u8).collect();
        let mut seen = BTreeSet::from([sum(&bytes)]);
        for bit in 0..8 * bytes.len() {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(sum(&other)), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(seen.insert(sum(&bytes[..len])), "{len} bytes");
        }
    }

    #[test]
    fn sums_are_of_one_tree_and_detect_their_own_damage() {
        let dir = tempfile::tempdir().unwrap();
        let [path, place] = ["m.gguf", "m.sums"].map(|name| dir.path().join(name));
        let bytes: Vec<u8> = (0..(200 << 10)).map(|i: u32| (i / 7) as u8).collect();
        let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
        fs::write(&path, &bytes).unwrap();
        let file = FileSystem.open(&path, OpenMode::Read).unwrap();
        assert_eq!(GroupSums::read(&place, &tree), None);
        GroupSums::make(&*file, &tree, &place).unwrap();
        let sums = GroupSums::read(&place, &tree).unwrap();
        let group = &bytes[64 << 10..128 << 10];
        assert!(sums.holds(1, group) && !sums.holds(2, group) && !sums.holds(9, group));

        let mut other = bytes.clone();
        other[7] ^= 1;
        let unlike = Tree::read(&mut &*other, other.len() as u64).unwrap();
        assert_eq!(GroupSums::read(&place, &unlike), None);
        let right = fs::read(&place).unwrap();
        let mut flipped = right.clone();
        flipped[9] ^= 1;
        for damaged in [&right[8..], &right[..right.len() - 1], &flipped] {
            fs::write(&place, damaged).unwrap();
            assert_eq!(GroupSums::read(&place, &tree), None);
        }
        fs::write(&path, &other).unwrap();
        assert!(GroupSums::make(&*file, &tree, &place).is_err());
    }
}
