//! Drafts change the number of steps, not the answer.

use std::time::Duration;

use paceline_tensor::PAGE;
use paceline_text::grammar::{Constraint, Grammar};

use super::requests::{SAMPLED, biased, mixed, prompt, request};
use super::rig::{Rig, SequenceOutcome, alone};
use super::tiny::{END, TinyModel};
use crate::{EngineConfig, GenerationRequest, SamplingParams};

pub(super) const CONTEXT: usize = 3 * PAGE;

pub(super) fn sizes(drafts: usize) -> EngineConfig {
    EngineConfig {
        cache_positions: 4 * CONTEXT,
        max_running: 4,
        max_waiting: 100,
        drafts,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

/// An engine with free additional rows, so that it verifies every draft.
pub(super) fn eager(tiny: &TinyModel, drafts: usize) -> Rig {
    let mut rig = Rig::new(tiny, sizes(drafts));
    (1..=64).for_each(|rows| rig.engine.costs.record(rows, Duration::from_millis(1)));
    rig
}

/// Outcomes of all requests together, verified draft tokens, and tokens beyond one per step.
pub(super) fn run(
    rig: &mut Rig,
    requests: &[GenerationRequest],
) -> (Vec<SequenceOutcome>, usize, usize) {
    let ids: Vec<_> = requests.iter().map(|request| rig.submit(request)).collect();
    let (mut checked, mut gained) = (0, 0);
    while !rig.engine.is_idle() {
        let events = rig.step();
        let step = rig.engine.composition;
        let is_token = |event: &&crate::Event| matches!(event.reply, crate::Reply::Token { .. });
        checked += step.drafted;
        if step.drafted > 0 {
            let tokens = events.iter().filter(is_token).count();
            gained += tokens.saturating_sub(step.decoding);
        }
    }
    let outcome = |id| rig.outcomes.remove(&id).unwrap();
    (ids.into_iter().map(outcome).collect(), checked, gained)
}

/// Sampled from three tokens, so that draft tokens are often right and often wrong.
pub(super) fn babble(seed: u64) -> GenerationRequest {
    let sampling = SamplingParams {
        temperature: 2.0,
        seed,
        logit_bias: vec![(2, 60.0), (3, 60.0), (14, 60.0)],
        ..SAMPLED
    };
    GenerationRequest {
        logprobs: Some(2),
        ..request(prompt(10, 1), 100, sampling)
    }
}

/// Constrained by a grammar that forces much text, with several possible spellings.
pub(super) fn held(seed: u64) -> GenerationRequest {
    let sampling = SamplingParams {
        temperature: 2.0,
        seed,
        ..SAMPLED
    };
    let grammar = Grammar::Regex("(abcabcd|cd abe |kabcdl){9,12}".to_owned());
    GenerationRequest {
        constraint: Some(Constraint::whole(grammar)),
        ..request(prompt(5, 1), 80, sampling)
    }
}

fn check(tiny: &TinyModel) {
    let mut requests = mixed(tiny);
    requests.extend((0..4).map(babble));
    requests.extend((0..3).map(held));
    let expected: Vec<SequenceOutcome> = requests.iter().map(|r| alone(tiny, r, CONTEXT)).collect();
    for drafts in [1, 3, 8] {
        let (outcomes, checked, gained) = run(&mut eager(tiny, drafts), &requests);
        for (outcome, expected) in outcomes.iter().zip(&expected) {
            assert_eq!(outcome, expected, "{drafts} drafts");
        }
        assert!(0 < gained && gained < checked, "{gained} of {checked}");
    }
}

#[test]
fn drafts_change_no_answer() {
    check(&TinyModel::new(1));
}

/// Models with windows and recurrent states.
#[test]
fn drafts_change_no_answer_of_layers_that_differ() {
    check(&TinyModel::toy(2));
}

/// A greedy answer that repeats a cycle takes a fraction of the steps.
#[test]
fn repetitions_take_few_steps() {
    let tiny = TinyModel::new(1);
    let sampling = biased(&[(5, 100.0), (END, -100.0)]);
    let request = request(vec![1, 2, 3], CONTEXT - 10, sampling);
    let steps = |drafts| {
        let mut rig = eager(&tiny, drafts);
        let (outcomes, ..) = run(&mut rig, std::slice::from_ref(&request));
        (outcomes[0].tokens.clone(), rig.n_steps)
    };
    let ((plain, most), (drafted, few)) = (steps(0), steps(8));
    assert_eq!(plain, drafted);
    assert!(3 * few < most, "{few} of {most} steps");
}
