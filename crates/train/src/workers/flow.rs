//! Schedule of leaves through stages: forward through all, and back through all.
//!
//! ```text
//! stations of a leaf in three stages:     0 -> 1 -> 2 and back -> 1 back -> 0 back
//! of a leaf that is only evaluated:       0 -> 1 -> 2
//! ```
//! The order in which leaves meet stages changes no bit: each leaf depends on itself alone.

/// Leaves on their way through stages.
#[derive(Debug)]
pub(super) struct Flow {
    stages: usize,
    /// Whether leaves go back.
    back: bool,
    leaves: Vec<LeafPosition>,
}

/// Progress of a leaf.
#[derive(Clone, Copy, Debug, Default)]
struct LeafPosition {
    /// Stations that are behind it.
    passed: usize,
    /// Whether a stage is computing it.
    is_held: bool,
}

impl Flow {
    /// `leaves` before the first of `stages`.
    pub(super) fn new(stages: usize, leaves: usize, back: bool) -> Self {
        Self {
            stages,
            back,
            leaves: vec![LeafPosition::default(); leaves],
        }
    }

    fn stations(&self) -> usize {
        match self.back {
            true => 2 * self.stages - 1,
            false => self.stages,
        }
    }

    /// The stage of a station, and whether the leaf is to go back there.
    fn station(&self, passed: usize) -> (usize, bool) {
        let last = self.stages - 1;
        match self.back && passed >= last {
            true => (2 * last - passed, true),
            false => (passed, false),
        }
    }

    /// The next leaf for a worker of `stage`, and whether it is a backward pass. The leaf that is
    /// farthest is first, so that few files of leaves exist at a time.
    pub(super) fn next(&mut self, stage: usize) -> Option<(usize, bool)> {
        let stations = self.stations();
        let waits = |(_, place): &(usize, &LeafPosition)| {
            let is_open = !place.is_held && place.passed < stations;
            is_open && self.station(place.passed).0 == stage
        };
        let waiting = self.leaves.iter().enumerate().filter(waits);
        let (leaf, _) = waiting.max_by_key(|(i, place)| (place.passed, std::cmp::Reverse(*i)))?;
        let back = self.station(self.leaves[leaf].passed).1;
        self.leaves[leaf].is_held = true;
        Some((leaf, back))
    }

    /// A leaf went through the stage that it was in.
    pub(super) fn pass(&mut self, leaf: usize) {
        self.leaves[leaf].is_held = false;
        self.leaves[leaf].passed += 1;
    }

    /// The holder of a leaf is gone.
    pub(super) fn lose(&mut self, leaf: usize) {
        self.leaves[leaf].is_held = false;
    }

    /// Whether all leaves are through.
    pub(super) fn is_over(&self) -> bool {
        let stations = self.stations();
        self.leaves.iter().all(|place| place.passed == stations)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_leaf_goes_through_every_stage_and_back_also_after_a_loss() {
        for (stages, leaves) in [(1, 1), (2, 5), (3, 4), (4, 1)] {
            let mut flow = Flow::new(stages, leaves, true);
            let mut seen = vec![Vec::new(); leaves];
            let mut turn = 0;
            while !flow.is_over() {
                for stage in 0..stages {
                    let Some((leaf, back)) = flow.next(stage) else {
                        continue;
                    };
                    turn += 1;
                    if turn % 3 == 0 {
                        flow.lose(leaf);
                        continue;
                    }
                    seen[leaf].push((stage, back));
                    flow.pass(leaf);
                }
                assert!(turn < 1000, "{stages} {leaves}");
            }
            let ahead = (0..stages - 1).map(|stage| (stage, false));
            let way: Vec<_> = ahead
                .chain((0..stages).rev().map(|stage| (stage, true)))
                .collect();
            assert!(seen.iter().all(|leaf| *leaf == way), "{seen:?}");
        }
    }

    #[test]
    fn two_stages_have_work_at_the_same_time() {
        let mut flow = Flow::new(2, 3, true);
        assert_eq!(flow.next(1), None);
        assert_eq!(flow.next(0), Some((0, false)));
        flow.pass(0);
        assert_eq!(
            (flow.next(0), flow.next(1)),
            (Some((1, false)), Some((0, true)))
        );
        flow.pass(0);
        flow.pass(1);
        assert_eq!(flow.next(0), Some((0, true)), "what can go back goes first");
        let mut judged = Flow::new(2, 1, false);
        assert_eq!(judged.next(0), Some((0, false)));
        judged.pass(0);
        assert_eq!(judged.next(1), Some((0, false)));
        judged.pass(0);
        assert!(judged.is_over());
    }
}
