//! Matrices in floats or integers of 8 and 4 bits, as DeepSeek, compressed-tensors and ModelOpt
//! write them into folders.
//!
//! | weight | scales | value | joined to |
//! |---|---|---|---|
//! | F8_E4M3 | F32 or BF16, for each tile, row, group or matrix | s w | FP8 |
//! | F8_E4M3 | U8 or F8_E8M0: powers of two (MXFP8: of 32 columns) | s w | FP8 |
//! | U8 or I8: E2M1, low half first | F8_E4M3 of 16 columns (NVFP4) | s w | FP4 |
//! | U8 or I8: the same | U8 or F8_E8M0 of 32 columns | s w | MXFP4 |
//! | I32: `b` bits, no gaps | F16 or BF16, for each group or row | s (q - 2^(b-1)) | AFFINEb |
//!
//! The tensors of a module are `weight` or `weight_packed`, and one of [`SCALES`]; DeepSeek V4's is
//! `scale`. A *tile* is `weight_block_size` rows and columns, 128 each by default. Scales of NVFP4
//! are multiplied by `weight_scale_2` (ModelOpt) or divided by `weight_global_scale`
//! (compressed-tensors) first. Integers have their shape in `weight_shape`. Scales of activations
//! (`input_scale`) are not read: activations keep their precision.
//!
//! Sources: `fp8_cast_bf16.py` of DeepSeek-V3; `compressors/` of compressed-tensors 0.20;
//! `quantization/qtensor/` of ModelOpt; `finegrained_fp8.py` of transformers 5.24 (DeepSeek V4).

use std::path::PathBuf;

use paceline_base::{BlockType, e4m3, e8m0, ue4m3};
use serde_json::Value;

use crate::hf::Error;
use crate::mlx::{Mode, Quantised, Scheme, UncheckedTensor};
use crate::tensor::{MappedBytes, Tensor};

/// Last parts of the names that scales have.
pub const SCALES: [&str; 3] = ["weight_scale_inv", "weight_scale", "scale"];

/// Columns of a joined block.
const BLOCK: usize = 32;
/// Columns that a scale of NVFP4 has.
const FP4_GROUP: usize = 16;
/// Tile of files that do not name one: that of DeepSeek V3.
const TILE: [usize; 2] = [128, 128];

/// Scales of a matrix and the tiles that they belong to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scaling {
    /// Rows and columns that share a scale.
    tile: [usize; 2],
    /// Scales of a row of tiles.
    per_row: usize,
    /// Row of the scaled matrix that is row 0 here.
    first_row: usize,
    dtype: ScaleType,
    /// Of NVFP4.
    global: Option<Global>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScaleType {
    F32,
    BF16,
    /// As `BF16`, for integers only.
    F16,
    E4M3,
    E8M0,
}

/// A factor of all scales.
#[derive(Clone, Copy, Debug)]
enum Global {
    Times(f32),
    DividedBy(f32),
}

impl Global {
    fn of(self, scale: f32) -> f32 {
        match self {
            Self::Times(factor) => scale * factor,
            Self::DividedBy(divisor) => scale / divisor,
        }
    }
}

impl ScaleType {
    fn named(dtype: &str) -> Option<Self> {
        Some(match dtype {
            "F32" => Self::F32,
            "BF16" => Self::BF16,
            "F16" => Self::F16,
            "F8_E4M3" => Self::E4M3,
            "U8" | "F8_E8M0" => Self::E8M0,
            _ => return None,
        })
    }
}

impl Scaling {
    /// The scaling of the rows from `first` on.
    pub(crate) const fn skip_rows(mut self, first: usize) -> Self {
        self.first_row += first;
        self
    }

    const fn index(&self, row: usize, col: usize) -> usize {
        (self.first_row + row) / self.tile[0] * self.per_row + col / self.tile[1]
    }

