//! Data parallelism: leases ranges of a step's leaves to workers that have the whole model, in
//! proportion to their speeds.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use paceline_base::Rank;
use paceline_base::tree;
use paceline_cluster::Error as ClusterError;

use super::{At, LOOK_EVERY, WorkerEvent, WorkerSet, publish, read_values};
use crate::error::Error;
use crate::messages::{FromWorker, ToWorker, params_file, roots_file};
use crate::report::TrainingProgress;
use crate::weights::Parts;

/// Results of workers for a step, by first leaf.
#[derive(Default)]
struct LeafResults {
    done: BTreeMap<usize, (usize, Vec<f64>)>,
    /// By the leaves' range and the part.
    roots: BTreeMap<(usize, usize, usize), Vec<f32>>,
}

impl LeafResults {
    /// Takes a message of a worker that `has` these leaves: see [`LeafWork::take`].
    fn take(
        &mut self,
        message: FromWorker,
        (step, has): (u64, &[Range<usize>]),
        (leaves, parts, exchange): (usize, &Parts, &Path),
    ) -> Result<Option<Range<usize>>, &'static str> {
        let parts = &parts.gradients;
        let is_mine = |of: u64, range: Range<usize>| of == step && has.contains(&range);
        match message {
            FromWorker::Part {
                step,
                start,
                end,
                part,
                digest,
            } if is_mine(step, start..end) => {
                let width = parts.get(part).map_or(0, Range::len);
                let n = tree::roots(start..end, leaves).len() * width;
                let file = exchange.join(roots_file(step, start, end, part));
                let roots = read_values(&file, n, Some(&digest));
                let roots = roots.ok_or("wrote other roots than it says")?;
                self.roots.insert((start, end, part), roots);
                Ok(None)
            }
            FromWorker::Done {
                step,
                start,
                end,
                losses,
            } if is_mine(step, start..end) => {
                let told = |part: usize| self.roots.contains_key(&(start, end, part));
                let whole = (0..parts.len()).all(|part| parts[part].is_empty() || told(part));
                if !whole || losses.len() != end - start {
                    return Err("says it is done, but it is not");
                }
                let losses = losses.into_iter().map(f64::from_bits).collect();
                self.done.insert(start, (end, losses));
                Ok(Some(start..end))
            }
            _ => Ok(None),
        }
    }

    /// Adds up everything, the losses leaf by leaf.
    fn sum(mut self, leaves: usize, parts: &Parts) -> (f64, Vec<f32>) {
        let losses = self.done.values().flat_map(|(_, losses)| losses);
        let loss: f64 = losses.sum();
        let nodes = self.done.iter();
        let nodes: Vec<_> = nodes
            .flat_map(|(start, (end, _))| tree::roots(*start..*end, leaves))
            .collect();
        let mut grads = vec![0.0; parts.gradient_len()];
        let trained = parts.gradients.iter().enumerate();
        for (number, part) in trained.filter(|(_, part)| !part.is_empty()) {
            let mut values = Vec::with_capacity(nodes.len() * part.len());
            for (start, (end, _)) in &self.done {
                let roots = self.roots.remove(&(*start, *end, number));
                values.extend(roots.unwrap_or_default());
            }
            grads[part.clone()].copy_from_slice(tree::combine(leaves, &nodes, &mut values));
        }
        parts.fold(&mut grads);
        (loss, grads)
    }
}

/// Work that is cut into leaves.
pub(super) struct LeafWork<'a> {
    pub(super) leaves: usize,
    /// The message that asks for leaves.
    pub(super) message: &'a dyn Fn(Range<usize>) -> ToWorker,
    /// Takes a message of a worker that has these leaves. Returns the leaves that are done by it,
    /// or why it is invalid.
    pub(super) take: &'a mut TakeLeaves<'a>,
}

/// See [`LeafWork::take`].
pub(super) type TakeLeaves<'a> =
    dyn FnMut(FromWorker, &[Range<usize>]) -> Result<Option<Range<usize>>, &'static str> + 'a;

impl WorkerSet {
    /// The loss and the gradient of a step of a model with these leaves and parts.
    pub(super) fn leaves(
        &mut self,
        (leaves, parts): (usize, &Parts),
        params: &[f32],
        at: &At<'_>,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<(f64, Vec<f32>), Error> {
        publish(&self.exchange, &params_file(at.step, 0), params)?;
        let (mut given, exchange) = (LeafResults::default(), self.exchange.clone());
        let message = |range: Range<usize>| ToWorker::Compute {
            step: at.step,
            start: range.start,
            end: range.end,
        };
        let mut take = |message: FromWorker, has: &[Range<usize>]| {
            given.take(message, (at.step, has), (leaves, parts, &exchange))
        };
        let work = LeafWork {
            leaves,
            message: &message,
            take: &mut take,
        };
        self.share_out(work, at, watch)?;
        self.forget(at.step);
        Ok(given.sum(leaves, parts))
    }

