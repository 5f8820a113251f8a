//! Layers that do not fit into a limit of memory: read from disk when a step comes to them.
//!
//! ```text
//! disk -> blocks of the next two layers -> arrays of this layer -> computed
//! ```
//!
//! The file has a layer's arrays as MLX computes with them, so nothing is converted in a step.
//! Layers from the first on stay in memory as far as the limit allows.

use std::ops::Range;
use std::sync::Arc;

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::backend::{LayerWriter, StreamedLayers};
use paceline_model::{Error, StreamCounts};
use paceline_tensor::{Kernels, MatrixMemory};

use super::Layer;

/// Layers in blocks at a time: one is copied, two are read.
pub(crate) const BLOCKS: u64 = 3;

/// Layers in memory, and blocks for layers read from disk, within a limit of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingPlan {
    /// Layers that stay, from the first that the rank holds.
    pub(crate) stay: usize,
    /// Blocks for the others.
    pub(crate) blocks: u64,
}

/// Writes the layers of a rank to disk while they are loaded.
#[derive(Debug)]
pub(crate) struct RingWriter {
    pub(crate) writer: LayerWriter,
    pub(crate) plan: RingPlan,
    pub(crate) kernels: Arc<Kernels>,
    /// Layers of the model that do not stay.
    pub(crate) passing: Range<usize>,
    pub(crate) arrays: Vec<Vec<StreamedArray>>,
}

/// Layers on disk.
#[derive(Debug)]
pub(crate) struct Ring {
    layers: StreamedLayers,
    passing: Range<usize>,
    /// Of each passing layer, in the order of [`Layer::arrays`].
    arrays: Vec<Vec<StreamedArray>>,
}

/// An array on disk.
#[derive(Debug)]
pub(crate) struct StreamedArray {
    memory: MatrixMemory,
    /// As it lies on disk.
    shape: Vec<i32>,
    dtype: Dtype,
    /// Whether the layer has its transpose.
    is_across: bool,
}

impl RingWriter {
    /// Writes the arrays of layer `index`, which were evaluated, and empties them if it does not
    /// stay.
    pub(super) fn keep(
        &mut self,
        stream: &Stream,
        (index, layer): (usize, &Layer),
    ) -> Result<(), Error> {
        self.writer.begin_layer(index);
        let write = |array: &Array| {
            let is_turned = !array.is_rows() && array.shape().len() > 1;
            let across = is_turned.then(|| transposed(stream, array));
            let across = across.transpose()?;
            let is_across = across.is_some();
            let rows = stream.contiguous(across.as_ref().unwrap_or(array))?;
            stream.eval([&rows])?;
            Ok(StreamedArray {
                memory: self.writer.array(rows.as_bytes()?, self.kernels.pool())?,
                shape: rows.shape(),
                dtype: rows.dtype(),
                is_across,
            })
        };
        let arrays = layer.arrays().into_iter().map(write);
        let arrays = arrays.collect::<Result<Vec<_>, Error>>()?;
        if self.passing.contains(&index) {
            self.arrays.push(arrays);
            empty(stream, layer)?;
        }
        Ok(())
    }

    /// After the last layer.
    pub(super) fn finish(self) -> Result<Ring, Error> {
        let blocks = self.plan.blocks;
        Ok(Ring {
            layers: self.writer.finish(self.passing.clone(), blocks)?,
            passing: self.passing,
            arrays: self.arrays,
        })
    }
}

impl Ring {
    /// Whether a layer is read in each step.
    pub(crate) fn has(&self, index: usize) -> bool {
        self.passing.contains(&index)
    }

    /// Waits until layer `index` was read, and gives its arrays their values.
    pub(crate) fn fill(
        &self,
        stream: &Stream,
        (index, layer): (usize, &Layer),
    ) -> Result<(), Error> {
        self.layers.enter(index)?;
        let own = &self.arrays[index - self.passing.start];
        let mut each = layer.arrays().into_iter().zip(own);
        let filled = each.try_for_each(|(array, own)| own.fill(stream, array));
        self.layers.leave(index);
        filled
    }

    /// Lets go of the values of a layer that a step was submitted with.
    pub(crate) fn empty(&self, stream: &Stream, layer: &Layer) -> Result<(), Error> {
        empty(stream, layer)
    }

    pub(crate) fn is_failed(&self) -> bool {
        self.layers.is_failed()
    }

    pub(crate) fn counts(&self) -> StreamCounts {
        self.layers.counts()
    }
}

impl StreamedArray {
    fn fill(&self, stream: &Stream, array: &Array) -> Result<(), Error> {
        // SAFETY: the caller has entered the layer, and leaves it after this copy.
        let bytes = unsafe { self.memory.bytes() }.unwrap_or_default();
        let rows = stream.array(bytes, &self.shape, self.dtype)?;
        let filled = match self.is_across {
            true => transposed(stream, &rows)?,
            false => rows,
        };
        // SAFETY: no weight's bytes are borrowed after it was loaded.
        unsafe { array.become_array(&filled) };
        Ok(())
    }
}

/// Has the arrays of a layer stand for a number.
fn empty(stream: &Stream, layer: &Layer) -> Result<(), Error> {
    let number = stream.scalar(0.0, Dtype::F32)?;
    for array in layer.arrays() {
        // SAFETY: as in `StreamedArray::fill`.
        unsafe { array.become_array(&number) };
    }
    Ok(())
}

/// The last two axes in the other order: of a matrix that is stored as rows.
fn transposed(stream: &Stream, array: &Array) -> Result<Array, Error> {
    let mut axes: Vec<i32> = (0..array.shape().len() as i32).collect();
    let n = axes.len();
    axes.swap(n - 2, n - 1);
    Ok(stream.transpose(array, &axes)?)
}