    fn value(&self, scales: &MappedBytes, row: usize, col: usize) -> f32 {
        let i = self.index(row, col);
        let scale = match self.dtype {
            ScaleType::F32 => f32::from_le_bytes(scales.as_chunks().0[i]),
            ScaleType::E4M3 => e4m3(scales[i]),
            ScaleType::E8M0 => e8m0(scales[i]),
            ScaleType::BF16 | ScaleType::F16 => {
                let bits = u16::from_le_bytes(scales.as_chunks().0[i]);
                f32::from_bits(u32::from(bits) << 16)
            }
        };
        self.global.map_or(scale, |global| global.of(scale))
    }

    /// Writes block `index` of row `row` of `matrix`, as [`Quantised::block`].
    pub(crate) fn block(&self, matrix: &Quantised, row: usize, index: usize, out: &mut [u8]) {
        let col = index * BLOCK;
        let scale = |col| self.value(&matrix.scales, row, col).to_le_bytes();
        let front = match matrix.scheme.mode {
            Mode::Fp8 => {
                out[..4].copy_from_slice(&scale(col));
                4
            }
            Mode::Fp4 => {
                out[..4].copy_from_slice(&scale(col));
                out[4..8].copy_from_slice(&scale(col + FP4_GROUP));
                8
            }
            Mode::Symmetric | Mode::Affine | Mode::Mxfp4 => {
                let scale: [u8; 2] = matrix.scales.as_chunks().0[self.index(row, col)];
                let bias = self.bias(scale, matrix.scheme.bits);
                out[..4].copy_from_slice(&[scale, bias].concat());
                4
            }
        };
        let values = &mut out[front..];
        let at = (row * (matrix.cols / BLOCK) + index) * values.len();
        values.copy_from_slice(&matrix.weight[at..at + values.len()]);
    }

    /// The bias that moves integers of `bits` bits down by half their range: `-2^(bits - 1)` times
    /// the scale, exact where it is finite.
    fn bias(&self, scale: [u8; 2], bits: u32) -> [u8; 2] {
        let [one, infinite] = match self.dtype {
            ScaleType::F16 => [1 << 10, 31 << 10],
            _ => [1 << 7, 255 << 7],
        };
        let bits_of = u16::from_le_bytes(scale);
        let mut magnitude = bits_of & 0x7fff;
        for _ in 1..bits {
            magnitude = match magnitude {
                subnormal if subnormal < one => subnormal << 1,
                top if top >= infinite => top,
                finite => finite + one,
            };
        }
        (magnitude | !bits_of & 0x8000).to_le_bytes()
    }
}

/// A tensor of GGUF's NVFP4, each of its scales multiplied by `factor`, as FP4.
///
/// # Errors
/// The system refuses memory.
///
/// # Panics
/// If the tensor is of another type.
pub fn times(tensor: &Tensor, factor: f32) -> std::io::Result<Tensor> {
    assert_eq!(
        tensor.block_type,
        BlockType::NVFP4,
        "type of {}",
        tensor.name
    );
    let len = tensor.bytes.len() / BlockType::NVFP4.bytes() * 2 * BlockType::FP4.bytes();
    let bytes = MappedBytes::filled(len, |out| {
        // Of a block of 64 columns in groups of 16, a half at a time.
        let halves = out.as_chunks_mut::<{ BlockType::FP4.bytes() }>().0;
        for (i, out) in halves.iter_mut().enumerate() {
            let block = &tensor.bytes[i / 2 * BlockType::NVFP4.bytes()..];
            for group in 0..2 {
                let from = i % 2 * 2 + group;
                let scale = ue4m3(block[from]) * factor;
                out[4 * group..][..4].copy_from_slice(&scale.to_le_bytes());
                let values = &block[4 + 8 * from..][..8];
                out[8 + 8 * group..][..8].copy_from_slice(&neighbours(values));
            }
        }
    })?;
    Ok(Tensor {
        name: tensor.name.clone(),
        block_type: BlockType::FP4,
        shape: tensor.shape.clone(),
        bytes,
    })
}

