//! Weights as integers of 16 bits: what the integer kernels compute with.
//!
//! The chunks of 256 columns of a row are a *unit* (the last of a row may have fewer) and have one
//! *step* in common. A weight is `step * (scale * q + min)`. The integers of the file ([`Chunk`])
//! are `q`; scale and min are integers of each half chunk:
//!
//! ```text
//! Q3_K, Q6_K, IQ4_XS     step = d          scale = sub
//! IQ2, IQ3               step = d / 8, IQ3_XXS d / 4, IQ3_S d; scale = sub
//! Q2_K, Q4_K, Q5_K       step = d / k      scale = k sub
//!                                          min = (min_sub * round(-128 dmin / step) + 64) >> 7
//! all others             step = 2^e        scale = round(scale / step)
//!                                          min = round((m scale + min) / step) - m * its scale
//! ```
//!
//! Steps are so small that `scale * q + min` just fits 16 bits for every `q` that the type has, and
//! multipliers fit too. So the scales of the last row have 12 bits where `q` has 4. Halves have no
//! more bits down to a quarter of the power of two above the largest. For that power itself `8 d`
//! is one too many: then down to a half of it. The others are exact.
//!
//! Where no whole `k` is possible, `dmin` being much larger than `d`, scales are rounded as mins
//! are. Of `q` that are never negative `m` is the middle, which rounding does not move. *Wide* are
//! types whose `q` have 6 bits or more. Their sums have 20 bits, so that scales have 12 too, and
//! mins are multiples of 64.
//!
//! Rounding is to nearest, ties to even. A unit of zeros has step 0. A unit with a scale that is no
//! number has a step that is none, and so has every output of its row.
//!
//! Why: sums over 256 columns are integers then, exact in any order, and become floats once.

use std::array;
use std::ops::{Deref, Range};

use half::{bf16, f16};
use paceline_base::BlockType;

use super::grids::grid_step;
use super::{Chunk, RawScales, chunk, raw_scales};

#[cfg(test)]
mod tests;

pub(crate) const UNIT_CHUNKS: usize = 8;
/// Columns of a unit: their weights have a step in common, so packing some needs all of them.
pub const UNIT: usize = UNIT_CHUNKS * Chunk::LEN;

/// Largest magnitude of a weight in steps.
const LARGEST: f32 = i16::MAX as f32;
const LARGEST_WIDE: f32 = ((1 << 19) - 1) as f32;

/// The most that rounding the min may move a weight by.
const ROUNDING: f32 = 1.0;

/// The number that mins of wide types are multiples of.
pub(crate) const WIDE_MIN: i32 = 64;

/// Largest weights below which a unit counts as zeros: its step would be no normal bf16.
const SMALLEST: f32 = 1e-30;

/// Integer scale and min of each half of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HalfFactors {
    pub(crate) scale: [i32; 2],
    pub(crate) min: [i32; 2],
}

/// Factors of a unit's weights, next to their integers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    /// Value of one.
    pub(crate) step: f32,
    /// Of scales and mins, where the type has them: see the module.
    pub(crate) multipliers: [i32; 2],
    pub(crate) factors: [HalfFactors; UNIT_CHUNKS],
}

impl Unit {
    /// Unit `index` of a row of stored blocks, which starts with one.
    ///
    /// # Panics
    /// On a bug of the caller: a float type, or no such unit.
    pub(crate) fn of(block_type: BlockType, row: &[u8], index: usize) -> Self {
        let chunks = row.len() / block_type.bytes() * (block_type.len() / Chunk::LEN);
        let chunks = index * UNIT_CHUNKS..chunks.min((index + 1) * UNIT_CHUNKS);
        if let Some(part) = exact_part(block_type) {
            let raw = Each::of(chunks, |c| raw_scales(block_type, row, c));
            return exact(part, &raw);
        }
        match block_type {
            BlockType::Q2_K | BlockType::Q4_K | BlockType::Q5_K => multiplied(
                block_type,
                &Each::of(chunks, |c| raw_scales(block_type, row, c)),
            ),
            _ => rounded(
                block_type,
                &Each::of(chunks, |c| {
                    let chunk = chunk(block_type, row, c);
                    [chunk.scale, chunk.min]
                }),
            ),
        }
    }

