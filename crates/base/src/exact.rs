//! Sums that are exact: the definition, and how two of them become one.
//!
//! [`ExactSum`] holds the exact sum of any number of finite values as an integer in units of
//! 2^-2176. [`ExactSum::value`] rounds it once, to the nearest f64, ties to even: for f64 values
//! that is what Python's `math.fsum` gives. Merging is integer addition, so the result depends on
//! the values alone. Their order, how they were split and the processor do not matter.
//!
//! ```text
//! slice       0           1                 68                      135
//! unit   2^-2176     2^-2144     ...       2^0        ...        2^2144
//! ```
//!
//! The range holds products of two f64 (2^-2148 to 2^2048) and 2^64 of them. A slice is an `i64`
//! that takes 2^29 additions of 32-bit pieces before [`ExactSum::carry`] has to run, which the
//! methods see to. [`Ratio`] divides exact sums with one rounding: means and variances.
//!
//! This module defines. The fast form over columns is in the crate `mapreduce`, and is tested
//! against this one.

mod ratio;

pub use ratio::Ratio;

/// Slices of an [`ExactSum`].
const SLICES: usize = 136;

/// Exponent of the unit of slice 0, negated.
const BIAS: i32 = 2176;

/// Additions of 32-bit pieces to a slice before carries run. Two sums with as many merge within an
/// `i64`: 2 * 2^29 * 2^32 is 2^62.
const ADDITIONS_MAX: u32 = 1 << 29;

const NAN: u8 = 1;
const INFINITY: u8 = 2;
const NEG_INFINITY: u8 = 4;
/// A value other than -0 was added.
const NOT_NEG_ZERO: u8 = 8;
/// -0 was added.
const NEG_ZERO: u8 = 16;
const FLAGS: u8 = 31;

/// The exact sum of values, and whether a NaN or an infinity was among them.
///
/// NaN, or infinities of both signs, make the sum NaN; else an infinity makes it that infinity.
/// The sum of nothing is 0; it is -0 only when every value was -0. A sum beyond the range of f64
/// rounds to an infinity, as IEEE 754 has it, where `math.fsum` raises an error.
///
/// Costs 1.1 kB; adding a value costs a few nanoseconds.
#[derive(Clone)]
pub struct ExactSum {
    slices: [i64; SLICES],
    /// Additions since the last carry.
    additions: u32,
    flags: u8,
}

/// Bytes that are no [`ExactSum`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an exact sum of {bytes} bytes, flags {flags}, first slice {first}: malformed")]
pub struct Malformed {
    /// How many there are.
    pub bytes: usize,
    /// The first of them, or 0.
    pub flags: u8,
    /// The second, or 0.
    pub first: u8,
}

impl ExactSum {
    /// The sum of nothing.
    pub const fn new() -> Self {
        Self {
            slices: [0; SLICES],
            additions: 0,
            flags: 0,
        }
    }

    pub fn add(&mut self, value: f64) {
        self.note(value);
        if value.is_finite() {
            let (mantissa, exponent) = parts(value);
            self.add_units(mantissa, exponent, value.is_sign_negative());
        }
    }

    /// Adds the exact product of two values. An infinity times zero is NaN.
    pub fn add_product(&mut self, a: f64, b: f64) {
        if !(a.is_finite() && b.is_finite()) {
            return self.note(a * b);
        }
        self.flags |= NOT_NEG_ZERO;
        let negative = a.is_sign_negative() != b.is_sign_negative();
        let ((m, e), (n, f)) = (parts(a), parts(b));
        let product = u128::from(m) * u128::from(n);
        self.add_units(product as u64, e + f, negative);
        self.add_units((product >> 64) as u64, e + f + 64, negative);
    }

    /// Adds `count * 2^exponent`, an exponent from -2176 to 2048.
    ///
    /// # Panics
    /// At another exponent.
    pub fn add_scaled(&mut self, count: i64, exponent: i32) {
        self.flags |= NOT_NEG_ZERO;
        self.add_units(count.unsigned_abs(), exponent, count < 0);
    }

