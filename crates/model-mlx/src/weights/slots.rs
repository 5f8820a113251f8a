//! Experts of a layer in fewer slots than there are experts, for a limit of memory.
//!
//! ```text
//! choice (T, k) on the host -> missing experts, from the model's file, into slots used longest ago
//! slots of the choice (T, k) -> gathered products over the stacks of slots
//! ```

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::backend::WeightReader;
use paceline_model::{Config, Error, ModelSource, Shard};

use super::{Loader, Routed};

/// Facts for reading weights of a shard: at loading, and when experts are missing later.
#[derive(Debug)]
pub(crate) struct ShardFiles {
    pub(crate) source: Arc<ModelSource>,
    pub(crate) config: Config,
    pub(crate) shard: Shard,
    /// Of activations.
    pub(crate) dtype: Dtype,
    /// See [`Loader::by_outputs`].
    pub(crate) by_outputs: bool,
    /// Slots of each layer; `None` where all experts stay in memory.
    pub(crate) slots: Option<usize>,
}

/// The slots of a layer.
#[derive(Debug)]
pub(crate) struct Slots {
    files: Arc<ShardFiles>,
    layer: usize,
    /// The first expert that the rank holds: others are counted from it.
    first: usize,
    /// A matrix for each slot.
    pub(crate) routed: Routed,
    /// The expert of each slot.
    held: Vec<Option<usize>>,
    /// Number of the request that last used each slot.
    last: Vec<u64>,
    clock: u64,
}

impl ShardFiles {
    pub(crate) fn loader<'a>(self: &'a Arc<Self>, stream: &'a Stream) -> Loader<'a> {
        let config = &self.config;
        Loader {
            stream,
            names: WeightReader {
                source: &self.source,
                config,
            },
            config,
            shard: &self.shard,
            dtype: self.dtype,
            by_outputs: self.by_outputs,
            files: self,
            kept: RefCell::default(),
            nearest: RefCell::default(),
        }
    }
}

impl Slots {
    /// Of a layer, with the `experts` in `routed`, which are the first that the rank holds.
    pub(super) fn new(
        files: &Arc<ShardFiles>,
        layer: usize,
        (routed, experts): (Routed, Range<usize>),
    ) -> Self {
        Self {
            files: Arc::clone(files),
            layer,
            first: experts.start,
            routed,
            held: (0..experts.len()).map(Some).collect(),
            last: vec![0; experts.len()],
            clock: 0,
        }
    }

    pub(crate) const fn count(&self) -> usize {
        self.held.len()
    }

    /// The slot of an expert that is in memory.
    pub(crate) fn slot(&self, expert: usize) -> Option<usize> {
        self.held.iter().position(|held| *held == Some(expert))
    }

    /// An expert that is in memory, if there is one.
    pub(crate) fn any(&self) -> usize {
        self.held.iter().flatten().next().copied().unwrap_or(0)
    }

    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.routed.stacks().flat_map(super::Stack::arrays)
    }

    /// Reads those of `experts` that are missing, at most as many as there are slots. Returns how
    /// many it read.
    pub(crate) fn bring(&mut self, stream: &Stream, experts: &[usize]) -> Result<u64, Error> {
        self.clock += 1;
        for slot in experts
            .iter()
            .filter_map(|expert| self.slot(*expert))
            .collect::<Vec<_>>()
        {
            self.last[slot] = self.clock;
        }
        let (files, mut reads) = (Arc::clone(&self.files), 0);
        let loader = files.loader(stream);
        for &expert in experts {
            if self.slot(expert).is_some() {
                continue;
            }
            let slots = 0..self.count();
            let oldest = slots
                .min_by_key(|slot| self.last[*slot])
                .expect("a layer has slots");
            self.held[oldest] = None; // a failed read leaves it empty
            let matrices = loader.expert(self.layer, self.first + expert)?;
            for (stack, matrix) in self.routed.stacks_mut().zip(matrices) {
                stack.matrices.put(stream, oldest as i32, &matrix)?;
                loader.eval(stack.matrices.arrays())?;
            }
            (self.held[oldest], self.last[oldest]) = (Some(expert), self.clock);
            reads += 1;
        }
        Ok(reads)
    }
}
