//! How a model is cut over the ranks of a group.
//!
//! A *stage* holds consecutive layers. The ranks of a stage share every layer of it (a tensor
//! split), and the stages follow one another (a pipeline). Ranks are numbered stage by stage:
//!
//! ```text
//! 3x2 of SmolLM2 (30 layers, 9 heads of 64, 3 KV heads, feed-forward 1536 = 12 blocks of 128):
//!
//!            layers   heads  KV heads   feed-forward blocks   vocabulary (last stage only)
//! rank 0     0..19    0..3   0..1       0..4
//! rank 1     0..19    3..6   1..2       4..8
//! rank 2     0..19    6..9   2..3       8..12
//! rank 3    19..30    0..3   0..1       0..4                  0..16384
//! rank 4    19..30    3..6   1..2       4..8                  16384..32768
//! rank 5    19..30    6..9   2..3       8..12                 32768..49152
//! ```
//!
//! Within a stage, a rank owns the columns of the output projections that belong to its *leaves* of
//! the canonical sum ([`paceline_base::tree`]). It also owns the rows of the other matrices that
//! produce them. So the sum over all ranks has the bits of one rank.
//!
//! **KV heads are replicated** where a cut falls between the query heads of one KV head: both ranks
//! hold it. Cutting between KV heads only would leave SmolLM2 (3 of them) at most 3 ranks, and 2
//! ranks would have 6 and 3 query heads. Replication costs one head's keys and values (computed and
//! cached twice) per such cut. It balances to one query head.
//!
//! **Attention can be repeated** on all ranks of a stage, which then share only the experts
//! ([`StageKind::Experts`]). A layer takes one exchange instead of two, and every rank computes and
//! caches all heads.
//!
//! **Shares are rounded once**, when the split is made, at each cut, so no rank is off by more than
//! a leaf. A split then has whole numbers of leaves. A worker checks a received split against its
//! model and rounds nothing.

mod cut;
mod error;
mod kind;
mod shard;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use paceline_base::Rank;
use serde::{Deserialize, Serialize};

use crate::{Config, LayerShape};
use cut::SumShape;
pub use cut::{HeadRanges, LayerCut, LeafCut};
pub use error::{Error, MAX_RANKS};
pub use kind::{SplitKind, StageKind};
pub use shard::Shard;

/// Vocabulary rows per block: whole groups of every kernel, and 256 bytes of logits. Also the block
/// of matrices that ranks divide by outputs.
const ROW_BLOCK: usize = 64;

/// A model's split over ranks. Serialises as whole numbers, so that every rank cuts at the same
/// places. A received split must pass [`check`](Self::check).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    stages: Vec<SplitStage>,
}

/// Consecutive layers and the ranks that share them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SplitStage {
    first_rank: u32,
    layers: Range<usize>,
    #[serde(default)]
    kind: StageKind,
    /// Requested share of each rank, relative to the others of the stage.
    shares: Vec<u32>,
    /// Leaves of each rank, for every leaf count of the stage's layers. A split without them is
    /// refused.
    #[serde(default)]
    dealt: Vec<LeafAssignment>,
}

/// Assignment of a sum's leaves to the ranks of a stage, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LeafAssignment {
    leaves: usize,
    /// End of each rank's leaves.
    ends: Vec<usize>,
}

impl Split {
    /// All of `config` on one rank.
    pub fn whole(config: &Config) -> Self {
        Self {
            stages: vec![SplitStage::new(config, 0, 0..config.layers.len(), vec![1])],
        }
    }

