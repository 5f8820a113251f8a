//! Weights in memory: packed matrices, norms and biases, checked against the configuration.

use std::borrow::Cow;

use paceline_base::{Bytes, KernelClass};
use paceline_formats::tensor::Tensor;
use paceline_tensor::{PackOptions, Packed, StoredMatrix, ThreadPool, stored};

use crate::rope::MIN_DIVISOR;
use crate::{Config, Error, Family, Part, Role, Source};

/// A matrix with an optional bias: `(out, in)`.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) matrix: Packed,
    pub(crate) bias: Option<Vec<f32>>,
}

/// The weights of one layer; shapes in [`Part`].
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) query: Linear,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    pub(crate) attention_output: Linear,
    pub(crate) query_norm: Option<Vec<f32>>,
    pub(crate) key_norm: Option<Vec<f32>>,
    pub(crate) post_attention_norm: Option<Vec<f32>>,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) post_ffn_norm: Option<Vec<f32>>,
}

/// Token embeddings, read row by row from the mapped file.
#[derive(Debug)]
pub(crate) struct Embedding {
    tensor: Tensor,
}

impl Embedding {
    /// Writes the embedding of `token`, `(width,)`, as stored.
    pub(crate) fn row(&self, token: u32, out: &mut [f32]) {
        let bytes = self
            .tensor
            .block_type
            .row_bytes(out.len())
            .expect("checked at load");
        let start = token as usize * bytes;
        stored::dequantise(
            self.tensor.block_type,
            &self.tensor.bytes[start..start + bytes],
            out,
        );
    }
}

/// Loads weights of one model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loader<'a> {
    pub(crate) source: &'a Source,
    pub(crate) config: &'a Config,
    pub(crate) class: KernelClass,
    pub(crate) pool: &'a ThreadPool,
}

impl Loader<'_> {
    fn family(&self) -> Family {
        self.config.family
    }

    pub(crate) fn embedding(&self) -> Result<Embedding, Error> {
        let tensor = self.source.weight(self.family(), Role::TokenEmbedding)?;
        check_shape(&tensor, &[self.config.vocab, self.config.width])?;
        Ok(Embedding { tensor })
    }

    /// The output head, and whether it is the embedding.
    pub(crate) fn output(&self) -> Result<(Linear, bool), Error> {
        let tied = match self.config.tied {
            Some(tied) => tied,
            None => {
                let own = self.source.opt_weight(self.family(), Role::Output)?;
                own.is_none()
            }
        };
        let role = if tied {
            Role::TokenEmbedding
        } else {
            Role::Output
        };
        let shape = [self.config.vocab, self.config.width];
        Ok((self.linear(role, shape, 0)?, tied))
    }

    pub(crate) fn output_norm(&self) -> Result<Vec<f32>, Error> {
        self.norm(Role::OutputNorm, self.config.width)
    }

    pub(crate) fn layer(&self, i: usize) -> Result<Layer, Error> {
        let c = self.config;
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let role = |part| Role::Layer(i, part);
        let linear = |part, rows, cols| self.linear(role(part), [rows, cols], 0);
        let down = self.source.weight(self.family(), role(Part::Down))?;
        let norms = self.family() == Family::Gemma3;
        let opt_norm = |there: bool, part, n| there.then(|| self.norm(role(part), n)).transpose();
        let head_norms = matches!(self.family(), Family::Qwen3 | Family::Gemma3);
        Ok(Layer {
            attention_norm: self.norm(role(Part::AttentionNorm), c.width)?,
            query: linear(Part::Query, q, c.width)?,
            key: linear(Part::Key, kv, c.width)?,
            value: linear(Part::Value, kv, c.width)?,
            attention_output: self.linear(
                role(Part::AttentionOutput),
                [c.width, q],
                c.attention_leaf(),
            )?,
            query_norm: opt_norm(head_norms, Part::QueryNorm, c.head_dim)?,
            key_norm: opt_norm(head_norms, Part::KeyNorm, c.head_dim)?,
            post_attention_norm: opt_norm(norms, Part::PostAttentionNorm, c.width)?,
            ffn_norm: self.norm(role(Part::FfnNorm), c.width)?,
            gate: linear(Part::Gate, c.ffn, c.width)?,
            up: linear(Part::Up, c.ffn, c.width)?,
            down: self.linear(
                role(Part::Down),
                [c.width, c.ffn],
                c.ffn_leaf(down.block_type.len()),
            )?,
            post_ffn_norm: opt_norm(norms, Part::PostFfnNorm, c.width)?,
        })
    }

    /// Packs a matrix and lets go of its file pages.
    fn linear(&self, role: Role, shape: [usize; 2], leaf_cols: usize) -> Result<Linear, Error> {
        let tensor = self.source.weight(self.family(), role)?;
        check_shape(&tensor, &shape)?;
        let stored = StoredMatrix {
            block_type: tensor.block_type,
            rows: shape[0],
            cols: shape[1],
            bytes: &tensor.bytes,
        };
        let options = PackOptions {
            leaf_cols,
            as_f32: self.class == KernelClass::CpuF32,
        };
        let matrix = Packed::new(stored, options, self.pool).map_err(|source| Error::Pack {
            name: tensor.name.clone(),
            source,
        })?;
        tensor.bytes.discard();
        let bias = match self.bias(role)? {
            Some(bias) => Some(vector(&bias, shape[0])?),
            None => None,
        };
        Ok(Linear { matrix, bias })
    }

    /// The bias of a matrix: qwen2 has one on queries, keys and values, other files may.
    fn bias(&self, role: Role) -> Result<Option<Tensor>, Error> {
        let needed = matches!(role, Role::Layer(_, Part::Query | Part::Key | Part::Value));
        if self.family() == Family::Qwen2 && needed {
            return self.source.bias(self.family(), role).map(Some);
        }
        self.source.opt_bias(self.family(), role)
    }

    fn norm(&self, role: Role, n: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.source.weight(self.family(), role)?;
        let mut weights = vector(&tensor, n)?;
        if self.config.norm_offset != 0.0 {
            weights
                .iter_mut()
                .for_each(|w| *w += self.config.norm_offset);
        }
        Ok(weights)
    }
}

