//! A rank's process: its shard, the copy of another, and its part of each step.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use paceline_base::tree::{self, Stack};
use paceline_cluster::machine;
use paceline_comm::tcp::Listener;

use super::link::{Link, Pending, listen};
use super::state::{ShardFile, ShardState, share};
use super::{GroupPlan, ShardCuts, ShardRole, Sharding};
use crate::activity::Activity;
use crate::error::Error;
use crate::messages::{FromWorker, RankUse, ShardSource, ToWorker};
use crate::optimiser::{Optimiser, norm, squares};
use crate::run::TrainingRun;
use crate::stage::LeafSet;
use crate::values::PartValues;
use crate::worker::{RunChannel, error_chain, unexpected};
use crate::workers::{LeafSums, compute_together, publish_all};

/// Rows of held-out data that go through the layers together: their values between layers take less
/// than those of a step.
const ROWS_TOGETHER: usize = 16;

/// A rank that has read its model.
pub(crate) struct RankWorker<'a> {
    channel: &'a RunChannel,
    activity: Arc<Activity>,
    run: TrainingRun,
    /// Folder of exchanged files.
    exchange: PathBuf,
    role: ShardRole,
    cuts: ShardCuts,
    listener: Option<Listener>,
    link: Option<Link>,
    state: Option<RankState>,
}

/// Memory of a rank between steps.
struct RankState {
    /// Steps that are done.
    step: u64,
    /// The own shard, and the copy of that of the rank before.
    halves: [ShardState; 2],
    /// The gradients of both, of a step that is not committed.
    uncommitted: Option<[Vec<f32>; 2]>,
    /// All values, and the step before which they are that; for [`Sharding::State`].
    values: (Option<u64>, Vec<f32>),
}

