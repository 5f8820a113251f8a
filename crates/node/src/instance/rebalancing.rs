//! Rebalances the tensor shares of an instance's ranks by their measured step times.
//!
//! During computation every rank is queried once a second for its step times.
//! [`paceline_plan::follow`] decides; this module sends the queries and has the possible splits.
//! These are the requested split and variants with a smaller share for one rank, which are used for
//! nothing else.

use std::time::Duration;

use paceline_base::Rank;
use paceline_model::{ComputeTime, Config, Shard, Split};
use paceline_plan::rebalance::{RankShares, ShareMove, ShareRebalancer};

use crate::PlannedSplit;
use crate::sharding::asked;

/// Query interval: two queries detect a foreign load within 3 s.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Fewest steps between two queries for a valid step time.
const STEPS_LEAST: u64 = 3;

/// Reduced shares of a rank, in quarters of its original one.
const QUARTERS: [u32; 3] = [3, 2, 1];

/// Variants of `cut` in which one rank has less than in `shares` (empty for equal shares), each
/// once.
pub(crate) fn lighter(config: &Config, cut: &PlannedSplit, shares: &[u32]) -> Vec<PlannedSplit> {
    let split = &cut.split;
    let ranks = split.ranks();
    let mut all: Vec<PlannedSplit> = Vec::new();
    let Some(kind) = split.kind() else {
        return all;
    };
    for rank in 0..ranks as usize {
        for quarters in QUARTERS {
            let share = |other: usize| {
                let whole = shares.get(other).copied().unwrap_or(1);
                whole.saturating_mul(if other == rank { quarters } else { 4 })
            };
            let shares: Vec<u32> = (0..ranks as usize).map(share).collect();
            let placement = asked(config, kind, ranks, &shares).ok();
            let way = placement.and_then(|it| PlannedSplit::new(config, it, cut.tok_s).ok());
            let is_known =
                |it: &PlannedSplit| it.split == *split || all.iter().any(|a| a.split == it.split);
            let new = way.filter(|way| !is_known(way));
            all.extend(new);
        }
    }
    all
}

/// The name of a split with its ranks' shares, unique among its variants.
pub(super) fn name(split: &Split) -> String {
    let stages = split.each_stage();
    let parts: Vec<String> = if split.tensor_ranks() > 1 {
        stages
            .flat_map(|(_, shares)| shares)
            .map(u32::to_string)
            .collect()
    } else {
        stages.map(|(layers, _)| layers.len().to_string()).collect()
    };
    format!("{split} {}", parts.join(","))
}

/// Each rank's part of the model.
fn parts(config: &Config, split: &Split) -> RankShares {
    let shards = (0..split.ranks()).map(|rank| split.shard(config, Rank(rank)));
    let shards: Vec<Shard> = shards.collect();
    // A rank without feed-forward columns has heads, or rows of the output head.
    let columns = |shard: &Shard| shard.ffn().len().max(1);
    let part = |shard: &Shard| {
        let stage = shard.stage_ranks();
        let of_stage = stage.map(|rank| columns(&shards[rank as usize]));
        let all = of_stage.sum::<usize>() * config.layers.len();
        (shard.layers.len() * columns(shard)) as f64 / all.max(1) as f64
    };
    shards.iter().map(part).collect()
}

/// Queries the ranks and evaluates their answers.
#[derive(Debug)]
pub(super) struct Follower {
    follow: ShareRebalancer,
    /// Time of the last query.
    asked: Duration,
    /// The last report of each rank, and its report at the previous query.
    told: Vec<Option<ComputeTime>>,
    before: Vec<Option<ComputeTime>>,
    epoch: u64,
    /// Duration of the last start of an epoch.
    change: Duration,
}

impl Follower {
    /// For an instance with the possible splits `cuts` that starts with `first`.
    pub(super) fn new(config: &Config, cuts: &[PlannedSplit], first: usize) -> Self {
        let ways = cuts.iter().map(|cut| parts(config, &cut.split)).collect();
        let split = &cuts[first].split;
        let (ranks, each) = (split.ranks() as usize, split.tensor_ranks());
        let stages = (0..ranks).step_by(each.max(1));
        let stages = stages.map(|from| from..(from + each).min(ranks));
        Self {
            follow: ShareRebalancer::new(ways, stages.collect(), first),
            asked: Duration::ZERO,
            told: vec![None; ranks],
            before: vec![None; ranks],
            epoch: 0,
            change: Duration::ZERO,
        }
    }

