//! Matrices in MLX's quantised form, as `mlx_lm.convert` writes them into folders.
//!
//! ```text
//! config.json   "quantization": {"group_size": 64, "bits": 4, "mode": "affine",
//!                                "model.layers.0.mlp.down_proj": {"group_size": 64, "bits": 6}}
//! X.weight      U32 (rows, cols * bits / 32)   integers, least significant bits first
//! X.scales      F16 or BF16 (rows, cols / group_size), for mxfp4 U8
//! X.biases      as scales; not for mxfp4
//! ```
//!
//! A matrix is quantised when it has scales, regardless of what its configuration says about others
//! (`mlx_lm/utils.py`, `load_model`). The parameters are stated for all matrices or under its name.
//! `quantization_config` means the same and is read where the first is absent.
//!
//! The kernels want a row in one piece. [`Quantised`] joins 32 columns of the three tensors to a
//! block of [`BlockType`], and repeats the scale of a longer group in each. A joined matrix takes
//! up to a third more than its parts: 12 bytes for 9, at 2 bits in groups of 128. At 4 bits in
//! groups of 64 it is a ninth. It is a copy, and goes when the kernels have packed it.
//!
//! Embeddings, which are read row by row, are never joined as a whole.

use std::ops::Range;
use std::path::PathBuf;

use paceline_base::BlockType;
use serde_json::Value;

use crate::hf::Error;
use crate::scaled::Scaling;
use crate::tensor::{Absent, MappedBytes, Tensor};

/// Encoding of a matrix's values as integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A scale and a bias for each group.
    Affine,
    /// 4-bit floats with a power of two for each group of 32.
    Mxfp4,
    /// FP8, by [`scaled`](crate::scaled) as the following.
    Fp8,
    /// 4-bit floats with a scale for each group of 16.
    Fp4,
    /// Integers with a scale, the middle of their range standing for 0.
    Symmetric,
}

impl Mode {
    /// Whether MLX computes with it as it is stored.
    pub const fn is_mlx(self) -> bool {
        matches!(self, Self::Affine | Self::Mxfp4)
    }
}

/// Quantisation parameters of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    /// Kind of integers.
    pub mode: Mode,
    /// Bits of one: 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
    /// Columns that share a scale: 32, 64 or 128. Of [`scaled`](crate::scaled) matrices those of a
    /// joined block, 32.
    pub group_size: usize,
}

/// A quantised matrix, `(rows, cols)`, as it lies in the mapped files.
#[derive(Clone, Debug)]
pub struct Quantised {
    /// Name of the module: that of its tensors without the last part.
    pub name: String,
    /// Output features, at least 1.
    pub rows: usize,
    /// Input features, whole groups, at least one.
    pub cols: usize,
    pub scheme: Scheme,
    /// Type of a joined block.
    pub block_type: BlockType,
    /// `rows * cols * bits / 8` bytes.
    pub weight: MappedBytes,
    /// `rows * cols / group_size` values of 2 bytes, or 1 for mxfp4; of [`scaled`](crate::scaled)
    /// matrices all of the file.
    pub scales: MappedBytes,
    /// As many values as scales; for affine integers.
    pub biases: Option<MappedBytes>,
    /// For other scales than MLX's.
    pub(crate) scaling: Option<Scaling>,
}

/// A part of a quantised matrix that does not fit its scales.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: tensor {tensor}.{part}: shape {got:?} does not fit scales {scales:?} at {} bits in groups \
     of {}",
    path.display(), scheme.bits, scheme.group_size
)]
pub struct Misfit {
    pub path: PathBuf,
    pub tensor: String,
    pub part: &'static str,
    pub got: Vec<usize>,
    /// Shape of the scales.
    pub scales: Vec<usize>,
    /// Quantisation of the matrix.
    pub scheme: Scheme,
}

/// A tensor of a quantised matrix, before it is checked.
#[derive(Clone, Debug)]
pub(crate) struct UncheckedTensor {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: MappedBytes,
}

/// Columns of a joined block.
const BLOCK: usize = 32;

/// Bytes of the longest block: 8-bit integers, a scale and a bias.
pub const BLOCK_BYTES_MAX: usize = BlockType::AFFINE8_F16.bytes();

