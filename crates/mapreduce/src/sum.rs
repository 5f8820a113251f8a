//! Exact sums of columns at the speed of memory.
//!
//! [`add`] gives the bits that [`ExactSum::add`] gives for each value. It takes blocks of 4,096
//! values, and splits each value by its distance from the block's largest:
//!
//! ```text
//! value   |<-- 44 bits -->|<-- 46 bits -->|<-- 46 bits -->|<-- 46 bits -->|  rest, has to be 0
//!           level 1         level 2         level 3         level 4
//! ```
//!
//! A level is `(x + m) - m` for a large `m` of the right exponent: exact, and a multiple of the
//! level's unit. Of such multiples, 128 add up exactly in a lane of f64. So a block costs ten
//! vector operations a vector, and becomes one integer a level. Two levels are enough for most
//! columns. A block whose range is larger is computed with three or four, and if that is not
//! enough, value by value. Nothing here is approximate. Source of the splitting: Rump, Ogita and
//! Oishi, "Accurate floating-point summation", 2008.
//!
//! Measured on an AMD EPYC (Zen 5) against a sum of 32 lanes: docs/measurements.md.

use paceline_base::exact::ExactSum;

/// Values of a block: 32 KiB, a first-level cache.
pub(crate) const BLOCK: usize = 4096;

/// Additions to a lane in a block, with the narrowest lanes.
const LANE_ADDITIONS_LOG2: i32 = 8;

/// Exponents of a block's largest value between which levels neither over- nor underflow.
const EXPONENTS: std::ops::Range<i32> = -800..1000;

/// Bits between the units of two levels: 53 less what a lane's additions need.
const LEVEL_BITS: i32 = 53 - LANE_ADDITIONS_LOG2 + 1;

/// Levels of most columns.
const DEPTH_MIN: usize = 2;

const DEPTH_MAX: usize = 4;

/// Blocks after which fewer levels are tried again: a failure costs a pass in the cache.
const SHALLOWER_AFTER: u32 = 64;

/// Blocks shorter than this are added value by value.
const SHORT: usize = 128;

/// Adds `values`: `(n,)`, any values. The result does not depend on how a column is cut into
/// calls. Cost: one pass, 8 bytes a value from memory.
pub fn add(sum: &mut ExactSum, values: &[f64]) {
    let mut adder = Adder::default();
    for block in values.chunks(BLOCK) {
        adder.add(sum, block);
    }
}

/// Adds the products of pairs: `a` and `b` are `(n,)`. Exact, also where a product would over- or
/// underflow. Cost: one pass over both.
///
/// # Panics
/// If the lengths differ.
pub fn add_products(sum: &mut ExactSum, a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len(), "a product of columns");
    let mut adder = Adder::default();
    let mut parts = [vec![0.0; BLOCK], vec![0.0; BLOCK]];
    for (a, b) in a.chunks(BLOCK).zip(b.chunks(BLOCK)) {
        let [high, low] = parts.each_mut().map(|part| &mut part[..a.len()]);
        if two_products(a, b, high, low) {
            adder.add(sum, high);
            adder.add(sum, low);
            sum.note(0.0); // a product of zeros is no -0 of a column
        } else {
            let pairs = a.iter().zip(b);
            pairs.for_each(|(a, b)| sum.add_product(*a, *b));
        }
    }
}

/// Adds blocks; remembers what the last one needed, which the next needs too more often than not.
#[derive(Debug)]
struct Adder {
    exponent: Option<i32>,
    depth: usize,
    /// Blocks since the depth was found.
    blocks: u32,
}

impl Default for Adder {
    fn default() -> Self {
        Self {
            exponent: None,
            depth: DEPTH_MIN,
            blocks: 0,
        }
    }
}

