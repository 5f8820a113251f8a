//! Stored matrices as MLX reads them: planes of values, cut to a rank's rows and columns.
//!
//! | stored | in MLX |
//! |---|---|
//! | F32, F16, BF16 | as stored |
//! | Q4_0 | 4 bits in groups of 32, scale `d`, bias `-8 d` |
//! | Q4_1 | 4 bits in groups of 32, scale `d`, bias `m` |
//! | Q5_0, Q5_1 | the same with 5 bits, bias `-16 d` or `m` |
//! | Q8_0 | 8 bits in groups of 32, scale `d`, bias `-128 d` |
//! | MXFP4 | 4-bit floats in groups of 32, a power of two each |
//! | Q4_K, Q5_K | 4 or 5 bits in groups of 32: scales and biases are rounded to halves |
//! | all other blocks | 8 bits in groups of 32: off by up to 1/510 of a group's range |
//! | MLX's own groups | as stored |
//!
//! All but the last two of GGUF's keep every weight ([`nearest`] tells them). Scales and biases are
//! halves, as in the file, except where `8 d` or `128 d` is beyond them, which no quantiser writes.

use std::ops::Range;

use half::f16;
use paceline_base::BlockType;
use paceline_mlx::{Array, Dtype, QuantisedMode, Stream};
use paceline_model::Error;
use paceline_model::backend::StoredTensor;
use paceline_tensor::storage::{self, Chunk};
use paceline_weights::mlx;
use paceline_weights::tensor::{MappedBytes, Tensor};

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
    /// The array of a range of rows and columns. Of whole rows of a file it is the only copy.
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
                let bytes = rows.flat_map(|row| &row[columns.clone()]).copied();
                Held::Own(bytes.collect())
            }
        };
        Ok(stream.array(part.as_ref(), &shape, self.dtype)?)
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

