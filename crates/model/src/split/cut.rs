//! A rank's part of one layer: heads, and the leaves of the layer's sums.

use std::ops::Range;

use paceline_base::tree::{self, TreeNode};

use super::{SplitStage, StageKind};
use crate::config::HeadOrder;
use crate::{Config, LayerCache, LayerShape};

/// Shape of a sum that is divided over ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct SumShape {
    cols: usize,
    /// Columns of a leaf; the last may have fewer.
    leaf_cols: usize,
}

impl SumShape {
    pub(super) const fn leaves(self) -> usize {
        self.cols.div_ceil(self.leaf_cols)
    }

    pub(super) const fn attention(layer: &LayerShape) -> Self {
        Self {
            cols: layer.heads * layer.output_dim(),
            leaf_cols: layer.attention_leaf(),
        }
    }

    /// The down projection of a dense feed-forward.
    pub(super) const fn dense(config: &Config, layer: &LayerShape) -> Self {
        Self {
            cols: layer.ffn,
            leaf_cols: config.ffn_leaf,
        }
    }

    /// The layer's feed-forward. With experts it is the sum over them, one leaf each.
    pub(super) fn feed_forward(config: &Config, layer: &LayerShape) -> Self {
        let experts = layer.experts.map(|experts| Self {
            cols: experts.leaves(),
            leaf_cols: 1,
        });
        experts.unwrap_or_else(|| Self::dense(config, layer))
    }
}

/// A rank's heads of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadRanges {
    /// Query heads.
    pub heads: Range<usize>,
    /// KV heads of these; other ranks may also have the first and the last.
    pub kv_heads: Range<usize>,
}

impl HeadRanges {
    /// The heads of a rank that owns `columns` of the attention output.
    fn new(layer: &LayerShape, columns: &Range<usize>) -> Self {
        let dim = layer.output_dim();
        let heads = columns.start / dim..columns.end / dim;
        let group = layer.heads / layer.kv_heads;
        let interleaved = matches!(
            layer.cache,
            LayerCache::Delta(net) if net.order == HeadOrder::Interleaved
        );
        let first = heads.start % layer.kv_heads;
        let kv_heads = match heads.is_empty() {
            true => 0..0,
            // A range of KV heads, or all of them if the range wraps around.
            false if interleaved && first + heads.len() <= layer.kv_heads => {
                first..first + heads.len()
            }
            false if interleaved => 0..layer.kv_heads,
            false => heads.start / group..heads.end.div_ceil(group),
        };
        Self { heads, kv_heads }
    }

    /// Query and KV heads together.
    pub fn total(&self) -> usize {
        self.heads.len() + self.kv_heads.len()
    }
}

/// A canonical sum divided over the ranks of a stage, as one of them sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeafCut {
    /// Leaves of the sum.
    pub(crate) leaves: usize,
    /// Columns of a leaf; the last may have fewer.
    pub leaf_cols: usize,
    cols: usize,
    /// Leaves of each rank.
    ranges: Vec<Range<usize>>,
    index: usize,
    /// Roots of all ranks, in rank order.
    pub(crate) nodes: Vec<TreeNode>,
    /// Roots of each rank.
    pub(crate) roots: Vec<usize>,
}

impl LeafCut {
    fn new(sum: SumShape, stage: &SplitStage, index: usize) -> Self {
        Self::over(sum, stage.leaves(sum.leaves()), index)
    }

    /// A sum that every rank has whole.
    fn whole(sum: SumShape) -> Self {
        Self::over(sum, std::iter::once(0..sum.leaves()).collect(), 0)
    }

    /// Whether one rank alone has the sum, or every rank has all of it.
    pub const fn is_whole(&self) -> bool {
        self.ranges.len() == 1
    }

    fn over(sum: SumShape, ranges: Vec<Range<usize>>, index: usize) -> Self {
        let (leaves, SumShape { cols, leaf_cols }) = (sum.leaves(), sum);
        let roots = ranges
            .iter()
            .map(|range| tree::roots(range.clone(), leaves));
        let roots: Vec<Vec<TreeNode>> = roots.collect();
        Self {
            leaves,
            leaf_cols,
            cols,
            ranges,
            index,
            roots: roots.iter().map(Vec::len).collect(),
            nodes: roots.concat(),
        }
    }

