//! A hybrid logical clock: timestamps that follow the wall clock and never run backwards.
//!
//! A [`HybridTimestamp`] is milliseconds since 1970, a count within the millisecond, and the node
//! that made it. Timestamps of one cluster are totally ordered. A clock that has observed a
//! timestamp only returns later ones. So a write made after another one was observed wins over it,
//! regardless of wall clocks. Source: Kulkarni and others, "Logical Physical Clocks", OPODIS 2014.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::NodeId;

/// Largest skew of two machines' clocks. A timestamp further ahead is refused, since it would win
/// over every write until the wall clock has caught up.
pub const SKEW_MAX: Duration = Duration::from_secs(60);

/// A timestamp of one node's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HybridTimestamp {
    /// Milliseconds since 1970.
    pub ms: u64,
    /// Counts timestamps within the millisecond.
    pub count: u32,
    pub node: NodeId,
}

/// A node's current monotonic and wall time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Monotonic time since some moment of this process; includes the machine's sleep.
    pub since_start: Duration,
    /// Milliseconds since 1970 by this machine's clock.
    pub wall_ms: u64,
}

/// A node's clock.
#[derive(Clone, Debug)]
pub(crate) struct HybridClock {
    node: NodeId,
    ms: u64,
    count: u32,
}

impl HybridClock {
    pub(crate) const fn new(node: NodeId) -> Self {
        Self {
            node,
            ms: 0,
            count: 0,
        }
    }

    /// Returns a timestamp later than all returned or observed ones.
    pub(crate) const fn stamp(&mut self, wall_ms: u64) -> HybridTimestamp {
        if wall_ms > self.ms {
            (self.ms, self.count) = (wall_ms, 0);
        } else if self.count == u32::MAX {
            (self.ms, self.count) = (self.ms + 1, 0);
        } else {
            self.count += 1;
        }
        HybridTimestamp {
            ms: self.ms,
            count: self.count,
            node: self.node,
        }
    }

    /// Whether another node's timestamp is not too far ahead of this machine's clock.
    pub(crate) const fn is_near(stamp: HybridTimestamp, wall_ms: u64) -> bool {
        stamp.ms <= wall_ms.saturating_add(SKEW_MAX.as_millis() as u64)
    }

    /// Observes another node's timestamp; false if it is too far ahead of this machine's clock.
    pub(crate) fn observe(&mut self, stamp: HybridTimestamp, wall_ms: u64) -> bool {
        if !Self::is_near(stamp, wall_ms) {
            return false;
        }
        (self.ms, self.count) = (self.ms, self.count).max((stamp.ms, stamp.count));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_grow_whatever_the_wall_clock_does() {
        let mut clock = HybridClock::new(NodeId([1; 16]));
        let mut last = clock.stamp(5);
        for wall_ms in [5, 5, 4, 0, 6, 6, 100, 3] {
            let next = clock.stamp(wall_ms);
            assert!(next > last, "{next:?} after {last:?}");
            last = next;
        }
        clock.count = u32::MAX;
        assert!(clock.stamp(3) > last);
    }

    #[test]
    fn what_was_seen_is_earlier() {
        let mut clock = HybridClock::new(NodeId([1; 16]));
        let other = |ms, count| HybridTimestamp {
            ms,
            count,
            node: NodeId([9; 16]),
        };
        assert!(clock.observe(other(60_007, 3), 7));
        assert!(clock.stamp(8) > other(60_007, 3));
        assert!(
            !clock.observe(other(60_008, 0), 7),
            "more than a minute ahead"
        );
        assert!(clock.observe(other(0, u32::MAX), 7), "the past is harmless");
        assert!(clock.stamp(9).ms < 60_008);
    }
}
