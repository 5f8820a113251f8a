//! Products whose input dimension is cut over the ranks of a stage: each rank's part of the sums,
//! and the sums over all ranks.

use std::mem::take;
use std::ops::Range;
use std::sync::mpsc::channel;
use std::thread;

use paceline_comm::Memory;
use paceline_tensor::{Activations, BLOCK, Product};

use super::{add_bias, exchanged};
use crate::Error;
use crate::links::Links;
use crate::model::Model;
use crate::split::LeafCut;
use crate::weights::Summed;

/// Rows from which a rank exchanges a block's sums while it computes the next one's, where sums
/// [overlap](Links::overlap): with fewer there is one block. A block of a small model (width 576)
/// is 1 to 2 ms of work and 288 KiB to send, and the thread that sends takes some tens of
/// microseconds to start.
const OVERLAP_FROM: usize = BLOCK + 1;

/// Buffers for sums.
#[derive(Debug)]
pub(super) struct Sums {
    /// `(roots of all ranks, T, C)`; the sum of them, `(T, C)`, is at the start.
    pub(super) delta: Memory<f32>,
    /// Values that each rank sends.
    counts: Vec<usize>,
}

impl Sums {
    pub(super) fn new(model: &Model, rows: usize) -> Self {
        let (shard, n) = (model.shard(), rows * model.config().width);
        let nodes = |cut: &LeafCut| cut.nodes.len();
        let most = nodes(&shard.attention).max(nodes(&shard.feed_forward));
        Self {
            delta: exchanged(model, n * most),
            counts: Vec::with_capacity(shard.stage_ranks().len()),
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
            Some(links) if links.overlap && x.rows() >= OVERLAP_FROM => {
                self.overlapped(model, links, weights, cut, x)?;
            }
            Some(links) => {
                let sum = &mut self.delta[..cut.nodes.len() * n];
                own_part(model, weights, x, 0..x.rows(), mine(cut, sum));
                links.sum(cut, sum, &mut self.counts)?;
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
        let Self { delta, counts } = self;
        let mut left = &mut delta[..];
        let (computed, to_exchange) = channel::<&mut [f32]>();
        thread::scope(|scope| {
            let exchange = thread::Builder::new().name("exchange".into());
            let exchange = exchange.spawn_scoped(scope, move || {
                let mut blocks = to_exchange.into_iter();
                blocks.try_for_each(|sum| links.sum(cut, sum, counts))
            });
            let exchange = exchange.map_err(Error::Thread)?;
            for block in blocks() {
                let sum = cut_off(&mut left, cut.nodes.len() * block.len() * width);
                own_part(model, weights, x, block, mine(cut, sum));
                if computed.send(sum).is_err() {
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

/// Where the other ranks expect this rank's roots in the room for those of all.
fn mine<'a>(cut: &LeafCut, sum: &'a mut [f32]) -> &'a mut [f32] {
    let n = sum.len() / cut.nodes.len();
    &mut sum[cut.roots_before() * n..][..cut.own_roots() * n]
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
