//! A rank's part of a whole model: layers, rows of the output head, and its neighbours.

use std::ops::Range;

use paceline_base::Rank;

use super::cut::LayerCut;

/// A rank's part of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    pub rank: Rank,
    /// Pipeline stage, from 0.
    pub stage: usize,
    /// Number of stages.
    pub stages: usize,
    /// Layers of the stage.
    pub layers: Range<usize>,
    /// Its part of a layer of the model's default sizes.
    pub usual: LayerCut,
    /// Its part of each of its layers.
    pub(super) own: Vec<LayerCut>,
    /// Rows of the output head, by rank of the stage; empty outside the last stage.
    pub(crate) vocab: Vec<Range<usize>>,
    /// Rows of the matrices that are otherwise summed over ranks, by rank of the stage, for
    /// backends that compute rows whole.
    pub outputs: Vec<Range<usize>>,
    /// Index among the ranks of the stage.
    pub index: usize,
    /// Ranks of this stage, of the one before, and of the one after.
    pub(crate) stage_ranks: Range<u32>,
    pub(crate) before: Option<Range<u32>>,
    pub(crate) after: Option<Range<u32>>,
}

impl Shard {
    /// Whether it embeds tokens: only the first stage does.
    pub const fn embeds(&self) -> bool {
        self.stage == 0
    }

    /// Whether its stage has the output head.
    pub const fn has_head(&self) -> bool {
        self.stage + 1 == self.stages
    }

    /// Whether this rank is the leader, which gets the logits.
    pub const fn leads(&self) -> bool {
        self.has_head() && self.index == 0
    }

    /// Rows of the output head.
    pub fn vocab(&self) -> Range<usize> {
        self.vocab[self.index].clone()
    }

    /// Rows of the output head of each rank of the stage.
    pub fn vocab_by_rank(&self) -> &[Range<usize>] {
        &self.vocab
    }

    /// Its part of layer `index` of the model.
    ///
    /// # Panics
    /// If the layer is in another stage.
    pub fn layer(&self, index: usize) -> &LayerCut {
        &self.own[index - self.layers.start]
    }

    /// Cuts of this rank's layers, in order.
    pub fn each_layer(&self) -> std::slice::Iter<'_, LayerCut> {
        self.own.iter()
    }

    /// Feed-forward columns in a layer of the model's default sizes.
    pub fn ffn(&self) -> Range<usize> {
        self.usual.ffn()
    }

    /// Ranks that share this rank's layers.
    pub fn stage_ranks(&self) -> Range<u32> {
        self.stage_ranks.clone()
    }

    /// The rank of the previous stage that sends this rank its input.
    pub(crate) fn source(&self) -> Option<Rank> {
        let before = self.before.as_ref()?;
        Some(Rank(before.start + self.index as u32 % before.len() as u32))
    }

    /// The ranks of the next stage that receive this rank's output.
    pub fn targets(&self) -> impl Iterator<Item = Rank> {
        let (mine, n) = (self.index as u32, self.stage_ranks.len() as u32);
        let after = self.after.clone().unwrap_or(0..0);
        let first = after.start;
        after
            .filter(move |rank| (rank - first) % n == mine)
            .map(Rank)
    }
}
