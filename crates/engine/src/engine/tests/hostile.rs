//! Forged snapshots give a typed error, or a sequence that ends; never a panic.

use paceline_tensor::PAGE;
use serde_json::{Value, json};

use super::requests::{SAMPLED, prompt, request, stops};
use super::rig::Rig;
use super::tiny::TinyModel;
use crate::{EngineConfig, GenerationRequest, SamplingParams, Snapshot};

const CONTEXT: usize = 2 * PAGE;

fn rig(tiny: &TinyModel) -> Rig {
    Rig::new(tiny, EngineConfig::single("tiny", CONTEXT))
}

/// A snapshot in the middle of an answer of 20 tokens, as JSON.
fn snapshot(tiny: &TinyModel) -> Value {
    let mut rig = rig(tiny);
    let stop = stops();
    let sampling = SamplingParams {
        logit_bias: vec![(3, 0.5), (4, -0.5)],
        ..SAMPLED
    };
    let id = rig.submit(&GenerationRequest {
        stop,
        logprobs: Some(3),
        ..request(prompt(10, 3), 20, sampling)
    });
    rig.steps(5);
    serde_json::to_value(rig.engine.take_snapshot(id).unwrap()).unwrap()
}

/// Parses and restores a snapshot; returns the error.
fn restore(rig: &mut Rig, value: Value) -> Result<(), String> {
    let snapshot: Snapshot = serde_json::from_value(value).map_err(|e| e.to_string())?;
    let restored = rig.engine.restore(snapshot);
    restored.map(drop).map_err(|e| e.to_string())
}

/// A field of a snapshot, a wrong value, and what is said of it. `*N` repeats a list or a text.
const WRONG: &str = "\
/model | \"other (cpu)\" | snapshot of other (cpu), this engine runs tiny (cpu)
/prompt_len | 0 | snapshot of 15 tokens, 0 of them the prompt, with 15 to generate
/prompt_len | 16 | snapshot of 15 tokens, 16 of them the prompt, with 15
/prompt_len | 18446744073709551615 | snapshot of 15 tokens, 18446744073709551615 of them
/prompt_len | -1 | invalid value
/tokens | [] | snapshot of 0 tokens
/tokens | [1]*128 | snapshot may grow to 143 tokens, but the context holds 128
/tokens/14 | 34 | token 34 at position 14 is outside the vocabulary of 34
/tokens/0 | 4294967295 | token 4294967295 at position 0
/tokens_left | 0 | snapshot of 15 tokens, 10 of them the prompt, with 0 to generate
/tokens_left | 114 | snapshot may grow to 129 tokens
/tokens_left | 18446744073709551615 | snapshot may grow to 18446744073709551615 tokens
/sampler/params/temperature | -1.0 | temperature is -1, expected
/sampler/params/min_p | 3 | min_p is 3, expected 0 to 1
/sampler/draws | null | invalid type
/logprobs | 21 | logprobs is 21, expected at most 20
/logprobs | -1 | invalid value
/sampler/params/logit_bias | [[34, 1.0]] | logit_bias has token 34, which is outside the vocabulary
/sampler/params/logit_bias | [[1, 1.0]]*1025 | logit_bias has 1025 tokens, expected at most 1024
/sampler/params/logit_bias/0/1 | 1e300 | logit_bias of token 3 is inf, expected -100 to 100
/sampler/params/logit_bias/1/0 | 3 | logit_bias has token 3 twice
/decoder/pending | [97]*1048576 | snapshot holds back text
/decoder/pending | [228]*1048576 | snapshot holds back text
/decoder/pending | [228, 184, 173] | snapshot holds back text
/decoder/pending | [128] | snapshot holds back text
/stops/held | \"x\"*1048576 | state of a stop matcher
/stops/stops/1 | \"\" | stop string 1 is empty
/stops/stopped | 1 | snapshot holds back text
/stops/stopped | 99 | snapshot holds back text";

/// The value of a row of [`WRONG`].
fn value_of(text: &str) -> Value {
    let (value, times) = text.split_once('*').unwrap_or((text, "1"));
    let times: usize = times.parse().unwrap();
    match serde_json::from_str(value).unwrap() {
        Value::Array(items) => vec![items; times].concat().into(),
        Value::String(text) => text.repeat(times).into(),
        value => value,
    }
}

#[test]
fn what_is_wrong_with_a_snapshot_is_said() {
    let tiny = TinyModel::new(1);
    let good = snapshot(&tiny);
    let mut rig = rig(&tiny);
    for row in WRONG.lines() {
        let columns: Vec<&str> = row.split(" | ").collect();
        let [field, wrong, expected] = columns[..] else {
            panic!("{row}");
        };
        let mut value = good.clone();
        *value.pointer_mut(field).unwrap() = value_of(wrong);
        let error = restore(&mut rig, value).unwrap_err();
        assert!(error.contains(expected), "{field}: {error}");
        assert!(rig.engine.is_idle(), "{field}: nothing is kept");
    }
    // A prompt that fills the context is refused as in a request.
    let mut full = good.clone();
    full["tokens"] = json!(vec![1; CONTEXT]);
    (full["prompt_len"], full["tokens_left"]) = (json!(CONTEXT), json!(0));
    let error = restore(&mut rig, full).unwrap_err();
    let expected = "snapshot may grow to 129 tokens, but the context holds 128";
    assert_eq!(error, expected);
    assert_eq!(restore(&mut rig, good), Ok(()), "all other values");
}

/// Paths of all values in `value`.
fn paths(value: &Value, path: &str, out: &mut Vec<String>) {
    out.push(path.to_owned());
    let mut inner = |key: &dyn std::fmt::Display, v| paths(v, &format!("{path}/{key}"), out);
    match value {
        Value::Object(map) => map.iter().for_each(|(key, v)| inner(key, v)),
        Value::Array(list) => (0..).zip(list).for_each(|(i, v): (usize, _)| inner(&i, v)),
        _ => {}
    }
}

#[test]
fn any_value_anywhere_is_refused_or_ends() {
    let tiny = TinyModel::new(1);
    let good = snapshot(&tiny);
    let wrong = json!([
        null,
        true,
        0,
        1,
        -1,
        31,
        u64::MAX,
        1e300,
        "",
        "ab",
        [],
        [255, 255],
        {}
    ]);
    let mut all = Vec::new();
    paths(&good, "", &mut all);
    let (mut refused, mut ended) = (0, 0);
    for path in &all {
        for wrong in wrong.as_array().unwrap() {
            let mut value = good.clone();
            *value.pointer_mut(path).unwrap() = wrong.clone();
            let mut rig = rig(&tiny);
            match restore(&mut rig, value) {
                Err(error) => refused += usize::from(!error.is_empty()),
                Ok(()) => {
                    // Its first token may come with a prompt event: not checked.
                    (0..3 * CONTEXT).for_each(|_| drop(rig.engine.step().unwrap()));
                    assert!(rig.engine.is_idle(), "{path}: {wrong}");
                    ended += 1;
                }
            }
        }
    }
    let counts = (refused, ended);
    assert!(refused > 100 && ended > 50, "{counts:?}");
}
