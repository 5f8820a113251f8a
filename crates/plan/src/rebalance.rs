//! Rebalances tensor shares from measured step times.
//!
//! A machine in use by its owner computes slower, and all ranks of a stage wait for it.
//! [`ShareRebalancer`] receives each rank's compute time, without waits, every second or so. Time
//! over share is the rank's time for all of the model. From it [`ShareRebalancer`] derives the step
//! time of every split candidate of the instance, and proposes a better one.
//!
//! ```text
//! step of a candidate = sum over stages of the most over its ranks of (share x rank's time)
//! ```
//!
//! A change costs time, and times vary. So a candidate must be better by [`NOISE`] in [`LOOKS`]
//! updates in a row, and gain the cost of the change within [`HORIZON`]. The way back follows the
//! same rule, with the ranks' times at their shares then. The first candidate is also restored
//! where it is no worse: its shares are those that fit the machines' memory.
//!
//! Pure: times are arguments.

use std::ops::Range;
use std::time::Duration;

use crate::split_selection::NOISE;

/// Looks in a row at which another way must be better.
pub const LOOKS: u32 = 2;

/// A change must gain its cost within this time. A person uses a machine for minutes.
pub const HORIZON: Duration = Duration::from_secs(30);

/// Weight of the last look in what a rank takes: the one before still counts, so that a spike moves
/// nothing.
const LOOK_WEIGHT: f64 = 0.6;

/// Steps a second of the first way, as a multiple of those now, from which on it is no worse.
const NO_WORSE: f64 = 0.98;

/// A way to cut a model: the part of it that each rank has, all together 1.
pub type RankShares = Vec<f64>;

/// A way that is better now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShareMove {
    /// Its place among the ways.
    pub to: usize,
    /// Steps a second there, as a multiple of those now.
    pub gain: f64,
}

/// Follows what ranks take.
#[derive(Clone, Debug)]
pub struct ShareRebalancer {
    ways: Vec<RankShares>,
    /// Ranks of each stage, the same at all ways.
    stages: Vec<Range<usize>>,
    /// Split candidates that are unavailable.
    closed: Vec<bool>,
    at: usize,
    first: usize,
    /// Seconds that each rank would take for all of the model.
    takes: Vec<Option<f64>>,
    /// The better way, and looks in a row that found it.
    better: Option<(usize, u32)>,
}

impl ShareRebalancer {
    /// Begins at way `at`. `stages` has the ranks of each stage.
    ///
    /// # Panics
    /// When there is no way `at`, or a way has a share that is not above 0.
    pub fn new(ways: Vec<RankShares>, stages: Vec<Range<usize>>, at: usize) -> Self {
        assert!(at < ways.len(), "way {at} of {}", ways.len());
        let is_share = |share: &f64| share.is_finite() && *share > 0.0;
        assert!(ways.iter().flatten().all(is_share), "shares {ways:?}");
        let takes = vec![None; ways[at].len()];
        Self {
            closed: vec![false; ways.len()],
            ways,
            stages,
            at,
            first: at,
            takes,
            better: None,
        }
    }

    /// Way `at` is in use from now on.
    pub const fn moved(&mut self, at: usize) {
        self.at = at;
        self.better = None;
    }

    /// Marks split candidate `way` as unavailable; it is never proposed again.
    ///
    /// # Panics
    /// When there is no such way.
    pub fn close(&mut self, way: usize) {
        self.closed[way] = true;
        self.better = None;
    }

    /// Records each rank's compute seconds since the last update. Returns a better split candidate
    /// that is worth `change`, the time that a change takes.
    pub fn update(&mut self, busy: &[f64], change: Duration) -> Option<ShareMove> {
        let shares = &self.ways[self.at];
        for ((takes, busy), share) in self.takes.iter_mut().zip(busy).zip(shares) {
            let now = busy / share;
            *takes = Some(takes.map_or(now, |known| known + LOOK_WEIGHT * (now - known)));
        }
        let Some(ShareMove { to, gain }) = self.better_now(change) else {
            self.better = None;
            return None;
        };
        let looks = match self.better {
            Some((way, looks)) if way == to => looks + 1,
            _ => 1,
        };
        self.better = Some((to, looks));
        (looks >= LOOKS).then_some(ShareMove { to, gain })
    }

    /// A way that is better by what is known now.
    fn better_now(&self, change: Duration) -> Option<ShareMove> {
        let now = self.step(self.at)?;
        let others = (0..self.ways.len()).filter(|way| *way != self.at && !self.closed[*way]);
        let steps = others.filter_map(|way| Some((way, self.step(way)?)));
        let (to, step) = steps.min_by(|a, b| a.1.total_cmp(&b.1))?;
        let gain = now / step;
        let saved = HORIZON.as_secs_f64() * (1.0 - 1.0 / gain);
        if gain > 1.0 + NOISE && saved > change.as_secs_f64() {
            return Some(ShareMove { to, gain });
        }
        let (to, gain) = (self.first, now / self.step(self.first)?);
        let is_back =
            self.at != to && !self.closed[to] && gain >= NO_WORSE && change < HORIZON / 10;
        is_back.then_some(ShareMove { to, gain })
    }

