//! Random calls on two engines with moves between them. Each schedule runs twice.

use paceline_base::testing::long;
use paceline_tensor::PAGE;
use proptest::prelude::*;

use super::requests::mixed;
use super::rig::{Rig, SequenceOutcome, alone};
use super::tiny::TinyModel;
use crate::{EngineConfig, Error, Event, GenerationRequest, SequenceId, StepTimeTarget};

const CONTEXT: usize = 3 * PAGE;

/// A call; indices are modulo the number of items.
#[derive(Clone, Copy, Debug)]
enum ScheduleCall {
    Submit {
        engine: usize,
        request: usize,
    },
    Cancel {
        sequence: usize,
    },
    /// To the other engine.
    Move {
        sequence: usize,
    },
    /// A copy continues in the other engine.
    Copy {
        sequence: usize,
    },
    Step {
        engine: usize,
        times: usize,
    },
}

fn calls() -> impl Strategy<Value = Vec<ScheduleCall>> {
    let call = prop_oneof![
        6 => (0..2usize, 0..100usize).prop_map(|(engine, request)| ScheduleCall::Submit { engine, request }),
        1 => (0..100usize).prop_map(|sequence| ScheduleCall::Cancel { sequence }),
        2 => (0..100usize).prop_map(|sequence| ScheduleCall::Move { sequence }),
        1 => (0..100usize).prop_map(|sequence| ScheduleCall::Copy { sequence }),
        8 => (0..2usize, 1..20usize).prop_map(|(engine, times)| ScheduleCall::Step { engine, times }),
    ];
    prop::collection::vec(call, 1..60)
}

fn sizes() -> impl Strategy<Value = EngineConfig> {
    let sizes = (1..7usize, 1..5usize, 0..80usize, 0..4usize, 0..9usize);
    sizes.prop_map(
        |(max_running, max_waiting, rows, pages, drafts)| EngineConfig {
            model: "tiny".to_owned(),
            context: CONTEXT,
            cache_positions: CONTEXT + pages * PAGE,
            max_running,
            max_waiting,
            max_rows: max_running + rows,
            fixed_rows: 14,
            pace: StepTimeTarget::Auto,
            drafts,
            strict: false,
        },
    )
}

/// The engine and id of a sequence, and its request.
#[derive(Clone, Copy, Debug)]
struct SequenceLocation {
    engine: usize,
    id: SequenceId,
    request: usize,
}

struct EnginePair<'a> {
    requests: &'a [GenerationRequest],
    rigs: [Rig; 2],
    places: Vec<SequenceLocation>,
    events: Vec<Event>,
}

impl EnginePair<'_> {
    fn call(&mut self, call: ScheduleCall) {
        match call {
            ScheduleCall::Submit { engine, request } => {
                self.submit(engine, request % self.requests.len())
            }
            ScheduleCall::Cancel { sequence } => {
                if let Some(at) = self.unfinished(sequence) {
                    let place = self.places.remove(at);
                    self.rigs[place.engine].cancel(place.id);
                }
            }
            ScheduleCall::Move { sequence } => self.restore_elsewhere(sequence, true),
            ScheduleCall::Copy { sequence } => self.restore_elsewhere(sequence, false),
            ScheduleCall::Step { engine, times } => {
                (0..times).for_each(|_| self.events.extend(self.rigs[engine].step()));
            }
        }
    }

    fn submit(&mut self, engine: usize, request: usize) {
        let wanted = &self.requests[request];
        match self.rigs[engine].try_submit(wanted) {
            Ok(id) => self.places.push(SequenceLocation {
                engine,
                id,
                request,
            }),
            Err(Error::Busy { request: back, .. }) => assert_eq!(*back, *wanted),
            Err(error) => panic!("{error}"),
        }
    }

    /// Index of a sequence that has not ended.
    fn unfinished(&self, sequence: usize) -> Option<usize> {
        let has_ended = |p: &SequenceLocation| self.rigs[p.engine].outcomes[&p.id].finish.is_some();
        let open = (0..self.places.len()).filter(|i| !has_ended(&self.places[*i]));
        let open: Vec<usize> = open.collect();
        (!open.is_empty()).then(|| open[sequence % open.len()])
    }

    fn restore_elsewhere(&mut self, sequence: usize, moves: bool) {
        let Some(at) = self.unfinished(sequence) else {
            return;
        };
        let SequenceLocation {
            engine,
            id,
            request,
        } = self.places[at];
        let other = &self.rigs[1 - engine].engine;
        if other.resuming.len() >= other.config.max_resuming() {
            return;
        }
        let rig = &mut self.rigs[engine];
        let (snapshot, past) = if moves {
            self.places.remove(at);
            rig.take(id)
        } else {
            (rig.engine.snapshot(id).unwrap(), rig.outcomes[&id].clone())
        };
        let engine = 1 - engine;
        let id = self.rigs[engine].restore(&snapshot, past);
        self.places.push(SequenceLocation {
            engine,
            id,
            request,
        });
    }
}

fn run(
    tinies: &[TinyModel; 2],
    sizes: &[EngineConfig; 2],
    calls: &[ScheduleCall],
    all: &All,
) -> Vec<Event> {
    let rig = |i: usize| Rig::new(&tinies[i], sizes[i].clone());
    let mut world = EnginePair {
        requests: &all.requests,
        rigs: [rig(0), rig(1)],
        places: Vec::new(),
        events: Vec::new(),
    };
    calls.iter().for_each(|call| world.call(*call));
    world.rigs.iter_mut().for_each(Rig::drain);
    for place in world.places {
        let outcome = &world.rigs[place.engine].outcomes[&place.id];
        assert_eq!(*outcome, all.outcomes[place.request], "{place:?}");
    }
    world.events
}

/// All requests with their undisturbed outcomes.
#[derive(Debug)]
struct All {
    requests: Vec<GenerationRequest>,
    outcomes: Vec<SequenceOutcome>,
}

#[test]
fn random_schedules_change_nothing_and_end() {
    check(
        [TinyModel::new(1), TinyModel::new(2)],
        if long() { 300 } else { 100 },
    );
}

/// With windows and states, whose pages are allocated separately.
#[test]
fn random_schedules_of_layers_that_differ_change_nothing_and_end() {
    check(
        [TinyModel::toy(1), TinyModel::toy(2)],
        if long() { 150 } else { 50 },
    );
}

fn check(tinies: [TinyModel; 2], cases: u32) {
    let requests = mixed(&tinies[0]);
    let outcomes = requests
        .iter()
        .map(|r| alone(&tinies[0], r, CONTEXT))
        .collect();
    let all = All { requests, outcomes };
    let config = ProptestConfig::with_cases(cases);
    proptest!(config, |(calls in calls(), a in sizes(), b in sizes())| {
        let sizes = [a, b];
        let events = run(&tinies, &sizes, &calls, &all);
        prop_assert_eq!(run(&tinies, &sizes, &calls, &all), events);
    });
}
