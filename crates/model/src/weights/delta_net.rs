//! Loads the weights of a gated delta net: the rows of this rank's heads, from either file layout.

use std::ops::Range;

use paceline_tensor::{PackOptions, PackedMatrix, StateRule, StoredMatrix, storage};
use paceline_weights::tensor::MappedBytes;

use super::{Linear, ShardLoader, StoredTensor, WeightReader, pack_error, vector};
use crate::config::{self, HeadOrder};
use crate::{Error, LayerCache, LayerCut, LayerRole, LayerShape, ModelFamily, Role};

/// Weights of a gated delta net besides queries, keys, values and output. H are this rank's value
/// heads.
#[derive(Debug)]
pub(crate) struct DeltaNet {
    /// `(H E, C)`
    pub(crate) gate: PackedMatrix,
    /// `(H, C)`, in f32, as decays.
    pub(crate) step: PackedMatrix,
    /// `(H, C)`; `None` in Mamba 2, whose decays follow from the steps.
    pub(crate) decay: Option<PackedMatrix>,
    pub(crate) rule: StateRule,
    /// As in the configuration.
    pub(crate) sigmoid_gates: bool,
    /// `(D, C)`: inputs of gates and of decays, whose matrices have D columns (Kimi); `None` where
    /// these have C.
    pub(crate) downs: [Option<PackedMatrix>; 2],
    /// As in the configuration.
    pub(crate) least_decay: Option<f32>,
    pub(crate) vectors: DeltaVectors,
    /// `(H,)`: key head of each value head, among this rank's.
    pub(crate) key_heads: Vec<usize>,
}

/// Vectors of a gated delta net, of this rank's H value heads and channels.
#[derive(Debug)]
pub struct DeltaVectors {
    /// `(taps, channels)`, channels of queries, keys and values.
    pub conv: Vec<f32>,
    /// `(channels,)`, in Mamba 2; otherwise empty.
    pub conv_bias: Vec<f32>,
    /// `(H,)`: factors of values in results of Mamba 2; otherwise empty.
    pub skip: Vec<f32>,
    /// `(H,)`; `(H D,)` where each element of a key has a decay.
    pub bias: Vec<f32>,
    /// `(H,)`, below 0.
    pub scale: Vec<f32>,
    /// `(E,)`; `(H E,)` in Mamba 2.
    pub norm: Vec<f32>,
}

/// Matrices of a gated delta net, with the rows of this rank's heads.
#[derive(Clone, Debug)]
pub struct DeltaMatrices {
    /// Queries, keys and values.
    pub inputs: [MatrixRows; 3],
    pub gate: MatrixRows,
    pub step: MatrixRows,
    /// `None` in Mamba 2, whose decays follow from the steps.
    pub decay: Option<MatrixRows>,
    /// Products that are the inputs of gates and of decays, whole on every rank; `None` where these
    /// are normed rows.
    pub downs: [Option<MatrixRows>; 2],
}

impl DeltaMatrices {
    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &MatrixRows> {
        let plain = self.inputs.iter().chain([&self.gate, &self.step]);
        plain.chain(&self.decay).chain(self.downs.iter().flatten())
    }
}

impl DeltaNet {
    /// Matrices whose input is a normed row: of gates, steps and decays, or of what gates and
    /// decays are made from.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let [gate, decay] = &self.downs;
        let gate = gate.as_ref().unwrap_or(&self.gate);
        let decay = decay.as_ref().or(self.decay.as_ref());
        [gate, &self.step].into_iter().chain(decay)
    }

    /// Gates and decays, where their input is a product.
    pub(crate) fn of_downs(&self) -> [Option<&PackedMatrix>; 2] {
        let [gate, decay] = &self.downs;
        let decay = decay.as_ref().and(self.decay.as_ref());
        [gate.as_ref().map(|_| &self.gate), decay]
    }
}

/// Consecutive row ranges.
pub(crate) type RowRanges = Vec<Range<usize>>;

