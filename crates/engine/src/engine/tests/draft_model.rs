//! A draft model changes the number of steps, not the answer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use paceline_model::Model;
use paceline_tensor::PAGE;

use super::drafts::{CONTEXT, babble, eager, run, sizes};
use super::requests::{SAMPLED, biased, mixed, prompt, request};
use super::rig::{Rig, SequenceOutcome, alone};
use super::tiny::{END, TinyModel, byte_tokenizer};
use crate::{Draft, DraftNetwork, Error, SamplingParams};

/// A stopped clock: drafting costs nothing.
pub(super) fn frozen() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// A clock by which every draft pass takes a second.
fn slow() -> Instant {
    static LOOKS: AtomicU64 = AtomicU64::new(0);
    frozen() + Duration::from_secs(LOOKS.fetch_add(1, Ordering::Relaxed))
}

pub(super) fn draft(of: &TinyModel, now: fn() -> Instant) -> Draft {
    let model: Arc<Model> = Arc::clone(&of.model);
    let tokenizer = Arc::clone(&of.tokenizer);
    Draft {
        network: DraftNetwork::Model { model, tokenizer },
        now,
    }
}

/// An engine with free additional rows and free drafting.
fn drafting(tiny: &TinyModel, by: &TinyModel, drafts: usize) -> Rig {
    let mut rig = eager(tiny, drafts);
    rig.engine.set_draft_model(&draft(by, frozen)).unwrap();
    rig
}

fn check(tiny: &TinyModel, by: &TinyModel) {
    let mut requests = mixed(tiny);
    requests.extend((0..4).map(babble));
    let expected: Vec<SequenceOutcome> = requests.iter().map(|r| alone(tiny, r, CONTEXT)).collect();
    for drafts in [1, 3, 8] {
        let (outcomes, checked, gained) = run(&mut drafting(tiny, by, drafts), &requests);
        for (outcome, expected) in outcomes.iter().zip(&expected) {
            assert_eq!(outcome, expected, "{drafts} drafts");
        }
        assert!(0 < gained && gained < checked, "{gained} of {checked}");
    }
}

/// Draft models with windows and states, and with states that outlast several pages.
#[test]
fn a_draft_of_another_shape_changes_no_answer() {
    let tiny = TinyModel::new(1);
    check(&tiny, &TinyModel::toy(1));
    check(&tiny, &TinyModel::delta_net(1));
}

#[test]
fn a_draft_changes_no_answer_of_layers_that_differ() {
    check(&TinyModel::toy(2), &TinyModel::new(1));
    check(&TinyModel::delta_net(1), &TinyModel::toy(1));
}

/// Answers without repetition, with a draft model that predicts them exactly.
fn of_the_same_mind(sampling: SamplingParams) -> (usize, usize) {
    let tiny = TinyModel::new(1);
    let request = request(prompt(20, 7), 2 * PAGE, sampling);
    let steps = |rig: &mut Rig| {
        let (outcomes, ..) = run(rig, std::slice::from_ref(&request));
        (outcomes[0].tokens.clone(), rig.n_steps)
    };
    let plain = steps(&mut eager(&tiny, 0));
    let drafted = steps(&mut drafting(&tiny, &tiny, 8));
    assert_eq!(plain.0, drafted.0);
    assert_eq!(plain.0.len(), 2 * PAGE);
    (plain.1, drafted.1)
}

#[test]
fn a_draft_of_the_same_mind_takes_few_steps() {
    let greedy = biased(&[(END, -100.0)]);
    let logit_bias = greedy.logit_bias.clone();
    let sampled = SamplingParams {
        logit_bias,
        seed: 5,
        ..SAMPLED
    };
    for sampling in [greedy, sampled] {
        let (plain, drafted) = of_the_same_mind(sampling);
        assert!(4 * drafted < plain, "{drafted} of {plain} steps");
    }
}

/// Steps of an answer with little repetition. Each step takes a millisecond.
fn steps_of(rig: &mut Rig) -> usize {
    let logit_bias = vec![(END, -100.0)];
    let sampling = SamplingParams {
        logit_bias,
        seed: 9,
        ..SAMPLED
    };
    rig.submit(&request(prompt(5, 3), 2 * PAGE, sampling));
    while !rig.engine.is_idle() {
        rig.step();
        rig.engine.record_duration(Duration::from_millis(1));
    }
    rig.n_steps
}

#[test]
fn a_draft_that_costs_more_than_it_gives_is_left() {
    let tiny = TinyModel::new(1);
    let without = steps_of(&mut eager(&tiny, 8));
    let mut rig = eager(&tiny, 8);
    rig.engine.set_draft_model(&draft(&tiny, slow)).unwrap();
    let with = steps_of(&mut rig);
    // Its first passes, with right drafts, show its cost. N-gram drafts may come at other steps
    // then.
    assert!(with + 8 > without, "{with} steps, {without} without");
    let free = steps_of(&mut drafting(&tiny, &tiny, 8));
    assert!(2 * free < without, "{free} steps, {without} without");
}

#[test]
fn a_draft_of_another_vocabulary_is_refused_by_its_first_token() {
    let tiny = TinyModel::new(1);
    let other = TinyModel {
        tokenizer: Arc::new(byte_tokenizer(&[])),
        ..tiny.clone()
    };
    let refused = tiny
        .engine(sizes(8))
        .set_draft_model(&draft(&other, frozen));
    let error = refused.unwrap_err();
    let text = error.to_string();
    let is_first = matches!(error, Error::DraftVocabulary { token: 0, .. });
    assert!(
        is_first && text.contains("token 0 of the draft model is"),
        "{text}"
    );
    assert!(text.contains("the model is \"a\""), "{text}");
}
