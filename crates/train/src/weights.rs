//! A stage's weights for training: fixed as f32, fixed in their stored form, or trained.
//!
//! [`StageWeights`] says for each tensor which it is. Trained values themselves are in one vector
//! of the run ([`Layout`](crate::params::Layout)), cut into *parts*: the embedding, each layer, the
//! last norm and the head. A tensor here has its range within its part, because a rank of a sharded
//! run never has more than a part or two.

mod loader;

use std::ops::Range;

use paceline_model::adapter::files::{TARGETS, file_row};
use paceline_model::{LayerCache, LayerShape};
use paceline_tensor::{Kernels, storage};
use paceline_weights::tensor::Tensor;

use crate::params::Layout;
use crate::pool;
pub(crate) use loader::{WeightLoader, numbers};

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

/// The target that is all matrices of routed and shared experts. There are many, so they are
/// adapted on request alone.
pub(crate) const EXPERTS: &str = "experts";

/// Names of the matrices that a text means: `all`, `attention`, `all,experts`, or other names with
/// commas between.
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
        names => {
            let each = names.split(',').map(|name| match name.trim() {
                group @ ("all" | "attention") => targets(group),
                name => Vec::from([name.to_owned()]),
            });
            each.flatten().collect()
        }
    }
}

/// Outputs and inputs of the matrices of a layer, in the order of [`TARGETS`]. In place of queries,
/// keys and values they are those of [`LatentWeights`] or [`DeltaWeights`].
pub(crate) fn sizes(width: usize, shape: &LayerShape) -> [[usize; 2]; 7] {
    let (up, down) = ([shape.ffn, width], [width, shape.ffn]);
    if let Some(of) = shape.latent {
        let expanded = shape.heads * (of.plain + of.value_dim);
        return [
            [shape.heads * of.query_dim(), of.query_rank.unwrap_or(width)],
            [of.key_dim(), width],
            [expanded, of.rank],
            [width, shape.heads * of.value_dim],
            up,
            up,
            down,
        ];
    }
    if let LayerCache::Delta(_) = shape.cache {
        let values = shape.heads * shape.value_dim;
        return [
            [delta_channels(shape), width],
            [values, width],
            [shape.heads, width],
            [width, values],
            up,
            up,
            down,
        ];
    }
    let q = shape.heads * shape.head_dim * if shape.gated { 2 } else { 1 };
    let kv = shape.kv_heads * shape.head_dim;
    [
        [q, width],
        [kv, width],
        [kv, width],
        [width, shape.heads * shape.head_dim],
        up,
        up,
        down,
    ]
}

/// Channels of a delta net's convolution: queries, keys and values.
pub(crate) const fn delta_channels(shape: &LayerShape) -> usize {
    2 * shape.kv_heads * shape.head_dim + shape.heads * shape.value_dim
}

/// Numbers of a layer's matrices: all of them, and those that a token meets.
pub(crate) fn layer_numbers(width: usize, shape: &LayerShape) -> (u64, u64) {
    let of = |sizes: &[[usize; 2]]| {
        let each = sizes.iter().map(|[rows, cols]| (rows * cols) as u64);
        each.sum::<u64>()
    };
    let sizes = sizes(width, shape);
    let query_rank = shape.latent.and_then(|latent| latent.query_rank);
    let decays = match shape.cache {
        LayerCache::Delta(_) => shape.heads * width,
        _ => 0,
    };
    let compression = (query_rank.unwrap_or(0) * width + decays) as u64;
    let Some(experts) = shape.experts else {
        let all = of(&sizes) + compression;
        return (all, all);
    };
    let router = ((experts.count + usize::from(experts.shared_gate)) * width) as u64;
    let shared = of(&sizes[..ATTENTION]) + compression + router;
    let shared = shared + (3 * experts.shared * width) as u64;
    let expert = (3 * experts.width * width) as u64;
    let with = |experts: usize| shared + experts as u64 * expert;
    (with(experts.count), with(experts.used))
}

/// The first of [`TARGETS`], which are of attention.
pub(crate) const ATTENTION: usize = 4;