/// A matrix, its whole shape, and the rows to load.
pub type MatrixRows = (LayerRole, [usize; 2], RowRanges);

/// Row ranges of a rank's heads in the file's matrices. Letters as in [`LayerShape`].
#[derive(Clone, Copy, Debug)]
pub struct DeltaRowLayout<'a> {
    /// Of the model.
    width: usize,
    shape: &'a LayerShape,
    heads: &'a Range<usize>,
    key_heads: &'a Range<usize>,
}

impl<'a> DeltaRowLayout<'a> {
    /// The layout of a layer in a model of `width`, of the heads in `cut`.
    pub const fn new(width: usize, shape: &'a LayerShape, cut: &'a LayerCut) -> Self {
        Self {
            width,
            shape,
            heads: &cut.heads,
            key_heads: &cut.kv_heads,
        }
    }

    /// Q, K, V and gate matrices in the file's layout: one matrix by key head if `has` reports it,
    /// else two.
    fn inputs(&self, has: impl Fn(LayerRole) -> bool) -> [MatrixRows; 4] {
        let (keys, values) = (self.all_keys(), self.all_values());
        if has(LayerRole::DeltaQkvGate) {
            let all = [2 * (keys + values), self.width];
            return self
                .by_key_head()
                .map(|rows| (LayerRole::DeltaQkvGate, all, rows));
        }
        let [q, k, v] = self.in_qkv();
        let of = |rows| (LayerRole::DeltaQkv, [2 * keys + values, self.width], rows);
        let e = self.shape.value_dim;
        let own = self.heads.start * e..self.heads.end * e;
        let gate = (LayerRole::DeltaGate, [values, self.width], vec![own]);
        [of(q), of(k), of(v), gate]
    }

    /// The matrices of Mamba 2: rows of one matrix of gates, values, keys, queries and steps.
    fn mamba(&self) -> DeltaMatrices {
        let Self {
            shape,
            heads,
            key_heads,
            width,
        } = self;
        let (d, e) = (shape.head_dim, shape.value_dim);
        let (keys, values) = (self.all_keys(), self.all_values());
        let all = [2 * (keys + values) + shape.heads, *width];
        let of = |from: usize, own: &Range<usize>, dim: usize| {
            let rows = from + own.start * dim..from + own.end * dim;
            (LayerRole::MambaInput, all, vec![rows])
        };
        DeltaMatrices {
            inputs: [
                of(2 * values + keys, key_heads, d),
                of(2 * values, key_heads, d),
                of(values, heads, e),
            ],
            gate: of(0, heads, e),
            step: of(2 * (values + keys), heads, 1),
            decay: None,
            downs: [None, None],
        }
    }

    /// The matrices of Kimi delta attention; gates are a product of two if `low_rank_gates`.
    fn kimi(&self, low_rank_gates: bool) -> DeltaMatrices {
        let (d, e, c) = (self.shape.head_dim, self.shape.value_dim, self.width);
        let (keys, values) = (self.all_keys(), self.all_values());
        let of = |part, shape, dim: usize| {
            let own = self.heads.start * dim..self.heads.end * dim;
            (part, shape, vec![own])
        };
        let down = |part| (part, [d, c], std::iter::once(0..d).collect());
        DeltaMatrices {
            inputs: [
                of(LayerRole::Query, [keys, c], d),
                of(LayerRole::Key, [keys, c], d),
                of(LayerRole::Value, [values, c], e),
            ],
            gate: match low_rank_gates {
                true => of(LayerRole::DeltaGate, [values, d], e),
                false => of(LayerRole::AttentionGate, [values, c], e),
            },
            step: of(LayerRole::DeltaStep, [self.shape.heads, c], 1),
            decay: Some(of(LayerRole::DeltaDecay, [keys, d], d)),
            downs: [
                low_rank_gates.then(|| down(LayerRole::DeltaGateDown)),
                Some(down(LayerRole::DeltaDecayDown)),
            ],
        }
    }

