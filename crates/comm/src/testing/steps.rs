//! Calls with known inputs and results.

use std::fmt::Debug;

use half::{bf16, f16};
use paceline_base::Rank;

use super::Xorshift;
use crate::{Complex64, Deadline, Dtype, Element, Error, Group, Reduce};

/// Elements of a long buffer: 400,172 bytes of f32, several rounds of any sensible segment and an
/// odd remainder.
pub(super) const LONG: usize = 100_043;

/// A call that all ranks make.
#[derive(Clone, Debug)]
pub(super) enum CollectiveCase {
    Barrier,
    Gather(Dtype, Vec<usize>),
    GatherInPlace(Dtype, Vec<usize>),
    GatherEven(Dtype, usize),
    Reduce(Dtype, usize, Reduce),
    Scatter(Dtype, Vec<usize>, Reduce),
    ScatterEven(Dtype, usize, Reduce),
    Broadcast(Dtype, usize, Rank),
    /// Rank r sends `(r + 2 s) mod n` elements to rank s.
    Exchange(Dtype, usize),
    ExchangeEven(Dtype, usize),
    /// Every rank sends to the next one, then receives from the previous one, with this tag.
    Shift(Dtype, usize, u32),
}

impl CollectiveCase {
    /// A call of each kind, short, and a long one, for a group of `size`.
    pub(super) fn each(size: u32) -> Vec<Self> {
        let counts = (0..size as usize).map(|rank| rank % 3).collect();
        let scattered = (0..size as usize).map(|rank| rank % 4).collect();
        vec![
            Self::Barrier,
            Self::Gather(Dtype::F32, counts),
            Self::GatherEven(Dtype::U8, 3),
            Self::Reduce(Dtype::F32, 5, Reduce::Sum),
            Self::Scatter(Dtype::I32, scattered, Reduce::Sum),
            Self::ExchangeEven(Dtype::U16, 2),
            Self::Broadcast(Dtype::F32, 4, Rank(size - 1)),
            Self::Reduce(Dtype::F32, LONG, Reduce::Max),
        ]
    }

    /// Any step, of any length that `each_length` knows.
    pub(super) fn any(random: &mut Xorshift, size: u32) -> Self {
        let lengths = each_length(size);
        // For calls with a part for each rank: moderate lengths.
        let moderate = |length: usize| if length == LONG { LONG / 8 } else { length };
        let part = |random: &mut Xorshift| moderate(lengths[random.below(lengths.len())]);
        let length = |random: &mut Xorshift| lengths[random.below(lengths.len())];
        let dtype = Dtype::ALL[random.below(Dtype::ALL.len())];
        let op = Reduce::ALL[random.below(Reduce::ALL.len())];
        let counts = |random: &mut Xorshift| (0..size).map(|_| part(random)).collect();
        match random.below(11) {
            0 => Self::Barrier,
            1 => Self::Gather(dtype, counts(random)),
            2 => Self::GatherInPlace(dtype, counts(random)),
            3 => Self::GatherEven(dtype, part(random)),
            4 => Self::Reduce(dtype, length(random), op),
            5 => Self::Scatter(dtype, counts(random), op),
            6 => Self::ScatterEven(dtype, part(random), op),
            7 => Self::Broadcast(dtype, length(random), random.rank(size)),
            8 => Self::Exchange(dtype, part(random) + 1),
            9 => Self::ExchangeEven(dtype, part(random)),
            _ => Self::Shift(dtype, length(random), u32::from(random.below(2) == 0)),
        }
    }