/// The type of a matrix's floats, or of its scales where it has them. `None` for GGUF's blocks and
/// for scales that are powers of two.
pub(super) const fn floats(matrix: &StoredTensor) -> Option<Dtype> {
    match matrix {
        StoredTensor::Whole(tensor) => float(tensor.block_type),
        StoredTensor::Mlx(matrix) => match scales(matrix.block_type) {
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
    pub(super) fn new(matrix: &StoredTensor, rows: Range<usize>) -> (Self, Range<usize>) {
        match matrix {
            StoredTensor::Whole(tensor) => Self::of_tensor(tensor, rows),
            StoredTensor::Mlx(matrix) => (Self::of_mlx(matrix), rows),
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
                mlx::Mode::Mxfp4 => QuantisedMode::Mxfp4,
                _ => QuantisedMode::Affine,
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
        let (n, form) = (rows.len(), StoredForm::of(tensor.block_type));
        let groups = Groups::of(tensor, rows);
        let factors = |values, dtype| plane(Held::Own(values), cols / GROUP, dtype);
        let (mode, dtype) = match form {
            StoredForm::Powers => (QuantisedMode::Mxfp4, Dtype::U8),
            StoredForm::Kept { .. } | StoredForm::Fitted => (QuantisedMode::Affine, Dtype::F16),
        };
        let has_biases = form != StoredForm::Powers;
        let stored = Self::Groups {
            packed: plane(
                Held::Own(groups.packed),
                cols * form.bits() / 32,
                Dtype::U32,
            ),
            scales: factors(groups.scales, dtype),
            biases: has_biases.then(|| factors(groups.biases, dtype)),
            group: GROUP,
            bits: form.bits(),
            mode,
        };
        (stored, 0..n)
    }

    /// Bytes that `values` values of a matrix take when activations are of type `floats`.
    pub(super) fn bytes_of(matrix: &StoredTensor, values: u64, floats: Dtype) -> u64 {
        let groups = |group: usize, bits: u64, factors: usize| {
            let factors = factors * floats.bytes();
            values / group as u64 * (group as u64 * bits / 8 + factors as u64)
        };
        match matrix {
            StoredTensor::Mlx(m) if m.scheme.mode == mlx::Mode::Mxfp4 => values / 32 * 17,
            StoredTensor::Mlx(m) if m.scheme.mode.is_mlx() => {
                groups(m.scheme.group_size, m.scheme.bits.into(), 2)
            }
            StoredTensor::Mlx(m) => groups(GROUP, StoredForm::of(m.block_type).bits() as u64, 2),
            StoredTensor::Whole(tensor) => match tensor.block_type {
                BlockType::F32 | BlockType::F16 | BlockType::BF16 => floats.bytes() as u64 * values,
                other => match StoredForm::of(other) {
                    StoredForm::Powers => values / 32 * 17,
                    form => groups(GROUP, form.bits() as u64, 2),
                },
            },
        }
    }
}

/// Fewest values for a thread of their own: they take it some milliseconds, and its start 20 us.
const VALUES_MIN: usize = 1 << 18;

/// How blocks are held as groups of 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoredForm {
    /// Their integers, `offset` added, in `bits` bits.
    Kept { bits: usize, offset: u8 },
    /// Four-bit floats with a power of two.
    Powers,
    /// 255 steps between the least and the largest value.
    Fitted,
}

impl StoredForm {
    const fn of(block_type: BlockType) -> Self {
        let (bits, offset) = match block_type {
            BlockType::Q4_0 => (4, 8),
            BlockType::Q4_1 | BlockType::Q4_K => (4, 0),
            BlockType::Q5_0 => (5, 16),
            BlockType::Q5_1 | BlockType::Q5_K => (5, 0),
            BlockType::Q8_0 => (8, 128),
            BlockType::MXFP4 | BlockType::MXFP4_SPLIT => return Self::Powers,
            _ => return Self::Fitted,
        };
        Self::Kept { bits, offset }
    }

    const fn bits(self) -> usize {
        match self {
            Self::Kept { bits, .. } => bits,
            Self::Powers => 4,
            Self::Fitted => 8,
        }
    }
}

/// MLX's form that is nearest to a type of block that MLX has no form for. `None` for types whose
/// weights stay what they are.
pub(super) const fn nearest(block_type: BlockType) -> Option<&'static str> {
    match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::BF16 => None,
        BlockType::Q4_K => Some("4 bits in groups of 32, scales rounded to halves"),
        BlockType::Q5_K => Some("5 bits in groups of 32, scales rounded to halves"),
        other => match StoredForm::of(other) {
            StoredForm::Kept { .. } | StoredForm::Powers => None,
            StoredForm::Fitted => Some("8 bits in groups of 32"),
        },
    }
}

/// Blocks as groups of 32.
struct Groups {
    form: StoredForm,
    packed: Vec<u8>,
    /// Halves, little endian, or bytes of powers of two.
    scales: Vec<u8>,
    biases: Vec<u8>,
}

impl Groups {
    fn of(tensor: &Tensor, rows: Range<usize>) -> Self {
        let row_bytes = tensor.block_type.row_bytes(tensor.cols());
        let row_bytes = row_bytes.expect("checked when the file was opened");
        let bytes = &tensor.bytes[rows.start * row_bytes..rows.end * row_bytes];
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let most = (rows.len() * tensor.cols()).div_ceil(VALUES_MIN);
        Self::on_threads(tensor.block_type, bytes, threads.min(most))
    }

    /// Of the blocks in `bytes`, a part of them on each thread.
    fn on_threads(block_type: BlockType, bytes: &[u8], threads: usize) -> Self {
        let blocks = bytes.len() / block_type.bytes();
        let part = blocks.div_ceil(threads.max(1)).max(1) * block_type.bytes();
        let of_part = |part: &[u8], room: usize| {
            let mut groups = Self::new(block_type, room * block_type.len());
            let blocks = part.chunks_exact(block_type.bytes());
            blocks.for_each(|block| groups.add(block_type, block));
            groups
        };
        let (first, others) = bytes.split_at(part.min(bytes.len()));
        std::thread::scope(|scope| {
            let run = |part| scope.spawn(move || of_part(part, part.len() / block_type.bytes()));
            let others: Vec<_> = others.chunks(part).map(run).collect();
            let mut all = of_part(first, blocks);
            for other in others {
                let other = other.join().expect("blocks of a checked file are repacked");
                all.packed.extend(other.packed);
                all.scales.extend(other.scales);
                all.biases.extend(other.biases);
            }
            all
        })
    }