/// The factors of `rope_freqs`, if the file has them.
pub(crate) fn rope_factors(source: &Source, config: &Config) -> Result<Option<Vec<f32>>, Error> {
    let Some(tensor) = source.opt_weight(config.family, Role::RopeFactors)? else {
        return Ok(None);
    };
    let pairs = config.ropes[0].frequencies.len();
    let factors = vector(&tensor, pairs)?;
    let usable = |factor: &f32| factor.is_finite() && f64::from(*factor) >= MIN_DIVISOR;
    if let Some(bad) = factors.iter().find(|factor| !usable(factor)) {
        return Err(Error::Value {
            field: "rope factor",
            got: bad.to_string(),
            expected: Cow::Borrowed("0.001 or more"),
        });
    }
    Ok(Some(factors))
}

fn check_shape(tensor: &Tensor, expected: &[usize]) -> Result<(), Error> {
    if tensor.shape == expected {
        return Ok(());
    }
    Err(Error::Shape {
        name: tensor.name.clone(),
        got: tensor.shape.clone(),
        expected: expected.to_vec(),
    })
}

fn vector(tensor: &Tensor, n: usize) -> Result<Vec<f32>, Error> {
    check_shape(tensor, &[n])?;
    let mut out = vec![0.0; n];
    stored::dequantise(tensor.block_type, &tensor.bytes, &mut out);
    Ok(out)
}

impl Layer {
    fn linears(&self) -> [&Linear; 7] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.attention_output,
            &self.gate,
            &self.up,
            &self.down,
        ]
    }

    pub(crate) fn bytes(&self) -> Bytes {
        Bytes(self.linears().iter().map(|l| l.matrix.bytes().0).sum())
    }

    fn reads_integers(&self) -> IntegerInputs {
        let any = |linears: &[&Linear]| linears.iter().any(|l| l.matrix.reads_integers());
        let Self {
            query,
            key,
            value,
            gate,
            up,
            ..
        } = self;
        IntegerInputs {
            normed: any(&[query, key, value, gate, up]),
            attended: any(&[&self.attention_output]),
            hidden: any(&[&self.down]),
            head: false,
        }
    }
}

/// Which inputs of products some matrix reads as integers; the others are kept in f32 only,
/// and need not be whole runs of 32.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IntegerInputs {
    /// Of the queries, keys, values, gate and up.
    pub(crate) normed: bool,
    /// Of the attention's output projection.
    pub(crate) attended: bool,
    /// Of the down projection.
    pub(crate) hidden: bool,
    /// Of the output head.
    pub(crate) head: bool,
}

impl IntegerInputs {
    pub(crate) fn of(layers: &[Layer], output: &Linear) -> Self {
        let head = output.matrix.reads_integers();
        let start = Self {
            head,
            ..Self::default()
        };
        layers
            .iter()
            .map(Layer::reads_integers)
            .fold(start, |a, b| Self {
                normed: a.normed || b.normed,
                attended: a.attended || b.attended,
                hidden: a.hidden || b.hidden,
                head: a.head,
            })
    }
}
