//! A draft model guesses for a split model: the same answers.

use std::process::Stdio;

use serde_json::json;

use super::server::{NodeServer, chat};
use super::tiny::FAMILIES;
use super::{TestHome, alone, http, text};

/// Over slow links drafts always pay; here the model is too small for that to be sure, so that only
/// what is checked is counted.
#[test]
fn a_server_guesses_by_its_draft_and_counts_it() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let copy = world.path("models/copy.gguf");
    std::fs::copy(&model, &copy).unwrap();
    let more = json!({"max_tokens": 200, "temperature": 1.2, "seed": 4, "logprobs": true});
    let request = chat(&model, "hi", &more);
    let answered = |nodes: usize, more: &[&str]| {
        let server = NodeServer::start(&world, &model, &[&["--threads", "1"], more].concat());
        let answer = http::ask(server.port, "/v1/chat/completions", Some(&request));
        assert_eq!(answer.status, 200, "{}", answer.body);
        let metrics = http::ask(server.port, "/metrics", None).body;
        let mut lines = metrics.as_str().unwrap().lines();
        let mut count = |name: &str| -> f64 {
            let line = lines.find(|line| line.contains(name) && !line.starts_with('#'));
            let value = line.and_then(|line| line.split(' ').next_back());
            value
                .unwrap_or_else(|| panic!("no {name}"))
                .parse()
                .unwrap()
        };
        let counts = [count("guesses_checked"), count("guesses_right")];
        server.stop(nodes);
        (answer.body["choices"][0].clone(), counts)
    };
    let (plain, none) = answered(1, &[]);
    assert_eq!(none, [0.0, 0.0]);
    let split = ["--nodes", "4", "--split", "2x2", "--draft"];
    let args = [&split[..], &[copy.to_str().unwrap()]].concat();
    let (guessed, [checked, right]) = answered(4, &args);
    assert_eq!(guessed, plain);
    assert!(checked >= 1.0 && right <= checked, "{right} of {checked}");
}

/// A model's file with another spelling of its second token.
fn respelt(mut file: Vec<u8>) -> Vec<u8> {
    let (turn, other) = (b"<turn>", b"<tuRn>");
    for at in 0..file.len() - turn.len() {
        if file[at..].starts_with(turn) {
            file[at..at + turn.len()].copy_from_slice(other);
        }
    }
    file
}

#[test]
fn drafts_that_cannot_guess_are_refused() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let other = world.path("models/other.gguf");
    let bytes = std::fs::read(&model).unwrap();
    std::fs::write(&other, respelt(bytes)).unwrap();
    let other = other.to_str().unwrap();
    let refused = |args: &[&str]| {
        let mut command = world.paceline(args.iter().copied());
        let output = super::finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
        (output.status.code(), text(&output.stderr))
    };
    let (code, said) = refused(&["run", &model, "hi", "--draft", other]);
    assert_eq!(code, Some(1), "{said}");
    let which = "token 1 of the draft model is \"<tuRn>\", that of the model is \"<turn>\"";
    for part in [which, "hint: "] {
        assert!(said.contains(part), "{part:?} in {said}");
    }
    for (more, told) in [
        (["--draft", &*model, "--drafts", "0"], "--drafts 0"),
        (
            ["--engine", "cpu", "--drafts", "17"],
            "auto, or a number from 0 to 16",
        ),
    ] {
        let (code, said) = refused(&[&["up", &*model][..], &more].concat());
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(told), "{said}");
    }
}
