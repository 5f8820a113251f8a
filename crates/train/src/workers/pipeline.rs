//! Leaves through workers that have a stage each.

use std::collections::BTreeMap;
use std::ops::Range;

use paceline_base::Rank;
use paceline_base::tree::Stack;
use paceline_cluster::Error as ClusterError;

use super::flow::Flow;
use super::{AssignedLeaves, At, LOOK_EVERY, WorkerEvent, WorkerSet, publish, read_values};
use crate::error::Error;
use crate::messages::{FromWorker, LeafTask, Set, ToWorker, params_file};
use crate::run::{TrainingProgress, TrainingRun};

/// Results of leaves.
struct PipelineResults {
    /// By leaf.
    losses: Vec<f64>,
    /// By stage.
    sums: Vec<Sum>,
}

/// The tree over leaves' gradients of a stage, which arrive in any order.
struct Sum {
    stack: Stack,
    /// The leaf that the tree takes next.
    next: usize,
    /// Leaves that arrived before that one: few, since the first ones go through stages first.
    early: BTreeMap<usize, Vec<f32>>,
}

impl Sum {
    fn new(leaves: usize, n: usize) -> Self {
        Self {
            stack: Stack::new(leaves, n),
            next: 0,
            early: BTreeMap::new(),
        }
    }

    fn take(&mut self, leaf: usize, grads: Vec<f32>) {
        self.early.insert(leaf, grads);
        while let Some(grads) = self.early.remove(&self.next) {
            self.stack.push(&grads);
            self.next += 1;
        }
    }
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
        let given = self.flow(run, params, (at, Set::Train, leaves), watch)?;
        self.forget(at.step);
        // Stages follow each other as layers do, and the head is last.
        let parts = run.net.parts();
        let mut grads = Vec::with_capacity(parts.gradient_len());
        for sum in &given.sums {
            grads.extend_from_slice(sum.stack.values());
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
        let rows = run.held_out();
        Ok(self
            .flow(run, params, (at, Set::Valid, rows), watch)?
            .losses)
    }

    fn flow(
        &mut self,
        run: &TrainingRun,
        params: &[f32],
        (at, set, leaves): (&At<'_>, Set, usize),
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<PipelineResults, Error> {
        let ranges = run.stages(self.stages)?;
        for (stage, ranges) in ranges.iter().enumerate() {
            let own = ranges.iter().flat_map(|range| &params[range.clone()]);
            let own: Vec<f32> = own.copied().collect();
            publish(&self.exchange, &params_file(at.step, stage), &own)?;
        }
        let lens: Vec<usize> = ranges
            .iter()
            .map(|ranges| ranges.iter().map(Range::len).sum())
            .collect();
        let mut flow = Flow::new(self.stages, leaves, set == Set::Train);
        // Leaves that are only evaluated have no gradient.
        let trained = |len: usize| if set == Set::Train { len } else { 0 };
        let sum = |len: &usize| Sum::new(leaves, trained(*len));
        let mut given = PipelineResults {
            losses: vec![0.0; leaves],
            sums: lens.iter().map(sum).collect(),
        };
        while !flow.is_over() {
            self.hand_out(&mut flow, (at.step, set));
            self.check_alive()?;
            if let Some(event) = self.workers.recv(LOOK_EVERY) {
                match self.take(event)? {
                    WorkerEvent::Nothing => {}
                    WorkerEvent::Lost(has) => return_leaves(&mut flow, &has),
                    WorkerEvent::Said(rank, message) => {
                        let n = lens[self.stage(rank as usize).index];
                        let wrong = self.passed(rank, message, n, (&mut flow, &mut given));
                        if let Some(why) = wrong {
                            return_leaves(&mut flow, &self.lose(rank, why));
                        }
                    }
                }
            }
            for has in self.lose_hung(at) {
                return_leaves(&mut flow, &has);
            }
            self.report_progress(watch);
        }
        Ok(given)
    }

    /// Gives a leaf to each worker that has none and for whose stage there is one.
    fn hand_out(&mut self, flow: &mut Flow, (step, set): (u64, Set)) {
        for rank in 0..self.members.len() {
            let member = &self.members[rank];
            if !member.is_ready || member.has.task.is_some() {
                continue;
            }
            let Some((leaf, back)) = flow.next(rank % self.stages) else {
                continue;
            };
            let task = LeafTask {
                step,
                set,
                leaf,
                back,
            };
            self.members[rank].has.task = Some(task);
            self.deadlines.begin(rank, 1);
            match self.workers.send(Rank(rank as u32), &ToWorker::Pass(task)) {
                // The event of its end follows within `CLOSED_LIMIT` of the monitor, with the
                // reason; the task is returned then.
                Ok(()) | Err(ClusterError::Closed { .. }) => {}
                Err(error) => return_leaves(flow, &self.lose(rank as u32, error.to_string())),
            }
        }
    }

    /// Records the result of a stage of `n` trained values. Returns the reason if it is invalid.
    fn passed(
        &mut self,
        rank: u32,
        message: FromWorker,
        n: usize,
        (flow, given): (&mut Flow, &mut PipelineResults),
    ) -> Option<String> {
        let FromWorker::Passed { task, loss, digest } = message else {
            return None;
        };
        let stage = self.stage(rank as usize).index;
        if self.members[rank as usize].has.task != Some(task) {
            return None; // of a step that is over
        }
        if let Some(loss) = loss {
            given.losses[task.leaf] = f64::from_bits(loss);
        }
        if task.back {
            let file = self.exchange.join(task.roots_file(stage));
            let digest = digest.unwrap_or_default();
            let Some(grads) = read_values(&file, n, Some(&digest)) else {
                return Some(format!("rank {rank} wrote another gradient than it says"));
            };
            given.sums[stage].take(task.leaf, grads);
        }
        for name in task.spent(self.stage(rank as usize)) {
            // Other files are removed with the step's folder.
            let _ = std::fs::remove_file(self.exchange.join(name));
        }
        self.members[rank as usize].has.task = None;
        self.deadlines.end(rank as usize, 0);
        self.fruitless = 0;
        flow.pass(task.leaf);
        None
    }
}

/// Returns the work of a lost worker for others to do.
fn return_leaves(flow: &mut Flow, has: &AssignedLeaves) {
    if let Some(task) = has.task {
        flow.lose(task.leaf);
    }
}
