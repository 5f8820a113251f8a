//! A worker that has a stage of the model. Leaves go through it and back, from and to its
//! neighbours directly.
//!
//! The order is 1F1B. A stage goes forward with as many leaves as there are stages behind it. Then
//! it takes one leaf forward and one back in turn. So it has few leaves under way, and all stages
//! compute at the same time. The sum over leaves is the tree of all of them, as in one process.
//!
//! ```text
//! stage 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3        F0: leaf 0 forward, B0: back
//! stage 1      F0 B0 F1 B1 F2 B2 F3 B3
//! ```
//! Workers of the same stage have neighbouring leaves each.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use paceline_base::tree::Stack;
use paceline_comm::tcp::Listener;
use paceline_model::adapter::files::tensors;

use super::rows::{self, compute_rows};
use super::{RunChannel, error_chain, unexpected};
use crate::activity::Activity;
use crate::dropout::Dropout;
use crate::error::Error;
use crate::messages::{FromWorker, ToWorker, params_file, roots_file};
use crate::net::{Leaf, Pass};
use crate::run::TrainingRun;
use crate::shard::{Link, Pending, listen, share};
use crate::stage::LeafSet;
use crate::workers::publish;

/// Tags of what goes forward and what comes back.
const FORWARD: u32 = 2;
const BACK: u32 = 3;

/// A leaf, and what chance leaves out of it.
type StageLeaf = (Leaf, Option<Dropout>);

pub(super) struct StageWorker<'a> {
    channel: &'a RunChannel,
    activity: Arc<Activity>,
    run: TrainingRun,
    /// Folder of exchanged files: values of steps, and gradients.
    exchange: PathBuf,
    listener: Option<Listener>,
    seat: Option<Seat>,
    /// This worker's rank, while it has a part of each row.
    of_rows: Option<usize>,
    /// Whether it then has a part of the experts too.
    cuts_experts: bool,
    /// A step, and the values before it.
    values: (Option<u64>, Vec<f32>),
}

/// A worker's place in the group of all stages.
struct Seat {
    link: Link,
    rank: usize,
    /// Workers of all stages.
    of: usize,
}

/// A turn of a stage, with the place of its leaf among the worker's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Forward(usize),
    Back(usize),
}

impl<'a> StageWorker<'a> {
    pub(super) fn new(
        (channel, activity): (&'a RunChannel, &Arc<Activity>),
        (run, cuts_experts): (TrainingRun, bool),
        exchange: PathBuf,
    ) -> Self {
        Self {
            channel,
            cuts_experts,
            activity: Arc::clone(activity),
            run,
            exchange,
            listener: None,
            seat: None,
            of_rows: None,
            values: (None, Vec::new()),
        }
    }

    /// Does what a message asks for. Reports a failure of the group.
    pub(super) fn handle(&mut self, message: ToWorker) -> Result<(), Error> {
        let activity = Arc::clone(&self.activity);
        let (epoch, done) = match message {
            ToWorker::Listen { epoch, open } => (epoch, self.listen(epoch, open)),
            ToWorker::Form {
                epoch,
                rank,
                plan,
                step,
                ..
            } => {
                let Some(listener) = self.listener.take() else {
                    return Err(unexpected(None, "Listen before Form"));
                };
                let joined = Link::join(listener, (rank, &activity), &plan);
                let of = plan.addrs.len();
                let seated = joined.and_then(|link| {
                    if self.run.net.stage().of == 1 {
                        self.of_rows = Some(rank);
                        let seat = rows::seat(link, (rank, of), self.cuts_experts);
                        self.run.net.cut_rows(Some(seat));
                    } else {
                        self.seat = Some(Seat { link, rank, of });
                    }
                    Ok(self.channel.send(&FromWorker::Formed { epoch, step })?)
                });
                (epoch, seated)
            }
            ToWorker::Pipe { epoch, step, set } => {
                (epoch, activity.compute(set, || self.pipe(epoch, step, set)))
            }
            other => return Err(unexpected(Some(&other), "a message for a stage")),
        };
        match done {
            Err(error @ (Error::Comm(_) | Error::Join(_))) => {
                self.leave(); // so that the other ranks notice
                let reason = error_chain(&error);
                Ok(self.channel.send(&FromWorker::Broken { epoch, reason })?)
            }
            other => other,
        }
    }

    /// Leaves the group.
    fn leave(&mut self) {
        (self.seat, self.of_rows) = (None, None);
        self.run.net.cut_rows(None);
    }

    fn listen(&mut self, epoch: u64, open: bool) -> Result<(), Error> {
        self.leave();
        let (listener, addrs) = listen(open)?;
        self.listener = Some(listener);
        let step = None;
        let listening = FromWorker::Listening { epoch, addrs, step };
        Ok(self.channel.send(&listening)?)
    }

    /// This worker's leaves of a step, or rows that are held out, through its stage.
    fn pipe(&mut self, epoch: u64, step: u64, set: LeafSet) -> Result<(), Error> {
        self.activity.take_waited_s(); // of a step that failed
        let stage = self.run.net.stage();
        if self.values.0 != Some(step) {
            let path = self.exchange.join(params_file(step, stage.index));
            let bytes = std::fs::read(&path).map_err(Error::file("read", &path))?;
            self.values = (Some(step), tensors::floats(&bytes));
        }
        let all = self.run.leaves_of(set);
        if let Some(rank) = self.of_rows {
            let at = (rank, self.exchange.as_path());
            let found = compute_rows(&self.run, at, &self.values.1, (step, set))?;
            let own = if rank == 0 { 0..all } else { all..all };
            return self.tell((epoch, step), own, found);
        }
        let Some(seat) = &self.seat else {
            return Err(unexpected(None, "Form before Pipe"));
        };
        let own = share(0..all, seat.rank / stage.of, seat.of / stage.of);
        let leaf = |at: usize| match set {
            LeafSet::Train => self.run.leaf(step, at),
            LeafSet::Valid => (self.run.held_out_row(at), None),
        };
        let leaves: Vec<StageLeaf> = own.clone().map(leaf).collect();
        let mut line = StageLine::new(&self.run, &self.values.1, seat, (&leaves, set));
        let mut digest = None;
        let losses = match set {
            LeafSet::Valid => line.judge()?,
            LeafSet::Train => {
                let (losses, sum) = line.train(step, (own.start, all))?;
                let file = roots_file(step, own.start, own.end, stage.index);
                digest = Some(publish(&self.exchange, &file, &sum)?);
                losses
            }
        };
        line.finish()?;
        self.tell((epoch, step), own, (losses, digest))
    }

    /// Reports losses and the digest of gradients of leaves.
    fn tell(
        &self,
        (epoch, step): (u64, u64),
        own: Range<usize>,
        (losses, digest): (Vec<f64>, Option<String>),
    ) -> Result<(), Error> {
        let losses = losses.into_iter().take(own.len());
        let piped = FromWorker::Piped {
            epoch,
            step,
            start: own.start,
            end: own.end,
            losses: losses.map(f64::to_bits).collect(),
            digest,
            waited_s: self.activity.take_waited_s(),
        };
        Ok(self.channel.send(&piped)?)
    }
}

/// Leaves on their way through a stage.
struct StageLine<'a> {
    run: &'a TrainingRun,
    params: &'a [f32],
    leaves: &'a [StageLeaf],
    /// From and to the stage before, and the one behind.
    inputs: Option<Inbound<'a>>,
    outputs: Option<Outbound<'a>>,
    gradients: Option<Inbound<'a>>,
    back: Option<Outbound<'a>>,
}