impl Scheme {
    /// Scheme that `config` gives for the module `name`.
    pub(crate) fn of(
        config: &Value,
        name: &str,
        path: impl Fn() -> PathBuf,
    ) -> Result<Self, Error> {
        let wrong = |field, got: &Value, expected| Error::Quantization {
            path: path(),
            tensor: name.to_owned(),
            field,
            got: shortened(got),
            expected,
        };
        let table = ["quantization", "quantization_config"]
            .into_iter()
            .find_map(|key| config.get(key).filter(|table| !table.is_null()))
            .ok_or_else(|| wrong("quantization", &Value::Null, "how the matrix is quantised"))?;
        let own = match table.get(name) {
            None | Some(Value::Bool(true)) => table,
            Some(own) if own.is_object() => own,
            Some(other) => return Err(wrong("quantization", other, "bits and group_size")),
        };
        let field = |key: &str| own.get(key).unwrap_or(&Value::Null);
        let number = |key, default| match field(key) {
            Value::Null => Some(default),
            value => value.as_u64(),
        };
        let (mode, sizes, group) = match field("mode") {
            Value::Null => (Mode::Affine, &[2, 3, 4, 5, 6, 8][..], 64),
            Value::String(mode) if mode == "affine" => (Mode::Affine, &[2, 3, 4, 5, 6, 8][..], 64),
            Value::String(mode) if mode == "mxfp4" => (Mode::Mxfp4, &[4][..], 32),
            other => return Err(wrong("mode", other, "affine or mxfp4")),
        };
        let bits = number("bits", 4).filter(|bits| sizes.contains(bits));
        let bits = bits.ok_or_else(|| wrong("bits", field("bits"), bits_of(mode)))?;
        let groups = if mode == Mode::Affine {
            &[32, 64, 128][..]
        } else {
            &[32]
        };
        let group_size = number("group_size", group).filter(|size| groups.contains(size));
        let group_size =
            group_size.ok_or_else(|| wrong("group_size", field("group_size"), groups_of(mode)))?;
        Ok(Self {
            mode,
            bits: bits as u32,
            group_size: group_size as usize,
        })
    }
}

const fn bits_of(mode: Mode) -> &'static str {
    match mode {
        Mode::Affine => "2, 3, 4, 5, 6 or 8",
        _ => "4",
    }
}

const fn groups_of(mode: Mode) -> &'static str {
    match mode {
        Mode::Affine => "32, 64 or 128",
        _ => "32",
    }
}

/// A value as text, cut where it gets long.
pub(crate) fn shortened(value: &Value) -> String {
    let mut text = value.to_string();
    if let Some((at, _)) = text.char_indices().nth(60) {
        text.truncate(at);
        text.push_str("...");
    }
    text
}

/// Facts that the parts of a matrix are checked against.
struct Checks<'a> {
    name: &'a str,
    scheme: Scheme,
    scales: &'a UncheckedTensor,
    path: &'a dyn Fn() -> PathBuf,
}

impl Checks<'_> {
    fn dtype(&self, part: &UncheckedTensor, suffix: &str, expected: &'static str) -> Error {
        Error::QuantisedDtype {
            path: (self.path)(),
            tensor: format!("{}.{suffix}", self.name),
            dtype: part.dtype.clone(),
            expected,
        }
    }

    fn misfit(&self, part: &'static str, got: &[usize]) -> Error {
        Error::Misfit(Box::new(Misfit {
            path: (self.path)(),
            tensor: self.name.to_owned(),
            part,
            got: got.to_vec(),
            scales: self.scales.shape.clone(),
            scheme: self.scheme,
        }))
    }

    /// The type of a joined block.
    fn block_type(&self, weight: &UncheckedTensor) -> Result<BlockType, Error> {
        if weight.dtype != "U32" {
            return Err(self.dtype(weight, "weight", "U32"));
        }
        let bits = self.scheme.bits;
        let found = match (self.scheme.mode, self.scales.dtype.as_str()) {
            (Mode::Mxfp4, "U8") => Some(BlockType::MXFP4),
            (Mode::Affine, "F16") => BlockType::affine(bits, BlockType::F16),
            (Mode::Affine, "BF16") => BlockType::affine(bits, BlockType::BF16),
            (Mode::Affine, _) => return Err(self.dtype(self.scales, "scales", "F16 or BF16")),
            _ => return Err(self.dtype(self.scales, "scales", "U8")),
        };
        Ok(found.expect("a scheme has the bits of a type"))
    }

    /// Rows and columns.
    fn sizes(&self, weight: &UncheckedTensor) -> Result<[usize; 2], Error> {
        let shape = &self.scales.shape;
        let [rows, groups] = shape[..] else {
            return Err(self.misfit("scales", shape));
        };
        let cols = groups.checked_mul(self.scheme.group_size);
        let bits = cols.and_then(|cols| cols.checked_mul(self.scheme.bits as usize));
        let (Some(cols), Some(bits), 1..) = (cols, bits, rows.min(groups)) else {
            return Err(self.misfit("scales", shape));
        };
        if weight.shape != [rows, bits / 32] {
            return Err(self.misfit("weight", &weight.shape));
        }
        Ok([rows, cols])
    }

    fn biases(&self, biases: Option<UncheckedTensor>) -> Result<Option<MappedBytes>, Error> {
        if self.scheme.mode == Mode::Mxfp4 {
            return Ok(None);
        }
        let part = biases.ok_or_else(|| Error::MissingTensor {
            path: (self.path)(),
            tensor: format!("{}.biases", self.name),
        })?;
        if part.shape != self.scales.shape {
            return Err(self.misfit("biases", &part.shape));
        }
        if part.dtype != self.scales.dtype {
            return Err(self.dtype(&part, "biases", "that of the scales"));
        }
        Ok(Some(part.bytes))
    }
}

