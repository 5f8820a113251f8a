//! Random numbers by counter: a number depends on its key, and on no number before it.

/// Purpose of a key: first values of adapters.
pub(crate) const INIT: u64 = 1;
/// Purpose of a key: the order of examples.
pub(crate) const ORDER: u64 = 2;
/// Purpose of a key: inputs of adapters that are left out.
pub(crate) const DROPOUT: u64 = 3;

/// 64 even bits of a key: the finaliser of SplitMix64 (Steele et al. 2014) over each word in turn.
pub(crate) fn bits(key: [u64; 4]) -> u64 {
    key.into_iter().fold(0, |state, word| {
        let mut z = (state ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    })
}

/// Even in 0..1.
pub(crate) fn unit(key: [u64; 4]) -> f64 {
    (bits(key) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_even_and_differ_by_key() {
        let mean = (0..4096).map(|i| unit([7, INIT, 0, i])).sum::<f64>() / 4096.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        assert_ne!(bits([1, 2, 3, 4]), bits([1, 2, 4, 3]));
    }
}
