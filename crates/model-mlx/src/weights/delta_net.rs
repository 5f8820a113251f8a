//! The weights of recurrent layers: rows of this rank's heads, wherever they lie.

use paceline_mlx::Array;
use paceline_model::backend::{DeltaRowLayout, DeltaVectors, MatrixRows};
use paceline_model::{Error, LayerShape, Role};
use paceline_tensor::StateRule;

use super::super::matrix::{Linear, Matrix};
use super::Loader;

/// Weights of a gated delta net. Letters: H value heads of this rank, K key heads, D and E elements
/// of a key and of a value. A head has G decays, 1 or D. All but `inputs` and the gates are in f32
/// for every type of activations, since a state depends on them.
#[derive(Debug)]
pub(crate) struct DeltaNet {
    pub(crate) rule: StateRule,
    /// See [`paceline_model::DeltaNet`], as of `least_decay`.
    pub(crate) sigmoid_gates: bool,
    /// `(2 K D + H E, C)`: queries, keys and values.
    pub(crate) inputs: Matrix,
    /// `(H E, C)`, or `(H E, D)` of what `gate_down` gives.
    pub(crate) gate: Matrix,
    /// `(D, C)`
    pub(crate) gate_down: Option<Matrix>,
    /// `(C, H)`
    pub(crate) step: Array,
    /// `(C, H G)`, or `(D, H G)` of what `decay_down` gives; none in Mamba 2.
    pub(crate) decay: Option<Array>,
    /// `(C, D)`
    pub(crate) decay_down: Option<Array>,
    /// Of the convolution, `2 K D + H E` channels.
    pub(crate) taps: Taps,
    /// `(H G,)`
    pub(crate) bias: Array,
    /// `(H, 1)`, below 0.
    pub(crate) scale: Array,
    /// See [`paceline_model::DeltaNet`].
    pub(crate) least_decay: Option<f32>,
    /// `(H, 1, 1)`: factors of values in results, in Mamba 2.
    pub(crate) skip: Option<Array>,
    /// `(E,)`; `(H E,)` in Mamba 2.
    pub(crate) norm: Array,
    /// `(H E / K,)`: ones, for the norm of a group of heads in Mamba 2.
    pub(crate) group_ones: Option<Array>,
    /// `(D,)` each: factors for the norms of queries and keys. A key then has length 1 and a query
    /// that over the root of D. None in Mamba 2, which has them as they are.
    pub(crate) lengths: Option<[Array; 2]>,
    /// `(H,)`: the key head of each value head, among this rank's.
    pub(crate) key_heads: Array,
}

/// Weights of a short convolution.
#[derive(Debug)]
pub(crate) struct ShortConv {
    /// `(H D, C)` each: the factor of a result, and the factors of an input.
    pub(crate) inputs: [Linear; 3],
    /// `H D` channels.
    pub(crate) taps: Taps,
}

/// A convolution of each channel, in f32.
#[derive(Debug)]
pub(crate) struct Taps {
    /// `(1, channels)` for each input that it looks at, the newest last.
    pub(crate) taps: Vec<Array>,
    /// `(1, channels)`
    pub(crate) bias: Option<Array>,
}

impl DeltaNet {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let matrices = [
            Some(&self.inputs),
            Some(&self.gate),
            self.gate_down.as_ref(),
        ];
        let matrices = matrices.into_iter().flatten().flat_map(Matrix::arrays);
        let all = [&self.step, &self.bias, &self.scale, &self.norm];
        let some = [&self.decay, &self.decay_down, &self.skip, &self.group_ones];
        let vectors = all.into_iter().chain(some.into_iter().flatten());
        matrices
            .chain(vectors)
            .chain([&self.key_heads])
            .chain(self.taps.arrays())
            .chain(self.lengths.iter().flatten())
            .collect()
    }
}

impl ShortConv {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let inputs = self.inputs.iter().flat_map(Linear::arrays);
        inputs.chain(self.taps.arrays()).collect()
    }
}

impl Taps {
    fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.taps.iter().chain(&self.bias)
    }
}

