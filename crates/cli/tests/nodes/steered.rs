//! `--split auto` leaves a split that turns out worse than another; the answer's tokens stay the
//! same. Decisions are tested in `crates/plan/src/split_selection/tests.rs`, changes of an instance
//! in `crates/node/src/supervisor/tests/failing.rs`.
//!
//! Facts that lie make it so. measured.json says that the first split is far faster than it can be,
//! and that loading takes no time. The next splits are still too fast in it, also where the
//! machine was busy while it was measured.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::processes::children;
use super::server::{NodeServer, chat};
use super::tiny::FAMILIES;
use super::{TestHome, alone, http, until};

const PROMPT: &str = "Once upon a time, and a very good time it was.";

/// Measured over predicted, by split.
type LieTable<'a> = &'a [(&'a str, f64)];

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

impl TestHome {
    fn facts(&self) -> PathBuf {
        self.path("home").join("measured.json")
    }

    /// Has the facts say that measured over predicted is this for these splits.
    fn lie(&self, model: &str, nodes: &str, ratios: LieTable<'_>) {
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
        let facts = fs::read(self.facts()).unwrap();
        let mut facts: Value = serde_json::from_slice(&facts).unwrap();
        let key = facts["measured"].as_object().unwrap().keys().next();
        let key = key.unwrap().clone();
        for (split, ratio) in ratios {
            let key = format!("{key}, {nodes} nodes, {split}");
            facts["ratio"][&key] = json!(ratio);
            facts["load"][&key] = json!(0.0);
        }
        fs::write(self.facts(), facts.to_string()).unwrap();
    }
}

#[test]
fn a_split_that_was_asked_for_is_kept() {
    let world = TestHome::new();
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

/// A server of a tiny model over two nodes, and what one node answers. Its first split is believed
/// to be far faster than it is.
struct Lied {
    _world: TestHome,
    model: String,
    server: NodeServer,
    expected: Value,
}

impl Lied {
    fn start() -> Self {
        let world = TestHome::new();
        let model = world.write_model(FAMILIES[0]);
        let own = ["--context", "2048", "--threads", "1"];
        let one = NodeServer::start(&world, &model, &own);
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
        let server = NodeServer::of(&mut world.paceline([&up, &own[..]].concat()));
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
    for part in [
        "is predicted to get",
        "[split changed from tensor (",
        "tokens/s measured) to pipeline (",
        " expected) in ",
    ] {
        assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
    }
}
