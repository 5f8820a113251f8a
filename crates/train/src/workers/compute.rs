//! Leaves through a whole model, layer by layer, and the sums of their gradients.

use std::ops::Range;

use paceline_base::tree::Stack;

use crate::error::Error;
use crate::run::TrainingRun;
use crate::values::PartValues;
use crate::weights::Parts;

/// The network that one process computes leaves with: a model, or a draft head.
pub(crate) trait LeafModel {
    /// Leaves of a step, and the parts of what is trained.
    fn shape(&self) -> (usize, &Parts);

    /// Losses of leaves of a step; `done` receives the roots of the leaves' range.
    fn compute(
        &mut self,
        params: &[f32],
        at: (u64, Range<usize>),
        done: &mut PartSink<'_>,
    ) -> Result<Vec<f64>, Error>;
}

impl LeafModel for &TrainingRun {
    fn shape(&self) -> (usize, &Parts) {
        (self.order.leaves(), self.net.parts())
    }

    fn compute(
        &mut self,
        params: &[f32],
        (step, leaves): (u64, Range<usize>),
        done: &mut PartSink<'_>,
    ) -> Result<Vec<f64>, Error> {
        let mut values = self.net.whole(params);
        compute(self, &mut values, step, leaves, done)
    }
}

/// A step in this process.
pub(super) fn alone(
    model: &mut impl LeafModel,
    params: &[f32],
    step: u64,
) -> Result<(f64, Vec<f32>), Error> {
    let (leaves, parts) = model.shape();
    let parts = parts.clone();
    let mut grads = vec![0.0; parts.gradient_len()];
    let losses = model.compute(params, (step, 0..leaves), &mut |part, roots| {
        grads[parts.gradients[part].clone()].copy_from_slice(roots);
        Ok(())
    })?;
    parts.fold(&mut grads);
    Ok((losses.iter().sum(), grads))
}

/// Receives the number of a trained part and the values of its roots.
pub(crate) type PartSink<'a> = dyn FnMut(usize, &[f32]) -> Result<(), Error> + 'a;

/// Losses of leaves. `done` receives the number of each trained part and the values of the roots of
/// the leaves' range, as soon as they are computed. The last layer's arrive while the one before is
/// computed.
fn compute(
    run: &TrainingRun,
    values: &mut dyn PartValues,
    step: u64,
    leaves: Range<usize>,
    done: &mut PartSink<'_>,
) -> Result<Vec<f64>, Error> {
    let mut sums = LeafSums::new(run, leaves.start, true);
    let mut losses = Vec::with_capacity(leaves.len());
    let together = run.net.together(run.job.tokens_max * run.job.leaf);
    let all: Vec<usize> = leaves.collect();
    for group in all.chunks(together) {
        let mut done = (group.last() == all.last()).then_some(&mut *done);
        losses.extend(compute_together(
            run,
            values,
            (step, group),
            &mut sums,
            &mut done,
        )?);
    }
    Ok(losses)
}

/// Losses of leaves that go through the layers together: none of no leaves, which asks for the same
/// values.
pub(crate) fn compute_together(
    run: &TrainingRun,
    values: &mut dyn PartValues,
    (step, leaves): (u64, &[usize]),
    sums: &mut LeafSums<'_>,
    done: &mut Option<&mut PartSink<'_>>,
) -> Result<Vec<f64>, Error> {
    let (net, parts) = (&run.net, run.net.parts());
    let leaves: Vec<_> = leaves.iter().map(|leaf| run.leaf(step, *leaf)).collect();
    let leaves: Vec<_> = leaves
        .iter()
        .map(|(leaf, chance)| (leaf, *chance))
        .collect();
    let mut passes = net.begin(values, (&leaves, vec![None; leaves.len()]), 1)?;
    let at = (passes.as_mut_slice(), leaves.as_slice());
    let losses = net.top(values, at, run.judged(step), &mut |[norm, head]| {
        sums.push(parts.norm(), norm);
        sums.push(parts.head(), head);
    })?;
    sums.report_part(parts.head(), done)?;
    sums.report_part(parts.norm(), done)?;
    let mut grads = Vec::new();
    for part in (1..parts.norm()).rev() {
        let params = values.part(part)?;
        grads.resize(parts.gradients[part].len(), 0.0);
        for pass in &mut passes {
            net.down(params, pass, &mut grads)?;
            sums.push(part, &grads);
            grads.fill(0.0);
        }
        if !sums.keeps_memory {
            grads = Vec::new(); // before the sum is copied for other ranks
        }
        sums.report_part(part, done)?;
    }
    let mut grads = vec![0.0; parts.gradients[0].len()];
    for pass in &passes {
        net.bottom(pass, &mut grads)?;
        sums.push(0, &grads);
        grads.fill(0.0);
    }
    sums.report_part(0, done)?;
    Ok(losses)
}

/// The trees over leaves of all parts of what is trained.
pub(crate) struct LeafSums<'a> {
    parts: &'a Parts,
    leaves: usize,
    first_leaf: usize,
    /// Of parts that have leaves and are not handed out.
    stacks: Vec<Option<Stack>>,
    /// Whether the memory of a part serves the next one, since the system clears new pages. Ranks
    /// return it before they copy the sum.
    keeps_memory: bool,
    spare: Option<Stack>,
}

impl<'a> LeafSums<'a> {
    pub(crate) fn new(run: &'a TrainingRun, first_leaf: usize, keeps_memory: bool) -> Self {
        let (parts, leaves) = (run.net.parts(), run.order.leaves());
        let largest = parts.gradients.iter().map(Range::len).max().unwrap_or(0);
        Self {
            parts,
            leaves,
            first_leaf,
            stacks: vec![None; parts.gradients.len()],
            keeps_memory,
            spare: keeps_memory.then(|| Stack::new(leaves, largest)),
        }
    }

    /// Adds the next leaf's gradient of a part.
    fn push(&mut self, part: usize, grads: &[f32]) {
        if grads.is_empty() {
            return;
        }
        let stack = self.stacks[part].get_or_insert_with(|| {
            let spare = self.spare.take();
            let stack = spare.unwrap_or_else(|| Stack::new(self.leaves, grads.len()));
            stack.with_width(grads.len(), self.first_leaf)
        });
        stack.push(grads);
    }

    /// Hands out the roots of a part, and forgets them, if no leaf follows.
    fn report_part(
        &mut self,
        part: usize,
        done: &mut Option<&mut PartSink<'_>>,
    ) -> Result<(), Error> {
        let Some(done) = done else { return Ok(()) };
        if self.parts.gradients[part].is_empty() {
            return Ok(());
        }
        let stack = self.stacks[part].take();
        done(part, stack.as_ref().map_or(&[], Stack::values))?;
        self.spare = stack.filter(|_| self.keeps_memory);
        Ok(())
    }
}
