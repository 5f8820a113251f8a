//! A stage's weights for training: fixed as f32, fixed in their stored form, or trained.
//!
//! [`StageWeights`] says for each tensor which it is. Trained values themselves are in one vector
//! of the run ([`Layout`](crate::params::Layout)), cut into *parts*: the embedding, each layer, the
//! last norm and the head. A tensor here has its range within its part, because a rank of a sharded
//! run never has more than a part or two.

use std::ops::Range;

use paceline_model::adapter::files::{TARGETS, file_row};
use paceline_model::{Config, Experts, LayerRole, LayerShape, ModelFamily, ModelSource, Nth, Role};
use paceline_tensor::{Kernels, RopePairs, storage};
use paceline_weights::tensor::Tensor;

use crate::error::Error;
use crate::params::{Layout, Lora};
use crate::pool;
use crate::stage::ModelStage;

/// Floats of a tile of a matrix in its stored form: 4 MiB.
const TILE_FLOATS: usize = 1 << 20;

/// Rows of a tile of other matrices. A gradient's columns that meet them, 256 tokens by 2048, are 2
/// MiB, which the second or third cache holds. With all 49,152 rows of a table at once the product
/// took four times as long.
const TILE_ROWS: usize = 2048;

/// The CPU's kernels never read weights that a device has.
const ELSEWHERE: &str = "values that are on a device";

/// The function that is called for each tile.
type TileSink<'a> = &'a mut dyn FnMut(Range<usize>, &[f32]);

/// Training method: the trained part, and the storage of the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Adapters, with base matrices as f32.
    Lora,
    /// Adapters, with base matrices in their stored (quantised) form.
    Qlora,
    /// Every weight.
    Full,
}

/// Names of the matrices that a text means: `all`, `attention`, or names with commas between.
pub fn targets(text: &str) -> Vec<String> {
    let of_block = |wanted: &'static [&'static str]| {
        let all = TARGETS
            .iter()
            .filter(|(_, block, _)| wanted.contains(block));
        all.map(|(_, _, name)| (*name).to_owned()).collect()
    };
    match text {
        "all" => of_block(&["self_attn", "mlp"]),
        "attention" => of_block(&["self_attn"]),
        names => names
            .split(',')
            .map(|name| name.trim().to_owned())
            .collect(),
    }
}

/// Outputs and inputs of the matrices of a layer, in the order of [`TARGETS`].
pub(crate) fn sizes(width: usize, shape: &LayerShape) -> [[usize; 2]; 7] {
    let q = shape.heads * shape.head_dim;
    let kv = shape.kv_heads * shape.head_dim;
    let (up, down) = ([shape.ffn, width], [width, shape.ffn]);
    [
        [q, width],
        [kv, width],
        [kv, width],
        [width, q],
        up,
        up,
        down,
    ]
}

/// Numbers of a layer's matrices: all of them, and those that a token meets.
pub(crate) fn layer_numbers(width: usize, shape: &LayerShape) -> (u64, u64) {
    let of = |sizes: &[[usize; 2]]| {
        let each = sizes.iter().map(|[rows, cols]| (rows * cols) as u64);
        each.sum::<u64>()
    };
    let sizes = sizes(width, shape);
    let Some(experts) = shape.experts else {
        return (of(&sizes), of(&sizes));
    };
    let shared = of(&sizes[..ATTENTION]) + (experts.count * width) as u64;
    let expert = (3 * experts.width * width) as u64;
    let with = |experts: usize| shared + experts as u64 * expert;
    (with(experts.count), with(experts.used))
}

/// The first of [`TARGETS`], which are of attention.
pub(crate) const ATTENTION: usize = 4;

/// Numbers of a norm or a bias.
#[derive(Debug)]
pub(crate) enum VectorParameter {
    Fixed(Vec<f32>),
    Trained(Range<usize>),
}

impl VectorParameter {
    pub(crate) fn get<'a>(&'a self, params: &'a [f32]) -> &'a [f32] {
        match self {
            Self::Fixed(values) => values,
            Self::Trained(range) => &params[range.clone()],
        }
    }

    pub(crate) fn grads<'a>(&self, grads: &'a mut [f32]) -> Option<&'a mut [f32]> {
        match self {
            Self::Fixed(_) => None,
            Self::Trained(range) => Some(&mut grads[range.clone()]),
        }
    }
}

