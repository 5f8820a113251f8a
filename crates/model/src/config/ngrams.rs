//! Memory of n-grams: the last tokens of a sequence choose rows of tables, by hashes.
//!
//! ```text
//! tokens of a row, newest first   a b c      behind a stop token or the beginning: the blank token
//! mix of 2 and of 3 tokens        m2 = a k0 ^ b k1      m3 = m2 ^ c k2
//! row in the part of head h       m2 mod p[h]           m3 mod p[H + h]      p: primes
//! ```
//!
//! Every layer with a memory has a table, factors and primes of its own. Source: Cheng et al. 2026
//! (Engram); `modeling_qwen4_exp.py` and `modeling_deepseek_v41.py` of transformers.

use paceline_tensor::{LayerStore, NO_TOKEN, StateShape};

/// Memory of n-grams, which some layers read before their first half.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ngrams {
    /// Tokens of the longest n-gram (N), 2 to [`MAX_LONGEST`].
    pub longest: usize,
    /// Rows that an n-gram of each length chooses (H).
    pub heads: usize,
    /// Elements of a row of a table (D).
    pub dim: usize,
    /// Taps of the convolution over what is read, N positions apart; 0 without one.
    pub taps: usize,
    /// N-grams do not reach to a token like this or beyond; `None` where all tokens are alike.
    pub stop: Option<u32>,
    /// Token in place of those that an n-gram does not reach.
    pub blank: u32,
    /// Keys of all tokens, where n-grams are of keys instead of tokens: tokens whose texts differ
    /// in case or accents have the same key. `None` where n-grams are of tokens.
    pub keys: Option<usize>,
    /// In ascending order of their layers.
    pub tables: Vec<NgramTable>,
}

/// The table of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramTable {
    pub layer: usize,
    /// Rows, at least the sum of the primes.
    pub rows: usize,
    /// Factors of the tokens of an n-gram, `(N,)`; products with tokens are below 2^63.
    pub factors: Vec<u64>,
    /// Rows of each head, `((N - 1) H,)`.
    pub primes: Vec<u64>,
}

/// Bounds several times those of published models. With them, the search for primes takes
/// milliseconds.
pub(crate) const MAX_LONGEST: u64 = 8;
pub(crate) const MAX_NGRAM_HEADS: u64 = 32;
pub(crate) const MAX_TABLES: usize = 16;
pub(crate) const MAX_LEAST_ROWS: u64 = 1 << 28;
pub(crate) const MAX_COLUMNS: usize = ((MAX_LONGEST - 1) * MAX_NGRAM_HEADS) as usize;

impl Ngrams {
    /// Rows that a position reads of a table: one for each head and length.
    pub const fn columns(&self) -> usize {
        (self.longest - 1) * self.heads
    }

    /// Elements of these rows (E).
    pub const fn width(&self) -> usize {
        self.columns() * self.dim
    }

    /// Positions that a row reads, its own included.
    pub(crate) const fn looks_back(&self) -> usize {
        let inputs = 1 + self.longest * self.taps.saturating_sub(1);
        if inputs > self.longest {
            inputs
        } else {
            self.longest
        }
    }

    /// Cache of a layer's memory: tokens, and inputs of the convolution of `streams` streams of
    /// `width` elements.
    pub(crate) const fn store(&self, streams: usize, width: usize) -> LayerStore {
        let (heads, value_dim) = if self.taps > 0 {
            (streams, width)
        } else {
            (1, 0)
        };
        LayerStore::State(StateShape {
            heads,
            len: 0,
            head_dim: 1,
            value_dim,
        })
    }

    /// The table of a layer, if it has one.
    pub fn table(&self, layer: usize) -> Option<&NgramTable> {
        self.tables.iter().find(|table| table.layer == layer)
    }

    /// Rows of the table for the `tokens` of a position, `(N,)`, newest first. `key` maps tokens.
    pub(crate) fn choose(
        &self,
        table: &NgramTable,
        tokens: &[u32],
        key: impl Fn(u32) -> u32,
        out: &mut [u32],
    ) {
        let key = |token| u64::from(key(token));
        let (mut mix, mut first) = (key(tokens[0]) * table.factors[0], 0);
        let mut is_cut = false;
        let columns = table.primes.chunks_exact(self.heads);
        let lengths = columns.zip(out.chunks_exact_mut(self.heads));
        for ((i, (primes, out)), token) in lengths.enumerate().zip(&tokens[1..]) {
            is_cut |= *token == NO_TOKEN || Some(*token) == self.stop;
            mix ^= key(if is_cut { self.blank } else { *token }) * table.factors[1 + i];
            for (prime, out) in primes.iter().zip(out) {
                *out = (first + mix % prime) as u32;
                first += prime;
            }
        }
    }
}

