//! Random calls on two engines with moves between them. The outcome of a request does not depend
//! on other requests, chunks, threads, orders, budgets, pipelines or memory, and none starves. Each
//! schedule runs twice.

use std::cell::Cell;

use paceline_base::testing::long;
use paceline_tensor::{InstructionSet, PAGE};
use proptest::prelude::*;

use super::in_flight::rig_of;
use super::prefill_budget::Simulation;
use super::requests::{SAMPLED, mixed, prompt, request};
use super::rig::{Rig, SequenceOutcome, alone};
use super::scores::scored;
use super::tiny::TinyModel;
use crate::{
    EngineConfig, Error, Event, GenerationRequest, SamplingParams, SchedulingParams, SequenceId,
    StepTimeTarget,
};

const CONTEXT: usize = 3 * PAGE;

/// A call; indices are modulo the number of items.
#[derive(Clone, Copy, Debug)]
enum ScheduleCall {
    Submit {
        engine: usize,
        request: usize,
        order: SchedulingParams,
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
        6 => (0..2usize, 0..100usize, orders())
            .prop_map(|(engine, request, order)| ScheduleCall::Submit { engine, request, order }),
        1 => (0..100usize).prop_map(|sequence| ScheduleCall::Cancel { sequence }),
        2 => (0..100usize).prop_map(|sequence| ScheduleCall::Move { sequence }),
        1 => (0..100usize).prop_map(|sequence| ScheduleCall::Copy { sequence }),
        8 => (0..2usize, 1..20usize).prop_map(|(engine, times)| ScheduleCall::Step { engine, times }),
    ];
    prop::collection::vec(call, 1..60)
}

/// Most requests are of one client.
fn orders() -> impl Strategy<Value = SchedulingParams> {
    let client = prop_oneof![3 => Just(99), 1 => 0..3u64];
    (-2..3i32, client).prop_map(|(priority, client)| SchedulingParams {
        priority,
        deadline_ms: None,
        client,
    })
}

fn paces() -> impl Strategy<Value = StepTimeTarget> {
    prop_oneof![
        Just(StepTimeTarget::Auto),
        Just(StepTimeTarget::Off),
        (1..200u32).prop_map(StepTimeTarget::Millis)
    ]
}

/// Sizes of an engine, and its stages.
fn sizes() -> impl Strategy<Value = (EngineConfig, usize)> {
    // Every second engine has room for one context alone, so that memory is often short.
    let pages = prop_oneof![Just(0usize), 0..4usize];
    let sizes = (1..9usize, 1..5usize, 0..80usize, pages, 0..9usize);
    let depth = prop_oneof![2 => Just(1), 1 => 2..4usize];
    (sizes, paces(), depth).prop_map(|(sizes, pace, depth)| {
        let (max_running, max_waiting, rows, pages, drafts) = sizes;
        let config = EngineConfig {
            cache_positions: CONTEXT + pages * PAGE,
            max_running,
            max_waiting,
            max_rows: max_running + rows,
            pace,
            drafts,
            ..EngineConfig::single("tiny", CONTEXT)
        };
        (config, depth)
    })
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
    engines: [Simulation; 2],
    places: Vec<SequenceLocation>,
    events: Vec<Event>,
}

impl EnginePair<'_> {
    fn call(&mut self, call: ScheduleCall) {
        match call {
            ScheduleCall::Submit {
                engine,
                request,
                order,
            } => self.submit(engine, request % self.requests.len(), order),
            ScheduleCall::Cancel { sequence } => {
                if let Some(at) = self.unfinished(sequence) {
                    let place = self.places.remove(at);
                    self.engines[place.engine].rig.cancel(place.id);
                }
            }
            ScheduleCall::Move { sequence } => self.restore_elsewhere(sequence, true),
            ScheduleCall::Copy { sequence } => self.restore_elsewhere(sequence, false),
            ScheduleCall::Step { engine, times } => {
                for _ in 0..times {
                    let (_, events) = self.engines[engine].step_with_events();
                    self.events.extend(events);
                }
            }
        }
    }

    fn submit(&mut self, engine: usize, request: usize, order: SchedulingParams) {
        let wanted = GenerationRequest {
            order,
            ..self.requests[request].clone()
        };
        match self.engines[engine].rig.try_submit(&wanted) {
            Ok(id) => self.places.push(SequenceLocation {
                engine,
                id,
                request,
            }),
            Err(Error::Busy { request: back, .. }) => assert_eq!(*back, wanted),
            Err(error) => panic!("{error}"),
        }
    }

    /// Index of a sequence that has not ended.
    fn unfinished(&self, sequence: usize) -> Option<usize> {
        let has_ended = |p: &SequenceLocation| {
            let outcomes = &self.engines[p.engine].rig.outcomes;
            outcomes[&p.id].finish.is_some()
        };
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
        let other = &self.engines[1 - engine].rig.engine;
        if other.resuming.len() >= other.config.max_resuming() {
            return;
        }
        let rig = &mut self.engines[engine].rig;
        let (snapshot, past) = if moves {
            self.places.remove(at);
            rig.take(id)
        } else {
            (rig.engine.snapshot(id).unwrap(), rig.outcomes[&id].clone())
        };
        let engine = 1 - engine;
        let id = self.engines[engine].rig.restore(&snapshot, past);
        self.places.push(SequenceLocation {
            engine,
            id,
            request,
        });
    }
}

