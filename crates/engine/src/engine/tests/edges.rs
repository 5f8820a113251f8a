//! Limits, refusals and cancellation.

use std::sync::Arc;

use paceline_tensor::PAGE;

use super::requests::{SAMPLED, biased, prompt, request};
use super::rig::{Rig, alone, id_of};
use super::tiny::{END, TinyModel, VOCAB};
use crate::{Engine, EngineConfig, Error, Finish, GenerationRequest, SamplingParams};

const CONTEXT: usize = 2 * PAGE;

fn sizes() -> EngineConfig {
    EngineConfig {
        cache_positions: 4 * CONTEXT,
        max_running: 4,
        max_waiting: 4,
        max_rows: 16,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

fn greedy(prompt: Vec<u32>, max_tokens: usize) -> GenerationRequest {
    request(prompt, max_tokens, SamplingParams::default())
}

/// Requests with prompts of one token and answers of 100.
fn long_answers(tiny: &TinyModel, n: usize) -> Vec<GenerationRequest> {
    let wanted = |seed| request(vec![1], 100, SamplingParams { seed, ..SAMPLED });
    let is_long = |r: &GenerationRequest| alone(tiny, r, CONTEXT).tokens.len() == 100;
    (0..).map(wanted).filter(is_long).take(n).collect()
}

#[test]
fn sizes_that_cannot_work_are_named() {
    let tiny = TinyModel::new(1);
    type Change = fn(&mut EngineConfig);
    let short = |n| format!("cache_positions is {n}, expected at least the context");
    let many = format!("cache_positions is {}, expected at most 2^32", usize::MAX);
    let rows = "max_rows is 3, expected at least max_running";
    let cases: [(Change, &str); 8] = [
        (|it| it.context = 1, "context is 1, expected 2 or more"),
        (|it| it.context = 0, "context is 0, expected 2 or more"),
        (|it| it.cache_positions = PAGE, &short(PAGE)),
        (|it| it.context = usize::MAX, &short(512)),
        (|it| it.cache_positions = usize::MAX, &many),
        (
            |it| it.max_running = 0,
            "max_running is 0, expected 1 or more",
        ),
        (
            |it| it.max_waiting = 0,
            "max_waiting is 0, expected 1 or more",
        ),
        (|it| it.max_rows = 3, rows),
    ];
    for (change, expected) in cases {
        let mut config = sizes();
        change(&mut config);
        let (model, tokenizer) = (Arc::clone(&tiny.model), Arc::clone(&tiny.tokenizer));
        let error = Engine::new(model, tokenizer, config).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn memory_follows_from_the_cache_when_other_sizes_are_huge() {
    let tiny = TinyModel::new(1);
    let huge = usize::MAX;
    let config = EngineConfig {
        max_running: huge,
        max_waiting: huge,
        max_rows: huge,
        ..sizes()
    };
    let mut rig = Rig::new(&tiny, config);
    let wanted = greedy(prompt(70, 1), 40);
    let ids = [(); 20].map(|()| rig.submit(&wanted));
    rig.drain();
    rig.check_alone(&tiny, &ids, [&wanted; 20]);
}

#[test]
fn a_request_that_cannot_be_answered_says_why() {
    let tiny = TinyModel::new(1);
    let mut engine = tiny.engine(sizes());
    let outside = vec![0, 1, VOCAB as u32];
    let with = |change: fn(&mut GenerationRequest)| {
        let mut wanted = greedy(vec![1], 5);
        change(&mut wanted);
        wanted
    };
    let hot = with(|it| it.sampling.temperature = f32::NAN);
    let empty_stop = with(|it| it.stop = vec!["a".to_owned(), String::new()]);
    let told = with(|it| it.logprobs = Some(21));
    let biased = with(|it| it.sampling.logit_bias = vec![(33, 1.0), (34, 1.0)]);
    let cases = "\
the prompt is empty
the prompt has 128 tokens, but the context holds 128
token 34 at position 2 is outside the vocabulary of 34
temperature is NaN, expected 0 or more, finite
stop string 1 is empty
logprobs is 21, expected at most 20
logit_bias has token 34, which is outside the vocabulary of 34";
    let prompts = [vec![], prompt(CONTEXT, 1), outside];
    let requests = prompts.map(|prompt| greedy(prompt, 5)).into_iter();
    let requests = requests.chain([hot, empty_stop, told, biased]);
    for (request, expected) in requests.zip(cases.lines()) {
        assert_eq!(engine.submit(request).unwrap_err().to_string(), expected);
        assert!(engine.is_idle());
    }
}

#[test]
fn answers_end_where_they_must() {
    let tiny = TinyModel::new(1);
    // (prompt, most tokens, tokens of the answer)
    for (n, max_tokens, expected) in [
        (5, 0, 0),
        (5, 1, 1),
        (CONTEXT - 1, usize::MAX, 1),
        (CONTEXT - 2, 5, 2),
        (PAGE, usize::MAX, CONTEXT - PAGE),
    ] {
        let outcome = alone(&tiny, &greedy(prompt(n, 4), max_tokens), CONTEXT);
        assert!(!outcome.tokens.contains(&END), "the prompt is badly chosen");
        assert_eq!(outcome.tokens.len(), expected, "{n} {max_tokens}");
        assert_eq!(outcome.finish, Some(Finish::Length));
        assert_eq!(outcome.prompt_reads, 1);
    }
}

#[test]
fn an_answer_has_its_least_number_of_tokens() {
    let tiny = TinyModel::new(1);
    let ends = biased(&[(END, 100.0)]);
    let wanted = GenerationRequest {
        min_tokens: 3,
        ..request(prompt(3, 1), 9, ends)
    };
    let outcome = alone(&tiny, &wanted, CONTEXT);
    assert_eq!(outcome.tokens.len(), 4, "three, and the one that ends it");
    assert_eq!(outcome.finish, Some(Finish::EndOfText));
}

#[test]
fn the_end_token_is_given_out_without_text() {
    let tiny = TinyModel::new(1);
    let ended = |seed| {
        let wanted = request(prompt(3, 1), 60, SamplingParams { seed, ..SAMPLED });
        let outcome = alone(&tiny, &wanted, CONTEXT);
        (outcome.finish == Some(Finish::EndOfText)).then_some(outcome)
    };
    let outcome = (0..100).find_map(ended).unwrap();
    let (last, before) = outcome.tokens.split_last().unwrap();
    assert_eq!(*last, END);
    assert!(!before.contains(&END) && !outcome.text.contains("im_end"));
    let bytes = before.iter().map(|t| tiny.tokenizer.token_bytes(*t));
    let bytes = bytes.flatten().collect::<Vec<_>>().concat();
    assert_eq!(outcome.text, String::from_utf8_lossy(&bytes));
}

#[test]
fn a_full_queue_gives_the_request_back() {
    let tiny = TinyModel::new(1);
    let mut rig = Rig::new(&tiny, sizes());
    for i in 0..4 {
        rig.submit(&greedy(prompt(9, i), 5));
    }
    let refused = greedy(vec![], 7); // not checked
    let error = rig.try_submit(&refused).unwrap_err();
    assert_eq!(error.to_string(), "4 requests are waiting already");
    assert!(matches!(error, Error::Busy { waiting: 4, request } if *request == refused));
    rig.step();
    rig.submit(&greedy(prompt(9, 9), 5));
    rig.drain();
}

#[test]
fn preempted_sequences_take_no_place_of_requests() {
    let tiny = TinyModel::new(1);
    let config = EngineConfig {
        cache_positions: CONTEXT,
        max_waiting: 3,
        ..sizes()
    };
    let mut rig = Rig::new(&tiny, config);
    for request in long_answers(&tiny, 2) {
        rig.submit(&request);
    }
    while rig.engine.resuming.is_empty() {
        rig.step();
    }
    for i in 0..3 {
        rig.submit(&greedy(prompt(5, i), 2));
    }
    rig.drain();
}

#[test]
fn cancelling_frees_pages_and_ends_events() {
    let tiny = TinyModel::new(1);
    for steps in 0..12 {
        let config = EngineConfig {
            cache_positions: CONTEXT + PAGE,
            max_running: 3,
            ..sizes()
        };
        let mut rig = Rig::new(&tiny, config);
        let ids = [0, 1, 2, 3].map(|i| rig.submit(&greedy(prompt(40, i), 30)));
        rig.steps(steps);
        for &id in ids.iter().step_by(2) {
            rig.cancel(id);
            for error in [
                rig.engine.cancel(id).unwrap_err(),
                rig.engine.snapshot(id).unwrap_err(),
                rig.engine.take_snapshot(id).unwrap_err(),
            ] {
                let expected = format!("sequence {} is not in this engine", id.0);
                assert_eq!(error.to_string(), expected);
            }
            let outcome = rig.outcomes[&id].clone();
            let events = rig.step();
            assert!(events.iter().all(|event| id_of(event) != id), "{events:?}");
            assert_eq!(rig.outcomes[&id], outcome);
        }
        rig.drain();
    }
}

#[test]
fn a_prompt_is_begun_only_when_there_are_pages_for_all_of_it() {
    let tiny = TinyModel::new(1);
    let config = EngineConfig {
        cache_positions: CONTEXT + PAGE,
        ..sizes()
    };
    let mut rig = Rig::new(&tiny, config);
    let answers = long_answers(&tiny, 1);
    let first = rig.submit(&answers[0]);
    rig.submit(&greedy(prompt(100, 1), 5));
    let last = rig.submit(&greedy(prompt(100, 2), 5));
    while rig.outcomes[&last].finish.is_none() {
        rig.step();
    }
    assert!(
        rig.outcomes[&first].finish.is_none(),
        "it ran beside the others"
    );
    assert_eq!(rig.preemptions, 0);
    rig.drain();
}
