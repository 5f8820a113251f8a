//! Where snapshots go in another engine. That their sequences continue as if they had never been
//! moved: `schedules`.

use paceline_tensor::PAGE;

use super::requests::{prompt, request};
use super::rig::{Rig, SequenceOutcome, id_of};
use super::tiny::TinyModel;
use crate::{EngineConfig, Error, Event, SamplingParams, Snapshot};

const CONTEXT: usize = 3 * PAGE;

/// Sizes that differ from [`EngineConfig::single`].
fn other_sizes(max_running: usize, max_waiting: usize) -> EngineConfig {
    EngineConfig {
        cache_positions: 2 * CONTEXT,
        max_running,
        max_waiting,
        max_rows: 17,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

#[test]
fn restored_sequences_go_first_and_in_order() {
    let tiny = TinyModel::new(1);
    let mut source = Rig::new(&tiny, other_sizes(3, 10));
    let made = |i| request(prompt(5, i), 4, SamplingParams::default());
    let snapshots: [Snapshot; 2] = [0, 1].map(|i| {
        let id = source.submit(&made(i));
        source.take(id).0
    });
    let mut rig = Rig::new(&tiny, other_sizes(1, 2));
    let new = rig.submit(&made(9));
    let [first, second] = snapshots.map(|s| rig.restore(&s, SequenceOutcome::default()));
    let mut finished = Vec::new();
    while !rig.engine.is_idle() {
        let events = rig.step();
        let is_end = |e: &&Event| matches!(e.reply, crate::Reply::Finished { .. });
        finished.extend(events.iter().filter(is_end).map(id_of));
    }
    assert_eq!(finished, [first, second, new]);
}

#[test]
fn a_full_engine_gives_the_snapshot_back() {
    let tiny = TinyModel::new(1);
    let mut rig = Rig::new(&tiny, other_sizes(1, 2));
    let id = rig.submit(&request(prompt(5, 1), 4, SamplingParams::default()));
    let (snapshot, past) = rig.take(id);
    for _ in 0..3 {
        rig.restore(&snapshot, past.clone());
    }
    let error = rig.engine.restore(snapshot.clone()).unwrap_err();
    let expected = "3 sequences are waiting to be resumed already";
    assert_eq!(error.to_string(), expected);
    let Error::BusyResuming { snapshot: back, .. } = error else {
        panic!("{error}");
    };
    let [back, given] = [&*back, &snapshot].map(|it| serde_json::to_value(it).unwrap());
    assert_eq!(back, given);
    rig.drain();
}
