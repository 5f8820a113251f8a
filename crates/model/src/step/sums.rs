//! Products whose input dimension is cut over the ranks of a stage: each rank's part of the sums,
//! and the sums over all ranks.

use std::mem::take;
use std::ops::Range;
use std::sync::mpsc::channel;
use std::thread;

use paceline_tensor::{Activations, BLOCK, Product};

use super::add_bias;
use crate::Error;
use crate::links::Links;
use crate::model::Model;
use crate::split::LeafCut;
use crate::weights::Summed;

/// Rows from which a rank exchanges a block's sums while it computes the next one's: with fewer
/// there is one block. A block of a small model (width 576) is 1 to 2 ms of work and 288 KiB to
/// send, and the thread that sends takes some tens of microseconds to start.
const OVERLAP_FROM: usize = BLOCK + 1;

/// Buffers for sums.
#[derive(Debug)]
pub(super) struct Sums {
    /// `(roots of all ranks, T, C)`; the sum of them, `(T, C)`, is at the start.
    pub(super) delta: Vec<f32>,
    /// `(roots of this rank, T, C)`; empty when no other rank shares its layers.
    partial: Vec<f32>,
    /// Values that each rank sends.
    counts: Vec<usize>,
}

impl Sums {
    pub(super) fn new(model: &Model, rows: usize) -> Self {
        let (shard, n) = (model.shard(), rows * model.config().width);
        let most = |of: fn(&LeafCut) -> usize| of(&shard.attention).max(of(&shard.feed_forward));
        let ranks = shard.stage_ranks().len();
        let own_roots = if ranks == 1 {
            0
        } else {
            most(LeafCut::own_roots)
        };
        Self {
            delta: vec![0.0; n * most(|cut| cut.nodes.len())],
            partial: vec![0.0; n * own_roots],
            counts: Vec::with_capacity(ranks),
        }
    }

    /// x (T, in) -> delta (T, C): this rank's roots of the canonical sum, then the sum over the
    /// roots of all ranks.
    pub(super) fn compute(
        &mut self,
        model: &Model,
        weights: &Summed,
        cut: &LeafCut,
        x: &Activations,
    ) -> Result<(), Error> {
        let n = x.rows() * model.config().width;
        match model.links().filter(|_| cut.roots.len() > 1) {
            None => own_part(model, weights, x, 0..x.rows(), &mut self.delta[..n]),
            Some(links) if x.rows() >= OVERLAP_FROM => {
                self.overlapped(model, links, weights, cut, x)?;
            }
            Some(links) => {
                let mine = &mut self.partial[..weights.roots.len() * n];
                own_part(model, weights, x, 0..x.rows(), mine);
                let sum = &mut self.delta[..cut.nodes.len() * n];
                links.sum(cut, mine, sum, &mut self.counts)?;
            }
        }
        add_bias(&mut self.delta, weights.bias.as_deref(), x.rows());
        Ok(())
    }

    /// Sums of many rows, block by block: a thread exchanges one while the next is computed. All
    /// ranks of a stage have the same rows, and so the same blocks.
    fn overlapped(
        &mut self,
        model: &Model,
        links: &Links,
        weights: &Summed,
        cut: &LeafCut,
        x: &Activations,
    ) -> Result<(), Error> {
        let (width, rows) = (model.config().width, x.rows());
        let blocks = || (0..rows).step_by(BLOCK).map(|t| t..rows.min(t + BLOCK));
        let Self {
            delta,
            partial,
            counts,
        } = self;
        let (mut parts, mut sums) = (&mut partial[..], &mut delta[..]);
        let (computed, to_exchange) = channel::<(&[f32], &mut [f32])>();
        thread::scope(|scope| {
            let exchange = thread::Builder::new().name("exchange".into());
            let exchange = exchange.spawn_scoped(scope, move || {
                let mut blocks = to_exchange.into_iter();
                blocks.try_for_each(|(mine, sum)| links.sum(cut, mine, sum, counts))
            });
            let exchange = exchange.map_err(Error::Thread)?;
            for block in blocks() {
                let n = block.len() * width;
                let mine = cut_off(&mut parts, weights.roots.len() * n);
                let sum = cut_off(&mut sums, cut.nodes.len() * n);
                own_part(model, weights, x, block, mine);
                if computed.send((mine, sum)).is_err() {
                    break; // the exchange has failed, and says why
                }
            }
            drop(computed);
            exchange.join().expect("the exchange does not panic")
        })?;
        // Each sum is at the start of its block's room for the roots of all ranks.
        for block in blocks() {
            let [from, to] = [cut.nodes.len(), 1].map(|roots| roots * block.start * width);
            delta.copy_within(from..from + block.len() * width, to);
        }
        Ok(())
    }
}

/// The first `n` values of what is left.
fn cut_off<'a>(left: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (first, rest) = take(left).split_at_mut(n);
    *left = rest;
    first
}

/// This rank's roots for some rows of `x`, `(roots, rows, C)`.
fn own_part(model: &Model, weights: &Summed, x: &Activations, rows: Range<usize>, out: &mut [f32]) {
    let n = rows.len() * model.config().width;
    let outs = out.chunks_exact_mut(n).zip(&weights.roots);
    let products = outs.map(|(out, (first_col, weights))| Product {
        weights,
        first_col: *first_col,
        out,
    });
    model.kernels().products_of_rows(x, rows, products);
}
