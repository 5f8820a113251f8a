//! The hash tree of a model file, which verifies it range by range.
//!
//! A file's root is its BLAKE3 hash, as `b3sum` prints it. The leaves here are *groups* of a power
//! of two of bytes, each the root of the subtree below it. A node that trusts the root verifies the
//! list of leaves first, then each group by itself, in any order.
//!
//! ```text
//!                 root                  signed into the shared map
//!              /        \
//!          .               .            computed from the leaves
//!        /   \           /   \
//! leaf     leaf   leaf     leaf      32 bytes each; stored in a file next to the model
//! 64 KiB   64 KiB 64 KiB   the rest  unit of transfer and verification
//! ```
//! Pure: no files, no clock. Source: the BLAKE3 paper, section 2.1 (tree) and 5.1.2 (subtrees).

use std::io::{self, Read};
use std::ops::Range;

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use blake3::{Hash, Hasher};

/// Smallest group. A split cuts every matrix once or twice, and each cut costs half a group. With
/// 64 KiB these are some 10 MB of a model of 150 matrices.
const GROUP_BYTES_MIN: u64 = 64 << 10;

/// Most groups of a file: 8 MiB of leaves, for files from 16 GiB on.
const GROUPS_MAX: u64 = 1 << 18;

pub const LEAF_BYTES: usize = 32;

/// A subtree's hash, or the root where the file has one group.
type Leaf = [u8; LEAF_BYTES];

/// Division of a file of some length into groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashGroups {
    /// Length of the file.
    pub bytes: u64,
    /// Length of a group; the last may be shorter.
    pub each: u64,
}

impl HashGroups {
    /// The division of a file of `bytes`, the same on every node.
    pub fn of(bytes: u64) -> Self {
        let least = bytes.div_ceil(GROUPS_MAX).next_power_of_two();
        let each = least.max(GROUP_BYTES_MIN);
        Self { bytes, each }
    }

    /// Number of groups; 1 for an empty file.
    pub fn count(self) -> u64 {
        self.bytes.div_ceil(self.each).max(1)
    }

    /// The groups that a byte range touches, within the file.
    pub fn around(self, range: &Range<u64>) -> Range<u64> {
        let end = range.end.min(self.bytes);
        if range.start >= end {
            return 0..0;
        }
        range.start / self.each..end.div_ceil(self.each)
    }

    /// The bytes of consecutive groups.
    pub fn span(self, groups: &Range<u64>) -> Range<u64> {
        let at = |group: u64| group.saturating_mul(self.each).min(self.bytes);
        at(groups.start)..at(groups.end)
    }
}

/// The leaves of a file's tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    pub groups: HashGroups,
    leaves: Vec<Leaf>,
}

impl Tree {
    /// Computes the leaves of a file of `bytes` bytes. Reads all of it.
    ///
    /// # Errors
    /// The file cannot be read, or is shorter.
    pub fn read(file: &mut impl Read, bytes: u64) -> io::Result<Self> {
        let groups = HashGroups::of(bytes);
        let mut leaves = Vec::with_capacity(groups.count() as usize);
        let mut group = vec![0; groups.each as usize];
        for index in 0..groups.count() {
            let span = groups.span(&(index..index + 1));
            let own = &mut group[..(span.end - span.start) as usize];
            file.read_exact(own)?;
            leaves.push(leaf(groups, index, own));
        }
        Ok(Self { groups, leaves })
    }

    /// Parses concatenated leaves, as of [`to_bytes`](Self::to_bytes); `None` if their number does
    /// not match a file of `bytes`.
    pub fn from_bytes(bytes: u64, leaves: &[u8]) -> Option<Self> {
        let groups = HashGroups::of(bytes);
        let is_whole = leaves.len() as u64 == groups.count() * LEAF_BYTES as u64;
        let read = || {
            let leaves = leaves.chunks_exact(LEAF_BYTES);
            let leaves = leaves.map(|leaf| leaf.try_into().expect("a chunk of this length"));
            leaves.collect()
        };
        is_whole.then(|| Self {
            groups,
            leaves: read(),
        })
    }

