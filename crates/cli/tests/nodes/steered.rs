//! `--split auto` leaves a split that turns out worse than another, and nobody notices by the
//! answer.
//!
//! Facts that lie make it so: measured.json says that the first split is far faster than it can be
//! and the next ones still too fast, and that loading takes no time.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::processes::{assert_gone, children};
use crate::server::{Server, chat};
use crate::tiny::FAMILIES;
use crate::{World, alone, http, text, until};

const PROMPT: &str = "Once upon a time, and a very good time it was.";

/// Measured over predicted, by split.
type Lies<'a> = &'a [(&'a str, f64)];

/// Sampled, so that random numbers move along with what is computed.
const ANSWER: [&str; 8] = [
    "--max-tokens",
    "200",
    "--temperature",
    "1.1",
    "--seed",
    "11",
    "--context",
    "512",
];

impl World {
    fn facts(&self) -> PathBuf {
        self.path("home").join("measured.json")
    }

    fn read_facts(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.facts()).unwrap()).unwrap()
    }

    /// Has the facts say that measured over predicted is this for these splits; the keys of the
    /// splits in the file.
    fn lie(&self, model: &str, nodes: &str, ratios: Lies<'_>) -> Vec<String> {
        self.json(
            model,
            &[
                "hi",
                "--max-tokens",
                "1",
                "--nodes",
                nodes,
                "--threads",
                "1",
            ],
        );
        let mut facts = self.read_facts();
        let key = facts["measured"].as_object().unwrap().keys().next();
        let key = key.unwrap().clone();
        let keys = ratios.iter().map(|(split, ratio)| {
            let key = format!("{key}, {nodes} nodes, {split}");
            facts["ratio"][&key] = json!(ratio);
            facts["load"][&key] = json!(0.0);
            key
        });
        let keys = keys.collect();
        std::fs::write(self.facts(), facts.to_string()).unwrap();
        keys
    }
}

/// The first changes, as (from, to).
fn course(changes: &Value) -> Vec<(String, String)> {
    let word = |change: &Value, end: &str| change[end].as_str().unwrap().to_owned();
    let changes = changes.as_array().unwrap().iter();
    changes
        .map(|change| (word(change, "from"), word(change, "to")))
        .collect()
}

#[test]
fn an_answer_goes_on_by_another_split_with_the_same_tokens() {
    let _alone = alone();
    let cases: [(usize, &str, Lies<'_>); 3] = [
        (0, "2", &[("tensor", 1e5), ("pipeline", 1e2)]),
        (2, "2", &[("pipeline", 1e5), ("tensor", 1e2)]),
        (3, "4", &[("tensor", 1e7), ("pipeline", 1e4), ("2x2", 1e2)]),
    ];
    for (family, nodes, lies) in cases {
        let world = World::new();
        let model = world.model(FAMILIES[family]);
        let mut args = vec![PROMPT, "--threads", "1"];
        args.extend(ANSWER);
        let expected = world.json(&model, &args);
        assert_eq!(expected["split_changes"], json!([]));
        let keys = world.lie(&model, nodes, lies);
        args.extend(["--nodes", nodes]);
        let steered = world.json(&model, &args);
        assert_eq!(steered["tokens"], expected["tokens"], "{nodes} {lies:?}");
        assert_eq!(steered["text"], expected["text"]);
        let course = course(&steered["split_changes"]);
        for (change, pair) in course.iter().zip(lies.windows(2)) {
            assert_eq!(
                (&*change.0, &*change.1),
                (pair[0].0, pair[1].0),
                "{course:?}"
            );
        }
        assert!(course.len() + 1 >= lies.len(), "{course:?}");
        // The lie is known as one: the next run begins elsewhere, or with less hope.
        let learned = world.read_facts()["ratio"][&keys[0]].as_f64().unwrap();
        assert!(learned < lies[0].1 / 10.0, "{learned}");
        world.assert_clean();
    }
}

#[test]
fn a_split_that_was_asked_for_is_kept() {
    let world = World::new();
    let model = world.model(FAMILIES[0]);
    world.lie(&model, "2", &[("tensor", 1e5), ("pipeline", 1e2)]);
    let args = [
        PROMPT,
        "--nodes",
        "2",
        "--split",
        "tensor",
        "--threads",
        "1",
    ];
    let json = world.json(&model, &[&args, &ANSWER[..]].concat());
    assert_eq!(json["split"], "tensor");
    assert_eq!(json["split_changes"], json!([]));
}

#[test]
fn people_read_of_a_change_after_the_answer() {
    let _alone = alone();
    let world = World::new();
    let model = world.model(FAMILIES[0]);
    world.lie(&model, "2", &[("tensor", 1e5), ("pipeline", 1e2)]);
    let args = [PROMPT, "--nodes", "2", "--threads", "1"];
    let output = world.run(&model, &[&args, &ANSWER[..]].concat());
    let said = text(&output.stderr);
    let line = said.lines().find(|line| line.starts_with("[split changed"));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    assert!(line.starts_with("[split changed from tensor ("), "{line}");
    assert!(line.contains("tokens/s measured) to pipeline ("), "{line}");
    assert!(line.contains(" expected) in "), "{line}");
}

/// A server changes between and inside requests; those that come meanwhile wait.
#[test]
fn a_server_changes_while_it_answers() {
    let _alone = alone();
    let world = World::new();
    let model = world.model(FAMILIES[0]);
    let more = json!({"max_tokens": 150, "logprobs": true, "top_logprobs": 2});
    let body = chat(&model, PROMPT, &more);
    let ask = |port| http::ask(port, "/v1/chat/completions", Some(&body)).body["choices"].clone();
    let own = ["--context", "512", "--threads", "1"];
    let one = Server::start(&world, &model, &own);
    let expected = ask(one.port);
    one.stop(1);
    world.lie(&model, "2", &[("tensor", 1e5), ("pipeline", 1e2)]);
    let server = Server::start(&world, &model, &[&own[..], &["--nodes", "2"]].concat());
    let first = server.running.workers(2);
    let port = server.port;
    std::thread::scope(|scope| {
        let alone = scope.spawn(move || ask(port));
        until("the split changes", || {
            server.running.said().contains("[split changed from")
        });
        assert_eq!(ask(port), expected);
        assert_eq!(alone.join().unwrap(), expected);
    });
    assert_gone(&first);
    // It may be changing back.
    until("there are two workers", || {
        children(server.running.id()).len() == 2
    });
    let metrics = http::ask(port, "/metrics", None).body;
    let metrics = metrics.as_str().unwrap();
    let metric = |name: &str| -> f64 {
        let line = metrics
            .lines()
            .find(|line| line.contains(name) && !line.starts_with('#'));
        let line = line.unwrap_or_else(|| panic!("no {name} in {metrics}"));
        line.split(' ').next_back().unwrap().parse().unwrap()
    };
    assert!(metric("split_changes") >= 1.0);
    assert!(metric("decode_tok_s_predicted") > 0.0);
    let ended = server.stop(2);
    assert!(
        ended.stderr.contains("is predicted to get"),
        "{}",
        ended.stderr
    );
}