    /// This rank's channels of Mamba's convolution, in our order: its files have values first.
    fn mamba_channels(&self) -> Vec<usize> {
        let before = self.all_values();
        let of = |(_, _, rows): MatrixRows| rows.into_iter().flatten();
        let all = self.mamba().inputs.into_iter().flat_map(of);
        all.map(|row| row - before).collect()
    }

    /// Step and decay matrices; one matrix if `joined`.
    fn gates(&self, joined: bool) -> [MatrixRows; 2] {
        let (heads, width) = (self.shape.heads, self.width);
        if joined {
            return self
                .gates_by_key_head()
                .map(|rows| (LayerRole::DeltaStepDecay, [2 * heads, width], rows));
        }
        [LayerRole::DeltaStep, LayerRole::DeltaDecay]
            .map(|part| (part, [heads, width], vec![self.heads.clone()]))
    }

    fn all_keys(&self) -> usize {
        self.shape.kv_heads * self.shape.head_dim
    }

    fn all_values(&self) -> usize {
        self.shape.heads * self.shape.value_dim
    }

    /// Q, K and V rows in a matrix with all of each in sequence.
    fn in_qkv(&self) -> [RowRanges; 3] {
        let (d, e) = (self.shape.head_dim, self.shape.value_dim);
        let keys = |from: usize| {
            let Range { start, end } = self.key_heads.clone();
            let mine = from + start * d..from + end * d;
            vec![mine]
        };
        let from = 2 * self.all_keys();
        let values = from + self.heads.start * e..from + self.heads.end * e;
        [keys(0), keys(self.all_keys()), vec![values]]
    }

    /// Q, K, V and gate rows in a matrix ordered by key head.
    fn by_key_head(&self) -> [RowRanges; 4] {
        let (d, e) = (self.shape.head_dim, self.shape.value_dim);
        let group = self.shape.heads / self.shape.kv_heads;
        let each = 2 * d + 2 * group * e;
        let keys = |from: usize| {
            let of = |head: usize| head * each + from..head * each + from + d;
            self.key_heads.clone().map(of).collect()
        };
        let values = |from: usize| {
            let of = |head: usize| {
                let start = head / group * each + from + head % group * e;
                start..start + e
            };
            self.heads.clone().map(of).collect()
        };
        [keys(0), keys(d), values(2 * d), values(2 * d + group * e)]
    }

    /// Step and decay rows in a matrix ordered by key head.
    fn gates_by_key_head(&self) -> [RowRanges; 2] {
        let group = self.shape.heads / self.shape.kv_heads;
        [0, group].map(|from| {
            let of = |head: usize| {
                let row = head / group * 2 * group + from + head % group;
                row..row + 1
            };
            self.heads.clone().map(of).collect()
        })
    }

    /// Key head of each of this rank's value heads.
    pub fn key_heads(&self, order: HeadOrder) -> Vec<usize> {
        let group = self.shape.heads / self.shape.kv_heads;
        let of = |head: usize| match order {
            HeadOrder::Grouped => head / group,
            HeadOrder::Interleaved => head % self.shape.kv_heads,
        };
        let heads = self.heads.clone();
        heads.map(|head| of(head) - self.key_heads.start).collect()
    }
}

