//! Drains a node whose battery is low, and lets a node that still runs after its drain work again.
//! Decides the steps of a drain.
//!
//! ```text
//! leaver   says so in its facts                 others hand nothing to it
//! leaver   has the next owner copy the model    ... where it lacks it
//! leaver   writes a record without itself       the record's owner starts its instance
//! leaver   answers on, if it was the owner      ... which becomes ready
//! entries  see their line close                 hand their requests to the new owner
//! ```
//! Two draining nodes may hand their work to each other before either reads the other's facts. So a
//! draining node follows each instance until another node answers with it. It hands the instance
//! over again if that owner died, and gives up at once if no staying node is left.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::member::Life;

use super::{Action, ResumeReason, Round};
use crate::{BatteryReading, InstanceId, InstanceSpec, Observed, Record, Specs, State, ownership};

/// Charge at which work moves. Laptops go to sleep at about 5 %, and a large model takes minutes to
/// be copied and loaded elsewhere.
const LOW: f64 = 0.10;

/// A drained node has left by then: `up` gives its answers 5 s, and `paceline leave` removes the
/// node at once. A node that is still there takes work again.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// Next step for an instance that this node hands over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainStep {
    /// Done: other nodes answer, or it was unloaded.
    Moved,
    /// Wait: its owner is loading it, or a successor takes it over.
    Waits,
    /// Wait while there are staying nodes: its owner is draining too and hands it over.
    Passing,
    /// Hand it to another node.
    Homeless,
    /// Give up: no node can take it.
    Stuck,
}

/// Whether a node can take work over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DrainStatus {
    Stays,
    Leaves,
    Gone,
}

/// Whether the battery was low at its last reading.
#[derive(Debug, Default)]
pub struct BatteryHistory {
    is_low: bool,
}

impl BatteryHistory {
    /// Takes a reading. Returns whether the battery is low, if that changed. It stays low until
    /// mains power returns, so a wavering charge moves nothing.
    fn judge(&mut self, found: BatteryReading) -> Option<bool> {
        let is_low = found.is_some_and(|(used, charge)| used && (self.is_low || charge <= LOW));
        (std::mem::replace(&mut self.is_low, is_low) != is_low).then_some(is_low)
    }
}

pub(super) fn rule(round: &mut Round<'_>) -> Vec<Action> {
    let (observed, battery) = (round.observed, &mut round.history.battery);
    let mut actions = Vec::new();
    match observed.battery.and_then(|found| battery.judge(found)) {
        // No node could take the work: it stays here, and the next reading may find one.
        Some(true) if is_last(observed) => {
            battery.is_low = false;
            actions.push(Action::Strand);
        }
        Some(true) => actions.push(Action::Drain),
        Some(false) => actions.push(Action::Resume {
            reason: ResumeReason::Power,
        }),
        None => {}
    }
    let is_late = |at| round.now.saturating_duration_since(at) >= GONE_WITHIN;
    if observed.drained.is_some_and(is_late) && !battery.is_low {
        actions.push(Action::Resume {
            reason: ResumeReason::StillHere,
        });
    }
    actions
}

/// Whether no other node can take work.
pub fn is_last(observed: &Observed) -> bool {
    let mut others = observed.nodes.iter().filter(|node| node.id != observed.own);
    !others.any(|node| node.state == Life::Alive && !node.facts.leaving)
}

/// Whether other nodes exist and all of them drain, so that this node keeps its work.
pub fn is_stranded(observed: &Observed, specs: &Specs) -> bool {
    let mut nodes = observed.nodes.iter();
    let has_others = nodes.any(|it| it.id != observed.own && it.state == Life::Alive);
    has_others && is_last(observed) && !work(observed, specs).is_empty()
}

/// Instances that a draining node hands over, and the users' names for their models. Its leased
/// instances end with it.
pub fn work(observed: &Observed, specs: &Specs) -> BTreeMap<InstanceId, String> {
    let own = observed.own;
    let all = specs.iter().filter(|(_, it)| it.spec.nodes.contains(&own));
    let all = all.filter(|(_, it)| it.spec.lender != Some(own));
    all.map(|(id, it)| (id, it.spec.model.clone())).collect()
}