impl<'a> StageLine<'a> {
    fn new(
        run: &'a TrainingRun,
        params: &'a [f32],
        seat: &'a Seat,
        (leaves, set): (&'a [StageLeaf], LeafSet),
    ) -> Self {
        let (stage, width) = (run.net.stage(), run.net.config().width);
        let sizes = || {
            let each = leaves.iter();
            each.map(|(leaf, _)| leaf.tokens.len() * width).collect()
        };
        let (link, trains) = (&seat.link, set == LeafSet::Train);
        let before = (!stage.is_first()).then(|| seat.rank - 1);
        let behind = (!stage.is_last()).then_some(seat.rank + 1);
        let inbound = |rank, tag| Inbound::new(link, (rank, tag), sizes());
        let outbound = |rank, tag| Outbound::new(link, (rank, tag));
        Self {
            run,
            params,
            leaves,
            inputs: before.map(|rank| inbound(rank, FORWARD)),
            outputs: behind.map(|rank| outbound(rank, FORWARD)),
            gradients: behind.filter(|_| trains).map(|rank| inbound(rank, BACK)),
            back: before.filter(|_| trains).map(|rank| outbound(rank, BACK)),
        }
    }

    /// The values that a leaf begins with, behind the first stage.
    fn input(&mut self) -> Result<Option<Vec<f32>>, Error> {
        self.inputs.as_mut().map(Inbound::take).transpose()
    }

    /// All leaves forward: their losses, in the last stage.
    fn judge(&mut self) -> Result<Vec<f64>, Error> {
        let (net, mut losses) = (&self.run.net, Vec::new());
        let mut values = net.whole(self.params);
        for (leaf, _) in self.leaves {
            let x = self.input()?;
            match &mut self.outputs {
                None => losses.extend(net.losses(&mut values, &[leaf], vec![x])?),
                Some(outputs) => {
                    let y =
                        net.forward(&mut values, (&[(leaf, None)], &[net.rows(leaf)]), vec![x])?;
                    outputs.give(y.into_iter().flatten().collect())?;
                }
            }
        }
        Ok(losses)
    }

    /// All leaves forward and back, of `all` in the step from `first` on: their losses, in the last
    /// stage, and the roots of their gradients.
    fn train(
        &mut self,
        step: u64,
        (first, all): (usize, usize),
    ) -> Result<(Vec<f64>, Vec<f32>), Error> {
        let (run, stage) = (self.run, self.run.net.stage());
        let mut grads = vec![0.0; run.net.parts().gradient_len()];
        let mut sum = Stack::new(all, grads.len());
        sum.reset(first);
        let (mut losses, mut under_way) = (Vec::new(), VecDeque::new());
        let ahead = stage.of - stage.index - 1;
        let judged = run.judged(step);
        for turn in turns(ahead, self.leaves.len()) {
            match turn {
                Turn::Forward(at) => {
                    let (leaf, chance) = &self.leaves[at];
                    let x = self.input()?;
                    let mut values = run.net.whole(self.params);
                    let leaves = [(leaf, *chance)];
                    let begun = run.net.begin(&mut values, (&leaves, vec![x]), ahead + 1)?;
                    for mut pass in begun {
                        if let Some(outputs) = &mut self.outputs {
                            outputs.give(std::mem::take(&mut pass.x))?;
                        }
                        under_way.push_back(pass);
                    }
                }
                Turn::Back(at) => {
                    let pass = under_way.pop_front().expect("it went forward");
                    let loss = self.back(pass, &self.leaves[at], judged, &mut grads)?;
                    losses.extend(loss);
                    sum.push(&grads);
                    grads.fill(0.0);
                }
            }
        }
        Ok((losses, sum.values().to_vec()))
    }

    /// A leaf back: its loss, in the last stage.
    fn back(
        &mut self,
        mut pass: Pass,
        (leaf, _): &StageLeaf,
        judged: u64,
        grads: &mut [f32],
    ) -> Result<Option<f64>, Error> {
        let net = &self.run.net;
        let dy = self.gradients.as_mut().map(Inbound::take).transpose()?;
        let mut values = net.whole(self.params);
        let loss = net.back(&mut values, (&mut pass, leaf), (dy, judged), grads)?;
        if let Some(back) = &mut self.back {
            back.give(pass.x)?;
        }
        Ok(self.outputs.is_none().then_some(loss))
    }

    /// Waits until everything was sent.
    fn finish(self) -> Result<(), Error> {
        let mut sent = [self.outputs, self.back].into_iter().flatten();
        sent.try_for_each(Outbound::finish)
    }
}

/// The turns of a stage with `ahead` stages behind it, for `n` leaves.
fn turns(ahead: usize, n: usize) -> Vec<Turn> {
    let mut turns = Vec::with_capacity(2 * n);
    for at in 0..n + ahead {
        turns.extend((at < n).then_some(Turn::Forward(at)));
        let back = at.checked_sub(ahead).filter(|leaf| *leaf < n);
        turns.extend(back.map(Turn::Back));
    }
    turns
}

/// Values that a neighbour sends, leaf by leaf. The next ones are on their way while a leaf is
/// computed.
struct Inbound<'a> {
    link: &'a Link,
    from: (usize, u32),
    sizes: VecDeque<usize>,
    next: Option<Pending<f32>>,
}

