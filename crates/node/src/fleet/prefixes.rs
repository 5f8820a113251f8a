//! Prompt prefixes that each replica has computed, as far as this node knows.
//!
//! An ingress records which prompts it sent to which replica, in blocks of [`BLOCK`] tokens. It
//! does not know evictions from a replica's cache, nor other nodes' prompts: an error costs one
//! prefill.

use std::collections::{BTreeMap, VecDeque};

use paceline_fleet::InstanceId;

/// Tokens of a block: a KV page, the unit of an engine's prefix cache.
pub(crate) const BLOCK: usize = paceline_tensor::PAGE;

/// Most blocks of a prompt that are compared: 65,536 tokens. Prompts equal up to there count as
/// equal.
const BLOCKS_OF_ONE: usize = 1024;

/// Most recorded blocks: 4,096 requests of 1,024 tokens, about 4 MB. Key and number take 24 bytes
/// in a half-empty tree, and as much in the queue.
const BLOCKS_MAX: usize = 65_536;

/// FNV-1a's 64-bit offset and prime, over tokens instead of bytes. Source: RFC 9923. A hash
/// collision costs one prefill, so a stronger hash is not needed.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

/// A hash for each full block of a prompt, over all tokens up to the block's end.
pub(crate) fn blocks(prompt: &[u32]) -> Vec<u64> {
    let mix = |hash: u64, token: &u32| (hash ^ u64::from(*token)).wrapping_mul(FNV_PRIME);
    let whole = prompt.chunks_exact(BLOCK).take(BLOCKS_OF_ONE);
    let mut hash = FNV_OFFSET;
    whole
        .map(|block| {
            hash = block.iter().fold(hash, mix);
            hash
        })
        .collect()
}

/// Blocks and the instances that computed them; drops the oldest.
#[derive(Debug, Default)]
pub(crate) struct Prefixes {
    /// The number of the last mention of a block at an instance.
    known: BTreeMap<(u64, InstanceId), u64>,
    /// All mentions, oldest first.
    mentions: VecDeque<(u64, InstanceId, u64)>,
    last: u64,
}

impl Prefixes {
    /// Records that an instance computes a prompt.
    pub(crate) fn remember(&mut self, blocks: &[u64], id: InstanceId) {
        // The first block counts as newest: the others are useless without it.
        for block in blocks.iter().rev() {
            self.last += 1;
            self.known.insert((*block, id), self.last);
            self.mentions.push_back((*block, id, self.last));
        }
        while self.mentions.len() > BLOCKS_MAX
            && let Some((block, id, number)) = self.mentions.pop_front()
        {
            if self.known.get(&(block, id)) == Some(&number) {
                self.known.remove(&(block, id));
            }
        }
    }

    /// Number of leading blocks of a prompt that an instance has computed.
    pub(crate) fn read_by(&self, blocks: &[u64], id: InstanceId) -> usize {
        let is_known = |block: &&u64| self.known.contains_key(&(**block, id));
        blocks.iter().take_while(is_known).count()
    }

    /// Drops the blocks of an instance whose cache is gone.
    pub(crate) fn forget(&mut self, id: InstanceId) {
        self.known.retain(|(_, other), _| *other != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(first: u32, len: usize) -> Vec<u32> {
        let mut prompt = vec![7; len];
        prompt[0] = first;
        prompt
    }

    #[test]
    fn a_block_stands_for_all_tokens_before_its_end() {
        assert!(blocks(&[]).is_empty());
        for len in [1, BLOCK - 1] {
            assert!(blocks(&prompt(7, len)).is_empty(), "{len}");
        }
        assert_eq!(blocks(&prompt(7, BLOCK)).len(), 1);
        let (one, other) = (blocks(&prompt(1, 3 * BLOCK)), blocks(&prompt(2, 3 * BLOCK)));
        assert!(one.iter().zip(&other).all(|(a, b)| a != b));
        assert_eq!(one[..2], blocks(&prompt(1, 3 * BLOCK - 1)));
        assert_eq!(blocks(&prompt(7, 2000 * BLOCK)).len(), BLOCKS_OF_ONE);
    }

    #[test]
    fn the_common_beginning_is_found_where_it_was_read() {
        let (here, there) = (InstanceId(1), InstanceId(2));
        let mut prefixes = Prefixes::default();
        let long = blocks(&prompt(1, 4 * BLOCK));
        prefixes.remember(&long[..2], here);
        assert_eq!(prefixes.read_by(&long, here), 2);
        assert_eq!(prefixes.read_by(&long, there), 0);
        assert_eq!(prefixes.read_by(&blocks(&prompt(2, 4 * BLOCK)), here), 0);
        prefixes.remember(&long, there);
        assert_eq!(prefixes.read_by(&long, there), 4);
        prefixes.forget(there);
        assert_eq!(prefixes.read_by(&long, there), 0);
        assert_eq!(prefixes.read_by(&long, here), 2);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_what_is_used_stays() {
        let id = InstanceId(1);
        let mut prefixes = Prefixes::default();
        let (kept, lost) = ([1, 2], [3, 4]);
        prefixes.remember(&lost, id);
        for number in 0..2 * BLOCKS_MAX as u64 {
            if number % 1000 == 0 {
                prefixes.remember(&kept, id);
            }
            prefixes.remember(&[100 + number], id);
        }
        assert_eq!(prefixes.read_by(&kept, id), 2);
        assert_eq!(prefixes.read_by(&lost, id), 0);
        assert!(prefixes.known.len() <= BLOCKS_MAX && prefixes.mentions.len() == BLOCKS_MAX);
    }
}