/// Other live nodes that stay. They have this node's numerics or are part of the instance already,
/// so that answers stay the same. Nodes of another protocol come only where no others are, as at
/// the end of an upgrade: one of them then has the whole instance.
pub fn heirs(observed: &Observed, spec: &InstanceSpec) -> Vec<NodeId> {
    let mut heirs = observed.ranked.clone();
    heirs.retain(|id| *id != observed.own);
    for node in &observed.nodes {
        let stays = node.state == Life::Alive && !node.facts.leaving && node.id != observed.own;
        if stays && spec.nodes.contains(&node.id) && !heirs.contains(&node.id) {
            heirs.push(node.id);
        }
    }
    if heirs.is_empty() {
        let own = observed.nodes.iter().find(|node| node.id == observed.own);
        let numerics = own.map(|node| node.facts.numerics);
        let others = observed.nodes.iter().filter(|node| {
            let stays = node.state == Life::Alive && !node.facts.leaving;
            stays && node.id != observed.own && Some(node.facts.numerics) == numerics
        });
        heirs.extend(others.map(|node| node.id));
    }
    heirs
}

/// The next record of an instance without this node, owned by `owner`, one of `heirs`. `None` if no
/// node is left.
pub fn handed_over(
    own: NodeId,
    mut spec: InstanceSpec,
    heirs: &[NodeId],
    owner: NodeId,
) -> Option<InstanceSpec> {
    if spec.nodes[0] != owner {
        // The first successor replaces the departing owner.
        spec.successors.retain(|other| *other != owner);
        spec.successors.insert(0, owner);
    }
    let life = |id| match heirs.contains(&id) {
        true => Life::Alive,
        false => Life::Left,
    };
    ownership::without(spec, own, &[], life)
}

/// The next step for an instance that this node hands over, by its record.
pub fn step(observed: &Observed, record: Option<&Record>) -> DrainStep {
    let Some(Record {
        epoch,
        spec,
        report,
    }) = record
    else {
        return DrainStep::Moved;
    };
    if spec.nodes.contains(&observed.own) {
        return DrainStep::Homeless;
    }
    let told = report.as_ref().filter(|it| it.epoch >= *epoch);
    match (status(observed, spec.nodes[0]), told.map(|it| it.state)) {
        (DrainStatus::Gone, _) => {
            // A draining successor takes nothing over.
            let mut stands = spec.successors.iter().map(|id| status(observed, *id));
            match stands.find(|it| *it != DrainStatus::Gone) {
                Some(DrainStatus::Stays) => DrainStep::Waits,
                _ => DrainStep::Homeless,
            }
        }
        (_, Some(State::Ready)) => DrainStep::Moved,
        (_, Some(State::Failed)) => DrainStep::Stuck,
        (DrainStatus::Leaves, _) if heirs(observed, spec).is_empty() => DrainStep::Stuck,
        (DrainStatus::Leaves, _) => DrainStep::Passing,
        (DrainStatus::Stays, _) => DrainStep::Waits,
    }
}

fn status(observed: &Observed, id: NodeId) -> DrainStatus {
    let mut nodes = observed.nodes.iter().filter(|it| it.id == id);
    match nodes.find(|it| matches!(it.state, Life::Alive | Life::Suspect)) {
        Some(node) if node.facts.leaving => DrainStatus::Leaves,
        Some(_) => DrainStatus::Stays,
        None => DrainStatus::Gone,
    }
}