/// Storage of a matrix.
#[derive(Debug)]
pub(crate) enum MatrixStorage {
    Fixed(Vec<f32>),
    /// Rows are unpacked when they are used; with a size of heads, rows of a head are turned from
    /// neighbours to halves.
    Stored(Tensor, Option<usize>),
    /// On the engine's device alone; heads as of `Stored`.
    Elsewhere(Option<usize>),
    Trained(Range<usize>),
}

/// The two factors of an adapter: `(rank, cols)` and `(rows, rank)`.
#[derive(Clone, Debug)]
pub(crate) struct AdapterFactors {
    /// Index of its matrix in the whole model.
    pub(crate) number: u64,
    pub(crate) a: Range<usize>,
    pub(crate) b: Range<usize>,
}

/// A matrix `(rows, cols)`: outputs, inputs.
#[derive(Debug)]
pub(crate) struct Matrix {
    pub(crate) kept: MatrixStorage,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) bias: Option<VectorParameter>,
    pub(crate) pair: Option<AdapterFactors>,
}

impl Matrix {
    /// Calls `with` for tiles of whole rows in order: the first row and the tile's values.
    pub(crate) fn tiles(
        &self,
        params: &[f32],
        kernels: &Kernels,
        mut with: impl FnMut(Range<usize>, &[f32]),
    ) {
        let plain = |values: &[f32], with: TileSink<'_>| {
            for (i, tile) in values.chunks(TILE_ROWS * self.cols).enumerate() {
                let first = i * TILE_ROWS;
                with(first..first + tile.len() / self.cols, tile);
            }
        };
        let (tensor, heads) = match &self.kept {
            MatrixStorage::Fixed(values) => return plain(values, &mut with),
            MatrixStorage::Trained(range) => return plain(&params[range.clone()], &mut with),
            MatrixStorage::Stored(tensor, heads) => (tensor, *heads),
            MatrixStorage::Elsewhere(_) => unreachable!("{ELSEWHERE}"),
        };
        let tile = (TILE_FLOATS / self.cols).clamp(1, self.rows);
        let mut values = vec![0.0; tile * self.cols];
        for first in (0..self.rows).step_by(tile) {
            let rows = first..(first + tile).min(self.rows);
            let out = &mut values[..rows.len() * self.cols];
            pool::chunks(kernels.pool(), out, self.cols, |i, out| {
                unpack(tensor, file_row(first + i, heads), out);
            });
            with(rows, out);
        }
    }

    /// A row of a table.
    pub(crate) fn row(&self, params: &[f32], row: usize, out: &mut [f32]) {
        let at = row * self.cols..(row + 1) * self.cols;
        match &self.kept {
            MatrixStorage::Fixed(values) => out.copy_from_slice(&values[at]),
            MatrixStorage::Trained(range) => out.copy_from_slice(&params[range.clone()][at]),
            MatrixStorage::Stored(tensor, heads) => unpack(tensor, file_row(row, *heads), out),
            MatrixStorage::Elsewhere(_) => unreachable!("{ELSEWHERE}"),
        }
    }
}

fn unpack(tensor: &Tensor, row: usize, out: &mut [f32]) {
    let bytes = tensor.bytes.len() / tensor.rows().max(1);
    let stored = &tensor.bytes[row * bytes..(row + 1) * bytes];
    storage::dequantise(tensor.block_type, stored, out);
}

/// The weights of a layer.
#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) attention_norm: VectorParameter,
    pub(crate) query_norm: Option<VectorParameter>,
    pub(crate) key_norm: Option<VectorParameter>,
    pub(crate) post_attention_norm: Option<VectorParameter>,
    pub(crate) ffn_norm: VectorParameter,
    pub(crate) post_ffn_norm: Option<VectorParameter>,
    /// In the order of [`TARGETS`]; of a layer with experts those of attention alone.
    pub(crate) matrices: Vec<Matrix>,
    pub(crate) experts: Option<ExpertWeights>,
}

/// Routed experts in place of a feed-forward.
#[derive(Debug)]
pub(crate) struct ExpertWeights {
    /// (experts, C)
    pub(crate) router: Matrix,
    /// Gate, up and down of each expert.
    pub(crate) experts: Vec<[Matrix; 3]>,
}