    /// Makes the call with values drawn from `salt` and checks its result.
    pub(super) fn run(&self, group: &dyn Group, salt: u64, by: Deadline) -> Result<(), Error> {
        let dtype = match self {
            Self::Barrier => return group.barrier(by),
            Self::Gather(dtype, _)
            | Self::GatherInPlace(dtype, _)
            | Self::GatherEven(dtype, _)
            | Self::Reduce(dtype, ..)
            | Self::Scatter(dtype, ..)
            | Self::ScatterEven(dtype, ..)
            | Self::Broadcast(dtype, ..)
            | Self::Exchange(dtype, _)
            | Self::ExchangeEven(dtype, _)
            | Self::Shift(dtype, ..) => dtype,
        };
        match dtype {
            Dtype::Bool => self.run_typed::<bool>(group, salt, by),
            Dtype::I8 => self.run_typed::<i8>(group, salt, by),
            Dtype::I16 => self.run_typed::<i16>(group, salt, by),
            Dtype::I32 => self.run_typed::<i32>(group, salt, by),
            Dtype::I64 => self.run_typed::<i64>(group, salt, by),
            Dtype::U8 => self.run_typed::<u8>(group, salt, by),
            Dtype::U16 => self.run_typed::<u16>(group, salt, by),
            Dtype::U32 => self.run_typed::<u32>(group, salt, by),
            Dtype::U64 => self.run_typed::<u64>(group, salt, by),
            Dtype::F16 => self.run_typed::<f16>(group, salt, by),
            Dtype::Bf16 => self.run_typed::<bf16>(group, salt, by),
            Dtype::F32 => self.run_typed::<f32>(group, salt, by),
            Dtype::F64 => self.run_typed::<f64>(group, salt, by),
            Dtype::Complex64 => self.run_typed::<Complex64>(group, salt, by),
        }
    }

    fn run_typed<T: ExactElement>(
        &self,
        group: &dyn Group,
        salt: u64,
        by: Deadline,
    ) -> Result<(), Error> {
        let (got, expected) = match self {
            Self::Barrier => return Ok(()),
            Self::Gather(_, counts) | Self::GatherInPlace(_, counts) => {
                self.gather::<T>(group, counts, salt, by)?
            }
            Self::GatherEven(_, length) => {
                let parts: Vec<Vec<T>> = parts(group, salt, |_| *length);
                let mut output = vec![T::default(); length * parts.len()];
                group.all_gather(&parts[own(group)], &mut output, by)?;
                (output, parts.concat())
            }
            Self::Reduce(_, length, op) => {
                let parts = parts(group, salt, |_| *length);
                let mut data = vec![T::default(); *length];
                group.all_reduce_into(&parts[own(group)], &mut data, *op, by)?;
                (data, reduced(*op, &parts))
            }
            Self::Scatter(_, counts, op) => scatter(group, counts, *op, salt, by)?,
            Self::ScatterEven(_, length, op) => {
                let size = group.size() as usize;
                let parts = parts(group, salt, |_| length * size);
                let mut output = vec![T::default(); *length];
                group.reduce_scatter(&parts[own(group)], &mut output, *op, by)?;
                let all = reduced(*op, &parts);
                (output, all[own(group) * length..][..*length].to_vec())
            }
            Self::Broadcast(_, length, root) => {
                let parts: Vec<Vec<T>> = parts(group, salt, |_| *length);
                let mut data = parts[own(group)].clone();
                group.broadcast(&mut data, *root, by)?;
                (data, parts[root.0 as usize].clone())
            }
            Self::Exchange(_, modulus) => exchange(group, *modulus, salt, by)?,
            Self::ExchangeEven(_, length) => {
                let parts: Vec<Vec<T>> = parts(group, salt, |_| length * group.size() as usize);
                let mut output = vec![T::default(); parts[0].len()];
                group.all_to_all(&parts[own(group)], &mut output, by)?;
                let mine = |part: &Vec<T>| part[own(group) * length..][..*length].to_vec();
                (output, parts.iter().flat_map(mine).collect())
            }
            Self::Shift(_, length, tag) => shift(group, *length, *tag, salt, by)?,
        };
        let first = got.iter().zip(&expected).position(|(a, b)| a != b);
        let rank = group.rank();
        assert_eq!(
            (first, got.len()),
            (None, expected.len()),
            "{self:?} on {rank}: got {:?}, expected {:?}",
            first.map(|i| got[i]),
            first.map(|i| expected[i]),
        );
        Ok(())
    }