    /// Whether a query is due at `now`.
    pub(super) fn is_due(&mut self, now: Duration) -> bool {
        let is_due = now.saturating_sub(self.asked) >= ASK_EVERY;
        if is_due {
            self.asked = now;
            self.told.fill(None);
        }
        is_due
    }

    pub(super) fn ready(&mut self, epoch: u64, at: usize, took: Duration) {
        self.follow.moved(at);
        (self.epoch, self.change) = (epoch, took);
        self.told.fill(None);
        self.before.fill(None);
    }

    /// Split `way` failed to start and is not proposed again.
    pub(super) fn close(&mut self, way: usize) {
        self.follow.close(way);
    }

    /// Records a rank's report of `epoch`; returns a better split once all have reported.
    pub(super) fn record_busy(
        &mut self,
        rank: Rank,
        epoch: u64,
        busy: ComputeTime,
    ) -> Option<ShareMove> {
        if epoch != self.epoch {
            return None; // a report of an earlier epoch
        }
        *self.told.get_mut(rank.0 as usize)? = Some(busy);
        let told: Vec<ComputeTime> = self.told.iter().copied().collect::<Option<_>>()?;
        self.told.fill(None);
        let now: Vec<Option<ComputeTime>> = told.iter().copied().map(Some).collect();
        let before = std::mem::replace(&mut self.before, now);
        let pairs = told.iter().zip(before);
        let seconds: Option<Vec<f64>> = pairs.map(|(now, before)| since(*now, before?)).collect();
        self.follow.update(&seconds?, self.change)
    }
}

/// Seconds of a step between two queries; `None` if there were too few steps.
fn since(now: ComputeTime, before: ComputeTime) -> Option<f64> {
    let steps = now.steps.checked_sub(before.steps)?;
    let ns = now.ns.checked_sub(before.ns)?;
    (steps >= STEPS_LEAST).then(|| ns as f64 / 1e9 / steps as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two tensor-parallel ranks: equal shares, and a third for the first.
    fn follower() -> Follower {
        let ways = vec![vec![0.5, 0.5], vec![1.0 / 3.0, 2.0 / 3.0]];
        let mut follower = Follower {
            follow: ShareRebalancer::new(ways, std::iter::once(0..2).collect(), 0),
            asked: Duration::ZERO,
            told: vec![None; 2],
            before: vec![None; 2],
            epoch: 0,
            change: Duration::ZERO,
        };
        follower.ready(1, 0, Duration::from_millis(100));
        follower
    }

    /// The moves after `n` queries, between which each rank computed ten steps of `ms`.
    fn looks(
        follower: &mut Follower,
        (epoch, ms): (u64, [u64; 2]),
        n: u64,
    ) -> Vec<Option<ShareMove>> {
        let look = |look: u64| {
            let busy = |ms: u64| ComputeTime {
                ns: look * 10 * ms * 1_000_000,
                steps: look * 10,
            };
            let first = follower.record_busy(Rank(0), epoch, busy(ms[0]));
            assert_eq!(first, None, "one rank is missing");
            follower.record_busy(Rank(1), epoch, busy(ms[1]))
        };
        (1..=n).map(look).collect()
    }

    #[test]
    fn a_slow_rank_is_seen_at_the_third_look() {
        let told = looks(&mut follower(), (1, [20, 10]), 3);
        assert_eq!(told[..2], [None, None]);
        assert_eq!(told[2].map(|it| it.to), Some(1));
        assert_eq!(looks(&mut follower(), (1, [10, 10]), 9), [None; 9]);
    }

    #[test]
    fn what_ranks_said_before_they_left_an_epoch_does_not_count() {
        let mut follower = follower();
        assert_eq!(looks(&mut follower, (0, [20, 10]), 9), [None; 9]);
        follower.ready(2, 1, Duration::ZERO);
        assert_eq!(looks(&mut follower, (2, [14, 14]), 3), [None; 3], "it fits");
    }

    #[test]
    fn ranks_are_asked_once_a_second_and_few_steps_say_nothing() {
        let mut follower = follower();
        let at = Duration::from_millis;
        let due = [900, 1000, 1100, 1999, 2000].map(|ms| follower.is_due(at(ms)));
        assert_eq!(due, [false, true, false, false, true]);
        let busy = |ns, steps| ComputeTime { ns, steps };
        assert_eq!(since(busy(5_000_000, 5), busy(0, 0)), Some(0.001));
        assert_eq!(since(busy(5_000_000, 2), busy(0, 0)), None);
        assert_eq!(since(busy(0, 0), busy(5, 5)), None, "another epoch");
    }
}
