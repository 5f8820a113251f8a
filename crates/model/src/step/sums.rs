//! Products whose inputs are divided over the ranks of a stage: this rank's partial sums, and the
//! exchange that completes them.

use paceline_comm::RegisteredMemory;
use paceline_tensor::{Activations, Product};

use super::adapter_products::{self, AdapterProducts, AdapterRows};
use super::halves::HalfTurn;
use super::rows::{add_bias, exchanged};
use crate::model::Model;
use crate::split::LeafCut;
use crate::weights::Summed;
use crate::{Error, LayerRole};

/// Buffers for sums.
#[derive(Debug)]
pub(super) struct Sums {
    /// `(roots of all ranks, T, C)`; the whole sum, `(T, C)`, ends up at the start. With adapters
    /// each root has additional values ([`adapter_products`]).
    pub(super) delta: RegisteredMemory<f32>,
    /// Values that each rank sends.
    counts: Vec<usize>,
}

impl Sums {
    pub(super) fn new(model: &Model, rows: usize) -> Self {
        let shard = model.shard();
        let wide = model.adapters().summed_rank_max();
        let n = rows * model.config().width + adapter_products::room(rows, wide);
        let nodes = |cut: &LeafCut| cut.nodes.len();
        let cuts = shard
            .each_layer()
            .map(|cut| [&cut.attention, &cut.feed_forward, cut.dense()].map(nodes));
        let cuts = cuts.flatten();
        let most = cuts.max().unwrap_or(0);
        Self {
            delta: exchanged(model, n * most),
            counts: Vec::with_capacity(shard.stage_ranks().len()),
        }
    }

    /// x (T, in) -> delta (T, C): this rank's roots of the canonical sum, then the sum over the
    /// roots of all ranks. `index` labels the exchange. The sum includes the adapters of `runs`.
    /// The other half of the step, if any, computes during the exchange.
    pub(super) fn compute(
        &mut self,
        (model, index, runs): (&Model, usize, &[AdapterRows]),
        (weights, part): (&Summed, LayerRole),
        cut: &LeafCut,
        x: &Activations,
        turn: Option<&mut HalfTurn<'_>>,
    ) -> Result<(), Error> {
        let beside = AdapterProducts::of(model, (index, part), runs);
        let own = x.rows() * model.config().width;
        let n = own + beside.as_ref().map_or(0, |beside| beside.room(x.rows()));
        let links = model.links().filter(|_| cut.roots.len() > 1);
        let delta = &mut self.delta;
        // Its roots are at the offset that the other ranks expect.
        let first = links.map_or(0, |_| cut.roots_before());
        let mine = &mut delta[first * n..(first + weights.roots.len()) * n];
        let outs = mine.chunks_exact_mut(n).zip(&weights.roots);
        let products = outs.map(|(out, (first_col, weights))| Product {
            weights,
            first_col: *first_col,
            out: &mut out[..own],
        });
        model.kernels().products(x, products);
        if let Some(beside) = &beside {
            beside.read_roots(x, cut, (&mut *mine, own));
        }
        self.exchange((model, index), cut, n, turn)?;
        add_bias(&mut self.delta, weights.bias.as_deref(), x.rows());
        if let Some(beside) = &beside {
            beside.add_sum(&mut self.delta[..n], own);
        }
        Ok(())
    }

    /// This rank's roots, of `n` values each, in place in delta -> the sum over the roots of all
    /// ranks.
    pub(super) fn exchange(
        &mut self,
        (model, index): (&Model, usize),
        cut: &LeafCut,
        n: usize,
        turn: Option<&mut HalfTurn<'_>>,
    ) -> Result<(), Error> {
        let Self { delta, counts } = self;
        if let Some(links) = model.links().filter(|_| cut.roots.len() > 1) {
            let sum = &mut delta[..cut.nodes.len() * n];
            let mut exchange = || links.sum(index, cut, sum, counts);
            match turn {
                Some(turn) => links.in_turn(turn, index, exchange),
                None => exchange(),
            }?;
        }
        Ok(())
    }
}
