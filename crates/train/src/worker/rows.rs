//! A worker that has some blocks of every row: see [`rows`](crate::rows). All workers have all
//! leaves, and the whole model but for cut experts; rank 0 has the sums.

use std::path::Path;

use crate::error::Error;
use crate::messages::roots_file;
use crate::rows::{RowCalls, RowSeat};
use crate::run::TrainingRun;
use crate::shard::Link;
use crate::stage::LeafSet;
use crate::workers::{LeafModel, publish};

/// Tags of blocks' gradients begin here.
const GRADIENTS: u32 = 16;

/// The group of ranks that compute rows together.
#[derive(Debug)]
struct RowLink(Link);

impl RowCalls for RowLink {
    fn gather(&self, own: Vec<f32>, counts: Vec<usize>) -> Result<Vec<f32>, Error> {
        Ok(self.0.gather(own, counts).wait()?)
    }

    fn gather_losses(&self, own: Vec<f64>, counts: Vec<usize>) -> Result<Vec<f64>, Error> {
        Ok(self.0.gather(own, counts).wait()?)
    }

    fn swap(&self, values: Vec<f32>, counts: [Vec<usize>; 2]) -> Result<Vec<f32>, Error> {
        Ok(self.0.swap(values, counts).wait()?)
    }

    fn give(&self, values: Vec<f32>, number: usize) -> Result<(), Error> {
        let sent = self.0.transmit(values, (0, GRADIENTS + number as u32));
        Ok(sent.wait().map(drop)?)
    }

    fn get(&self, n: usize, rank: usize, number: usize) -> Result<Vec<f32>, Error> {
        Ok(self
            .0
            .receive(n, (rank, GRADIENTS + number as u32))
            .wait()?)
    }
}

/// The place of rank `rank` of `of` in a group.
pub(super) fn seat(link: Link, (rank, of): (usize, usize), cuts_experts: bool) -> RowSeat {
    RowSeat {
        calls: Box::new(RowLink(link)),
        rank,
        of,
        cuts_experts,
    }
}

/// Computes all leaves of a step, or rows that are held out, with the other ranks. Gives their
/// losses, and the digest of the gradients' file, which rank 0 writes.
pub(super) fn compute_rows(
    run: &TrainingRun,
    (rank, exchange): (usize, &Path),
    params: &[f32],
    (step, set): (u64, LeafSet),
) -> Result<(Vec<f64>, Option<String>), Error> {
    if set == LeafSet::Valid {
        return Ok((run.losses(params)?, None));
    }
    let (leaves, parts) = (run.order.leaves(), run.net.parts());
    let mut grads = vec![0.0; parts.gradient_len()];
    let mut model = run;
    let losses = model.compute(params, (step, 0..leaves), &mut |part, roots| {
        grads[parts.gradients[part].clone()].copy_from_slice(roots);
        Ok(())
    })?;
    if rank > 0 {
        return Ok((losses, None));
    }
    let file = roots_file(step, 0, leaves, 0);
    Ok((losses, Some(publish(exchange, &file, &grads)?)))
}
