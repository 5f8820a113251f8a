//! Priorities, deadlines and clients on a simulated machine.

use std::time::Duration;

use paceline_tensor::PAGE;

use super::requests::{endless, of_client, prompt};
use super::rig::Rig;
use super::tiny::TinyModel;
use crate::{EngineConfig, Finish, GenerationRequest, SchedulingParams, SequenceId};

const CONTEXT: usize = 3 * PAGE;

/// Milliseconds of a step.
const STEP_MS: u64 = 10;

fn sizes(max_running: usize) -> EngineConfig {
    EngineConfig {
        cache_positions: 2 * CONTEXT,
        max_running,
        max_waiting: 100,
        max_rows: 40,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

/// An answer of exactly `n` tokens.
fn long(n: usize, seed: u32, order: SchedulingParams) -> GenerationRequest {
    GenerationRequest {
        order,
        ..endless(prompt(5, seed), n)
    }
}

fn step(rig: &mut Rig) {
    rig.step();
    rig.engine.record_duration(Duration::from_millis(STEP_MS));
}

/// Ids of finished sequences, in order.
fn ends(rig: &mut Rig) -> Vec<SequenceId> {
    let mut ended = Vec::new();
    while !rig.engine.is_idle() {
        step(rig);
        for (id, outcome) in &rig.outcomes {
            if outcome.finish.is_some() && !ended.contains(id) {
                ended.push(*id);
            }
        }
    }
    ended
}

#[test]
fn an_answer_ends_when_its_deadline_is_over() {
    let tiny = TinyModel::new(1);
    let mut rig = Rig::new(&tiny, sizes(1)).unordered();
    let order = |ms| SchedulingParams {
        deadline_ms: ms,
        ..SchedulingParams::default()
    };
    let part = rig.submit(&long(100, 1, order(Some(200))));
    let nothing = rig.submit(&long(100, 2, order(Some(100))));
    let whole = rig.submit(&long(100, 3, order(Some(10_000))));
    ends(&mut rig);
    let outcome = |id| &rig.outcomes[&id];
    // The earliest deadline gets the slot: ten steps of 10 ms.
    assert_eq!(outcome(nothing).tokens.len(), 10);
    assert_eq!(outcome(part).tokens.len(), 10);
    assert_eq!(outcome(whole).tokens.len(), 100);
    let finishes = [nothing, part, whole].map(|id| outcome(id).finish);
    let late = Some(Finish::Deadline);
    assert_eq!(finishes, [late, late, Some(Finish::Length)]);
    assert_eq!(rig.engine.pages.available(), rig.engine.compute.pages());
}

#[test]
fn clients_with_many_and_with_few_requests_are_served_alike() {
    let tiny = TinyModel::new(1);
    let mut rig = Rig::new(&tiny, sizes(2)).unordered();
    let all = [(1, 12), (2, 3)].map(|(client, n)| -> Vec<_> {
        let one = |i| rig.submit(&long(20, i, of_client(client)));
        (0..n).map(one).collect()
    });
    let ended = ends(&mut rig);
    let last = all[1].iter().map(|id| ended.iter().position(|e| e == id));
    assert!(last.max().flatten().unwrap() <= 8, "{ended:?} of {all:?}");
    assert_eq!(ended.len(), all.iter().map(Vec::len).sum::<usize>());
}
