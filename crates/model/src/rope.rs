//! Rotary position embeddings: frequencies and angles.
//!
//! Angles are computed in f64 with the pure-Rust `libm` and rounded to f32 once, because system
//! math libraries differ. So every platform has the same bits.

use std::ops::Range;

use paceline_tensor::RopePairs;

/// Largest rotated head; bounds the memory that a file can request.
pub(crate) const MAX_PAIRS: usize = 1 << 12;

/// Smallest accepted divisor of frequencies. Real ones are 1 to 64; with this one the highest
/// frequency is 1000 radians per position, whose angles f64 still resolves.
pub(crate) const MIN_DIVISOR: f64 = 1e-3;

/// A set of rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Which elements are rotated together.
    pub pairs: RopePairs,
    /// Radians per position for each pair.
    pub frequencies: Vec<f64>,
    /// Factor of cosines and sines: 1 without [`Yarn`] or LongRoPE.
    pub magnitude: f64,
    /// Frequencies of long contexts; `None` if those above serve every context.
    pub long: Option<LongContext>,
}

/// Frequencies for contexts longer than the original one. The served context decides, not the
/// length of a sequence, so that cached keys stay valid while a sequence grows.
#[derive(Clone, Debug, PartialEq)]
pub struct LongContext {
    /// Positions of the original training context.
    pub original: usize,
    pub frequencies: LongFrequencies,
}

/// See [`LongContext`].
#[derive(Clone, Debug, PartialEq)]
pub enum LongFrequencies {
    /// LongRoPE: radians per position for each pair.
    ///
    /// Source: Ding et al. 2024; `_compute_longrope_parameters` in transformers'
    /// `modeling_rope_utils.py`.
    Fixed(Vec<f64>),
    /// Dynamic NTK: the base grows with the context, by `factor`.
    ///
    /// Source: `_compute_dynamic_ntk_parameters`, as above.
    GrownBase { base: f64, factor: f64 },
}

/// YaRN: long wavelengths are stretched, short ones kept, with a ramp between.
///
/// Source: Peng et al. 2023; `_compute_yarn_parameters` in transformers' `modeling_rope_utils.py`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Stretch factor of long wavelengths.
    pub factor: f64,
    /// Original training context.
    pub original_context: f64,
    /// Pairs with at least this many rotations in the original context are kept.
    pub fast: f64,
    /// Pairs with at most this many rotations are stretched fully.
    pub slow: f64,
    /// Whether the ends of the ramp are rounded to whole pairs.
    pub whole_pairs: bool,
    /// Factor of cosines and sines.
    pub magnitude: f64,
}

/// Frequency scaling of Llama 3.1: long wavelengths are stretched, short ones kept.
///
/// Source: `_compute_llama3_parameters` in transformers' `modeling_rope_utils.py`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Scaling {
    /// Stretch factor of long wavelengths.
    pub factor: f64,
    /// Wavelengths above `original_context / low` are stretched fully.
    pub low: f64,
    /// Wavelengths below `original_context / high` are kept.
    pub high: f64,
    /// Original training context.
    pub original_context: f64,
}

impl Rope {
    /// Frequencies `base^(-2 i / rotated)` for `rotated / 2` pairs, divided by `linear`.
    pub fn new(pairs: RopePairs, rotated: usize, base: f64, linear: f64) -> Self {
        let frequency = |i: usize| libm::pow(base, -2.0 * i as f64 / rotated as f64) / linear;
        Self {
            pairs,
            frequencies: (0..rotated / 2).map(frequency).collect(),
            magnitude: 1.0,
            long: None,
        }
    }

    /// The rotations of a served context of `context` positions.
    #[must_use]
    pub fn for_context(&self, context: usize) -> Self {
        let mut rope = self.clone();
        if let Some(long) = self.long.as_ref().filter(|long| context > long.original) {
            rope.frequencies = long.frequencies(2 * self.frequencies.len(), context);
        }
        rope
    }

    /// Applies YaRN to plain frequencies of base `base`.
    #[must_use]
    pub fn with_yarn(mut self, base: f64, yarn: Yarn) -> Self {
        let rotated = 2.0 * self.frequencies.len() as f64;
        let (first, last) = yarn.ramp(base, rotated);
        for (j, frequency) in self.frequencies.iter_mut().enumerate() {
            let stretched = ((j as f64 - first) / (last - first)).clamp(0.0, 1.0);
            *frequency = *frequency / yarn.factor * stretched + *frequency * (1.0 - stretched);
        }
        self.magnitude = yarn.magnitude;
        self
    }

    /// Applies Llama 3.1's scaling.
    #[must_use]
    pub fn with_llama3(mut self, scaling: Llama3Scaling) -> Self {
        for frequency in &mut self.frequencies {
            *frequency = scaling.apply(*frequency);
        }
        self
    }

