//! Constrained answers of a model that ignores the grammar.

use paceline_base::testing::long;
use paceline_text::grammar::{Constraint, Grammar, Start};

use super::requests::{SAMPLED, request};
use super::rig::{Rig, SequenceOutcome, alone};
use super::tiny::TinyModel;
use crate::{EngineConfig, Error, Finish, GenerationRequest, SamplingParams};

const CONTEXT: usize = 128;

fn constrained(constraint: Constraint, seed: u64) -> GenerationRequest {
    let sampling = SamplingParams {
        seed,
        temperature: 2.0,
        ..SAMPLED
    };
    GenerationRequest {
        constraint: Some(constraint),
        ..request(vec![1, 2, 3], 60, sampling)
    }
}

fn regex(pattern: &str) -> Grammar {
    Grammar::Regex(pattern.to_owned())
}

#[test]
fn answers_match_and_end() {
    let tiny = TinyModel::new(1);
    let mut texts = std::collections::BTreeSet::new();
    for seed in 0..20 {
        let wanted = constrained(Constraint::whole(regex("(ab|cd ){2,5}k?l")), seed);
        let answer = alone(&tiny, &wanted, CONTEXT);
        assert_eq!(answer.finish, Some(Finish::EndOfText), "{answer:?}");
        let body = answer.text.strip_suffix('l').unwrap();
        let pairs = body.strip_suffix('k').unwrap_or(body).replace("cd ", "ab");
        assert!((4..=10).contains(&pairs.len()), "{answer:?}");
        assert_eq!(pairs.replace("ab", ""), "", "{answer:?}");
        texts.insert(answer.text);
    }
    assert!(texts.len() > 5, "{texts:?}");
}

/// The outcome of a single request, and its steps. Additional rows cost nothing, so that drafts
/// pay.
fn run(
    tiny: &TinyModel,
    wanted: &GenerationRequest,
    sizes: EngineConfig,
) -> (SequenceOutcome, usize) {
    let mut rig = Rig::new(tiny, sizes);
    let ms = std::time::Duration::from_millis(1);
    (1..=64).for_each(|rows| rig.engine.costs.record(rows, ms));
    let id = rig.submit(wanted);
    rig.drain();
    (rig.outcomes.remove(&id).unwrap(), rig.n_steps)
}

/// Log-probabilities need logits for every token, so no token is forced.
#[test]
fn forced_tokens_take_no_steps_and_change_no_answer() {
    let tiny = TinyModel::new(1);
    let sizes = EngineConfig::single("tiny", CONTEXT);
    let mut saved = 0;
    for seed in 0..20 {
        let quick = constrained(Constraint::whole(regex("(fghijklm|hm){4,6}")), seed);
        let slow = GenerationRequest {
            logprobs: Some(0),
            ..quick.clone()
        };
        let (got, steps) = run(&tiny, &quick, sizes.clone());
        let (expected, all_steps) = run(&tiny, &slow, sizes.clone());
        assert_eq!(got.tokens, expected.tokens);
        assert_eq!((got.text, got.finish), (expected.text, expected.finish));
        assert!(steps < all_steps, "{steps} of {all_steps} steps");
        saved += all_steps - steps;
    }
    assert!(saved > 100, "{saved}");
}

/// The length limit may fall into forced tokens.
#[test]
fn forced_tokens_keep_to_the_bounds_of_the_answer() {
    let tiny = TinyModel::new(1);
    let sizes = EngineConfig::single("tiny", CONTEXT);
    for most in 1..12 {
        let wanted = GenerationRequest {
            max_tokens: most,
            ..constrained(Constraint::whole(regex("fghijklmfgh")), 0)
        };
        let (got, _) = run(&tiny, &wanted, sizes.clone());
        assert_eq!(got.tokens.len(), most);
        assert_eq!(got.text, "fghijklmfgh"[..most]);
        assert_eq!(got.finish, Some(Finish::Length));
    }
    let wanted = GenerationRequest {
        stop: vec!["jk".to_owned()],
        ..constrained(Constraint::whole(regex("fghijklmfgh")), 0)
    };
    let (got, steps) = run(&tiny, &wanted, sizes);
    assert_eq!(got.text, "fghi");
    assert_eq!(got.finish, Some(Finish::Stop(0)));
    assert_eq!(steps, 1);
}

#[test]
fn lazy_grammars_let_go_again() {
    let tiny = TinyModel::new(1);
    let lazily = |marker: &str| Constraint {
        grammar: regex("d{2}"),
        start: Start::Lazily {
            markers: vec![marker.to_owned()],
            except: None,
        },
    };
    let mut calls = 0;
    for seed in 0..20 {
        let answer = alone(&tiny, &constrained(lazily("m"), seed), CONTEXT);
        let mut rest = answer.text.as_str();
        while let Some((_, behind)) = rest.split_once('m') {
            let is_cut = behind.len() < 2 && answer.finish == Some(Finish::Length);
            assert!(behind.starts_with("dd") || is_cut, "{answer:?}");
            calls += 1;
            rest = behind.get(2..).unwrap_or_default();
        }
    }
    assert!(calls > 3, "{calls}");
}

