//! Rotary position embeddings: frequencies and angles.
//!
//! Angles are computed in f64 with the pure-Rust `libm`, so that every platform gives the same
//! bits (system math libraries differ), and rounded to f32 once.

use std::ops::Range;

use paceline_tensor::RopePairs;

/// Largest head that rotates; bounds what a file can make us compute.
pub(crate) const MAX_PAIRS: usize = 1 << 12;

/// Least divisor of frequencies that is accepted from a file. Real ones are 1 to 64; with this one
/// the highest frequency is 1000 radians a position, whose angles f64 still tells apart.
pub(crate) const MIN_DIVISOR: f64 = 1e-3;

/// One set of rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Which elements turn together.
    pub pairs: RopePairs,
    /// Radians per position for each pair.
    pub frequencies: Vec<f64>,
}

/// Frequency scaling of Llama 3.1: long wavelengths are stretched, short ones kept.
///
/// Source: `_compute_llama3_parameters` in transformers' `modeling_rope_utils.py`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Scaling {
    /// How far long wavelengths are stretched.
    pub factor: f64,
    /// Wavelengths above `original_context / low` are stretched fully.
    pub low: f64,
    /// Wavelengths below `original_context / high` are kept.
    pub high: f64,
    /// Context of the first training.
    pub original_context: f64,
}

impl Rope {
    /// Frequencies `base^(-2 i / rotated)` for `rotated / 2` pairs, divided by `linear`.
    pub fn new(pairs: RopePairs, rotated: usize, base: f64, linear: f64) -> Self {
        let frequency = |i: usize| libm::pow(base, -2.0 * i as f64 / rotated as f64) / linear;
        Self {
            pairs,
            frequencies: (0..rotated / 2).map(frequency).collect(),
        }
    }

    /// Applies Llama 3.1's scaling.
    #[must_use]
    pub fn with_llama3(mut self, scaling: Llama3Scaling) -> Self {
        for frequency in &mut self.frequencies {
            *frequency = scaling.apply(*frequency);
        }
        self
    }

    /// Divides each frequency by its factor (the `rope_freqs` tensor of GGUF files).
    ///
    /// # Panics
    /// If there are not as many factors as pairs.
    #[must_use]
    pub fn with_factors(mut self, factors: &[f32]) -> Self {
        assert_eq!(self.frequencies.len(), factors.len());
        for (frequency, factor) in self.frequencies.iter_mut().zip(factors) {
            *frequency /= f64::from(*factor);
        }
        self
    }

    /// Appends `(cos, sin)` of every pair for each position to `out`.
    pub fn angles(&self, positions: Range<usize>, out: &mut Vec<(f32, f32)>) {
        for position in positions {
            out.extend(self.frequencies.iter().map(|frequency| {
                let (sin, cos) = libm::sincos(position as f64 * frequency);
                (cos as f32, sin as f32)
            }));
        }
    }
}

impl Llama3Scaling {
    fn apply(self, frequency: f64) -> f64 {
        let wavelength = std::f64::consts::TAU / frequency;
        if wavelength < self.original_context / self.high {
            return frequency;
        }
        if wavelength > self.original_context / self.low {
            return frequency / self.factor;
        }
        let smooth = (self.original_context / wavelength - self.low) / (self.high - self.low);
        (1.0 - smooth) * frequency / self.factor + smooth * frequency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_pair_turns_a_radian_per_position() {
        let rope = Rope::new(RopePairs::Halves, 64, 10_000.0, 1.0);
        let mut angles = Vec::new();
        rope.angles(3..4, &mut angles);
        assert_eq!(angles.len(), 32);
        assert_eq!(angles[0], (3.0f64.cos() as f32, 3.0f64.sin() as f32));
        assert!((rope.frequencies[16] - 0.01).abs() < 1e-15);
    }

    #[test]
    fn linear_scaling_stretches_all_positions() {
        let plain = Rope::new(RopePairs::Halves, 16, 10_000.0, 1.0);
        let scaled = Rope::new(RopePairs::Halves, 16, 10_000.0, 8.0);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        plain.angles(2..3, &mut a);
        scaled.angles(16..17, &mut b);
        assert_eq!(a, b);
    }

    #[test]
    fn llama3_keeps_short_wavelengths_and_stretches_long_ones() {
        let scaling = Llama3Scaling {
            factor: 8.0,
            low: 1.0,
            high: 4.0,
            original_context: 8192.0,
        };
        assert_eq!(scaling.apply(1.0), 1.0);
        assert_eq!(scaling.apply(1e-5), 1e-5 / 8.0);
        let between = scaling.apply(std::f64::consts::TAU / 4096.0);
        assert!(between < 1.6e-3 && between > 1.6e-3 / 8.0);
    }
}