impl Adder {
    fn add(&mut self, sum: &mut ExactSum, block: &[f64]) {
        if block.len() < SHORT {
            return sum.extend(block.iter().copied());
        }
        if !sum.has_other_than_neg_zero() {
            let other = block.iter().find(|x| x.to_bits() != (-0.0f64).to_bits());
            sum.note(other.copied().unwrap_or(-0.0));
        }
        self.blocks += 1;
        if self.blocks.is_multiple_of(SHALLOWER_AFTER) {
            self.depth = DEPTH_MIN.max(self.depth - 1);
        }
        let guess = self.exponent.unwrap_or_else(|| exponent(peak(block)));
        if try_levels(sum, block, guess, self.depth) {
            self.exponent = Some(guess);
            return;
        }
        let own = exponent(peak(block));
        for depth in self.depth..=DEPTH_MAX {
            if try_levels(sum, block, own, depth) {
                (self.exponent, self.depth) = (Some(own), depth);
                return;
            }
        }
        sum.extend(block.iter().copied());
    }
}

/// Adds a block of values below `2^(exponent + 1)`; whether that was exact. If not, nothing is
/// added.
fn try_levels(sum: &mut ExactSum, block: &[f64], exponent: i32, depth: usize) -> bool {
    if !EXPONENTS.contains(&exponent) {
        return false;
    }
    let levels = levels(exponent);
    let Some(totals) = split(block, levels, depth) else {
        return false;
    };
    for (total, level) in totals.into_iter().zip(levels) {
        if total != 0 {
            sum.add_scaled(total, level.unit);
        }
    }
    true
}

/// Constants that split off a level.
#[derive(Clone, Copy, Debug)]
struct Level {
    /// Added and subtracted again.
    magic: f64,
    /// Exponent of the unit.
    unit: i32,
}

fn levels(exponent: i32) -> [Level; DEPTH_MAX] {
    let first = exponent + LANE_ADDITIONS_LOG2 + 1;
    [0, 1, 2, 3].map(|i| {
        let top = first - i * LEVEL_BITS;
        Level {
            magic: 1.5 * power(top),
            unit: top - 52,
        }
    })
}

/// 2^exponent, of a normal number.
const fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Exponent of a magnitude; that of NaN and infinity is 1024, that of zero low.
const fn exponent(peak: f64) -> i32 {
    (peak.to_bits() >> 52) as i32 - 1023
}

/// State of a block's lanes.
#[derive(Debug)]
struct Lanes<const N: usize> {
    sums: [[f64; N]; DEPTH_MAX],
    /// Largest magnitude, without NaN.
    peak: [f64; N],
    /// All bits of what is left of the values, their signs shifted out.
    rest: [u64; N],
}

impl<const N: usize> Lanes<N> {
    const EMPTY: Self = Self {
        sums: [[0.0; N]; DEPTH_MAX],
        peak: [0.0; N],
        rest: [0; N],
    };

    #[inline(always)]
    fn take<const DEPTH: usize>(&mut self, values: &[f64; N], magic: [f64; DEPTH_MAX]) {
        for i in 0..N {
            let mut x = values[i];
            let magnitude = x.abs();
            let peak = self.peak[i];
            self.peak[i] = if magnitude > peak { magnitude } else { peak };
            for (sums, magic) in self.sums.iter_mut().zip(magic).take(DEPTH) {
                let part = (x + magic) - magic;
                sums[i] += part;
                x -= part;
            }
            self.rest[i] |= x.to_bits() << 1;
        }
    }

    /// Sums of the lanes in units of the levels, if they are exact.
    fn totals(&self, levels: [Level; DEPTH_MAX]) -> Option<[i64; DEPTH_MAX]> {
        let rest = self.rest.iter().fold(0, |all, rest| all | rest);
        let peak = self.peak.iter().fold(0.0f64, |a, b| a.max(*b));
        // The first level holds magnitudes up to half of its magic number's power of two.
        let bound = power(levels[0].unit + 52 - LANE_ADDITIONS_LOG2);
        if rest != 0 || peak.is_nan() || peak >= bound {
            return None;
        }
        let mut totals = [0; DEPTH_MAX];
        for (total, (sums, level)) in totals.iter_mut().zip(self.sums.iter().zip(levels)) {
            let scale = power(-level.unit);
            *total = sums.iter().map(|sum| (sum * scale) as i64).sum();
        }
        Some(totals)
    }
}