    /// Seconds of a step at a way; `None` before the first look.
    fn step(&self, way: usize) -> Option<f64> {
        let shares = &self.ways[way];
        let of_rank = |rank: usize| Some(shares[rank] * self.takes[rank]?);
        let of_stage = |ranks: &Range<usize>| -> Option<f64> {
            let times: Option<Vec<f64>> = ranks.clone().map(of_rank).collect();
            times?.into_iter().reduce(f64::max)
        };
        self.stages.iter().map(of_stage).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGE: Duration = Duration::from_millis(500);

    /// Equal shares, and those with a quarter, half and three quarters of it for one of two.
    fn ways() -> Vec<RankShares> {
        let all = [(1, 1), (1, 4), (1, 2), (3, 4), (4, 1), (2, 1), (4, 3)];
        let part = |(a, b): (i32, i32)| {
            let all = f64::from(a + b);
            vec![f64::from(a) / all, f64::from(b) / all]
        };
        all.into_iter().map(part).collect()
    }

    fn tensor(at: usize) -> ShareRebalancer {
        ShareRebalancer::new(ways(), std::iter::once(0..2).collect(), at)
    }

    /// Seconds that the ranks of a way compute a step for, where they would take `takes` for all.
    fn busy(follow: &ShareRebalancer, takes: [f64; 2]) -> Vec<f64> {
        let shares = &follow.ways[follow.at];
        shares
            .iter()
            .zip(takes)
            .map(|(share, takes)| share * takes)
            .collect()
    }

    /// The split candidates that it moves to within `looks` updates.
    fn moves(follow: &mut ShareRebalancer, takes: [f64; 2], looks: usize) -> Vec<usize> {
        let mut all = Vec::new();
        for _ in 0..looks {
            if let Some(ShareMove { to, gain }) = follow.update(&busy(follow, takes), CHANGE) {
                assert!(gain > 1.0 + NOISE || to == 0);
                follow.moved(to);
                all.push(to);
            }
        }
        all
    }

    #[test]
    fn a_rank_that_slows_gives_work_away_and_gets_it_back() {
        let mut follow = tensor(0);
        assert!(moves(&mut follow, [0.02, 0.02], 5).is_empty());
        // Another program has half of its cores: a third for it is best.
        assert_eq!(moves(&mut follow, [0.04, 0.02], 5), [2]);
        assert!(
            moves(&mut follow, [0.04, 0.02], 20).is_empty(),
            "it stays there"
        );
        assert_eq!(moves(&mut follow, [0.02, 0.02], 5), [0], "and back");
        // The other one, to the last of its shares.
        assert_eq!(moves(&mut follow, [0.02, 0.2], 10).last(), Some(&4));
    }

    #[test]
    fn a_way_that_cannot_be_had_is_passed_over() {
        let mut follow = tensor(0);
        follow.close(2);
        assert_eq!(moves(&mut follow, [0.04, 0.02], 5), [1]);
    }

    #[test]
    fn spikes_and_small_differences_move_nothing() {
        let mut follow = tensor(0);
        assert!(moves(&mut follow, [0.02, 0.02], 3).is_empty());
        assert!(moves(&mut follow, [0.06, 0.02], 1).is_empty());
        assert!(moves(&mut follow, [0.02, 0.02], 4).is_empty());
        assert!(moves(&mut follow, [0.022, 0.02], 20).is_empty());
    }

    #[test]
    fn a_change_that_takes_long_is_not_made() {
        let mut follow = tensor(0);
        let long = Duration::from_secs(20);
        for _ in 0..10 {
            assert_eq!(follow.update(&busy(&follow, [0.04, 0.02]), long), None);
        }
        assert!(
            follow
                .update(&busy(&follow, [0.04, 0.02]), CHANGE)
                .is_none()
        );
        assert!(
            follow
                .update(&busy(&follow, [0.04, 0.02]), CHANGE)
                .is_some()
        );
    }

    /// Stages take turns: a slow one is left as little as may be.
    #[test]
    fn stages_of_a_pipeline_add_up() {
        let stages = vec![0..1, 1..2];
        let mut follow = ShareRebalancer::new(ways(), stages, 0);
        assert!(moves(&mut follow, [0.02, 0.02], 5).is_empty());
        assert_eq!(moves(&mut follow, [0.04, 0.02], 10).last(), Some(&1));
        assert_eq!(moves(&mut follow, [0.02, 0.02], 20), [0], "it is no worse");
    }
}
