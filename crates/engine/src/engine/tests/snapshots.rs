//! Where snapshots go in another engine. That their sequences continue as if they had never been
//! moved: `schedules`.

use paceline_tensor::PAGE;

use super::requests::{prompt, request};
use super::rig::{Rig, SequenceOutcome};
use super::tiny::TinyModel;
use crate::{EngineConfig, Error, SamplingParams, Snapshot};

const CONTEXT: usize = 3 * PAGE;

/// Sizes that differ from [`EngineConfig::single`].
fn other_sizes() -> EngineConfig {
    EngineConfig {
        cache_positions: 2 * CONTEXT,
        max_running: 3,
        max_waiting: 2,
        max_rows: 17,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

#[test]
fn restored_sequences_go_first_and_in_order() {
    let tiny = TinyModel::new(1);
    let mut source = Rig::new(
        &tiny,
        EngineConfig {
            max_waiting: 10,
            ..other_sizes()
        },
    );
    let made = |i| request(prompt(5, i), 4, SamplingParams::default());
    let snapshots: Vec<Snapshot> = (0..3)
        .map(|i| {
            let id = source.submit(&made(i));
            source.take(id).0
        })
        .collect();
    let mut rig = Rig::new(
        &tiny,
        EngineConfig {
            max_running: 1,
            ..other_sizes()
        },
    );
    let new = rig.submit(&made(9));
    let mut order: Vec<_> = snapshots[..2]
        .iter()
        .map(|s| rig.restore(s, SequenceOutcome::default()))
        .collect();
    order.push(new);
    let mut finished = Vec::new();
    while !rig.engine.is_idle() {
        let events = rig.step();
        let ends = events
            .iter()
            .filter(|e| matches!(e, crate::Event::Finished { .. }));
        finished.extend(ends.map(super::rig::id_of));
    }
    assert_eq!(finished, order);
}

#[test]
fn a_full_engine_gives_the_snapshot_back() {
    let tiny = TinyModel::new(1);
    let mut rig = Rig::new(
        &tiny,
        EngineConfig {
            max_running: 1,
            ..other_sizes()
        },
    );
    let id = rig.submit(&request(prompt(5, 1), 4, SamplingParams::default()));
    let (snapshot, past) = rig.take(id);
    for _ in 0..3 {
        rig.restore(&snapshot, past.clone());
    }
    let error = rig.engine.restore(snapshot.clone()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "3 sequences are waiting to be resumed already"
    );
    let Error::BusyResuming {
        waiting: 3,
        snapshot: back,
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!(
        serde_json::to_value(&back).unwrap(),
        serde_json::to_value(&snapshot).unwrap()
    );
    rig.drain();
}
