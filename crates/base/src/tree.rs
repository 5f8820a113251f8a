//! The canonical summation tree: one order of additions, on any number of ranks and threads.
//!
//! A float sum depends on its order. Every sum that a split may cut over ranks is therefore defined
//! as a binary tree over `n` logical blocks. The blocks are the *leaves*, in order; ranks, threads
//! and chunks play no part. The node at level `l` and index `i` covers the leaves
//! `[i * 2^l, min((i + 1) * 2^l, n))`. Its value is left child + right child. A node whose right
//! child is empty *is* its left child (nothing is added). For n = 6:
//!
//! ```text
//! level 3                [0,6)            = [0,4) + [4,6)
//! level 2       [0,4)             [4,6)     level 2, index 1 is its left child
//! level 1   [0,2)   [2,4)     [4,6)
//! level 0   0   1   2   3     4   5
//! ```
//!
//! A rank owns a contiguous range of leaves. It computes the values of the fewest subtrees that
//! make up its range ([`roots`]). All ranks gather those values in rank order, and each adds what
//! is left of the tree ([`combine`]). All ranks then hold the bits that one rank would get alone.
//!
//! Worked example, n = 6 cut into 0..3 and 3..6. Rank 0 sends `[0,2)` and leaf 2, rank 1 sends leaf
//! 3 and `[4,6)`. Both compute `([0,2) + (2 + 3)) + [4,6)`. A cut at a power of two costs one
//! vector per rank.
//!
//! [`sum_all`] is the definition; [`Stack`] evaluates any range with O(log n) storage. Kernels
//! that keep their partial sums in registers follow [`TreeNode::join`] and are tested against
//! [`sum_all`].

use std::ops::Range;

/// A node of the tree, named by the lowest level at which it appears.
///
/// So two nodes are equal exactly when they cover the same leaves (of the same `n`). Every node
/// above level 0 has two children that are not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TreeNode {
    level: u32,
    index: usize,
}

impl TreeNode {
    pub const fn leaf(index: usize) -> Self {
        Self { level: 0, index }
    }

    /// Height above the leaves: the node spans `2^level` leaves, bounded by `n`.
    pub const fn level(self) -> u32 {
        self.level
    }

    /// First leaf.
    pub const fn start(self) -> usize {
        self.index << self.level
    }

    /// The leaves under this node in a tree over `n` leaves.
    pub fn leaves(self, n: usize) -> Range<usize> {
        self.start()..self.start().saturating_add(1 << self.level).min(n)
    }

    /// The parent of `self` and `right` if they are its two children in a tree over `n` leaves.
    ///
    /// This rule alone gives the order of all sums. Keep values on a stack, and after each push
    /// replace the top two by their sum for as long as they join.
    pub fn join(self, right: Self, n: usize) -> Option<Self> {
        let middle = self.start() + (1 << self.level);
        let end = middle.saturating_add(1 << self.level).min(n);
        let siblings = self.index.is_multiple_of(2) && right.leaves(n) == (middle..end);
        siblings.then_some(Self {
            level: self.level + 1,
            index: self.index / 2,
        })
    }
}

/// The fewest nodes of the tree over `n` leaves that together cover exactly `range`, in order.
///
/// At most `2 * ceil(log2(n))` nodes, one when the range is a subtree, none when it is empty.
///
/// # Panics
/// If `range` does not lie within `0..n`.
pub fn roots(range: Range<usize>, n: usize) -> Vec<TreeNode> {
    each_root(range, n).collect()
}

/// As [`roots`], as an iterator without allocation.
///
/// # Panics
/// If `range` does not lie within `0..n`.
pub fn each_root(range: Range<usize>, n: usize) -> impl Iterator<Item = TreeNode> {
    assert!(
        range.start <= range.end && range.end <= n,
        "leaves {range:?} of a tree over {n}"
    );
    let mut start = range.start;
    std::iter::from_fn(move || {
        let node = (start < range.end).then(|| widest(start, range.end, n))?;
        start = node.leaves(n).end;
        Some(node)
    })
}

/// The node with the most leaves that starts at `start` and does not pass `end`.
fn widest(start: usize, end: usize, n: usize) -> TreeNode {
    let mut node = TreeNode::leaf(start);
    // A level above `node` whose right child is empty is `node` again, so only a level that adds
    // leaves is taken over.
    for level in 1..usize::BITS {
        let up = TreeNode {
            level,
            index: start >> level,
        };
        let leaves = up.leaves(n);
        if leaves.start != start || leaves.end > end {
            break;
        }
        if leaves.end > node.leaves(n).end {
            node = up;
        }
    }
    node
}