/// The events, how often a sequence lost its pages to another, and the tokens that were not
/// computed again.
fn run(
    tinies: &[TinyModel; 2],
    sizes: &[(EngineConfig, usize); 2],
    calls: &[ScheduleCall],
    all: &All,
) -> (Vec<Event>, usize, u64) {
    let engine = |i: usize| {
        let (config, depth) = sizes[i].clone();
        Simulation::of(match depth {
            // Without a pipeline no batch is announced.
            1 => Rig::new(&tinies[i], config).unordered(),
            _ => rig_of(&tinies[i], config, (depth, depth), None).unordered(),
        })
    };
    let mut world = EnginePair {
        requests: &all.requests,
        engines: [engine(0), engine(1)],
        places: Vec::new(),
        events: Vec::new(),
    };
    calls.iter().for_each(|call| world.call(*call));
    world.engines.iter_mut().for_each(Simulation::drain);
    for place in world.places {
        let outcome = &world.engines[place.engine].rig.outcomes[&place.id];
        assert_eq!(*outcome, all.outcomes[place.request], "{place:?}");
    }
    let preemptions = world.engines.iter().map(|it| it.rig.preemptions).sum();
    let reused = world.engines.iter().map(|it| it.rig.engine.n_reused());
    let reused = reused.sum();
    (world.events, preemptions, reused)
}

/// All requests with their undisturbed outcomes.
#[derive(Debug)]
struct All {
    requests: Vec<GenerationRequest>,
    outcomes: Vec<SequenceOutcome>,
}

#[test]
fn random_schedules_change_nothing_and_end() {
    check([1, 3].map(TinyModel::new), if long() { 300 } else { 100 });
}

/// With windows and states, whose pages are allocated separately.
#[test]
fn random_schedules_of_layers_that_differ_change_nothing_and_end() {
    check([1, 2].map(TinyModel::toy), if long() { 150 } else { 50 });
}

fn check(tinies: [TinyModel; 2], cases: u32) {
    let mut requests = scored(&tinies[0]);
    requests.extend(with_common_prefixes());
    let outcomes = outcomes_of(&tinies[0], &requests);
    let all = All { requests, outcomes };
    let config = ProptestConfig::with_cases(cases);
    let (preempted, reused) = (Cell::new(0), Cell::new(0));
    proptest!(config, |(calls in calls(), a in sizes(), b in sizes())| {
        let sizes = [a, b];
        let ran = run(&tinies, &sizes, &calls, &all);
        preempted.set(preempted.get() + ran.1);
        reused.set(reused.get() + ran.2);
        prop_assert_eq!(run(&tinies, &sizes, &calls, &all), ran);
    });
    let (preempted, reused) = (preempted.get(), reused.get());
    let least = 20 * u64::from(cases);
    assert!(reused > least, "{reused}: little was shared");
    assert!(
        preempted > cases as usize / 10,
        "{preempted}: memory was rarely short"
    );
}

/// Requests with common prefixes that end within, at and after borders of pages.
fn with_common_prefixes() -> impl Iterator<Item = GenerationRequest> {
    let base = prompt(2 * PAGE + 8, 1);
    let ends = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 7];
    ends.into_iter().zip(0..).flat_map(move |(common, seed)| {
        let base = base.clone();
        [0, 1, 20].into_iter().map(move |more| {
            let prompt = [&base[..common], &prompt(more, 9)].concat();
            request(prompt, 30, SamplingParams { seed, ..SAMPLED })
        })
    })
}

fn outcomes_of(tiny: &TinyModel, requests: &[GenerationRequest]) -> Vec<SequenceOutcome> {
    requests.iter().map(|r| alone(tiny, r, CONTEXT)).collect()
}

#[test]
fn outcomes_are_of_every_kind() {
    let tiny = TinyModel::new(1);
    let outcomes = outcomes_of(&tiny, &mixed(&tiny));
    let has = |what: &dyn Fn(&SequenceOutcome) -> bool| outcomes.iter().any(what);
    use crate::Finish::{EndOfText, Length, Stop};
    assert!(has(&|o| o.finish == Some(EndOfText)), "{outcomes:?}");
    assert!(has(&|o| o.finish == Some(Length)), "{outcomes:?}");
    assert!(has(&|o| matches!(o.finish, Some(Stop(_)))), "{outcomes:?}");
    assert!(has(&|o| o.text.contains('\u{fffd}')), "{outcomes:?}");
    assert!(has(&|o| o.text.contains('中')), "{outcomes:?}");
    assert!(has(&|o| o.tokens.is_empty()) && has(&|o| o.tokens.len() > 40));
    assert!(outcomes.iter().all(|o| o.prompt_reads == 1));
}

#[test]
fn instruction_sets_change_nothing() {
    let requests = mixed(&TinyModel::new(1)).into_iter().skip(2).step_by(3);
    let requests: Vec<GenerationRequest> = requests.collect();
    let run = |set| outcomes_of(&TinyModel::with_set(set, 1), &requests);
    let mut outcomes = InstructionSet::available().into_iter().map(run);
    let first = outcomes.next().unwrap();
    assert!(outcomes.all(|other| other == first));
}