    /// Without weights, or with some that are no numbers.
    const fn none(step: f32) -> Self {
        Self {
            step,
            multipliers: [0; 2],
            factors: [HalfFactors {
                scale: [0; 2],
                min: [0; 2],
            }; UNIT_CHUNKS],
        }
    }

    /// With the step that `step` gives for weights of up to `largest`, and factors for it.
    fn with(largest: f32, step: f32, factors: impl FnOnce(&mut Self)) -> Self {
        if !(largest.is_finite() && step.is_finite()) {
            return Self::none(f32::NAN);
        }
        if largest <= SMALLEST {
            return Self::none(0.0);
        }
        let mut this = Self::none(step);
        factors(&mut this);
        this
    }
}

/// Something of each chunk of a unit, read once.
struct Each<T> {
    values: [T; UNIT_CHUNKS],
    len: usize,
}

impl<T: Copy> Each<T> {
    fn of(chunks: Range<usize>, read: impl Fn(usize) -> T) -> Self {
        assert!(
            !chunks.is_empty(),
            "no unit where it would begin: {chunks:?}"
        );
        let last = chunks.end - 1;
        Self {
            values: array::from_fn(|i| read(last.min(chunks.start + i))),
            len: chunks.len(),
        }
    }
}

impl<T> Deref for Each<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values[..self.len]
    }
}

/// Whether weights of a type have 20 bits.
pub(crate) const fn is_wide(block_type: BlockType) -> bool {
    match block_type {
        BlockType::Q8_0 | BlockType::IQ4_NL => true,
        other => matches!(other.affine_bits(), Some(6..)),
    }
}

/// The number that mins of a type with one scale for a chunk are multiples of.
pub(crate) const fn grain(block_type: BlockType) -> i32 {
    if is_wide(block_type) { WIDE_MIN } else { 1 }
}

/// The least power of two that is not below a positive number.
fn power_up(x: f32) -> f32 {
    const MANTISSA: u32 = (1 << 23) - 1;
    f32::from_bits((x.to_bits() + MANTISSA) & !MANTISSA)
}

/// Smallest and largest `q` of a type that has one scale for a chunk.
fn range(block_type: BlockType) -> [f32; 2] {
    match block_type {
        BlockType::Q4_0 => [-8.0, 7.0],
        BlockType::Q5_0 => [-16.0, 15.0],
        BlockType::Q8_0 => [-128.0, 127.0],
        BlockType::IQ4_NL => [-127.0, 113.0],
        BlockType::Q4_1 => [0.0, 15.0],
        BlockType::Q5_1 => [0.0, 31.0],
        BlockType::MXFP4 | BlockType::MXFP4_SPLIT => [-12.0, 12.0],
        affine => {
            let bits = affine
                .affine_bits()
                .expect("no type is left but the affine");
            let offset = super::offset(bits) as f32;
            [-offset, (1 << bits) as f32 - 1.0 - offset]
        }
    }
}

/// The larger, or what is no number.
fn larger(a: f32, b: f32) -> f32 {
    if a >= b || a.is_nan() { a } else { b }
}

fn nearest(x: f32) -> i32 {
    x.round_ties_even() as i32
}

/// Types with one scale for a chunk: of each, this and its min.
fn rounded(block_type: BlockType, chunks: &[[f32; 2]]) -> Unit {
    let [low, high] = range(block_type);
    let grain = grain(block_type);
    let most = if is_wide(block_type) {
        LARGEST_WIDE
    } else {
        LARGEST
    };
    let ends = |&[scale, min]: &[f32; 2]| {
        let end = |q: f32| q.mul_add(scale, min).abs();
        larger(end(low), end(high))
    };
    let largest = chunks.iter().map(ends).fold(0.0, larger);
    let middle = if low < 0.0 { 0 } else { (high as i32 + 1) / 2 };
    let factors = |&[scale, min]: &[f32; 2], step: f32| {
        let center = (middle as f32).mul_add(scale, min);
        let scale = nearest(scale / step);
        let min = nearest(center / (step * grain as f32)) * grain - middle * scale;
        HalfFactors {
            scale: [scale; 2],
            min: [min; 2],
        }
    };
    let fits = |HalfFactors { scale, min }: HalfFactors| {
        let end = |q: f32| (q as i32 * scale[0] + min[0]).abs() as f32 <= most;
        end(low) && end(high)
    };
    Unit::with(largest, power_up(largest / most), |unit| {
        // Rounding may have moved the largest weight out of what fits.
        if !chunks.iter().all(|chunk| fits(factors(chunk, unit.step))) {
            unit.step *= 2.0;
        }
        for (to, chunk) in unit.factors.iter_mut().zip(chunks) {
            *to = factors(chunk, unit.step);
        }
    })
}

