//! The weights of a gated delta net: rows of this rank's heads, wherever they lie.

use paceline_mlx::Array;
use paceline_model::backend::{DeltaRowLayout, MatrixRows};
use paceline_model::{Error, LayerRole, Role};

use super::super::matrix::Matrix;
use super::Loader;

/// Letters: H value heads of this rank, K key heads, D and E elements of a key and of a value. All
/// but the first two are in f32 for every type of activations, since a state depends on all of
/// them.
#[derive(Debug)]
pub(crate) struct DeltaNet {
    /// `(2 K D + H E, C)`: queries, keys and values.
    pub(crate) inputs: Matrix,
    /// `(H E, C)`
    pub(crate) gate: Matrix,
    /// `(C, H)`
    pub(crate) step: Array,
    /// `(C, H)`
    pub(crate) decay: Array,
    /// `(1, 2 K D + H E)` for each input that the convolution looks at, the newest last.
    pub(crate) taps: Vec<Array>,
    /// `(H,)`
    pub(crate) bias: Array,
    /// `(H,)`, below 0.
    pub(crate) scale: Array,
    /// `(E,)`
    pub(crate) norm: Array,
    /// `(D,)` each: factors for the norms of queries and keys. A key then has length 1 and a query
    /// that over the root of D.
    pub(crate) lengths: [Array; 2],
    /// `(H,)`: the key head of each value head, among this rank's.
    pub(crate) key_heads: Array,
}

impl DeltaNet {
    pub(super) fn arrays(&self) -> Vec<&Array> {
        let Self {
            inputs,
            gate,
            step,
            decay,
            taps,
            bias,
            scale,
            norm,
            lengths,
            key_heads,
        } = self;
        let matrices = [inputs, gate].into_iter().flat_map(Matrix::arrays);
        let vectors = [step, decay, bias, scale, norm, key_heads];
        matrices.chain(vectors).chain(taps).chain(lengths).collect()
    }
}

impl Loader<'_> {
    pub(super) fn delta_net(
        &self,
        layer: usize,
        net: paceline_model::DeltaNet,
    ) -> Result<DeltaNet, Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        let places = DeltaRowLayout {
            shape,
            heads: &cut.heads,
            key_heads: &cut.kv_heads,
        };
        let role = |part| Role::Layer(layer, part);
        let has = |part| self.names.source.has_any(self.config.family, role(part));
        let [q, k, v, gate] = places.inputs(has);
        let gates = places.gates(self.names.joins_delta_gates(layer));
        let wide = |(part, all, rows): &MatrixRows| {
            self.wide_rows(role(*part), [*all, self.config.width], rows)
        };
        let of_heads = |all: Vec<f32>| self.wide(&all[cut.heads.clone()]);
        let finite = |part| self.names.finite(role(part), shape.heads);
        let key_heads: Vec<u32> = places
            .key_heads(net.order)
            .into_iter()
            .map(|head| head as u32)
            .collect();
        let size = shape.head_dim as f32;
        let lengths = [1.0 / size, 1.0 / size.sqrt()];
        let [query, key] = lengths.map(|length| self.wide(&vec![length; shape.head_dim]));
        let scale = self.names.decay_factors(finite(LayerRole::DeltaScale)?);
        Ok(DeltaNet {
            inputs: self.delta_rows(layer, &[q, k, v])?,
            gate: self.delta_rows(layer, &[gate])?,
            step: wide(&gates[0])?,
            decay: wide(&gates[1])?,
            taps: self.delta_taps(layer, places, net.taps)?,
            bias: of_heads(finite(LayerRole::DeltaBias)?)?,
            scale: of_heads(scale)?,
            norm: self.wide(&self.names.delta_norm(layer)?)?,
            lengths: [query?, key?],
            key_heads: self
                .stream
                .array_u32(&key_heads, &[key_heads.len() as i32])?,
        })
    }

    /// Rows of matrices of this width, one behind the other.
    fn delta_rows(&self, layer: usize, parts: &[MatrixRows]) -> Result<Matrix, Error> {
        let mut matrices = Vec::new();
        for (part, all, rows) in parts {
            let shape = [*all, self.config.width];
            for rows in rows {
                let role = Role::Layer(layer, *part);
                matrices.push(self.matrix(role, shape, rows.clone(), 0..shape[1])?);
            }
        }
        Matrix::behind(self.stream, matrices)
    }

    fn delta_taps(
        &self,
        layer: usize,
        places: DeltaRowLayout<'_>,
        taps: usize,
    ) -> Result<Vec<Array>, Error> {
        let role = Role::Layer(layer, LayerRole::DeltaConv);
        let all = self.names.conv(role, places, taps)?;
        let channels = all.len() / taps;
        let tap = |tap: &[f32]| Ok(self.stream.array_f32(tap, &[1, channels as i32])?);
        all.chunks_exact(channels).map(tap).collect()
    }
}
