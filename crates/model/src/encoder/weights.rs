//! The weights of an encoder, under their names in the Hugging Face layout.

use paceline_base::Bytes;
use paceline_formats::hf::HfFolder;
use paceline_formats::tensor::Tensor;
use paceline_tensor::{PackOptions, Packed, StoredMatrix, ThreadPool, stored};

use super::EncoderConfig;
use crate::Error;

/// Prefixes of names; a bare model's have none.
const PREFIXES: [&str; 3] = ["", "bert.", "roberta."];

/// Everything. C width, F feed-forward width.
#[derive(Debug)]
pub(super) struct Weights {
    /// `(vocabulary, C)`, as stored.
    words: Tensor,
    /// `(positions, C)`, as stored.
    positions: Tensor,
    /// `(C,)`: that of type 0, the only one that texts have.
    kind: Vec<f32>,
    pub(super) norm: Norm,
    pub(super) layers: Vec<Layer>,
}

/// A layer.
#[derive(Debug)]
pub(super) struct Layer {
    /// `(C, C)`
    pub(super) query: Linear,
    /// `(C, C)`
    pub(super) key: Linear,
    /// `(C, C)`
    pub(super) value: Linear,
    /// `(C, C)`
    pub(super) output: Linear,
    pub(super) attention_norm: Norm,
    /// `(F, C)`
    pub(super) up: Linear,
    /// `(C, F)`
    pub(super) down: Linear,
    pub(super) ffn_norm: Norm,
}

/// A matrix `(outputs, inputs)` with a bias `(outputs,)`.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) matrix: Packed,
    pub(super) bias: Vec<f32>,
}

/// Scale and shift of a layer norm, `(C,)` each.
#[derive(Debug)]
pub(super) struct Norm {
    pub(super) weight: Vec<f32>,
    pub(super) bias: Vec<f32>,
}

/// Finds weights in a folder.
struct Loader<'a> {
    folder: &'a HfFolder,
    pool: &'a ThreadPool,
    prefix: &'static str,
}

impl Weights {
    /// # Errors
    /// A weight that is missing, or has another shape than `config` says.
    pub(super) fn load(
        folder: &HfFolder,
        config: &EncoderConfig,
        pool: &ThreadPool,
    ) -> Result<Self, Error> {
        let is_there =
            |prefix: &&str| folder.has(&format!("{prefix}embeddings.word_embeddings.weight"));
        let prefix = PREFIXES.into_iter().find(is_there).unwrap_or_default();
        let loader = Loader {
            folder,
            pool,
            prefix,
        };
        let c = config.width;
        let table = |name: &str, rows| loader.tensor(&format!("embeddings.{name}"), &[rows, c]);
        let types = table("token_type_embeddings.weight", config.types)?;
        let mut kind = floats(&types);
        kind.truncate(c);
        let layers = (0..config.layers).map(|i| loader.layer(i, config));
        Ok(Self {
            words: table("word_embeddings.weight", config.vocab)?,
            positions: table("position_embeddings.weight", config.positions)?,
            kind,
            norm: loader.norm("embeddings.LayerNorm", c)?,
            layers: layers.collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn bytes(&self) -> Bytes {
        let tables = self.words.bytes.len() + self.positions.bytes.len();
        let matrices = self.layers.iter().flat_map(Layer::matrices);
        Bytes(tables as u64 + matrices.map(|matrix| matrix.bytes().0).sum::<u64>())
    }

    /// The sum of a token's, its position's and its type's row, `(C,)`.
    pub(super) fn embedding(&self, token: u32, position: usize, out: &mut [f32]) {
        row(&self.words, token as usize, out);
        let mut other = vec![0.0; out.len()];
        row(&self.positions, position, &mut other);
        for ((x, kind), position) in out.iter_mut().zip(&self.kind).zip(&other) {
            // In the order of `modeling_bert.py`.
            *x = (*x + kind) + position;
        }
    }
}

impl Layer {
    fn matrices(&self) -> impl Iterator<Item = &Packed> {
        let all = [
            &self.query,
            &self.key,
            &self.value,
            &self.output,
            &self.up,
            &self.down,
        ];
        all.into_iter().map(|linear| &linear.matrix)
    }
}

impl Loader<'_> {
    fn layer(&self, i: usize, config: &EncoderConfig) -> Result<Layer, Error> {
        let (c, f) = (config.width, config.ffn);
        let linear = |name: &str, shape| self.linear(&format!("encoder.layer.{i}.{name}"), shape);
        let norm = |name: &str| self.norm(&format!("encoder.layer.{i}.{name}"), c);
        Ok(Layer {
            query: linear("attention.self.query", [c, c])?,
            key: linear("attention.self.key", [c, c])?,
            value: linear("attention.self.value", [c, c])?,
            output: linear("attention.output.dense", [c, c])?,
            attention_norm: norm("attention.output.LayerNorm")?,
            up: linear("intermediate.dense", [f, c])?,
            down: linear("output.dense", [c, f])?,
            ffn_norm: norm("output.LayerNorm")?,
        })
    }

    fn tensor(&self, name: &str, expected: &[usize]) -> Result<Tensor, Error> {
        let tensor = self.folder.tensor(&format!("{}{name}", self.prefix))?;
        if tensor.shape != expected {
            return Err(Error::Shape {
                name: tensor.name,
                got: tensor.shape,
                expected: expected.to_vec(),
            });
        }
        Ok(tensor)
    }

    fn vector(&self, name: &str, n: usize) -> Result<Vec<f32>, Error> {
        Ok(floats(&self.tensor(name, &[n])?))
    }

    fn linear(&self, name: &str, shape: [usize; 2]) -> Result<Linear, Error> {
        let tensor = self.tensor(&format!("{name}.weight"), &shape)?;
        let [rows, cols] = shape;
        let values = floats(&tensor);
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let stored = StoredMatrix {
            block_type: paceline_base::BlockType::F32,
            rows,
            cols,
            bytes: &bytes,
        };
        let packed = Packed::new(stored, PackOptions::default(), self.pool);
        let matrix = packed.map_err(|source| Error::Pack {
            name: tensor.name,
            source,
        })?;
        let bias = self.vector(&format!("{name}.bias"), rows)?;
        Ok(Linear { matrix, bias })
    }

    fn norm(&self, name: &str, n: usize) -> Result<Norm, Error> {
        Ok(Norm {
            weight: self.vector(&format!("{name}.weight"), n)?,
            bias: self.vector(&format!("{name}.bias"), n)?,
        })
    }
}

/// All values of a tensor.
fn floats(tensor: &Tensor) -> Vec<f32> {
    let mut out = vec![0.0; tensor.rows() * tensor.cols()];
    stored::dequantise(tensor.block_type, &tensor.bytes, &mut out);
    out
}

/// Row `i` of a table.
fn row(table: &Tensor, i: usize, out: &mut [f32]) {
    let bytes = table.bytes.len() / table.rows();
    let stored = &table.bytes[i * bytes..(i + 1) * bytes];
    stored::dequantise(table.block_type, stored, out);
}
