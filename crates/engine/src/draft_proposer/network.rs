//! The network that computes drafts: a small model, or a draft head on the large model's residual
//! stream.
//!
//! Both read the rows of a sequence and give logits after the last one. A head's row also needs a
//! *feature* of the position before. That is the captured row of the large model, or the head's own
//! output where the large model has not computed that position. [`FeatureBuffer`] has the captured
//! rows that the head has not read.

use std::ops::Range;
use std::sync::Arc;

use paceline_model::{
    Batch, BatchSequence, BatchSize, Compute, DraftBlock, DraftHead, DraftHeadCompute, DraftPlace,
    HeadRows, LoadedModel, Logits, PassKind, WindowPages,
};
use paceline_tensor::Kernels;

use super::{Draft, DraftNetwork};
use crate::Error;
use crate::pages::{Pages, SequencePages};

/// Most positions with captured rows of a sequence that a head has not read; older ones are
/// dropped. Of a model with width 4096 and three captures they are 24 MiB. A head on a longer
/// prompt reads its end only.
const FEATURES_MAX: usize = 512;

/// A network with its cache.
#[derive(Debug)]
pub(super) enum Network {
    Model(Arc<dyn LoadedModel>, Box<dyn Compute>),
    Head(Arc<dyn DraftHead>, Box<dyn DraftHeadCompute>),
}

/// Rows of one sequence in a draft pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassRows<'a> {
    pub(super) tokens: &'a [u32],
    /// Position in the network's cache.
    pub(super) position: usize,
    /// Position there of the last token that is no draft; read by heads.
    pub(super) pending: usize,
    pub(super) pages: &'a SequencePages,
    /// Features of a head's rows.
    pub(super) features: &'a [f32],
}

impl Network {
    /// # Errors
    /// [`Error::Model`] if the allocation fails.
    pub(super) fn new(draft: &Draft, size: BatchSize, positions: usize) -> Result<Self, Error> {
        Ok(match &draft.network {
            DraftNetwork::Model { model, .. } => {
                let context = size.context.min(model.config().context);
                let size = BatchSize { context, ..size };
                let compute = Arc::clone(model).reserve(size, positions)?;
                Self::Model(Arc::clone(model), compute)
            }
            DraftNetwork::Head(head) => {
                let compute = Arc::clone(head);
                let compute = compute.reserve(size.rows, size.sequences, positions)?;
                Self::Head(Arc::clone(head), compute)
            }
        })
    }

    pub(super) fn pages(&self) -> Pages {
        match self {
            Self::Model(_, compute) => Pages::new(compute.pages(), compute.windows()),
            Self::Head(_, head) => Pages::new(head.pages(), &[]),
        }
    }

    pub(super) const fn is_head(&self) -> bool {
        matches!(self, Self::Head(..))
    }

    /// Whether it has recurrent states or windows.
    pub(super) fn has_states(&self) -> bool {
        match self {
            Self::Model(_, compute) => !compute.windows().is_empty(),
            Self::Head(..) => false,
        }
    }

    /// Values of a captured row; 0 for a model.
    pub(super) fn feature_width(&self) -> usize {
        match self {
            Self::Model(..) => 0,
            Self::Head(head, _) => head.width() * head.captures().len(),
        }
    }

    /// Whether it can read a token of the large model.
    pub(super) fn knows(&self, token: u32) -> bool {
        match self {
            Self::Model(model, _) => (token as usize) < model.config().vocab,
            Self::Head(..) => true,
        }
    }

    /// Writes the logits of a draft token of sequence `i` of the last pass. Tokens that one of the
    /// vocabularies lacks have minus infinity.
    pub(super) fn write_logits(&mut self, i: usize, place: DraftPlace, out: &mut [f32]) {
        match self {
            Self::Model(_, compute) => {
                let logits = compute.logits_mut(i);
                let n = logits.len().min(out.len());
                out[..n].copy_from_slice(&logits[..n]);
                out[n..].fill(f32::NEG_INFINITY);
            }
            Self::Head(_, head) => head.write_logits(i, place, out),
        }
    }

    /// The output of a head's last row of sequence `i`: the feature of its next row. Empty for a
    /// model.
    pub(super) fn output(&self, i: usize) -> &[f32] {
        match self {
            Self::Model(..) => &[],
            Self::Head(_, head) => head.output(i),
        }
    }

    /// The blocks that it drafts; `None` if it drafts a token in a pass.
    pub(super) fn block(&self) -> Option<DraftBlock> {
        match self {
            Self::Model(..) => None,
            Self::Head(head, _) => head.block(),
        }
    }

