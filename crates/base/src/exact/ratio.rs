//! Quotients of exact integers with one rounding: means, variances.

use super::{BIAS, ExactSum, trim};

/// Bits of a quotient that are computed before the rest becomes one sticky bit: 53, one to round
/// by, and room.
const QUOTIENT_BITS: usize = 64;

/// An exact number: an integer of any size times a power of two, over a whole number.
///
/// [`value`](Self::value) rounds it once, to the nearest f64. Made of few limbs: all operations
/// take microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ratio {
    negative: bool,
    /// Low limb first, without zeros at the end.
    limbs: Vec<u32>,
    /// Exponent of the lowest bit.
    exponent: i32,
    /// Never 0.
    divisor: Vec<u32>,
}

impl Ratio {
    /// A sum without its NaN and infinities.
    pub fn of(sum: &ExactSum) -> Self {
        let (negative, limbs) = sum.magnitude();
        Self {
            negative,
            limbs,
            exponent: -BIAS,
            divisor: vec![1],
        }
    }

    /// Whether it is 0.
    pub const fn is_zero(&self) -> bool {
        self.limbs.is_empty()
    }

    /// Divided by `by`.
    ///
    /// # Panics
    /// If `by` is 0.
    pub fn over(mut self, by: u64) -> Self {
        assert!(by != 0, "division by zero");
        self.divisor = product(&self.divisor, &limbs_of(by));
        self
    }

    /// Times `by`.
    pub fn times(mut self, by: u64) -> Self {
        self.limbs = product(&self.limbs, &limbs_of(by));
        self
    }

    /// Times itself. Only of a number that was not divided.
    ///
    /// # Panics
    /// If it was divided.
    pub fn squared(self) -> Self {
        assert!(self.divisor == [1], "a square of a quotient");
        Self {
            negative: false,
            limbs: product(&self.limbs, &self.limbs),
            exponent: 2 * self.exponent,
            divisor: self.divisor,
        }
    }

    /// Minus `other`. Only of numbers that were not divided; the result is their magnitude and
    /// sign.
    ///
    /// # Panics
    /// If one of them was divided.
    pub fn minus(self, other: &Self) -> Self {
        assert!(
            self.divisor == [1] && other.divisor == [1],
            "a difference of quotients"
        );
        let exponent = self.exponent.min(other.exponent);
        let aligned = |of: &Self| shifted(&of.limbs, (of.exponent - exponent) as usize);
        let (a, b) = (aligned(&self), aligned(other));
        let (negative, limbs) = if self.negative != other.negative {
            (self.negative, total(&a, &b))
        } else if is_less(&a, &b) {
            (!self.negative, difference(&b, &a))
        } else {
            (self.negative, difference(&a, &b))
        };
        Self {
            negative,
            limbs,
            exponent,
            divisor: self.divisor,
        }
    }

    /// Rounded to the nearest f64, ties to even; beyond its range an infinity. 0 is +0.
    pub fn value(&self) -> f64 {
        if self.is_zero() {
            return 0.0;
        }
        // The numerator gets enough bits that the quotient has all significant ones; the remainder
        // is sticky.
        let wanted = bits(&self.divisor) + QUOTIENT_BITS;
        let down = bits(&self.limbs) as i32 - wanted as i32;
        let (rest, dropped) = match down {
            ..=0 => (shifted(&self.limbs, -down as usize), false),
            1.. => cut(&self.limbs, down as usize),
        };
        let (quotient, remains) = divided(rest, &self.divisor);
        let (exponent, sticky) = (self.exponent + down, dropped || remains);
        let magnitude = rounded(quotient, exponent, sticky);
        if self.negative { -magnitude } else { magnitude }
    }
}

/// `quotient * 2^exponent`, and a little more if `sticky`, to the nearest f64. The quotient has at
/// least 54 bits or is exact.
fn rounded(quotient: u128, exponent: i32, sticky: bool) -> f64 {
    let top = exponent + (128 - quotient.leading_zeros() as i32) - 1;
    if top > 1023 {
        return f64::INFINITY;
    }
    // The exponent of the result's lowest bit.
    let lowest = (top - 52).max(-1074);
    let cut = lowest - exponent;
    let (mantissa, round, sticky) = match cut {
        ..=0 => (quotient << -cut, false, sticky),
        1..=127 => {
            let below = quotient & ((1 << (cut - 1)) - 1);
            let round = quotient >> (cut - 1) & 1 == 1;
            (quotient >> cut, round, sticky || below != 0)
        }
        _ => (0, false, true),
    };
    let up = round && (sticky || mantissa & 1 == 1);
    let mantissa = mantissa as u64 + u64::from(up);
    // A mantissa of 2^53 carries into the exponent, and the largest exponent into infinity.
    f64::from_bits((((lowest + 1074) as u64) << 52) + mantissa)
}