/// Possible owners of an instance: first nodes with its model, then its successors in order.
pub fn by_preference(
    mut heirs: Vec<NodeId>,
    successors: &[NodeId],
    has: &BTreeSet<NodeId>,
) -> Vec<NodeId> {
    let place = |id: &NodeId| {
        let at = successors.iter().position(|other| other == id);
        at.unwrap_or(usize::MAX)
    };
    heirs.sort_by_key(|id| (!has.contains(id), place(id)));
    heirs
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    #[test]
    fn a_low_battery_is_told_once_and_its_end_too() {
        let mut battery = BatteryHistory::default();
        let looks = [
            (Some((true, 0.5)), None),
            (Some((true, 0.10)), Some(true)),
            (Some((true, 0.11)), None), // it wavers
            (Some((true, 0.05)), None),
            (Some((false, 0.05)), Some(false)),
            (Some((false, 0.04)), None),
            (None, None),
        ];
        for (found, said) in looks {
            assert_eq!(battery.judge(found), said, "{found:?}");
        }
    }

    /// Node 15's view: nodes 2 and 15 live, those from 8 on drain, those from 16 on are gone.
    fn view(stays: bool) -> Observed {
        let mut observed = Observed::new(node(15));
        for number in [8, 9, 15] {
            lives(&mut observed, number, 0);
            observed.nodes.last_mut().unwrap().facts.leaving = true;
        }
        if stays {
            lives(&mut observed, 2, 0);
            observed.ranked = vec![node(2)];
        }
        observed
    }

    fn step_of(nodes: &[u8], successors: &[u8], told: Option<(u64, State)>) -> DrainStep {
        let (_, mut record) = record(1, 3, nodes);
        record.spec.successors = successors.iter().map(|number| node(*number)).collect();
        record.report = told.map(|(epoch, state)| reported(epoch, state));
        step(&view(true), Some(&record))
    }

    #[test]
    fn work_is_followed_until_another_node_answers() {
        assert_eq!(step(&view(true), None), DrainStep::Moved);
        for (nodes, told, expected) in [
            (&[2, 15][..], None, DrainStep::Homeless),
            (&[2], None, DrainStep::Waits),
            (&[2], Some((2, State::Ready)), DrainStep::Waits), // of another epoch
            (&[2], Some((3, State::Loading)), DrainStep::Waits),
            (&[2], Some((3, State::Ready)), DrainStep::Moved),
            (&[2], Some((3, State::Failed)), DrainStep::Stuck),
        ] {
            assert_eq!(step_of(nodes, &[15], told), expected, "{nodes:?} {told:?}");
        }
    }

    #[test]
    fn two_that_leave_do_not_wait_for_each_other() {
        let ready = Some((3, State::Ready));
        for (nodes, successors, told, expected) in [
            (&[8][..], &[15][..], None, DrainStep::Passing),
            (&[8, 2], &[2, 15], None, DrainStep::Passing),
            (&[8], &[15], ready, DrainStep::Moved),
            (&[16], &[15], None, DrainStep::Homeless),
            (&[16], &[8, 2], None, DrainStep::Homeless),
            (&[16], &[17, 2], None, DrainStep::Waits), // 2 takes over
            (&[16], &[], ready, DrainStep::Homeless),  // it was ready
        ] {
            let found = step_of(nodes, successors, told);
            assert_eq!(found, expected, "{nodes:?} {successors:?} {told:?}");
        }
        let (_, record) = record(1, 3, &[8]);
        let alone = step(&view(false), Some(&record));
        assert_eq!(alone, DrainStep::Stuck, "no node stays");
    }

    #[test]
    fn another_protocol_takes_over_where_no_other_node_can() {
        let mut observed = view(false);
        for (number, numerics) in [(3, 0), (4, 1)] {
            lives(&mut observed, number, 0);
            observed.nodes.last_mut().unwrap().facts.numerics = numerics;
        }
        let (_, record) = record(1, 3, &[15]);
        assert_eq!(heirs(&observed, &record.spec), [node(3)], "equal numbers");
        observed.ranked = vec![node(15), node(2)];
        assert_eq!(heirs(&observed, &record.spec), [node(2)], "its own first");
    }

    #[test]
    fn those_that_have_the_model_come_first() {
        let heirs = vec![node(2), node(3), node(4), node(5)];
        let has = BTreeSet::from([node(4), node(5)]);
        let order = by_preference(heirs.clone(), &[node(3), node(5)], &has);
        assert_eq!(order, [node(5), node(4), node(3), node(2)]);
        let order = by_preference(heirs, &[], &BTreeSet::new());
        assert_eq!(order, [node(2), node(3), node(4), node(5)]);
    }

    #[test]
    fn a_node_that_still_runs_after_its_drain_works_again() {
        let start = std::time::Instant::now();
        let after = |seconds, battery| {
            let mut observed = view(true);
            (observed.drained, observed.battery) = (Some(start), battery);
            run_at(
                rule,
                &observed,
                Vec::new(),
                start + Duration::from_secs(seconds),
            )
        };
        let reason = ResumeReason::StillHere;
        assert_eq!(after(9, None), []);
        assert_eq!(after(10, None), [Action::Resume { reason }]);
        let low = after(10, Some(Some((true, 0.05))));
        assert_eq!(low, [Action::Drain], "its battery is low");
    }
}