/// The sum over all leaves, written as the tree is defined. Each leaf is `(width,)`.
///
/// No leaves give an empty vector. Cost: n - 1 vector additions and as many allocations.
///
/// # Panics
/// If the leaves differ in length.
pub fn sum_all(leaves: &[&[f32]]) -> Vec<f32> {
    let Some(first) = leaves.first() else {
        return Vec::new();
    };
    assert!(
        leaves.iter().all(|leaf| leaf.len() == first.len()),
        "leaves differ in length"
    );
    let top = leaves.len().next_power_of_two().trailing_zeros();
    value(leaves, top, 0)
}

/// The value of the node at `level` and `index`.
fn value(leaves: &[&[f32]], level: u32, index: usize) -> Vec<f32> {
    if level == 0 {
        return leaves[index].to_vec();
    }
    let left = value(leaves, level - 1, 2 * index);
    if (2 * index + 1) << (level - 1) >= leaves.len() {
        return left;
    }
    let right = value(leaves, level - 1, 2 * index + 1);
    left.iter().zip(&right).map(|(l, r)| l + r).collect()
}

/// Finishes the sum from the roots of all ranks, in place, without allocation.
///
/// `nodes` are [`roots`] of consecutive ranges that together make `0..n`, in order; `values` is
/// `(nodes.len(), width)`, their values one after another. Returns the sum over all leaves,
/// `(width,)`, which lies at the start of `values`; the rest of `values` is scratch.
/// Cost: `nodes.len() - 1` vector additions. Given n = 0, returns an empty slice.
///
/// # Panics
/// If `values` is not a whole number of vectors or the nodes are not such a cover.
pub fn combine<'a>(n: usize, nodes: &[TreeNode], values: &'a mut [f32]) -> &'a mut [f32] {
    let width = values.len().checked_div(nodes.len()).unwrap_or(0);
    assert_eq!(
        width * nodes.len(),
        values.len(),
        "{} values for {} nodes",
        values.len(),
        nodes.len()
    );
    // Started at leaf 0, the levels on the stack fall strictly from bottom to top, but for the
    // node just pushed.
    let mut stack = [TreeNode::leaf(0); usize::BITS as usize + 1];
    let (mut depth, mut next_leaf) = (0, 0);
    for (i, &node) in nodes.iter().enumerate() {
        assert_eq!(
            node.start(),
            next_leaf,
            "roots leave a gap or overlap before {node:?}"
        );
        next_leaf = node.leaves(n).end;
        values.copy_within(i * width..(i + 1) * width, depth * width);
        stack[depth] = node;
        depth += 1;
        depth = settle(n, &mut stack[..depth], values, width);
    }
    assert!(
        next_leaf == n && depth <= 1,
        "roots cover {next_leaf} of {n} leaves"
    );
    &mut values[..depth * width]
}

/// Adds up the top of the stack for as long as its nodes join; returns the depth that is left.
fn settle(n: usize, nodes: &mut [TreeNode], values: &mut [f32], width: usize) -> usize {
    let mut depth = nodes.len();
    while let [.., left, right] = &mut nodes[..depth] {
        let Some(parent) = left.join(*right, n) else {
            break;
        };
        *left = parent;
        depth -= 1;
        let (below, top) = values.split_at_mut(depth * width);
        add(&mut below[(depth - 1) * width..], &top[..width]);
    }
    depth
}

/// `left += right`, elementwise: the only addition of the tree.
fn add(left: &mut [f32], right: &[f32]) {
    for (l, r) in left.iter_mut().zip(right) {
        *l += r;
    }
}

/// Evaluates the tree over a range of leaves that are pushed in order, like a binary counter.
///
/// Holds at most `2 * ceil(log2(n)) + 1` vectors of `width` floats, allocated by [`Stack::new`] and
/// kept over [`Stack::reset`]. After the leaves of a range it holds the values of [`roots`] of that
/// range.
///
/// ```
/// use paceline_base::tree::{Stack, combine, roots};
///
/// let leaves = [[1.0_f32], [2.0], [3.0]];
/// let mut stack = Stack::new(3, 1);
/// stack.reset(1); // this rank owns the leaves 1 and 2
/// leaves[1..].iter().for_each(|leaf| stack.push(leaf));
/// assert_eq!(stack.nodes(), roots(1..3, 3));
/// let mut gathered = [&leaves[0], stack.values()].concat(); // from the ranks 0 and 1
/// let nodes = [roots(0..1, 3), roots(1..3, 3)].concat();
/// assert_eq!(combine(3, &nodes, &mut gathered), [6.0]);
/// ```
#[derive(Clone, Debug)]
pub struct Stack {
    n: usize,
    width: usize,
    next_leaf: usize,
    nodes: Vec<TreeNode>,
    values: Vec<f32>,
}

