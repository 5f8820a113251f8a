//! Loads the weights of BERT from the Hugging Face layout or a GGUF file.

use paceline_base::Bytes;
use paceline_tensor::{PackOptions, PackedMatrix, StoredMatrix, ThreadPool, storage};
use paceline_weights::hf::HfFolder;
use paceline_weights::tensor::Tensor;

use super::config::Bert;
use crate::{Error, ModelSource};

/// Prefixes of tensor names; a bare model has none.
const PREFIXES: [&str; 3] = ["", "bert.", "roberta."];

/// All weights. C width, F feed-forward width.
#[derive(Debug)]
pub(super) struct EncoderWeights {
    /// `(vocabulary, C)`, as stored.
    words: Tensor,
    /// `(positions, C)`, as stored.
    positions: Tensor,
    /// `(C,)`: embedding of token type 0, the only one that texts have.
    kind: Vec<f32>,
    pub(super) norm: Norm,
    pub(super) layers: Vec<EncoderLayer>,
}

#[derive(Debug)]
pub(super) struct EncoderLayer {
    /// `(C, C)`
    pub(super) query: EncoderLinear,
    /// `(C, C)`
    pub(super) key: EncoderLinear,
    /// `(C, C)`
    pub(super) value: EncoderLinear,
    /// `(C, C)`
    pub(super) output: EncoderLinear,
    pub(super) attention_norm: Norm,
    /// `(F, C)`
    pub(super) up: EncoderLinear,
    /// `(C, F)`
    pub(super) down: EncoderLinear,
    pub(super) ffn_norm: Norm,
}

/// A matrix `(outputs, inputs)` with a bias `(outputs,)`.
#[derive(Debug)]
pub(super) struct EncoderLinear {
    pub(super) matrix: PackedMatrix,
    pub(super) bias: Vec<f32>,
}

/// Scale and shift of a layer norm, `(C,)` each.
#[derive(Debug)]
pub(super) struct Norm {
    pub(super) weight: Vec<f32>,
    pub(super) bias: Vec<f32>,
}

/// Tensor lookup in a folder or file.
struct EncoderLoader<'a> {
    source: &'a ModelSource,
    pool: &'a ThreadPool,
    /// Prefix of tensor names in a folder.
    prefix: &'static str,
}

/// Name of a weight in a folder and in a GGUF file, without `.weight` or `.bias`.
type WeightNames<'a> = [&'a str; 2];