impl<'a> RankWorker<'a> {
    pub(crate) fn new(
        (channel, activity): (&'a RunChannel, &Arc<Activity>),
        run: TrainingRun,
        exchange: PathBuf,
        role: ShardRole,
    ) -> Self {
        let cuts = ShardCuts::new(run.net.layout(), run.net.parts(), role.of);
        Self {
            channel,
            activity: Arc::clone(activity),
            run,
            exchange,
            role,
            cuts,
            listener: None,
            link: None,
            state: None,
        }
    }

    /// Does what a message asks for. Reports a failure of the group; the rank keeps its state.
    pub(crate) fn handle(&mut self, message: ToWorker) -> Result<(), Error> {
        let epoch = match &message {
            ToWorker::Listen { epoch, .. }
            | ToWorker::Form { epoch, .. }
            | ToWorker::Step { epoch, .. }
            | ToWorker::Judge { epoch, .. }
            | ToWorker::Save { epoch, .. } => *epoch,
            other => return Err(unexpected(Some(other), "a message for a rank")),
        };
        let activity = Arc::clone(&self.activity);
        let done = match message {
            ToWorker::Listen { open, .. } => self.listen(epoch, open),
            ToWorker::Form {
                plan, from, step, ..
            } => self.form(epoch, &plan, (&from, step)),
            ToWorker::Step { step, .. } => {
                activity.compute(LeafSet::Train, || self.step(epoch, step))
            }
            ToWorker::Judge { .. } => activity.compute(LeafSet::Valid, || self.judge(epoch)),
            _ => self.save(epoch),
        };
        match done {
            Err(error @ (Error::Comm(_) | Error::Join(_))) => {
                self.link = None; // so that the other ranks notice
                let reason = error_chain(&error);
                Ok(self.channel.send(&FromWorker::Broken { epoch, reason })?)
            }
            other => other,
        }
    }

    fn listen(&mut self, epoch: u64, open: bool) -> Result<(), Error> {
        self.link = None;
        let (listener, addrs) = listen(open)?;
        self.listener = Some(listener);
        let step = self.state.as_ref().map(|state| state.step);
        Ok(self
            .channel
            .send(&FromWorker::Listening { epoch, addrs, step })?)
    }

    /// Joins the others. Then every rank has its shard and its copy of another, before `step`.
    fn form(
        &mut self,
        epoch: u64,
        plan: &GroupPlan,
        (from, step): (&ShardSource, u64),
    ) -> Result<(), Error> {
        let Some(listener) = self.listener.take() else {
            return Err(unexpected(None, "Listen before Form"));
        };
        let link = Link::join(listener, (self.role.rank, &self.activity), plan)?;
        match from {
            ShardSource::First => self.begin(step),
            ShardSource::File => self.read(&link, step)?,
            ShardSource::Copies { empty, norm } => {
                if let Some(state) = &mut self.state {
                    match norm {
                        Some(norm) => state.commit(f64::from_bits(*norm)),
                        None => state.uncommitted = None,
                    }
                }
                self.restore(&link, empty, step)?;
            }
        }
        // Of the group and the step that failed, and of shards on their way.
        machine::give_back_free_memory();
        self.link = Some(link);
        Ok(self.channel.send(&FromWorker::Formed { epoch, step })?)
    }

    /// A shard of a rank, all zeros.
    fn empty(&self, rank: usize) -> ShardState {
        let n = self.cuts.len(rank);
        ShardState {
            params: vec![0.0; n],
            optimiser: Optimiser::new(self.run.job.optimiser, n),
        }
    }

    /// The state before the first step.
    fn begin(&mut self, step: u64) {
        let (net, seed) = (&self.run.net, self.run.job.seed);
        let halves = [self.role.rank, self.role.before()].map(|rank| ShardState {
            params: net.first_values_of(seed, &self.cuts.shard(rank)),
            ..self.empty(rank)
        });
        self.state = Some(RankState::new(step, halves));
    }

    /// The state of a file, and the copy of the rank before.
    fn read(&mut self, link: &Link, step: u64) -> Result<(), Error> {
        self.state = None; // before the next one takes memory
        let mut own = self.empty(self.role.rank);
        own.read(&self.exchange.join(ShardFile::given(step, self.role.rank)))?;
        let mut copy = self.empty(self.role.before());
        link.pass_all(self.role, own.vectors(), copy.vectors_mut())?;
        self.state = Some(RankState::new(step, [own, copy]));
        Ok(())
    }

    /// Gives ranks without a state theirs, by rank.
    fn restore(&mut self, link: &Link, empty: &[usize], step: u64) -> Result<(), Error> {
        for lost in empty {
            let lost = ShardRole {
                rank: *lost,
                ..self.role
            };
            if let Some(state) = &self.state {
                if lost.behind() == self.role.rank {
                    link.give(state.halves[1].vectors(), lost.rank)?;
                }
                if lost.before() == self.role.rank {
                    link.give(state.halves[0].vectors(), lost.rank)?;
                }
            } else if lost.rank == self.role.rank {
                let mut halves = [self.empty(lost.rank), self.empty(lost.before())];
                link.get(halves[0].vectors_mut(), lost.behind())?;
                link.get(halves[1].vectors_mut(), lost.before())?;
                self.state = Some(RankState::new(step, halves));
            }
        }
        Ok(())
    }

    fn parts(&mut self) -> Result<(&TrainingRun, &ShardCuts, &Link, &mut RankState), Error> {
        match (&self.link, &mut self.state) {
            (Some(link), Some(state)) => Ok((&self.run, &self.cuts, link, state)),
            _ => Err(unexpected(None, "Form")),
        }
    }

    /// One step. The commit is the last gather.
    fn step(&mut self, epoch: u64, step: u64) -> Result<(), Error> {
        let role = self.role;
        let (run, cuts, link, state) = self.parts()?;
        let (leaves, parts) = (run.order.leaves(), run.net.parts());
        let sent_before = link.sent_bytes();
        let sums = (link, cuts, role);
        let mut sums = SliceSums::new(sums, leaves, run);
        let mut losses = Vec::new();
        let together = run.net.together(run.job.tokens_max * run.job.leaf) * role.of;
        let rounds: Vec<Range<usize>> = (0..leaves)
            .step_by(together)
            .map(|first| first..(first + together).min(leaves))
            .collect();
        for round in &rounds {
            let own = share(round.clone(), role.rank, role.of);
            let mut of_leaves = LeafSums::new(run, own.start, false);
            let own: Vec<usize> = own.collect();
            sums.begin(round.clone())?;
            let mut done = |part: usize, roots: &[f32]| sums.take(part, roots);
            let norm = parts.norm();
            let order = (0..=norm + 1).chain((1..norm).rev());
            losses.extend(with_values(
                run,
                (cuts, link, role),
                state,
                order,
                |values| {
                    let at = (step, own.as_slice());
                    compute_together(run, values, at, &mut of_leaves, &mut Some(&mut done))
                },
            )?);
        }
        let grads = sums.finish()?;
        let counts: Vec<usize> = (0..role.of)
            .map(|rank| {
                rounds
                    .iter()
                    .map(|r| share(r.clone(), rank, role.of).len())
                    .sum()
            })
            .collect();
        let losses = link.gather(losses, counts).wait()?;
        let losses = by_leaf(&losses, &rounds, role.of);
        let own = squares(&cuts.block_lens(role.rank), &grads[0]);
        state.uncommitted = Some(grads);
        let counts = (0..role.of).map(|rank| cuts.block_lens(rank).len());
        let all = link.gather(own, counts.collect()).wait()?;
        let norm = norm(run.net.layout(), &cuts.in_order(&all));
        if losses.iter().sum::<f64>().is_finite() {
            state.commit(norm);
        }
        let use_of = RankUse {
            sent_bytes: link.sent_bytes() - sent_before,
            memory_bytes: machine::peak_memory_bytes(),
        };
        let done = FromWorker::Stepped {
            epoch,
            step,
            use_of,
            norm: norm.to_bits(),
            losses: losses.into_iter().map(f64::to_bits).collect(),
        };
        Ok(self.channel.send(&done)?)
    }

    /// The losses of this rank's part of the rows that are held out.
    fn judge(&mut self, epoch: u64) -> Result<(), Error> {
        let role = self.role;
        let (run, cuts, link, state) = self.parts()?;
        let n = run.held_out();
        let together = ROWS_TOGETHER * role.of;
        let mut losses = Vec::new();
        for first in (0..n).step_by(together) {
            let round = first..(first + together).min(n);
            let own = share(round, role.rank, role.of);
            let leaves: Vec<_> = own.clone().map(|row| run.held_out_row(row)).collect();
            let leaves: Vec<_> = leaves.iter().collect();
            let order = 0..run.net.parts().count();
            let of = with_values(run, (cuts, link, role), state, order, |values| {
                run.net.losses(values, &leaves, vec![None; leaves.len()])
            })?;
            losses.extend(own.zip(of.into_iter().map(f64::to_bits)));
        }
        Ok(self.channel.send(&FromWorker::Judged { epoch, losses })?)
    }

    /// Writes the own shard for a checkpoint.
    fn save(&mut self, epoch: u64) -> Result<(), Error> {
        let (rank, exchange) = (self.role.rank, self.exchange.clone());
        let (_, _, _, state) = self.parts()?;
        let vectors = state.halves[0].vectors();
        let digest = publish_all(&exchange, &ShardFile::saved(rank), &vectors)?;
        let step = state.step;
        let saved = FromWorker::Saved {
            epoch,
            rank,
            step,
            digest,
        };
        Ok(self.channel.send(&saved)?)
    }
}

impl RankState {
    fn new(step: u64, halves: [ShardState; 2]) -> Self {
        Self {
            step,
            halves,
            uncommitted: None,
            values: (None, Vec::new()),
        }
    }