impl ShardLoader<'_> {
    /// Loads Q, K and V of a gated delta net, and its additional weights. Steps and decays are in
    /// f32 for every class: their errors accumulate over the life of a state.
    pub(super) fn delta_net(
        &self,
        layer: usize,
        net: config::DeltaNet,
    ) -> Result<([Linear; 3], DeltaNet), Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        let places = DeltaRowLayout::new(self.config.width, shape, cut);
        let all = self.names.delta_matrices(layer, places, net);
        let of = |own: &MatrixRows, as_f32| self.gathered(layer, own, as_f32);
        let opt = |own: &Option<_>, as_f32| own.as_ref().map(|own| of(own, as_f32)).transpose();
        let linear = |own| {
            let matrix = of(own, false)?;
            Ok::<_, Error>(Linear { matrix, bias: None })
        };
        let [q, k, v] = &all.inputs;
        let qkv = [linear(q)?, linear(k)?, linear(v)?];
        let net = DeltaNet {
            gate: of(&all.gate, false)?,
            step: of(&all.step, true)?,
            decay: opt(&all.decay, true)?,
            rule: net.rule,
            sigmoid_gates: net.sigmoid_gates,
            downs: [opt(&all.downs[0], false)?, opt(&all.downs[1], true)?],
            least_decay: net.least_decay,
            vectors: self.names.delta_vectors(layer, places, net)?,
            key_heads: places.key_heads(net.order),
        };
        Ok((qkv, net))
    }

    /// Packs the rows of a matrix; copies them if they are not contiguous.
    fn gathered(
        &self,
        layer: usize,
        (part, shape, rows): &MatrixRows,
        as_f32: bool,
    ) -> Result<PackedMatrix, Error> {
        let (role, shape) = (Role::Layer(layer, *part), *shape);
        let pack = |stored: StoredMatrix<'_>, mut options: PackOptions| {
            options.as_f32 |= as_f32;
            self.matrix(stored, 0..stored.cols, options)
        };
        if let [rows] = &rows[..] {
            let part = (rows.clone(), 0..shape[1]);
            return self.packed(role, shape, part, pack);
        }
        let (name, block_type, bytes) = match self.names.located(role, shape)? {
            StoredTensor::Whole(tensor) => {
                let row = tensor.bytes.len() / shape[0];
                let of = |rows: &Range<usize>| {
                    let own = tensor.bytes.slice(rows.start * row..rows.end * row);
                    let own = own.expect("the rows are of the matrix");
                    Ok::<_, Error>(own.arrived()?)
                };
                let bytes = gather(rows, of)?;
                tensor.bytes.discard();
                (tensor.name, tensor.block_type, bytes)
            }
            StoredTensor::Mlx(matrix) => {
                let of = |rows: &Range<usize>| self.joined(&matrix, rows.clone(), &(0..shape[1]));
                let bytes = gather(rows, of)?;
                (matrix.name.clone(), matrix.block_type, bytes)
            }
        };
        let stored = StoredMatrix {
            block_type,
            rows: rows.iter().map(Range::len).sum(),
            cols: shape[1],
            bytes: &bytes,
        };
        let options = PackOptions {
            leaf_cols: 0,
            as_f32: self.class == paceline_base::KernelClass::CpuF32,
        };
        pack(stored, options).map_err(|source| pack_error(&name, source))
    }
}