    /// Splits a model over `ranks` ranks. `shares` are relative; empty means equal shares.
    ///
    /// # Errors
    /// [`Error`] names what does not fit.
    pub fn plan(
        config: &Config,
        kind: SplitKind,
        ranks: u32,
        shares: &[u32],
    ) -> Result<Self, Error> {
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(Error::Ranks { got: ranks });
        }
        let equal = vec![1; ranks as usize];
        let shares = if shares.is_empty() { &equal } else { shares };
        if shares.len() != ranks as usize {
            let got = shares.len();
            return Err(Error::Shares { got, ranks });
        }
        if let Some(rank) = shares.iter().position(|share| *share == 0) {
            let rank = Rank(rank as u32);
            return Err(Error::ZeroShare { rank });
        }
        let tensor = tensor_ranks(config, kind, ranks)?;
        let by_stage: Vec<&[u32]> = shares.chunks_exact(tensor as usize).collect();
        let mut stages = stages(config, &by_stage)?;
        for stage in &mut stages {
            let shares = stage.shares.len() > 1 && stage.has_experts(config);
            stage.kind = match kind {
                SplitKind::Experts => StageKind::Experts,
                SplitKind::GridOfExperts { .. } if shares => StageKind::Experts,
                _ => StageKind::Tensor,
            };
        }
        let split = Self { stages };
        split.check(config)?;
        Ok(split)
    }

    /// Splits a model into the stages of a planner's placement: kind, layers and rank shares of
    /// each.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn of_stages(
        config: &Config,
        stages: impl IntoIterator<Item = (StageKind, Range<usize>, Vec<u32>)>,
    ) -> Result<Self, Error> {
        let mut first_rank: u32 = 0;
        let stages = stages.into_iter().map(|(kind, layers, shares)| {
            let stage = SplitStage::new(config, first_rank, layers, shares);
            first_rank = first_rank.saturating_add(stage.shares.len() as u32);
            SplitStage { kind, ..stage }
        });
        let stages = stages.collect();
        let split = Self { stages };
        split.check(config)?;
        Ok(split)
    }

    /// Layers and shares of each stage, in order.
    pub fn each_stage(&self) -> impl Iterator<Item = (Range<usize>, &[u32])> {
        let stages = self.stages.iter();
        stages.map(|stage| (stage.layers.clone(), &*stage.shares))
    }

    /// Kind of each stage, in order.
    pub fn kinds(&self) -> impl Iterator<Item = StageKind> {
        self.stages.iter().map(|stage| stage.kind)
    }

    /// The kind for [`plan`](Self::plan) that makes such a split with other shares; `None` if only
    /// some stages share experts.
    pub fn kind(&self) -> Option<SplitKind> {
        let (tensor, pipeline) = (self.tensor_ranks() as u32, self.stages.len() as u32);
        let of_experts = self.kinds().filter(|kind| *kind == StageKind::Experts);
        match (of_experts.count(), self.stages.len()) {
            (0, _) => Some(SplitKind::Grid { tensor, pipeline }),
            (1, 1) => Some(SplitKind::Experts),
            (some, all) if some == all => Some(SplitKind::GridOfExperts { tensor, pipeline }),
            _ => None,
        }
    }

    /// Whether the ranks of a stage share only experts.
    fn shares_experts(&self) -> bool {
        self.kinds().any(|kind| kind == StageKind::Experts)
    }

    /// Checks that it is a split of `config`: every layer once and in order, ranks in order, and
    /// work for each rank.
    ///
    /// # Errors
    /// [`Error::Ranks`], [`Error::Layers`], [`Error::ZeroShare`], [`Error::Shared`],
    /// [`Error::NoExperts`], [`Error::Leaves`], [`Error::NothingLeft`].
    pub fn check(&self, config: &Config) -> Result<(), Error> {
        self.check_stages(config.layers.len())?;
        let starts = self.stages.iter().map(|stage| stage.layers.start);
        if let Some(layer) = starts.into_iter().find(|layer| !config.can_cut(*layer)) {
            return Err(Error::Shared { layer });
        }
        let mut stages = self.stages.iter();
        stages.try_for_each(|stage| stage.check(config))?;
        (0..self.ranks()).try_for_each(|rank| {
            let shard = self.shard(config, Rank(rank));
            if !shard.own.iter().all(LayerCut::is_empty) {
                return Ok(());
            }
            Err(Error::NothingLeft {
                rank: Rank(rank),
                heads: shard.usual.attention.leaves,
                ffn: shard.usual.feed_forward.leaves,
                tensor: shard.stage_ranks.len() as u32,
            })
        })
    }

    fn check_stages(&self, layers: usize) -> Result<(), Error> {
        let ranks: usize = self.stages.iter().map(|stage| stage.shares.len()).sum();
        let got = u32::try_from(ranks).unwrap_or(u32::MAX);
        if !(1..=MAX_RANKS).contains(&got) {
            return Err(Error::Ranks { got });
        }
        let misplaced = |layers, after| Error::Layers { layers, after };
        let (mut rank, mut layer) = (0, 0);
        for stage in &self.stages {
            let own = &stage.layers;
            let follows = stage.first_rank == rank && own.start == layer;
            if !follows || own.end <= own.start || stage.shares.is_empty() {
                return Err(misplaced(own.clone(), layer));
            }
            if let Some(zero) = stage.shares.iter().position(|share| *share == 0) {
                let rank = Rank(rank + zero as u32);
                return Err(Error::ZeroShare { rank });
            }
            (rank, layer) = (rank + stage.shares.len() as u32, own.end);
        }
        match layer == layers {
            true => Ok(()),
            false => Err(misplaced(layer..layers, layer)),
        }
    }

    pub fn ranks(&self) -> u32 {
        self.stages.iter().map(|s| s.shares.len() as u32).sum()
    }

    pub const fn stages(&self) -> usize {
        self.stages.len()
    }

    /// Largest number of ranks that share a layer.
    pub fn tensor_ranks(&self) -> usize {
        let ranks = self.stages.iter().map(|s| s.shares.len());
        ranks.max().unwrap_or(1)
    }

    /// The rank that gets the logits, samples tokens and sends the others their plans. It is the
    /// first of the last stage, which has the logits.
    pub fn leader(&self) -> Rank {
        Rank(self.stages.last().map_or(0, |stage| stage.first_rank))
    }

    /// The part of the model on `rank`.
    ///
    /// # Panics
    /// If there is no such rank, or the split does not [fit](Self::check) `config`.
    pub fn shard(&self, config: &Config, rank: Rank) -> Shard {
        let of = |s: &SplitStage| s.ranks().contains(&rank.0);
        let stage = self.stages.iter().position(of);
        let stage = stage.expect("a rank of the split");
        let own = &self.stages[stage];
        let index = (rank.0 - own.first_rank) as usize;
        let cut = |layer: &LayerShape| LayerCut::new(config, layer, own, index);
        let last = stage + 1 == self.stages.len();
        let none = 0..0;
        let ranks = |s: usize| self.stages[s].ranks();
        Shard {
            rank,
            stage,
            stages: self.stages.len(),
            layers: own.layers.clone(),
            usual: cut(&config.usual_layer()),
            own: config.layers[own.layers.clone()].iter().map(cut).collect(),
            vocab: match last {
                true => own.rows(config.vocab),
                false => vec![none; own.shares.len()],
            },
            outputs: own.rows(config.width),
            index,
            stage_ranks: own.ranks(),
            before: stage.checked_sub(1).map(ranks),
            after: (!last).then(|| ranks(stage + 1)),
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tensor_ranks(), self.stages.len()) {
            (1, 1) => write!(f, "none"),
            (_, 1) if self.shares_experts() => write!(f, "experts"),
            (_, 1) => write!(f, "tensor"),
            (1, _) => write!(f, "pipeline"),
            (tensor, pipeline) if self.shares_experts() => {
                write!(f, "{tensor}x{pipeline}-experts")
            }
            (tensor, pipeline) => write!(f, "{tensor}x{pipeline}"),
        }
    }
}

