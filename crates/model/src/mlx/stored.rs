//! Stored matrices as MLX reads them: planes of values, cut to a rank's rows and columns.
//!
//! | stored | in MLX |
//! |---|---|
//! | F32, F16, BF16 | as stored, in place |
//! | Q4_0 | 4 bits in groups of 32, scale `d`, bias `-8 d` |
//! | Q4_1 | 4 bits in groups of 32, scale `d`, bias `m` |
//! | Q8_0 | 8 bits in groups of 32, scale `d`, bias `-128 d` |
//! | all other blocks | 8 bits in groups of 32: off by up to 1/510 of a group's range |
//! | MLX's own groups | as stored, in place |
//!
//! All but the fifth keep every weight; scales and biases are halves, as in the file, but where
//! `8 d` or `128 d` is beyond them, which no quantiser writes.

use std::ops::Range;

use half::f16;
use paceline_base::BlockType;
use paceline_formats::mlx;
use paceline_formats::tensor::{MappedBytes, Tensor};
use paceline_mlx::{Array, Dtype, QuantisedMode, Stream};
use paceline_tensor::stored;

use crate::Error;
use crate::weights::AsStored;

/// Values of a group of blocks that were packed here.
const GROUP: usize = 32;

/// Bytes of a file, or what was made of them.
#[derive(Clone, Debug)]
pub(super) enum Held {
    /// In the file.
    Mapped(MappedBytes),
    /// Made here.
    Own(Vec<u8>),
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Mapped(bytes) => bytes,
            Self::Own(bytes) => bytes,
        }
    }
}

/// A matrix of plain values: `rows` times `cols` of `dtype`, row by row.
#[derive(Clone, Debug)]
pub(super) struct Plane {
    pub(super) bytes: Held,
    pub(super) cols: usize,
    pub(super) dtype: Dtype,
}

impl Plane {
    /// The array of a range of rows and columns. Whole rows of a file stay in place.
    pub(super) fn array(
        &self,
        stream: &Stream,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Array, Error> {
        let (size, shape) = (self.dtype.bytes(), [rows.len() as i32, cols.len() as i32]);
        let row_bytes = self.cols * size;
        let whole = rows.start * row_bytes..rows.end * row_bytes;
        let part = match &self.bytes {
            Held::Mapped(bytes) if cols.len() == self.cols => {
                Held::Mapped(bytes.slice(whole).expect("rows of the matrix"))
            }
            held => {
                let part = &held.as_ref()[whole];
                let columns = cols.start * size..cols.end * size;
                let rows = part.chunks_exact(row_bytes);
                Held::Own(
                    rows.flat_map(|row| &row[columns.clone()])
                        .copied()
                        .collect(),
                )
            }
        };
        Ok(stream.array_owned(part, &shape, self.dtype)?)
    }
}

/// A stored matrix.
#[derive(Clone, Debug)]
pub(super) enum Stored {
    /// `(out, in)`
    Floats(Plane),
    /// Integers in groups, each with a scale and, but for `mxfp4`, a bias.
    Groups {
        /// `(out, in * bits / 32)`
        packed: Plane,
        /// `(out, in / group)`
        scales: Plane,
        /// As `scales`.
        biases: Option<Plane>,
        group: usize,
        bits: usize,
        mode: QuantisedMode,
    },
}

/// The type of the floats of a matrix, its scales where it has them; `None` for GGUF's blocks and
/// for scales that are powers of two.
pub(super) const fn floats(matrix: &AsStored) -> Option<Dtype> {
    match matrix {
        AsStored::Whole(tensor) => float(tensor.block_type),
        AsStored::Mlx(matrix) => match scales(matrix.block_type) {
            Dtype::U8 => None,
            dtype => Some(dtype),
        },
    }
}

/// The type of the scales of MLX's groups.
const fn scales(block_type: BlockType) -> Dtype {
    match block_type {
        BlockType::MXFP4 => Dtype::U8,
        BlockType::AFFINE2_F16
        | BlockType::AFFINE3_F16
        | BlockType::AFFINE4_F16
        | BlockType::AFFINE5_F16
        | BlockType::AFFINE6_F16
        | BlockType::AFFINE8_F16 => Dtype::F16,
        _ => Dtype::BF16,
    }
}

/// The type of values of a float block.
pub(super) const fn float(block_type: BlockType) -> Option<Dtype> {
    match block_type {
        BlockType::F32 => Some(Dtype::F32),
        BlockType::F16 => Some(Dtype::F16),
        BlockType::BF16 => Some(Dtype::BF16),
        _ => None,
    }
}

impl Stored {
    /// The rows `rows` of a matrix, and which of the result they are: those packed here start at 0.
    pub(super) fn new(matrix: &AsStored, rows: Range<usize>) -> (Self, Range<usize>) {
        match matrix {
            AsStored::Whole(tensor) => Self::of_tensor(tensor, rows),
            AsStored::Mlx(matrix) => (Self::of_mlx(matrix), rows),
        }
    }