impl WeightReader<'_> {
    /// The matrices of a layer that is a gated delta net.
    pub fn delta_matrices(
        &self,
        layer: usize,
        places: DeltaRowLayout<'_>,
        net: config::DeltaNet,
    ) -> DeltaMatrices {
        match net.rule {
            StateRule::Sum => places.mamba(),
            StateRule::Channels => places.kimi(net.low_rank_gates),
            StateRule::Difference => {
                let has = |part| {
                    self.source
                        .has_any(self.config.family, Role::Layer(layer, part))
                };
                let [q, k, v, gate] = places.inputs(has);
                let [step, decay] = places.gates(self.joins_delta_gates(layer));
                DeltaMatrices {
                    inputs: [q, k, v],
                    gate,
                    step,
                    decay: Some(decay),
                    downs: [None, None],
                }
            }
        }
    }

    /// The vectors of a layer that is a gated delta net.
    pub fn delta_vectors(
        &self,
        layer: usize,
        places: DeltaRowLayout<'_>,
        net: config::DeltaNet,
    ) -> Result<DeltaVectors, Error> {
        let (shape, heads) = (places.shape, places.heads);
        let role = |part| Role::Layer(layer, part);
        let part = |part, n: usize, own: Range<usize>| {
            let all = match net.rule {
                StateRule::Difference => self.finite(role(part), n)?,
                _ => self.finite_flat(role(part), [n, 1])?,
            };
            Ok::<_, Error>(all[own].to_vec())
        };
        let of_heads = |role| part(role, shape.heads, heads.clone());
        let is_mamba = net.rule == StateRule::Sum;
        let (d, e) = (shape.head_dim, shape.value_dim);
        let conv = role(LayerRole::DeltaConv);
        let all = 2 * places.all_keys() + places.all_values();
        let channels: Vec<usize> = match is_mamba {
            true => places.mamba_channels(),
            false => places.in_qkv().into_iter().flatten().flatten().collect(),
        };
        let conv_bias = || {
            let bias = vector(&self.source.bias(self.config.family, conv)?, all)?;
            Ok::<_, Error>(channels.iter().map(|channel| bias[*channel]).collect())
        };
        let norm = || {
            let groups = [shape.kv_heads, places.all_values() / shape.kv_heads];
            let all = self.finite_flat(role(LayerRole::DeltaNorm), groups)?;
            Ok::<_, Error>(all[heads.start * e..heads.end * e].to_vec())
        };
        Ok(DeltaVectors {
            conv: match net.rule {
                StateRule::Channels => self.kimi_taps(layer, places, net.taps)?,
                _ => self.taps_of(conv, [all, net.taps], &channels)?,
            },
            conv_bias: is_mamba.then(conv_bias).transpose()?.unwrap_or_default(),
            skip: match is_mamba {
                true => of_heads(LayerRole::MambaSkip)?,
                false => Vec::new(),
            },
            bias: match net.rule {
                StateRule::Channels => {
                    let own = heads.start * d..heads.end * d;
                    part(LayerRole::DeltaBias, places.all_keys(), own)?
                }
                _ => of_heads(LayerRole::DeltaBias)?,
            },
            scale: self.decay_factors(of_heads(LayerRole::DeltaScale)?),
            norm: match is_mamba {
                true => norm()?,
                false => self.delta_norm(layer)?,
            },
        })
    }

    /// Whether a layer's steps and decays are one matrix. If the file has neither form, the error
    /// names the one in the family's newer files.
    fn joins_delta_gates(&self, layer: usize) -> bool {
        let family = self.config.family;
        let has = |part| self.source.has_any(family, Role::Layer(layer, part));
        has(LayerRole::DeltaStepDecay) || family.joins_delta_gates() && !has(LayerRole::DeltaStep)
    }

    /// As [`finite`](Self::finite), for `rows` by `cols` values that files have in one or several
    /// dimensions, some of size 1.
    fn finite_flat(&self, role: Role, [rows, cols]: [usize; 2]) -> Result<Vec<f32>, Error> {
        let n = rows * cols;
        let mut tensor = self.source.weight(self.config.family, role)?;
        let sizes = |shape: &[usize]| -> Vec<usize> {
            shape.iter().copied().filter(|size| *size != 1).collect()
        };
        let is_kimi = self.config.family == ModelFamily::KimiLinear;
        if tensor.shape == [rows, cols] || is_kimi && sizes(&tensor.shape) == sizes(&[rows, cols]) {
            tensor.shape = vec![n];
        }
        // Kimi K3 has 128 decays for 96 heads; mlx-lm reads the first.
        if let (Role::Layer(_, LayerRole::DeltaScale), &[more]) = (role, &tensor.shape[..])
            && let Some(first) = tensor.bytes.slice(0..n * tensor.block_type.bytes())
            && more > n
            && is_kimi
        {
            (tensor.bytes, tensor.shape) = (first, vec![n]);
        }
        super::finite_vector(&tensor, n)
    }

    /// The norm of each head's result, `(E,)`.
    fn delta_norm(&self, layer: usize) -> Result<Vec<f32>, Error> {
        let role = Role::Layer(layer, LayerRole::DeltaNorm);
        let tensor = self.source.weight(self.config.family, role)?;
        vector(&tensor, self.config.layers[layer].value_dim)
    }

    /// Taps of the three convolutions of Kimi delta attention, `(taps, channels)`.
    fn kimi_taps(
        &self,
        layer: usize,
        places: DeltaRowLayout<'_>,
        taps: usize,
    ) -> Result<Vec<f32>, Error> {
        let (d, e, heads) = (places.shape.head_dim, places.shape.value_dim, places.heads);
        let of = |(part, all, dim): (LayerRole, usize, usize)| {
            let own: Vec<usize> = (heads.start * dim..heads.end * dim).collect();
            self.taps_of(Role::Layer(layer, part), [all, taps], &own)
        };
        let parts = [
            (LayerRole::DeltaQueryConv, places.all_keys(), d),
            (LayerRole::DeltaKeyConv, places.all_keys(), d),
            (LayerRole::DeltaValueConv, places.all_values(), e),
        ];
        let parts = parts.map(of).into_iter().collect::<Result<Vec<_>, _>>()?;
        let of_tap = |tap: usize| {
            let of =
                |part: &Vec<f32>| part[part.len() / taps * tap..][..part.len() / taps].to_vec();
            parts.iter().flat_map(of).collect::<Vec<_>>()
        };
        Ok((0..taps).flat_map(of_tap).collect())
    }

    /// Factors of decays; folders store their logarithms.
    fn decay_factors(&self, stored: Vec<f32>) -> Vec<f32> {
        match self.source {
            crate::ModelSource::Gguf(_) => stored,
            crate::ModelSource::Hf(_) => {
                let factor = |log: f32| -libm::exp(f64::from(log)) as f32;
                stored.into_iter().map(factor).collect()
            }
        }
    }

    /// Taps of a layer's short convolution, `(taps, channels of this rank)`; `None` without one.
    pub fn short_conv_taps(&self, layer: usize, cut: &LayerCut) -> Result<Option<Vec<f32>>, Error> {
        let shape = &self.config.layers[layer];
        let LayerCache::Conv(taps) = shape.cache else {
            return Ok(None);
        };
        let own = cut.heads.start * shape.head_dim..cut.heads.end * shape.head_dim;
        let own: Vec<usize> = own.collect();
        let role = Role::Layer(layer, LayerRole::ConvTaps);
        let sizes = [shape.heads * shape.head_dim, taps];
        self.taps_of(role, sizes, &own).map(Some)
    }

    /// Taps of the channels `own` of `channels`, `(taps, own)`.
    pub(super) fn taps_of(
        &self,
        role: Role,
        [channels, taps]: [usize; 2],
        own: &[usize],
    ) -> Result<Vec<f32>, Error> {
        let mut tensor = self.source.weight(self.config.family, role)?;
        // The dimension 1 is in the middle in transformers' folders, last in MLX's.
        if tensor.shape == [channels, 1, taps] || tensor.shape == [channels, taps, 1] {
            tensor.shape = vec![channels, taps];
        }
        super::check_shape(&tensor, &[channels, taps])?;
        let bytes = tensor.bytes.arrived()?;
        let mut all = vec![0.0; channels * taps];
        storage::dequantise(tensor.block_type, &bytes, &mut all);
        let of_tap = |tap| own.iter().map(move |channel| channel * taps + tap);
        Ok((0..taps).flat_map(of_tap).map(|at| all[at]).collect())
    }
}

/// Bytes of consecutive row ranges.
fn gather(
    rows: &[Range<usize>],
    of: impl Fn(&Range<usize>) -> Result<MappedBytes, Error>,
) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    for rows in rows {
        bytes.extend_from_slice(&of(rows)?);
    }
    Ok(bytes)
}