impl SplitStage {
    /// Rounds shares to leaves. [`Split::check`] reports layers that the model does not have.
    fn new(config: &Config, first_rank: u32, layers: Range<usize>, shares: Vec<u32>) -> Self {
        let deal = |leaves| LeafAssignment {
            leaves,
            ends: cut(leaves, &shares).iter().map(|own| own.end).collect(),
        };
        Self {
            dealt: leaf_counts(config, &layers).into_iter().map(deal).collect(),
            first_rank,
            layers,
            kind: StageKind::Tensor,
            shares,
        }
    }

    fn ranks(&self) -> Range<u32> {
        self.first_rank..self.first_rank + self.shares.len() as u32
    }

    /// Checks that every leaf of its layers belongs to one rank, in order, and that the layers of
    /// an expert stage have experts.
    fn check(&self, config: &Config) -> Result<(), Error> {
        if self.kind == StageKind::Experts && !self.has_experts(config) {
            let layers = self.layers.clone();
            return Err(Error::NoExperts { layers });
        }
        let ranks = self.shares.len();
        let is_dealt = |leaves: &usize| {
            let ends = self.ends(*leaves);
            ends.len() == ranks && ends.is_sorted() && ends.last() == Some(leaves)
        };
        let mut all = leaf_counts(config, &self.layers).into_iter();
        match all.find(|leaves| !is_dealt(leaves)) {
            Some(leaves) => Err(Error::Leaves { leaves, ranks }),
            None => Ok(()),
        }
    }