    fn gather<T: ExactElement>(
        &self,
        group: &dyn Group,
        counts: &[usize],
        salt: u64,
        by: Deadline,
    ) -> Result<ActualExpected<T>, Error> {
        let parts: Vec<Vec<T>> = parts(group, salt, |rank| counts[rank]);
        let mut output = vec![T::default(); counts.iter().sum()];
        let part = &parts[own(group)];
        if matches!(self, Self::GatherInPlace(..)) {
            let start: usize = counts[..own(group)].iter().sum();
            output[start..start + part.len()].copy_from_slice(part);
            group.all_gather_in_place(&mut output, counts, by)?;
        } else {
            group.all_gather_v(part, &mut output, counts, by)?;
        }
        Ok((output, parts.concat()))
    }
}

type ActualExpected<T> = (Vec<T>, Vec<T>);

fn own(group: &dyn Group) -> usize {
    group.rank().0 as usize
}

fn scatter<T: ExactElement>(
    group: &dyn Group,
    counts: &[usize],
    op: Reduce,
    salt: u64,
    by: Deadline,
) -> Result<ActualExpected<T>, Error> {
    let parts = parts(group, salt, |_| counts.iter().sum());
    let mut output = vec![T::default(); counts[own(group)]];
    group.reduce_scatter_v(&parts[own(group)], &mut output, counts, op, by)?;
    let start: usize = counts[..own(group)].iter().sum();
    let all = reduced(op, &parts);
    let expected = all[start..start + counts[own(group)]].to_vec();
    Ok((output, expected))
}

fn exchange<T: ExactElement>(
    group: &dyn Group,
    modulus: usize,
    salt: u64,
    by: Deadline,
) -> Result<ActualExpected<T>, Error> {
    let size = group.size() as usize;
    let count = |from: usize, to: usize| (from + 2 * to) % modulus;
    let sends = |from: usize| (0..size).map(|to| count(from, to)).collect::<Vec<_>>();
    let receives: Vec<usize> = (0..size).map(|from| count(from, own(group))).collect();
    let parts: Vec<Vec<T>> = parts(group, salt, |rank| sends(rank).iter().sum());
    let mut output = vec![T::default(); receives.iter().sum()];
    group.all_to_all_v(
        &parts[own(group)],
        &sends(own(group)),
        &mut output,
        &receives,
        by,
    )?;
    let mine = |from: usize| {
        let start: usize = sends(from)[..own(group)].iter().sum();
        parts[from][start..][..count(from, own(group))].to_vec()
    };
    Ok((output, (0..size).flat_map(mine).collect()))
}

