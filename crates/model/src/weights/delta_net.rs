//! Loads the weights of a gated delta net: the rows of this rank's heads, from either file layout.

use std::ops::Range;

use paceline_tensor::{PackOptions, PackedMatrix, StateRule, StoredMatrix, storage};
use paceline_weights::tensor::MappedBytes;

use super::{Linear, ShardLoader, StoredTensor, WeightReader, pack_error, vector};
use crate::config::{self, HeadOrder};
use crate::{Error, LayerCache, LayerRole, LayerShape, Role};

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
    /// `(taps, channels)`, channels of queries, keys and values.
    pub(crate) conv: Vec<f32>,
    /// `(channels,)`, in Mamba 2; otherwise empty.
    pub(crate) conv_bias: Vec<f32>,
    /// `(H,)`: factors of values in results of Mamba 2; otherwise empty.
    pub(crate) skip: Vec<f32>,
    /// `(D, C)`: inputs of gates and of decays, whose matrices have D columns (Kimi); `None` where
    /// these have C.
    pub(crate) downs: [Option<PackedMatrix>; 2],
    /// As in the configuration.
    pub(crate) least_decay: Option<f32>,
    /// `(H,)`; `(H D,)` where each element of a key has a decay.
    pub(crate) bias: Vec<f32>,
    /// `(H,)`, below 0.
    pub(crate) scale: Vec<f32>,
    /// `(E,)`; `(H E,)` in Mamba 2.
    pub(crate) norm: Vec<f32>,
    /// `(H,)`: key head of each value head, among this rank's.
    pub(crate) key_heads: Vec<usize>,
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

/// A matrix, its total rows, and the rows to load.
pub type MatrixRows = (LayerRole, usize, RowRanges);

/// Row ranges of a rank's heads in the file's matrices. Letters as in [`LayerShape`].
#[derive(Clone, Copy, Debug)]
pub struct DeltaRowLayout<'a> {
    pub shape: &'a LayerShape,
    pub heads: &'a Range<usize>,
    pub key_heads: &'a Range<usize>,
}

