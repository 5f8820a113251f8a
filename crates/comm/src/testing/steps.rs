//! Calls with known inputs and results.

use std::fmt::Debug;

use paceline_base::Rank;

use super::Random;
use crate::{Deadline, Dtype, Element, Error, Group, Reduce};

/// Elements of a long buffer: 400,172 bytes of f32, several rounds of any sensible segment and an
/// odd rest.
pub(super) const LONG: usize = 100_043;

/// One call that all ranks make.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Barrier,
    Gather(Dtype, Vec<usize>),
    GatherEven(Dtype, usize),
    Reduce(Dtype, usize, Reduce),
    Broadcast(Dtype, usize, Rank),
    /// Every rank sends to the next one, then receives from the one before, with this tag.
    Shift(Dtype, usize, u32),
}

impl Step {
    /// One call of each kind, short, and a long one, for a group of `size`.
    pub(super) fn each(size: u32) -> Vec<Self> {
        let counts = (0..size as usize).map(|rank| rank % 3).collect();
        vec![
            Self::Barrier,
            Self::Gather(Dtype::F32, counts),
            Self::GatherEven(Dtype::U8, 3),
            Self::Reduce(Dtype::F32, 5, Reduce::Sum),
            Self::Broadcast(Dtype::F32, 4, Rank(size - 1)),
            Self::Reduce(Dtype::F32, LONG, Reduce::Max),
        ]
    }

    /// Any step, of any length that `each_length` knows.
    pub(super) fn any(random: &mut Random, size: u32) -> Self {
        let lengths = each_length(size);
        let length = |random: &mut Random| lengths[random.below(lengths.len())];
        let dtype = [Dtype::U8, Dtype::F32][random.below(2)];
        let op = [Reduce::Sum, Reduce::Max, Reduce::Min][random.below(3)];
        match random.below(6) {
            0 => Self::Barrier,
            1 => Self::Gather(dtype, (0..size).map(|_| length(random)).collect()),
            2 => Self::GatherEven(dtype, length(random)),
            3 => Self::Reduce(dtype, length(random), op),
            4 => Self::Broadcast(dtype, length(random), random.rank(size)),
            _ => Self::Shift(dtype, length(random), u32::from(random.below(2) == 0)),
        }
    }

    /// Makes the call with values drawn from `salt` and compares what it gives with what it should.
    pub(super) fn run(&self, group: &dyn Group, salt: u64, by: Deadline) -> Result<(), Error> {
        let dtype = match self {
            Self::Barrier => return group.barrier(by),
            Self::Gather(dtype, _)
            | Self::GatherEven(dtype, _)
            | Self::Reduce(dtype, ..)
            | Self::Broadcast(dtype, ..)
            | Self::Shift(dtype, ..) => dtype,
        };
        match dtype {
            Dtype::U8 => self.run_typed::<u8>(group, salt, by),
            Dtype::F32 => self.run_typed::<f32>(group, salt, by),
        }
    }

    fn run_typed<T: Value>(&self, group: &dyn Group, salt: u64, by: Deadline) -> Result<(), Error> {
        let (rank, size) = (group.rank().0, group.size());
        let values = |rank, length| values::<T>(salt, rank, length);
        let (got, expected) = match self {
            Self::Barrier => return Ok(()),
            Self::Gather(_, counts) => {
                let parts: Vec<Vec<T>> = (0..).zip(counts).map(|(r, n)| values(r, *n)).collect();
                let mut output = vec![T::default(); counts.iter().sum()];
                group.all_gather_v(&parts[rank as usize], &mut output, counts, by)?;
                (output, parts.concat())
            }
            Self::GatherEven(_, length) => {
                let parts: Vec<Vec<T>> = (0..size).map(|r| values(r, *length)).collect();
                let mut output = vec![T::default(); length * size as usize];
                group.all_gather(&parts[rank as usize], &mut output, by)?;
                (output, parts.concat())
            }
            Self::Reduce(_, length, op) => {
                let mut data = values(rank, *length);
                group.all_reduce(&mut data, *op, by)?;
                (data, reduced(*op, (0..size).map(|r| values(r, *length))))
            }
            Self::Broadcast(_, length, root) => {
                let mut data = values(rank, *length);
                group.broadcast(&mut data, *root, by)?;
                (data, values(root.0, *length))
            }
            Self::Shift(_, length, tag) => {
                let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
                let mut data = vec![T::default(); *length];
                if size > 1 {
                    group.send(&values(rank, *length), Rank(next), *tag, by)?;
                    group.recv(&mut data, Rank(before), *tag, by)?;
                }
                (
                    data,
                    if size > 1 {
                        values(before, *length)
                    } else {
                        vec![T::default(); *length]
                    },
                )
            }
        };
        let first = got
            .iter()
            .zip(&expected)
            .position(|(got, expected)| got != expected);
        assert_eq!(
            (first, got.len()),
            (None, expected.len()),
            "{self:?} on rank {rank}"
        );
        Ok(())
    }
}

/// Lengths at which chunking goes wrong.
pub(super) fn each_length(size: u32) -> Vec<usize> {
    let size = size as usize;
    vec![0, 1, size - 1, size, size + 1, 37, 16_384, 16_385, LONG]
}

/// Element types with values whose sums are exact in any order.
trait Value: Element + PartialEq + Debug + Default {
    fn from_byte(byte: u8) -> Self;
    fn reduce(op: Reduce, a: Self, b: Self) -> Self;
}

impl Value for u8 {
    fn from_byte(byte: u8) -> Self {
        byte
    }

    fn reduce(op: Reduce, a: Self, b: Self) -> Self {
        match op {
            Reduce::Sum => a.wrapping_add(b),
            Reduce::Max => a.max(b),
            Reduce::Min => a.min(b),
        }
    }
}

impl Value for f32 {
    fn from_byte(byte: u8) -> Self {
        Self::from(byte) - 100.0
    }

    fn reduce(op: Reduce, a: Self, b: Self) -> Self {
        match op {
            Reduce::Sum => a + b,
            Reduce::Max => a.max(b),
            Reduce::Min => a.min(b),
        }
    }
}

/// What `rank` brings.
fn values<T: Value>(salt: u64, rank: u32, length: usize) -> Vec<T> {
    // A seed of 0 would stay 0; the factor (2^64 / golden ratio) spreads small salts and ranks.
    let spread = (salt * 64 + u64::from(rank) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut random = Random(spread);
    (0..length)
        .map(|_| T::from_byte(random.next().to_le_bytes()[3]))
        .collect()
}

fn reduced<T: Value>(op: Reduce, parts: impl Iterator<Item = Vec<T>>) -> Vec<T> {
    let add = |a: Vec<T>, b: Vec<T>| {
        a.iter()
            .zip(&b)
            .map(|(a, b)| T::reduce(op, *a, *b))
            .collect()
    };
    parts.reduce(add).unwrap_or_default()
}