#[inline(always)]
fn split_lanes<const N: usize, const DEPTH: usize>(
    block: &[f64],
    levels: [Level; DEPTH_MAX],
) -> Option<[i64; DEPTH_MAX]> {
    let magic = levels.map(|level| level.magic);
    let mut lanes = Lanes::<N>::EMPTY;
    let (chunks, rest) = block.as_chunks::<N>();
    for chunk in chunks {
        lanes.take::<DEPTH>(chunk, magic);
    }
    let mut last = [0.0; N];
    last[..rest.len()].copy_from_slice(rest);
    lanes.take::<DEPTH>(&last, magic);
    lanes.totals(levels)
}

#[inline(always)]
fn split_depth<const N: usize>(
    block: &[f64],
    levels: [Level; DEPTH_MAX],
    depth: usize,
) -> Option<[i64; DEPTH_MAX]> {
    match depth {
        ..=2 => split_lanes::<N, 2>(block, levels),
        3 => split_lanes::<N, 3>(block, levels),
        4.. => split_lanes::<N, 4>(block, levels),
    }
}

#[inline(always)]
fn two_products_lanes(a: &[f64], b: &[f64], high: &mut [f64], low: &mut [f64]) -> bool {
    let mut exact = true;
    for (((a, b), high), low) in a.iter().zip(b).zip(high).zip(low) {
        let product = a * b;
        *high = product;
        *low = a.mul_add(*b, -product);
        let magnitude = product.abs();
        let is_safe = magnitude > PRODUCT_MIN && magnitude < PRODUCT_MAX;
        exact &= is_safe | (*a == 0.0) & b.is_finite() | (*b == 0.0) & a.is_finite();
    }
    exact
}

/// Products whose low half is exact lie between these.
const PRODUCT_MIN: f64 = power(-900);
const PRODUCT_MAX: f64 = power(1000);

#[inline(always)]
fn peak_lanes(block: &[f64]) -> f64 {
    let mut peaks = [0.0f64; 32];
    let (chunks, rest) = block.as_chunks::<32>();
    for chunk in chunks {
        for (peak, x) in peaks.iter_mut().zip(chunk) {
            let x = x.abs();
            *peak = if x > *peak { x } else { *peak };
        }
    }
    let all = peaks.iter().chain(rest);
    all.fold(0.0, |a: f64, b| a.max(b.abs()))
}

/// Compiles a function for the instruction sets of x86, and chooses at run time.
macro_rules! for_each_cpu {
    ($vis:vis $name:ident($($arg:ident: $type:ty),*) -> $result:ty, $wide:expr, $narrow:expr) => {
        $vis fn $name($($arg: $type),*) -> $result {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512dq,avx512vl,fma")]
                fn with_avx512($($arg: $type),*) -> $result {
                    $wide
                }
                #[target_feature(enable = "avx2,fma")]
                fn with_avx2($($arg: $type),*) -> $result {
                    $narrow
                }
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("fma")
                {
                    // SAFETY: the features were detected.
                    return unsafe { with_avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the features were detected.
                    return unsafe { with_avx2($($arg),*) };
                }
            }
            $narrow
        }
    };
}
pub(crate) use for_each_cpu;

for_each_cpu!(
    split(block: &[f64], levels: [Level; 4], depth: usize) -> Option<[i64; 4]>,
    split_depth::<32>(block, levels, depth),
    split_depth::<16>(block, levels, depth)
);
for_each_cpu!(
    two_products(a: &[f64], b: &[f64], high: &mut [f64], low: &mut [f64]) -> bool,
    two_products_lanes(a, b, high, low),
    two_products_lanes(a, b, high, low)
);
for_each_cpu!(peak(block: &[f64]) -> f64, peak_lanes(block), peak_lanes(block));

#[cfg(test)]
mod tests {
    use bitrep::SumF64;

    use super::*;
    use crate::philox::Philox;