fn shift<T: ExactElement>(
    group: &dyn Group,
    length: usize,
    tag: u32,
    salt: u64,
    by: Deadline,
) -> Result<ActualExpected<T>, Error> {
    let (rank, size) = (group.rank().0, group.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    if size == 1 {
        return Ok((Vec::new(), Vec::new()));
    }
    let parts: Vec<Vec<T>> = parts(group, salt, |_| length);
    group.send(&parts[own(group)], Rank(next), tag, by)?;
    let data = group.recv_like(&vec![T::default(); length], Rank(before), tag, by)?;
    Ok((data, parts[before as usize].clone()))
}

/// Lengths at which chunking errors show.
pub(super) fn each_length(size: u32) -> Vec<usize> {
    let size = size as usize;
    vec![0, 1, size - 1, size, size + 1, 37, 16_384, 16_385, LONG]
}

/// Element types with values whose sums and products are exact in any order.
trait ExactElement: Element + PartialEq + Debug + Default {
    /// A value out of few small ones.
    fn from_byte(byte: u8) -> Self;

    /// The plain definition of a reduction.
    fn reduce(op: Reduce, a: Self, b: Self) -> Self;
}

macro_rules! integer_values {
    ($($type:ty)*) => {$(
        impl ExactElement for $type {
            fn from_byte(byte: u8) -> Self {
                Self::from_le_bytes([byte; size_of::<Self>()])
            }

            fn reduce(op: Reduce, a: Self, b: Self) -> Self {
                match op {
                    Reduce::Sum => a.wrapping_add(b),
                    Reduce::Max => a.max(b),
                    Reduce::Min => a.min(b),
                    Reduce::Prod => a.wrapping_mul(b),
                }
            }
        }
    )*};
}

integer_values!(i8 i16 i32 i64 u8 u16 u32 u64);

/// -2, -1, -0.5, 0.5, 1, 2: sums and products of eight of them are exact in every float here.
fn small(byte: u8) -> f32 {
    [-2.0, -1.0, -0.5, 0.5, 1.0, 2.0][usize::from(byte) % 6]
}

macro_rules! float_values {
    ($($type:ty)*) => {$(
        impl ExactElement for $type {
            fn from_byte(byte: u8) -> Self {
                <$type>::from(<half::bf16>::from_f32(small(byte)).to_f32())
            }

            fn reduce(op: Reduce, a: Self, b: Self) -> Self {
                match op {
                    Reduce::Sum => a + b,
                    Reduce::Max => a.max(b),
                    Reduce::Min => a.min(b),
                    Reduce::Prod => a * b,
                }
            }
        }
    )*};
}

float_values!(f32 f64);

macro_rules! half_values {
    ($($type:ty)*) => {$(
        impl ExactElement for $type {
            fn from_byte(byte: u8) -> Self {
                Self::from_f32(small(byte))
            }

            fn reduce(op: Reduce, a: Self, b: Self) -> Self {
                Self::from_f32(f32::reduce(op, a.to_f32(), b.to_f32()))
            }
        }
    )*};
}

half_values!(f16 bf16);

impl ExactElement for bool {
    fn from_byte(byte: u8) -> Self {
        byte.is_multiple_of(3)
    }

    fn reduce(op: Reduce, a: Self, b: Self) -> Self {
        match op {
            Reduce::Sum | Reduce::Max => a || b,
            Reduce::Min | Reduce::Prod => a && b,
        }
    }
}

impl ExactElement for Complex64 {
    fn from_byte(byte: u8) -> Self {
        let re = small(byte);
        // No products of complex numbers with both parts: those of eight numbers are exact only in
        // f64.
        let im = if byte & 128 == 0 { 0.0 } else { re };
        Self { re, im }
    }

    fn reduce(op: Reduce, a: Self, b: Self) -> Self {
        let less = (a.re, a.im) < (b.re, b.im);
        match op {
            Reduce::Sum => Self {
                re: a.re + b.re,
                im: a.im + b.im,
            },
            Reduce::Max => [a, b][usize::from(less)],
            Reduce::Min => [b, a][usize::from(less)],
            Reduce::Prod => Self {
                re: a.re * b.re - a.im * b.im,
                im: a.re * b.im + a.im * b.re,
            },
        }
    }
}

/// Each rank's elements, in rank order.
fn parts<T: ExactElement>(
    group: &dyn Group,
    salt: u64,
    length: impl Fn(usize) -> usize,
) -> Vec<Vec<T>> {
    let length = |rank: u32| length(rank as usize);
    (0..group.size())
        .map(|rank| values(salt, rank, length(rank)))
        .collect()
}

fn values<T: ExactElement>(salt: u64, rank: u32, length: usize) -> Vec<T> {
    // A seed of 0 would stay 0; the factor (2^64 / golden ratio) spreads small salts and ranks.
    let spread = (salt * 64 + u64::from(rank) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut random = Xorshift(spread);
    (0..length)
        .map(|_| T::from_byte(random.next().to_le_bytes()[3]))
        .collect()
}

fn reduced<T: ExactElement>(op: Reduce, parts: &[Vec<T>]) -> Vec<T> {
    let mut result = parts[0].clone();
    for part in &parts[1..] {
        for (a, b) in result.iter_mut().zip(part) {
            *a = T::reduce(op, *a, *b);
        }
    }
    result
}