    fn has_experts(&self, config: &Config) -> bool {
        let own = config.layers.get(self.layers.clone()).unwrap_or_default();
        own.iter().any(|layer| layer.experts.is_some())
    }

    /// End of each rank's part of a sum of `leaves` leaves; empty if the split has no assignment.
    fn ends(&self, leaves: usize) -> &[usize] {
        let mut dealt = self.dealt.iter();
        let dealt = dealt.find(|dealt| dealt.leaves == leaves);
        dealt.map_or(&[][..], |dealt| &dealt.ends[..])
    }

    /// Each rank's part of a sum of `leaves` leaves.
    fn leaves(&self, leaves: usize) -> Vec<Range<usize>> {
        let ends = self.ends(leaves);
        let starts = std::iter::once(0).chain(ends.iter().copied());
        starts.zip(ends).map(|(start, end)| start..*end).collect()
    }

    /// Each rank's part of `n` rows, in blocks of [`ROW_BLOCK`].
    fn rows(&self, n: usize) -> Vec<Range<usize>> {
        let row = |block: usize| (block * ROW_BLOCK).min(n);
        let blocks = self.leaves(n.div_ceil(ROW_BLOCK)).into_iter();
        blocks.map(|b| row(b.start)..row(b.end)).collect()
    }
}

/// All leaf counts of the sums of `layers` and of a default layer. Block counts of divided rows are
/// included. Each count occurs once.
fn leaf_counts(config: &Config, layers: &Range<usize>) -> BTreeSet<usize> {
    let own = config.layers.get(layers.clone()).unwrap_or_default();
    let usual = config.usual_layer();
    let sums = |layer: &LayerShape| {
        let beside = layer.dense_beside.then(|| SumShape::dense(config, layer));
        let all = [
            SumShape::attention(layer),
            SumShape::feed_forward(config, layer),
        ];
        all.into_iter().chain(beside).map(SumShape::leaves)
    };
    let sums = own.iter().chain([&usual]).flat_map(sums);
    let rows = [config.vocab, config.width].map(|rows| rows.div_ceil(ROW_BLOCK));
    sums.chain(rows).collect()
}

fn tensor_ranks(config: &Config, kind: SplitKind, ranks: u32) -> Result<u32, Error> {
    match kind {
        SplitKind::Tensor | SplitKind::Experts => Ok(ranks),
        SplitKind::Pipeline => Ok(1),
        SplitKind::Grid { tensor, pipeline } | SplitKind::GridOfExperts { tensor, pipeline } => {
            let error = Error::Grid {
                tensor,
                pipeline,
                ranks,
            };
            (tensor * pipeline == ranks).then_some(tensor).ok_or(error)
        }
        SplitKind::Auto => {
            let usual = config.usual_layer();
            let leaves = (usual.heads * usual.output_dim()).div_ceil(usual.attention_leaf());
            let fits = |tensor: &u32| ranks.is_multiple_of(*tensor) && *tensor as usize <= leaves;
            Ok((1..=ranks).rev().find(fits).unwrap_or(1))
        }
    }
}