impl DeltaRowLayout<'_> {
    /// Q, K, V and gate matrices in the file's layout: one matrix by key head if `has` reports it,
    /// else two.
    pub fn inputs(&self, has: impl Fn(LayerRole) -> bool) -> [MatrixRows; 4] {
        let (keys, values) = (self.all_keys(), self.all_values());
        if has(LayerRole::DeltaQkvGate) {
            let all = 2 * (keys + values);
            return self
                .by_key_head()
                .map(|rows| (LayerRole::DeltaQkvGate, all, rows));
        }
        let [q, k, v] = self.in_qkv();
        let of = |rows| (LayerRole::DeltaQkv, 2 * keys + values, rows);
        let e = self.shape.value_dim;
        let own = self.heads.start * e..self.heads.end * e;
        let gate = (LayerRole::DeltaGate, values, vec![own]);
        [of(q), of(k), of(v), gate]
    }

    /// Q, K, V, gate and step rows of Mamba 2 in its one matrix of gates, values, keys, queries and
    /// steps.
    fn mamba(&self) -> [MatrixRows; 5] {
        let Self {
            shape,
            heads,
            key_heads,
        } = self;
        let (d, e) = (shape.head_dim, shape.value_dim);
        let (keys, values) = (self.all_keys(), self.all_values());
        let all = 2 * (keys + values) + shape.heads;
        let of = |from: usize, own: &Range<usize>, dim: usize| {
            let rows = from + own.start * dim..from + own.end * dim;
            (LayerRole::MambaInput, all, vec![rows])
        };
        [
            of(2 * values + keys, key_heads, d),
            of(2 * values, key_heads, d),
            of(values, heads, e),
            of(0, heads, e),
            of(2 * (values + keys), heads, 1),
        ]
    }

    /// This rank's channels of Mamba's convolution, in our order: its files have values first.
    fn mamba_channels(&self) -> Vec<usize> {
        let before = self.all_values();
        let of = |(_, _, rows): MatrixRows| rows.into_iter().flatten();
        let [q, k, v, ..] = self.mamba();
        let all = [q, k, v].into_iter().flat_map(of);
        all.map(|row| row - before).collect()
    }

    /// Step and decay matrices; one matrix if `joined`.
    pub fn gates(&self, joined: bool) -> [MatrixRows; 2] {
        let heads = self.shape.heads;
        if joined {
            return self
                .gates_by_key_head()
                .map(|rows| (LayerRole::DeltaStepDecay, 2 * heads, rows));
        }
        [LayerRole::DeltaStep, LayerRole::DeltaDecay]
            .map(|part| (part, heads, vec![self.heads.clone()]))
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
    /// Loads Q, K and V of a gated delta net, and its additional weights.
    pub(super) fn delta_net(
        &self,
        layer: usize,
        net: config::DeltaNet,
    ) -> Result<([Linear; 3], DeltaNet), Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        let places = DeltaRowLayout {
            shape,
            heads: &cut.heads,
            key_heads: &cut.kv_heads,
        };
        match net.rule {
            StateRule::Sum => return self.mamba(layer, places, net),
            StateRule::Channels => return self.kimi_net(layer, places, net),
            StateRule::Difference => {}
        }
        let role = |part| Role::Layer(layer, part);
        let has = |part| self.names.source.has_any(self.config.family, role(part));
        let of = |(part, all, rows): &MatrixRows| self.gathered(role(*part), *all, rows, false);
        let [q, k, v, gate] = &places.inputs(has);
        let [q, k, v, gate] = [of(q)?, of(k)?, of(v)?, of(gate)?];
        let [step, decay] = self.delta_gates(layer, places)?;
        let linear = |matrix| Linear { matrix, bias: None };
        let [bias, scale] = [LayerRole::DeltaBias, LayerRole::DeltaScale]
            .map(|part| self.names.finite(role(part), shape.heads));
        let of_heads = |all: Vec<f32>| all[cut.heads.clone()].to_vec();
        let net = DeltaNet {
            gate,
            step,
            decay: Some(decay),
            rule: net.rule,
            conv: self
                .names
                .conv(role(LayerRole::DeltaConv), places, net.taps)?,
            conv_bias: Vec::new(),
            skip: Vec::new(),
            downs: [None, None],
            least_decay: net.least_decay,
            bias: of_heads(bias?),
            scale: of_heads(self.names.decay_factors(scale?)),
            norm: self.names.delta_norm(layer)?,
            key_heads: places.key_heads(net.order),
        };
        Ok(([q, k, v].map(linear), net))
    }

    /// As [`delta_net`](Self::delta_net), for Mamba 2: values, keys and queries are what its papers
    /// call x, B and C.
    fn mamba(
        &self,
        layer: usize,
        places: DeltaRowLayout<'_>,
        net: config::DeltaNet,
    ) -> Result<([Linear; 3], DeltaNet), Error> {
        let (shape, heads) = (places.shape, places.heads);
        let role = |part| Role::Layer(layer, part);
        let of =
            |(part, all, rows): &MatrixRows, as_f32| self.gathered(role(*part), *all, rows, as_f32);
        let [q, k, v, gate, step] = &places.mamba();
        let linear = |matrix| Linear { matrix, bias: None };
        let qkv = [of(q, false)?, of(k, false)?, of(v, false)?].map(linear);
        let channels = places.mamba_channels();
        let all = 2 * places.all_keys() + places.all_values();
        let conv = role(LayerRole::DeltaConv);
        let bias = self.names.source.bias(self.config.family, conv)?;
        let bias = vector(&bias, all)?;
        let of_heads = |part| {
            let all = self.names.finite_flat(role(part), [shape.heads, 1])?;
            Ok::<_, Error>(all[heads.clone()].to_vec())
        };
        let e = shape.value_dim;
        let groups = [shape.kv_heads, places.all_values() / shape.kv_heads];
        let norm = self.names.finite_flat(role(LayerRole::DeltaNorm), groups)?;
        let net = DeltaNet {
            gate: of(gate, false)?,
            step: of(step, true)?,
            decay: None,
            rule: net.rule,
            conv: self.names.taps_of(conv, [all, net.taps], &channels)?,
            conv_bias: channels.iter().map(|channel| bias[*channel]).collect(),
            skip: of_heads(LayerRole::MambaSkip)?,
            downs: [None, None],
            least_decay: net.least_decay,
            bias: of_heads(LayerRole::DeltaBias)?,
            scale: self.names.decay_factors(of_heads(LayerRole::DeltaScale)?),
            norm: norm[heads.start * e..heads.end * e].to_vec(),
            key_heads: places.key_heads(net.order),
        };
        Ok((qkv, net))
    }

    /// As [`delta_net`](Self::delta_net), for Kimi delta attention.
    fn kimi_net(
        &self,
        layer: usize,
        places: DeltaRowLayout<'_>,
        net: config::DeltaNet,
    ) -> Result<([Linear; 3], DeltaNet), Error> {
        let (d, e, c) = (
            places.shape.head_dim,
            places.shape.value_dim,
            self.config.width,
        );
        let (heads, role) = (places.heads, |part| Role::Layer(layer, part));
        let own = |dim: usize| heads.start * dim..heads.end * dim;
        // Inputs of a state are in f32 for every class, as in other delta nets.
        let matrix = |part, [all, cols]: [usize; 2], rows, as_f32| {
            self.packed(
                role(part),
                [all, cols],
                (rows, 0..cols),
                |stored, mut options| {
                    options.as_f32 |= as_f32;
                    self.matrix(stored, 0..stored.cols, options)
                },
            )
        };
        let (keys, values) = (places.all_keys(), places.all_values());
        let linear = |part, all, dim| {
            let matrix = matrix(part, [all, c], own(dim), false)?;
            Ok::<_, Error>(Linear { matrix, bias: None })
        };
        let qkv = [
            linear(LayerRole::Query, keys, d)?,
            linear(LayerRole::Key, keys, d)?,
            linear(LayerRole::Value, values, e)?,
        ];
        let gate_down = || matrix(LayerRole::DeltaGateDown, [d, c], 0..d, false);
        let downs = [
            net.low_rank_gates.then(gate_down).transpose()?,
            Some(matrix(LayerRole::DeltaDecayDown, [d, c], 0..d, true)?),
        ];
        let (gate, gate_cols) = match net.low_rank_gates {
            true => (LayerRole::DeltaGate, d),
            false => (LayerRole::AttentionGate, c),
        };
        let flat = |part, n| self.names.finite_flat(role(part), [1, n]);
        let scale = flat(LayerRole::DeltaScale, places.shape.heads)?;
        let net = DeltaNet {
            gate: matrix(gate, [values, gate_cols], own(e), false)?,
            step: matrix(LayerRole::DeltaStep, [places.shape.heads, c], own(1), true)?,
            decay: Some(matrix(LayerRole::DeltaDecay, [keys, d], own(d), true)?),
            rule: net.rule,
            conv: self.kimi_taps(layer, places, net.taps)?,
            conv_bias: Vec::new(),
            skip: Vec::new(),
            downs,
            least_decay: net.least_decay,
            bias: flat(LayerRole::DeltaBias, keys)?[own(d)].to_vec(),
            scale: self.names.decay_factors(scale)[heads.clone()].to_vec(),
            norm: self.names.delta_norm(layer)?,
            key_heads: places.key_heads(net.order),
        };
        Ok((qkv, net))
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
            self.names
                .taps_of(Role::Layer(layer, part), [all, taps], &own)
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

    /// Taps of a layer's short convolution, `(taps, channels of this rank)`; `None` without one.
    pub(super) fn conv_taps(&self, layer: usize) -> Result<Option<Vec<f32>>, Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        let LayerCache::Conv(taps) = shape.cache else {
            return Ok(None);
        };
        let own = cut.heads.start * shape.head_dim..cut.heads.end * shape.head_dim;
        let own: Vec<usize> = own.collect();
        let role = Role::Layer(layer, LayerRole::ConvTaps);
        let sizes = [shape.heads * shape.head_dim, taps];
        self.names.taps_of(role, sizes, &own).map(Some)
    }

    /// Steps and decays, in f32 for every class: their errors accumulate over the life of a state.
    fn delta_gates(
        &self,
        layer: usize,
        places: DeltaRowLayout<'_>,
    ) -> Result<[PackedMatrix; 2], Error> {
        let of = |(part, all, rows): &MatrixRows| {
            self.gathered(Role::Layer(layer, *part), *all, rows, true)
        };
        let [step, decay] = &places.gates(self.names.joins_delta_gates(layer));
        Ok([of(step)?, of(decay)?])
    }

    /// Packs `rows` of a matrix with `all` rows; copies them if they are not contiguous.
    fn gathered(
        &self,
        role: Role,
        all: usize,
        rows: &[Range<usize>],
        as_f32: bool,
    ) -> Result<PackedMatrix, Error> {
        let shape = [all, self.config.width];
        let pack = |stored: StoredMatrix<'_>, mut options: PackOptions| {
            options.as_f32 |= as_f32;
            self.matrix(stored, 0..stored.cols, options)
        };
        if let [rows] = rows {
            let part = (rows.clone(), 0..shape[1]);
            return self.packed(role, shape, part, pack);
        }
        let (name, block_type, bytes) = match self.names.located(role, shape)? {
            StoredTensor::Whole(tensor) => {
                let row = tensor.bytes.len() / all;
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
    /// Whether a layer's steps and decays are one matrix. If the file has neither form, the error
    /// names the one in the family's newer files.
    pub fn joins_delta_gates(&self, layer: usize) -> bool {
        let family = self.config.family;
        let has = |part| self.source.has_any(family, Role::Layer(layer, part));
        has(LayerRole::DeltaStepDecay) || family.joins_delta_gates() && !has(LayerRole::DeltaStep)
    }

    /// As [`finite`](Self::finite), for vectors that files have in several dimensions.
    fn finite_flat(&self, role: Role, [rows, cols]: [usize; 2]) -> Result<Vec<f32>, Error> {
        let n = rows * cols;
        let mut tensor = self.source.weight(self.config.family, role)?;
        if tensor.shape == [rows, cols] || tensor.shape == [1, rows, cols, 1] {
            tensor.shape = vec![n];
        }
        super::finite_vector(&tensor, n)
    }

    /// The norm of each head's result, `(E,)`.
    pub fn delta_norm(&self, layer: usize) -> Result<Vec<f32>, Error> {
        let role = Role::Layer(layer, LayerRole::DeltaNorm);
        let tensor = self.source.weight(self.config.family, role)?;
        vector(&tensor, self.config.layers[layer].value_dim)
    }

    /// Factors of decays; folders store their logarithms.
    pub fn decay_factors(&self, stored: Vec<f32>) -> Vec<f32> {
        match self.source {
            crate::ModelSource::Gguf(_) => stored,
            crate::ModelSource::Hf(_) => {
                let factor = |log: f32| -libm::exp(f64::from(log)) as f32;
                stored.into_iter().map(factor).collect()
            }
        }
    }

    /// Convolution taps of a rank's channels, `(taps, channels)`.
    pub fn conv(
        &self,
        role: Role,
        places: DeltaRowLayout<'_>,
        taps: usize,
    ) -> Result<Vec<f32>, Error> {
        let channels = 2 * places.all_keys() + places.all_values();
        let own: Vec<usize> = places.in_qkv().into_iter().flatten().flatten().collect();
        self.taps_of(role, [channels, taps], &own)
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