/// Nibbles of 16 columns as pairs of neighbours; in `values` columns 0..8 are low and 8..16 high.
fn neighbours(values: &[u8]) -> [u8; 8] {
    std::array::from_fn(|i| {
        let [first, second] = [2 * i, 2 * i + 1].map(|k| values[k % 8] >> (4 * (k / 8)) & 15);
        first | second << 4
    })
}

/// The tensors of a module, with its errors.
struct Module<'a, P, D> {
    name: &'a str,
    /// A tensor of the module by the last part of its name.
    part: P,
    path: D,
}

/// The matrix of the module `name`; `None` when it has no scales.
pub(crate) fn quantised(
    name: &str,
    config: &Value,
    part: impl Fn(&str) -> Result<Option<UncheckedTensor>, Error>,
    path: impl Fn() -> PathBuf,
) -> Result<Option<Quantised>, Error> {
    let module = Module { name, part, path };
    for suffix in SCALES {
        if let Some(scales) = (module.part)(suffix)? {
            return module.matrix(config, (suffix, scales)).map(Some);
        }
    }
    Ok(None)
}

/// The last part of a tensor's name, and the tensor.
type Part = (&'static str, UncheckedTensor);

impl<P, D> Module<'_, P, D>
where
    P: Fn(&str) -> Result<Option<UncheckedTensor>, Error>,
    D: Fn() -> PathBuf,
{
    fn matrix(&self, config: &Value, scales: Part) -> Result<Quantised, Error> {
        let weight = match (self.part)("weight_packed")? {
            Some(packed) => ("weight_packed", packed),
            None => ("weight", self.required("weight")?),
        };
        let [rows, cols] = weight.1.shape[..] else {
            return Err(self.shape(&weight, "two sizes"));
        };
        match weight.1.dtype.as_str() {
            "F8_E4M3" => self.fp8([rows, cols], (weight, scales), tile(self, config)?),
            "U8" | "I8" => self.fp4([rows, cols.saturating_mul(2)], (weight, scales)),
            "I32" => self.integers([rows, cols], (weight, scales)),
            _ => Err(self.dtype(&weight, "F8_E4M3, or U8, I8 or I32 for packed values")),
        }
    }

    fn fp8(
        &self,
        shape: [usize; 2],
        (weight, scales): (Part, Part),
        tile: [usize; 2],
    ) -> Result<Quantised, Error> {
        let dtype = ScaleType::named(&scales.1.dtype);
        let dtype = dtype.filter(|t| !matches!(t, ScaleType::F16 | ScaleType::E4M3));
        let dtype = dtype.ok_or_else(|| self.dtype(&scales, "F32, BF16, U8 or F8_E8M0"))?;
        self.check_columns(&weight, shape)?;
        let tile = self.tile_of(shape, &scales, Some(tile))?;
        let scheme = (Mode::Fp8, 8, BlockType::FP8);
        Ok(self.joined(scheme, shape, (weight, scales), (tile, dtype, None)))
    }

    fn fp4(&self, shape: [usize; 2], (weight, scales): (Part, Part)) -> Result<Quantised, Error> {
        self.check_columns(&weight, shape)?;
        let [rows, cols] = shape;
        let (expected, group) = match ScaleType::named(&scales.1.dtype) {
            Some(ScaleType::E4M3) => ("one scale for 16 columns", FP4_GROUP),
            Some(ScaleType::E8M0) => ("one scale for 32 columns", BLOCK),
            _ => return Err(self.dtype(&scales, "F8_E4M3, U8 or F8_E8M0")),
        };
        if scales.1.shape != [rows, cols / group] {
            return Err(self.shape(&scales, expected));
        }
        if group == BLOCK {
            let scheme = (Mode::Mxfp4, 4, BlockType::MXFP4);
            let tile = ([1, BLOCK], ScaleType::E8M0, None);
            return Ok(Quantised {
                scaling: None, // as MLX has it
                ..self.joined(scheme, shape, (weight, scales), tile)
            });
        }
        let tile = ([1, FP4_GROUP], ScaleType::E4M3, Some(self.global()?));
        Ok(self.joined(
            (Mode::Fp4, 4, BlockType::FP4),
            shape,
            (weight, scales),
            tile,
        ))
    }

    fn integers(
        &self,
        [rows, words]: [usize; 2],
        (weight, scales): (Part, Part),
    ) -> Result<Quantised, Error> {
        for field in ["weight_zero_point", "weight_g_idx"] {
            if (self.part)(field)?.is_some() {
                let got = "a tensor".to_owned();
                return Err(self.unsupported(field, got, "none: symmetric integers in order"));
            }
        }
        let cols = self.columns(rows)?;
        let shape = [rows, cols];
        self.check_columns(&weight, shape)?;
        let bits = (words.saturating_mul(32) / cols) as u32;
        let (dtype, float) = match ScaleType::named(&scales.1.dtype) {
            Some(ScaleType::F16) => (ScaleType::F16, BlockType::F16),
            Some(ScaleType::BF16) => (ScaleType::BF16, BlockType::BF16),
            _ => return Err(self.dtype(&scales, "F16 or BF16")),
        };
        let block_type = BlockType::affine(bits, float);
        let block_type = block_type.filter(|_| words * 32 == cols * bits as usize);
        let expected = "2, 3, 4, 5, 6 or 8 bits for each value of weight_shape";
        let block_type = block_type.ok_or_else(|| self.shape(&weight, expected))?;
        let tile = (self.tile_of(shape, &scales, None)?, dtype, None);
        let scheme = (Mode::Symmetric, bits, block_type);
        Ok(self.joined(scheme, shape, (weight, scales), tile))
    }

    /// Columns of packed integers with `rows` rows, by `weight_shape`.
    fn columns(&self, rows: usize) -> Result<usize, Error> {
        let shape = ("weight_shape", self.required("weight_shape")?);
        let bytes = shape.1.bytes.clone().arrived()?;
        let sizes: Vec<u64> = match shape.1.dtype.as_str() {
            "I64" => bytes
                .as_chunks()
                .0
                .iter()
                .map(|&x| u64::from_le_bytes(x))
                .collect(),
            "I32" => {
                let sizes = bytes.as_chunks().0.iter();
                sizes.map(|&x| u32::from_le_bytes(x).into()).collect()
            }
            _ => return Err(self.dtype(&shape, "I64 or I32")),
        };
        match sizes[..] {
            [first, cols @ (1..)] if first == rows as u64 => Ok(cols as usize),
            _ => {
                let got = format!("{sizes:?}");
                Err(self.unsupported("weight_shape", got, "as many rows as weight_packed has"))
            }
        }
    }

    fn global(&self) -> Result<Global, Error> {
        let (suffix, of): (_, fn(f32) -> Global) = match (self.part)("weight_scale_2")? {
            Some(_) => ("weight_scale_2", Global::Times),
            None => ("weight_global_scale", Global::DividedBy),
        };
        let scale = (suffix, self.required(suffix)?);
        if scale.1.dtype != "F32" {
            return Err(self.dtype(&scale, "F32"));
        }
        match scale.1.bytes.clone().arrived()?.as_chunks().0 {
            [bytes] => Ok(of(f32::from_le_bytes(*bytes))),
            _ => Err(self.shape(&scale, "one value")),
        }
    }

    /// Rows and columns that share one of `scales`: of the whole matrix, a row, a tile or a group.
    fn tile_of(
        &self,
        [rows, cols]: [usize; 2],
        scales: &Part,
        tile: Option<[usize; 2]>,
    ) -> Result<[usize; 2], Error> {
        let tiles = tile.map(|tile| [rows.div_ceil(tile[0]), cols.div_ceil(tile[1])]);
        let group = |n: usize| {
            let each = cols.checked_div(n).filter(|each| each * n == cols);
            each.filter(|each| each.is_multiple_of(BLOCK))
        };
        let found = match scales.1.shape[..] {
            [] | [1] | [1, 1] => Some([rows, cols]),
            [n] | [n, 1] if n == rows => Some([1, cols]),
            [a, b] if Some([a, b]) == tiles => tile,
            [n, groups] if n == rows => group(groups).map(|each| [1, each]),
            _ => None,
        };
        let expected = "a scale for each tile, row or group of 32, 64, .. columns";
        found.ok_or_else(|| self.shape(scales, expected))
    }

    fn check_columns(&self, weight: &Part, [rows, cols]: [usize; 2]) -> Result<(), Error> {
        if rows > 0 && cols > 0 && cols.is_multiple_of(BLOCK) {
            return Ok(());
        }
        Err(self.shape(weight, "rows of a multiple of 32 values"))
    }

    fn joined(
        &self,
        (mode, bits, block_type): (Mode, u32, BlockType),
        [rows, cols]: [usize; 2],
        (weight, scales): (Part, Part),
        (tile, dtype, global): ([usize; 2], ScaleType, Option<Global>),
    ) -> Quantised {
        let scaling = Scaling {
            tile,
            per_row: cols.div_ceil(tile[1]),
            first_row: 0,
            dtype,
            global,
        };
        Quantised {
            name: self.name.to_owned(),
            rows,
            cols,
            scheme: Scheme {
                mode,
                bits,
                group_size: BLOCK,
            },
            block_type,
            weight: weight.1.bytes,
            scales: scales.1.bytes,
            biases: None,
            scaling: Some(scaling),
        }
    }

    fn required(&self, suffix: &str) -> Result<UncheckedTensor, Error> {
        (self.part)(suffix)?.ok_or_else(|| Error::MissingTensor {
            path: (self.path)(),
            tensor: format!("{}.{suffix}", self.name),
        })
    }

    fn dtype(&self, (suffix, part): &Part, expected: &'static str) -> Error {
        Error::QuantisedDtype {
            path: (self.path)(),
            tensor: format!("{}.{suffix}", self.name),
            dtype: part.dtype.clone(),
            expected,
        }
    }

    fn shape(&self, (suffix, part): &Part, expected: &'static str) -> Error {
        Error::Scales {
            path: (self.path)(),
            tensor: format!("{}.{suffix}", self.name),
            got: part.shape.clone(),
            expected,
        }
    }

    fn unsupported(&self, field: &'static str, got: String, expected: &'static str) -> Error {
        Error::Quantization {
            path: (self.path)(),
            tensor: self.name.to_owned(),
            field,
            got,
            expected,
        }
    }
}

/// Rows and columns of a tile, as the configuration says.
fn tile<P, D>(module: &Module<'_, P, D>, config: &Value) -> Result<[usize; 2], Error>
where
    P: Fn(&str) -> Result<Option<UncheckedTensor>, Error>,
    D: Fn() -> PathBuf,
{
    let nested = config.pointer("/text_config/quantization_config");
    let Some(table) = config.get("quantization_config").or(nested) else {
        return Ok(TILE);
    };
    let groups = table.get("config_groups").and_then(Value::as_object);
    let mut groups = groups.into_iter().flat_map(|groups| groups.values());
    let structure = groups.find_map(|group| group.pointer("/weights/block_structure"));
    let stated = table.get("weight_block_size").or(structure);
    let Some(stated) = stated.filter(|stated| !stated.is_null()) else {
        return Ok(TILE);
    };
    let sizes = stated.as_array().map(Vec::as_slice).unwrap_or_default();
    match sizes.iter().map(Value::as_u64).collect::<Vec<_>>()[..] {
        [Some(rows @ 1..), Some(cols @ 1..)] if cols.is_multiple_of(BLOCK as u64) => {
            Ok([rows as usize, cols as usize])
        }
        _ => {
            let got = crate::mlx::shortened(stated);
            Err(module.unsupported("weight_block_size", got, "rows, and columns by 32"))
        }
    }
}
