//! Experts of a layer that several ranks have a part of each: rows travel to the rank of an expert
//! and back.
//!
//! ```text
//! rank 0   rows of its blocks --swap--> rows for its experts, by block --products--> --swap--> sum
//! rank 1   the same
//! ```
//! An expert's rows of a block are one product each, as in one process. Every rank adds the results
//! for its rows in the order of experts. So no bit depends on the number of ranks. The shared
//! expert's rows stay.

use std::collections::BTreeMap;
use std::ops::Range;

use paceline_model::Experts;

use super::super::{Cpu, FeedForward, ForwardedRows};
use super::{ExpertWork, RoutedRows};
use crate::error::Error;
use crate::rows::{BlockSums, ExpertParts, ExpertUses, LeafRows, RowSeat};
use crate::weights::{ExpertWeights, Matrix, MatrixStorage, VectorParameter};

/// Rows of all blocks that this rank's experts computed.
#[derive(Debug, Default)]
pub(in crate::cpu) struct GuestRows {
    uses: ExpertUses,
    /// By block and expert.
    work: BTreeMap<(usize, usize), ExpertWork>,
}

/// A layer's experts, and the ranks that have them.
type At<'a> = ((Experts, &'a ExpertWeights), (&'a LeafRows, &'a RowSeat));

impl Cpu<'_> {
    /// The experts' results for each block that is here, of its rows' `inputs`.
    ///
    /// # Errors
    /// [`Error::Comm`] of the other ranks.
    pub(in crate::cpu) fn experts_apart(
        &self,
        (at, (rows, seat)): At<'_>,
        params: &[f32],
        inputs: &[&[f32]],
    ) -> Result<(Vec<ForwardedRows>, GuestRows), Error> {
        let (count, c) = (at.0.count, self.config.width);
        let own = || rows.own().zip(inputs);
        let all = own().map(|(block, x)| self.of_block(&block).route(at, params, x));
        let mut all: Vec<RoutedRows> = all.collect();
        let uses = all.iter().flat_map(|routed| &routed.uses);
        let uses = seat.uses(rows, uses.map(|n| *n as f32).collect(), count)?;
        let mut sent = ExpertParts::new();
        for (block, routed) in rows.own().zip(&mut all) {
            for own in routed.experts.iter_mut().filter(|own| own.expert < count) {
                let x = std::mem::take(&mut own.work.x);
                sent.insert((block.number(), own.expert), x);
            }
        }
        let (mut work, mut given) = (BTreeMap::new(), ExpertParts::new());
        for (key, x) in seat.swap_experts(rows, &uses, &sent, (c, false))? {
            let cpu = self.of_rows(rows.first_of(key.0));
            let (kept, y) = cpu.expert((at.0, &at.1.experts[key.1]), params, x);
            work.insert(key, kept);
            given.insert(key, y);
        }
        let mut got = seat.swap_experts(rows, &uses, &given, (c, true))?;
        let mut found = Vec::with_capacity(all.len());
        for ((block, x), mut routed) in own().zip(all) {
            for own in &mut routed.experts {
                match got.remove(&(block.number(), own.expert)) {
                    Some(y) => own.y = y,
                    None => {
                        let x = std::mem::take(&mut own.work.x);
                        let weights = (at.0, &at.1.experts[own.expert]);
                        (own.work, own.y) = self.of_block(&block).expert(weights, params, x);
                    }
                }
            }
            found.push((routed.sum(x.len(), c), FeedForward::Routed(routed)));
        }
        Ok((found, GuestRows { uses, work }))
    }

    /// The gradients at the inputs of each block that is here, by what its forward pass left and
    /// the gradient at its results.
    ///
    /// # Errors
    /// [`Error::Comm`] of the other ranks.
    pub(in crate::cpu) fn experts_back_apart(
        &self,
        (at, (rows, seat)): At<'_>,
        params: &[f32],
        mut blocks: Vec<(&[f32], RoutedRows, &[f32])>,
        guests: GuestRows,
        sums: &mut BlockSums<'_>,
    ) -> Result<Vec<Vec<f32>>, Error> {
        let (count, c) = (at.0.count, self.config.width);
        let GuestRows { uses, mut work } = guests;
        sums.begin_experts(at.1.ranges(count), uses.clone());
        let (mut outs, mut sent) = (Vec::new(), ExpertParts::new());
        for (block, (_, routed, dy)) in rows.own().zip(&blocks) {
            let mut of = routed.results_back(at.0, dy, c);
            for (own, d) in routed.experts.iter().zip(&mut of.rows) {
                if own.expert < count {
                    sent.insert((block.number(), own.expert), std::mem::take(d));
                }
            }
            outs.push(of);
        }
        let mut given = ExpertParts::new();
        for (key, d) in seat.swap_experts(rows, &uses, &sent, (c, false))? {
            let cpu = self.of_rows(rows.first_of(key.0));
            let kept = work.remove(&key).expect("the rows went forward");
            let weights = (at.0, &at.1.experts[key.1]);
            let d = sums.add_expert(key, |grads| {
                cpu.expert_back(weights, params, (kept, &d), grads)
            });
            given.insert(key, d);
        }
        let mut got = seat.swap_experts(rows, &uses, &given, (c, true))?;
        let mut found = Vec::with_capacity(blocks.len());
        for (nth, ((block, (x, routed, _)), mut of)) in
            rows.own().zip(&mut blocks).zip(outs).enumerate()
        {
            let cpu = self.of_block(&block);
            for (own, d) in routed.experts.iter_mut().zip(&mut of.rows) {
                *d = match got.remove(&(block.number(), own.expert)) {
                    Some(d) => d,
                    None => {
                        let kept = (std::mem::take(&mut own.work), d.as_slice());
                        let weights = (at.0, &at.1.experts[own.expert]);
                        sums.add(nth, |grads| cpu.expert_back(weights, params, kept, grads))
                    }
                };
            }
            let back = (*x, &*routed, of);
            found.push(sums.add(nth, |grads| cpu.routes_back(at, params, back, grads)));
        }
        Ok(found)
    }
}

impl ExpertWeights {
    /// Ranges of the trained values of each of `count` routed experts, in their part.
    fn ranges(&self, count: usize) -> Vec<Vec<Range<usize>>> {
        let of = |matrix: &Matrix| {
            let mut found = Vec::new();
            if let MatrixStorage::Trained(range) = &matrix.kept {
                found.push(range.clone());
            }
            if let Some(VectorParameter::Trained(range)) = &matrix.bias {
                found.push(range.clone());
            }
            let pair = matrix.pair.as_ref();
            found.extend(
                pair.into_iter()
                    .flat_map(|pair| [pair.a.clone(), pair.b.clone()]),
            );
            found
        };
        let experts = self.experts.iter().take(count);
        experts
            .map(|own| own.iter().flat_map(of).collect())
            .collect()
    }
}
