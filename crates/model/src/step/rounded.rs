//! Numbers rounded to 8 and 4 bits, as DeepSeek V4.1 was trained with them: `deepseek_v41.py` of
//! mlx-lm. Vectors that are not whole blocks stay as they are.

/// Columns of a block.
const BLOCK: usize = 32;
/// Columns of a block with a scale in E4M3.
const SMALL_BLOCK: usize = 16;

/// Largest numbers of E4M3 and of E2M1.
const E4M3_MAX: f32 = 448.0;
const E2M1_MAX: f32 = 6.0;

/// Rounds to E4M3, times a power of two for each block of 32.
pub(super) fn to_8_bits(x: &mut [f32]) {
    blocks(x, BLOCK, |block| {
        let scale = power_above(largest(block).max(1e-4) / E4M3_MAX);
        for x in block {
            *x = e4m3((*x / scale).clamp(-E4M3_MAX, E4M3_MAX)) * scale;
        }
    });
}

/// Rounds to E2M1, times a power of two for each block of 32.
pub(super) fn to_4_bits(x: &mut [f32]) {
    blocks(x, BLOCK, |block| {
        let least = E2M1_MAX * f32::MIN_POSITIVE;
        let scale = power_above(largest(block).max(least) / E2M1_MAX);
        block.iter_mut().for_each(|x| *x = e2m1(*x / scale) * scale);
    });
}

/// Rounds to E2M1, times a number in E4M3 for each block of 16.
pub(super) fn to_scaled_4_bits(x: &mut [f32]) {
    blocks(x, SMALL_BLOCK, |block| {
        let least = E2M1_MAX / 512.0;
        let scale = e4m3((largest(block).max(least) / E2M1_MAX).min(E4M3_MAX));
        block.iter_mut().for_each(|x| *x = e2m1(*x / scale) * scale);
    });
}

fn blocks(x: &mut [f32], len: usize, round: impl Fn(&mut [f32])) {
    if x.len().is_multiple_of(len) {
        x.chunks_exact_mut(len).for_each(round);
    }
}

fn largest(block: &[f32]) -> f32 {
    block.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// The least power of two that is not below a normal number.
const fn power_above(x: f32) -> f32 {
    let bits = x.to_bits();
    let power = bits >> 23 << 23;
    f32::from_bits(if bits == power {
        bits
    } else {
        power + (1 << 23)
    })
}

/// The nearest number of E4M3, ties to even; `x` is within its range.
fn e4m3(x: f32) -> f32 {
    let exponent = (x.abs().to_bits() >> 23).max(127 - 6); // below lie multiples of one step
    let step = f32::from_bits((exponent - 3) << 23);
    (x / step).round_ties_even() * step
}

/// The nearest number of E2M1, ties to even, and its largest beyond.
fn e2m1(x: f32) -> f32 {
    let magnitude = x.abs();
    let step = match magnitude {
        m if m < 1.75 => 0.5,
        m if m < 3.5 => 1.0,
        _ => 2.0,
    };
    ((magnitude / step).round_ties_even() * step)
        .min(E2M1_MAX)
        .copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_few_bits_are_the_nearest() {
        let fours = [
            (0.25, 0.0),
            (0.26, 0.5),
            (0.75, 1.0),
            (1.25, 1.0),
            (1.75, 2.0),
            (2.5, 2.0),
            (2.51, 3.0),
            (3.5, 4.0),
            (5.0, 4.0),
            (5.1, 6.0),
            (9.0, 6.0),
        ];
        for (x, expected) in fours {
            assert_eq!((e2m1(x), e2m1(-x)), (expected, -expected), "{x}");
        }
        for byte in 0..=126 {
            let (own, next) = (paceline_base::e4m3(byte), paceline_base::e4m3(byte + 1));
            assert_eq!(e4m3(own), own);
            if byte < 126 {
                let even = if byte % 2 == 0 { own } else { next };
                assert_eq!(e4m3((own + next) / 2.0), even, "between {own} and {next}");
            }
        }
        for (x, expected) in [(1.0, 1.0), (1.1, 2.0), (0.5, 0.5), (3.0, 4.0)] {
            assert_eq!(power_above(x), expected);
        }
    }
}