/// The first `n` primes that are not below `least`.
pub(crate) fn primes_from(least: u64, n: usize) -> Vec<u64> {
    let is_prime = |n: &u64| {
        let mut divisors = (2..).take_while(|d| d * d <= *n);
        *n >= 2 && divisors.all(|d| !n.is_multiple_of(d))
    };
    (least..).filter(is_prime).take(n).collect()
}

/// Largest factor whose product with a token of `keys` ones is below 2^63, halved.
const fn half_bound(keys: usize) -> u64 {
    let bound = (i64::MAX as u64) / keys as u64 / 2;
    if bound == 0 { 1 } else { bound }
}

/// Factors of table `index` of Qwen4-Exp, `n` of them. Source: Steele, Lea and Flood 2014
/// (`SplitMix64`).
pub(crate) fn split_mix_factors(seed: u64, index: usize, n: usize, vocab: usize) -> Vec<u64> {
    const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
    let seed = seed.wrapping_add(SEED_STEP * index as u64);
    let factor = |i: u64| {
        let mut x = seed.wrapping_add(GAMMA.wrapping_mul(i + 2));
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        2 * ((x ^ (x >> 31)) % half_bound(vocab)) + 1
    };
    (0..n as u64).map(factor).collect()
}

/// Between the seeds of two tables, or of two layers.
const SEED_STEP: u64 = 10_007;

/// Factors of a layer of DeepSeek V4.1, `n` of them: those of numpy's `default_rng`. `keys` are
/// fewer than 2^30.
pub(crate) fn pcg_factors(layer: usize, n: usize, keys: usize) -> Vec<u64> {
    let (mut random, bound) = (
        Pcg::new((SEED_STEP * layer as u64) as u32),
        half_bound(keys),
    );
    (0..n).map(|_| 2 * random.below(bound) + 1).collect()
}

/// A generator of random numbers as numpy seeds it from 32 bits. Source: O'Neill 2014 (PCG), the
/// variant XSL RR 128/64.
struct Pcg {
    state: u128,
    step: u128,
}

impl Pcg {
    fn new(seed: u32) -> Self {
        let words = seed_words(seed);
        let word = |i: usize| u128::from(words[2 * i]) | u128::from(words[2 * i + 1]) << 32;
        let (start, step) = (word(0) << 64 | word(1), word(2) << 64 | word(3));
        let mut random = Self {
            state: 0,
            step: step << 1 | 1,
        };
        random.next();
        random.state = random.state.wrapping_add(start);
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        const FACTOR: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;
        self.state = self.state.wrapping_mul(FACTOR).wrapping_add(self.step);
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// A number below `bound`, which is above 2^32. Source: Lemire 2019.
    fn below(&mut self, bound: u64) -> u64 {
        loop {
            let product = u128::from(self.next()) * u128::from(bound);
            if product as u64 >= bound.wrapping_neg() % bound {
                return (product >> 64) as u64;
            }
        }
    }
}

/// numpy's `SeedSequence` of one word: a pool of four words, mixed, then eight words from it.
fn seed_words(seed: u32) -> [u32; 8] {
    let hash = |x: u32, constant: &mut u32, factor: u32| {
        let x = x ^ *constant;
        *constant = constant.wrapping_mul(factor);
        let x = x.wrapping_mul(*constant);
        x ^ x >> 16
    };
    let mut constant = 0x43B0_D7E5;
    let mut pool = [seed, 0, 0, 0].map(|x| hash(x, &mut constant, 0x931E_8875));
    for from in 0..4 {
        for to in (0..4).filter(|to| *to != from) {
            let x = hash(pool[from], &mut constant, 0x931E_8875);
            let mixed = pool[to].wrapping_mul(0xCA01_F9DD);
            let mixed = mixed.wrapping_sub(x.wrapping_mul(0x4973_F715));
            pool[to] = mixed ^ mixed >> 16;
        }
    }
    let mut constant = 0x8B51_F9DD;
    std::array::from_fn(|i| hash(pool[i % 4], &mut constant, 0x58F3_8DED))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that numpy 2.3 and transformers 5.24 give, and rows of DeepSeek V4.1 Flash.
    #[test]
    fn factors_and_primes_are_those_of_the_definitions() {
        assert_eq!(
            pcg_factors(1, 3, 99_092),
            [76_632_096_046_245, 4_839_876_093_313, 35_959_672_319_349]
        );
        assert_eq!(
            split_mix_factors(1234, 1, 3, 248_320),
            [3_352_040_966_061, 19_752_442_147_475, 10_742_103_100_073]
        );
        let primes = primes_from(16_000_000, 48);
        let rows = [&primes[..24], &primes[24..]].map(|primes| primes.iter().sum::<u64>());
        assert_eq!(rows, [384_006_168, 384_016_682]);
    }
}
