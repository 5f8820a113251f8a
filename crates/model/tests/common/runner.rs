//! Feeds sequences to a model.

use std::sync::Arc;

use paceline_model::{Batch, BatchSequence, BatchSize, Compute, Error, LoadedModel, Logits, Model};
use paceline_tensor::PAGE;

use super::compare::argmax;

/// Rows of a step of [`Runner::each`].
const CHUNK: usize = 64;

/// A model with a cache for one sequence.
#[derive(Debug)]
pub(crate) struct Runner {
    compute: Box<dyn Compute>,
    pages: Vec<u32>,
}

impl Runner {
    /// For sequences of up to `positions` tokens.
    pub(crate) fn new(model: Model, positions: usize) -> Self {
        Self::of(Arc::new(model), positions)
    }

    /// As [`new`](Self::new), of any weights.
    pub(crate) fn of(model: Arc<dyn LoadedModel>, positions: usize) -> Self {
        let pages = (0..positions.div_ceil(PAGE) as u32).collect();
        Self::on_pages(model, positions, pages)
    }

    /// As [`of`](Self::of), the sequence's pages in this order.
    pub(crate) fn on_pages(model: Arc<dyn LoadedModel>, positions: usize, pages: Vec<u32>) -> Self {
        Self::reserved(model, positions, pages).unwrap()
    }

    /// As [`new`](Self::new), or why the model does not compute `positions`.
    pub(crate) fn try_new(model: Model, positions: usize) -> Result<Self, Error> {
        let pages = (0..positions.div_ceil(PAGE) as u32).collect();
        Self::reserved(Arc::new(model), positions, pages)
    }

    fn reserved(
        model: Arc<dyn LoadedModel>,
        positions: usize,
        pages: Vec<u32>,
    ) -> Result<Self, Error> {
        let size = BatchSize {
            rows: positions,
            logit_rows: positions,
            sequences: 1,
            context: positions,
        };
        let all = pages.iter().map(|page| *page as usize + 1).max();
        let compute = model.reserve(size, all.unwrap_or(1) * PAGE)?;
        Ok(Self { compute, pages })
    }

    /// Logits after each of `tokens`, which start at position 0.
    pub(crate) fn all(&mut self, tokens: &[u32]) -> Vec<Vec<f32>> {
        self.step(tokens, 0, Logits::All)
    }

    /// Logits after the last of `tokens`, which begin at `position`.
    pub(crate) fn last(&mut self, tokens: &[u32], position: usize) -> Vec<f32> {
        self.step(tokens, position, Logits::Last).remove(0)
    }

    /// As [`all`](Self::all), in chunks: calls `f` with a token's position and the logits after it.
    /// Never holds more than 64 rows of logits (a row of Gemma's is 1 MiB).
    pub(crate) fn each(&mut self, tokens: &[u32], mut f: impl FnMut(usize, &[f32])) {
        for (i, chunk) in tokens.chunks(CHUNK).enumerate() {
            let rows = self.step(chunk, i * CHUNK, Logits::All);
            rows.iter()
                .enumerate()
                .for_each(|(t, row)| f(i * CHUNK + t, row));
        }
    }

    /// The `n` tokens that follow `prompt` when the largest logit always wins.
    pub(crate) fn greedy(&mut self, prompt: &[u32], n: usize) -> Vec<u32> {
        let mut out = vec![argmax(&self.last(prompt, 0))];
        while out.len() < n {
            let position = prompt.len() + out.len() - 1;
            let logits = self.last(&out[out.len() - 1..], position);
            out.push(argmax(&logits));
        }
        out
    }

    /// As [`all`](Self::all), or why the step fails.
    pub(crate) fn try_all(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        self.try_step(tokens, 0, Logits::All)
    }

    fn step(&mut self, tokens: &[u32], position: usize, logits: Logits) -> Vec<Vec<f32>> {
        self.try_step(tokens, position, logits).unwrap()
    }

    fn try_step(
        &mut self,
        tokens: &[u32],
        position: usize,
        logits: Logits,
    ) -> Result<Vec<Vec<f32>>, Error> {
        let sequence = BatchSequence::plain(tokens, position, &self.pages, logits);
        let batch = [sequence];
        let batch = Batch::new(&batch);
        let rows = self.compute.forward(&batch)?;
        let row = |i| self.compute.logits_mut(i).to_vec();
        Ok((0..rows).map(row).collect())
    }
}
