//! A rank's weights as MLX's arrays.

use std::cell::RefCell;
use std::ops::Range;

use paceline_base::{Bytes, KernelClass};
use paceline_mlx::{Array, Dtype, Quantised, Stream};

use super::stored::{Stored, float, floats};
use crate::split::{LeafCut, Shard};
use crate::weights::Names;
use crate::{Config, Error, Family, Part, Role, Source};

/// A matrix `(out, in)`.
#[derive(Clone, Debug)]
enum Matrix {
    /// Its transpose, `(in, out)`: a view.
    Float(Array),
    Quantised(Quantised),
}

/// A matrix with an optional bias `(out,)`.
#[derive(Clone, Debug)]
pub(super) struct Linear {
    matrix: Matrix,
    bias: Option<Array>,
}

impl Linear {
    /// x (T, in) -> (T, out)
    pub(super) fn apply(&self, stream: &Stream, x: &Array) -> Result<Array, Error> {
        let product = match &self.matrix {
            Matrix::Float(across) => stream.matmul(x, across)?,
            Matrix::Quantised(weights) => stream.quantised_matmul(x, weights)?,
        };
        Ok(match &self.bias {
            Some(bias) => stream.add(&product, bias)?,
            None => product,
        })
    }

    /// The rows that `indices (T,)` name: (T, in).
    pub(super) fn rows(
        &self,
        stream: &Stream,
        indices: &Array,
        dtype: Dtype,
    ) -> Result<Array, Error> {
        let rows = match &self.matrix {
            Matrix::Float(across) => {
                let whole = stream.transpose(across, &[1, 0])?;
                stream.take(&whole, indices, 0)?
            }
            Matrix::Quantised(w) => {
                let take = |array: &Array| stream.take(array, indices, 0);
                let rows = Quantised {
                    packed: take(&w.packed)?,
                    scales: take(&w.scales)?,
                    biases: w.biases.as_ref().map(take).transpose()?,
                    ..*w
                };
                stream.dequantise(&rows, dtype)?
            }
        };
        Ok(stream.astype(&rows, dtype)?)
    }

    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let matrix: Vec<&Array> = match &self.matrix {
            Matrix::Float(across) => vec![across],
            Matrix::Quantised(w) => {
                let biases = w.biases.iter();
                [&w.packed, &w.scales].into_iter().chain(biases).collect()
            }
        };
        matrix.into_iter().chain(&self.bias)
    }
}

/// A matrix that the ranks of a stage share by its input dimension, or by its outputs: see
/// [`Loader::by_outputs`].
#[derive(Debug)]
pub(super) struct Summed {
    /// This rank's columns, or rows; none when it has no part in it.
    pub(super) mine: Option<Linear>,
    /// `(C,)`: added to the sum over all ranks.
    pub(super) bias: Option<Array>,
}

/// A rank's weights of one layer; whole shapes in [`Part`].
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: Array,
    /// Query, key and value; none for a rank without heads.
    pub(super) qkv: Option<[Linear; 3]>,
    pub(super) attention_output: Summed,
    pub(super) query_norm: Option<Array>,
    pub(super) key_norm: Option<Array>,
    pub(super) post_attention_norm: Option<Array>,
    pub(super) ffn_norm: Array,
    /// Gate and up; none for a rank without feed-forward.
    pub(super) gate_up: Option<[Linear; 2]>,
    pub(super) down: Summed,
    pub(super) post_ffn_norm: Option<Array>,
}

impl Layer {
    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let linears = self
            .qkv
            .iter()
            .flatten()
            .chain(self.gate_up.iter().flatten());
        let summed = [&self.attention_output, &self.down];
        let sums = summed.into_iter().flat_map(|s| &s.mine);
        let norms = [
            &self.query_norm,
            &self.key_norm,
            &self.post_attention_norm,
            &self.post_ffn_norm,
        ];
        linears
            .chain(sums)
            .flat_map(Linear::arrays)
            .chain(norms.into_iter().flatten())
            .chain(summed.into_iter().flat_map(|s| &s.bias))
            .chain([&self.attention_norm, &self.ffn_norm])
    }
}