    /// Applies the gradients of the step under way, if there are any, whose length is `norm`.
    fn commit(&mut self, norm: f64) {
        let Some(grads) = self.uncommitted.take() else {
            return;
        };
        for (half, mut grads) in self.halves.iter_mut().zip(grads) {
            half.optimiser
                .update(self.step, norm, &mut grads, &mut half.params);
        }
        self.step += 1;
    }
}

/// Calls `with` with the values before a step, whose parts are asked for in this order.
fn with_values<T>(
    run: &TrainingRun,
    (cuts, link, role): (&ShardCuts, &Link, ShardRole),
    state: &mut RankState,
    order: impl IntoIterator<Item = usize>,
    with: impl FnOnce(&mut dyn PartValues) -> Result<T, Error>,
) -> Result<T, Error> {
    let own = &state.halves[0].params;
    if role.sharding == Sharding::All {
        let order = order.into_iter().collect();
        return with(&mut GatheredValues::new((link, cuts, role), own, order));
    }
    if state.values.0 != Some(state.step) {
        let parts = run.net.parts();
        let n = parts.count() - usize::from(parts.is_shared());
        let mut from = GatheredValues::new((link, cuts, role), own, (0..n).collect());
        let mut all = Vec::with_capacity(run.net.layout().len());
        for part in 0..n {
            all.extend_from_slice(from.part(part)?);
        }
        state.values = (Some(state.step), all);
    }
    with(&mut run.net.whole(&state.values.1))
}

/// Values of parts that all ranks have slices of. The next part is on its way while one is used.
struct GatheredValues<'a> {
    link: &'a Link,
    cuts: &'a ShardCuts,
    role: ShardRole,
    /// The own shard's values.
    own: &'a [f32],
    /// The parts that are asked for from here on.
    order: VecDeque<usize>,
    ahead: Option<Pending<f32>>,
    values: Vec<f32>,
}

