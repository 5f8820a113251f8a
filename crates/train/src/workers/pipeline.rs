//! Leaves through workers that have a stage each, or some blocks of each row, and exchange them
//! directly: see [`worker::stage`](crate::worker) and [`rows`](crate::rows). A worker that is lost
//! breaks the group of all; it is formed again, and the step is repeated.

use std::ops::Range;

use paceline_base::tree::{self, TreeNode};

use super::{At, WorkerSet, publish, read_values};
use crate::error::Error;
use crate::messages::{FromWorker, ToWorker, params_file, roots_file};
use crate::report::TrainingProgress;
use crate::run::TrainingRun;
use crate::stage::LeafSet;

/// A worker's answer.
#[derive(Clone, Debug, Default)]
struct Piped {
    leaves: Range<usize>,
    losses: Vec<u64>,
    /// SHA-256 of the file of roots.
    digest: Option<String>,
    /// Seconds in which it did not wait for other workers.
    busy_s: f64,
}

/// Losses of leaves, and by stage the nodes of the tree over leaves with their values.
struct PipelineResults {
    losses: Vec<f64>,
    roots: Vec<(Vec<TreeNode>, Vec<f32>)>,
}

impl WorkerSet {
    /// The loss and the gradient of a step.
    pub(super) fn trained(
        &mut self,
        run: &TrainingRun,
        params: &[f32],
        at: &At<'_>,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<(f64, Vec<f32>), Error> {
        let leaves = run.order.leaves();
        let given = self.pipe(run, params, (at, LeafSet::Train), watch)?;
        self.forget(at.step);
        // Stages follow each other as layers do, and the head is last.
        let parts = run.net.parts();
        let mut grads = Vec::with_capacity(parts.gradient_len());
        for (nodes, mut roots) in given.roots {
            grads.extend_from_slice(tree::combine(leaves, &nodes, &mut roots));
        }
        parts.fold(&mut grads);
        Ok((given.losses.iter().sum(), grads))
    }

    /// The loss of each row of what is held out.
    pub(super) fn judged(
        &mut self,
        run: &TrainingRun,
        params: &[f32],
        at: &At<'_>,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<Vec<f64>, Error> {
        let given = self.pipe(run, params, (at, LeafSet::Valid), watch)?;
        Ok(given.losses)
    }

    fn pipe(
        &mut self,
        run: &TrainingRun,
        params: &[f32],
        (at, set): (&At<'_>, LeafSet),
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<PipelineResults, Error> {
        let step = at.step;
        let ranges = match self.stages {
            1 => vec![std::iter::once(0..params.len()).collect()],
            stages => run.stages(stages)?,
        };
        for (stage, ranges) in ranges.iter().enumerate() {
            let own = ranges.iter().flat_map(|range| &params[range.clone()]);
            let own: Vec<f32> = own.copied().collect();
            publish(&self.exchange, &params_file(step, stage), &own)?;
        }
        let lens: Vec<usize> = match self.stages {
            1 => Vec::from([run.net.parts().gradient_len()]),
            _ => ranges
                .iter()
                .map(|ranges| ranges.iter().map(Range::len).sum())
                .collect(),
        };
        self.group().step = step;
        loop {
            self.form(run, None, watch)?;
            let epoch = self.group().epoch;
            let mut all = vec![Piped::default(); self.members.len()];
            let message = |_: usize| ToWorker::Pipe { epoch, step, set };
            let begun = (at.clock)();
            let whole = self.ask_all(&message, watch, |rank, said| match said {
                FromWorker::Piped {
                    epoch: of,
                    start,
                    end,
                    losses,
                    digest,
                    waited_s,
                    ..
                } => {
                    all[rank] = Piped {
                        leaves: start..end,
                        losses,
                        digest,
                        busy_s: (at.clock)() - begun - waited_s,
                    };
                    of == epoch
                }
                _ => false,
            })?;
            self.group().is_formed &= whole;
            if !whole {
                continue;
            }
            match self.results(run.leaves_of(set), step, &lens, &all) {
                Ok(results) => {
                    self.fruitless = 0;
                    if set == LeafSet::Train {
                        self.busy_s = all.iter().map(|own| own.busy_s).reduce(f64::min);
                    }
                    return Ok(results);
                }
                Err((rank, why)) => {
                    self.lose(rank, why);
                    self.group().is_formed = false;
                }
            }
        }
    }

    /// Results of all workers, of `n` leaves and stages with `lens` trained values, or the worker
    /// that gave something else, and why.
    fn results(
        &self,
        n: usize,
        step: u64,
        lens: &[usize],
        all: &[Piped],
    ) -> Result<PipelineResults, (u32, String)> {
        let mut losses = vec![0.0; n];
        let mut roots = vec![(Vec::new(), Vec::new()); lens.len()];
        let mut next = vec![0; lens.len()];
        for (rank, own) in all.iter().enumerate() {
            let wrong = |what: &str| (rank as u32, format!("rank {rank} gave {what}"));
            let (stage, of) = (rank % lens.len(), own.leaves.clone());
            if of.start != next[stage] || of.end < of.start || of.end > n {
                return Err(wrong("the results of other leaves"));
            }
            next[stage] = of.end;
            if stage + 1 == lens.len() {
                let losses = losses[of.clone()].iter_mut().zip(&own.losses);
                losses.for_each(|(place, loss)| *place = f64::from_bits(*loss));
            }
            let Some(digest) = &own.digest else { continue };
            let (nodes, values) = &mut roots[stage];
            let own_nodes = tree::roots(of.clone(), n);
            let file = roots_file(step, of.start, of.end, stage);
            let numbers = own_nodes.len() * lens[stage];
            let read = read_values(&self.exchange.join(file), numbers, Some(digest));
            values.extend(read.ok_or_else(|| wrong("another gradient than it says"))?);
            nodes.extend(own_nodes);
        }
        match next.iter().all(|end| *end == n) {
            true => Ok(PipelineResults { losses, roots }),
            false => Err((0, "some leaves have no result".to_owned())),
        }
    }
}
