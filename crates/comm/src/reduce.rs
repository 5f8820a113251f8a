//! Elementwise reductions.

use half::{bf16, f16};

use crate::peer_bytes::PeerBytes;
use crate::{Complex64, Dtype};

paceline_base::named_enum! {
    /// How the elements of two ranks are combined.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Reduce {
        /// `a + b`; integers wrap, of bools it is "or". f16 and bf16 are added in f32 and rounded
        /// once.
        Sum = "sum",
        /// The larger one; NaN if either is NaN; of two equal ones (`0.0` and `-0.0`) the first.
        /// Complex numbers compare by their real, then their imaginary part.
        Max = "max",
        /// The smaller one; NaN if either is NaN; of two equal ones the first.
        Min = "min",
        /// `a * b`; integers wrap, of bools it is "and". f16 and bf16 as for sums.
        Prod = "prod",
    }
}

impl Reduce {
    /// Its number on the wire.
    pub const fn code(self) -> u8 {
        1 + self as u8
    }

    /// The reduction with this number.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.code() == code)
    }
}

/// An element type as bytes, and the type its reductions are computed in.
trait ReduceElement {
    /// The type of partial results.
    type Wide: Copy + Default;

    /// An element in memory.
    type Bytes: Copy;

    /// The elements of an array. A partial element at the end is dropped.
    fn elements(bytes: &[u8]) -> &[Self::Bytes];
    fn elements_mut(bytes: &mut [u8]) -> &mut [Self::Bytes];
    /// An element of an array.
    ///
    /// # Safety
    /// The array contains the whole element.
    unsafe fn lent(bytes: PeerBytes<'_>, index: usize) -> Self::Bytes;
    fn load(bytes: Self::Bytes) -> Self::Wide;
    fn store(value: Self::Wide) -> Self::Bytes;
    fn sum(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn prod(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! bytes_of {
    ($type:ty) => {
        type Bytes = [u8; size_of::<$type>()];

        fn elements(bytes: &[u8]) -> &[Self::Bytes] {
            bytes.as_chunks().0
        }
        fn elements_mut(bytes: &mut [u8]) -> &mut [Self::Bytes] {
            bytes.as_chunks_mut().0
        }
        #[inline(always)]
        unsafe fn lent(bytes: PeerBytes<'_>, index: usize) -> Self::Bytes {
            // SAFETY: by the caller's promise.
            unsafe { bytes.element(index) }
        }
    };
}

macro_rules! integer {
    ($($type:ty)*) => {$(
        impl ReduceElement for $type {
            type Wide = Self;
            bytes_of!($type);

            fn load(bytes: Self::Bytes) -> Self {
                Self::from_ne_bytes(bytes)
            }
            fn store(value: Self) -> Self::Bytes {
                value.to_ne_bytes()
            }
            fn sum(a: Self, b: Self) -> Self {
                a.wrapping_add(b)
            }
            fn max(a: Self, b: Self) -> Self {
                Ord::max(a, b)
            }
            fn min(a: Self, b: Self) -> Self {
                Ord::min(a, b)
            }
            fn prod(a: Self, b: Self) -> Self {
                a.wrapping_mul(b)
            }
        }
    )*};
}

integer!(i8 i16 i32 i64 u8 u16 u32 u64);

// `f32::max` leaves the sign of zero unspecified and drops NaN. All machines must agree on the
// result, so neither is acceptable here.
macro_rules! float {
    ($($type:ty, $wide:ty, $narrow:expr;)*) => {$(
        impl ReduceElement for $type {
            type Wide = $wide;
            bytes_of!($type);

            fn load(bytes: Self::Bytes) -> $wide {
                Self::from_ne_bytes(bytes).into()
            }
            fn store(value: $wide) -> Self::Bytes {
                let narrow: fn($wide) -> $type = $narrow;
                narrow(value).to_ne_bytes()
            }
            fn sum(a: $wide, b: $wide) -> $wide {
                a + b
            }
            fn max(a: $wide, b: $wide) -> $wide {
                if (b > a) | b.is_nan() { b } else { a }
            }
            fn min(a: $wide, b: $wide) -> $wide {
                if (b < a) | b.is_nan() { b } else { a }
            }
            fn prod(a: $wide, b: $wide) -> $wide {
                a * b
            }
        }
    )*};
}

float! {
    f32, f32, |value| value;
    f64, f64, |value| value;
    f16, f32, f16::from_f32;
    bf16, f32, bf16::from_f32;
}

impl ReduceElement for bool {
    type Wide = u8;
    bytes_of!(u8);

    fn load([byte]: [u8; 1]) -> u8 {
        byte
    }
    fn store(value: u8) -> [u8; 1] {
        [value]
    }
    fn sum(a: u8, b: u8) -> u8 {
        a | b
    }
    fn max(a: u8, b: u8) -> u8 {
        a | b
    }
    fn min(a: u8, b: u8) -> u8 {
        a & b
    }
    fn prod(a: u8, b: u8) -> u8 {
        a & b
    }
}

impl ReduceElement for Complex64 {
    type Wide = Self;
    bytes_of!(Self);

    fn load([a, b, c, d, e, f, g, h]: [u8; 8]) -> Self {
        Self {
            re: f32::load([a, b, c, d]),
            im: f32::load([e, f, g, h]),
        }
    }
    fn store(value: Self) -> [u8; 8] {
        let ([a, b, c, d], [e, f, g, h]) = (f32::store(value.re), f32::store(value.im));
        [a, b, c, d, e, f, g, h]
    }
    fn sum(a: Self, b: Self) -> Self {
        Self {
            re: a.re + b.re,
            im: a.im + b.im,
        }
    }
    fn max(a: Self, b: Self) -> Self {
        if a.is_nan() || !(b.is_nan() || b.follows(a)) {
            a
        } else {
            b
        }
    }
    fn min(a: Self, b: Self) -> Self {
        if a.is_nan() || !(b.is_nan() || a.follows(b)) {
            a
        } else {
            b
        }
    }
    fn prod(a: Self, b: Self) -> Self {
        Self {
            re: a.re * b.re - a.im * b.im,
            im: a.re * b.im + a.im * b.re,
        }
    }
}

impl Complex64 {
    fn is_nan(self) -> bool {
        self.re.is_nan() || self.im.is_nan()
    }

    fn follows(self, other: Self) -> bool {
        self.re > other.re || (self.re == other.re && self.im > other.im)
    }
}

/// Calls `$function::<T>($arguments)` with the Rust type of a dtype.
macro_rules! typed {
    ($dtype:expr, $function:ident $arguments:tt) => {
        match $dtype {
            Dtype::Bool => $function::<bool> $arguments,
            Dtype::I8 => $function::<i8> $arguments,
            Dtype::I16 => $function::<i16> $arguments,
            Dtype::I32 => $function::<i32> $arguments,
            Dtype::I64 => $function::<i64> $arguments,
            Dtype::U8 => $function::<u8> $arguments,
            Dtype::U16 => $function::<u16> $arguments,
            Dtype::U32 => $function::<u32> $arguments,
            Dtype::U64 => $function::<u64> $arguments,
            Dtype::F16 => $function::<f16> $arguments,
            Dtype::Bf16 => $function::<bf16> $arguments,
            Dtype::F32 => $function::<f32> $arguments,
            Dtype::F64 => $function::<f64> $arguments,
            Dtype::Complex64 => $function::<Complex64> $arguments,
        }
    };
}

/// Position of the operand that the result replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandSide {
    /// `into = into op from`.
    First,
    /// `into = from op into`.
    Second,
}

/// `into = into op from`, or with the operands swapped. Both are arrays of `dtype` of equal length.
///
/// # Panics
/// If they are not equally long.
pub fn fold(op: Reduce, dtype: Dtype, side: OperandSide, into: &mut [u8], from: &[u8]) {
    fold_lent(op, dtype, side, into, PeerBytes::of(from));
}

/// Like [`fold`], with `from` in a peer's memory. If that changes meanwhile, an element of the
/// result comes from old, new, or mixed bytes.
///
/// # Panics
/// If they are not equally long.
pub(crate) fn fold_lent(
    op: Reduce,
    dtype: Dtype,
    side: OperandSide,
    into: &mut [u8],
    from: PeerBytes<'_>,
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has what it was compiled for.
        return unsafe { fold_avx2(op, dtype, side, into, from) };
    }
    fold_any(op, dtype, side, into, from);
}

/// [`fold_any`] in vector registers of twice the width: the same operations on each element, so the
/// same results.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fold_avx2(op: Reduce, dtype: Dtype, side: OperandSide, into: &mut [u8], from: PeerBytes<'_>) {
    fold_any(op, dtype, side, into, from);
}

#[inline(always)]
fn fold_any(op: Reduce, dtype: Dtype, side: OperandSide, into: &mut [u8], from: PeerBytes<'_>) {
    typed!(dtype, fold_typed(op, side, into, from));
}

#[inline(always)]
fn fold_typed<T: ReduceElement>(
    op: Reduce,
    side: OperandSide,
    into: &mut [u8],
    from: PeerBytes<'_>,
) {
    match op {
        Reduce::Sum => fold_by::<T>(T::sum, side, into, from),
        Reduce::Max => fold_by::<T>(T::max, side, into, from),
        Reduce::Min => fold_by::<T>(T::min, side, into, from),
        Reduce::Prod => fold_by::<T>(T::prod, side, into, from),
    }
}

#[inline(always)]
fn fold_by<T: ReduceElement>(
    op: impl Fn(T::Wide, T::Wide) -> T::Wide,
    side: OperandSide,
    into: &mut [u8],
    from: PeerBytes<'_>,
) {
    assert_eq!(into.len(), from.len(), "bytes on both sides of a reduction");
    // SAFETY: for indices of elements of `into`, which is as long.
    let b = |index| unsafe { T::load(T::lent(from, index)) };
    // Loops and not `for_each`, whose body would be compiled without the features of `fold_avx2`.
    let elements = T::elements_mut(into).iter_mut().enumerate();
    match side {
        OperandSide::First => {
            for (index, a) in elements {
                *a = T::store(op(T::load(*a), b(index)));
            }
        }
        OperandSide::Second => {
            for (index, a) in elements {
                *a = T::store(op(b(index), T::load(*a)));
            }
        }
    }
}

/// Elements that [`reduce_parts`] handles at a time: their partial results stay in L1, and the loop
/// over parts is amortised.
const BLOCK: usize = 256;

/// Reduces `size` arrays of `dtype` in rank order, keeping partial results wide: `into = ((p_0 op
/// p_1) op p_2) op ...`, rounded once. `part(r)` is the array of rank r; `None` means the contents
/// of `into`.
pub(crate) fn reduce_parts<'a>(
    op: Reduce,
    dtype: Dtype,
    into: &mut [u8],
    size: usize,
    part: impl Fn(usize) -> Option<&'a [u8]>,
) {
    typed!(dtype, reduce_typed(op, into, size, part));
}

