//! Numbers that order values of any type as an i64.

use crate::{Dtype, ResultValue};

/// A key that orders floats as integers: -0 before 0, and by magnitude beyond the infinities NaN.
pub(crate) const fn key(value: f64) -> i64 {
    let bits = value.to_bits() as i64;
    bits ^ ((bits >> 63) as u64 >> 1) as i64
}

pub(crate) const fn float(key: i64) -> f64 {
    f64::from_bits((key ^ ((key >> 63) as u64 >> 1) as i64) as u64)
}

/// The place of a value in the order of its type.
#[inline(always)]
pub(crate) const fn order(dtype: Dtype, value: f64) -> i64 {
    match dtype.is_integer() {
        true => whole_order(dtype, value as i128),
        false => key(value),
    }
}

/// The place of an integer in the order of its type.
pub(crate) const fn whole_order(dtype: Dtype, value: i128) -> i64 {
    match dtype {
        Dtype::U64 => (value as u64 ^ 1 << 63) as i64,
        _ => value as i64,
    }
}

pub(crate) const fn ordered(dtype: Dtype, order: i64) -> ResultValue {
    match dtype {
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 => ResultValue::Float(float(order)),
        Dtype::U64 => ResultValue::Int((order as u64 ^ 1 << 63) as i128),
        _ => ResultValue::Int(order as i128),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_order_values() {
        let floats = [
            f64::NEG_INFINITY,
            -1.0,
            -0.0,
            0.0,
            5e-324,
            1.0,
            f64::INFINITY,
        ];
        assert!(floats.is_sorted_by(|a, b| order(Dtype::F64, *a) < order(Dtype::F64, *b)));
        for (dtype, low, high) in [
            (Dtype::U64, 0, i128::from(u64::MAX)),
            (Dtype::I64, i128::from(i64::MIN), i128::from(i64::MAX)),
            (Dtype::I8, -128, 127),
        ] {
            assert!(whole_order(dtype, low) < whole_order(dtype, high));
            for value in [low, 1, high] {
                assert_eq!(
                    ordered(dtype, whole_order(dtype, value)),
                    ResultValue::Int(value)
                );
            }
        }
        for value in floats {
            assert_eq!(
                ordered(Dtype::F64, order(Dtype::F64, value)),
                ResultValue::Float(value)
            );
        }
    }
}