impl<'a> GatheredValues<'a> {
    fn new(
        (link, cuts, role): (&'a Link, &'a ShardCuts, ShardRole),
        own: &'a [f32],
        order: VecDeque<usize>,
    ) -> Self {
        Self {
            link,
            cuts,
            role,
            own,
            order,
            ahead: None,
            values: Vec::new(),
        }
    }

    /// Starts the gather of the part that is asked for next; none of a part without values.
    fn start(&self) -> Option<Pending<f32>> {
        let part = *self.order.front()?;
        let counts = self.cuts.counts(part);
        let is_empty = counts.iter().all(|n| *n == 0);
        let own = &self.own[self.cuts.place(part, self.role.rank)];
        (!is_empty).then(|| self.link.gather(own.to_vec(), counts))
    }
}

impl PartValues for GatheredValues<'_> {
    fn part(&mut self, part: usize) -> Result<&[f32], Error> {
        assert_eq!(self.order.front(), Some(&part), "parts in another order");
        let pending = self.ahead.take().or_else(|| self.start());
        self.values = Vec::new(); // before the next one arrives
        self.values = match pending {
            Some(pending) => pending.wait()?,
            None => Vec::new(),
        };
        self.order.pop_front();
        self.ahead = self.start();
        Ok(&self.values)
    }
}

/// The sums of this rank's slices over all leaves. One part's roots are on their way while the next
/// part's are computed.
struct SliceSums<'a> {
    link: &'a Link,
    cuts: &'a ShardCuts,
    role: ShardRole,
    run: &'a TrainingRun,
    leaves: usize,
    /// Leaves under way.
    round: Range<usize>,
    /// By part.
    stacks: Vec<Stack>,
    on_way: Option<(usize, Pending<f32>)>,
    copy_on_way: Option<(usize, Pending<f32>)>,
    /// Of the own shard, and of that of the rank before.
    grads: [Vec<f32>; 2],
}

impl<'a> SliceSums<'a> {
    fn new(
        (link, cuts, role): (&'a Link, &'a ShardCuts, ShardRole),
        leaves: usize,
        run: &'a TrainingRun,
    ) -> Self {
        let parts = 0..run.net.parts().count();
        let stack = |part: usize| Stack::new(leaves, cuts.slices(part)[role.rank].len());
        Self {
            link,
            cuts,
            role,
            run,
            leaves,
            round: 0..0,
            stacks: parts.map(stack).collect(),
            on_way: None,
            copy_on_way: None,
            grads: [role.rank, role.before()].map(|rank| vec![0.0; cuts.len(rank)]),
        }
    }

