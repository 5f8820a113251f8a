//! `--split auto` leaves a split that turns out worse than another, and nobody notices by the
//! answer.
//!
//! Facts that lie make it so. measured.json says that the first split is far faster than it can be,
//! and that loading takes no time. The next splits are still too fast in it, whatever else the
//! machine did while it was measured.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::processes::children;
use super::server::{Server, chat};
use super::tiny::FAMILIES;
use super::{World, alone, http, text, until};

const PROMPT: &str = "Once upon a time, and a very good time it was.";

/// Measured over predicted, by split.
type Lies<'a> = &'a [(&'a str, f64)];

/// Sampled, so that random numbers move along with what is computed. Long, so that it is still
/// being made when the thread that changes splits gets its turn. 200 tokens take a hundredth of a
/// second.
const ANSWER: [&str; 8] = [
    "--max-tokens",
    "1500",
    "--temperature",
    "1.1",
    "--seed",
    "11",
    "--context",
    "2048",
];

impl World {
    fn facts(&self) -> PathBuf {
        self.path("home").join("measured.json")
    }

    fn read_facts(&self) -> Value {
        serde_json::from_slice(&fs::read(self.facts()).unwrap()).unwrap()
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
        fs::write(self.facts(), facts.to_string()).unwrap();
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
        (0, "2", &[("tensor", 1e8), ("pipeline", 1e5)]),
        (2, "2", &[("pipeline", 1e8), ("tensor", 1e5)]),
        (3, "4", &[("tensor", 1e10), ("pipeline", 1e7), ("2x2", 1e5)]),
    ];
    for (family, nodes, lies) in cases {
        let world = World::new();
        let model = world.write_model(FAMILIES[family]);
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
    let model = world.write_model(FAMILIES[0]);
    world.lie(&model, "2", &[("tensor", 1e8), ("pipeline", 1e5)]);
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
    let model = world.write_model(FAMILIES[0]);
    world.lie(&model, "2", &[("tensor", 1e8), ("pipeline", 1e5)]);
    let args = [PROMPT, "--nodes", "2", "--threads", "1"];
    let output = world.run(&model, &[&args, &ANSWER[..]].concat());
    let said = text(&output.stderr);
    let line = said.lines().find(|line| line.starts_with("[split changed"));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    assert!(line.starts_with("[split changed from tensor ("), "{line}");
    assert!(line.contains("tokens/s measured) to pipeline ("), "{line}");
    assert!(line.contains(" expected) in "), "{line}");
}

/// A server of a tiny model over two nodes, and what one node answers. Its first split is believed
/// to be far faster than it is.
struct Lied {
    _world: World,
    model: String,
    server: Server,
    expected: Value,
}

impl Lied {
    fn start() -> Self {
        let world = World::new();
        let model = world.write_model(FAMILIES[0]);
        let own = ["--context", "2048", "--threads", "1"];
        let one = Server::start(&world, &model, &own);
        let expected = question(one.port, &model);
        one.stop(1);
        world.lie(&model, "2", &[("tensor", 1e8), ("pipeline", 1e5)]);
        let up = [
            "up",
            "--no-beacons",
            "--model",
            &model,
            "--port",
            "0",
            "--nodes",
            "2",
        ];
        let server = Server::of(&mut world.paceline([&up, &own[..]].concat()));
        Self {
            _world: world,
            model,
            server,
            expected,
        }
    }

    /// The answer's choices, with log probabilities.
    fn ask(&self) -> Value {
        question(self.server.port, &self.model)
    }

    fn said(&self, what: &str) {
        until(what, || self.server.running.said().contains(what));
    }

    /// A line of `/metrics`.
    fn metric(&self, name: &str) -> f64 {
        let metrics = http::ask(self.server.port, "/metrics", None).body;
        let metrics = metrics.as_str().unwrap();
        let line = metrics
            .lines()
            .find(|line| line.contains(name) && !line.starts_with('#'));
        let line = line.unwrap_or_else(|| panic!("no {name} in {metrics}"));
        line.split(' ').next_back().unwrap().parse().unwrap()
    }
}

fn question(port: u16, model: &str) -> Value {
    let more = json!({"max_tokens": 1500, "logprobs": true, "top_logprobs": 2});
    let body = chat(model, PROMPT, &more);
    http::ask(port, "/v1/chat/completions", Some(&body)).body["choices"].clone()
}

/// A server changes between and inside requests; those that come meanwhile wait.
#[test]
fn a_server_changes_while_it_answers() {
    let _alone = alone();
    let lied = Lied::start();
    let first = lied.server.running.workers(2);
    std::thread::scope(|scope| {
        let alone = scope.spawn(|| lied.ask());
        lied.said("[split changed from");
        assert_eq!(lied.ask(), lied.expected);
        assert_eq!(alone.join().unwrap(), lied.expected);
    });
    let now = children(lied.server.running.id());
    assert_eq!(now, first, "the workers are the same");
    assert!(lied.metric("split_changes") >= 1.0);
    assert!(lied.metric("decode_tok_s_predicted") > 0.0);
    let ended = lied.server.stop(2);
    assert!(
        ended.stderr.contains("is predicted to get"),
        "{}",
        ended.stderr
    );
}

/// Neither can be started: the answer is lost, which is said, and the server recovers.
#[test]
fn where_no_split_can_start_the_answer_is_lost_and_the_next_is_not() {
    let _alone = alone();
    let lied = Lied::start();
    let (model, kept) = (
        Path::new(&lied.model),
        Path::new(&lied.model).with_extension("kept"),
    );
    fs::rename(model, &kept).unwrap();
    assert_eq!(lied.ask(), Value::Null, "an answer without workers");
    lied.said("[split stays tensor: pipeline could not be started: ");
    fs::rename(&kept, model).unwrap();
    lied.said("the workers are ready again");
    assert_eq!(lied.ask(), lied.expected);
    lied.server.stop(2);
}