impl Loader<'_> {
    pub(super) fn delta_net(
        &self,
        layer: usize,
        net: paceline_model::DeltaNet,
    ) -> Result<DeltaNet, Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        let places = DeltaRowLayout::new(self.config.width, shape, cut);
        let all = self.names.delta_matrices(layer, places, net);
        let wide = |own: &MatrixRows| self.wide_part(layer, own);
        let opt = |own: &Option<MatrixRows>| own.as_ref().map(wide).transpose();
        let [gate_down, decay_down] = &all.downs;
        let rows = |own: &MatrixRows| self.delta_rows(layer, std::slice::from_ref(own));
        let own = self.names.delta_vectors(layer, places, net)?;
        let heads = cut.heads.len() as i32;
        let of_heads = |values: &[f32], shape: &[i32]| self.stream.array_f32(values, shape);
        let skip = || of_heads(&own.skip, &[heads, 1, 1]);
        let is_mamba = net.rule == StateRule::Sum;
        let group = shape.value_dim * (shape.heads / shape.kv_heads);
        let key_heads: Vec<u32> = places
            .key_heads(net.order)
            .into_iter()
            .map(|head| head as u32)
            .collect();
        Ok(DeltaNet {
            rule: net.rule,
            sigmoid_gates: net.sigmoid_gates,
            inputs: self.delta_rows(layer, &all.inputs)?,
            gate: rows(&all.gate)?,
            gate_down: gate_down.as_ref().map(rows).transpose()?,
            step: wide(&all.step)?,
            decay: opt(&all.decay)?,
            decay_down: opt(decay_down)?,
            taps: self.delta_taps(&own, net.taps)?,
            bias: self.wide(&own.bias)?,
            scale: of_heads(&own.scale, &[heads, 1])?,
            least_decay: net.least_decay,
            skip: is_mamba.then(skip).transpose()?,
            norm: self.wide(&own.norm)?,
            group_ones: is_mamba.then(|| self.wide(&vec![1.0; group])).transpose()?,
            lengths: (!is_mamba).then(|| self.lengths(shape)).transpose()?,
            key_heads: self.stream.array_u32(&key_heads, &[heads])?,
        })
    }

    fn lengths(&self, shape: &LayerShape) -> Result<[Array; 2], Error> {
        let size = shape.head_dim as f32;
        let [query, key] =
            [1.0 / size, 1.0 / size.sqrt()].map(|length| self.wide(&vec![length; shape.head_dim]));
        Ok([query?, key?])
    }

    /// Rows of matrices of one width, one behind the other.
    fn delta_rows(&self, layer: usize, parts: &[MatrixRows]) -> Result<Matrix, Error> {
        let mut matrices = Vec::new();
        for (part, shape, rows) in parts {
            for rows in rows {
                let role = Role::Layer(layer, *part);
                matrices.push(self.matrix(role, *shape, rows.clone(), 0..shape[1])?);
            }
        }
        Matrix::behind(self.stream, matrices)
    }

    /// Rows of a matrix in f32 for every type of activations, transposed: `(in, rows)`.
    fn wide_part(&self, layer: usize, (part, shape, rows): &MatrixRows) -> Result<Array, Error> {
        self.wide_rows(Role::Layer(layer, *part), *shape, rows)
    }

    fn delta_taps(&self, own: &DeltaVectors, taps: usize) -> Result<Taps, Error> {
        let bias = (!own.conv_bias.is_empty()).then(|| self.channels(&own.conv_bias));
        Ok(Taps {
            taps: self.taps(&own.conv, taps)?,
            bias: bias.transpose()?,
        })
    }

    fn taps(&self, all: &[f32], taps: usize) -> Result<Vec<Array>, Error> {
        let each = all.chunks_exact(all.len() / taps);
        each.map(|tap| self.channels(tap)).collect()
    }

    /// `(1, channels)`
    fn channels(&self, values: &[f32]) -> Result<Array, Error> {
        Ok(self.stream.array_f32(values, &[1, values.len() as i32])?)
    }

    pub(super) fn short_conv(&self, layer: usize, taps: usize) -> Result<ShortConv, Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        let own = cut.heads.start * shape.head_dim..cut.heads.end * shape.head_dim;
        let sizes = [shape.heads * shape.head_dim, self.config.width];
        let rows = |part| self.rows(Role::Layer(layer, part), sizes, own.clone());
        let [query, key, value] = shape.input_roles().map(rows);
        let all = self.names.short_conv_taps(layer, cut)?;
        Ok(ShortConv {
            inputs: [query?, key?, value?],
            taps: Taps {
                taps: self.taps(&all.expect("the layer is a short convolution"), taps)?,
                bias: None,
            },
        })
    }
}
