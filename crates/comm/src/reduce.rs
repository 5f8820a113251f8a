//! Elementwise reductions.

use std::fmt;

use crate::Dtype;

/// How the elements of two ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// `a + b`; integers wrap.
    Sum,
    /// The larger one; NaN if either is NaN; of two equal ones (`0.0` and `-0.0`) the first.
    Max,
    /// The smaller one; NaN if either is NaN; of two equal ones the first.
    Min,
}

impl Reduce {
    /// Its number on the wire.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Sum => 1,
            Self::Max => 2,
            Self::Min => 3,
        }
    }

    /// The reduction with this number.
    pub(crate) const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Sum),
            2 => Some(Self::Max),
            3 => Some(Self::Min),
            _ => None,
        }
    }
}

impl fmt::Display for Reduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Max => "max",
            Self::Min => "min",
        })
    }
}

/// `first = first op second`, elementwise. Both are arrays of `dtype` of equal length.
pub(crate) fn fold(op: Reduce, dtype: Dtype, first: &mut [u8], second: &[u8]) {
    assert_eq!(
        first.len(),
        second.len(),
        "bytes on both sides of a reduction"
    );
    match (dtype, op) {
        (Dtype::U8, Reduce::Sum) => bytes(first, second, u8::wrapping_add),
        (Dtype::U8, Reduce::Max) => bytes(first, second, u8::max),
        (Dtype::U8, Reduce::Min) => bytes(first, second, u8::min),
        (Dtype::F32, Reduce::Sum) => floats(first, second, |a, b| a + b),
        // `f32::max` leaves the sign of zero open and drops NaN; a result that every machine
        // agrees on may do neither.
        (Dtype::F32, Reduce::Max) => {
            floats(
                first,
                second,
                |a, b| if b > a || b.is_nan() { b } else { a },
            );
        }
        (Dtype::F32, Reduce::Min) => {
            floats(
                first,
                second,
                |a, b| if b < a || b.is_nan() { b } else { a },
            );
        }
    }
}

fn bytes(first: &mut [u8], second: &[u8], op: impl Fn(u8, u8) -> u8) {
    for (a, b) in first.iter_mut().zip(second) {
        *a = op(*a, *b);
    }
}

fn floats(first: &mut [u8], second: &[u8], op: impl Fn(f32, f32) -> f32) {
    for (a, b) in first.as_chunks_mut().0.iter_mut().zip(second.as_chunks().0) {
        *a = op(f32::from_ne_bytes(*a), f32::from_ne_bytes(*b)).to_ne_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Data, DataMut};

    fn check(op: Reduce, a: f32, b: f32, expected: f32) {
        // Longer than a vector register, so that both the vector body and the rest run.
        let (mut first, second) = ([a; 37], [b; 37]);
        fold(
            op,
            Dtype::F32,
            DataMut::new(&mut first).bytes_mut(),
            Data::new(&second).bytes(),
        );
        for got in first {
            let equal = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
            assert!(equal, "{a} {op} {b}: {got}, expected {expected}");
        }
    }

    #[test]
    fn floats_follow_the_documented_rules() {
        for (op, a, b, expected) in [
            (Reduce::Sum, 1.5, -0.25, 1.25),
            (Reduce::Sum, f32::MAX, f32::MAX, f32::INFINITY),
            (Reduce::Max, 1.0, 2.0, 2.0),
            (Reduce::Max, 2.0, 1.0, 2.0),
            (Reduce::Max, -0.0, 0.0, -0.0),
            (Reduce::Max, 0.0, -0.0, 0.0),
            (Reduce::Max, f32::NAN, 1.0, f32::NAN),
            (Reduce::Max, 1.0, f32::NAN, f32::NAN),
            (Reduce::Min, 1.0, 2.0, 1.0),
            (Reduce::Min, 2.0, f32::NEG_INFINITY, f32::NEG_INFINITY),
            (Reduce::Min, 0.0, -0.0, 0.0),
            (Reduce::Min, f32::NAN, 1.0, f32::NAN),
            (Reduce::Min, 1.0, f32::NAN, f32::NAN),
        ] {
            check(op, a, b, expected);
        }
    }

    #[test]
    fn bytes_wrap() {
        for (op, expected) in [(Reduce::Sum, 44), (Reduce::Max, 200), (Reduce::Min, 100)] {
            let mut first = [200_u8; 37];
            fold(op, Dtype::U8, &mut first, &[100; 37]);
            assert_eq!(first, [expected; 37]);
        }
    }
}