    /// No groups yet, with capacity for `values` values.
    fn new(block_type: BlockType, values: usize) -> Self {
        let form = StoredForm::of(block_type);
        let room = || Vec::with_capacity(values / GROUP * 2);
        Self {
            form,
            packed: Vec::with_capacity(values * form.bits() / 8),
            scales: room(),
            biases: room(),
        }
    }

    fn add(&mut self, block_type: BlockType, block: &[u8]) {
        match self.form {
            StoredForm::Powers => {
                self.scales.push(block[0]);
                match block_type {
                    BlockType::MXFP4 => self.packed.extend_from_slice(&block[1..]),
                    _ => self.packed.extend(nibbles(&block[1..])),
                }
            }
            StoredForm::Kept { bits, offset } => {
                for chunk in 0..block_type.len() / GROUP {
                    let chunk = storage::chunk(block_type, block, chunk);
                    self.keep(&chunk, bits, offset);
                }
            }
            StoredForm::Fitted => {
                let mut values = [0.0; 256];
                let values = &mut values[..block_type.len()];
                storage::dequantise(block_type, block, values);
                values.chunks_exact(GROUP).for_each(|group| self.fit(group));
            }
        }
    }

    /// The integers of a chunk whose halves have the same scale.
    fn keep(&mut self, chunk: &Chunk, bits: usize, offset: u8) {
        let min = chunk.min * chunk.min_sub[0] as f32;
        let bias = min - f32::from(offset) * chunk.scale;
        let integers = chunk.q.map(|q| q.wrapping_add_unsigned(offset) as u8);
        let [scale, bias] = [chunk.scale, bias].map(f16::from_f32);
        self.group(scale, bias, pack(bits, &integers));
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
        let scale = match near.to_f32() < exact {
            true => f16::from_bits(near.to_bits() + 1),
            false => near,
        };
        let step = |x: &f32| (x - bias.to_f32()) / scale.to_f32();
        // A group of equal values has a scale of 0: any integer is right.
        let integer = |x| step(x).round().clamp(0.0, 255.0) as u8;
        self.group(scale, bias, values.iter().map(integer));
    }
}

/// Values of `bits` bits each, packed with the first in the lowest bits.
fn pack(bits: usize, values: &[u8; GROUP]) -> Vec<u8> {
    let mut packed = vec![0u8; GROUP * bits / 8];
    for (i, value) in values.iter().enumerate() {
        let (byte, shift) = (i * bits / 8, i * bits % 8);
        let wide = u16::from(*value) << shift;
        packed[byte] |= wide as u8;
        if shift + bits > 8 {
            packed[byte + 1] |= (wide >> 8) as u8;
        }
    }
    packed
}

