//! Rows of an indexer of pools or blocks, in f32 behind what else a layer keeps.
//!
//! As on the CPU (`tensor/src/kv/pooled.rs`), the last position of a pool has the pool's key, and
//! the others have what that key is made of. Positions of blocks have keys of their own.

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::Error;

use super::{Cache, Span, View, put};

/// Index keys that a layer with such an indexer keeps.
#[derive(Debug)]
pub(crate) struct PooledRows {
    /// Keys and values, or latent keys alone, `(1, K, rows, ..)` each; then index rows
    /// `(1, 1, rows, X)`.
    pub(super) arrays: Vec<Array>,
    /// Elements of a value at the start of a latent key.
    pub(super) value: i32,
}

/// Sizes of a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PooledSizes {
    pub(crate) heads: usize,
    pub(crate) key: usize,
    pub(crate) value: usize,
    /// Whether a value is the start of its key.
    pub(crate) is_latent: bool,
    /// Elements of an index row, with gates where it has some.
    pub(crate) index: usize,
}

impl PooledSizes {
    /// Bytes of a position where keys and values are `dtype`.
    pub(super) const fn row_bytes(self, dtype: Dtype) -> u64 {
        let values = if self.is_latent { 0 } else { self.value };
        (self.heads * (self.key + values) * dtype.bytes() + 4 * self.index) as u64
    }
}

impl PooledRows {
    /// Keys, values unless keys are latent, and index rows.
    pub(crate) fn arrays(&self) -> &[Array] {
        &self.arrays
    }

    /// Zeros for `rows` positions.
    pub(super) fn new(
        stream: &Stream,
        rows: i32,
        (of, dtype): (PooledSizes, Dtype),
    ) -> Result<Self, Error> {
        let zeros = |heads: usize, dim: usize, dtype| {
            stream.zeros(&[1, heads as i32, rows, dim as i32], dtype)
        };
        let mut arrays = vec![zeros(of.heads, of.key, dtype)?];
        if !of.is_latent {
            arrays.push(zeros(of.heads, of.value, dtype)?);
        }
        arrays.push(zeros(1, of.index, Dtype::F32)?);
        Ok(Self {
            arrays,
            value: of.value as i32,
        })
    }
}

impl Cache {
    /// Writes index rows `(1, 1, rows, X)` to the rows of `span`.
    pub(crate) fn write_index(
        &mut self,
        stream: &Stream,
        layer: usize,
        span: &Span,
        new: &Array,
    ) -> Result<(), Error> {
        let held = self.arrays_mut(layer, span.view.lane);
        let held = held.last_mut().expect("the layer has index rows");
        put(stream, held, span.place(), new)
    }

    /// Index rows that a view shows, `(1, 1, rows, X)`.
    pub(crate) fn read_index_rows(
        &self,
        stream: &Stream,
        layer: usize,
        view: &View,
    ) -> Result<Array, Error> {
        let held = match view.lane {
            Some(_) => self.lanes.of_layer(layer),
            None => self.layers[layer].rows(),
        };
        view.of(stream, held.last().expect("the layer has index rows"))
    }
}