    /// Leaves that all ranks together compute next.
    fn begin(&mut self, round: Range<usize>) -> Result<(), Error> {
        self.land()?;
        self.round = round;
        Ok(())
    }

    fn nodes(&self, rank: usize) -> Vec<tree::TreeNode> {
        tree::roots(share(self.round.clone(), rank, self.role.of), self.leaves)
    }

    /// Sends the roots of a part to the ranks that have slices of it.
    fn take(&mut self, part: usize, roots: &[f32]) -> Result<(), Error> {
        self.land()?;
        let slices = self.cuts.slices(part);
        let (first, width) = (
            slices[0].start,
            self.cuts.counts(part).iter().sum::<usize>(),
        );
        let mut values = Vec::with_capacity(roots.len());
        for slice in slices {
            for root in roots.chunks(width) {
                values.extend_from_slice(&root[slice.start - first..slice.end - first]);
            }
        }
        let of_ranks = 0..self.role.of;
        let roots_of = |rank: usize| self.nodes(rank).len();
        let own = slices[self.role.rank].len();
        let sends = slices
            .iter()
            .map(|slice| roots_of(self.role.rank) * slice.len());
        let receives = of_ranks.map(|rank| roots_of(rank) * own);
        let counts = [sends.collect(), receives.collect()];
        self.on_way = Some((part, self.link.swap(values, counts)));
        Ok(())
    }

    /// Adds up the roots that are on their way. Those of the last leaves complete a sum, which the
    /// rank behind gets too.
    fn land(&mut self) -> Result<(), Error> {
        let Some((part, pending)) = self.on_way.take() else {
            return Ok(());
        };
        let got = pending.wait()?;
        let width = self.cuts.slices(part)[self.role.rank].len();
        let nodes = (0..self.role.of).flat_map(|rank| self.nodes(rank));
        let nodes: Vec<tree::TreeNode> = nodes.collect();
        for (i, node) in nodes.into_iter().enumerate() {
            self.stacks[part].push_root(node, &got[i * width..(i + 1) * width]);
        }
        if self.round.end < self.leaves {
            return Ok(());
        }
        self.land_copy()?;
        let stack = std::mem::replace(&mut self.stacks[part], Stack::new(1, 0));
        let sum = stack.values();
        self.add(0, part, sum);
        let n = self.cuts.slices(part)[self.role.before()].len();
        self.copy_on_way = Some((part, self.link.pass_on(self.role, sum.to_vec(), n)));
        Ok(())
    }

    fn land_copy(&mut self) -> Result<(), Error> {
        if let Some((part, pending)) = self.copy_on_way.take() {
            self.add(1, part, &pending.wait()?);
        }
        Ok(())
    }

    /// Writes a part's sum to its place. A table that is the head too has two sums; the head's is
    /// complete first.
    fn add(&mut self, half: usize, part: usize, sum: &[f32]) {
        let rank = [self.role.rank, self.role.before()][half];
        let place = &mut self.grads[half][self.cuts.place(part, rank)];
        let is_second = part == 0 && self.run.net.parts().is_shared();
        for (g, sum) in place.iter_mut().zip(sum) {
            *g = if is_second { sum + *g } else { *sum };
        }
    }

    fn finish(mut self) -> Result<[Vec<f32>; 2], Error> {
        self.land()?;
        self.land_copy()?;
        Ok(self.grads)
    }
}

/// Losses in the order of leaves, of those that each rank has of each round, by rank.
fn by_leaf(by_rank: &[f64], rounds: &[Range<usize>], of: usize) -> Vec<f64> {
    let mut losses = vec![0.0; by_rank.len()];
    let leaves = (0..of).flat_map(|rank| {
        let own = rounds
            .iter()
            .map(move |round| share(round.clone(), rank, of));
        own.flatten()
    });
    leaves
        .zip(by_rank)
        .for_each(|(leaf, loss)| losses[leaf] = *loss);
    losses
}