/// Bytes of neighbours, the first in the low half. The input is sixteen bytes whose low halves are
/// values 0 to 15 and whose high halves are 16 to 31.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    let pairs = bytes.chunks_exact(2);
    let low = pairs.clone().map(|two| (two[0] & 15) | (two[1] << 4));
    low.chain(pairs.map(|two| (two[0] >> 4) | (two[1] & 0xf0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values that MLX computes of a group.
    fn values(groups: &Groups) -> Vec<f32> {
        let half = |bytes: &[u8], i: usize| f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
        let bits = groups.form.bits();
        let integer = |k: usize| {
            let bit = |i: usize| groups.packed[i / 8] >> (i % 8) & 1;
            (0..bits).fold(0u8, |all, i| all | bit(k * bits + i) << i)
        };
        let n = groups.packed.len() * 8 / bits;
        let value = |k| {
            let (scale, bias) = (half(&groups.scales, k / 32), half(&groups.biases, k / 32));
            f32::from(integer(k)) * scale.to_f32() + bias.to_f32()
        };
        (0..n).map(value).collect()
    }

    fn block(block_type: BlockType) -> Vec<u8> {
        let bytes = (0..block_type.bytes()).map(|i| (i * 89 + 13) as u8);
        let mut block: Vec<u8> = bytes.collect();
        // Scales at both ends of a block, depending on the type: all are sane halves.
        let n = block.len();
        for at in [0, 2, n - 4, n - 2] {
            block[at..at + 2].copy_from_slice(&f16::from_f32(0.25).to_le_bytes());
        }
        block
    }

    fn groups(block_type: BlockType, block: &[u8]) -> Groups {
        let mut groups = Groups::new(block_type, block_type.len());
        groups.add(block_type, block);
        groups
    }

    #[test]
    fn what_mlx_can_hold_is_kept_exactly() {
        use BlockType as B;
        for block_type in [B::Q4_0, B::Q4_1, B::Q5_0, B::Q5_1, B::Q8_0] {
            assert_eq!(nearest(block_type), None);
            let block = block(block_type);
            let mut expected = vec![0.0; block_type.len()];
            storage::dequantise(block_type, &block, &mut expected);
            let got = values(&groups(block_type, &block));
            assert_eq!(got, expected, "{block_type}");
        }
    }

    #[test]
    fn the_rest_is_off_by_a_510th_of_the_range() {
        use BlockType as B;
        for block_type in [B::Q4_K, B::Q5_K, B::Q6_K, B::IQ4_NL] {
            assert!(nearest(block_type).is_some());
            let block = block(block_type);
            let mut expected = vec![0.0; block_type.len()];
            storage::dequantise(block_type, &block, &mut expected);
            let got = values(&groups(block_type, &block));
            for (got, expected) in got.chunks(32).zip(expected.chunks(32)) {
                let high = expected.iter().fold(f32::MIN, |m, x| m.max(*x));
                let low = expected.iter().fold(f32::MAX, |m, x| m.min(*x));
                // A half rounds the least value and a step, by 2^-11 of them; of integers that are
                // kept, the bias, and a step that is taken as often as there are.
                let rounding = (low.abs() + 2.0 * (high - low)) / 2048.0;
                let bound = (high - low) / 510.0 + rounding;
                for (got, expected) in got.iter().zip(expected) {
                    let off = (got - expected).abs();
                    assert!(off <= bound, "{block_type}: {got} {expected}");
                }
            }
        }
    }

    /// Both orders of nibbles, against what they stand for.
    #[test]
    fn four_bit_floats_keep_their_codes() {
        const CODES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for block_type in [BlockType::MXFP4, BlockType::MXFP4_SPLIT] {
            let mut block: Vec<u8> = (0..17).map(|i| (i * 89 + 13) as u8).collect();
            block[0] = 128;
            let mut expected = vec![0.0; 32];
            storage::dequantise(block_type, &block, &mut expected);
            let groups = groups(block_type, &block);
            assert_eq!(groups.scales, [128]);
            let value = |k: usize| {
                let code = groups.packed[k / 2] >> (4 * (k % 2)) & 15;
                let size = 2.0 * CODES[usize::from(code & 7)];
                if code < 8 { size } else { -size }
            };
            let got: Vec<f32> = (0..32).map(value).collect();
            assert_eq!(got, expected, "{block_type}");
        }
    }

    #[test]
    fn equal_values_stay() {
        let mut groups = Groups::new(BlockType::Q6_K, 32);
        groups.fit(&[-1.5; 32]);
        assert_eq!(values(&groups), [-1.5; 32]);
    }

    #[test]
    fn threads_change_no_byte() {
        for block_type in [BlockType::Q4_K, BlockType::Q6_K, BlockType::Q8_0] {
            let random = |row| paceline_tensor::storage::random::random_row(block_type, 256, row);
            let bytes: Vec<u8> = (0..7).flat_map(random).collect();
            let one = Groups::on_threads(block_type, &bytes, 1);
            for threads in [2, 3, 7, 100] {
                let got = Groups::on_threads(block_type, &bytes, threads);
                let parts = |of: &Groups| [of.packed.clone(), of.scales.clone(), of.biases.clone()];
                assert_eq!(parts(&got), parts(&one), "{block_type} {threads}");
            }
        }
    }
}