    /// Notes what the integer cannot hold: the sign of zero, infinities and NaN.
    pub fn note(&mut self, value: f64) {
        self.flags |= match value {
            _ if value.is_nan() => NAN | NOT_NEG_ZERO,
            f64::INFINITY => INFINITY | NOT_NEG_ZERO,
            f64::NEG_INFINITY => NEG_INFINITY | NOT_NEG_ZERO,
            _ if value == 0.0 && value.is_sign_negative() => NEG_ZERO,
            _ => NOT_NEG_ZERO,
        };
    }

    /// Whether a value other than -0 was added.
    pub const fn has_other_than_neg_zero(&self) -> bool {
        self.flags & NOT_NEG_ZERO != 0
    }

    fn add_units(&mut self, mantissa: u64, exponent: i32, negative: bool) {
        assert!((-BIAS..=2048 + 64).contains(&exponent), "2^{exponent}");
        let at = (exponent + BIAS) as usize;
        let (slice, shift) = (at / 32, at % 32);
        let units = u128::from(mantissa) << shift;
        let sign = if negative { -1 } else { 1 };
        for (i, piece) in [units, units >> 32, units >> 64].into_iter().enumerate() {
            self.slices[slice + i] += sign * i64::from(piece as u32);
        }
        self.count(1);
    }

    fn count(&mut self, additions: u32) {
        self.additions += additions;
        if self.additions >= ADDITIONS_MAX {
            self.carry();
        }
    }

    /// Brings all slices but the last into 0 to 2^32 - 1, which does not change the sum.
    fn carry(&mut self) {
        for i in 0..SLICES - 1 {
            let carry = self.slices[i] >> 32;
            self.slices[i] -= carry << 32;
            self.slices[i + 1] += carry;
        }
        self.additions = 1;
    }

    /// Adds another sum: the result is the sum of all values of both, independent of order.
    pub fn merge(&mut self, other: &Self) {
        for (slice, theirs) in self.slices.iter_mut().zip(&other.slices) {
            *slice += theirs;
        }
        self.flags |= other.flags;
        self.count(other.additions.max(1));
    }

    /// The sum rounded to the nearest f64, ties to even.
    pub fn value(&self) -> f64 {
        if let Some(value) = self.special() {
            return value;
        }
        let ratio = Ratio::of(self);
        if ratio.is_zero() && self.flags & (NEG_ZERO | NOT_NEG_ZERO) == NEG_ZERO {
            return -0.0;
        }
        ratio.value()
    }

    /// NaN or an infinity, when the values make the sum one.
    pub const fn special(&self) -> Option<f64> {
        match self.flags & (NAN | INFINITY | NEG_INFINITY) {
            0 => None,
            INFINITY => Some(f64::INFINITY),
            NEG_INFINITY => Some(f64::NEG_INFINITY),
            _ => Some(f64::NAN),
        }
    }

    /// The flags that distinguish sums: not the sign of zero if another value was added.
    const fn flags(&self) -> u8 {
        if self.has_other_than_neg_zero() {
            self.flags & !NEG_ZERO
        } else {
            self.flags
        }
    }

    /// Sign and magnitude in units of 2^-2176, the lowest 32 bits first, without zeros at the end.
    fn magnitude(&self) -> (bool, Vec<u32>) {
        let mut own = self.clone();
        own.carry();
        let negative = own.slices[SLICES - 1] < 0;
        if negative {
            own.slices.iter_mut().for_each(|slice| *slice = -*slice);
            own.carry();
        }
        let last = own.slices[SLICES - 1];
        let mut limbs: Vec<u32> = own.slices.iter().map(|slice| *slice as u32).collect();
        limbs.push((last >> 32) as u32);
        trim(&mut limbs);
        (negative, limbs)
    }