    /// Columns whose sums go wrong otherwise: uniform, mixed sign and size, nearly cancelling,
    /// sparse, and any bits.
    pub(crate) fn columns(n: usize) -> Vec<(&'static str, Vec<f64>)> {
        let random = Philox::new(36);
        let uniform = |i: usize| random.uniform(i as u64, 0);
        let wide = |i: usize, range: f64| {
            let scale = 2f64.powi(((uniform(i) - 0.5) * range) as i32);
            (random.uniform(i as u64, 1) - 0.5) * scale
        };
        let column = |f: &dyn Fn(usize) -> f64| (0..n).map(f).collect();
        vec![
            ("uniform", column(&uniform)),
            ("mixed", column(&|i| wide(i, 40.0))),
            ("wide", column(&|i| wide(i, 600.0))),
            (
                "cancelling",
                column(&|i| {
                    if i % 2 == 0 {
                        1e16 * uniform(i / 2)
                    } else {
                        -1e16 * uniform(i / 2) + 1e-8
                    }
                }),
            ),
            (
                "sparse",
                column(&|i| if i % 1000 == 7 { wide(i, 100.0) } else { 0.0 }),
            ),
            (
                "bits",
                column(&|i| {
                    let any = f64::from_bits(random.word(i as u64, 2));
                    if any.is_finite() { any } else { 0.0 }
                }),
            ),
            (
                "tiny",
                column(&|i| f64::from_bits((uniform(i) * 1e6) as u64)),
            ),
            ("huge", column(&|i| wide(i, 3.0) * 2f64.powi(1000))),
        ]
    }

    #[test]
    fn columns_have_the_bits_of_the_definition_and_of_bitrep() {
        for n in [0, 1, 127, 128, 4095, 4096, 4097, 30_000] {
            for (name, values) in columns(n) {
                let mut defined = ExactSum::new();
                defined.extend(values.iter().copied());
                let mut fast = ExactSum::new();
                add(&mut fast, &values);
                assert_eq!(fast.to_bytes(), defined.to_bytes(), "{name}, {n} values");
                let mut other = SumF64::default();
                values.iter().for_each(|value| other.add(*value));
                assert_eq!(fast.value(), other.value(), "{name}, {n} values");
            }
        }
    }

    #[test]
    fn any_cut_has_the_same_bits() {
        for (name, values) in columns(20_000) {
            let mut whole = ExactSum::new();
            add(&mut whole, &values);
            for cut in [1, 300, 4096, 19_999] {
                let mut sums = values.chunks(cut).map(|part| {
                    let mut sum = ExactSum::new();
                    add(&mut sum, part);
                    sum
                });
                let mut merged = sums.next().unwrap();
                sums.for_each(|sum| merged.merge(&sum));
                assert_eq!(merged.to_bytes(), whole.to_bytes(), "{name}, cut {cut}");
            }
        }
    }

    #[test]
    fn specials_pass_through_blocks() {
        for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for at in [0, 999, 5000, 8999] {
                let mut values = vec![1.0; 9000];
                values[at] = special;
                let mut sum = ExactSum::new();
                add(&mut sum, &values);
                let got = sum.value();
                assert!(
                    got == special || special.is_nan() && got.is_nan(),
                    "{got} at {at}"
                );
            }
        }
        let mut sum = ExactSum::new();
        add(&mut sum, &[-0.0; 5000]);
        assert_eq!(sum.value().to_bits(), (-0.0f64).to_bits());
        add(&mut sum, &[0.0; 5000]);
        assert_eq!(sum.value().to_bits(), 0.0f64.to_bits());
    }

    #[test]
    fn products_have_the_bits_of_the_definition() {
        for (name, a) in columns(10_000) {
            for (other, b) in columns(10_000) {
                let mut defined = ExactSum::new();
                a.iter()
                    .zip(&b)
                    .for_each(|(a, b)| defined.add_product(*a, *b));
                let mut fast = ExactSum::new();
                add_products(&mut fast, &a, &b);
                assert_eq!(fast.to_bytes(), defined.to_bytes(), "{name} x {other}");
            }
        }
    }
}
