//! Observations for the rules' tests: nodes and instances by numbers.

use std::time::Instant;

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::{NodeFacts, NodeView};
use paceline_cluster::nodes::member::Life;

use super::{Action, History, Round};
use crate::{
    InstanceId, InstanceSpec, Observed, OwnedInstance, Record, Report, State, WorkerStatus,
};

pub(super) fn node(number: u8) -> NodeId {
    NodeId([number; 16])
}

pub(super) fn record(id: u64, epoch: u64, nodes: &[u8]) -> (InstanceId, Record) {
    let spec = InstanceSpec {
        model: "smollm2".to_owned(),
        nodes: nodes.iter().map(|number| node(*number)).collect(),
        split: "auto".to_owned(),
        threads: 1,
        ..InstanceSpec::default()
    };
    let record = Record {
        epoch,
        spec,
        report: None,
    };
    (InstanceId(id), record)
}

pub(super) fn reported(epoch: u64, state: State) -> Report {
    Report {
        epoch,
        state,
        progress: None,
        wires: None,
        reason: None,
        computing: Vec::new(),
        context: None,
        numbers: None,
        split: None,
    }
}

/// Adds a live node with this memory, 0 for unknown.
pub(super) fn lives(observed: &mut Observed, number: u8, memory_bytes: u64) {
    let id = node(number);
    observed.lives.insert(id, Life::Alive);
    observed.nodes.push(NodeView {
        id,
        state: Life::Alive,
        found_by: String::new(),
        heard_by: Vec::new(),
        linked: true,
        slow_ms: None,
        facts: NodeFacts {
            memory_bytes,
            ..NodeFacts::default()
        },
    });
}

/// Lets the node run an instance that answers.
pub(super) fn runs(observed: &mut Observed, id: u64, epoch: u64, nodes: &[u8]) {
    let (id, Record { spec, .. }) = record(id, epoch, nodes);
    let owned = OwnedInstance {
        epoch,
        ranks: vec![None; spec.nodes.len()],
        spec,
        status: Some(WorkerStatus {
            is_ready: true,
            open: 0,
        }),
        answers: true,
        serves: true,
        excluded: Vec::new(),
        is_cramped: false,
        is_slower: false,
    };
    observed.owned.insert(id, owned);
}

/// The actions of a rule without a history.
pub(super) fn run(
    rule: fn(&mut Round<'_>) -> Vec<Action>,
    observed: &Observed,
    records: Vec<(InstanceId, Record)>,
) -> Vec<Action> {
    run_at(rule, observed, records, Instant::now())
}

pub(super) fn run_at(
    rule: fn(&mut Round<'_>) -> Vec<Action>,
    observed: &Observed,
    records: Vec<(InstanceId, Record)>,
    now: Instant,
) -> Vec<Action> {
    rule(&mut Round {
        observed,
        specs: &records.into_iter().collect(),
        now,
        history: &mut History::new(now),
    })
}
