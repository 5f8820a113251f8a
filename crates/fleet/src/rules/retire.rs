//! Retires leased instances without a program: their lending node is dead, or it is this node and
//! was restarted.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use paceline_base::AwakeTime;

use super::{Action, Round, UnloadReason};
use crate::{InstanceId, Observed, ROUND, Specs, ownership};

/// An instance is unloaded when its lending node has been dead for this time. A briefly suspended
/// node is back within it, and its program still waits: that takes 30 s of silence for a loss.
const RETURN_LIMIT: Duration = Duration::from_secs(10);

/// Instances whose lending node is dead, and for how long.
#[derive(Debug)]
pub struct LostLenders {
    /// Clock that stops while this node is suspended and receives no heartbeats.
    awake: AwakeTime,
    since: BTreeMap<InstanceId, Duration>,
}

impl LostLenders {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            awake: AwakeTime::new(now, 2 * ROUND),
            since: BTreeMap::new(),
        }
    }

    /// Instances of `abandoned` whose lending node has been dead for [`RETURN_LIMIT`].
    fn look(&mut self, now: Instant, abandoned: &[InstanceId]) -> Vec<InstanceId> {
        self.awake.tick(now);
        let total = self.awake.total();
        self.since.retain(|id, _| abandoned.contains(id));
        for id in abandoned {
            self.since.entry(*id).or_insert(total);
        }
        let over = |since: &Duration| total.saturating_sub(*since) >= RETURN_LIMIT;
        let due = self.since.iter().filter(|(_, since)| over(since));
        due.map(|(id, _)| *id).collect()
    }
}

pub(super) fn rule(round: &mut Round<'_>) -> Vec<Action> {
    let (observed, specs) = (round.observed, round.specs);
    let abandoned = ownership::abandoned(specs, observed.own, |id| observed.life(id));
    let mut over = round.history.lenders.look(round.now, &abandoned);
    over.extend(past_leases(observed, specs));
    let unload = |id| Action::Unload {
        id,
        reason: UnloadReason::Unleased,
    };
    over.into_iter().map(unload).collect()
}

/// Instances that this node leased before its restart.
pub fn past_leases(observed: &Observed, specs: &Specs) -> Vec<InstanceId> {
    let own = Some(observed.own);
    let lent = specs.iter().filter(|(_, it)| it.spec.lender == own);
    let past = lent.filter(|(id, _)| !observed.leased.contains(id));
    past.map(|(id, _)| id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_given_up_once_its_lender_has_been_dead_for_a_while() {
        let start = Instant::now();
        let mut lost = LostLenders::new(start);
        let both = [InstanceId(1), InstanceId(2)];
        let mut look =
            |s: u64, abandoned: &[InstanceId]| lost.look(start + Duration::from_secs(s), abandoned);
        assert_eq!(look(1, &both), []);
        for s in 2..=5 {
            assert_eq!(look(s, &both), []);
        }
        assert_eq!(look(6, &both[1..]), [], "the lender of 1 is back");
        for s in 7..=10 {
            assert_eq!(look(s, &both), []);
        }
        assert_eq!(look(11, &both), [InstanceId(2)]);
        assert_eq!(look(12, &[]), []);
        // This node was suspended for an hour, and counts 2 s of it.
        assert_eq!(look(13, &both), []);
        assert_eq!(look(3613, &both), []);
    }
}