/// All of a rank's weights.
#[derive(Debug)]
pub(super) struct Weights {
    /// In the first stage.
    pub(super) embedding: Option<Linear>,
    pub(super) layers: Vec<Layer>,
    /// Norm and this rank's rows of the output head, in the last stage.
    pub(super) head: Option<(Array, Linear)>,
    /// Positions per radian, for each of [`Config::ropes`].
    pub(super) periods: Vec<Array>,
}

impl Weights {
    /// Every array once, but the head's where it is the embedding.
    fn bytes(&self, tied: bool) -> Bytes {
        let head = self
            .head
            .iter()
            .filter(|_| !tied || self.embedding.is_none());
        let arrays = self.layers.iter().flat_map(Layer::arrays);
        let tables = self.embedding.iter().chain(head.map(|(_, head)| head));
        let all = arrays.chain(tables.flat_map(Linear::arrays));
        Bytes(all.map(Array::n_bytes).sum())
    }
}

/// The type of activations: that of the weights, where they are floats; of the scales, where these
/// are; else of the norms of a folder. GGUF's blocks have halves, which are too narrow for the
/// activations of gemma.
pub(super) fn activations(
    names: &Names<'_>,
    family: Family,
    class: KernelClass,
) -> Result<Dtype, Error> {
    if class == KernelClass::MlxF32 {
        return Ok(Dtype::F32);
    }
    let c = names.config;
    let query = names.as_stored(Role::Layer(0, Part::Query), [c.heads * c.head_dim, c.width])?;
    let dtype = match floats(&query) {
        Some(dtype) => dtype,
        None => {
            let norm = names.source.weight(family, Role::OutputNorm)?;
            float(norm.block_type)
                .filter(|_| matches!(names.source, Source::Hf(_)))
                .unwrap_or(Dtype::F16)
        }
    };
    let narrow = dtype == Dtype::F16 && matches!(names.source, Source::Gguf(_));
    Ok(if narrow && family.needs_wide_activations() {
        Dtype::F32
    } else {
        dtype
    })
}

/// Loads weights of one model.
pub(super) struct Loader<'a> {
    pub(super) stream: &'a Stream,
    pub(super) names: Names<'a>,
    pub(super) config: &'a Config,
    pub(super) shard: &'a Shard,
    /// Of activations.
    pub(super) dtype: Dtype,
    /// Whether ranks have rows of every matrix, so that each of their products is whole.
    pub(super) by_outputs: bool,
    /// What others are converted from, until they are: MLX would write the results to their
    /// memory when nobody else has them, and that is the file's.
    pub(super) kept: RefCell<Vec<Array>>,
}