fn half_of(header: Option<f16>) -> f32 {
    header.map_or(0.0, f16::to_f32)
}

/// The part of a half that is the step of a type with exact integer scales; `None` for others.
const fn exact_part(block_type: BlockType) -> Option<f32> {
    match block_type {
        BlockType::Q3_K | BlockType::Q6_K | BlockType::IQ4_XS => Some(1.0),
        other => grid_step(other),
    }
}

/// Types whose integer scales are exact, and whose step is `part` of a half.
fn exact(part: f32, chunks: &[RawScales]) -> Unit {
    let step = chunks
        .first()
        .map_or(0.0, |raw| part * half_of(raw.header[0]));
    let mut unit = Unit::none(step);
    for (to, raw) in unit.factors.iter_mut().zip(chunks) {
        let [first, second] = raw
            .bytes
            .map(|byte| byte.map(|byte| i32::from(byte.cast_signed())));
        to.scale = [first.unwrap_or(0), second.or(first).unwrap_or(0)];
    }
    unit
}

/// Scales and mins of a chunk's halves, as the file has them.
fn subs(block_type: BlockType, raw: &RawScales) -> [[i32; 2]; 2] {
    let [first, second] = raw.bytes.map(|byte| i32::from(byte.unwrap_or(0)));
    match block_type {
        BlockType::Q2_K => [[first & 15, second & 15], [first >> 4, second >> 4]],
        _ => [[first; 2], [second; 2]],
    }
}

/// Types whose scales and mins are multiplied.
fn multiplied(block_type: BlockType, chunks: &[RawScales]) -> Unit {
    let highest: f32 = match block_type {
        BlockType::Q2_K => 3.0,
        BlockType::Q4_K => 15.0,
        _ => 31.0,
    };
    let [d, dmin] = chunks
        .first()
        .map_or([0.0; 2], |raw| raw.header.map(half_of));
    let ends = |raw: &RawScales| {
        let [scales, mins] = subs(block_type, raw);
        let end = |half: usize| {
            let min = dmin * mins[half] as f32;
            larger(
                min.abs(),
                highest.mul_add(d * scales[half] as f32, min).abs(),
            )
        };
        larger(end(0), end(1))
    };
    let largest = chunks.iter().map(ends).fold(0.0, larger);
    // At most: for weights to fit, and multipliers of scales and of mins.
    let most = LARGEST - ROUNDING;
    let times = [
        most * d.abs() / largest,
        255.0,
        255.0 * d.abs() / dmin.abs(),
    ];
    let times = times.into_iter().fold(f32::INFINITY, f32::min).floor();
    let step = if times >= 1.0 {
        d / times
    } else {
        larger(
            largest / (most - highest),
            larger(d.abs(), dmin.abs()) / 255.0,
        )
        .copysign(d)
    };
    Unit::with(largest, step, |unit| {
        unit.multipliers = [d, dmin].map(|half| nearest(half * 128.0 / unit.step));
        for (to, raw) in unit.factors.iter_mut().zip(chunks) {
            let [scales, mins] = subs(block_type, raw);
            let times = |subs: [i32; 2], by: i32| subs.map(|sub| (sub * by + 64) >> 7);
            to.scale = times(scales, unit.multipliers[0]);
            to.min = times(mins, unit.multipliers[1]);
        }
    })
}

/// A step as the packer stores it: the half that it is (a part of), or bfloat16, else f32.
pub(crate) fn step_bytes(block_type: BlockType, step: f32) -> ([u8; 4], usize) {
    let bits = match (block_type, exact_part(block_type)) {
        (_, Some(part)) => f16::from_f32(step / part).to_bits(),
        (BlockType::Q2_K | BlockType::Q4_K | BlockType::Q5_K, _) => {
            return (step.to_ne_bytes(), 4);
        }
        _ => bf16::from_f32(step).to_bits(),
    };
    let [a, b] = bits.to_ne_bytes();
    ([a, b, 0, 0], 2)
}