fn reduce_typed<'a, T: ReduceElement>(
    op: Reduce,
    into: &mut [u8],
    size: usize,
    part: impl Fn(usize) -> Option<&'a [u8]>,
) {
    match op {
        Reduce::Sum => reduce_by::<T>(T::sum, into, size, part),
        Reduce::Max => reduce_by::<T>(T::max, into, size, part),
        Reduce::Min => reduce_by::<T>(T::min, into, size, part),
        Reduce::Prod => reduce_by::<T>(T::prod, into, size, part),
    }
}

#[inline(always)]
fn reduce_by<'a, T: ReduceElement>(
    op: impl Fn(T::Wide, T::Wide) -> T::Wide,
    into: &mut [u8],
    size: usize,
    part: impl Fn(usize) -> Option<&'a [u8]>,
) {
    let mut start = 0;
    for block in T::elements_mut(into).chunks_mut(BLOCK) {
        let range = start..start + block.len();
        start = range.end;
        let of = |rank| part(rank).map(|part| &T::elements(part)[range.clone()]);
        let mut partial = [T::Wide::default(); BLOCK];
        for (p, x) in partial.iter_mut().zip(of(0).unwrap_or(block)) {
            *p = T::load(*x);
        }
        for rank in 1..size {
            for (p, x) in partial.iter_mut().zip(of(rank).unwrap_or(block)) {
                *p = op(*p, T::load(*x));
            }
        }
        for (x, p) in block.iter_mut().zip(partial) {
            *x = T::store(p);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;
    use crate::{Data, DataMut, Element};

    /// `a op b` by both implementations, longer than a vector register.
    fn both<T: Element + PartialEq + fmt::Debug>(op: Reduce, a: T, b: T) -> T {
        let mut results = Vec::new();
        for (side, (x, y)) in [(OperandSide::First, (a, b)), (OperandSide::Second, (b, a))] {
            let (mut into, from) = ([x; 37], [y; 37]);
            let bytes = Data::new(&from);
            fold(
                op,
                T::DTYPE,
                side,
                DataMut::new(&mut into).bytes_mut(),
                bytes.bytes(),
            );
            results.push(into[0]);
            results.extend(into);
        }
        let (first, second) = ([a; 300], [b; 300]);
        let mut into = first;
        let from = Data::new(&second).bytes();
        reduce_parts(
            op,
            T::DTYPE,
            DataMut::new(&mut into).bytes_mut(),
            2,
            |rank| (rank == 1).then_some(from),
        );
        results.extend(into);
        let text = format!("{:?}", results[0]);
        for result in &results {
            assert_eq!(format!("{result:?}"), text, "{a:?} {op} {b:?}");
        }
        results[0]
    }

    #[test]
    fn floats_follow_the_documented_rules() {
        for (op, a, b, expected) in [
            (Reduce::Sum, 1.5, -0.25, 1.25),
            (Reduce::Sum, f32::MAX, f32::MAX, f32::INFINITY),
            (Reduce::Prod, 1.5, -0.25, -0.375),
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
            let got = both(op, a, b);
            let equal = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
            assert!(equal, "{a} {op} {b}: {got}, expected {expected}");
            let (got, expected) = (both(op, f64::from(a), f64::from(b)), f64::from(expected));
            let huge = expected.is_infinite() && got > f64::from(f32::MAX);
            let nan = expected.is_nan() && got.is_nan();
            assert!(got == expected || huge || nan, "{a} {op} {b} as f64: {got}");
        }
    }

    #[test]
    fn integers_wrap_and_bools_are_logic() {
        for (op, expected) in [
            (Reduce::Sum, 44),
            (Reduce::Max, 200),
            (Reduce::Min, 100),
            (Reduce::Prod, 32),
        ] {
            assert_eq!(both(op, 200_u8, 100), expected);
        }
        assert_eq!(both(Reduce::Sum, 100_i8, 100), -56);
        assert_eq!(both(Reduce::Prod, i64::MAX, 2), -2);
        assert_eq!(both(Reduce::Min, -3_i16, 7), -3);
        assert_eq!(both(Reduce::Max, u64::MAX, 0), u64::MAX);
        for (op, expected) in [
            (Reduce::Sum, true),
            (Reduce::Min, false),
            (Reduce::Prod, false),
        ] {
            assert_eq!(both(op, true, false), expected);
        }
    }

    #[test]
    fn complex_numbers_multiply_and_compare() {
        let number = |re, im| Complex64 { re, im };
        let (a, b) = (number(1.0, 2.0), number(1.0, -3.0));
        assert_eq!(both(Reduce::Sum, a, b), number(2.0, -1.0));
        assert_eq!(both(Reduce::Prod, a, b), number(7.0, -1.0));
        assert_eq!(both(Reduce::Max, a, b), a);
        assert_eq!(both(Reduce::Min, a, b), b);
        assert!(both(Reduce::Max, number(0.0, f32::NAN), a).im.is_nan());
        assert!(both(Reduce::Min, a, number(f32::NAN, 0.0)).re.is_nan());
    }

    #[test]
    fn half_floats_are_rounded_once() {
        // 2048 + 1 is 2048 in f16; eight ones in sequence are lost unless sums are wide.
        let parts: Vec<[f16; 3]> = std::iter::once(2048.0)
            .chain([1.0; 8])
            .map(|x| [f16::from_f32(x); 3])
            .collect();
        let mut into = parts[0];
        let bytes: Vec<&[u8]> = parts.iter().map(|part| Data::new(part).bytes()).collect();
        let part = |rank: usize| (rank > 0).then(|| bytes[rank]);
        let data = &mut DataMut::new(&mut into);
        reduce_parts(Reduce::Sum, Dtype::F16, data.bytes_mut(), 9, part);
        assert_eq!(data.bytes(), Data::new(&[f16::from_f32(2056.0); 3]).bytes());
    }
}