/// Assigns each stage its layers, at least one.
fn stages(config: &Config, shares: &[&[u32]]) -> Result<Vec<SplitStage>, Error> {
    let starts = (0..config.layers.len()).filter(|layer| config.can_cut(*layer));
    let layers = starts.count();
    if shares.len() > layers {
        let stages = shares.len() as u32;
        return Err(Error::Stages { stages, layers });
    }
    let weight = |shares: &[u32]| shares.iter().map(|share| u64::from(*share)).sum::<u64>();
    let weights: Vec<u64> = shares.iter().map(|shares| weight(shares)).collect();
    let ends = layer_ends(config, &weights);
    let (mut first_rank, mut first_layer) = (0, 0);
    let stage = |(shares, end): (&&[u32], usize)| {
        let stage = SplitStage::new(config, first_rank, first_layer..end, shares.to_vec());
        (first_rank, first_layer) = (first_rank + shares.len() as u32, end);
        stage
    };
    Ok(shares.iter().zip(ends).map(stage).collect())
}

/// End of each stage, so that the largest quotient of weights and share is smallest.
///
/// The output head counts for the last stage. A dynamic programme over (stages, layers): with `s`
/// stages and `n` layers it takes `s n^2` steps, under a second for a thousand of each.
fn layer_ends(config: &Config, shares: &[u64]) -> Vec<usize> {
    let (stages, layers) = (shares.len(), config.layers.len());
    let head = (config.width as u64 * config.vocab as u64) as f64;
    let mut before = vec![0; layers + 1];
    for (i, layer) in config.layers.iter().enumerate() {
        before[i + 1] = before[i] + layer.parameters(config.width);
    }
    let may_start: Vec<bool> = (0..layers).map(|layer| config.can_cut(layer)).collect();
    let cost = |stage: usize, held: Range<usize>| {
        let extra = if stage + 1 == stages { head } else { 0.0 };
        ((before[held.end] - before[held.start]) as f64 + extra) / shares[stage] as f64
    };
    // best[n]: the smallest maximal cost of the stages so far with n layers; from[s][n]: where
    // stage s starts then.
    let mut best = vec![f64::INFINITY; layers + 1];
    best[0] = 0.0;
    let mut from = Vec::with_capacity(stages);
    for stage in 0..stages {
        let mut next = vec![f64::INFINITY; layers + 1];
        let mut starts = vec![0; layers + 1];
        for end in stage + 1..=layers {
            let earlier = best[..end].iter().enumerate();
            for (start, sofar) in earlier.filter(|(i, _)| may_start[*i]) {
                let worst = sofar.max(cost(stage, start..end));
                if worst < next[end] {
                    (next[end], starts[end]) = (worst, start);
                }
            }
        }
        best = next;
        from.push(starts);
    }
    let mut ends = vec![layers; stages];
    for stage in (1..stages).rev() {
        ends[stage - 1] = from[stage][ends[stage]];
    }
    ends
}

/// Divides `0..n` in proportion to `shares`, every cut rounded to the nearest.
fn cut(n: usize, shares: &[u32]) -> Vec<Range<usize>> {
    let total: u128 = shares.iter().map(|share| u128::from(*share)).sum();
    let total = total.max(1); // zero shares are refused later
    let mut sum = 0;
    let mut start = 0;
    let range = |share: &u32| {
        sum += u128::from(*share);
        let end = ((2 * n as u128 * sum + total) / (2 * total)) as usize;
        let range = start..end;
        start = end;
        range
    };
    shares.iter().map(range).collect()
}

#[cfg(test)]
pub(crate) mod tests;