impl Loader<'_> {
    /// `array` in the type of activations.
    fn converted(&self, array: Array) -> Result<Array, Error> {
        let converted = self.stream.astype(&array, self.dtype)?;
        self.kept.borrow_mut().push(array);
        Ok(converted)
    }

    fn eval<'a>(&self, arrays: impl IntoIterator<Item = &'a Array>) -> Result<(), Error> {
        self.stream.eval(arrays)?;
        self.kept.borrow_mut().clear();
        Ok(())
    }

    /// Loads all of the shard; `progress(done, of)` is called after each layer.
    pub(super) fn load(
        &self,
        tied: bool,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<(Weights, Bytes), Error> {
        let (c, shard) = (self.config, self.shard);
        let n = shard.layers.len();
        let table = |role, mine| self.rows(role, [c.vocab, c.width], mine);
        let embedding = shard
            .embeds()
            .then(|| table(Role::TokenEmbedding, 0..c.vocab))
            .transpose()?;
        let mut layers = Vec::with_capacity(n);
        for i in shard.layers.clone() {
            let layer = self.layer(i)?;
            self.eval(layer.arrays())?;
            layers.push(layer);
            progress(layers.len(), n + 1);
        }
        let head = || {
            let output = match &embedding {
                Some(table) if tied && shard.vocab() == (0..c.vocab) => table.clone(),
                _ if tied => table(Role::TokenEmbedding, shard.vocab())?,
                _ => table(Role::Output, shard.vocab())?,
            };
            Ok::<_, Error>((self.norm(Role::OutputNorm, c.width)?, output))
        };
        let head = shard.has_head().then(head).transpose()?;
        let weights = Weights {
            periods: self.periods()?,
            embedding,
            layers,
            head,
        };
        let tables = weights
            .embedding
            .iter()
            .chain(weights.head.iter().map(|(_, head)| head));
        self.eval(tables.flat_map(Linear::arrays))?;
        progress(n + 1, n + 1);
        let bytes = weights.bytes(tied && shard.vocab() == (0..c.vocab));
        Ok((weights, bytes))
    }

    fn periods(&self) -> Result<Vec<Array>, Error> {
        let of = |rope: &crate::Rope| {
            let periods: Vec<f32> = rope.frequencies.iter().map(|f| (1.0 / f) as f32).collect();
            Ok(self.stream.array_f32(&periods, &[periods.len() as i32])?)
        };
        self.config.ropes.iter().map(of).collect()
    }

    fn layer(&self, i: usize) -> Result<Layer, Error> {
        let (c, shard) = (self.config, self.shard);
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let role = |part| Role::Layer(i, part);
        let rows = |part, all, mine| self.rows(role(part), [all, c.width], mine);
        let of_heads = |heads: &Range<usize>| heads.start * c.head_dim..heads.end * c.head_dim;
        let qkv = || {
            Ok::<_, Error>([
                rows(Part::Query, q, of_heads(&shard.usual.heads))?,
                rows(Part::Key, kv, of_heads(&shard.usual.kv_heads))?,
                rows(Part::Value, kv, of_heads(&shard.usual.kv_heads))?,
            ])
        };
        let gate_up = || {
            let gate = rows(Part::Gate, c.ffn, shard.ffn())?;
            Ok::<_, Error>([gate, rows(Part::Up, c.ffn, shard.ffn())?])
        };
        let norm = |part, n| self.norm(role(part), n);
        let opt = |there: bool, part, n| there.then(|| norm(part, n)).transpose();
        let (sandwich, heads) = (c.family.norms_after_halves(), c.family.norms_heads());
        Ok(Layer {
            attention_norm: norm(Part::AttentionNorm, c.width)?,
            qkv: (!shard.usual.heads.is_empty()).then(qkv).transpose()?,
            attention_output: self.summed(
                role(Part::AttentionOutput),
                q,
                &shard.usual.attention,
            )?,
            query_norm: opt(heads, Part::QueryNorm, c.head_dim)?,
            key_norm: opt(heads, Part::KeyNorm, c.head_dim)?,
            post_attention_norm: opt(sandwich, Part::PostAttentionNorm, c.width)?,
            ffn_norm: norm(Part::FfnNorm, c.width)?,
            gate_up: (!shard.ffn().is_empty()).then(gate_up).transpose()?,
            down: self.summed(role(Part::Down), c.ffn, &shard.usual.feed_forward)?,
            post_ffn_norm: opt(sandwich, Part::PostFfnNorm, c.width)?,
        })
    }

    /// The rows `mine` of a matrix.
    fn rows(&self, role: Role, shape: [usize; 2], mine: Range<usize>) -> Result<Linear, Error> {
        let bias = match self.names.bias(role, shape[0])? {
            Some(bias) => Some(self.floats(&bias[mine.clone()])?),
            None => None,
        };
        let matrix = self.matrix(role, shape, mine, 0..shape[1])?;
        Ok(Linear { matrix, bias })
    }

    /// This rank's columns of a matrix, or its rows.
    fn summed(&self, role: Role, cols: usize, cut: &LeafCut) -> Result<Summed, Error> {
        let width = self.config.width;
        let (rows, columns) = if self.by_outputs {
            (self.shard.outputs[self.shard.index].clone(), 0..cols)
        } else {
            (0..width, cut.columns())
        };
        let bias = self.names.bias(role, width)?;
        let bias = bias.map(|bias| self.floats(&bias)).transpose()?;
        let mine = || {
            let matrix = self.matrix(role, [width, cols], rows.clone(), columns.clone())?;
            Ok::<_, Error>(Linear { matrix, bias: None })
        };
        let empty = rows.is_empty() || columns.is_empty();
        let mine = (!empty).then(mine).transpose()?;
        Ok(Summed { mine, bias })
    }

    fn matrix(
        &self,
        role: Role,
        shape: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Matrix, Error> {
        let (stored, rows) = Stored::new(&self.names.as_stored(role, shape)?, rows);
        let stream = self.stream;
        match &stored {
            Stored::Floats(plane) => {
                let whole = plane.array(stream, rows, cols)?;
                let whole = self.converted(whole)?;
                Ok(Matrix::Float(stream.transpose(&whole, &[1, 0])?))
            }
            Stored::Groups {
                packed,
                scales,
                biases,
                group,
                bits,
                mode,
            } => {
                let in_groups = |n: usize| match n.is_multiple_of(*group) {
                    true => Ok(n / group),
                    false => Err(Error::CutGroup {
                        role,
                        column: n,
                        group: *group,
                    }),
                };
                let groups = in_groups(cols.start)?..in_groups(cols.end)?;
                let words = cols.start * bits / 32..cols.end * bits / 32;
                let factors = |plane: &super::stored::Plane| {
                    let array = plane.array(stream, rows.clone(), groups.clone())?;
                    // Powers of two in bytes stay as they are.
                    if array.dtype() == Dtype::U8 {
                        return Ok(array);
                    }
                    self.converted(array)
                };
                Ok(Matrix::Quantised(Quantised {
                    packed: packed.array(stream, rows.clone(), words)?,
                    scales: factors(scales)?,
                    biases: biases.as_ref().map(factors).transpose()?,
                    group: *group as i32,
                    bits: *bits as i32,
                    mode: *mode,
                }))
            }
        }
    }

    /// A vector in the type of activations.
    fn floats(&self, values: &[f32]) -> Result<Array, Error> {
        let array = self.stream.array_f32(values, &[values.len() as i32])?;
        Ok(self.stream.astype(&array, self.dtype)?)
    }

    fn norm(&self, role: Role, n: usize) -> Result<Array, Error> {
        self.floats(&self.names.norm(role, n)?)
    }
}

/// What a shard's weights will take, from the sizes in the file: told before anything is loaded.
pub(super) fn planned(
    names: &Names<'_>,
    shard: &Shard,
    tied: bool,
    dtype: Dtype,
) -> Result<Bytes, Error> {
    let c = names.config;
    let of = |role: Role, shape: [usize; 2], share: usize| {
        let matrix = names.located(role, shape)?;
        let values = shape[0] * shape[1] / shape[usize::from(share_of_cols(role))] * share;
        Ok::<_, Error>(Stored::bytes_of(&matrix, values as u64, dtype))
    };
    let (q, kv, d) = (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.head_dim);
    let (heads, kv_heads, ffn) = (
        shard.usual.heads.len() * d,
        shard.usual.kv_heads.len() * d,
        shard.ffn().len(),
    );
    let mut sum = 0;
    for i in shard.layers.clone() {
        for (part, shape, share) in [
            (Part::Query, [q, c.width], heads),
            (Part::Key, [kv, c.width], kv_heads),
            (Part::Value, [kv, c.width], kv_heads),
            (Part::AttentionOutput, [c.width, q], heads),
            (Part::Gate, [c.ffn, c.width], ffn),
            (Part::Up, [c.ffn, c.width], ffn),
            (Part::Down, [c.width, c.ffn], ffn),
        ] {
            sum += of(Role::Layer(i, part), shape, share)?;
        }
    }
    let table = [c.vocab, c.width];
    if shard.embeds() {
        sum += of(Role::TokenEmbedding, table, c.vocab)?;
    }
    let shared = tied && shard.embeds() && shard.vocab().len() == c.vocab;
    if shard.has_head() && !shared {
        let role = if tied {
            Role::TokenEmbedding
        } else {
            Role::Output
        };
        sum += of(role, table, shard.vocab().len())?;
    }
    Ok(Bytes(sum))
}

/// Whether a rank holds columns of a matrix, not rows.
const fn share_of_cols(role: Role) -> bool {
    matches!(role, Role::Layer(_, Part::AttentionOutput | Part::Down))
}