    /// Has all leaves computed.
    pub(super) fn share_out(
        &mut self,
        work: LeafWork<'_>,
        at: &At<'_>,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<(), Error> {
        let mut open: Vec<Range<usize>> = std::iter::once(0..work.leaves).collect();
        let mut done = 0;
        while done < work.leaves {
            if self.is_ready() {
                for range in std::mem::take(&mut open) {
                    open.extend(self.lease(range, work.message, at));
                }
            } else {
                self.check_alive()?;
            }
            if let Some(event) = self.workers.recv(LOOK_EVERY) {
                match self.take(event)? {
                    WorkerEvent::Nothing => {}
                    WorkerEvent::Lost(has) => open.extend(has.leaves),
                    WorkerEvent::Said(rank, message) => {
                        let has = &self.members[rank as usize].has.leaves;
                        match (work.take)(message, has) {
                            Ok(None) => {} // leaves that are others' by now, or not all of it
                            Ok(Some(range)) => {
                                done += range.len();
                                self.record(rank as usize, &range, at);
                            }
                            Err(why) => {
                                open.extend(self.lose(rank, format!("rank {rank} {why}")).leaves);
                            }
                        }
                    }
                }
            }
            open.extend(self.lose_hung(at).into_iter().flat_map(|has| has.leaves));
            self.report_progress(watch);
        }
        Ok(())
    }

    /// Whether leaves can be given out. Workers that load the model are waited for only before
    /// anything was computed.
    fn is_ready(&self) -> bool {
        let (mut ready, mut loading) = (false, false);
        for member in &self.members {
            ready |= member.is_ready;
            loading |= member.is_there && !member.is_ready;
        }
        let begun = self.members.iter().any(|member| member.speed > 0.0) || self.lost > 0;
        ready && (begun || !loading)
    }

    /// Cuts leaves among the ready workers, by their speed. Gives back leaves that no worker took.
    fn lease(
        &mut self,
        leaves: Range<usize>,
        message: &dyn Fn(Range<usize>) -> ToWorker,
        at: &At<'_>,
    ) -> Vec<Range<usize>> {
        let ready: Vec<usize> = (0..self.members.len())
            .filter(|rank| self.members[*rank].is_ready)
            .collect();
        let speeds: Vec<f64> = ready.iter().map(|rank| self.members[*rank].speed).collect();
        let mut back = Vec::new();
        for (rank, range) in ready.into_iter().zip(shares(leaves, &speeds)) {
            if range.is_empty() {
                continue;
            }
            let message = message(range.clone());
            let member = &mut self.members[rank];
            if member.has.leaves.is_empty() {
                member.since = (at.clock)();
                self.deadlines.begin(rank, range.len());
            }
            member.has.leaves.push(range);
            match self.workers.send(Rank(rank as u32), &message) {
                // The event of its end follows within `CLOSED_LIMIT` of the monitor, with the
                // reason; the leaves are returned then.
                Ok(()) | Err(ClusterError::Closed { .. }) => {}
                Err(error) => back.extend(self.lose(rank as u32, error.to_string()).leaves),
            }
        }
        back
    }

    /// Notes that a worker is done with some of its leaves.
    fn record(&mut self, rank: usize, range: &Range<usize>, at: &At<'_>) {
        let (member, now) = (&mut self.members[rank], (at.clock)());
        member.has.leaves.retain(|has| has != range);
        member.speed = range.len() as f64 / (now - member.since).max(1e-6);
        member.since = now;
        let next = member.has.leaves.first().map_or(0, Range::len);
        self.deadlines.end(rank, next);
        self.fruitless = 0;
    }
}

/// Neighbouring parts of a range, in proportion to speeds; those not known count as the mean.
fn shares(range: Range<usize>, speeds: &[f64]) -> Vec<Range<usize>> {
    let known: Vec<f64> = speeds
        .iter()
        .copied()
        .filter(|speed| *speed > 0.0)
        .collect();
    let mean = known.iter().sum::<f64>() / known.len() as f64;
    let of = |speed: &f64| {
        if *speed > 0.0 {
            *speed
        } else if mean > 0.0 {
            mean
        } else {
            1.0
        }
    };
    let total: f64 = speeds.iter().map(of).sum();
    let (mut sum, mut start, n) = (0.0, range.start, range.len() as f64);
    let mut parts = Vec::with_capacity(speeds.len());
    for (i, speed) in speeds.iter().enumerate() {
        sum += of(speed);
        let end = match i + 1 == speeds.len() {
            true => range.end,
            false => range.start + (n * sum / total).round() as usize,
        };
        let end = end.clamp(start, range.end);
        parts.push(start..end);
        start = end;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_speeds_and_cover_the_range() {
        assert_eq!(shares(0..8, &[0.0, 0.0]), [0..4, 4..8]);
        assert_eq!(shares(2..10, &[3.0, 1.0]), [2..8, 8..10]);
        assert_eq!(shares(0..4, &[2.0, 0.0, 2.0]), [0..1, 1..3, 3..4]);
        assert_eq!(
            shares(0..1, &[1.0, 1.0, 1.0])
                .iter()
                .map(Range::len)
                .sum::<usize>(),
            1
        );
        assert_eq!(shares(5..5, &[1.0, 2.0]), [5..5, 5..5]);
    }
}