    fn of_mlx(matrix: &mlx::Quantised) -> Self {
        let mlx::Scheme {
            mode,
            bits,
            group_size,
        } = matrix.scheme;
        let bits = bits as usize;
        let plane = |bytes: &MappedBytes, cols, dtype| Plane {
            bytes: Held::Mapped(bytes.clone()),
            cols,
            dtype,
        };
        let factors = |bytes| plane(bytes, matrix.cols / group_size, scales(matrix.block_type));
        Self::Groups {
            packed: plane(&matrix.weight, matrix.cols * bits / 32, Dtype::U32),
            scales: factors(&matrix.scales),
            biases: matrix.biases.as_ref().map(factors),
            group: group_size,
            bits,
            mode: match mode {
                mlx::Mode::Affine => QuantisedMode::Affine,
                mlx::Mode::Mxfp4 => QuantisedMode::Mxfp4,
            },
        }
    }

    fn of_tensor(tensor: &Tensor, rows: Range<usize>) -> (Self, Range<usize>) {
        let cols = tensor.cols();
        let plane = |bytes, cols, dtype| Plane { bytes, cols, dtype };
        if let Some(dtype) = float(tensor.block_type) {
            let bytes = Held::Mapped(tensor.bytes.clone());
            return (Self::Floats(plane(bytes, cols, dtype)), rows);
        }
        let n = rows.len();
        let Groups {
            bits,
            packed,
            scales,
            biases,
        } = Groups::of(tensor, rows);
        let halves = |values| plane(Held::Own(values), cols / GROUP, Dtype::F16);
        let stored = Self::Groups {
            packed: plane(Held::Own(packed), cols * bits / 32, Dtype::U32),
            scales: halves(scales),
            biases: Some(halves(biases)),
            group: GROUP,
            bits,
            mode: QuantisedMode::Affine,
        };
        (stored, 0..n)
    }

    /// Bytes that `values` values of a matrix take when activations are of type `floats`.
    pub(super) fn bytes_of(matrix: &AsStored, values: u64, floats: Dtype) -> u64 {
        let groups = |group: usize, bits: u64, factors: usize| {
            let factors = factors * floats.bytes();
            values / group as u64 * (group as u64 * bits / 8 + factors as u64)
        };
        match matrix {
            AsStored::Mlx(m) if m.scheme.mode == mlx::Mode::Mxfp4 => values / 32 * 17,
            AsStored::Mlx(m) => groups(m.scheme.group_size, m.scheme.bits.into(), 2),
            AsStored::Whole(tensor) => match tensor.block_type {
                BlockType::F32 | BlockType::F16 | BlockType::BF16 => floats.bytes() as u64 * values,
                BlockType::Q4_0 | BlockType::Q4_1 => groups(GROUP, 4, 2),
                _ => groups(GROUP, 8, 2),
            },
        }
    }
}

/// Blocks as groups of 32.
struct Groups {
    bits: usize,
    packed: Vec<u8>,
    /// Halves, little endian.
    scales: Vec<u8>,
    biases: Vec<u8>,
}

impl Groups {
    fn of(tensor: &Tensor, rows: Range<usize>) -> Self {
        let row_bytes = tensor.block_type.row_bytes(tensor.cols());
        let row_bytes = row_bytes.expect("checked when the file was opened");
        let bytes = &tensor.bytes[rows.start * row_bytes..rows.end * row_bytes];
        let values = rows.len() * tensor.cols();
        let bits = match tensor.block_type {
            BlockType::Q4_0 | BlockType::Q4_1 => 4,
            _ => 8,
        };
        let room = || Vec::with_capacity(values / GROUP * 2);
        let mut groups = Self {
            bits,
            packed: Vec::with_capacity(values * bits / 8),
            scales: room(),
            biases: room(),
        };
        let block_type = tensor.block_type;
        for block in bytes.chunks_exact(block_type.bytes()) {
            groups.add(block_type, block);
        }
        groups
    }

    fn add(&mut self, block_type: BlockType, block: &[u8]) {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
        match block_type {
            BlockType::Q4_0 => self.group(half(0), times(half(0), -8.0), nibbles(&block[2..])),
            BlockType::Q4_1 => self.group(half(0), half(2), nibbles(&block[4..])),
            BlockType::Q8_0 => {
                let shifted = block[2..].iter().map(|byte| byte ^ 0x80);
                self.group(half(0), times(half(0), -128.0), shifted);
            }
            _ => {
                let mut values = [0.0; 256];
                let values = &mut values[..block_type.len()];
                stored::dequantise(block_type, block, values);
                values.chunks_exact(GROUP).for_each(|group| self.fit(group));
            }
        }
    }

    fn group(&mut self, scale: f16, bias: f16, packed: impl IntoIterator<Item = u8>) {
        self.scales.extend(scale.to_le_bytes());
        self.biases.extend(bias.to_le_bytes());
        self.packed.extend(packed);
    }