/// The weights of a stage, and where what is trained lies.
#[derive(Debug)]
pub(crate) struct StageWeights {
    /// None but in the first stage.
    pub(crate) embedding: Option<Matrix>,
    /// The number of the first of `layers`.
    pub(crate) first_layer: usize,
    pub(crate) layers: Vec<LayerWeights>,
    /// None but in the last stage.
    pub(crate) output_norm: Option<VectorParameter>,
    /// None where it is the embedding, and but in the last stage. The last one of several stages
    /// has a table of its own also where the model has one table.
    pub(crate) output: Option<Matrix>,
    pub(crate) layout: Layout,
    pub(crate) parts: Parts,
    /// Tensors that a whole model's training begins with, by slot; empty for adapters.
    first: Vec<FirstTensor>,
}

/// The parts of what is trained: the embedding, then each layer, then the last norm and the head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Ranges in the vector of trained values. A head that is the table of tokens has that range.
    pub(crate) values: Vec<Range<usize>>,
    /// Ranges in a vector of gradients, where the head has a range of its own. A table that is both
    /// ends of a model has two sums over leaves, which [`fold`](Self::fold) adds.
    pub(crate) gradients: Vec<Range<usize>>,
}

impl Parts {
    /// Parts that end at `ends`. With `is_tied` the head's part is that of the embedding.
    pub(crate) fn new(ends: &[usize], is_tied: bool) -> Self {
        let mut values: Vec<_> = ends.windows(2).map(|two| two[0]..two[1]).collect();
        let mut gradients = values.clone();
        if let (true, Some(head), Some(table)) = (is_tied, gradients.last_mut(), values.first()) {
            head.end = head.start + table.len();
            let table = table.clone();
            values
                .last_mut()
                .into_iter()
                .for_each(|head| *head = table.clone());
        }
        Self { values, gradients }
    }

    /// The number of parts.
    pub(crate) fn count(&self) -> usize {
        self.values.len()
    }

    /// The part of the norm before the head.
    pub(crate) fn norm(&self) -> usize {
        self.count() - 2
    }

    /// The part of the head.
    pub(crate) fn head(&self) -> usize {
        self.count() - 1
    }

    /// Length of a vector of gradients.
    pub(crate) fn gradient_len(&self) -> usize {
        self.gradients.last().map_or(0, |head| head.end)
    }

    /// Whether a trained head is the table of tokens.
    pub(crate) fn is_shared(&self) -> bool {
        let head = self.head();
        !self.values[head].is_empty() && self.values[head] != self.gradients[head]
    }

    /// Turns a vector of gradients into one of as many numbers as there are trained values.
    pub(crate) fn fold(&self, grads: &mut Vec<f32>) {
        if !self.is_shared() {
            return;
        }
        let head = self.gradients[self.head()].start;
        let (others, of_head) = grads.split_at_mut(head);
        let table = others[self.values[0].clone()].iter_mut();
        table.zip(of_head).for_each(|(g, head)| *g += *head);
        grads.truncate(head);
    }
}

/// A tensor as it is stored.
#[derive(Debug)]
pub(crate) struct FirstTensor {
    tensor: Tensor,
    /// Size of heads whose rows are turned from neighbours to halves.
    heads: Option<usize>,
}

impl FirstTensor {
    /// All of its values, in our order of rows.
    fn values(&self) -> Vec<f32> {
        let rows = self.tensor.shape.first().copied().unwrap_or(0);
        let n: usize = self.tensor.shape.iter().product();
        let mut stored = vec![0.0; n];
        storage::dequantise(self.tensor.block_type, &self.tensor.bytes, &mut stored);
        self.tensor.bytes.discard();
        if self.heads.is_none() {
            return stored;
        }
        let cols = n / rows.max(1);
        let row = |i| &stored[file_row(i, self.heads) * cols..][..cols];
        (0..rows).flat_map(row).copied().collect()
    }
}

impl StageWeights {
    /// The layer with this number in the whole model.
    pub(crate) fn layer(&self, number: usize) -> &LayerWeights {
        &self.layers[number - self.first_layer]
    }

    /// Numbers of the layers.
    pub(crate) fn numbers(&self) -> Range<usize> {
        self.first_layer..self.first_layer + self.layers.len()
    }