/// The quotient, of at most [`QUOTIENT_BITS`] + 1 bits, and whether there is a remainder.
fn divided(mut rest: Vec<u32>, divisor: &[u32]) -> (u128, bool) {
    if divisor == [1] {
        let join = |value: u128, limb: &u32| value << 32 | u128::from(*limb);
        return (rest.iter().rev().fold(0, join), false);
    }
    let mut quotient = 0;
    for step in (0..=bits(&rest) - bits(divisor)).rev() {
        let part = shifted(divisor, step);
        let fits = !is_less(&rest, &part);
        if fits {
            rest = difference(&rest, &part);
        }
        quotient = quotient << 1 | u128::from(fits);
    }
    (quotient, !rest.is_empty())
}

fn limbs_of(value: u64) -> Vec<u32> {
    let mut limbs = vec![value as u32, (value >> 32) as u32];
    trim(&mut limbs);
    limbs
}

fn bits(limbs: &[u32]) -> usize {
    let top = limbs.last().map_or(0, |limb| limb.leading_zeros() as usize);
    32 * limbs.len() - top
}

fn shifted(limbs: &[u32], by: usize) -> Vec<u32> {
    let mut result = vec![0; by / 32];
    let mut carry = 0;
    for limb in limbs {
        let wide = u64::from(*limb) << (by % 32) | carry;
        result.push(wide as u32);
        carry = wide >> 32;
    }
    result.push(carry as u32);
    trim(&mut result);
    result
}

/// Without the `by` lowest bits, and whether one of them was set.
fn cut(limbs: &[u32], by: usize) -> (Vec<u32>, bool) {
    let (below, kept) = limbs.split_at(by / 32);
    let low = kept[0] & ((1 << (by % 32)) - 1);
    let pairs = kept.iter().zip(kept[1..].iter().chain([&0]));
    let join = |(limb, next): (&u32, &u32)| {
        ((u64::from(*next) << 32 | u64::from(*limb)) >> (by % 32)) as u32
    };
    let mut result: Vec<u32> = pairs.map(join).collect();
    trim(&mut result);
    (result, low != 0 || below.iter().any(|limb| *limb != 0))
}

fn product(a: &[u32], b: &[u32]) -> Vec<u32> {
    let mut result = vec![0u32; a.len() + b.len()];
    for (i, x) in a.iter().enumerate() {
        let mut carry = 0;
        for (j, y) in b.iter().enumerate() {
            let wide = u64::from(*x) * u64::from(*y) + u64::from(result[i + j]) + carry;
            result[i + j] = wide as u32;
            carry = wide >> 32;
        }
        result[i + b.len()] = carry as u32;
    }
    trim(&mut result);
    result
}

fn total(a: &[u32], b: &[u32]) -> Vec<u32> {
    let limb = |of: &[u32], i: usize| u64::from(of.get(i).copied().unwrap_or(0));
    let mut carry = 0;
    let mut result = Vec::new();
    for i in 0..=a.len().max(b.len()) {
        let wide = limb(a, i) + limb(b, i) + carry;
        result.push(wide as u32);
        carry = wide >> 32;
    }
    trim(&mut result);
    result
}

/// `a - b`, which is not negative.
fn difference(a: &[u32], b: &[u32]) -> Vec<u32> {
    let mut borrow = 0;
    let mut result = Vec::new();
    for (i, limb) in a.iter().enumerate() {
        let minus = i64::from(b.get(i).copied().unwrap_or(0)) + borrow;
        let wide = i64::from(*limb) - minus;
        borrow = i64::from(wide < 0);
        result.push(wide as u32);
    }
    trim(&mut result);
    result
}

/// Whether `a < b`; both without zeros at the end.
fn is_less(a: &[u32], b: &[u32]) -> bool {
    match a.len().cmp(&b.len()) {
        std::cmp::Ordering::Equal => a.iter().rev().lt(b.iter().rev()),
        order => order.is_lt(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ratio(value: f64) -> Ratio {
        let mut sum = ExactSum::new();
        sum.add(value);
        Ratio::of(&sum)
    }

    #[test]
    fn quotients_round_as_the_processor_does() {
        for a in [1.0, -7.0, 1e300, 5e-324, 1.1e-310, 123456789.125, f64::MAX] {
            for b in [1u64, 2, 3, 7, 10, 1 << 40, (1 << 53) - 1] {
                let got = ratio(a).over(b).value();
                assert_eq!(got, a / b as f64, "{a:e} / {b}");
            }
        }
        assert_eq!(
            ratio(3.0).over(3).over(u64::MAX).over(u64::MAX).value(),
            2f64.powi(-128)
        );
    }

    #[test]
    fn differences_and_squares_are_exact() {
        let (a, b) = (ratio(1e200).squared(), ratio(-1e-200).squared());
        assert_eq!(a.clone().minus(&b).minus(&a).value(), -0.0);
        assert_eq!(ratio(3.0).minus(&ratio(5.0)).value(), -2.0);
        assert_eq!(ratio(-3.0).minus(&ratio(5.0)).value(), -8.0);
        assert_eq!(ratio(-5.0).minus(&ratio(-3.0)).value(), -2.0);
        assert_eq!(ratio(1.5).times(6).value(), 9.0);
        assert!(ratio(2.0).minus(&ratio(2.0)).is_zero());
    }
}