    /// The one encoding of the sum: equal sums have equal bytes. It takes about 20 bytes usually,
    /// 551 at most. First come flags (bit 7 is the sign), then the index of the first slice that is
    /// not 0. The 32-bit pieces from there on follow, little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (negative, limbs) = self.magnitude();
        let first = limbs.iter().take_while(|limb| **limb == 0).count();
        let mut bytes = vec![self.flags() | u8::from(negative) << 7, first as u8];
        bytes.extend(limbs[first..].iter().flat_map(|limb| limb.to_le_bytes()));
        bytes
    }

    /// The sum that [`to_bytes`](Self::to_bytes) has encoded.
    ///
    /// # Errors
    /// [`Malformed`]: nothing encodes to these bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Malformed> {
        let at = |i: usize| bytes.get(i).copied().unwrap_or(0);
        let (flags, first) = (at(0), at(1));
        let malformed = Malformed {
            bytes: bytes.len(),
            flags,
            first,
        };
        let (limbs, rest) = bytes.get(2..).ok_or(malformed)?.as_chunks::<4>();
        let end = usize::from(first) + limbs.len();
        if !rest.is_empty() || end > SLICES || flags & !(FLAGS | 1 << 7) != 0 {
            return Err(malformed);
        }
        let mut sum = Self::new();
        let sign = if flags >> 7 == 1 { -1 } else { 1 };
        for (slice, limb) in sum.slices[usize::from(first)..].iter_mut().zip(limbs) {
            *slice = sign * i64::from(u32::from_le_bytes(*limb));
        }
        sum.flags = flags & FLAGS;
        sum.additions = 1;
        Ok(sum)
    }

    /// The sum when it is an integer of 127 bits, as sums of integers are.
    pub fn to_i128(&self) -> Option<i128> {
        if self.special().is_some() {
            return None;
        }
        let (negative, limbs) = self.magnitude();
        let (fraction, whole) = limbs.split_at(limbs.len().min(BIAS as usize / 32));
        if fraction.iter().any(|limb| *limb != 0) || whole.len() > 4 {
            return None;
        }
        let join = |value: u128, limb: &u32| value << 32 | u128::from(*limb);
        let value = i128::try_from(whole.iter().rev().fold(0, join)).ok()?;
        Some(if negative { -value } else { value })
    }
}

impl Default for ExactSum {
    fn default() -> Self {
        Self::new()
    }
}

impl PartialEq for ExactSum {
    /// Whether both are the same sum, however their slices lie.
    fn eq(&self, other: &Self) -> bool {
        self.flags() == other.flags() && self.magnitude() == other.magnitude()
    }
}

impl std::fmt::Debug for ExactSum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ExactSum({:?})", self.value())
    }
}

impl Extend<f64> for ExactSum {
    fn extend<T: IntoIterator<Item = f64>>(&mut self, values: T) {
        values.into_iter().for_each(|value| self.add(value));
    }
}

/// Mantissa and exponent of the lowest bit of a finite value's magnitude.
fn parts(value: f64) -> (u64, i32) {
    let bits = value.to_bits();
    let (exponent, fraction) = ((bits >> 52 & 0x7ff) as i32, bits & ((1 << 52) - 1));
    match exponent {
        0 => (fraction, -1074),
        _ => (fraction | 1 << 52, exponent - 1075),
    }
}