    /// The table that tokens begin with.
    pub(crate) fn table(&self) -> &Matrix {
        let table = self.embedding.as_ref();
        table.expect("the first stage has the table of tokens")
    }

    /// The values of `ranges` of the trained vector, one behind the other, before the first step of
    /// a whole model's training.
    pub(crate) fn first_values(&self, ranges: &[Range<usize>]) -> Vec<f32> {
        let mut found = Vec::with_capacity(ranges.iter().map(Range::len).sum());
        for range in ranges {
            for (slot, first) in self.layout.slots().iter().zip(&self.first) {
                let start = range.start.max(slot.range.start);
                let end = range.end.min(slot.range.end);
                if start < end {
                    let within = start - slot.range.start..end - slot.range.start;
                    found.extend_from_slice(&first.values()[within]);
                }
            }
        }
        found
    }

    /// The output head's matrix and the norm before it.
    pub(crate) fn head(&self) -> (&VectorParameter, &Matrix) {
        let norm = self.output_norm.as_ref();
        let norm = norm.expect("the last stage has the last norm");
        (norm, self.output.as_ref().unwrap_or_else(|| self.table()))
    }
}

/// Reads weights.
pub(crate) struct WeightLoader<'a> {
    pub(crate) source: &'a ModelSource,
    pub(crate) config: &'a Config,
    pub(crate) kernels: &'a Kernels,
    pub(crate) method: Method,
    pub(crate) lora: Lora,
    /// Names out of [`TARGETS`].
    pub(crate) targets: &'a [String],
    /// The first layer with adapters.
    pub(crate) adapted_from: usize,
    pub(crate) stage: ModelStage,
    /// Whether fixed matrices are read by the engine's device, and not here.
    pub(crate) elsewhere: bool,
    pub(crate) layout: Layout,
    /// Where the part that is read begins in the layout.
    pub(crate) part: usize,
    pub(crate) first: Vec<FirstTensor>,
}