impl<'a> Inbound<'a> {
    fn new(link: &'a Link, from: (usize, u32), sizes: VecDeque<usize>) -> Self {
        let mut new = Self {
            link,
            from,
            sizes,
            next: None,
        };
        new.start();
        new
    }

    fn start(&mut self) {
        let size = self.sizes.pop_front();
        self.next = size.map(|n| self.link.receive(n, self.from));
    }

    fn take(&mut self) -> Result<Vec<f32>, Error> {
        let next = self.next.take().expect("no more than there are leaves");
        let got = next.wait()?;
        self.start();
        Ok(got)
    }
}

/// Values for a neighbour, leaf by leaf. One leaf's are on their way at a time.
struct Outbound<'a> {
    link: &'a Link,
    to: (usize, u32),
    on_way: Option<Pending<f32>>,
}

impl<'a> Outbound<'a> {
    const fn new(link: &'a Link, to: (usize, u32)) -> Self {
        let on_way = None;
        Self { link, to, on_way }
    }

    fn give(&mut self, values: Vec<f32>) -> Result<(), Error> {
        if let Some(before) = self.on_way.take() {
            before.wait()?;
        }
        self.on_way = Some(self.link.transmit(values, self.to));
        Ok(())
    }

    fn finish(self) -> Result<(), Error> {
        if let Some(last) = self.on_way {
            last.wait()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_leaf_goes_forward_and_back_with_few_under_way() {
        use Turn::{Back, Forward};
        assert_eq!(turns(0, 2), [Forward(0), Back(0), Forward(1), Back(1)]);
        let two = [
            Forward(0),
            Forward(1),
            Back(0),
            Forward(2),
            Back(1),
            Back(2),
        ];
        assert_eq!(turns(1, 3), two);
        assert_eq!(turns(3, 1), [Forward(0), Back(0)]);
        assert_eq!(turns(2, 0), []);
    }
}