impl Stack {
    /// A stack for a tree over `n` leaves of `width` floats each, at leaf 0.
    pub fn new(n: usize, width: usize) -> Self {
        let capacity = 2 * n.next_power_of_two().trailing_zeros() as usize + 1;
        let nodes = Vec::with_capacity(capacity);
        Self {
            n,
            width,
            next_leaf: 0,
            nodes,
            values: Vec::with_capacity(capacity * width),
        }
    }

    /// Drops all values; the next leaf is `start`.
    pub fn reset(&mut self, start: usize) {
        self.nodes.clear();
        self.values.clear();
        self.next_leaf = start;
    }

    /// The same memory for leaves of `width` floats, from leaf `start` on.
    #[must_use]
    pub fn with_width(mut self, width: usize, start: usize) -> Self {
        self.reset(start);
        self.width = width;
        self
    }

    /// Adds the next leaf, `(width,)`.
    ///
    /// # Panics
    /// If all `n` leaves were pushed, or `leaf` has another length.
    pub fn push(&mut self, leaf: &[f32]) {
        assert!(
            self.next_leaf < self.n,
            "leaf {} of a tree over {}",
            self.next_leaf,
            self.n
        );
        self.push_root(TreeNode::leaf(self.next_leaf), leaf);
    }

    /// Adds the value of the node that starts at the next leaf, `(width,)`.
    ///
    /// # Panics
    /// If the node starts elsewhere, or `value` has another length.
    pub fn push_root(&mut self, node: TreeNode, value: &[f32]) {
        assert_eq!(node.start(), self.next_leaf, "start of {node:?}");
        assert_eq!(value.len(), self.width, "length of {node:?}");
        self.next_leaf = node.leaves(self.n).end;
        match self.nodes.last_mut() {
            // The top is added to where it lies, so that the value needs no place.
            Some(top) if let Some(parent) = top.join(node, self.n) => {
                *top = parent;
                let start = self.values.len() - self.width;
                add(&mut self.values[start..], value);
            }
            _ => {
                self.nodes.push(node);
                self.values.extend_from_slice(value);
            }
        }
        let depth = settle(self.n, &mut self.nodes, &mut self.values, self.width);
        self.nodes.truncate(depth);
        self.values.truncate(depth * self.width);
    }

    /// The nodes whose values are held, in order.
    pub fn nodes(&self) -> &[TreeNode] {
        &self.nodes
    }

    /// Their values, `(nodes().len(), width)`: what a rank sends.
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// xorshift64: enough to make floats whose sum depends on the order.
    struct XorShift(u64);

    impl XorShift {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        fn below(&mut self, bound: usize) -> usize {
            (self.next() % bound as u64) as usize
        }

        /// Of both signs and twelve magnitudes.
        fn float(&mut self) -> f32 {
            let scale = 10.0_f32.powi(self.below(12) as i32 - 6);
            (self.next() as u32 as f32 / u32::MAX as f32 - 0.5) * scale
        }
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    fn node(level: u32, index: usize) -> TreeNode {
        TreeNode { level, index }
    }

    /// The part of a sum that a rank computes for its own range of leaves.
    fn partial(leaves: &[&[f32]], range: Range<usize>, stack: &mut Stack) -> Vec<f32> {
        stack.reset(range.start);
        leaves[range.clone()]
            .iter()
            .for_each(|leaf| stack.push(leaf));
        assert_eq!(stack.nodes(), roots(range, leaves.len()));
        stack.values().to_vec()
    }

    fn check_cuts(leaves: &[&[f32]], cuts: &[usize]) {
        let (n, width) = (leaves.len(), leaves[0].len());
        let mut stack = Stack::new(n, width);
        let held = (stack.nodes.capacity(), stack.values.capacity());
        let (mut nodes, mut values) = (Vec::new(), Vec::new());
        for pair in cuts.windows(2) {
            nodes.extend(roots(pair[0]..pair[1], n));
            values.extend(partial(leaves, pair[0]..pair[1], &mut stack));
        }
        assert_eq!(
            held,
            (stack.nodes.capacity(), stack.values.capacity()),
            "storage grew"
        );
        let sum = combine(n, &nodes, &mut values);
        assert_eq!(bits(sum), bits(&sum_all(leaves)), "n {n}, cuts {cuts:?}");
    }