    /// The 255 equal steps from the least to the largest value; the scale is rounded up, so that
    /// the largest is within them.
    fn fit(&mut self, values: &[f32]) {
        let low = values.iter().fold(f32::INFINITY, |m, x| m.min(*x));
        let high = values.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
        let bias = f16::from_f32(low);
        let exact = (high - bias.to_f32()) / 255.0;
        let near = f16::from_f32(exact);
        let scale = if near.to_f32() < exact {
            f16::from_bits(near.to_bits() + 1)
        } else {
            near
        };
        let step = |x: &f32| (x - bias.to_f32()) / scale.to_f32();
        // A group of equal values has a scale of 0: any integer is right.
        let integers = values
            .iter()
            .map(|x| step(x).round().clamp(0.0, 255.0) as u8);
        let integers: Vec<u8> = integers.collect();
        self.group(scale, bias, integers);
    }
}

fn times(scale: f16, factor: f32) -> f16 {
    f16::from_f32(scale.to_f32() * factor)
}

/// Sixteen bytes whose low halves are values 0 to 15 and whose high halves are 16 to 31, as bytes
/// of neighbours, the first in the low half.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    let low = bytes
        .chunks_exact(2)
        .map(|two| (two[0] & 15) | (two[1] << 4));
    let high = bytes
        .chunks_exact(2)
        .map(|two| (two[0] >> 4) | (two[1] & 0xf0));
    low.chain(high)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What MLX computes of a group.
    fn values(groups: &Groups) -> Vec<f32> {
        let half = |bytes: &[u8], i: usize| f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
        let per_byte = 8 / groups.bits;
        let integer = |k: usize| {
            let byte = groups.packed[k / per_byte];
            byte >> (groups.bits * (k % per_byte)) & ((1u16 << groups.bits) - 1) as u8
        };
        let n = groups.packed.len() * per_byte;
        let value = |k| {
            let (scale, bias) = (half(&groups.scales, k / 32), half(&groups.biases, k / 32));
            f32::from(integer(k)) * scale.to_f32() + bias.to_f32()
        };
        (0..n).map(value).collect()
    }

    fn block(block_type: BlockType) -> Vec<u8> {
        let mut block: Vec<u8> = (0..block_type.bytes())
            .map(|i| (i * 89 + 13) as u8)
            .collect();
        // Scales at both ends of a block, depending on the type: all are sane halves.
        let n = block.len();
        for at in [0, 2, n - 4, n - 2] {
            block[at..at + 2].copy_from_slice(&f16::from_f32(0.25).to_le_bytes());
        }
        block
    }

    fn groups(block_type: BlockType, block: &[u8]) -> Groups {
        let bits = if matches!(block_type, BlockType::Q4_0 | BlockType::Q4_1) {
            4
        } else {
            8
        };
        let mut groups = Groups {
            bits,
            packed: Vec::new(),
            scales: Vec::new(),
            biases: Vec::new(),
        };
        groups.add(block_type, block);
        groups
    }

    #[test]
    fn what_mlx_can_hold_is_kept_exactly() {
        for block_type in [BlockType::Q4_0, BlockType::Q4_1, BlockType::Q8_0] {
            let block = block(block_type);
            let mut expected = vec![0.0; block_type.len()];
            stored::dequantise(block_type, &block, &mut expected);
            assert_eq!(
                values(&groups(block_type, &block)),
                expected,
                "{block_type}"
            );
        }
    }

    #[test]
    fn the_rest_is_off_by_a_510th_of_the_range() {
        for block_type in [
            BlockType::Q4_K,
            BlockType::Q6_K,
            BlockType::Q5_0,
            BlockType::IQ4_NL,
        ] {
            let block = block(block_type);
            let mut expected = vec![0.0; block_type.len()];
            stored::dequantise(block_type, &block, &mut expected);
            let got = values(&groups(block_type, &block));
            for (got, expected) in got.chunks(32).zip(expected.chunks(32)) {
                let high = expected.iter().fold(f32::MIN, |m, x| m.max(*x));
                let low = expected.iter().fold(f32::MAX, |m, x| m.min(*x));
                // A half rounds the least value and a step, by 2^-11 of them.
                let rounding = (low.abs() + (high - low)) / 2048.0;
                let bound = (high - low) / 510.0 + rounding;
                for (got, expected) in got.iter().zip(expected) {
                    assert!(
                        (got - expected).abs() <= bound,
                        "{block_type}: {got} {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn equal_values_stay() {
        let mut groups = groups(BlockType::Q8_0, &block(BlockType::Q8_0));
        groups.packed.clear();
        (groups.scales, groups.biases) = (Vec::new(), Vec::new());
        groups.fit(&[-1.5; 32]);
        assert_eq!(values(&groups), [-1.5; 32]);
    }
}
