//! Detection of weights that are infinite or NaN, from the scales of their blocks alone.

use half::{bf16, f16};
use paceline_base::BlockType;

use super::decoded::iq1_m_scale;
use super::mlx::is_brain;

/// A bfloat16 scale beyond this can make weights infinite: 255 times it and a bias of its size are
/// below f32's 2^128.
const LARGEST_SCALE: f32 = f32::from_bits((127 + 118) << 23);

/// The first value of `bytes` that is infinite or NaN, or so large a scale that its weights could
/// be. A value is a number of a float type, or a scale or min of a block. `None` where every weight
/// is finite.
///
/// Reads the scales of whole blocks; a partial block at the end is not looked at. Cost: a load for
/// each scale, so memory's speed.
pub fn not_finite(block_type: BlockType, bytes: &[u8]) -> Option<f32> {
    let mut blocks = bytes.chunks_exact(block_type.bytes());
    let half = |block: &[u8], at: usize| [block[at], block[at + 1]];
    let halves = |places: &'static [usize]| {
        move |block: &[u8]| {
            let values = places.iter().map(|&at| match is_brain(block_type) {
                true => bf16::from_le_bytes(half(block, at)).to_f32(),
                false => f16::from_le_bytes(half(block, at)).to_f32(),
            });
            // Infinity is beyond it, and no other half.
            values
                .into_iter()
                .find(|x| x.is_nan() || x.abs() > LARGEST_SCALE)
        }
    };
    match block_type {
        BlockType::F32 => blocks.find_map(|block| {
            let value = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            (!value.is_finite()).then_some(value)
        }),
        BlockType::BF16 => blocks.find_map(|block| {
            let value = bf16::from_le_bytes(half(block, 0)).to_f32();
            (!value.is_finite()).then_some(value)
        }),
        // The exponent 255 is NaN by the format's definition and infinite by llama.cpp's; 6, the
        // largest number, is infinite from 2^126 on.
        BlockType::MXFP4 | BlockType::MXFP4_SPLIT => {
            let largest = blocks.map(|block| block[0]).max()?;
            match largest {
                255 => Some(f32::NAN),
                253.. => Some(f32::INFINITY),
                _ => None,
            }
        }
        BlockType::IQ1_M => blocks.find_map(|block| {
            let scale = iq1_m_scale(block).to_f32();
            (!scale.is_finite()).then_some(scale)
        }),
        BlockType::FP8 => blocks.find_map(|block| {
            let (scale, values) = block.split_first_chunk()?;
            let nan = values.iter().any(|byte| byte & 127 == 127);
            let scale = if nan {
                f32::NAN
            } else {
                f32::from_le_bytes(*scale)
            };
            not_usable(scale)
        }),
        BlockType::FP4 => blocks.find_map(|block| {
            let mut scales = block[..8].as_chunks().0.iter();
            scales.find_map(|scale| not_usable(f32::from_le_bytes(*scale)))
        }),
        other => blocks.find_map(halves(places(other))),
    }
}

/// A scale that can make weights of up to 448 infinite or NaN.
fn not_usable(scale: f32) -> Option<f32> {
    (scale.is_nan() || scale.abs() > LARGEST_SCALE).then_some(scale)
}

/// Byte offsets of a block's f16 values.
const fn places(block_type: BlockType) -> &'static [usize] {
    match block_type {
        BlockType::F16
        | BlockType::Q4_0
        | BlockType::Q5_0
        | BlockType::Q8_0
        | BlockType::IQ4_NL
        | BlockType::IQ4_XS
        | BlockType::IQ2_XXS
        | BlockType::IQ2_XS
        | BlockType::IQ2_S
        | BlockType::IQ3_XXS
        | BlockType::IQ3_S
        | BlockType::IQ1_S => &[0],
        BlockType::TQ1_0 => &[52],
        BlockType::TQ2_0 => &[64],
        BlockType::Q2_K => &[80, 82],
        BlockType::Q3_K => &[108],
        BlockType::Q6_K => &[208],
        BlockType::F32 | BlockType::BF16 | BlockType::MXFP4 | BlockType::MXFP4_SPLIT => &[],
        BlockType::IQ1_M | BlockType::NVFP4 | BlockType::FP8 | BlockType::FP4 => &[],
        // Q4_1, Q5_1, Q4_K, Q5_K, and MLX's integers
        _ => &[0, 2],
    }
}

#[cfg(test)]
mod tests {
    use super::super::dequantise;
    use super::super::random::random_row;
    use super::*;

    /// Blocks of random bits: the scales predict whether weights are finite.
    #[test]
    fn scales_tell_of_weights() {
        let mut bad = 0;
        for block_type in BlockType::ALL {
            assert_eq!(
                not_finite(block_type, &random_row(block_type, 256, 1)),
                None
            );
            let mut seed = 7u64;
            for _ in 0..2000 {
                let mut block = vec![0; block_type.bytes()];
                block.fill_with(|| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 56) as u8
                });
                for at in places(block_type).iter().take(usize::from(seed >> 60 == 0)) {
                    block[*at..at + 2].copy_from_slice(&[0x80, 0x7f]);
                }
                let mut weights = vec![0.0; block_type.len()];
                dequantise(block_type, &block, &mut weights);
                let finite = weights.iter().all(|x| x.is_finite());
                // A scale that meets zeros alone leaves them finite or makes them NaN.
                if !finite {
                    bad += 1;
                    let told = not_finite(block_type, &block);
                    assert!(told.is_some(), "{block_type}: {weights:?}");
                }
            }
        }
        assert!(bad > 100, "{bad} blocks");
    }
}