impl WeightLoader<'_> {
    pub(crate) fn load(mut self) -> Result<StageWeights, Error> {
        let c = self.config;
        let (stage, table) = (self.stage, [c.vocab, c.width]);
        let (numbers, tied) = (stage.layers(c)?, self.is_tied()?);
        let mut ends = vec![0];
        let mut embedding = None;
        if stage.is_first() {
            let role = Role::TokenEmbedding;
            embedding = Some(self.matrix(role, table, "model.embed_tokens", None)?);
        }
        self.end_part(&mut ends);
        let mut layers = Vec::with_capacity(numbers.len());
        for i in numbers.clone() {
            layers.push(self.layer(i)?);
            self.end_part(&mut ends);
        }
        let mut output_norm = None;
        if stage.is_last() {
            output_norm = Some(self.vector(Role::OutputNorm, c.width, "model.norm.weight")?);
        }
        self.end_part(&mut ends);
        let shares_table = tied && stage.is_first();
        let mut output = None;
        if stage.is_last() && !shares_table {
            let (role, name) = match tied {
                true => (Role::TokenEmbedding, "model.embed_tokens"),
                false => (Role::Output, "lm_head"),
            };
            output = Some(self.matrix(role, table, name, None)?);
        }
        self.end_part(&mut ends);
        Ok(StageWeights {
            embedding,
            first_layer: numbers.start,
            layers,
            output_norm,
            output,
            layout: self.layout,
            parts: Parts::new(&ends, shares_table && stage.is_last()),
            first: self.first,
        })
    }

    /// What is read from here on is of the next part.
    fn end_part(&mut self, ends: &mut Vec<usize>) {
        self.part = self.layout.len();
        ends.push(self.part);
    }

    fn layer(&mut self, i: usize) -> Result<LayerWeights, Error> {
        let (c, shape) = (self.config, self.config.layers[i]);
        let sizes = sizes(c.width, &shape);
        let norm_name = |name: &str| format!("model.layers.{i}.{name}.weight");
        let sandwich = c.family.norms_after_halves();
        let before_ffn = match sandwich {
            true => "pre_feedforward_layernorm",
            false => "post_attention_layernorm",
        };
        let role = |part| Role::Layer(i, part);
        let head_norms = c.family.norms_heads();
        let norm = role(LayerRole::AttentionNorm);
        let attention_norm = self.vector(norm, c.width, &norm_name("input_layernorm"))?;
        let mut matrices = Vec::with_capacity(TARGETS.len());
        let count = if shape.experts.is_some() {
            ATTENTION
        } else {
            TARGETS.len()
        };
        for ((part, block, name), size) in TARGETS.into_iter().zip(sizes).take(count) {
            let heads = self.turned(i, part).then_some(shape.head_dim);
            let name = format!("model.layers.{i}.{block}.{name}");
            matrices.push(self.matrix(role(part), size, &name, heads)?);
        }
        let experts = shape.experts.map(|of| self.experts(i, of)).transpose()?;
        let mut opt = |there: bool, part, n, name: &str| {
            there
                .then(|| self.vector(role(part), n, &norm_name(name)))
                .transpose()
        };
        let dim = shape.head_dim;
        Ok(LayerWeights {
            query_norm: opt(head_norms, LayerRole::QueryNorm, dim, "self_attn.q_norm")?,
            key_norm: opt(head_norms, LayerRole::KeyNorm, dim, "self_attn.k_norm")?,
            post_attention_norm: opt(
                sandwich,
                LayerRole::PostAttentionNorm,
                c.width,
                "post_attention_layernorm",
            )?,
            post_ffn_norm: opt(
                sandwich,
                LayerRole::PostFfnNorm,
                c.width,
                "post_feedforward_layernorm",
            )?,
            ffn_norm: self.vector(role(LayerRole::FfnNorm), c.width, &norm_name(before_ffn))?,
            attention_norm,
            matrices,
            experts,
        })
    }

    /// The experts of a layer, under the names of their family's files.
    fn experts(&mut self, i: usize, of: Experts) -> Result<ExpertWeights, Error> {
        let (block, names) = match self.config.family {
            ModelFamily::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        let (c, stem) = (self.config.width, format!("model.layers.{i}.{block}"));
        let role = Role::Layer(i, LayerRole::Router);
        let router = self.matrix(role, [of.count, c], &format!("{stem}.gate"), None)?;
        let mut experts = Vec::with_capacity(of.count);
        for index in 0..of.count {
            let nth = Nth {
                index,
                of: of.count,
            };
            let mut own = |part, size, name: &str| {
                let name = format!("{stem}.experts.{index}.{name}");
                self.matrix(Role::Layer(i, part), size, &name, None)
            };
            let [gate, up, down] = names;
            experts.push([
                own(LayerRole::ExpertGate(nth), [of.width, c], gate)?,
                own(LayerRole::ExpertUp(nth), [of.width, c], up)?,
                own(LayerRole::ExpertDown(nth), [c, of.width], down)?,
            ]);
        }
        Ok(ExpertWeights { router, experts })
    }

    /// Whether a file's rows lie by neighbours and ours by halves.
    fn turned(&self, layer: usize, part: LayerRole) -> bool {
        let pairs = self.config.ropes[self.config.layers[layer].rope].pairs;
        pairs == RopePairs::Adjacent && matches!(part, LayerRole::Query | LayerRole::Key)
    }

    fn matrix(
        &mut self,
        role: Role,
        [rows, cols]: [usize; 2],
        name: &str,
        heads: Option<usize>,
    ) -> Result<Matrix, Error> {
        // Tokens' rows are read here by every engine.
        let is_read = role == Role::TokenEmbedding || self.method == Method::Full;
        let kept = if self.elsewhere && !is_read {
            MatrixStorage::Elsewhere(heads)
        } else {
            let tensor = self.source.weight(self.config.family, role)?;
            check(&tensor, &[rows, cols])?;
            MatrixStorage::Stored(tensor, heads)
        };
        let mut matrix = Matrix {
            kept,
            rows,
            cols,
            bias: self.bias(role, rows, name, heads)?,
            pair: None,
        };
        match self.method {
            Method::Qlora => {}
            Method::Lora if self.elsewhere => {}
            // Few rows of a table that is no head are used, and those by their number.
            Method::Lora if role == Role::TokenEmbedding && !self.is_head()? => {}
            Method::Lora => matrix.kept = MatrixStorage::Fixed(self.unpacked(&matrix)),
            Method::Full => {
                let range = self.slot(format!("{name}.weight"), vec![rows, cols]);
                let stored = std::mem::replace(&mut matrix.kept, MatrixStorage::Trained(range));
                if let MatrixStorage::Stored(tensor, heads) = stored {
                    self.first.push(FirstTensor { tensor, heads });
                }
            }
        }
        if let Some(number) = self.adapted(role) {
            let of = |part| format!("base_model.model.{name}.{part}.weight");
            let a = self.slot(of("lora_A"), vec![self.lora.rank, cols]);
            let b = self.slot(of("lora_B"), vec![rows, self.lora.rank]);
            matrix.pair = Some(AdapterFactors { number, a, b });
        }
        Ok(matrix)
    }

    /// The number of a matrix that has an adapter.
    fn adapted(&self, role: Role) -> Option<u64> {
        let Role::Layer(layer, part) = role else {
            return None;
        };
        let nth = TARGETS.iter().position(|(of, _, _)| *of == part)?;
        let is_target = self.targets.iter().any(|name| name == TARGETS[nth].2);
        let is_adapted = self.method != Method::Full && is_target && layer >= self.adapted_from;
        is_adapted.then_some((layer * TARGETS.len() + nth) as u64)
    }

    /// Whether the token embedding is the output head here.
    fn is_head(&self) -> Result<bool, Error> {
        Ok(self.stage.is_last() && self.is_tied()?)
    }

    fn is_tied(&self) -> Result<bool, Error> {
        Ok(match self.config.tied {
            Some(tied) => tied,
            None => self
                .source
                .opt_weight(self.config.family, Role::Output)?
                .is_none(),
        })
    }

    fn unpacked(&self, matrix: &Matrix) -> Vec<f32> {
        let mut values = Vec::with_capacity(matrix.rows * matrix.cols);
        matrix.tiles(&[], self.kernels, |_, tile| values.extend_from_slice(tile));
        if let MatrixStorage::Stored(tensor, _) = &matrix.kept {
            tensor.bytes.discard();
        }
        values
    }

    fn bias(
        &mut self,
        role: Role,
        n: usize,
        name: &str,
        heads: Option<usize>,
    ) -> Result<Option<VectorParameter>, Error> {
        let family = self.config.family;
        let needed = family.has_qkv_biases()
            && matches!(
                role,
                Role::Layer(_, LayerRole::Query | LayerRole::Key | LayerRole::Value)
            );
        let bias = match needed {
            true => Some(self.source.bias(family, role)?),
            false => self.source.opt_bias(family, role)?,
        };
        let Some(tensor) = bias else { return Ok(None) };
        let name = format!("{name}.bias");
        self.of_tensor(FirstTensor { tensor, heads }, n, name)
            .map(Some)
    }

    fn vector(&mut self, role: Role, n: usize, name: &str) -> Result<VectorParameter, Error> {
        let tensor = self.source.weight(self.config.family, role)?;
        let heads = None;
        self.of_tensor(FirstTensor { tensor, heads }, n, name.to_owned())
    }

    /// A norm or a bias of `n` numbers, trained or not.
    fn of_tensor(
        &mut self,
        stored: FirstTensor,
        n: usize,
        name: String,
    ) -> Result<VectorParameter, Error> {
        check(&stored.tensor, &[n])?;
        if self.method != Method::Full {
            return Ok(VectorParameter::Fixed(stored.values()));
        }
        let range = self.slot(name, vec![n]);
        self.first.push(stored);
        Ok(VectorParameter::Trained(range))
    }

    /// A trained tensor's range in its part.
    fn slot(&mut self, name: String, shape: Vec<usize>) -> Range<usize> {
        let range = self.layout.add(name, shape);
        range.start - self.part..range.end - self.part
    }
}

pub(crate) fn numbers(tensor: &Tensor, n: usize) -> Result<Vec<f32>, Error> {
    check(tensor, &[n])?;
    let mut values = vec![0.0; n];
    storage::dequantise(tensor.block_type, &tensor.bytes, &mut values);
    Ok(values)
}

fn check(tensor: &Tensor, expected: &[usize]) -> Result<(), Error> {
    if tensor.shape == expected {
        return Ok(());
    }
    Err(Error::Model(paceline_model::Error::Shape {
        name: tensor.name.clone(),
        got: tensor.shape.clone(),
        expected: expected.to_vec(),
    }))
}
