//! The outcome of a request, scores of its prompt included, does not depend on other requests,
//! chunks, threads, order or memory. `schedules` moves sequences between engines besides.

use paceline_tensor::{InstructionSet, PAGE};

use super::requests::mixed;
use super::rig::{Rig, SequenceOutcome, alone};
use super::scores::scored;
use super::tiny::TinyModel;
use crate::{EngineConfig, GenerationRequest, SequenceId, StepTimeTarget};

/// Positions of a sequence: three pages.
const CONTEXT: usize = 3 * PAGE;

/// Order of arrival.
#[derive(Clone, Copy, Debug)]
enum ArrivalOrder {
    AllAtOnce,
    Reversed,
    /// One request after every third step.
    Staggered,
}

fn config(max_running: usize, max_rows: usize, cache_positions: usize) -> EngineConfig {
    EngineConfig {
        model: "tiny".to_owned(),
        context: CONTEXT,
        cache_positions,
        max_running,
        max_waiting: 100,
        max_rows,
        fixed_rows: 14,
        pace: StepTimeTarget::Auto,
        drafts: 0,
        strict: false,
    }
}

/// Outcomes in the order of `requests`, and the number of preemptions.
fn run(
    tiny: &TinyModel,
    config: &EngineConfig,
    requests: &[GenerationRequest],
    order: ArrivalOrder,
) -> (Vec<SequenceOutcome>, usize) {
    let mut rig = Rig::new(tiny, config.clone());
    let mut ids: Vec<SequenceId> = match order {
        ArrivalOrder::AllAtOnce => requests.iter().map(|r| rig.submit(r)).collect(),
        ArrivalOrder::Reversed => requests.iter().rev().map(|r| rig.submit(r)).collect(),
        ArrivalOrder::Staggered => {
            let submit = |request| {
                rig.steps(3);
                rig.submit(request)
            };
            requests.iter().map(submit).collect()
        }
    };
    if let ArrivalOrder::Reversed = order {
        ids.reverse();
    }
    rig.drain();
    let outcome = |id| rig.outcomes.remove(&id).unwrap();
    (ids.into_iter().map(outcome).collect(), rig.preemptions)
}

fn expected(tiny: &TinyModel, requests: &[GenerationRequest]) -> Vec<SequenceOutcome> {
    requests.iter().map(|r| alone(tiny, r, CONTEXT)).collect()
}

#[test]
fn outcomes_are_those_of_a_request_alone() {
    let tiny = TinyModel::new(1);
    let requests = scored(&tiny);
    let expected = expected(&tiny, &requests);
    for (request, outcome) in requests.iter().zip(&expected) {
        let scores = outcome.scores.as_ref().map(Vec::len);
        let all = request.prompt.len() - 1;
        assert_eq!(scores, request.prompt_logprobs.then_some(all));
    }
    let sizes = [
        config(1, 1, CONTEXT),
        config(1, 7, CONTEXT),
        config(3, 64, 2 * CONTEXT),
        config(4, 7, 2 * CONTEXT),
        config(8, 512, 8 * CONTEXT),
        config(12, 13, CONTEXT), // memory for one long sequence, shared by many
        config(12, 512, CONTEXT + PAGE),
    ];
    let mut preemptions = 0;
    for threads in [1, 2, 3] {
        let tiny = TinyModel::new(threads);
        for config in &sizes {
            for order in [
                ArrivalOrder::AllAtOnce,
                ArrivalOrder::Reversed,
                ArrivalOrder::Staggered,
            ] {
                let (outcomes, preempted) = run(&tiny, config, &requests, order);
                preemptions += preempted;
                for (i, (got, expected)) in outcomes.iter().zip(&expected).enumerate() {
                    let title = format!("request {i}, {threads} threads, {order:?}, {config:?}");
                    assert_eq!(got, expected, "{title}");
                }
            }
        }
    }
    assert!(
        preemptions > 50,
        "memory was short only {preemptions} times"
    );
}

#[test]
fn outcomes_are_of_every_kind() {
    let tiny = TinyModel::new(1);
    let outcomes = expected(&tiny, &mixed(&tiny));
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
    let requests: Vec<GenerationRequest> = mixed(&TinyModel::new(1))
        .into_iter()
        .skip(2)
        .step_by(3)
        .collect();
    let run = |set| expected(&TinyModel::with_set(set, 1), &requests);
    let mut outcomes = InstructionSet::available().into_iter().map(run);
    let first = outcomes.next().unwrap();
    assert!(outcomes.all(|other| other == first));
}