    /// Of heads that do not turn.
    pub(crate) const fn still() -> Self {
        Self {
            pairs: RopePairs::Halves,
            frequencies: Vec::new(),
            magnitude: 1.0,
            long: None,
        }
    }

    /// The same pairs without rotation.
    #[must_use]
    pub fn without_turning(&self) -> Self {
        let frequencies = vec![0.0; self.frequencies.len()];
        Self {
            frequencies,
            magnitude: 1.0,
            long: None,
            ..self.clone()
        }
    }

    /// Sets the frequencies of all pairs but the first `n` to 0.
    #[must_use]
    pub fn with_turning(mut self, n: usize) -> Self {
        self.frequencies.iter_mut().skip(n).for_each(|f| *f = 0.0);
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
                ((cos * self.magnitude) as f32, (sin * self.magnitude) as f32)
            }));
        }
    }
}

impl LongContext {
    /// Frequencies of `rotated` elements in a context longer than the original one.
    fn frequencies(&self, rotated: usize, context: usize) -> Vec<f64> {
        match &self.frequencies {
            LongFrequencies::Fixed(frequencies) => frequencies.clone(),
            LongFrequencies::GrownBase { base, factor } => {
                let growth = factor * context as f64 / self.original as f64 - (factor - 1.0);
                let dim = rotated as f64;
                let grown = base * libm::pow(growth, dim / (dim - 2.0));
                Rope::new(RopePairs::Halves, rotated, grown, 1.0).frequencies
            }
        }
    }
}

impl Yarn {
    /// Default factor of cosines and sines.
    pub fn usual_magnitude(factor: f64, weight: f64) -> f64 {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * weight * libm::log(factor) + 1.0
        }
    }

    /// Ends of the ramp as fractional pairs: the last that is kept and the first that is stretched
    /// fully.
    fn ramp(self, base: f64, rotated: f64) -> (f64, f64) {
        let pair = |turns: f64| {
            let wavelengths = self.original_context / (turns * std::f64::consts::TAU);
            rotated * libm::log(wavelengths) / (2.0 * libm::log(base))
        };
        let (mut first, mut last) = (pair(self.fast), pair(self.slow));
        if self.whole_pairs {
            (first, last) = (first.floor(), last.ceil());
        }
        (first, last) = (first.max(0.0), last.min(rotated - 1.0));
        if first == last {
            last += 0.001;
        }
        (first, last)
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

    /// gpt-oss: pairs up to 8.09 are kept, from 17.4 on stretched 32 times.
    #[test]
    fn yarn_keeps_the_first_pairs_and_stretches_the_last() {
        let yarn = Yarn {
            factor: 32.0,
            original_context: 4096.0,
            fast: 32.0,
            slow: 1.0,
            whole_pairs: false,
            magnitude: Yarn::usual_magnitude(32.0, 1.0),
        };
        let plain = Rope::new(RopePairs::Halves, 64, 150_000.0, 1.0);
        let scaled = plain.clone().with_yarn(150_000.0, yarn);
        let ratio = |j: usize| plain.frequencies[j] / scaled.frequencies[j];
        assert_eq!(
            (ratio(0), ratio(8), ratio(18), ratio(31)),
            (1.0, 1.0, 32.0, 32.0)
        );
        assert!(ratio(9) > 1.0 && ratio(17) < 32.0 && ratio(12) < ratio(13));
        assert!((scaled.magnitude - 1.346_573_59).abs() < 1e-8);
        let mut angles = Vec::new();
        scaled.angles(0..1, &mut angles);
        assert_eq!(angles[0], (scaled.magnitude as f32, 0.0));
    }

    /// Up to the original context the base is the file's. At 3 times that context, a factor of 2
    /// makes it `5^(64 / 62)` times as large.
    #[test]
    fn a_dynamic_base_grows_with_the_context() {
        let plain = Rope::new(RopePairs::Halves, 64, 10_000.0, 1.0);
        let dynamic = Rope {
            long: Some(LongContext {
                original: 4096,
                frequencies: LongFrequencies::GrownBase {
                    base: 10_000.0,
                    factor: 2.0,
                },
            }),
            ..plain.clone()
        };
        assert_eq!(dynamic.for_context(4096).frequencies, plain.frequencies);
        let base = 10_000.0 * 5f64.powf(64.0 / 62.0);
        let grown = Rope::new(RopePairs::Halves, 64, base, 1.0).frequencies;
        let got = dynamic.for_context(3 * 4096).frequencies;
        assert!((got[31] / grown[31] - 1.0).abs() < 1e-12, "{got:?}");
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