    #[test]
    fn roots_of_known_ranges() {
        for (range, n, expected) in [
            (0..0, 0, vec![]),
            (3..3, 5, vec![]),
            (0..1, 1, vec![node(0, 0)]),
            (0..8, 8, vec![node(3, 0)]),
            (0..6, 6, vec![node(3, 0)]),
            (4..6, 6, vec![node(1, 2)]),
            (4..5, 5, vec![node(0, 4)]),
            (0..3, 6, vec![node(1, 0), node(0, 2)]),
            (3..6, 6, vec![node(0, 3), node(1, 2)]),
            (4..7, 7, vec![node(2, 1)]),
            (1..8, 9, vec![node(0, 1), node(1, 1), node(2, 1)]),
            (
                1..9,
                9,
                vec![node(0, 1), node(1, 1), node(2, 1), node(0, 8)],
            ),
        ] {
            assert_eq!(roots(range.clone(), n), expected, "{range:?} of {n}");
        }
    }

    #[test]
    fn additions_are_the_documented_ones() {
        let leaves: [f32; 6] = [1e8, 1.0, -1e8, 3.0, 1e-3, 7.0];
        let [a, b, c, d, e, f] = leaves;
        let vectors: Vec<&[f32]> = leaves.iter().map(std::slice::from_ref).collect();
        assert_eq!(
            bits(&sum_all(&vectors)),
            bits(&[((a + b) + (c + d)) + (e + f)])
        );
        assert_eq!(
            bits(&sum_all(&vectors[..5])),
            bits(&[((a + b) + (c + d)) + e])
        );
        assert_eq!(bits(&sum_all(&vectors[..3])), bits(&[(a + b) + c]));
        assert!(sum_all(&[]).is_empty());
        assert!(combine(0, &[], &mut []).is_empty());
    }

    #[test]
    fn roots_cover_their_range_with_the_fewest_nodes() {
        for n in 0..=33_usize {
            // All nodes of the tree, each under its lowest level.
            let mut all: Vec<Range<usize>> = (0..=n.next_power_of_two().trailing_zeros())
                .flat_map(|l| (0..n.div_ceil(1 << l)).map(move |i| node(l, i).leaves(n)))
                .collect();
            all.sort_by_key(|r| (r.start, r.end));
            all.dedup();
            for (start, end) in (0..=n).flat_map(|s| (s..=n).map(move |e| (s, e))) {
                // A node is in the answer if it fits and no wider one that fits contains it.
                let fits: Vec<_> = all
                    .iter()
                    .filter(|r| r.start >= start && r.end <= end)
                    .collect();
                let inside = |r: &Range<usize>, o: &Range<usize>| {
                    r != o && o.start <= r.start && r.end <= o.end
                };
                let widest = fits.iter().filter(|r| !fits.iter().any(|o| inside(r, o)));
                let expected: Vec<_> = widest.map(|r| (*r).clone()).collect();
                let got: Vec<_> = roots(start..end, n).iter().map(|r| r.leaves(n)).collect();
                assert_eq!(got, expected, "{start}..{end} of {n}");
            }
        }
    }

    #[test]
    fn any_cut_gives_the_bits_of_one_rank() {
        for n in 1..=64 {
            let seed = 0x9e37_79b9_7f4a_7c15 ^ n as u64;
            println!("n {n}, seed {seed:#x}");
            let mut random = XorShift(seed);
            let data: Vec<f32> = (0..n * 3).map(|_| random.float()).collect();
            let leaves: Vec<&[f32]> = data.chunks(3).collect();
            check_cuts(&leaves, &[0, n]);
            (0..=n).for_each(|cut| check_cuts(&leaves, &[0, cut, n]));
            for ranks in 1..=8 {
                for _ in 0..20 {
                    let mut cuts: Vec<_> = (1..ranks).map(|_| random.below(n + 1)).collect();
                    cuts.extend([0, n]);
                    cuts.sort_unstable();
                    check_cuts(&leaves, &cuts);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "gap or overlap")]
    fn a_missing_rank_is_noticed() {
        let nodes = [roots(0..1, 4), roots(2..4, 4)].concat();
        combine(4, &nodes, &mut [1.0, 2.0]);
    }

    #[test]
    #[should_panic(expected = "cover 3 of 4")]
    fn a_short_cover_is_noticed() {
        combine(4, &roots(0..3, 4), &mut [1.0, 2.0]);
    }
}
