//! Captured rows of a whole text, computed by the model.

use std::sync::Arc;

use paceline_model::{Batch, BatchSequence, BatchSize, Compute, LoadedModel as _, Logits, Model};
use paceline_tensor::PAGE;

use crate::error::Error;

/// Rows of a pass of the model: weights are read once for all.
const ROWS: usize = 256;

/// The model with memory for one text.
#[derive(Debug)]
pub(super) struct Captures {
    compute: Box<dyn Compute>,
    pages: Vec<u32>,
}

impl Captures {
    /// For texts of up to `tokens_max` tokens.
    ///
    /// # Errors
    /// [`Error::Model`] if the memory cannot be reserved.
    pub(super) fn new(model: &Arc<Model>, tokens_max: usize) -> Result<Self, Error> {
        let size = BatchSize {
            rows: ROWS,
            logit_rows: 1,
            sequences: 1,
            context: tokens_max,
        };
        let pages = tokens_max.div_ceil(PAGE);
        Ok(Self {
            compute: Arc::clone(model).reserve(size, pages * PAGE)?,
            pages: (0..pages as u32).collect(),
        })
    }

    /// The captured rows of a text, `(tokens, captures, C)`.
    pub(super) fn rows(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        let mut rows = Vec::new();
        for (i, part) in tokens.chunks(ROWS).enumerate() {
            let sequence = BatchSequence::plain(part, i * ROWS, &self.pages, Logits::None);
            let sequences = [sequence];
            self.compute.forward(&Batch::new(&sequences))?;
            rows.extend_from_slice(self.compute.captured());
        }
        Ok(rows)
    }
}
