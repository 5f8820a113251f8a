//! Readmits nodes that lost workers repeatedly, once a load names them: a user who names a node
//! wants it used.

use std::collections::{BTreeMap, BTreeSet};

use paceline_cluster::nodes::NodeId;

use super::{Action, Round};
use crate::InstanceId;

/// By instance of this node and its epoch: the loads with named nodes seen so far.
#[derive(Debug, Default)]
pub(super) struct NamedLoads(BTreeMap<(InstanceId, u64), BTreeSet<InstanceId>>);

pub(super) fn rule(round: &mut Round<'_>) -> Vec<Action> {
    let owned = &round.observed.owned;
    let seen = &mut round.history.named.0;
    seen.retain(|(id, epoch), _| owned.get(id).is_some_and(|it| it.epoch == *epoch));
    let named = || round.specs.iter().filter(|(_, it)| it.spec.named);
    let readmit = |(id, it): (&InstanceId, &crate::OwnedInstance)| {
        let seen = seen.entry((*id, it.epoch)).or_default();
        let new = named().filter(|(load, _)| !seen.contains(load));
        let nodes: BTreeSet<NodeId> = new.flat_map(|(_, it)| it.spec.nodes.clone()).collect();
        *seen = named().map(|(load, _)| load).collect();
        let id = *id;
        (!nodes.is_empty()).then_some(Action::Readmit { id, nodes })
    };
    owned.iter().filter_map(readmit).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::super::{History, Round};
    use super::*;
    use crate::{Observed, Record};

    #[test]
    fn a_load_by_name_takes_a_node_back_once() {
        let now = std::time::Instant::now();
        let mut history = History::new(now);
        let mut observed = Observed::new(node(1));
        runs(&mut observed, 5, 1, &[1, 2]);
        let named = |id, nodes: &[u8]| -> (InstanceId, Record) {
            let (id, mut record) = record(id, 1, nodes);
            record.spec.named = true;
            (id, record)
        };
        let all = [record(5, 1, &[1, 2]), named(6, &[2]), named(7, &[3])];
        let mut readmitted = |loads: usize| {
            let specs = all[..loads].iter().cloned().collect();
            let actions = rule(&mut Round {
                observed: &observed,
                specs: &specs,
                now,
                history: &mut history,
            });
            let nodes = |action| match action {
                Action::Readmit { nodes, .. } => nodes.into_iter().map(|id| id.0[0]),
                other => panic!("{other:?}"),
            };
            actions.into_iter().flat_map(nodes).collect::<Vec<u8>>()
        };
        let none: [u8; 0] = [];
        assert_eq!(readmitted(1), none);
        assert_eq!(readmitted(2), [2]);
        assert_eq!(readmitted(2), none, "no news");
        assert_eq!(readmitted(3), [3]);
        assert_eq!(readmitted(2), none);
        assert_eq!(readmitted(3), [3], "loaded again");
    }
}