    /// Roots of all ranks; the buffer of [`complete`](Self::complete) holds one copy of the sum's
    /// values for each.
    pub const fn all_roots(&self) -> usize {
        self.nodes.len()
    }

    /// Roots of the ranks before this one.
    pub fn roots_before(&self) -> usize {
        self.roots[..self.index].iter().sum()
    }

    /// Leaves of each rank, in rank order.
    pub(crate) fn leaf_ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Index of this rank in [`leaf_ranges`](Self::leaf_ranges).
    pub(crate) const fn place(&self) -> usize {
        self.index
    }

    /// Leaves of this rank.
    fn mine(&self) -> Range<usize> {
        self.ranges[self.index].clone()
    }

    fn is_empty(&self) -> bool {
        self.mine().is_empty()
    }

    fn columns_of(&self, leaves: Range<usize>) -> Range<usize> {
        let column = |leaf: usize| (leaf * self.leaf_cols).min(self.cols);
        column(leaves.start)..column(leaves.end)
    }

    /// Columns of this rank.
    pub fn columns(&self) -> Range<usize> {
        self.columns_of(self.mine())
    }

    /// Columns of each rank of the stage.
    pub fn columns_by_rank(&self) -> impl Iterator<Item = Range<usize>> {
        self.ranges
            .iter()
            .map(|leaves| self.columns_of(leaves.clone()))
    }

    /// This rank's roots.
    pub(crate) fn own_roots(&self) -> impl Iterator<Item = TreeNode> {
        tree::each_root(self.mine(), self.leaves)
    }

    /// Columns of each of this rank's roots.
    pub fn root_columns(&self) -> Vec<Range<usize>> {
        let roots = tree::roots(self.mine(), self.leaves).into_iter();
        roots
            .map(|root| self.columns_of(root.leaves(self.leaves)))
            .collect()
    }
}

/// A rank's part of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerCut {
    /// Query heads.
    pub heads: Range<usize>,
    /// KV heads of these.
    pub kv_heads: Range<usize>,
    /// Heads of each rank of the stage; only this rank's if every rank has all heads.
    pub heads_by_rank: Vec<HeadRanges>,
    /// The sum of the attention's output projection; not divided if every rank has all heads.
    pub attention: LeafCut,
    /// The sum of the down projection; in a layer with experts the sum over them, one leaf each.
    pub feed_forward: LeafCut,
    /// The sum of the dense down projection in a layer with parallel experts.
    beside: Option<LeafCut>,
}

impl LayerCut {
    pub(super) fn new(
        config: &Config,
        layer: &LayerShape,
        stage: &SplitStage,
        index: usize,
    ) -> Self {
        let attention = match stage.kind {
            StageKind::Tensor => LeafCut::new(SumShape::attention(layer), stage, index),
            StageKind::Experts => LeafCut::whole(SumShape::attention(layer)),
        };
        let held = attention
            .columns_by_rank()
            .map(|columns| HeadRanges::new(layer, &columns));
        let heads_by_rank: Vec<HeadRanges> = held.collect();
        let dense = || LeafCut::new(SumShape::dense(config, layer), stage, index);
        Self {
            kv_heads: heads_by_rank[attention.index].kv_heads.clone(),
            heads: heads_by_rank[attention.index].heads.clone(),
            heads_by_rank,
            attention,
            feed_forward: LeafCut::new(SumShape::feed_forward(config, layer), stage, index),
            beside: layer.dense_beside.then(dense),
        }
    }

    /// Whether the rank has no exclusive part of the layer.
    pub(super) fn is_empty(&self) -> bool {
        let beside = self.beside.as_ref().is_none_or(LeafCut::is_empty);
        let attention = self.repeats_attention() || self.attention.is_empty();
        attention && self.feed_forward.is_empty() && beside
    }

    /// Whether the stage has several ranks that all compute the whole attention.
    pub(crate) const fn repeats_attention(&self) -> bool {
        self.attention.ranges.len() < self.feed_forward.ranges.len()
    }

    /// Index of this rank's heads in `heads_by_rank`.
    pub(crate) const fn heads_place(&self) -> usize {
        self.attention.index
    }

    /// The sum of the down projection of a dense feed-forward.
    pub const fn dense(&self) -> &LeafCut {
        match &self.beside {
            Some(beside) => beside,
            None => &self.feed_forward,
        }
    }

    /// Columns of the feed-forward.
    pub fn ffn(&self) -> Range<usize> {
        self.feed_forward.columns()
    }
}
