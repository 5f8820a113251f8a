//! Random stored blocks, to measure and to test kernels with.

use half::{bf16, f16};
use paceline_base::BlockType;

use super::is_brain;

/// A row of `cols` random weights of any storage type, as a file would hold it.
///
/// Decoded values have a mean near 0 and a standard deviation near 0.02, as trained weights do. In
/// quantised blocks the integers and sub-scales are random bits. Their block scale varies by half
/// up and down, so that a block's scale used for another is noticed. Floats are uniform. The same
/// arguments give the same bytes on every machine.
///
/// # Panics
/// When `cols` is not a whole number of blocks.
pub fn random_row(block_type: BlockType, cols: usize, seed: u64) -> Vec<u8> {
    let bytes = block_type
        .row_bytes(cols)
        .expect("cols is a whole number of blocks");
    let mut rng = SplitMix64(seed);
    let mut row = random_bytes(bytes, &mut rng);
    for block in row.chunks_exact_mut(block_type.bytes()) {
        // Uniform within +-w has the standard deviation w / sqrt(3).
        let uniform = 0.02 * 3.0_f32.sqrt() * (2.0 * rng.unit() - 1.0);
        match block_type {
            BlockType::F32 => block.copy_from_slice(&uniform.to_le_bytes()),
            BlockType::F16 => block.copy_from_slice(&f16::from_f32(uniform).to_le_bytes()),
            BlockType::BF16 => block.copy_from_slice(&bf16::from_f32(uniform).to_le_bytes()),
            quantised => {
                let step = unit(quantised) * (0.5 + rng.unit());
                for &(at, factor) in halves(quantised) {
                    let bytes = if is_brain(quantised) {
                        bf16::from_f32(step * factor).to_le_bytes()
                    } else {
                        f16::from_f32(step * factor).to_le_bytes()
                    };
                    block[at..at + 2].copy_from_slice(&bytes);
                }
                match quantised {
                    BlockType::MXFP4 | BlockType::MXFP4_SPLIT => {
                        block[0] = 119 + (rng.next() % 2) as u8; // 2^-8 or 2^-7
                    }
                    BlockType::NVFP4 => block[..4].iter_mut().for_each(|scale| *scale %= 7),
                    BlockType::FP8 => {
                        block[..4].copy_from_slice(&step.to_le_bytes());
                        // Magnitudes from 1/8 to 15/8.
                        block[4..].iter_mut().for_each(|b| *b = *b & 0x9f | 0x20);
                    }
                    BlockType::FP4 => {
                        block[..4].copy_from_slice(&step.to_le_bytes());
                        block[4..8].copy_from_slice(&(1.25 * step).to_le_bytes());
                    }
                    // No quantiser writes a field of 3.
                    BlockType::TQ2_0 => {
                        block[..64].iter_mut().for_each(|b| *b &= !(*b << 1 & 0xaa))
                    }
                    BlockType::IQ1_M => set_iq1_m_scale(block, f16::from_f32(step)),
                    _ => {}
                }
            }
        }
    }
    row
}

/// Writes the scale of an IQ1_M block, whose bits lie at the top of four words.
fn set_iq1_m_scale(block: &mut [u8], scale: f16) {
    for i in 0..4 {
        let byte = &mut block[49 + 2 * i];
        let bits = (scale.to_bits() >> (4 * i) & 15) as u8;
        *byte = *byte & 15 | bits << 4;
    }
}

