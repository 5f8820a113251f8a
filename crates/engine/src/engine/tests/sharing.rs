//! Prefix cache: sequences with common prefixes share pages, without an effect on their answers.
//! Random ones: `schedules`.

use paceline_tensor::PAGE;

use super::requests::{SAMPLED, prompt, request};
use super::rig::{Rig, alone};
use super::tiny::TinyModel;
use crate::{EngineConfig, GenerationRequest, SamplingParams};

const CONTEXT: usize = 5 * PAGE;

fn sizes() -> EngineConfig {
    EngineConfig {
        cache_positions: 3 * CONTEXT,
        max_running: 4,
        max_waiting: 20,
        max_rows: 40,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

/// [`sizes`] with another cache.
fn caching(cache_positions: usize) -> EngineConfig {
    EngineConfig {
        cache_positions,
        ..sizes()
    }
}

/// An answer of `n` tokens to `prompt`.
fn sampled(prompt: Vec<u32>, n: usize, seed: u64) -> GenerationRequest {
    let mut request = request(prompt, n, SamplingParams { seed, ..SAMPLED });
    request.logprobs = Some(2);
    request
}

#[test]
fn a_turn_of_a_chat_reads_only_what_is_new() {
    check_chat(&TinyModel::new(2), 6);
    check_chat(&TinyModel::toy(2), 6);
    check_chat(&TinyModel::delta_net(2), 3); // with shorter answers
}

/// `least`: minimum pages that all turns reuse together.
fn check_chat(tiny: &TinyModel, least: u64) {
    let mut rig = Rig::new(tiny, sizes());
    let mut said = prompt(70, 1);
    // Full pages of earlier turns: all but the last token of an answer.
    let mut computed = 0;
    for turn in 0..4 {
        let wanted = sampled(said.clone(), 30, turn);
        let (outcome, reused) = rig.answer(&wanted);
        assert_eq!(reused, (computed / PAGE * PAGE) as u64, "turn {turn}");
        assert_eq!(outcome, alone(tiny, &wanted, CONTEXT));
        said.extend(&outcome.tokens);
        computed = said.len() - 1;
        said.extend(prompt(20, 50 + turn as u32));
    }
    assert!(rig.engine.n_reused() >= least * PAGE as u64);
}

/// An agent's next turn begins with the last prompt, and with the answer in another form, without
/// the reasoning. States are retained near the end of each prompt.
#[test]
fn an_agents_second_turn_reuses_its_prefix() {
    let tiny = TinyModel::delta_net(2);
    let context = 60 * PAGE;
    let config = EngineConfig {
        context,
        cache_positions: 2 * context,
        max_rows: 512,
        ..sizes()
    };
    let mut rig = Rig::new(&tiny, config);
    // A prompt of 2500 tokens; the template's last 6 open the answer.
    let mut said = prompt(2500, 1);
    let mut shared = 0;
    for turn in 0..3 {
        let wanted = sampled([&said[..], &prompt(6, 7)].concat(), 200, turn);
        let (outcome, reused) = rig.answer(&wanted);
        let reused = reused as usize;
        assert!(
            reused * 100 >= shared * 95 && reused <= shared,
            "turn {turn}: {reused} of {shared} tokens"
        );
        assert_eq!(outcome, alone(&tiny, &wanted, context));
        shared = said.len();
        said.extend(prompt(90, 50 + turn as u32));
    }
}

#[test]
fn a_prompt_that_is_known_takes_one_row() {
    let tiny = TinyModel::new(1);
    let mut rig = Rig::new(&tiny, sizes());
    let wanted = [1, 2, 3, 4].map(|seed| sampled(prompt(2 * PAGE + 1, 1), 5, seed));
    rig.answer(&wanted[0]);
    let steps = rig.n_steps;
    let ids: Vec<_> = wanted[1..].iter().map(|r| rig.submit(r)).collect();
    rig.drain();
    // One token per step from the first on, and one idle step.
    assert!(rig.n_steps - steps <= 5, "{} steps", rig.n_steps - steps);
    rig.check_alone(&tiny, &ids, &wanted[1..]);
}

#[test]
fn shared_pages_make_room_for_more_sequences() {
    let tiny = TinyModel::new(1);
    // Each alone needs four of five pages.
    let mut rig = Rig::new(&tiny, caching(CONTEXT + PAGE));
    let wanted = [0, 1, 2, 3].map(|seed| sampled(prompt(3 * PAGE + 2, 1), 20, seed));
    rig.answer(&wanted[0]);
    let ids: Vec<_> = wanted[1..].iter().map(|r| rig.submit(r)).collect();
    rig.step();
    assert_eq!(rig.engine.running.len(), 3, "three pages and one each");
    rig.drain();
    assert_eq!(rig.preemptions, 0);
    rig.check_alone(&tiny, &ids, &wanted[1..]);
}

#[test]
fn a_sequence_that_gave_up_its_pages_finds_them_again() {
    let tiny = TinyModel::new(1);
    let mut rig = Rig::new(&tiny, caching(CONTEXT));
    let wanted = |i| sampled(prompt(PAGE + 40, i), 100, i.into());
    let is_long = |r: &GenerationRequest| alone(&tiny, r, CONTEXT).tokens.len() == 100;
    let wanted: Vec<GenerationRequest> = (0..).map(wanted).filter(is_long).take(2).collect();
    let ids: Vec<_> = wanted.iter().map(|r| rig.submit(r)).collect();
    rig.drain();
    assert!(rig.preemptions > 0 && rig.engine.n_reused() >= 2 * PAGE as u64);
    rig.check_alone(&tiny, &ids, &wanted);
}

/// Simultaneous answers to one uncached prompt, as for an API's `n`.
#[test]
fn answers_to_one_prompt_compute_it_once() {
    for tiny in [
        TinyModel::new(1),
        TinyModel::toy(1),
        TinyModel::delta_net(1),
    ] {
        let mut rig = Rig::new(&tiny, caching(5 * CONTEXT));
        let wanted = [0, 1, 2, 3].map(|seed| sampled(prompt(3 * PAGE + 2, 1), 20, seed));
        let ids = wanted.each_ref().map(|r| rig.submit(r));
        rig.drain();
        assert_eq!(rig.engine.n_reused(), 3 * 3 * PAGE as u64);
        rig.check_alone(&tiny, &ids, &wanted);
    }
}

/// The sequence that computes it is cancelled in the middle: another continues.
#[test]
fn nobody_waits_for_a_prompt_that_was_cancelled() {
    let tiny = TinyModel::new(1);
    let mut rig = Rig::new(&tiny, caching(5 * CONTEXT));
    let wanted = |seed| sampled(prompt(3 * PAGE + 2, 1), 20, seed);
    let first = rig.submit(&wanted(0));
    let second = rig.submit(&wanted(1));
    rig.steps(2); // 80 of 194 rows
    rig.cancel(first);
    rig.drain();
    assert_eq!(rig.engine.n_reused(), PAGE as u64);
    assert_eq!(rig.outcomes[&second], alone(&tiny, &wanted(1), CONTEXT));
}