#[test]
fn a_snapshot_stands_where_its_tokens_lead() {
    let tiny = TinyModel::new(2);
    let sizes = EngineConfig::single("tiny", CONTEXT);
    // 24 steps give 3 tokens and two groups each at most, so that none ends it.
    let constraint = Constraint::whole(regex("(ab|cd |e[a-m]*f){60,70}k"));
    for seed in 0..5 {
        let wanted = GenerationRequest {
            max_tokens: 110,
            ..constrained(constraint.clone(), seed)
        };
        let expected = alone(&tiny, &wanted, CONTEXT);
        let mut rigs = [(); 2].map(|()| Rig::new(&tiny, sizes.clone()));
        let mut id = rigs[0].submit(&wanted);
        for turn in 0..8 {
            rigs[turn % 2].steps(3);
            let (snapshot, past) = rigs[turn % 2].take(id);
            id = rigs[(turn + 1) % 2].restore(&snapshot, past);
        }
        rigs[0].drain();
        assert_eq!(rigs[0].outcomes[&id], expected);
    }
}

#[test]
fn strangers_are_not_constrained() {
    let tiny = TinyModel::new(1);
    let sizes = EngineConfig {
        max_running: 3,
        max_waiting: 3,
        ..EngineConfig::single("tiny", CONTEXT)
    };
    let free = request(vec![3, 1, 2], 40, SAMPLED);
    let held = constrained(Constraint::whole(regex("[a-e]{30}")), 1);
    let mut rig = Rig::new(&tiny, sizes);
    let ids = [&free, &held, &free].map(|wanted| rig.submit(wanted));
    rig.drain();
    rig.check_alone(&tiny, &ids, [&free, &held, &free]);
    assert_eq!(rig.outcomes[&ids[1]].text.len(), 30);
}

#[test]
fn control_tokens_are_text_where_asked_for() {
    let tiny = TinyModel::new(1);
    let wanted = GenerationRequest {
        shown: vec![5, 3],
        ..request(vec![1], 3, SAMPLED)
    };
    let mut rig = Rig::new(&tiny, EngineConfig::single("tiny", CONTEXT));
    assert!(matches!(rig.try_submit(&wanted), Err(Error::Shown { .. })));
    let bad = constrained(Constraint::whole(regex("(")), 1);
    assert!(matches!(rig.try_submit(&bad), Err(Error::Constraint(_))));
}

/// Twenty fields of common kinds.
fn schema() -> String {
    let kind = |i: usize| match i % 5 {
        0 => serde_json::json!({"type": "string", "maxLength": 24}),
        1 => serde_json::json!({"type": "integer", "minimum": 0, "maximum": 999}),
        2 => serde_json::json!({"enum": ["red", "green", "blue"]}),
        3 => serde_json::json!({"type": "boolean"}),
        _ => serde_json::json!({"type": "array", "items": {"type": "number"}, "maxItems": 3}),
    };
    let names: Vec<String> = (0..20).map(|i| format!("field_{i}")).collect();
    let fields = names
        .iter()
        .enumerate()
        .map(|(i, name)| (name.clone(), kind(i)));
    let fields: serde_json::Map<String, serde_json::Value> = fields.collect();
    serde_json::json!({
        "type": "object", "properties": fields, "required": names, "additionalProperties": false,
    })
    .to_string()
}

/// A long test. By default [`forced_tokens_take_no_steps_and_change_no_answer`] counts the steps,
/// and the golden tables of `cli` have SmolLM2 fill in a schema.
#[test]
fn a_real_model_fills_in_a_schema() {
    let test = "a_real_model_fills_in_a_schema";
    if !long() {
        return eprintln!("SKIPPED {test} (its time): PACELINE_TEST_LONG is not set");
    }
    let Some(path) = super::smollm2::path(test) else {
        return;
    };
    let model = super::smollm2::load(&path, 1);
    let prompt = model.encode("Here is the record of a lamp as JSON:\n");
    let free = request(prompt, 400, SamplingParams::default());
    let held = GenerationRequest {
        constraint: Some(Constraint::whole(Grammar::JsonSchema(schema()))),
        ..free.clone()
    };
    let answer = alone(&model, &held, 1024);
    assert_eq!(answer.finish, Some(Finish::EndOfText), "{answer:?}");
    let filled: serde_json::Value = serde_json::from_str(&answer.text).unwrap();
    assert_eq!(filled.as_object().unwrap().len(), 20, "{}", answer.text);
    // Fewer steps than tokens, and even fewer if field names are drafted.
    let sizes = EngineConfig::single("tiny", 1024);
    let (plain, steps) = run(&model, &held, sizes.clone());
    let (guessed, guessed_steps) = run(&model, &held, EngineConfig { drafts: 8, ..sizes });
    assert_eq!([&plain, &guessed], [&answer, &answer]);
    let tokens = answer.tokens.len();
    eprintln!("{tokens} tokens in {steps} steps, with guesses in {guessed_steps}");
    assert!(steps < tokens && guessed_steps < steps);
    // The grammar's first masks fill its caches; the second answer is the usual case.
    let ms = |wanted: &GenerationRequest| {
        let mut rig = Rig::new(&model, EngineConfig::single("tiny", 1024));
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            rig.submit(wanted);
            rig.steps(1);
            let begun: usize = rig.outcomes.values().map(|o| o.tokens.len()).sum();
            let start = std::time::Instant::now();
            while !rig.engine.is_idle() {
                rig.step();
            }
            let took_ms = start.elapsed().as_secs_f64() * 1e3;
            let all: usize = rig.outcomes.values().map(|o| o.tokens.len()).sum();
            best = best.min(took_ms / (all - begun) as f64);
        }
        best
    };
    let same = GenerationRequest {
        max_tokens: tokens,
        ..free
    };
    let (free_ms, held_ms) = (ms(&same), ms(&held));
    eprintln!("{tokens} tokens: {free_ms:.3} ms a token free, {held_ms:.3} ms constrained");
    assert!(
        held_ms <= 1.05 * free_ms,
        "{held_ms:.3} ms, {free_ms:.3} ms without"
    );
}
