//! Layers of another engine on disk, as the arrays that it computes with.
//!
//! All layers of a shard are in the file, whichever stay in memory: the budget may differ from
//! start to start.

use std::ops::Range;

use paceline_base::Bytes;
use paceline_tensor::{MatrixMemory, ThreadPool};

use super::{MemoryLimit, StreamCounts, StreamUnit, Streamer};
use crate::Error;
use crate::packed_file::PackedFile;
use crate::packed_file::records::{BLOCK, StreamedMatrix};

/// Writes the layers of a shard, in their order.
#[derive(Debug)]
pub struct LayerWriter {
    packed: PackedFile,
}

/// Layers that are read while a step computes those before.
#[derive(Debug)]
pub struct StreamedLayers {
    streamer: Streamer,
}

impl LayerWriter {
    /// Into `packed`, which has no other use.
    pub fn new(packed: PackedFile) -> Self {
        let packed = packed.streamed();
        Self { packed }
    }

    /// Notes that the next arrays are of layer `index`.
    pub fn begin_layer(&self, index: usize) {
        self.packed.set_unit(Some(StreamUnit::Layer(index)));
    }

    /// Writes an array of the layer unless the file has it. Blocks on the disk.
    ///
    /// # Errors
    /// [`Error::Packed`].
    pub fn array(&self, bytes: &[u8], pool: &ThreadPool) -> Result<MatrixMemory, Error> {
        Ok(self.packed.array(bytes, pool)?)
    }

    /// Ends the file after the last array. Its layers `passing` are read, `blocks` at a time.
    ///
    /// # Errors
    /// [`Error::Packed`] and [`Error::Streaming`] for the file.
    pub fn finish(self, passing: Range<usize>, blocks: u64) -> Result<StreamedLayers, Error> {
        let _ = self.packed.finish(); // a failure is the fault
        if let Some(fault) = self.packed.take_fault() {
            return Err(fault.into());
        }
        let (mut matrices, path) = self.packed.take_streamed();
        let is_passing = |unit| matches!(unit, StreamUnit::Layer(i) if passing.contains(&i));
        matrices.retain(|matrix| is_passing(matrix.unit));
        let bytes = |matrix: &StreamedMatrix| matrix.memory.size().next_multiple_of(BLOCK) as u64;
        let layers = matrices.chunk_by(|a, b| a.unit == b.unit);
        let largest = layers
            .map(|layer| layer.iter().map(bytes).sum::<u64>())
            .max();
        let budget = Bytes(blocks * largest.unwrap_or(0));
        let streamer = Streamer::new((matrices, path), MemoryLimit::Units(budget))?;
        streamer.fit(None, Bytes(0))?;
        Ok(StreamedLayers { streamer })
    }
}

impl StreamedLayers {
    /// Waits until layer `index` is in memory, and has the next two read. Its arrays have their
    /// bytes until the caller [leaves](Self::leave) it.
    ///
    /// # Errors
    /// [`Error::Streaming`], from then on in every step.
    pub fn enter(&self, index: usize) -> Result<(), Error> {
        self.streamer.enter(index)
    }

    /// Gives the memory of a layer to the next one.
    pub fn leave(&self, index: usize) {
        self.streamer.leave(StreamUnit::Layer(index));
    }

    /// Whether a read failed, so that no step will succeed.
    pub fn is_failed(&self) -> bool {
        self.streamer.is_failed()
    }

    /// Counters since it was made.
    pub fn counts(&self) -> StreamCounts {
        self.streamer.counts()
    }
}
