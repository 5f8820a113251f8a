//! Starts the instances that this node owns, takes over those of dead owners, and stops those that
//! it no longer owns.

use super::{Action, Round, WriteReason};
use crate::ownership::{Duty, duties};
use crate::rules::relocate::with_room;
use crate::{InstanceId, Observed, Specs, State};

pub(super) fn rule(round: &mut Round<'_>) -> Vec<Action> {
    let (observed, specs) = (round.observed, round.specs);
    let mut actions = Vec::new();
    let mut own = Vec::new();
    for duty in duties(specs, observed.own, |id| observed.life(id)) {
        match duty {
            // The draining thread hands over instances that arrive meanwhile.
            Duty::Own { id, .. } if observed.is_leaving && !serves(observed, id) => {}
            Duty::TakeOver { .. } if observed.is_leaving => {}
            Duty::Own { id, epoch, spec } => {
                own.push(id);
                if observed.owned.get(&id).is_none_or(|it| it.epoch != epoch) {
                    let resumes = epoch > 1 || is_restart(specs, id, epoch);
                    actions.push(Action::Start {
                        id,
                        epoch,
                        spec,
                        resumes,
                    });
                }
            }
            Duty::TakeOver { id, epoch, spec } => actions.push(Action::Write {
                id,
                epoch,
                spec: with_room(observed, specs, id, &spec),
                reason: WriteReason::OwnerLost,
            }),
        }
    }
    let is_old = |id: &InstanceId| !own.contains(id) && !bridges(observed, specs, *id);
    let old = observed.owned.iter().filter(|(id, _)| is_old(id));
    actions.extend(old.map(|(id, it)| Action::Stop {
        id: *id,
        epoch: it.epoch,
    }));
    actions
}

fn serves(observed: &Observed, id: InstanceId) -> bool {
    observed.owned.get(&id).is_some_and(|it| it.serves)
}

/// Whether an earlier process of this node started the instance of this record.
fn is_restart(specs: &Specs, id: InstanceId, epoch: u64) -> bool {
    let report = specs.get(id).and_then(|it| it.report.as_ref());
    report.is_some_and(|it| it.epoch == epoch && it.state != State::Failed)
}

/// Whether this node answers with an instance although another owns it, which is not ready.
fn bridges(observed: &Observed, specs: &Specs, id: InstanceId) -> bool {
    let is_ready = |epoch| {
        let report = specs.get(id).and_then(|it| it.report.as_ref());
        report.is_some_and(|it| it.epoch >= epoch && it.state == State::Ready)
    };
    observed.is_leaving && specs.get(id).is_some_and(|it| !is_ready(it.epoch))
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use paceline_cluster::nodes::member::Life;

    /// Actions of node 1, as `start EPOCH`, `stop EPOCH` or `write EPOCH NODES`; `+` if it resumes.
    fn actions(case: impl FnOnce(&mut Observed, &mut Vec<(InstanceId, Record)>)) -> Vec<String> {
        let (mut observed, mut records) = (Observed::new(node(1)), vec![record(5, 3, &[1, 2])]);
        observed.lives.insert(node(2), Life::Alive);
        case(&mut observed, &mut records);
        let said = |action: Action| match action {
            Action::Start { epoch, resumes, .. } => {
                format!("start {epoch}{}", if resumes { "+" } else { "" })
            }
            Action::Stop { epoch, .. } => format!("stop {epoch}"),
            Action::Write { epoch, spec, .. } => {
                let nodes: Vec<u8> = spec.nodes.iter().map(|id| id.0[0]).collect();
                format!("write {epoch} {nodes:?}")
            }
            other => format!("{other:?}"),
        };
        run(rule, &observed, records)
            .into_iter()
            .map(said)
            .collect()
    }

    use crate::Record;

    #[test]
    fn an_owner_runs_its_record_once() {
        assert_eq!(actions(|_, _| ()), ["start 3+"]);
        assert_eq!(actions(|_, records| records[0].1.epoch = 1), ["start 1"]);
        let restarted = |state| {
            move |_: &mut Observed, records: &mut Vec<(InstanceId, Record)>| {
                records[0].1.epoch = 1;
                records[0].1.report = Some(reported(1, state));
            }
        };
        assert_eq!(actions(restarted(State::Ready)), ["start 1+"]);
        assert_eq!(actions(restarted(State::Failed)), ["start 1"]);
        let none: [&str; 0] = [];
        assert_eq!(actions(|it, _| runs(it, 5, 3, &[1, 2])), none);
        assert_eq!(actions(|it, _| runs(it, 5, 2, &[1, 2])), ["start 3+"]);
    }

    #[test]
    fn an_instance_ends_where_another_node_owns_it_or_nobody_does() {
        let none: [&str; 0] = [];
        let elsewhere = |is_leaving, is_ready| {
            move |it: &mut Observed, records: &mut Vec<(InstanceId, Record)>| {
                runs(it, 5, 2, &[1, 2]);
                it.is_leaving = is_leaving;
                records[0] = record(5, 3, &[2]);
                records[0].1.report = Some(reported(if is_ready { 3 } else { 2 }, State::Ready));
            }
        };
        assert_eq!(actions(elsewhere(false, false)), ["stop 2"]);
        assert_eq!(actions(elsewhere(true, true)), ["stop 2"]);
        assert_eq!(actions(elsewhere(true, false)), none, "it bridges");
        let unloaded = actions(|it, records| {
            runs(it, 5, 2, &[1, 2]);
            it.is_leaving = true;
            records.clear();
        });
        assert_eq!(unloaded, ["stop 2"]);
    }

    #[test]
    fn a_node_that_leaves_starts_and_takes_nothing() {
        let none: [&str; 0] = [];
        assert_eq!(actions(|it, _| it.is_leaving = true), none);
        let lost = |is_leaving| {
            move |it: &mut Observed, records: &mut Vec<(InstanceId, Record)>| {
                it.is_leaving = is_leaving;
                it.lives.remove(&node(2));
                records[0] = record(5, 3, &[2, 1]);
                records[0].1.spec.successors = vec![node(1)];
            }
        };
        assert_eq!(actions(lost(false)), ["write 4 [1]"]);
        assert_eq!(actions(lost(true)), none);
    }
}
