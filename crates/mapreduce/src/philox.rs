//! Random numbers by counter: Philox 4x32-10.
//!
//! The n-th number is a function of the seed and n. So any machine computes any part of a sample,
//! and computing it again gives the same. Source: Salmon, Moraes, Dror and Shaw, "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011. Constants and test vectors are those of the Random123
//! library.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// Numbers of one seed.
#[derive(Clone, Copy, Debug)]
pub struct Philox {
    key: [u32; 2],
}

impl Philox {
    pub const fn new(seed: u64) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
        }
    }

    /// The block of 128 bits with this number.
    #[inline(always)]
    pub fn block(&self, counter: [u32; 4]) -> [u32; 4] {
        let (mut block, mut key) = (counter, self.key);
        for _ in 0..ROUNDS {
            let a = u64::from(MULTIPLIERS[0]) * u64::from(block[0]);
            let b = u64::from(MULTIPLIERS[1]) * u64::from(block[2]);
            block = [
                (b >> 32) as u32 ^ block[1] ^ key[0],
                b as u32,
                (a >> 32) as u32 ^ block[3] ^ key[1],
                a as u32,
            ];
            key[0] = key[0].wrapping_add(KEY_STEPS[0]);
            key[1] = key[1].wrapping_add(KEY_STEPS[1]);
        }
        block
    }

    /// 64 random bits: those of `sample` in dimension `dimension`.
    #[inline(always)]
    pub fn word(&self, sample: u64, dimension: u32) -> u64 {
        let counter = [sample as u32, (sample >> 32) as u32, dimension >> 1, 0];
        let block = self.block(counter);
        let at = 2 * (dimension & 1) as usize;
        u64::from(block[at + 1]) << 32 | u64::from(block[at])
    }

    /// A number from 0 to just below 1, a multiple of 2^-53.
    #[inline(always)]
    pub fn uniform(&self, sample: u64, dimension: u32) -> f64 {
        const UNIT: f64 = 1.0 / (1u64 << 53) as f64;
        (self.word(sample, dimension) >> 11) as f64 * UNIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        let pi = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        for (counter, key, expected) in [
            (
                [0; 4],
                [0; 2],
                [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd],
            ),
            (
                pi,
                [0xa4093822, 0x299f31d0],
                [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
            ),
        ] {
            assert_eq!(Philox { key }.block(counter), expected);
        }
    }

    #[test]
    fn dimensions_differ() {
        let random = Philox::new(1);
        let words: std::collections::HashSet<u64> = (0..1000u64)
            .flat_map(|sample| (0..4).map(move |dimension| random.word(sample, dimension)))
            .collect();
        assert_eq!(words.len(), 4000);
    }
}
