//! A shard's values and moments, and the file in which they travel between a run and a rank.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use paceline_model::adapter::files::tensors;

use crate::error::Error;
use crate::optimiser::Optimiser;

#[derive(Clone, Debug)]
pub(crate) struct ShardState {
    pub(crate) params: Vec<f32>,
    pub(crate) optimiser: Optimiser,
}

/// The file of a shard: its values, its first moments, its second ones, as f32 in little-endian.
/// Rules without moments have the values alone.
pub(crate) struct ShardFile;

impl ShardFile {
    /// The file that a run gives a rank, with the state before a step.
    pub(crate) fn given(step: u64, rank: usize) -> String {
        format!("{step}/shard-{rank}")
    }

    /// The file that a rank gives its run for a checkpoint; the next one replaces it.
    pub(crate) fn saved(rank: usize) -> String {
        format!("saved/shard-{rank}")
    }
}

impl ShardState {
    /// Values and moments, as they lie in the file.
    pub(crate) fn vectors(&self) -> [&[f32]; 3] {
        [&self.params, &self.optimiser.first, &self.optimiser.second]
    }

    /// The same, to be filled.
    pub(crate) fn vectors_mut(&mut self) -> [&mut [f32]; 3] {
        let Optimiser { first, second, .. } = &mut self.optimiser;
        [&mut self.params, first, second]
    }

    /// Fills everything from a file of [`ShardFile`].
    ///
    /// # Errors
    /// [`Error::Files`], also for a file of another length.
    pub(crate) fn read(&mut self, path: &Path) -> Result<(), Error> {
        let failed = || Error::file("read", path);
        let mut file = File::open(path).map_err(failed())?;
        let got = file.metadata().map_err(failed())?.len();
        let lens = self.vectors().map(|vector| size_of_val(vector) as u64);
        let expected: u64 = lens.iter().sum();
        if got != expected {
            let reason = format!("has {got} bytes, expected {expected}");
            return Err(Error::malformed(path, reason));
        }
        let mut bytes = vec![0; BLOCK_BYTES];
        for vector in self.vectors_mut() {
            for block in vector.chunks_mut(BLOCK_BYTES / size_of::<f32>()) {
                let bytes = &mut bytes[..size_of_val(block)];
                file.read_exact(bytes).map_err(failed())?;
                block.copy_from_slice(&tensors::floats(bytes));
            }
        }
        Ok(())
    }
}

/// Bytes that are read at once: as much as a system reads ahead, or more.
const BLOCK_BYTES: usize = 1 << 20;

/// The part of `all` that `rank` of `of` has: neighbours have neighbouring parts of about the same
/// size.
pub(crate) fn share(all: Range<usize>, rank: usize, of: usize) -> Range<usize> {
    let at = |rank: usize| all.start + all.len() * rank / of;
    at(rank)..at(rank + 1)
}