/// The f16 values of a block, as `(byte, value in units of the block's scale)`. The second one,
/// where there is one, moves the mean of the weights to about zero.
pub(super) const fn halves(block_type: BlockType) -> &'static [(usize, f32)] {
    match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::BF16 => &[],
        BlockType::Q4_0
        | BlockType::Q5_0
        | BlockType::Q8_0
        | BlockType::IQ4_NL
        | BlockType::IQ4_XS
        | BlockType::IQ2_XXS
        | BlockType::IQ2_XS
        | BlockType::IQ2_S
        | BlockType::IQ3_XXS
        | BlockType::IQ3_S
        | BlockType::IQ1_S => &[(0, 1.0)],
        BlockType::TQ1_0 => &[(52, 1.0)],
        BlockType::TQ2_0 => &[(64, 1.0)],
        BlockType::Q4_1 => &[(0, 1.0), (2, -7.5)],
        BlockType::Q5_1 => &[(0, 1.0), (2, -15.5)],
        BlockType::Q2_K => &[(80, 1.0), (82, 1.5)],
        BlockType::Q3_K => &[(108, 1.0)],
        BlockType::Q4_K => &[(0, 1.0), (2, 7.5)],
        BlockType::Q5_K => &[(0, 1.0), (2, 15.5)],
        BlockType::Q6_K => &[(208, 1.0)],
        BlockType::MXFP4 | BlockType::MXFP4_SPLIT | BlockType::IQ1_M => &[],
        BlockType::NVFP4 | BlockType::FP8 | BlockType::FP4 => &[],
        BlockType::AFFINE2_F16 | BlockType::AFFINE2_BF16 => &[(0, 1.0), (2, -1.5)],
        BlockType::AFFINE3_F16 | BlockType::AFFINE3_BF16 => &[(0, 1.0), (2, -3.5)],
        BlockType::AFFINE4_F16 | BlockType::AFFINE4_BF16 => &[(0, 1.0), (2, -7.5)],
        BlockType::AFFINE5_F16 | BlockType::AFFINE5_BF16 => &[(0, 1.0), (2, -15.5)],
        BlockType::AFFINE6_F16 | BlockType::AFFINE6_BF16 => &[(0, 1.0), (2, -31.5)],
        BlockType::AFFINE8_F16 | BlockType::AFFINE8_BF16 => &[(0, 1.0), (2, -127.5)],
    }
}

/// Block scale under which random bits decode to a standard deviation of 0.02. Found by trial;
/// `random_rows_look_like_weights` holds the result between 0.017 and 0.023. 1 for floats, which
/// have none.
const fn unit(block_type: BlockType) -> f32 {
    match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::BF16 => 1.0,
        BlockType::Q4_0 | BlockType::Q4_1 => 0.0043,
        BlockType::Q5_0 | BlockType::Q5_1 => 0.0022,
        BlockType::Q8_0 => 0.000_27,
        BlockType::Q2_K => 0.0013,
        BlockType::Q3_K => 0.000_47,
        BlockType::Q4_K => 0.000_075,
        BlockType::Q5_K => 0.000_036,
        BlockType::Q6_K => 0.000_015,
        BlockType::IQ4_NL => 0.000_28,
        BlockType::IQ4_XS => 0.000_015,
        BlockType::IQ1_S | BlockType::IQ1_M => 0.0026,
        BlockType::IQ2_XXS | BlockType::IQ2_XS | BlockType::IQ2_S => 0.000_34,
        BlockType::IQ3_XXS | BlockType::IQ3_S => 0.000_135,
        BlockType::TQ1_0 => 0.0235,
        BlockType::FP8 => 0.0228,
        BlockType::FP4 => 0.0058,
        BlockType::TQ2_0 => 0.0272,
        BlockType::MXFP4 | BlockType::MXFP4_SPLIT | BlockType::NVFP4 => 1.0, // see `random_row`
        BlockType::AFFINE2_F16 | BlockType::AFFINE2_BF16 => 0.0173,
        BlockType::AFFINE3_F16 | BlockType::AFFINE3_BF16 => 0.0085,
        BlockType::AFFINE4_F16 | BlockType::AFFINE4_BF16 => 0.0042,
        BlockType::AFFINE5_F16 | BlockType::AFFINE5_BF16 => 0.0021,
        BlockType::AFFINE6_F16 | BlockType::AFFINE6_BF16 => 0.00105,
        BlockType::AFFINE8_F16 | BlockType::AFFINE8_BF16 => 0.000_262,
    }
}

/// `n` random bytes.
pub(super) fn random_bytes(n: usize, rng: &mut SplitMix64) -> Vec<u8> {
    let mut bytes: Vec<u8> = std::iter::repeat_with(|| rng.next().to_le_bytes())
        .take(n.div_ceil(8))
        .flatten()
        .collect();
    bytes.truncate(n);
    bytes
}

/// A small generator with good bits, enough for test data.
///
/// Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
/// constants as in Vigna's `splitmix64.c`.
#[derive(Debug)]
pub(super) struct SplitMix64(pub(super) u64);

impl SplitMix64 {
    /// 64 random bits.
    pub(super) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in 0.0..1.0, in steps of 2^-24.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }
}