/// Whether a matrix of [`TARGETS`] may have an adapter: serving has none on other paths.
pub(crate) const fn takes_adapter(shape: &LayerShape, nth: usize) -> bool {
    let is_net = matches!(shape.cache, LayerCache::Delta(_));
    let is_plain = shape.latent.is_none() && !shape.gated;
    nth >= ATTENTION || !is_net && (is_plain || nth + 1 == ATTENTION)
}

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
    /// (H,): scores of heads without a value (gpt-oss).
    pub(crate) sinks: Option<VectorParameter>,
    pub(crate) post_attention_norm: Option<VectorParameter>,
    pub(crate) ffn_norm: VectorParameter,
    pub(crate) post_ffn_norm: Option<VectorParameter>,
    /// In the order of [`TARGETS`]; of a layer with experts those of attention alone.
    pub(crate) matrices: Vec<Matrix>,
    pub(crate) latent: Option<LatentWeights>,
    pub(crate) delta: Option<DeltaWeights>,
    pub(crate) experts: Option<ExpertWeights>,
}

/// Routed experts in place of a feed-forward.
#[derive(Debug)]
pub(crate) struct ExpertWeights {
    /// (experts, C)
    pub(crate) router: Matrix,
    /// (experts,): added to scores for the choice alone, without a gradient.
    pub(crate) choice: Option<VectorParameter>,
    /// Gate, up and down of each expert, and behind them those of the shared one.
    pub(crate) experts: Vec<[Matrix; 3]>,
    /// (1, C): the shared expert's weight before its sigmoid; 1 without.
    pub(crate) shared_gate: Option<Matrix>,
}

/// A gated delta net besides the matrices of its layer. These are the projection to queries, keys
/// and values, that to gates, that to steps, and the output.
#[derive(Debug)]
pub(crate) struct DeltaWeights {
    /// (H, C)
    pub(crate) decay: Matrix,
    /// (channels, taps)
    pub(crate) conv: VectorParameter,
    /// (H,): added to the input of decays.
    pub(crate) bias: VectorParameter,
    /// (H,): logarithm of the decays' factor.
    pub(crate) scale: VectorParameter,
    /// (E,)
    pub(crate) norm: VectorParameter,
}

/// Latent attention besides the matrices of its layer. These are the expansion of queries, the
/// projection to latent elements, their expansion to keys and values of all heads, and the output.
#[derive(Debug)]
pub(crate) struct LatentWeights {
    /// Compression of queries, and its norm.
    pub(crate) query_down: Option<(Matrix, VectorParameter)>,
    /// Of latent elements.
    pub(crate) norm: VectorParameter,
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

/// The values that a slot begins with.
#[derive(Debug)]
pub(crate) enum FirstTensor {
    /// A tensor as it is stored, with the size of heads whose rows are turned from neighbours to
    /// halves.
    Stored(Tensor, Option<usize>),
    /// Matrices of all experts, one behind the other.
    Stack(Vec<Tensor>),
    /// Numbers that lie apart in their file.
    Plain(Vec<f32>),
}

impl FirstTensor {
    /// All of its values, in our order of rows.
    fn values(&self) -> Vec<f32> {
        match self {
            Self::Stored(tensor, heads) => values_of(tensor, *heads),
            Self::Stack(all) => all.iter().flat_map(|one| values_of(one, None)).collect(),
            Self::Plain(values) => values.clone(),
        }
    }
}

/// A tensor's values, in our order of rows.
fn values_of(tensor: &Tensor, heads: Option<usize>) -> Vec<f32> {
    let rows = tensor.shape.first().copied().unwrap_or(0);
    let n: usize = tensor.shape.iter().product();
    let mut stored = vec![0.0; n];
    storage::dequantise(tensor.block_type, &tensor.bytes, &mut stored);
    tensor.bytes.discard();
    if heads.is_none() {
        return stored;
    }
    let cols = n / rows.max(1);
    let row = |i| &stored[file_row(i, heads) * cols..][..cols];
    (0..rows).flat_map(row).copied().collect()
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