    /// Runs a pass. `is_captured`: a head's features are captured rows.
    ///
    /// # Errors
    /// [`Error::Model`] of the model's backend.
    pub(super) fn pass(
        &mut self,
        parts: &[PassRows<'_>],
        (logits, is_captured): (Logits, bool),
    ) -> Result<(), Error> {
        let compute = match self {
            Self::Model(_, compute) => compute,
            Self::Head(_, head) => {
                let rows = parts.iter().map(|part| HeadRows {
                    tokens: part.tokens,
                    features: part.features,
                    position: part.position,
                    pending: part.pending,
                    pages: part.pages.pages(),
                });
                let pass = match (is_captured, logits) {
                    (false, _) => PassKind::Next,
                    (true, Logits::None) => PassKind::Read,
                    (true, _) => PassKind::First,
                };
                head.forward(&rows.collect::<Vec<_>>(), pass)?;
                return Ok(());
            }
        };
        let windows = parts.iter().map(|part| part.pages.windows().collect());
        let windows: Vec<Vec<WindowPages<'_>>> = windows.collect();
        let rows = parts.iter().zip(&windows);
        let rows = rows.map(|(part, windows)| BatchSequence {
            tokens: part.tokens,
            position: part.position,
            pages: part.pages.pages(),
            windows,
            adapter: 0,
            logits,
        });
        let sequences: Vec<BatchSequence<'_>> = rows.collect();
        let batch = Batch::new(&sequences);
        compute.forward(&batch)?;
        Ok(())
    }
}

/// Captured rows of consecutive positions of a sequence.
#[derive(Clone, Debug)]
pub(super) struct FeatureBuffer {
    /// Position of the first row.
    from: usize,
    /// `(positions, width)`
    values: Vec<f32>,
    width: usize,
}

impl FeatureBuffer {
    pub(super) const fn new() -> Self {
        Self {
            from: 0,
            values: Vec::new(),
            width: 0,
        }
    }

    /// Positions with rows.
    pub(super) fn positions(&self) -> Range<usize> {
        let n = self.values.len().checked_div(self.width).unwrap_or(0);
        self.from..self.from + n
    }

    /// Adds rows of `width` values from `position` on. They replace older rows from there on, and
    /// all rows that do not reach it.
    pub(super) fn add(&mut self, position: usize, rows: &[f32], width: usize) {
        self.width = width;
        let held = self.positions();
        match held.contains(&position) || position == held.end {
            true => self.values.truncate((position - held.start) * width),
            false => {
                self.values.clear();
                self.from = position;
            }
        }
        self.values.extend_from_slice(rows);
        let held = self.positions();
        self.drop_before(held.end.saturating_sub(FEATURES_MAX));
    }

    /// Drops the rows before `position`.
    pub(super) fn drop_before(&mut self, position: usize) {
        let held = self.positions();
        let n = position.clamp(held.start, held.end) - held.start;
        self.values.drain(..n * self.width);
        self.from += n;
    }

    /// The rows of `positions`.
    ///
    /// # Panics
    /// If it has not all of them.
    pub(super) fn rows(&self, positions: Range<usize>) -> &[f32] {
        let (start, end) = (positions.start - self.from, positions.end - self.from);
        &self.values[start * self.width..end * self.width]
    }
}

/// Kernels that sample drafts.
pub(super) fn kernels(network: &Network) -> &Kernels {
    match network {
        Network::Model(model, _) => model.kernels(),
        Network::Head(head, _) => head.kernels(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_each_other_or_begin_anew() {
        let mut buffer = FeatureBuffer::new();
        let row = |x: f32| [x, x];
        buffer.add(5, &[row(5.0), row(6.0), row(7.0)].concat(), 2);
        // A rejected draft is computed again.
        buffer.add(7, &row(70.0), 2);
        assert_eq!(buffer.positions(), 5..8);
        assert_eq!(buffer.rows(6..8), [6.0, 6.0, 70.0, 70.0]);
        buffer.drop_before(7);
        assert_eq!(buffer.positions(), 7..8);
        // A gap.
        buffer.add(9, &row(9.0), 2);
        assert_eq!(buffer.positions(), 9..10);
        // The end of a long prompt.
        buffer.add(10, &vec![1.0; 2 * 2 * FEATURES_MAX], 2);
        assert_eq!(buffer.positions(), 10 + FEATURES_MAX..10 + 2 * FEATURES_MAX);
    }
}