    /// The concatenated leaves.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.leaves.concat()
    }

    /// The file's BLAKE3 hash. Cost: a compression for each leaf.
    pub fn root(&self) -> [u8; LEAF_BYTES] {
        match self.leaves.as_slice() {
            [one] => *one,
            leaves => {
                let (left, right) = halves(leaves);
                *merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash).as_bytes()
            }
        }
    }

    /// Whether `bytes` match the leaf of a group.
    pub fn holds(&self, index: u64, bytes: &[u8]) -> bool {
        let span = self.groups.span(&(index..index + 1));
        let own = self.leaves.get(index as usize);
        own.is_some_and(|own| {
            bytes.len() as u64 == span.end - span.start && leaf(self.groups, index, bytes) == *own
        })
    }
}

fn leaf(groups: HashGroups, index: u64, bytes: &[u8]) -> Leaf {
    if groups.count() == 1 {
        return *blake3::hash(bytes).as_bytes();
    }
    let mut hasher = Hasher::new();
    hasher.set_input_offset(index * groups.each);
    hasher.update(bytes).finalize_non_root()
}

/// The hash of two or more leaves below the root, or of one.
fn subtree(leaves: &[Leaf]) -> Leaf {
    match leaves {
        [one] => *one,
        leaves => {
            let (left, right) = halves(leaves);
            merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

/// The left half is the largest power of two that leaves something for the right one.
fn halves(leaves: &[Leaf]) -> (&[Leaf], &[Leaf]) {
    let left = leaves.len().next_power_of_two() / 2;
    leaves.split_at(left.max(1))
}

/// A root in hexadecimal digits.
pub fn shown(root: Leaf) -> String {
    Hash::from_bytes(root).to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use paceline_base::SplitMix64;

    use super::*;

    fn bytes(n: usize) -> Vec<u8> {
        let mut random = SplitMix64::new(n as u64);
        (0..n).map(|_| random.next() as u8).collect()
    }

    fn tree(bytes: &[u8]) -> Tree {
        Tree::read(&mut &*bytes, bytes.len() as u64).unwrap()
    }

    #[test]
    fn the_root_is_the_hash_of_the_file() {
        let each = GROUP_BYTES_MIN as usize;
        for n in [
            0,
            1,
            each - 1,
            each,
            each + 1,
            2 * each,
            3 * each + 5,
            7 * each,
            9 * each,
        ] {
            let bytes = bytes(n);
            let tree = tree(&bytes);
            assert_eq!(tree.root(), *blake3::hash(&bytes).as_bytes(), "{n} bytes");
            let again = Tree::from_bytes(n as u64, &tree.to_bytes()).unwrap();
            assert_eq!(again, tree);
            assert_eq!(Tree::from_bytes(n as u64, &[0; 31]), None);
        }
    }

    #[test]
    fn each_group_is_checked_alone_and_one_bit_is_noticed() {
        let each = GROUP_BYTES_MIN as usize;
        let mut bytes = bytes(3 * each + 5);
        let tree = tree(&bytes);
        for (index, group) in bytes.chunks(each).enumerate() {
            assert!(tree.holds(index as u64, group));
            assert!(!tree.holds(index as u64 + 1, group), "at another place");
            assert!(!tree.holds(index as u64, &group[1..]));
        }
        bytes[each + 7] ^= 1;
        assert!(!tree.holds(1, &bytes[each..2 * each]));
        assert!(tree.holds(0, &bytes[..each]));
    }

    #[test]
    fn groups_cover_a_file_and_grow_with_it() {
        let groups = HashGroups::of(3 * GROUP_BYTES_MIN + 5);
        assert_eq!((groups.each, groups.count()), (GROUP_BYTES_MIN, 4));
        assert_eq!(groups.around(&(0..1)), 0..1);
        assert_eq!(
            groups.around(&(GROUP_BYTES_MIN - 1..GROUP_BYTES_MIN + 1)),
            0..2
        );
        assert_eq!(groups.around(&(7..7)), 0..0);
        assert_eq!(groups.around(&(groups.bytes..u64::MAX)), 0..0);
        assert_eq!(groups.around(&(0..u64::MAX)), 0..4);
        assert_eq!(groups.span(&(3..4)), 3 * GROUP_BYTES_MIN..groups.bytes);
        for large in [16 << 30, (16 << 30) + 1, 700 << 30, u64::MAX >> 1] {
            let groups = HashGroups::of(large);
            assert!(groups.count() <= GROUPS_MAX, "{large}");
            assert!(groups.each.is_power_of_two());
        }
        assert_eq!(HashGroups::of(0).count(), 1);
    }
}