/// Drops zeros at the high end.
fn trim(limbs: &mut Vec<u32>) {
    while limbs.last() == Some(&0) {
        limbs.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers for tests, from a linear congruence of Knuth.
    struct Numbers(u64);

    impl Iterator for Numbers {
        type Item = u64;
        fn next(&mut self) -> Option<u64> {
            let step = self.0.wrapping_mul(6364136223846793005);
            self.0 = step.wrapping_add(1442695040888963407);
            Some(self.0 ^ self.0 >> 29)
        }
    }

    fn sum(values: &[f64]) -> ExactSum {
        let mut sum = ExactSum::new();
        sum.extend(values.iter().copied());
        sum
    }

    #[test]
    fn edges_of_f64() {
        let (max, tiny) = (f64::MAX, f64::from_bits(1));
        let half_ulp = 2f64.powi(-53);
        for (values, expected) in [
            (&[][..], 0.0),
            (&[-0.0], -0.0),
            (&[-0.0, 0.0], 0.0),
            (&[1.0, -1.0], 0.0),
            (&[tiny], tiny),
            (&[-tiny, -tiny], -2.0 * tiny),
            (&[max, max], f64::INFINITY),
            (&[max, max, -max], max),
            (&[-max, -max], f64::NEG_INFINITY),
            (&[1e16, 1.0, -1e16], 1.0),
            (&[1.0, half_ulp], 1.0),
            (&[1.0, half_ulp, tiny], 1.0 + 2.0 * half_ulp),
            (&[1.0, half_ulp, -tiny], 1.0),
            (&[1.0 + 2.0 * half_ulp, half_ulp], 1.0 + 4.0 * half_ulp),
            (&[max, max * 2f64.powi(-54)], max),
            (&[max, max * 2f64.powi(-53)], f64::INFINITY),
            (&[f64::MIN_POSITIVE, -tiny], f64::from_bits((1 << 52) - 1)),
            (&[f64::INFINITY, 1.0], f64::INFINITY),
            (&[f64::NEG_INFINITY, max], f64::NEG_INFINITY),
        ] {
            let got = sum(values).value();
            assert_eq!(got.to_bits(), expected.to_bits(), "{values:?}: {got:e}");
        }
        assert!(sum(&[f64::INFINITY, f64::NEG_INFINITY]).value().is_nan());
        assert!(sum(&[f64::NAN, 1.0]).value().is_nan());
    }

    #[test]
    fn any_bits_cancel_and_keep_their_bytes() {
        let values: Vec<f64> = Numbers(1).take(3000).map(f64::from_bits).collect();
        let finite: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
        let whole = sum(&finite);
        let (a, b) = finite.split_at(777);
        let mut merged = sum(b);
        merged.merge(&ExactSum::from_bytes(&sum(a).to_bytes()).unwrap());
        assert_eq!(merged.to_bytes(), whole.to_bytes());
        assert_eq!(merged, whole);
        merged.extend(finite.iter().rev().map(|value| -value));
        assert_eq!(merged.value(), 0.0);
        assert_eq!(merged.to_bytes().len(), 2);
    }

    #[test]
    fn carries_run_before_a_slice_overflows() {
        let mut sum = ExactSum::new();
        let value = f64::from_bits(0x43ef_ffff_ffff_ffff); // 53 ones
        sum.add(value);
        for _ in 0..40 {
            let copy = sum.clone();
            sum.merge(&copy);
        }
        assert_eq!(sum.value(), value * 2f64.powi(40));
        assert!(sum.additions < ADDITIONS_MAX);
    }

    #[test]
    fn products_are_exact() {
        let mut dot = ExactSum::new();
        let (a, tiny) = (1.0 + f64::EPSILON, f64::from_bits(1));
        dot.add_product(a, a);
        dot.add_product(-1.0, 1.0);
        dot.add_product(-2.0, f64::EPSILON);
        assert_eq!(dot.value(), f64::EPSILON * f64::EPSILON);
        dot = ExactSum::new();
        dot.add_product(tiny, tiny);
        assert_eq!(dot.value(), 0.0); // below half of the least f64
        let scale = 2f64.powi(1000);
        dot.merge(&{
            let mut other = ExactSum::new();
            other.add_product(f64::MAX, f64::MAX);
            other.add_product(-f64::MAX, f64::MAX);
            other.add_product(scale, tiny);
            other
        });
        assert_eq!(dot.value(), scale * tiny);
        dot.add_product(f64::INFINITY, 0.0);
        assert!(dot.value().is_nan());
    }

    #[test]
    fn integers_come_back() {
        let mut sum = ExactSum::new();
        for _ in 0..5 {
            sum.add_scaled(i64::MIN, 0);
        }
        assert_eq!(sum.to_i128(), Some(5 * i128::from(i64::MIN)));
        sum.add(0.5);
        assert_eq!(sum.to_i128(), None);
        assert_eq!(ExactSum::new().to_i128(), Some(0));
        assert_eq!(self::sum(&[f64::MAX]).to_i128(), None);
    }

    #[test]
    fn malformed_bytes_are_refused() {
        for bytes in [
            &[][..],
            &[0],
            &[0, 0, 1],
            &[32, 0],
            &[0, 136, 1, 0, 0, 0],
            &[0; 2 + 4 * (SLICES + 1)],
        ] {
            assert!(ExactSum::from_bytes(bytes).is_err(), "{bytes:?}");
        }
    }
}
