//! The same answer from any split: tokens, and log-probabilities to the last digit.

use std::process::Stdio;

use paceline_base::testing::long;
use serde_json::{Value, json};

use super::server::{Server, chat};
use super::tiny::FAMILIES;
use super::{World, alone, http, smollm2};
use crate::library;

const PROMPTS: [&str; 5] = [
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain in two sentences how a bicycle stays upright.",
    "List five animals that live in the forest, with a word about each.",
    "def fibonacci(n):",
];

/// A number of nodes and what else to say about the split.
type Cut = (&'static str, &'static [&'static str]);

/// The splits of the issue, and uneven ones; all of them in a long run.
const CUTS: [Cut; 14] = [
    ("2", &["--split", "tensor"]),
    ("3", &["--split", "tensor"]),
    ("4", &["--split", "tensor"]),
    ("5", &["--split", "tensor"]),
    ("2", &["--split", "pipeline"]),
    ("3", &["--split", "pipeline"]),
    ("5", &["--split", "pipeline"]),
    ("8", &["--split", "pipeline"]),
    ("4", &["--split", "2x2"]),
    ("6", &["--split", "3x2"]),
    ("2", &["--shares", "3,1"]),
    ("4", &["--split", "2x2", "--shares", "1,2,5,1"]),
    ("3", &["--split", "pipeline", "--shares", "1,6,2"]),
    ("7", &[]),
];

/// The entries of [`CUTS`] that are always tried with a real model. They have both ways to split,
/// both at once, more ranks than cores, and shares that differ.
const ALWAYS: [usize; 5] = [1, 4, 8, 10, 12];

fn args<'a>((nodes, more): &'a Cut, own: &[&'a str]) -> Vec<&'a str> {
    [&["--nodes", nodes], *more, own].concat()
}

/// Answers to `requests`, which are under way at the same time. An answer has what was said, and of
/// each token its bytes and its log-probability beside those of the likeliest.
fn answers(port: u16, requests: &[Value]) -> Vec<Value> {
    std::thread::scope(|scope| {
        let ask = |body| scope.spawn(move || http::ask(port, "/v1/chat/completions", Some(body)));
        let asked: Vec<_> = requests.iter().map(ask).collect();
        let choice = |answer: std::thread::ScopedJoinHandle<'_, http::Answer>| {
            let answer = answer.join().unwrap();
            assert_eq!(answer.status, 200, "{}", answer.body);
            answer.body["choices"][0].clone()
        };
        asked.into_iter().map(choice).collect()
    })
}

/// The bar: five prompts, 64 tokens each, temperature 0, and two sampled beside them. All cuts in a
/// long run.
#[test]
fn smollm2_says_the_same_over_any_split() {
    let Some(model) = smollm2("smollm2_says_the_same_over_any_split") else {
        return;
    };
    let _alone = alone();
    let world = World::new();
    let more = json!({"max_tokens": 64, "logprobs": true, "top_logprobs": 5});
    let mut requests: Vec<Value> = PROMPTS.iter().map(|p| chat(&model, p, &more)).collect();
    let sampled = json!({"max_tokens": 64, "logprobs": true, "temperature": 1, "seed": 7,
                         "top_p": 0.95, "frequency_penalty": 0.2});
    requests.push(chat(&model, PROMPTS[0], &sampled));
    // Of this one ranks send their largest logits alone.
    let of_few = json!({"max_tokens": 64, "temperature": 1, "seed": 9, "top_k": 40, "top_p": 0.9});
    requests.push(chat(&model, PROMPTS[1], &of_few));
    let own = ["--context", "512", "--parallel", "7"];
    let served = |cut: &Cut| {
        let server = Server::start(&world, &model, &args(cut, &own));
        let answers = answers(server.port, &requests);
        server.stop(cut.0.parse().unwrap());
        answers
    };
    let expected = served(&("1", &[]));
    let whole = expected.iter().filter(|a| a["finish_reason"] == "length");
    assert!(whole.count() >= 4, "{expected:?}");
    for (number, cut) in CUTS.iter().enumerate() {
        if long() || ALWAYS.contains(&number) {
            assert_eq!(served(cut), expected, "{cut:?}");
        }
    }
    world.assert_clean();
}

/// `paceline run`, whose one node is no worker but the command itself. Sampling and bytes are tried
/// with one cut, and with all four in a long run.
#[test]
fn the_command_says_the_same_over_any_split() {
    let Some(model) = smollm2("the_command_says_the_same_over_any_split") else {
        return;
    };
    let _alone = alone();
    let world = World::new();
    let tokens = |cut: &Cut, own: &[&str]| {
        let own = [&[PROMPTS[1], "--max-tokens", "64"], own].concat();
        let json = world.json(&model, &args(cut, &own));
        assert_eq!(json["nodes"].to_string(), cut.0);
        let kv = if own.contains(&"q8_0") { "q8_0" } else { "f16" };
        assert_eq!(json["kv_type"], kv);
        json["tokens"].clone()
    };
    let bytes = ["--temperature", "0", "--kv", "q8_0", "--pin"];
    for own in [&["--temperature", "0"][..], &["--seed", "11"], &bytes] {
        let expected = tokens(&("1", &[]), own);
        assert!(expected.as_array().unwrap().len() > 16, "{expected}");
        let cuts = [CUTS[10], CUTS[1], CUTS[4], CUTS[9]];
        let all = long() || own == ["--temperature", "0"];
        for cut in &cuts[..if all { 4 } else { 1 }] {
            assert_eq!(tokens(cut, own), expected, "{cut:?} {own:?}");
        }
    }
}

/// More cuts of every family, up to a rank without heads or with one layer.
#[test]
fn every_family_says_the_same_over_any_split() {
    let _alone = alone();
    let cuts: [Cut; 9] = [
        ("1", &[]),
        ("2", &["--split", "tensor"]),
        ("3", &["--split", "tensor"]),
        ("4", &["--split", "tensor"]),
        ("4", &["--split", "pipeline"]),
        ("4", &["--split", "2x2"]),
        ("6", &["--split", "3x2", "--shares", "1,2,1,1,3,1"]),
        ("2", &["--split", "tensor", "--shares", "5,1"]),
        ("3", &["--class", "cpu-q8"]),
    ];
    let world = World::new();
    for tiny in FAMILIES {
        let model = world.write_model(tiny);
        let more = json!({"max_tokens": 48, "logprobs": true, "top_logprobs": 3});
        let long = "Once upon a time, and a very good time it was. ".repeat(4);
        let sampled = json!({"max_tokens": 48, "logprobs": true, "temperature": 1.3, "seed": 5});
        let requests = [
            chat(&model, &long, &more),
            chat(&model, "hi", &more),
            chat(&model, "hi", &sampled),
        ];
        // Guessed tokens change nothing, however the model is cut.
        let served = |cut: &Cut, drafts: &'static str| {
            let own = ["--context", "512", "--threads", "1", "--drafts", drafts];
            let server = Server::start(&world, &model, &args(cut, &own));
            let answers = answers(server.port, &requests);
            server.stop(cut.0.parse().unwrap());
            answers
        };
        let expected = served(&("1", &[]), "0");
        let quick = served(&("1", &["--class", "cpu-q8"]), "0");
        assert_ne!(expected, quick, "{tiny:?}: the classes differ");
        for cut in &cuts {
            let expected = if cut.1.contains(&"cpu-q8") {
                &quick
            } else {
                &expected
            };
            assert_eq!(&served(cut, "8"), expected, "{tiny:?} {cut:?}");
        }
    }
}

/// A model over RDMA: the library is opened by its name, the devices come from JACCL's device file.
#[test]
fn nodes_over_rdma_say_the_same() {
    let _alone = alone();
    let world = World::new();
    let folder = world.path("home");
    if library::build(&folder).is_none() {
        eprintln!("SKIPPED nodes_over_rdma_say_the_same: no rustc");
        return;
    }
    let model = world.write_model(FAMILIES[0]);
    let devices = world.path("devices.json");
    std::fs::write(&devices, r#"[[null, "soft0"], ["soft1", null]]"#).unwrap();
    let run = |more: &[&str]| {
        let own = [
            "run",
            &model,
            "Once upon a time",
            "--max-tokens",
            "12",
            "--temperature",
            "0",
        ];
        let mut command = world.paceline(
            own.into_iter()
                .chain(["--json"])
                .chain(more.iter().copied()),
        );
        command
            .env("LD_LIBRARY_PATH", &folder)
            .env("IBV_SOFT_FOLDER", &folder);
        command.env("MLX_IBV_DEVICES", &devices);
        super::finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let tokens = |more: &[&str]| {
        let output = run(more);
        assert!(output.status.success(), "{output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["tokens"].clone()
    };
    let expected = tokens(&[]);
    assert!(expected.as_array().is_some_and(|tokens| !tokens.is_empty()));
    for split in ["tensor", "pipeline"] {
        let over = ["--nodes", "2", "--split", split, "--transport", "rdma"];
        let refused = run(&over);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        let over = [&over[..], &["--plaintext"]].concat();
        assert_eq!(tokens(&over), expected, "{split}");
    }
}