impl Quantised {
    /// The rows `rows`, without a copy; `None` where the matrix has fewer.
    pub fn row_range(&self, rows: Range<usize>) -> Option<Self> {
        let of = |bytes: &MappedBytes| {
            let row = bytes.len() / self.rows;
            bytes.slice(rows.start * row..rows.end * row)
        };
        let biases = match &self.biases {
            Some(biases) => Some(of(biases)?),
            None => None,
        };
        let (scales, scaling) = match self.scaling {
            Some(scaling) => (self.scales.clone(), Some(scaling.skip_rows(rows.start))),
            None => (of(&self.scales)?, None),
        };
        Some(Self {
            name: self.name.clone(),
            rows: rows.len(),
            weight: of(&self.weight)?,
            scales,
            biases,
            scaling,
            ..*self
        })
    }

    /// Waits until all of the matrix has arrived, so that later reads do not.
    ///
    /// # Errors
    /// [`Absent`] if it never arrives.
    pub fn arrived(self) -> Result<Self, Absent> {
        Ok(Self {
            weight: self.weight.arrived()?,
            scales: self.scales.arrived()?,
            biases: self.biases.map(MappedBytes::arrived).transpose()?,
            ..self
        })
    }

    /// Checks the parts of the matrix `name` against `scheme` and each other.
    pub(crate) fn new(
        name: &str,
        scheme: Scheme,
        [weight, scales]: [UncheckedTensor; 2],
        biases: Option<UncheckedTensor>,
        path: impl Fn() -> PathBuf,
    ) -> Result<Self, Error> {
        let checks = Checks {
            name,
            scheme,
            scales: &scales,
            path: &path,
        };
        let block_type = checks.block_type(&weight)?;
        let [rows, cols] = checks.sizes(&weight)?;
        let biases = checks.biases(biases)?;
        Ok(Self {
            name: name.to_owned(),
            rows,
            cols,
            scheme,
            block_type,
            weight: weight.bytes,
            scales: scales.bytes,
            biases,
            scaling: None,
        })
    }

    /// Writes block `index` of row `row`, `block_type.bytes()` bytes.
    ///
    /// # Panics
    /// If there is no such block, or `out` has another length.
    pub fn block(&self, row: usize, index: usize, out: &mut [u8]) {
        if let Some(scaling) = &self.scaling {
            return scaling.block(self, row, index, out);
        }
        let integers = 4 * self.scheme.bits as usize;
        let group =
            row * (self.cols / self.scheme.group_size) + index * BLOCK / self.scheme.group_size;
        let size = if self.biases.is_some() { 2 } else { 1 };
        let mut at = 0;
        for part in std::iter::once(&self.scales).chain(&self.biases) {
            out[at..at + size].copy_from_slice(&part[group * size..][..size]);
            at += size;
        }
        let start = (row * (self.cols / BLOCK) + index) * integers;
        out[at..].copy_from_slice(&self.weight[start..start + integers]);
    }

    /// Writes the columns `cols` of the rows from `first` on, joined, as many as `out` has room
    /// for.
    ///
    /// # Panics
    /// If the columns are not whole runs of 32 of this matrix, or there are fewer rows.
    pub fn join(&self, first: usize, cols: &Range<usize>, out: &mut [u8]) {
        let blocks = cols.start / BLOCK..cols.end / BLOCK;
        assert_eq!([cols.start % BLOCK, cols.end % BLOCK], [0, 0], "{cols:?}");
        let size = self.block_type.bytes();
        for (i, block) in out.chunks_exact_mut(size).enumerate() {
            let (row, at) = (i / blocks.len(), i % blocks.len());
            self.block(first + row, blocks.start + at, block);
        }
    }

    /// Advises the system that the files' pages are not needed soon.
    pub fn discard(&self) {
        self.parts().for_each(MappedBytes::discard);
    }

    /// Values, scales and biases as the files have them.
    pub fn parts(&self) -> impl Iterator<Item = &MappedBytes> {
        [&self.weight, &self.scales].into_iter().chain(&self.biases)
    }

    /// The whole matrix, joined in memory; [`discard`](Self::discard)s the files' pages.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Absent`].
    pub fn joined(&self) -> Result<Tensor, Error> {
        let blocks = self.rows * (self.cols / BLOCK);
        let arrived = self.clone().arrived()?;
        let bytes = MappedBytes::filled(blocks * self.block_type.bytes(), |out| {
            arrived.join(0, &(0..self.cols), out);
        });
        self.discard();
        Ok(Tensor {
            name: format!("{}.weight", self.name),
            block_type: self.block_type,
            shape: vec![self.rows, self.cols],
            bytes: bytes.map_err(|error| Error::Memory {
                tensor: self.name.clone(),
                error,
            })?,
        })
    }
}