impl EncoderWeights {
    /// # Errors
    /// A weight that is missing, or whose shape differs from `config`.
    pub(super) fn load(
        source: &ModelSource,
        config: &Bert,
        pool: &ThreadPool,
    ) -> Result<Self, Error> {
        let is_there = |folder: &HfFolder, prefix: &str| {
            folder.has(&format!("{prefix}embeddings.word_embeddings.weight"))
        };
        let found = match source {
            ModelSource::Hf(folder) => PREFIXES.into_iter().find(|p| is_there(folder, p)),
            ModelSource::Gguf(_) => None,
        };
        let loader = EncoderLoader {
            source,
            pool,
            prefix: found.unwrap_or_default(),
        };
        let c = config.width;
        let table = |names: WeightNames<'_>, rows| loader.tensor(names, "weight", &[rows, c]);
        let positions = ["embeddings.position_embeddings", "position_embd"];
        let types = ["embeddings.token_type_embeddings", "token_types"];
        let types = table(types, config.types)?;
        let mut kind = floats(&types);
        kind.truncate(c);
        let layers = (0..config.layers).map(|i| loader.layer(i, config));
        Ok(Self {
            words: table(["embeddings.word_embeddings", "token_embd"], config.vocab)?,
            positions: table(positions, config.positions)?,
            kind,
            norm: loader.norm(["embeddings.LayerNorm", "token_embd_norm"], c)?,
            layers: layers.collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn bytes(&self) -> Bytes {
        let tables = self.words.bytes.len() + self.positions.bytes.len();
        let matrices = self.layers.iter().flat_map(EncoderLayer::matrices);
        Bytes(tables as u64 + matrices.map(|matrix| matrix.bytes().0).sum::<u64>())
    }

    /// The sum of the token, position and type embeddings, `(C,)`.
    pub(super) fn embedding(&self, token: u32, position: usize, out: &mut [f32]) {
        row(&self.words, token as usize, out);
        let mut other = vec![0.0; out.len()];
        row(&self.positions, position, &mut other);
        for ((x, kind), position) in out.iter_mut().zip(&self.kind).zip(&other) {
            // The order of `modeling_bert.py`.
            *x = (*x + kind) + position;
        }
    }
}

impl EncoderLayer {
    fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let attention = [&self.query, &self.key, &self.value, &self.output];
        let all = attention.into_iter().chain([&self.up, &self.down]);
        all.map(|linear| &linear.matrix)
    }
}

impl EncoderLoader<'_> {
    fn layer(&self, i: usize, config: &Bert) -> Result<EncoderLayer, Error> {
        let (c, f) = (config.width, config.ffn);
        let names = |[folder, file]: WeightNames<'_>| {
            [
                format!("encoder.layer.{i}.{folder}"),
                format!("blk.{i}.{file}"),
            ]
        };
        let linear =
            |of: WeightNames<'_>, shape| self.linear(names(of).each_ref().map(|n| &**n), shape);
        let norm = |of: WeightNames<'_>| self.norm(names(of).each_ref().map(|n| &**n), c);
        Ok(EncoderLayer {
            query: linear(["attention.self.query", "attn_q"], [c, c])?,
            key: linear(["attention.self.key", "attn_k"], [c, c])?,
            value: linear(["attention.self.value", "attn_v"], [c, c])?,
            output: linear(["attention.output.dense", "attn_output"], [c, c])?,
            attention_norm: norm(["attention.output.LayerNorm", "attn_output_norm"])?,
            up: linear(["intermediate.dense", "ffn_up"], [f, c])?,
            down: linear(["output.dense", "ffn_down"], [c, f])?,
            ffn_norm: norm(["output.LayerNorm", "layer_output_norm"])?,
        })
    }

    /// The tensor with the suffix `kind`.
    fn tensor(
        &self,
        names: WeightNames<'_>,
        kind: &str,
        expected: &[usize],
    ) -> Result<Tensor, Error> {
        let [in_folder, in_file] = names;
        let tensor = match self.source {
            ModelSource::Hf(folder) => {
                folder.tensor(&format!("{}{in_folder}.{kind}", self.prefix))?
            }
            ModelSource::Gguf(file) => file.tensor(&format!("{in_file}.{kind}"))?,
        };
        if tensor.shape != expected {
            return Err(Error::Shape {
                name: tensor.name,
                got: tensor.shape,
                expected: expected.to_vec(),
            });
        }
        Ok(tensor)
    }

    fn vector(&self, names: WeightNames<'_>, kind: &str, n: usize) -> Result<Vec<f32>, Error> {
        Ok(floats(&self.tensor(names, kind, &[n])?))
    }

    fn linear(&self, names: WeightNames<'_>, shape: [usize; 2]) -> Result<EncoderLinear, Error> {
        let tensor = self.tensor(names, "weight", &shape)?;
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
        let packed = PackedMatrix::new(stored, PackOptions::default(), self.pool);
        let matrix = packed.map_err(|source| Error::Pack {
            name: tensor.name,
            source,
        })?;
        let bias = self.vector(names, "bias", rows)?;
        Ok(EncoderLinear { matrix, bias })
    }

    fn norm(&self, names: WeightNames<'_>, n: usize) -> Result<Norm, Error> {
        Ok(Norm {
            weight: self.vector(names, "weight", n)?,
            bias: self.vector(names, "bias", n)?,
        })
    }
}

/// All values of a tensor.
fn floats(tensor: &Tensor) -> Vec<f32> {
    let mut out = vec![0.0; tensor.rows() * tensor.cols()];
    storage::dequantise(tensor.block_type, &tensor.bytes, &mut out);
    out
}

/// Row `i` of a table.
fn row(table: &Tensor, i: usize, out: &mut [f32]) {
    let bytes = table.bytes.len() / table.rows();
    let stored = &table.bytes[i * bytes..(i + 1) * bytes];
    storage::dequantise(table.block_type, stored, out);
}
