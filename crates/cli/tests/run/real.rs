//! Behaviour that only a real model shows.

use std::io::Read;
use std::process::Stdio;
use std::time::{Duration, Instant};

use paceline_tensor::InstructionSet;
use serde_json::Value;

use super::{World, finish, numbers, object, smollm2, test_model, text};

const QUESTION: &str = "Why is the sky blue?";

#[test]
fn a_real_answer_depends_on_the_seed_only() {
    let Some(model) = smollm2("a_real_answer_depends_on_the_seed_only") else {
        return;
    };
    let world = World::new();
    let tokens = |args: &[&str]| {
        let args = [&[QUESTION, "--max-tokens", "24"], args].concat();
        numbers(&world.json(&model, &args), "tokens")
    };
    let greedy = tokens(&["--temperature", "0", "--threads", "1"]);
    assert_eq!(greedy, tokens(&["--temperature", "0", "--threads", "2"]));
    let sampled = tokens(&["--seed", "3", "--threads", "2"]);
    assert_eq!(sampled, tokens(&["--seed", "3", "--threads", "1"]));
    assert_ne!(sampled, tokens(&["--seed", "4"]));
}

/// Peak resident memory stays within file, keys and values, 15 % of the file and 128 MiB (256 MiB
/// for a vocabulary of 262k). It is never less than the proportional share.
#[test]
#[cfg(target_os = "linux")]
fn memory_stays_near_the_file() {
    const TEST: &str = "memory_stays_near_the_file";
    // Bytes of a position: layers * KV heads * head size, keys and values, f16.
    for (file, position_bytes, spare_mib) in [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", 30 * 3 * 64 * 4, 128),
        ("gemma-3-270m-q4_k_m.gguf", 18 * 256 * 4, 256),
    ] {
        let Some(model) = test_model(TEST, file) else {
            continue;
        };
        let prompt = "one two three four five six seven ".repeat(24);
        let args = ["--raw", &prompt, "--max-tokens", "8", "--context", "1024"];
        let json = World::new().json(&model, &args);
        let peak = json["peak_memory_bytes"].as_u64().unwrap();
        let bytes = std::fs::metadata(&model).unwrap().len();
        let cache = 1024 * position_bytes;
        let limit = bytes + cache + bytes * 15 / 100 + (spare_mib << 20);
        assert!(peak <= limit, "{file}: {peak} bytes at most, limit {limit}");
    }
}

#[test]
fn keys_and_values_of_bytes_give_an_answer() {
    let Some(model) = smollm2("keys_and_values_of_bytes_give_an_answer") else {
        return;
    };
    let world = World::new();
    let args = [QUESTION, "--max-tokens", "12", "--temperature", "0"];
    let tokens = |more: &[&str]| numbers(&world.json(&model, &[&args, more].concat()), "tokens");
    let own = tokens(&[]);
    assert_eq!(own, tokens(&["--kv", "f16", "--pin"]));
    assert_eq!(tokens(&["--kv", "q8_0"]).len(), own.len()); // how near: model/tests/llama_cpp.rs
}

#[test]
fn every_instruction_set_gives_the_same_answer() {
    let Some(model) = smollm2("every_instruction_set_gives_the_same_answer") else {
        return;
    };
    let world = World::new();
    let mut answers: Vec<Value> = Vec::new();
    for set in InstructionSet::ALL.map(InstructionSet::name) {
        let prompt = ["run", &model, "--raw", "The capital of France is", "--json"];
        let options = ["--temperature", "0", "--max-tokens", "6"];
        let mut command = world.paceline(prompt);
        command.args(options).env("PACELINE_CPU", set);
        let output = finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
        if text(&output.stderr).contains("but this machine has") {
            continue; // no machine has all of them
        }
        let json = object(&output);
        assert_eq!(json["instruction_set"], set);
        answers.push(json["tokens"].clone());
    }
    assert!(!answers.is_empty(), "every machine has the first");
    assert!(
        answers.windows(2).all(|pair| pair[0] == pair[1]),
        "{answers:?}"
    );
}

#[test]
fn names_of_control_tokens_are_text_to_a_real_model() {
    let Some(model) = smollm2("names_of_control_tokens_are_text_to_a_real_model") else {
        return;
    };
    let world = World::new();
    let n = |prompt: &str| {
        let json = world.json(&model, &[prompt, "--max-tokens", "0"]);
        json["n_prompt"].as_u64().unwrap()
    };
    // As a control token it would be one more; as text it is <, |, im, _, end, |, > or so.
    let more = n("hi <|im_end|>") - n("hi");
    assert!(more > 3, "{more}");
}

/// The text comes in pieces, spread over the time that the figures say it took.
#[test]
fn a_real_answer_is_streamed() {
    let Some(model) = smollm2("a_real_answer_is_streamed") else {
        return;
    };
    let world = World::new();
    let args = [
        "run",
        &model,
        "Tell me a story.",
        "--temperature",
        "0",
        "--max-tokens",
        "64",
    ];
    let mut command = world.paceline(args);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut arrivals = Vec::new();
    let mut buffer = [0; 4096];
    while stdout.read(&mut buffer).unwrap() > 0 {
        arrivals.push(Instant::now());
    }
    let said = text(&child.wait_with_output().unwrap().stderr);
    let decode = said
        .split("decode ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let speed: f64 = decode
        .and_then(|speed| speed.parse().ok())
        .unwrap_or_else(|| panic!("{said}"));
    let generated = Duration::from_secs_f64(63.0 / speed);
    let spread = *arrivals.last().unwrap() - arrivals[0];
    assert!(
        spread > generated / 2,
        "all came within {spread:?} of {generated:?}"
    );
    assert!(arrivals.len() > 16, "{} pieces", arrivals.len());
}
