//! Deadlines of leased leaves, from the times of recent leaves.
//!
//! A worker that hangs in a device may still send heartbeats. Its leaves are reassigned once they
//! have taken [`TIMES`] times the median of recent leaves, and [`FLOOR_S`] at least. Before any
//! leaf was computed there is no deadline, and only heartbeats count. The deadline of a rank
//! doubles each time its worker is dropped, so a slow machine keeps its leaves in the end.

use std::collections::VecDeque;

use paceline_base::upper_median;

/// Shortest deadline of a leaf in seconds. Loading a page of weights again from a disk takes
/// seconds; a leaf of a toy takes milliseconds.
const FLOOR_S: f64 = 30.0;

/// Deadline of a leaf as a multiple of the median. Machines of a home cluster differ by 5 at most
/// in measurements of decoding; a busy one takes twice its time.
const TIMES: f64 = 10.0;

/// Recent leaves that count: the last few steps of a usual batch.
const RECENT: usize = 64;

/// The most that a place's time is stretched.
const PATIENCE_MAX: f64 = 64.0;

/// The longest time between two looks that counts. The caller looks ten times a second: more is a
/// suspension, in which workers were suspended too.
const LOOK_MAX_S: f64 = 1.0;

/// Work of each rank, and its time limit.
#[derive(Debug)]
pub(super) struct Deadlines {
    /// Seconds of a leaf, the latest behind.
    times: VecDeque<f64>,
    /// Time of the last look.
    looked_s: Option<f64>,
    ranks: Vec<Wait>,
}

/// A rank's leaves that are computed together.
#[derive(Clone, Debug)]
struct Wait {
    /// Leaves; 0 for none.
    leaves: usize,
    waited_s: f64,
    patience: f64,
}

/// A rank whose time is over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Overdue {
    pub(super) rank: u32,
    /// The time that its leaves had.
    pub(super) limit_s: f64,
}

impl Deadlines {
    /// Deadlines for `ranks` ranks.
    pub(super) fn new(ranks: usize) -> Self {
        let wait = Wait {
            leaves: 0,
            waited_s: 0.0,
            patience: 1.0,
        };
        Self {
            times: VecDeque::with_capacity(RECENT),
            looked_s: None,
            ranks: vec![wait; ranks],
        }
    }

    /// Records that a rank begins `leaves` leaves; 0 for none.
    pub(super) fn begin(&mut self, rank: usize, leaves: usize) {
        let wait = &mut self.ranks[rank];
        (wait.leaves, wait.waited_s) = (leaves, 0.0);
    }

    /// Records that a rank has computed its leaves and continues with `next` leaves; 0 for none.
    pub(super) fn end(&mut self, rank: usize, next: usize) {
        let wait = &self.ranks[rank];
        if wait.leaves > 0 {
            if self.times.len() == RECENT {
                self.times.pop_front();
            }
            self.times.push_back(wait.waited_s / wait.leaves as f64);
        }
        self.begin(rank, next);
    }

    /// The ranks that are overdue at `now_s`, each reported once.
    pub(super) fn overdue(&mut self, now_s: f64) -> Vec<Overdue> {
        let looked = self.looked_s.replace(now_s).unwrap_or(now_s);
        let passed = (now_s - looked).clamp(0.0, LOOK_MAX_S);
        let usual = self.usual_s();
        let mut over = Vec::new();
        for (rank, wait) in (0..).zip(&mut self.ranks) {
            if wait.leaves == 0 {
                continue;
            }
            wait.waited_s += passed;
            let Some(usual) = usual else {
                continue;
            };
            let limit_s = (TIMES * usual * wait.leaves as f64).max(FLOOR_S) * wait.patience;
            if wait.waited_s > limit_s {
                wait.leaves = 0;
                wait.patience = (2.0 * wait.patience).min(PATIENCE_MAX);
                over.push(Overdue { rank, limit_s });
            }
        }
        over
    }

    /// The median of recent leaves, in seconds.
    fn usual_s(&self) -> Option<f64> {
        upper_median(self.times.iter().copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls every 0.5 s from `from_s` on, as the parent does. The second at which a rank is
    /// overdue.
    fn told(deadlines: &mut Deadlines, from_s: f64, limit_s: f64) -> Option<(f64, Vec<Overdue>)> {
        let looks = (0..).map(|i| from_s + f64::from(i) * 0.5);
        looks.take_while(|now| *now <= limit_s).find_map(|now| {
            let over = deadlines.overdue(now);
            (!over.is_empty()).then_some((now, over))
        })
    }

    #[test]
    fn a_leaf_has_a_multiple_of_what_leaves_take() {
        let mut deadlines = Deadlines::new(2);
        deadlines.begin(0, 2);
        deadlines.begin(1, 1);
        assert_eq!(told(&mut deadlines, 0.0, 20.0), None, "nothing to judge by");
        deadlines.end(0, 0); // 10 s each
        let (at, over) = told(&mut deadlines, 20.0, 1000.0).unwrap();
        let limit_s = 100.0;
        assert_eq!(over, [Overdue { rank: 1, limit_s }]);
        assert!((100.0..=101.0).contains(&at), "{at}");
        assert_eq!(told(&mut deadlines, at, at + 1000.0), None, "told once");

        // The next worker in its place has twice the time; another one still has once.
        deadlines.begin(1, 1);
        let begun = at + 1000.0;
        let (at, _) = told(&mut deadlines, begun, begun + 1000.0).unwrap();
        assert!((200.0..=201.0).contains(&(at - begun)), "{at}");
        deadlines.begin(0, 1);
        let (end, _) = told(&mut deadlines, at, at + 1000.0).unwrap();
        assert!((100.0..=101.0).contains(&(end - at)), "{end}");
    }

    #[test]
    fn short_leaves_have_the_floor_and_a_suspension_is_nobodys_fault() {
        let mut deadlines = Deadlines::new(2);
        deadlines.overdue(0.0);
        deadlines.begin(0, 1);
        deadlines.end(0, 0);
        deadlines.begin(1, 4);
        assert_eq!(told(&mut deadlines, 0.0, 20.0), None);
        // An hour without a poll counts as a second.
        let (at, over) = told(&mut deadlines, 3620.0, 4000.0).unwrap();
        assert_eq!(over[0].rank, 1);
        assert!((3628.5..=3630.0).contains(&at), "{at}");
    }

    #[test]
    fn the_median_of_recent_leaves_counts() {
        let mut deadlines = Deadlines::new(1);
        for i in 0..200 {
            deadlines.begin(0, 1);
            deadlines.ranks[0].waited_s = if i < 100 { 1e6 } else { f64::from(i % 3) };
            deadlines.end(0, 0);
        }
        assert_eq!(deadlines.usual_s(), Some(1.0));
        assert_eq!(deadlines.times.len(), RECENT);
    }
}
