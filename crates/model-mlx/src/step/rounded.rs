//! Numbers rounded to 8 and 4 bits, as DeepSeek V4.1 was trained with them; the definitions are
//! those of the CPU (`model/src/step/rounded.rs`). Vectors that are not whole blocks stay as they
//! are.

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::Error;

/// Columns of a block.
const BLOCK: i32 = 32;
/// Columns of a block with a scale in E4M3.
const SMALL_BLOCK: i32 = 16;

/// Largest numbers of E4M3 and of E2M1.
const E4M3_MAX: f32 = 448.0;
const E2M1_MAX: f32 = 6.0;

type Made = Result<Array, paceline_mlx::Error>;

/// Rounds to E4M3, times a power of two for each block of 32.
pub(super) fn to_8_bits(stream: &Stream, x: &Array) -> Result<Array, Error> {
    blocks(stream, (x, BLOCK), |x, largest| {
        let scale = scale(stream, largest, (1e-4, E4M3_MAX))?;
        let scale = power_above(stream, &scale)?;
        stream.multiply(&e4m3(stream, &stream.divide(x, &scale)?)?, &scale)
    })
}

/// Rounds to E2M1, times a power of two for each block of 32.
pub(super) fn to_4_bits(stream: &Stream, x: &Array) -> Result<Array, Error> {
    blocks(stream, (x, BLOCK), |x, largest| {
        let least = E2M1_MAX * f32::MIN_POSITIVE;
        let scale = scale(stream, largest, (least, E2M1_MAX))?;
        let scale = power_above(stream, &scale)?;
        stream.multiply(&e2m1(stream, &stream.divide(x, &scale)?)?, &scale)
    })
}

/// Rounds to E2M1, times a number in E4M3 for each block of 16.
pub(super) fn to_scaled_4_bits(stream: &Stream, x: &Array) -> Result<Array, Error> {
    blocks(stream, (x, SMALL_BLOCK), |x, largest| {
        let scale = scale(stream, largest, (E2M1_MAX / 512.0, E2M1_MAX))?;
        let scale = e4m3(stream, &scale)?;
        stream.multiply(&e2m1(stream, &stream.divide(x, &scale)?)?, &scale)
    })
}

/// `x (.., n)` in blocks of `len`, each with its largest magnitude.
fn blocks(
    stream: &Stream,
    (x, len): (&Array, i32),
    round: impl Fn(&Array, &Array) -> Made,
) -> Result<Array, Error> {
    let sizes = x.shape();
    if sizes[3] % len != 0 {
        return Ok(x.clone());
    }
    let by_block = stream.reshape(x, &[-1, len])?;
    let largest = stream.max_along(&stream.abs(&by_block)?, 1)?;
    Ok(stream.reshape(&round(&by_block, &largest)?, &sizes)?)
}

/// `max(largest, least) / most`
fn scale(stream: &Stream, largest: &Array, (least, most): (f32, f32)) -> Made {
    let largest = stream.maximum(largest, &stream.scalar(least, Dtype::F32)?)?;
    stream.divide(&largest, &stream.scalar(most, Dtype::F32)?)
}

/// The least power of two that is not below a normal number.
fn power_above(stream: &Stream, x: &Array) -> Made {
    let exponent = stream.ceil(&stream.log2(x)?)?;
    stream.power(&stream.scalar(2.0, Dtype::F32)?, &exponent)
}

/// The nearest number of E4M3, ties to even, within its range.
fn e4m3(stream: &Stream, x: &Array) -> Made {
    let most = stream.scalar(E4M3_MAX, Dtype::F32)?;
    let x = stream.maximum(&stream.minimum(x, &most)?, &stream.negative(&most)?)?;
    // Below the least normal number, 2^-6, lie multiples of one step; a number has 3 bits behind
    // its first.
    let least = stream.scalar(f32::exp2(-6.0), Dtype::F32)?;
    let magnitude = stream.maximum(&stream.abs(&x)?, &least)?;
    let exponent = stream.floor(&stream.log2(&magnitude)?)?;
    let exponent = stream.subtract(&exponent, &stream.scalar(3.0, Dtype::F32)?)?;
    let step = stream.power(&stream.scalar(2.0, Dtype::F32)?, &exponent)?;
    stream.multiply(&stream.round(&stream.divide(&x, &step)?)?, &step)
}

/// The nearest number of E2M1, ties to even, and its largest beyond.
fn e2m1(stream: &Stream, x: &Array) -> Made {
    let most = stream.scalar(E2M1_MAX, Dtype::F32)?;
    let x = stream.maximum(&stream.minimum(x, &most)?, &stream.negative(&most)?)?;
    let magnitude = stream.abs(&x)?;
    let mut step = stream.scalar(0.5, Dtype::F32)?;
    for (from, more) in [(1.75, 0.5), (3.5, 1.0)] {
        let is_below = stream.less(&magnitude, &stream.scalar(from, Dtype::F32)?)?;
        let is_above = stream.subtract(
            &stream.scalar(1.0, Dtype::F32)?,
            &stream.astype(&is_below, Dtype::F32)?,
        )?;
        let more = stream.scalar(more, Dtype::F32)?;
        step = stream.add(&step, &stream.multiply(&is_above, &more)?)?;
    }
    stream.multiply(&stream.round(&stream.divide(&x, &step)?)?, &step)
}
